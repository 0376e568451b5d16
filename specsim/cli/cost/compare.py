"""`specsim cost compare`: what a target and a drafter would gain on several GPUs."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specsim.cli.console import parse_numbers, print_json, print_table, progress_bar
from specsim.cli.options import TUNED, JsonOption, SeedOption
from specsim.errors import InputError

if TYPE_CHECKING:
    from specsim.cost.roofline.cost import RooflineCost

RESULT, PAGE = "comparison.json", "report.html"


def compare(
    trace: Annotated[
        Path,
        typer.Option(help="Trace folder, made by `realrun record` or `specsim example`.", show_default=False),
    ],
    model: Annotated[
        str, typer.Option(help="The target: a public shape such as llama-3.1-8b, or a config.json.", show_default=False)
    ],
    drafter: Annotated[
        str,
        typer.Option(
            help="A draft model, as --model; or eagle, edd, vdm, space, prompt-lookup, eesd:LAYERS, self-sd:LAYERS, "
            "medusa:HEADS.",
            show_default=False,
        ),
    ],
    gpus: Annotated[str, typer.Option(help="Hardware to compare, by name.")] = "a100,h100,h200,l40s",
    batch: Annotated[str, typer.Option(help="Sequences that share every pass; a list such as 1,8.")] = "1",
    weights: Annotated[
        str | None,
        typer.Option(help="Of the layers' matrices: int4, int8 or float8; default bfloat16.", show_default=False),
    ] = None,
    policy: Annotated[
        list[str],
        typer.Option(help="A policy to tune, by name or FILE.py; repeat for more. The best one counts."),
    ] = TUNED,
    trials: Annotated[int, typer.Option(help="Configurations to try per policy.", min=1)] = 100,
    tuning_share: Annotated[float, typer.Option(help="Share of the sequences to tune on.")] = 0.5,
    out: Annotated[
        Path | None,
        typer.Option(help=f"Folder for {RESULT} and {PAGE}, which has the figures.", show_default=False),
    ] = None,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Compare GPUs for a target and a drafter: tuned policy and predicted speedup on each.

    Acceptance is the trace's, times are a roofline's: shapes of both models against the
    datasheet of each GPU, not calibrated. On each, every policy is tuned on one part of the
    sequences; the one that is best there is predicted on the other part, with its 95 % interval.
    s_d and s_t are a draft step's time and that of a token without speculation. "Moves most" is
    the constant of the roofline that changes the speedup most when it is 20 % less and 20 % more;
    --out has all of them as tornadoes, and s_d / s_t over the context.

    Example: specsim cost compare --trace TRACE --model llama-3.1-8b --drafter eagle --weights int4
    """
    from specsim.files import working_in, write_json, write_text
    from specsim.policy.registry import find_policies
    from specsim.ranking.hardware import compare_devices
    from specsim.trace.files import read_plain_trace
    from specsim.tuning.settings import SearchSettings

    named = [name.strip() for name in gpus.split(",")]
    costs, skipped = _costs(named, parse_numbers(batch, "--batch", int, "1,8"), model, drafter, weights)
    kinds = find_policies(policy)
    settings = SearchSettings(trials=trials, seed=seed)
    whole = read_plain_trace(trace)
    with nullcontext() if out is None else working_in(out, None):
        with progress_bar() as bar:
            found = compare_devices(
                whole, costs, kinds, settings, tuning_share=tuning_share, progress=lambda *at: bar("GPUs", *at)
            )
        options = {"trace": trace.name, "model": model, "drafter": drafter, "weights": weights or "bfloat16",
                   "trials": trials, "seed": seed}  # fmt: skip
        document = {**found.as_dict(), "options": options, "skipped": skipped}
        if out is not None:
            from specsim.report.hardware.page import render_comparison

            write_json(document, out / RESULT)
            write_text(out / PAGE, render_comparison(document))
    if json:
        print_json(document)
        return
    _print(document)
    if out is not None:
        print(f"{out / PAGE} shows all of it")


def _costs(
    gpus: list[str], batches: list[int], model: str, drafter: str, weights: str | None
) -> tuple[list[RooflineCost], list[dict[str, str]]]:
    """The costs of every GPU at every batch, and the GPUs that cannot run it, with the reason of each."""
    from specsim.cost.roofline.document import roofline_from_document
    from specsim.cost.roofline.hardware import find_hardware

    costs, skipped = [], []
    for gpu in gpus:
        find_hardware(gpu)
        document = {"target": model, "drafter": drafter, "hardware": gpu, "weights": weights}
        try:
            costs += [roofline_from_document({**document, "batch": size}) for size in batches]
        except InputError as error:
            skipped.append({"gpu": gpu, "reason": str(error)})
    if not costs:
        raise InputError(skipped[0]["reason"])
    return costs, skipped


def _print(document: dict[str, Any]) -> None:
    from specsim.report.hardware.page import COLUMNS
    from specsim.report.table import as_text

    options, parts = document["options"], document["sequences"]
    title = (
        f"{options['model']} with {options['drafter']}, weights {options['weights']}: tuned on {parts['tuning']} "
        f"sequences, predicted on {parts['holdout']} others"
    )
    notes = dict.fromkeys(note for row in document["rows"] for note in row["cost_notes"])
    approximate = ["approximate: rejection sampling"] if document["approximate"] else []
    print_table("; ".join([title, *approximate, *notes]), *as_text(COLUMNS, document["rows"]))
    for one in document["skipped"]:
        print(f"left out, {one['gpu']}: {one['reason']}")
