"""Tables at every width: no number is cut, no word falls apart, nothing is left out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from realrun.cli.board import print_board as print_drafters
from realrun.cli.validate import print_validation
from specsim.cli.console import print_table
from specsim.report.terminal import LOG_WIDTH, Need, blocks, widths
from tests.support.commands import call

WIDTHS = (60, 100)
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


def interval(estimate: float) -> dict[str, float]:
    return {"estimate": estimate, "low": estimate - 0.1, "high": estimate + 0.1}


VALIDATED = {
    "label": "max_confidence, tuned", "role": "tuned", "predicted": interval(1.5), "measured": interval(1.4),
    "error_percent": 7.1, "rounds_identical_percent": 100.0, "truncated_share": 0.02, "tau": 2.5, "oracle_regret": 0.2,
    "forecast": interval(1.5), "wall_clock_speedup": interval(1.35), "wall_clock_differs": True, "tokens_per_s": 100.0,
    "ms_per_token": 10.0,
}  # fmt: skip
VALIDATION: dict[str, Any] = {
    "rows": [VALIDATED], "sequences": {"holdout": 6}, "output_tokens": 768, "null_arm": interval(1.0),
    "noise_floor_percent": 0.7, "load": {"others_percent": 3.0, "stolen_percent": 0.0},
    "prompts": {"source": "prompts.jsonl", "count": 12, "digest": "ab"},
    "skipped": [{"policy": "space_k", "reason": "meant for drafters of kind space; this trace's is model"}],
    "median_abs_error_percent": 1.0, "p90_abs_error_percent": 2.0,
    "errors": {
        name: {"median_abs_percent": 1.0, "p90_abs_percent": 2.0, "largest_percent": -2.5, "mean_percent": 0.5}
        for name in ("forecast", "text_known", "costs_known", "decomposition")
    },
    "environment": {"clock": "cpu"}, "options": {"repeats": 3},
    "baseline": {"tokens_per_s": 71.4, "ms_per_token": 14.0},
    "forecast": {
        "made": "2026-11-01T10:00:00+00:00", "sealed": True, "sequences": {"tuning": 6, "holdout": 6},
        "costs": {"source": "profile.json"},
    },
    "machine_state": {"changes": []},
    "time": {"minutes": 0, "spent_s": 60.0, "prompts": {"given": 12, "recorded": 12, "decoded": 6}},
    "choice": {
        "forecast": "max_confidence, tuned", "forecast_speedup": 1.6, "measured_speedup": interval(1.4),
        "measured": "max_confidence, tuned", "regret": interval(0.0), "significant": False,
    },
}  # fmt: skip
ASKED_FOR_MORE = "rounds that asked for more than the recorded trees hold: max_confidence, tuned: 2.00 %"
DRAFTED = {
    "label": "max_confidence, tuned",
    "drafter": "prompt-lookup", "form": "adaptive", "settings": POLICY, "speedup": interval(1.2), "tau": 1.5,
    "measured": interval(1.3), "error_percent": -1.2, "rounds_identical_percent": 100.0, "truncated_share": 0.02,
    "v_d": 0.5, "hm": 0.6, "forecast": interval(1.6), "wall_clock_speedup": interval(1.35), "wall_clock_differs": False,
    "best_of_drafter": True, "tied_with_leader": False, "leader_minus_this": None, "without_loops": interval(1.1),
}  # fmt: skip
DRAFTERS: dict[str, Any] = {
    **VALIDATION, "rows": [DRAFTED, {**DRAFTED, "form": "fixed K", "leader_minus_this": {"difference": interval(0.1)}}],
    "options": {"repeats": 3}, "target": "lab", "sequences": {"tuning": 6, "holdout": 6}, "looping_prompts": 1,
}  # fmt: skip


@pytest.mark.parametrize("width", WIDTHS)
def test_validation_and_leaderboard_of_drafters_fit(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    print_validation(VALIDATION, Path("out"))
    text = capsys.readouterr().out
    assert_tables_fit(text, width)
    assert "14.00 ms per baseline token, by process CPU time" in " ".join(text.split())
    assert "by the clock, 1.400 by medians" in " ".join(text.split()) and "Fastest: max_confidence" in text
    assert "1.400 [1.300, 1.500]" in text and "1.500 [1.400, 1.600]" in text and ASKED_FOR_MORE in text
    print_drafters(DRAFTERS)
    text = capsys.readouterr().out
    assert_tables_fit(text, width)
    assert text.count("fixed K") == text.count("autoregressive") and "1.100 [1.000, 1.200]" in text
    assert ASKED_FOR_MORE in text


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
