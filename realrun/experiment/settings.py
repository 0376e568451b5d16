"""Settings of experiments: what to record and tune, and how often to decode."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from realrun.experiment.timing import check_repeats
from realrun.measure.record import RecordSettings
from specsim.policy.base import Policy
from specsim.policy.registry import POLICIES
from specsim.report.experiment import Options


@dataclass(frozen=True)
class Candidate:
    """A policy to validate.

    role : where its settings come from: tuned, fitted, default or fixed_k
    train_speedup : forecast before anything was decoded, from tuning costs and tuning prompts; None where unknown
    variant : of the policy, as leaderboards label it
    """

    policy: Policy
    role: str
    train_speedup: float | None = None
    variant: str = ""


@dataclass(frozen=True)
class ExperimentSettings:
    """How to record, tune and decode; see `ValidationSettings`."""

    record: RecordSettings
    kinds: tuple[type[Policy], ...] | None = None
    trials: int = 100
    repeats: int = 3
    tuning_share: float = 0.5
    seed: int = 0
    minutes: float = 0.0

    def __post_init__(self) -> None:
        check_repeats(self.repeats)

    @property
    def policies(self) -> tuple[type[Policy], ...]:
        """Return the policies to compare."""
        return tuple(POLICIES.values()) if self.kinds is None else self.kinds

    def options(self, repeats: int) -> Options:
        """Return the options as the document of an experiment holds them. repeats : that were made"""
        return Options(self.trials, repeats, self.tuning_share, self.seed)


@dataclass(frozen=True)
class ValidationSettings(ExperimentSettings):
    """How to record, tune and decode in a validation.

    Attributes
    ----------
    record : what is recorded, and how tokens are chosen
    kinds : policies to compare; None: all that the trace can serve
    trials : configurations to try per policy
    repeats : timed runs of every held-out prompt and policy, an odd number from 3 on; within minutes one, and the
        others where time is left and noise asks for them
    tuning_share : share of the prompts to tune on, in (0, 1)
    seed : of all randomness
    minutes : time to spend: prompts and policies are left out to fit, the least telling first; 0: no limit
    overwrite : whether an existing validation is replaced
    trace : a recorded trace of these prompts and settings; None: the trace in the output folder, recorded if missing
    cost : costs from before to forecast by, a file or a name that `specsim.read_cost` reads; None: a profile made now

    Examples
    --------
    >>> import realrun
    >>> realrun.ValidationSettings(realrun.RecordSettings(max_draft_tokens=8), trials=20).repeats
    3
    """

    overwrite: bool = False
    trace: Path | None = None
    cost: Path | None = None
