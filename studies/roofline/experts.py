"""Where speculation pays on mixtures of experts: `python -m studies.roofline.experts [OUT]`.

Asks NVIDIA's measured operators (the extra [silicon]) what passes of mixtures and of a dense model take at every batch,
and writes OUT/experts.json, of which the study's report makes its tables. OUT is this folder unless it is given.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specsim.cost.roofline.architecture import find_architecture
from specsim.cost.silicon.cost import SiliconCost, silicon_from_document
from specsim.files import write_json
from specsim.report.markdown import markdown_table

HOME = Path(__file__).parent
FILE = "experts.json"
HARDWARE = "h200"  # the smallest on which all of them fit in bfloat16
MODELS = {  # and how tokens are dealt to experts
    "llama-3.1-8b": ("balanced",),
    "mixtral-8x7b": ("balanced", "power_law_1.2"),
    "qwen3-30b-a3b": ("balanced", "power_law_1.2"),
}
DRAFTER = "eagle"
DRAFTED = 3  # tokens
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
CONTEXT = 1024
LAYER = "qwen3-30b-a3b", "h100", (1, 2, 4, 8, 16, 32, 64)  # a layer of experts alone: model, hardware, tokens

Document = Mapping[str, Any]


def asked(model: str, routing: str, attention: str, batch: int) -> SiliconCost:
    return silicon_from_document(
        {"target": model, "drafter": DRAFTER, "hardware": HARDWARE, "routing": routing, "attention": attention,
         "batch": batch}
    )  # fmt: skip


def measured(model: str, routing: str, batch: int) -> dict[str, Any]:
    """Seconds of a token without speculation, of a draft, and of verifying it, attention counted in both ways."""
    once, separate = (asked(model, routing, way, batch) for way in ("once", "separate"))
    return {
        "model": model, "routing": routing, "batch": batch,
        "token_s": float(once.autoregressive_step(CONTEXT)),
        "draft_s": float(once.draft(DRAFTED, CONTEXT)),
        "verify_s": {"once": float(once.verify(DRAFTED + 1, CONTEXT)),
                     "separate": float(separate.verify(DRAFTED + 1, CONTEXT))},
    }  # fmt: skip


def layer_s() -> dict[str, float]:
    """Seconds of one layer of experts by tokens."""
    model, hardware, tokens = LAYER
    document = {"target": model, "drafter": DRAFTER, "hardware": hardware}
    target = silicon_from_document(document).target
    (experts,) = (one for one in target.matrix_operations(ends=False) if one._name == "experts")
    wire = target.tables.wire([experts])
    return {str(n): target.tables.seconds(wire, rows=n) / target.model.num_layers for n in tokens}


def measure() -> dict[str, Any]:
    """All that the tables below show."""
    return {
        "tables": asked("llama-3.1-8b", "balanced", "once", 1).target.tables.name,
        "hardware": HARDWARE, "drafter": DRAFTER, "drafted": DRAFTED, "context": CONTEXT,
        "layer": {"model": LAYER[0], "hardware": LAYER[1], "seconds": layer_s()},
        "rows": [measured(model, routing, batch) for model, routings in MODELS.items() for routing in routings
                 for batch in BATCHES],
    }  # fmt: skip


def least_acceptance(cost: float, drafted: int) -> float | None:
    """The chance that a drafted token is accepted, all alike, from which on a round that costs so many tokens pays.

    1 + a + ... + a^drafted = cost, the tokens of a round; 0 where it pays anyway, None where it never does.
    """
    from scipy.optimize import brentq

    def gain(a: float) -> float:
        return sum(a**n for n in range(drafted + 1)) - cost

    if gain(0.0) >= 0:
        return 0.0
    return None if gain(1.0) < 0 else float(brentq(gain, 0.0, 1.0))


def costs(row: Document, *, drafting: bool) -> list[float]:
    """What verifying a draft, or a whole round, takes in tokens without speculation: at the least and at the most."""
    draft = row["draft_s"] if drafting else 0.0
    return [(row["verify_s"][way] + draft) / row["token_s"] for way in ("once", "separate")]


def span(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def table_rows(document: Document, *, drafting: bool) -> Iterator[list[str]]:
    """A line per model and routing, a cell per batch."""
    rows = document["rows"]
    for model, routing in dict.fromkeys((row["model"], row["routing"]) for row in rows):
        here = [row for row in rows if (row["model"], row["routing"]) == (model, routing)]
        cells = []
        for row in here:
            ends = costs(row, drafting=drafting)
            if drafting:
                least = [least_acceptance(cost, document["drafted"]) for cost in ends]
                cells.append(span(*("never" if a is None else f"{a:.2f}" for a in least)))
            else:
                cells.append(span(*(f"{cost:.2f}" for cost in ends)))
        dense = find_architecture(model).experts is None
        yield [f"{model}, dense" if dense else f"{model}, {routing}", *cells]


def section(document: Document) -> list[str]:
    """The lines of the report's section."""
    drafted, layer = document["drafted"], document["layer"]
    batches = list(dict.fromkeys(f"{row['batch']}" for row in document["rows"]))
    columns = ["model", *(f"batch {batch}" for batch in batches)]
    seconds = {int(tokens): s for tokens, s in layer["seconds"].items()}
    pairs = [(n, n * (drafted + 1)) for n in seconds if n * (drafted + 1) in seconds]
    return [
        "## Where speculation pays on mixtures of experts",
        "",
        f"By NVIDIA's measured operators (aiconfigurator-core 0.12.0, {document['tables']}) in bfloat16, one device. A "
        "pass over more tokens reads more experts until it reads all of them: at a small batch verification costs "
        "much, where a batch's plain tokens hit all experts already as little as on a dense model. Routing is that of "
        "the measurement: balanced, as many experts as possible, or skewed by a power law.",
        "",
        f"A layer of experts alone, {layer['model']} on {layer['hardware']}, balanced: verifying {drafted} drafted "
        "tokens a sequence takes, of a plain step's time, "
        + ", ".join(f"{seconds[more] / seconds[n]:.2f} at batch {n}" for n, more in pairs)
        + ".",
        "",
        f"Whole models on {document['hardware']} at context {document['context']:,}: a pass that verifies {drafted} "
        "drafted tokens, in tokens without speculation. Attention of several queries over a cache was not measured: a "
        "range is from one query's to that of so many sequences.",
        "",
        *markdown_table(columns, table_rows(document, drafting=False)),
        f"The chance, alike for all drafted tokens, that one is accepted from which on drafting {drafted} tokens with "
        f"{document['drafter']} pays, its {drafted} steps included:",
        "",
        *markdown_table(columns, table_rows(document, drafting=True)),
    ]  # fmt: skip


def read(home: Path = HOME) -> Document:
    """What was measured last."""
    found: Document = json.loads((home / FILE).read_text())
    return found


if __name__ == "__main__":
    write_json(measure(), Path(sys.argv[1] if len(sys.argv) > 1 else HOME) / FILE)
