"""`specsim cost list` and `specsim cost show`: what things cost, in files and under names that ship."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from specsim.cli.console import parse_numbers, print_json, print_table
from specsim.cli.options import JsonOption


def list_costs(json: JsonOption = False) -> None:
    """List the costs that ship, which commands that take costs know by these names.

    Example: specsim replay TRACE --policy fixed_k --set k=3 --cost vllm-llama3.1-8b-eagle-h100
    """
    from specsim.cost.written import read_written, shipped_costs

    documents = {name: read_written(path) for name, path in shipped_costs().items()}
    if json:
        print_json(documents)
        return
    rows = [[name, document["form"], document["date"], document["source"]] for name, document in documents.items()]
    print_table(f"{len(rows)} costs that ship", ["name", "form", "date", "source"], rows)


def show(
    file: Annotated[str, typer.Argument(help="Cost file, or a name of `specsim cost list`.", show_default=False)],
    tokens: Annotated[
        str,
        typer.Option(
            help="Tokens of a target pass; default 1,2,4,8 or, of a profile, those that it covers.", show_default=False
        ),
    ] = "",
    contexts: Annotated[
        str,
        typer.Option(help="Cached tokens; default 128,1024 or, of a profile, its own ends.", show_default=False),
    ] = "",
    batch: Annotated[int | None, typer.Option(help="Sequences in lockstep, of costs that know batches.", min=1)] = None,
    json: JsonOption = False,
) -> None:
    """Show what a draft step, a target pass over n tokens, and a token without speculation take.

    s_d / s_t is a draft step's time over that of a token without speculation; a pass over n tokens is shown in
    such tokens' times, too: below n accepted tokens a round can pay. Where drafting takes something once a round,
    however many tokens are drafted, it has a column of its own, "proposal".

    Example: specsim cost show edd-llama2-chat-7b-a6000
    """
    from specsim.cost.batch_profile import BatchProfileCost
    from specsim.cost.files import read_cost
    from specsim.cost.profile import ProfileCost

    model = read_cost(file, batch=batch)
    own, sizes = [128, 1024], [1, 2, 4, 8]
    if isinstance(model, ProfileCost | BatchProfileCost):
        own = [int(model.contexts[0]), int(model.contexts[-1])]
        most = len(model.verify_s) if isinstance(model, ProfileCost) else int(model.tokens[-1])
        sizes = [size for size in sizes if size <= most]
    at = parse_numbers(contexts, "--contexts", int, "128,1024") if contexts else own
    sizes = parse_numbers(tokens, "--tokens", int, "1,2,4,8") if tokens else sizes
    rows: list[dict[str, Any]] = []
    for context in at:
        alone_s = float(model.autoregressive_step(context))
        passes_s = {size: float(model.verify(size, context)) for size in sizes}
        rows.append(
            {
                "context": context,
                "autoregressive_s": alone_s,
                "proposal_s": (proposal_s := float(model.proposal_seconds(context))),
                "draft_step_s": (draft_s := float(model.draft(1, context)) - proposal_s),
                "step_ratio": draft_s / alone_s,
                "verify_s": passes_s,
                "round_overhead_s": model.round_overhead(),
            }
        )
    notes = model.notes(max(sizes) - 1, (min(at), max(at)))
    if json:
        print_json({"cost": file, "batch": batch or 1, "rows": rows, "notes": notes})
        return
    proposes = any(row["proposal_s"] for row in rows)
    shown = [
        [
            f"{row['context']}",
            *(f"{1e3 * row[key]:.3f}" for key in ("autoregressive_s", "draft_step_s")),
            f"{row['step_ratio']:.3f}",
            *([f"{1e3 * row['proposal_s']:.3f}"] if proposes else []),
            f"{1e3 * row['round_overhead_s']:.3f}",
            *(f"{1e3 * value:.3f} ({value / row['autoregressive_s']:.2f})" for value in row["verify_s"].values()),
        ]
        for row in rows
    ]
    once = ["proposal"] if proposes else []
    passes = (f"pass of {size}" for size in sizes)
    columns = ["context", "a token, ms", "draft step", "s_d / s_t", *once, "overhead", *passes]
    title = f"{file}: milliseconds; of passes also in tokens without speculation"
    print_table("; ".join([title, *notes]), columns, shown)
