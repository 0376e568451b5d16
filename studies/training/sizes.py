"""EDD and EAGLE trained on the same text, with about as many trainable parameters: which is better for its size?

No setting of either makes the two equal: EDD's own embedding, which is its head too, is most of the difference. So
EDD is trained twice, whole, with more parameters than EAGLE, and its layer alone, with fewer.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from realrun.pairs.drafter_files import read_drafter
from realrun.pairs.pair import Pair
from realrun.train.common.distill import TextSettings
from realrun.train.common.on_text import Method, TextRun, train_on_text
from realrun.train.eagle import EagleSettings, train_eagle
from realrun.train.edd import DecoderTraining, EddSettings
from specsim.cost.model import ConstantCost
from specsim.io.progress import Progress
from specsim.policy.chain.fixed_k import FixedK
from studies.common import Config, Document
from studies.training.decoders import PAPER_K
from studies.training.replays import Folders, by_seed, recorded_all
from studies.training.seeds import Seeds
from studies.training.trainings import WHOLE, Wanted, decoders, trained

EAGLE, LAYER, EDD = "EAGLE", "EDD, its layer alone", "EDD, whole"
NAMES = {LAYER: LAYER, EAGLE: EAGLE, EDD: WHOLE}  # by rising size: as shown, as trained


class LayerTraining(DecoderTraining):
    """EDD's training of the layer alone; embedding, norm and head stay the target's."""

    def __init__(self, target: Any, settings: EddSettings, seed: int):
        super().__init__(target, settings, seed)
        self.decoder.requires_grad_(False)
        self.decoder.model.layers.requires_grad_(True)

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.decoder.model.layers.parameters()), "lr": self.settings.lr}]


def train_layer(pair: Pair, settings: EddSettings, run: TextRun) -> dict[str, Any]:
    """Train EDD's layer alone; see `train_on_text`."""
    method = Method.of("edd", {"trained": "layer", **asdict(settings)}, "")
    return train_on_text(pair, method, lambda: LayerTraining(pair.target, settings, run.loop.seed), run)


def wanted(config: Config) -> Wanted:
    """List the trainings of this question besides EDD's ablation, which trains the full drafter."""
    usual = config["decoders"]["usual"]
    return {
        EAGLE: (train_eagle, EagleSettings(), TextSettings()),
        LAYER: (train_layer, EddSettings(states_after=usual), TextSettings()),
    }


def measure(out: Path, config: Config, report: Progress) -> Document:
    """Train and record all three; replays of K = 5 by way of decoding, and what the files say of sizes and text."""
    whole = {WHOLE: decoders(config)[WHOLE]}  # as EDD's ablation trains it
    folders = trained(out, {**whole, **wanted(config)}, config["decoders"]["tokens"], config, report)
    first = {shown: read_drafter(next(iter(folders[name].values()))).facts for shown, name in NAMES.items()}
    return {
        "lengths": {run["name"]: lengths(out, run, folders, config, report) for run in config["runs"]},
        "facts": {shown: {key: fact[key] for key in ("parameters", "tokens")} for shown, fact in first.items()},
    }


def lengths(out: Path, run: Config, folders: Folders, config: Config, report: Progress) -> dict[str, Seeds]:
    """Replay K = 5 in a way of decoding."""
    replays = {}
    cost = ConstantCost(0.05, 1.0)  # plays no part in an acceptance length
    for shown, name in NAMES.items():
        trees = name == WHOLE and run is config["runs"][0]  # EDD's ablation has recorded it so
        traces = recorded_all(out, {name: folders[name]}, run, config, report, trees=trees)
        replays[shown] = by_seed(FixedK, PAPER_K, traces[name], cost, config, tuned=False)
    return replays
