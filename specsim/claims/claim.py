"""What a claim states, and of what: the form of a claim file.

A claim is a value with its tolerance, a bound, or an order, of one subject: a replay, a real run or a value of a JSON
document; or of two, their ratio or their difference. Everything else in this package follows from these classes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

VERSION = 1


def _printable(text: str) -> str:
    """Text that fits on one line of a terminal, and into XML."""
    if not text.isprintable():
        raise ValueError(f"{text[:60]!r} holds characters that cannot be printed; write one line of plain text")
    return text


Printable: TypeAlias = Annotated[str, AfterValidator(_printable)]
Text: TypeAlias = Annotated[Printable, Field(min_length=1)]
Share: TypeAlias = Annotated[float, Field(gt=0, lt=1)]
NotNegative: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Setting: TypeAlias = bool | int | FiniteFloat | Text | list[FiniteFloat]
Step: TypeAlias = Text | Annotated[int, Field(ge=0)] | dict[str, Printable | int | float | bool]
Way: TypeAlias = Annotated[list[Step], Field(min_length=1)]
Names: TypeAlias = Annotated[list[Text], Field(min_length=1)]
Ends: TypeAlias = Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)]
Verdict: TypeAlias = Literal["holds", "drifted", "contradicted", "not decidable"]


class Strict(BaseModel):
    """No key that is not known, no value of another type than the key's, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Seconds(Strict):
    """The papers' cost: seconds of a draft step and of a target pass."""

    s_d: Annotated[PositiveFloat, Field(allow_inf_nan=False)]
    s_t: Annotated[PositiveFloat, Field(allow_inf_nan=False)]


class ReplaySubject(Strict):
    """A policy replayed on a trace. Paths are relative to the claim file.

    average : "tokens" weighs every token alike (sum over sum), "sequences" every sequence (mean of their ratios)
    max_output_tokens : every sequence as if it had been decoded with this limit
    max_draft_tokens : the trace as if it had been recorded to this depth
    tuning_share : share of the sequences on which policies that learn do so; given, every policy is reported on the
        others alone. Unless given, a half, and policies that do not learn are reported on all
    rounds : of quantity "rounds_identical_percent", the rounds.parquet of a real run of these sequences
    replays : of a policy that draws, the mean over so many, with seeds from `seed` on
    """

    trace: Text
    cost: Text | Seconds
    draft_cost: Text | None = None
    batch: PositiveInt | None = None
    policy: Text
    settings: dict[str, Setting] = {}
    quantity: Text = "speedup"
    average: Literal["tokens", "sequences"] = "tokens"
    max_output_tokens: PositiveInt | None = None
    max_draft_tokens: PositiveInt | None = None
    tuning_share: Share | None = None
    rounds: Text | None = None
    replays: Annotated[int, Field(ge=1, le=1000)] = 1
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0


class ServingSubject(Strict):
    """The speedup of a policy in full batches, as `specsim serve schedule` has it.

    serving : the trace whose acceptance every sequence has
    cost : one that knows batches
    context : tokens in every cache; those of the trace unless given
    policy : one that learns nothing, or "goodput", which chooses K anew in every round up to its max_draft_tokens
    """

    serving: Text
    cost: Text
    batch: Annotated[int, Field(ge=1, le=65_536)] = 1
    context: PositiveInt | None = None
    policy: Text
    settings: dict[str, Setting] = {}
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0


class RunSubject(Strict):
    """What `realrun validate` measured: of one of its rows, by label or by policy, or of the whole run.

    validation : the folder that it wrote, or its validation.json
    """

    validation: Text
    policy: Text | None = None
    quantity: Text = "speedup"


class ValueSubject(Strict):
    """A number in a JSON document, a value with keys estimate, low, high, or the mean of a list, no number below 0.

    at : the way to it: keys, positions from 0, and {key = value, ...} for the one entry of a list that has these
    over : the way to a second list, of the same sequences, all above 0; the value is then the first one's sum over this
        one's
    """

    document: Text
    at: Way
    over: Way | None = None


Subject: TypeAlias = ReplaySubject | ServingSubject | RunSubject | ValueSubject
SUBJECTS: dict[str, type[Subject]] = {  # by the key that tells them apart
    "trace": ReplaySubject,
    "serving": ServingSubject,
    "validation": RunSubject,
    "document": ValueSubject,
}


class Statement(Strict):
    """What is claimed, apart from its subject.

    about : "record" asks whether these very sequences give that number, so that only the noise of measured seconds
        leaves doubt; "prompts" asks it of prompts like these, with the 95 % interval over sequences. The first is the
        default of `expected`, the second that of bounds and orders
    interval : beside `expected`, both ends of the 95 % interval over sequences, with its tolerance
    verdict : what the claim is known to come out as; another verdict fails
    source : where the figure is printed, or who states it
    """

    name: Text
    source: Printable = ""
    expected: FiniteFloat | None = None
    tolerance: NotNegative | None = None
    tolerance_percent: NotNegative | None = None
    interval: Ends | None = None
    at_least: FiniteFloat | None = None
    at_most: FiniteFloat | None = None
    about: Literal["record", "prompts"] | None = None
    verdict: Verdict = "holds"

    @model_validator(mode="after")
    def _states_one_thing(self) -> Self:
        bounds = self.at_least is not None or self.at_most is not None
        tolerances = (self.tolerance is not None) + (self.tolerance_percent is not None)
        if self.expected is not None and bounds:
            raise ValueError("expected and a bound exclude each other; keep one")
        if (self.expected is not None) != (tolerances == 1):
            raise ValueError("expected goes with one of tolerance and tolerance_percent")
        if self.interval is not None and (self.expected is None or self.interval[0] > self.interval[1]):
            raise ValueError("interval is [low, high] beside expected; give both, the lower end first")
        if self.at_least is not None and self.at_most is not None and self.at_least > self.at_most:
            raise ValueError("at_least is above at_most; swap them")
        return self

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The least and the largest value with which it holds; None of an order."""
        if self.expected is not None:
            return self.around(self.expected)
        if self.at_least is None and self.at_most is None:
            return None
        low = -float("inf") if self.at_least is None else self.at_least
        return low, float("inf") if self.at_most is None else self.at_most

    def around(self, value: float) -> tuple[float, float]:
        """The least and the largest value that the tolerance does not tell from this one."""
        percent = self.tolerance_percent or 0.0
        reach = abs(value) * percent / 100 if self.tolerance is None else self.tolerance
        return value - reach, value + reach

    @property
    def over_prompts(self) -> bool:
        """Whether it is a statement about prompts like these, not about this record alone."""
        return self.about == "prompts" if self.about else self.expected is None


class Claim(Strict):
    """One claim of a file.

    form : "value" of one subject, "ratio" of the first subject's value to the second's, "difference" of the first's
        less the second's, or "order", in which each subject's value is above the next one's
    """

    home: Path
    statement: Statement
    form: Literal["value", "ratio", "difference", "order"]
    subjects: tuple[Subject, ...]

    @model_validator(mode="after")
    def _fits_its_form(self) -> Self:
        count, bounds = len(self.subjects), self.statement.bounds
        if self.form == "order" and (bounds is not None or count < 2):
            raise ValueError("an order is of two subjects or more, and has neither expected nor bounds")
        if self.form != "order" and bounds is None:
            raise ValueError("nothing is claimed; give expected with a tolerance, at_least, at_most, or an order")
        if self.form in ("ratio", "difference") and count != 2:
            raise ValueError(f"a {self.form} is of two subjects")
        return self

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
    from specsim.policy.registry import is_file_name  # compiles policies, which a claim need not have

    return str(home / policy) if is_file_name(policy) else policy


def policy_file(subject: Subject, home: Path) -> Path | None:
    """The Python file that evaluating this subject runs; None where it runs none."""
    if not isinstance(subject, ReplaySubject | ServingSubject):
        return None
    name = policy_at(subject.policy, home)
    return None if name == subject.policy else Path(name.rpartition(".py")[0] + ".py").resolve()


def subject_text(subject: Subject) -> str:
    """What tells a subject of an order from the others, in short."""
    if isinstance(subject, ReplaySubject | ServingSubject):
        settings = ", ".join(f"{key}={value}" for key, value in subject.settings.items())
        return f"{subject.policy}({settings})" if settings else subject.policy
    if isinstance(subject, RunSubject):
        return subject.policy or subject.quantity
    return _way_text(subject.at)


def _way_text(at: list[Any]) -> str:
    return ".".join(",".join(str(value) for value in one.values()) if isinstance(one, dict) else str(one) for one in at)
