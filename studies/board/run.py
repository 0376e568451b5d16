"""All drafters of the lab's target on one board: `python -m studies.board.run [OUT]`.

What `realrun leaderboard` does with the settings of config.toml, in each way of decoding. A second start goes
on with what is there. Writes OUT/<run>/ (with report.html), OUT/figures/ and OUT/report.md, in which every
number comes from the runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from realrun.leaderboard.job import Settings, named, run_leaderboard
from realrun.pairs.drafter_files import read_drafter
from realrun.pairs.pair import LAB_WEIGHTS, LOOKUP, load_pair
from realrun.pairs.prompts import study_prompts
from specsim.cli.console import progress_bar
from specsim.cost.files import read_cost
from specsim.cost.profile import ProfileCost
from specsim.files import write_json, write_text
from specsim.policy.registry import POLICIES, make_policy
from specsim.policy.tree.base import TreePolicy
from specsim.replaying.priced import PricedTrace
from specsim.report import leaderboard_figures
from specsim.report.markdown import accuracy, ladder_table, markdown_table, trust_table
from specsim.report.page import comparable_text
from specsim.speedup.intervals import interval_text
from specsim.speedup.prediction import ladder
from specsim.trace.files import read_trace
from specsim.trace.trace import Trace
from studies.common import (
    Config,
    Document,
    about_machine,
    about_prompts,
    claim,
    parts,
    record_settings,
    run_study,
    truncated_share,
)
from studies.words import about_target, about_uneven_blocks, share_text, without_withdrawn

RECORDED = ("config.json", "*/board.json")


def board(out: Path, run: Config, config: Config) -> Document:
    """The leaderboard in this way of decoding, with its replays; read where it is there."""
    done = out / run["name"] / "board.json"
    if done.is_file():
        return dict(json.loads(done.read_text()))
    settings = Settings(
        record=record_settings(run, config, trees=True),
        kinds=tuple(POLICIES[name] for name in config["policies"]),
        trials=config["trials"],
        repeats=config["repeats"],
        tuning_share=config["tuning_share"],
        seed=config["seed"],
    )
    load = partial(load_pair, config["target"], dtype=config["dtype"], threads=config["threads"])
    plain = load(drafter=LOOKUP)
    pairs = {name: load(drafter=given, beside=plain) for name, given in named(None, config["target"]).items()}
    prompts = study_prompts(plain.tokenizer, config["prompts"])
    with progress_bar() as report:
        document = run_leaderboard(pairs, plain, prompts, settings, out / run["name"], report)
    folders = {name: out / run["name"] / name for name in pairs}
    traces = {name: read_trace(folder / "trace") for name, folder in folders.items()}
    costs = {name: read_cost(folder / "profile.json") for name, folder in folders.items()}
    document = with_replays(document, traces, costs, config)  # type: ignore[arg-type]  # no file of two numbers
    write_json(document, done)
    return document


def with_replays(
    document: Document, traces: Mapping[str, Trace], costs: Mapping[str, ProfileCost], config: Config
) -> Document:
    """The board with each row's ladder, and the share of its rounds that the record truncates; both by drafter."""
    holdouts = {name: parts(trace, config)[1] for name, trace in traces.items()}
    rows = []
    for row in document["rows"]:
        holdout, cost = holdouts[row["drafter"]], costs[row["drafter"]]
        policy = make_policy(row["policy"], row["params"])
        steps = ladder(holdout, policy, cost, seed=config["seed"])
        share = truncated_share(PricedTrace(holdout, cost).replay(policy, seed=config["seed"]))
        rungs = {"eq14": steps.eq14, "constant": steps.constant, "profile": row["speedup"]["estimate"]}
        own = {"ladder": {**rungs, "measured": row["measured"]["estimate"]}, "truncated_share": share}
        rows.append({**row, **own, "tree": isinstance(policy, TreePolicy)})
    return {**document, "rows": rows}


def board_table(document: Document) -> list[str]:
    """The board, by measured speedup. A star marks the best row of its drafter on the tuning prompts."""
    columns = ["drafter", "policy", "from own rounds", "to the leader", "measured", "error %", "tau", "v_d", "HM"]
    columns += ["without loops", "rounds truncated %"]
    rows = []
    for row in document["rows"]:
        behind = row["leader_minus_this"]
        tie = " not significant" if row["tied_with_leader"] else ""
        star = " *" if row["best_of_drafter"] else ""
        rows.append(
            [
                row["drafter"] + (" (own target)" if row["own_target"] else ""),
                f"{row['form']}{star}: {row['settings']}",
                interval_text(row["speedup"]),
                interval_text(behind["difference"]) + tie if behind else "",
                interval_text(row["measured"]),
                f"{row['error_percent']:+.1f}",
                f"{row['tau']:.2f}",
                *(f"{row[key]:.3f}" for key in ("v_d", "hm")),
                interval_text(row["without_loops"]) if row["without_loops"] else "",
                share_text(row) if row["tree"] else "",
            ]
        )
    return markdown_table(columns, rows)


def loops(document: Document) -> list[str]:
    """How many prompts' texts repeat themselves, which favours prompt lookup."""
    count, all_of_them = document["looping_prompts"], document["sequences"]["holdout"]
    text = f"The text of {count} of the {all_of_them} prompts loops: at most half of its trigrams are distinct."
    rest = (
        "`without loops` is the measured speedup over the others."
        if all_of_them - count > 1
        else ("Too few are left for speedups without them.")
    )
    return [f"{text} {rest}", ""]


def drafters_table(document: Document) -> list[str]:
    """What the drafters are, what they were trained on, and what a draft step costs."""
    rows = []
    for one in document["drafters"]:
        folder = LAB_WEIGHTS / one["name"]
        tokens = read_drafter(folder).facts.get("tokens") if folder.is_dir() else None
        seen = f"{tokens / 1e6:.1f}" if tokens else ""
        first = f"{100 * one['first_token_accepted_share']:.1f}"
        rows.append([one["name"], seen, first, f"{one['step_ratio']:.3f}", str(one["depth"])])
    columns = ["drafter", "tokens trained on, M", "first token accepted %", "s_d / s_t", "deepest draft, tokens"]
    return markdown_table(columns, rows)


def report_text(config: Config, boards: Mapping[str, Document]) -> str:
    """The whole report as Markdown."""
    one = next(iter(boards.values()))
    lines = [
        "# All drafters of the lab's target, at equal cost accounting",
        "",
        f"{about_prompts(config, one, 'rank on')}; {about_machine(one)}. {about_target(config)} "
        f"{about_uneven_blocks(config, one)}"
        "Every prompt was decoded by all at once, in turns of two rounds, and costs were read off those rounds, "
        "against one autoregressive time, the plain target's. Of each drafter the best fixed K, adaptive chain and "
        "tree, chosen and tuned on the tuning prompts, and its paper's own policy; speedups with 95 % intervals over"
        " prompts; `to the leader` is the first row's less the row's. Drafters with a target of their own write a "
        "text of their own. Equal are prompts, policies and costs, not what the drafters were trained on.",
        "",
    ]
    lines += [line for text in comparable_text(boards) for line in (text, "")]
    for name, document in boards.items():
        lines += [
            f"## {name}",
            "",
            *board_table(shown := without_withdrawn(config, document)),
            *loops(document),
            *trust_table({name: document}, config["repeats"]),
            accuracy(row["error_percent"] for row in document["rows"]),
            "",
            *ladder_table((f"{row['drafter']}, {row['form']}", row) for row in shown["rows"]),
            f"![Drafters](figures/drafters-{name}.svg)",
            "",
            *drafters_table(shown),
        ]
    return "\n".join(lines)


def main(out: Path, config: Config) -> None:
    """Run everything and write the report."""
    claim(out, config)
    boards = {run["name"]: board(out, run, config) for run in config["runs"]}
    for name, document in boards.items():
        shown = without_withdrawn(config, document)["rows"]
        write_text(out / "figures" / f"drafters-{name}.svg", leaderboard_figures.drafters(shown))
    write_text(out / "report.md", report_text(config, boards))


if __name__ == "__main__":
    run_study(main, __file__)
