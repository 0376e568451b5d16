"""Run every operation's check once in CUDA C++, for compute-sanitizer to watch: python sanitize.py [OPERATION ...]."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch

import speckernels
from speckernels.runtime import dispatch


def main(names: list[str]) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2]))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with speckernels.use_backend("cuda"):
        for name in names or sorted(dispatch.OPERATIONS):
            importlib.import_module(f"tests.kernels.ops.test_{name}").check(device)
            print(f"{name}: agrees with the reference", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
