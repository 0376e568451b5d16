"""The study of tree policies: its numbers against plain counts, and a report that tells them."""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specsim.cost.model import ConstantCost
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.tree.eagle2 import Eagle2
from specsim.policy.tree.optimal_tree import OptimalTree
from specsim.policy.tree.pct import PCT
from specsim.policy.tree.sparse_tree import SparseTree
from specsim.ranking.leaderboard import leaderboard
from specsim.replaying.priced import PricedTrace
from specsim.static_tree import shape as tree_shapes
from specsim.trace.trace import Trace
from studies import costs
from studies.common import parts, without_truncated
from studies.trees import facts, text
from studies.trees.run import write_figures
from tests.support.tree_traces import tree_trace

CONFIG = {"repeats": 2, 
    "target": "lab-deep",
    "prompts": 8, "max_new_tokens": 60, "tree_nodes": 24, "tree_width": 10, "depth": 6, "tuning_share": 0.5, "seed": 0,
    "paper": {
        "s_d": 1.1e-3, "s_t": 29.8e-3, "overhead_s": 4.9e-3, "node_s": 7e-6,
        "width": 5, "max_depth": 6, "leaf_threshold": 0.01,
    },
    "knee": {"tokens": 32},
}  # fmt: skip


@pytest.fixture(scope="module")
def trace() -> Trace:
    return tree_trace(1, sequences=8, depth=6, width=10, nodes=256)


def test_rounds_count_passes_nodes_and_tokens(trace: Trace) -> None:
    chain = facts.rounds_of(trace, FixedK(k=3))
    assert chain.passes == pytest.approx(chain.verified.estimate) and chain.truncated == 0
    star = facts.rounds_of(trace, SparseTree(children=(4.0, 0.0, 0.0, 0.0, 0.0)))
    # Each sequence's last round has no room for a draft where a round before left just one token.
    log = facts.passes_replay(trace, SparseTree(children=(4.0, 0.0, 0.0, 0.0, 0.0))).rounds
    drafted = log.drafted > 0
    assert star.passes == pytest.approx(drafted.mean())
    accepted = tree_shapes.accepted_tokens((4, 0, 0, 0, 0), trace.true_rank)
    starts = trace.offsets[log.sequence] + log.t
    assert star.tau.estimate == pytest.approx(1 + np.where(drafted, accepted[starts], 0).mean())


def test_pct_of_the_paper_has_no_more_nodes_as_it_narrows(trace: Trace) -> None:
    rows = facts.width_rows(trace, CONFIG)
    assert [row["width"] for row in rows] == list(range(1, 9))
    assert all(row["truncated"] <= 0.05 for row in rows)
    assert all(a["nodes"] <= b["nodes"] + 1e-9 for a, b in itertools.pairwise(rows))
    answer = facts.paper_answer(trace, CONFIG, ConstantCost(1.1e-3, 29.8e-3))
    assert answer.pct.verified.estimate == pytest.approx(rows[4]["nodes"])
    assert answer.node_share == pytest.approx(rows[4]["nodes"] / answer.eagle2.verified.estimate)
    assert answer.small == facts.rounds_of(trace, Eagle2(nodes=min(50, round(rows[4]["nodes"]))))


def test_what_too_few_nodes_truncate_is_not_compared(trace: Trace) -> None:
    small = tree_trace(1, sequences=8, depth=6, width=10, nodes=20)
    rows = facts.width_rows(small, CONFIG)
    assert len(rows) < 8 and all(row["truncated"] <= 0.05 for row in rows)
    answers = [facts.paper_answer(one, CONFIG, ConstantCost(1.1e-3, 29.8e-3)) for one in (trace, small)]
    assert [answer.comparable for answer in answers] == [True, False]
    words = [text.paper_words(answer) for answer in answers]
    assert "% of the nodes" in words[0] and words[1] == "not compared: too few nodes were recorded"


def test_a_claim_is_decided_only_where_its_interval_lies_on_one_side(trace: Trace) -> None:
    answer = facts.paper_answer(trace, CONFIG, ConstantCost(1.1e-3, 29.8e-3))
    least, most = (answer.tau_beyond(answer.tau_ratio + step) for step in (-0.2, 0.2))
    assert (text.side(least), text.side(answer.tau_beyond(answer.tau_ratio)), text.side(most)) == (1, 0, -1)
    alike = dataclasses.replace(answer, pct=answer.eagle2)
    assert text.paper_words(alike) == "100 % of the nodes (more than half), 100.0 % of tau (comparable)"


def test_rounds_of_domains_are_all_rounds(trace: Trace) -> None:
    policy = PCT(max_depth=6)
    found = facts.domain_rows(trace, {"PCT": policy})["PCT"]
    assert set(found) == {"code", "prose"}
    for domain, one in found.items():
        alone = trace.select(np.flatnonzero(trace.domain == domain))
        rounds, log = facts.rounds_of(alone, policy), facts.passes_replay(alone, policy).rounds
        assert (one["tau"], one["truncated"]) == (rounds.tau.estimate, rounds.truncated)
        assert one["nodes_mean"] == pytest.approx(rounds.verified.estimate) == pytest.approx(log.verified.mean())
        assert one["nodes_percentiles"][2] == np.median(log.verified)


def test_static_trees_by_size_leave_out_what_costs_do_not_cover(trace: Trace) -> None:
    class Small(ConstantCost):
        max_tree_tokens = 33

    train, holdout = parts(trace, CONFIG)
    dense, sparse = facts.static_sizes(train, holdout, {"all": ConstantCost(1, 9), "small": Small(1, 9)})
    assert [point["nodes"] for point in sparse] == list(facts.SIZES)
    for point in (*dense, *sparse):
        assert (point["speedups"]["small"] is None) == (point["nodes"] > 32)
        assert point["speedups"]["all"] > 0
    assert [point["nodes"] for point in dense] == sorted(point["nodes"] for point in dense)
    searched = {point["nodes"]: point["expected"] for point in sparse}
    assert all(point["expected"] <= searched.get(point["nodes"], np.inf) + 1e-9 for point in dense)


def validation_of(board: dict[str, Any]) -> dict[str, Any]:
    """A validation that measured every policy of a board 4 % slower than predicted."""
    rows = []
    for row in board["rows"]:
        measured = {key: value / 1.04 for key, value in row["speedup"].items()}
        role = "tuned" if row["tuned"] else "fixed_k" if row["policy"] == "fixed_k" else "fitted"
        rows.append(
            {
                **{key: row[key] for key in ("policy", "params", "label", "tau")},
                "role": "default" if row["policy"] == "eagle2" and not row["tuned"] else role,
                "predicted": row["speedup"],
                "measured": measured,
                "error_percent": 4.0,
                "train_speedup": row["train_speedup"],
                "ladder": {"eq14": None, "constant": 2.0, "profile": row["speedup"]["estimate"], "measured": 2.5},
                "rounds_identical_percent": 100.0,
                "measured_tau": row["tau"],
                "sequence_seconds": [1.04 * seconds for seconds in row["sequence_seconds"]],
            }
        )
    return {
        "rows": rows,
        "load": {"others_percent": 40.0, "stolen_percent": 0.0},
        "baseline": {"tokens_per_s": 71.43, "ms_per_token": 14.0},
        "null_arm": {"estimate": 1.001, "low": 0.996, "high": 1.006},
        "noise_floor_percent": 0.6,
        "sequences": board["sequences"],
        "dtype": "float32",
        "environment": {"device": "a machine", "threads": 1, "date": "2026-01-01"},
    }


def test_the_report_answers_with_the_numbers_of_the_runs(trace: Trace, tmp_path: Path) -> None:
    priced = {costs.MEASURED: ConstantCost(1.1e-3, 29.8e-3), **costs.paper_costs(CONFIG)}
    train, holdout = parts(trace, CONFIG)
    kinds = [FixedK, PCT, Eagle2, OptimalTree]
    boards = {
        name: without_truncated(
            {
                **leaderboard({"t": trace}, [cost], kinds=kinds, trials=2, sensitivity=False, jobs=1)[0].as_dict(),
                "baseline_s": PricedTrace(holdout, cost).baseline_s.tolist(),
            }
        )
        for name, cost in priced.items()
    }
    board = boards[costs.MEASURED]
    document = validation_of(board)
    document["autoregressive_sequence_seconds"] = board["baseline_s"]
    counted = {
        name: [asdict(facts.rounds_of(holdout, facts.policy_of(row))) for row in one["rows"]]
        for name, one in boards.items()
    }
    found = {
        "boards": boards,
        "rounds": counted,
        "measured": counted[costs.MEASURED],
        "paper": asdict(facts.paper_answer(trace, CONFIG, priced[costs.PAPER])),
        "widths": facts.width_rows(trace, CONFIG),
        "domains": facts.domain_rows(holdout, {"PCT": PCT(max_depth=6)}),
        "sizes": facts.static_sizes(train, holdout, priced),
        "trees": facts.best_static(boards, train),
        "calibration": {
            "draft probability": {"ece": 0.02, "log_loss_nats": 0.25},
            "calibrated": {"ece": 0.01, "log_loss_nats": 0.19},
        },
        "bins": facts.node_bins(holdout),
        "record_ratio": 3.25,
    }
    run = text.Run.of(document, json.loads(json.dumps(found, allow_nan=False)))
    write_figures(tmp_path, "one", run)
    report = text.report_text(CONFIG, {"one": run})
    answers = dict(text.answers([run]))
    assert answers["absolute error of predicted speedups of tree policies"] == (
        "median 4.00 % (target 3 %: missed), 90th percentile 4.00 % (target 5 %: met)"
    )
    assert "| one | 1.001 [0.996, 1.006] | 0.60 | 4.00, missed | 4.00, met |" in report
    assert "cost of a deep one" in report and "| 2.000 |" in report  # the ladder's constant rung
    assert "0.2500 nats, 0.0200; 0.1900 nats, 0.0100" in answers.values() and "3.25" in answers.values()
    leader = board["rows"][0]
    assert f"| {leader['label']} | {leader['speedup']['estimate']:.3f} [" in report
    # The policy that the study is about is not on these boards, which is said and not guessed.
    assert answers["hardware_pct less PCT, tuned, measured costs"] == "not on this board"
    ours = {**leader, "policy": "hardware_pct", "label": "hardware_pct, fitted"}
    with_ours = {name: {**one, "rows": [ours, *one["rows"]]} for name, one in boards.items()}
    answers = dict(text.answers([dataclasses.replace(run, boards=with_ours)]))
    other = facts.first(board["rows"], facts.labelled("pct, tuned"))
    ahead = leader["speedup"]["estimate"] - other["speedup"]["estimate"]
    assert answers["hardware_pct less PCT, tuned, measured costs"].startswith(f"{ahead:+.3f} [")
    for kind in ("widths", "sizes", "trees", "domains", "reliability"):
        assert f"](figures/one-{kind}.svg)" in report
        assert (tmp_path / f"one-{kind}.svg").is_file()
