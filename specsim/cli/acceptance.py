"""`specsim acceptance`: from little data to dense traces."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from specsim.cli.command import Answer, command
from specsim.cli.console import check_new, fact_text, print_facts, print_table, progress_bar
from specsim.cli.options import SeedSettings
from specsim.io.errors import InputError
from specsim.io.settings import Settings, argument, setting

if TYPE_CHECKING:
    from specsim.acceptance.models import AcceptanceModel

acceptance = typer.Typer(
    help="Fit acceptance models, generate traces.\n\n"
    "iid: one acceptance rate, from any source. per_position: one rate per draft depth, from any source, such as a "
    "server's counters. difficulty: easy and hard stretches with confidence and entropy, from a dense trace; from "
    "rounds with a default distribution of confidence.\n\n"
    "Policies that read confidence or entropy need difficulty; with the other models, compare fixed draft lengths.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
OVERWRITE_HELP = "Replace what is at --out."


@dataclass(frozen=True, kw_only=True)
class FitOptions(Settings):
    """Acceptance model to fit, and the data."""

    source: Path = argument(
        "A trace (folder or .zip), rounds of real runs (.parquet, as `realrun validate` writes them), counters per "
        'draft position (.json, {"drafted": [...], "accepted": [...]}), or what an engine wrote about drafts.'
    )
    model: Literal["iid", "per_position", "difficulty"] = setting(..., "Acceptance model to fit.")
    out: Path = setting(..., "Where to write the model, as JSON.")
    policy: str | None = setting(None, "Use only rounds recorded under this policy.")
    overwrite: bool = setting(False, OVERWRITE_HELP, flag="--overwrite")


@command(acceptance)
def fit(options: FitOptions) -> Answer:
    """Fit an acceptance model to data.

    Rounds that accept their whole draft are read as censored: they bound the longest accepted prefix from below. This
    requires drafts whose end does not depend on how they would have continued, so prefer rounds of a fixed draft
    length.

    Example: specsim acceptance fit counters.json --model per_position --out model.json
    """
    from specsim.acceptance.generate import MODELS, as_document, save_model
    from specsim.acceptance.sources import Counters, describe, verified_by_depth
    from specsim.engines.import_records import as_counts

    check_new(options.out, overwrite=options.overwrite)
    data = as_counts(options.source, policy=options.policy)
    if isinstance(data, Counters) and data.drafted_tokens is not None:
        raise InputError(
            f"{options.source} is of drafts of several lengths, so that the rate of an i-th token that was drafted is "
            "unknown; give rounds, or counters of a fixed K"
        )
    fitted, description = MODELS[options.model].fit(data), describe(data)
    save_model(fitted, options.out, description)

    def show() -> None:
        accepted, verified = verified_by_depth(data)
        rows = [
            [str(i + 1), f"{verified[i]:,.0f}", f"{accepted[i]:,.0f}", f"{accepted[i] / verified[i]:.3f}"]
            for i in range(len(verified))
            if verified[i] > 0
        ]
        which = " (rounds that draft the whole depth)" if description["source"] == "dense trace" else ""
        print_table(f"{options.source}{which}", ["draft depth", "verified", "accepted", "rate"], rows)
        print_table(f"{options.model}, written to {options.out}", ["parameter", "value"], _parameter_rows(fitted))

    return Answer(as_document(fitted, description), show)


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(SeedSettings):
    """How much is generated from which model."""

    model: Path = argument("Model made by `specsim acceptance fit`.")
    out: Path = setting(..., "Trace folder to write.")
    sequences: int = setting(100, "Number of sequences.", low=1)
    output_tokens: int = setting(128, "Output tokens per sequence.", low=1)
    max_draft_tokens: int = setting(16, "Maximum draft length to record.", low=1, high=255)
    prompt_tokens: int = setting(64, "Prompt tokens per sequence; costs depend on them.", low=1)
    overwrite: bool = setting(False, OVERWRITE_HELP, flag="--overwrite")


@command(acceptance)
def generate(options: GenerateOptions) -> Answer:
    """Generate a synthetic trace from a model.

    `specsim replay` and `specsim tune` read it like a recorded trace. Its meta.json marks it as synthetic and holds
    the model.

    Example: specsim acceptance generate model.json --out synthetic --sequences 200
    """
    from specsim.acceptance.generate import generate as run_generate
    from specsim.acceptance.generate import load_model
    from specsim.trace.files import check_free, write_trace

    check_free(options.out, overwrite=options.overwrite)
    model = load_model(options.model)
    with progress_bar() as report:
        report("generate", 0, 2)
        trace = run_generate(
            model,
            sequences=options.sequences,
            output_tokens=options.output_tokens,
            depth=options.max_draft_tokens,
            prompt_tokens=options.prompt_tokens,
            seed=options.seed,
        )
        report("generate", 1, 2)
        write_trace(trace, options.out, overwrite=options.overwrite)
    document = {
        "trace": str(options.out),
        "model": model.name,
        "sequences": trace.sequences,
        "output_tokens": len(trace.token),
        "depth": options.max_draft_tokens,
        "seed": options.seed,
        "mean_match_len": float(trace.match_len.mean()),
    }
    return Answer(document, partial(print_facts, "synthetic trace", document))


def _parameter_rows(model: AcceptanceModel) -> list[list[str]]:
    """Names and values of the model's parameters; of a long table its ends and middle."""
    rows = []
    for name, value in vars(model).items():
        values = list(value) if isinstance(value, tuple | list) else [value]
        if len(values) > 32:
            text = " ... ".join(map(fact_text, (values[0], values[len(values) // 2], values[-1])))
        else:
            text = fact_text(values)
        rows.append([name, text])
    return rows
