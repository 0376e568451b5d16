"""The kernels on a GPU beside what torch offers: `python -m studies gpu_kernels`.

Runs the main cases of `kernels/benchmarks`, and tree attention once more by the tensor memory accelerator.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from speckernels.ops.tree_attention import TMA_ENVIRONMENT
from specsim.io.errors import InputError
from studies.common import Config
from studies.gpu_kernels.report import report

ALL, TMA = "kernels.json", "tma.json"
RECORDED = (ALL, TMA)


def main(out: Path, config: Config) -> None:
    """Measure what is missing, and write the report."""
    missing = [name for name in RECORDED if not (out / name).is_file()]
    if missing and not torch.cuda.is_available():
        raise InputError("the study gpu_kernels times kernels on a GPU, and this machine has none; run it on a GPU")
    if ALL in missing:
        measure(out / ALL, " or ".join(config["backends"]), config["minutes"], tma="0")
    if TMA in missing:
        measure(out / TMA, "tree_attention and cuda", config["tma_minutes"], tma="1")
    report(*(json.loads((out / name).read_text()) for name in RECORDED)).write(out)


def measure(file: Path, selected: str, minutes: float, *, tma: str) -> None:
    """Run the benchmark's main cases of these contenders."""
    command = [sys.executable, "-m", "pytest", "kernels/benchmarks", "--benchmark-only"]
    command += [f"--benchmark-json={file.resolve()}", "-m", "headline and not slow", "-k", selected]
    environment = os.environ | {TMA_ENVIRONMENT: tma, "SPECKERNELS_BENCH_MINUTES": str(minutes)}
    subprocess.run(command, cwd=Path(__file__).parents[2], env=environment)
    if not file.is_file():
        raise InputError(f"pytest kernels/benchmarks wrote no {file}; see its output above")
