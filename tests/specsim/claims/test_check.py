"""Claim files: what is read, refused and written; evaluating claims, and judging their values."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import specsim
from specsim.claims.check import check_files, judge, judge_order
from specsim.claims.files import claim_files, read_claims, update_expected
from specsim.claims.measured import RATIOS
from specsim.compare.leaderboard import leaderboards
from specsim.io.errors import InputError
from specsim.io.files import write_table
from specsim.policy.chain.beta_ts import BetaTS
from specsim.replaying.intervals import Estimate, paired_difference
from specsim.replaying.priced import PricedTrace
from specsim.trace.split import split_sequences
from tests.specsim.claims.conftest import CLAIMS, CheckClaim, ClaimFile, write_validation
from tests.support.checks import refusal

COST = specsim.ConstantCost(0.001, 0.010)


@pytest.fixture
def trace(recorded: Path) -> specsim.Trace:
    return specsim.read_trace(recorded / "trace")


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.0, 2.0, "holds"),
        (1.5, 1.5, "holds"),
        (2.0 + 1e-12, 2.0 + 1e-12, "holds"),
        (2.1, 2.2, "drifted"),
        (0.1, 0.9, "drifted"),
        (0.9, 1.1, "not decidable"),
        (1.9, 2.1, "not decidable"),
        (0.0, 9.0, "not decidable"),
    ],
)
def test_the_whole_interval_decides(low: float, high: float, verdict: str) -> None:
    assert judge(Estimate(low, low, high), (1.0, 2.0), outside="drifted") == verdict
    assert judge(Estimate(-low, -high, -low), (-2.0, -1.0), outside="drifted") == verdict


def test_every_step_of_an_order_must_hold() -> None:
    leads, tied, trails = Estimate(1, 0.5, 1.5), Estimate(0.1, -0.1, 0.3), Estimate(-1, -1.5, -0.5)
    assert judge_order([leads, leads]) == "holds"
    assert judge_order([leads, tied]) == "not decidable"
    assert judge_order([tied, trails]) == "contradicted"
    assert judge_order([leads, Estimate(0, 0, 0)]) == "not decidable"  # equal on every sequence


@pytest.mark.parametrize("quantity", [*RATIOS, "oracle_regret"])
def test_quantities_equal_a_prediction(trace: specsim.Trace, check_claim: CheckClaim, quantity: str) -> None:
    checked = check_claim(f'settings = {{ k = 3 }}\nquantity = "{quantity}"\nat_least = -1e9')
    assert checked.verdict == "holds"
    predicted = specsim.predict(trace, COST, "fixed_k", k=3)
    expected = {
        "speedup": predicted.speedup.estimate,
        "v_d": predicted.v_d,
        "r_d": predicted.r_d,
        "hm": predicted.hm,
        "tau": predicted.tau,
        "mean_accepted_tokens": predicted.accepted / predicted.rounds,
        "mean_draft_tokens": predicted.drafted / predicted.rounds,
        "tokens_per_s": predicted.output_tokens / predicted.seconds,
        "autoregressive_tokens_per_s": predicted.output_tokens / predicted.ar_seconds,
        "oracle_regret": predicted.oracle_regret,
    }
    assert checked.judged.estimate == pytest.approx(expected[quantity], rel=1e-12)


def test_sequences_can_weigh_the_same(trace: specsim.Trace, check_claim: CheckClaim) -> None:
    checked = check_claim('settings = { k = 3 }\naverage = "sequences"\nat_least = 0.0')
    run = specsim.replay(trace, COST, "fixed_k", k=3)
    assert checked.judged.estimate == pytest.approx(float(np.mean(run.autoregressive_s / run.speculative_s)))


def test_a_value_is_about_this_record_and_a_bound_about_prompts(check_claim: CheckClaim) -> None:
    value = check_claim("settings = { k = 4 }\nexpected = 2.33\ntolerance = 0.01")
    bound = check_claim("settings = { k = 4 }\nat_least = 2.3")
    assert value.verdict == "holds" and value.judged.low == value.judged.high
    assert bound.verdict == "not decidable" and bound.judged.low < 2.3 < bound.judged.high
    assert value.passed and not bound.passed


def test_a_known_verdict_passes_and_another_fails(check_claim: CheckClaim) -> None:
    known = 'settings = { k = 4 }\nat_most = 1.0\nverdict = "contradicted"'
    assert check_claim(known).passed
    other = check_claim(known.replace("at_most", "at_least"))
    assert other.verdict == "holds" and not other.passed and "known as contradicted" in other.message


def test_neighbours_of_an_order_are_compared_in_pairs(check_claim: CheckClaim) -> None:
    """K = 4 and K = 2 differ by less than their intervals are wide, and yet significantly."""
    checked = check_claim("order = [{ settings = { k = 4 } }, { settings = { k = 2 } }]")
    assert checked.verdict == "holds" and "fixed_k(k=4) leads by +" in checked.recomputed
    assert check_claim("order = [{ settings = { k = 6 } }, { settings = { k = 4 } }]").verdict == "not decidable"


def test_a_ratio_is_of_two_subjects(check_claim: CheckClaim) -> None:
    checked = check_claim(
        "ratio = [{ settings = { k = 4 } }, { settings = { k = 1 } }]\nexpected = 1.435\ntolerance = 0.01"
    )
    assert checked.verdict == "holds"
    assert checked.judged.estimate == pytest.approx(2.329 / 1.623, abs=2e-3)


def test_a_difference_is_taken_in_pairs_of_sequences(trace: specsim.Trace, check_claim: CheckClaim) -> None:
    four, two = (specsim.replay(trace, COST, "fixed_k", k=k) for k in (4, 2))
    expected = paired_difference(four.autoregressive_s, four.speculative_s, two.speculative_s).difference
    both = "difference = [{ settings = { k = 4 } }, { settings = { k = 2 } }]\n"
    checked = check_claim(both + "at_least = 0.0")
    assert checked.verdict == "holds" and checked.judged == expected
    value = check_claim(both + f"expected = {expected.estimate}\ntolerance = 1e-9")
    assert value.verdict == "holds" and value.judged == Estimate.exact(expected.estimate)


def test_an_interval_is_claimed_beside_its_value(trace: specsim.Trace, check_claim: CheckClaim) -> None:
    speedup = specsim.predict(trace, COST, "fixed_k", k=4).speedup
    claim = "settings = {{ k = 4 }}\nexpected = {:.3f}\ninterval = [{:.3f}, {:.3f}]\ntolerance = 0.0005"
    checked = check_claim(claim.format(speedup.estimate, speedup.low, speedup.high))
    assert checked.verdict == "holds" and checked.interval == speedup and f"{speedup.high:.4g}]" in checked.recomputed
    for moved in [(0, 0, 0.002), (0, -0.002, 0), (0.002, 0, 0)]:
        ends = (a + b for a, b in zip((speedup.estimate, speedup.low, speedup.high), moved, strict=True))
        assert check_claim(claim.format(*ends)).verdict == "drifted"


def test_replays_and_draft_limits_are_those_of_a_leaderboard(trace: specsim.Trace, check_claim: CheckClaim) -> None:
    """A policy that draws, averaged over three replays, on the trace as if recorded to five tokens."""
    (board,) = leaderboards({"it": trace}, [COST], kinds=[BetaTS], max_drafts=[5], trials=2, replays=3, jobs=1)
    row = next(row for row in board.rows if row.label == "beta_ts, weak prior")
    subject = 'policy = "beta_ts"\nsettings = { alpha0 = 1.0, beta0 = 1.0 }\nmax_draft_tokens = 5\ntuning_share = 0.5\n'
    assert check_claim(f"{subject}replays = 3\nat_least = -9.0").judged == row.prediction.speedup
    regret = check_claim(f'{subject}replays = 3\nquantity = "oracle_regret"\nat_least = -9.0').judged
    assert regret.estimate == pytest.approx(row.prediction.oracle_regret, rel=1e-12)
    single = check_claim(f"{subject}at_least = 0.0")
    assert single.judged is not None and single.judged != row.prediction.speedup


def test_a_policy_that_learns_is_reported_on_the_held_out_sequences(check_claim: CheckClaim) -> None:
    checked = check_claim('policy = "renewal_stop"\ntuning_share = 0.25\nat_least = 1.0')
    assert checked.verdict == "holds"
    assert len(checked.seconds[0]) == 18


def test_with_a_tuning_share_every_policy_is_reported_on_the_held_out_sequences(
    trace: specsim.Trace, check_claim: CheckClaim
) -> None:
    """So that a policy that learns and a policy that does not are compared on the same sequences."""
    order = 'order = [{ policy = "fixed_k", settings = { k = 4 } }, { policy = "renewal_stop" }]'
    for share, sequences in (("", 24), ("tuning_share = 0.5\n", 12)):
        checked = check_claim(share + order)
        assert len(checked.seconds[0]) == sequences
    priced = PricedTrace(trace, COST)
    part = priced.select(split_sequences(trace, tuning_share=0.5)[1])
    fixed = specsim.predict(part.trace, COST, "fixed_k", k=4)
    lead = fixed.speedup.estimate / specsim.predict(trace, COST, "renewal_stop").speedup.estimate - 1
    assert checked.steps[0].estimate == pytest.approx(lead, rel=1e-9)


@pytest.mark.parametrize("changes", [0, 7])
def test_rounds_are_compared_with_a_real_run(
    trace: specsim.Trace, check_claim: CheckClaim, tmp_path: Path, changes: int
) -> None:
    """The real run drafted as the replay of K = 3 did, but for some rounds."""
    rounds = specsim.replay(trace, COST, "fixed_k", k=3).rounds.to_frame().drop(columns=["verified", "last"])
    rounds["sequence_id"] = trace.sequence_id[rounds.pop("sequence")]
    rounds.loc[: changes - 1, "drafted"] += 1
    columns = {"policy": ["fixed_k(k=3)"] * len(rounds), **{name: rounds[name].to_list() for name in rounds}}
    path = tmp_path / "rounds.parquet"
    write_table(pa.table(columns), path)
    checked = check_claim(
        f'settings = {{ k = 3 }}\nquantity = "rounds_identical_percent"\nrounds = "{path}"\nat_least = 100'
    )
    assert checked.passed == (not changes)
    assert checked.judged.estimate == pytest.approx(100 * (1 - changes / len(rounds)))
    write_table(pa.table(columns).drop_columns(["t"]), path)  # whose rounds could be anywhere in their text
    with pytest.raises(InputError, match="does not say where its rounds begin"):
        check_claim(f'settings = {{ k = 3 }}\nquantity = "rounds_identical_percent"\nrounds = "{path}"\nat_least = 100')


@pytest.mark.parametrize(
    ("claim", "verdict"),
    [
        ('policy = "fixed_k"\nexpected = 1.5\ntolerance_percent = 2', "holds"),
        ('policy = "fixed_k(k=2)"\nexpected = 1.5\ntolerance_percent = 0.5', "not decidable"),  # within the floor
        ('policy = "fixed_k"\nexpected = 1.6\ntolerance_percent = 2', "drifted"),
        ('policy = "fixed_k"\nquantity = "tokens_per_s"\nexpected = 10\ntolerance = 0.5', "holds"),
        ('policy = "fixed_k"\nquantity = "rounds_identical_percent"\nat_least = 100', "holds"),
        ('quantity = "median_abs_error_percent"\nat_most = 0.5', "contradicted"),
        ('order = [{ policy = "fixed_k" }, { policy = "adaedl" }]', "holds"),
        ('order = [{ policy = "adaedl" }, { policy = "fixed_k" }]', "contradicted"),
    ],
)
def test_real_runs_are_judged_with_their_noise(tmp_path: Path, claim: str, verdict: str) -> None:
    write_validation(tmp_path / "run")
    path = tmp_path / "run.claims.toml"
    path.write_text(f'version = 1\n[[claim]]\nname = "it"\nvalidation = "run"\n{claim}')
    assert check_files([path])[0].verdict == verdict


@pytest.mark.parametrize(
    ("changes", "claim"),
    [
        ({}, 'policy = "cape"\nat_least = 1'),
        ({}, "at_least = 1"),
        ({}, 'quantity = "nothing"\nat_least = 1'),
        ({}, 'policy = "fixed_k"\nquantity = "label"\nat_least = 1'),
        ({"rows": 3}, 'policy = "fixed_k"\nat_least = 1'),
        ({"noise_floor_percent": None}, 'policy = "fixed_k"\nat_least = 1'),
        ({"autoregressive_sequence_seconds": [1.0, -1.0, 1.0]}, 'policy = "fixed_k"\nat_least = 1'),
        ({"autoregressive_sequence_seconds": [1.0]}, 'policy = "fixed_k"\nat_least = 1'),
        ({"kind": "other"}, 'policy = "fixed_k"\nat_least = 1'),
    ],
)
def test_incomplete_runs_are_refused(tmp_path: Path, changes: dict[str, Any], claim: str) -> None:
    write_validation(tmp_path / "run", **changes)
    path = tmp_path / "run.claims.toml"
    path.write_text(f'version = 1\n[[claim]]\nname = "it"\nvalidation = "run"\n{claim}')
    refusal(lambda: check_files([path]), "claim 'it'")


def test_any_number_of_a_document(tmp_path: Path) -> None:
    write_validation(tmp_path / "run")
    path = tmp_path / "value.claims.toml"
    lines = ["version = 1", '[defaults]\ndocument = "run/validation.json"']
    measured = '["rows", { policy = "adaedl" }, "measured"]'
    claims = {
        "by position": ('["rows", 0, "error_percent"]', "expected = -0.7\ntolerance = 0", "holds"),
        "by values": (measured, "at_least = 1.32", "not decidable"),
        "of this record": (measured, 'at_least = 1.32\nabout = "record"', "holds"),
    }
    lines += [f'[[claim]]\nname = "{name}"\nat = {at}\n{claim}' for name, (at, claim, _) in claims.items()]
    path.write_text("\n".join(lines))
    assert [checked.verdict for checked in check_files([path])] == [verdict for *_, verdict in claims.values()]
    for at in ('["rows", 2, "error_percent"]', '["rows", { policy = "x" }]', '["none"]', '["kind"]', '["kind", "x"]'):
        path.write_text(
            f'version = 1\n[[claim]]\nname = "it"\ndocument = "run/validation.json"\nat = {at}\nat_least = 1'
        )
        with pytest.raises(InputError, match="validation.json"):
            check_files([path])


def test_a_number_of_a_csv_file_is_found_by_its_row_and_column(tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text("model,k,time_s,note\n7B,3,2.5,\n7B,5,2.0,warm\n13B,3,4.0,\n")
    path = tmp_path / "it.claims.toml"
    at = {k: f'[{{ model = "7B", k = {k} }}, "time_s"]' for k in (3, 5)}
    claim = f"ratio = [{{ at = {at[3]} }}, {{ at = {at[5]} }}]\nexpected = 1.25\ntolerance = 0"
    path.write_text(f'version = 1\n[[claim]]\nname = "it"\ndocument = "runs.csv"\n{claim}')
    assert [checked.verdict for checked in check_files([path])] == ["holds"]
    for wrong in ('"time_s"', '{ model = "7B" }, "time_s"', '{ k = 5 }, "note"', '{ model = "13B" }, "note"'):
        path.write_text(f'version = 1\n[[claim]]\nname = "it"\ndocument = "runs.csv"\nat = [{wrong}]\nat_least = 1')
        with pytest.raises(InputError, match="runs.csv"):
            check_files([path])


def test_a_list_of_a_document_is_its_mean_over_sequences(tmp_path: Path) -> None:
    """Two lists of the same document are compared in pairs."""
    (tmp_path / "it.json").write_text(
        json.dumps({"a": [2.0, 4.0, 9.0], "b": [1.1, 1.9, 4.5], "c": [1.0, -1.0], "d": [], "e": [1.0, 0.0]})
    )
    path = tmp_path / "it.claims.toml"
    claims = {
        'at = ["a"]\nexpected = 5\ntolerance = 0': "holds",
        'ratio = [{ at = ["a"] }, { at = ["b"] }]\nexpected = 2\ntolerance = 1e-9': "holds",
        'ratio = [{ at = ["a"] }, { at = ["b"] }]\nat_least = 1.7\nat_most = 2.3': "holds",
        'at = ["a"]\nat_least = 4': "not decidable",
        'at = ["e"]\nexpected = 0.5\ntolerance = 0': "holds",
    }
    lines = [f'[[claim]]\nname = "{number}"\n{claim}' for number, claim in enumerate(claims)]
    path.write_text("\n".join(['version = 1\n[defaults]\ndocument = "it.json"', *lines]))
    assert [checked.verdict for checked in check_files([path])] == list(claims.values())
    for at in "cd":
        path.write_text(f'version = 1\n[[claim]]\nname = "it"\ndocument = "it.json"\nat = ["{at}"]\nat_least = 1')
        with pytest.raises(InputError, match="is not a number"):
            check_files([path])


def test_changed_files_are_read_again(claim_file: ClaimFile) -> None:
    """Documents, traces and costs are cached between claims, but not once their files change."""
    subject = 'trace = "trace"\ncost = "cost.json"\npolicy = "fixed_k"\nsettings = { k = 4 }\nat_least = 0.0'
    path = claim_file(
        f'version = 1\n[[claim]]\nname = "a"\ndocument = "it.json"\nat = ["a"]\nat_least = 0.0\n'
        f'[[claim]]\nname = "b"\n{subject}'
    )
    values = []
    for value, s_d in ((1.5, 0.001), (2.25, 0.0005)):
        (path.parent / "it.json").write_text(json.dumps({"a": value}))
        (path.parent / "cost.json").write_text(json.dumps({"s_d": s_d, "s_t": 0.010}))
        values.append([checked.judged.estimate for checked in check_files([path]) if checked.judged is not None])
    assert [value for value, _ in values] == [1.5, 2.25] and values[1][1] > 1.1 * values[0][1]


def test_a_shorter_limit_is_the_shorter_run(trace: specsim.Trace) -> None:
    """Replays of the first 20 tokens are the rounds that the whole run's first 20 tokens allow."""
    short = trace.shortened(20)
    assert trace.shortened(1).output_tokens.tolist() == [1] * trace.sequences
    assert short.output_tokens.tolist() == [20] * trace.sequences and trace.shortened(60).depth == trace.depth
    rows = trace.position < 20
    assert (short.token == trace.token[rows]).all()
    assert (short.match_len.astype(int) + short.position <= 20).all()
    assert (short.draft_limit <= 19 - short.position).all()
    whole, cut = (specsim.replay(recording, COST, "fixed_k", k=4).rounds.rows() for recording in (trace, short))
    first = [row for row in whole if row[1] + row[3] + 1 <= 20 and row[1] + 4 < 20]  # untouched by the limit
    assert set(first) <= set(cut) and len(first) > 0.5 * len(cut)
    with pytest.raises(InputError, match="max_output_tokens"):
        trace.shortened(0)


WRONG = {  # what is changed in a claim file that holds, into what, and the word that the error names
    "version": ("version = 1", "version = 2", "version"),
    "version's type": ("version = 1", "version = true", "version"),
    "file's key": ("version = 1", "version = 1\nclaims = 1", "claims"),
    "no TOML": ("version = 1", "version = = 1", "TOML"),
    "defaults' key": ("[defaults]", "[defaults]\ntraces = 1", "traces"),
    "claim's key": ("settings = { k = 4 }", "setings = { k = 4 }", "key 'setings' is unknown here"),
    "key's type": ("settings = { k = 4 }", 'settings = "k = 4"', "settings"),
    "number's type": ("expected = 2.33", 'expected = "2.33"', "expected"),
    "NaN": ("expected = 2.33", "expected = nan", "expected"),
    "infinity": ("at_least = 0.5", "at_least = inf", "at_least"),
    "negative tolerance": ("tolerance_percent = 0.5", "tolerance_percent = -1.0", "tolerance_percent"),
    "both a value and a bound": ("expected = 2.33", "expected = 2.33\nat_most = 3.0", "exclude"),
    "nothing claimed": ("expected = 2.33", "", "nothing is claimed"),
    "no tolerance": ("tolerance_percent = 0.5", "", "tolerance"),
    "bounds crossed": ("at_least = 0.5", "at_least = 0.5\nat_most = 0.4", "swap"),
    "two subjects": ('policy = "fixed_k"', 'policy = "fixed_k"\ntrace = "trace"\nvalidation = "v"', "exclude"),
    "no subject": ('trace = "trace"', "", "subject"),
    "a key of another subject": ('policy = "fixed_k"', 'policy = "fixed_k"\nat = ["rows"]', "at"),
    "two of a name": ("drafts are accepted", "speedup of four drafts", "rename"),
    "an unknown verdict": ("at_least = 0.5", 'at_least = 0.5\nverdict = "true"', "verdict"),
    "a name of two lines": ("drafts are accepted", "drafts\\nare accepted", "a line"),
    "a source that is no text": ('source = "a table"', 'source = "a\\u0000table"', "a line"),
    "rounds without their quantity": ('policy = "fixed_k"', 'policy = "fixed_k"\nrounds = "r"', "rounds"),
    "identity without rounds": ('"v_d"', '"rounds_identical_percent"', "rounds"),
    "a share of all": ('policy = "fixed_k"', 'policy = "fixed_k"\ntuning_share = 1.0', "tuning_share"),
    "path": ('trace = "trace"', 'trace = "elsewhere"', "elsewhere"),
    "cost path": ("cost = { s_d = 0.001, s_t = 0.010 }", 'cost = "none.json"', "none.json"),
    "cost's unit": ("s_d = 0.001", "s_d_ms = 1.0", "s_d"),
    "cost's sign": ("s_d = 0.001", "s_d = -0.001", "s_d"),
    "policy": ('policy = "fixed_k"', 'policy = "fixed_l"', "fixed_l"),
    "policy's setting": ("{ k = 4 }", "{ m = 4 }", "'m'"),
    "setting's range": ("{ k = 4 }", "{ k = -4 }", "k=-4"),
    "setting's type": ("{ k = 4 }", "{ k = 4.5 }", "k=4.5"),
    "quantity": ('"v_d"', '"v_t"', "v_t"),
    "batch without grids": ('policy = "fixed_k"', 'policy = "fixed_k"\nbatch = 2', "batch"),
    "average": ('policy = "fixed_k"', 'policy = "fixed_k"\naverage = "rounds"', "average"),
    "length": ('policy = "fixed_k"', 'policy = "fixed_k"\nmax_output_tokens = 0', "max_output_tokens"),
    "seed": ('policy = "fixed_k"', 'policy = "fixed_k"\nseed = -1', "seed"),
    "an interval without its value": ("at_least = 0.5", "at_least = 0.5\ninterval = [0.1, 0.2]", "interval"),
    "an interval of one end": ("expected = 2.33", "expected = 2.33\ninterval = [2.1]", "interval"),
    "an interval's ends crossed": ("expected = 2.33", "expected = 2.33\ninterval = [2.4, 2.1]", "interval"),
    "no replays": ('policy = "fixed_k"', 'policy = "fixed_k"\nreplays = 0', "replays"),
    "deeper than recorded": ('policy = "fixed_k"', 'policy = "fixed_k"\nmax_draft_tokens = 99', "99"),
    "a difference of one": ("at_least = 0.5", "at_least = 0.5\ndifference = [{}]", "two subjects"),
    "ratio and difference": (
        "at_least = 0.5",
        "at_least = 0.5\nratio = [{}, {}]\ndifference = [{}, {}]",
        "keep a single key",
    ),
    "an order of one": ("at_least = 0.5", "order = [{ settings = { k = 1 } }]", "two subjects"),
    "an order with a bound": ("at_least = 0.5", "at_least = 0.5\norder = [{}, {}]", "order"),
    "a ratio of three": ("at_least = 0.5", "at_least = 0.5\nratio = [{}, {}, {}]", "two subjects"),
    "a ratio's type": ("at_least = 0.5", "at_least = 0.5\nratio = 3", "ratio"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named_in_one_line(claim_file: ClaimFile, case: str) -> None:
    old, new, word = WRONG[case]
    assert old in CLAIMS
    path = claim_file(CLAIMS.replace(old, new, 1))
    with pytest.raises(InputError) as refused:
        check_files([path])
    message = str(refused.value)
    assert word in message and str(path) in message and "\n" not in message


@pytest.mark.parametrize("key", ["trace", "cost", "policy"])
def test_a_name_that_no_file_can_have_is_refused_in_one_line(claim_file: ClaimFile, key: str) -> None:
    long = re.sub(rf"(?m)^{key} = .*$", f'{key} = "{"x" * 5000}"', CLAIMS, count=1)
    assert long != CLAIMS
    with pytest.raises(InputError, match="good.claims.toml|claim ") as refused:
        check_files([claim_file(long)])
    assert "\n" not in str(refused.value)


def test_files_are_read_before_anything_is_evaluated(recorded: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.claims.toml"
    bad.write_text("version = 1\n")
    seen: list[int] = []
    with pytest.raises(InputError, match="there is no claim"):
        check_files([recorded / "good.claims.toml", bad], progress=lambda what, done, total: seen.append(done))
    assert seen == []


def test_a_folder_stands_for_its_claim_files(recorded: Path, tmp_path: Path) -> None:
    assert claim_files([recorded, recorded / "good.claims.toml"]) == [recorded / "good.claims.toml"]
    with pytest.raises(InputError, match="holds no"):
        claim_files([tmp_path])


def test_an_update_keeps_comments(claim_file: ClaimFile) -> None:
    path = claim_file(CLAIMS)
    update_expected(path, {"speedup of four drafts": Estimate.exact(1.23456789)})
    text = path.read_text()
    assert text == CLAIMS.replace("expected = 2.33", "expected = 1.23457")
    assert read_claims(path)[0].statement.expected == 1.23457


def test_an_update_replaces_the_interval_too(claim_file: ClaimFile) -> None:
    path = claim_file(CLAIMS.replace("expected = 2.33", "expected = 2.33\ninterval = [2.2, 2.5]"))
    update_expected(path, {"speedup of four drafts": Estimate(1.23456789, 1.1, 1.3456789)})
    assert "expected = 1.23457\ninterval = [1.1, 1.34568]\n" in path.read_text()


def test_the_documented_file_is_read(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "claims.md").read_text()
    path = tmp_path / "documented.claims.toml"
    path.write_text(text.split("```toml\n")[1].split("```")[0])
    assert [claim.form for claim in read_claims(path)] == ["value", "value", "order", "value", "value"]
