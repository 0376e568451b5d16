"""Subjects of claims that are replays: the trace replayed again, with the claim's policy and costs."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from specsim.claims.claim import ReplaySubject, Seconds, policy_at
from specsim.claims.measured import Measured, PerSequence, Stamp, from_columns, stamp_of
from specsim.cost.model import ConstantCost, CostModel
from specsim.io.arrays import Floats, IntArray
from specsim.io.errors import InputError
from specsim.io.examples import located
from specsim.replaying.replay import Replay

if TYPE_CHECKING:
    from specsim.replaying.priced import PricedTrace

IDENTITY = "rounds_identical_percent"
DEFAULT_SHARE = 0.5  # of the sequences, on which policies learn

# Quantity of a replay -> (numerator, denominator) per sequence. HM = 2 a / (d + o), with a accepted, d drafted and o
# output tokens, is a ratio of sums like the others.
RATIOS: dict[str, Any] = {
    "speedup": lambda run: (run.autoregressive_s, run.speculative_s),
    "v_d": lambda run: (run.accepted, run.drafted),
    "r_d": lambda run: (run.accepted, run.output_tokens),
    "hm": lambda run: (2 * run.accepted, run.drafted + run.output_tokens),
    "tau": lambda run: (run.output_tokens, run.num_rounds),
    "mean_accepted_tokens": lambda run: (run.accepted, run.num_rounds),
    "mean_draft_tokens": lambda run: (run.drafted, run.num_rounds),
    "tokens_per_s": lambda run: (run.output_tokens, run.speculative_s),
    "autoregressive_tokens_per_s": lambda run: (run.output_tokens, run.autoregressive_s),
}


class Source(NamedTuple):
    """The trace and costs of a replay; `stamps` change when its files do."""

    home: Path
    stamps: tuple[Stamp, ...]
    trace: str
    cost: str | Seconds
    draft_cost: str | None
    batch: int | None
    max_output_tokens: int | None
    max_draft_tokens: int | None


def of_replay(subject: ReplaySubject, home: Path) -> Measured:
    """Evaluate a claim's quantity of a replay; paths in it are relative to `home`."""
    files = [subject.trace, subject.policy, subject.draft_cost, subject.cost if isinstance(subject.cost, str) else None]
    stamps = tuple(stamp_of(home / file) for file in files if file)
    source = Source(home, stamps, *(getattr(subject, name) for name in Source._fields[2:]))
    same_replay = msgspec.json.encode(msgspec.structs.replace(subject, quantity="speedup", average="tokens"))
    run, replays, held_out_only = _replay(source, same_replay)
    part = _held_out(source, subject.tuning_share or DEFAULT_SHARE, subject.seed) if held_out_only else _priced(source)
    if subject.rounds is not None and subject.quantity == IDENTITY:
        top, bottom = _identical(run, part.trace.sequence_id, home / subject.rounds)
    else:
        top, bottom = _columns(subject, run, replays, part)
    key = (subject.trace, subject.max_output_tokens, tuple(part.trace.sequence_id.tolist()))
    measured = from_columns(PerSequence(top, bottom, key), average=subject.average)
    return replace(measured, seconds=(run.speculative_s, np.asarray(run.output_tokens, dtype=np.float64)))


@lru_cache(maxsize=64)  # several quantities are claimed of the same replay, which holds no trace
def _replay(source: Source, subject_json: bytes) -> tuple[Replay, int, bool]:
    """The sum of a subject's replays, their number, and whether they are of the held-out sequences only."""
    from specsim.compare.replays import replay_seeds, together
    from specsim.learn.predict import fitted_part

    subject, whole = msgspec.json.decode(subject_json, type=ReplaySubject), _priced(source)
    name = policy_at(subject.policy, source.home)
    share = subject.tuning_share or DEFAULT_SHARE
    part, policy, learned_on = fitted_part(whole, name, subject.settings, share, subject.seed)
    held_out_only = learned_on > 0 or subject.tuning_share is not None
    if held_out_only:
        part = _held_out(source, share, subject.seed)
    if subject.replays == 1:
        return part.replay(policy, seed=subject.seed, log=subject.rounds is not None), 1, held_out_only
    if subject.rounds is not None:
        raise InputError("rounds are those of a single replay; leave replays out")
    replays = replay_seeds(part, policy, range(subject.seed, subject.seed + subject.replays))
    return replace(together(replays), rounds=None), len(replays), held_out_only


@lru_cache(maxsize=4)  # several policies are claimed of the same trace
def _priced(source: Source) -> PricedTrace:
    from specsim.replaying.priced import PricedTrace
    from specsim.trace.files import read_trace

    trace = read_trace(source.home / located(source.trace, "trace"))
    if source.max_output_tokens is not None:
        trace = trace.shortened(source.max_output_tokens)
    if source.max_draft_tokens is not None:
        trace = trace.shallower(source.max_draft_tokens)
    return PricedTrace(trace, _cost(source))


@lru_cache(maxsize=4)
def _held_out(source: Source, tuning_share: float, seed: int) -> PricedTrace:
    """The sequences that policies do not learn on."""
    from specsim.trace.split import split_sequences

    whole = _priced(source)
    return whole.select(split_sequences(whole.trace, tuning_share=tuning_share, seed=seed)[1])


def _columns(subject: ReplaySubject, run: Replay, replays: int, part: PricedTrace) -> tuple[Floats, Floats]:
    """The two columns [S] whose sums' ratio is the quantity of these replays."""
    quantity = subject.quantity
    if subject.rounds is not None or quantity == IDENTITY:
        raise InputError(f"quantity {IDENTITY!r} and rounds belong together; give both or neither")
    if quantity == "oracle_regret":
        from specsim.replaying.prediction import oracle_seconds, oracle_width

        width = oracle_width(run.policy)
        least_s = replays * oracle_seconds(part, [type(run.policy)], width=width, seed=subject.seed)
        return run.speculative_s - least_s, least_s
    if quantity not in RATIOS:
        known = ", ".join([*RATIOS, "oracle_regret", IDENTITY])
        raise InputError(f"unknown quantity {quantity!r} of a replay; choose one of {known}")
    top, bottom = (np.asarray(column, dtype=np.float64) for column in RATIOS[quantity](run))
    return top, bottom


def _identical(run: Replay, sequence_id: IntArray, path: Path) -> tuple[Floats, Floats]:
    """Per sequence [S]: 100 times the replayed rounds that a real run of the policy did as well, and all of them."""
    from specsim.acceptance.sources import read_rounds

    real, log = read_rounds(path, policy=str(run.policy)), run.rounds
    if real.sequence_id is None or real.t is None:
        raise InputError(f"{path} does not say where its rounds begin; give rounds.parquet of `realrun validate`")
    assert log is not None
    columns = real.sequence_id, real.t, real.drafted, real.accepted
    own_columns = sequence_id[log.sequence], log.t, log.drafted, log.accepted
    real_rounds = set(zip(*(column.tolist() for column in columns), strict=True))
    same = [row in real_rounds for row in zip(*(column.tolist() for column in own_columns), strict=True)]
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
