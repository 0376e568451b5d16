"""Rejection sampling is loss-free: by enumeration through the verifier, and by many samples of the real loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from transformers import LlamaForCausalLM

from realrun.decode.decoder import Decoder
from realrun.decode.draft import Draft
from realrun.decode.draft_model import DraftModel
from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import Sampler, draw
from realrun.decode.verify import Verifier, match_verifier, rejection_verifier
from realrun.lm.cached import CachedLM
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.registry import make_policy
from tests.support.sampling_distribution import (
    EXACT,
    FedChoice,
    Path,
    distance,
    emitted_distribution,
    exact_distribution,
    random_tables,
    warped,
)
from tests.support.small_vocabulary import SAMPLED, models, p_value


def broken_replacement(logits: torch.Tensor, draft: Draft, context: RoundContext) -> list[int]:
    """Draws the replacement of a rejected token from p (errata C1)."""
    emitted, (sampler, sequence, position, *_) = rejection_verifier(logits, draft, context), context
    last = draw(sampler.probs(logits[len(emitted) - 1 :][:1]), [sampler.uniform("last", sequence, position, 0)])
    return [*emitted[:-1], int(last)]


def broken_ratio(logits: torch.Tensor, draft: Draft, context: RoundContext) -> list[int]:
    """Accepts where u < q/p."""
    sampler, sequence, position, *_ = context
    target = sampler.probs(logits)
    accepted = 0
    for place, token in enumerate(draft.tokens):
        u = sampler.uniform("judge", sequence, position, place + 1)
        if not u * target[place, token] < draft.probs[place][token]:
            break
        accepted += 1
    weights = target[accepted]
    if accepted < len(draft.tokens):
        weights = (weights - draft.probs[accepted]).clamp(min=0)
    last = draw(weights[None], [sampler.uniform("last", sequence, position, 0)])
    return [*draft.tokens[:accepted], int(last)]


@pytest.mark.parametrize(
    ("vocabulary", "depth", "temperature", "top_p", "top_k", "seed"),
    [
        (6, 1, 1.0, 1.0, 0, 0),
        (6, 1, 0.6, 0.8, 0, 1),
        (3, 2, 1.3, 1.0, 0, 2),
        (4, 2, 1.0, 0.75, 0, 3),
        (3, 3, 0.8, 0.9, 0, 4),
        (6, 1, 0.8, 1.0, 3, 5),
        (4, 2, 0.8, 0.95, 3, 6),
    ],
)
def test_the_distribution_of_what_is_emitted_is_the_targets(
    vocabulary: int, depth: int, temperature: float, top_p: float, top_k: int, seed: int
) -> None:
    tables = random_tables(vocabulary, depth, seed)
    sampler = FedChoice("rejection", temperature, 0, top_p, top_k)
    distribution = emitted_distribution(tables, depth, sampler, rejection_verifier)
    assert sum(distribution.values()) == pytest.approx(1, abs=EXACT)
    assert distance(distribution, exact_distribution(tables, depth, sampler)) < EXACT


def test_a_drafter_that_is_not_cut_is_loss_free_too_if_the_verifier_knows() -> None:
    """Top-p of the target alone decides the distribution; that of the drafter only what is accepted."""
    tables, sampler = random_tables(4, 1, 5), FedChoice("rejection", 1.0, 0, 0.7)
    whole = FedChoice("rejection", 1.0, 0, 1.0, fed=sampler.fed)

    def verifier(logits: torch.Tensor, draft: Draft, context: RoundContext) -> list[int]:
        return rejection_verifier(logits, draft, context._replace(sampler=sampler))

    distribution = emitted_distribution(tables, 1, whole, verifier)  # beyond the round, tokens follow the whole target
    expected = {}
    for first, chance in enumerate(warped(tables.target[()].tolist(), 1.0, 0.7)):
        expected[first,] = chance
    first_token = Counter[Path]()
    for path, chance in distribution.items():
        first_token[path[:1]] += chance
    assert distance(dict(first_token), expected) < EXACT


BROKEN = {
    "replacement from p": (broken_replacement, None),
    "u < q/p": (broken_ratio, None),
    "top-p of p alone": (rejection_verifier, FedChoice("rejection", 0.9, 0, 1.0)),
}


@pytest.mark.parametrize(("verifier", "judged_by"), BROKEN.values(), ids=BROKEN.keys())
def test_enumeration_catches_a_broken_verifier(verifier: Verifier, judged_by: Sampler | None) -> None:
    tables, sampler = random_tables(4, 1, 7), FedChoice("rejection", 0.9, 0, 0.8)
    assert (
        distance(emitted_distribution(tables, 1, sampler, verifier, judged_by), exact_distribution(tables, 1, sampler))
        > 0.02
    )


# --- The real loop -----------------------------------------------------------------------------

SAMPLES = 1200


class RememberedLM(CachedLM):
    """A model whose plain pass over a text is made once and remembered, so that thousands of decodings are quick."""

    def __init__(self, model: LlamaForCausalLM, known: dict[Path, torch.Tensor]):
        super().__init__(model)
        self.known = known

    def reset(self) -> None:
        self.length, self.text = 0, Path()

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        self.text = (*self.text[: self.length], *tokens)
        return torch.stack([self.after(self.text[: self.length + n + 1]) for n in range(len(tokens))][-keep:])

    def after(self, text: Path) -> torch.Tensor:
        if text not in self.known:
            self.known[text] = self.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
        return self.known[text]

    def truncate(self, length: int) -> None:
        self.length = min(self.length, length)


KNOWN: tuple[dict[Path, torch.Tensor], dict[Path, torch.Tensor]] = ({}, {})


def remembering_decoder(sampler: Sampler, verifier: Verifier | None) -> Decoder:
    target, drafter = models()
    decoder = Decoder(target, DraftModel(drafter, ()), (), sampler, verifier)
    decoder.target = RememberedLM(target, KNOWN[0])
    assert isinstance(decoder.drafter, DraftModel)
    decoder.drafter.lm = RememberedLM(drafter, KNOWN[1])
    return decoder


POLICIES = [
    None,
    make_policy("fixed_k", {"k": 3}),
    make_policy("max_confidence", {"lambda0": 0.6, "dynamic": False, "max_draft_tokens": 3}),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_many_samples_of_the_loop_follow_the_target(policy: ChainPolicy | None) -> None:
    assert p_value(remembering_decoder(SAMPLED, None), policy, SAMPLES) > 1e-3


@dataclass(frozen=True)
class ToldTheUncut(Sampler):
    """Drafts from the nucleus and says that it drew from all tokens."""

    def draft(
        self, logits: torch.Tensor, sequence: int, position: int, depth: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return super().draft(logits, sequence, position, depth)[0], (logits / self.temperature).softmax(-1)


@pytest.mark.parametrize(
    ("sampler", "verifier"),
    [
        (SAMPLED, broken_replacement),
        (SAMPLED, broken_ratio),
        (ToldTheUncut("rejection", 1.2, seed=5, top_p=0.8), None),
    ],
    ids=BROKEN.keys(),
)
def test_samples_catch_a_broken_verifier(sampler: Sampler, verifier: Verifier | None) -> None:
    assert p_value(remembering_decoder(sampler, verifier), POLICIES[1], samples=500) < 1e-6


def test_the_mode_picks_the_verifier() -> None:
    target, drafter = models()
    for sampler, verifier in ((SAMPLED, rejection_verifier), (Sampler(), match_verifier)):
        assert Decoder(target, DraftModel(drafter, ()), (), sampler).verifier is verifier
