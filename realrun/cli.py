"""The `realrun` command: real models. Record, profile, validate; train the lab."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from realrun.board.command import leaderboard
from realrun.campaign.command import campaign
from realrun.options import (
    CountOption,
    DepthOption,
    DeviceOption,
    DrafterOption,
    DraftOption,
    DtypeOption,
    JsonOption,
    Kernels,
    KernelsOption,
    Mode,
    ModeOption,
    OverwriteOption,
    PredictorOption,
    PromptsOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    ThreadsOption,
    TokensOption,
    TopPOption,
    TreeNodesOption,
    TreeWidthOption,
    load,
    load_prompts,
)
from realrun.shape_commands import cost_grid, scripted, shapes
from realrun.train_commands import train as train_group
from realrun.typical_command import typical
from specsim.console import print_json, print_table, progress_bar, run

app = typer.Typer(
    help="Run speculative decoding for real: record traces, profile the machine, validate predictions.\n\n"
    "Without --target and --draft, the embedded lab is used: a small pair trained on Python's standard library.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
lab = typer.Typer(help="Train and examine the embedded lab's models.", no_args_is_help=True)
app.add_typer(lab, name="lab")
app.add_typer(train_group, name="train")
for _command in (campaign, cost_grid, leaderboard, scripted, shapes, typical):
    app.command()(_command)


@app.command()
def record(
    out: Annotated[Path, typer.Argument(help="Trace folder to write.", show_default=False)],
    target: TargetOption = "lab",
    draft: DraftOption = "lab",
    drafter: DrafterOption = "model",
    predictor: PredictorOption = "auto",
    prompts: PromptsOption = None,
    count: CountOption = 36,
    max_new_tokens: TokensOption = 128,
    depth: DepthOption = 16,
    tree_nodes: TreeNodesOption = 0,
    tree_width: TreeWidthOption = 10,
    mode: ModeOption = Mode.gumbel,
    temperature: TemperatureOption = 0.8,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    threads: ThreadsOption = 1,
    kernels: KernelsOption = Kernels.auto,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
) -> None:
    """Record a dense trace: what the drafter would propose at every position of the target's output."""
    from realrun.choice import Choice
    from realrun.kernels import use_kernels
    from realrun.record import RecordSettings, elapsed_ratio
    from realrun.record import record as run_record
    from specsim.trace_files import check_free, write_trace

    check_free(out, overwrite=overwrite)
    choice = Choice(mode.value, temperature, seed, top_p)
    settings = RecordSettings(depth, max_new_tokens, choice, tree_nodes, tree_width)
    pair = load(target, draft, device, dtype, threads, predictor, drafter)
    with use_kernels(kernels.value), progress_bar() as report:
        chosen = load_prompts(pair, prompts, count)
        trace = run_record(pair, chosen, settings, lambda done, total: report("record", done, total))
    write_trace(trace, out, overwrite=overwrite)
    document = {
        "trace": str(out),
        "sequences": trace.sequences,
        "output_tokens": int(trace.output_tokens.sum()),
        "mean_match_len": float(trace.match_len.mean()),
        **({} if trace.tree is None else {"mean_tree_nodes": float(trace.tree.count.mean())}),
        "first_token_accepted_share": trace.meta["first_token_accepted_share"],
        "distinct_trigram_share": trace.meta["distinct_trigram_share"],
        "time_over_generation": elapsed_ratio(trace),
    }
    if json:
        print_json(document)
    else:
        rows = [[k, f"{v:.3f}" if isinstance(v, float) else str(v)] for k, v in document.items()]
        print_table("recorded", ["", "value"], rows)


@app.command()
def profile(
    out: Annotated[Path, typer.Argument(help="Profile to write, JSON.", show_default=False)],
    target: TargetOption = "lab",
    draft: DraftOption = "lab",
    drafter: DrafterOption = "model",
    predictor: PredictorOption = "auto",
    contexts: Annotated[str, typer.Option(help="Cached tokens to measure at, comma-separated.")] = "32,64,128,256",
    depth: DepthOption = 16,
    repeats: Annotated[int, typer.Option(help="Timed rounds per size and context.", min=2)] = 40,
    tree_tokens: Annotated[
        int, typer.Option(help="Largest draft tree to measure, in tokens; 0 measures no trees.", min=0)
    ] = 65,
    mode: ModeOption = Mode.gumbel,
    temperature: TemperatureOption = 0.8,
    top_p: TopPOption = 1.0,
    seed: SeedOption = 0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    threads: ThreadsOption = 1,
    kernels: KernelsOption = Kernels.auto,
    json: JsonOption = False,
) -> None:
    """Measure draft steps, verification of 1..D+1 tokens and of trees, policy steps and round overhead."""
    from realrun.choice import Choice
    from realrun.kernels import use_kernels
    from realrun.profile import profile as run_profile
    from realrun.profile import write_json
    from specsim.errors import InputError

    try:
        grid = [int(c) for c in contexts.split(",")]
    except ValueError:
        raise InputError(f"--contexts {contexts!r} is no list of whole numbers; write for example 64,128,256") from None
    pair = load(target, draft, device, dtype, threads, predictor, drafter)
    with use_kernels(kernels.value), progress_bar() as report:
        document = run_profile(
            pair,
            contexts=grid,
            depth=depth,
            repeats=repeats,
            choice=Choice(mode.value, temperature, seed, top_p),
            seed=seed,
            tree_tokens=tree_tokens,
            progress=lambda done, total: report("profile", done, total),
        )
    write_json(document, out)
    if json:
        print_json(document)
        return
    median = document["median_s"]
    depth = len(median["draft_step"])  # less than asked for where the drafter goes no further
    rows = []
    for column, context in enumerate(grid):
        verify = [row[column] for row in median["verify"]]
        cells = [
            sum(row[column] for row in median["draft_step"]) / depth,
            median["autoregressive"][column],
            verify[0],
            verify[depth // 2],
            verify[depth],
            *([median["tree"]["verify"][-1][column]] if "tree" in median else []),
        ]
        rows.append([str(context), *(f"{1e3 * x:.2f}" for x in cells)])
    columns = [
        "context",
        "draft step",
        "autoregressive step",
        "verify 1",
        f"verify {depth // 2 + 1}",
        f"verify {depth + 1}",
        *([f"verify tree of {tree_tokens}"] if "tree" in median else []),
    ]
    print_table(f"{document['provenance']['device']}, median milliseconds", columns, rows)


@app.command()
def validate(
    out: Annotated[Path, typer.Option(help="Folder for trace, profile, result and report.")] = Path("validation"),
    target: TargetOption = "lab",
    draft: DraftOption = "lab",
    drafter: DrafterOption = "model",
    predictor: PredictorOption = "auto",
    prompts: PromptsOption = None,
    count: CountOption = 36,
    max_new_tokens: TokensOption = 128,
    depth: DepthOption = 16,
    tree_nodes: TreeNodesOption = 0,
    tree_width: TreeWidthOption = 10,
    mode: ModeOption = Mode.gumbel,
    temperature: TemperatureOption = 0.8,
    top_p: TopPOption = 1.0,
    policy: Annotated[
        list[str], typer.Option(help="A policy to compare, by name or FILE.py; repeat for more. Default: all.")
    ] = [],  # noqa: B006 (typer reads the default, nobody changes it)
    also: Annotated[
        list[str], typer.Option(help="Policies of your own beside those, FILE.py or FILE.py:NAME.", metavar="FILE.py")
    ] = [],  # noqa: B006
    trials: Annotated[int, typer.Option(help="Configurations tried per policy.", min=1)] = 100,
    repeats: Annotated[int, typer.Option(help="Timed runs of every hold-out prompt and policy.", min=1)] = 3,
    tuning_share: Annotated[float, typer.Option(help="Share of the prompts to tune on.")] = 0.5,
    max_error: Annotated[
        float | None, typer.Option(help="Exit with 1 if the median absolute error exceeds this many percent.")
    ] = None,
    seed: SeedOption = 0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    threads: ThreadsOption = 1,
    kernels: KernelsOption = Kernels.auto,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
) -> None:
    """The main job: record, profile, tune every policy offline, predict, really decode, compare.

    With --tree-nodes trees are recorded and profiled too, and tree policies join the chains.
    A trace that is already in the output folder and was made with the same settings is
    used again. Writes trace/, profile.json, validation.json, rounds.parquet and report.html.
    """
    from realrun.choice import Choice
    from realrun.kernels import use_kernels
    from realrun.main_job import Settings, run_main_job
    from realrun.record import RecordSettings
    from specsim.policy import POLICIES
    from specsim.policy.files import find_policies

    settings = Settings(
        record=RecordSettings(
            depth, max_new_tokens, Choice(mode.value, temperature, seed, top_p), tree_nodes, tree_width
        ),
        kinds=tuple(find_policies([*(policy or POLICIES), *also]).values()),
        trials=trials,
        repeats=repeats,
        tuning_share=tuning_share,
        seed=seed,
        overwrite=overwrite,
    )
    pair = load(target, draft, device, dtype, threads, predictor, drafter)
    with use_kernels(kernels.value), progress_bar() as report:
        document = run_main_job(pair, load_prompts(pair, prompts, count), settings, out, report)
    if json:
        print_json(document)
    else:
        _print_validation(document, out)
    if max_error is not None and not document["median_abs_error_percent"] <= max_error:
        raise typer.Exit(1)


def _print_validation(document: dict, out: Path) -> None:  # type: ignore[type-arg]
    def interval(values: dict[str, float]) -> str:
        return f"{values['estimate']:.3f} [{values['low']:.3f}, {values['high']:.3f}]"

    rows = [["autoregressive", "baseline", "1.000", "1.000", *[""] * 4]]
    for row in document["rows"]:
        rows.append(
            [
                row["label"],
                row["role"],
                interval(row["predicted"]),
                interval(row["measured"]),
                f"{row['error_percent']:+.1f}",
                "approximate" if document["approximate"] else f"{row['rounds_identical_percent']:.2f}",
                f"{row['tau']:.2f}",
                f"{100 * row['oracle_regret']:.1f} %",
            ]
        )
    columns = [
        "policy",
        "settings",
        "predicted speedup",
        "measured speedup",
        "error %",
        "rounds identical %",
        "tau",
        "regret",
    ]
    title = f"{document['sequences']['holdout']} hold-out sequences, {document['output_tokens']} tokens, 95 % intervals"
    print_table(title, columns, rows)
    if document["skipped"]:
        print_table("not compared", ["policy", "reason"], [[s["policy"], s["reason"]] for s in document["skipped"]])
    best = document["best"]
    print(f"median absolute error: {document['median_abs_error_percent']:.2f} %")
    print(
        f"predicted best: {best['predicted']}, {best['loss_percent']:.2f} % below the measured best {best['measured']}"
    )
    print(f"report: {out / 'report.html'}")


@lab.command()
def train(
    work: Annotated[Path, typer.Option(help="Folder for checkpoints; a second run resumes from it.")] = Path(
        "lab-work"
    ),
    out: Annotated[Path, typer.Option(help="Folder for the trained models.")] = Path("lab-weights"),
    target_tokens: Annotated[float, typer.Option(help="Training tokens of the target, in millions.")] = 17,
    draft_tokens: Annotated[float, typer.Option(help="Training tokens of the draft model, in millions.")] = 12,
    distill_tokens: Annotated[float, typer.Option(help="Further tokens of distillation, in millions.")] = 4,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = 0,
    seed: SeedOption = 0,
) -> None:
    """Train tokenizer, target and draft model from Python's standard library. Hours on a CPU."""
    import torch

    from realrun.lab.train import train_lab

    if threads:
        torch.set_num_threads(threads)
    million = 1_000_000
    train_lab(
        work,
        out,
        target_tokens=int(target_tokens * million),
        draft_tokens=int(draft_tokens * million),
        distill_tokens=int(distill_tokens * million),
        device=device,
        seed=seed,
    )


@lab.command()
def evaluate(
    target: TargetOption = "lab",
    draft: DraftOption = "lab",
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    threads: ThreadsOption = 1,
    json: JsonOption = False,
) -> None:
    """Held-out loss of both models in nats per token, and how often their top tokens agree."""
    from realrun.lab.evaluate import evaluate as run_evaluate

    document = run_evaluate(load(target, draft, device, dtype, threads))
    if json:
        print_json(document)
    else:
        print_table("held-out text", ["", "value"], [[k, f"{v:.3f}"] for k, v in document.items()])


def main() -> None:
    """Entry point of the console command."""
    run(app)
