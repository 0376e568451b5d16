"""A drafter that really drafts ahead: before each verification it drafts behind the outcomes that it expects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from realrun.decode.decoder import Decoder
from realrun.decode.draft import Draft, KeepDrafting
from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import Sampler
from realrun.pairs.pair import Pair
from specsim.learn.chain_calibration import feature_table
from specsim.learn.draft_ahead import OutcomeModel
from specsim.policy.chain.fixed_k import FixedK
from specsim.replaying.ahead import AheadSettings, outcome_probs


class DraftsAhead:
    """In a decoder's place of the drafter `inner`, of fixed K.

    depth : how far behind the last verified token a drafter that reads the target's states drafts
    ready : of every round with a draft, (t, whether its draft was prepared)
    """

    def __init__(self, inner: Any, settings: AheadSettings, model: OutcomeModel, depth: int, eos: Sequence[int]):
        self.inner, self.settings, self.model, self.depth, self.eos = inner, settings, model, depth, frozenset(eos)
        self.width = model.rates.shape[1] - 1
        self.prepared: dict[tuple[int, ...], list[int]] = {}
        self.ready: list[tuple[int, bool]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def begin(self, context: Sequence[int], target_hidden: torch.Tensor | None = None) -> None:
        self.prepared, self.ready = {}, []
        self.inner.begin(context, target_hidden)

    def propose(self, tokens: Sequence[int], context: RoundContext, keep: KeepDrafting) -> Draft:
        drafted = self.prepared.get(tuple(tokens))
        self.ready.append((context.position, drafted is not None))
        if drafted is None or self.settings.text_alone:
            draft = self.inner.propose(tokens, context, keep)
            self.origin = len(tokens) - 1  # the pending token, which is fed with the target's state before it
            if drafted is not None:
                assert drafted[: context.limit] == draft.tokens, "what was prepared is what is drafted afterwards"
        else:
            chosen = drafted[: context.limit]
            draft = Draft(tokens=chosen, parents=list(range(-1, len(chosen) - 1)))
        self.prepared = dict(self.look_ahead(list(tokens), draft.tokens, context))
        return draft

    def look_ahead(
        self, text: list[int], drafted: list[int], context: RoundContext
    ) -> list[tuple[tuple[int, ...], Any]]:
        """Draft behind the most probable outcomes of the verification of a draft."""
        at = len(text) - 1 - self.origin  # tokens since the drafter read the target's states
        logits = self.logits(text, drafted)[at:]
        sampler, place = context.sampler, range(context.position, context.position + len(drafted) + 1)
        tokens, _ = sampler.candidates(logits, context.sequence, place, self.width + 1)
        rates = self.model.rates[at : at + len(drafted) + 1]
        accept = rates[:, 0]
        if at == 0:
            _, prob, top, entropy = sampler.statistics(logits, context.sequence, context.position).float().numpy().T
            accept = self.model.calibration.prob(feature_table(top[None], entropy[None], prob[None], np.zeros(1)))[0]
        probs = outcome_probs(accept.copy(), rates[:, 1:] / (1 - rates[:, :1]))
        outcomes = []
        for place in np.argsort(-probs, axis=None, kind="stable").tolist():
            accepted, rank = divmod(place, self.width + 1)
            fits = self.settings.text_alone or at + accepted + 1 + self.settings.k < self.depth
            if probs[accepted, rank] > 0 and fits and len(outcomes) < self.settings.prepared:
                outcomes.append([*drafted[:accepted], int(tokens[accepted, rank])])
        return [((*text, *outcome), self.draft([*text, *outcome], context.sampler)) for outcome in outcomes]

    def draft(self, text: list[int], sampler: Sampler) -> list[int]:
        """Draft K tokens behind a text, greedily, from the states that the drafter last read."""
        drafted: list[int] = []
        while len(drafted) < self.settings.k and not self.eos.intersection(drafted):
            drafted.append(int(self.logits(text, drafted)[-1].argmax()))
        return drafted

    def logits(self, text: list[int], drafted: list[int]) -> torch.Tensor:
        """Compute logits after every token from the origin on; the drafter's cache is left as it was."""
        lm, whole = self.inner.lm, [*text, *drafted]
        path = whole[self.origin :]
        with torch.inference_mode():
            if self.settings.text_alone:  # the library's own pass over the whole text
                after: torch.Tensor = lm.model(torch.tensor([whole])).logits[0, self.origin :]
                return after
            before = np.tile(np.arange(lm.length) < self.origin, (len(path), 1))
            seen = torch.from_numpy(np.hstack([before, np.tri(len(path), dtype=np.bool_)]))
            after = lm.append_rows(path, list(range(self.origin, self.origin + len(path))), seen)
            lm.truncate(lm.length)
        return after


def decode_ahead(
    pair: Pair, prompts: Sequence[Sequence[int]], tokens: int, settings: AheadSettings, model: OutcomeModel, depth: int
) -> list[tuple[list[int], list[tuple[int, bool]]]]:
    """Decode prompts greedily; of each the output, and of every round with a draft whether it was prepared."""
    target, inner = pair.make_drafter()
    drafter = DraftsAhead(inner, settings, model, depth, pair.eos_token_ids)
    decoder = Decoder(target, drafter, pair.eos_token_ids, Sampler())
    policy = FixedK(k=settings.k)
    outputs = (decoder.decode(prompt, tokens, policy, sequence=s).tokens for s, prompt in enumerate(prompts))
    return [(output, drafter.ready) for output in outputs]
