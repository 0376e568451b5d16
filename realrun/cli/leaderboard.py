"""The command `leaderboard`: all drafters of a target with their best policies, at equal cost accounting."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from realrun.cli.options import (
    ClockName,
    ClockOption,
    DeviceOption,
    DraftModelOption,
    DtypeOption,
    JsonOption,
    Kernels,
    KernelsOption,
    MaxDraftTokensOption,
    MaxNewTokensOption,
    NumPromptsOption,
    PolicyFileOption,
    PromptsOption,
    RepeatsOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    ThreadsOption,
    TokenizerDifferenceOption,
    TopKOption,
    TopPOption,
    TreeWidthOption,
    TrialsOption,
    TuningShareOption,
    how_to_go_on,
    load,
    load_prompts,
)
from specsim.cli.console import print_json, print_table, progress_bar


class ExactMode(StrEnum):
    """How the target chooses tokens; the ways of `realrun.cli.options.Mode` that are replayed exactly."""

    greedy = "greedy"
    gumbel = "gumbel"


def leaderboard(
    out: Annotated[Path, typer.Option(help="Folder for all that is measured, the result and the report.")] = Path(
        "leaderboard"
    ),
    drafters: Annotated[
        str | None,
        typer.Option(
            help="Drafters, comma-separated: model (with --draft-model), prompt-lookup, names of the lab's, or folders "
            "made by `realrun train`. Default: all of the lab's.",
            show_default=False,
        ),
    ] = None,
    target: TargetOption = "lab",
    draft_model: DraftModelOption = "lab",
    allow_tokenizer_difference: TokenizerDifferenceOption = False,
    prompts: PromptsOption = None,
    num_prompts: NumPromptsOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    max_draft_tokens: MaxDraftTokensOption = 16,
    tree_nodes: Annotated[int, typer.Option(help="Nodes of every recorded tree; 0 compares chains alone.", min=0)] = 64,
    tree_width: TreeWidthOption = 10,
    mode: Annotated[
        ExactMode, typer.Option(help="Greedy, or sampling with Gumbel noise; both are replayed exactly.")
    ] = ExactMode.gumbel,
    temperature: TemperatureOption = 0.8,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    policy: Annotated[
        list[str], typer.Option(help="A policy to tune, by name or FILE.py; repeat for more. Default: all.")
    ] = [],  # noqa: B006 (typer reads the default, nobody changes it)
    policy_file: PolicyFileOption = [],  # noqa: B006
    trials: TrialsOption = 100,
    measure: Annotated[
        bool, typer.Option("--measure/--predict-only", help="Really decode the held-out prompts with every row.")
    ] = True,
    repeats: RepeatsOption = 3,
    tuning_share: TuningShareOption = 0.5,
    seed: SeedOption = 0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    threads: ThreadsOption = 1,
    kernels: KernelsOption = Kernels.auto,
    clock: ClockOption = ClockName.wall,
    overwrite: Annotated[bool, typer.Option(help="Start anew, replacing what an earlier start left there.")] = False,
    json: JsonOption = False,
) -> None:
    """Rank all drafters, each with its best fixed K, adaptive chain and tree, and with its paper's own policy.

    All get the same prompts, half of them to tune on and half to be ranked on. Policies are tuned under the median
    costs of profiles that all drafters and the plain target take in turns; what tuning promises is the forecast,
    written before a held-out prompt is decoded. Then all rows and two plain baselines decode every prompt at once, in
    turns of two rounds, so that drift of the machine hits all alike.

    Columns: forecast; measured speedup by medians, with an interval that holds for all rows at once, and by the wall
    clock; the speedup replayed at the costs of the run's own rounds, and its error; "behind", the leader's speedup less
    the row's; "without loops", the speedup over prompts whose text does not repeat itself; tau, output tokens per
    target pass; v_d, accepted over drafted tokens; HM, the harmonic mean of v_d and accepted over output tokens. A star
    marks the row of each drafter that was best on the tuning prompts. MEDUSA-2 and SPACE come with a target of their
    own, of the same architecture, whose text differs: speed is compared, not what they write.

    Started again, the command goes on where it ended. Writes a folder per drafter (trace/, profile.json,
    tuning_profile.json, tuned.json), forecast.json, decoded/, leaderboard.json, leaderboard.csv and report.html.

    Example: realrun leaderboard --out board --drafters model,medusa-1,prompt-lookup --mode greedy
    """
    from realrun.decode.sampling import Sampler
    from realrun.leaderboard.job import Settings, named, run_leaderboard
    from realrun.lm.clock import check_clock, use_clock
    from realrun.lm.kernels import use_kernels
    from realrun.pairs.pair import LOOKUP
    from realrun.pairs.prompts import prompts_source
    from realrun.recording.record import RecordSettings, longest_prompt
    from specsim.files import working_in
    from specsim.policy.registry import POLICIES, find_policies

    check_clock(clock.value, device, threads)
    sampler = Sampler(mode.value, temperature, seed, top_p, top_k)
    source = prompts_source(target, prompts)
    settings = Settings(
        record=RecordSettings(max_draft_tokens, max_new_tokens, sampler, tree_nodes, tree_width, source),
        kinds=tuple(find_policies([*(policy or POLICIES), *policy_file]).values()),
        trials=trials,
        repeats=repeats if measure else 0,
        tuning_share=tuning_share,
        seed=seed,
    )
    names = named(drafters, target)
    where = target, draft_model, device, dtype, threads
    with (
        working_in(out, how_to_go_on(overwrite)),
        use_kernels(kernels.value),
        use_clock(clock.value),
        progress_bar() as report,
    ):
        plain = load(*where, "none", LOOKUP)
        pairs = {name: load(*where, "auto", given, plain, allow_tokenizer_difference) for name, given in names.items()}
        longest = min(longest_prompt(pair, max_new_tokens, max_draft_tokens) for pair in pairs.values())
        chosen = load_prompts(plain, prompts, num_prompts, longest)
        document = run_leaderboard(pairs, plain, chosen, settings, out, report, overwrite=overwrite)
    if json:
        print_json(document)
    else:
        print_board(document)
        print(f"report: {out / 'report.html'}")


def print_board(document: Mapping[str, Any]) -> None:
    """The ranking as a table."""
    from specsim.report.documents import drafters_columns, drafters_rows
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

    measured = document["options"]["repeats"] > 0
    sequences = document["sequences"]
    print(f"prompts: {prompts_text(document['prompts'])}")
    title = (
        f"{document['target']}: tuned on {sequences['tuning']} prompts, ranked on {sequences['holdout']} others, "
        f"{document['output_tokens']} tokens, 95 % intervals"
    )
    print_table(title, *as_text(drafters_columns(measured=measured), drafters_rows(document)), labels=2)
    for line in truncated_text(document["rows"]):
        print(line)
    if measured:
        print(f"measured: {repeats_text(document['options']['repeats'])}; wall clock: all repeats summed")
        for line in wall_clock_text(document["rows"]):
            print(line)
        print(f"machine: {machine_text(document)}")
        print(floor_text(document))
        error = document["median_abs_error_percent"]
        print(f"median error of replay at the costs of the run's own rounds: {error:.2f} %")
        print(choice_text(document["choice"]))
    top = document["rows"][0]
    speedup = top["measured"] if measured else top["speedup"]
    print(speculation_text(top["label"], speedup, document["noise_floor_percent"] or 0.0))
    if document["looping_prompts"]:
        print(f"prompts whose text repeats itself: {document['looping_prompts']} of {sequences['holdout']}")
