"""How soon a command has its answer."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from specsim.trace.files import write_trace
from tests.support.reference import small_trace

pytestmark = pytest.mark.bench


def test_replay_answers_within_a_second(tmp_path: Path) -> None:
    """The bound only forgives busy machines."""
    write_trace(small_trace(), tmp_path / "trace")
    (tmp_path / "cost.json").write_text('{"s_d": 1e-3, "s_t": 1e-2}')
    args = ["replay", "trace", "--policy", "adaedl", "--set", "max_draft_tokens=6", "--cost", "cost.json", "--json"]
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "specsim", *args], cwd=tmp_path, capture_output=True, check=True)
        best = min(best, time.perf_counter() - start)
    assert best < 3.0
