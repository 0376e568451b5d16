"""The report's text; every number comes from the runs."""

from __future__ import annotations

from pathlib import Path

from specsim.files import write_text
from specsim.speedup.intervals import ratio_interval
from studies.common import Config, Document
from studies.costs import about_costs
from studies.training import decoders, exits, figures, heads, heat, sizes
from studies.training.seeds import COVERS, speedup, tau
from studies.words import has_uneven_blocks

UNEVEN = (
    "Speedups, and the sweep over the first N layers (figure 4), are withdrawn: all identity blocks stood behind layer "
    "4 when costs were measured, so that each layer up to there cost 1 of 40 and had the quality of 1 of 8. Policies "
    "were tuned at those costs."
)


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


def decoder_section(config: Config, found: Document, drawn: Path) -> list[str]:
    """EDD taken apart, and its figure into the folder `drawn`."""
    panels = [("layers of the target below the states that EDD reads", found["sweep"])]
    title = "Acceptance length against the layer of the states"
    figure = figures.sweeps(panels, tau, "acceptance length tau, tokens", "layers", title)
    write_text(drawn / "layers.svg", figure)
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
    for costs, rows in found["ablation"].items():
        lines += [f"At {costs}:", "", *decoders.ablation_table(rows, decoders.PAPER_SPEEDUPS)]
        lines += ["The gain's estimate alone, with and without it tuned on the same trials:", ""]
        lines += decoders.ablation_table(found["tuned"][costs], {})
    return [
        *lines,
        "The layer whose states are read (figure 5, where the fourth-to-last of 32 is best), at measured costs; layers "
        "of the target as it was trained:",
        "",
        *decoders.sweep_table(found["sweep"], config["decoders"]["usual"]),
        "![Layers](figures/layers.svg)",
        "",
    ]


def exit_section(config: Config, found: Document, drawn: Path) -> list[str]:
    """EESD taken apart, and its figure into the folder `drawn`."""
    uneven = has_uneven_blocks({"target": config["priced"]}, found)
    sweeps = {what: sweep for what, sweep in found["sweeps"].items() if what != "N" or not uneven}
    names = {"N": "first N layers", "E": "early-exit layers"}
    panels = [(names[what], sweep) for what, sweep in sweeps.items()]
    measured = (tau, "acceptance length tau, tokens") if uneven else (speedup, "speedup")
    write_text(drawn / "exits.svg", figures.sweeps(panels, *measured, "exits", f"Early exits: {measured[1]}"))
    asked = config["early_exits"]
    layers, exit_layers = asked["usual"]
    lines = [
        f"## EESD taken apart, {config['runs'][0]['name']}",
        "",
        f"Early exits of {asked['tokens']:g} M tokens each, {exit_layers} exit layer after N = {layers} layers where "
        "nothing else is said (EESD, table 4), each at the profile of its own structure.",
        "",
        *([UNEVEN, ""] if uneven else []),
        *exits.rows_table(found["rows"], priced=not uneven),
    ]
    titles = {"N": "The first N layers (figure 4):", "E": "Early-exit layers (figure 5); 0 is a norm and a head alone:"}
    for what, sweep in sweeps.items():
        usual = {"N": layers, "E": exit_layers}[what]
        lines += [titles[what], "", *exits.sweep_table(what, sweep, usual, found["ratios"][what], priced=not uneven)]
    return [*lines, "![Sweeps](figures/exits.svg)", ""]


def size_section(config: Config, found: Document, drawn: Path) -> list[str]:
    """EDD beside EAGLE."""
    return [
        "## EDD beside EAGLE, of like size",
        "",
        "No setting of either makes the two equal: EAGLE trains a layer and a projection below the target's head, EDD "
        "a layer, a norm and an embedding that is its head too. Its layer alone is nearest. tau at K = 5 on all "
        "prompts; same text, same tokens, same seeds.",
        "",
        *sizes.sizes_table(found["lengths"], found["facts"]),
        *sizes.sizes_finding(found["lengths"]),
    ]


def head_section(config: Config, found: Document, drawn: Path) -> list[str]:
    """MEDUSA's first head, and its figure into the folder `drawn`."""
    best = ratio_interval(found["attainable"]["attainable"], found["attainable"]["places"])
    write_text(drawn / "heads.svg", figures.head_curves(heads.curves(found), best))
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


def heat_section(config: Config, found: Document, drawn: Path) -> list[str]:
    """SPACE's heat, and its figure into the folder `drawn`."""
    tunings = heat.by_tuning(found)
    write_text(drawn / "heat.svg", figures.heats(heat.points(tunings)))
    return [
        "## SPACE: what tuning costs the target",
        "",
        f"Plain fine-tuning (SFT, p_ar = 1) beside SAR-SFT on {config['heat']['tokens']:g} M tokens of the same text, "
        "by the low-rank adapter and by all weights, at the recipe's learning rate and below. The cost is the rise of "
        "the cross-entropy of held-out text; one seed, intervals over windows.",
        "",
        *heat.heat_findings(tunings),
        *heat.heat_table(tunings),
        "![Heat](figures/heat.svg)",
        "",
    ]
