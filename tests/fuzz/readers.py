"""Every reader of files: a valid file, how it is mutated, and what is done with what was read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from specsim.acceptance.generate import generate, load_model, save_model
from specsim.acceptance.models import IID, PerPosition
from specsim.acceptance.sources import Counters, Rounds, read_counters, read_rounds, read_source, verified_by_depth
from specsim.claims.check import check_files
from specsim.cost.batch_profile import BATCH_PROFILE_KIND, BATCH_PROFILE_VERSION, BatchProfileCost
from specsim.cost.calibrate import calibrate
from specsim.cost.files import read_cost
from specsim.cost.grid import GRID_KIND, GRID_VERSION, read_grid
from specsim.cost.joined import JoinedCost, joined_document
from specsim.cost.model import CostModel
from specsim.cost.probe import PROBE_KIND, PROBE_VERSION
from specsim.cost.profile import PROFILE_KIND, PROFILE_VERSION, ProfileCost
from specsim.engines.formats.records import summary, write_imported
from specsim.engines.formats.registry import read_format
from specsim.engines.pass_times import read_pass_times
from specsim.io.files import file_digest
from specsim.learn.storage import trace_digest
from specsim.policy.static_tree.rates import read_rates
from specsim.serving.arrivals import recorded_requests
from specsim.trace.files import (
    JOINED_FILE,
    META,
    SEQUENCES,
    STEPS,
    TREES,
    meta_digest,
    pack_trace,
    read_meta,
    read_trace,
    write_trace,
)
from tests.fuzz import mutate, outside
from tests.fuzz.reader import JSON, OTHER, Reader, json_file
from tests.specsim.claims.conftest import CLAIMS
from tests.specsim.engines.test_pass_times import BATCHED, DRAFT_LOG
from tests.support import ROOT
from tests.support.joined_traces import joined_trace
from tests.support.reference import small_trace
from tests.support.tree_traces import tree_trace

FIXTURES = ROOT / "tests" / "specsim" / "engines" / "fixtures"
INPUTS = FIXTURES.parent / "inputs"


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


def input_importer(kind: str, name: str, family: str = OTHER) -> Reader:
    """Make a reader of a file as people have it."""
    return importer_of(kind, (INPUTS / name).read_text(), family)


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


IMPORTERS = {
    "llamacpp-log, rounds": importer("llamacpp-log", "llamacpp_log_k3.txt", slice(100)),
    "llamacpp-log, statistics": importer("llamacpp-log", "llamacpp_log_k3.txt", slice(47, 52)),
    "llamacpp-log, requests": importer("llamacpp-log", "llamacpp_log_k3.txt", slice(47, 51)),
    "llamacpp-responses": importer("llamacpp-responses", "llamacpp_responses_k3.jsonl", slice(3), JSON),
    "vllm-requests": importer("vllm-requests", "vllm_requests_k3.json", family=JSON),
    "vllm-requests, summary": lines_importer("vllm-requests", SUMMARY, {"metrics": {"speculative_decoding": SUMMARY}}),
    "vllm-log": importer("vllm-log", "vllm_log.txt", slice(1)),
    "prometheus, llama.cpp": importer("prometheus", "llamacpp_metrics_k3.prom"),
    "prometheus, TensorRT-LLM": importer_of("prometheus", TRT),
    "vllm-bench": importer_of("vllm-bench", VLLM_BENCH),
    "sglang-responses": lines_importer("sglang-responses", META_INFO, {"choices": [{"meta_info": META_INFO}]}),
    "sglang-responses, OpenAI": lines_importer(
        "sglang-responses", {"usage": {"completion_tokens": 100}, "sglext": {"spec_tokens_details": META_INFO}}
    ),
    "sglang-log": importer_of("sglang-log", SGLANG),
    "vllm-log, wrapped": input_importer("vllm-log", "wrapped_log.txt"),
    "vllm-log, of n-grams": input_importer("vllm-log", "vllm_ngram_log.txt"),
    "vllm-bench, JSON": input_importer("vllm-bench", "vllm_bench.json", JSON),
    "vllm-requests, stream": input_importer("vllm-requests", "stream.txt"),
    "llamacpp-log, chain": input_importer("llamacpp-log", "router_chained_log.txt"),
    "llamacpp-responses, by depth": input_importer("llamacpp-responses", "draft_by_depth.jsonl", JSON),
    "sglang-bench": input_importer("sglang-bench", "sglang_bench.txt"),
    "sglang-bench, JSON": input_importer("sglang-bench", "sglang_bench.jsonl"),
    "sweep": importer_of("sweep", "K,batch,tok/s,accept length\n0,1,50,\n1,1,75,1.7\n3,1,90,2.3\n"),
    "accept-lengths": lines_importer("accept-lengths", *[{"choices": [{"accept_lengths": [1, 4, 2]}]}] * 2),
    "accept-lengths, of EAGLE": lines_importer("accept-lengths", *EAGLE),
    "openvino": importer("openvino", "openvino_sample.txt", slice(14)),
    "openvino, iterations": importer("openvino", "openvino_requests.jsonl", slice(2), JSON),
    "onnxruntime": importer("onnxruntime", "onnxruntime_stats.jsonl", slice(2), JSON),
    "aiperf": lines_importer("aiperf", NEUTRAL, {"spec_decode_acceptance": NEUTRAL}),
}


SECONDS = {
    "draft_step": [[1e-3] * 2] * 4, "catch_up": [0.0] * 2, "verify": [[1e-2] * 2] * 5, "autoregressive": [1e-2] * 2,
    "policy_step": 1e-5, "round_overhead": 1e-4, "score_step": 1e-5,
    "catch_up_many": {"tokens": [4, 16], "seconds": [[1e-3] * 2, [2e-3] * 2]},
    "tree": {"sizes": [1, 4], "wider": [[0.0, 0.0], [1e-4, 1e-4]], "verify": [[1e-2] * 2] * 2, "policy_step": 1e-5,
             "round_overhead": 1e-4},
}  # fmt: skip
PROFILE = {"kind": PROFILE_KIND, "version": PROFILE_VERSION, "contexts": [0, 200], "mean_s": SECONDS}
PROFILE["median_s"] = SECONDS
LINEAR = {
    "kind": "specsim-cost", "version": 1, "form": "linear", "source": "a test", "date": "2026-11", "step_s": 0.001,
    "target": {"fixed_s": 0.01, "token_s": 1e-5, "cached_token_s": 1e-8},
    "drafter": {"fixed_s": 0.002, "token_s": 1e-6},
}  # fmt: skip
BATCH_PROFILE = {
    "kind": BATCH_PROFILE_KIND, "version": BATCH_PROFILE_VERSION, "batches": [1, 4], "contexts": [0, 200],
    "tokens": [1, 3], "verify_s": [[[0.01, 0.02]] * 2] * 2, "draft_s": [[[0.002, 0.001]] * 2] * 2,
    "catch_up_s": [[0.001] * 2] * 2, "step_s": 1e-4, "round_s": 1e-4,
}  # fmt: skip
PROBE = {
    "kind": PROBE_KIND, "version": PROBE_VERSION, "target": "t", "drafter": "d", "contexts": [40, 60], "sweeps": 9,
    "mean_s": {"verify": [[0.01, 0.02]] * 2, "draft_step": [[0.001, 0.001]], "autoregressive": [0.01, 0.02]},
    "relative_half_width": {"verify": [0.01, 0.02], "draft_step": 0.01, "autoregressive": 0.02},
}  # fmt: skip
GRID = {
    "kind": GRID_KIND, "version": GRID_VERSION, "model": "m", "batches": [1], "contexts": [0, 64], "tokens": [1, 2],
    "median_s": [[[0.01, 0.011], [None, 0.013]]],
    "missing": [{"batch": 1, "context": 64, "tokens": [1], "reason": "time"}],
    "provenance": {"device": "a device", "dtype": "bfloat16", "date": "2026-01-01"},
}  # fmt: skip
STAGE = {
    "kind": "specsim-gpu-stage", "version": 1, "stage": "profile", "reduced": True, "complete": True, "seconds": 3.5,
    "provenance": {"device": "a device", "date": "2026-01-01"}, "grids": {"m": GRID},
}  # fmt: skip
PLAN = {"kind": "eagle", "target": "t", "settings": {"steps": 5, "rate": 1e-3}}


def use_cost(path: Path) -> None:
    cost = read_cost(path)
    for part in cost.parts if isinstance(cost, JoinedCost) else (cost,):
        use_prices(part)


def use_probe(path: Path) -> None:
    use_prices(calibrate(PROFILE, path))


def use_prices(cost: CostModel) -> None:
    contexts = np.array([1.0, 8.0])
    if isinstance(cost, ProfileCost | BatchProfileCost):
        contexts = cost.contexts[[0, -1]].astype(float)
    prices = [cost.draft(1, contexts), cost.catch_up(contexts), cost.verify(1, contexts)]
    prices += [cost.catch_up_by(7, contexts), cost.autoregressive_step(contexts)]
    prices += [np.array([cost.policy_step(), cost.round_overhead()])]
    if cost.max_tree_tokens:
        prices += [cost.wider(1, contexts), cost.tree_verify(1, contexts)]
    assert all(np.isfinite(price).all() and (price >= 0).all() for price in prices)


def use_grid(path: Path) -> None:
    grid = read_grid(path)
    if grid.whole_tokens(int(grid.batches[0])):
        assert np.isfinite(grid.pass_s(int(grid.batches[0]), int(grid.tokens[0]), grid.contexts[[0, -1]])).all()


def use_model(path: Path) -> None:
    model = load_model(path)
    depth = len(model.alpha) if isinstance(model, PerPosition) else 3
    model.draw(np.array([5, 3]), min(depth, 20), np.random.default_rng(0))


def use_meta(path: Path) -> Any:
    meta = read_meta(path)
    ids = meta["eos_token_id"]
    assert ids is None or isinstance(ids, int) or all(isinstance(token, int) for token in ids)
    print(meta["target"], meta["drafter"], meta["decoding"], meta["device"], file=NOWHERE)
    return json.dumps(meta, sort_keys=True)


class _Nowhere:
    """A terminal that shows nothing, but takes UTF-8 only."""

    def write(self, text: str) -> int:
        return len(text.encode())


NOWHERE: Any = _Nowhere()


def use_trace(path: Path) -> Any:
    trace = read_trace(path)
    assert trace.draft_limit.shape == trace.token.shape and np.isfinite(trace.prob).all()
    return trace_digest(trace)


def use_rounds(path: Path) -> None:
    accepted, verified = verified_by_depth(read_rounds(path))
    assert np.isfinite(accepted).all() and np.isfinite(verified).all()


def use_arrivals(path: Path) -> None:
    found = recorded_requests(path, small_trace())
    assert np.isfinite(found.arrival_s).all() and (np.diff(found.arrival_s) >= 0).all()
    assert found.prompt_tokens.min() > 0 and found.output_tokens.min() > 0


def use_arrivals_csv(path: Path) -> None:
    use_arrivals(Path(shutil.copyfile(path, path.with_suffix(".csv"))))


def use_plan(path: Path) -> None:
    from realrun.train.common.folder import refuse_another

    refuse_another(path, PLAN, whole=True)


def use_stage(path: Path) -> None:
    from realrun.gpu import StageFile
    from realrun.kept_files import read_kept

    found = read_kept(path, StageFile)
    assert found is None or found["complete"] in (True, False)


class _Tokenizer:
    """Bytes as tokens."""

    bos_token, chat_template = None, None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}


def use_prompts(path: Path) -> None:
    from realrun.pairs.prompts import prompt_digest, read_conversations, read_prompts, spread

    prompt_digest(read_conversations(path, _Tokenizer(), (0,)))  # type: ignore[arg-type]
    prompt_digest(spread(read_prompts(path, _Tokenizer()), 1))  # type: ignore[arg-type]


def use_text(path: Path) -> None:
    from realrun.train.common.distill import _documents

    assert all(document.strip() for document in _documents(path))


def write_drafter(path: Path) -> None:
    import torch

    from realrun.pairs.drafter_files import describe_target, save_drafter
    from tests.support.tiny import tiny_pair

    facts = {"target": describe_target(tiny_pair().target, "t"), "attention": [1], "mlp": [0], "exit_layers": 0}
    save_drafter(path, "self-sd", {"norm.weight": torch.ones(32)}, facts)


def use_drafter(path: Path) -> None:
    from realrun.pairs.drafter_files import _check_target, read_drafter
    from tests.support.tiny import tiny_pair

    _check_target(read_drafter(path), tiny_pair().target)


def write_predictor(path: Path) -> None:
    import torch

    from realrun.decode.acceptance_predictor import Predictor, save_predictor

    facts = {"fingerprint": "f", "target": "t", "drafter": "d"}
    save_predictor(Predictor(torch.ones(2, 8), torch.ones(8), torch.ones(2), facts), path)


def use_predictor(path: Path) -> None:
    from realrun.decode.acceptance_predictor import load_predictor

    load_predictor(path).after(None)


def write_claims(path: Path) -> None:
    write_trace(generate(IID(0.8), sequences=8, output_tokens=20, depth=8), path.with_name("trace"))
    path.write_text(CLAIMS)


def use_claims(path: Path) -> None:
    """Reads the claims and evaluates them."""
    for result in check_files([path]):
        assert result.message and "\n" not in result.message


def write_with_trees(path: Path) -> None:
    write_trace(tree_trace(1, sequences=2, tokens=12, depth=3, width=3, nodes=8), path)


def write_joined(path: Path) -> None:
    write_trace(joined_trace(sequences=2, drafters=2), path)


def write_packed(path: Path) -> None:
    folder = path.with_name("to be packed")
    write_with_trees(folder)
    pack_trace(folder, path)
    shutil.rmtree(folder)


def write_rounds(path: Path) -> None:
    import pyarrow as pa

    from specsim.io.files import write_table

    columns = {"policy": ["a"] * 4, "sequence_id": [0, 0, 1, 1], "t": [0, 3, 0, 1], "drafted": [3, 2, 4, 4]}
    write_table(pa.table({**columns, "accepted": [2, 2, 0, 4], "tree": [False] * 4}), path)


def sign_meta(path: Path) -> None:
    """Make the checksum of a meta.json right again, if it still has a checksum."""
    try:
        meta = json.loads((path / META).read_text())
        meta["checksums"][META] = meta_digest(meta)
        (path / META).write_text(json.dumps(meta))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass


def sign_files(path: Path) -> None:
    meta = json.loads((path / META).read_text())
    meta["checksums"] = {name: file_digest(path / name) for name in meta["checksums"] if name != META}
    meta["checksums"][META] = meta_digest(meta)
    (path / META).write_text(json.dumps(meta))


def write_text_folder(path: Path) -> None:
    path.mkdir()
    (path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two", "n": 1}\n')


def write_plan(path: Path) -> None:
    path.mkdir()
    (path / "plan.json").write_text(json.dumps(PLAN))


ARRIVALS = '{"timestamp": 27, "input_length": 374, "output_length": 4, "hash_ids": [4]}\n' * 3
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:47.9,396,109\n"
BURST_GPT = "Timestamp,Model,Request tokens,Response tokens\n5,ChatGPT,472,18\n45,ChatGPT,1087,230\n"
PROMPTS = """{"text": "import os", "domain": "code"}
{"prompt": "once", "domain": "prose"}
{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
"""


def use_pass_times(path: Path) -> None:
    assert isinstance(read_pass_times([path]).contradictions, list)


READERS: dict[str, Reader] = {
    "constant costs": Reader(JSON, json_file({"s_d": 0.001, "s_t": 0.01}), use_cost, mutate.of_json),
    "pass times": Reader(
        JSON, json_file({"pass_ms": {"1": 8.5, "2": 13.5, "5": 20.7}, "draft_ms": 1.2}), use_cost, mutate.of_json
    ),
    "pass times of a bench": Reader(OTHER, lambda path: path.write_text(BATCHED), use_pass_times, mutate.of_log),
    "pass times of logs": Reader(OTHER, lambda path: path.write_text(DRAFT_LOG), use_pass_times, mutate.of_log),
    "joined costs": Reader(
        JSON, json_file(joined_document([{"s_d": 0.001, "s_t": 0.01}, PROFILE])), use_cost, mutate.of_json
    ),
    "linear costs": Reader(JSON, json_file(LINEAR), use_cost, mutate.of_json),
    "cost profile": Reader(JSON, json_file(PROFILE), use_cost, mutate.of_json),
    "batch profile": Reader(JSON, json_file(BATCH_PROFILE), use_cost, mutate.of_json),
    "probe": Reader(JSON, json_file(PROBE), use_probe, mutate.of_json),
    "cost grid": Reader(JSON, json_file(GRID), use_grid, mutate.of_json),
    "counters": Reader(
        JSON,
        json_file({"drafted": [9, 9, 4], "accepted": [7, 5, 1]}),
        lambda path: verified_by_depth(read_counters(path)),
        mutate.of_json,
    ),
    "acceptance, i.i.d.": Reader(JSON, lambda path: save_model(IID(0.8), path), use_model, mutate.of_json),
    "acceptance by position": Reader(
        JSON, lambda path: save_model(PerPosition((0.8, 0.6, 0.5)), path), use_model, mutate.of_json
    ),
    "GPU stage": Reader(JSON, json_file(STAGE), use_stage, mutate.of_json),
    "trace meta": Reader(JSON, write_with_trees, use_meta, mutate.of_json, files=(META,), covered=True),
    "trace meta, vouched for": Reader(JSON, write_with_trees, use_meta, mutate.of_json, files=(META,), mend=sign_meta),
    "joined trace": Reader(JSON, write_joined, use_trace, mutate.of_json, files=(JOINED_FILE,)),
    "training plan": Reader(JSON, write_plan, use_plan, mutate.of_json, files=("plan.json",)),
    "prompts": Reader(JSON, lambda path: path.write_text(PROMPTS), use_prompts, mutate.of_json_lines),
    "arrivals, lines": Reader(JSON, lambda path: path.write_text(ARRIVALS), use_arrivals, mutate.of_json_lines),
    "arrivals, Azure": Reader(OTHER, lambda path: path.write_text(AZURE), use_arrivals_csv, mutate.of_tokens),
    "arrivals, BurstGPT": Reader(OTHER, lambda path: path.write_text(BURST_GPT), use_arrivals_csv, mutate.of_tokens),
    "text rows": Reader(JSON, write_text_folder, use_text, mutate.of_json_lines, files=("a.jsonl",)),
    "drafter": Reader(JSON, write_drafter, use_drafter, mutate.of_json_header, files=("drafter.safetensors",)),
    "predictor": Reader(JSON, write_predictor, use_predictor, mutate.of_json_header),
    "claims": Reader(OTHER, write_claims, use_claims, mutate.of_toml),
    "rates": Reader(
        OTHER, lambda path: path.write_text("depth,top1,top2\n1,0.6,0.1\n2,0.5,0.1\n"), read_rates, mutate.of_tokens
    ),
    "rounds": Reader(OTHER, write_rounds, use_rounds, mutate.of_parquet),
    "trace sequences, vouched for": Reader(
        OTHER, write_with_trees, use_trace, mutate.of_parquet, files=(SEQUENCES,), mend=sign_files
    ),
    "trace steps, vouched for": Reader(
        OTHER, write_with_trees, use_trace, mutate.of_parquet, files=(STEPS,), mend=sign_files
    ),
    "trace trees, vouched for": Reader(
        OTHER, write_with_trees, use_trace, mutate.of_parquet, files=(TREES,), mend=sign_files
    ),
    "trace folder": Reader(
        OTHER,
        lambda path: write_trace(small_trace(), path),
        use_trace,
        mutate.of_bytes,
        files=(META, SEQUENCES, STEPS),
        covered=True,
    ),
    "trace, zipped": Reader(OTHER, write_packed, use_trace, mutate.of_zip, covered=True),
    **IMPORTERS,
    **outside.SERVERS,
    **outside.DENSE,
    **outside.MODELS,
}
