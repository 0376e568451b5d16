"""Cost models, also of joined drafters and of SPACE, the table they compile to, and the files they are read from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from specsim.cost.files import read_cost
from specsim.cost.joined import JoinedCost, joined_document, joined_table
from specsim.cost.model import ConstantCost, disturbances
from specsim.cost.profile import LEAST_CONTEXT, ProfileCost, TreeProfile, profile_from_json
from specsim.cost.table import compile_table
from specsim.io.errors import InputError
from specsim.learn.evaluate import evaluate_many
from specsim.learn.storage import cost_digest
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.registry import POLICIES, make_policy
from specsim.replaying.checks import unsupported_reason
from specsim.replaying.oracles import chain_oracle_seconds
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from tests.support.checks import refusal
from tests.support.commands import call, json_of
from tests.support.joined_traces import joined_trace
from tests.support.reference import RampCost, small_trace

CONTEXTS = np.array([16, 64, 256])


def profile(verify_s: Any = None, **changes: Any) -> ProfileCost:
    values: dict[str, Any] = {
        "contexts": CONTEXTS,
        "draft_step_s": np.array([[1.5, 2.5, 4.5], [1.0, 2.0, 4.0]]),
        "catch_up_s": np.array([0.5, 0.25, 0.75]),
        "verify_s": np.array([[10.0, 20.0, 40.0], [12.0, 19.0, 44.0]] if verify_s is None else verify_s),
        "autoregressive_s": np.array([9.0, 18.0, 36.0]),
        "policy_step_s": 0.25,
        "round_overhead_s": 0.5,
    }
    return ProfileCost(**{**values, **changes})


def document(**median: Any) -> dict[str, Any]:
    """A profile file's content."""
    whole = profile()
    return {
        "kind": "specsim-profile",
        "version": 2,
        "contexts": CONTEXTS.tolist(),
        "median_s": {
            "draft_step": whole.draft_step_s.tolist(),
            "catch_up": whole.catch_up_s.tolist(),
            "verify": whole.verify_s.tolist(),
            "autoregressive": whole.autoregressive_s.tolist(),
            "policy_step": 0.25,
            "round_overhead": 0.5,
            **median,
        },
    }


@given(low=st.integers(0, 300), span=st.integers(0, 300), bits=st.integers(0, 6), deepest=st.integers(1, 9))
def test_a_table_holds_the_model_at_the_middle_of_each_bucket(low: int, span: int, bits: int, deepest: int) -> None:
    """Hence a linear model is met to half a bucket's slope at every context covered."""
    model = RampCost(slope=1e-3)
    table = compile_table(model, max_draft_tokens=deepest, contexts=(low, low + span), bucket_bits=bits)
    context = np.arange(low, low + span + 1)
    column = context >> bits
    half = 2**bits / 2 * 1e-3 * (1 + 1e-9)
    assert table.verify_s.shape == (deepest + 2, column[-1] + 1)
    for n in range(1, deepest + 1):
        assert np.abs(table.draft_s[n, column] - model.draft(n, context)).max() <= n * half
    assert (table.draft_s[0] == 0).all()
    assert np.abs(table.catch_up_s[column] - model.catch_up(context)).max() <= half
    for n in range(1, deepest + 2):
        assert np.abs(table.verify_s[n, column] - model.verify(n, context)).max() <= 2 * half
    assert np.abs(table.autoregressive_s[column] - model.autoregressive_step(context)).max() <= 2 * half
    assert (table.policy_step_s, table.round_overhead_s) == (2e-5, 4e-4)
    assert np.isnan(table.verify_s[0]).all()  # a pass over no token is never priced


def test_a_table_asks_for_covered_contexts_only() -> None:
    """Buckets reach beyond the contexts given; the model does not."""
    table = compile_table(profile(), max_draft_tokens=1, contexts=(17, 250))
    assert table.autoregressive_s[0] == table.autoregressive_s[1] - 18 * (24 - 17) / 96  # 17 and 24
    assert table.autoregressive_s[-1] == 18 + 18 * (248 - 64) / 192
    assert compile_table(profile(), max_draft_tokens=1, contexts=(16, 256)).autoregressive_s[-1] == 36


def test_constant_cost_is_the_papers_two_numbers() -> None:
    model = ConstantCost(s_d=1.1e-3, s_t=29.8e-3)  # EDD + PCT, appendix B, 7B
    np.testing.assert_array_equal(model.draft(2, [1, 9]), [2.2e-3, 2.2e-3])
    np.testing.assert_array_equal(model.catch_up([1, 9]), [0, 0])
    np.testing.assert_array_equal(model.wider(9, [1, 9]), [0, 0])
    np.testing.assert_array_equal(model.tree_verify(64, [1, 9]), model.verify(1, [1, 9]))
    np.testing.assert_array_equal(model.verify(17, [1, 9]), model.autoregressive_step([1, 9]))
    assert model.policy_step() == model.round_overhead() == 0
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="s_d="):
            ConstantCost(s_d=bad, s_t=1.0)
        with pytest.raises(InputError, match="s_t="):
            ConstantCost(s_d=1.0, s_t=bad)


def test_a_profile_is_exact_on_its_grid_and_linear_between() -> None:
    model = profile()
    np.testing.assert_array_equal(model.draft(1, CONTEXTS), [1.5, 2.5, 4.5])
    np.testing.assert_array_equal(model.draft(2, [40, 160]), [3.5, 6.5])
    np.testing.assert_array_equal(model.catch_up([40, 160]), [0.375, 0.5])
    np.testing.assert_array_equal(model.verify(1, [40, 160]), [15, 30])
    np.testing.assert_array_equal(model.autoregressive_step([16, 28, 256]), [9, 11.25, 36])
    np.testing.assert_array_equal(model.verify(2, CONTEXTS), [12, 19, 44])  # 19 after 20: an even number of rows


positive = st.floats(1e-6, 1.0)


@given(verify_s=arrays(float, (5, 3), elements=positive), context=st.integers(16, 256))
def test_verification_costs_what_was_measured_whether_more_tokens_took_longer_or_not(
    verify_s: np.ndarray, context: int
) -> None:
    model = profile(verify_s)
    for n in range(1, 6):
        np.testing.assert_array_equal(model.verify(n, CONTEXTS), verify_s[n - 1])
        assert float(model.verify(n, context)) == np.interp(context, CONTEXTS, verify_s[n - 1])


@given(
    sizes=st.sets(st.integers(2, 20), min_size=1, max_size=3).map(lambda rest: [1, *sorted(rest)]),
    seconds=arrays(float, (2, 4, 3), elements=positive),
)
def test_trees_cost_what_was_measured_and_lie_between_where_they_were_not(
    sizes: list[int], seconds: np.ndarray
) -> None:
    wider_s, verify_s = seconds[:, : len(sizes)]
    tree = TreeProfile(np.array(sizes), wider_s, verify_s, policy_step_s=0.5, round_overhead_s=2.0)
    model = replace(profile(), tree=tree)
    for read, table in ((model.wider, wider_s), (model.tree_verify, verify_s)):
        for size, row in zip(sizes, table, strict=True):
            np.testing.assert_allclose(read(size, CONTEXTS), row, rtol=1e-12, atol=1e-12)
        for size in range(1, sizes[-1] + 1):
            expected = [np.interp(size, sizes, table[:, column]) for column in range(len(CONTEXTS))]
            np.testing.assert_allclose(read(size, CONTEXTS), expected, rtol=1e-12, atol=1e-12)


def test_predictions_read_means_and_of_older_files_medians() -> None:
    old = document()
    means = {**old["median_s"], "verify": [[11.0, 21.0, 41.0], [14.0, 15.0, 46.0]], "policy_step": 8.0}
    for file, table in ((old, old["median_s"]), ({**old, "mean_s": means}, means)):
        model = profile_from_json(file, "here")
        np.testing.assert_array_equal(model.verify_s, table["verify"])
        assert model.policy_step_s == table["policy_step"]


@pytest.mark.parametrize(("asked", "named"), [([16, 257], "16 to 257"), ([15], "15 to 15"), (np.nan, "nan")])
def test_a_context_outside_the_grid_is_named(asked: Any, named: str) -> None:
    model = profile()
    for priced in (
        lambda: model.draft(1, asked),
        lambda: model.catch_up(asked),
        lambda: model.verify(1, asked),
        lambda: model.autoregressive_step(asked),
    ):
        with pytest.raises(InputError, match="covers contexts 16 to 256 tokens") as caught:
            priced()
        assert named in str(caught.value)


def test_a_size_outside_the_grid_is_named() -> None:
    for n in (0, 3):
        with pytest.raises(InputError, match=f"1 to 2 tokens, asked for {n};"):
            profile().verify(n, 20)
        with pytest.raises(InputError, match=f"drafts of 1 to 2 tokens, asked for {n};"):
            profile().draft(n, 20)


def test_a_trace_beyond_the_profile_is_refused_before_any_replay() -> None:
    """Its contexts are 0 (a prompt of a single token) to 68 (a prompt of 30 and 40 tokens of output)."""
    deep = profile(np.ones((7, 3)), draft_step_s=np.ones((6, 3)))
    refusal(lambda: cost_table(small_trace(), deep), "covers contexts 16 to 256 tokens, asked for 8")
    refusal(lambda: cost_table(small_trace().select([0]), profile()), "1 to 2 tokens, asked for 3")
    assert cost_table(small_trace().select([0]), deep).verify_s.shape == (8, 5)


def test_read_cost_reads_both_kinds(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(document()))
    model = read_cost(path)
    assert isinstance(model, ProfileCost)
    np.testing.assert_array_equal(model.verify_s, profile().verify_s)
    np.testing.assert_array_equal(model.draft_step_s, profile().draft_step_s)
    assert (model.policy_step(), model.round_overhead()) == (0.25, 0.5)
    path.write_text('{"s_d": 0.001, "s_t": 0.02, "note": "by hand"}')
    assert read_cost(str(path)) == ConstantCost(0.001, 0.02)
    path.write_text('{"s_d": 0.001, "s_t": 0.02, "round_s": 0.003}')
    assert read_cost(path).round_seconds(4, 100) == pytest.approx(4 * 0.001 + 0.02 + 0.003)
    refusal(lambda: read_cost({"s_d": 0.001, "s_t": 0.02, "rounds_s": 0.003}), "rounds_s")


@pytest.mark.parametrize("verify", [(0.196, 0.0), (0.0, 0.392)])
def test_a_profile_carries_the_error_of_its_times(verify: tuple[float, float]) -> None:
    """Of the least certain K, by simulation: a half-width of 19.6 % is a standard error of 10 %."""
    times = {"draft_step": [[1e-9]] * 2, "catch_up": [1e-9], "verify": [[1.0]] * 3, "autoregressive": [1.0]}
    times |= {"policy_step": 0.0, "round_overhead": 0.0}
    widths = {"draft_step": [[0.0]] * 2, "verify": [[0.0], *([width] for width in verify)], "autoregressive": [0.196]}
    about = {"kind": "specsim-profile", "version": 2, "contexts": [16], "mean_s": times}
    rng = np.random.default_rng(0)
    error = max(verify) / 1.96
    ratios = np.exp(0.1 * rng.standard_normal(40_000) - error * rng.standard_normal(40_000))
    cost = read_cost({**about, "relative_half_width": widths})
    assert cost.error_band == pytest.approx(np.quantile(ratios, (0.05, 0.95)), rel=0.01)
    assert cost.speedup_error == pytest.approx((0.0, np.log(ratios).std()), rel=0.01, abs=1e-12)
    assert read_cost(about).error_band is None and read_cost(about).speedup_error == (0.0, 0.0)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "not valid JSON"),
        ("{}", "neither"),
        ("[1, 2]", "neither"),
        ('{"s_d": 0, "s_t": 1}', "s_d"),
        ('{"s_d": 1, "s_t": NaN}', "NaN is not a finite number"),
        ('{"s_d": "x", "s_t": 1}', "s_d"),
        (json.dumps({**document(), "version": 99}), "99"),
        ('{"kind": "specsim-profile", "version": 2}', "malformed"),
        ("", ""),
        ("null", ""),
        ('{"s_d": 0.001}', ""),
        (json.dumps({**document(), "version": 1}), ""),
        (json.dumps({**document(), "contexts": [16, 64]}), ""),
        (json.dumps({**document(), "contexts": [16, 256, 64]}), ""),
        (json.dumps({**document(), "median_s": None}), ""),
        (json.dumps({**document(), "mean_s": {"verify": [[1.0]]}}), ""),
        (json.dumps(document(draft_step=[])), ""),
        (json.dumps(document(verify=[1, 2, 3])), ""),
        (json.dumps(document(verify=[[1, 2, 3], [1, 2]])), ""),
        (json.dumps(document(verify=[[1, 2, -3]])), ""),
        (json.dumps(document(autoregressive=[1, 2, float("inf")])), ""),
        (json.dumps(document(round_overhead=-1e-6)), ""),
    ],
)
def test_a_damaged_cost_file_is_refused_by_name(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(content)
    refusal(lambda: read_cost(path), str(path), says)


def test_a_cost_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "no.json", tmp_path):
        with pytest.raises(InputError, match="does not exist"):
            read_cost(path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    refusal(lambda: read_cost(tmp_path / "binary.json"), "binary.json is not valid JSON")


def test_a_profile_from_its_least_context_on_prices_all_shorter_ones() -> None:
    arrays = {"draft_step_s": [[1.0, 2.0]], "verify_s": [[3.0, 5.0], [4.0, 6.0]]}
    vectors = {"catch_up_s": [1.0, 2.0], "autoregressive_s": [7.0, 9.0]}
    values = {name: np.array(value) for name, value in (arrays | vectors).items()}
    for least, covered in ((LEAST_CONTEXT, True), (LEAST_CONTEXT + 1, False)):
        cost = ProfileCost(np.array([least, 10]), **values, policy_step_s=0.0, round_overhead_s=0.0)
        if covered:
            np.testing.assert_array_equal(cost.autoregressive_step([0, 1, 2, 10]), [7, 7, 7, 9])
        else:
            with pytest.raises(InputError, match="covers contexts 3 to 10 tokens, asked for 0"):
                cost.autoregressive_step([0, 10])


def profile_document(**more: Any) -> dict[str, Any]:
    """Steps of 2 ms, passes of 10 + n ms; at context 2, catching up on 1, 4 and 16 tokens takes 1, 2.5 and 10 ms."""
    seconds = {
        "draft_step": [[0.002, 0.002]] * 5,
        "catch_up": [0.001, 0.002],
        "catch_up_many": {"tokens": [4, 16], "seconds": [[0.0025, 0.004], [0.01, 0.02]]},
        "verify": [[0.010 + n / 1000] * 2 for n in range(1, 7)],
        "autoregressive": [0.010, 0.010],
        "policy_step": 1e-5,
        "round_overhead": 1e-4,
    }
    return {"kind": "specsim-profile", "version": 2, "contexts": [2, 102], "mean_s": {**seconds, **more}}


def catching_profile(**more: Any) -> ProfileCost:
    return profile_from_json(profile_document(**more), "given")


def test_catching_up_is_linear_between_what_was_measured() -> None:
    cost = catching_profile()
    by_hand = {1: 0.001, 2: 0.0015, 3: 0.002, 4: 0.0025, 10: 0.00625, 16: 0.01, 32: 0.02}  # 0.625 ms a token from 4 on
    for tokens, seconds in by_hand.items():
        assert float(cost.catch_up_by(tokens, 2)) == pytest.approx(seconds, rel=1e-12)
    assert float(cost.catch_up_by(4, 52)) == pytest.approx((0.0025 + 0.004) / 2)
    assert float(cost.catch_up_by(1, 2)) == float(cost.catch_up(2))


def test_a_profile_of_short_drafts_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(json.dumps(profile_document()))
    shown = json_of(call("specsim", "cost", "show", tmp_path / "profile.json", "--json"))
    assert [list(row["verify_s"]) for row in shown["rows"]] == [["1", "2", "4"]] * 2


def test_what_was_not_measured_costs_as_many_times_one() -> None:
    assert float(catching_profile(catch_up_many=None).catch_up_by(7, 2)) == pytest.approx(0.007)
    assert float(ConstantCost(0.1, 1.0).catch_up_by(7, 2)) == 0.0


@pytest.mark.parametrize(
    "many",
    [
        {"tokens": [1, 4], "seconds": [[0.0, 0.0]] * 2},
        {"tokens": [4, 4], "seconds": [[0.0, 0.0]] * 2},
        {"tokens": [], "seconds": []},
        {"tokens": [4], "seconds": [[0.0]]},
        {"tokens": [4], "seconds": [[0.0, -1.0]]},
        {"tokens": [4]},
    ],
)
def test_a_profile_that_catches_up_oddly_is_refused(many: Any) -> None:
    refusal(lambda: catching_profile(catch_up_many=many), "profile again")


def test_a_joined_table_by_hand() -> None:
    trace = joined_trace(drafters=2)
    table = joined_table(trace, JoinedCost((ConstantCost(0.001, 0.020), catching_profile())))
    longest = int(trace.output_tokens.max())
    assert table.each_draft_s.shape[:2] == (2, trace.depth + 1) and table.each_catch_up_s.shape[:2] == (2, longest + 1)
    np.testing.assert_allclose(table.each_draft_s[:, 3, 0], [0.003, 0.006])
    np.testing.assert_allclose(table.each_verify_s[:, 4, 0], [0.020, 0.014])
    at = 8 - 2  # the first column is priced at context 8
    np.testing.assert_allclose(table.each_catch_up_s[1, [0, 1, 4], 0], [0, 0.001 + 1e-5 * at, 0.0025 + 1.5e-5 * at])
    assert not table.each_catch_up_s[0].any()
    assert table.each_round_overhead_s.tolist() == [0.0, 1e-4] and table.each_policy_step_s.tolist() == [0.0, 1e-5]
    np.testing.assert_array_equal(table.autoregressive_s, 0.020)  # the first's
    assert table.notes == (
        "a token without speculation takes 10 to 20 ms by the drafters' costs, which should be of one target on one "
        "machine",
    )


def test_joined_costs_price_a_call_as_the_first_drafter_does() -> None:
    cost = JoinedCost((ConstantCost(0.001, 0.020), catching_profile()))
    assert (float(cost.draft(3, 8)), float(cost.verify(4, 8)), float(cost.autoregressive_step(8))) == (
        0.003,
        0.02,
        0.02,
    )
    assert float(cost.catch_up(8)) == cost.policy_step() == cost.round_overhead() == 0


def test_a_profile_without_the_time_of_a_predictors_score_charges_none() -> None:
    document = profile_document()
    assert "score_step" not in document["mean_s"]
    assert profile_from_json(document, "here").score_step_s == 0


def test_a_file_of_joined_costs_holds_each_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    constants = {"s_d": 0.001, "s_t": 0.010}
    file.write_text(json.dumps(joined_document([constants, profile_document()])))
    cost = read_cost(file)
    assert isinstance(cost, JoinedCost) and cost.parts[0] == ConstantCost(0.001, 0.010)
    assert float(cost.parts[1].catch_up_by(4, 2)) == 0.0025
    for bad, message in (
        ([], "does not hold the costs of single drafters"),
        ([joined_document([constants])], "does not hold the costs of single drafters"),
        ([constants, {"s_d": -1.0, "s_t": 1.0}], "drafter 2: .*s_d"),
        ([constants, 7], "drafter 2 is neither"),
    ):
        file.write_text(json.dumps(joined_document(bad)))
        refusal(lambda: read_cost(file), match=message)
    file.write_text(json.dumps({"kind": "specsim-joined-cost", "version": 1}))
    refusal(lambda: read_cost(file), "required field `costs`")


def test_space_pays_for_its_passes_and_for_no_draft_step() -> None:
    """k = 2: the rounds of fixed K = 2, every pass over 1 + 2 x 4 = 9 tokens, but for shorter drafts at the end."""
    trace, model = small_trace(), RampCost(slope=0.0)
    policy = make_policy("space_k", {"k": 2})
    table = cost_table(trace, model, policy)
    result = replay(trace, policy, table, log=True)
    plain = replay(trace, FixedK(k=2), cost_table(trace, model), log=True)
    assert result.rounds.rows() == plain.rounds.rows()
    draft_s, policy_s, verify_s, other_s = result.seconds.sum(axis=0)
    rounds = result.num_rounds.sum()
    assert draft_s == policy_s == 0
    passes = [float(model.verify(3 * (drafted + 1), 0)) for drafted in result.rounds.drafted.tolist()]
    assert verify_s == pytest.approx(sum(passes), rel=1e-12)
    assert passes.count(float(model.verify(9, 0))) > 0.8 * rounds
    assert other_s == pytest.approx(rounds * model.round_overhead(), rel=1e-12)
    np.testing.assert_array_equal(result.autoregressive_s, plain.autoregressive_s)


class SizedTrees(RampCost):
    """Trees cost what chains of as many tokens cost, and a compaction."""

    max_tree_tokens = 512

    def tree_verify(self, n_tokens: int, context: Any) -> Any:
        return self.verify(n_tokens, context) + 7e-3


def as_space(trace: Trace) -> Trace:
    return replace(trace, meta={**trace.meta, "drafter_kind": "space"})


@pytest.mark.parametrize(("name", "settings", "k"), [
    ("space_k", {"k": 3}, 3), ("fixed_k", {"k": 2}, 2), ("adaedl", {"lambda0": 0.5, "max_draft_tokens": 4}, 4),
])  # fmt: skip
def test_on_a_trace_of_space_masks_are_part_of_every_pass(name: str, settings: dict[str, Any], k: int) -> None:
    """m drafted tokens cost a tree of (m + 1)(k + 1), with k of the run's longest draft, and measured draft steps."""
    trace, model = small_trace(), SizedTrees(slope=0.0)
    policy = make_policy(name, settings)
    result = replay(as_space(trace), policy, cost_table(as_space(trace), model, policy), log=True)
    elsewhere = replay(trace, policy, cost_table(trace, RampCost(slope=0.0), FixedK(k=2)), log=True)
    assert result.rounds.rows() == elsewhere.rounds.rows()
    drafted = result.rounds.drafted.tolist()
    draft_s, _, verify_s, _ = result.seconds.sum(axis=0)
    assert verify_s == pytest.approx(sum(float(model.tree_verify((m + 1) * (k + 1), 0)) for m in drafted), rel=1e-12)
    assert draft_s == pytest.approx(sum(float(model.draft(m, 0)) for m in drafted if m), rel=1e-12) and draft_s > 0
    np.testing.assert_array_equal(result.autoregressive_s, elsewhere.autoregressive_s)


def test_no_policy_beats_the_oracle_on_a_trace_of_space() -> None:
    """Of any k a pass over m drafted tokens has at least m masks in a group."""
    trace, model = as_space(small_trace()), SizedTrees(slope=0.0)
    least = chain_oracle_seconds(trace, cost_table(trace, model))
    for k in range(1, trace.depth + 1):
        policy = FixedK(k=k)
        seconds = replay(trace, policy, cost_table(trace, model, policy)).speculative_s
        assert (least <= seconds + 1e-12).all()
    priced = cost_table(trace, model).verify_s[:, 0]
    assert priced[2:].tolist() == [float(model.tree_verify(n * n, 0)) for n in range(2, len(priced))]
    assert priced[1] == float(model.verify(1, 0))  # a round that drafts nothing has no masks at the least


def test_tuning_on_a_trace_of_space_counts_every_policys_own_masks() -> None:
    trace, model = as_space(small_trace()), SizedTrees(slope=0.0)
    points = [{"k": k} for k in (1, 2, 4)]
    evaluated = evaluate_many(FixedK, points, PricedTrace(trace, model), jobs=1)
    for point, seconds in zip(points, evaluated.seconds, strict=True):
        policy = FixedK(**point)
        alone = replay(trace, policy, cost_table(trace, model, policy)).speculative_s.sum()
        assert seconds == pytest.approx(alone, rel=1e-12)


def test_a_search_on_a_trace_of_space_goes_on_only_under_the_same_costs_of_its_passes() -> None:
    class Dearer(SizedTrees):
        def tree_verify(self, n_tokens: int, context: Any) -> Any:
            return super().tree_verify(n_tokens, context) + (n_tokens == 6) * 1e-3  # no square, so of no oracle's pass

    trace, costs = small_trace(), (SizedTrees(slope=0.0), Dearer(slope=0.0))
    assert len({cost_digest(PricedTrace(as_space(trace), cost)) for cost in costs}) == 2
    assert len({cost_digest(PricedTrace(trace, cost)) for cost in costs}) == 1


def test_what_belongs_on_a_trace_of_space() -> None:
    """Chains, space_k among them, which elsewhere is out of place; and no trees."""
    trace = small_trace()
    assert "space" in str(unsupported_reason(trace, POLICIES["space_k"]))
    assert unsupported_reason(as_space(trace), POLICIES["space_k"]) is None
    assert "chains only" in str(unsupported_reason(as_space(trace), POLICIES["vct"]))


def test_longer_passes_that_are_much_faster_are_noted() -> None:
    """Over both contexts, 2 tokens take 2.1 s and 3 take 1.5: 29 % less; 1.9 s are 10 % less, as pairs of rows may."""
    quiet = np.full((1, 2), 3.0), np.ones(2)
    (note,) = disturbances(*quiet, np.array([[1.0, 1.2], [2.0, 2.2], [1.5, 1.5]]))
    assert "verifying more tokens takes up to 29 % less" in note
    assert disturbances(*quiet, np.array([[1.0, 1.2], [2.0, 2.2], [1.8, 2.0]])) == []
    (note,) = disturbances(np.array([[3.0, 0.8]]), np.ones(2), np.ones((3, 2)))
    assert "a round takes 0.80 of a step" in note
