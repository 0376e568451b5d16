"""What a claim states, and of what: the form of a claim file.

A claim is a value with its tolerance, a bound, or an order. Its subject is a replay, a real run or a value of a
document; a ratio and a difference have two subjects.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from specsim.io.user_file import is_file_name

VERSION = 1

Text: TypeAlias = Annotated[str, Meta(min_length=1)]
PositiveInt: TypeAlias = Annotated[int, Meta(ge=1)]
PositiveFloat: TypeAlias = Annotated[float, Meta(gt=0)]
NotNegative: TypeAlias = Annotated[float, Meta(ge=0)]
Share: TypeAlias = Annotated[float, Meta(gt=0, lt=1)]
Setting: TypeAlias = bool | int | float | Text | list[float]
Step: TypeAlias = Text | Annotated[int, Meta(ge=0)] | dict[str, str | int | float | bool]
JsonPath: TypeAlias = Annotated[list[Step], Meta(min_length=1)]
Verdict: TypeAlias = Literal["holds", "drifted", "contradicted", "not decidable"]


class Strict(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Base of all parts of a claim: unknown keys and values of another type are refused."""


class Seconds(Strict, frozen=True):
    """The papers' cost: seconds of a draft step and of a target pass."""

    s_d: PositiveFloat
    s_t: PositiveFloat


class ReplaySubject(Strict, frozen=True):
    """A policy replayed on a trace. Paths are relative to the claim file.

    average : "tokens" weighs every token the same (sum over sum), "sequences" every sequence (mean of their ratios)
    max_output_tokens : every sequence as if it had been decoded with this limit
    max_draft_tokens : the trace as if it had been recorded to this depth
    tuning_share : share of the sequences on which policies that learn do so; if given, every policy is reported on the
        others alone. Default: a half, and policies that do not learn are reported on all sequences
    rounds : for quantity "rounds_identical_percent", the rounds.parquet of a real run of these sequences
    replays : for a policy that draws, the mean over this many replays, with seeds from `seed` on
    """

    trace: Text
    cost: Text | Seconds
    policy: Text
    draft_cost: Text | None = None
    batch: PositiveInt | None = None
    settings: dict[str, Setting] = {}
    quantity: Text = "speedup"
    average: Literal["tokens", "sequences"] = "tokens"
    max_output_tokens: PositiveInt | None = None
    max_draft_tokens: PositiveInt | None = None
    tuning_share: Share | None = None
    rounds: Text | None = None
    replays: Annotated[int, Meta(ge=1, le=1000)] = 1
    seed: Annotated[int, Meta(ge=0, lt=2**32)] = 0


class RunSubject(Strict, frozen=True):
    """A number that `realrun validate` measured: of a row, by its label or policy, or of the whole run.

    validation : the folder that it wrote, or its validation.json
    """

    validation: Text
    policy: Text | None = None
    quantity: Text = "speedup"


class ValueSubject(Strict, frozen=True):
    """A number in a document, a value with keys estimate, low, high, or the mean of a list of numbers from 0 on.

    document : a JSON file, or a CSV file as a list of its rows
    at : the path to it: keys, positions from 0, and {key = value, ...} for the only entry of a list with these values
    """

    document: Text
    at: JsonPath


Subject: TypeAlias = ReplaySubject | RunSubject | ValueSubject
SUBJECTS: dict[str, type[Subject]] = {  # by the key that only they have
    "trace": ReplaySubject,
    "validation": RunSubject,
    "document": ValueSubject,
}


class Statement(Strict, frozen=True):
    """What is claimed of the subject.

    about : "record" asks whether these very sequences give that number, so that only the noise of measured seconds
        leaves doubt; "prompts" asks it of prompts like these, with the 95 % interval over sequences. The first is the
        default of `expected`, the second that of bounds and orders
    interval : in addition to `expected`, both ends of the 95 % interval over sequences, with its tolerance
    verdict : the known verdict; another verdict fails
    source : where the figure is printed, or who states it
    """

    name: Text
    source: str = ""
    expected: float | None = None
    tolerance: NotNegative | None = None
    tolerance_percent: NotNegative | None = None
    interval: tuple[float, float] | None = None
    at_least: float | None = None
    at_most: float | None = None
    about: Literal["record", "prompts"] | None = None
    verdict: Verdict = "holds"

    def __post_init__(self) -> None:
        has_bounds = self.at_least is not None or self.at_most is not None
        tolerances = (self.tolerance is not None) + (self.tolerance_percent is not None)
        if self.expected is not None and has_bounds:
            raise ValueError("expected and a bound exclude each other; remove either")
        if (self.expected is not None) != (tolerances == 1):
            raise ValueError("expected needs either tolerance or tolerance_percent")
        if self.interval is not None and (self.expected is None or self.interval[0] > self.interval[1]):
            raise ValueError("interval needs expected and both ends; give [low, high]")
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise ValueError("at_least is above at_most; swap them")

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The least and the largest value with which it holds; None for an order."""
        if self.expected is not None:
            return self.around(self.expected)
        if self.at_least is None and self.at_most is None:
            return None
        low = -float("inf") if self.at_least is None else self.at_least
        return low, float("inf") if self.at_most is None else self.at_most

    def around(self, value: float) -> tuple[float, float]:
        """The least and the largest value within the tolerance of this value."""
        percent = self.tolerance_percent or 0.0
        reach = abs(value) * percent / 100 if self.tolerance is None else self.tolerance
        return value - reach, value + reach

    @property
    def over_prompts(self) -> bool:
        """Whether it is a statement about prompts like these, not about this record alone."""
        return self.about == "prompts" if self.about else self.expected is None


@dataclass(frozen=True)
class Claim:
    """A claim of a file.

    home : the file's folder
    form : "value" of a single subject; "ratio" or "difference" of the first subject's value and the second's; or
        "order", in which each subject's value is above the next subject's
    """

    home: Path
    statement: Statement
    form: Literal["value", "ratio", "difference", "order"]
    subjects: tuple[Subject, ...]

    def __post_init__(self) -> None:
        count, bounds = len(self.subjects), self.statement.bounds
        if self.form == "order" and (bounds is not None or count < 2):
            raise ValueError("an order is of two subjects or more, and has neither expected nor bounds")
        if self.form != "order" and bounds is None:
            raise ValueError("nothing is claimed; give expected with a tolerance, at_least, at_most, or an order")
        if self.form in ("ratio", "difference") and count != 2:
            raise ValueError(f"a {self.form} is of two subjects")

    @property
    def name(self) -> str:
        return self.statement.name

    @property
    def claimed(self) -> str:
        """What is claimed, in words."""
        statement = self.statement
        if self.form == "order":
            return " > ".join(subject_text(subject) for subject in self.subjects)
        if statement.expected is not None:
            by = f"{statement.tolerance:g}" if statement.tolerance is not None else f"{statement.tolerance_percent:g} %"
            ends = "" if statement.interval is None else " [{:g}, {:g}]".format(*statement.interval)
            return f"{statement.expected:g}{ends} +- {by}"
        parts = [("at least", statement.at_least), ("at most", statement.at_most)]
        return ", ".join(f"{words} {value:g}" for words, value in parts if value is not None)


def policy_at(policy: str, home: Path) -> str:
    """A claim's policy as `find_policy` takes it: FILE.py is relative to the claim file."""
    return str(home / policy) if is_file_name(policy) else policy


def policy_file(subject: Subject, home: Path) -> Path | None:
    """The Python file that evaluating this subject runs, or None."""
    if not isinstance(subject, ReplaySubject):
        return None
    name = policy_at(subject.policy, home)
    return None if name == subject.policy else Path(name.rpartition(".py")[0] + ".py").resolve()


def subject_text(subject: Subject) -> str:
    """Name a subject of an order by what differs from the others."""
    if isinstance(subject, ReplaySubject):
        settings = ", ".join(f"{key}={value}" for key, value in subject.settings.items())
        return f"{subject.policy}({settings})" if settings else subject.policy
    if isinstance(subject, RunSubject):
        return subject.policy or subject.quantity
    return ".".join(_step_text(step) for step in subject.at)


def _step_text(step: Any) -> str:
    return ",".join(map(str, step.values())) if isinstance(step, dict) else str(step)
