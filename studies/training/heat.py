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

from realrun.pairs.drafter_files import describe_target, read_drafter
from realrun.pairs.pair import LAB_WEIGHTS, load_target
from realrun.training.common.distill import TextSettings, training_text
from realrun.training.common.loop import Job, LoopSettings
from realrun.training.common.lora import AdapterSettings
from realrun.training.space import MaskTraining, SpaceSettings
from specsim.progress import Progress
from specsim.report.markdown import difference_text, markdown_table
from specsim.speedup.intervals import Estimate, ratio_difference, ratio_interval
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
        """As part of a path."""
        return f"{'full' if self.full else 'adapter'}-{'plain' if self.plain else 'sar'}-{self.share:g}"


def tunings(config: Config) -> list[Tuning]:
    """All that are compared, plain ones beside SAR-SFT."""
    lr = {False: float(read_drafter(LAB_WEIGHTS / SHIPPED).facts["settings"]["lr"]), True: config["heat"]["full_lr"]}
    return [
        Tuning(full, share, plain, share * lr[full])
        for full in (False, True)
        for share in config["heat"]["shares"]
        for plain in (True, False)
    ]


def measure(out: Path, config: Config, report: Progress) -> Document:
    """Train all tunings on the same text and measure them on the same windows."""
    recipe = read_drafter(LAB_WEIGHTS / SHIPPED).facts
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

    found: list[Document] = []
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
        found.append({"tuning": asdict(tuning), **done})
    return {"tunings": found}


def by_tuning(document: Document) -> dict[Tuning, Document]:
    """What `measure` found, by tuning."""
    return {Tuning(**one["tuning"]): one for one in document["tunings"]}


def cost_nats(found: Document) -> Estimate:
    """How much the tuning raises the cross-entropy of held-out text, over windows."""
    after, before = (np.array(found["after"][name]) for name in ("tuned", "original"))
    ones = np.ones(len(after))
    return ratio_difference(after, ones, before, ones).difference


def mask_gain(found: Document, mask: int = 1) -> Estimate:
    """How much more often after the tuning than before it a mask says what the target says there."""
    after, before = (np.array(found[when][f"mask_{mask}_agreement"]) for when in ("after", "before"))
    ones = np.ones(len(after))
    return ratio_difference(after, ones, before, ones).difference


def points(found: Mapping[Tuning, Document]) -> dict[str, list[tuple[float, Estimate, Estimate]]]:
    """What is trained and how -> (learning rate, cost, gain of mask 1), by rising rate."""
    drawn: dict[str, list[tuple[float, Estimate, Estimate]]] = {}
    for tuning, one in sorted(found.items(), key=lambda item: (item[0].full, not item[0].plain, item[0].lr)):
        name = f"{HOW[tuning.full]}, {'SFT' if tuning.plain else 'SAR-SFT'}"
        drawn.setdefault(name, []).append((tuning.lr, cost_nats(one), mask_gain(one)))
    return drawn


def heat_table(found: Mapping[Tuning, Document]) -> list[str]:
    """Cost in nats and agreement of the masks for each tuning."""
    table = []
    for tuning, one in found.items():
        after = one["after"]
        masks = sorted(name for name in after if name.endswith("_agreement"))
        first = ratio_interval(after[masks[0]], np.ones(len(after[masks[0]])))
        method = "SFT" if tuning.plain else "SAR-SFT"
        table.append([HOW[tuning.full], method, f"{tuning.lr:.1e}", f"{one['parameters']:,}", _changed(cost_nats(one))])
        table[-1] += [str(first), difference_text(mask_gain(one))]
        table[-1] += [f"{np.mean(after[name]):.3f}" for name in masks[1:]]
    count = sum(name.endswith("_agreement") for name in next(iter(found.values()))["after"])
    columns = ["trained", "tuned by", "learning rate", "trained parameters", "cost, nats a token", "mask 1 agrees"]
    return markdown_table(
        [*columns, "mask 1, more than before", *(f"mask {n} agrees" for n in range(2, count + 1))], table
    )


def heat_findings(found: Mapping[Tuning, Document]) -> list[str]:
    """At which heats plain tuning costs nothing, and at which of these SAR-SFT costs nothing more and masks learn."""
    lines = []
    for full in (False, True):
        mine = {tuning: one for tuning, one in found.items() if tuning.full is full}
        free = {t.share: one for t, one in mine.items() if t.plain and cost_nats(one).low <= 0}
        sar = {t.share: one for t, one in mine.items() if not t.plain}
        learns = [share for share in free if mask_gain(sar[share]).low > 0]
        both = [share for share in learns if cost_nats(sar[share]).low <= 0]
        lines.append(
            f"- {HOW[full].capitalize()}: plain tuning costs nothing that these windows show at {_shares(free)} of the "
            f"recipe's learning rate; mask 1 learns there under SAR-SFT at {_shares(learns)}, which itself costs "
            f"nothing at {_shares(both)}."
        )
    return [*lines, ""]


def _changed(cost: Estimate) -> str:
    word = "costs" if cost.low > 0 else "gains" if cost.high < 0 else "not significant"
    return f"{cost.estimate:+.4f} [{cost.low:+.4f}, {cost.high:+.4f}] {word}"


def _shares(shares: Any) -> str:
    return ", ".join(f"{share:g}" for share in shares) or "none"
