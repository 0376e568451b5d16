"""Drafting ahead against a plain simulation with sets of prepared outcomes, closed forms and hand-worked rounds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import specsim
from specsim.cost.model import ConstantCost
from specsim.learn.draft_ahead import draft_ahead, learn_outcomes
from specsim.replaying.ahead import MISSED, READY, AheadSettings, Outcomes, reads_text_alone, replay_ahead
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from tests.support.checks import refusal
from tests.support.commands import call, json_of
from tests.support.tree_traces import tree_trace

COST = ConstantCost(s_d=0.25, s_t=1.0)
PAIRS = {"lab-model": "example:lab-deep-model", "lab-eagle": "example:lab-deep-eagle"}


def reference(trace: Trace, settings: AheadSettings, known: Outcomes) -> dict[tuple[int, int], bool]:
    """Whether the draft of every round was ready, by (sequence, t): outcomes are sorted, and the first are prepared."""
    ready: dict[tuple[int, int], bool] = {}
    for s in range(trace.sequences):
        begin, length = int(trace.offsets[s]), int(trace.output_tokens[s])
        ranks = trace.true_rank[begin : begin + length]  # type: ignore[index]
        t, prepared = 0, False
        origin = 0  # the position at which the drafter last drafted from the target's states
        while t < length:
            ready[s, t] = prepared
            origin = origin if prepared and not settings.text_alone else t
            remaining = int(trace.budget_tokens[s]) - t - 1
            limit = min(remaining, int(trace.draft_limit[begin + t]) if origin == t else remaining)
            drafted = min(settings.k, limit)
            rank_at = [int(ranks[origin, t - origin + i]) for i in range(drafted + 1)]
            accepted = next((i for i in range(drafted) if rank_at[i] != 0), drafted)
            chances = []
            for a in range(drafted + 1):
                if not settings.text_alone and t + a + 1 - origin + settings.k >= trace.depth:
                    continue
                places = range(t - origin, t - origin + drafted + 1)
                accept = [known.accept[begin + t, i] if origin == t else known.by_depth[i] for i in places]
                path = np.prod(accept[:a])
                if a == drafted:
                    chances.append((path * accept[a], -a, 0))
                for r, share in enumerate(known.rank[t - origin + a], start=1):
                    chances.append((path * (1 - accept[a]) * share, -a, -r))
            chances.sort(reverse=True)
            best = {(-a, -r) for chance, a, r in chances[: settings.prepared] if chance > 0}
            prepared = (accepted, rank_at[accepted]) in best
            t += accepted + 1
            if remaining - accepted - 1 <= 0:
                prepared = False  # nothing is left to draft
    return ready


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(("k", "prepared"), [(1, 1), (2, 3), (3, 8), (2, 16)])
def test_every_hit_is_that_of_sorted_outcomes(name: str, k: int, prepared: int) -> None:
    trace, cost = specsim.read_trace(f"example:{name}"), specsim.read_cost(PAIRS[name])
    settings = AheadSettings(k, prepared, pearl=False, own_device=True, text_alone=reads_text_alone(trace))
    known = learn_outcomes(trace, 16).on(trace)
    rounds = replay_ahead(trace, settings, known, cost_table(trace, cost))
    starts = np.flatnonzero(rounds.draft_of >= 0)
    sequence = np.searchsorted(trace.offsets, starts, side="right") - 1
    replayed = dict(
        zip(zip(sequence, starts - trace.offsets[sequence], strict=True), rounds.draft_of[starts] == READY, strict=True)
    )
    assert replayed == reference(trace, settings, known)
    assert rounds.hits.sum() == sum(replayed.values())


@pytest.mark.parametrize("name", PAIRS)
def test_without_preparation_it_is_the_replay_of_fixed_k(name: str) -> None:
    trace, cost = specsim.read_trace(f"example:{name}"), specsim.read_cost(PAIRS[name])
    known = learn_outcomes(trace, 1).on(trace)
    for k in (1, 4, 7):
        settings = AheadSettings(k, 0, pearl=False, own_device=True, text_alone=reads_text_alone(trace))
        rounds = replay_ahead(trace, settings, known, cost_table(trace, cost))
        plain = specsim.replay(trace, cost, "fixed_k", k=k)
        assert rounds.rounds.tolist() == plain.num_rounds.tolist()
        np.testing.assert_allclose(rounds.seconds, plain.speculative_s, rtol=1e-12)


def iid_trace(accept: float, shares: list[float], tokens: int) -> Trace:
    """A text in which every token is the first choice with this probability, and else of rank 1, 2, ... by shares."""
    rng = np.random.default_rng(3)
    rank = np.where(rng.random(tokens) < accept, 0, 1 + rng.choice(len(shares), p=shares, size=tokens))
    trace = specsim.generate(acceptance=accept, sequences=1, output_tokens=tokens, depth=5)
    ahead = np.arange(tokens)[:, None] + np.arange(5)
    ranks = np.where(ahead < tokens, rank[np.minimum(ahead, tokens - 1)], -1)
    return replace(
        trace,
        true_rank=ranks.astype(np.int16),
        match_len=np.logical_and.accumulate(ranks == 0, axis=1).sum(axis=1).astype(np.uint8),
    )


def test_hit_rate_and_seconds_of_independent_tokens_follow_their_formula() -> None:
    accept, shares, k, prepared = 0.7, [0.5, 0.3, 0.2], 3, 4
    trace = iid_trace(accept, shares, 200_000)
    known = Outcomes(np.full((200_000, 5), accept), np.full(5, accept), np.tile(shares, (5, 1)))
    settings = AheadSettings(k, prepared, pearl=False, own_device=True, text_alone=True)
    rounds = replay_ahead(trace, settings, known, cost_table(trace, COST))
    # 0.3 x 0.5 = 0.15 for a = 0, 0.7 x 0.15 = 0.105, 0.49 x 0.15 = 0.0735, 0.343 x 0.15 = 0.05145 for a = 3;
    # 0.3 x 0.3 = 0.09 for a = 0; 0.7^4 = 0.2401 for a = 3 and the first choice: the four largest are
    expected = 0.2401 + 0.15 + 0.105 + 0.09
    hits, chances = int(rounds.hits[0]), int(rounds.chances[0])
    assert abs(hits / chances - expected) < 4 * np.sqrt(expected * (1 - expected) / chances)
    # A round takes 1 s, and 0.75 s more where its draft was not ready; preparing takes 4 x 0.25 s, as long as the pass.
    assert rounds.seconds[0] == pytest.approx(rounds.rounds[0] + 0.75 * (rounds.rounds[0] - hits), abs=1.0)
    shared = replay_ahead(trace, settings._replace(own_device=False), known, cost_table(trace, COST))
    assert shared.seconds[0] == pytest.approx(rounds.seconds[0] + rounds.rounds[0] * 1.0, abs=2.0)


def test_pearl_by_hand() -> None:
    # Ranks of the text: two misses, then five first choices, a miss, and two first choices to the end; K = 2.
    rank = np.array([1, 2, 0, 0, 0, 0, 0, 1, 0, 0])
    base = iid_trace(0.5, [1.0], len(rank))
    ahead = np.arange(10)[:, None] + np.arange(5)
    trace = replace(base, true_rank=np.where(ahead < 10, rank[np.minimum(ahead, 9)], -1).astype(np.int16))
    settings = AheadSettings(2, 0, pearl=True, own_device=True, text_alone=True)
    known = Outcomes(np.full((10, 5), 0.5), np.full(5, 0.5), np.ones((5, 1)))
    rounds = replay_ahead(trace, settings, known, cost_table(trace, COST))
    # Positions 0 and 1: the first draft is refused while two tokens are drafted. 2: accepted, so at 3 a draft of one
    # token is ready; it and the next are right, and so at 5. At 7 the draft is refused, and 8 begins anew.
    assert np.flatnonzero(rounds.draft_of >= 0).tolist() == [0, 1, 2, 3, 5, 7, 8, 9]
    assert np.flatnonzero(rounds.draft_of == READY).tolist() == [3, 5, 7]
    assert np.flatnonzero(rounds.draft_of == MISSED).tolist() == [1, 2, 8]
    assert rounds.seconds[0] == pytest.approx(8 * 1.0)  # two draft steps take 0.5 s, less than a pass
    slow = replay_ahead(trace, settings, known, cost_table(trace, ConstantCost(s_d=0.75, s_t=1.0)))
    # A pass waits for two draft steps, 1.5 s, at 0, 1, 2 and 8 (two tokens), and where the next draft is used, 3 and 5;
    # at 8 a single token may be drafted, at 9 none.
    assert slow.seconds[0] == pytest.approx(3 * 1.5 + 2 * 1.5 + 1.0 + 1.0 + 1.0)


@pytest.mark.parametrize("k", [2, 3, 5])
def test_pearl_is_its_algorithm_on_drafted_tokens(k: int) -> None:
    trace = specsim.read_trace("example:lab-model")
    known = learn_outcomes(trace, 1).on(trace)
    settings = AheadSettings(k, 0, pearl=True, own_device=True, text_alone=True)
    rounds = replay_ahead(trace, settings, known, cost_table(trace, COST))
    for s in range(trace.sequences):
        begin, length = int(trace.offsets[s]), int(trace.output_tokens[s])
        text, drafts = trace.token[begin : begin + length].tolist(), trace.draft_token[begin : begin + length].tolist()
        passes, t, waiting = [], 0, None  # waiting : drafted tokens that are not verified yet
        while t < length:
            passes.append((t, waiting is not None))
            if waiting is None:  # the target reads the pending token while k tokens are drafted
                waiting = drafts[t][1:k] if drafts[t][0] == text[t] else None
                t += 1
                continue
            more = drafts[t + len(waiting)][:k] if t + len(waiting) < length else []  # drafted meanwhile
            right = waiting == text[t : t + len(waiting)] and more and more[0] == text[t + len(waiting)]
            accepted = next(
                (i for i, (d, y) in enumerate(zip(waiting, text[t:], strict=False)) if d != y), len(waiting)
            )
            t += accepted + 1
            waiting = more[1:] if right else None
        starts = np.flatnonzero(rounds.draft_of[begin : begin + length] >= 0)
        assert starts.tolist() == [start for start, _ in passes]
        drafting = [start for start in starts.tolist() if trace.draft_limit[begin + start] > 0]
        ready = dict(passes)
        assert [rounds.draft_of[begin + start] == READY for start in drafting] == [ready[start] for start in drafting]


def test_more_outcomes_never_hit_less_and_text_alone_keeps_every_round() -> None:
    result = draft_ahead(tree_trace(1, sequences=12), COST, outcomes=[1, 2, 4, 8], max_draft_tokens=2)
    plain, *ahead, _ = result.rows
    rates = [float(row.hit_rate) for row in ahead]
    assert rates == sorted(rates)
    assert rates[0] < rates[-1]
    assert {row.tau for row in ahead if row.k == plain.k} == {plain.tau}
    assert result.to_frame()["gain"].iloc[0] == 1.0


def test_the_command_prints_the_functions_answer() -> None:
    trace, cost = "example:lab-eagle", "example:lab-deep-eagle"
    options = ("--outcomes", "1,4", "--max-draft-tokens", 3, "--devices", 1)
    answer = draft_ahead(trace, cost, outcomes=[1, 4], max_draft_tokens=3, devices=1)
    document = json_of(call("specsim", "draft-ahead", trace, "--cost", cost, *options, "--json"))
    assert document["rows"] == answer.as_dict()["rows"]
    assert document["best"]["mode"] == "plain"  # a device that both share gains nothing
    shown = call("specsim", "draft-ahead", trace, "--cost", cost, *options).out
    assert "the drafter's own states" in shown and f"{100 * answer.rows[2].hit_rate:.1f} %" in shown


def test_what_cannot_be_counted_is_refused() -> None:
    trace = tree_trace(1)
    refusal(lambda: draft_ahead(specsim.generate(sequences=4), COST), "true_rank")
    refusal(lambda: draft_ahead(trace, COST, max_draft_tokens=5), "max_draft_tokens=5", "1 to 4")
    refusal(lambda: draft_ahead(trace, COST, outcomes=[0]), "outcomes=[0]")
    refusal(lambda: draft_ahead(trace, COST, devices=3), "devices=3")

    class ChainsOnly(ConstantCost):
        max_tree_tokens = 0

    refusal(lambda: draft_ahead(trace, ChainsOnly(0.1, 1.0), outcomes=[2], max_draft_tokens=2), "trees", "prepare 1")
