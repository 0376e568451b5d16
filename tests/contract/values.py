"""A contract of the library: what it computes on small inputs, recorded number for number.

    python -m tests.contract.values            compare with values.json, print every difference
    python -m tests.contract.values --write    replace values.json by what the present code computes

After an intended change of a cost, a forecast or a decision, run it with --write: the difference in values.json shows
the reviewer which numbers moved. This file finds changes; other tests check that the numbers are right.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import specsim
from realrun.measure.curve import along_contexts, influences
from speckernels.bench.cases import ordered_cases
from speckernels.bench.cases.base import SEED
from specsim.acceptance.sources import Rounds
from specsim.cost.batches import BatchTokens
from specsim.cost.files import read_cost, shipped_costs
from specsim.cost.probe import Probe, changes, with_probe
from specsim.cost.roofline.architecture import find_architecture, public_shapes
from specsim.cost.roofline.cost import RooflineCost, find_drafter
from specsim.cost.roofline.hardware import Derating, Hardware, find_hardware, known_hardware
from specsim.cost.roofline.passes import Operation, Roofline
from specsim.cost.roofline.shape import Architecture
from specsim.engines.as_engine import as_engine
from specsim.engines.conventions import CONVENTIONS
from specsim.engines.definitions import QUANTITIES, Totals, engine_counts, find_definitions
from specsim.engines.formats.records import ImportedRecords
from specsim.engines.formats.registry import FORMATS
from specsim.io.arrays import finite_or_null
from specsim.learn.space import search_space
from specsim.policy.registry import NAMED
from specsim.policy.static_tree.search import best_trees
from specsim.replaying.intervals import (
    against_baseline,
    log_ratio_error,
    noise_floor_percent,
    paired_difference,
    ratio_difference,
    ratio_interval,
    ratio_of_ratios,
    simultaneous,
    student_quantile,
    tails,
)
from specsim.replaying.priced import PricedTrace
from specsim.trace.trace import Trace
from tests.contract.commands import column, differences, read_golden, write_golden
from tests.fuzz.readers import READERS
from tests.support.commands import call, json_of
from tests.support.joined_traces import joined_trace
from tests.support.tree_traces import tree_trace

GOLDEN = Path(__file__).with_name("values.json")
INPUTS = Path(__file__).parents[1] / "specsim" / "engines"
TOLERANCE = 1e-9  # relative
LARGE = Hardware(
    "large", memory_bytes_s=1e12, flops={"bfloat16": 1e15, "float32": 1e14, "float8": 2e15}, link_bytes_s=1e11
)
DRAFTERS = (
    "eagle", "eagle3", "mtp", "edd", "vdm", "space", "medusa:3", "eesd:2", "self-sd:2", "block:2", "prompt-lookup",
)  # fmt: skip
TARGETS = ("llama-3.1-8b", "deepseek-v3", "gpt-oss-20b", "qwen3-next-80b-a3b", "gemma-4-26b-a4b")


Value = Any  # JSON
VALUES: dict[str, Callable[[], Value]] = {}


def each(members: Iterable[str], name: str) -> Callable[[Callable[[str], Value]], Callable[[str], Value]]:
    """Record a function's value of each member, as "name member"."""

    def add(compute: Callable[[str], Value]) -> Callable[[str], Value]:
        VALUES.update({f"{name} {member}": partial(compute, member) for member in members})
        return compute

    return add


def totals(operations: Iterable[Operation]) -> list[float]:
    """Sum bytes read and written, bytes sent over the link, FLOPs and kernel launches over operations."""
    parts = [*operations]
    names = ("bytes", "link_bytes", "flops", "launches")
    return [float(sum(np.sum(getattr(part, name)) for part in parts)) for name in names]


def passes(model: Architecture, **how: Any) -> Value:
    """A model's sizes, and the work of decoding, of verifying long texts, and of a prefill beside it."""
    roofline = Roofline(model, LARGE, derating=Derating(), **how)
    mixed = BatchTokens.of(np.array([1, 4, 300]), np.array([700, 20_000, 0]))
    return [
        *(int(number) for number in (model.parameters, model.head_parameters, model.norms)),
        *(float(roofline.kv_bytes(context)) for context in (100, 20_000)),
        totals(roofline.operations(1, 128)),
        totals(roofline.operations(8, 20_000, 3)),
        totals(roofline.batch_operations(mixed._replace(prompts=300.0))),
    ]


@each(public_shapes(), "passes of")
def _passes(name: str) -> Value:
    return passes(find_architecture(name))


@each(TARGETS, "formats of")
def _formats(name: str) -> Value:
    model, parts = find_architecture(name), {"attention": "float8", "experts": "mxfp4", "mlp": "q4_k_m", "head": "int8"}
    return [
        passes(model, weights="int4", cache="float8", tensor_parallel=2),
        passes(model, weights=parts, activations="float8", states="bfloat16", vector=0.5),
    ]


@each([f"{drafter} of {target}" for target in TARGETS for drafter in DRAFTERS], "drafts by")
def _drafts(names: str) -> Value:
    drafter, target = names.split(" of ")
    try:
        found = find_drafter(drafter, find_architecture(target))
    except specsim.InputError as error:
        return str(error)
    cost = RooflineCost(Roofline(find_architecture(target), LARGE), found, batch=2)
    tokens = BatchTokens.alike([1, 3], [1, 5], [128, 5000])
    return [
        found.kind,
        found.model and found.model.parameters,
        *(np.asarray(cost.batch_draft(place, tokens)).tolist() for place in (1, 2, 4)),
        np.asarray(cost.batch_verify(tokens)).tolist(),
        float(cost.catch_up(1000)),
        float(cost.missing_bytes(BatchTokens.alike(64, 1, 20_000))),
    ]


@each(known_hardware(), "steps on")
def _device(name: str) -> Value:
    device = find_hardware(name)
    cost = RooflineCost(Roofline(find_architecture("llama-3.2-1b"), device, dtype=device.state_dtype),
                        find_drafter("eagle3", find_architecture("llama-3.2-1b")))  # fmt: skip
    ceilings = [device.memory_bytes, device.memory_bytes_s, device.link_bytes_s, dict(device.flops)]
    return [*ceilings, *(float(cost.verify(n, 1000)) for n in (1, 8, 600)), float(cost.draft_step(2, 1000))]


@each(("vllm", "sglang", "tensorrt-llm", "llamacpp"), "overheads of")
def _engine(name: str) -> Value:
    target = "llama-3.1-8b"
    words = ("cost", "show", "--gpu", "h100", "--target", target, "--tokens", "1,4,64", "--engine", name, "--json")
    return [json_of(call("specsim", *words, "--drafter", drafter, "--batch", batch))["rows"]
            for drafter in ("eagle3", "llama-3.2-1b", "prompt-lookup") for batch in ("1", "16")]  # fmt: skip


@cache
def text() -> Trace:
    return tree_trace(7, sequences=12, tokens=60, overconfidence=1.3, hidden=0.4)


SERVED = "specdecode-bench-llama3.1-8b-eagle-h100"


@each(("vllm", "sglang", "llamacpp"), "requests served by")
def _server(name: Any) -> Value:
    how = {"server": name, "requests": 150, "seed": 1}
    return [
        specsim.serve(text(), SERVED, "fixed_k", k=3, arrivals="poisson:60", **how).as_dict(),
        specsim.serve(text(), SERVED, "adaedl", arrivals="closed:12", slots=8, kv_tokens=900, **how).as_dict(),
    ]


@each(sorted({*specsim.rules()} - {"oracle"}), "requests served under")
def _rule(name: str) -> Value:
    load = specsim.serve(text(), SERVED, name, arrivals="poisson:80", slots=32, requests=150, tpot_ms=12.0, seed=2)
    return load.as_dict()["speculation"]


@each(("schedule", "lockstep"), "batches in a")
def _batches(name: str) -> Value:
    if name == "lockstep":
        frame = specsim.serve_batches(text(), SERVED, "fixed_k", k=4, batches=(1, 4, 16)).to_frame()
    else:
        frame = specsim.serve_schedule(text(), SERVED, batches=(1, 8, 128), max_draft_tokens=5).to_frame()
    return json.loads(frame.reset_index().to_json(orient="records", double_precision=15))


@each(("ordered", "equal", "drawn", "ties"), "trees for rates")
def _trees(name: str) -> Value:
    """Rates [depth, rank]; among equal trees the search takes a shallow one."""
    drawn = np.random.default_rng(3).random((4, 5))
    rates = {
        "ordered": np.array([[0.6, 0.2, 0.1], [0.5, 0.25, 0.1], [0.5, 0.3, 0.05]]),
        "equal": np.full((4, 2), 0.5),
        "drawn": drawn / drawn.sum(axis=1, keepdims=True) * 0.9,
        "ties": np.array([[0.25, 0.5, 0.25], [0.5, 0.5, 0.0], [0.5, 0.25, 0.25]]),
    }
    best = best_trees(rates[name], 14)
    return [best.expected_tokens.tolist(), [best.shape(nodes) for nodes in (2, 3, 4, 6, 9, 14)]]


@each(NAMED, "space of")
def _space(name: str) -> Value:
    space = search_space(NAMED[name], {}, {"depth": 6, "nodes": 24, "width": 4})
    return [specsim.make_policy(name).settings, space.size, space.default, space.grid(9), space.sobol(5, seed=3)]


def counts(found: ImportedRecords) -> Value:
    """What an engine's file counts, and the speedup of each draft length that `advise` computes from it."""
    try:
        lengths = specsim.advise(found, {"s_d": 0.0004, "s_t": 0.01}).as_dict()["lengths"]
    except specsim.InputError:
        lengths = "none"
    told = {key: value for key, value in found.as_dict().items() if key not in ("definition", "notes")}  # sentences
    source = vars(found.source) if found.source is not None else {}
    return [told, {key: column(value) for key, value in source.items() if isinstance(value, np.ndarray)}, lengths]


@each(sorted(path.name for folder in ("inputs", "fixtures") for path in (INPUTS / folder).iterdir()), "counts in")
def _counts(name: str) -> Value:
    (path,) = INPUTS.glob(f"*/{name}")
    try:
        return counts(specsim.import_records(None, path))
    except specsim.InputError:
        return "refused"


@each(shipped_costs(), "shipped costs of")
def _shipped(name: str) -> Value:
    answers = [call("specsim", "cost", "show", name, *words, "--json") for words in ((), ("--batch", "48"))]
    return [json.loads(answer.out)["rows"] if answer.out else "refused" for answer in answers]


@each(("one_drafter", "switch_match", "first_that_drafts"), "several drafters by")
def _joined(name: str) -> Value:
    cost = specsim.JoinedCost(tuple(specsim.ConstantCost(s_d, 0.01) for s_d in (1e-6, 0.001, 0.002)))
    rows = specsim.replay(joined_trace(), cost, name).to_frame()
    return json.loads(rows.to_json(orient="split", index=False, double_precision=15))


KERNEL_CASES = {str(case): (operation, case) for operation, case in ordered_cases(on_gpu=False)}


@each(KERNEL_CASES, "work of")
def _kernel(name: str) -> Value:
    """What a kernel's floor follows from: bytes and floating-point operations, and the integers of its results."""
    operation, case = KERNEL_CASES[name]
    args = operation.inputs(case, torch.Generator().manual_seed(SEED))
    found = operation.reference(*args)
    results = [found] if isinstance(found, torch.Tensor) else [part for part in found if isinstance(part, torch.Tensor)]
    integers = [int(part.sum()) for part in results if not part.is_floating_point()]
    return [case.compiled, *vars(operation.work(case, args, found)).values(), integers]


@each([name for name in READERS if name.split(",")[0] in FORMATS], "import of")
def _import(name: str) -> Value:
    with TemporaryDirectory() as folder:
        path = Path(folder, "file.json")
        READERS[name].write(path)
        return counts(specsim.import_records(name.split(",")[0], path))


@each(("cuts", "whole", "blocks", "padded", "trees", "cut trees", "rows"), "steps of a server with")
def _steps(name: str) -> Value:
    """Of prompts that are read in pieces or at once, caches in blocks, padded drafts and static trees."""
    how: dict[str, Any] = {
        "cuts": {"step_tokens": 48, "k": 3},
        "whole": {"server": "sglang", "step_tokens": 90, "k": 3},
        "blocks": {"block_tokens": 16, "kv_tokens": 400, "k": 4},
        "padded": {"pad": "graphs", "policy": "adaedl"},
        "trees": {"policy": "vct", "width": 2, "depth": 2},
        "cut trees": {"policy": "vct", "width": 2, "depth": 2, "step_tokens": 40},
        "rows": {"policy": "max_confidence", "block_tokens": 8, "kv_tokens": 800, "server": "llamacpp"},
    }
    result = specsim.serve(text(), SERVED, arrivals="poisson:90", slots=16, requests=150, seed=3, **how[name])
    return result.as_dict()["speculation"]


@each(("3", "14", "60"), "intervals of so many sequences:")
def _intervals(name: str) -> Value:
    a, b, c, d = np.random.default_rng(int(name)).gamma(9.0, size=(4, int(name)))
    board = simultaneous(a, [a, b, c])
    compared = [paired_difference(a, b, c), ratio_difference(a, b, c, d), *(board.difference(0, n) for n in (1, 2))]
    return [
        *(estimate.as_dict() for estimate in (ratio_interval(a, b), ratio_of_ratios(a, b, c, d), *board.speedups)),
        *(comparison.as_dict() for comparison in compared),
        [*tails(int(name), 0.95), student_quantile(int(name), 0.975), log_ratio_error(a, b, c, d)],
        [noise_floor_percent(ratio_interval(a, b)), against_baseline(ratio_interval(a, b), 2.0)],
    ]


@each(("whole", "sparse"), "curves of samples,")
def _curves(name: str) -> Value:
    rng, grid = np.random.default_rng(5), [4, 30, 70, 200]
    at = (4, 30, 70, 200) if name == "whole" else (4, 45, 200)
    sweeps = [[(c, 0.01 + 1e-5 * c + 1e-3 * rng.standard_t(2) ** 2) for c in at] for _ in range(6)]
    points = [point for sweep in sweeps for point in sweep]
    moved = influences(sweeps, grid)
    fitted = [along_contexts(points, grid, q) for q in (None, 0.25, 0.75)]
    return [finite_or_null(values) for values in (*fitted, moved.values, moved.moved, moved.relative_half_width)]


def valid_file(name: str) -> Value:
    """The JSON of a valid file of a reader."""
    with TemporaryDirectory() as folder:
        READERS[name].write(Path(folder, "file.json"))
        return json.loads(Path(folder, "file.json").read_text())


@each(("0.8", "1.02", "1.5"), "a machine slower by")
def _probed(factor: str) -> Value:
    before, now = valid_file("probe"), valid_file("probe")
    for key, seconds in now["mean_s"].items():
        now["mean_s"][key] = (float(factor) * np.array(seconds)).tolist()
    now["mean_s"]["verify"][0][0] *= 1.1
    probes = [Probe.from_json(document) for document in (before, now)]
    moved = with_probe(read_cost(valid_file("cost profile")), probes[1])
    steps = [float(moved.verify(2, 100)), float(moved.draft(1, 100)), moved.round_overhead()]
    return [[change._asdict() for change in changes(*probes)], steps]


@each(QUANTITIES, "what engines print as")
def _printed(name: str) -> Value:
    drafted, accepted = np.array([[3, 3, 2, 0, 3], [3, 1, 0, 0, 2]])
    totals = replace(Totals.of(Rounds(drafted=drafted, accepted=accepted), 11.0), total_s=2.0, first_s=0.3)
    return {f"{number.engine}: {number.printed}": number.value(totals) for number in find_definitions(name)}


@each(CONVENTIONS, "counters of")
def _counters(name: str) -> Value:
    played = as_engine(text(), CONVENTIONS[name], max_output_tokens=40).trace
    priced = PricedTrace(played, read_cost({"s_d": 1, "s_t": 9}))
    return engine_counts(priced, specsim.make_policy("adaedl", {"max_draft_tokens": 5}), CONVENTIONS[name])._asdict()


@each(("vllm_log.txt", "llamacpp_log_k3.txt", "drift_log.txt"), "diagnosis of")
def _diagnosis(name: str) -> Value:
    (path,) = INPUTS.glob(f"*/{name}")
    found = specsim.diagnose(path, baseline_tokens_per_s=60.0, tokens_per_s=75.0, cost={"s_d": 0.001, "s_t": 0.015})
    return json.loads(json.dumps(found.as_dict(), default=str))


def main() -> bool:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the recorded values by those of the present code")
    writing = parser.parse_args().write
    now = {name: json.loads(json.dumps(compute())) for name, compute in VALUES.items()}
    if writing:
        write_golden(now, GOLDEN)
        return False
    before = read_golden(GOLDEN)
    different = [f"{name}{line}" for name in now for line in differences(before.get(name), now[name], TOLERANCE)]
    print(*different, f"{len(now)} values compared, {len(different)} numbers differ", sep="\n")
    return bool(different)


if __name__ == "__main__":
    raise SystemExit(main())
