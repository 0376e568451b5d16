"""Commands as in a locked-down container: a read-only file system, no home, another user, and 1 GiB of memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Everything is read-only but a memory file system, for temporary files; the user is nobody.
INSIDE = """
mount --bind / / && mount -o bind,remount,ro / && ! touch "$1/written" 2> /dev/null || exit 77
limit=$2; shift 2; cd / && ulimit -v "$limit"
exec setpriv --reuid=65534 --regid=65534 --clear-groups -- "$@"
"""
START = "import numba, numpy, pandas, pyarrow.parquet; print(open('/proc/self/status').read())"
COST = ("--cost", "example:lab-deep-model")
COMMANDS = {
    "replay": ("example:lab-lookup", "--policy", "fixed_k", "--set", "k=3", *COST),
    "leaderboard": ("example:lab-lookup", "--policy", "fixed_k", "--trials", "3", *COST),
    "advise": ("--accept-length", "2.5", "--k", "3", "--cost", "vllm-llama3.1-8b-eagle-h100"),
    "info": ("example:lab-lookup",),
    "cost": ("show", "vllm-llama3.1-8b-eagle-h100"),
}


def run(
    *command: str, limit_kib: str = "unlimited", folder: str | None = "/dev/shm"
) -> subprocess.CompletedProcess[str]:
    places = {"HOME": "/nonexistent", "TMPDIR": folder or "/nonexistent", "NUMBA_CACHE_DIR": ""}
    environment = {**os.environ, **places, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    script = ["unshare", "--mount", "sh", "-c", INSIDE, "sh", str(ROOT), limit_kib]
    try:
        done = subprocess.run([*script, *command], capture_output=True, text=True, env=environment, check=False)
    except FileNotFoundError:
        pytest.skip("no unshare")
    if done.returncode in (1, 77) and "Traceback" not in done.stderr:
        pytest.skip("the file system cannot be mounted read-only here")
    return done


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_where_nothing_can_be_written(name: str) -> None:
    status = run(sys.executable, "-c", START).stdout
    start_kib = int(status.partition("VmPeak:")[2].split()[0])
    done = run(sys.executable, "-m", "specsim", name, *COMMANDS[name], "--json", limit_kib=str(start_kib + (1 << 20)))
    if done.returncode == 2:  # a thread of LLVM or BLAS may want more
        assert done.stderr.count("error: memory is used up") == 1 and "Traceback" not in done.stderr, done.stderr
        done = run(sys.executable, "-m", "specsim", name, *COMMANDS[name], "--json")
    assert done.returncode == 0 and done.stdout.startswith("{"), done.stderr
    compiles = name in ("replay", "leaderboard")
    assert done.stderr.count("set NUMBA_CACHE_DIR to a folder that can") == compiles, done.stderr


@pytest.mark.slow
def test_without_any_folder_the_error_names_the_remedy() -> None:
    done = run(sys.executable, "-m", "specsim", "info", "example:lab-lookup", folder=None)
    assert (done.returncode, done.stderr) == (
        2, "error: no folder for temporary files can be written; set TMPDIR to one that can\n"
    )  # fmt: skip
