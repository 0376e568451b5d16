"""The formats that can be imported, by name, and the real files on which each reader was tested.

Help and documentation are written from this table. Readers are loaded when they are used.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from specsim.io.errors import InputError

if TYPE_CHECKING:
    from specsim.engines.formats.records import ImportedRecords

UNTESTED = "not yet tested on a file that the engine wrote"


class Format(NamedTuple):
    """A kind of files and its reader.

    reader : module of this folder, and its function
    doc : content of the files
    tested : output of the real program on which the reader was tested; "" for none
    """

    reader: str
    doc: str
    tested: str

    def read(self, paths: Sequence[Path]) -> ImportedRecords:
        module, _, name = self.reader.partition(".")
        reader: Callable[[Sequence[Path]], ImportedRecords] = getattr(import_module(f"{__package__}.{module}"), name)
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
    "vllm-dense": Format(
        "vllm_dense.read_dense",
        "folder that the plugin recorded inside vLLM: a trace",
        "folders that vLLM 0.32 wrote, served and offline",
    ),
    "vllm-bench": Format("vllm_log.read_vllm_bench", "what `vllm bench serve` prints", "four printed results of 2026"),
    "prometheus": Format(
        "prometheus.read_prometheus",
        "scrapes of vLLM, llama.cpp or TensorRT-LLM",
        "scrapes of vLLM 0.32 and llama.cpp 2026.10; none of TensorRT-LLM",
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
    "aiperf": Format(
        "requests.read_aiperf",
        "AIPerf's SpecDecodeAcceptanceRecord, of any engine",
        "a record that its own model wrote (0.13)",
    ),
}


def read_format(kind: str, paths: Sequence[Path]) -> ImportedRecords:
    """Read files of a kind; InputError, which names a file, for an unknown kind and for files of another kind."""
    if kind not in FORMATS:
        close = difflib.get_close_matches(kind, FORMATS, n=1) or [name for name in FORMATS if name.startswith(kind)]
        hint = f"did you mean {close[0]}? " if close else ""
        raise InputError(f"unknown input format {kind!r}; {hint}Formats: {', '.join(FORMATS)}")
    try:
        imported = FORMATS[kind].read(paths)
    except InputError as error:
        if any(str(path) in str(error) for path in paths):
            raise
        raise InputError(f"{', '.join(map(str, paths))}: {error}") from None  # about what the files hold together
    if FORMATS[kind].tested:
        return imported
    note = f"{kind} is {UNTESTED}; compare these numbers with the engine's own"
    return replace(imported, notes=(*imported.notes, note))


def listed() -> str:
    """The kinds with their content, a line each; a star marks those without a test on a real file."""
    return "\n".join(f"{kind:19}{' ' if form.tested else '*'} {form.doc}" for kind, form in FORMATS.items())
