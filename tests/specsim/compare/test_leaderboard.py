"""The leaderboard: ranks what it says, tunes only on its part, averages draws, and shows the rule that it learned."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID
from specsim.compare.document import (
    CSV_COLUMNS,
    as_document,
    combined,
    results_csv,
    table_text,
    trace_names,
    write_results,
)
from specsim.compare.leaderboard import Board, leaderboards, learned_rule
from specsim.cost.model import ConstantCost
from specsim.io.errors import InputError
from specsim.learn import search
from specsim.learn.settings import SearchSettings
from specsim.policy.base import Variant, setting
from specsim.policy.chain.max_confidence import MaxConfidence
from specsim.policy.registry import POLICIES, make_policy
from specsim.replaying.intervals import Estimate, paired_difference
from specsim.replaying.oracles import chain_oracle_seconds
from specsim.replaying.prediction import predict_policy
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.report.board import BoardOptions, EngineChoice, Leaderboard, Recommended
from specsim.report.leaderboard import render_leaderboard
from specsim.report.page import recommendation_text
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace
from tests.specsim.report.test_report import Page
from tests.support.reference import RampCost, build_trace

COST = RampCost()
KINDS = [POLICIES[name] for name in ("fixed_k", "max_confidence", "beta_ts", "p_min", "space_k", "cali_ts")]


def honest_trace(seed: int = 0, sequences: int = 16, depth: int = 8, **optional: np.ndarray) -> Trace:
    """A drafter whose confidence is its chance of being right."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(30, 60, sequences).tolist()
    confidence = rng.beta(2.0, 0.8, (sum(lengths), depth))
    return build_trace(rng, rng.random(confidence.shape) < confidence, lengths, confidence=confidence, **optional)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return honest_trace()


@pytest.fixture(scope="module")
def board(trace: Trace) -> Board:
    return leaderboards({"honest": trace}, [COST], kinds=KINDS, trials=12, replays=3)[0]


def parts(trace: Trace) -> tuple[Trace, Trace]:
    tuning, held = split_sequences(trace)
    return trace.select(tuning), trace.select(held)


def spoiled(trace: Trace) -> Trace:
    """Nothing is accepted any more in the held-out sequences."""
    _, held = split_sequences(trace)
    rows = np.concatenate([np.arange(trace.offsets[s], trace.offsets[s + 1]) for s in held])
    match = trace.match_len.copy()
    match[rows] = 0
    return dataclasses.replace(trace, match_len=match)


def test_rows_are_predictions_on_the_held_out_part_best_first(trace: Trace, board: Board) -> None:
    _, holdout = parts(trace)
    speedups = [row.prediction.speedup.estimate for row in board.rows]
    assert speedups == sorted(speedups, reverse=True)
    for row in board.rows:
        if row.policy.name != "beta_ts":
            assert row.prediction == predict_policy(PricedTrace(holdout, COST), row.policy) and row.replays == 1
    ar_s = replay(holdout, make_policy("fixed_k"), cost_table(holdout, COST)).autoregressive_s
    best = chain_oracle_seconds(holdout, cost_table(holdout, COST))
    assert board.oracle.estimate == pytest.approx(ar_s.sum() / best.sum()) and board.oracle.estimate > speedups[0]
    for row in board.rows:
        regret = board.oracle.estimate / row.prediction.speedup.estimate - 1
        assert row.prediction.oracle_regret == pytest.approx(regret) and regret > 0


def test_a_papers_table_has_the_speedup_of_every_task(trace: Trace) -> None:
    """As a replay of that task's held-out sequences alone has it."""
    domains = np.array(["chat", "math & code"] * 8)
    board = leaderboards({"honest": dataclasses.replace(trace, domain=domains)}, [COST], kinds=KINDS[:2], trials=3)[0]
    document = as_document([board], BoardOptions())
    rows = list(csv.DictReader(io.StringIO(table_text(document, ".csv"))))
    assert list(rows[0]) == ["Method", "chat", "math & code", "#MAT", "Overall", "Low", "High"]
    baseline, *rows, oracle = rows
    assert (baseline["Overall"], baseline["chat"]) == ("1.0000", "1.0000")
    assert float(oracle["Overall"]) == pytest.approx(board.oracle.estimate, abs=1e-4)
    _, held = split_sequences(dataclasses.replace(trace, domain=domains))
    for row, printed in zip(board.rows, rows, strict=True):
        for name in ("chat", "math & code"):
            part = PricedTrace(trace.select([s for s in held if domains[s] == name]), COST)
            assert float(printed[name]) == pytest.approx(float(part.replay(row.policy).speedup), abs=1e-4)
        assert float(printed["Overall"]) == pytest.approx(row.speedup.estimate, abs=1e-4)
        assert float(printed["Low"]) == pytest.approx(row.speedup.low, abs=1e-4)
    latex = table_text(document, ".tex")
    assert latex.count(r"\\") == 3 + len(board.rows) and r"math \& code & \#MAT & Overall" in latex
    top = board.rows[0].speedup
    assert f"\\textbf{{{top.estimate:.2f} [{top.low:.2f}, {top.high:.2f}]}}" in latex
    assert latex.count("textbf") == 1 + sum(row.tied for row in board.rows)
    assert "Predicted speedup" in latex


def test_the_simplest_policy_within_a_percent_is_recommended(board: Board) -> None:
    fixed, *others = sorted(board.rows, key=lambda row: row.policy.name != "fixed_k")

    def at(row: Any, value: float) -> Any:
        return dataclasses.replace(row, speedup=Estimate(value, value, value))

    assert dataclasses.replace(board, rows=[at(others[0], 2.0), at(fixed, 1.99)]).recommended.policy == fixed.policy
    assert dataclasses.replace(board, rows=[at(others[0], 2.0), at(fixed, 1.97)]).recommended.policy == others[0].policy


def test_a_rule_that_engines_lack_stands_beside_their_best(board: Board) -> None:
    leader, *others = board.document.rows
    rows = [structs.replace(leader, speedup=Estimate(2.0, 1.5, 2.5)), *others]
    fixed = next(row for row in rows if row.policy == "fixed_k")
    other = next(row for row in rows if row.policy != "fixed_k")
    recommended = Recommended(other.label, 1.0, {}, EngineChoice(fixed.label, {"vllm": "--flag"}))
    own, engines, flag = recommendation_text(structs.replace(board.document, rows=rows, recommended=recommended))
    assert own.startswith(f"Recommended: {other.label} (") and f"their best: {fixed.label} (" in engines
    assert flag == "vllm: --flag"


def test_none_is_recommended_where_none_is_significantly_faster(board: Board) -> None:
    unsure = [dataclasses.replace(row, speedup=Estimate(1.05, 0.98, 1.12)) for row in board.rows]
    document = as_document([dataclasses.replace(board, rows=unsure)], BoardOptions())
    assert document.boards[0].recommended is None
    assert "Recommended" not in render_leaderboard(document)


def test_the_page_says_that_it_predicts_with_which_error_and_what_to_use(board: Board) -> None:
    document = as_document([dataclasses.replace(board, cost_band=(0.5, 2.0))], BoardOptions(cost="h100.json", batch=8))
    page = " ".join(Page(render_leaderboard(document)).words)
    top, speedup = board.rows[0], board.rows[0].speedup
    assert f"{speedup.low / 2:.2f} to {2 * speedup.high:.2f} with the error of such costs" in page
    assert "costs: h100.json \u00b7 batch 8" in page and "Predicted. " in page
    assert board.recommended is not None and f"Recommended: {board.recommended.label} (" in page
    assert f"{1 / sum(top.token_s):,.1f} tok/s" in page


def test_forms_and_reasons_are_all_there(board: Board) -> None:
    labels = {row.label for row in board.rows}
    assert labels >= {"fixed_k, tuned", "fixed_k, K = 4", "max_confidence, dynamic", "max_confidence, static"}
    assert labels >= {"beta_ts, weak prior", "beta_ts, strong prior", "beta_ts, tuned", "p_min, default"}
    assert dict(board.skipped).keys() == {"space_k", "cali_ts"}
    assert "score" in dict(board.skipped)["cali_ts"]
    assert {row.label for row in board.rows if not row.tuned} == {
        "fixed_k, K = 4", "p_min, default", "beta_ts, weak prior", "beta_ts, strong prior"
    }  # fmt: skip


def test_tuning_never_sees_the_held_out_part(trace: Trace, board: Board) -> None:
    other = leaderboards({"spoiled": spoiled(trace)}, [COST], kinds=KINDS[:2], trials=12, replays=3)[0]
    settings = {row.label: (row.policy, row.train_speedup) for row in board.rows}
    assert {row.label: (row.policy, row.train_speedup) for row in other.rows}.items() <= settings.items()
    assert other.rows[0].prediction.v_d == 0.0


def test_differences_to_the_leader_hold_at_once_and_insignificant_ones_are_marked(trace: Trace, board: Board) -> None:
    _, holdout = parts(trace)
    ar_s = replay(holdout, make_policy("fixed_k"), cost_table(holdout, COST)).autoregressive_s
    leader = board.rows[0]
    assert leader.to_leader is None and not leader.tied
    for row in board.rows[1:]:
        alone = paired_difference(ar_s, leader.speculative_s, row.speculative_s).difference
        assert row.to_leader.difference.estimate == alone.estimate >= 0
        if alone.low < alone.high:
            assert row.to_leader.difference.low < alone.low and row.to_leader.difference.high > alone.high
        assert row.speedup.low < row.prediction.speedup.low and row.speedup.high > row.prediction.speedup.high
        assert row.document({}).as_dict()["speedup"] == row.speedup.as_dict()
        assert row.tied == (row.to_leader.difference.low <= 0)
    assert any(row.tied for row in board.rows)
    dear = leaderboards({"more": honest_trace(sequences=80)}, [ConstantCost(0.5, 1.0)], kinds=KINDS[:1], trials=8)[0]
    assert not all(row.tied for row in dear.rows[1:])


def test_policies_that_draw_are_averaged_over_seeds(trace: Trace, board: Board) -> None:
    _, holdout = parts(trace)
    row = next(row for row in board.rows if row.label == "beta_ts, weak prior")
    replays = [replay(holdout, row.policy, cost_table(holdout, COST), seed=seed, log=True) for seed in range(3)]
    assert row.replays == 3
    np.testing.assert_allclose(row.speculative_s, np.mean([r.speculative_s for r in replays], axis=0))
    lengths = np.concatenate([r.rounds.drafted for r in replays])
    assert row.mean_length == pytest.approx(lengths.mean())
    assert row.prediction.v_d == pytest.approx(sum(r.accepted.sum() for r in replays) / lengths.sum())
    assert sum(row.token_s) == pytest.approx(row.speculative_s.sum() / holdout.output_tokens.sum())
    assert row.length_quantile(0.5) == int(np.quantile(lengths, 0.5, method="inverted_cdf"))


def test_a_trace_cut_short_is_the_trace_with_shorter_drafts(trace: Trace) -> None:
    cut = trace.shallower(3)
    assert cut.depth == cut.meta["depth"] == 3 and cut.match_len.max() <= 3
    policy = MaxConfidence(lambda0=0.5, dynamic=False, max_draft_tokens=3)
    short, whole = (replay(part, policy, cost_table(part, COST), log=True) for part in (cut, trace))
    assert short.rounds.rows() == whole.rounds.rows()
    for depth in (0, 9):
        with pytest.raises(InputError, match="recorded to depth 8"):
            trace.shallower(depth)


def test_a_board_per_maximal_draft_leaves_out_what_drafts_longer(trace: Trace) -> None:
    boards = leaderboards({"a": trace}, [COST], kinds=KINDS[:1], max_drafts=[3, 8], trials=8)
    assert [board.max_draft for board in boards] == [3, 8]
    assert [len(board.rows) for board in boards] == [1, 2]
    assert "4 is more than the 3 tokens" in dict(boards[0].skipped)["fixed_k, K = 4"]
    assert boards[0].rows[0].policy.settings["k"] <= 3
    assert boards[0].oracle.estimate < boards[1].oracle.estimate


def test_the_answer_depends_on_nothing_but_its_arguments(trace: Trace, board: Board) -> None:
    seen: list[tuple[str, int, int]] = []
    again = leaderboards(
        {"honest": trace}, [COST], kinds=KINDS, trials=12, replays=3, jobs=1, progress=lambda *call: seen.append(call)
    )[0]
    assert json.dumps(again.as_dict()) == json.dumps(board.as_dict())
    assert seen == [("honest, drafts up to 8", done, len(board.rows)) for done in range(1, len(board.rows) + 1)]


def test_several_traces_are_combined_by_geometric_mean_and_rank(trace: Trace) -> None:
    traces = {"first": trace, "second": honest_trace(1, sequences=10)}
    costs = [COST, ConstantCost(1e-3, 2e-3)]
    boards = leaderboards(traces, costs, kinds=KINDS[:2], trials=6)
    assert [board.trace for board in boards] == ["first", "second"]
    standings = combined(boards)
    assert len(standings) == 4
    for standing in standings:
        places = [[row.label for row in board.rows].index(standing.label) for board in boards]
        assert standing.ranks == [place + 1 for place in places] and standing.mean_rank == np.mean(standing.ranks)
        speedups = [board.rows[place].prediction.speedup.estimate for board, place in zip(boards, places, strict=True)]
        assert standing.speedup == pytest.approx(math.sqrt(math.prod(speedups)))
    alone = leaderboards({"second": traces["second"]}, costs[1:], kinds=KINDS[:2], trials=6)
    assert alone[0].as_dict() == boards[1].as_dict()


def test_nothing_to_rank_and_bad_arguments_are_refused(trace: Trace) -> None:
    with pytest.raises(InputError, match="serves none of the policies .*space_k: meant for"):
        leaderboards({"a": trace}, [COST], kinds=[POLICIES["space_k"]])
    with pytest.raises(InputError, match="2 costs for 1 traces"):
        leaderboards({"a": trace}, [COST, COST])
    with pytest.raises(InputError, match="replays=0"):
        leaderboards({"a": trace}, [COST], replays=0)


def test_an_interrupted_search_ends_the_board(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy tuned in part would stand among the others with nothing said of it."""
    searched = search._replay_points

    def interrupted(*job: Any) -> None:
        searched(*job)
        raise KeyboardInterrupt

    monkeypatch.setattr(search, "_replay_points", interrupted)
    with pytest.raises(KeyboardInterrupt):
        leaderboards({"a": trace}, [COST], kinds=[POLICIES["fixed_k"]], trials=4, jobs=1)


@dataclasses.dataclass(frozen=True)
class Learner(MaxConfidence):
    """Learns a table from the data: the mean confidence above a floor."""

    table: tuple[float, ...] = setting((0.5,), 0.0, 1.0, doc="learned")
    floor: float = setting(0.1, 0.0, 1.0, tune=(0.0, 0.8), doc="least confidence to learn from")
    rule: str = setting("mean", choices=("mean", "median"), tune=(0, 1), doc="what to learn")

    name = "learner"
    variants = (Variant("learned", {"lambda0": 0.2}, tuned=False),)

    @classmethod
    def fit(cls, settings: Any, train: Trace, table: Any) -> Learner:
        own = {"table": (float(train.confidence[train.confidence > settings.get("floor", 0.1)].mean()),), **settings}
        return cls(**own)


@pytest.fixture(scope="module")
def document(trace: Trace, board: Board) -> Leaderboard:
    other = leaderboards({"<b>other": honest_trace(1)}, [COST], kinds=[Learner, *KINDS[:2]], trials=6)
    return as_document([board, *other], BoardOptions(trials=12, cost="ramp & more"))


def test_the_report_shows_every_row_and_figure_and_escapes_names(document: Leaderboard) -> None:
    text = render_leaderboard(document)
    page = Page(text)
    assert page.names.count("svg") == 1 + 4 * len(document.boards)
    assert len(page.ids) == len(set(page.ids)), "no two figures share an id"
    for board in document.boards:
        for row in board.rows:
            assert f"{row.label}" in page.text
            assert f"{row.speedup:.3f}" in page.text
    assert "<b>other" in page.text and "<b>other" not in text and "ramp & more" in page.text
    assert "http" not in text.replace("http://www.w3.org/", ""), "nothing is fetched"
    assert render_leaderboard(document) == text
    with pytest.raises(InputError, match="specsim-leaderboard"):
        Leaderboard.from_json({**document.as_dict(), "kind": "specsim-profile"}, "specsim-leaderboard", "rank again")


def test_results_are_three_files_of_the_same_numbers(document: Leaderboard, tmp_path: Path) -> None:
    write_results(tmp_path / "out", document)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "leaderboard.csv",
        "leaderboard.json",
        "report.html",
    ]
    written = (tmp_path / "out" / "leaderboard.json").read_text()
    assert json.loads(written) == json.loads(json.dumps(document.as_dict()))
    lines = list(csv.DictReader(io.StringIO(results_csv(document))))
    rows = [(board.trace, rank, row) for board in document.boards for rank, row in enumerate(board.rows, 1)]
    assert len(lines) == len(rows) and tuple(lines[0]) == CSV_COLUMNS
    for line, (trace, rank, row) in zip(lines, rows, strict=True):
        assert (line["trace"], line["rank"], line["label"]) == (trace, str(rank), row.label)
        assert float(line["speedup"]) == row.speedup
        assert float(line["v_d"]) == row.v_d and float(line["oracle_regret"]) == row.oracle_regret


def test_traces_are_named_by_as_much_of_the_path_as_they_need(tmp_path: Path) -> None:
    assert trace_names([tmp_path / "a", tmp_path / "b"]) == ["a", "b"]
    assert trace_names([tmp_path / "a" / "trace", tmp_path / "b" / "trace"]) == ["a/trace", "b/trace"]
    with pytest.raises(InputError, match="given twice"):
        trace_names([tmp_path / "a", tmp_path / "a"])


S_D, S_T = 0.1, 1.0
CONSTANT = ConstantCost(S_D, S_T)


def signalling_trace(*, honest: bool, sequences: int = 40, depth: int = 8) -> Trace:
    """Tokens accepted with probabilities of their own; the confidence is that probability, or says nothing of it."""
    rng = np.random.default_rng(1)
    lengths = rng.integers(60, 100, sequences).tolist()
    chance = rng.beta(1.2, 0.6, (sum(lengths), depth))
    shown = chance if honest else rng.beta(1.2, 0.6, chance.shape)
    return build_trace(rng, rng.random(chance.shape) < chance, lengths, confidence=shown)


def halves(trace: Trace) -> tuple[PricedTrace, PricedTrace]:
    train, held = parts(trace)
    return PricedTrace(train, CONSTANT), PricedTrace(held, CONSTANT)


def seconds_by_hand(trace: Trace, least_path: float) -> float:
    """Draft while the product of the confidences is at least `least_path`, by a loop over rounds."""
    total = 0.0
    for start, end in zip(trace.offsets, trace.offsets[1:], strict=False):
        at = int(start)
        while at < end:
            path, drafted = 1.0, 0
            while drafted < min(trace.depth, int(trace.draft_limit[at])):
                path *= float(trace.confidence[at, drafted])
                drafted += 1
                if path < least_path:
                    break
            total += drafted * S_D + S_T
            at += min(drafted, int(trace.match_len[at])) + 1
    return total


def test_the_rule_is_as_fast_as_the_best_threshold_found_by_hand() -> None:
    """With signals that are the acceptance probabilities, the best rule is a threshold on their product."""
    train, held = halves(signalling_trace(honest=True, sequences=160))  # of fewer, chance moves the two by 2 %
    rule = learned_rule(train, SearchSettings(jobs=1))
    own_s = held.replay(rule).speculative_s.sum()
    best_s = min(seconds_by_hand(held.trace, least) for least in np.geomspace(0.02, 0.98, 40))
    oracle_s = chain_oracle_seconds(held.trace, held.table()).sum()
    assert own_s <= 1.02 * best_s and oracle_s < 0.9 * own_s


def test_without_information_the_rule_is_the_best_fixed_draft_length() -> None:
    """The oracle is as far ahead as ever; none of that is for a policy to gain."""
    train, held = halves(signalling_trace(honest=False))
    rule = learned_rule(train, SearchSettings(jobs=1))
    fixed_s = min(held.replay(make_policy("fixed_k", {"k": k})).speculative_s.sum() for k in range(1, 9))
    assert held.replay(rule).speculative_s.sum() == pytest.approx(fixed_s, rel=0.02)
    assert chain_oracle_seconds(held.trace, held.table()).sum() < 0.75 * fixed_s


def test_a_board_shows_the_gap_to_the_rule_beside_the_gap_to_the_oracle() -> None:
    trace = signalling_trace(honest=True)
    kinds = [POLICIES["fixed_k"], POLICIES["max_confidence"]]
    options = {"kinds": kinds, "trials": 8, "replays": 1}
    (board,) = leaderboards({"t": trace}, [CONSTANT], **options)
    train, held = halves(trace)
    rule = learned_rule(train, SearchSettings(jobs=1))
    assert board.rule == rule and rule is not None
    rule_s = held.replay(rule).speculative_s.sum()
    for row in board.rows:
        assert row.rule_gap == pytest.approx(row.speculative_s.sum() / rule_s - 1)
        assert row.rule_gap < row.prediction.oracle_regret
        assert row.document({}).learned_rule_gap == row.rule_gap
    (other,) = leaderboards({"t": spoiled(trace)}, [CONSTANT], **options)
    assert other.rule == rule  # it learns from the tuning sequences alone


def test_without_signals_there_is_no_rule() -> None:
    bare = generate(IID(0.8), sequences=20, output_tokens=60, depth=8)
    (board,) = leaderboards({"t": bare}, [CONSTANT], kinds=[POLICIES["fixed_k"]], trials=4)
    assert board.rule is None and board.as_dict()["learned_rule_speedup"] is None
    assert all(row.rule_gap is None for row in board.rows)
