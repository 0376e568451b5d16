"""Both command lines, in this process."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from typing import Any, NamedTuple
from unittest import mock

from transformers.utils import logging

import realrun.cli.main
import specsim.cli.main

COMMANDS = {
    "specsim": specsim.cli.main.main,
    "realrun": realrun.cli.main.main,
}


def on_any_machine() -> Any:
    """However little a validation resolves, which is the machine's doing, it succeeds."""
    return mock.patch("realrun.cli.validate.resolves_something", return_value=True)


class Result(NamedTuple):
    code: int
    out: str
    err: str


def call(command: str, *args: object) -> Result:
    """Run a console command in this process."""
    out, err, argv = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = [command, *map(str, args)]
    code: Any = 0
    verbosity = logging.get_verbosity()
    try:
        with on_any_machine(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            COMMANDS[command]()
    except SystemExit as stop:
        code = stop.code or 0
    finally:
        sys.argv = argv
        logging.set_verbosity(verbosity)
    return Result(code, out.getvalue(), err.getvalue())


def json_of(result: Result) -> dict[str, Any]:
    """Return the JSON object, of plain numbers, that is all of standard output."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    assert result.code == 0 and result.err == "", result
    document = json.loads(result.out, parse_constant=refuse)
    assert isinstance(document, dict)
    return document


def assert_refused(result: Result, *names: object) -> None:
    assert result.code == 2, result
    assert result.out == ""
    assert result.err.startswith("error: ") and result.err.count("\n") == 1, result.err
    assert result.err.endswith("\n") and "Traceback" not in result.err
    for name in names:
        assert str(name) in result.err, result.err
