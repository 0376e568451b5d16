"""`realrun board`: all drafters of a target with their best policies, at equal cost accounting."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from realrun.cli.options import (
    OVERWRITE_HELP,
    RecordOptions,
    TimedSettings,
    TokenizerSettings,
    TuneOptions,
    working,
)
from specsim.cli.command import Answer
from specsim.cli.console import print_table
from specsim.io.settings import Settings, setting

if TYPE_CHECKING:
    from specsim.report.experiment import DrafterBoard


@dataclass(frozen=True, kw_only=True)
class BoardFolder(Settings):
    """Which drafters to rank, and where."""

    out: Path = setting(Path("leaderboard"), "Folder for measurements, result and report.")
    drafters: str | None = setting(
        None,
        "Drafters, comma-separated: model (with --draft-model), prompt-lookup, names of the lab's drafters, or folders "
        "made by `realrun train`. Default: all of the lab's.",
    )
    overwrite: bool = setting(False, OVERWRITE_HELP, flag="--overwrite/--no-overwrite")


@dataclass(frozen=True, kw_only=True)
class BoardRecordOptions(RecordOptions):
    """What to record for a ranking, which only takes what replays exactly."""

    tree_nodes: int = setting(
        64, "Nodes of every recorded tree; 0, or --policy without a tree policy, compares chain policies alone.", low=0
    )
    mode: Literal["greedy", "greedy-draft", "gumbel"] = setting(
        "greedy-draft",
        "greedy: no sampling. Otherwise the target samples, and the drafter proposes: greedy-draft, its likeliest "
        "tokens, as engines do by default; gumbel, what it chooses by the target's noise. All replay exactly.",
    )


@dataclass(frozen=True, kw_only=True)
class BoardTuneOptions(TuneOptions):
    """How policies are tuned for a ranking."""

    policy: list[str] = setting([], "Policy to tune, by name or FILE.py; repeat for more. Default: all.")
    measure: bool = setting(
        True, "Decode the held-out prompts with every row for real.", flag="--measure/--predict-only"
    )


def board(
    folder: BoardFolder,
    models: TokenizerSettings,
    record: BoardRecordOptions,
    tune: BoardTuneOptions,
    machine: TimedSettings,
) -> Answer:
    """Rank all drafters with their best policies.

    Every drafter is ranked with its best fixed K, adaptive chain and tree, and its paper's own policy. All get the
    same prompts: half to tune on, half held out for the ranking. Policies are tuned under the median costs of profiles
    that all drafters and the plain target take in turns. The forecast is written before any held-out prompt is
    decoded. Then all rows and two baselines decode every prompt in turns of two rounds, so that drift of the machine
    affects all of them equally.

    Columns: forecast; measured speedup by medians, with a simultaneous 95 % interval, and by the wall clock; speedup
    replayed at the costs of the run's own rounds, and its error; "behind", the leader's speedup minus the row's;
    "slower?", whether the row is significantly slower than the leader; "without loops", the speedup over prompts whose
    text does not repeat itself; tau, mean acceptance length; v_d, draft acceptance rate. A star marks each drafter's
    best row on the tuning prompts. MEDUSA-2 and SPACE come with a target of their own with the same architecture:
    compare their speed, not their text.

    After an interruption the same command goes on. Writes a folder per drafter (trace/, profile.json,
    tuning_profile.json, tuned.json), forecast.json, decoded/, leaderboard.json, leaderboard.csv and report.html.

    Example: realrun board --out board --drafters model,medusa-1,prompt-lookup --mode greedy
    """
    from realrun.experiment.timing import check_repeats
    from realrun.leaderboard.job import BoardSettings, named, run_leaderboard
    from realrun.measure.record import longest_prompt
    from realrun.pairs.pair import LOOKUP
    from specsim.policy.registry import POLICIES
    from specsim.policy.tree.base import TreePolicy

    machine.check()
    if tune.measure:
        check_repeats(tune.repeats)
    search = {**tune.search, "repeats": tune.repeats if tune.measure else 0}
    kinds, recording = tune.kinds([*POLICIES]), record.settings(models.target, tune.seed)
    if not any(issubclass(kind, TreePolicy) for kind in kinds):
        recording = replace(recording, tree_nodes=0)  # which would take most of the time
    settings = BoardSettings(recording, kinds, **search)
    sources = named(folder.drafters, models.target)
    with working(folder.out, machine, overwrite=folder.overwrite) as report:
        plain = models.load(machine, drafter=LOOKUP)
        pairs = {
            name: models.load(machine, predictor="auto", drafter=source, beside=plain)
            for name, source in sources.items()
        }
        lengths = record.max_new_tokens, record.max_draft_tokens
        prompts = record.load(plain, min(longest_prompt(pair, *lengths) for pair in pairs.values()))
        board = run_leaderboard(pairs, plain, prompts, settings, folder.out, report, overwrite=folder.overwrite)

    def show() -> None:
        print_board(board)
        print(f"report: {folder.out / 'report.html'}")

    return Answer(board.as_dict(), show)


def print_board(board: DrafterBoard) -> None:
    """Print the ranking as a table, and what qualifies it."""
    from specsim.report import page
    from specsim.report.documents import ERROR_COLUMNS, drafters_columns, drafters_rows, error_rows
    from specsim.report.table import as_text

    rows, leader, floor_percent = board.rows, board.rows[0], board.noise_floor_percent
    print(f"prompts: {page.prompts_text(board.prompts)}")
    title = (
        f"{board.target}: tuned on {board.sequences.tuning} prompts, ranked on {board.sequences.holdout} others, "
        f"{board.output_tokens} tokens, 95 % intervals"
    )
    measured = board.options.repeats > 0
    print_table(title, *as_text(drafters_columns(measured=measured), drafters_rows(board)), labels=2)
    for line in page.truncated_text((row.label, row.truncated_share) for row in rows):
        print(line)
    if floor_percent is not None and board.null_arm is not None:
        print(f"measured: {page.repeats_text(board.options.repeats)}; wall clock: all repeats summed")
        for line in page.wall_clock_text(rows):
            print(line)
        print(f"machine: {page.machine_text(board)}")
        print(page.floor_text(floor_percent, board.null_arm))
        print(page.forecast_text(board.forecast, rows))
        print_table("errors against the measurement", *as_text(ERROR_COLUMNS, error_rows(board.errors)))
    if board.choice is not None:
        print(page.choice_text(board.choice))
    print(page.speculation_text(leader.label, leader.measured or leader.speedup, floor_percent or 0.0))
    if board.looping_prompts:
        print(f"prompts whose text repeats itself: {board.looping_prompts} of {board.sequences.holdout}")
