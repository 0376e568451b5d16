"""MEDUSA's heads: what they predict, how their candidates are sought, and what is recorded and measured of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from realrun.decode.acceptance_predictor import last_states
from realrun.decode.decoder import Decoder
from realrun.decode.rounds import Decoded
from realrun.decode.sampling import Sampler
from realrun.drafters.medusa import MedusaHeads, MedusaKind, MedusaLM, head_columns
from realrun.measure.profile import profile
from realrun.measure.record import RecordSettings, record
from realrun.pairs.drafter_files import describe_target, load_drafter, save_drafter
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from realrun.proposals.recorder import RecordRequest
from realrun.proposals.trees import Trees, TreeSize
from specsim.cost.profile import profile_from_json
from specsim.io.errors import InputError
from specsim.policy.base import Policy
from specsim.policy.registry import make_policy
from tests.support.dense_records import as_names, as_record, one_by_one, paths_outside_chain
from tests.support.pairs.medusa import CHOICES, HEADS, TOKENS, medusa_pair
from tests.support.tiny import POSITIONS, VOCAB, random_predictor, tiny_model, tiny_prompts

ids = {"ids": lambda spec: f"{spec[0]}-{spec[1].get('k', '')}".rstrip("-")}
choices = pytest.mark.parametrize("sampler", CHOICES.values(), ids=CHOICES.keys())


def scored(pair: Pair) -> Pair:
    return replace(pair, predictor=random_predictor(pair))


def decoded(
    pair: Pair, policy: Policy, sampler: Sampler, seed: int = 3, prompts: Sequence[Prompt] | None = None
) -> list[Decoded]:
    decoder, state, runs = Decoder(*pair.make_drafter(), pair.eos_token_ids, sampler), None, []
    for number, prompt in enumerate(prompts or tiny_prompts()):
        runs.append(decoder.decode(prompt.tokens, TOKENS, policy, sequence=number, seed=seed, state=state))
        state = runs[-1].state
    return runs


# --- The heads ----------------------------------------------------------------------------------


def test_heads_are_the_papers_formula() -> None:
    heads, hidden = medusa_pair().drafter.heads, torch.randn(7, 32, dtype=torch.float64)
    together = heads(hidden)
    assert together.shape == (HEADS, 7, VOCAB)
    for k in range(HEADS):
        for row, h in enumerate(hidden):
            first, second = heads.residual[k], heads.vocabulary[k]
            expected = second @ (F.silu(first @ h) + h)
            torch.testing.assert_close(together[k, row], expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(heads.logits(k, heads.state(k, hidden)), together[k], rtol=0, atol=1e-12)


def test_untrained_heads_predict_what_the_target_does() -> None:
    target = tiny_model(2, seed=1)
    hidden = torch.randn(5, 32, dtype=torch.float64)
    for logits in MedusaHeads(target, 3)(hidden):
        torch.testing.assert_close(logits, target.get_output_embeddings()(hidden), rtol=0, atol=1e-12)


def test_heads_may_share_the_targets_vocabulary(tmp_path: Path) -> None:
    """They draft as heads with copies of it, and their file holds the residual blocks alone."""
    pair, generator = medusa_pair(), torch.Generator().manual_seed(0)
    shared, own = MedusaHeads(pair.target, HEADS, shared=True), MedusaHeads(pair.target, HEADS)
    for heads in (shared, own):
        generator.manual_seed(0)
        heads.residual.data.normal_(generator=generator)
    assert {*shared.state_dict()} == {"residual"} and {*own.state_dict()} == {"residual", "vocabulary"}
    facts = {"target": describe_target(pair.target, "tiny"), "heads": HEADS}
    texts = []
    for heads in (shared, own):
        path = save_drafter(tmp_path / str(len(texts)), "medusa", heads.state_dict(), facts)
        target, kind = load_drafter(path, pair.target)
        lm, drafter = kind.make_drafter(target, (), None)
        policy = make_policy("fixed_k", {"k": HEADS})
        texts.append(Decoder(lm, drafter, (), Sampler("gumbel", 0.8)).decode([4, 5, 6], 40, policy).log())
    assert texts[0] == texts[1]
    hidden = torch.randn(7, 32, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(shared(hidden), own(hidden), rtol=0, atol=1e-12)


def counting_pair(shift: int = 0) -> Pair:
    """After token x the target says x + 1, and its heads, if shift is 0, what it will say then."""
    target = tiny_model(1, seed=5)
    target.config.tie_word_embeddings = False
    with torch.no_grad():
        for block in (target.model.layers[0].self_attn.o_proj, target.model.layers[0].mlp.down_proj):
            block.weight.zero_()
        embeddings = target.model.embed_tokens.weight.normal_()
        rows = 10 * embeddings / embeddings.norm(dim=1, keepdim=True)
        target.lm_head.weight = torch.nn.Parameter(rows.roll(1, 0))
        heads = MedusaHeads(target, HEADS)
        heads.vocabulary.data = torch.stack([rows.roll(k + 1 + shift, 0) for k in range(1, HEADS + 1)])
    return replace(medusa_pair(), target=target, drafter=MedusaKind(heads.eval()))


def test_head_k_predicts_the_token_k_places_after_the_pending_one() -> None:
    prompt, policy = Prompt("code", [4, 5, 6, 7]), make_policy("fixed_k", {"k": HEADS})
    for shift, accepted in ((0, HEADS), (1, 0), (-1, 0)):
        pair = counting_pair(shift)
        run = Decoder(*pair.make_drafter(), (), Sampler()).decode(prompt.tokens, 60, policy)
        assert run.tokens == [*range(8, 68)]
        assert {r.accepted for r in run.rounds} == {accepted}
        trace = record(pair, [prompt], RecordSettings(16, 60, Sampler()))
        assert trace.depth == HEADS and (trace.match_len[: 60 - HEADS] == accepted).all()
        assert ((trace.true_rank[: 60 - HEADS] == 0) == (shift == 0)).all()
        assert (trace.true_rank[-1] == [trace.true_rank[-1, 0], -1, -1, -1]).all()


# --- One distribution for all nodes of a level ----------------------------------------------------


WIDE_LEVELS = [
    ("cartesian", {"s1": 3, "s2": 2, "s3": 2, "s4": 1}),
    ("pct", {"cost_ratio": 0.1, "width": 4, "max_depth": HEADS}),
]


@choices
@pytest.mark.parametrize("spec", WIDE_LEVELS, **ids)
def test_candidates_are_sought_in_one_row_of_a_level(
    spec: tuple[str, dict[str, Any]], sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that do not share memory give the same drafts, from more candidate searches."""
    pair = medusa_pair()
    policy, counted = make_policy(*spec), []
    candidates = Sampler.candidates

    def counting(self: Sampler, logits: torch.Tensor, *asked: Any) -> Any:
        counted.append(len(logits))
        return candidates(self, logits, *asked)

    monkeypatch.setattr(Sampler, "candidates", counting)
    shared = decoded(pair, policy, sampler)
    assert set(counted) == {1}
    monkeypatch.setattr(MedusaLM, "_logits", lambda self, rows, plain=MedusaLM._logits: plain(self, rows).contiguous())
    separate = decoded(pair, policy, sampler)
    assert max(counted) > 3
    assert [run.full_log() for run in separate] == [run.full_log() for run in shared]
    assert [run.tokens for run in separate] == [run.tokens for run in shared]


# --- No deeper than the heads ---------------------------------------------------------------------


@pytest.mark.parametrize("spec", [("fixed_k", {"k": 5}), ("vct", {"width": 1, "depth": 5})], **ids)
def test_drafting_beyond_the_heads_is_refused(spec: tuple[str, dict[str, Any]]) -> None:
    with pytest.raises(InputError, match="4 MEDUSA heads draft at most 4 tokens; lower") as caught:
        decoded(medusa_pair(), make_policy(*spec), Sampler())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("heads", [0, 17])
def test_a_number_of_heads_out_of_range_is_refused(heads: int) -> None:
    with pytest.raises(InputError, match="choose 1 to 16"):
        MedusaHeads(tiny_model(1, seed=1), heads)


# --- Recording: columns by their definition ---------------------------------------------------------


ALL = {**CHOICES, "nucleus": Sampler("gumbel", 1.0, seed=5, top_p=0.6)}
all_choices = pytest.mark.parametrize("sampler", ALL.values(), ids=ALL.keys())
REJECTION = Sampler("rejection", 0.8, seed=4)


@all_choices
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
    """Along the text, by one pass of the target over every prefix of it."""
    pair, prompts = scored(medusa_pair()), tiny_prompts(2)
    trace = record(pair, prompts, RecordSettings(16, 12, REJECTION))
    assert trace.depth == HEADS and trace.text_accept is not None and trace.score is not None
    for row in range(len(trace.token)):
        number = int(np.searchsorted(trace.offsets, row, side="right")) - 1
        t = int(row - trace.offsets[number])
        before = [*prompts[number].tokens, *trace.token[trace.offsets[number] : row].tolist()]
        states = last_states(pair.target, [*before, *trace.token[row : row + HEADS].tolist()])
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
                own = int(trace.token[row + i])
                assert trace.text_prob[row, i] == pytest.approx(float(offered[own]), rel=1e-5)
                assert trace.text_accept[row, i] == pytest.approx(
                    min(1.0, float(offered[own] / judged[i, own])), rel=1e-5
                )
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
