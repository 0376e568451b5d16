"""Stage kernels: their tests on this device, a memory and race check, and the benchmark."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from realrun.campaign.job import Job
from speckernels.bench import Document, ElsewhereError, run_bench
from speckernels.runtime.build import architecture, build_all

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
    if job.full:  # all at once on all cores, not one by one inside the tests
        major, minor = torch.cuda.get_device_capability(job.device)
        build_all((architecture(major, minor),))
    tests = _tests(job, job.left_s() * 0.35)
    job.save({"tests": tests})
    job.report(1, 3)
    sanitizer = {tool: _sanitize(tool, job.left_s() * 0.2) for tool in ("memcheck", "racecheck")} if job.full else {}
    job.report(2, 3)
    file = job.out / "kernel-bench.json"

    def measure() -> Document:
        minutes = job.minutes(0.95)
        return run_bench(file, minutes, device=job.device, quick=not job.full, progress=job.progress)

    try:
        bench = measure()
    except ElsewhereError:  # rows of other sources, versions or another device
        file.replace(file.with_suffix(".old.json"))
        bench = measure()
    return {
        "tests": tests,
        "sanitizer": sanitizer,
        "bench": "kernel-bench.json",
        "complete": not bench.unfinished and tests.get("exit_code", 0) == 0,
    }


def _tests(job: Job, limit_s: float) -> dict[str, Any]:
    """The kernels' tests: those for a GPU on one, else the quick ones."""
    if not TESTS.is_dir():
        return {"outcome": "not run: the tests are not installed here; run from the source tree"}
    if job.full:  # scripted acceptance is the stage validate
        real_run = [str(path) for path in TESTS.with_name("realrun").glob("test_*.py") if path.stem != "test_scripted"]
        return _outcome(_python("-m", "pytest", "-q", "-m", "gpu", str(TESTS), *real_run), limit_s)
    chosen = ["-k", "tree_metadata and not mutant"]
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
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if "--tool" in command else None
    done = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environment,  # without a pool, an access beyond a tensor is one beyond an allocation
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
