"""MEDUSA's heads: what they predict, and how their candidates are sought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from realrun.decode.decoder import Decoder
from realrun.decode.rounds import Decoded
from realrun.decode.sampling import Sampler
from realrun.drafters.medusa import MedusaHeads, MedusaKind, MedusaLM
from realrun.measure.record import RecordSettings, record
from realrun.pairs.drafter_files import describe_target, load_drafter, save_drafter
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from specsim.io.errors import InputError
from specsim.policy.base import Policy
from specsim.policy.registry import make_policy
from tests.support.pairs.medusa import CHOICES, HEADS, TOKENS, medusa_pair
from tests.support.pairs.scores import random_predictor
from tests.support.tiny import VOCAB, tiny_model, tiny_prompts

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
    assert [run.tree_log() for run in separate] == [run.tree_log() for run in shared]
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
