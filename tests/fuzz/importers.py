"""Readers of what engines and benchmarks write: valid files, and writing what was read for specsim's own readers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from specsim.acceptance.sources import Counters, Rounds, read_source
from specsim.engines.formats.records import summary, write_imported
from specsim.engines.formats.registry import read_format
from tests.fuzz import mutate
from tests.fuzz.reader import JSON, OTHER, Reader
from tests.support import ROOT

FIXTURES = ROOT / "tests" / "specsim" / "engines" / "fixtures"


def use_import(kind: str) -> Callable[[Path], None]:
    """Reads what an engine wrote, and writes it for specsim's readers, which must take it."""

    def use(path: Path) -> None:
        imported = read_format(kind, [path])
        found = summary(imported)
        assert np.isfinite(list(found["averages"].values())).all()
        if imported.source is not None:
            suffix = {Rounds: ".parquet", Counters: ".json"}.get(type(imported.source), "")
            out = path.with_name(f"imported{suffix}")
            write_imported(imported, out, overwrite=True)
            read_source(out)

    return use


def importer(kind: str, fixture: str, lines: slice = slice(None), family: str = OTHER) -> Reader:
    """Make a reader of a part of an engine's real file."""
    content = "".join((FIXTURES / fixture).read_text().splitlines(keepends=True)[lines])
    of = mutate.of_log if family == OTHER else mutate.of_json_lines if fixture.endswith("l") else mutate.of_json
    return Reader(family, lambda path: path.write_text(content), use_import(kind), of)


def lines_importer(kind: str, *records: object) -> Reader:
    """Of JSON Lines by hand."""
    return importer_of(kind, "".join(json.dumps(record) + "\n" for record in records), JSON)


def importer_of(kind: str, content: str, family: str = OTHER) -> Reader:
    of = mutate.of_log if family == OTHER else mutate.of_json_lines
    return Reader(family, lambda path: path.write_text(content), use_import(kind), of)


META_INFO = {
    "completion_tokens": 100, "spec_num_correct_drafts": 69, "spec_num_proposed_drafts": 231, "spec_verify_ct": 33,
    "spec_correct_drafts_histogram": [4, 10, 7, 7, 3, 1, 0, 1],
}  # fmt: skip
NEUTRAL = {
    "engine": "vllm", "acceptance_histogram": {"0": 1, "2": 1}, "num_accepted_draft_tokens": 2, "num_draft_tokens": 4,
    "num_spec_steps": 2, "num_spec_tokens": 2, "completion_tokens": 5, "per_step_accepted": [0, 2],
    "per_step_drafted": [2, 2],
}  # fmt: skip
SUMMARY = {
    "acceptance_histogram": [2, 1, 1], "num_accepted_draft_tokens": 3, "num_draft_tokens": 7, "num_spec_steps": 4,
    "num_spec_tokens": 2, "acceptance_histogram_by_draft_length": {"1": [1], "2": [1, 1, 1]},
}  # fmt: skip
ITERATION = {"numRequestsWithDraftTokens": 8, "numDraftTokens": 8, "numAcceptedTokens": 5}
SGLANG = "Decode batch, #running-req: 3, #token: 108, accept len: 2.17, accept rate: 0.39, cuda graph: True\n" * 2
TRT = "".join(
    f'trtllm_spec_decode_{what}_tokens_total{{token_position="{i}"}} {n}\n'
    for what, i, n in (("drafted", 0, 500), ("drafted", 1, 100), ("accepted", 0, 300), ("accepted", 1, 40))
)
VLLM_BENCH = (
    "Drafts:         26407\nDraft tokens:     26407\nAccepted tokens:  22021\n"
    "Per-position acceptance (%):\n  Position 0:        83.39\n"
)
EAGLE = [{"choices": [{"idxs": [334, 126], "new_tokens": [1026, 471]}]}] * 2
VLLM_2024 = (
    "Speculative metrics: Draft acceptance rate: 0.607, System efficiency: 0.510, Number of speculative tokens: 4, "
    "Number of accepted tokens: 32594, Number of draft tokens: 53716, Number of emitted tokens: 34244.\n"
)


IMPORTERS = {
    "llamacpp-log, rounds": importer("llamacpp-log", "llamacpp_log_k3.txt", slice(100)),
    "llamacpp-log, statistics": importer("llamacpp-log", "llamacpp_log_k3.txt", slice(47, 52)),
    "llamacpp-log, requests": importer("llamacpp-log", "llamacpp_log_k3.txt", slice(47, 51)),
    "llamacpp-responses": importer("llamacpp-responses", "llamacpp_responses_k3.jsonl", slice(3), JSON),
    "vllm-requests": importer("vllm-requests", "vllm_requests_k3.json", family=JSON),
    "vllm-requests, summary": lines_importer("vllm-requests", SUMMARY, {"metrics": {"speculative_decoding": SUMMARY}}),
    "vllm-log": importer("vllm-log", "vllm_log.txt", slice(1)),
    "vllm-log, of 2024": importer_of("vllm-log", VLLM_2024),
    "prometheus, llama.cpp": importer("prometheus", "llamacpp_metrics_k3.prom"),
    "prometheus, TensorRT-LLM": importer_of("prometheus", TRT),
    "vllm-bench": importer_of("vllm-bench", VLLM_BENCH),
    "sglang-responses": lines_importer("sglang-responses", META_INFO, {"choices": [{"meta_info": META_INFO}]}),
    "sglang-responses, OpenAI": lines_importer(
        "sglang-responses", {"usage": {"completion_tokens": 100}, "sglext": {"spec_tokens_details": META_INFO}}
    ),
    "sglang-log": importer_of("sglang-log", SGLANG),
    "tensorrt-llm": lines_importer("tensorrt-llm", *({"iter": i, "specDecodingStats": ITERATION} for i in range(3))),
    "accept-lengths": lines_importer("accept-lengths", *[{"choices": [{"accept_lengths": [1, 4, 2]}]}] * 2),
    "accept-lengths, of EAGLE": lines_importer("accept-lengths", *EAGLE),
    "aiperf": lines_importer("aiperf", NEUTRAL, {"spec_decode_acceptance": NEUTRAL}),
}
