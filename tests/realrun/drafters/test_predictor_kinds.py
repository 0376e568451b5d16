"""The acceptance predictor of every kind of drafter: recorded scores, the real loop's, training, cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import realrun.proposals.chain
import realrun.proposals.target_cache
from realrun.decode.acceptance_predictor import RoundScorer, load_predictor, pending_token_states
from realrun.decode.decoder import Decoder
from realrun.decode.draft import Draft
from realrun.decode.draft_model import DraftModel
from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import Sampler
from realrun.measure.profile import profile
from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from realrun.train.predictor import PredictorSettings, Samples, collect, joined, train_predictor
from specsim.trace.trace import Trace
from tests.realrun.drafters.test_predictor import CHOICES, ScoreReader, choices
from tests.support.checks import refusal
from tests.support.clock import SetClock
from tests.support.pairs.inside import INSIDE, KINDS, marked, pair_of, scoring
from tests.support.small_targets import quiet
from tests.support.tiny import tiny_prompts

DEPTH, TOKENS = 4, 24  # as many tokens as the MEDUSA heads draft
PROMPTS = [Prompt("all", [17]), *tiny_prompts(6)]  # the first has no state before its pending token
inside = pytest.mark.parametrize("kind", marked(INSIDE))
kinds = pytest.mark.parametrize("kind", marked((*KINDS, "eagle3"), ("eagle", "eagle3")))


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, Draft]]:
    """(sequence, output position, draft) of everything that is proposed."""
    drafts: list[tuple[int, int, Draft]] = []
    propose = DraftModel.propose

    def keep(self: DraftModel, tokens: Sequence[int], context: RoundContext, *asked: Any) -> Draft:
        draft = propose(self, tokens, context, *asked)
        drafts.append((context.sequence, context.position, draft))
        return draft

    monkeypatch.setattr(DraftModel, "propose", keep)
    return drafts


@kinds
@choices
def test_the_real_loop_computes_the_recorded_scores(
    kind: str, sampler: Sampler, drafts: list[tuple[int, int, Draft]]
) -> None:
    pair = scoring(kind)
    trace = record(pair, PROMPTS, RecordSettings(DEPTH, TOKENS, sampler))
    assert trace.score is not None and trace.score.std() > 0.1
    decoder = Decoder(*pair.make_drafter(), pair.eos_token_ids, sampler)
    for k in (1, DEPTH):
        for sequence, prompt in enumerate(PROMPTS):
            decoded = decoder.decode(prompt.tokens, TOKENS, ScoreReader(k=k), sequence=sequence)
            rows = slice(*trace.offsets[sequence : sequence + 2].tolist())
            assert decoded.tokens == trace.token[rows].tolist()
    compared = 0
    for sequence, position, draft in drafts:
        recorded = trace.score[int(trace.offsets[sequence]) + position, : len(draft.steps)].tolist()
        assert [step.score for step in draft.steps] == recorded
        compared += len(draft.steps)
    assert compared > 150


def trace_and_samples(kind: str, sampler: Sampler) -> tuple[Trace, Samples]:
    """A trace and what training collects on the same runs."""
    pair = scoring(kind)
    settings = PredictorSettings(TOKENS, DEPTH, (sampler.temperature if sampler.mode == "gumbel" else 0.0,), seed=4)
    decoder, dense = Decoder(*pair.make_drafter(), pair.eos_token_ids, Sampler()), pair.make_recorder(Sampler())
    sequences = [collect(pair, decoder, dense, prompt, settings, s) for s, prompt in enumerate(PROMPTS)]
    return record(pair, PROMPTS, RecordSettings(DEPTH, TOKENS, sampler)), joined(sequences)


@kinds
@choices
def test_samples_are_the_judged_tokens_of_a_dense_trace(kind: str, sampler: Sampler) -> None:
    trace, samples = trace_and_samples(kind, sampler)
    remaining = np.repeat(trace.output_tokens, trace.output_tokens) - trace.position
    expected = {
        (t, i, i <= trace.match_len[t])
        for t in range(len(trace.token))
        for i in range(1, min(DEPTH, int(remaining[t])) + 1)
        if i - 1 <= trace.match_len[t]
    }
    columns = (samples.round.tolist(), samples.depth.tolist(), samples.label.tolist())
    assert set(zip(*columns, strict=True)) == expected and len(samples.label) == len(expected)
    starts = np.searchsorted(trace.offsets, samples.round.numpy(), side="right") - 1
    np.testing.assert_array_equal(samples.sequence.numpy(), starts)
    assert 0.1 < np.mean(columns[2]) < 0.97


@kinds
@choices
def test_samples_have_the_states_that_scores_are_made_of(
    kind: str, sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (realrun.proposals.chain, realrun.proposals.target_cache):  # several chunks of positions
        monkeypatch.setattr(module, "CHUNK", 7)
    trace, samples = trace_and_samples(kind, sampler)
    predictor = scoring(kind).predictor
    assert trace.score is not None and predictor is not None
    for depth in range(1, DEPTH + 1):
        at = (samples.depth == depth).nonzero()[:, 0]
        rounds = samples.round[at]
        scores = predictor.after(samples.target_hidden[rounds])(samples.draft_hidden[at], depth)
        # States are kept in half precision for training.
        np.testing.assert_allclose(scores, trace.score[rounds.numpy(), depth - 1], rtol=0, atol=4e-3)
        np.testing.assert_allclose(samples.confidence[at], trace.confidence[rounds.numpy(), depth - 1], rtol=1e-5)
        assert len(at) > 2


@kinds
@torch.inference_mode()
def test_states_are_what_the_drafters_head_reads(kind: str) -> None:
    _, samples = trace_and_samples(kind, CHOICES["greedy"])
    pair, states = pair_of(kind), samples.draft_hidden.double()
    *_, draft = (pair.target, *pair.drafter.weights(pair.target))
    if kind == "medusa":
        logits = torch.einsum("nvd,nd->nv", draft.vocabulary[samples.depth - 1], states)
    else:
        owner = pair.target if kind == "eagle" else draft
        logits = (draft.lm_head if kind == "eagle3" else owner.get_output_embeddings())(states)
    sure = logits.softmax(-1).amax(-1).float()
    # States are in half precision; these distributions are flat.
    torch.testing.assert_close(samples.confidence, sure, rtol=0, atol=1e-3)
    assert samples.confidence.std() > 0.015


@torch.inference_mode()
def test_states_of_heads_are_those_of_the_rounds() -> None:
    """Head i's state of a judged token is made of the target's state of its round, not of the token's own place."""
    _, samples = trace_and_samples("medusa", CHOICES["greedy"])
    heads = pair_of("medusa").drafter.heads
    hidden = samples.target_hidden[samples.round].double()
    matrices = heads.residual[samples.depth - 1]
    expected = F.silu(torch.einsum("nij,nj->ni", matrices, hidden)) + hidden
    torch.testing.assert_close(samples.draft_hidden.double(), expected, rtol=0, atol=0.02)
    assert (samples.depth == DEPTH).sum() > 5


@torch.inference_mode()
def test_states_of_an_early_exit_lie_on_the_true_text() -> None:
    """A judged token's state is that of one pass over the text, wherever its round began."""
    pair = pair_of("eesd")
    _, samples = trace_and_samples("eesd", CHOICES["greedy"])
    decoder = Decoder(*pair.make_drafter(), pair.eos_token_ids, Sampler())
    expected = []
    for prompt in PROMPTS:
        output = decoder.decode(prompt.tokens, TOKENS, None).tokens
        expected.append(pending_token_states(pair.drafter.model, prompt.tokens, [*output, 0])[1:])
    states = torch.cat(expected)[samples.round + samples.depth - 1]
    torch.testing.assert_close(samples.draft_hidden.double(), states, rtol=0, atol=0.005)


@kinds
def test_a_profile_measures_what_a_score_costs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every drafted token of the scored rounds is scored once, and no other; the time shows in the profile."""
    clock, pause_s, calls, score = SetClock(monkeypatch), 0.004, 0, RoundScorer.__call__

    def slow(self: RoundScorer, draft_hidden: torch.Tensor, depth: int, begin: int = 0) -> torch.Tensor:
        nonlocal calls
        calls += 1
        clock.take(pause_s)
        return score(self, draft_hidden, depth, begin)

    monkeypatch.setattr(RoundScorer, "__call__", slow)
    contexts, depth = [8, 16], 3
    document = profile(scoring(kind), contexts=contexts, depth=depth, limit_s=0, tree_tokens=0)
    assert calls == (1 + len(contexts) * document["sweeps"]) * depth
    assert document["median_s"]["score_step"] == pytest.approx(pause_s, rel=0.01)
    calls = 0
    profile(pair_of(kind), contexts=contexts, depth=depth, limit_s=0, tree_tokens=0)
    assert calls == 0


@kinds
def test_scores_are_made_for_policies_that_read_them_only(
    kind: str, drafts: list[tuple[int, int, Draft]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = scoring(kind)
    decoder = Decoder(*pair.make_drafter(), (), Sampler())
    decoder.decode([1, 2, 3], 8, ScoreReader(k=2))
    assert all(0 < step.score < 1 for _, _, draft in drafts for step in draft.steps)

    def unwanted(*arguments: object) -> None:
        raise AssertionError("a score was computed")

    monkeypatch.setattr(RoundScorer, "__call__", unwanted)
    drafts.clear()
    plain = ScoreReader(k=2)
    object.__setattr__(plain, "features", ())
    decoder.decode([1, 2, 3], 8, plain)
    assert drafts and all(step.score == 0 for _, _, draft in drafts for step in draft.steps)


SMALL = PredictorSettings(max_new_tokens=12, max_draft_tokens=6, temperatures=(0.0, 0.8), epochs=3, batch=64)


@inside
def test_a_predictor_of_every_kind_is_trained(kind: str, tmp_path: Path) -> None:
    pair, prompts = pair_of(kind), tiny_prompts(6) * 4  # texts that the MEDUSA heads know
    document = train_predictor(pair, prompts, SMALL, tmp_path / "whole", quiet)
    predictor = load_predictor(tmp_path / "whole")
    predictor.check(pair.target.config, pair.draft_config, pair.fingerprint)
    depth = min(SMALL.max_draft_tokens, pair.drafter.max_depth or SMALL.max_draft_tokens)
    assert len(predictor.bias) == document["settings"]["max_draft_tokens"] == depth
    assert document["drafter_kind"] == kind
    assert set(document["held_out"]) == {"predictor", "confidence", "base rate"}
    for values in document["held_out"].values():
        assert set(values) == {"log_loss_nats", "ece", "auc"} and np.isfinite(list(values.values())).all()
    trace = record(replace(pair, predictor=predictor), tiny_prompts(2), RecordSettings(DEPTH, 10))
    assert trace.score is not None and trace.meta["predictor"] == predictor.digest
    other: Pair = pair_of("model")
    refusal(
        lambda: predictor.check(other.target.config, other.draft_config, other.fingerprint),
        "other weights",
        pair.draft_name,
    )
    refusal(lambda: train_predictor(other, prompts, SMALL, tmp_path / "whole", quiet), "weights=", "--out")
