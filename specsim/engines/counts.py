"""An engine's counters for a policy, from a replay of the trace as the engine would run it."""

from __future__ import annotations

from typing import Any

from specsim.engines.as_engine import rounds_of
from specsim.engines.conventions import Conventions
from specsim.engines.definitions import DEFINITIONS, Totals
from specsim.io.errors import InputError
from specsim.policy.base import Policy
from specsim.policy.chain.base import ChainPolicy
from specsim.replaying.priced import PricedTrace
from specsim.trace.joined import SUFFIX


def engine_counts(priced: PricedTrace, policy: Policy, conventions: Conventions, *, seed: int = 0) -> dict[str, Any]:
    """The engine's counters and the numbers that it prints of them.

    priced : the trace as the engine would run it, see `as_engine`
    policy : how it drafts
    conventions : how it counts

    Returns engine, num_drafts, num_draft_tokens, num_accepted_tokens, drafted_per_position and accepted_per_position
    [D], and by the names of the engine's own log what it prints.

    Raises InputError for a tree policy, and for a policy that shortens the drafts of suffix decoding.
    """
    if not isinstance(policy, ChainPolicy):
        raise InputError(f"policy {policy.name} drafts trees, which no engine's counters cover; choose a chain policy")
    longest = int(priced.trace.draft_limit.max(initial=0))
    if priced.trace.meta.get("drafter_kind") == SUFFIX and policy.max_draft_tokens < longest:
        raise InputError(
            f"policy {policy} shortens drafts of up to {longest} tokens, but suffix decoding would then draft others; "
            f"draft up to {longest}, or use `specsim record-text --max-draft-tokens {policy.max_draft_tokens}`"
        )
    played = priced.replay(policy, seed=seed, log=True)
    assert played.rounds is not None
    prefilled = priced.trace.sequences if conventions.first_token == "prefill" else 0
    totals = Totals.of(rounds_of(played.rounds, priced.trace, conventions), int(played.output_tokens.sum()) + prefilled)
    printed = [number for number in DEFINITIONS if number.engine == conventions.engine]
    return {
        "engine": conventions.engine,
        "num_drafts": totals.rounds,
        "num_draft_tokens": totals.drafted,
        "num_accepted_tokens": totals.accepted,
        "drafted_per_position": totals.by_depth.drafted.tolist(),
        "accepted_per_position": totals.by_depth.accepted.tolist(),
        "printed": {number.printed: number.value(totals) for number in printed} if totals.drafted else {},
    }
