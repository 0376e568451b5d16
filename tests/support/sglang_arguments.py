"""Exported flags, parsed by SGLang's own parser: `python -m tests.support.sglang_arguments SGLANG`.

SGLANG is the folder of the package's source, such as an unpacked wheel's; neither it nor a GPU is needed to run. Writes
tests/specsim/engines/fixtures/sglang_arguments.json: for every exported setting its flags, the fields of ServerArgs
that they set, and of a schedule the number of steps at every batch size, as `AdaptiveSpeculativeParams` has it.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from specsim.engines.export import (
    Setting,
    draft_length,
    export_flags,
    schedule_setting,
    scripted,
)
from specsim.engines.flags import SGLANG_ALGORITHMS, draft_length_flags
from specsim.policy.tree.eagle2 import Eagle2
from specsim.serving.draft_length import ScheduledK
from tests.support import ROOT

FIXTURE = ROOT / "tests/specsim/engines/fixtures/sglang_arguments.json"
VARIABLE = re.compile(r"(SGLANG_\w+)=(\S+)")
BATCHES = 32
STUBS = ("arg_groups.overrides", "runtime_context", "speculative.spec_info", "utils")  # imported, and not used here


def settings() -> Iterator[tuple[str, Setting]]:
    """Every form of SGLang's settings that `specsim export` and `advise` print, by name."""
    yield "draft length", draft_length("sglang", 4)
    yield "tree", export_flags("sglang", policy=Eagle2(nodes=12, depth=3, top_k=4))
    yield "schedule", schedule_setting("sglang", ScheduledK({1: 4, 3: 2, 8: 0}), BATCHES)
    yield "scripted acceptance", scripted("sglang", [0.8, 0.5, 0.2])
    for kind in SGLANG_ALGORITHMS:
        yield f"drafter {kind}", Setting(draft_length_flags("sglang", 4, kind))


def source(package: Path) -> tuple[argparse.ArgumentParser, Any, Any]:
    """SGLang's parser of the options on speculation, its schedules, and its environment's variables."""
    for name in ("sglang", "sglang.srt", *(f"sglang.srt.{part}" for part in ("arg_groups", "speculative"))):
        folder = ModuleType(name)
        folder.__path__ = [str(package.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = folder
    for name in STUBS:
        sys.modules[f"sglang.srt.{name}"] = mock.MagicMock()
    parser = argparse.ArgumentParser(exit_on_error=False)
    spec = import_module("sglang.srt.arg_groups.fields.spec").Spec
    import_module("sglang.srt.arg_groups.arg_utils").add_cli_args_from_dataclass(parser, spec)
    adaptive = import_module("sglang.srt.speculative.adaptive_spec_params").AdaptiveSpeculativeParams
    return parser, adaptive, import_module("sglang.srt.environ").envs


def parsed(setting: Setting, sglang: tuple[argparse.ArgumentParser, Any, Any]) -> dict[str, Any]:
    """What SGLang makes of a setting."""
    parser, adaptive, environment = sglang
    flags = setting.flags
    variables = dict(VARIABLE.findall(flags))
    words = shlex.split(flags[flags.index("--") :])
    default, given = vars(parser.parse_args([])), vars(parser.parse_args(words))
    document: dict[str, Any] = {"set": {name: value for name, value in given.items() if value != default[name]}}
    if variables:
        with mock.patch.dict("os.environ", variables):
            document["environment"] = {name: getattr(environment, name).get() for name in variables}
    if setting.file is not None and given["speculative_adaptive"]:
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(setting.file)
            file.flush()
            steps = adaptive(given["speculative_num_steps"], file.name)
            document["steps"] = [steps.get_steps_for_batch(batch) for batch in range(1, BATCHES + 1)]
    return document


if __name__ == "__main__":
    sglang = source(Path(sys.argv[1]))
    cases = {name: {"flags": setting.flags, **parsed(setting, sglang)} for name, setting in settings()}
    FIXTURE.write_text(json.dumps({"sglang": "0.5.23", "settings": cases}).replace('{"flags', '\n{"flags') + "\n")
