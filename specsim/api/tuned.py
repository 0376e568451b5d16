"""What `tune` and `cross_validate` give: results that show themselves as a figure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specsim.tuning.crossval import CrossValidation
from specsim.tuning.search import CALLED, TuneResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WHAT = "speedup on sequences that did not tune, with 95 % intervals"


@dataclass(frozen=True, repr=False)
class Tuned(TuneResult):
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
        from specsim.report.results.figures import estimates_figure

        others = {
            CALLED[name].removeprefix("the "): one.prediction.speedup.as_dict() for name, one in self.references.items()
        }
        return estimates_figure(["tuned", *others], [self.holdout.speedup.as_dict(), *others.values()], WHAT)


@dataclass(frozen=True)
class CrossValidated(CrossValidation):
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
        from specsim.report.results.figures import estimates_figure

        others = {
            CALLED[name].removeprefix("the "): one.prediction.speedup.as_dict() for name, one in self.references.items()
        }
        return estimates_figure(["tuned", *others], [self.estimate.speedup.as_dict(), *others.values()], WHAT)
