"""What can be imported, by name, and which real files each reader was tested on. Readers are loaded when they are used.

Help and documentation are written from this table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from specsim.errors import InputError

if TYPE_CHECKING:
    from specsim.engines.formats.imported import Imported

UNTESTED = "not yet tested on a file that the engine wrote"


class Format(NamedTuple):
    """How files of a kind are read.

    reader : module of this folder, and its function
    doc : what the files are
    tested : which output of the real program the reader was tested on; "" for none
    """

    reader: str
    doc: str
    tested: str

    def read(self, paths: Sequence[Path]) -> Imported:
        module, _, name = self.reader.partition(".")
        reader: Callable[[Sequence[Path]], Imported] = getattr(import_module(f"{__package__}.{module}"), name)
        return reader(paths)


FORMATS = {
    "llamacpp-log": Format(
        "llamacpp.read_log",
        "log of llama-server; with LLAMA_TRACE=1 every round",
        "logs of llama.cpp 2026.10; lines of 2025 and June 2026",
    ),
    "llamacpp-responses": Format(
        "llamacpp.read_responses", "llama-server's responses (timings): sums", "responses of llama.cpp 2026.10 and 2025"
    ),
    "vllm-requests": Format(
        "requests.read_vllm",
        "responses with --per-request-spec-decode-metrics",
        "responses of vLLM 0.32",
    ),
    "vllm-log": Format(
        "vllm_log.read_vllm_log", "vLLM's log; its lines are summed", "logs of vLLM 0.32; lines of 0.5, 0.8 and 0.10"
    ),
    "vllm-bench": Format("vllm_log.read_vllm_bench", "what `vllm bench serve` prints", "four printed results of 2026"),
    "lmdeploy-log": Format(
        "vllm_log.read_lmdeploy_log", "LMDeploy's log", "a line that its logger printed (August 2026)"
    ),
    "prometheus": Format(
        "prometheus.read_prometheus",
        "scrapes of vLLM, llama.cpp, TensorRT-LLM or LMDeploy",
        "scrapes of vLLM 0.32 and llama.cpp 2026.10; none of TensorRT-LLM and LMDeploy",
    ),
    "sglang-responses": Format(
        "sglang.read_responses",
        "SGLang's responses with meta_info or sglext",
        "responses of November 2025 and August 2026",
    ),
    "sglang-log": Format("sglang.read_log", "SGLang's log: averages", "lines of May, October and December 2025"),
    "tensorrt-llm": Format("tensorrt_llm.read_iterations", "TensorRT-LLM's iteration statistics: sums", ""),
    "accept-lengths": Format(
        "benchmarks.read_accept_lengths",
        "answers of Spec-Bench (rounds) or EAGLE (sums)",
        "EAGLE's published answers; none of Spec-Bench",
    ),
    "specdec-bench": Format(
        "benchmarks.read_specdec_bench",
        "acceptance_rate.json of specdec_bench",
        "a file that its own metric wrote (2026)",
    ),
    "specdecode-bench": Format(
        "specdecode_bench.read_dense",
        "SpecDecode-Bench's lengths at every position: a trace",
        "all four published files (1,410 requests)",
    ),
    "inferencex": Format(
        "benchmarks.read_inferencex", "InferenceX's mean acceptance lengths by K", "all nine published tables"
    ),
    "exllamav3": Format("simulators.read_exllama", "ExLlamaV3's draft_stats", ""),
    "arctic": Format(
        "simulators.read_arctic", "steps of Arctic Inference's suffix simulator", "tables that it wrote (June 2026)"
    ),
    "inference-lab": Format(
        "simulators.read_inference_lab", "acceptance.parquet of inference-lab", "tables that its own writer made (2026)"
    ),
    "aiperf": Format(
        "requests.read_aiperf",
        "AIPerf's SpecDecodeAcceptanceRecord, of any engine",
        "a record that its own model wrote (0.13)",
    ),
}


def read_format(kind: str, paths: Sequence[Path]) -> Imported:
    """What these files hold; InputError where they are of another kind, or there is no such kind."""
    if kind not in FORMATS:
        raise InputError(f"nothing is imported as {kind!r}; choose one of {', '.join(FORMATS)}")
    imported = FORMATS[kind].read(paths)
    if FORMATS[kind].tested:
        return imported
    note = f"{kind} is {UNTESTED}; compare these numbers with the engine's own"
    return replace(imported, notes=(*imported.notes, note))


def listed() -> str:
    """The kinds with what they are, a line each; a star marks those without a test on a real file."""
    return "\n".join(f"{kind:19}{' ' if one.tested else '*'} {one.doc}" for kind, one in FORMATS.items())
