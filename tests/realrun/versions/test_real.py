"""A slowdown built into a copy of this checkout is found, by real decoding."""

from __future__ import annotations

from pathlib import Path

import pytest

from realrun.pairs.pair import load_pair
from realrun.pairs.prompts import lab_prompts
from realrun.versions.compare import CompareSettings, compare
from specsim.policy.registry import make_policy
from studies.versions.run import checkouts


@pytest.mark.slow
@pytest.mark.parametrize(("part", "slower"), [("round", ["slower", "slower"]), ("draft", [None, "slower"])])
def test_a_slowdown_of_15_percent_is_found(tmp_path: Path, part: str, slower: list[str | None]) -> None:
    """In all rounds, or in drafting alone, which the baseline does not do; rounds and texts stay the same."""
    pair = {"drafter": "eagle", "threads": 1}
    prompts = lab_prompts(load_pair(threads=1).tokenizer, 3)
    settings = CompareSettings(pair, [make_policy("fixed_k", k=3)], max_new_tokens=24, clock="cpu")
    with checkouts(part, 15.0) as (base, head):
        rows = compare(base, head, prompts, settings, tmp_path / "out")["rows"]
    verdicts = [row["verdict"] for row in rows]
    assert all(wanted in (None, verdict) for wanted, verdict in zip(slower, verdicts, strict=True)), rows
    assert part == "round" or verdicts[0] != "slower", rows
    assert all(row["rounds_identical_percent"] == row["output_identical_percent"] == 100 for row in rows)
