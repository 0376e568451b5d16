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
from specsim.cost.model import ConstantCost
from specsim.cost.profile import read_cost
from specsim.policy.base import Policy, Variant, build_policy
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.registry import POLICIES
from specsim.policy.tree.pct import PCT
from specsim.progress import Progress
from specsim.replaying.priced import PricedTrace
from specsim.speedup.prediction import predict_policy
from specsim.trace.files import read_trace
from specsim.trace.split import split_sequences
from studies.common import Config, Document, board, load, named, record_settings, validation

EDD, VDM = "edd", "vdm"
HERE, PAPER = "this machine's costs", "the paper's costs"
WHOLE, NO_STATES, NO_KL, ONE_BLOCK = "EDD + PCT", "without states", "without KL", "one block length"
NO_GAIN, NO_LEAVES = "without expected time gain", "leaves kept"


@nb.njit
def expand_sure(state, params, tree, first, end, u, widths):  # type: ignore[no-untyped-def]
    """Expand what the drafter is sure of, whatever the chance that its parents are accepted."""
    width, expanded = int(params.width), 0
    for i in range(first, end):
        likely = ((i == 0) | (tree.prob[i] >= params.cost_ratio)) & (expanded < int(params.max_nodes))
        widths[i] = width * likely
        expanded += likely
    return state


@nb.njit
def select_sure(state, params, tree, count, keep):  # type: ignore[no-untyped-def]
    """Keep what PCT keeps; a node that may have been expanded at any path counts from the leaves' threshold on."""
    kept = 0
    for i in range(1, count):
        if (tree.path[i] >= params.leaf_threshold) & (kept < int(params.max_nodes)):
            keep[i] = True
            kept += 1
    return params.leaf_threshold


@dataclass(frozen=True)
class SureTree(PCT):
    """PCT without its estimate of a gain (table 3): a node's own confidence against a threshold."""

    name = "sure_tree"
    variants = (Variant("tuned", {"test": "node"}), Variant("untuned", tuned=False))
    expand = staticmethod(expand_sure)
    select = staticmethod(select_sure)

    @property
    def max_expanded(self) -> int:
        return self.max_nodes


@dataclass(frozen=True)
class PaperPCT(PCT):
    """PCT as the paper runs it, and with its leaves kept."""

    variants = (
        Variant("s_d / s_t of the costs", tuned=False),
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
    """The validation of every drafter in one way of decoding, the ratio s_d / s_t and what its file says of it.

    Rows get their speedup on the tuning prompts, by which the best of several is chosen.
    """
    found = {}
    for drafter in config["drafters"]:
        folder = out / run["name"] / drafter
        trees = config["trees"] if drafter == EDD else []  # trees with EDD's alone
        kinds = partial(kinds_of, names=[*config["chains"], *trees])
        document = validation(folder, folders.get(drafter, drafter), kinds, run, config, report, trees=bool(trees))
        trace, cost = read_trace(folder / "trace"), read_cost(folder / "profile.json")
        tuning, _ = split_sequences(trace, tuning_share=config["tuning_share"], seed=config["seed"])
        for row in document["rows"]:
            policy = build_policy(POLICIES[row["policy"]], row["params"])
            row["train_speedup"] = predict_policy(PricedTrace(trace.select(tuning), cost), policy).speedup.estimate
        document["step_ratio"] = PricedTrace(trace, cost).table().step_ratio
        document["facts"] = read_drafter(folders.get(drafter, LAB_WEIGHTS / drafter)).facts
        found[drafter] = document
    return found


def kinds_of(pair: Pair, names: Sequence[str]) -> list[type[Policy]]:
    """These policies and fixed K, which MEDUSA has no deeper than it has heads."""
    return [
        PaperK if pair.drafter.max_depth is None else HeadsK,
        *(POLICIES[name] for name in names if name != "fixed_k"),
    ]


def paper_cost(config: Config) -> ConstantCost:
    """Seconds of a draft step and of a target pass in the paper."""
    return ConstantCost(config["paper"]["s_d"], config["paper"]["s_t"])


def tree_boards(out: Path, run: Config, config: Config, report: Progress) -> Document:
    """All policies of EDD's validation replayed at the paper's costs."""
    folder = out / run["name"] / EDD
    kinds = [POLICIES[name] for name in (*config["chains"], *config["trees"])]
    done = folder / "paper-costs.json"
    return board(done, done.stem, read_trace(folder / "trace"), paper_cost(config), kinds, config, report)


def variants(
    out: Path, config: Config, folders: Mapping[str, Path], report: Progress
) -> dict[str, dict[str, Document]]:
    """Boards of every decoder of the ablation and the sweep, greedy, at two costs: name -> costs -> board.

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
        measured = read_cost(out / run["name"] / EDD / "profile.json")
        kinds: list[type[Policy]] = [PaperK, PaperPCT, SureTree]
        found[name] = {
            what: board(where / f"{what.split()[0]}.json", what.split()[0], trace, cost, kinds, config, report)
            for what, cost in ((HERE, measured), (PAPER, paper_cost(config)))
        }
    return found
