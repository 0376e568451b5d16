"""The formats that can be read, by name: what tells them, and the real files on which each reader was tested.

Help and documentation are written from this table. Readers are loaded when they are used. A file is told by its
content: of the formats whose `mark` it has, the first that can read it.
"""

from __future__ import annotations

import difflib
import re
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
    mark : expression that files of this kind hold
    """

    reader: str
    doc: str
    tested: str
    mark: str = "(?!)"  # matches nothing

    def read(self, paths: Sequence[Path]) -> ImportedRecords:
        module, _, name = self.reader.partition(".")
        reader: Callable[[Sequence[Path]], ImportedRecords] = getattr(import_module(f"{__package__}.{module}"), name)
        return reader(paths)


FORMATS = {
    "llamacpp-log": Format(
        "llamacpp.read_log",
        "log of llama-server; with LLAMA_TRACE=1 every round",
        "logs of llama.cpp 2026.10; lines of 2025 and June 2026",
        mark=r"draft acceptance|statistics\s{1,20}\S{1,60}:? #calls|\| accepted\s{1,20}\d{1,9}/|"
        r"\bpred=\s{0,9}\d+\s{1,9}draft=|n_drafted {0,9}= \d",
    ),
    "llamacpp-responses": Format(
        "llamacpp.read_responses",
        "llama-server's responses (timings): sums",
        "responses of llama.cpp 2026.10 and 2025",
        mark=r'"(?:timings|draft_n)"\s*:',
    ),
    "vllm-requests": Format(
        "requests.read_vllm",
        "responses with --per-request-spec-decode-metrics",
        "responses of vLLM 0.32",
        mark=r'"(?:num_spec_steps|speculative_decoding|spec_decode_metrics)"\s*:',
    ),
    "vllm-log": Format(
        "vllm_log.read_vllm_log",
        "vLLM's log; its lines are summed",
        "logs of vLLM 0.32; lines of 0.8 and 0.10",
        mark=r"SpecDecoding\s{1,20}metrics:",
    ),
    "vllm-dense": Format(
        "vllm_dense.read_dense",
        "folder that the plugin recorded inside vLLM: a trace",
        "folders that vLLM 0.32 wrote, served and offline",
    ),
    "vllm-bench": Format(
        "bench_results.read_vllm",
        "what `vllm bench serve` prints, or its --save-result",
        "four printed results of 2026",
        mark=r'(?m)^(?:Drafts|num_drafts):\s|"spec_decode_\w+"\s*:',
    ),
    "sglang-bench": Format(
        "bench_results.read_sglang",
        "SGLang's bench_serving, z-lab's: averages",
        "",
        mark=r'(?m)^ {0,20}(?:Average )?Accept length:|"(?:avg_spec_)?accept_length"\s*:',
    ),
    "sweep": Format("sweep.read_sweep", "your own table: K, batch, tok/s or TPOT, accept length", "tables by hand"),
    "prometheus": Format(
        "prometheus.read_prometheus",
        "scrapes of vLLM, SGLang, llama.cpp or TensorRT-LLM",
        "scrapes of vLLM 0.32 and llama.cpp 2026.10; none of TensorRT-LLM",
        mark=r"(?m)^[ >|+-]{0,20}(?:# (?:HELP|TYPE) )?(?:vllm:|llamacpp:|trtllm_|sglang:)\w+",
    ),
    "sglang-responses": Format(
        "sglang.read_responses",
        "SGLang's responses with meta_info or sglext",
        "responses of November 2025 and August 2026",
        mark=r'"spec_verify_ct"\s*:',
    ),
    "sglang-log": Format(
        "sglang.read_log",
        "SGLang's log: averages",
        "lines of May, October and December 2025",
        mark=r"Decode batch[.,].{0,400}accept len",
    ),
    "openvino": Format(
        "openvino.read_printed",
        "what OpenVINO GenAI's sample prints; m_batch_sizes",
        "requests of OpenVINO GenAI 2026.4.1",
        mark=r'(?m)^ {0,8}Num accepted token: {0,8}\d|"m_batch_sizes"\s*:',
    ),
    "onnxruntime": Format(
        "onnxruntime.read_stats",
        "onnxruntime-genai's get_speculative_stats: sums",
        "requests of onnxruntime-genai 0.18",
        mark=r'"draft_tokens_evaluated"\s*:',
    ),
    "accept-lengths": Format(
        "benchmarks.read_accept_lengths",
        "answers of Spec-Bench (rounds) or EAGLE (sums)",
        "EAGLE's published answers; none of Spec-Bench",
        mark=r'"(?:accept_lengths|idxs)"\s*:',
    ),
    "aiperf": Format(
        "requests.read_aiperf",
        "AIPerf's SpecDecodeAcceptanceRecord, of any engine",
        "a record that its own model wrote (0.13)",
        mark=r'"spec_decode_acceptance"\s*:|"acceptance_histogram"\s*:\s*\{',
    ),
}


# Results of load tests without counts of drafts, by a pattern in them.
WITHOUT_DRAFTS = {
    r'"output_tokens_per_second"\s*:': "GuideLLM's result",
    r"(?m)^Generation: \d{1,9} tokens, [\d.]{1,20} tokens-per-sec": "what mlx_lm.generate prints",
    r'Serving Benchmark Result|"output_throughput"\s*:': "the result of a benchmark",
}
HEAD = 2**24  # characters of a file in which a mark is looked for
NOTHING = "give a log, a scrape, a benchmark's result or responses; `specsim import --help` lists what is read"

UNREADABLE = {  # by a file's first bytes
    (b"\xff\xfe", b"\xfe\xff"): "text in UTF-16, as `>` of Windows PowerShell writes it; save it as UTF-8, there by "
    "`Get-Content FILE | Set-Content -Encoding utf8 NEW`",
    (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zX", b"BZh"): "compressed; give the text that it holds",
}


def recognise(path: Path) -> list[str]:
    """The formats whose mark a file has; InputError for a file with none."""
    if not path.exists():
        raise InputError(f"{path} does not exist; {NOTHING}")
    if path.is_dir():
        raise InputError(f"{path} is a folder; {NOTHING}")
    with path.open("rb") as binary:
        start = binary.read(4)
    for marks, what in UNREADABLE.items():
        if start.startswith(marks):
            raise InputError(f"{path} is {what}")
    with path.open(encoding="utf-8", errors="replace") as file:
        text = file.read(HEAD)
    kinds = [kind for kind, form in FORMATS.items() if re.search(form.mark, text)]
    if not kinds:
        from specsim.engines.formats.sweep import is_header

        kinds = ["sweep"] if any(map(is_header, text[: 2**16].splitlines()[:20])) else []
    for mark, what in WITHOUT_DRAFTS.items():
        if not kinds and re.search(mark, text):
            raise InputError(
                f"{path} is {what}, which counts no drafts; save the server's /metrics before and after it and give "
                f"both to `specsim import prometheus`, or give this to `specsim doctor COUNTERS --baseline {path.name}`"
            )
    if not kinds and re.fullmatch(r"\s*\[[\d\s.,eE+-]+\]\s*", text):
        raise InputError(
            f'{path} is a list of numbers, without counts; give counters by depth, {{"drafted": [1000, 1000], '
            '"accepted": [720, 500]}, or the mean acceptance length: `specsim advise --accept-length 2.22 --k 2`'
        )
    if not kinds:
        raise InputError(f"{path} holds nothing that an engine or a benchmark writes about drafts; {NOTHING}")
    return kinds


def read_any(paths: Sequence[Path]) -> tuple[str, ImportedRecords]:
    """Read files of a kind that they tell themselves: the kind and what they hold."""
    refused = None
    for kind in recognise(paths[0]):
        try:
            return kind, read_format(kind, paths)
        except InputError as error:
            refused = refused or error
    assert refused is not None
    raise refused


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
