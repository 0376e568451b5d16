"""Prometheus: a scrape of an engine's metrics, or two of the same server, between which the difference is counted.

vLLM, llama.cpp and LMDeploy count accepted tokens by position, but drafts and drafted tokens only in sum; TensorRT-LLM
counts drafted tokens by position too, so that its counters hold under any schedule. SGLang has gauges of its latest
interval, which cannot be summed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specsim.acceptance.sources import MOST_COUNT, MOST_DRAFTED, Counters
from specsim.engines import rates
from specsim.engines.formats import llamacpp, requests
from specsim.engines.formats.imported import Imported, definition_of, log_lines
from specsim.errors import InputError

SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})? ([^\s{}]+)(?: -?[\d.]+)?\s*$")
LABEL = re.compile(r'(?<!\w)(\w+)="((?:[^"\\]|\\.)*)"')
PREFIXES = {
    "vllm:": "vllm",
    "llamacpp:": "llamacpp",
    "lmdeploy:": "lmdeploy",
    "trtllm_": "tensorrt-llm",
    "sglang:": "sglang",
}
DRAFTS, DRAFTED, ACCEPTED = "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"
BY_POSITION = "spec_decode_num_accepted_tokens_per_pos"
EMITTED = "spec_decode_num_emitted_tokens"  # of vLLM before 0.8
TRT_DRAFTED, TRT_ACCEPTED = "spec_decode_drafted_tokens", "spec_decode_accepted_tokens"
OUTPUT = {"vllm": "generation_tokens", "llamacpp": "tokens_predicted"}
LABELS = ("position", "token_position")
INSTEAD = {
    "vllm": requests.DETAILED,
    "llamacpp": llamacpp.INSTEAD,
    "lmdeploy": "give two scrapes from a time of one draft length",
}
Counts = Mapping[tuple[str, int | None], int]


def read_prometheus(paths: Sequence[Path]) -> Imported:
    """One scrape, of all since the server's start, or two, of the time between them."""
    if len(paths) > 2:
        raise InputError(f"{len(paths)} scrapes; give one, or two to count what came between them")
    scrapes = [scrape(path) for path in paths]
    engines = [one.engine for one in scrapes]
    if len(set(engines)) > 1:
        raise InputError(f"scrapes of {engines[0]} and {engines[1]} cannot be subtracted; give two of one server")
    counts = scrapes[0].counts if len(paths) == 1 else _difference(scrapes[0].counts, scrapes[1].counts, paths)
    imported = _imported(engines[0], counts, paths[-1])
    alone = () if len(paths) == 2 else ("all since the server's start; two scrapes count what came between them",)
    skipped = sum((one.skipped for one in scrapes), Counter())
    return replace(imported, notes=(*imported.notes, *alone), skipped=skipped)


class Scrape(NamedTuple):
    """The engine, its counters of speculation by name and position, and how many lines could not be read, and why."""

    engine: str
    counts: Counts
    skipped: Counter[str]


def scrape(path: Path) -> Scrape:
    """A file of metrics; InputError where it has no counters of speculation, or several engines'."""
    found: dict[tuple[str, int | None], int] = {}
    engines, models = set(), set()
    skipped: Counter[str] = Counter()
    for line in log_lines([path], skipped):
        if line.startswith("#") or not line.strip():
            continue
        sample = SAMPLE.match(line)
        if sample is None:
            skipped["lines that are no sample"] += 1
            continue
        name, labels = sample[1], dict(LABEL.findall(sample[2] or ""))
        prefix = next((one for one in PREFIXES if name.startswith(one)), None)
        if prefix is None or name.endswith("_created"):
            continue
        short = name.removeprefix(prefix).removesuffix("_total")
        if not short.startswith("spec_") and short not in OUTPUT.values():
            continue
        engines.add(PREFIXES[prefix])
        models.add(labels.get("model_name"))
        position = next((labels[label] for label in LABELS if label in labels), None)
        key = short, None if position is None else _whole(position, f"{path}: position of {name}", MOST_DRAFTED)
        if PREFIXES[prefix] == "sglang" or short.endswith(("_rate", "_efficiency", "_length", "_overhead")):
            continue
        found[key] = found.get(key, 0) + _whole(sample[3], f"{path}: {name}", MOST_COUNT)
    if not engines or not any(name.startswith("spec_") for name, _ in found):
        if "sglang" in engines:
            raise InputError(
                f"{path}: SGLang exports gauges of its latest interval, no counts by position; import the meta_info of "
                "its responses (sglang-responses)"
            )
        raise InputError(f"{path} has no counters of speculation; scrape /metrics of a server that speculates")
    if len(engines) > 1 or len(models) > 1:
        several = sorted(engines) if len(engines) > 1 else sorted(map(str, models))
        raise InputError(f"{path} is of {' and '.join(several)}; give one server's and one model's metrics")
    return Scrape(engines.pop(), found, skipped)


def _whole(text: str, name: str, most: int) -> int:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= most or number != int(number):
        raise InputError(f"{name} is {text:.40}, no count; scrape again")
    return int(number)


def _difference(before: Counts, after: Counts, paths: Sequence[Path]) -> Counts:
    for key in {**before, **after}:
        if after.get(key, 0) < before.get(key, 0):
            raise InputError(
                f"{key[0]} falls from {before[key]:,} in {paths[0]} to {after.get(key, 0):,} in {paths[1]}: the server "
                "started anew between the scrapes, or they are in the wrong order; give two of one run"
            )
    return {key: value - before.get(key, 0) for key, value in after.items()}


def by_position(counts: Counts, name: str) -> list[int]:
    """The counts of a name from position 0 on."""
    found = {position: value for (one, position), value in counts.items() if one == name and position is not None}
    return [found.get(position, 0) for position in range(max(found, default=-1) + 1)]


def _imported(engine: str, counts: Counts, path: Path) -> Imported:
    output = counts.get((OUTPUT.get(engine, ""), None))
    outputs = None if output is None else (output,)
    definition = definition_of(engine) or definition_of("vllm")
    if engine == "tensorrt-llm" and (accepted := by_position(counts, TRT_ACCEPTED)):
        drafted = by_position(counts, TRT_DRAFTED)
        accepted += [0] * (len(drafted) - len(accepted))
        columns = [np.array(column, dtype=np.int64) for column in (drafted, accepted)]
        if (
            len(accepted) > len(drafted)
            or (columns[1] > columns[0]).any()
            or any((np.diff(column) > 0).any() for column in columns)
        ):
            raise InputError(f"{path}: {drafted} drafted and {accepted} accepted by position cannot be; scrape again")
        if not columns[0].any():
            raise InputError(f"{path}: nothing was drafted; scrape after some requests")
        used = columns[0] > 0
        return Imported(Counters(columns[0][used], columns[1][used]), engine, definition, output_tokens=outputs)
    rounds, drafted_sum, accepted_sum = (counts.get((name, None)) for name in (DRAFTS, DRAFTED, ACCEPTED))
    if drafted_sum is None or accepted_sum is None:
        raise InputError(f"{path} lacks counters of drafted and accepted tokens; scrape it whole")
    if not drafted_sum:
        raise InputError(f"{path}: nothing was drafted; scrape after some requests")
    passed = by_position(counts, BY_POSITION)
    notes = ("accepted tokens behind a rejected one are counted, too",) if (EMITTED, None) in counts else ()
    if not passed or rounds is None:
        instead = INSTEAD.get(engine, "scrape a version that counts by position")
        return Imported(
            None, engine, definition, output_tokens=outputs, sums=(rounds, drafted_sum, accepted_sum), notes=notes,
            instead=instead,
        )  # fmt: skip
    if sum(passed) != accepted_sum:
        raise InputError(
            f"{path}: {accepted_sum:,} accepted tokens, but {sum(passed):,} by position; scrape it whole, at one time"
        )
    found, said = rates.counters(rounds, drafted_sum, passed, INSTEAD.get(engine, ""))
    return Imported(found, engine, definition, output_tokens=outputs, notes=tuple(said))
