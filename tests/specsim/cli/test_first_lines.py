"""The first lines that people type, in the words of public threads: 18 are answered, 2 end in the right question."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.specsim.cost.test_names import CHECKPOINTS
from tests.support.commands import assert_refused, call, json_of

LOG = (
    "INFO 11-05 10:00:10 [metrics.py:100] SpecDecoding metrics: Mean acceptance length: 2.60, Accepted throughput: "
    "160.00 tokens/s, Drafted throughput: 300.00 tokens/s, Accepted: 1600 tokens, Drafted: 3000 tokens, Per-position "
    "acceptance rate: 0.800, 0.500, 0.300, Avg Draft acceptance rate: 53.3%\n"
)
COUNTS = {"drafted": [1000] * 5, "accepted": [700, 490, 343, 240, 168]}
# What is typed behind `specsim`, and a word of the answer.
ANSWERED = [
    (["advise", "vllm.log", "--gpu", "H100", "--target", "meta-llama/Llama-3.1-8B-Instruct", "--drafter", "EAGLE3",
      "--engine", "vLLM"], '"eagle3"'),
    (["advise", "vllm.log", "--gpu", "NVIDIA H100 80GB HBM3", "--target", "Qwen/Qwen3-32B-FP8", "--drafter", "eagle-3",
      "--engine", "vllm"], "weights float8"),
    (["advise", "k.json", "--gpu", "rtx4090", "--target", "Qwen/Qwen3-8B", "--weights", "fp8", "--drafter",
      "Qwen/Qwen3-0.6B", "--engine", "SGLang"], "STANDALONE"),
    (["advise", "k.json", "--gpu", "NVIDIA GeForce RTX 3090", "--target", "Qwen/Qwen3.6-27B", "--weights", "int4",
      "--drafter", "mtp", "--engine", "vllm"], '"mtp"'),
    (["advise", "k.json", "--gpu", "RTX 3090", "--target", "unsloth/Qwen3.8-27B-GGUF:Q4_K_M", "--drafter", "draft-mtp",
      "--engine", "llama.cpp"], "--spec-draft-n-max"),
    (["advise", "vllm.log", "--gpu", "h200", "--target", "openai/gpt-oss-120b", "--drafter", "eagle3", "--engine",
      "vllm"], "experts mxfp4"),
    (["advise", "vllm.log", "--gpu", "H200", "--tp", "8", "--target", "deepseek-ai/DeepSeek-V3.2", "--drafter",
      "deepseek_mtp", "--engine", "vllm"], "weights float8"),
    (["advise", "vllm.log", "--gpu", "B200", "--tp", "8", "--target", "moonshotai/Kimi-K2.5", "--drafter", "EAGLE3",
      "--engine", "vllm"], "experts int4-g32"),
    (["advise", "vllm.log", "--gpu", "AMD Instinct MI355X", "--target", "Qwen/Qwen3-Next-80B-A3B-Instruct-FP8",
      "--drafter", "qwen3_next_mtp", "--engine", "sglang"], "NEXTN"),
    (["advise", "k.json", "--gpu", "H20", "--tp", "2", "--target", "MiniMaxAI/MiniMax-M2.5-NVFP4", "--drafter",
      "eagle3", "--engine", "trtllm"], "max_draft_len"),
    (["advise", "k.json", "--gpu", "rtx5090", "--target", "Qwen/Qwen3-8B", "--drafter", "drafter_dflash.json",
      "--engine", "tensorrt_llm"], "max_draft_len"),
    (["advise", "k.json", "--gpu", "h100", "--target", "llama3.1:8b", "--drafter", "drafter_eagle3.json", "--engine",
      "vllm"], '"eagle3"'),
    (["advise", "k.json", "--gpu", "NVIDIA A100-SXM4-80GB", "--target", "target_awq.json", "--drafter", "eagle3",
      "--engine", "vllm"], "weights int4"),
    (["advise", "k.json", "--gpu", "L40S", "--target", "Qwen/Qwen3-8B-AWQ", "--drafter", "z-lab/Qwen3-8B-DFlash-b16"],
     "weights int4"),
    (["cost", "show", "--gpu", "NVIDIA H100 PCIe", "--target", "google/gemma-2-9b-it", "--drafter", "ngram"], "decode"),
    (["cost", "show", "--gpu", "h100", "--target", "RedHatAI/Qwen3-32B-FP8-dynamic", "--drafter", "dspark", "--engine",
      "SGLang"], "weights float8"),
    (["export", "vLLM", "--k", "3"], "num_speculative_tokens"),
    (["explain", "acceptance-rate", "--engine", "SGLang"], "accept rate"),
]  # fmt: skip
ASKED = [
    (["advise", "vllm.log", "--gpu", "TPU-v6e", "--target", "deepseek-ai/DeepSeek-V4-Flash", "--drafter", "dspark",
      "--engine", "vllm"], ["unknown GPU 'TPU-v6e'", "nearest: ", "memory_bytes_s"]),
    (["advise", "vllm.log", "--gpu", "H100", "--target", "Qwen/Qwen3-8B", "--drafter", "draft_model", "--engine",
      "vllm"], ["which model drafts?"]),
]  # fmt: skip


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(CHECKPOINTS, tmp_path, dirs_exist_ok=True)
    (tmp_path / "vllm.log").write_text(LOG)
    (tmp_path / "k.json").write_text(json.dumps(COUNTS))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("line", "answer"), ANSWERED, ids=lambda value: " ".join(value)[:60])
def test_a_first_line_is_answered(line: list[str], answer: str) -> None:
    shown = call("specsim", *line)
    if answer not in " ".join(shown.out.split()):
        document = json.dumps(json_of(call("specsim", *line, "--json")), ensure_ascii=False)
        assert answer in document.replace('\\"', '"'), shown.out


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("line", "question"), ASKED, ids=lambda value: " ".join(value)[:60])
def test_a_first_line_ends_in_the_right_question(line: list[str], question: list[str]) -> None:
    assert_refused(call("specsim", *line), *question)
