"""Evaluate claims again and judge them: holds, drifted, contradicted, or not decidable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from specsim.arrays import Floats
from specsim.claims.claim import Claim, Verdict, policy_file, subject_text
from specsim.claims.files import read_claims
from specsim.claims.measured import Measured, PerSequence
from specsim.claims.subjects import measure
from specsim.errors import InputError
from specsim.speedup.intervals import Estimate, ratio_difference, ratio_of_ratios

ROUNDING = 1e-9  # relative, of a bound: what sums in another order may differ by


@dataclass(frozen=True)
class Checked:
    """A claim and what it came out as.

    found : the value with what it may be, which decided; None of an order
    interval : the value with its 95 % interval over sequences, where the claim has one
    steps : of an order, each neighbour's lead over the next with its interval
    seconds : of the first subject, per sequence [S], and its tokens [S]; None where nothing takes time
    """

    claim: Claim
    verdict: Verdict
    found: Estimate | None = None
    interval: Estimate | None = None
    steps: tuple[Estimate, ...] = ()
    seconds: tuple[Floats, Floats] | None = None

    @property
    def passed(self) -> bool:
        """Whether the verdict is the one that the claim is known to have."""
        return self.verdict == self.claim.statement.verdict

    @property
    def recomputed(self) -> str:
        """What was found, in words; the interval only where there is one."""
        if self.found is None:
            names = [subject_text(subject) for subject in self.claim.subjects]
            return ", ".join(f"{name} {_signed(step)}" for name, step in zip(names, self.steps, strict=False))
        return _text(self.interval or self.found)

    @property
    def message(self) -> str:
        """One line for whoever has to mend it."""
        known = self.claim.statement.verdict
        wanted = "" if known == "holds" else f", known as {known}"
        source = f" ({self.claim.statement.source})" if self.claim.statement.source else ""
        return (
            f"{self.claim.name}: {self.verdict}{wanted}: claimed {self.claim.claimed}, found {self.recomputed}{source}"
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.claim.name,
            "verdict": self.verdict,
            "known_verdict": self.claim.statement.verdict,
            "passed": self.passed,
            "claimed": self.claim.claimed,
            "recomputed": found.as_dict() if (found := self.interval or self.found) else None,
            "order": [step.as_dict() for step in self.steps] or None,
            "source": self.claim.statement.source,
        }


def judge(found: Estimate, bounds: tuple[float, float], *, outside: Verdict) -> Verdict:
    """Whether all that a value may be lies inside the bounds, outside, or neither: then nothing can be decided."""
    low, high = (bound * (1 + side * ROUNDING * np.sign(bound)) for bound, side in zip(bounds, (-1, 1), strict=True))
    if low <= found.low and found.high <= high:
        return "holds"
    return outside if found.high < low or found.low > high else "not decidable"


def judge_order(leads: Iterable[Estimate]) -> Verdict:
    """An order holds where every subject leads the next one significantly, each by its interval."""
    leads = tuple(leads)
    if any(lead.high < 0 for lead in leads):
        return "contradicted"
    return "holds" if all(lead.low > 0 for lead in leads) else "not decidable"


def check(claim: Claim) -> Checked:
    """Evaluate one claim. InputError, which names it, where it cannot be evaluated."""
    try:
        measured = [measure(subject, claim.home) for subject in claim.subjects]
        statement = claim.statement
        if claim.form == "order":
            leads = tuple(
                _lead(first, second, over_prompts=statement.over_prompts) for first, second in pairwise(measured)
            )
            return Checked(claim, judge_order(leads), steps=leads, seconds=measured[0].seconds)
        found = FORMS[claim.form](*measured, over_prompts=statement.over_prompts)
        assert statement.bounds is not None
        outside: Verdict = "contradicted" if statement.expected is None else "drifted"
        verdict, interval = judge(found, statement.bounds, outside=outside), None
        if statement.interval is not None:
            interval = FORMS[claim.form](*measured, over_prompts=True)
            if not _ends_hold(interval, claim):
                verdict = outside
        return Checked(claim, verdict, found, interval, seconds=measured[0].seconds)
    except InputError as error:
        raise InputError(f"claim {claim.name!r}: {error}") from None
    except OSError as error:  # a name that no file can have; the others are refused by who reads them
        raise InputError(f"claim {claim.name!r}: {error.strerror}: {str(error.filename)[:80]}...") from None


def check_policy_files(claim: Claim, *, allowed: bool = False) -> None:
    """Raise InputError if a claim would run a policy file outside the working tree, unless that is allowed.

    The working tree is that of Git around the current directory, or else the current directory.
    """
    here = Path.cwd()
    tree = next((folder for folder in (here, *here.parents) if (folder / ".git").exists()), here)
    for subject in claim.subjects:
        path = policy_file(subject, claim.home)
        if path is not None and not allowed and not path.is_relative_to(tree):
            raise InputError(
                f"claim {claim.name!r} would run the policy file {path}, outside the working tree {tree}; read it, "
                "then allow it with --allow-policy-files"
            )


def check_files(
    paths: Sequence[Path],
    *,
    allow_policy_files: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Checked]:
    """Evaluate the claims of these files. All files are read before the first claim is evaluated.

    allow_policy_files : whether claims may run policy files, which are Python programs, outside the working tree

    Raises InputError for a claim that cannot be evaluated or may not.
    """
    claims = [(path, claim) for path in paths for claim in read_claims(path)]
    for path, claim in claims:
        try:
            check_policy_files(claim, allowed=allow_policy_files)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
    found = []
    for done, (path, claim) in enumerate(claims, start=1):
        try:
            found.append(check(claim))
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        if progress:
            progress("claims", done, len(claims))
    return found


def _lead(first: Measured, second: Measured, *, over_prompts: bool) -> Estimate:
    """How much larger the first value is: of the same sequences in pairs, else by the ends of the two intervals."""
    if over_prompts and (ratio := _paired(first, second)) is not None:
        return Estimate(ratio.estimate - 1, ratio.low - 1, ratio.high - 1)
    return _difference(first, second, over_prompts=over_prompts)


def _ends_hold(found: Estimate, claim: Claim) -> bool:
    """Whether both ends of the interval are those that the claim has."""
    statement = claim.statement
    assert statement.interval is not None
    ends = zip((found.low, found.high), statement.interval, strict=True)
    return all(judge(Estimate.exact(end), statement.around(said), outside="drifted") == "holds" for end, said in ends)


def _value(only: Measured, *, over_prompts: bool) -> Estimate:
    return only.prompts if over_prompts else only.record


def _apart(first: Measured, second: Measured, *, over_prompts: bool) -> Estimate:
    """The first value less the second, by the ends of their intervals."""
    a, b = (_value(measured, over_prompts=over_prompts) for measured in (first, second))
    return Estimate(a.estimate - b.estimate, a.low - b.high, a.high - b.low)


def _difference(first: Measured, second: Measured, *, over_prompts: bool) -> Estimate:
    """The first value less the second; of the same sequences in pairs. The noise floors widen it."""
    a, b = first.per_sequence, second.per_sequence
    if not over_prompts or a is None or b is None or not _same_sequences(a, b):
        return _apart(first, second, over_prompts=over_prompts)
    found = ratio_difference(a.top, a.bottom, b.top, b.bottom).difference
    reach = max(first.floor_percent, second.floor_percent) / 100 * abs(second.value)
    return Estimate(found.estimate, found.low - reach, found.high + reach)


def _ratio(first: Measured, second: Measured, *, over_prompts: bool) -> Estimate:
    if over_prompts and (ratio := _paired(first, second)) is not None:
        return ratio
    a, b = (_value(measured, over_prompts=over_prompts) for measured in (first, second))
    if not b.low > 0 or a.low < 0:
        raise InputError("a ratio is of positive values; choose other subjects")
    return Estimate(a.estimate / b.estimate, a.low / b.high, a.high / b.low)


def _paired(first: Measured, second: Measured) -> Estimate | None:
    """The ratio of two values of the same sequences; None where they are of others. The noise floors widen it."""
    a, b = first.per_sequence, second.per_sequence
    if a is None or b is None or not _same_sequences(a, b):
        return None
    found = ratio_of_ratios(a.top, a.bottom, b.top, b.bottom)
    factor = 1 + max(first.floor_percent, second.floor_percent) / 100
    return Estimate(found.estimate, found.low / factor, found.high * factor)


def _same_sequences(a: PerSequence, b: PerSequence) -> bool:
    return bool(a.key == b.key) and a.top.shape == b.top.shape


FORMS: dict[str, Callable[..., Estimate]] = {"value": _value, "ratio": _ratio, "difference": _difference}


def _text(found: Estimate) -> str:
    if found.low == found.high:
        return f"{found.estimate:.6g}"
    return f"{found.estimate:.4g} [{found.low:.4g}, {found.high:.4g}]"


def _signed(step: Estimate) -> str:
    return f"leads by {step.estimate:+.3g} [{step.low:+.3g}, {step.high:+.3g}]"
