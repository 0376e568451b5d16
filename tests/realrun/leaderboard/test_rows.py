"""What the board says of its rows: which prompts loop, and that papers' policies exist."""

from __future__ import annotations

import numpy as np

from realrun.drafters.registry import DRAFTERS
from realrun.leaderboard.rows import LOOPS, trigram_shares
from specsim.policy.registry import POLICIES
from tests.support.reference import small_trace


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
