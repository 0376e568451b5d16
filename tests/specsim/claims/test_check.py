"""What is evaluated, and how it is judged."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import specsim
from specsim.claims.check import Checked, check_files, judge, judge_order
from specsim.claims.replayed import RATIOS
from specsim.errors import InputError
from specsim.files import write_table
from specsim.policy.chain.beta_ts import BetaTS
from specsim.ranking.leaderboard import leaderboard
from specsim.replaying.priced import PricedTrace
from specsim.speedup.intervals import Estimate, paired_difference, ratio_interval
from specsim.trace.split import split_sequences
from tests.specsim.claims.test_files import beside

HEAD = 'version = 1\n[defaults]\ntrace = "trace"\ncost = { s_d = 0.001, s_t = 0.010 }\npolicy = "fixed_k"\n'


def checked(recorded: Path, folder: Path, claim: str) -> Checked:
    """The one claim of these lines, evaluated."""
    (found,) = check_files([beside(recorded, folder, f'{HEAD}[[claim]]\nname = "it"\n{claim}')])
    return found


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
def test_all_that_a_value_may_be_decides(low: float, high: float, verdict: str) -> None:
    assert judge(Estimate(low, low, high), (1.0, 2.0), outside="drifted") == verdict
    assert judge(Estimate(-low, -high, -low), (-2.0, -1.0), outside="drifted") == verdict


def test_an_order_needs_every_step() -> None:
    leads, tied, trails = Estimate(1, 0.5, 1.5), Estimate(0.1, -0.1, 0.3), Estimate(-1, -1.5, -0.5)
    assert judge_order([leads, leads]) == "holds"
    assert judge_order([leads, tied]) == "not decidable"
    assert judge_order([tied, trails]) == "contradicted"


@pytest.mark.parametrize("quantity", [*RATIOS, "oracle_regret"])
def test_quantities_are_those_of_a_prediction(recorded: Path, tmp_path: Path, quantity: str) -> None:
    found = checked(recorded, tmp_path, f'settings = {{ k = 3 }}\nquantity = "{quantity}"\nat_least = -1e9')
    assert found.found is not None and found.verdict == "holds"
    trace, cost = specsim.read_trace(recorded / "trace"), specsim.ConstantCost(0.001, 0.010)
    said = specsim.predict(trace, cost, "fixed_k", k=3)
    wanted = {
        "speedup": said.speedup.estimate,
        "v_d": said.v_d,
        "r_d": said.r_d,
        "hm": said.hm,
        "tau": said.tau,
        "mean_accepted_tokens": said.accepted / said.rounds,
        "mean_draft_tokens": said.drafted / said.rounds,
        "tokens_per_s": said.output_tokens / said.seconds,
        "autoregressive_tokens_per_s": said.output_tokens / said.ar_seconds,
        "oracle_regret": said.oracle_regret,
    }
    assert found.found.estimate == pytest.approx(wanted[quantity], rel=1e-12)


def test_sequences_may_count_alike(recorded: Path, tmp_path: Path) -> None:
    found = checked(recorded, tmp_path, 'settings = { k = 3 }\naverage = "sequences"\nat_least = 0.0')
    replayed = specsim.replay(
        specsim.read_trace(recorded / "trace"), specsim.ConstantCost(0.001, 0.010), "fixed_k", k=3
    )
    assert found.found is not None
    assert found.found.estimate == pytest.approx(float(np.mean(replayed.autoregressive_s / replayed.speculative_s)))


def test_a_value_is_of_this_record_a_bound_of_prompts(recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    value = checked(recorded, tmp_path, "settings = { k = 4 }\nexpected = 2.33\ntolerance = 0.01")
    bound = checked(recorded, tmp_path / "b", "settings = { k = 4 }\nat_least = 2.3")
    assert value.verdict == "holds" and value.found is not None and value.found.low == value.found.high
    assert bound.verdict == "not decidable" and bound.found is not None and bound.found.low < 2.3 < bound.found.high
    assert value.passed and not bound.passed


def test_a_known_verdict_passes_and_another_fails(recorded: Path, tmp_path: Path) -> None:
    known = 'settings = { k = 4 }\nat_most = 1.0\nverdict = "contradicted"'
    assert checked(recorded, tmp_path, known).passed
    (tmp_path / "b").mkdir()
    other = checked(recorded, tmp_path / "b", known.replace("at_most", "at_least"))
    assert other.verdict == "holds" and not other.passed and "known as contradicted" in other.message


def test_neighbours_of_an_order_are_compared_in_pairs(recorded: Path, tmp_path: Path) -> None:
    """K = 4 and K = 2 differ by less than their intervals are wide, and yet significantly."""
    found = checked(recorded, tmp_path, "order = [{ settings = { k = 4 } }, { settings = { k = 2 } }]")
    assert found.verdict == "holds" and "fixed_k(k=4) leads by +" in found.recomputed
    (tmp_path / "b").mkdir()
    tied = checked(recorded, tmp_path / "b", "order = [{ settings = { k = 6 } }, { settings = { k = 4 } }]")
    assert tied.verdict == "not decidable"


def test_a_ratio_is_of_two_subjects(recorded: Path, tmp_path: Path) -> None:
    found = checked(
        recorded,
        tmp_path,
        "ratio = [{ settings = { k = 4 } }, { settings = { k = 1 } }]\nexpected = 1.435\ntolerance = 0.01",
    )
    assert found.verdict == "holds" and found.found is not None
    assert found.found.estimate == pytest.approx(2.329 / 1.623, abs=2e-3)


def test_a_difference_is_taken_in_pairs_of_sequences(recorded: Path, tmp_path: Path) -> None:
    trace, cost = specsim.read_trace(recorded / "trace"), specsim.ConstantCost(0.001, 0.010)
    four, two = (specsim.replay(trace, cost, "fixed_k", k=k) for k in (4, 2))
    wanted = paired_difference(four.autoregressive_s, four.speculative_s, two.speculative_s).difference
    both = "difference = [{ settings = { k = 4 } }, { settings = { k = 2 } }]\n"
    found = checked(recorded, tmp_path, both + "at_least = 0.0")
    assert found.verdict == "holds" and found.found == wanted
    (tmp_path / "b").mkdir()
    value = checked(recorded, tmp_path / "b", both + f"expected = {wanted.estimate}\ntolerance = 1e-9")
    assert value.verdict == "holds" and value.found == Estimate.exact(wanted.estimate)


def test_an_interval_is_claimed_beside_its_value(recorded: Path, tmp_path: Path) -> None:
    said = specsim.predict(
        specsim.read_trace(recorded / "trace"), specsim.ConstantCost(0.001, 0.010), "fixed_k", k=4
    ).speedup
    claim = "settings = {{ k = 4 }}\nexpected = {:.3f}\ninterval = [{:.3f}, {:.3f}]\ntolerance = 0.0005"
    found = checked(recorded, tmp_path, claim.format(said.estimate, said.low, said.high))
    assert found.verdict == "holds" and found.interval == said and f"{said.high:.4g}]" in found.recomputed
    for number, moved in enumerate([(0, 0, 0.002), (0, -0.002, 0), (0.002, 0, 0)]):
        (tmp_path / str(number)).mkdir()
        ends = (a + b for a, b in zip((said.estimate, said.low, said.high), moved, strict=True))
        assert checked(recorded, tmp_path / str(number), claim.format(*ends)).verdict == "drifted"


def test_replays_and_draft_limits_are_those_of_a_leaderboard(recorded: Path, tmp_path: Path) -> None:
    """A policy that draws, averaged over three replays, on the trace as if recorded to five tokens."""
    trace, cost = specsim.read_trace(recorded / "trace"), specsim.ConstantCost(0.001, 0.010)
    (board,) = leaderboard(
        {"it": trace}, [cost], kinds=[BetaTS], max_drafts=[5], trials=2, replays=3, sensitivity=False, jobs=1
    )
    row = next(row for row in board.rows if row.label == "beta_ts, weak prior")
    subject = 'policy = "beta_ts"\nsettings = { alpha0 = 1.0, beta0 = 1.0 }\nmax_draft_tokens = 5\ntuning_share = 0.5\n'
    for quantity, value in (("speedup", row.prediction.speedup), ("oracle_regret", row.prediction.oracle_regret)):
        (tmp_path / quantity).mkdir()
        found = checked(
            recorded, tmp_path / quantity, f'{subject}replays = 3\nquantity = "{quantity}"\nat_least = -9.0'
        )
        assert found.found is not None
        own = found.found if quantity == "speedup" else found.found.estimate
        assert own == value if quantity == "speedup" else own == pytest.approx(value, rel=1e-12)
    (tmp_path / "one").mkdir()
    single = checked(recorded, tmp_path / "one", f"{subject}at_least = 0.0")
    assert single.found is not None and single.found != row.prediction.speedup


def test_a_policy_that_learns_is_reported_on_the_rest(recorded: Path, tmp_path: Path) -> None:
    found = checked(recorded, tmp_path, 'policy = "renewal_stop"\ntuning_share = 0.25\nat_least = 1.0')
    assert found.verdict == "holds" and found.seconds is not None
    assert len(found.seconds[0]) == 18


def test_with_a_tuning_share_every_policy_is_reported_on_the_rest(recorded: Path, tmp_path: Path) -> None:
    """So that one that learns and one that does not are compared on the same sequences."""
    order = 'order = [{ policy = "fixed_k", settings = { k = 4 } }, { policy = "renewal_stop" }]'
    for number, share in enumerate(["", "tuning_share = 0.5\n"]):
        (tmp_path / str(number)).mkdir()
        found = checked(recorded, tmp_path / str(number), share + order)
        assert found.seconds is not None and len(found.seconds[0]) == (12 if share else 24)
    priced = PricedTrace(specsim.read_trace(recorded / "trace"), specsim.ConstantCost(0.001, 0.010))
    part = priced.select(split_sequences(priced.trace, tuning_share=0.5)[1])
    both = [
        specsim.predict(part.trace, part.cost, "fixed_k", k=4),
        specsim.predict(priced.trace, part.cost, "renewal_stop"),
    ]
    lead = both[0].speedup.estimate / both[1].speedup.estimate - 1
    assert found.steps[0].estimate == pytest.approx(lead, rel=1e-9)


def with_rounds(recorded: Path, folder: Path, changes: int = 0) -> Checked:
    """Identity of the rounds of K = 3 with those that a real run left, of which so many did something else."""
    trace, cost = specsim.read_trace(recorded / "trace"), specsim.ConstantCost(0.001, 0.010)
    rounds = specsim.replay(trace, cost, "fixed_k", k=3).rounds.to_frame().drop(columns=["verified", "last"])
    rounds["sequence_id"] = trace.sequence_id[rounds.pop("sequence")]
    rounds.loc[: changes - 1, "drafted"] += 1
    columns = {"policy": ["fixed_k(k=3)"] * len(rounds), **{name: rounds[name].to_list() for name in rounds}}
    write_table(pa.table(columns), folder / "rounds.parquet")
    claim = 'settings = { k = 3 }\nquantity = "rounds_identical_percent"\nrounds = "rounds.parquet"\nat_least = 100'
    return checked(recorded, folder, claim)


def test_rounds_are_compared_with_those_of_a_real_run(recorded: Path, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    same, other = with_rounds(recorded, tmp_path), with_rounds(recorded, tmp_path / "b", changes=7)
    assert same.verdict == "holds" and same.found == Estimate(100, 100, 100)
    rounds = specsim.replay(
        specsim.read_trace(recorded / "trace"), specsim.ConstantCost(1, 1), "fixed_k", k=3
    ).num_rounds
    assert other.found is not None and other.found.estimate == pytest.approx(100 * (1 - 7 / rounds.sum()))
    assert not other.passed


def validation(folder: Path, **changes: Any) -> Path:
    """A folder with a validation of two policies over three sequences."""
    row = {
        "label": "fixed_k(k=2)",
        "policy": "fixed_k",
        "measured": {"estimate": 1.5, "low": 1.4, "high": 1.6},
        "sequence_seconds": [1.0, 2.0, 3.0],
        "sequence_tokens": [10, 20, 30],
        "rounds_identical_percent": 100.0,
        "error_percent": -0.7,
    }
    slower = {
        **row,
        "label": "adaedl(gamma=0.2)",
        "policy": "adaedl",
        "measured": {"estimate": 1.364, "low": 1.3, "high": 1.6},
        "sequence_seconds": [1.1, 2.2, 3.3],
    }
    document = {
        "kind": "specsim-validation",
        "noise_floor_percent": 1.0,
        "median_abs_error_percent": 0.7,
        "autoregressive_sequence_seconds": [1.5, 3.0, 4.5],
        "rows": [row, slower],
    }
    folder.mkdir(exist_ok=True)
    (folder / "validation.json").write_text(json.dumps({**document, **changes}))
    return folder


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
    validation(tmp_path / "run")
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
def test_a_run_that_cannot_tell_is_refused(tmp_path: Path, changes: dict[str, Any], claim: str) -> None:
    validation(tmp_path / "run", **changes)
    path = tmp_path / "run.claims.toml"
    path.write_text(f'version = 1\n[[claim]]\nname = "it"\nvalidation = "run"\n{claim}')
    with pytest.raises(InputError) as refused:
        check_files([path])
    assert "claim 'it'" in str(refused.value) and "\n" not in str(refused.value)


def test_any_number_of_a_document(tmp_path: Path) -> None:
    validation(tmp_path / "run")
    path = tmp_path / "value.claims.toml"
    lines = ["version = 1", '[defaults]\ndocument = "run/validation.json"']
    ways = {
        "by position": ('["rows", 0, "error_percent"]', "expected = -0.7\ntolerance = 0", "holds"),
        "by values": ('["rows", { policy = "adaedl" }, "measured"]', "at_least = 1.32", "not decidable"),
        "of this record": (
            '["rows", { policy = "adaedl" }, "measured"]',
            'at_least = 1.32\nabout = "record"',
            "holds",
        ),
    }
    lines += [f'[[claim]]\nname = "{name}"\nat = {at}\n{claim}' for name, (at, claim, _) in ways.items()]
    path.write_text("\n".join(lines))
    assert [one.verdict for one in check_files([path])] == [verdict for *_, verdict in ways.values()]
    for at in ('["rows", 2, "error_percent"]', '["rows", { policy = "x" }]', '["none"]', '["kind"]', '["kind", "x"]'):
        path.write_text(
            f'version = 1\n[[claim]]\nname = "it"\ndocument = "run/validation.json"\nat = {at}\nat_least = 1'
        )
        with pytest.raises(InputError, match="validation.json"):
            check_files([path])


def test_a_list_of_a_document_is_its_mean_over_sequences(tmp_path: Path) -> None:
    """Two lists of one document are compared in pairs."""
    a, b = [2.0, 4.0, 9.0], [1.1, 1.9, 4.5]
    (tmp_path / "it.json").write_text(json.dumps({"a": a, "b": b, "c": [1.0, -1.0], "d": [], "e": [1.0, 0.0]}))
    path = tmp_path / "it.claims.toml"
    claims = {
        "mean": 'at = ["a"]\nexpected = 5\ntolerance = 0',
        "ratio": 'ratio = [{ at = ["a"] }, { at = ["b"] }]\nexpected = 2\ntolerance = 1e-9',
        "paired": 'ratio = [{ at = ["a"] }, { at = ["b"] }]\nat_least = 1.7\nat_most = 2.3',
        "wide": 'at = ["a"]\nat_least = 4',
        "with a zero": 'at = ["e"]\nexpected = 0.5\ntolerance = 0',
    }
    lines = [f'[[claim]]\nname = "{name}"\n{claim}' for name, claim in claims.items()]
    path.write_text("\n".join(['version = 1\n[defaults]\ndocument = "it.json"', *lines]))
    found = {one.claim.name: one for one in check_files([path])}
    assert [one.verdict for one in found.values()] == ["holds", "holds", "holds", "not decidable", "holds"]
    for at in "cd":
        path.write_text(f'version = 1\n[[claim]]\nname = "it"\ndocument = "it.json"\nat = ["{at}"]\nat_least = 1')
        with pytest.raises(InputError, match="is no number"):
            check_files([path])


def test_two_lists_of_a_document_are_sum_over_sum(tmp_path: Path) -> None:
    """As a speedup is of the baseline's seconds and the policy's; two of them differ in pairs."""
    base, a, b = [9.0, 4.0, 7.0], [3.0, 2.0, 2.5], [4.0, 3.0, 3.5]
    (tmp_path / "it.json").write_text(
        json.dumps({"base": base, "rows": [a, b], "short": [1.0], "no": [1.0, 0.0, 1.0], "less": [1, -1, 1]})
    )
    path = tmp_path / "it.claims.toml"
    head = 'version = 1\n[defaults]\ndocument = "it.json"\nat = ["base"]\n[[claim]]\nname = "it"\n'
    said, apart = ratio_interval(base, a), paired_difference(base, a, b).difference
    path.write_text(f'{head}over = ["rows", 0]\nat_least = 0.0')
    assert check_files([path])[0].found == said
    path.write_text(f'{head}difference = [{{ over = ["rows", 0] }}, {{ over = ["rows", 1] }}]\nat_least = 0.0')
    assert check_files([path])[0].found == apart
    for over, word in (("short", "different lengths"), ("no", "no list of positive"), ("none", "no such key")):
        path.write_text(f'{head}over = ["{over}"]\nat_least = 0.0')
        with pytest.raises(InputError, match=word):
            check_files([path])
    path.write_text(f'{head.replace("base", "less")}over = ["rows", 0]\nat_least = 0.0')
    with pytest.raises(InputError, match="at leads to is no list of numbers from 0 on"):
        check_files([path])


def test_what_changed_is_read_again(recorded: Path, tmp_path: Path) -> None:
    """Documents, traces and costs are kept between claims, but not once their files are others."""
    beside(recorded, tmp_path, "")
    document, cost, path = tmp_path / "it.json", tmp_path / "cost.json", tmp_path / "it.claims.toml"
    replayed = 'trace = "trace"\ncost = "cost.json"\npolicy = "fixed_k"\nsettings = { k = 4 }\nat_least = 0.0'
    path.write_text(
        f'version = 1\n[[claim]]\nname = "a"\ndocument = "it.json"\nat = ["a"]\nat_least = 0.0\n'
        f'[[claim]]\nname = "b"\n{replayed}'
    )
    found = []
    for value, s_d in ((1.5, 0.001), (2.25, 0.0005)):
        document.write_text(json.dumps({"a": value}))
        cost.write_text(json.dumps({"s_d": s_d, "s_t": 0.010}))
        found.append([one.found.estimate for one in check_files([path]) if one.found is not None])
    assert [value for value, _ in found] == [1.5, 2.25] and found[1][1] > 1.1 * found[0][1]


def test_a_shorter_limit_is_the_shorter_run(recorded: Path) -> None:
    """Replays of the first 20 tokens are the rounds that the whole run's first 20 tokens allow."""
    trace = specsim.read_trace(recorded / "trace")
    short = trace.shortened(20)
    assert short.output_tokens.tolist() == [20] * trace.sequences and trace.shortened(60).depth == trace.depth
    rows = trace.position < 20
    assert (short.token == trace.token[rows]).all()
    assert (short.match_len.astype(int) + short.position <= 20).all()
    assert (short.draft_limit <= 19 - short.position).all()
    cost = specsim.ConstantCost(0.001, 0.010)
    whole, cut = (specsim.replay(one, cost, "fixed_k", k=4).rounds.rows() for one in (trace, short))
    first = [row for row in whole if row[1] + row[3] + 1 <= 20 and row[1] + 4 < 20]  # untouched by the limit
    assert set(first) <= set(cut) and len(first) > 0.5 * len(cut)
    with pytest.raises(InputError, match="max_output_tokens"):
        trace.shortened(0)


def test_nothing_that_is_claimed_is_nan(recorded: Path, tmp_path: Path) -> None:
    found = checked(recorded, tmp_path, "settings = { k = 4 }\nat_least = 0.0")
    assert found.found is not None and all(math.isfinite(value) for value in found.found.as_dict().values())
