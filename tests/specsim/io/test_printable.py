"""What a file says is printed with its control characters escaped, whichever command prints it, and in short lines."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID
from specsim.claims.pytest_plugin import ClaimFailed, ClaimItem
from specsim.cli.main import main
from specsim.io.errors import InputError
from specsim.io.printable import LONGEST_LINE, printable
from specsim.trace.files import write_trace
from tests.support.commands import assert_refused, call

CLEAR, TITLE, CSI, BIDI = "\x1b[2J", "\x1b]0;owned\x07", "\x9b31m", "\u202e"
EVIL = f"a{CLEAR}b{TITLE}c{CSI}d{BIDI}e\rf"
ESCAPED = r"a\x1b[2Jb\x1b]0;owned\x07c\x9b31md\u202ee\rf"
STYLE = re.compile("\x1b\\[[0-9;]*m")


class Terminal(io.StringIO):
    """Standard output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    generated = generate(IID(0.8), sequences=4, output_tokens=30, depth=8)
    write_trace(replace(generated, meta={**generated.meta, "target": EVIL, EVIL: 1}), tmp_path / "trace")
    return tmp_path / "trace"


def test_info_escapes_what_stands_in_a_trace(trace: Path) -> None:
    out = call("specsim", "info", trace).out
    assert ESCAPED in out and out.count(r"\x1b[2J") == 2
    assert out.replace("\n", "").isprintable()


def test_a_terminal_shows_our_styles_and_no_code_of_a_file(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "argv", ["specsim", "info", str(trace)])
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit):
        main()
    shown = screen.getvalue()
    assert STYLE.search(shown) and r"\x1b[2J" in shown
    assert STYLE.sub("", shown).replace("\n", "").isprintable()
    assert sys.stdout is screen


def test_notes_and_errors_are_escaped_as_well(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    counts = {"num_accepted_draft_tokens": 2, "num_draft_tokens": 4, "num_spec_steps": 2}
    path.write_text(json.dumps({"engine": EVIL, "acceptance_histogram": {"0": 1, "2": 1}, **counts}))
    assert ESCAPED in call("specsim", "import", "aiperf", path).out
    assert_refused(call("specsim", "info", tmp_path / EVIL.replace("\r", "")), r"a\x1b[2Jb")
    assert_refused(call("specsim", "info", path, f"--{EVIL}"), r"\x1b[2J")
    assert_refused(call("specsim", f"{EVIL}"), r"\x1b[2J")


def test_pytest_shows_no_code_of_a_claims_file() -> None:
    with pytest.raises(ClaimFailed) as info:
        raise ClaimFailed(f"a{CLEAR}b")
    item: Any = None  # which is not asked for such a failure
    assert ClaimItem.repr_failure(item, info) == r"a\x1b[2Jb"


def test_an_error_is_one_line_of_bounded_length_that_keeps_what_to_do() -> None:
    error = str(InputError("x" * 5000 + f"\n{CLEAR}\t\u2028; give a trace"))
    assert len(error) == LONGEST_LINE and error.isprintable()
    assert error.startswith("xxx") and error.endswith("; give a trace") and " ... " in error


def test_text_of_people_stays_as_it_is() -> None:
    for text in ("plain", "zażółć, 日本語, ½ ┏━┓ 🙂", "two\nlines\tand a tab"):
        assert printable(text) == text
    assert printable("\ud800") == r"\ud800"
