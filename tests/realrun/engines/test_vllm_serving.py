"""Slow: recordings of vLLM's server: suffix decoding against the texts, MTP modules against --drafter mtp."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from realrun.decode.sampling import Sampler
from realrun.engines.engine import save_models
from realrun.engines.processes.vllm_recorder import FOLDER, TEXTS
from realrun.engines.vllm import ENVIRONMENT, V1_RUNNER, VllmEngine, read_rounds
from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import Pair, load_pair
from realrun.pairs.prompts import Prompt
from realrun.proposals.recorder import RecordRequest
from specsim.engines.conventions import CONVENTIONS
from specsim.engines.formats.registry import read_format
from specsim.lookup.from_text import TokenText, suffix_trace
from specsim.lookup.suffix import SuffixRule
from specsim.policy.chain.fixed_k import FixedK
from specsim.trace.files import read_trace
from specsim.trace.trace import Trace
from tests.realrun.engines.test_vllm_recording import assert_same
from tests.specsim.engines.test_as_engine import replayed_rounds
from tests.support import ROOT
from tests.support.commands import call
from tests.support.mtp import FAMILIES, checkpoint

pytestmark = pytest.mark.slow
START_S = 150
POINT = "[vllm.general_plugins]\nspecsim = realrun.engines.processes.vllm_recorder:register\n"
Answer = Mapping[str, Any]


@contextmanager
def served(
    vllm: VllmEngine, folder: Path, speculation: Mapping[str, Any], *more: str, **environment: str
) -> Iterator[Any]:
    """`vllm serve` the model in folder/target; gives what answers prompts, as many at once as are given."""
    plugin = folder / "plugin"
    (plugin / "specsim-0.1.dist-info").mkdir(parents=True, exist_ok=True)
    (plugin / "specsim-0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: specsim\nVersion: 0.1\n")
    (plugin / "specsim-0.1.dist-info" / "entry_points.txt").write_text(POINT)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [
        vllm.python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "target"),
        "--dtype", "float32", "--enforce-eager", "--no-async-scheduling", "--no-enable-prefix-caching",
        "--max-model-len", "256",
        "--host", "127.0.0.1", "--port", str(port), "--served-model-name", "target",
        "--per-request-spec-decode-metrics", "detailed", "--speculative-config", json.dumps(speculation), *more,
    ]  # fmt: skip
    path = os.pathsep.join(map(str, (plugin, ROOT)))
    settings = {**os.environ, **ENVIRONMENT, **V1_RUNNER, "PYTHONPATH": path, **environment}
    del settings["VLLM_ENABLE_V1_MULTIPROCESSING"]
    log = (folder / "log.txt").open("w")
    with log, subprocess.Popen(command, env=settings, stdout=log, stderr=log, start_new_session=True) as process:
        try:
            _wait(process, f"http://127.0.0.1:{port}/health", folder / "log.txt")

            def ask(prompt: Sequence[int], tokens: int) -> Answer:
                asked = {
                    "model": "target", "prompt": [*prompt], "max_tokens": tokens, "temperature": 0.0,
                    "ignore_eos": True, "return_token_ids": True,
                }  # fmt: skip
                request = urllib.request.Request(
                    f"http://127.0.0.1:{port}/v1/completions",
                    json.dumps(asked).encode(),
                    {"Content-Type": "application/json"},
                )
                with urllib.request.urlopen(request, timeout=120) as response:
                    answer: Answer = json.load(response)
                return answer

            def answers(prompts: Sequence[Sequence[int]], tokens: int, at_once: int) -> list[Answer]:
                with ThreadPoolExecutor(at_once) as pool:
                    return list(pool.map(lambda prompt: ask(prompt, tokens), prompts))

            yield answers
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def _wait(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    for _ in range(START_S):
        if process.poll() is not None:
            break
        try:
            urllib.request.urlopen(address, timeout=2).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise AssertionError(log.read_text()[-3000:])


def texts_of(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer["choices"][0]["token_ids"] for answer in answers]


def imported(folder: Path) -> Trace:
    result = call("specsim", "import", "vllm-dense", folder, "--out", folder / "trace", "--overwrite")
    assert result.code == 0, result.err
    return read_trace(folder / "trace")


def by_prompt(trace: Trace, prompts: Sequence[Prompt]) -> Trace:
    """The sequences in the order of these prompts, all of which differ."""
    assert trace.prompts is not None
    recorded = [tuple(prompt.tolist()) for prompt in trace.prompts]
    return trace.select([recorded.index(tuple(prompt.tokens)) for prompt in prompts])


def test_a_served_model_records_what_realrun_records(
    vllm: VllmEngine, prompts: list[Prompt], lab_pair32: Pair, tmp_path: Path
) -> None:
    """Six requests at once, of which three are given a text; the server is killed at the end."""
    count, depth = 24, 4
    expected = record(lab_pair32, prompts[:6], RecordSettings(depth, count, Sampler("greedy")))
    texts = [text.tolist() for text in np.split(expected.token, expected.offsets[1:-1])]
    forced = [[*reversed(text)] for text in texts[3:]]  # which the model would not say
    rows = [
        json.dumps({"prompt_tokens": prompt.tokens, "output_tokens": text})
        for prompt, text in zip(prompts[3:6], forced, strict=True)
    ]
    (tmp_path / "texts.jsonl").write_text("\n".join(rows))
    save_models(lab_pair32, tmp_path)
    speculation = {"method": "draft_model", "model": str(tmp_path / "draft"), "num_speculative_tokens": depth}
    named = {FOLDER: str(tmp_path / "out"), TEXTS: str(tmp_path / "texts.jsonl")}
    with served(vllm, tmp_path, speculation, **named) as answers:
        assert texts_of(answers([prompt.tokens for prompt in prompts[:6]], count, 6)) == [*texts[:3], *forced]
    trace = by_prompt(imported(tmp_path / "out"), prompts[:6])
    assert_same(trace.select([0, 1, 2]), expected.select([0, 1, 2]))
    assert trace.token[trace.offsets[3] :].tolist() == [token for text in forced for token in text]
    own = [
        record_forced(lab_pair32, prompt.tokens, text, depth) for prompt, text in zip(prompts[3:6], forced, strict=True)
    ]
    drafts = trace.draft_token[trace.offsets[3] :].reshape(3, count, depth)[:, 1:]
    assert drafts.tolist() == own


@torch.inference_mode()
def record_forced(pair: Pair, prompt: Sequence[int], text: Sequence[int], depth: int) -> list[list[list[int]]]:
    """What the draft model drafts greedily behind each token of a text but the last, by the library."""
    (draft,) = pair.drafter.weights(pair.target)
    drafts = []
    for t in range(1, len(text)):
        tokens = [*prompt, *text[:t]]
        for _ in range(depth):
            tokens.append(int(draft(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
        drafts.append(tokens[-depth:])
    return drafts


VOCABULARY = 12  # of which a random drafter is right at times
Rounds = list[list[tuple[int, int]]]


def run(
    vllm: VllmEngine,
    folder: Path,
    speculation: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    tokens: int,
    batch: int,
) -> tuple[list[list[int]], Trace, Rounds]:
    """Outputs and trace of a recorded run of folder/target, and the rounds of a normal run with the same outputs."""
    job = {
        "folder": str(folder), "prompts": prompts, "max_new_tokens": tokens, "eos_token_ids": [],
        "speculation": speculation, "batch": batch, "context": 256, "temperature": 0,
    }  # fmt: skip
    recorded = vllm.process({**job, "recording": str(folder / "out")}, folder, V1_RUNNER)
    normal = vllm.process(job, folder, V1_RUNNER)
    assert recorded["outputs"] == normal["outputs"]
    trace = read_format("vllm-dense", [folder / "out"]).source
    assert isinstance(trace, Trace)
    trace = replace(trace, meta={**trace.meta, "eos_token_id": None})  # both runs go on behind an end of text
    return (
        recorded["outputs"],
        trace,
        [read_rounds(metrics, number) for number, metrics in enumerate(normal["metrics"])],
    )


def test_suffix_decoding_is_recorded_as_the_texts_have_it(
    vllm: VllmEngine, prompts: list[Prompt], lab_pair32: Pair, tmp_path: Path
) -> None:
    """One request after another, as each draws on those before it; a normal run's rounds are the replay's."""
    if subprocess.run([vllm.python, "-c", "import arctic_inference.suffix_decoding"], capture_output=True).returncode:
        pytest.skip("no arctic-inference beside vLLM")
    count, k = 48, 8
    asked = [prompt.tokens for prompt in (*prompts[:8], prompts[0])]
    save_models(lab_pair32, tmp_path)
    speculation = {"method": "suffix", "num_speculative_tokens": k}
    texts, trace, rounds = run(vllm, tmp_path, speculation, asked, count, 1)
    rows = [TokenText([*prompt], text, "all", count) for prompt, text in zip(asked, texts, strict=True)]
    ours = suffix_trace(rows, SuffixRule(), k)
    assert_same(trace, ours, ())
    assert trace.match_len.max() == k and trace.meta["drafter_facts"] == ours.meta["drafter_facts"]
    assert_rounds(trace, rounds, k, count)


def assert_rounds(trace: Trace, rounds: Sequence[Sequence[tuple[int, int]]], k: int, count: int) -> None:
    """All rounds of a normal run but the last of a sequence, which may accept more than was recorded."""
    expected = replayed_rounds(trace, FixedK(k), count, CONVENTIONS["vllm"])
    assert [row[:-1] for row in rounds] == [[round_[1:] for round_ in row[:-1]] for row in expected]
    assert sum(accepted for row in rounds for _, accepted in row) > 0


# vLLM's attention kernels support no narrower heads.
WIDE = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 256,
}  # fmt: skip


@pytest.mark.parametrize(("name", "sizes"), [("MiMo", {}), ("GLM-4.5", {"head_dim": 64, "moe_intermediate_size": 64})])
def test_mtp_drafts_here_what_it_drafts_in_vllm(
    name: str, sizes: Mapping[str, int], vllm: VllmEngine, tmp_path: Path
) -> None:
    """From one checkpoint, with eight requests at once; the rounds of a run without recording match the replay."""
    count, k, generator = 24, 3, torch.Generator().manual_seed(5)
    checkpoint(FAMILIES[name], tmp_path / "target", torch.float32, **WIDE, **sizes)
    config = tmp_path / "target" / "config.json"
    published = config.read_text()
    config.write_text(published.replace('"mimo"', '"qwen2"'))  # vLLM's transformers does not know MiMo either
    asked = torch.randint(VOCABULARY, (8, 20), generator=generator).tolist()
    speculation = {"method": "mtp", "num_speculative_tokens": k}
    texts, trace, rounds = run(vllm, tmp_path, speculation, asked, count, 8)
    config.write_text(published)
    record_drafts = load_pair(str(tmp_path / "target"), drafter="mtp").make_recorder(Sampler())
    gaps = []
    for sequence, (prompt, text) in enumerate(zip(asked, texts, strict=True)):
        ours = record_drafts(RecordRequest(prompt, text, k, Sampler(), sequence))
        rows = slice(sequence * count + 1, (sequence + 1) * count)  # vLLM does not draft before the first output token
        assert trace.token[rows].tolist() == text[1:]
        assert trace.draft_token[rows].tolist() == ours["draft_token"][1:].tolist()
        gaps.append(np.abs(trace.prob[rows] - ours["prob"][1:]).max())
    print(f"{len(asked) * (count - 1)} positions, largest difference of a probability {max(gaps):.1e}")
    assert max(gaps) < 1e-5
    assert_rounds(trace, rounds, k, count)
