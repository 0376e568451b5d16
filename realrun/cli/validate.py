"""`realrun validate`: predicted against measured speedup."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from realrun.cli.options import (
    ClockName,
    ClockOption,
    DeviceOption,
    DrafterOption,
    DraftModelOption,
    DtypeOption,
    JsonOption,
    Kernels,
    KernelsOption,
    MaxDraftTokensOption,
    MaxNewTokensOption,
    Mode,
    ModeOption,
    NumPromptsOption,
    OverwriteOption,
    PolicyFileOption,
    PredictorOption,
    PromptsOption,
    RepeatsOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    ThreadsOption,
    TokenizerDifferenceOption,
    TopKOption,
    TopPOption,
    TreeNodesOption,
    TreeWidthOption,
    TrialsOption,
    TuningShareOption,
    how_to_go_on,
    load,
    load_prompts,
    refuse_beside,
)
from specsim.cli.console import print_json, print_table, progress_bar

RECORDED = (  # what --trace decides
    "prompts",
    "num_prompts",
    "max_new_tokens",
    "max_draft_tokens",
    "tree_nodes",
    "tree_width",
    "mode",
    "temperature",
    "top_p",
    "top_k",
    "overwrite",
)
TUNED = (*RECORDED, "policy", "trials", "repeats", "tuning_share", "seed")  # what --like decides


def validate(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for trace, profile, result and report.")] = Path("validation"),
    target: TargetOption = "lab",
    draft_model: DraftModelOption = "lab",
    allow_tokenizer_difference: TokenizerDifferenceOption = False,
    drafter: DrafterOption = "model",
    join: Annotated[
        list[str],
        typer.Option(
            help="Draft with this one too, ahead of --drafter: policies that choose the drafter of every round are "
            "compared with each drafter alone; repeat for a third.",
            metavar="DRAFTER",
        ),
    ] = [],  # noqa: B006
    predictor: PredictorOption = "auto",
    trace: Annotated[
        Path | None,
        typer.Option(
            help="A trace of this pair, made by `realrun record`, to be used in place of a new one; its prompts and "
            "settings are those that it was recorded with.",
            show_default=False,
        ),
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option(
            help="The folder of a finished validation, to be done again with the policies as it tuned them, on its "
            "prompts and in its way, so that `specsim claims diff` can compare the two row by row.",
            show_default=False,
        ),
    ] = None,
    prompts: PromptsOption = None,
    num_prompts: NumPromptsOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    max_draft_tokens: MaxDraftTokensOption = 16,
    tree_nodes: TreeNodesOption = 0,
    tree_width: TreeWidthOption = 10,
    mode: ModeOption = Mode.gumbel,
    temperature: TemperatureOption = 0.8,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    policy: Annotated[
        list[str], typer.Option(help="A policy to compare, by name or FILE.py; repeat for more. Default: all.")
    ] = [],  # noqa: B006 (typer reads the default, nobody changes it)
    policy_file: PolicyFileOption = [],  # noqa: B006
    trials: TrialsOption = 100,
    repeats: RepeatsOption = 3,
    tuning_share: TuningShareOption = 0.5,
    max_error: Annotated[
        float | None, typer.Option(help="Exit with 1 if the median absolute error exceeds this many percent.")
    ] = None,
    seed: SeedOption = 0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    threads: ThreadsOption = 1,
    kernels: KernelsOption = Kernels.auto,
    clock: ClockOption = ClockName.wall,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
) -> None:
    """Predict speedups and measure them: record, profile, tune every policy offline, predict, really decode, compare.

    With --tree-nodes trees are recorded and profiled too, and tree policies join the chains.
    A trace that is already in the output folder and was made with the same settings is
    used again; --trace names one that lies elsewhere. Started again after an interruption, the same command goes on:
    what was tuned and decoded is kept in validation.partial/ until the result is written. Writes trace/, profile.json,
    validation.json, rounds.parquet and report.html.

    With --join several drafters share the target, as `specsim join` has it: each is recorded and profiled alone, and
    switching policies and each drafter alone are tuned, predicted and really decoded. Writes a trace for each
    drafter, cost.json and validation.json.

    --like does a finished validation again, with the same policies and settings and without tuning; the models are
    given as before, and must be the same.

    Example: realrun validate --trace TRACE --target MODEL --draft-model SMALL_MODEL --out validation
    """
    from realrun.decode.sampling import Sampler
    from realrun.leaderboard.joined import validate_joined
    from realrun.lm.clock import check_clock, use_clock
    from realrun.lm.kernels import use_kernels
    from realrun.pairs.joined import join_pairs
    from realrun.pairs.prompts import prompts_source
    from realrun.recording.again import prompts_of, settings_of
    from realrun.recording.record import RecordSettings, longest_prompt
    from realrun.validation.like import read_like
    from realrun.validation.run import ValidationSettings
    from realrun.validation.run import validate as run_validation
    from realrun.validation.timing import check_repeats
    from specsim.files import working_in
    from specsim.policy.registry import POLICIES, SWITCH_POLICIES, find_policies
    from specsim.trace.files import read_plain_trace

    check_clock(clock.value, device, threads)
    check_repeats(repeats)
    old = recorded = None
    if join:
        refuse_beside(ctx, "join", ("trace", "like", "predictor"))
    if like is not None:
        refuse_beside(ctx, "like", TUNED)
        old = read_like(like, trace=trace, files=policy_file)
        recorded, settings = old.prompts, old.settings
    else:
        if trace is None:
            sampler, source = Sampler(mode.value, temperature, seed, top_p, top_k), prompts_source(target, prompts)
            record = RecordSettings(max_draft_tokens, max_new_tokens, sampler, tree_nodes, tree_width, source)
        else:
            refuse_beside(ctx, "trace", RECORDED)
            given = read_plain_trace(trace)
            recorded, record = prompts_of(given, str(trace)), settings_of(given, str(trace))
        settings = ValidationSettings(
            record=record,
            kinds=tuple(find_policies([*(policy or (SWITCH_POLICIES if join else POLICIES)), *policy_file]).values()),
            trials=trials,
            repeats=repeats,
            tuning_share=tuning_share,
            seed=seed,
            overwrite=overwrite,
            trace=trace,
        )
    where = target, draft_model, device, dtype, threads
    with (
        working_in(out, how_to_go_on(overwrite)),
        use_kernels(kernels.value),
        use_clock(clock.value),
        progress_bar() as report,
    ):
        last = load(
            *where, "none" if join else predictor, drafter, allow_tokenizer_difference=allow_tokenizer_difference
        )
        pairs = [*(load(*where, drafter=name, beside=last) for name in join), last]
        pair = join_pairs(pairs) if join else last
        if old is not None:
            old.prepare(out)
        longest = longest_prompt(pair, max_new_tokens, max_draft_tokens)
        chosen = load_prompts(pair, prompts, num_prompts, longest) if recorded is None else recorded
        if join:
            document = validate_joined(pairs, chosen, settings, out, report)
        else:
            document = run_validation(pair, chosen, settings, out, report)
    if json:
        print_json(document)
    elif join:
        _print_joined(document, out)
    else:
        _print_validation(document, out)
    if not join and not resolves_something(document):
        print(
            "this run resolves nothing: no speedup differs from another's, or from none, by more than the noise floor; "
            "run it again on a quieter machine, or with more prompts or repeats",
            file=sys.stderr,
        )
        raise typer.Exit(1)
    if max_error is not None and not document["median_abs_error_percent"] <= max_error:
        raise typer.Exit(1)


def resolves_something(document: Mapping[str, Any]) -> bool:
    """Whether any two rows, or the fastest and the baseline, differ by more than the noise floor."""
    from specsim.speedup.intervals import beyond_floor

    rows = document["rows"]
    fastest = rows[0]["measured"]["estimate"]
    return any(row["resolved"] for row in rows) or beyond_floor(document["noise_floor_percent"], fastest, 1.0)


def _print_joined(document: dict[str, Any], out: Path) -> None:
    from specsim.report.page import choice_text, floor_text, machine_text, speculation_text, wall_clock_text
    from specsim.speedup.intervals import interval_text

    print(f"machine: {machine_text(document)}")
    print(floor_text(document))
    rows = [
        [
            row["label"],
            f"{row['train_speedup']:.3f}",
            interval_text(row["measured"]),
            f"{row['wall_clock_speedup']['estimate']:.3f}",
            interval_text(row["predicted"]),
            f"{row['error_percent']:+.1f} %",
            f"{row['rounds_identical_percent']:.2f} %",
            " / ".join(map(str, row["rounds_of_drafters"])),
        ]
        for row in document["rows"]
    ]
    columns = [
        "policy",
        "forecast",
        "measured speedup",
        "wall clock",
        "from own rounds",
        "error",
        "rounds identical",
        "rounds by drafter",
    ]
    names = ", ".join(f"{number} {name}" for number, name in enumerate(document["drafters"], start=1))
    title = f"{document['sequences']['holdout']} hold-out sequences, 95 % intervals; drafters: {names}"
    print_table(title, columns, rows)
    if document["skipped"]:
        print_table("not compared", ["policy", "reason"], [[s["policy"], s["reason"]] for s in document["skipped"]])
    found = document["switching"]
    print(f"best single drafter: {found['best_single']}; best switch: {found['best_switch']}")
    gains = [interval_text(found[how]["difference"]) for how in ("predicted", "measured")]
    told = "" if found["resolved"] else ", which is not significant"
    print(f"the switch's speedup is higher by {gains[1]}{told}; from the run's own rounds by {gains[0]}")
    for line in wall_clock_text(document["rows"]):
        print(line)
    print(choice_text(document["choice"]))
    top = document["rows"][0]
    print(speculation_text(top["label"], top["measured"], document["noise_floor_percent"]))
    print(f"all of it: {out / 'validation.json'}")


def _print_validation(document: dict[str, Any], out: Path) -> None:
    from specsim.report.documents import VALIDATION_COLUMNS, validation_rows
    from specsim.report.page import (
        choice_text,
        floor_text,
        machine_text,
        prompts_text,
        repeats_text,
        speculation_text,
        truncated_text,
        wall_clock_text,
    )
    from specsim.report.table import as_text

    print(f"machine: {machine_text(document)}")
    print(floor_text(document))
    print(f"prompts: {prompts_text(document['prompts'])}")
    title = f"{document['sequences']['holdout']} hold-out sequences, {document['output_tokens']} tokens, 95 % intervals"
    print_table(title, *as_text(VALIDATION_COLUMNS, validation_rows(document)))
    print(f"measured: {repeats_text(document['options']['repeats'])}; wall clock: all repeats summed")
    for line in [*wall_clock_text(document["rows"]), *truncated_text(document["rows"])]:
        print(line)
    departures = [row["divergences"]["first"] for row in document["rows"] if "divergences" in row]
    if departures:
        counts = ", ".join(f"{sum(one[cause] for one in departures)} {cause}" for cause in departures[0])
        print(f"first departures from the replay, of sequences that have one: {counts}")
    if document["skipped"]:
        print_table("not compared", ["policy", "reason"], [[s["policy"], s["reason"]] for s in document["skipped"]])
    print(
        f"error of replay at the costs of the run's own rounds: median {document['median_abs_error_percent']:.2f} %, "
        f"90th percentile {document['p90_abs_error_percent']:.2f} %"
    )
    print(
        f"the same at costs without the policy's own rounds: median {document['median_abs_unseen_error_percent']:.2f} %"
    )
    if document["choice"]:
        print(choice_text(document["choice"]))
    top = document["rows"][0]
    print(speculation_text(top["label"], top["measured"], document["noise_floor_percent"]))
    print(f"report: {out / 'report.html'}")
