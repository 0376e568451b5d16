"""Results of a check for machines: JSON, JUnit XML, and times in pytest-benchmark's form."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, get_args
from xml.etree import ElementTree

import numpy as np

from specsim.claims.check import Checked
from specsim.claims.claim import Verdict


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
                "stats": _stats(seconds / tokens),
            }
            for result, seconds, tokens in timed
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
