"""Cost models, the table they compile to, and the files they are read from."""

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
from specsim.cost.model import ConstantCost
from specsim.cost.profile import LEAST_CONTEXT, ProfileCost, TreeProfile, profile_from_json
from specsim.cost.table import compile_table
from specsim.io.errors import InputError
from specsim.replaying.table import cost_table
from tests.support.checks import refusal
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
    assert model.constant(40) == ConstantCost(s_d=1.75, s_t=13.5)


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
    for call in (
        lambda: model.draft(1, asked),
        lambda: model.catch_up(asked),
        lambda: model.verify(1, asked),
        lambda: model.autoregressive_step(asked),
    ):
        with pytest.raises(InputError, match="covers contexts 16 to 256 tokens") as caught:
            call()
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
    with pytest.raises(InputError, match="covers contexts 16 to 256 tokens, asked for 8"):
        cost_table(small_trace(), deep)
    with pytest.raises(InputError, match="1 to 2 tokens, asked for 3"):
        cost_table(small_trace().select([0]), profile())
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


@pytest.mark.parametrize(
    "content",
    [
        "",
        "null",
        '{"s_d": 0.001}',
        '{"s_d": 1, "s_t": NaN}',
        '{"s_d": "x", "s_t": 1}',
        json.dumps({**document(), "version": 1}),
        json.dumps({**document(), "contexts": [16, 64]}),
        json.dumps({**document(), "contexts": [16, 256, 64]}),
        json.dumps({**document(), "median_s": None}),
        json.dumps({**document(), "mean_s": {"verify": [[1.0]]}}),
        json.dumps(document(draft_step=[])),
        json.dumps(document(verify=[1, 2, 3])),
        json.dumps(document(verify=[[1, 2, 3], [1, 2]])),
        json.dumps(document(verify=[[1, 2, -3]])),
        json.dumps(document(autoregressive=[1, 2, float("inf")])),
        json.dumps(document(round_overhead=-1e-6)),
    ],
)
def test_a_damaged_cost_file_is_refused_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "cost.json"
    path.write_text(content)
    refusal(lambda: read_cost(path), str(path))


def test_a_cost_file_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "no.json", tmp_path):
        with pytest.raises(InputError, match="does not exist"):
            read_cost(path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="binary.json is not valid JSON"):
        read_cost(tmp_path / "binary.json")


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
