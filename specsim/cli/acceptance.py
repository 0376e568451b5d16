"""`specsim acceptance`: from little data to dense traces."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from specsim.cli.console import check_new, print_json, print_table, progress_bar
from specsim.cli.options import JsonOption, RoundsPolicyOption, SeedOption

acceptance = typer.Typer(
    help="Acceptance models: fit one to what data there is, generate traces from it, see how well it fits.\n\n"
    "iid: one acceptance rate, any source. per_position: one per draft depth, any source, such as a server's "
    "counters. difficulty: easy and hard stretches with confidence and entropy, from a dense trace; from rounds "
    "with a default distribution of confidence.\n\n"
    "Only difficulty tells policies that look at confidence or entropy anything; under the others, compare "
    "fixed draft lengths.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


class ModelKind(StrEnum):
    """Acceptance models by name."""

    iid = "iid"
    per_position = "per_position"
    difficulty = "difficulty"


ModelArgument = Annotated[Path, typer.Argument(help="Model made by `specsim acceptance fit`.", show_default=False)]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace what is at --out.")]


@acceptance.command()
def fit(
    source: Annotated[
        Path,
        typer.Argument(
            help="A trace (folder or .zip), rounds of real runs (.parquet, as `realrun validate` writes them), or "
            'counters per draft position (.json, {"drafted": [...], "accepted": [...]}).',
            show_default=False,
        ),
    ],
    model: Annotated[ModelKind, typer.Option(help="What to fit.", show_default=False)],
    out: Annotated[Path, typer.Option(help="Where to write the model, as JSON.", show_default=False)],
    policy: RoundsPolicyOption = None,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
) -> None:
    """Fit an acceptance model.

    Rounds that accept their whole draft are read as censored: they bound the match length from
    below. That holds for drafts whose end had nothing to do with how they would have gone on, so
    give rounds of a fixed draft length where you have them.

    Example: specsim acceptance fit counters.json --model per_position --out model.json
    """
    from specsim.acceptance.files import MODELS, as_document, save_model
    from specsim.acceptance.sources import describe, read_source, verified_by_depth
    from specsim.acceptance.synthetic import plain

    check_new(out, overwrite=overwrite)
    data = read_source(source, policy=policy)
    fitted = MODELS[model.value].fit(data)
    save_model(fitted, out, describe(data))
    if json:
        print_json(as_document(fitted, describe(data)))
        return
    accepted, verified = verified_by_depth(data)
    rows = [
        [str(i + 1), f"{verified[i]:,.0f}", f"{accepted[i]:,.0f}", f"{accepted[i] / verified[i]:.3f}"]
        for i in range(len(verified))
        if verified[i] > 0
    ]
    where = " (rounds that draft the whole depth)" if describe(data)["source"] == "dense trace" else ""
    print_table(f"{source}{where}", ["draft depth", "verified", "accepted", "rate"], rows)
    print_table(f"{model.value}, written to {out}", ["parameter", "value"], _parameter_rows(plain(fitted)))


@acceptance.command()
def generate(
    model: ModelArgument,
    out: Annotated[Path, typer.Option(help="Trace folder to write.", show_default=False)],
    sequences: Annotated[int, typer.Option(help="Sequences.", min=1)] = 100,
    output_tokens: Annotated[int, typer.Option(help="Output tokens of each.", min=1)] = 128,
    max_draft_tokens: Annotated[int, typer.Option(help="Longest draft recorded, in tokens.", min=1, max=255)] = 16,
    prompt_tokens: Annotated[int, typer.Option(help="Prompt tokens of each; costs depend on them.", min=1)] = 64,
    seed: SeedOption = 0,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
) -> None:
    """Write a synthetic dense trace, which `specsim replay` and `specsim tune` read like a recorded one.

    Its meta.json says that it is synthetic and holds the model.

    Example: specsim acceptance generate model.json --out synthetic --sequences 200
    """
    from specsim.acceptance.files import load_model
    from specsim.api.generate import generate as run_generate
    from specsim.trace.files import check_free, write_trace

    check_free(out, overwrite=overwrite)
    loaded = load_model(model)
    with progress_bar() as report:
        report("generate", 0, 2)
        trace = run_generate(
            loaded,
            sequences=sequences,
            output_tokens=output_tokens,
            depth=max_draft_tokens,
            prompt_tokens=prompt_tokens,
            seed=seed,
        )
        report("generate", 1, 2)
        write_trace(trace, out, overwrite=overwrite)
    document = {
        "trace": str(out),
        "model": loaded.name,
        "sequences": trace.sequences,
        "output_tokens": len(trace.token),
        "depth": max_draft_tokens,
        "seed": seed,
        "mean_match_len": float(trace.match_len.mean()),
    }
    if json:
        print_json(document)
        return
    print_table("synthetic trace", ["", "value"], [[key, _number(value)] for key, value in document.items()])


@acceptance.command()
def check(
    model: ModelArgument,
    trace: Annotated[Path, typer.Argument(help="Recorded trace to compare with.", show_default=False)],
    replicates: Annotated[int, typer.Option(help="Traces to generate.", min=2)] = 39,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Compare a model with a trace: accepted lengths, autocorrelation, calibration.

    Traces of the same size are generated from the model. The range holds 95 % of such traces: of a
    true model, about one statistic in twenty lies outside.

    Example: specsim acceptance check model.json TRACE
    """
    from specsim.acceptance.files import load_model
    from specsim.acceptance.goodness import fit_report
    from specsim.trace.files import read_plain_trace

    loaded, recorded = load_model(model), read_plain_trace(trace)
    with progress_bar() as report:
        result = fit_report(
            loaded,
            recorded,
            replicates=replicates,
            seed=seed,
            progress=lambda done, total: report("generate", done, total),
        )
    if json:
        print_json({"model": loaded.name, **result.as_dict()})
        return
    lengths = zip(result.accepted_length, result.model_accepted_length, strict=True)
    print_table(
        "match length, share of positions",
        ["tokens", "observed", "model"],
        [[str(length), f"{own:.4f}", f"{others:.4f}"] for length, (own, others) in enumerate(lengths)],
    )
    rows = [
        [s.name, f"{s.observed:.3f}", f"{s.model:.3f}", f"{s.low:.3f} to {s.high:.3f}", _yes(s.fits)]
        for s in result.statistics
    ]
    noise, distance = result.total_variation_noise, result.total_variation
    rows.insert(
        0,
        ["total variation of match lengths", f"{distance:.3f}", "", f"up to {noise:.3f}", _yes(distance <= noise)],
    )
    title = f"{loaded.name} against {trace}: {result.replicates} generated traces of {result.sequences} sequences"
    print_table(title, ["statistic", "observed", "model", "95 % range", "fits"], rows)


def _yes(fact: bool) -> str:
    return "yes" if fact else "no"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _parameter_rows(parameters: dict[str, Any]) -> list[list[str]]:
    """Parameters to read; of a long table its ends and middle."""
    rows = []
    for name, value in parameters.items():
        values = value if isinstance(value, tuple | list) else [value]
        if len(values) > 32:
            text = f"{_number(values[0])} ... {_number(values[len(values) // 2])} ... {_number(values[-1])}"
        else:
            text = ", ".join(_number(one) for one in values)
        rows.append([name, text])
    return rows
