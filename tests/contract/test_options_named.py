"""What helps and errors say of options: each is the command's own, or is named together with a command that has it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import typer

import realrun.cli.main
import speckernels.cli
import specsim.cli.main
from tests.support import ROOT

APPS = {"specsim": specsim.cli.main.app, "realrun": realrun.cli.main.app, "speckernels": speckernels.cli.app}
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
ENGINES = {  # options of engines and pip, which are named too
    "--metrics",
    "--no-deps",
    "--per-request-spec-decode-metrics",
    "--save-detailed",
    "--save-result",
    "--speculative-eagle-topk",
    "--use-tree-spec",
}
LINE = re.compile(rf"(?:`|Example: |&& )((?:{'|'.join(APPS)}) [^`&\n]*)")  # a command, as it is typed

RAISING = ("InputError", "claim", "read_own", "refuse_other")  # what errors' texts are given to
# Errors of these files, or functions of them, name options without a command: all commands that raise them have those.
TRACES = ("realrun record", "realrun validate", "realrun board")
TRAININGS = tuple(f"realrun train {name}" for name in ("eesd", "medusa", "edd", "eagle", "eagle3"))
RAISED_BY = {
    "realrun/cli/board.py": ("realrun board",),
    "realrun/cli/profile.py": ("realrun profile",),
    "realrun/cli/typical.py": ("realrun typical",),
    "realrun/cli/engine/check.py": ("realrun engine check",),
    "realrun/cli/record.py": ("realrun record",),
    "realrun/engines/check.py": ("realrun engine check",),
    "realrun/engines/vllm.py:VllmEngine": ("realrun record", "realrun engine check"),
    "realrun/engines/vllm.py:sampling_of": ("realrun record",),
    "realrun/engines/llamacpp.py:LlamaCppEngine": ("realrun record",),
    "realrun/engines/validate.py": ("realrun engine validate",),
    "realrun/decode/draft_model.py": (*TRACES[:2], "realrun profile"),
    "realrun/leaderboard/job.py": ("realrun board",),
    "realrun/experiment/joined.py": ("realrun validate",),
    "realrun/lm/clock.py": ("realrun validate", "realrun board", "realrun profile"),
    "realrun/lm/kernels.py": (*TRACES, "realrun profile"),
    "realrun/kept_files.py:refuse_file": (*TRACES[1:], *TRAININGS, "realrun train self-sd"),
    "realrun/pairs/pair.py": (*TRACES[:2], "realrun profile"),
    "realrun/pairs/pair.py:check_tokenizers": (*TRACES, "realrun profile"),
    "realrun/pairs/prompts.py": (*TRACES, "realrun typical", "realrun train predictor", "realrun train self-sd"),
    "realrun/measure/record.py": TRACES,
    "realrun/measure/reuse.py": TRACES[1:],
    "realrun/train/common/distill.py": TRAININGS,
    "realrun/train/common/folder.py": TRAININGS,
    "realrun/train/common/loop.py": TRAININGS,
    "realrun/train/common/trainings.py": TRAININGS,
    "realrun/train/draft.py": ("realrun train draft",),
    "realrun/train/medusa.py": ("realrun train medusa",),
    "specsim/acceptance/sources.py": ("specsim acceptance fit",),
    "specsim/learn/predict.py": ("specsim replay",),
    "specsim/replaying/expected.py": ("specsim replay",),
    "specsim/cli/console.py:check_new": (
        "realrun profile",
        "realrun cost-grid",
        "specsim acceptance fit",
        "specsim claims record",
    ),
    "specsim/cli/console.py:parse_settings": ("specsim replay", "specsim tune", "realrun typical"),
    "specsim/cli/options.py": ("specsim replay", "specsim tune", "specsim leaderboard"),
    "specsim/cli/options.py:RequestSettings": ("specsim cost show", "specsim advise"),
    "specsim/cost/roofline/serving.py": ("specsim cost show", "specsim advise"),
    "specsim/engines/import_records.py:as_counts": ("specsim advise", "specsim acceptance fit"),
    "specsim/cli/servers/doctor.py": ("specsim doctor",),
    "specsim/servers/prompts.py": ("specsim bench", "specsim doctor"),
    "specsim/servers/bench.py": ("specsim bench",),
    "specsim/cli/cost/calibrate.py": ("specsim cost calibrate",),
    "specsim/claims/check.py": ("specsim claims check",),
    "specsim/cli/claims.py": ("specsim claims record",),
    "specsim/cli/engines/join.py": ("specsim join",),
    "realrun/experiment/timing.py": ("realrun validate", "realrun board", "realrun engine validate"),
    "realrun/experiment/run.py": ("realrun validate",),
    "realrun/experiment/forecast.py": ("realrun validate", "realrun board"),
    "specsim/cli/replay.py": ("specsim replay",),
    "specsim/cli/serve/frontier.py": ("specsim serve frontier",),
    "specsim/cli/serve/schedule.py": ("specsim serve schedule",),
    "specsim/cli/serve/simulate.py": ("specsim serve simulate",),
    "specsim/cost/files.py": ("specsim replay", "specsim tune", "specsim leaderboard", "specsim tree best"),
    "specsim/cli/engines/export.py": ("specsim export",),
    "specsim/engines/export.py": ("specsim export",),
    "specsim/engines/formats/records.py": ("specsim import",),
    "specsim/report/tree_figures.py": ("specsim tree search", "specsim serve frontier"),
    "specsim/trace/files.py": ("realrun record", "specsim acceptance generate"),
}


@cache
def commands() -> dict[str, Any]:
    """Every command and group of commands, by what is typed to call it."""
    found: dict[str, Any] = {}

    def add(name: str, command: Any) -> None:
        found[name] = command
        for child in command.list_commands(None) if hasattr(command, "list_commands") else ():
            add(f"{name} {child}", command.get_command(None, child))

    for name, app in APPS.items():
        add(name, typer.main.get_command(app))
    return found


def options(name: str) -> set[str]:
    """What a command takes."""
    return {flag for parameter in commands()[name].params for flag in (*parameter.opts, *parameter.secondary_opts)} | {
        "--help"
    }


def command_of(line: str) -> str:
    """The command that a line calls, its longest beginning that is a command."""
    words = line.split()
    return next(" ".join(words[:n]) for n in range(3, 0, -1) if " ".join(words[:n]) in commands())


def strange(text: str, own: set[str]) -> list[str]:
    """Options that a text names and that neither these are nor the commands have that it names them with."""
    found = [
        f"{line}: {option}"
        for line in LINE.findall(text)
        for option in OPTION.findall(line)
        if option not in options(command_of(line))
    ]
    return found + [option for option in OPTION.findall(LINE.sub("", text)) if option not in own | ENGINES]


@pytest.mark.parametrize("name", commands())
def test_a_help_recommends_what_there_is(name: str) -> None:
    command = commands()[name]
    texts = [command.help or "", *(getattr(parameter, "help", None) or "" for parameter in command.params)]
    assert [found for text in texts for found in strange(text, options(name))] == []


def errors(source: str) -> Iterator[tuple[str, str]]:
    """All errors that a file raises or has raised: the function or class, and the text without what is put in."""
    for part in ast.parse(source).body:
        for node in ast.walk(part):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in RAISING:
                texts = [part for part in ast.walk(node) if isinstance(part, ast.Constant) and type(part.value) is str]
                texts.sort(key=lambda text: (text.lineno, text.col_offset))
                yield getattr(part, "name", ""), "".join(str(text.value) for text in texts)


def test_an_error_recommends_what_there_is() -> None:
    wrong = []
    for folder in ("specsim", "realrun", "kernels/speckernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            file = path.relative_to(ROOT).as_posix()
            for function, text in errors(path.read_text()):
                raisers = RAISED_BY.get(f"{file}:{function}", RAISED_BY.get(file, ()))
                own = set.intersection(*map(options, raisers)) if raisers else set[str]()
                wrong += [f"{file}: {option}: {text}" for option in strange(text, own)]
    assert wrong == []


def test_a_strange_option_is_found() -> None:
    assert strange("profile again with `realrun profile --tree-nodes` or --fast", {"--slow"}) == ["--fast"]
    assert strange("see `realrun record --contexts`", set()) == ["realrun record --contexts: --contexts"]
