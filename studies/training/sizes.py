"""EDD and EAGLE trained on the same text, with about as many trainable parameters: is one of them better for its size?

No setting of either makes the two equal: EDD's own embedding, which is its head too, is most of the difference. So
EDD is trained twice, whole, with more parameters than EAGLE, and its layer alone, with fewer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from realrun.pairs.drafter_files import read_drafter
from realrun.pairs.pair import Pair
from realrun.training.common.distill import TextSettings
from realrun.training.common.on_text import TextRun, train_on_text
from realrun.training.eagle import EagleSettings, train_eagle
from realrun.training.edd import DecoderTraining, EddSettings
from specsim.cost.model import ConstantCost
from specsim.policy.chain.fixed_k import FixedK
from specsim.progress import Progress
from specsim.report.markdown import difference_text, markdown_table
from studies.common import Config, Document
from studies.training.decoders import PAPER_K
from studies.training.replays import Folders, by_seed, recorded_all
from studies.training.seeds import Seeds, tau, tau_difference
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
    """Train EDD's layer alone, as `train_on_text` says."""
    own = asdict(settings)
    plan, facts = {"drafter": "edd", "trained": "layer", **own}, {"method": "edd", "trained": "layer", **own}
    return train_on_text(
        pair, "edd", lambda: LayerTraining(pair.target, settings, run.loop.seed), run, plan=plan, facts=facts
    )


def wanted(config: Config) -> Wanted:
    """What is trained for this question beside EDD's ablation, which trains the whole."""
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
    """Replays of K = 5 in one way of decoding."""
    found = {}
    cost = ConstantCost(0.05, 1.0)  # plays no part in an acceptance length
    for shown, name in NAMES.items():
        trees = name == WHOLE and run is config["runs"][0]  # EDD's ablation has recorded it so
        traces = recorded_all(out, {name: folders[name]}, run, config, report, trees=trees)
        found[shown] = by_seed(FixedK, PAPER_K, traces[name], cost, config, tuned=False)
    return found


def sizes_table(found: Mapping[str, Mapping[str, Seeds]], facts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """By rising size: parameters, text, and the acceptance length in each way of decoding, less EAGLE's too."""
    eagle = facts[EAGLE]["parameters"]
    table = []
    for name, fact in facts.items():
        count = fact["parameters"]
        table.append([name, f"{count:,}", f"{count / eagle:.2f}", f"{fact['tokens'] / 1e6:.2f}"])
        for runs in found.values():
            less = "" if name == EAGLE else difference_text(tau_difference(runs[name], runs[EAGLE]))
            table[-1] += [str(tau(runs[name])), less]
    columns = ["drafter", "trained parameters", "of EAGLE's", "tokens seen, M"]
    return markdown_table([*columns, *(text for run in found for text in (f"tau, {run}", "less EAGLE's"))], table)


def sizes_finding(found: Mapping[str, Mapping[str, Seeds]]) -> list[str]:
    """What that says of the two, a line for each way of decoding."""
    lines = []
    for run, runs in found.items():
        less, more = (tau_difference(runs[name], runs[EAGLE]) for name in (LAYER, EDD))
        if less.low > 0:
            said = "EDD accepts more even with fewer parameters"
        elif more.high < 0:
            said = "EAGLE accepts more even than EDD with more parameters"
        else:
            said = "not decided, as EDD with fewer is not clearly above EAGLE, nor EDD with more clearly below"
        lines.append(f"- {run}: {said}.")
    return [*lines, ""]
