"""What rounds of a batch cost on a machine, measured at several batches, contexts and draft lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt

from specsim.cost.batches import BatchCost, BatchTokens
from specsim.cost.model import check_rounds, checked_axis, checked_table
from specsim.io.arrays import Ints, Seconds
from specsim.io.errors import InputError
from specsim.io.json import checked

BATCH_PROFILE_KIND = "specsim-batch-profile"
BATCH_PROFILE_VERSION = 1
AGAIN = "measure again"
AXES = ("batches", "contexts", "tokens")


class BatchProfileDocument(TypedDict):
    """The keys of a batch profile, see `BatchProfileCost`."""

    batches: list[int]
    contexts: list[int]
    tokens: list[int]
    verify_s: list[list[list[float]]]
    draft_s: list[list[list[float]]]
    catch_up_s: list[list[float]]
    step_s: float
    round_s: float
    noise_floor: NotRequired[float | None]


@dataclass(frozen=True, repr=False)
class BatchProfileCost(BatchCost):
    """Measured rounds of a batch, linear between what was measured.

    A ragged batch costs as much as a batch of its mean context and mean number of tokens. What lies outside of the
    measured batches, contexts and sizes is an error.

    batches [B], contexts [C], tokens [N] : increasing; contexts in cached tokens, tokens of a pass by sequence, from 1
    verify_s : [B, C, N]; draft_s : [B, C, P], the draft step at each place of a round that begins at the context; the
        last also stands for all later steps
    catch_up_s : [B, C], additional time of a draft step for another token of every sequence
    step_s, round_s : overhead of a step besides its passes, and of a round of speculation beyond that
    batch : sequences in lockstep
    """

    batches: Ints
    contexts: Ints
    tokens: Ints
    verify_s: Seconds
    draft_s: Seconds
    catch_up_s: Seconds
    step_s: float = 0.0
    round_s: float = 0.0
    batch: int = 1

    def batch_draft(self, place: npt.ArrayLike, tokens: BatchTokens) -> Seconds:
        last = self.draft_s.shape[2] - 1
        batch, context = tokens.sequences, tokens.cached / tokens.sequences - np.asarray(place)  # where the round began
        step_s = self._between(self.draft_s, np.arange(last + 1), batch, context, np.minimum(place, last))
        more = tokens.new / tokens.sequences - 1
        return step_s + more * self._between(self.catch_up_s[:, :, None], np.arange(1), batch, context, 0)

    def batch_verify(self, tokens: BatchTokens) -> Seconds:
        batch = tokens.sequences
        return self._between(self.verify_s, self.tokens, batch, tokens.cached / batch, tokens.new / batch)

    def check(self, name: str, noise_floor: float) -> None:
        """Raise InputError for impossible rounds, beyond the noise of the measurement."""
        step_s = self.verify_s[:, :, 0] + self.step_s
        for each, size in enumerate(self.tokens[1:].tolist(), start=1):
            places = min(size - 1, self.draft_s.shape[2])  # with a time of their own; the last stands for all later
            draft_s = self.draft_s[:, :, :places].sum(axis=2) + (size - 1 - places) * self.draft_s[:, :, -1]
            round_s = draft_s + self.verify_s[:, :, each] + self.step_s + self.round_s
            what = f"a round at K = {size - 1}"
            check_rounds(name, round_s.reshape(1, -1), step_s.ravel(), what, noise_floor)

    def _between(self, table: Seconds, last_axis: Ints, *asked: npt.ArrayLike) -> Seconds:
        """Of a table [B, C, X], at these batches, contexts and places of its last axis."""
        from scipy.interpolate import interpn

        values = np.broadcast_arrays(*(np.asarray(value, dtype=np.float64) for value in asked))
        axes = (self.batches, self.contexts, last_axis)
        for name, points, value in zip(AXES, axes, values, strict=True):
            if value.size and not (points[0] <= value.min() and value.max() <= points[-1]):
                raise InputError(
                    f"batch profile covers {name} {points[0]} to {points[-1]}, asked for {value.min():g} to "
                    f"{value.max():g}; measure these"
                )
        return np.asarray(interpn(axes, table, np.stack(values, axis=-1)).reshape(values[0].shape))


def batch_profile_from_json(data: Any, where: str) -> BatchProfileCost:
    """The cost model of a parsed document; InputError where it is malformed."""
    name = f"batch profile {where}"
    document: BatchProfileDocument = checked(data, name, BatchProfileDocument, invalid=AGAIN)
    batches, contexts, tokens = (checked_axis(document[key], f"{name}: {key}", AGAIN) for key in AXES)  # type: ignore[literal-required]
    if not batches[0] == tokens[0] == 1:
        raise InputError(f"{name}: batches and tokens do not begin with 1; {AGAIN}")
    rows: list[int | None] = [len(batches), len(contexts)]
    return BatchProfileCost(
        batches,
        contexts,
        tokens,
        checked_table(document["verify_s"], [*rows, len(tokens)], f"{name}: verify_s", AGAIN, positive=True),
        checked_table(document["draft_s"], [*rows, None], f"{name}: draft_s", AGAIN),
        checked_table(document["catch_up_s"], rows, f"{name}: catch_up_s", AGAIN),
        float(checked_table(document["step_s"], [], f"{name}: step_s", AGAIN)),
        float(checked_table(document["round_s"], [], f"{name}: round_s", AGAIN)),
    )
