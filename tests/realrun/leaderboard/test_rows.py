"""What the board says of rows that were measured: who leads, what trusting the prediction costs, which prompts loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from realrun.drafters.registry import DRAFTERS
from realrun.leaderboard.rows import LOOPS, best_of, trigram_shares
from specsim.policy.registry import POLICIES
from tests.support.reference import small_trace


def row(label: str, predicted: float, measured: float | None, *, tied: bool = False) -> dict[str, Any]:
    found = None if measured is None else {"estimate": measured, "low": measured, "high": measured}
    return {"label": label, "speedup": {"estimate": predicted}, "measured": found, "tied_with_leader": tied}


def test_trusting_the_prediction_costs_what_the_fastest_is_ahead() -> None:
    board = [row("a", 1.4, 1.6), row("b", 1.5, 1.52), row("c", 1.1, 1.0)]
    found = best_of(board, noise_percent=1.0)
    assert found is not None and (found["predicted"], found["measured"]) == ("b", "a")
    assert found["loss_percent"] == pytest.approx(100 * (1 - 1.52 / 1.6)) and found["resolved"]
    tied = [board[0], row("b", 1.5, 1.52, tied=True)]
    assert best_of(tied, 1.0)["resolved"] is False  # type: ignore[index]
    assert best_of(board, noise_percent=6.0)["resolved"] is False  # type: ignore[index]
    right = best_of([row("a", 1.7, 1.6), row("b", 1.5, 1.52)], 1.0)
    assert right is not None and right["loss_percent"] == 0.0 and right["resolved"] is False
    assert best_of([row("a", 1.4, None)], 0.0) is None


def test_a_text_that_repeats_itself_has_few_trigrams() -> None:
    trace = small_trace()
    counts = np.diff(trace.offsets)
    tokens = [np.arange(n) if at % 2 else np.resize([3, 4], n) for at, n in enumerate(counts)]
    shares = trigram_shares(
        trace.__class__(**{**vars(trace), "token": np.concatenate(tokens).astype(trace.token.dtype)})
    )
    long_enough = [at for at, n in enumerate(counts) if n > 8]
    assert long_enough and all((shares[at] > LOOPS) == bool(at % 2) for at in long_enough)


def test_papers_policies_exist() -> None:
    named = {kind.paper_policy for kind in DRAFTERS.values()} - {None}
    assert named and named <= POLICIES.keys()
