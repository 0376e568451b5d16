"""`specsim cost compare`: what a target and a drafter would gain on several GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specsim.cli.command import Answer
from specsim.cli.console import print_table, progress_bar
from specsim.cli.options import TUNED, SplitSettings
from specsim.io.errors import InputError
from specsim.io.settings import setting

if TYPE_CHECKING:
    from specsim.cost.roofline.cost import RooflineCost
    from specsim.trace.trace import Trace

RESULT, PAGE = "comparison.json", "report.html"


@dataclass(frozen=True, kw_only=True)
class CompareOptions(SplitSettings):
    """Which pair is compared on which GPUs."""

    trace: Path = setting(..., "Trace folder, made by `realrun record` or `specsim example`.")
    target: str = setting(..., "Target: a public shape such as llama-3.1-8b, or a config.json.")
    drafter: str = setting(
        ...,
        "Drafter: a draft model, as --target; or eagle, eagle3, mtp, edd, vdm, space, prompt-lookup, block:LAYERS, "
        "eesd:LAYERS, self-sd:LAYERS, medusa:HEADS.",
    )
    gpus: str = setting("a100,h100,h200,l40s", "GPUs to compare, by name.")
    batch: tuple[int, ...] = setting((1,), "Batch sizes; a list such as 1,8.")
    weights: str | None = setting(
        None, "Weight format of the layers: int4, int8, float8, mxfp4 or nvfp4 (default: bfloat16)."
    )
    engine: str | None = setting(None, "Inference engine whose overhead counts: vllm, sglang, tensorrt-llm, ...")
    tp: int = setting(1, "GPUs that share every layer (tensor parallelism).", low=1)
    policy: list[str] = setting(TUNED, "Policy to tune, by name or FILE.py; repeat for more. The best counts.")
    out: Path | None = setting(None, f"Folder for {RESULT} and {PAGE} with figures.")


def compare(options: CompareOptions) -> Answer:
    """Compare predicted speedups on GPUs.

    Acceptance comes from the trace; times come from an uncalibrated roofline: shapes of both models against each GPU's
    datasheet. On each GPU every policy is tuned on one part of the sequences; the best is predicted on the held-out
    part, with its 95 % interval. s_d and s_t are the times of a draft step and of a baseline decode step. "Most
    sensitive to" is the roofline constant that changes the speedup most when it is 20 % smaller or larger; --out has
    all of them as tornado charts, and s_d / s_t over the context.

    Example: specsim cost compare --trace TRACE --target llama-3.1-8b --drafter eagle --weights int4
    """
    from specsim.compare.hardware import compare_devices
    from specsim.io.files import working_in, write_json, write_text
    from specsim.learn.settings import SearchSettings
    from specsim.policy.registry import find_policies
    from specsim.trace.files import read_plain_trace

    gpus = [name.strip() for name in options.gpus.split(",")]
    pair = {name: getattr(options, name) for name in ("target", "drafter", "weights", "engine")}
    pair |= {"tensor_parallel": options.tp}
    kinds, out = find_policies(options.policy), options.out
    search, share = SearchSettings(trials=options.trials, seed=options.seed), options.tuning_share
    trace = read_plain_trace(options.trace)
    costs, skipped = _costs(gpus, options.batch, pair, trace)
    with nullcontext() if out is None else working_in(out, None):
        with progress_bar() as bar:
            comparison = compare_devices(trace, costs, kinds, search, tuning_share=share, progress=partial(bar, "GPUs"))
        described = {
            "trace": options.trace.name,
            **{name: getattr(options, name) for name in ("target", "drafter", "engine", "tp", "trials", "seed")},
            "weights": options.weights or "bfloat16",
        }
        document = {**comparison.as_dict(), "options": described, "skipped": skipped}
        if out is not None:
            from specsim.report.hardware import render_comparison

            write_json(document, out / RESULT)
            write_text(out / PAGE, render_comparison(document))

    def show() -> None:
        _print(document)
        if out is not None:
            print(f"full report: {out / PAGE}")

    return Answer(document, show)


def _costs(
    gpus: list[str], batches: Sequence[int], pair: dict[str, Any], trace: Trace
) -> tuple[list[RooflineCost], list[dict[str, str]]]:
    """Costs of every GPU at every batch size; GPUs that cannot run the pair over the trace's contexts, and why."""
    from specsim.cost.batches import BatchTokens
    from specsim.cost.calibrate import data_sheet_document
    from specsim.cost.files import read_cost
    from specsim.cost.roofline.cost import RooflineCost
    from specsim.cost.roofline.hardware import find_hardware
    from specsim.cost.table import context_range

    costs, skipped = [], []
    for gpu in gpus:
        find_hardware(gpu)
        for size in batches:
            try:
                cost = read_cost(data_sheet_document(gpu, **pair), batch=size)
                assert isinstance(cost, RooflineCost)
                cost.check_memory(BatchTokens.alike(size, 1, context_range(trace)[1]))
                costs.append(cost)
            except InputError as error:
                skipped.append({"gpu": gpu, "reason": str(error)})
    if not costs:
        raise InputError(skipped[0]["reason"])
    return costs, [reason for number, reason in enumerate(skipped) if reason not in skipped[:number]]


def _print(document: dict[str, Any]) -> None:
    from specsim.report.hardware import COLUMNS
    from specsim.report.table import as_text

    options, parts = document["options"], document["sequences"]
    title = (
        f"{options['target']} with {options['drafter']}, weights {options['weights']}: tuned on {parts['tuning']} "
        f"sequences, predicted on {parts['holdout']} held-out ones"
    )
    notes = dict.fromkeys(note for row in document["rows"] for note in row["cost_notes"])
    approximate = ["approximate: rejection sampling"] if document["approximate"] else []
    print_table("; ".join([title, *approximate, *notes]), *as_text(COLUMNS, document["rows"]))
    for gpu in document["skipped"]:
        print(f"left out, {gpu['gpu']}: {gpu['reason']}")
