"""Definitions of the acceptance length, acceptance rate, rates by position and TPOT that engines print; counters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specsim.acceptance.sources import Counters, Rounds, verified_by_depth
from specsim.engines.as_engine import counters_of, rounds_of
from specsim.engines.conventions import Conventions
from specsim.io.errors import InputError
from specsim.io.names import find_name, known_name, plain
from specsim.trace.joined import SUFFIX

if TYPE_CHECKING:  # numba is slow to import
    from specsim.policy.base import Policy
    from specsim.replaying.priced import PricedTrace

LENGTH, RATE, POSITIONS, TPOT = "acceptance-length", "acceptance-rate", "position-rate", "tpot"
QUANTITIES = (LENGTH, RATE, POSITIONS, TPOT)
RUNNING = ("rounds", "accept")  # which `specsim explain` tells beside them: how engines run rounds and accept drafts


@dataclass(frozen=True)
class Totals:
    """Totals of a run, from which every engine's numbers follow.

    rounds, drafted, accepted : rounds that the engine counts, tokens drafted and tokens accepted in them
    output_tokens : tokens that were output, the first included; NaN if unknown
    plain_steps : steps that drafted nothing, beside the rounds
    by_depth : rounds that drafted an i-th token, and rounds that accepted it
    evaluated : drafted tokens up to the first that was rejected, with it; NaN if unknown
    means : mean over requests of 1 + accepted tokens / rounds, and of accepted / drafted tokens; NaN if unknown
    last : tokens drafted and accepted in the last round of every request; NaN if unknown
    first_s, total_s : seconds until a request's first token and until its last; NaN if unknown
    """

    rounds: int
    drafted: int
    accepted: int
    output_tokens: float
    by_depth: Counters
    plain_steps: int = 0
    evaluated: float = np.nan
    means: tuple[float, float] = (np.nan, np.nan)
    last: tuple[float, float] = (np.nan, np.nan)
    first_s: float = np.nan
    total_s: float = np.nan

    @staticmethod
    def of(rounds: Rounds, output_tokens: float) -> Totals:
        """Sum rounds that emitted this number of output tokens."""
        means = last = np.nan, np.nan
        if rounds.sequence_id is not None and len(rounds.sequence_id):
            ends = np.flatnonzero(np.diff(rounds.sequence_id, append=-1))
            last = float(rounds.drafted[ends].sum()), float(rounds.accepted[ends].sum())
            starts = np.concatenate([[0], ends[:-1] + 1])
            drafted, accepted = (np.add.reduceat(counts, starts) for counts in (rounds.drafted, rounds.accepted))
            lengths, shares = 1 + accepted / (ends - starts + 1), accepted / np.maximum(drafted, 1)
            means = float(lengths.mean()), float(shares.mean())
        return Totals(
            len(rounds.drafted),
            int(rounds.drafted.sum()),
            int(rounds.accepted.sum()),
            output_tokens,
            counters_of(rounds),
            evaluated=float(np.minimum(rounds.accepted + 1, rounds.drafted).sum()),
            means=means,
            last=last,
        )


@dataclass(frozen=True)
class Definition:
    """An engine's definition of a quantity.

    engine, quantity : whose, and which of `QUANTITIES`
    printed : what it is called in the engine's log or metrics
    formula : in words
    value : the number, or the list of numbers by depth, of a run's `Totals`
    note : where it misleads
    """

    engine: str
    quantity: str
    printed: str
    formula: str
    value: Callable[[Totals], Any]
    note: str = ""


def _ratio(count: float, among: float) -> float:
    """Divide; NaN, which is not shown, where there was nothing to count among."""
    return count / among if among else math.nan


def _bonus_included(totals: Totals) -> float:
    return 1 + _ratio(totals.accepted, totals.rounds)


def _accepted_share(totals: Totals) -> float:
    return _ratio(totals.accepted, totals.drafted)


def _of_all_rounds(totals: Totals) -> list[float]:
    return [float(share) for share in totals.by_depth.accepted / totals.rounds]


def _of_rounds_that_drafted_it(totals: Totals) -> list[float]:
    return [float(share) for share in totals.by_depth.accepted / totals.by_depth.drafted]


def _of_rounds_that_verified_it(totals: Totals) -> list[float]:
    accepted, verified = verified_by_depth(totals.by_depth)
    return [float(share) for share in accepted / np.maximum(verified, 1)]


def _without_last_rounds(totals: Totals) -> float:
    drafted = totals.drafted - totals.last[0]
    return (totals.accepted - totals.last[1]) / drafted if drafted else np.nan


def _after_the_first(totals: Totals) -> float:
    return (totals.total_s - totals.first_s) / (totals.output_tokens - 1)


BONUS = "1 + accepted tokens / rounds with a draft"
SHARE = "accepted tokens / drafted tokens"
OF_ALL = "rounds that accepted the i-th token / all rounds with a draft"
BY_REQUEST = "a short request counts as much as a long one; other engines' numbers are the token-weighted one"
OF_ANY = "of any engine's requests"
AFTER_FIRST = "(time of the last token - of the first) / (output tokens - 1)"
SCHEDULE = "where drafts differ in length, its denominator counts rounds that never drafted so far"
DEFINITIONS = (
    Definition(
        "specsim", LENGTH, "tau", "output tokens / (rounds + steps without a draft)",
        lambda totals: _ratio(totals.output_tokens, totals.rounds + totals.plain_steps),
    ),
    Definition("specsim", RATE, "v_d", SHARE, _accepted_share),
    Definition(
        "specsim", POSITIONS, "specsim acceptance", "rounds that accepted the i-th token / rounds that verified it",
        _of_rounds_that_verified_it, "verified: all before it were accepted, which other engines' rates do not ask",
    ),
    Definition("vllm", LENGTH, "Mean acceptance length", BONUS, _bonus_included),
    Definition(
        "vllm", RATE, "Avg Draft acceptance rate", SHARE, _accepted_share,
        "what is accepted beyond the limit on output tokens is counted",
    ),
    Definition("vllm", POSITIONS, "Per-position acceptance rate", OF_ALL, _of_all_rounds, SCHEDULE),
    Definition("llamacpp", LENGTH, "mean len, #mean acc len", BONUS, _bonus_included),
    Definition("llamacpp", RATE, "draft acceptance", SHARE, _accepted_share),
    Definition("llamacpp", POSITIONS, "#acc rate/pos", OF_ALL, _of_all_rounds, SCHEDULE),
    Definition(
        "sglang", LENGTH, "accept len, spec_accept_length", "completion tokens / verification passes",
        lambda totals: _ratio(totals.output_tokens, totals.rounds),
        "the completion counts the token that the prompt's pass emits",
    ),
    Definition(
        "sglang", RATE, "accept rate, spec_accept_rate", "accepted tokens / (passes x drafted tokens of each)",
        _accepted_share,
        "of trees a share of nodes; before pull request 13212 accepted tokens and bonus were divided by nodes and root",
    ),
    Definition(
        "tensorrt-llm", LENGTH, "acceptanceLength", "1 + accepted tokens / requests with a draft, per iteration",
        _bonus_included,
    ),
    Definition(
        "tensorrt-llm", POSITIONS, "trtllm_spec_decode_accepted_tokens_total by token_position",
        "rounds that accepted the i-th token / rounds that drafted it", _of_rounds_that_drafted_it,
        "both counts are exported, so that it holds for drafts of any length",
    ),
    Definition("lmdeploy", LENGTH, "Mean acceptance length", BONUS, _bonus_included),
    Definition("lmdeploy", RATE, "Draft acceptance rate", SHARE, _accepted_share),
    Definition("lmdeploy", POSITIONS, "Per-position acceptance rate", OF_ALL, _of_all_rounds, SCHEDULE),
    Definition(
        "aiperf", LENGTH, "Acceptance Length", f"mean over requests of {BONUS}",
        lambda totals: totals.means[0], BY_REQUEST,
    ),
    Definition("aiperf", LENGTH, "Token-Weighted Acceptance Length", BONUS, _bonus_included, OF_ANY),
    Definition(
        "aiperf", RATE, "Draft Acceptance Rate", f"mean over requests of {SHARE}, in percent",
        lambda totals: 100 * totals.means[1], BY_REQUEST,
    ),
    Definition(
        "aiperf", RATE, "Overall Draft Acceptance Rate", f"{SHARE}, in percent",
        lambda totals: 100 * _accepted_share(totals), OF_ANY,
    ),
    Definition(
        "transformers", LENGTH, "mean of num_matches", "accepted tokens / rounds",
        lambda totals: _ratio(totals.accepted, totals.rounds), "without the token that the target adds",
    ),
    Definition(
        "openvino", RATE, "get_draft_acceptance_rate", "accepted tokens / drafted tokens, without each last round",
        _without_last_rounds,
        "a request's last round is not counted, drafted or accepted; accepted = output tokens - iterations holds it",
    ),
    Definition(
        "onnxruntime-genai", LENGTH, "mean_emitted_tokens_per_round", "tokens that rounds output / rounds",
        lambda totals: (totals.output_tokens - totals.plain_steps) / totals.rounds,
        "steps without a draft and their tokens are left out",
    ),
    Definition(
        "onnxruntime-genai", RATE, "acceptance_rate", "accepted tokens / drafted tokens up to the first rejected one",
        lambda totals: totals.accepted / totals.evaluated,
        "tokens after the first rejected one are not in the denominator, so it is above other engines' rates",
    ),
    Definition("specsim", TPOT, "TPOT", AFTER_FIRST, _after_the_first),
    Definition("vllm", TPOT, "TPOT of `vllm bench serve`", AFTER_FIRST, _after_the_first),
    Definition("llamacpp", TPOT, "predicted_per_token_ms", AFTER_FIRST, _after_the_first),
    Definition("openvino", TPOT, "get_tpot", AFTER_FIRST, _after_the_first),
    Definition(
        "guidellm", TPOT, "time_per_output_token_ms", "time of the last token / output tokens",
        lambda totals: totals.total_s / totals.output_tokens,
        "holds the wait for the first token; its inter_token_latency_ms, and tpot_ms of its goodput, are others' TPOT",
    ),
    Definition(
        "aiperf", TPOT, "inter_token_latency", AFTER_FIRST, _after_the_first,
        "where the first chunk holds several tokens, they are all left out of the output tokens",
    ),
    Definition(
        "mlx", TPOT, "1 / generation_tps", "(time of the last token - of the first) / output tokens",
        lambda totals: (totals.total_s - totals.first_s) / totals.output_tokens,
        "tokens of the first round count, its seconds do not: an answer of one round shows any speed",
    ),
)  # fmt: skip


def find_definitions(quantity: str, engine: str | None = None) -> list[Definition]:
    """Definitions of a quantity, of an engine or of all."""
    if quantity not in QUANTITIES:
        raise InputError(f"unknown quantity {quantity!r}; choose one of {', '.join((*QUANTITIES, *RUNNING))}")
    if engine is not None and plain(engine) == "dynamo":
        raise InputError("Dynamo prints its engine's numbers; name that engine: vllm, sglang or tensorrt-llm")
    known = [*dict.fromkeys(number.engine for number in DEFINITIONS if number.quantity == quantity)]
    others = [number.quantity for number in DEFINITIONS if engine and find_name("engine", engine, [number.engine])]
    if others and quantity not in others:
        printed = " and ".join(dict.fromkeys(others))
        raise InputError(f"{engine} prints no {quantity}; it prints {printed}")
    engine = engine and known_name("engine", engine, known, where=f"for {quantity}")
    return [number for number in DEFINITIONS if number.quantity == quantity and engine in (None, number.engine)]


class EngineCounts(NamedTuple):
    """An engine's counters. printed : by the names of the engine's own log, what it prints of them"""

    engine: str
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    drafted_per_position: list[int]
    accepted_per_position: list[int]
    printed: dict[str, float | list[float]]


def engine_counts(priced: PricedTrace, policy: Policy, conventions: Conventions, *, seed: int = 0) -> EngineCounts:
    """The engine's counters and the numbers that it prints of them.

    priced : the trace as the engine would run it, see `as_engine`
    policy : how it drafts
    conventions : how it counts

    Raises InputError for a tree policy, and for a policy that shortens the drafts of suffix decoding.
    """
    from specsim.policy.chain.base import ChainPolicy

    if not isinstance(policy, ChainPolicy):
        raise InputError(f"policy {policy.name} drafts trees, which no engine's counters cover; choose a chain policy")
    longest = int(priced.trace.draft_limit.max(initial=0))
    if priced.trace.drafter_kind == SUFFIX and policy.max_draft_tokens < longest:
        raise InputError(
            f"policy {policy} shortens drafts of up to {longest} tokens, but suffix decoding would then draft others; "
            f"draft up to {longest}, or use `specsim record-text --max-draft-tokens {policy.max_draft_tokens}`"
        )
    played = priced.replay(policy, seed=seed, log=True)
    assert played.rounds is not None
    prefilled = priced.trace.sequences if conventions.first_token == "prefill" else 0
    totals = Totals.of(rounds_of(played.rounds, priced.trace, conventions), int(played.output_tokens.sum()) + prefilled)
    own = [number for number in DEFINITIONS if number.engine == conventions.engine and number.quantity != TPOT]
    values = {number.printed: number.value(totals) for number in own} if totals.drafted else {}
    return EngineCounts(
        conventions.engine,
        totals.rounds,
        totals.drafted,
        totals.accepted,
        totals.by_depth.drafted.tolist(),
        totals.by_depth.accepted.tolist(),
        {name: value for name, value in values.items() if np.isfinite(value).all()},
    )
