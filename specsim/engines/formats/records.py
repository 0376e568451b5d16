"""Records imported from an engine's files, their summary, and their files for other commands."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specsim.acceptance.sources import (
    SLACK,
    TOTALS,
    Counters,
    Rounds,
    Source,
    describe,
    longest_rounds,
    verified_by_depth,
)
from specsim.engines.conventions import CONVENTIONS, Conventions
from specsim.engines.definitions import DEFINITIONS, POSITIONS, Totals
from specsim.io.errors import InputError
from specsim.io.files import replacing, write_json, write_table, write_text
from specsim.replaying.result import Result
from specsim.trace.files import write_trace
from specsim.trace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

METADATA = b"specsim.import"
UNSET = ("None", "none", "auto")  # words of engines for an option that was not given
Skipped = Counter[str]  # lines, records or requests that were left out, by reason


@dataclass(frozen=True)
class Setup:
    """The server or run that the numbers are of, as far as its files tell.

    model, drafter : as the engine was given them, such as hub ids; "" if unknown
    method : the engine's word for the kind of drafter, such as "eagle3"; "" if unknown
    draft_tokens : K; None if unknown
    running : requests that ran at once, on average; None if unknown
    tokens_per_s : output tokens per second, of all requests together, of llama.cpp while they decode; None if unknown
    context : mean cached tokens of a request: its prompt and half of its output; None if unknown
    tp : GPUs that share every layer; None if unknown
    weights, cache : formats that the engine was told to hold weights and the KV cache in, in its words, such as
        "fp8_e4m3"; "" if it was told none
    """

    model: str = ""
    drafter: str = ""
    method: str = ""
    draft_tokens: int | None = None
    running: float | None = None
    tokens_per_s: float | None = None
    context: int | None = None
    tp: int | None = None
    weights: str = ""
    cache: str = ""

    @property
    def kind(self) -> str:
        """The drafter as costs name it: a draft model's own name, or the kind of drafter; "" if unknown."""
        method = self.method.lower().removeprefix("draft-").replace("_", "-")
        if method in ("", "draft-model", "model", "standalone", "simple"):
            return self.drafter
        return "prompt-lookup" if method.startswith("ngram") else method


@dataclass(frozen=True, repr=False)
class ImportedRecords(Result):
    """Contents of an engine's files.

    source : trace, Rounds, Counters or None What specsim fits to and replays; None if the files hold only sums or
        averages, without acceptance by position
    engine : engine or benchmark that wrote the numbers
    definition : meaning of the numbers, in words; default: the engine's definitions
    version : engine version, "" if the files do not name it
    requests : number of requests; None if unknown
    output_tokens : per request, or a single total
    sums : rounds, drafted and accepted tokens where there is no source; None for unknown ones
    averages : printed averages whose counts are unknown
    notes : assumptions, and fields missing from the files
    skipped : number of lines or requests left out, by reason
    instead : what to import instead, where there is no source
    plain_steps : steps of the target beside the rounds, which drafted nothing; where the files do not count them and
        output tokens are known, they follow from these; None if unknown
    setup : the server or run
    trees : whether drafts were trees, of which no draft length follows from sums
    """

    source: Source | None
    engine: str
    definition: str = ""
    version: str = ""
    requests: int | None = None
    output_tokens: tuple[int, ...] | None = None
    sums: tuple[int | None, int | None, int | None] = (None, None, None)
    averages: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    skipped: Mapping[str, int] = field(default_factory=dict)
    instead: str = ""
    plain_steps: int | None = None
    setup: Setup = Setup()
    trees: bool = False

    def __post_init__(self) -> None:
        if not self.definition:
            own = (number for number in DEFINITIONS if number.engine == self.engine)
            object.__setattr__(self, "definition", "; ".join(f"{number.printed} = {number.formula}" for number in own))
        if isinstance(self.source, Trace):
            return
        rounds, drafted, accepted = self.counted
        output = None if self.output_tokens is None else sum(self.output_tokens)
        if rounds is None or accepted is None:
            return
        k = -(-drafted // rounds) if drafted and rounds else 0
        if isinstance(self.source, Counters):
            k = len(self.source.drafted)
        plain = self.plain_steps
        if output is not None:
            first = self.requests or 0  # tokens that came from the prompts' steps
            check_output(rounds, accepted, output, k, self.requests)
            if plain is None:
                plain = max(output - first - accepted - rounds, 0)
            elif output - first > 1.1 * (rounds + plain) * (k + 1) and k:
                raise InputError(
                    f"{output:,} output tokens in {rounds + plain:,} steps are more than the K + 1 = {k + 1} that a "
                    "step yields at most; the counts are of different runs: export them together"
                )
            object.__setattr__(self, "plain_steps", plain)
        if isinstance(self.source, Counters):
            source = dataclasses.replace(self.source, plain_steps=plain, output_tokens=output)
            object.__setattr__(self, "source", source)

    @property
    def counted(self) -> tuple[int | None, int | None, int | None]:
        """Rounds, drafted and accepted tokens; None for those that the files do not tell."""
        totals = self.totals
        return self.sums if totals is None else (totals.rounds, totals.drafted, totals.accepted)

    @property
    def conventions(self) -> Conventions | None:
        """How the engine runs and counts rounds, if known."""
        return CONVENTIONS.get(self.engine)

    @property
    def totals(self) -> Totals | None:
        """Totals of the rounds that the engine counts; None if only sums are known."""
        output = np.nan if self.output_tokens is None else float(sum(self.output_tokens))
        if isinstance(self.source, Counters):
            drafted, tokens = self.source.drafted, self.source.drafted_tokens
            total = int(drafted.sum()) if tokens is None else tokens
            return Totals(
                int(drafted[0]), total, int(self.source.accepted.sum()), output, self.source, self.plain_steps or 0
            )
        if self.source is None:
            return None
        totals = Totals.of(longest_rounds(self.source) if isinstance(self.source, Trace) else self.source, output)
        return dataclasses.replace(totals, plain_steps=self.plain_steps or 0)

    @property
    def holds(self) -> str:
        """Kind of data in the files: "dense trace", "rounds", "counters", or "sums alone"."""
        return "sums alone" if self.source is None else str(describe(self.source)["source"])

    def __repr__(self) -> str:
        return f"{self.holds} of {self.engine} {self.version}".rstrip()

    def to_frame(self) -> pd.DataFrame:
        """A table of acceptance as the engine defines and prints it, beside specsim's."""
        import pandas as pd  # slow to import

        return pd.DataFrame(summary(self)["printed"], columns=["quantity", "engine", "printed", "value", "formula"])

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: sums, averages, definitions, notes, and what was skipped; not the rounds themselves."""
        return {"holds": self.holds, **summary(self)}

    def write(self, path: str | PathLike[str], *, overwrite: bool = False) -> None:
        """Write them for other commands: a trace folder, rounds as .parquet or AIPerf's .jsonl, counters as .json."""
        path = Path(path)
        if path.exists() and not overwrite:
            raise InputError(f"{path} exists; choose another name or overwrite it")
        write_imported(self, path, overwrite=overwrite)


def check_output(rounds: int, accepted: int, output: int, k: int, requests: int | None, name: str = "") -> None:
    """InputError if these rounds emit more than was output.

    A round emits its accepted tokens and one of the target. The last round of a request may be cut, by K tokens at
    most, which engines count all the same.
    """
    slack = SLACK * output + k + 1 if requests is None else requests * max(k, 1)
    if rounds + accepted > output + slack:
        where = f"{name}: " if name else ""
        raise InputError(
            f"{where}{rounds:,} rounds with {accepted:,} accepted tokens emit {rounds + accepted:,}, more than the "
            f"{output:,} output tokens; the counts are of different runs: export them together"
        )


def origin(imported: ImportedRecords) -> dict[str, Any]:
    """Where the numbers come from, for the file."""
    conventions = imported.conventions
    return {
        "engine": imported.engine,
        "version": imported.version,
        "definition": imported.definition,
        **{name: getattr(conventions, name, None) for name in ("first_token", "last_draft", "counts_empty")},
        "requests": imported.requests,
        "setup": {name: value for name, value in dataclasses.asdict(imported.setup).items() if value},
        "notes": [*imported.notes],
        "skipped": dict(imported.skipped),
    }


def write_imported(imported: ImportedRecords, path: Path, *, overwrite: bool = False) -> None:
    """Write a trace folder, rounds as .parquet, counters as .json, or rounds as AIPerf's records (.jsonl)."""
    source = imported.source
    if source is None:
        raise InputError(f"sums and averages do not give acceptance by position; {imported.instead}")
    if isinstance(source, Trace):
        if path.suffix:
            raise InputError(f"--out {path}: this source gives a trace; name a folder, such as --out trace")
        with_origin = dataclasses.replace(source, meta={**source.meta, "import": origin(imported)})
        write_trace(with_origin, path, overwrite=overwrite)
    elif path.suffix == ".jsonl":
        write_text(path, "".join(json.dumps(record) + "\n" for record in aiperf_records(imported)))
    elif isinstance(source, Rounds):
        _check_suffix(path, ".parquet", "rounds")
        with replacing(path) as temporary:
            write_table(_rounds_table(source, imported), temporary)
    else:
        _check_suffix(path, ".json", "counters")
        counts = {"drafted": source.drafted.tolist(), "accepted": source.accepted.tolist()}
        totals: dict[str, Any] = {key: value for key in TOTALS if (value := getattr(source, key)) is not None}
        if source.windows:
            totals["windows"] = [
                {"drafted": own.drafted.tolist(), "accepted": own.accepted.tolist()} for own in source.windows
            ]
        write_json(counts | totals | origin(imported), path)


def _check_suffix(path: Path, suffix: str, content: str) -> None:
    if path.suffix != suffix:
        raise InputError(f"--out {path}: this source gives {content}; name a {suffix}, such as --out {content}{suffix}")


def _rounds_table(rounds: Rounds, imported: ImportedRecords) -> Any:
    """Columns as `specsim.acceptance.sources.read_rounds` takes them, with their origin in the metadata."""
    import pyarrow as pa

    columns = {"drafted": rounds.drafted, "accepted": rounds.accepted, "sequence_id": rounds.sequence_id, "t": rounds.t}
    table = pa.table({name: pa.array(values) for name, values in columns.items() if values is not None})
    return table.replace_schema_metadata({METADATA: json.dumps(origin(imported)).encode()})


def aiperf_records(imported: ImportedRecords) -> list[dict[str, Any]]:
    """AIPerf's record of each request; InputError where rounds by request are unknown."""
    rounds = imported.source
    if not isinstance(rounds, Rounds) or rounds.sequence_id is None:
        raise InputError("AIPerf's records are of requests; this source has no rounds by request; choose another --out")
    records = []
    for number, sequence in enumerate(np.unique(rounds.sequence_id).tolist()):
        own = rounds.select(rounds.sequence_id == sequence)
        drafted, accepted, times = own.drafted.tolist(), own.accepted.tolist(), np.bincount(own.accepted)
        records.append(
            {
                "engine": imported.engine,
                "mean_acceptance_length": 1 + sum(accepted) / len(accepted),
                "draft_acceptance_rate": sum(accepted) / sum(drafted) if sum(drafted) else 0.0,
                "acceptance_histogram": {str(length): int(times[length]) for length in np.flatnonzero(times).tolist()},
                "num_accepted_draft_tokens": sum(accepted),
                "num_draft_tokens": sum(drafted),
                "num_spec_steps": len(accepted),
                "num_spec_tokens": drafted[0] if len(set(drafted)) == 1 else None,
                "completion_tokens": None if imported.output_tokens is None else imported.output_tokens[number],
                "per_step_accepted": accepted,
                "per_step_drafted": drafted,
            }
        )
    return records


def summary(imported: ImportedRecords) -> dict[str, Any]:
    """Sums, averages, and the engine's numbers beside specsim's."""
    totals = imported.totals
    rounds, drafted, accepted = imported.counted
    averages = dict(imported.averages)
    if totals is None and rounds and accepted is not None:
        averages["1 + accepted / rounds"] = 1 + accepted / rounds
    if totals is None and drafted and accepted is not None:
        averages["accepted / drafted"] = accepted / drafted
    return {
        **origin(imported),
        "rounds": rounds,
        "drafted": drafted,
        "accepted": accepted,
        "plain_steps": imported.plain_steps,
        "output_tokens": None if imported.output_tokens is None else sum(imported.output_tokens),
        "setup": dataclasses.asdict(imported.setup),
        "averages": averages,
        "printed": _printed(imported),
    }


def _printed(imported: ImportedRecords) -> list[dict[str, Any]]:
    """The numbers that the engine and specsim print of these records."""
    totals, source = imported.totals, imported.source
    if totals is None or source is None:
        return []
    rows = []
    for number in DEFINITIONS:
        if number.engine not in ("specsim", imported.engine):
            continue
        value = number.value(totals)
        if (number.engine, number.quantity) == ("specsim", POSITIONS):
            if isinstance(source, Counters) and source.drafted_tokens is not None:
                continue  # shares of all rounds, see `Counters`
            accepted, verified = verified_by_depth(source)  # rounds tell more than their counters
            value = (accepted / np.maximum(verified, 1)).tolist()
        if np.isfinite(value).all():
            names = ("engine", "quantity", "printed", "formula")
            rows.append({**{name: getattr(number, name) for name in names}, "value": value})
    return rows
