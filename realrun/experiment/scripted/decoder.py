"""Scripted rounds: a trace decides what is accepted and what the policy sees, all compute is real.

Draft steps, copies to the host, policy decisions, target passes and caches are those of a
decoding run, through the same loop. Only the text is not: token ids are arbitrary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from realrun.decode.decoder import Decoder
from realrun.decode.draft import Draft, Drafter, KeepDrafting
from realrun.decode.rounds import Round, RoundContext
from realrun.decode.sampling import Sampler
from realrun.lm.cached import CachedLM
from realrun.measure.rounds import ScriptedVerifier
from realrun.pairs.pair import Pair
from realrun.pairs.random_pair import vocabulary
from specsim.policy.chain.base import ChainPolicy, Step
from specsim.replaying.chain import or_unread
from specsim.replaying.kernel import step_functions
from specsim.trace.trace import Trace

WARM_UP_ROUNDS = 8


class Script:
    """What a trace says about each (sequence id, output position)."""

    def __init__(self, trace: Trace):
        self._first_row = dict(zip(trace.sequence_id.tolist(), trace.offsets[:-1].tolist(), strict=True))
        optional = [or_unread(trace, column) for column in (trace.score, trace.top10_confidence)]
        self._features = np.stack([trace.prob, trace.confidence, trace.entropy_nats, *optional], axis=-1)
        self.match_len: list[int] = trace.match_len.tolist()
        self.draft_limit: list[int] = trace.draft_limit.tolist()

    def row(self, sequence: int, position: int) -> int:
        """Row of the trace's arrays over positions."""
        return int(self._first_row[sequence] + position)

    def step(self, row: int, depth: int) -> Step:
        """Features of the token drafted at this depth, from 1."""
        return Step(*self._features[row, depth - 1].tolist())


class ScriptedDrafter:
    """Drafts for real; the policy sees, and the draft ends, what and where the trace says."""

    def __init__(self, drafter: Drafter, script: Script):
        self.drafter, self.script = drafter, script
        self.wants_target_hidden = False  # scores come from the trace

    def prepare(
        self, length: int, sampler: Sampler, sequence: int, positions: int, features: Sequence[str] = ()
    ) -> None:
        self.drafter.prepare(length, sampler, sequence, positions)

    def begin(self, context: Sequence[int], target_hidden: torch.Tensor | None = None) -> None:
        self.drafter.begin(context)

    def propose(self, tokens: Sequence[int], context: RoundContext, keep: KeepDrafting) -> Draft:
        row = self.script.row(context.sequence, context.position)
        limit = min(context.limit, self.script.draft_limit[row])
        if limit == 0:
            return Draft()

        def scripted(step: Step, depth: int) -> bool:
            return keep(self.script.step(row, depth), depth)

        draft = self.drafter.propose(tokens, context._replace(limit=limit), scripted)
        draft.steps = [self.script.step(row, depth) for depth in range(1, len(draft.tokens) + 1)]
        return draft

    def commit(self, length: int, target_hidden: torch.Tensor | None = None) -> None:
        self.drafter.commit(length)


class TraceVerifier(ScriptedVerifier):
    """Does the verifier's work, then accepts as many tokens as the trace says."""

    def __init__(self, script: Script):
        super().__init__()
        self.script = script

    def __call__(self, logits: torch.Tensor, draft: Draft, context: RoundContext) -> list[int]:
        self.accept = min(len(draft.tokens), self.script.match_len[self.script.row(context.sequence, context.position)])
        return super().__call__(logits, draft, context)


class ScriptedDecoder:
    """Runs a trace's rounds on a pair of models. The trace's prompts become random text of their length."""

    def __init__(self, pair: Pair, trace: Trace, sampler: Sampler, seed: int):
        script = Script(trace)
        target, draft = pair.make_drafter(())
        self.trace, self.seed, self.draft_lm = trace, seed, draft.lm
        self.decoder = Decoder(target, ScriptedDrafter(draft, script), (), sampler, TraceVerifier(script))
        longest = int((trace.prompt_tokens + trace.output_tokens).max())
        self._tokens: list[int] = np.random.default_rng(seed).integers(1, vocabulary(pair), longest).tolist()

    @torch.inference_mode()
    def warm_up(self, policies: Sequence[ChainPolicy]) -> None:
        """Make room, record every size of pass, compile every policy: nothing of it belongs on the clock."""
        length, depth = len(self._tokens) + self.trace.depth + 2, self.trace.depth
        self.decoder.target.warm(range(1, depth + 2), length)
        self.decoder.drafter.prepare(length, self.decoder.sampler, int(self.trace.sequence_id[0]), depth)
        for policy in policies:
            self.speculative(0, policy, most_rounds=WARM_UP_ROUNDS)

    @torch.inference_mode()
    def speculative(self, index: int, policy: ChainPolicy, *, most_rounds: int | None = None) -> list[Round]:
        """The rounds of the trace's index-th sequence, all of them unless told."""
        trace, decoder = self.trace, self.decoder
        prompt, length = int(trace.prompt_tokens[index]), int(trace.output_tokens[index])
        sequence, rounds = int(trace.sequence_id[index]), list[Round]()
        self._prepare(sequence, length)
        for lm in (decoder.target, self.draft_lm):
            self._rewind(lm, prompt - 1)
        tokens, state = self._tokens[:prompt], step_functions(policy).initial_state(policy.params)
        while (t := len(tokens) - prompt) < length and (most_rounds is None or len(rounds) < most_rounds):
            context = RoundContext(decoder.sampler, sequence, t, policy.max_draft_tokens, self.seed)
            state, _ = decoder.round(tokens, context, policy, state, rounds)
        return rounds

    @torch.inference_mode()
    def autoregressive(self, index: int, start: int, end: int) -> list[Round]:
        """The baseline's rounds for output positions start .. end - 1 of a sequence, in warm caches."""
        trace, decoder = self.trace, self.decoder
        prompt, sequence = int(trace.prompt_tokens[index]), int(trace.sequence_id[index])
        rounds: list[Round] = []
        self._prepare(sequence, end)
        for warm, last in ((False, start + 1), (True, end)):
            tokens = self._tokens[: prompt + start]
            self._rewind(decoder.target, len(tokens) - 1)
            for t in range(start, last):
                context = RoundContext(decoder.sampler, sequence, t, 0, self.seed)
                decoder.round(tokens, context, None, None, rounds if warm else [])
        return rounds

    def _prepare(self, sequence: int, positions: int) -> None:
        """Make the noise of a sampled choice ahead of the clock, for drafts beyond the last position too."""
        model, sampler = self.decoder.target.model, self.decoder.sampler
        positions += self.trace.depth + 1
        sampler.prepare(sequence, positions, int(model.config.vocab_size), self.decoder.target.device, model.dtype)

    def _rewind(self, lm: CachedLM, length: int) -> None:
        """Make the cache `length` tokens long. Text that was there may stay, as it means nothing."""
        lm.truncate(length)
        lm.prefill(self._tokens[lm.length : length])


def with_prefix(trace: Trace, tokens: int) -> Trace:
    """The same trace behind that many more tokens of prompt."""
    return dataclasses.replace(trace, prompt_tokens=trace.prompt_tokens + tokens, prompt=None)
