"""What a replay counts: sums per sequence, and a log with a row per round."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specsim.io.arrays import IntArray, Ints, Seconds

if TYPE_CHECKING:
    import pandas as pd

PARTS = ("draft", "policy", "verify", "other")  # of a round's seconds


class Sums(NamedTuple):
    """Arrays over sequences, to which a kernel adds.

    num_rounds, drafted, accepted, policy_steps : int64; policy_steps counts how often the policy was asked
    verified : int64, tokens in the target's passes beside the pending ones
    truncated : int64, rounds that asked for more than the recorded trees hold
    draft_s, policy_s, verify_s, other_s : float64
    """

    num_rounds: Ints
    drafted: Ints
    accepted: Ints
    policy_steps: Ints
    verified: Ints
    truncated: Ints
    draft_s: Seconds
    policy_s: Seconds
    verify_s: Seconds
    other_s: Seconds

    @staticmethod
    def zeros(*shape: int) -> Sums:
        arrays: Any = (np.zeros(shape, np.float64 if name.endswith("_s") else np.int64) for name in Sums._fields)
        return Sums(*arrays)

    def at(self, which: Any) -> Sums:
        """Views of these sequences' sums."""
        return Sums(*(values[which] for values in self))

    @property
    def seconds(self) -> Seconds:
        """[..., 4], in draft, policy, verify, other."""
        return np.stack([self.draft_s, self.policy_s, self.verify_s, self.other_s], axis=-1)


# The fields of `RoundLog` as compiled code takes them.
RoundArrays = namedtuple(
    "RoundArrays", "sequence t drafted accepted verified last drafter draft_s policy_s verify_s other_s baseline_s"
)


@dataclass(frozen=True, repr=False)
class RoundLog:
    """Rounds in the order in which they were replayed, an array [R] per column: counts int64, seconds float64.

    sequence : index of the sequence in the trace
    t : output position at which the round starts
    drafted, accepted : tokens; the round emits accepted + 1 tokens, fewer where the text ends
    verified : drafted tokens that the target verified; in a chain, all but those that its policy drops
    last : place of the last accepted token among the verified tokens, from 1; 0 where none is accepted; in a
        chain, the same as accepted
    drafter : number of the drafter of a joined trace, from 1; 0 where nothing was drafted, and for other traces
    draft_s, policy_s, verify_s, other_s : seconds of the round's parts; their sums per sequence are `Replay.seconds`
    baseline_s : seconds to emit the round's tokens without speculation; `replay` computes it
    """

    sequence: IntArray
    t: IntArray
    drafted: IntArray
    accepted: IntArray
    verified: IntArray
    last: IntArray
    drafter: IntArray
    draft_s: Seconds
    policy_s: Seconds
    verify_s: Seconds
    other_s: Seconds
    baseline_s: Seconds

    @staticmethod
    def zeros(rounds: int) -> RoundLog:
        """Allocate a log of this many rounds."""
        names = RoundArrays._fields
        arrays: Any = (np.zeros(rounds, np.float64 if name.endswith("_s") else np.int64) for name in names)
        return RoundLog(*arrays)

    @property
    def arrays(self) -> RoundArrays:
        return RoundArrays(*(getattr(self, name) for name in RoundArrays._fields))

    def __repr__(self) -> str:
        return (
            f"RoundLog: {len(self):,} rounds, {self.drafted.sum():,} tokens drafted, {self.accepted.sum():,} accepted"
        )

    def __len__(self) -> int:
        return len(self.sequence)

    def __getitem__(self, which: Any) -> RoundLog:
        """Select rounds by a slice, a mask [R] or indices."""
        return RoundLog(*(values[which] for values in self.arrays))

    def rows(self) -> list[tuple[int, ...]]:
        """List (sequence, t, drafted, accepted, verified, last) of every round, as plain numbers."""
        return list(zip(*(values.tolist() for values in self.arrays[:6]), strict=True))

    def to_frame(self) -> pd.DataFrame:
        """Tabulate a row per round: counts in tokens, parts and baseline in seconds; `RoundLog` defines the columns.

        The drafter is a column only for joined traces.
        """
        import pandas as pd  # slow to import, and a replay does not need it

        frame = pd.DataFrame(self.arrays._asdict())
        return frame if self.drafter.any() else frame.drop(columns="drafter")
