"""Policies on SmolLM2 with EAGLE, on this machine and at the costs of a GPU: `python -m studies policies`.

For each run of config.toml: record the tuning prompts with draft trees, tune every policy, decode the held-out prompts,
then rank all policies under this machine's costs and the GPU's, and judge the signals that stop a draft. A second start
goes on with what is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from specsim.cli.console import progress_bar
from specsim.compare.leaderboard import leaderboards
from specsim.cost.files import read_cost
from specsim.io.progress import Progress
from specsim.policy.registry import CHAIN_POLICIES, POLICIES, TREE_POLICIES
from specsim.report.table import SPEEDUP, TWO, Column
from specsim.trace.files import read_trace
from studies.common import MOST_TRUNCATED, VALIDATED, Config, Document, cached, claim, gpu_costs, run_title, validation
from studies.comparisons import best_by, board_rows, differ_measured, first_best, form, measured_gap, table_rows
from studies.figures import dots, point
from studies.policies import signals
from studies.policies.signals import ORACLE, RUN
from studies.report import Report, trust_lines

CPU, GPU = "this CPU", "GPU"
SHOWN = 8
UNKNOWN = point(float("nan"))  # draws nothing

Row = Mapping[str, Any]
FOUND = "found.json"  # leaderboards by cost
SIGNALS = "signals.json"
RECORDED = ("config.json", SIGNALS, f"*/{FOUND}", *(f"*/{name}" for name in VALIDATED))
KEPT = ("label", "policy", "params", "speedup", "tau", "v_d", "train_speedup", "truncated_share", "tied_with_leader")


def boards_of(folder: Path, config: Config, progress: Progress) -> dict[str, Any]:
    """Return the ranking at both costs, without rows whose rounds the record truncates too often."""
    trace = read_trace(folder / "trace")
    boards = {}
    for name, cost in {CPU: read_cost(folder / "profile.json"), GPU: gpu_costs(config["gpu"])}.items():
        (ranked,) = leaderboards(
            {"trace": trace},
            [cost],
            trials=config["trials"],
            tuning_share=config["tuning_share"],
            replays=config["replay_seeds"],
            seed=config["seed"],
            progress=progress,
        )
        rows = [row for row in ranked.as_dict()["rows"] if row["truncated_share"] <= MOST_TRUNCATED]
        boards[name] = [{key: row[key] for key in KEPT} for row in rows]
    return boards


def main(out: Path, config: Config) -> None:
    """Run everything and write the report."""
    claim(out, config)
    kinds = [POLICIES[name] for name in config["run"]]
    runs, boards = {}, {}
    for run in config["runs"]:
        folder, name = out / run["name"], run_title(run)
        with progress_bar() as progress:
            runs[name] = validation(folder, config["drafter"], kinds, run, config, progress, trees=True)
            boards[name] = cached(folder / FOUND, partial(boards_of, folder, config, progress))
    with progress_bar() as progress:
        judged = cached(out / SIGNALS, partial(signals.find, out / "signals", config["signals"], progress))
    report(config, runs, boards, judged).write(out)


def report(config: Config, runs: Mapping[str, Document], boards: Mapping[str, Document], signals: Document) -> Report:
    """Return the report.

    runs : validations by way of decoding; boards : by the same, leaderboards by cost; signals : that stop a draft
    """
    first, document = next(iter(runs.items()))
    best = {cost: best_by(rows, "policy") for cost, rows in boards[first].items()}
    rows = policy_rows(document, best[GPU])
    k = {cost: row["fixed_k"]["params"]["k"] for cost, row in best.items()}
    tree, chain = (
        first_best(row for row in document["rows"] if row["policy"] in kinds)
        for kinds in (TREE_POLICIES, CHAIN_POLICIES)
    )
    assert tree is not None and chain is not None
    gap = measured_gap(document, tree, chain, f"that of the best chain ({form(chain)})")
    gpu = config["gpu"]
    name = f"{gpu['target']} with {gpu['drafter']} on {gpu['engine']}, {gpu['gpu'].upper()}"
    return Report(
        question="Which policy is fastest for SmolLM2 with EAGLE, and does a GPU change the answer?",
        answer=f"On a CPU thread {rows[0]['policy']} is fastest in {first} decoding: it measures "
        f"{rows[0]['measured']['estimate']:.2f} times the baseline ({untied(document, rows[0])}). "
        f"At the costs of {name} the same texts rank {leader_text(boards[first][GPU])}. "
        f"The best fixed draft length is {k[CPU]} on the CPU and {k[GPU]} there. On the CPU the best tree "
        f"({form(tree)}) measures a speedup {gap}.",
        figure=dots(
            [(row["policy"], {key: row.get(key, UNKNOWN) for key in ("measured", "replayed", "GPU")}) for row in rows],
            "policies",
            "SmolLM2-135M-Instruct with EAGLE",
            "speedup, baseline = 1; 95 % intervals",
            level=1,
        ),
        figure_name="policies",
        caption=f"Speedup of each policy: measured and replayed on a CPU thread, and replayed at the costs of {name}",
        columns=[
            Column("policy", "policy"),
            Column("settings", "label"),
            Column("mean acceptance length (tau)", "tau", TWO),
            Column("replayed, CPU", "replayed", SPEEDUP),
            Column("measured, CPU", "measured", SPEEDUP),
            Column("settings for the GPU", "gpu_label"),
            Column("replayed, GPU", "GPU", SPEEDUP),
        ],
        shown=rows[:SHOWN],
        table=[
            *(row for run, result in runs.items() for row in table_rows(run, result["rows"], costs="this run's")),
            *(
                row
                for run, result in boards.items()
                for costs, ranked in result.items()
                for row in board_rows(run, {"rows": ranked}, costs=f"{costs}, replayed only")
            ),
            *signals["rows"],
        ],
        trust=[
            *trust_lines(config, runs),
            "Each policy is shown with the settings that were best on the tuning prompts, for each machine anew.",
            "Stop signals, replayed: of the gap between the best fixed K and the oracle, the rules that close most are "
            f"{best_signals(signals['rows'])}; the table's last rows have all.",
            f"No GPU was measured: the costs of {name} are of its data sheet and of published runs; acceptance is "
            "SmolLM2's. The column shows how costs alone change the ranking.",
            f"{config['tree_nodes']} nodes were recorded per position, {config['tree_width']} children wide and "
            f"{config['depth']} deep; policies that ask for more in over 5 % of their rounds are left out of replays. "
            f"Rounds identical in replay and real run, the fewest of any policy: "
            f"{min(row['rounds_identical_percent'] for row in document['rows']):.1f} %. In float32 a pass over one to "
            "three tokens rounds differently from one over more, which moves a probability across a threshold.",
        ],
    )


def policy_rows(document: Document, gpu: Mapping[str, Row]) -> list[Row]:
    """Return the best form of each policy that was run, fastest first, with its best form at the GPU's costs.

    gpu : the latter by policy; policies that ask for more nodes than were recorded are missing
    """
    rows = [
        {
            **row,
            "policy": name,
            "replayed": row["predicted"],
            **({"gpu_label": gpu[name]["label"], "GPU": gpu[name]["speedup"]} if name in gpu else {}),
        }
        for name, row in best_by(document["rows"], "policy").items()
    ]
    return sorted(rows, key=lambda row: -row["measured"]["estimate"])


def untied(document: Document, leader: Row) -> str:
    """Write from how many of the other policies the fastest differs significantly."""
    others = [row for name, row in best_by(document["rows"], "policy").items() if name != leader["policy"]]
    slower = sum(differ_measured(document, leader, row) for row in others)
    return f"significantly faster than {slower} of {len(others)} others"


def leader_text(ranked: Sequence[Row]) -> str:
    """Write which policy leads a leaderboard, and how many are not significantly slower."""
    leader, *others = ranked
    tied = sum(bool(row["tied_with_leader"]) for row in others)
    return (
        f"{leader['policy']} first at {leader['speedup']['estimate']:.2f} ({tied} of {len(others)} others are not "
        "significantly slower)"
    )


def best_signals(rows: Sequence[Row]) -> str:
    """Write which rule closes most of the gap between the best fixed K and the oracle, by drafter."""
    texts = []
    for run in dict.fromkeys(row["run"] for row in rows):
        rules = [row for row in rows if row["run"] == run and row["form"] != ORACLE]
        best = max(rules, key=lambda row: float(row["gap_to_oracle_closed"]["estimate"]))
        low, share, high = (100 * best["gap_to_oracle_closed"][key] for key in ("low", "estimate", "high"))
        texts.append(f"{best['form']} {share:.0f} % [{low:.0f}, {high:.0f}] ({run.removeprefix(RUN)})")
    return ", ".join(texts)
