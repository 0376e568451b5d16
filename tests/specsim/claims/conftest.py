"""A trace, costs and a claim file that holds, with which every test of claims starts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specsim import write_trace
from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID
from specsim.claims.check import Checked, check_files

HEAD = 'version = 1\n[defaults]\ntrace = "trace"\ncost = { s_d = 0.001, s_t = 0.010 }\npolicy = "fixed_k"\n'
CLAIMS = """\
version = 1

[defaults]
trace = "trace"
cost = { s_d = 0.001, s_t = 0.010 }
tolerance_percent = 0.5

[[claim]]
name = "speedup of four drafts"
policy = "fixed_k"
settings = { k = 4 }
expected = 2.33
source = "a table"

# A bound is a statement about prompts like these.
[[claim]]
name = "drafts are accepted"
policy = "fixed_k"
settings = { k = 2 }
quantity = "v_d"
at_least = 0.5
"""


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with trace/, cost.json and good.claims.toml, which holds. Read it only."""
    home = tmp_path_factory.mktemp("claims")
    write_trace(generate(IID(0.8), sequences=24, output_tokens=60, depth=8), home / "trace")
    (home / "cost.json").write_text(json.dumps({"s_d": 0.001, "s_t": 0.010}))
    (home / "good.claims.toml").write_text(CLAIMS)
    return home


ClaimFile = Callable[[str], Path]
CheckClaim = Callable[[str], Checked]


@pytest.fixture
def claim_file(recorded: Path, tmp_path: Path) -> ClaimFile:
    """Write a claim file of this text, each in a folder of its own with the trace where the file looks for it."""
    numbers = itertools.count()

    def write(text: str) -> Path:
        folder = tmp_path / f"claims{next(numbers)}"
        folder.mkdir()
        (folder / "trace").symlink_to(recorded / "trace")
        path = folder / "changed.claims.toml"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def check_claim(claim_file: ClaimFile) -> CheckClaim:
    """Evaluate the claim of these lines about the recorded trace under fixed_k."""

    def check(lines: str) -> Checked:
        (checked,) = check_files([claim_file(f'{HEAD}[[claim]]\nname = "it"\n{lines}')])
        return checked

    return check


def write_validation(folder: Path, **changes: Any) -> Path:
    """A folder with a validation of two policies over three sequences."""
    row = {
        "label": "fixed_k(k=2)",
        "policy": "fixed_k",
        "measured": {"estimate": 1.5, "low": 1.4, "high": 1.6},
        "sequence_seconds": [1.0, 2.0, 3.0],
        "sequence_tokens": [10, 20, 30],
        "rounds_identical_percent": 100.0,
        "error_percent": -0.7,
    }
    slower = {
        **row,
        "label": "adaedl(gamma=0.2)",
        "policy": "adaedl",
        "measured": {"estimate": 1.364, "low": 1.3, "high": 1.6},
        "sequence_seconds": [1.1, 2.2, 3.3],
    }
    document = {
        "kind": "specsim-validation",
        "noise_floor_percent": 1.0,
        "median_abs_error_percent": 0.7,
        "autoregressive_sequence_seconds": [1.5, 3.0, 4.5],
        "rows": [row, slower],
    }
    folder.mkdir(exist_ok=True)
    (folder / "validation.json").write_text(json.dumps({**document, **changes}))
    return folder
