"""`specsim leaderboard`: tune and rank policies on recorded traces."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from specsim.cli.console import parse_numbers, print_json, print_table, progress_bar
from specsim.cli.options import BatchOption, DraftCostOption, JsonOption, PolicyFileOption, SeedOption, read_costs
from specsim.ranking.document import as_document, trace_names, write_results
from specsim.report.documents import BOARD_COLUMNS, EFFECT_COLUMNS, board_rows, effect_rows
from specsim.report.page import speculation_text, truncated_text
from specsim.report.table import as_text


def leaderboard(
    traces: Annotated[
        list[Path],
        typer.Argument(
            help="Trace folders, made by `realrun record`, or names of `specsim example --list`.",
            metavar="TRACE...",
            show_default=False,
        ),
    ],
    cost: Annotated[
        list[Path],
        typer.Option(
            help='Cost file: a profile, {"s_d": seconds, "s_t": seconds}, or with --draft-cost the target\'s cost '
            "grid. One for all traces, or repeated, one for each in their order.",
            show_default=False,
        ),
    ],
    draft_cost: DraftCostOption = None,
    batch: BatchOption = None,
    policy: Annotated[
        list[str], typer.Option(help="A policy to compare, by name or FILE.py; repeat for more. Default: all.")
    ] = [],  # noqa: B006 (typer reads the default, it is never changed)
    policy_file: PolicyFileOption = [],  # noqa: B006
    max_draft_tokens: Annotated[
        str,
        typer.Option(
            help="Longest draft in tokens; a list such as 3,7,16 makes a board of each. Default: as deep as recorded.",
            show_default=False,
        ),
    ] = "",
    trials: Annotated[int, typer.Option(help="Configurations to try per policy.", min=1)] = 100,
    tuning_share: Annotated[float, typer.Option(help="Share of the sequences to tune on.")] = 0.5,
    replays: Annotated[
        int,
        typer.Option(help="Replays, each with another seed, to average over where a policy draws at random.", min=1),
    ] = 5,
    sensitivity: Annotated[
        bool, typer.Option(help="Vary each tuned setting over its range, to see how much it matters.")
    ] = True,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for leaderboard.json, leaderboard.csv and report.html.", show_default=False),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Threads; default one per core. The answer is the same.", min=1)
    ] = None,
    seed: SeedOption = 0,
    json: JsonOption = False,
) -> None:
    """Tune every policy on one part of each trace, rank them on the other.

    A row is a policy in one form: tuned, with a fixed or adaptive threshold, or with an
    engine's defaults. Columns: speedup over autoregressive decoding with its 95 % interval, which
    holds for all rows at once; "behind", the leader's speedup less the row's, and "not significant"
    where these sequences do not show that the row is slower; v_d, accepted over drafted tokens;
    r_d, accepted over output tokens; HM, their harmonic mean; tau, output tokens per target pass;
    the mean number of drafted tokens that a round verified, with the middle 80 % of rounds;
    gap to oracle, how much slower it is than a policy that knows beforehand what will be accepted;
    gap to learned rule, how much slower it is than the fastest rule learned from the same signals.

    What a trace cannot serve (a column not recorded, another kind of drafter) is listed with
    the reason. With several traces a combined ranking follows: geometric mean of the speedups,
    and mean rank.

    Example: specsim leaderboard TRACE --cost profile.json --policy-file my_policy.py --out board
    """
    from specsim.files import working_in
    from specsim.policy.registry import find_policies
    from specsim.ranking.leaderboard import default_policies
    from specsim.ranking.leaderboard import leaderboard as run
    from specsim.trace.files import read_trace

    depths = parse_numbers(max_draft_tokens, "--max-draft-tokens", int, "3,7,16") if max_draft_tokens else []
    models = [read_costs(path, draft_cost, batch) for path in cost]
    find_policies([*policy, *policy_file])  # names a bad one before any trace is read
    named = dict(zip(trace_names(traces), map(read_trace, traces), strict=True))
    kinds = find_policies([*(policy or default_policies(named.values())), *policy_file])
    options = {
        "cost": ", ".join(path.name for path in cost),
        "draft_cost": draft_cost.name if draft_cost else None,
        "batch": batch,
        "trials": trials,
        "tuning_share": tuning_share,
        "seeds": replays,
        "seed": seed,
    }
    with nullcontext() if out is None else working_in(out, None):
        with progress_bar() as report:
            boards = run(
                named,
                models,
                kinds=list(kinds.values()),
                max_drafts=depths,
                trials=trials,
                tuning_share=tuning_share,
                replays=replays,
                seed=seed,
                sensitivity=sensitivity,
                jobs=jobs or -1,
                progress=report,
            )
        document = as_document(boards, {key: value for key, value in options.items() if value is not None})
        if out is not None:
            write_results(out, document)
    if json:
        print_json(document)
        return
    for board in document["boards"]:
        print_board(board)
    for group in document["combined"]:
        rows = [
            [one["label"], f"{one['speedup']:.3f}", f"{one['mean_rank']:.1f}", ", ".join(map(str, one["ranks"]))]
            for one in group["standings"]
        ]
        title = f"all {len(traces)} traces, drafts up to {group['max_draft']}"
        print_table(title, ["policy", "geometric mean speedup", "mean rank", "ranks"], rows)
    if out is not None:
        print(f"{out / 'report.html'} shows all of it")


def print_board(board: Mapping[str, Any]) -> None:
    """One board as tables: the ranking, what was skipped, how much each setting matters."""
    title = (
        f"{board['trace']}: drafts up to {board['max_draft']}, tuned on {board['sequences']['tuning']} sequences, "
        f"ranked on {board['sequences']['holdout']} others"
    )
    if board["approximate"]:
        title += " (approximate: rejection sampling)"
    print_table(title, *as_text(BOARD_COLUMNS, board_rows(board)))
    print(speculation_text(board["rows"][0]["label"], board["rows"][0]["speedup"]))
    for line in truncated_text(board["rows"]):
        print(line)
    for warning in board["warnings"]:
        print(f"warning: {warning}")
    if board["skipped"]:
        print_table("not on this board", ["policy", "reason"], [[s["policy"], s["reason"]] for s in board["skipped"]])
    if board["sensitivity"]:
        title = "sensitivity: how much slower the worst value in a setting's range is than the best"
        print_table(title, *as_text(EFFECT_COLUMNS, effect_rows(board)))
