"""Stage kernels: the tests for this device, a memory and race check, and the benchmark."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from realrun.campaign.job import Job
from speckernels import Unavailable
from speckernels.bench import Document, ElsewhereError, run_bench
from speckernels.runtime.build import architecture, build_all

REPOSITORY = Path(__file__).resolve().parents[2]
TESTS = REPOSITORY / "tests" / "kernels"
# Of the tests on a GPU those that matter most come first; scripted acceptance is the stage validate.
GPU_TESTS = (TESTS, TESTS.with_name("realrun"))
ELSEWHERE = TESTS.with_name("realrun") / "validation" / "test_scripted.py"
# Whatever plugins and versions are on the machine: its own warnings fail no test, and no test hangs.
PYTEST = ("-m", "pytest", "-q", "-o", "filterwarnings=default", "-p", "no:cacheprovider", "--durations=15")
TEST_S = 120
MESSAGE, SLOWEST = 600, 15
# The closing line of pytest, or of compute-sanitizer.
SUMMARY = re.compile(
    r"^=* ?((?:\d+ (?:passed|failed|error|skipped|deselected)|no tests ran).*) in [\d.]+s"
    r"|(?:ERROR|RACECHECK) SUMMARY: (.*)$",
    re.MULTILINE,
)


def run(job: Job) -> dict[str, Any]:
    if job.full:  # all at once on all cores, not one by one inside the tests
        major, minor = torch.cuda.get_device_capability(job.device)
        with suppress(Unavailable):  # the dispatcher does without, and says so
            build_all((architecture(major, minor),))
    tests = _tests(job, job.left_s() * 0.35)
    job.save({"tests": tests})
    job.report(1, 3)
    sanitizer = {tool: _sanitize(tool, job.left_s() * 0.2) for tool in ("memcheck", "racecheck")} if job.full else {}
    job.report(2, 3)
    file = job.out / "kernel-bench.json"

    def measure() -> Document:
        """The telling cases first, then whatever else there is time for."""
        if job.full:
            run_bench(file, job.minutes(0.95), device=job.device, headline=True, progress=job.progress)
        return run_bench(
            file, max(job.minutes(0.95), 0.01), device=job.device, quick=not job.full, progress=job.progress
        )

    try:
        bench = measure()
    except ElsewhereError:  # rows of other sources, versions or another device
        file.replace(file.with_suffix(".old.json"))
        bench = measure()
    left = [f"{len(bench.unfinished)} cases of the benchmark"] if bench.unfinished else []
    errors = {}
    if tests.get("exit_code", 0) is None:
        left.append("tests")
    elif tests.get("exit_code"):
        errors["tests"] = tests["outcome"]
    return {
        "tests": tests,
        "sanitizer": sanitizer,
        "bench": "kernel-bench.json",
        "left": left,
        "errors": errors,
        "complete": not left and not errors,
    }


def _tests(job: Job, limit_s: float) -> dict[str, Any]:
    """Run the kernels' tests: those for a GPU if there is a GPU, else the quick tests."""
    if not TESTS.is_dir():
        return {"outcome": "not run: the tests are not installed here; run from the source tree"}
    junit = job.work / "kernels-tests.xml"
    junit.unlink(missing_ok=True)
    options = [*PYTEST, f"--junitxml={junit}"]
    if importlib.util.find_spec("pytest_timeout"):
        options.append(f"--timeout={TEST_S}")
    if job.full:
        chosen = ["-m", "gpu", f"--ignore={ELSEWHERE}", *map(str, GPU_TESTS)]
    else:
        chosen = ["-k", "tree_metadata and not mutant", str(TESTS)]
    return _outcome(_python(*options, *chosen), limit_s) | _by_junit(junit)


def _by_junit(path: Path) -> dict[str, Any]:
    """How many tests passed, which failed and why, and the slowest, by pytest's own report."""
    if not path.is_file():
        return {}
    found: dict[str, Any] = {"passed": 0, "failed": {}, "skipped": 0}
    seconds = {}
    for case in ElementTree.parse(path).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        seconds[name] = float(case.get("time", 0))
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        if problem is not None:
            found["failed"][name] = problem.get("message", "")[:MESSAGE]
        else:
            found["skipped" if case.find("skipped") is not None else "passed"] += 1
    found["slowest_s"] = dict(sorted(seconds.items(), key=lambda item: -item[1])[:SLOWEST])
    return found


def _sanitize(tool: str, limit_s: float) -> dict[str, Any]:
    """Run compute-sanitizer over a small check per operation."""
    binary = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if binary is None:
        return {"outcome": "not run: no compute-sanitizer here"}
    command = [binary, "--tool", tool, "--error-exitcode", "9", *_python(str(TESTS / "sanitize.py"))]
    return _outcome(command, limit_s)


def _python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def _outcome(command: list[str], limit_s: float) -> dict[str, Any]:
    paths = [str(REPOSITORY), str(REPOSITORY / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    if "--tool" in command:  # without a pool, an access beyond a tensor is also beyond an allocation
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    done = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = done.communicate(timeout=max(limit_s, 1.0))
    except subprocess.TimeoutExpired:
        os.killpg(done.pid, signal.SIGKILL)  # its children too, or they would disturb the benchmark
        output, _ = done.communicate()
        return {"outcome": f"stopped after {limit_s:.0f} s", "exit_code": None, "tail": output[-4000:]}
    found = ["".join(groups) for groups in SUMMARY.findall(output)]
    outcome = found[-1] if found else f"exit code {done.returncode}"
    return {"outcome": outcome, "exit_code": done.returncode, "tail": output[-4000:]}
