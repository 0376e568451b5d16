"""What a claim of a replay comes out as: the trace replayed again, under its policy and at its costs."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specsim.arrays import Floats, IntArray
from specsim.claims.claim import ReplaySubject, Seconds, policy_at
from specsim.claims.measured import Measured, PerSequence, Stamp, from_columns, stamp_of
from specsim.cost.model import ConstantCost, CostModel
from specsim.errors import InputError
from specsim.examples import located
from specsim.replaying.replay import Replay

if TYPE_CHECKING:
    from specsim.replaying.priced import PricedTrace

IDENTITY = "rounds_identical_percent"
DEFAULT_SHARE = 0.5  # of the sequences, on which policies learn

# Of a replay: quantity -> (numerator, denominator) per sequence. HM = 2 a / (d + o), of a accepted, d drafted and o
# output tokens, is a ratio of sums like the others.
RATIOS: dict[str, Any] = {
    "speedup": lambda one: (one.autoregressive_s, one.speculative_s),
    "v_d": lambda one: (one.accepted, one.drafted),
    "r_d": lambda one: (one.accepted, one.output_tokens),
    "hm": lambda one: (2 * one.accepted, one.drafted + one.output_tokens),
    "tau": lambda one: (one.output_tokens, one.num_rounds),
    "mean_accepted_tokens": lambda one: (one.accepted, one.num_rounds),
    "mean_draft_tokens": lambda one: (one.drafted, one.num_rounds),
    "tokens_per_s": lambda one: (one.output_tokens, one.speculative_s),
    "autoregressive_tokens_per_s": lambda one: (one.output_tokens, one.autoregressive_s),
}


class Source(NamedTuple):
    """What is replayed, and at which costs; `stamps` tell whether its files are still what was read."""

    home: Path
    stamps: tuple[Stamp, ...]
    trace: str
    cost: str | Seconds
    draft_cost: str | None
    batch: int | None
    max_output_tokens: int | None
    max_draft_tokens: int | None


def of_replay(subject: ReplaySubject, home: Path) -> Measured:
    files = [subject.trace, subject.policy, subject.draft_cost, subject.cost if isinstance(subject.cost, str) else None]
    stamps = tuple(stamp_of(home / file) for file in files if file)
    source = Source(home, stamps, *(getattr(subject, name) for name in Source._fields[2:]))
    replayed, times, on_rest = _replay(source, subject.model_dump_json(exclude={"quantity", "average"}))
    part = _rest(source, subject.tuning_share or DEFAULT_SHARE, subject.seed) if on_rest else _priced(source)
    top, bottom = _columns(subject, replayed, part, times, home)
    key = (subject.trace, subject.max_output_tokens, tuple(part.trace.sequence_id.tolist()))
    found = from_columns(PerSequence(top, bottom, key), average=subject.average)
    return replace(found, seconds=(replayed.speculative_s, np.asarray(replayed.output_tokens, dtype=np.float64)))


@lru_cache(maxsize=64)  # several quantities are claimed of one replay, which holds no trace
def _replay(source: Source, subject_json: str) -> tuple[Replay, int, bool]:
    """The sums of a subject's replays, of how many, and whether only on what policies do not learn on."""
    from specsim.api.predict import fitted_part
    from specsim.ranking.replays import replay_seeds, together

    subject, whole = ReplaySubject.model_validate_json(subject_json), _priced(source)
    name = policy_at(subject.policy, source.home)
    share = subject.tuning_share or DEFAULT_SHARE
    part, policy, learned_on = fitted_part(whole, name, subject.settings, share, subject.seed)
    on_rest = learned_on > 0 or subject.tuning_share is not None
    if on_rest:
        part = _rest(source, share, subject.seed)
    if subject.replays == 1:
        return part.replay(policy, seed=subject.seed, log=subject.rounds is not None), 1, on_rest
    if subject.rounds is not None:
        raise InputError("rounds are those of one replay; leave replays out")
    replays = replay_seeds(part, policy, range(subject.seed, subject.seed + subject.replays))
    return replace(together(replays), rounds=None), len(replays), on_rest


@lru_cache(maxsize=4)  # several policies are claimed of one trace
def _priced(source: Source) -> PricedTrace:
    from specsim.replaying.priced import PricedTrace
    from specsim.trace.files import read_trace

    found = read_trace(source.home / located(source.trace, "trace"))
    if source.max_output_tokens is not None:
        found = found.shortened(source.max_output_tokens)
    if source.max_draft_tokens is not None:
        found = found.shallower(source.max_draft_tokens)
    return PricedTrace(found, _cost(source))


@lru_cache(maxsize=4)
def _rest(source: Source, tuning_share: float, seed: int) -> PricedTrace:
    """The sequences that policies do not learn on."""
    from specsim.trace.split import split_sequences

    whole = _priced(source)
    return whole.select(split_sequences(whole.trace, tuning_share=tuning_share, seed=seed)[1])


def _columns(
    subject: ReplaySubject, replayed: Replay, part: PricedTrace, times: int, home: Path
) -> tuple[Floats, Floats]:
    """The two columns [S] whose sums' ratio is the quantity of these replays."""
    quantity = subject.quantity
    if (subject.rounds is not None) != (quantity == IDENTITY):
        raise InputError(f"quantity {IDENTITY!r} and rounds belong together; give both or neither")
    if subject.rounds is not None:
        return _identical(replayed, part.trace.sequence_id, home / subject.rounds)
    if quantity == "oracle_regret":
        from specsim.speedup.prediction import oracle_seconds, oracle_width

        policy = replayed.policy
        least = oracle_seconds(part, [type(policy)], width=oracle_width(policy), seed=subject.seed)
        return replayed.speculative_s - times * least, times * least
    if quantity not in RATIOS:
        known = ", ".join([*RATIOS, "oracle_regret", IDENTITY])
        raise InputError(f"quantity {quantity!r} is none of a replay; it has {known}")
    top, bottom = (np.asarray(column, dtype=np.float64) for column in RATIOS[quantity](replayed))
    return top, bottom


def _identical(replayed: Replay, sequence_id: IntArray, path: Path) -> tuple[Floats, Floats]:
    """Of every sequence [S] 100 times the rounds that a real run of the policy did just so, and all replayed ones."""
    from specsim.acceptance.sources import read_rounds

    real, log = read_rounds(path, policy=str(replayed.policy)), replayed.rounds
    if real.sequence_id is None or real.t is None:
        raise InputError(f"{path} does not say where its rounds begin; give rounds.parquet of `realrun validate`")
    assert log is not None
    columns = real.sequence_id, real.t, real.drafted, real.accepted
    own_columns = sequence_id[log.sequence], log.t, log.drafted, log.accepted
    done = set(zip(*(column.tolist() for column in columns), strict=True))
    same = [row in done for row in zip(*(column.tolist() for column in own_columns), strict=True)]
    counts = [np.bincount(log.sequence, weights, len(sequence_id)) for weights in (same, None)]
    return 100 * counts[0].astype(np.float64), counts[1].astype(np.float64)


def _cost(source: Source) -> CostModel:
    from specsim.cost.files import read_cost
    from specsim.cost.grid import read_grid_pair

    home, cost, draft_cost, batch = source.home, source.cost, source.draft_cost, source.batch
    if isinstance(cost, Seconds):
        if draft_cost is not None or batch is not None:
            raise InputError(
                "draft_cost and batch belong to other costs than s_d and s_t; name their file, or leave them out"
            )
        return ConstantCost(cost.s_d, cost.s_t)
    if draft_cost is not None:
        return read_grid_pair(home / cost, home / draft_cost, batch=batch or 1)
    path = home / cost
    return read_cost(path if stamp_of(path) else cost, batch=batch)
