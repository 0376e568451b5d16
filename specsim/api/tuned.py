"""What `tune` and `cross_validate` give: results that show themselves as a figure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specsim.speedup.result import Result
from specsim.tuning.crossval import CrossValidation
from specsim.tuning.search import CALLED, Reference, TuneResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from specsim.speedup.intervals import Estimate

WHAT = "speedup on sequences that did not tune, with 95 % intervals"


@dataclass(frozen=True, repr=False)
class Tuned(Result, TuneResult):
    """What tuning found, see there for its fields."""

    def plot(self) -> Figure:
        """Speedup of the tuned policy with its 95 % interval, above that of the policies beside it.

        Returns
        -------
        matplotlib.figure.Figure

        Examples
        --------
        >>> import specsim
        >>> trace, cost = specsim.read_trace("example:lab-eagle"), specsim.read_cost("example:lab-deep-eagle")
        >>> figure = specsim.tune(trace, cost, "fixed_k").plot()
        >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
        ['tuned', 'runner-up', 'default settings', 'best fixed K']
        """
        return _beside_others(self.holdout.speedup, self.references)


@dataclass(frozen=True, repr=False)
class CrossValidated(Result, CrossValidation):
    """What cross-validation found, see there for its fields."""

    def plot(self) -> Figure:
        """Speedup over all folds with its 95 % interval, above that of the policies beside it.

        Returns
        -------
        matplotlib.figure.Figure

        Examples
        --------
        >>> import specsim
        >>> trace, cost = specsim.read_trace("example:lab-eagle"), specsim.read_cost("example:lab-deep-eagle")
        >>> figure = specsim.cross_validate(trace, cost, "fixed_k", folds=3).plot()
        >>> figure.axes[0].get_yticklabels()[0].get_text()
        'tuned'
        """
        return _beside_others(self.estimate.speedup, self.references)


def _beside_others(tuned: Estimate, references: Mapping[str, Reference]) -> Figure:
    from specsim.report.results.figures import estimates_figure

    found = {CALLED[name].removeprefix("the "): one.prediction.speedup.as_dict() for name, one in references.items()}
    return estimates_figure(["tuned", *found], [tuned.as_dict(), *found.values()], WHAT)
