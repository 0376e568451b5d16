"""Tables at every width: no number is cut, no word falls apart, nothing is left out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from realrun.cli.board import print_board as print_drafters
from realrun.cli.validate import print_validation
from specsim.cli.console import print_table
from specsim.report.experiment import DrafterBoard, Validation
from specsim.report.terminal import LOG_WIDTH, Need, blocks, widths
from tests.support import ROOT
from tests.support.commands import call

WIDTHS = (60, 100)
STUDIES = ROOT / "studies"
INTERVAL = "1.523 [1.404, 1.650]"
POLICY = "adaedl(gamma=0.2, lambda0=0.3, max_draft_tokens=16)"
TUNED = [
    "",
    "tuning speedup",
    "held-out speedup [95 % interval]",
    "tuned gains",
    "tau",
    "regret to the oracle",
    "policy",
]
ROWS = [
    ["tuned", "1.553", INTERVAL, "", "3.41", "12.4 %", POLICY],
    ["best fixed K", "", INTERVAL, "+0.1", "3.2", "", "k=4"],
]


def shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int, *table: Any, **how: Any
) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(*table, **how)
    return capsys.readouterr().out


def assert_fits(text: str, width: int) -> None:
    assert max(map(len, text.splitlines())) <= width, text


@pytest.mark.parametrize("width", WIDTHS)
def test_a_wide_table_goes_on_in_blocks(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown(capsys, monkeypatch, width, "tuned", TUNED, ROWS)
    assert_fits(text, width)
    for whole in ("1.553", INTERVAL, "12.4 %", "3.41", "gamma=0.2,", "max_draft_tokens=16)"):
        assert whole in text
    assert (
        text.count("best fixed K") == text.count("│ tuned") >= 1 + (width == 60)
    )  # every block says what its rows are


def test_what_fits_is_one_block(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(capsys, monkeypatch, 200, "tuned", TUNED, ROWS)
    assert text.count("best fixed K") == 1 and POLICY in text


def test_a_log_is_as_wide_as_it_must_be(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_table("long", ["name", "value"], [["a", "x" * 150]])
    assert "x" * 150 in capsys.readouterr().out and LOG_WIDTH > 150


@pytest.mark.parametrize("width", [1, 8, 20, 40])
def test_no_terminal_is_too_narrow(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = shown(capsys, monkeypatch, width, "tuned", TUNED, ROWS)
    assert text
    if width == 40:
        assert_fits(text, width)
        assert "1.404," in text and "12.4 %" in text


def test_text_is_no_markup(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(capsys, monkeypatch, 60, "[red]title[/red] :smile:", ["[b]", "value"], [["[i]a[/i]", ":smile:"]])
    assert all(whole in text for whole in ("[red]title[/red] :smile:", "[b]", "[i]a[/i]"))


def test_blocks_hold_what_fits_beside_the_labels() -> None:
    needs = [Need(size, size, size) for size in (10, 20, 20, 90)]
    assert blocks(needs, 1, 60) == [[0, 1, 2], [0, 3]]
    assert blocks(needs, 2, 60) == [[0, 1, 2], [0, 1, 3]]
    assert blocks(needs, 1, 40) == [[0, 1], [0, 2], [0, 3]]
    assert blocks(needs[:1], 1, 40) == [[0]]


def test_what_is_left_over_goes_to_columns_that_lack_some() -> None:
    assert widths([Need(5, 5, 5), Need(8, 10, 40), Need(10, 10, 14)], 60) == [5, 31, 14]
    assert widths([Need(5, 5, 5), Need(10, 10, 12)], 60) == [5, 12]


def test_cells_are_broken_at_spaces_before_words_are() -> None:
    assert widths([Need(20, 20, 20), Need(5, 18, 18)], 40) == [20, 13]
    assert widths([Need(20, 20, 20), Need(25, 30, 30)], 40) == [16, 17]


def on_one_line(capsys: pytest.CaptureFixture[str], width: int) -> str:
    """What was printed, whose tables fit, with single spaces."""
    text = capsys.readouterr().out
    assert_tables_fit(text, width)
    return " ".join(text.split())


@pytest.mark.parametrize("width", WIDTHS)
def test_validation_and_leaderboard_of_drafters_fit(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of recorded runs; the fastest policy asked for more than was recorded, and the clock told another speedup."""
    monkeypatch.setenv("COLUMNS", str(width))
    disturbed = {"truncated_share": 0.02, "wall_clock_differs": True}
    run = Validation.read(STUDIES / "smollm2" / "recorded" / "eagle" / "validation.json")
    first, *others = run.rows
    print_validation(replace(run, rows=[replace(first, **disturbed), *others]), Path("out"))
    text = on_one_line(capsys, width)
    asked = "rounds that asked for more than the recorded trees hold: {}: 2.00 %"
    assert f"{run.baseline.ms_per_token:.2f} ms per baseline token" in text and f"Fastest: {first.label}" in text
    assert all(f"{row.measured}" in text and f"{row.forecast}" in text for row in run.rows)
    assert f"{float(first.wall_clock_speedup):.3f} by the clock" in text and asked.format(first.label) in text
    path = STUDIES / "drafters" / "recorded" / "board.json"
    board = DrafterBoard.from_json(json.loads(path.read_text()), "the board", "run it again")
    leader, *rest = board.rows
    print_drafters(replace(board, rows=[replace(leader, **disturbed), *rest]))
    text = on_one_line(capsys, width)
    assert all(f"{float(row.measured):.3f} [" in text for row in board.rows) and asked.format(leader.label) in text


def table_lines(text: str) -> list[str]:
    """Of tables alone: sentences are folded by the terminal."""
    return [line for line in text.splitlines() if re.match("[┏┃┡│└]", line)]


def words(text: str) -> set[str]:
    return {word for line in table_lines(text) for word in re.split(r"[\s┏┓┃┡╇┩│└┘━┳┴─]+", line)}


def assert_tables_fit(text: str, width: int) -> None:
    assert table_lines(text)
    assert_fits("\n".join(table_lines(text)), width)


EXAMPLE = "example/trace", "--cost", "example/profile.json"
COMMANDS = [
    ("specsim", "replay", *EXAMPLE, "--policy", "fixed_k"),
    ("specsim", "tune", *EXAMPLE, "--policy", "fixed_k", "--search", "grid", "--trials", "8"),
    ("specsim", "leaderboard", *EXAMPLE, "--policy", "fixed_k", "--policy", "p_min", "--trials", "2"),
    ("specsim", "tree", "best", *EXAMPLE),
    ("specsim", "tree", "search", "example/trace", "--nodes", "12"),
    ("specsim", "acceptance", "fit", "example/trace", "--model", "iid", "--out", "model.json"),
    ("specsim", "info", "example/trace"),
    ("specsim", "policies"),
    ("realrun", "shapes"),
]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join(words[:3]))
def test_a_command_fits_the_terminal(
    command: tuple[str, ...], width: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(width))
    assert call("specsim", "example").code == 0
    result = call(*command)
    assert result.code == 0, result
    assert_tables_fit(result.out, width)
    monkeypatch.setenv("COLUMNS", "1000")
    (tmp_path / "model.json").unlink(missing_ok=True)
    broken = words(call(*command).out) - words(result.out)  # or left out
    assert all(len(word) > width / 3 for word in broken), broken
