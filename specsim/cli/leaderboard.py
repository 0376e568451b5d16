"""`specsim leaderboard`: tune and rank policies on recorded traces."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from specsim.cli.command import Answer
from specsim.cli.console import claim_file, print_notes, print_skipped, print_table, progress_bar
from specsim.cli.options import (
    DRAFT_COST_HELP,
    JOBS_HELP,
    POLICY_FILE_HELP,
    AcceptSettings,
    BatchSettings,
    GpuSettings,
    SplitSettings,
    read_costs,
)
from specsim.compare.document import TABLES, as_document, table_text, trace_names, write_results
from specsim.io.settings import argument, setting
from specsim.policy.base import Policy
from specsim.report.board import BoardOptions as Described
from specsim.report.board import Combined, EngineChoice, RankedBoard, Recommended
from specsim.report.documents import BOARD_COLUMNS, board_rows
from specsim.report.page import NEAR_PERCENT, recommendation_text, speculation_text, spread_text, truncated_text
from specsim.report.table import as_text

if TYPE_CHECKING:
    from specsim.compare.leaderboard import Board


@dataclass(frozen=True, kw_only=True)
class BoardOptions(SplitSettings, BatchSettings, GpuSettings, AcceptSettings):
    """Which policies are ranked, on which traces and at which costs."""

    traces: list[Path] = argument(
        "Trace folders, made by `realrun record`, or names of `specsim example --list`.", metavar="TRACE..."
    )
    cost: list[Path] = setting(
        [],
        'Cost file: a profile, {"s_d": seconds, "s_t": seconds}, or the target\'s cost grid (with --draft-cost). One '
        "for all traces, or repeat: one per trace, in order.",
    )
    draft_cost: Path | None = setting(None, DRAFT_COST_HELP)
    policy: list[str] = setting([], "Policy to compare, by name or FILE.py; repeat for more. Default: all.")
    policy_file: list[str] = setting([], POLICY_FILE_HELP, metavar="FILE.py")
    max_draft_tokens: tuple[int, ...] | None = setting(
        None, "Maximum draft length; a list such as 3,7,16 makes a leaderboard each. Default: as deep as recorded."
    )
    replays: int = setting(5, "Replays with different seeds to average over, for policies that draw at random.", low=1)
    out: Path | None = setting(
        None, "Folder for leaderboard.json, leaderboard.csv and report.html; or a paper's table, FILE.tex or FILE.csv."
    )
    jobs: int | None = setting(None, JOBS_HELP, low=1)

    @property
    def described(self) -> Described:
        """The options that the document names."""
        return Described(
            cost=", ".join(path.name for path in self.cost) or self.gpu_text,
            draft_cost=self.draft_cost.name if self.draft_cost else None,
            batch=self.batch,
            trials=self.trials,
            tuning_share=self.tuning_share,
            seeds=self.replays,
            seed=self.seed,
        )


def leaderboard(options: BoardOptions) -> Answer:
    """Tune all policies and rank them.

    Policies are tuned on one part of each trace and ranked on the other. A row is a policy with fixed or adaptive
    threshold, tuned or with an engine's defaults. Columns: speedup over the baseline with a simultaneous 95 %
    interval; "behind", the leader's speedup minus the row's; "slower?", "not significant" where these sequences do
    not show that the row is slower; v_d, draft acceptance rate; tau, mean acceptance length; gap to oracle, how much
    slower the row is than a policy that knows what will be accepted. The report has more (--out FOLDER).

    Policies that a trace cannot serve (a column not recorded, another kind of drafter) are listed with the reason.
    With several traces a combined ranking follows: geometric mean of the speedups, and mean rank.

    Example: specsim leaderboard TRACE --cost profile.json --policy-file my_policy.py --out board

    Example: specsim leaderboard TRACE --cost profile.json --out table.tex
    """
    from specsim.compare.leaderboard import default_policies
    from specsim.compare.leaderboard import leaderboards as run
    from specsim.io.files import working_in, write_text
    from specsim.policy.registry import find_policies

    out, table = options.out, options.out is not None and options.out.suffix in TABLES
    if table and out is not None:
        claim_file(out, overwrite=True)  # as the folder's files are
    files = [options.costs(path) for path in options.cost] or [options.costs(None)]
    costs = [read_costs(file, options.draft_cost, options.batch) for file in files]
    find_policies([*options.policy, *options.policy_file])  # rejects a bad policy before any trace is read
    traces = dict(zip(trace_names(options.traces), map(options.read, options.traces), strict=True))
    kinds = find_policies([*(options.policy or default_policies(traces.values())), *options.policy_file])
    with nullcontext() if out is None or table else working_in(out, None):
        with progress_bar() as report:
            boards = run(
                traces,
                costs,
                kinds=list(kinds.values()),
                max_drafts=options.max_draft_tokens or (),
                trials=options.trials,
                tuning_share=options.tuning_share,
                replays=options.replays,
                seed=options.seed,
                jobs=options.jobs or -1,
                progress=report,
            )
        document = as_document(boards, options.described)
        shown = [
            replace(one, recommended=_with_flags(board)) for board, one in zip(boards, document.boards, strict=True)
        ]
        document = replace(document, boards=shown)
        if out is not None and table:
            write_text(out, table_text(document, out.suffix))
        elif out is not None:
            write_results(out, document)

    def show() -> None:
        for board in document.boards:
            print_board(board)
        for group in document.combined:
            _print_combined(group, len(traces))
        if out is not None:
            print(f"table: {out}" if table else f"full report: {out / 'report.html'}")

    return Answer(document.as_dict(), show)


def _with_flags(board: Board) -> Recommended | None:
    """Return the recommended policy with the engines' flags, or else the fixed K that they have a flag for."""
    recommended, drafter = board.recommended, str(board.meta.get("drafter_kind"))
    if recommended is None:
        return None
    flags, instead = _flags(recommended.policy, drafter), None
    fixed = next((row for row in board.rows if row.policy.name == "fixed_k"), None)
    if fixed is not None and not flags and (own := _flags(fixed.policy, drafter)):
        instead = EngineChoice(fixed.label, own)
    return Recommended(recommended.label, NEAR_PERCENT, flags, instead)


def _flags(policy: Policy, drafter: str) -> dict[str, str]:
    """Write the flags of engines that make them draft so; none for a rule or a kind of drafter that they lack."""
    from specsim.engines.flags import NAMES, draft_length_flags
    from specsim.policy.chain.fixed_k import FixedK  # numba is slow to import

    kind = "prompt-lookup" if drafter == "lookup" else drafter
    if not isinstance(policy, FixedK):
        return {}
    return {name: draft_length_flags(name, policy.k, kind) for name in ("vllm", "sglang") if kind in NAMES[name]}


def _print_combined(group: Combined, traces: int) -> None:
    rows = [
        [row.label, f"{row.speedup:.3f}", f"{row.mean_rank:.1f}", ", ".join(map(str, row.ranks))]
        for row in group.standings
    ]
    title = f"all {traces} traces, drafts up to {group.max_draft}"
    print_table(title, ["policy", "geometric mean speedup", "mean rank", "ranks"], rows)


def print_board(board: RankedBoard) -> None:
    """Print a leaderboard: the ranking, and what was skipped."""
    leader = board.rows[0]
    title = (
        f"{board.trace}: drafts up to {board.max_draft}, tuned on {board.sequences.tuning} sequences, ranked on "
        f"{board.sequences.holdout} held-out ones"
    )
    print_table(title, *as_text(BOARD_COLUMNS, board_rows(board)))
    print(speculation_text(leader.label, leader.speedup))
    if board.cost_band:
        print(f"The leader's speedup: {spread_text(leader.speedup, cost_band=board.cost_band)}.")
    for line in recommendation_text(board):
        print(line)
    for line in truncated_text((row.label, row.truncated_share) for row in board.rows):
        print(line)
    print_notes(board.warnings, "warning")
    print_skipped("not on this leaderboard", [(line.policy, line.reason) for line in board.skipped])
