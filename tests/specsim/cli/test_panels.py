"""Help has options and commands in panels, short options are unambiguous, and shells complete."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from specsim.io.settings import SHORT_FLAGS
from tests.contract.test_options_named import commands
from tests.support.commands import call


def test_the_first_screen_has_every_command_in_a_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = call("specsim", "--help").out.splitlines()
    panels = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert panels == ["Tune a server:", "Compare drafting policies:", "Traces, costs and claims:", "Options:"]
    assert 24 <= len(lines) <= 41 and max(map(len, lines)) <= 80


def test_options_stand_under_what_they_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    panel, headings, panels = "", [], {}
    for line in call("realrun", "validate", "--help").out.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            panel = line.removesuffix(":")
            headings.append(panel)
        panels |= {word.strip(","): panel for word in line.split()[:2] if line.startswith("  -")}
    where = {option: panels[option] for option in ("--target", "--prompts", "--temperature", "--clock", "--out")}
    assert where == {
        "--target": "Models",
        "--prompts": "Prompts",
        "--temperature": "Sampling",
        "--clock": "Machine and timing",
        "--out": "Output",
    }
    assert headings[-2:] == ["Output", "Options"]


@pytest.mark.parametrize("name", [name for name in commands() if name.startswith(("specsim", "realrun"))])
def test_a_letter_means_the_same_in_every_command(name: str) -> None:
    letters = {value: key for key, value in SHORT_FLAGS.items()}
    for parameter in commands()[name].params:
        for option in parameter.opts:
            assert len(option) != 2 or not option.startswith("-") or letters[option] in parameter.opts


def test_a_shell_completes_commands() -> None:
    environment = {"_SPECSIM_COMPLETE": "complete_bash", "COMP_WORDS": "specsim adv", "COMP_CWORD": "1"}
    code = "import sys; sys.argv[0] = 'specsim'; from specsim.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True)
    assert done.stdout.split() == ["advise"]
