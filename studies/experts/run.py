"""Where speculation pays on mixtures of experts: `python -m studies experts`.

Asks NVIDIA's measured operators (the extra [silicon]) what passes of mixtures and of a dense model take at every batch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specsim.cost.silicon.cost import SiliconCost, silicon_from_document
from studies.common import Config, cached, claim
from studies.experts.report import report

MEASURED = "experts.json"
RECORDED = ("config.json", MEASURED)


def silicon_cost(config: Config, model: str, routing: str, attention: str, batch: int) -> SiliconCost:
    """Return the measured costs of a model at a batch."""
    settings = {key: config[key] for key in ("drafter", "hardware")}
    return silicon_from_document(
        {**settings, "target": model, "routing": routing, "attention": attention, "batch": batch}
    )


def measured(config: Config, model: str, routing: str, batch: int) -> dict[str, Any]:
    """Return seconds of a baseline decode step, of a draft, and of verifying it, attention counted in both ways."""
    once, separate = (silicon_cost(config, model, routing, way, batch) for way in ("once", "separate"))
    context, drafted = config["context"], config["drafted"]
    return {
        "model": model,
        "routing": routing,
        "batch": batch,
        "token_s": float(once.autoregressive_step(context)),
        "draft_s": float(once.draft(drafted, context)),
        "verify_s": {
            "once": float(once.verify(drafted + 1, context)),
            "separate": float(separate.verify(drafted + 1, context)),
        },
    }


def layer_s(config: Config) -> dict[str, float]:
    """Return seconds of a layer of experts by tokens."""
    layer = config["layer"]
    document = {"target": layer["model"], "drafter": config["drafter"], "hardware": layer["hardware"]}
    target = silicon_from_document(document).target
    (experts,) = (operation for operation in target.matrix_operations(ends=False) if operation._name == "experts")
    wire = target.tables.wire([experts])
    return {str(n): target.tables.seconds(wire, rows=n) / target.model.num_layers for n in layer["tokens"]}


def measure(config: Config) -> dict[str, Any]:
    """Return all that the report shows."""
    model, (routing, *_) = next(iter(config["models"].items()))
    return {
        "tables": silicon_cost(config, model, routing, "once", 1).target.tables.name,
        "layer_s": layer_s(config),
        "rows": [
            measured(config, model, routing, batch)
            for model, routings in config["models"].items()
            for routing in routings
            for batch in config["batches"]
        ],
    }


def main(out: Path, config: Config) -> None:
    """Look up what is not there yet and write the report."""
    claim(out, config)
    report(config, cached(out / MEASURED, lambda: measure(config))).write(out)
