"""Rounds as ExLlamaV3, Arctic Inference's suffix simulator and inference-lab record them."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from specsim.acceptance.sources import MOST_DRAFTED, Rounds
from specsim.engines.formats.imported import Imported, Request, as_rounds, check_request, count, json_records
from specsim.errors import InputError
from specsim.json_files import checked
from specsim.parquet_files import INTEGERS, MARKS, TEXT, read_table

EXLLAMA = "give what eval/spec_decode.py --draft_stats writes, or jobs' draft_stats, as JSON or JSON Lines"
ARCTIC = "give steps of the suffix simulator, with step, num_spec_toks and num_accept_toks, as JSON Lines or .csv"
LAB = "give acceptance.parquet of inference-lab"


def read_exllama(paths: Sequence[Path]) -> Imported:
    """Rounds where they were recorded, else sums.

    A round is (position, window, accepted), in newer versions with a moving average behind these.
    """
    found, skipped = json_records(paths, invalid=EXLLAMA)
    requests, accepted, rejected, without = [], 0, 0, 0
    definition = "accepted = tokens of the drafted window that the target took, without its own"
    for number, record in enumerate(found):
        name = f"job {number + 1}"
        key = next((key for key in ("draft_stats", "stats") if key in record), None)  # of a job, of the evaluation
        if key is not None:
            rows = checked(record[key], f"{name}: {key}", list[list[float]], invalid=EXLLAMA)
            if any(len(row) < 3 or row[1] != int(row[1]) or row[2] != int(row[2]) for row in rows):
                raise InputError(f"{name}: a round is not (position, window, accepted); {EXLLAMA}")
            request = Request([int(row[1]) for row in rows], [int(row[2]) for row in rows])
            check_request(request, name)
            requests += [request] if rows else []
        elif "accepted_draft_tokens" in record and "rejected_draft_tokens" in record:
            numbers = [
                checked(record[f"{what}_draft_tokens"], name, int, invalid=EXLLAMA) for what in ("accepted", "rejected")
            ]
            accepted, rejected = accepted + count(numbers[0], name), rejected + count(numbers[1], name)
            without += 1
        else:
            raise InputError(f"{name} has neither draft_stats nor accepted_draft_tokens; {EXLLAMA}")
    if requests:
        if without:
            skipped["jobs with sums alone"] = without
        rounds, notes = as_rounds(requests)
        return Imported(rounds, "exllamav3", definition, "", len(requests), notes=tuple(notes), skipped=skipped)
    if not accepted + rejected:
        raise InputError(f"{paths[0]} holds no drafts; {EXLLAMA}")
    return Imported(
        None, "exllamav3", definition, "", without, sums=(None, accepted + rejected, accepted), skipped=skipped,
        instead=EXLLAMA,
    )  # fmt: skip


class Step(TypedDict):
    """Of the suffix simulator."""

    step: int
    num_spec_toks: int
    num_accept_toks: int


def read_arctic(paths: Sequence[Path]) -> Imported:
    """Steps of one request after another; each counts its steps anew."""
    skipped: dict[str, int] = {}
    rows: list[dict[str, Any]] = []
    for path in paths:
        if path.suffix == ".csv":
            rows += _csv_rows(path)
        else:
            more, skipped = json_records([path], invalid=ARCTIC)
            rows += more
    tasks = {str(row["task_id"]) for row in rows if "task_id" in row}
    if len(tasks) > 1:
        raise InputError(f"{paths[0]} is of {len(tasks)} configurations (task_id); give the rows of one alone")
    if any(str(row.get("use_tree_spec")).lower() == "true" for row in rows):
        raise InputError(
            f"{paths[0]}: num_spec_toks counts nodes of trees, not depths; run the simulator with --use-tree-spec false"
        )
    requests: list[Request] = []
    last = None
    for number, row in enumerate(rows):
        one = checked(row, f"step {number + 1}", Step, invalid=ARCTIC)
        if last is None or one["step"] <= last:
            requests.append(Request([], []))
        last = one["step"]
        requests[-1].drafted.append(one["num_spec_toks"])
        requests[-1].accepted.append(one["num_accept_toks"])
    for number, request in enumerate(requests):
        check_request(request, f"request {number + 1}")
    if not requests:
        raise InputError(f"{paths[0]} holds no steps; {ARCTIC}")
    rounds, notes = as_rounds(requests)
    definition = (
        "num_accept_toks = accepted tokens of a step, without the target's own; steps without a draft are there"
    )
    return Imported(rounds, "arctic", definition, "", len(requests), notes=tuple(notes), skipped=skipped)


def _csv_rows(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise InputError(f"{path} does not exist; {ARCTIC}")
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file)
            return [{**row, **{name: int(row[name]) for name in Step.__annotations__}} for row in rows]
    except (KeyError, ValueError, TypeError, csv.Error) as error:
        raise InputError(f"{path} is no table of steps ({error!s:.60}); {ARCTIC}") from None


def read_inference_lab(paths: Sequence[Path]) -> Imported:
    """Rounds of one model, speculator and configuration.

    A draft is as deep as columns acc0, acc1, ... hold 0 or 1; a table of several widths has nulls behind.
    """
    import pyarrow.parquet as pq

    if len(paths) > 1:
        raise InputError(f"{len(paths)} files; give one acceptance.parquet")
    path = paths[0]
    settings = ("model", "speculator", "config")
    columns = {
        **dict.fromkeys(("accept", "prompt_idx", "turn", "round_idx"), INTEGERS),
        **dict.fromkeys(settings, TEXT),
    }
    table = read_table(path, columns, settings, invalid=LAB)
    depth = sum(bool(re.fullmatch(r"acc\d{1,5}", name)) for name in pq.read_schema(path).names)
    if not depth or depth > MOST_DRAFTED:
        raise InputError(f"{path} has no columns acc0, acc1, ...; {LAB}")
    for name in settings:
        if name in table.column_names and len(known := set(table.column(name).to_pylist())) > 1:
            raise InputError(
                f"{path} is of several {name}s ({', '.join(map(repr, sorted(known)))}); give one's rows alone"
            )
    names = [f"acc{i}" for i in range(depth)]
    marks = read_table(path, dict.fromkeys(names, MARKS), invalid=LAB)
    values = np.array([marks.column(name).to_pylist() for name in names], dtype=object).reshape(depth, len(table))
    proposed = values != None  # noqa: E711 (by element)
    if not np.isin(values[proposed].astype(np.int64), (0, 1)).all() or (proposed[1:] & ~proposed[:-1]).any():
        raise InputError(f"{path}: acc0, acc1, ... are not 0 or 1 with nulls behind; {LAB}")
    drafted = proposed.sum(axis=0)
    leading = np.cumprod(proposed & values.astype(bool), axis=0).sum(axis=0)
    accept = np.array(table.column("accept").to_pylist(), dtype=object)
    bonus = next((extra for extra in (0, 1) if (accept == leading + extra).all()), None)
    if bonus is None or not len(table):
        raise InputError(f"{path}: accept is not what acc0, acc1, ... come to; {LAB}")
    keys = [table.column(name).to_pylist() for name in ("prompt_idx", "turn", "round_idx")]
    order = sorted(range(len(table)), key=lambda row: [key[row] for key in keys])
    requests: dict[tuple[int, int], int] = {}
    sequence = [requests.setdefault((keys[0][row], keys[1][row]), len(requests)) for row in order]
    rounds = Rounds(drafted[order].astype(np.int64), leading[order].astype(np.int64), None, np.array(sequence))
    definition = f"accept = accepted tokens{', the bonus included' if bonus else ''}"
    notes = (
        f"drafts are taken to be of {drafted.max()} tokens at most, as the table has columns that are filled",
        "no column t: where rounds begin is not told",
    )
    return Imported(rounds, "inference-lab", definition, "", len(requests), notes=notes)
