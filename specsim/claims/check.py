"""Evaluate claims and judge them: holds, drifted, contradicted, or not decidable. Results as JSON and JUnit XML."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args
from xml.etree import ElementTree

import numpy as np

from specsim.claims.claim import Claim, ReplaySubject, RunSubject, Subject, Verdict, policy_file, subject_text
from specsim.claims.files import read_claims
from specsim.claims.measured import Measured, PerSequence, of_replay, of_run, of_value
from specsim.io.arrays import Floats
from specsim.io.errors import InputError
from specsim.replaying.intervals import Estimate, ratio_difference, ratio_of_ratios

ROUNDING = 1e-9  # relative, of a bound: what sums in another order may differ by


@dataclass(frozen=True)
class Checked:
    """A claim with its verdict.

    judged : the value with the interval that decided; None for an order
    interval : the value with its 95 % interval over sequences, where the claim has an interval
    steps : for an order, each subject's lead over the next with its interval
    seconds : seconds and tokens per sequence [S] of the first subject; None where nothing is timed
    """

    claim: Claim
    verdict: Verdict
    judged: Estimate | None = None
    interval: Estimate | None = None
    steps: tuple[Estimate, ...] = ()
    seconds: tuple[Floats, Floats] | None = None

    @property
    def passed(self) -> bool:
        """Whether the verdict is the claim's known verdict."""
        return self.verdict == self.claim.statement.verdict

    @property
    def recomputed(self) -> str:
        """The recomputed value in words, with its interval where it has any."""
        if self.judged is None:
            names = [subject_text(subject) for subject in self.claim.subjects]
            return ", ".join(f"{name} {_signed(step)}" for name, step in zip(names, self.steps, strict=False))
        return _text(self.interval or self.judged)

    @property
    def message(self) -> str:
        """One line: verdict, claimed and recomputed value, source."""
        known = self.claim.statement.verdict
        expected = "" if known == "holds" else f", known as {known}"
        source = f" ({self.claim.statement.source})" if self.claim.statement.source else ""
        compared = f"claimed {self.claim.claimed}, found {self.recomputed}"
        return f"{self.claim.name}: {self.verdict}{expected}: {compared}{source}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.claim.name,
            "verdict": self.verdict,
            "known_verdict": self.claim.statement.verdict,
            "passed": self.passed,
            "claimed": self.claim.claimed,
            "recomputed": value.as_dict() if (value := self.interval or self.judged) else None,
            "order": [step.as_dict() for step in self.steps] or None,
            "source": self.claim.statement.source,
        }


def measure(subject: Subject, home: Path) -> Measured:
    """Evaluate a claim's subject; paths in it are relative to `home`."""
    if isinstance(subject, ReplaySubject):
        return of_replay(subject, home)
    if isinstance(subject, RunSubject):
        return of_run(subject, home)
    return of_value(subject, home)


def judge(value: Estimate, bounds: tuple[float, float], *, outside: Verdict) -> Verdict:
    """Judge whether a value's interval lies inside the bounds, outside, or straddles them (not decidable)."""
    low, high = (bound * (1 + side * ROUNDING * np.sign(bound)) for bound, side in zip(bounds, (-1, 1), strict=True))
    if low <= value.low and value.high <= high:
        return "holds"
    return outside if value.high < low or value.low > high else "not decidable"


def judge_order(leads: Iterable[Estimate]) -> Verdict:
    """An order holds if every subject leads the next significantly, each by its interval."""
    leads = tuple(leads)
    if any(lead.high < 0 for lead in leads):
        return "contradicted"
    return "holds" if all(lead.low > 0 for lead in leads) else "not decidable"


def check(claim: Claim) -> Checked:
    """Evaluate a claim; InputError names a claim whose evaluation failed."""
    try:
        measured = [measure(subject, claim.home) for subject in claim.subjects]
        statement = claim.statement
        if claim.form == "order":
            leads = tuple(
                _lead(first, second, over_prompts=statement.over_prompts) for first, second in pairwise(measured)
            )
            return Checked(claim, judge_order(leads), steps=leads, seconds=measured[0].seconds)
        value = FORMS[claim.form](*measured, over_prompts=statement.over_prompts)
        assert statement.bounds is not None
        outside: Verdict = "contradicted" if statement.expected is None else "drifted"
        verdict, interval = judge(value, statement.bounds, outside=outside), None
        if statement.interval is not None:
            interval = FORMS[claim.form](*measured, over_prompts=True)
            if not _ends_hold(interval, claim):
                verdict = outside
        return Checked(claim, verdict, value, interval, seconds=measured[0].seconds)
    except InputError as error:
        raise InputError(f"claim {claim.name!r}: {error}") from None
    except OSError as error:  # a name that no file can have; readers refuse other names
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

    Raises InputError for a claim whose evaluation fails or is not allowed.
    """
    claims = [(path, claim) for path in paths for claim in read_claims(path)]
    for path, claim in claims:
        try:
            check_policy_files(claim, allowed=allow_policy_files)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
    results = []
    for done, (path, claim) in enumerate(claims, start=1):
        try:
            results.append(check(claim))
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        if progress:
            progress("claims", done, len(claims))
    return results


def _lead(first: Measured, second: Measured, *, over_prompts: bool) -> Estimate:
    """How much larger the first value is: of the same sequences in pairs, else by the ends of the two intervals."""
    if over_prompts and (ratio := _paired(first, second)) is not None:
        return Estimate(ratio.estimate - 1, ratio.low - 1, ratio.high - 1)
    return _difference(first, second, over_prompts=over_prompts)


def _ends_hold(interval: Estimate, claim: Claim) -> bool:
    """Whether both ends of the interval are those that the claim has."""
    statement = claim.statement
    assert statement.interval is not None
    ends = zip((interval.low, interval.high), statement.interval, strict=True)
    return all(
        judge(Estimate.exact(end), statement.around(claimed), outside="drifted") == "holds" for end, claimed in ends
    )


def _value(only: Measured, *, over_prompts: bool) -> Estimate:
    return only.prompts if over_prompts else only.record


def _unpaired_difference(first: Measured, second: Measured, *, over_prompts: bool) -> Estimate:
    """The first value less the second, by the ends of their intervals."""
    a, b = (_value(measured, over_prompts=over_prompts) for measured in (first, second))
    return Estimate(a.estimate - b.estimate, a.low - b.high, a.high - b.low)


def _difference(first: Measured, second: Measured, *, over_prompts: bool) -> Estimate:
    """The first value less the second; of the same sequences in pairs. The noise floors widen it."""
    a, b = first.per_sequence, second.per_sequence
    if not over_prompts or a is None or b is None or not _same_sequences(a, b):
        return _unpaired_difference(first, second, over_prompts=over_prompts)
    paired = ratio_difference(a.top, a.bottom, b.top, b.bottom).difference
    reach = max(first.floor_percent, second.floor_percent) / 100 * abs(second.value)
    return Estimate(paired.estimate, paired.low - reach, paired.high + reach)


def _ratio(first: Measured, second: Measured, *, over_prompts: bool) -> Estimate:
    if over_prompts and (ratio := _paired(first, second)) is not None:
        return ratio
    a, b = (_value(measured, over_prompts=over_prompts) for measured in (first, second))
    if not b.low > 0 or a.low < 0:
        raise InputError("a ratio is of positive values; choose other subjects")
    return Estimate(a.estimate / b.estimate, a.low / b.high, a.high / b.low)


def _paired(first: Measured, second: Measured) -> Estimate | None:
    """The ratio of two values of the same sequences, widened by the noise floors; None for different sequences."""
    a, b = first.per_sequence, second.per_sequence
    if a is None or b is None or not _same_sequences(a, b):
        return None
    ratio = ratio_of_ratios(a.top, a.bottom, b.top, b.bottom)
    factor = 1 + max(first.floor_percent, second.floor_percent) / 100
    return Estimate(ratio.estimate, ratio.low / factor, ratio.high * factor)


def _same_sequences(a: PerSequence, b: PerSequence) -> bool:
    return bool(a.key == b.key) and a.top.shape == b.top.shape


FORMS: dict[str, Callable[..., Estimate]] = {"value": _value, "ratio": _ratio, "difference": _difference}


def _text(value: Estimate) -> str:
    if value.low == value.high:
        return f"{value.estimate:.6g}"
    return f"{value.estimate:.4g} [{value.low:.4g}, {value.high:.4g}]"


def _signed(step: Estimate) -> str:
    return f"leads by {step.estimate:+.3g} [{step.low:+.3g}, {step.high:+.3g}]"


def as_document(results: Sequence[Checked]) -> dict[str, Any]:
    """The JSON form of a check."""
    return {
        "kind": "specsim-claims",
        "version": 1,
        "passed": all(result.passed for result in results),
        "verdicts": {verdict: sum(result.verdict == verdict for result in results) for verdict in get_args(Verdict)},
        "claims": [result.as_dict() for result in results],
    }


def junit_xml(results: Sequence[Checked]) -> str:
    """JUnit XML as pytest writes it: a claim is a test case; a failure has the verdict as its type."""
    failed = sum(not result.passed for result in results)
    suites = ElementTree.Element("testsuites", name="specsim claims")
    counts = {"tests": str(len(results)), "failures": str(failed), "errors": "0", "skipped": "0"}
    suite = ElementTree.SubElement(suites, "testsuite", {"name": "specsim claims", **counts})
    for result in results:
        case = ElementTree.SubElement(
            suite, "testcase", classname=result.claim.home.name or "claims", name=result.claim.name, time="0"
        )
        if not result.passed:
            ElementTree.SubElement(case, "failure", type=result.verdict, message=result.message).text = result.message
        ElementTree.SubElement(case, "system-out").text = f"{result.verdict}: {result.recomputed}"
    return str(ElementTree.tostring(suites, encoding="unicode", xml_declaration=True)) + "\n"


def benchmark_document(results: Sequence[Checked]) -> dict[str, Any]:
    """Seconds per output token of every timed claim, for `pytest-benchmark compare`; its rounds are sequences."""
    from specsim import __version__

    timed = [(result, *result.seconds) for result in results if result.seconds is not None]
    return {
        "machine_info": {"node": platform.node(), "machine": platform.machine(), "system": platform.system()},
        "commit_info": {},
        "datetime": datetime.now(UTC).isoformat(),
        "version": __version__,
        "benchmarks": [
            {
                "group": None,
                "name": result.claim.name,
                "fullname": result.claim.name,
                "params": None,
                "param": None,
                "extra_info": {
                    "verdict": result.verdict,
                    "claimed": result.claim.claimed,
                    "recomputed": result.recomputed,
                },
                "options": {},
                "stats": _benchmark_stats(seconds / tokens),
            }
            for result, seconds, tokens in timed
        ],
    }


def _benchmark_stats(data: Any) -> dict[str, float]:
    q1, median, q3 = (float(value) for value in np.quantile(data, (0.25, 0.5, 0.75)))
    mean, spread = float(data.mean()), float(data.std(ddof=1)) if len(data) > 1 else 0.0
    return {
        "min": float(data.min()),
        "max": float(data.max()),
        "mean": mean,
        "stddev": spread,
        "rounds": len(data),
        "median": median,
        "iqr": q3 - q1,
        "q1": q1,
        "q3": q3,
        "iqr_outliers": 0,
        "stddev_outliers": 0,
        "outliers": "0;0",
        "ld15iqr": float(data.min()),
        "hd15iqr": float(data.max()),
        "ops": 1 / mean,
        "total": float(data.sum()),
        "iterations": 1,
        "data": data.tolist(),
    }
