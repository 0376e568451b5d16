"""Results of benchmarks of servers: vLLM's and SGLang's, as text and as JSON, and z-lab's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np

from specsim.acceptance.sources import MOST_COUNT
from specsim.engines import rates
from specsim.engines.formats.reading import count, json_records, log_lines
from specsim.engines.formats.records import ImportedRecords, Setup, Skipped
from specsim.engines.formats.requests import DETAILED
from specsim.engines.formats.sglang import CHAIN, setup_of
from specsim.io.errors import InputError
from specsim.io.json import checked

ONE_BENCHMARK = "give a single benchmark"
CLIENTS_ERROR = 0.05  # of the output: tokens that a client counts by itself, and every request's first token
SGLANG = "sglang"
SGLANG_INSTEAD = "import the meta_info of its responses (sglang-responses), whose histogram counts by position"
LENGTH = "accept len"  # name of the average that `advise` takes


class VllmResult(TypedDict):
    """Keys of `vllm bench serve --save-result`; without speculation it lacks those of drafts."""

    spec_decode_num_drafts: int
    spec_decode_draft_tokens: int
    spec_decode_accepted_tokens: int
    spec_decode_per_position_acceptance_rates: list[float]
    completed: NotRequired[int]
    total_input_tokens: NotRequired[int]
    total_output_tokens: NotRequired[int]
    max_concurrency: NotRequired[int | None]
    model_id: NotRequired[str]
    output_throughput: NotRequired[float]


VLLM_TEXT = {  # of `vllm bench serve`, and of vLLM's example spec_decode.py
    "spec_decode_num_drafts": re.compile(r"^(?:Drafts|num_drafts):\s+(\d+)\s*$"),
    "spec_decode_draft_tokens": re.compile(r"^(?:Draft tokens|num_draft_tokens):\s+(\d+)\s*$"),
    "spec_decode_accepted_tokens": re.compile(r"^(?:Accepted tokens|num_accepted_tokens):\s+(\d+)\s*$"),
    "completed": re.compile(r"^Successful requests:\s+(\d+)\s*$"),
    "total_input_tokens": re.compile(r"^Total input tokens:\s+(\d+)\s*$"),
    "total_output_tokens": re.compile(r"^(?:Total generated tokens|total_num_output_tokens):\s+(\d+)\s*$"),
    "max_concurrency": re.compile(r"^Maximum request concurrency:\s+(\d+)\s*$"),
}
THROUGHPUT = re.compile(r"(?m)^Output token throughput \(tok/s\):\s+(\d+(?:\.\d+)?)\s*$")  # SGLang's line, too
# Upper bounds of the requests that ran at once: SGLang's mean, the client's limit, and the number of all requests.
LOAD = {
    "concurrency": re.compile(r"^Concurrency:\s+(\d+(?:\.\d+)?)\s*$"),
    "max_concurrency": VLLM_TEXT["max_concurrency"],
    "completed": VLLM_TEXT["completed"],
}
VLLM_POSITION = re.compile(r"^\s*(?:Position|acceptance at token) (\d+):\s+(\d+\.\d+)\s*$")
VLLM_INVALID = "give what `vllm bench serve` or spec_decode.py prints, or the former's --save-result"


def read_vllm(paths: Sequence[Path]) -> ImportedRecords:
    """Read what `vllm bench serve` prints at the end of a run, or its JSON."""
    skipped = Skipped()
    if _is_json(paths[0]):
        records = json_records(paths, skipped, invalid=VLLM_INVALID)
        if len(records) != 1:
            raise InputError(f"{paths[0]} holds {len(records)} benchmarks; {ONE_BENCHMARK}")
        name, record = records[0]
        if "spec_decode_num_drafts" not in record:
            raise InputError(f"{name} is of a server without speculation, or of before it was counted; {VLLM_INVALID}")
        result: Any = checked(record, name, VllmResult, invalid=VLLM_INVALID)
        shares = [rates.Printed(rate, 1e-9) for rate in result["spec_decode_per_position_acceptance_rates"]]
        return _of_vllm(result, shares, skipped)
    numbers: dict[str, Any] = {}
    shares = []
    for line in log_lines(paths, skipped):
        if match := THROUGHPUT.match(line):
            numbers["output_throughput"] = float(match[1])
        for key, pattern in VLLM_TEXT.items():
            if match := pattern.match(line):
                if key in numbers and key.startswith("spec_"):
                    raise InputError(f"{paths[0]} holds several benchmarks; {ONE_BENCHMARK}")
                numbers[key] = count(match[1], key)
        if match := VLLM_POSITION.match(line):
            if count(match[1], "position") != len(shares):
                raise InputError(f"{paths[0]} holds several benchmarks, or a part of one; {ONE_BENCHMARK}")
            printed, scale = rates.Printed.of(match[2]), 100 if "Position" in line else 1
            shares.append(rates.Printed(printed.value / scale, printed.half / scale))
    if sum(key.startswith("spec_") for key in numbers) < 3 or not shares:
        raise InputError(f"{paths[0]} lacks the part 'Speculative Decoding' of vllm bench serve; give its whole output")
    return _of_vllm(numbers, shares, skipped)


def _of_vllm(result: Mapping[str, Any], shares: Sequence[rates.Printed], skipped: Skipped) -> ImportedRecords:
    keys = ("num_drafts", "draft_tokens", "accepted_tokens")
    rounds, drafted, accepted = (count(result[f"spec_decode_{key}"], key) for key in keys)
    counted = rates.counts_of_rates(shares, rounds, accepted)
    if counted is None:
        raise InputError(f"acceptance by position does not fit {accepted:,} accepted tokens; {ONE_BENCHMARK}")
    counters, notes = rates.sum_of_parts([rates.Part(rounds, drafted, counted, 0)], DETAILED)
    requests, output = result.get("completed"), result.get("total_output_tokens")
    setup = Setup(
        model=result.get("model_id", ""),
        draft_tokens=len(shares),
        running=min(result.get("max_concurrency") or 0, requests or MOST_COUNT) or None,
        tokens_per_s=result.get("output_throughput") or None,
        context=_context(result.get("total_input_tokens"), output, requests),
    )
    plain = None
    if output:
        beyond = output - (requests or 0) - rounds - accepted
        plain = beyond if beyond > CLIENTS_ERROR * output else 0
    return ImportedRecords(
        counters,
        "vllm",
        requests=requests,
        output_tokens=(output,) if output else None,
        notes=tuple(notes),
        skipped=skipped,
        plain_steps=plain,
        setup=setup,
    )


def _context(prompts: float | None, output: float | None, requests: float | None) -> int | None:
    """Mean cached tokens of a request: its prompt and half of its output."""
    return round((prompts + output / 2) / requests) if prompts and output and requests else None


SGLANG_TEXT = {
    "accept_length": re.compile(r"^\s*(?:Average )?Accept length:\s+(\d+(?:\.\d+)?)\s*$"),
    "passes": re.compile(r"^Spec verify ct:\s+(\d+)\s*$"),
    "total_output_tokens": re.compile(r"^(?:Total generated tokens|Output tokens):\s+(\d+)\s*$"),
    "total_input_tokens": re.compile(r"^Total input tokens:\s+(\d+)\s*$"),
    "completed": re.compile(r"^(?:Successful requests|Num prompts|Number of questions):\s+(\d+)\s*$"),
    "concurrency": re.compile(r"^Concurrency:\s+(\d+(?:\.\d+)?)\s*$"),
    "output_throughput": THROUGHPUT,
}
SGLANG_INVALID = "give what SGLang's bench_serving prints or writes, with 'Accept length'"


def read_sglang(paths: Sequence[Path]) -> ImportedRecords:
    """Read SGLang's bench_serving as text or JSON Lines, and z-lab's script around it."""
    skipped = Skipped()
    if _is_json(paths[0]):
        records = json_records(paths, skipped, invalid=SGLANG_INVALID)
        if any("internal_states" in record for _, record in records):
            return _of_server_info(records[0][1], paths[0], skipped)
        rows = [record for _, record in records if record.get("accept_length")]
    else:
        rows = [{}]
        for line in log_lines(paths, skipped):
            for key, pattern in SGLANG_TEXT.items():
                if match := pattern.match(line):
                    if key in rows[-1]:  # the next benchmark begins
                        rows.append({})
                    rows[-1][key] = float(match[1])
        rows = [row for row in rows if "accept_length" in row]
    if not rows:
        raise InputError(f"{paths[0]} has no 'Accept length' of a speculative run; {SGLANG_INVALID}")
    passes, output, requests, lengths, running, speeds, prompts = [], [], [], [], [], [], []
    for row in rows:
        numbers = {
            key: checked(row[key], f"{paths[0]}: {key}", float, invalid=SGLANG_INVALID)
            for key in SGLANG_TEXT
            if row.get(key) is not None
        }
        lengths.append(numbers["accept_length"])
        running.append(numbers.get("concurrency"))
        speeds.append(numbers.get("output_throughput"))
        prompts.append(numbers.get("total_input_tokens", 0.0))
        passes.append(count(numbers.get("passes", 0), "Spec verify ct"))
        output.append(count(numbers.get("total_output_tokens", 0), "output tokens"))
        requests.append(count(numbers.get("completed", 0), "requests"))
    if sum(passes) > sum(output) > 0:
        raise InputError(f"{paths[0]}: {sum(passes):,} passes put out {sum(output):,} tokens; {ONE_BENCHMARK}")
    notes = [f"benchmark {i}: acceptance length {length:.2f}" for i, length in enumerate(lengths, start=1)]
    return ImportedRecords(
        None,
        SGLANG,
        requests=sum(requests) if all(requests) else None,
        output_tokens=(sum(output),) if all(output) else None,
        sums=(sum(passes) if all(passes) else None, None, None),
        averages={LENGTH: float(np.average(lengths, weights=output if all(output) else None))},
        notes=tuple(notes) if len(rows) > 1 else (),
        skipped=skipped,
        instead=SGLANG_INSTEAD,
        setup=Setup(
            running=running[0] if len(set(running)) == 1 else None,
            tokens_per_s=speeds[0] if len(speeds) == 1 else None,
            context=_context(sum(prompts), sum(output), sum(requests)) if all(prompts) else None,
        ),
    )


class State(TypedDict):
    """State of one of SGLang's schedulers, averaged since the server's start."""

    avg_spec_accept_length: NotRequired[float | None]


class ServerInfo(TypedDict):
    """The fields of SGLang's /server_info that are read."""

    internal_states: list[State]
    model_path: NotRequired[str | None]
    tp_size: NotRequired[int | None]
    quantization: NotRequired[str | None]
    kv_cache_dtype: NotRequired[str | None]
    speculative_draft_model_path: NotRequired[str | None]
    speculative_algorithm: NotRequired[str | None]
    speculative_num_steps: NotRequired[int | None]
    speculative_eagle_topk: NotRequired[int | None]
    speculative_num_draft_tokens: NotRequired[int | None]


def _of_server_info(record: Mapping[str, Any], path: Path, skipped: Skipped) -> ImportedRecords:
    """Read the mean acceptance length since the server's start, and the server's settings."""
    info: ServerInfo = checked(record, str(path), ServerInfo, invalid="give SGLang's /server_info")
    lengths = [length for state in info["internal_states"] if (length := state.get("avg_spec_accept_length"))]
    if not lengths:
        raise InputError(
            f"{path}: the server has no avg_spec_accept_length; send requests to a speculative server first"
        )
    arguments: Any = info
    setup, trees = setup_of(arguments)
    return ImportedRecords(
        None,
        SGLANG,
        averages={LENGTH: float(np.mean(lengths))},
        skipped=skipped,
        instead=CHAIN if trees else SGLANG_INSTEAD,
        trees=trees,
        setup=setup,
    )


class Throughput(NamedTuple):
    """Output tokens per second of all requests together, and how many ran at once; None if unknown."""

    tokens_per_s: float
    running: float | None


def read_throughput(path: Path) -> Throughput:
    """Read the throughput of a vLLM, SGLang or GuideLLM benchmark, with or without speculation."""
    invalid = "give the result of a single benchmark of vLLM, SGLang or GuideLLM, or --baseline-tokens-per-second"
    skipped = Skipped()
    if _is_json(path):
        records = [record for _, record in json_records([path], skipped, invalid=invalid)]
        runs = records[0].get("benchmarks") if len(records) == 1 else None
        columns: list[list[Any]] = [[record.get(name) for record in records] for name in ("output_throughput", *LOAD)]
        if isinstance(runs, list):
            names = "output_tokens_per_second", "request_concurrency"
            columns = [[_at(run, "metrics", name, "successful", "mean") for run in runs] for name in names]
    else:
        lines = [*log_lines([path], skipped)]
        forms = (THROUGHPUT, *LOAD.values())
        columns = [[float(match[1]) for line in lines if (match := form.match(line))] for form in forms]
    speeds, *loads = columns
    if len(speeds) != 1 or not _is_positive(speeds[0]):
        raise InputError(f"{path} has no output throughput, or several; {invalid}")
    most = [float(load[0]) if load and _is_positive(load[0]) else np.inf for load in loads]
    return Throughput(float(speeds[0]), min(most) if min(most[:2]) < np.inf else None)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < np.inf


def _at(document: Any, *keys: str) -> Any:
    """Look a value up in nested JSON objects; None if a key is missing."""
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    return document


def _is_json(path: Path) -> bool:
    """Whether a file begins like JSON."""
    if not path.is_file():
        raise InputError(f"{path} does not exist; give the result of a benchmark")
    with path.open("rb") as file:
        return file.read(2**16).lstrip()[:1] in (b"{", b"[")
