"""Costs of a few measured pass times: ``{"pass_ms": {"1": 8.5, "2": 13.5, "5": 20.7}, "draft_ms": 1.2}``.

``pass_ms`` : milliseconds of a target pass by its number of tokens; 1 must be among them. Times are linear in between;
    beyond the largest number the last slope continues
``draft_ms`` : milliseconds per drafted token; 0 if ``pass_ms`` are times of whole rounds
``round_ms`` : further milliseconds per round, such as the pass of a drafter that drafts all tokens at once
``source``, ``date``, ``note`` : remarks
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specsim.cost.model import MAX_SECONDS, MIN_SECONDS, NOISE, CostModel
from specsim.io.arrays import Floats, Seconds
from specsim.io.errors import InputError
from specsim.io.json import from_keys

FORM = 'such as {"pass_ms": {"1": 8.5, "2": 13.5, "5": 20.7}, "draft_ms": 1.2}'
LARGEST_WIDTH = 4096


@dataclass(frozen=True, repr=False)
class PassTimesCost(CostModel):
    """Measured seconds of target passes and of a drafted token, the same at every context length.

    widths : tokens of the passes [N], increasing from 1; pass_s : seconds of the passes [N]

    >>> import specsim
    >>> cost = specsim.read_cost({"pass_ms": {"1": 8.5, "2": 13.5, "5": 20.7}, "draft_ms": 1.2})
    >>> round(1e3 * float(cost.verify(3, 100)), 3), round(1e3 * float(cost.draft(2, 100)), 3)
    (15.9, 2.4)
    """

    widths: Floats
    pass_s: Seconds
    draft_s: float
    round_s: float = 0.0

    def round_overhead(self) -> float:
        return self.round_s

    def draft(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        return np.full(np.shape(context), n_tokens * self.draft_s)

    def verify(self, n_tokens: int, context: npt.ArrayLike) -> Seconds:
        seconds = np.interp(n_tokens, self.widths, self.pass_s)
        if n_tokens > self.widths[-1] and len(self.widths) > 1:
            slope = np.diff(self.pass_s[-2:])[0] / np.diff(self.widths[-2:])[0]
            seconds += max(slope, 0.0) * (n_tokens - self.widths[-1])
        return np.full(np.shape(context), seconds)

    def autoregressive_step(self, context: npt.ArrayLike) -> Seconds:
        return np.full(np.shape(context), self.pass_s[0])

    def notes(self, max_draft_tokens: int, contexts: tuple[int, int]) -> list[str]:
        measured = f"passes of up to {max_draft_tokens + 1} tokens, measured to {self.widths[-1]:g}"
        notes = [f"extrapolated: {measured}"] if max_draft_tokens + 1 > self.widths[-1] else []
        return ["pass times are taken to be the same at all contexts", *notes, *self.contradictions]

    @property
    def contradictions(self) -> list[str]:
        """A line per pair of neighbouring passes where the one with more tokens was faster by more than the noise."""
        return [
            f"pass times contradict each other: {wide:g} tokens took {1e3 * wide_s:.4g} ms, {narrow:g} took "
            f"{1e3 * narrow_s:.4g} ms; measure both again"
            for narrow, narrow_s, wide, wide_s in zip(
                self.widths[:-1], self.pass_s[:-1], self.widths[1:], self.pass_s[1:], strict=True
            )
            if wide_s < (1 - NOISE) * narrow_s
        ]


@dataclass(frozen=True)
class PassTimesForm:
    """The keys of a file."""

    pass_ms: dict[str, float]
    draft_ms: float
    round_ms: float = 0.0
    source: str = ""
    date: str = ""
    note: str = ""

    def cost(self, name: str) -> PassTimesCost:
        """The cost model; InputError for impossible times."""
        try:
            times = sorted((float(width), 1e-3 * ms) for width, ms in self.pass_ms.items())
        except ValueError:
            raise InputError(f"{name}: a key of pass_ms is not a number of tokens; write it {FORM}") from None
        widths, seconds = (np.array(column) for column in zip(*times, strict=True)) if times else (np.array([]),) * 2
        if not widths.size or widths[0] != 1 or widths[-1] > LARGEST_WIDTH or (np.diff(widths) <= 0).any():
            raise InputError(
                f"{name}: pass_ms has times for {', '.join(self.pass_ms) or 'no'} tokens; give different numbers of "
                f"tokens from 1 (a decode step) to {LARGEST_WIDTH}"
            )
        other_s = np.array([self.draft_ms, self.round_ms]) * 1e-3
        if (
            not ((seconds >= MIN_SECONDS) & (seconds <= MAX_SECONDS)).all()
            or not ((other_s >= 0) & (other_s <= MAX_SECONDS)).all()
        ):
            raise InputError(f"{name}: a time is negative, 0 or not finite; write it in milliseconds, {FORM}")
        return PassTimesCost(widths, seconds, *other_s.tolist())


def pass_times_from_json(data: Mapping[str, object], name: str) -> PassTimesCost:
    """The cost model of a parsed file; InputError where it is malformed."""
    return from_keys(dict(data), PassTimesForm, name, f"write it {FORM}").cost(name)
