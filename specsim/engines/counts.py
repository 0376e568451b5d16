"""What an engine would count of a policy: replayed on a trace as it would run it."""

from __future__ import annotations

from typing import Any

from specsim.engines.as_engine import rounds_of
from specsim.engines.conventions import Conventions
from specsim.engines.definitions import DEFINITIONS, Totals
from specsim.errors import InputError
from specsim.policy.base import Policy
from specsim.policy.chain.base import ChainPolicy
from specsim.replaying.priced import PricedTrace
from specsim.trace.joined import SUFFIX


def engine_counts(priced: PricedTrace, policy: Policy, conventions: Conventions, *, seed: int = 0) -> dict[str, Any]:
    """The engine's counters and the numbers that it prints of them.

    Parameters
    ----------
    priced : PricedTrace
        The trace as the engine would run it, see `as_engine`.
    policy : ChainPolicy
        How it drafts.
    conventions : Conventions
        How it counts.

    Returns
    -------
    dict
        engine, num_drafts, num_draft_tokens, num_accepted_tokens, drafted_per_position and
        accepted_per_position [D], and by the names of the engine's own log what it prints.

    Raises
    ------
    InputError
        For a policy of trees, and for one that cuts short what suffix decoding proposes.
    """
    if not isinstance(policy, ChainPolicy):
        raise InputError(f"policy {policy.name} is of trees, of which no engine's counters are known; choose a chain's")
    longest = int(priced.trace.draft_limit.max(initial=0))
    if priced.trace.meta.get("drafter_kind") == SUFFIX and policy.max_draft_tokens < longest:
        raise InputError(
            f"policy {policy} cuts drafts of up to {longest} tokens short, where suffix decoding would choose others; "
            f"draft up to {longest}, or use `specsim record-text --max-draft-tokens {policy.max_draft_tokens}`"
        )
    played = priced.replay(policy, seed=seed, log=True)
    assert played.rounds is not None
    prefilled = priced.trace.sequences if conventions.first_token == "prefill" else 0
    totals = Totals.of(rounds_of(played.rounds, priced.trace, conventions), int(played.output_tokens.sum()) + prefilled)
    printed = [one for one in DEFINITIONS if one.engine == conventions.engine]
    return {
        "engine": conventions.engine,
        "num_drafts": totals.rounds,
        "num_draft_tokens": totals.drafted,
        "num_accepted_tokens": totals.accepted,
        "drafted_per_position": totals.by_depth.drafted.tolist(),
        "accepted_per_position": totals.by_depth.accepted.tolist(),
        "printed": {one.printed: one.value(totals) for one in printed} if totals.drafted else {},
    }
