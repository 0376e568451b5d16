"""The report's text; every number comes from the runs."""

from __future__ import annotations

from collections.abc import Mapping

from studies.common import Config, Document
from studies.costs import about_costs
from studies.training import decoders, exits, heads, heat, sizes
from studies.training.heat import Tuning
from studies.training.seeds import COVERS, Seeds

Rows = Mapping[str, Seeds]
Sweep = Mapping[int, Rows]


def introduction(config: Config) -> list[str]:
    """What was trained, on what it was replayed, and what intervals cover."""
    seeds = ", ".join(str(seed) for seed in config["seeds"])
    return [
        "# What training decides, on the lab",
        "",
        f"Drafters trained alike with seeds {seeds}, recorded on {config['prompts']} prompts from library files that "
        f"the lab was not trained on, {config['max_new_tokens']} tokens each, and replayed; nothing was timed but cost "
        f"profiles on {config['priced']} ({config['profile_repeats']} repeats, {config['threads']} thread). "
        "It is the lab's target deepened by blocks that pass their input on: the traces are those of the lab itself, "
        f"the costs a deep model's. Policies that are tuned are tuned on {100 * config['tuning_share']:g} % of the "
        "prompts, no file on both sides, and reported on the others; rows of policies that are not tuned have all.",
        "",
        f"{COVERS} A seed draws the windows of text and, of EAGLE, the first weights. Trainings are shorter than those "
        "of the lab's own drafters: the tables say what differs after so many tokens.",
        "",
    ]


def decoder_section(
    config: Config, ablations: Mapping[str, Rows], tuned: Mapping[str, Rows], sweep: Sweep
) -> list[str]:
    """EDD taken apart. ablations, tuned : by costs"""
    first = config["runs"][0]["name"]
    lines = [
        f"## EDD taken apart, {first}",
        "",
        f"Decoders of {config['decoders']['tokens']:g} M tokens each, under PCT as the paper runs it (width 5, depth "
        "10, leaves below 0.01 dropped, s_d / s_t of the costs). Without expected time gain: a node's own confidence "
        "against the same threshold, and the likeliest nodes kept as PCT keeps them. At measured costs all are priced "
        f"by the profile of the whole. {about_costs(config)}",
        "",
    ]
    for costs, rows in ablations.items():
        lines += [f"At {costs}:", "", *decoders.ablation_table(rows, decoders.PAPER_SPEEDUPS)]
        lines += ["The gain's estimate alone, with and without it tuned on the same trials:", ""]
        lines += decoders.ablation_table(tuned[costs], {})
    return [
        *lines,
        "The layer whose states are read (figure 5, where the fourth-to-last of 32 is best), at measured costs; layers "
        "of the target as it was trained:",
        "",
        *decoders.sweep_table(sweep, config["decoders"]["usual"]),
        "![Layers](figures/layers.svg)",
        "",
    ]


def exit_section(config: Config, rows: Rows, sweeps: Mapping[str, tuple[Sweep, Mapping[int, float]]]) -> list[str]:
    """EESD taken apart. sweeps : N and E, each with s_d / s_t by number"""
    asked = config["early_exits"]
    layers, exit_layers = asked["usual"]
    lines = [
        f"## EESD taken apart, {config['runs'][0]['name']}",
        "",
        f"Early exits of {asked['tokens']:g} M tokens each, {exit_layers} exit layer after N = {layers} layers where "
        "nothing else is said (EESD, table 4), each at the profile of its own structure.",
        "",
        *exits.rows_table(rows),
    ]
    titles = {"N": "The first N layers (figure 4):", "E": "Early-exit layers (figure 5); 0 is a norm and a head alone:"}
    for what, (sweep, ratios) in sweeps.items():
        usual = {"N": layers, "E": exit_layers}[what]
        lines += [titles[what], "", *exits.sweep_table(what, sweep, usual, ratios)]
    return [*lines, "![Sweeps](figures/exits.svg)", ""]


def size_section(found: Mapping[str, Rows], facts: Mapping[str, Document]) -> list[str]:
    """EDD beside EAGLE."""
    return [
        "## EDD beside EAGLE, of like size",
        "",
        "No setting of either makes the two equal: EAGLE trains a layer and a projection below the target's head, EDD "
        "a layer, a norm and an embedding that is its head too. Its layer alone is nearest. tau at K = 5 on all "
        "prompts; same text, same tokens, same seeds.",
        "",
        *sizes.sizes_table(found, facts),
        *sizes.sizes_finding(found),
    ]


def head_section(config: Config, found: Document) -> list[str]:
    """MEDUSA's first head."""
    return [
        "## MEDUSA's first head: training or capacity",
        "",
        "Agreement of head 1, which says the token after the next from the state at a token, with what the target "
        "says there. `MedusaSettings` has one residual block a head; the richer forms here are this study's own. All "
        f"start as the lab's head and see the same text, at a peak learning rate of {config['heads']['lr']:g}; one "
        "seed, intervals over windows of held-out text, paired.",
        "",
        *heads.heads_findings(found),
        *heads.heads_table(found),
        "![Heads](figures/heads.svg)",
        "",
    ]


def heat_section(config: Config, found: Mapping[Tuning, Document]) -> list[str]:
    """SPACE's heat."""
    return [
        "## SPACE: what tuning costs the target",
        "",
        f"Plain fine-tuning (SFT, p_ar = 1) beside SAR-SFT on {config['heat']['tokens']:g} M tokens of the same text, "
        "by the low-rank adapter and by all weights, at the recipe's learning rate and below. The cost is the rise of "
        "the cross-entropy of held-out text; one seed, intervals over windows.",
        "",
        *heat.heat_findings(found),
        *heat.heat_table(found),
        "![Heat](figures/heat.svg)",
        "",
    ]
