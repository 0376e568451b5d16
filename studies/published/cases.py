"""Published measurements as cases: the inputs that a user would know, and the measured time or speedup."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from specsim.cost.batches import BatchTokens
from specsim.cost.roofline.architecture import find_architecture
from specsim.cost.roofline.cost import RooflineCost, find_drafter
from specsim.cost.roofline.document import in_engine
from specsim.cost.roofline.formats import Weights
from specsim.cost.roofline.hardware import GGUF_BITS, Hardware, find_hardware
from specsim.cost.roofline.passes import Operation, Roofline
from specsim.cost.roofline.serving import tpot_s, with_prompt
from specsim.io.errors import InputError

DATA = Path(__file__).parent / "data"
MILLISECOND = 1e-3
INFERENCEX_LENGTH = 0.9  # of the lengths that it names: it draws lengths evenly from 80 to 100 % of them
MOST_USED = 0.5  # of the GPUs' peak FLOP/s; a run whose prompts alone would need more is not credible
MODELS = {  # of serving.parquet
    "MiniMaxAI/MiniMax-M2.5": "minimax-m2.5",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "Qwen/Qwen3.5-397B-A17B": "qwen3.5-397b-a17b",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "moonshotai/Kimi-K2.5": "kimi-k2",
    "nvidia/DeepSeek-V3.1-NVFP4": "deepseek-v3",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "nvidia/Qwen3-32B-NVFP4": "qwen3-32b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "zhipuai/GLM-5": "glm-5",
}


class Formats(NamedTuple):
    """Formats of a model's weights, as `Roofline` takes them, and of its products."""

    weights: Weights | None = None
    activations: str | None = None


FORMATS = {
    "bf16": Formats(),
    "fp8": Formats("float8", "float8"),
    "fp4": Formats("nvfp4", "float4"),
    "int8": Formats("int8"),
    "int4": Formats("int4"),
    **{name: Formats(name) for name in GGUF_BITS},
}
OF_EXPERTS = {  # mixtures of experts, whose attention stays in 16 bits
    "fp4": Formats({"experts": "nvfp4", "mlp": "nvfp4"}),
    "int4": Formats({"experts": "int4-g32"}),
}
OF_MODELS = {"gpt-oss-120b": Formats({"experts": "mxfp4"})}  # released in one format only
OTHER_GPUS = {  # not in specsim's hardware.json
    # AMD Ryzen AI 9 HX 370: 128 bits of LPDDR5X-7500; 16 CUs x 512 FLOPs a cycle x 2.9 GHz
    "radeon-890m": Hardware("AMD Radeon 890M", 120e9, {"float16": 23.8e12}, memory_bytes=48e9, title="AMD Radeon 890M"),
}
LIKE, BY_BATCH = "vllm#20780", "by batch"
AT_EARLY = "@2025-03"  # an engine's name with a month, see `specsim.cost.roofline.document.in_engine`
CONTEXT = 500  # tokens of context assumed for runs with speculation, which rarely state it: MT-Bench


@dataclass(frozen=True)
class Term:
    """Operations on a device. times : how often they count; prompts : whether they prefill other requests' prompts"""

    passes: Roofline
    operations: tuple[Operation, ...]
    times: float = 1.0
    prompts: bool = False


@dataclass(frozen=True)
class Case:
    """A measured time.

    system : GPU and engine
    terms : operations whose sum is the predicted time
    sequences : sequences in the batch
    measured_s : measured seconds
    about : the published row, with its "target"
    """

    system: str
    terms: tuple[Term, ...]
    sequences: int
    measured_s: float
    about: Mapping[str, str]

    @property
    def deployment(self) -> tuple[str, ...]:
        """Source, target, GPU and engine."""
        return tuple(self.about[key] for key in ("source", "target", "gpu", "engine"))

    @property
    def kind(self) -> tuple[str, ...]:
        """Features that decide its error, see `RooflineCost.kind`."""
        passes = self.terms[0].passes
        cost = RooflineCost(passes, find_drafter("prompt-lookup", passes.model), batch=self.sequences)
        return cost.kind(drafts=False)


def read_csv(name: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file in data/."""
    with (DATA / name).open() as file:
        return [*csv.DictReader(file)]


@cache
def passes(target: str, gpu: str, dtype: str, tp: int) -> Roofline:
    """Return a target's passes in the formats that a run states; InputError if they do not fit into memory."""
    model = find_architecture(target)
    formats = OF_MODELS.get(target) or (model.experts and OF_EXPERTS.get(dtype)) or FORMATS[dtype]
    hardware = OTHER_GPUS.get(gpu) or find_hardware(gpu)
    return Roofline(
        model,
        hardware,
        dtype=hardware.state_dtype,
        weights=formats.weights,
        activations=formats.activations if formats.activations in hardware.flops else None,
        tensor_parallel=tp,
    )


def steps() -> list[Case]:
    """Return decoding steps without speculation."""
    cases = []
    for row in read_csv("steps.csv"):
        batch = int(row["batch"])
        model = passes(row["target"], row["gpu"], row["dtype"], int(row["tp"]))
        step = Term(model, tuple(model.operations(1, int(row["context"]), batch)))
        system = f"{row['gpu']}, {row['engine']}"
        cases.append(Case(system, (step,), batch, MILLISECOND * float(row["step_ms"]), row))
    return cases


def serving() -> tuple[list[Case], list[str]]:
    """Return times per output token of servers, and the reason for each run that is left out."""
    cases, left_out, not_credible = [], [], set[tuple[str, ...]]()
    for row in pd.read_parquet(DATA / "serving.parquet").to_dict("records"):
        if max(row[key] or 1 for key in ("pp", "attention_dp", "moe_ep")) > 1:
            left_out.append("pipeline, data or expert parallelism")
            continue
        try:
            case, used = served({str(key): str(value) for key, value in row.items()})
        except InputError:
            left_out.append("weights and cache do not fit, or heads cannot be shared")
            continue
        cases.append(case)
        if used > MOST_USED:
            not_credible.add(case.deployment)
    credible = [case for case in cases if case.deployment not in not_credible]
    reason = f"in deployments where prompts alone would take over {100 * MOST_USED:.0f} % of the FLOPs"
    return credible, left_out + [reason] * (len(cases) - len(credible))


def served(row: dict[str, str]) -> tuple[Case, float]:
    """Return the case of a row of serving.parquet, and the share of the GPUs' peak FLOP/s that its prompts need."""
    target, concurrency = MODELS[row["model"]], int(row["concurrency"])
    model = passes(target, row["gpu"], row["precision"], int(row["tp"]))
    length = INFERENCEX_LENGTH if row["source"] == "InferenceX" else 1.0
    isl, osl = int(row["isl"]) * length, int(row["osl"]) * length
    decoding = BatchTokens.alike(concurrency, 1, isl + osl / 2)
    RooflineCost(model, find_drafter("prompt-lookup", model.model)).check_memory(decoding)
    both = [tuple(model.layers(model.model, tokens)) for tokens in (with_prompt(isl, decoding), decoding)]
    most_s, least_s = (sum(float(o.flops) / model.ceilings(o.products)[1] for o in operations) for operations in both)
    token_ms = float(row["tpot_ms"])
    request_s = MILLISECOND * (float(row["ttft_ms"]) + osl * token_ms)
    prompts = (concurrency - 1) / osl
    step = Term(model, tuple(model.batch_operations(decoding)))
    terms = step, Term(model, both[0], prompts, prompts=True), Term(model, both[1], -prompts, prompts=True)
    about = {**row, "target": target}
    case = Case(f"{row['gpu']}, {row['engine']}", terms, concurrency, MILLISECOND * token_ms, about)
    return case, concurrency * (most_s - least_s) / request_s


EARLY = (LIKE, "EAGLE-3's paper, table 3", "EAGLE-3's paper, table 5", "sglang#4716", "TensorRT-LLM#5146")
"""Sources that measured before July 2025, with engines that took longer to start a draft step."""


@dataclass(frozen=True)
class Speculation:
    """A run with speculation.

    system : GPU and source
    cost : of target and drafter, without an engine
    draft_tokens : K, or depth of the tree; verified_tokens : of a sequence in a pass
    acceptance : mean acceptance length
    measured : speedup
    """

    system: str
    engine: str
    cost: RooflineCost
    draft_tokens: int
    verified_tokens: int
    tree: bool
    acceptance: float
    measured: float
    about: Mapping[str, str]

    @property
    def deployment(self) -> str:
        """Target, drafter, GPU and source."""
        return f"{self.about['variant']} with {self.about['drafter']} on {self.system}"

    @property
    def era(self) -> str:
        """The engine, with a suffix if it was released before July 2025."""
        return f"{self.engine}{AT_EARLY * (self.about['source'] in EARLY)}"

    @property
    def draft_passes(self) -> int:
        """Draft passes of a round."""
        return 1 if self.cost.drafter.at_once else self.draft_tokens

    @property
    def step_s(self) -> float:
        """Seconds of a decoding step."""
        return float(self.cost.autoregressive_step(CONTEXT))

    @property
    def passes_s(self) -> float:
        """Seconds of the passes of a round."""
        cost = self.cost
        verify = cost.tree_verify if self.tree else cost.verify
        other_s = cost.tree_round_overhead() if self.tree else cost.round_overhead()
        return float(cost.draft(self.draft_tokens, CONTEXT) + verify(self.verified_tokens, CONTEXT)) + other_s


def credible(runs: Sequence[Speculation]) -> list[Speculation]:
    """Leave out targets of a source with a speedup above the acceptance length, which is impossible."""

    def of(run: Speculation) -> tuple[str, str]:
        return run.system, run.about["target"]

    impossible = {of(run) for run in runs if run.measured > run.acceptance}
    return [run for run in runs if of(run) not in impossible]


@dataclass(frozen=True)
class Drafting:
    """A time per output token of a server with speculation, whose time without speculation is not published.

    bare, cost : costs without an engine, and with the shipped overheads of the server's engine
    """

    system: str
    bare: RooflineCost
    cost: RooflineCost
    isl: float
    osl: float
    draft_tokens: int
    acceptance: float
    measured_s: float

    def predicted_s(self, cost: RooflineCost) -> float:
        return tpot_s(cost, self.isl, self.osl, cost.batch, self.draft_tokens, self.acceptance)


def drafting_servers() -> list[Drafting]:
    """Return servers with speculation."""
    servers = []
    for row in read_csv("drafting_servers.csv"):
        bare = pair_cost({**row, "batch": row["concurrency"]})
        costs = bare, in_engine(bare, row["engine"])
        system, lengths = f"{row['gpu']}, {row['source']}", (float(row["isl"]), float(row["osl"]))
        measured_s = MILLISECOND * float(row["tpot_ms"])
        servers.append(Drafting(system, *costs, *lengths, int(row["steps"]), float(row["acceptance"]), measured_s))
    return servers


def speculation() -> list[Speculation]:
    """Return runs with speculation.

    If a run states no tensor parallelism, the smallest that fits is assumed. EAGLE-3's tables by batch do not state
    the acceptance length: that of vllm#20780 is assumed, which has the same target, drafters and kind of prompts.
    """
    rows = read_csv("speculation.csv")
    known = {(row["drafter"], row["steps"]): row for row in rows if row["source"] == LIKE}
    for row in read_csv("by_batch.csv"):
        like = known[row["drafter"], row["k"]]
        rows.append({**like, **row, "tokens": str(int(row["k"]) + 1), "task": BY_BATCH})
    return [
        Speculation(
            f"{row['gpu']}, {row['source']}",
            row["engine"],
            pair_cost(row),
            int(row["steps"]),
            int(row["tokens"]),
            row["tree"] == "True",
            float(row["acceptance"]),
            float(row["speedup"]),
            row,
        )
        for row in rows
    ]


def pair_cost(row: Mapping[str, str]) -> RooflineCost:
    """Return the costs of a target and its drafter, which has 16-bit weights unless it is part of the target (MTP)."""
    target, name = least_passes(row), row["drafter"]
    drafter = find_drafter(json.loads(name) if name.startswith("{") else name, target.model)
    cost = RooflineCost(target, drafter, batch=int(row["batch"]))
    if drafter.kind == "mtp":
        return cost
    drafting = cost.draft_passes and replace(cost.draft_passes, weights=None, activations=None)
    return replace(cost, draft_passes=drafting)


def least_passes(row: Mapping[str, str]) -> Roofline:
    """Return the target's passes on the stated number of GPUs, or on the fewest that hold its weights."""
    if row["tp"]:
        return passes(row["target"], row["gpu"], row["dtype"], int(row["tp"]))
    for tp in (1, 2, 4):
        try:
            return passes(row["target"], row["gpu"], row["dtype"], tp)
        except InputError:
            continue
    return passes(row["target"], row["gpu"], row["dtype"], 8)
