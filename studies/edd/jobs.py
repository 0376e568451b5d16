"""What the study computes, each into a folder of its own: decoders trained, validations, records of variants, boards.

What is there already is read, so that a second start goes on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numba as nb

from realrun.pairs.drafter_files import read_drafter
from realrun.pairs.pair import LAB_WEIGHTS, Pair, load_target
from realrun.pairs.prompts import study_prompts
from realrun.recording.reuse import recorded_trace
from realrun.training.common.distill import TextSettings
from realrun.training.common.loop import LoopSettings
from realrun.training.common.on_text import TextRun
from realrun.training.edd import EddSettings, VdmSettings, train_edd
from specsim.policy.base import Policy, Variant
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.registry import POLICIES
from specsim.policy.tree.pct import PCT, select
from specsim.progress import Progress
from specsim.trace.files import read_trace
from studies.common import Config, Document, board, load, named, record_settings, validation
from studies.costs import costs_of, paper_costs

EDD, VDM = "edd", "vdm"
WHOLE, NO_STATES, NO_KL, ONE_BLOCK = "EDD + PCT", "without states", "without KL", "one block length"
NO_GAIN, NO_LEAVES = "without expected time gain", "leaves kept"


@nb.njit
def expand_sure(state, params, tree, first, end, u, widths):  # type: ignore[no-untyped-def]
    """Expand what the drafter is sure of, whatever the chance that its parents are accepted.

    Not what is to be dropped as a leaf, for its children would be dropped with it.
    """
    width, expanded = int(params.width), 0
    for i in range(first, end):
        sure = (tree.prob[i] >= params.cost_ratio) & (tree.path[i] >= params.leaf_threshold)
        likely = ((i == 0) | sure) & (expanded < int(params.max_nodes))
        widths[i] = width * likely
        expanded += likely
    return state


@nb.njit
def select_sure(state, params, tree, count, keep):  # type: ignore[no-untyped-def]
    """Keep what PCT keeps, the likeliest; nodes are expanded from the leaves' threshold on."""
    select(state, params, tree, count, keep)
    return params.leaf_threshold


@dataclass(frozen=True)
class SureTree(PCT):
    """PCT without its estimate of a gain (table 3): a node's own confidence against a threshold."""

    name = "sure_tree"
    variants = PCT.variants
    expand = staticmethod(expand_sure)
    select = staticmethod(select_sure)

    @property
    def max_expanded(self) -> int:
        return self.max_nodes


@dataclass(frozen=True)
class PaperPCT(PCT):
    """PCT as the paper runs it, tuned, and with its leaves kept."""

    variants = (  # type: ignore[assignment]  # one form more
        *PCT.variants,
        Variant("leaves kept", {"leaf_threshold": 0.0}, tuned=False),
    )


class PaperK(FixedK):
    """Fixed K, tuned and at the paper's length."""

    name = "fixed_k"
    variants = (Variant("tuned"), Variant("the paper's", {"k": 5}, tuned=False))


class HeadsK(FixedK):
    """The same for MEDUSA, which drafts no deeper than it has heads."""

    name = "fixed_k"
    variants = (Variant("tuned"), Variant("as deep as heads", {"k": 4}, tuned=False))


def trained(out: Path, config: Config, report: Progress) -> dict[str, Path]:
    """VDM, and the decoders of the ablation and the sweep: name -> folder."""
    ablation = config["ablation"]
    small, usual = ablation["tokens"], ablation["usual"]
    wanted = {
        VDM: (config["train"]["tokens"], VdmSettings()),
        WHOLE: (small, EddSettings(states_after=usual)),
        NO_STATES: (small, VdmSettings()),
        NO_KL: (small, EddSettings(states_after=usual, loss="text")),
        ONE_BLOCK: (small, EddSettings(states_after=usual, longest_block=5)),
    }
    wanted |= {f"states {n}": (small, EddSettings(states_after=n)) for n in ablation["states_after"] if n != usual}
    pair = load_target(dtype=config["train"]["dtype"], threads=config["threads"])
    default = LoopSettings(steps=1, warmup_steps=40, dtype=config["train"]["dtype"])
    folders = {}
    for name, (tokens, settings) in wanted.items():
        steps = int(1e6 * tokens / (default.batch_windows * default.window_tokens))
        folders[name] = folder = out / "trained" / name.replace(" ", "-")
        loop = dataclasses.replace(default, steps=steps)
        train_edd(pair, settings, TextRun(TextSettings(), loop, folder, out / "text", progress=named(report, name)))
    return folders


def main_jobs(
    out: Path, run: Config, config: Config, folders: Mapping[str, Path], report: Progress
) -> dict[str, Document]:
    """The validation of every drafter in one way of decoding, and what its file says of it."""
    found = {}
    for drafter in config["drafters"]:
        folder = out / run["name"] / drafter
        trees = config["trees"] if drafter == EDD else []  # trees with EDD's alone
        kinds = partial(kinds_of, names=[*config["chains"], *trees])
        document = validation(folder, folders.get(drafter, drafter), kinds, run, config, report, trees=bool(trees))
        document["facts"] = read_drafter(folders.get(drafter, LAB_WEIGHTS / drafter)).facts
        found[drafter] = document
    return found


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
    trace = read_trace(folder / "trace")
    return {
        what: board(folder / f"board-{short(what)}.json", what, trace, cost, kinds, config, report)
        for what, cost in paper_costs(config).items()
    }


def short(costs: str) -> str:
    """A costs' name in those of files."""
    return costs.split()[0].removesuffix("'s")


def variants(
    out: Path, config: Config, folders: Mapping[str, Path], report: Progress
) -> dict[str, dict[str, Document]]:
    """Boards of every decoder of the ablation and the sweep, greedy, at all costs: name -> costs -> board.

    All have EDD's structure, so that its profile prices them; the one without states has fewer rows to attend to.
    """
    run = config["runs"][0]
    found: dict[str, dict[str, Document]] = {}
    for name, folder in folders.items():
        if name == VDM:
            continue
        pair = load(config, folder)
        where = out / "variants" / folder.name
        trace = recorded_trace(
            pair,
            study_prompts(pair.tokenizer, config["prompts"]),
            record_settings(run, config, trees=True),
            where / "trace",
            partial(named(report, name), "record"),
        )
        kinds: list[type[Policy]] = [PaperK, PaperPCT, SureTree]
        found[name] = {
            what: board(where / f"{short(what)}.json", what, trace, cost, kinds, config, report)
            for what, cost in costs_of(out / run["name"] / EDD, config).items()
        }
    return found
