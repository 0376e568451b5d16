"""What `replay` gives: a replay that shows itself as a figure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specsim.replaying.replay import Replay

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Run(Replay):
    """A replay, see there for its arrays."""

    def __repr__(self) -> str:
        tokens, rounds = int(self.output_tokens.sum()), int(self.num_rounds.sum())
        return f"{self.policy}: {tokens:,} tokens in {rounds:,} rounds, speedup {self.speedup:.3f}"

    def plot(self) -> Figure:
        """Accepted tokens per round, and where the time of a token goes, beside autoregressive decoding.

        Returns
        -------
        matplotlib.figure.Figure
            Shown by a notebook; `savefig` writes it.

        Examples
        --------
        >>> import specsim
        >>> trace, cost = specsim.read_trace("example:lab-eagle"), specsim.read_cost("example:lab-deep-eagle")
        >>> figure = specsim.replay(trace, cost, "fixed_k", k=3).plot()
        >>> [axes.get_title(loc="left") for axes in figure.axes]
        ['Accepted tokens per round', 'Time per output token']
        """
        from specsim.report.results.figures import run_figure  # matplotlib is slow to import

        accepted = None if self.rounds is None else self.rounds.accepted
        tokens = int(self.output_tokens.sum())
        return run_figure(accepted, self.seconds.sum(axis=0) / tokens, float(self.autoregressive_s.sum()) / tokens)
