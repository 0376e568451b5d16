"""Rounds as ExLlamaV3, Arctic Inference's suffix simulator and inference-lab record them."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from specsim.acceptance.sources import MOST_DRAFTED, Rounds
from specsim.engines.formats.reading import Request, count, json_records, rounds_of_requests
from specsim.engines.formats.records import ImportedRecords, Skipped
from specsim.io.errors import InputError
from specsim.io.json import checked
from specsim.io.parquet import INTEGERS, MARKS, TEXT, read_table

EXLLAMA = "give what eval/spec_decode.py --draft_stats writes, or jobs' draft_stats, as JSON or JSON Lines"
ARCTIC = "give steps of the suffix simulator, with step, num_spec_toks and num_accept_toks, as JSON Lines or .csv"
LAB = "give acceptance.parquet of inference-lab"


def read_exllama(paths: Sequence[Path]) -> ImportedRecords:
    """Read rounds where they were recorded, else sums.

    A round is (position, window, accepted); newer versions add a moving average.
    """
    skipped = Skipped()
    requests, sums = [], []
    definition = "accepted = tokens of the drafted window that the target took, without its own"
    for name, record in json_records(paths, skipped, invalid=EXLLAMA, noun="job"):
        key = next((key for key in ("draft_stats", "stats") if key in record), None)  # of a job, of the evaluation
        if key is not None:
            rows = checked(record[key], f"{name}: {key}", list[list[float]], invalid=EXLLAMA)
            if any(len(row) < 3 or row[1] != int(row[1]) or row[2] != int(row[2]) for row in rows):
                raise InputError(f"{name}: a round is not (position, window, accepted); {EXLLAMA}")
            request = Request([int(row[1]) for row in rows], [int(row[2]) for row in rows]).check(name)
            requests += [request] if rows else []
        elif "accepted_draft_tokens" in record and "rejected_draft_tokens" in record:
            tokens = [record["accepted_draft_tokens"], record["rejected_draft_tokens"]]
            sums.append([count(checked(number, name, int, invalid=EXLLAMA), name) for number in tokens])
        else:
            raise InputError(f"{name} has neither draft_stats nor accepted_draft_tokens; {EXLLAMA}")
    if requests:
        if sums:
            skipped["jobs with sums alone"] = len(sums)
        return rounds_of_requests("exllamav3", requests, skipped, definition=definition)
    accepted, rejected = (sum(column) for column in zip(*sums, [0, 0], strict=True))
    if not accepted + rejected:
        raise InputError(f"{paths[0]} holds no drafts; {EXLLAMA}")
    return ImportedRecords(
        None,
        "exllamav3",
        definition,
        requests=len(sums),
        sums=(None, accepted + rejected, accepted),
        skipped=skipped,
        instead=EXLLAMA,
    )


class Step(TypedDict):
    """A step of the suffix simulator."""

    step: int
    num_spec_toks: int
    num_accept_toks: int


def read_arctic(paths: Sequence[Path]) -> ImportedRecords:
    """Read the steps of each request; a request ends where the step number starts again."""
    skipped = Skipped()
    rows: list[dict[str, Any]] = []
    for path in paths:
        is_table = path.suffix == ".csv"
        rows += _csv_rows(path) if is_table else [row for _, row in json_records([path], skipped, invalid=ARCTIC)]
    configurations = {str(row["task_id"]) for row in rows if "task_id" in row}
    if len(configurations) > 1:
        raise InputError(f"{paths[0]} is of {len(configurations)} configurations (task_id); give the rows of one")
    if any(str(row.get("use_tree_spec")).lower() == "true" for row in rows):
        raise InputError(
            f"{paths[0]}: num_spec_toks counts nodes of trees, not depths; run the simulator with --use-tree-spec false"
        )
    requests: list[Request] = []
    last = None
    for number, row in enumerate(rows, start=1):
        step: Step = checked(row, f"step {number}", Step, invalid=ARCTIC)
        if last is None or step["step"] <= last:
            requests.append(Request([], []))
        last = step["step"]
        requests[-1].drafted.append(step["num_spec_toks"])
        requests[-1].accepted.append(step["num_accept_toks"])
    for number, request in enumerate(requests, start=1):
        request.check(f"request {number}")
    if not requests:
        raise InputError(f"{paths[0]} holds no steps; {ARCTIC}")
    definition = (
        "num_accept_toks = accepted tokens of a step, without the target's own; steps without a draft are there"
    )
    return rounds_of_requests("arctic", requests, skipped, definition=definition)


def _csv_rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise InputError(f"{path} does not exist; {ARCTIC}")
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            return [{**row, **{name: int(row[name]) for name in Step.__annotations__}} for row in rows]
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        raise InputError(f"{path} is not a table of steps ({error!s:.60}); {ARCTIC}") from None


def read_inference_lab(paths: Sequence[Path]) -> ImportedRecords:
    """Read the rounds of a model, speculator and configuration.

    A draft is as deep as columns acc0, acc1, ... hold 0 or 1; a table of several widths has nulls behind.
    """
    if len(paths) > 1:
        raise InputError(f"{len(paths)} files; give a single acceptance.parquet")
    path = paths[0]
    settings = ("model", "speculator", "config")
    keys = ("prompt_idx", "turn", "round_idx")
    columns = {**dict.fromkeys(("accept", *keys), INTEGERS), **dict.fromkeys(settings, TEXT)}
    table = read_table(path, columns, settings, invalid=LAB)
    for name in settings:
        if name in table.column_names and len(known := set(table.column(name).to_pylist())) > 1:
            raise InputError(
                f"{path} is of several {name}s ({', '.join(map(repr, sorted(known)))}); give the rows of one"
            )
    drafted, leading = _marked_rounds(path, len(table))
    accept = np.array(table.column("accept").to_pylist(), dtype=object)
    bonus = next((extra for extra in (0, 1) if (accept == leading + extra).all()), None)
    if bonus is None or not len(table):
        raise InputError(f"{path}: accept is not the sum of acc0, acc1, ...; {LAB}")
    rows = list(zip(*(table.column(name).to_pylist() for name in keys), strict=True))
    order = sorted(range(len(rows)), key=rows.__getitem__)
    requests: dict[tuple[int, int], int] = {}
    sequence = [requests.setdefault(rows[row][:2], len(requests)) for row in order]
    definition = f"accept = accepted tokens{', the bonus included' if bonus else ''}"
    notes = (
        f"drafts are taken to be of {drafted.max()} tokens at most, as the table has columns that are filled",
        "no column t: the positions of rounds are unknown",
    )
    rounds = Rounds(drafted[order].astype(np.int64), leading[order].astype(np.int64), None, np.array(sequence))
    return ImportedRecords(rounds, "inference-lab", definition, requests=len(requests), notes=notes)


def _marked_rounds(path: Path, rows: int) -> tuple[Any, Any]:
    """Drafted and leading accepted tokens [R] of every round, by the columns acc0, acc1, ..."""
    import pyarrow.parquet as pq

    depth = sum(bool(re.fullmatch(r"acc\d{1,5}", name)) for name in pq.read_schema(path).names)
    if not depth or depth > MOST_DRAFTED:
        raise InputError(f"{path} has no columns acc0, acc1, ...; {LAB}")
    names = [f"acc{i}" for i in range(depth)]
    marks = read_table(path, dict.fromkeys(names, MARKS), invalid=LAB)
    values = np.array([marks.column(name).to_pylist() for name in names], dtype=object).reshape(depth, rows)
    proposed = values != None  # noqa: E711 (by element)
    if not np.isin(values[proposed].astype(np.int64), (0, 1)).all() or (proposed[1:] & ~proposed[:-1]).any():
        raise InputError(f"{path}: acc0, acc1, ... are not 0 or 1 with nulls behind; {LAB}")
    return proposed.sum(axis=0), np.cumprod(proposed & values.astype(bool), axis=0).sum(axis=0)
