"""The study of comparisons: its slowdowns fit the decoder as it is, and its counts are those of the verdicts."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from studies.versions import run
from studies.versions.run import report

CONFIG = tomllib.loads((Path(run.__file__).parent / "config.toml").read_text())


@pytest.mark.parametrize(("part", "places"), [("round", 1), ("draft", 2)])
def test_a_slowdown_is_built_into_the_decoder(part: str, places: int) -> None:
    """In drafting, before both kinds of drafts have been timed."""
    code = (run.ROOT / run.DECODER).read_text()
    slower = run.slowed(code, part, 3.0)
    compile(slower, "decoder.py", "exec")
    assert slower.count("_wait(0.03 * ") == places and slower.count("def _wait") == 1
    with pytest.raises(AssertionError, match="has no line"):
        run.slowed("", part, 3.0)


def test_verdicts_are_counted() -> None:
    interval = {"estimate": 3.0, "low": 1.0, "high": 5.0}

    def comparison(case: str, *verdicts: str) -> dict[str, Any]:
        rows = [
            {"label": label, "verdict": verdict, "exceeds": None if verdict == "not decidable" else True}
            | dict.fromkeys(("slowdown_percent", "null_percent"), interval)
            | {"restart_token_ms": [[10.0, 10.2], [1.0, 1.0], [10.1, 10.1]]}
            for label, verdict in zip(("baseline", "fixed_k"), verdicts, strict=True)
        ]
        load = {"others_percent": 10.0, "stolen_percent": 0.0}
        return {"case": case, "rows": rows, "restarts": 6, "spent_s": 120.0, "load": load}

    verdicts = {"rounds +3 %": ("no change", "slower"), "equal": ("faster", "not decidable")}
    comparisons = [
        comparison(case["name"], *verdicts.get(case["name"], ("no change", "no change"))) for case in CONFIG["cases"]
    ]
    machine = {"environment": {"device": "cpu", "threads": 1, "date": "2026-01-01"}, "dtype": "float32"}
    written = report(CONFIG, machine, comparisons)
    shown = {row["case"]: row for row in written.shown}
    assert [shown["rounds +3 %"][key] for key in ("found", "changes", "undecided")] == [1, 1, 0]
    assert [shown["equal"][key] for key in ("found", "changes", "undecided")] == [0, 1, 1]
    assert "found 1 of 3 slowdowns of 3 %" in written.answer and "itself in 1 of 2 comparisons" in written.answer
    assert len(written.markdown.split()) < 700
