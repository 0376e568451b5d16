"""`specsim explain`: what engines' numbers mean, and how they run and count rounds."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial

from specsim.cli.command import Answer
from specsim.cli.console import print_table
from specsim.io.settings import Settings, argument, setting


@dataclass(frozen=True, kw_only=True)
class ExplainOptions(Settings):
    """The number to explain, and the engine."""

    quantity: str = argument("acceptance-length, acceptance-rate, position-rate, or rounds.")
    engine: str | None = setting(None, "Only this engine, beside specsim's own definition (default: all).")


def explain(options: ExplainOptions) -> Answer:
    """Explain an engine's acceptance numbers.

    Shows what an engine means by its acceptance length or rate, or how it runs and counts rounds.

    Example: specsim explain acceptance-rate --engine sglang
    """
    from specsim.engines.definitions import find_definitions

    if options.quantity == "rounds":
        return _explain_rounds(options.engine)
    definitions = find_definitions(options.quantity, options.engine)
    if options.engine not in (None, "specsim"):
        definitions = [*find_definitions(options.quantity, "specsim"), *definitions]
    rows = [[each.engine, each.printed, each.formula, each.note] for each in definitions]
    lines = [dict(zip(("engine", "printed", "formula", "note"), row, strict=True)) for row in rows]
    show = partial(print_table, options.quantity, ["engine", "printed as", "is", "but"], rows, labels=4)
    return Answer({options.quantity: lines}, show)


def _explain_rounds(engine: str | None) -> Answer:
    from specsim.engines.conventions import CONVENTIONS, find_conventions

    conventions = [*CONVENTIONS.values()] if engine is None else [find_conventions(engine)]
    rows = [
        [
            f"{each.engine} {each.version}",
            f"the {each.first_token}",
            *("yes" if fact else "no" for fact in (each.clips_draft, each.counts_empty, each.drafts_ahead)),
            f"{'goes on' if each.drafts_past_end else 'ends'}; accepted: {each.accepts_end}",
            each.source,
        ]
        for each in conventions
    ]
    columns = ["engine", "first token from", "drafts end at the limit", "counts rounds without a draft"]
    columns += ["drafts in the previous step", "a draft after an end of text", "source"]
    show = partial(print_table, "How engines run and count rounds", columns, rows, labels=7)
    return Answer({"rounds": [asdict(each) for each in conventions]}, show)
