"""SPACE's heat: at which learning rate tuning the target costs it nothing, and whether its masks still learn there.

Plain fine-tuning (p_ar = 1) is what SAR-SFT (p_ar of the recipe) is set against, with a low-rank adapter and with all
weights trained, each at the recipe's learning rate and below it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from realrun.pairs.drafter_files import describe_target
from realrun.pairs.lab_drafters import drafter_training
from realrun.pairs.pair import load_target
from realrun.train.common.distill import TextSettings, training_text
from realrun.train.common.loop import Job, LoopSettings
from realrun.train.common.lora import AdapterSettings
from realrun.train.space import MaskTraining, SpaceSettings
from specsim.io.progress import Progress
from specsim.replaying.intervals import Estimate, ratio_difference, ratio_interval
from studies.common import Config, Document, named
from studies.training.held_out import held_out_windows, measured

SHIPPED = "space"
HOW = {False: "adapter", True: "all weights"}


@dataclass(frozen=True)
class Tuning:
    """One tuning of the target. share : of the recipe's learning rate; lr : that"""

    full: bool
    share: float
    plain: bool
    lr: float

    @property
    def name(self) -> str:
        """Format as part of a path."""
        return f"{'full' if self.full else 'adapter'}-{'plain' if self.plain else 'sar'}-{self.share:g}"


def tunings(config: Config) -> list[Tuning]:
    """All that are compared, plain ones beside SAR-SFT."""
    lr = {False: float(drafter_training(SHIPPED)["settings"]["lr"]), True: config["heat"]["full_lr"]}
    return [
        Tuning(full, share, plain, share * lr[full])
        for full in (False, True)
        for share in config["heat"]["shares"]
        for plain in (True, False)
    ]


def measure(out: Path, config: Config, report: Progress) -> Document:
    """Train all tunings on the same text and measure them on the same windows."""
    recipe = drafter_training(SHIPPED)
    own, train = recipe["settings"], config["train"]
    pair = load_target(config["target"], dtype=train["dtype"], threads=config["threads"])
    text = training_text(pair, TextSettings(), out / "text", report)
    windows, length = recipe["loop"]["batch_windows"], recipe["loop"]["window_tokens"]
    plain = LoopSettings(
        steps=1,
        batch_windows=windows,
        window_tokens=length,
        warmup_steps=train["warmup_steps"],
        dtype=train["dtype"],
    )
    loop = plain.lasting(1e6 * config["heat"]["tokens"])
    batch = held_out_windows(text, config["heat"]["windows"], length)
    base = SpaceSettings(own["masks"], own["p_ar"], examples=own["examples"], adapter=AdapterSettings(**own["adapter"]))

    def figures(job: Job) -> Document:
        with torch.no_grad(), loop.compute():
            rows = [job.held_out(window[None]) for window in batch]
        return {name: [row[name] for row in rows] for name in rows[0]}

    results: list[Document] = []
    for tuning in tunings(config):
        settings = replace(base, full=tuning.full, lr=tuning.lr, p_ar=1.0 if tuning.plain else own["p_ar"])
        plan = {"drafter": "space", "target": describe_target(pair.target, pair.target_name), **settings.decisive}
        done = measured(
            out / "heat" / tuning.name,
            lambda settings=settings: MaskTraining(pair.target, settings),  # type: ignore[misc]
            loop,
            text,
            plan,
            figures,
            named(report, tuning.name),
        )
        results.append({"tuning": asdict(tuning), **done})
    return {"tunings": results}


def by_tuning(document: Document) -> dict[Tuning, Document]:
    """What `measure` found, by tuning."""
    return {Tuning(**result["tuning"]): result for result in document["tunings"]}


def cost_nats(result: Document) -> Estimate:
    """How much the tuning raises the cross-entropy of held-out text, over windows."""
    after, before = (np.array(result["after"][name]) for name in ("tuned", "original"))
    windows = np.ones(len(after))
    return ratio_difference(after, windows, before, windows).difference


def mask_gain(result: Document) -> Estimate:
    """Compute how much more often the first mask agrees with the target after the tuning than before."""
    after, before = (np.array(result[when]["mask_1_agreement"]) for when in ("after", "before"))
    windows = np.ones(len(after))
    return ratio_difference(after, windows, before, windows).difference


def rows(results: Mapping[Tuning, Document]) -> list[dict[str, Any]]:
    """Return each tuning's cost in nats and the agreement of the first mask."""
    table = []
    for tuning, result in results.items():
        agreement = result["after"]["mask_1_agreement"]
        table.append(
            {
                "variant": f"{HOW[tuning.full]}, {'SFT' if tuning.plain else 'SAR-SFT'}, "
                f"{tuning.share:g} of the recipe's learning rate",
                "parameters": result["parameters"],
                "learning_rate": tuning.lr,
                "cost_nats": cost_nats(result).as_dict(),
                "agreement": ratio_interval(agreement, np.ones(len(agreement))).as_dict(),
                "agreement_difference": mask_gain(result).as_dict(),
            }
        )
    return table
