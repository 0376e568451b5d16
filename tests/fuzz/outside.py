"""Readers of what other programs wrote: servers' responses and benchmarks, dense recordings, drafters, GGUF models."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np

from specsim.io.json import parse_json
from specsim.servers.benchmark_files import as_vllm_bench
from specsim.servers.doctor import doctor
from specsim.servers.document import BASELINE, SPECULATIVE, Arm, Bench, Request, ServerFacts, read_bench
from tests.fuzz import mutate
from tests.fuzz.reader import JSON, OTHER, Reader, json_file
from tests.support import ROOT

RECORDED = ROOT / "tests" / "specsim" / "servers" / "recorded"
PAGES = {"version": "/version", "props": "/props", "server_info": "/server_info", "models": "/v1/models"}
METRICS, STREAM = "metrics", "stream"
ROW = np.dtype([(name, "<i4") for name in ("request", "position", "token")] + [("draft", "<i4", 2)] + [
    (name, "<f4", 2) for name in ("prob", "entropy_nats", "top10_confidence")
])  # fmt: skip
FACTS = {
    "name": "vllm", "version": "0.32.0", "runner": "V1", "method": "draft_model", "target": "t", "drafter": "d",
    "drafter_facts": {}, "vocabulary": 97, "eos_token_id": 92, "dtype": "float32", "device": "cpu",
    "max_num_batched_tokens": 2048, "max_num_seqs": 3, "depth": 2,
}  # fmt: skip


def small_bench() -> Bench:
    """Make a benchmark of two requests to each of two servers."""
    fast = [Request(f"p{i}", 21, 9, 0.02, 0.1 + 0.01 * i, "stop", 5, 0, 8, 16, 12) for i in range(2)]
    slow = [Request(f"p{i}", 21, 21, 0.02, 0.2 + 0.01 * i, "stop", 5, 0) for i in range(2)]
    server = ServerFacts("http://a", "vllm", "1", "target", 2, "eagle")
    arms = [Arm(SPECULATIVE, 1, 0.25, fast, [16, 16], [14, 10]), Arm(BASELINE, 1, 0.45, slow)]
    return Bench(server, ServerFacts("http://b", "vllm", "1", "target"), arms, "prompts", "2026-11-26")


def use_bench(path: Path) -> None:
    checkup = doctor(read_bench(path))
    parse_json(json.dumps(checkup.as_dict()), "the diagnosis", invalid="")


def use_benchmark(path: Path) -> None:
    parse_json(json.dumps(doctor(benchmark=path).as_dict()), "the diagnosis", invalid="")


def write_responses(engine: str) -> Callable[[Path], None]:
    """Write a file for each page of a recorded server, its metrics and its stream."""

    def write(path: Path) -> None:
        recording = json.loads((RECORDED / f"{engine}.json").read_text())
        path.mkdir()
        for name, page in PAGES.items():
            (path / name).write_text(json.dumps(recording["pages"].get(page)))
        (path / METRICS).write_text(recording["metrics"][0])
        (path / STREAM).write_text("\n\n".join(recording["stream"].split("\n\n")[-6:]))  # the counts come last

    return write


def use_responses(path: Path) -> None:
    """Recognise a server that answers so, stream a response from it and read its counters."""
    import httpx2

    from specsim.engines.import_records import read_counts
    from specsim.servers.client import recognise
    from specsim.servers.document import Sampling
    from specsim.servers.prompts import Prompt

    def answer(request: httpx2.Request) -> httpx2.Response:
        names = {page: name for name, page in PAGES.items()} | {"/metrics": METRICS, "/v1/completions": STREAM}
        body = (path / names[request.url.path]).read_bytes()
        return httpx2.Response(404 if body == b"null" else 200, content=body)

    async def ask() -> None:
        transport = httpx2.MockTransport(answer)
        async with httpx2.AsyncClient(base_url="http://server", transport=transport) as client:
            server = await recognise(client, "http://server", Sampling(8, 0.0, 0))
            request, _ = await server.ask(Prompt("a", "text"))
            assert request.output_tokens >= 0 and request.decode_s >= 0
            (path / "counters").write_text(await server.metrics())

    asyncio.run(ask())
    read_counts(path / "counters")


def of_stream(content: bytes, rng: Random) -> bytes:
    """Change lines, or the JSON of an event."""
    if rng.random() < 0.4:
        return mutate.of_log(content, rng)
    events = content.split(b"data: ")
    place = rng.choice([number for number, event in enumerate(events) if event.startswith(b"{")])
    events[place] = mutate.of_json(events[place], rng) + b"\n\n"
    return b"data: ".join(events)


def write_dense(path: Path) -> None:
    path.mkdir()
    (path / "engine.json").write_text(json.dumps(FACTS))
    request = {"prompt_tokens": [5, 6], "max_output_tokens": 9, "temperature": 0.0, "forced_tokens": None}
    lines = (json.dumps({"request": number, "id": f"r{number}", **request}) for number in range(2))
    (path / "requests.jsonl").write_text("".join(f"{line}\n" for line in lines))
    rows = [(r, t, 7 + t, (8 + t, 3), (0.9, 0.4), (0.3, 1.2), (0.9, 0.5)) for t in range(1, 5) for r in range(2)]
    np.save(path / "drafts.npy", np.array(rows, dtype=ROW))


def use_dense(path: Path) -> None:
    from tests.fuzz.readers import use_import

    use_import("vllm-dense")(path)


def of_rows(content: bytes, rng: Random) -> bytes:
    """Change bytes, or a number of a row."""
    if rng.random() < 0.4:
        return mutate.of_bytes(content, rng)
    place = len(content) - 4 * rng.randrange(1, ROW.itemsize * 8 // 4)
    number = rng.choice((-1, -5, 96, 97, 2**31 - 1)), rng.choice((1.5, -0.5, 1e30, float("nan"), float("inf")))
    new = np.int32(number[0]).tobytes() if rng.random() < 0.5 else np.float32(number[1]).tobytes()
    return content[:place] + new + content[place + 4 :]


def write_published(name: str, weights: str = "model.safetensors") -> Callable[[Path], None]:
    """Write a drafter as another library does, pickled where the weights' file says so."""

    def write(path: Path) -> None:
        import torch
        from safetensors.torch import load_file

        from tests.support.published import layouts
        from tests.support.published import write as write_layout

        write_layout(layouts()[name], path)
        if weights != "model.safetensors":
            torch.save(load_file(path / "model.safetensors"), path / weights)
            (path / "model.safetensors").unlink()

    return write


def write_medusa(path: Path) -> None:
    import torch

    path.mkdir()
    blocks = {f"{k}.0.linear.weight": torch.ones(32, 32) for k in range(2)}
    torch.save({**blocks, **{f"{k}.1.weight": torch.ones(97, 32) for k in range(2)}}, path / "medusa_lm_head.pt")


def use_published(path: Path) -> None:
    from realrun.pairs.drafter_files import load_drafter
    from tests.support.split_targets import target_of

    load_drafter(path, target_of("llama"))


def write_gguf(path: Path) -> None:
    """Write a model of two layers with a vocabulary of text."""
    from unittest import mock

    import torch

    from realrun.engines import gguf_file
    from tests.realrun.pairs.test_gguf_models import add_vocabulary
    from tests.support.tiny import tiny_model

    with mock.patch.object(gguf_file, "_add_vocabulary", add_vocabulary):
        gguf_file.write_gguf(tiny_model(2, seed=5, dtype=torch.float32), [0], path)


def use_gguf(path: Path) -> None:
    from realrun.pairs.gguf_models import dequantise

    folder = path.with_name("dequantised")
    dequantise(path, folder)
    shutil.rmtree(folder)


def of_header(content: bytes, rng: Random) -> bytes:
    """Change bytes of the header, or a number of it."""
    end = content.index(b"output.weight") if b"output.weight" in content else len(content) // 4
    return mutate.of_bytes(content[:end], rng) + content[end:]


def servers() -> dict[str, Reader]:
    readers = {
        "bench.json": Reader(JSON, json_file(small_bench().as_dict()), use_bench, mutate.of_json),
        "vllm bench, detailed": Reader(
            JSON, json_file(as_vllm_bench(small_bench().arms[0], "t")), use_benchmark, mutate.of_json
        ),
    }
    for engine, page in (("vllm", "version"), ("llamacpp", "props")):
        for file, how in (
            (page, mutate.of_json),
            ("models", mutate.of_json),
            (METRICS, mutate.of_log),
            (STREAM, of_stream),
        ):
            write = write_responses(engine)
            readers[f"server, {engine}, {file}"] = Reader(OTHER, write, use_responses, how, files=(file,))
    return readers


SERVERS = servers()
DENSE = {
    f"vllm-dense, {file}": Reader(OTHER, write_dense, use_dense, how, files=(file,))
    for file, how in (
        ("engine.json", mutate.of_json),
        ("requests.jsonl", mutate.of_json_lines),
        ("drafts.npy", of_rows),
    )
}
CONFIG, WEIGHTS, PICKLED = "config.json", "model.safetensors", "pytorch_model.bin"
MODELS = {
    **{
        f"published, {name}, {file}": Reader(OTHER, write_published(name), use_published, how, files=(file,))
        for name in ("specforge-eagle3", "speculators-peagle", "specforge-dspark")
        for file, how in ((CONFIG, mutate.of_json), (WEIGHTS, mutate.of_json_header))
    },
    "published, pickled": Reader(
        OTHER, write_published("specforge-eagle3", PICKLED), use_published, mutate.of_zip, files=(PICKLED,)
    ),
    "published, MEDUSA": Reader(OTHER, write_medusa, use_published, mutate.of_zip, files=("medusa_lm_head.pt",)),
    "GGUF": Reader(OTHER, write_gguf, use_gguf, of_header),
}
