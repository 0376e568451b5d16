"""Prometheus: a scrape of an engine's metrics, or two of the same server, whose difference is counted.

vLLM and llama.cpp count accepted tokens by position, but drafts and drafted tokens only in sum; TensorRT-LLM
counts drafted tokens by position too, so that its counters hold under any schedule. SGLang has gauges of its latest
interval, of which the last is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from specsim.acceptance.sources import MOST_COUNT, MOST_DRAFTED, Counters
from specsim.engines import rates
from specsim.engines.formats import llamacpp, requests
from specsim.engines.formats.reading import log_lines
from specsim.engines.formats.records import ImportedRecords, Setup, Skipped
from specsim.io.errors import InputError

# As the server writes it, and as a row of the table in Prometheus' own page, pasted: {...} | 22.
SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?(?:\s*+\|)?\s++([^\s{}|]++)(?: -?[\d.]++)?\s*+\|?\s*+$")
LABEL = re.compile(r'(?<!\w)(\w+)="((?:[^"\\]|\\.)*)"')
PREFIXES = {
    "vllm:": "vllm",
    "llamacpp:": "llamacpp",
    "trtllm_": "tensorrt-llm",
    "sglang:": "sglang",
}
DRAFTS, DRAFTED, ACCEPTED = "spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"
BY_POSITION = "spec_decode_num_accepted_tokens_per_pos"
EMITTED = "spec_decode_num_emitted_tokens"  # of vLLM before 0.8
TRT_DRAFTED, TRT_ACCEPTED = "spec_decode_drafted_tokens", "spec_decode_accepted_tokens"
OUTPUT = {"vllm": "generation_tokens", "llamacpp": "tokens_predicted"}
REQUESTS = "request_success"  # of vLLM: requests that ended
RUNNING = {"num_requests_running", "requests_processing", "num_running_reqs"}
SGLANG_LENGTH = "spec_accept_length"
PASTED = re.compile(r"^[\s>|+-]+")  # of quotes, tables, and of differences of two scrapes
GAUGES = ("_rate", "_efficiency", "_length", "_overhead")
LABELS = ("position", "token_position")
INSTEAD = {
    "vllm": requests.DETAILED,
    "llamacpp": llamacpp.INSTEAD,
}
Counts = Mapping[tuple[str, int | None], int]


def read_prometheus(paths: Sequence[Path]) -> ImportedRecords:
    """Read a scrape, which counts since the server's start, or two, which count the time between them."""
    if len(paths) > 2:
        raise InputError(f"{len(paths)} scrapes; give 1, or 2 to count what came between them")
    scrapes = [scrape(path) for path in paths]
    engine, *others = [scraped.engine for scraped in scrapes]
    if others not in ([], [engine]):
        raise InputError(f"scrapes of {engine} and {others[0]} differ; give two scrapes of the same server")
    setup = Setup(model=scrapes[-1].model, running=scrapes[-1].gauges.get("running") or None)
    replicas = scrapes[-1].gauges.get("busy", 1)
    load = f"each of {replicas:g} engines batches its own requests, {setup.running or 0:.3g} on average"
    if engine == "sglang":
        return _of_gauges(scrapes[-1], setup)
    counts = scrapes[0].counts if len(paths) == 1 else difference(scrapes[0].counts, scrapes[1].counts, paths)
    source, sums, notes = _counters(engine, counts, paths[-1])
    if len(paths) == 1:
        notes.append("all since the server's start; two scrapes count what came between them")
    notes += [load] if replicas > 1 else []
    output = counts.get((OUTPUT.get(engine, ""), None))
    return ImportedRecords(
        source,
        engine,
        requests=counts.get((REQUESTS, None)),
        output_tokens=None if output is None else (output,),
        sums=sums,
        notes=tuple(notes),
        skipped=sum((scraped.skipped for scraped in scrapes), Skipped()),
        instead="" if source else INSTEAD.get(engine, "scrape a version that counts by position"),
        setup=replace(setup, draft_tokens=len(source.drafted)) if source else setup,
    )


def _of_gauges(scraped: Scrape, setup: Setup) -> ImportedRecords:
    """SGLang's averages of its latest interval."""
    return ImportedRecords(
        None,
        "sglang",
        averages={"accept len": scraped.gauges["length"]},
        notes=("the gauge is of the latest interval; its log has all of them (sglang-log)",),
        skipped=scraped.skipped,
        instead="import the meta_info of its responses (sglang-responses), whose histogram counts by position",
        setup=setup,
    )


class Scrape(NamedTuple):
    """The engine, its counters of speculation by name and position, and the lines that could not be read.

    model : that is served, "" if unknown
    gauges : requests that run at once in an engine with any ("running"), the number of such engines ("busy"), and
        SGLang's acceptance length ("length")
    """

    engine: str
    counts: Counts
    skipped: Skipped
    model: str = ""
    gauges: Mapping[str, float] = {}


def scrape(path: Path) -> Scrape:
    """Read a file of metrics; InputError without counters of speculation, or with several engines'."""
    counts: dict[tuple[str, int | None], int] = {}
    engines, models = set(), set()
    skipped = Skipped()
    gauges: dict[str, float] = {}
    running: list[float] = []  # of every engine: replicas batch their own requests
    for line in log_lines([path], skipped):
        line = PASTED.sub("", line)
        if line.startswith("#") or not line.strip():
            continue
        sample = SAMPLE.match(line)
        if sample is None:
            skipped["lines that are no sample"] += 1
            continue
        name, labels = sample[1], dict(LABEL.findall(sample[2] or ""))
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
        if prefix is None or name.endswith("_created"):
            continue
        short = name.removeprefix(prefix).removesuffix("_total")
        if short in RUNNING or (short == SGLANG_LENGTH and prefix == "sglang:"):
            if short in RUNNING:
                running.append(_number(sample[3]))
            else:
                gauges["length"] = _number(sample[3])
        if not short.startswith("spec_") and short not in (*OUTPUT.values(), REQUESTS):
            continue
        engines.add(PREFIXES[prefix])
        models.add(labels.get("model_name"))
        position = next((labels[label] for label in LABELS if label in labels), None)
        key = short, None if position is None else _whole(position, f"{path}: position of {name}", MOST_DRAFTED)
        if PREFIXES[prefix] != "sglang" and not short.endswith(GAUGES):
            counts[key] = counts.get(key, 0) + _whole(sample[3], f"{path}: {name}", MOST_COUNT)
    busy = [number for number in running if number]
    gauges |= {"running": float(np.mean(busy)), "busy": len(busy)} if busy else {}
    if not engines or not any(name.startswith("spec_") for name, _ in counts):
        if engines == {"sglang"} and gauges.get("length", 0.0) >= 1:
            return Scrape("sglang", counts, skipped, "".join(filter(None, models)), gauges)
        raise InputError(f"{path} has no counters of speculation; scrape /metrics of a server that speculates")
    if len(engines) > 1 or len(models) > 1:
        several = sorted(engines) if len(engines) > 1 else sorted(map(str, models))
        raise InputError(f"{path} is of {' and '.join(several)}; give the metrics of a single server and model")
    return Scrape(engines.pop(), counts, skipped, models.pop() or "", gauges)


def is_counted(line: str) -> bool:
    """Tell whether a line of metrics is of counters of speculation or of output tokens."""
    name = line.partition("{")[0]
    return "spec_" in name or any(output in name for output in OUTPUT.values())


def output_tokens(text: str) -> int | None:
    """Return the output tokens that a scrape of vLLM or llama.cpp counts since the server's start; None if it does not.

    Unlike `scrape`, it takes metrics without counters of speculation.
    """
    total = None
    for line in text.split("\n"):
        sample = SAMPLE.match(line)
        if sample is None:
            continue
        prefix = next((prefix for prefix in PREFIXES if sample[1].startswith(prefix)), "")
        if prefix and sample[1].removeprefix(prefix).removesuffix("_total") == OUTPUT.get(PREFIXES[prefix]):
            total = (total or 0) + _whole(sample[3], sample[1], MOST_COUNT)
    return total


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if 0 <= number <= MOST_COUNT else 0.0


def _whole(text: str, name: str, most: int) -> int:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= most or number != int(number):
        raise InputError(f"{name} is {text:.40}, not a count; scrape again")
    return int(number)


def difference(before: Counts, after: Counts, paths: Sequence[Path]) -> Counts:
    """What was counted between two scrapes; InputError if a counter falls."""
    for key in {**before, **after}:
        if after.get(key, 0) < before.get(key, 0):
            raise InputError(
                f"{key[0]} falls from {before[key]:,} in {paths[0]} to {after.get(key, 0):,} in {paths[1]}: the server "
                "restarted between the scrapes, or they are in the wrong order; give two scrapes of the same run"
            )
    return {key: value - before.get(key, 0) for key, value in after.items()}


def by_position(counts: Counts, name: str) -> list[int]:
    """The counts of a metric from position 0 on."""
    values = {at: value for (metric, at), value in counts.items() if metric == name and at is not None}
    return [values.get(at, 0) for at in range(max(values, default=-1) + 1)]


Sums = tuple[int | None, int | None, int | None]


def _counters(engine: str, counts: Counts, path: Path) -> tuple[Counters | None, Sums, list[str]]:
    """Counters by position, or sums alone, and notes on them."""
    if engine == "tensorrt-llm" and (accepted := by_position(counts, TRT_ACCEPTED)):
        return _counters_of_both(by_position(counts, TRT_DRAFTED), accepted, path), (None, None, None), []
    rounds, drafted, accepted_sum = (counts.get((name, None)) for name in (DRAFTS, DRAFTED, ACCEPTED))
    if drafted is None or accepted_sum is None:
        raise InputError(f"{path} lacks counters of drafted and accepted tokens; scrape it whole")
    if not drafted:
        raise InputError(f"{path}: nothing was drafted; scrape after some requests")
    passed = by_position(counts, BY_POSITION)
    if not passed or rounds is None:
        notes = ["accepted tokens behind a rejected token are counted, too"] if (EMITTED, None) in counts else []
        return None, (rounds, drafted, accepted_sum), notes
    if sum(passed) != accepted_sum:
        raise InputError(
            f"{path}: {accepted_sum:,} accepted tokens, but {sum(passed):,} by position; scrape it whole, at once"
        )
    counters, notes = rates.counters(rounds, drafted, passed, INSTEAD.get(engine, ""))
    return counters, (None, None, None), notes


def _counters_of_both(drafted: list[int], accepted: list[int], path: Path) -> Counters:
    """Counters of drafted and accepted tokens by position."""
    columns = np.zeros((2, max(len(drafted), len(accepted))), dtype=np.int64)
    columns[0, : len(drafted)], columns[1, : len(accepted)] = drafted, accepted
    if (columns[1] > columns[0]).any() or (np.diff(columns) > 0).any():
        raise InputError(f"{path}: {drafted} drafted and {accepted} accepted by position is impossible; scrape again")
    if not columns[0].any():
        raise InputError(f"{path}: nothing was drafted; scrape after some requests")
    used = columns[0] > 0
    return Counters(columns[0][used], columns[1][used])
