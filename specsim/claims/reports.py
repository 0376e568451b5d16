"""What a check found, for machines: JSON, JUnit XML, and times in pytest-benchmark's form."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, get_args
from xml.etree import ElementTree

import numpy as np

from specsim.claims.check import Checked
from specsim.claims.claim import Verdict


def as_document(checked: Sequence[Checked]) -> dict[str, Any]:
    """The JSON form of a check."""
    return {
        "kind": "specsim-claims",
        "version": 1,
        "passed": all(one.passed for one in checked),
        "verdicts": {verdict: sum(one.verdict == verdict for one in checked) for verdict in get_args(Verdict)},
        "claims": [one.as_dict() for one in checked],
    }


def junit_xml(checked: Sequence[Checked]) -> str:
    """JUnit XML as pytest writes it: a claim is a test case, what did not pass is a failure of its verdict's type."""
    failed = sum(not one.passed for one in checked)
    suites = ElementTree.Element("testsuites", name="specsim claims")
    counts = {"tests": str(len(checked)), "failures": str(failed), "errors": "0", "skipped": "0"}
    suite = ElementTree.SubElement(suites, "testsuite", {"name": "specsim claims", **counts})
    for one in checked:
        case = ElementTree.SubElement(
            suite, "testcase", classname=one.claim.home.name or "claims", name=one.claim.name, time="0"
        )
        if not one.passed:
            ElementTree.SubElement(case, "failure", type=one.verdict, message=one.message).text = one.message
        ElementTree.SubElement(case, "system-out").text = f"{one.verdict}: {one.recomputed}"
    return str(ElementTree.tostring(suites, encoding="unicode", xml_declaration=True)) + "\n"


def benchmark_document(checked: Sequence[Checked]) -> dict[str, Any]:
    """Seconds per output token of every claim that has them, for `pytest-benchmark compare`; a round is a sequence."""
    from specsim import __version__

    timed = [(one, *one.seconds) for one in checked if one.seconds is not None]
    return {
        "machine_info": {"node": platform.node(), "machine": platform.machine(), "system": platform.system()},
        "commit_info": {},
        "datetime": datetime.now(UTC).isoformat(),
        "version": __version__,
        "benchmarks": [
            {
                "group": None,
                "name": one.claim.name,
                "fullname": one.claim.name,
                "params": None,
                "param": None,
                "extra_info": {"verdict": one.verdict, "claimed": one.claim.claimed, "recomputed": one.recomputed},
                "options": {},
                "stats": _stats(seconds / tokens),
            }
            for one, seconds, tokens in timed
        ],
    }


def _stats(data: Any) -> dict[str, float]:
    """pytest-benchmark's figures of these times."""
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
