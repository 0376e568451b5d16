"""Stage kernels: their tests on this device, a memory and race check, and the benchmark."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from realrun.campaign.job import Job
from speckernels.bench import BenchError, Document, run_bench

NAME = "kernels"
SHARE = 1.2

REPOSITORY = Path(__file__).resolve().parents[2]
TESTS = REPOSITORY / "tests" / "kernels"
# The closing line of pytest, or of compute-sanitizer.
SUMMARY = re.compile(
    r"^=* ?((?:\d+ (?:passed|failed|error|skipped|deselected)|no tests ran).*) in [\d.]+s"
    r"|(?:ERROR|RACECHECK) SUMMARY: (.*)$",
    re.MULTILINE,
)


def run(job: Job) -> dict[str, Any]:
    tests = _tests(job, job.left_s() * 0.35)
    job.report(1, 3)
    sanitizer = {tool: _sanitize(tool, job.left_s() * 0.2) for tool in ("memcheck", "racecheck")} if job.full else {}
    job.report(2, 3)
    file = job.out / "kernel-bench.json"

    def measure() -> Document:
        minutes = job.minutes(0.95)
        return run_bench(file, minutes, device=job.device, quick=not job.full, progress=job.progress)

    try:
        bench = measure()
    except BenchError:  # rows of other sources, versions or another device
        file.unlink(missing_ok=True)
        bench = measure()
    return {"tests": tests, "sanitizer": sanitizer, "bench": "kernel-bench.json", "complete": not bench.unfinished}


def _tests(job: Job, limit_s: float) -> dict[str, Any]:
    """The kernels' tests: those for a GPU on one, else the quick ones."""
    if not TESTS.is_dir():
        return {"outcome": "not run: the tests are not installed here; run from the source tree"}
    chosen = ["-m", "gpu"] if job.full else ["-k", "tree_metadata and not mutant"]
    return _outcome(_python("-m", "pytest", "-q", str(TESTS), *chosen), limit_s)


def _sanitize(tool: str, limit_s: float) -> dict[str, Any]:
    """compute-sanitizer over one small check per operation."""
    binary = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if binary is None:
        return {"outcome": "not run: no compute-sanitizer here"}
    command = [binary, "--tool", tool, "--error-exitcode", "9", *_python(str(TESTS / "sanitize.py"))]
    return _outcome(command, limit_s)


def _python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def _outcome(command: list[str], limit_s: float) -> dict[str, Any]:
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=max(limit_s, 1.0))
    except subprocess.TimeoutExpired as error:
        output = error.stdout if isinstance(error.stdout, str) else (error.stdout or b"").decode(errors="replace")
        return {"outcome": f"stopped after {limit_s:.0f} s", "tail": output[-4000:]}
    output = done.stdout + done.stderr
    found = ["".join(groups) for groups in SUMMARY.findall(output)]
    outcome = found[-1] if found else f"exit code {done.returncode}"
    return {"outcome": outcome, "exit_code": done.returncode, "tail": output[-4000:]}
