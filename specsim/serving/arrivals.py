"""When requests arrive, and how long they are: drawn, or recorded in the formats of public traces.

=============== ======= ============================================================ ==================
trace           file    columns or keys                                              time
=============== ======= ============================================================ ==================
Azure           .csv    TIMESTAMP, ContextTokens, GeneratedTokens                    a date
BurstGPT        .csv    Timestamp, Request tokens, Response tokens                   seconds
Mooncake        .jsonl  timestamp, input_length, output_length                       milliseconds
Qwen-Bailian    .jsonl  the same, and chat_id                                        seconds
=============== ======= ============================================================ ==================

Prefixes that requests share (``hash_ids``) are not read: every prompt is prefilled whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import numpy.typing as npt

from specsim.io.arrays import Floats, Ints
from specsim.io.errors import InputError
from specsim.io.files import read_csv
from specsim.io.json import bounded_lines, parse_json
from specsim.trace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURST_GPT = ("Timestamp", "Request tokens", "Response tokens")
FORMATS = (
    f"an Azure CSV ({','.join(AZURE)}), a BurstGPT CSV ({','.join(BURST_GPT)}), or JSON Lines of Mooncake or "
    "Qwen-Bailian (timestamp, input_length, output_length)"
)
LARGEST = 2**31  # tokens of a request
REQUESTS = 1000  # to serve by default


class Line(TypedDict):
    """A line of a request log by Mooncake or Qwen-Bailian."""

    timestamp: float
    input_length: int
    output_length: int


@dataclass(frozen=True, eq=False)
class Requests:
    """Requests to a server.

    arrival_s : float [N], from 0 on, not decreasing; unused in a closed loop
    prompt_tokens, output_tokens : int [N], at least 1
    sequence : int [N], sequence of the trace as which each request drafts; for a longer request the sequence starts
        again, for a shorter request it ends early
    left_out : recorded requests without output, such as failed ones
    """

    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    sequence: Ints
    left_out: int = 0

    def __len__(self) -> int:
        return len(self.sequence)


def requests_of_trace(trace: Trace, count: int, *, seed: int, rate: float | None = None) -> Requests:
    """Draw requests like the sequences of a trace, in a random order, each equally often.

    rate : requests per second of a Poisson process; None where users wait for their answers (a closed loop)
    """
    if count < 1 or (rate is not None and not 0 < rate < np.inf):
        raise InputError(f"{count} requests at {rate} per second; give at least 1 and a positive rate")
    rng = np.random.default_rng(seed)
    gaps_s = np.zeros(count) if rate is None else rng.exponential(1 / rate, count)
    sequence = shuffled(trace.sequences, count, rng)
    prompt_tokens, output_tokens = (
        np.asarray(values[sequence], dtype=np.int64) for values in (trace.prompt_tokens, trace.output_tokens)
    )
    return Requests(np.cumsum(gaps_s), prompt_tokens, output_tokens, sequence)


def asked_requests(
    trace: Trace, arrivals: str | PathLike[str], count: int | None = None, *, seed: int = 0
) -> tuple[Requests, int | None]:
    """Requests of "poisson:RATE", "closed:USERS" or a file of recorded requests, and the users of a closed loop.

    count : requests; default: REQUESTS, or all in a file
    """
    kind, colon, number = str(arrivals).partition(":")
    if not colon or kind not in ("poisson", "closed"):
        return recorded_requests(Path(arrivals), trace, limit=count, seed=seed), None
    try:
        value = float(number) if kind == "poisson" else int(number)
    except ValueError:
        example = "poisson:20" if kind == "poisson" else "closed:32"
        raise InputError(f"arrivals {kind}: {number!r} is not a number; write for example {example}") from None
    if kind == "poisson":
        return requests_of_trace(trace, count or REQUESTS, rate=value, seed=seed), None
    return requests_of_trace(trace, count or REQUESTS, seed=seed), int(value)


def shuffled(sequences: int, count: int, rng: np.random.Generator) -> Ints:
    """Draw `count` sequence indices: one random permutation of all sequences after another."""
    rounds = -(-count // sequences)
    return np.concatenate([rng.permutation(sequences) for _ in range(rounds)])[:count].astype(np.int64)


def recorded_requests(path: Path, trace: Trace, *, limit: int | None = None, seed: int = 0) -> Requests:
    """Read requests of a public trace of arrivals, each drafting like a random sequence of `trace`.

    limit : read at most the first `limit` requests

    Raises InputError for a missing file, an unknown format, or invalid values.
    """
    if not path.is_file():
        raise InputError(f"arrivals {path} does not exist; give poisson:RATE, closed:USERS, or {FORMATS}")
    is_csv = path.suffix.lower() == ".csv"
    arrival_s, prompt_tokens, output_tokens = _read_csv(path) if is_csv else _read_lines(path)
    for name, values in (("time", arrival_s), ("prompt", prompt_tokens), ("output", output_tokens)):
        wrong = ~np.isfinite(values)
        if name != "time":
            wrong |= (values < (name == "prompt")) | (values >= LARGEST) | (values != np.floor(values))
        if wrong.any():
            raise InputError(
                f"arrivals {path}: request {int(wrong.argmax()) + 1} has no valid {name} "
                f"({values[wrong][0]:g}); correct the file or leave the request out"
            )
    answered = output_tokens > 0
    if not answered.any():
        raise InputError(f"arrivals {path} holds no request with output; give another file")
    order = np.flatnonzero(answered)[np.argsort(arrival_s[answered], kind="stable")][:limit]
    return Requests(
        arrival_s=arrival_s[order] - arrival_s[order[0]],
        prompt_tokens=prompt_tokens[order].astype(np.int64),
        output_tokens=output_tokens[order].astype(np.int64),
        sequence=shuffled(trace.sequences, len(order), np.random.default_rng(seed)),
        left_out=int((~answered).sum()),
    )


Columns = tuple[Floats, Floats, Floats]  # seconds, prompt and output tokens


def _read_csv(path: Path) -> Columns:
    """Azure's trace or BurstGPT's."""
    frame = read_csv(path, f"arrivals {path}", f"give {FORMATS}")
    for names in (AZURE, BURST_GPT):
        if set(names) <= set(frame.columns):
            time, prompt, output = (frame[name] for name in names)
            time_s = _date_s(time, path) if names is AZURE else _numbers(time)
            return time_s, _numbers(prompt), _numbers(output)
    raise InputError(f"arrivals {path} has the columns {', '.join(map(str, frame.columns))}; give {FORMATS}")


def _date_s(dates: pd.Series[str], path: Path) -> Floats:
    import pandas as pd

    try:
        parsed = pd.to_datetime(dates, utc=True, format="ISO8601")
    except (ValueError, TypeError) as error:
        raise InputError(f"arrivals {path}: TIMESTAMP is no date ({str(error)[:80]}); correct the file") from None
    return np.asarray((parsed - parsed.min()).dt.total_seconds(), dtype=np.float64)


def _numbers(values: pd.Series[float]) -> Floats:
    """Convert cells to floats; anything else becomes NaN, which a later check rejects with its row."""
    import pandas as pd

    return np.asarray(pd.to_numeric(values, errors="coerce"), dtype=np.float64)


def _read_lines(path: Path) -> Columns:
    """Mooncake's trace, or Qwen-Bailian's, whose times are seconds."""
    rows: list[tuple[float, int, int]] = []
    with path.open("rb") as file:
        for number, line in enumerate(bounded_lines(file), start=1):
            if line.strip():
                name = f"arrivals {path}, line {number}"
                entry = parse_json(line, name, Line, invalid=f"give {FORMATS}")
                time_s = entry["timestamp"] if "chat_id" in entry else entry["timestamp"] / 1000
                rows.append((time_s, entry["input_length"], entry["output_length"]))
    columns: npt.NDArray[np.float64] = np.array(rows, dtype=np.float64).reshape(-1, 3)
    return columns[:, 0], columns[:, 1], columns[:, 2]
