"""`realrun compare` on the command line: verdicts in words, exit codes, and what is refused before the work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from realrun.cli.compare import exit_code
from tests.support.commands import assert_refused, call
from tests.support.stub_checkout import stub_checkout


def test_a_slower_version_is_reported_and_fails(tmp_path: Path) -> None:
    sides = ["--base", stub_checkout(tmp_path / "base"), "--head", stub_checkout(tmp_path / "head", slower=0.06)]
    args = [*sides, "--drafter", "prompt-lookup", "--num-prompts", 1, "--max-new-tokens", 8, "--out", tmp_path / "out"]
    shown = call("realrun", "compare", *args, "--policy", "fixed_k(k=3)")
    assert shown.code == 1 and "slower" in shown.out
    document = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [row["label"] for row in document["rows"]] == ["no speculation", "fixed_k(k=3)"]
    assert [row["verdict"] == "slower" for row in document["rows"]] == [False, True]
    assert document["options"]["clock"] == "cpu"
    assert_refused(call("realrun", "compare", *args), "holds a finished comparison", "--overwrite")


def test_the_memory_of_the_device_is_left_to_the_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command itself loads nothing there; the stub takes any device."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    base = stub_checkout(tmp_path / "base")
    args = ["--base", base, "--head", base, "--drafter", "prompt-lookup", "--num-prompts", 1, "--max-new-tokens", 4]
    args += ["--out", tmp_path / "out", "--minutes", 0.001, "--device", "cuda"]
    shown = call("realrun", "compare", *args, "--json")
    assert shown.code in (0, 3)
    options = json.loads(shown.out)["options"]
    assert (options["pair"]["device"], options["clock"]) == ("cuda", "wall")


def test_exit_codes_tell_slower_from_not_decidable() -> None:
    assert [exit_code(rows) for rows in ([False, False], [False, None], [None, True])] == [0, 3, 1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--head absent", "absent is not a folder"),
        ("--head /", "holds no realrun/ or bin/python"),
        ("--policy fixed_q", "fixed_q"),
        ("--policy fixed_k(q=3)", "no setting 'q'"),
        ("--policy fixed_k(3)", "write for example gamma=0.2"),
        ("--policy time_gain", "learns from a trace"),
        ("--clock cpu --threads 2", "--clock"),
        ("--device cuda:99", "device cuda:99 is not available"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, options: str, says: str) -> None:
    base = stub_checkout(tmp_path / "base")
    args = ["--base", base, "--head", base, "--drafter", "prompt-lookup", "--out", tmp_path / "out", *options.split()]
    assert_refused(call("realrun", "compare", *args), says)
