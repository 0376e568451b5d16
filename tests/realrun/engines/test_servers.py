"""`specsim doctor` on real servers of llama.cpp and vLLM with a fault built in; slow, by `nox -s engines`.

Both run on a CPU with the lab's pair, the target with identity blocks up to 40 layers. Their times are not a GPU's, so
that causes alone are checked, by ratios of arms that take turns.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from realrun.engines.engine import models_of, save_models
from realrun.engines.gguf_file import write_gguf
from realrun.engines.vllm import ENVIRONMENT, VllmEngine
from realrun.pairs.pair import LAB_DEEP, load_pair
from realrun.pairs.prompts import lab_prompts
from specsim.servers.bench import bench
from specsim.servers.doctor import Checkup, doctor
from specsim.servers.document import Bench

pytestmark = pytest.mark.slow

START_S = 200.0
LLAMACPP = """
import sys, time
sys.path.insert(0, {processes!r})
import xllamacpp
from run_llamacpp import parameters
given = parameters({{"folder": {folder!r}, "context": 512, "threads": 1}}, {k}, 0.0)
given.port = {port}
if {k}:
    given.speculative.draft.mparams.path = {draft!r}
server = xllamacpp.Server(given)
while True:
    time.sleep(1)
"""
Serve = Callable[[int, str], str]  # K and the name of the draft model, to the address of a server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pair as both engines read it, a draft model of random weights, and prompts."""
    folder, pair = tmp_path_factory.mktemp("models"), load_pair(LAB_DEEP)
    save_models(pair, folder)
    for name, model in models_of(pair):
        write_gguf(model, pair.eos_token_ids, folder / f"{name}.gguf")
    (draft,) = pair.drafter.weights(pair.target)
    torch.manual_seed(0)
    for weights in draft.parameters():
        if weights.ndim > 1:
            torch.nn.init.normal_(weights, std=0.02)
    draft.save_pretrained(folder / "random")
    pair.tokenizer.save_pretrained(folder / "random")
    write_gguf(draft, pair.eos_token_ids, folder / "random.gguf")
    lines = [json.dumps({"prompt": list(map(int, prompt.tokens))}) for prompt in lab_prompts(pair.tokenizer, 48)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


@contextmanager
def running(command: list[str], environment: dict[str, str], port: int, log: Path) -> Iterator[str]:
    """Start a server, wait until it answers, and stop it in the end."""
    url, start = f"http://127.0.0.1:{port}", time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | environment)
    try:
        while True:
            assert process.poll() is None and time.monotonic() < start + START_S, log.read_text()[-2000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1)
                break
            except (urllib.error.URLError, TimeoutError, ConnectionError):
                time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.fixture(scope="module", params=["llamacpp", "vllm"])
def serve(request: pytest.FixtureRequest, folder: Path) -> Iterator[Serve]:
    """Start servers of an engine by K and draft model, each once."""
    urls: dict[tuple[int, str], str] = {}
    if request.param == "llamacpp":
        pytest.importorskip("xllamacpp")
    else:
        engine = VllmEngine()
        if not Path(engine.python).is_file():
            pytest.skip(f"{engine.python} is not there")
    with ExitStack() as stack:

        def start(k: int, draft: str) -> str:
            if (k, draft) in urls:
                return urls[k, draft]
            port, log = free_port(), folder / f"{request.param}-{k}-{draft}.log"
            if request.param == "llamacpp":
                processes = str(Path(sys.modules[VllmEngine.__module__].__file__ or "").parent / "processes")
                script = LLAMACPP.format(
                    processes=processes, folder=str(folder), k=k, port=port, draft=f"{folder}/{draft}.gguf"
                )
                command, environment = [sys.executable, "-c", script], {}
            else:
                command = [
                    VllmEngine().python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1",
                    "--port", str(port), "--model", str(folder / "target"), "--dtype", "float32", "--enforce-eager",
                    "--max-model-len", "512", "--max-num-seqs", "8",
                ]  # fmt: skip
                if k:
                    speculation = {"method": "draft_model", "model": str(folder / draft), "num_speculative_tokens": k}
                    command += ["--speculative-config", json.dumps(speculation)]
                    command += ["--per-request-spec-decode-metrics", "detailed"]
                environment = ENVIRONMENT
            urls[k, draft] = stack.enter_context(running(command, environment, port, log))
            return urls[k, draft]

        yield start


def measure(serve: Serve, folder: Path, k: int, draft: str) -> Bench:
    concurrency = (1,) if "llamacpp" in serve(k, draft) else (1, 4)
    return bench(
        serve(k, draft),
        baseline=serve(0, "none"),
        prompts=folder / "prompts.jsonl",
        concurrency=concurrency,
        requests=12,
        max_tokens=64,
        minutes=2,
    )


def names(checkup: Checkup) -> list[str]:
    return [cause.name for cause in checkup.causes]


@pytest.mark.parametrize(
    ("k", "draft", "cause"),
    [
        (3, "random", "the drafter does not fit the target"),
        (12, "draft", "K = 12 is too long"),
        (3, "target", "the drafter is slow"),
    ],
)
def test_the_fault_is_the_first_cause(serve: Serve, folder: Path, k: int, draft: str, cause: str) -> None:
    assert names(doctor(measure(serve, folder, k, draft)))[:1] == [cause]
