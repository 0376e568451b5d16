"""`specsim explain`: what engines' numbers mean, and how they run and count rounds."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from specsim.cli.console import print_json, print_table
from specsim.cli.options import JsonOption


def explain(
    quantity: Annotated[
        str,
        typer.Argument(help="acceptance-length, acceptance-rate, position-rate, or rounds.", show_default=False),
    ],
    engine: Annotated[str | None, typer.Option(help="Of this engine, beside specsim's own; default all.")] = None,
    json: JsonOption = False,
) -> None:
    """Say what an engine means by its acceptance length or rate, or how it runs and counts rounds.

    Example: specsim explain acceptance-rate --engine sglang
    """
    from specsim.engines.conventions import CONVENTIONS, find_conventions
    from specsim.engines.definitions import find_definitions

    if quantity == "rounds":
        conventions = [*CONVENTIONS.values()] if engine is None else [find_conventions(engine)]
        if json:
            print_json({"rounds": [dataclasses.asdict(one) for one in conventions]})
            return
        rows = [
            [
                f"{one.engine} {one.version}",
                f"the {one.first_token}",
                "yes" if one.clips_draft else "no",
                "yes" if one.counts_empty else "no",
                f"{'goes on' if one.drafts_past_end else 'ends'}; accepted: {one.accepts_end}",
                one.source,
            ]
            for one in conventions
        ]
        columns = ["engine", "first token from", "drafts end at the limit", "counts rounds without a draft"]
        columns += ["a draft behind an end of text", "found"]
        print_table("How engines run and count rounds", columns, rows, labels=6)
        return
    found = find_definitions(quantity, engine)
    if engine not in (None, "specsim"):
        found = [*find_definitions(quantity, "specsim"), *found]
    if json:
        names = ("engine", "printed", "formula", "note")
        print_json({quantity: [{name: getattr(one, name) for name in names} for one in found]})
        return
    rows = [[one.engine, one.printed, one.formula, one.note] for one in found]
    print_table(quantity, ["engine", "printed as", "is", "but"], rows, labels=4)
