"""Where a real run first leaves its replay: a near tie that rounding turned around, or a defect.

Recording and decoding compute the same logits in passes of other sizes, which round differently. In low precision two
tokens may then change places whose logits lie within a few steps of the number type, and a policy's signal may cross
its threshold. Anything larger is no rounding. Each sequence's first departure is looked at: decoding goes the same way
again up to that round, whose logits are then read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from realrun.decode.decoder import Decoder, Decoding
from realrun.decode.gumbel import gumbel_noise
from realrun.decode.rounds import Decoded
from realrun.decode.sampling import Sampler
from realrun.lm.cached import CachedLM
from realrun.pairs.prompts import Prompt
from specsim.policy.base import Policy
from specsim.policy.chain.base import ChainPolicy, Step
from specsim.policy.switch.base import SwitchPolicy
from specsim.replaying.rounds import RoundLog
from specsim.trace.trace import Trace

NEAR_TIE_ULPS = 16.0
"""Gap up to which two logits count as tied: the rounding of some tens of layers, each of a step or so."""

LOGARITHMIC = ("prob", "confidence", "top10_confidence")  # signals that are probabilities

What = Literal["draft", "text", "policy"]
Cause = Literal["near tie", "defect", "not examined"]


@dataclass(frozen=True)
class Divergence:
    """A sequence's first departure from its replay.

    t : output position at which the round starts
    what : a drafted token, a token of the text, or how long the policy drafted differs
    gap_ulps : between the logits of what was chosen here and in the recording, or of a policy between its signals here
        and there in nats, in steps of the number type at the logits' size; None where it was not examined
    """

    sequence: int
    t: int
    what: What
    gap_ulps: float | None

    @property
    def cause(self) -> Cause:
        if self.gap_ulps is None:
            return "not examined"
        return "near tie" if self.gap_ulps <= NEAR_TIE_ULPS else "defect"


def ulp(value: float, dtype: torch.dtype) -> float:
    """The step between numbers of this type at the size of `value`."""
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(abs(value), torch.finfo(dtype).tiny)))


def divergences(
    decoder: Decoder,
    policy: Policy,
    trace: Trace,
    prompts: Sequence[Prompt],
    replayed: RoundLog,
    runs: Sequence[Decoded],
    *,
    seed: int,
) -> list[Divergence]:
    """Find the first departure of every sequence; of trees and several drafters, only its place.

    Parameters
    ----------
    decoder : that of the runs, or another over the same models
    prompts, runs : of the trace's sequences
    replayed : the replay's rounds on the trace
    seed : of the policy's uniforms in the runs
    """
    departures = []
    for index, run in enumerate(runs):
        mine = replayed.sequence == index
        columns = (replayed.t, replayed.drafted, replayed.accepted, replayed.verified, replayed.last, replayed.drafter)
        wanted = list(zip(*(column[mine].tolist() for column in columns), strict=True))
        text = trace.token[trace.offsets[index] : trace.offsets[index + 1]].tolist()
        number = _first_round(run, wanted, text)
        if number is None:
            continue
        t = run.rounds[number].t
        if not isinstance(policy, ChainPolicy) or isinstance(policy, SwitchPolicy):
            departures.append(Divergence(index, t, "text", None))
            continue
        state = runs[index - 1].state if index else None
        decoding = _Again(decoder, policy, trace, prompts[index], index, state, seed)
        departures.append(decoding.look_at(number, t, wanted[number][1], text))
    return departures


def summary(departures: Sequence[Divergence]) -> dict[str, Any]:
    """Count first departures by cause, with the largest gap of those that count as ties, as JSON."""
    ties = [each.gap_ulps for each in departures if each.cause == "near tie" and each.gap_ulps is not None]
    counts = {
        cause: sum(each.cause == cause for each in departures) for cause in ("near tie", "defect", "not examined")
    }
    defects = [
        {"sequence": each.sequence, "t": each.t, "what": each.what, "gap_ulps": each.gap_ulps}
        for each in departures
        if each.cause == "defect"
    ]
    return {"first": counts, "largest_tie_ulps": max(ties, default=None), "defects": defects}


def _first_round(run: Decoded, wanted: Sequence[tuple[int, ...]], text: Sequence[int]) -> int | None:
    """The number of the first round that differs in the log or in what it emitted; None where all are the same."""
    end = 0
    for number, (real, row) in enumerate(zip(run.full_log(), wanted, strict=False)):
        end = real[0] + real[2] + 1
        if real != row or run.tokens[real[0] : end] != text[real[0] : end]:
            return number
    return None


class _Again:
    """One sequence decoded again, up to a round whose logits are read."""

    def __init__(
        self, decoder: Decoder, policy: Policy, trace: Trace, prompt: Prompt, index: int, state: Any, seed: int
    ):
        self.trace, self.index, self.number = trace, index, int(trace.sequence_id[index])
        self.decoder, self.policy = decoder, policy
        budget = int(trace.budget_tokens[index])
        self.decoding = Decoding(decoder, prompt.tokens, budget, policy, self.number, seed, state)

    def look_at(self, number: int, t: int, drafted: int, text: Sequence[int]) -> Divergence:
        """Decode up to a round and explain how it differs from the replay.

        number, t, drafted : the round's number, its first position, and the tokens that the replay drafted in it
        """
        for _ in range(number):
            self.decoding.advance()
        draft_lm = getattr(self.decoder.drafter, "lm", None)  # drafters without a model have no logits to read
        watched = nullcontext(list[torch.Tensor]()) if draft_lm is None else passes(draft_lm)
        with watched as of_draft, passes(self.decoder.target) as of_target:
            draft = self.decoding.advance()
        row = int(self.trace.offsets[self.index]) + t
        recorded = self.trace.draft_token[row].tolist()
        for depth, (token, other) in enumerate(zip(draft.tokens, recorded[:drafted], strict=False)):
            if token != other:
                logits = of_draft[depth][-1] if len(of_draft) == len(draft.tokens) else None
                return Divergence(self.index, t, "draft", self._gap(logits, token, other, t + depth))
        if len(draft.tokens) != drafted:
            return Divergence(self.index, t, "policy", self._signal_gap(draft.steps, row, of_draft))
        emitted = self.decoding.tokens[self.decoding.prompt_tokens + t :]
        for place, (token, other) in enumerate(zip(emitted, text[t:], strict=False)):
            if token != other:
                logits = of_target[-1][place] if of_target else None
                return Divergence(self.index, t, "text", self._gap(logits, token, other, t + place))
        return Divergence(self.index, t, "policy", None)

    def _gap(self, logits: torch.Tensor | None, token: int, other: int, position: int) -> float | None:
        """Compute the gap between the scores of the token chosen here and the recorded token, in ulps of a logit."""
        sampler: Sampler = self.decoder.sampler
        if logits is None or sampler.mode == "rejection":
            return None
        pair = logits[[token, other]].double()
        gap = float(pair[0] - pair[1])
        if sampler.mode == "gumbel":
            noise = gumbel_noise(
                sampler.seed, self.number, position, 1, len(logits), logits.device, torch.float64
            ).flatten()
            gap += sampler.temperature * float(noise[token] - noise[other])
        return abs(gap) / self._ulp(pair)

    def _ulp(self, logits: torch.Tensor) -> float:
        """Return one unit in the last place of the largest logit, in the target's number type.

        Float32 logits are computed from values that are rounded to that type.
        """
        return ulp(float(logits.abs().max()), self.decoder.target.model.dtype)

    def _signal_gap(self, steps: Sequence[Step], row: int, of_draft: Sequence[torch.Tensor]) -> float | None:
        """Return the largest difference of a signal that the policy read, in ulps of the largest logit behind it."""
        if len(of_draft) != len(steps):
            return None
        gaps = [0.0]
        for depth, (step, logits) in enumerate(zip(steps, of_draft, strict=True)):
            for name in self.policy.features:
                here, there = getattr(step, name), float(getattr(self.trace, name)[row, depth])
                if name in LOGARITHMIC:
                    here, there = (math.log(max(value, torch.finfo(torch.float32).tiny)) for value in (here, there))
                gaps.append(abs(here - there) / self._ulp(logits[-1]))
        return max(gaps)


@contextmanager
def passes(lm: CachedLM) -> Iterator[list[torch.Tensor]]:
    """The logits of every pass of this model inside."""
    seen: list[torch.Tensor] = []
    forward = lm.forward

    def noted(tokens: Sequence[int]) -> torch.Tensor:
        logits = forward(tokens)
        seen.append(logits.clone())
        return logits

    own = vars(lm)  # where a name goes before the class's
    before = own.get("forward")
    own["forward"] = noted
    try:
        yield seen
    finally:
        if before is None:
            del own["forward"]
        else:
            own["forward"] = before
