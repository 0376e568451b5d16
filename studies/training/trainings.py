"""What the study trains, each into a folder of its own: the same settings with every seed, read where it is there.

A seed draws the windows of text and, where a drafter does not start from the target's weights, its first weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from realrun.pairs.drafter_files import read_drafter
from realrun.pairs.pair import Pair, load_target
from realrun.train.common.distill import TextSettings
from realrun.train.common.loop import LoopSettings
from realrun.train.common.on_text import TextRun
from realrun.train.edd import EddSettings, VdmSettings, train_edd
from realrun.train.eesd import EesdSettings, train_eesd
from specsim.io.progress import Progress
from studies.common import Config, Document, named

Train = Callable[[Pair, Any, TextRun], Document]
Wanted = Mapping[str, tuple[Train, Any, TextSettings]]  # by name: how, with which settings, on which text

WHOLE, NO_STATES, NO_KL, ONE_BLOCK = "EDD + PCT", "without states", "without KL", "one block length"
EESD, NO_EXIT, NO_DISTILLATION = "EESD", "E = 0", "without self-distillation"


def trained(out: Path, wanted: Wanted, tokens: float, config: Config, report: Progress) -> dict[str, dict[int, Path]]:
    """Train all of these with every seed: name -> seed -> the drafter's folder. tokens : in millions"""
    plain = LoopSettings(steps=1, warmup_steps=config["train"]["warmup_steps"], dtype=config["train"]["dtype"])
    loop = plain.lasting(1e6 * tokens)
    folders: dict[str, dict[int, Path]] = {name: {} for name in wanted}
    pair = None
    for seed in config["seeds"]:  # a seed of all before the next of any
        for name, (train, settings, text) in wanted.items():
            folders[name][seed] = folder = out / "trained" / f"{file_name(name)}-{seed}"
            if (folder / "drafter.safetensors").is_file() and read_drafter(folder).facts["loop"] == asked(loop, seed):
                continue
            pair = pair or load_target(config["target"], dtype=config["train"]["dtype"], threads=config["threads"])
            progress = named(report, f"{name}, seed {seed}")
            train(pair, settings, TextRun(text, replace(loop, seed=seed), folder, out / "text", progress=progress))
    return folders


def asked(loop: LoopSettings, seed: int) -> dict[str, Any]:
    """Training settings that a drafter's file records."""
    return replace(loop, seed=seed).as_dict()


def file_name(name: str) -> str:
    """A name as part of a path."""
    return name.replace(",", "").replace(" = ", "-").replace(" + ", "-").replace(" ", "-")


def decoders(config: Config) -> Wanted:
    """List the trainings of EDD's table 3 and figure 5."""
    usual = config["decoders"]["usual"]
    settings = {
        WHOLE: EddSettings(states_after=usual),
        NO_STATES: VdmSettings(),
        NO_KL: EddSettings(states_after=usual, loss="text"),
        ONE_BLOCK: EddSettings(states_after=usual, longest_block=5),
    }
    settings |= {f"states {n}": EddSettings(states_after=n) for n in config["decoders"]["states_after"] if n != usual}
    return {name: (train_edd, edd, TextSettings()) for name, edd in settings.items()}


def early_exits(config: Config) -> Wanted:
    """List the trainings of EESD's table 4 and figures 4 and 5."""
    asked = config["early_exits"]
    layers, exit_layers = asked["usual"]
    base = EesdSettings(layers=layers, exit_layers=exit_layers)
    exits = {EESD: (train_eesd, base, TextSettings())}
    exits[NO_DISTILLATION] = (train_eesd, base, TextSettings(generated_share=0.0))
    exits |= {f"N = {n}": (train_eesd, replace(base, layers=n), TextSettings()) for n in asked["layers"] if n != layers}
    exits |= {
        f"E = {e}": (train_eesd, replace(base, exit_layers=e), TextSettings())
        for e in asked["exit_layers"]
        if e != exit_layers
    }
    return exits
