"""MEDUSA recorded and profiled: columns by their definition, rejection sampling, costs by place of a draft."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from realrun.decode.acceptance_predictor import last_states
from realrun.decode.sampling import Sampler
from realrun.drafters.medusa import MedusaHeads, MedusaKind, head_columns
from realrun.measure.profile import profile
from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import Pair
from realrun.proposals.recorder import RecordRequest
from realrun.proposals.trees import Trees, TreeSize
from specsim.cost.profile import profile_from_json
from specsim.io.errors import InputError
from tests.realrun.drafters.test_medusa import scored
from tests.realrun.measure.test_record_trees import as_names, as_record, one_by_one, paths_outside_chain
from tests.support.pairs.medusa import CHOICES, HEADS, medusa_pair
from tests.support.tiny import POSITIONS, VOCAB, tiny_prompts

ALL = {**CHOICES, "nucleus": Sampler("gumbel", 1.0, seed=5, top_p=0.6)}
choices = pytest.mark.parametrize("sampler", ALL.values(), ids=ALL.keys())
REJECTION = Sampler("rejection", 0.8, seed=4)


@choices
@pytest.mark.parametrize("prompt", [[7], [5, 9, 3, 11]], ids=["one token", "four tokens"])
def test_columns_are_what_each_head_says_at_each_position(sampler: Sampler, prompt: list[int]) -> None:
    """One head, one position at a time."""
    pair, depth, sequence = scored(medusa_pair()), 3, 2
    output = [*range(20, 31)]
    states = last_states(pair.target, [*prompt, *output])
    scorer = pair.predictor.after(torch.stack([at(states, len(prompt) + t) for t in range(11)]))
    request = RecordRequest(prompt, output, depth, sampler, sequence, scorer, TreeSize(12, 5))
    columns = head_columns(pair.target, pair.drafter.heads, request)
    trees = as_record(Trees(*(columns[f"tree_{name}"] for name in Trees._fields)), 5)
    for t in range(len(output)):
        hidden = at(states, len(prompt) + t)
        siblings = []
        for i in range(depth):
            logits = pair.drafter.heads(hidden[None])[i]
            token, *features = sampler.statistics(logits, sequence, t + i)[0].tolist()
            assert columns["draft_token"][t, i] == token
            np.testing.assert_allclose(
                [columns[name][t, i] for name in ("prob", "confidence", "entropy_nats")], features, rtol=1e-6
            )
            score = pair.predictor.after(hidden[None])(pair.drafter.heads.states(hidden[None])[i], i + 1)
            assert columns["score"][t, i] == pytest.approx(float(score), rel=1e-6)
            tokens, probs = (part[0].numpy() for part in sampler.candidates(logits, sequence, [t + i], VOCAB))
            rank = -1 if t + i >= len(output) else tokens.tolist().index(output[t + i])
            if sampler.top_p == 1.0:  # outside the nucleus all are equal, and ordered by index
                assert columns["true_rank"][t, i] == rank
            siblings.append((tokens[:5], probs[:5].astype(np.float32)))
        expected, horizon = one_by_one(lambda path, recorded=siblings: recorded[len(path)], depth, 12)
        recorded = as_names(trees, t)
        assert paths_outside_chain(recorded) == pytest.approx(paths_outside_chain(expected), rel=1e-5)
        assert sampler.top_p < 1.0 or {k: v[0] for k, v in recorded.items()} == {k: v[0] for k, v in expected.items()}
        assert trees.horizon[t] == pytest.approx(horizon, rel=1e-5)
    match = columns["draft_token"][:, 0] == output
    assert ((columns["match_len"] > 0) == match).all()


def at(states: torch.Tensor, tokens: int) -> torch.Tensor:
    """The state that produced the newest of so many tokens: the one before it; zeros where there is none."""
    return states[tokens - 2] if tokens > 1 else torch.zeros_like(states[0])


def test_more_depth_than_heads_is_cut_by_the_recorder_and_refused_by_the_pass() -> None:
    trace = record(medusa_pair(), tiny_prompts(2), RecordSettings(16, 8))
    assert trace.depth == trace.meta["depth"] == HEADS and trace.meta["drafter_kind"] == "medusa"
    pair = medusa_pair()
    with pytest.raises(InputError, match="4 MEDUSA heads draft at most 4 tokens, not 5; lower the depth"):
        head_columns(pair.target, pair.drafter.heads, RecordRequest([3, 4], [5, 6], HEADS + 1, Sampler()))


# --- Rejection sampling ---------------------------------------------------------------------------


@torch.inference_mode()
def test_rejection_traces_hold_the_heads_distributions_and_the_targets_verdict() -> None:
    """The share `accept_prob`, by one pass of the target over every drafted prefix."""
    pair, prompts = scored(medusa_pair()), tiny_prompts(2)
    trace = record(pair, prompts, RecordSettings(16, 12, REJECTION))
    assert trace.depth == HEADS and trace.accept_prob is not None and trace.score is not None
    for row in range(len(trace.token)):
        number = int(np.searchsorted(trace.offsets, row, side="right")) - 1
        t = int(row - trace.offsets[number])
        before = [*prompts[number].tokens, *trace.token[trace.offsets[number] : row].tolist()]
        states = last_states(pair.target, [*before, *trace.draft_token[row].tolist()])
        hidden = at(states, len(before))[None]
        judged = REJECTION.probs(pair.target.get_output_embeddings()(states[len(before) - 1 :]))
        for i in range(HEADS):
            drafted = int(trace.draft_token[row, i])
            offered = REJECTION.probs(pair.drafter.heads(hidden)[i])[0]
            assert trace.prob[row, i] == pytest.approx(float(offered[drafted]), rel=1e-5)
            assert trace.confidence[row, i] == pytest.approx(float(offered.max()), rel=1e-5)
            score = pair.predictor.after(hidden)(pair.drafter.heads.states(hidden)[i], i + 1)
            assert trace.score[row, i] == pytest.approx(float(score), rel=1e-5)
            if t + i < 12:
                accept = min(1.0, float(judged[i, drafted] / offered[drafted]))
                assert trace.accept_prob[row, i] == pytest.approx(accept, rel=1e-5)
                rank = int((offered > offered[trace.token[row + i]]).sum())
                assert trace.true_rank[row, i] == rank


# --- Costs -----------------------------------------------------------------------


def wide_pair() -> Pair:
    """Heads whose products, over a large vocabulary, are what takes time."""
    config = LlamaConfig(
        vocab_size=5000,
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=POSITIONS,
    )
    torch.manual_seed(1)
    target = LlamaForCausalLM(config).double().eval()
    return replace(medusa_pair(), target=target, drafter=MedusaKind(MedusaHeads(target, HEADS).requires_grad_(False)))


def test_the_first_draft_step_holds_all_heads() -> None:
    document = profile(wide_pair(), contexts=[8, 40], depth=16, limit_s=0, tree_tokens=0)
    for quantile in ("p25_s", "median_s"):
        steps = np.array(document[quantile]["draft_step"])
        assert steps.shape == (HEADS, 2)
        assert (steps[1:] < 0.3 * steps[0]).all()
        assert (np.array(document[quantile]["catch_up"]) < 0.3 * steps[0]).all()  # there is no cache to catch up
        assert len(document[quantile]["verify"]) == HEADS + 1
    profile_from_json(document, "just measured")


@pytest.mark.parametrize("heads", [1, 2])
def test_trees_are_measured_as_deep_as_the_heads_go(heads: int) -> None:
    document = profile(medusa_pair(heads=heads), contexts=[8, 40], depth=16, limit_s=0, tree_tokens=20)
    tree = document["median_s"]["tree"]
    assert len(document["median_s"]["draft_step"]) == heads and tree["sizes"][-1] == 20
    assert np.isfinite(tree["wider"]).all() and (np.array(tree["verify"]) > 0).all()
    if heads == 1:  # no pass of one head ingests more than the pending token
        assert (np.array(tree["wider"]) == tree["wider"][0]).all()
