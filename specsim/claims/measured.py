"""The measured value of a claim's subject, with its interval: a value of a document, a replay, or a real run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from specsim.claims.claim import ReplaySubject, RunSubject, Seconds, ValueSubject, policy_at
from specsim.cost.model import ConstantCost, CostModel
from specsim.io.arrays import Floats, IntArray
from specsim.io.errors import InputError
from specsim.io.examples import located
from specsim.io.files import read_csv
from specsim.io.json import read_json
from specsim.replaying.intervals import Estimate, ratio_interval
from specsim.replaying.replay import Replay

if TYPE_CHECKING:
    from specsim.replaying.priced import PricedTrace

Stamp: TypeAlias = tuple[tuple[str, int, int], ...]  # of files: name, time of the last change, size


@dataclass(frozen=True)
class PerSequence:
    """A ratio of sums over sequences: numerators and denominators [S].

    key : equal for subjects of the same sequences, which can be compared in pairs
    """

    top: Floats
    bottom: Floats
    key: Any


@dataclass(frozen=True)
class Measured:
    """A value with its intervals.

    record : interval for these very sequences: the value alone where nothing was timed, else with the noise floor
    prompts : 95 % interval for prompts like these
    floor_percent : noise floor of measured seconds; 0 for computed values
    seconds : seconds and tokens per sequence [S], where the value comes from times
    """

    value: float
    record: Estimate
    prompts: Estimate
    floor_percent: float = 0.0
    per_sequence: PerSequence | None = None
    seconds: tuple[Floats, Floats] | None = None


def from_columns(columns: PerSequence, *, average: str = "tokens", floor_percent: float = 0.0) -> Measured:
    """The ratio of two columns, with its interval over sequences and that of the noise of seconds."""
    top, bottom = columns.top, columns.bottom
    if average == "sequences":
        top, bottom = np.divide(top, bottom, out=np.zeros(top.shape), where=bottom > 0), np.ones(top.shape)
    if not bottom.sum() > 0:
        raise InputError("the denominator is 0: no round or no token is counted; choose another quantity")
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
    """Read a number, an estimate with its interval, or the mean of a list with an entry per sequence."""
    if isinstance(value, dict) and {"estimate", "low", "high"} <= set(value):
        numbers = [value[key] for key in ("estimate", "low", "high")]
        if all(is_number(number) for number in numbers):
            estimate = float(numbers[0])
            return Measured(estimate, Estimate.exact(estimate), Estimate(*map(float, numbers)))
    if isinstance(value, list) and value and all(is_number(entry) and entry >= 0 for entry in value):
        entries = np.asarray(value, dtype=np.float64)
        return from_columns(PerSequence(entries, np.ones(entries.shape), ("list", where)))
    if not is_number(value):
        raise InputError(f"{where}: the claimed value is not a number but {str(value)[:40]!r}; name a number")
    exact = Estimate.exact(float(value))
    return Measured(exact.estimate, exact, exact)


def of_value(subject: ValueSubject, home: Path) -> Measured:
    """Evaluate a claim's number of a document."""
    path = home / subject.document
    return as_measured(value_at(_read_document(path, stamp_of(path)), subject.at, str(path)), str(path))


def value_at(document: Any, at: list[Any], where: str) -> Any:
    """Follow a path through a document; InputError names the step that does not fit."""
    value = document
    for number, step in enumerate(at, start=1):
        place = f"{where}: step {number} of at, {str(step)[:60]}"
        if isinstance(step, str) and isinstance(value, dict):
            if step not in value:
                raise InputError(f"{place}: there is no such key; keys: {', '.join(map(str, list(value)[:12]))}")
            value = value[step]
        elif isinstance(step, int) and isinstance(value, list):
            if step >= len(value):
                raise InputError(f"{place}: the list has {len(value)} entries, counted from 0")
            value = value[step]
        elif isinstance(step, dict) and isinstance(value, list):
            objects = [entry for entry in value if isinstance(entry, dict)]
            entries = [entry for entry in objects if all(entry.get(key) == wanted for key, wanted in step.items())]
            if len(entries) != 1:
                raise InputError(f"{place}: {len(entries)} entries have these values; name a single entry")
            value = entries[0]
        else:
            raise InputError(f"{place}: there is no {'object' if isinstance(step, str) else 'list'} here")
    return value


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and bool(np.isfinite(value))


@lru_cache(maxsize=8)  # many claims are about the same document
def _read_document(path: Path, stamp: Stamp) -> Any:
    """Read a JSON document, or a CSV table as a list of its rows."""
    if path.suffix == ".csv":
        rows = read_csv(path, f"document {path}", "check the path").to_dict("records")
        return [{column: _number_or_text(cell) for column, cell in row.items()} for row in rows]
    return read_json(path, f"document {path}", missing="check the path", invalid="make it again")


def _number_or_text(cell: Any) -> Any:
    try:
        return float(cell)
    except ValueError:
        return cell


def stamp_of(path: Path) -> Stamp:
    """Cache key: names, mtimes and sizes of the file or of the folder's files; empty if unreadable."""
    try:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        states = [(file.name, file.stat()) for file in files if file.is_file()]
    except OSError:  # such as a name that is too long; reading it raises the error
        return ()
    return tuple((name, state.st_mtime_ns, state.st_size) for name, state in states)


def positive(values: Any, where: str) -> Floats:
    """A list of positive numbers as an array; InputError for anything else."""
    if not isinstance(values, list) or not values or not all(is_number(value) and value > 0 for value in values):
        raise InputError(f"{where} is not a list of positive numbers; validate again")
    return np.asarray(values, dtype=np.float64)


IDENTITY = "rounds_identical_percent"
DEFAULT_SHARE = 0.5  # of the sequences, on which policies learn

# Quantity of a replay -> (numerator, denominator) per sequence. HM = 2 a / (d + o), with a accepted, d drafted and o
# output tokens, is a ratio of sums like the others.
RATIOS: Mapping[str, Callable[[Replay], tuple[npt.ArrayLike, npt.ArrayLike]]] = {
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
        top, bottom = _replay_columns(subject, run, replays, part)
    key = (subject.trace, subject.max_output_tokens, tuple(part.trace.sequence_id.tolist()))
    measured = from_columns(PerSequence(top, bottom, key), average=subject.average)
    return replace(measured, seconds=(run.speculative_s, np.asarray(run.output_tokens, dtype=np.float64)))


@lru_cache(maxsize=64)  # several quantities are claimed of the same replay, which holds no trace
def _replay(source: Source, subject_json: bytes) -> tuple[Replay, int, bool]:
    """The sum of a subject's replays, their number, and whether they are of the held-out sequences only."""
    from specsim.compare.leaderboard import replay_seeds, together
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
    from specsim.trace.split import split_sequences

    whole = _priced(source)
    return whole.select(split_sequences(whole.trace, tuning_share=tuning_share, seed=seed)[1])


def _replay_columns(subject: ReplaySubject, run: Replay, replays: int, part: PricedTrace) -> tuple[Floats, Floats]:
    """The two columns [S] whose sums' ratio is the quantity of these replays."""
    quantity = subject.quantity
    if subject.rounds is not None or quantity == IDENTITY:
        raise InputError(f"quantity {IDENTITY!r} and rounds belong together; give both or neither")
    if quantity == "oracle_regret":
        from specsim.replaying.prediction import oracle_seconds, oracle_width

        width = oracle_width(run.policy)
        least_s = replays * oracle_seconds(part, [type(run.policy)], width=width)
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


VALIDATION_KIND = "specsim-validation"
TIMED = {  # quantity -> its columns of its row and document
    "speedup": ("autoregressive_sequence_seconds", "sequence_seconds"),
    "tokens_per_s": ("sequence_tokens", "sequence_seconds"),
}


def read_validation(path: Path) -> dict[str, Any]:
    """Read the document of a validation, given as its folder or file."""
    path = path / "validation.json" if path.is_dir() else path
    document = read_json(path, f"validation {path}", missing="make it with `realrun validate`", invalid="make it again")
    if not isinstance(document, dict) or document.get("kind") != VALIDATION_KIND:
        raise InputError(f"{path} is not a validation; give what `realrun validate` wrote")
    return document


def of_run(subject: RunSubject, home: Path) -> Measured:
    path = home / subject.validation
    document, where = read_validation(path), str(path)
    if subject.policy is None:
        if subject.quantity == "speedup":
            raise InputError(f"{where}: which row's speedup is claimed; give policy")
        return as_measured(value_at(document, [subject.quantity], where), where)
    row = find_row(document, subject.policy, where)
    if subject.quantity not in TIMED:
        return as_measured(value_at(row, [subject.quantity], where), where)
    names, both = TIMED[subject.quantity], {**document, **row}
    top, bottom = (positive(both.get(name), f"{where}: {name}") for name in names)
    if top.shape != bottom.shape:
        raise InputError(f"{where}: {names[0]} and {names[1]} are of different lengths; validate again")
    floor: Any = document.get("noise_floor_percent")
    if not is_number(floor) or floor < 0:
        raise InputError(f"{where}: noise_floor_percent is not a percentage; validate again")
    seconds, tokens = (positive(row.get(name), f"{where}: {name}") for name in ("sequence_seconds", "sequence_tokens"))
    columns = PerSequence(top, bottom, ("validation", tuple(tokens.tolist())))
    return replace(from_columns(columns, floor_percent=float(floor)), seconds=(seconds, tokens))


def find_row(document: dict[str, Any], policy: str, where: str) -> dict[str, Any]:
    """The row of a validation with this label, or of this policy."""
    rows = document.get("rows")
    rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    for key in ("label", "policy"):
        matching = [row for row in rows if row.get(key) == policy]
        if len(matching) == 1:
            return dict(matching[0])
    known = ", ".join(str(row.get("label")) for row in rows[:20])
    raise InputError(f"{where}: {len(matching)} rows are of policy {policy!r}; choose a label: {known}")
