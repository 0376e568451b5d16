"""Results of `vllm bench serve` with every request, read as an arm and written from one."""

from __future__ import annotations

from hashlib import sha256
from itertools import accumulate
from os import PathLike
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from specsim.io.errors import InputError
from specsim.io.json import read_json
from specsim.servers.document import Arm, ArmName, Clients, Count, Duration, Request, Seconds, arrived_at_once

INVALID = "give the result of `vllm bench serve --save-result --save-detailed`"


class VllmBench(TypedDict):
    """The keys of a result that are read; times in seconds."""

    max_concurrency: Clients | None
    duration: Duration
    input_lens: list[Count]
    output_lens: list[Count]
    ttfts: list[Seconds]
    itls: list[list[Seconds]]
    generated_texts: NotRequired[list[str]]


def read_benchmark(path: str | PathLike[str], name: ArmName) -> Arm:
    """Read a result of `vllm bench serve` as the arm of this name; InputError for another file.

    Requests with the same output and input length are taken to repeat a prompt.
    """
    where = str(path)
    result: VllmBench = read_json(Path(path), where, VllmBench, missing=INVALID, invalid=INVALID, max_bytes=2**28)
    inputs, outputs, ttfts, itls = result["input_lens"], result["output_lens"], result["ttfts"], result["itls"]
    count = len(itls)
    texts = result.get("generated_texts") or [str(number) for number in range(count)]
    if {len(inputs), len(outputs), len(ttfts), len(texts)} != {count}:
        raise InputError(f"{where}: its lists have different lengths; {INVALID}")
    requests = [
        Request(
            sha256(f"{tokens} {text}".encode()).hexdigest()[:12],
            output,
            len(itl) + 1,
            ttft,
            sum(itl),
            prompt_tokens=tokens,
            at_once=arrived_at_once([*accumulate(itl, initial=ttft)], 0.0),
        )
        for tokens, output, ttft, itl, text in zip(inputs, outputs, ttfts, itls, texts, strict=True)
        if output > 1
    ]
    if not requests:
        raise InputError(f"{where} has no request of more than a token; {INVALID}")
    concurrency = result["max_concurrency"] or count
    return Arm(name, concurrency, result["duration"], requests)


def as_vllm_bench(arm: Arm, model: str) -> dict[str, Any]:
    """The keys of a result of `vllm bench serve` with every request.

    The time between streamed pieces is their mean, as pieces' own times are not kept.
    """
    requests = arm.requests
    itls = [[r.decode_s / (r.deltas - 1)] * (r.deltas - 1) if r.deltas > 1 else [] for r in requests]
    return {
        "backend": "openai",
        "label": arm.name,
        "model_id": model,
        "num_prompts": len(requests),
        "max_concurrency": arm.concurrency,
        "duration": arm.clients_s,
        "completed": len(requests),
        "total_input_tokens": sum(request.prompt_tokens or 0 for request in requests),
        "total_output_tokens": sum(request.output_tokens for request in requests),
        "output_throughput": arm.tokens_per_s,
        "mean_tpot_ms": 1e3 * sum(r.decode_s / (r.output_tokens - 1) for r in requests) / len(requests),
        "input_lens": [request.prompt_tokens or 0 for request in requests],
        "output_lens": [request.output_tokens for request in requests],
        "ttfts": [request.ttft_s for request in requests],
        "itls": itls,
    }
