"""The kernels on a GPU beside what torch offers: `python -m studies gpu_kernels`.

Runs the main cases of `speckernels bench`, and tree attention once more by the tensor memory accelerator.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from speckernels.bench import read_document, run_bench
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
        os.environ[TMA_ENVIRONMENT] = "0"
        run_bench(out / ALL, config["minutes"], backends=config["backends"], device="cuda", headline=True)
    if TMA in missing:
        os.environ[TMA_ENVIRONMENT] = "1"
        run_bench(out / TMA, config["tma_minutes"], ["tree_attention"], ["cuda"], "cuda", headline=True)
    report(read_document(out / ALL), read_document(out / TMA)).write(out)
