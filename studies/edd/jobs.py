"""What the study computes, each into a folder of its own: VDM trained, validations, boards.

What is there already is read, so that a second start goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from realrun.pairs.drafter_files import read_drafter
from realrun.pairs.lab_drafters import drafter_training
from realrun.pairs.pair import Pair, load_target
from realrun.train.common.distill import TextSettings
from realrun.train.common.loop import LoopSettings
from realrun.train.common.on_text import TextRun
from realrun.train.edd import VdmSettings, train_edd
from specsim.io.progress import Progress
from specsim.policy.base import Policy, Variant
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.registry import POLICIES
from studies.common import Config, Document, board, cached, named, validation
from studies.paper_costs import paper_costs

EDD, VDM = "edd", "vdm"
FACTS = "facts.json"  # what the drafters' own files say of them, by name


class PaperK(FixedK):
    """Fixed K, tuned and at the paper's length."""

    name = "fixed_k"
    variants = (Variant("tuned"), Variant("the paper's", {"k": 5}, tuned=False))


class HeadsK(FixedK):
    """The same for MEDUSA, which drafts no deeper than it has heads."""

    name = "fixed_k"
    variants = (Variant("tuned"), Variant("as deep as heads", {"k": 4}, tuned=False))


def vdm(out: Path, config: Config, report: Progress) -> Path:
    """The folder of VDM, which is trained here as the lab's drafters were."""
    train, folder = config["train"], out / "trained" / VDM
    pair = load_target(dtype=train["dtype"], threads=config["threads"])
    loop = LoopSettings(steps=1, warmup_steps=40, dtype=train["dtype"]).lasting(1e6 * train["tokens"])
    train_edd(pair, VdmSettings(), TextRun(TextSettings(), loop, folder, out / "text", progress=named(report, VDM)))
    return folder


def drafter_facts(out: Path, config: Config) -> Document:
    """Drafters, and what each was trained on."""

    def facts_of(name: str) -> Document:
        return read_drafter(out / "trained" / VDM).facts if name == VDM else drafter_training(name)

    return cached(out / FACTS, lambda: {name: facts_of(name) for name in config["drafters"]})


def main_jobs(out: Path, run: Config, config: Config, report: Progress) -> dict[str, Document]:
    """Validate every drafter in a way of decoding."""
    documents = {}
    for drafter in config["drafters"]:
        folder = out / run["name"] / drafter
        trees = config["trees"] if drafter == EDD else []  # trees with EDD's alone
        kinds = partial(kinds_of, names=[*config["chains"], *trees])
        drafter_or_training = partial(vdm, out, config, report) if drafter == VDM else drafter
        documents[drafter] = validation(folder, drafter_or_training, kinds, run, config, report, trees=bool(trees))
    return documents


def kinds_of(pair: Pair, names: Sequence[str]) -> list[type[Policy]]:
    """These policies and fixed K, which MEDUSA has no deeper than it has heads."""
    return [
        PaperK if pair.drafter.max_depth is None else HeadsK,
        *(POLICIES[name] for name in names if name != "fixed_k"),
    ]


def tree_boards(out: Path, run: Config, config: Config, report: Progress) -> dict[str, Document]:
    """All policies of EDD's validation replayed at costs that need no machine: costs -> board."""
    folder = out / run["name"] / EDD
    kinds = [POLICIES[name] for name in (*config["chains"], *config["trees"])]
    return {
        what: board(folder / f"board-{short(what)}.json", cost, kinds, config, report)
        for what, cost in paper_costs(config).items()
    }


def short(costs: str) -> str:
    """A costs' name in those of files."""
    return costs.split()[0].removesuffix("'s")
