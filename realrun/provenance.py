"""Where a result comes from: versions, machine, revision, date."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch


def provenance(device: torch.device, number_type: str) -> dict[str, str | int]:
    """A small JSON-able record to store beside every measurement of models in this number type."""
    versions = {name: installed(name) for name in ("torch", "transformers", "numpy", "numba")}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": device_name(device),
        "dtype": number_type,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "git_revision": git_revision(),
        **versions,
    }


def installed(package: str) -> str:
    """Find the version of a package, "none" if it is missing: some measurements need only some of them."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def device_name(device: torch.device) -> str:
    """The processor's marketing name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "cpu"


def git_revision() -> str:
    """Revision of the source tree, marked when it has uncommitted changes; else SPECSIM_REVISION or "unknown"."""
    unknown = os.environ.get("SPECSIM_REVISION", "unknown")
    root = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True, timeout=10)
        return done.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root:
            return unknown  # installed inside somebody else's repository
        return git("describe", "--always", "--dirty", "--abbrev=12")
    except (OSError, subprocess.SubprocessError):
        return unknown
