"""What is printed, escaped, and how progress is shown."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID
from specsim.claims.pytest_plugin import ClaimFailed, ClaimItem
from specsim.cli.main import main
from specsim.io.errors import InputError
from specsim.io.printable import LONGEST_LINE, printable
from specsim.io.progress import ProgressLines, ProgressReports, duration
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


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def lines_at(clock: Clock) -> ProgressLines:
    return ProgressLines([].append, clock=clock)


def test_a_line_says_what_how_far_and_how_long_still() -> None:
    clock = Clock()
    lines = lines_at(clock)
    assert lines.line() is None
    lines("record", 0, 36)
    clock.now += 20
    assert lines.line() == "record: 0 of 36, 20 s so far"
    lines("record", 12, 36)
    assert lines.line() == "record: 12 of 36, about 40 s left"
    clock.now += 100  # nothing is reported, and what is done takes longer than was thought
    assert lines.line() == "record: 12 of 36, about 4 min left"
    lines("record", 36, 36)
    assert lines.line() == "record: 36 of 36, done"
    clock.now += 9
    assert lines.line() == "record: 36 of 36, done"
    clock.now += 21
    assert lines.line() == "record: 36 of 36, done; the next part, 30 s so far"


@pytest.mark.parametrize(
    ("reports", "line"),  # each after so many seconds: a part, how much is done, of how much
    [
        ([(0, "record", 30, 36), (60, "record", 33, 36)], "record: 33 of 36, about 60 s left"),
        ([(0, "record", 1, 2), (1000, "tune", 1, 10), (10, "tune", 2, 10)], "tune: 2 of 10, about 80 s left"),
        (
            [(0, "probe", 1, 15), (1000, "probe", 15, 15), (1000, "probe", 1, 15), (10, "probe", 6, 15)],
            "probe: 6 of 15, about 18 s left",
        ),
    ],
    ids=["what was there before is no work", "parts have times of their own", "a part begins anew"],
)
def test_the_time_left_follows_the_part_since_it_began(reports: list[tuple[int, str, int, int]], line: str) -> None:
    clock = Clock()
    lines = lines_at(clock)
    for seconds, *report in reports:
        clock.now += seconds
        lines(*report)
    assert lines.line() == line


def test_lines_come_while_nothing_is_reported_and_end_with_the_work() -> None:
    came, printed = Event(), list[str]()

    def say(line: str) -> None:
        printed.append(line)
        if len(printed) == 3:
            came.set()

    lines = ProgressLines(say, interval_s=0.001)
    with lines:
        lines("verify", 1, 4)
        assert came.wait(60)
    assert lines.ended.is_set() and printed[0].startswith("verify: 1 of 4, ")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (3600, "60 min"), (9000, "2.5 h")]
)
def test_a_duration_is_read_at_a_glance(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_programs_are_told_at_most_every_second_and_at_the_end() -> None:
    clock, printed = Clock(), []
    reports = ProgressReports(printed.append, clock=clock)
    for step in range(1, 9):
        clock.now += 0.25
        reports("tune", step, 8)
    clock.now += 2
    reports("rank", 0, 4)
    first, second, last, other = map(json.loads, printed)
    assert first == {"progress": "tune", "done": 1, "total": 8, "elapsed_s": 0.0, "left_s": None}
    assert second == {"progress": "tune", "done": 5, "total": 8, "elapsed_s": 1.0, "left_s": 0.75}
    assert (last["done"], last["left_s"]) == (8, 0.0)
    assert other["progress"] == "rank"


def test_a_command_reports_to_programs() -> None:
    arguments = ["tune", "example:lab-lookup", "--cost", "edd-llama2-chat-7b-a6000", "--policy", "fixed_k", "--json"]
    result = call("specsim", "--progress", "json", *arguments)
    assert result.code == 0
    reports = [json.loads(line) for line in result.err.splitlines()]
    assert reports[-1]["progress"] == "tune" and reports[-1]["done"] == reports[-1]["total"]
    plain = call("specsim", *arguments)
    assert plain.err == "" and json.loads(plain.out) == json.loads(result.out)
