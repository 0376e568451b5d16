"""Data that acceptance models are fitted to: dense traces, rounds of a real run, counters of a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt

from specsim.io.arrays import Bools, Floats, Ints
from specsim.io.errors import InputError
from specsim.io.examples import is_example
from specsim.io.json import checked, plain_json, read_json
from specsim.trace.trace import Trace

MOST_COUNT = 2**53  # of rounds or tokens; larger integers are not exact in float64
MOST_DRAFTED = 2**16  # tokens of a round
# Share of the output by which counts may disagree: engines count drafts beyond the end of a text, and not always the
# first tokens of requests.
SLACK = 0.1


@dataclass(frozen=True)
class Rounds:
    """Rounds of real runs: k tokens drafted, a accepted. a = k only bounds the match length from below.

    drafted, accepted : int64 [R]
    policy : str [R], or None where not recorded
    sequence_id, t : int64 [R], or None where not recorded
    """

    drafted: Ints
    accepted: Ints
    policy: npt.NDArray[np.str_] | None = None
    sequence_id: Ints | None = None
    t: Ints | None = None

    def select(self, keep: Bools) -> Rounds:
        """Rounds where `keep` [R] holds."""

        columns = (self.drafted, self.accepted, self.policy, self.sequence_id, self.t)
        return Rounds(*(None if column is None else column[keep] for column in columns))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Counters:
    """Rounds that drafted an i-th token, and rounds that accepted it, by draft depth i = 1..D, int64 [D].

    plain_steps : steps of the target beside these rounds, which drafted nothing; None if unknown
    output_tokens : tokens that the rounds and the plain steps put out; None if unknown
    drafted_tokens : where drafts differ in length, and it is unknown which rounds drafted an i-th token: all their
        tokens. `drafted` then counts all rounds at every depth, so that accepted / drafted is the share of all rounds,
        and a K stands for the server's own drafts cut at K. None if `drafted` holds by depth
    windows : the same counts by interval of a log, in order; empty if they were not counted apart
    """

    drafted: Ints
    accepted: Ints
    plain_steps: int | None = None
    output_tokens: int | None = None
    drafted_tokens: int | None = None
    windows: tuple[Counters, ...] = ()


Source = Trace | Rounds | Counters


def verified_by_depth(source: Source) -> tuple[Floats, Floats]:
    """Count accepted and verified tokens per draft depth, float64 [D]; their ratio estimates the discrete hazard.

    A token is verified if everything drafted before it was accepted. A round that accepted all
    of its k tokens has no outcome at depth k + 1 (right-censoring). This is the
    Kaplan-Meier estimate of the match length's distribution, which is also the maximum-likelihood
    estimate if the end of a draft does not depend on the acceptance of later tokens.

    For a dense trace, count the rounds of a drafter that always drafts D tokens: with a round from every
    position, easy stretches would count once per token. Counters do not say which rounds
    were verified: assume that of the rounds that accepted i - 1 tokens, the same share drafted an i-th
    as of all rounds that drafted i - 1.
    """
    if isinstance(source, Counters):
        passed = source.accepted.astype(np.float64)
        before = np.concatenate([[1.0], passed[:-1] / source.drafted[:-1]])
        return passed, np.maximum(source.drafted * before, passed)
    if isinstance(source, Trace):
        source = longest_rounds(source)
    drafted, accepted = source.drafted, source.accepted
    depth = int(drafted.max(initial=0))
    at_least = np.cumsum(np.bincount(accepted, minlength=depth + 1)[::-1])[::-1].astype(np.float64)
    censored = np.bincount(drafted[accepted == drafted], minlength=depth + 1)
    return at_least[1:], at_least[:-1] - censored[:-1]


def longest_rounds(trace: Trace) -> Rounds:
    """Rounds that draft the trace's depth D every time, limited to `draft_limit`.

    For a trace of rejection sampling, match_len is used as drawn when recording.
    """
    rows = longest_starts(trace)
    drafted = trace.draft_limit[rows].astype(np.int64)
    return Rounds(drafted, np.minimum(trace.match_len[rows], drafted))


def longest_starts(trace: Trace) -> Ints:
    """Rows of the trace at which the rounds of `longest_rounds` start."""
    match = np.minimum(trace.match_len, trace.draft_limit).tolist()
    starts = []
    for begin, end in zip(trace.offsets[:-1].tolist(), trace.offsets[1:].tolist(), strict=True):
        t = begin
        while t < end:
            starts.append(t)
            t += match[t] + 1
    return np.array(starts, dtype=np.int64)


def read_rounds(path: Path | str, *, policy: str | None = None) -> Rounds:
    """Read and check `rounds.parquet`, as `realrun validate` writes it; with `policy`, only its rounds.

    Columns drafted and accepted are required; policy, sequence_id, t (with round) and verified are optional. Rounds
    of trees, marked in a column `tree`, are left out: they count nodes, not depth. If the column verified is
    there, it is the draft length, because tokens may have been dropped.
    Raises InputError for impossible counts, and for a round that does not begin where the previous
    round ended.
    """
    import pyarrow.compute as pc

    from specsim.io.parquet import FLAGS, INTEGERS, TEXT, read_table

    path = Path(path)
    counts = ("drafted", "accepted", "verified", "sequence_id", "t")
    optional = ("verified", "sequence_id", "t", "policy", "tree")
    columns = dict.fromkeys(counts, INTEGERS) | {"policy": TEXT, "tree": FLAGS}
    table = read_table(path, columns, optional, invalid="give the rounds.parquet of a run")
    if "tree" in table.column_names:
        table = table.filter(pc.invert(table.column("tree")))

    def column(name: str) -> Any:
        if name not in table.column_names:
            return None
        values = table.column(name).to_pylist()
        if name == "policy":
            return np.array(values, dtype=np.str_)
        most = MOST_DRAFTED if name in ("drafted", "verified") else MOST_COUNT
        if any(abs(value) > most for value in values):
            raise InputError(f"{path}: column {name!r} has a number above {most}; give counts and positions")
        return np.array(values, dtype=np.int64)

    draft = column("drafted") if "verified" not in table.column_names else column("verified")
    rounds = Rounds(draft, column("accepted"), column("policy"), column("sequence_id"), column("t"))
    if policy is not None:
        if rounds.policy is None:
            raise InputError(f"{path} has no column 'policy' to select {policy!r} from; leave --policy out")
        keep = rounds.policy == policy
        if not keep.any():
            known = ", ".join(np.unique(rounds.policy).tolist())
            raise InputError(f"{path} has no rounds of policy {policy!r}; it has: {known}")
        rounds = rounds.select(keep)
    if (rounds.drafted > 0).sum() == 0:
        raise InputError(f"{path} has no round that drafted a chain; give rounds of a speculative run")
    wrong = (rounds.accepted < 0) | (rounds.accepted > rounds.drafted)
    if wrong.any():
        row = int(wrong.argmax())
        raise InputError(
            f"{path}: {rounds.accepted[row]} of {rounds.drafted[row]} drafted tokens accepted in row {row}; "
            "give counts with 0 <= accepted <= drafted"
        )
    _check_chained(rounds, path)
    return rounds


def _check_chained(rounds: Rounds, path: Path) -> None:
    """Raise InputError unless each run's rounds are consecutive: the next t is t + accepted + 1.

    Rows of a policy and sequence are in the order of their rounds; a smaller t starts another run.
    """
    if rounds.sequence_id is None or rounds.t is None:
        return
    if rounds.t.min() < 0:
        raise InputError(f"{path}: column 't' has a negative position; positions count from 0 in each sequence")
    name = np.zeros(len(rounds.t), dtype=np.int64)
    if rounds.policy is not None:
        name = np.unique(rounds.policy, return_inverse=True)[1]
    order = np.lexsort((np.arange(len(name)), rounds.sequence_id, name))
    same = (np.diff(name[order]) == 0) & (np.diff(rounds.sequence_id[order]) == 0)
    step = np.diff(rounds.t[order])
    broken = same & (step > 0) & (step != rounds.accepted[order][:-1] + 1)
    if broken.any():
        row = int(order[broken.argmax()])
        raise InputError(
            f"{path}: the round after that of sequence {rounds.sequence_id[row]} at t = {rounds.t[row]} with "
            f"{rounds.accepted[row]} accepted is missing; give complete runs, each policy under its own name"
        )


def read_counters(path: str | PathLike[str] | Mapping[str, Any]) -> Counters:
    """Read and check per-position counters: {"drafted": [...], "accepted": [...]}, counts per draft depth from 1.

    A mapping is read as a file that holds it would be.

    drafted[i] counts rounds that proposed an i-th token, accepted[i] those in which it (and so
    all before it) was accepted, as servers count. Raises InputError for impossible counts.
    """
    write = f"write counters as {_EXAMPLE}"
    if isinstance(path, Mapping):
        name = "counters"
        document = checked(plain_json(path, name, invalid=write), name, _Counts, invalid=write)
    else:
        name = str(path)
        document = read_json(Path(path), name, _Counts, missing=write, invalid=write)
    columns = []
    for key in ("drafted", "accepted"):
        values = document[key]
        if not values or not all(0 <= value <= MOST_COUNT for value in values):
            raise InputError(f"{name}: {key!r} is not a list of counts up to {MOST_COUNT}; {write}")
        columns.append(np.array(values, dtype=np.int64))
    drafted, accepted = columns
    if len(drafted) != len(accepted):
        raise InputError(f"{name}: {len(drafted)} depths drafted but {len(accepted)} accepted; give both per depth")
    if (accepted > drafted).any() or (np.diff(accepted) > 0).any() or (np.diff(drafted) > 0).any():
        raise InputError(
            f"{name}: counts must not grow with depth and accepted must not exceed drafted; give rounds per depth"
        )
    if drafted[0] == 0:
        raise InputError(f"{name}: no token was drafted; export the counters after some requests")
    more = {key: document.get(key) for key in TOTALS}
    if not all(value is None or 0 <= value <= MOST_COUNT for value in more.values()):
        raise InputError(f"{name}: {', '.join(TOTALS)} are not counts up to {MOST_COUNT}; {write}")
    output, rounds = more["output_tokens"], int(drafted[0])
    steps, k = rounds + (more["plain_steps"] or 0), len(drafted)
    if output is not None and not rounds + int(accepted.sum()) - SLACK * output - k <= output <= (
        (1 + SLACK) * steps * (k + 1) if more["plain_steps"] is not None else MOST_COUNT
    ):
        raise InputError(
            f"{name}: {output:,} output tokens are not of {rounds:,} rounds with {int(accepted.sum()):,} accepted "
            f"tokens and {steps - rounds:,} other steps; export them together"
        )
    used = drafted > 0
    windows = tuple(read_counters(window) for window in document.get("windows", []))
    return Counters(drafted[used], accepted[used], **more, windows=windows)


class _Counts(TypedDict):
    """Schema of counters; the optional keys are those that `specsim import` writes."""

    drafted: list[int]
    accepted: list[int]
    engine: NotRequired[str]
    version: NotRequired[str]
    definition: NotRequired[str]
    first_token: NotRequired[str | None]
    last_draft: NotRequired[str | None]
    counts_empty: NotRequired[bool | None]
    requests: NotRequired[int | None]
    setup: NotRequired[dict[str, str | int | float | None]]
    windows: NotRequired[list[dict[str, list[int]]]]
    notes: NotRequired[list[str]]
    skipped: NotRequired[dict[str, int]]
    plain_steps: NotRequired[int | None]
    output_tokens: NotRequired[int | None]
    drafted_tokens: NotRequired[int | None]


TOTALS = ("plain_steps", "output_tokens", "drafted_tokens")  # optional keys of counters
_EXAMPLE = '{"drafted": [900, 900], "accepted": [700, 560]}'


def as_source(source: object, *, policy: str | None = None) -> Source:
    """Return a source, or read it from a path, a name or a mapping; TypeError for anything else.

    policy : use only this policy's rounds of a file
    """
    if isinstance(source, str | PathLike):
        return read_source(source, policy=policy)
    if policy is not None:
        raise InputError("policy selects rounds of a file, and this is not a path; leave it out")
    if isinstance(source, Mapping):
        return read_counters(source)
    if isinstance(source, Trace | Rounds | Counters):
        return source
    raise TypeError(
        f"counts are a {type(source).__name__}; expected a trace, a rounds.parquet, counters as .json, or a mapping "
        f"such as {_EXAMPLE}"
    )


def read_source(path: str | PathLike[str], *, policy: str | None = None) -> Source:
    """Read a trace folder or .zip, rounds as .parquet, or counters as .json."""
    from specsim.trace.files import read_plain_trace

    path = Path(path)
    if path.suffix == ".parquet":
        return read_rounds(path, policy=policy)
    if policy is not None:
        raise InputError(f"--policy selects rounds, and {path} has none; leave it out")
    if is_example(path):
        return read_plain_trace(path)
    if not path.exists():
        raise InputError(f"{path} does not exist; give a trace, a rounds.parquet or counters as .json")
    reader: Callable[[Path], Source] = read_counters if path.suffix == ".json" else read_plain_trace
    return reader(path)


def describe(source: Source) -> dict[str, Any]:
    """Description of the data that a model was fitted to, for its file."""
    if isinstance(source, Trace):
        return {"source": "dense trace", "sequences": source.sequences, "output_tokens": len(source.token)}
    if isinstance(source, Counters):
        return {"source": "counters", "rounds": int(source.drafted[0])}
    return {"source": "rounds", "rounds": len(source.drafted)}
