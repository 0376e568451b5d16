"""Compiled code is kept across processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specsim.policy.chain.adaedl import AdaEDL
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.files import write_trace
from tests.support import ROOT
from tests.support.reference import RampCost, small_trace

FRESH_PROCESS = """
import json, sys
from specsim.cost.model import ConstantCost
from specsim.policy.chain.adaedl import AdaEDL
from specsim.replaying.chain import chain_kernel
from specsim.replaying.kernel import step_functions
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.files import read_trace

trace = read_trace(sys.argv[1])
policy, table = AdaEDL(max_draft_tokens=trace.depth), cost_table(trace, ConstantCost(1e-3, 1e-2))
whole = replay(trace, policy, table)
part = replay(trace.select([2, 0]), policy, table)
kernel, steps = chain_kernel(AdaEDL), step_functions(policy)
state = steps.update(steps.initial_state(policy.params), policy.params, 3, 2)
compiled = [kernel, steps.initial_state, steps.update]
print(json.dumps({
    "hits": [sum(function.stats.cache_hits.values()) for function in compiled],
    "misses": [sum(function.stats.cache_misses.values()) for function in compiled],
    "state": state,
    "compiled_for": len(kernel.signatures),
    "rounds": whole.num_rounds.tolist(),
    "part_rounds": part.num_rounds.tolist(),
}))
"""


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    """Nor does a selection of a trace that was read: its arrays have the same types."""
    trace = small_trace()
    write_trace(trace, tmp_path / "trace")
    printed = []
    for _ in range(2):
        out = subprocess.run(
            [sys.executable, "-c", FRESH_PROCESS, str(tmp_path / "trace")],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")},
        )
        printed.append(json.loads(out.stdout))
    first, second = printed
    assert first["hits"] == [0, 0, 0] and all(first["misses"])
    assert second["hits"] == [1, 1, 1] and not any(second["misses"])
    assert first["compiled_for"] == second["compiled_for"] == 1
    assert first["rounds"] == second["rounds"]
    policy, cost = AdaEDL(max_draft_tokens=6), RampCost()
    state = AdaEDL.update.py_func(AdaEDL.initial_state.py_func(policy.params), policy.params, 3, 2)
    assert first["state"] == second["state"] == list(state)
    assert second["rounds"] == replay(trace, policy, cost_table(trace, cost)).num_rounds.tolist()
    assert second["part_rounds"] == [second["rounds"][2], second["rounds"][0]]


EDITED_POLICY = """
from specsim.cost.model import ConstantCost
from specsim.acceptance.models import IID
from specsim.acceptance.generate import generate
from specsim.policy.chain.beta_ts import BetaTS
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table

trace = generate(IID(0.6), sequences=2, output_tokens=60, depth=6)
found = replay(trace, BetaTS(max_draft_tokens=6), cost_table(trace, ConstantCost(1e-3, 1e-2)))
print(found.drafted.tolist())
"""


def test_an_edited_policy_in_a_sub_folder_is_compiled_anew(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "specsim", tmp_path / "specsim", ignore=shutil.ignore_patterns("__pycache__"))
    edited = tmp_path / "specsim/policy/estimates/counts.py"

    def drafted() -> str:
        command = [sys.executable, "-B", "-c", EDITED_POLICY]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path, env=environment).stdout

    before, text = drafted(), edited.read_text()
    assert drafted() == before
    edited.write_text(text.replace("counts[0] + accepted,", "counts[0] + 0.0 * accepted,"))  # no success counts
    assert edited.read_text() != text and drafted() != before


POLICY_FILE = """
from dataclasses import dataclass
from specsim.policy.base import setting
from specsim.policy.chain.fixed_k import FixedK

@dataclass(frozen=True)
class Mine(FixedK):
    name = "{name}"
    {setting}
"""
REPLAYED_FILE = """
import sys
from specsim.acceptance.models import IID
from specsim.acceptance.generate import generate
from specsim.cost.model import ConstantCost
from specsim.policy.user_file import load_policy_file
from specsim.replaying.chain import chain_kernel
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table

trace = generate(IID(0.6), sequences=2, output_tokens=60, depth=6)
(kind,) = load_policy_file(sys.argv[1])
print(replay(trace, kind(k=2), cost_table(trace, ConstantCost(1e-3, 1e-2))).drafted.tolist())
print(sum(chain_kernel(kind).stats.cache_hits.values()))
"""


@pytest.mark.parametrize(("own_setting", "kept"), [("spare: int = setting(3, 1, 9)", 0), ("", 1)])
def test_policies_of_one_name_in_two_files_do_not_share_what_only_one_can_load(
    tmp_path: Path, own_setting: str, kept: int
) -> None:
    """A policy that inherits all functions has settings of its own file, which another process cannot import."""
    printed = []
    for file in ("one.py", "other.py"):
        (tmp_path / file).write_text(POLICY_FILE.format(name="mine", setting=own_setting or "pass"))
        out = subprocess.run(
            [sys.executable, "-c", REPLAYED_FILE, str(tmp_path / file)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache")},
        )
        assert out.returncode == 0, out.stderr
        printed.append(out.stdout.splitlines())
    assert printed[0][0] == printed[1][0]
    assert [int(lines[1]) for lines in printed] == [0, kept]
