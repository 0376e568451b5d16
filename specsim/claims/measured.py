"""What a claim's subject comes out as: a replay, a real run, a JSON document or a finding evaluated again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from specsim.arrays import Floats, IntArray
from specsim.claims.claim import FindingSubject, ReplaySubject, RunSubject, Seconds, Subject, ValueSubject
from specsim.cost.model import ConstantCost, CostModel
from specsim.errors import InputError
from specsim.json_files import read_json
from specsim.replaying.replay import Replay
from specsim.speedup.intervals import Estimate, ratio_interval

if TYPE_CHECKING:
    from specsim.replaying.priced import PricedTrace

VALIDATION_KIND = "specsim-validation"
IDENTITY = "rounds_identical_percent"
DEFAULT_SHARE = 0.5  # of the sequences, on which policies learn

Stamp: TypeAlias = tuple[tuple[str, int, int], ...]  # of files: name, time of the last change, size


@dataclass(frozen=True)
class PerSequence:
    """A ratio of sums over sequences: both sums' parts [S], and whose they are, so that two can be compared in pairs.

    key : equal for subjects of the same sequences
    """

    top: Floats
    bottom: Floats
    key: Any


@dataclass(frozen=True)
class Measured:
    """A value, with the doubt about it.

    record : what it may be of these very sequences: the value alone where nothing was timed, else with the noise floor
    prompts : what it may be of prompts like these, 95 %
    floor_percent : the noise floor of measured seconds, 0 of what is computed
    seconds : per sequence [S], and tokens [S], of what takes time; None of other values
    """

    value: float
    record: Estimate
    prompts: Estimate
    floor_percent: float = 0.0
    per_sequence: PerSequence | None = None
    seconds: tuple[Floats, Floats] | None = None


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
TIMED = {  # the same of a real run, by columns of its row and document
    "speedup": ("autoregressive_sequence_seconds", "sequence_seconds"),
    "tokens_per_s": ("sequence_tokens", "sequence_seconds"),
}


def measure(subject: Subject, home: Path) -> Measured:
    """Evaluate a subject; paths in it are relative to `home`. InputError where that cannot be."""
    if isinstance(subject, ReplaySubject):
        return _replayed(subject, home)
    if isinstance(subject, RunSubject):
        return _run(subject, home)
    if isinstance(subject, ValueSubject):
        return _in_document(subject, home / subject.document)
    return _finding(subject)


def from_columns(columns: PerSequence, *, average: str = "tokens", floor_percent: float = 0.0) -> Measured:
    """The ratio of two columns, with its interval over sequences and that of the noise of seconds."""
    top, bottom = columns.top, columns.bottom
    if average == "sequences":
        top, bottom = np.divide(top, bottom, out=np.zeros(top.shape), where=bottom > 0), np.ones(top.shape)
    if not bottom.sum() > 0:
        raise InputError("the ratio has nothing below: no round or no token is counted; choose another quantity")
    over = ratio_interval(top, bottom)
    factor = 1 + floor_percent / 100
    return Measured(
        over.estimate,
        Estimate(over.estimate, over.estimate / factor, over.estimate * factor),
        Estimate(over.estimate, over.low / factor, over.high * factor),
        floor_percent,
        PerSequence(top, bottom, columns.key),
    )


def as_measured(value: Any, where: str) -> Measured:
    """A plain number, an estimate with its interval, or the mean of a list, whose entries are sequences."""
    if isinstance(value, dict) and {"estimate", "low", "high"} <= set(value):
        numbers = [value[key] for key in ("estimate", "low", "high")]
        if all(_is_number(number) for number in numbers):
            estimate = float(numbers[0])
            return Measured(estimate, Estimate.exact(estimate), Estimate(*map(float, numbers)))
    if isinstance(value, list) and value and all(_is_number(one) and one > 0 for one in value):
        entries = np.asarray(value, dtype=np.float64)
        return from_columns(PerSequence(entries, np.ones(entries.shape), ("list", where)))
    if not _is_number(value):
        raise InputError(f"{where}: what is claimed is no number but {str(value)[:40]!r}; name a number")
    exact = Estimate.exact(float(value))
    return Measured(exact.estimate, exact, exact)


def _in_document(subject: ValueSubject, path: Path) -> Measured:
    document, where = _document(path), str(path)
    found = found_at(document, subject.at, where)
    if subject.over is None:
        return as_measured(found, where)
    both = (_positive(one, f"{where}: at and over") for one in (found, found_at(document, subject.over, where)))
    top, bottom = both
    if top.shape != bottom.shape:
        raise InputError(f"{where}: at and over are lists of different lengths; name lists of the same sequences")
    return from_columns(PerSequence(top, bottom, ("list", where)))


def found_at(document: Any, at: list[Any], where: str) -> Any:
    """What lies at the end of this way through a JSON document."""
    found = document
    for number, step in enumerate(at, start=1):
        place = f"{where}: step {number} of at, {str(step)[:60]}"
        if isinstance(step, str) and isinstance(found, dict):
            if step not in found:
                raise InputError(f"{place}: there is no such key; there are {', '.join(map(str, list(found)[:12]))}")
            found = found[step]
        elif isinstance(step, int) and isinstance(found, list):
            if step >= len(found):
                raise InputError(f"{place}: the list has {len(found)} entries, counted from 0")
            found = found[step]
        elif isinstance(step, dict) and isinstance(found, list):
            fitting = [one for one in found if isinstance(one, dict) and step.items() <= _plain(one).items()]
            if len(fitting) != 1:
                raise InputError(f"{place}: {len(fitting)} entries have these values; name exactly one")
            found = fitting[0]
        else:
            raise InputError(f"{place}: there is no {'list' if isinstance(found, dict) else 'object'} to take it from")
    return found


def _plain(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if isinstance(value, str | int | float)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))


def _document(path: Path) -> Any:
    return _read_document(path, _stamp(path))


@lru_cache(maxsize=8)  # many claims are of one document
def _read_document(path: Path, stamp: Stamp) -> Any:
    return read_json(path, f"document {path}", missing="check the path", invalid="make it again")


def _stamp(path: Path) -> Stamp:
    """What changes where a file, or one in this folder, does."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    states = [(file.name, file.stat()) for file in files if file.is_file()]
    return tuple((name, state.st_mtime_ns, state.st_size) for name, state in states)


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


def _replayed(subject: ReplaySubject, home: Path) -> Measured:
    files = [subject.trace, subject.policy, subject.draft_cost, subject.cost if isinstance(subject.cost, str) else None]
    stamps = tuple(_stamp(home / file) for file in files if file)
    source = Source(home, stamps, *(getattr(subject, name) for name in Source._fields[2:]))
    part, replayed, times = _replay(source, subject.model_dump_json(exclude={"quantity", "average"}))
    top, bottom = _columns(subject, replayed, part, times, home)
    key = (subject.trace, subject.max_output_tokens, tuple(part.trace.sequence_id.tolist()))
    found = from_columns(PerSequence(top, bottom, key), average=subject.average)
    return replace(found, seconds=(replayed.speculative_s, np.asarray(replayed.output_tokens, dtype=np.float64)))


@lru_cache(maxsize=64)  # several quantities are claimed of one replay
def _replay(source: Source, subject_json: str) -> tuple[PricedTrace, Replay, int]:
    """What a subject is reported on, its replays' sums, and of how many."""
    from specsim.api.predict import fitted_part
    from specsim.ranking.leaderboard import replay_seeds, together

    subject, whole = ReplaySubject.model_validate_json(subject_json), _priced(source)
    name = str(source.home / subject.policy) if ".py" in subject.policy else subject.policy
    share = subject.tuning_share or DEFAULT_SHARE
    part, policy, learned_on = fitted_part(whole, name, subject.settings, share, subject.seed)
    if learned_on or subject.tuning_share is not None:
        part = _held(source, share, subject.seed)
    if subject.replays == 1:
        return part, part.replay(policy, seed=subject.seed, log=subject.rounds is not None), 1
    if subject.rounds is not None:
        raise InputError("rounds are those of one replay; leave replays out")
    replays = replay_seeds(part, policy, range(subject.seed, subject.seed + subject.replays))
    return part, replace(together(replays), rounds=None), len(replays)


@lru_cache(maxsize=4)  # several policies are claimed of one trace
def _priced(source: Source) -> PricedTrace:
    from specsim.ranking.leaderboard import shallower
    from specsim.replaying.priced import PricedTrace
    from specsim.trace.files import read_trace

    found = read_trace(source.home / source.trace)
    if source.max_output_tokens is not None:
        found = found.shortened(source.max_output_tokens)
    if source.max_draft_tokens is not None:
        found = shallower(found, source.max_draft_tokens)
    return PricedTrace(found, _cost(source))


@lru_cache(maxsize=4)
def _held(source: Source, tuning_share: float, seed: int) -> PricedTrace:
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
    return read_cost(path if path.exists() else cost, batch=batch)


def read_validation(path: Path) -> dict[str, Any]:
    """The document of a validation, given as its folder or file; InputError if it is none."""
    path = path / "validation.json" if path.is_dir() else path
    document = read_json(path, f"validation {path}", missing="make it with `realrun validate`", invalid="make it again")
    if not isinstance(document, dict) or document.get("kind") != VALIDATION_KIND:
        raise InputError(f"{path} is no validation; give what `realrun validate` wrote")
    return document


def run_columns(document: Mapping[str, Any], row: Mapping[str, Any], quantity: str, where: str) -> PerSequence | None:
    """The columns of a measured quantity of a row; None of one that is not timed."""
    if quantity not in TIMED:
        return None
    columns = TIMED[quantity]
    both = {**document, **row}
    top, bottom = (_positive(both.get(name), f"{where}: {name}") for name in columns)
    if top.shape != bottom.shape:
        raise InputError(f"{where}: {columns[0]} and {columns[1]} are of different lengths; validate again")
    tokens = row.get("sequence_tokens")
    return PerSequence(top, bottom, ("validation", tuple(tokens) if isinstance(tokens, list) else None))


def _positive(values: Any, where: str) -> Floats:
    if not isinstance(values, list) or not values or not all(_is_number(one) and one > 0 for one in values):
        raise InputError(f"{where} is no list of positive numbers; validate again")
    return np.asarray(values, dtype=np.float64)


def floor_percent(document: Mapping[str, Any], where: str) -> float:
    """The noise floor of a validation."""
    floor: Any = document.get("noise_floor_percent")
    if not _is_number(floor) or floor < 0:
        raise InputError(f"{where}: noise_floor_percent is no percentage; validate again")
    return float(floor)


def _run(subject: RunSubject, home: Path) -> Measured:
    path = home / subject.validation
    document, where = read_validation(path), str(path)
    if subject.policy is None:
        if subject.quantity == "speedup":
            raise InputError(f"{where}: whose speedup is claimed is not said; give policy")
        return as_measured(found_at(document, [subject.quantity], where), where)
    row = find_row(document, subject.policy, where)
    columns = run_columns(document, row, subject.quantity, where)
    if columns is None:
        return as_measured(found_at(row, [subject.quantity], where), where)
    found = from_columns(columns, floor_percent=floor_percent(document, where))
    tokens = _positive(row.get("sequence_tokens"), f"{where}: sequence_tokens")
    seconds = _positive(row.get("sequence_seconds"), f"{where}: sequence_seconds"), tokens
    return replace(found, seconds=seconds)


def find_row(document: dict[str, Any], policy: str, where: str) -> dict[str, Any]:
    """The row of a validation with this label, or of this policy."""
    rows = document.get("rows")
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    for key in ("label", "policy"):
        found = [row for row in rows if row.get(key) == policy]
        if len(found) == 1:
            return dict(found[0])
    known = ", ".join(str(row.get("label")) for row in rows[:20])
    raise InputError(f"{where}: {len(found)} rows are of policy {policy!r}; name one of {known}")


def _finding(subject: FindingSubject) -> Measured:
    from specsim.papers import finding

    found = finding(subject.finding)
    exact = Estimate.exact(found.value)  # of the cells as they are printed
    wide = exact if found.low is None or found.high is None else Estimate(found.value, found.low, found.high)
    return Measured(found.value, exact, wide)
