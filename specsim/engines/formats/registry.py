"""What can be imported, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from specsim.engines.formats import (
    benchmarks,
    llamacpp,
    prometheus,
    requests,
    sglang,
    simulators,
    specdecode_bench,
    tensorrt_llm,
    vllm_log,
)
from specsim.engines.formats.imported import Imported
from specsim.errors import InputError


class Format(NamedTuple):
    """How files of a kind are read, and what they are."""

    read: Callable[[Sequence[Path]], Imported]
    doc: str


FORMATS = {
    "llamacpp-log": Format(llamacpp.read_log, "log of llama-server; with LLAMA_TRACE=1 every round"),
    "llamacpp-responses": Format(llamacpp.read_responses, "its responses (timings.draft_n): sums"),
    "vllm-requests": Format(requests.read_vllm, "vLLM's responses with --per-request-spec-decode-metrics"),
    "vllm-log": Format(vllm_log.read_vllm_log, "vLLM's log, of which lines are summed"),
    "vllm-bench": Format(vllm_log.read_vllm_bench, "what vllm bench serve prints"),
    "lmdeploy-log": Format(vllm_log.read_lmdeploy_log, "LMDeploy's log"),
    "prometheus": Format(prometheus.read_prometheus, "a scrape of vLLM, llama.cpp, TensorRT-LLM, LMDeploy; or two"),
    "sglang-responses": Format(sglang.read_responses, "SGLang's responses with meta_info"),
    "sglang-log": Format(sglang.read_log, "SGLang's log: averages"),
    "tensorrt-llm": Format(tensorrt_llm.read_iterations, "TensorRT-LLM's iteration statistics: sums"),
    "accept-lengths": Format(benchmarks.read_accept_lengths, "answers of MEDUSA, EAGLE or Spec-Bench"),
    "specdec-bench": Format(benchmarks.read_specdec_bench, "acceptance_rate.json of specdec_bench"),
    "specdecode-bench": Format(specdecode_bench.read_dense, "SpecDecode-Bench's lengths at every position: a trace"),
    "exllamav3": Format(simulators.read_exllama, "ExLlamaV3's draft_stats"),
    "arctic": Format(simulators.read_arctic, "steps of Arctic Inference's suffix simulator"),
    "inference-lab": Format(simulators.read_inference_lab, "acceptance.parquet of inference-lab"),
    "aiperf": Format(requests.read_aiperf, "AIPerf's SpecDecodeAcceptanceRecord, of any engine"),
}


def read_format(kind: str, paths: Sequence[Path]) -> Imported:
    """What these files hold; InputError where they are of another kind, or there is no such kind."""
    if kind not in FORMATS:
        raise InputError(f"nothing is imported as {kind!r}; choose one of {', '.join(FORMATS)}")
    return FORMATS[kind].read(paths)
