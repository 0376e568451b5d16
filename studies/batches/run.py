"""Speculation in batches, predicted for servers and really decoded: `python -m studies batches`.

Takes the acceptance of SmolLM2 with EAGLE to servers, whose costs are published constants and rooflines, and decodes
the lab in batches, to hold the prediction of batches against real ones. A second start goes on with what is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from realrun.pairs.pair import load_pair
from specsim.cli.console import progress_bar
from specsim.cost.batches import BatchCost
from specsim.cost.files import read_cost
from specsim.cost.roofline.architecture import find_architecture
from specsim.cost.roofline.cost import RooflineCost, find_drafter
from specsim.cost.roofline.hardware import find_hardware
from specsim.cost.roofline.passes import Roofline
from specsim.io.progress import Progress
from specsim.policy.chain.fixed_k import FixedK
from specsim.replaying.intervals import Estimate
from specsim.report.table import ERROR, SPEEDUP, Column
from specsim.serving.costs import batch_cost
from specsim.serving.draft_length import DraftLengthRule, TurboSpec
from specsim.serving.speedup_map import SpeedupMap, speedup_map
from specsim.trace.files import read_plain_trace
from specsim.trace.trace import Trace
from studies.batches import real
from studies.batches.real import NULL, Case
from studies.common import Config, Document, claim
from studies.figures import Line, line_panels
from studies.report import Report

MEMORY_SHARE = 0.9  # of a device's memory that weights and caches may fill, as vLLM plans
GOAL_PERCENT = 7.0  # median error of the speedups of real batches
CONTEXT = 128  # of the figure and the break-even batch: it fits the largest batches

Maps = Mapping[str, Mapping[int, SpeedupMap]]  # by costs, then by context
RECORDED = ("config.json", "real/trace/*", f"real/{real.MEASURED}")


def main(out: Path, config: Config) -> None:
    """Run what is not there, and write the report."""
    claim(out, config)
    settings, seed = config["real"], config["seed"]
    trace = read_plain_trace(f"example:{config['servers']['trace']}")
    with progress_bar() as progress:
        if not (out / "real" / real.MEASURED).is_file():
            pair = load_pair(settings["target"], dtype=config["dtype"], threads=config["threads"], drafter="model")
            real.measure(out / "real", pair, settings, seed, progress)
        maps = server_maps(trace, config["servers"], seed, progress)
    report(config, maps, *real.results(out / "real", settings)).write(out)


def report(config: Config, maps: Maps, cases: Sequence[Case], about: Document) -> Report:
    """Return the report. maps : predicted for servers; cases, about : the lab really decoded in batches"""
    rows = [*map_rows(maps)]
    drafting = [case for case in cases if case.k != NULL]
    errors = np.array([100 * abs(case.error) for case in drafting])
    floor = max(100 * abs(case.measured.estimate - 1) for case in cases if case.k == NULL)
    even = {server: by_context[CONTEXT].break_even[0] for server, by_context in maps.items()}
    made, load, settings = about["made"], about["load"], config["real"]
    busy = "n.a." if load.others_percent is None else f"{load.others_percent:.0f} %"
    return Report(
        question="Up to which batch size does speculation pay?",
        answer=f"For {config['servers']['target']} with EAGLE (context {CONTEXT}, greedy, best fixed K) the largest "
        f"batch at which speculation pays is {', '.join(f'{batch} ({server})' for server, batch in even.items())}. "
        f"Against the lab decoded in real batches, predicted speedups have a median error of {np.median(errors):.1f} % "
        f"(goal {GOAL_PERCENT:g} %) and a largest error of {errors.max():.1f} %.",
        figure=line_panels(
            {
                "the lab, K = 2": case_lines([case for case in cases if case.k == 2]),
                f"servers, predicted, context {CONTEXT}": server_lines([row for row in rows if row.context == CONTEXT]),
            },
            ("batch", "speedup"),
            "batches",
            level=1.0,
            log_x=True,
        ),
        figure_name="batches",
        caption="Speedup by batch size: measured and predicted on the lab, and predicted for servers with the best "
        "fixed K",
        columns=[
            Column("batch", lambda row: str(row["batch"])),
            Column("best K predicted", lambda row: str(row["best_predicted"])),
            Column("best K measured", lambda row: str(row["best_measured"])),
            Column("predicted speedup", "predicted", SPEEDUP),
            Column("measured speedup", "measured", SPEEDUP),
            Column("error %", "error_percent", ERROR),
        ],
        shown=[
            {**predicted.as_dict(), "best_predicted": predicted.k, "best_measured": measured.k}
            for predicted, measured in best_cases(cases)
        ],
        table=[*(case.as_dict() for case in cases), *(row.as_dict() for row in rows)],
        trust=[
            f"Prompts: {settings['prompts']} of {settings['max_new_tokens']} tokens, greedy, in static batches that "
            f"shrink as texts end; {settings['repeats']} repeats in turns. Servers have the acceptance of "
            f"SmolLM2 with EAGLE on specsim's tasks (example:{config['servers']['trace']}, greedy).",
            f"Machine: {settings['target']} on {made['device']}, {made['threads']} thread, {made['dtype']}, "
            f"{made['date'][:10]}. Load: other processes used {busy} of the CPUs' time.",
            f"Noise floor: the baseline run twice differs by up to {floor:.1f} %. Predictions use the costs of probes "
            "on random text alone.",
            f"Rounds that differ from the simulation's: {'none' if not about['differing'] else about['differing']}.",
            "No server was run. SpecDecode-Bench's costs were fitted to vLLM on an H100 up to batch 64 and leave out "
            f"the price of drafted tokens ({drafted_ms(config['servers']):.2f} ms each in vLLM's published runs), so "
            "they favour long drafts; rooflines come from data sheets. Batches over "
            f"{100 * MEMORY_SHARE:.0f} % of the memory are left out.",
        ],
    )


def best_cases(cases: Sequence[Case]) -> list[tuple[Case, Case]]:
    """Return, per batch, the case that is best by prediction, and the one by measurement."""
    best = []
    for batch in sorted({case.batch for case in cases}):
        drafting = [case for case in cases if case.batch == batch and case.k != NULL]
        predicted = max(drafting, key=lambda case: case.predicted.estimate)
        best.append((predicted, max(drafting, key=lambda case: case.measured.estimate)))
    return best


def case_lines(cases: Sequence[Case]) -> dict[str, Line]:
    """Return measured and predicted speedup by batch."""
    batches = [case.batch for case in cases]
    return {key: (batches, [getattr(case, key).as_dict() for case in cases]) for key in ("predicted", "measured")}


@dataclass(frozen=True)
class Predicted:
    """A row of table.csv: the best fixed K on a server at a context and batch, and TurboSpec's speedup."""

    costs: str
    context: int
    batch: int
    k: int
    predicted: Estimate
    turbospec: float

    def as_dict(self) -> dict[str, Any]:
        return {"decoded": "predicted", **asdict(self)}


def server_lines(rows: Sequence[Predicted]) -> dict[str, Line]:
    """Return the best fixed K's speedup by batch, a line for each server."""
    lines: dict[str, Line] = {}
    for server in dict.fromkeys(row.costs for row in rows):
        mine = [row for row in rows if row.costs == server]
        lines[server] = ([row.batch for row in mine], [row.predicted.as_dict() for row in mine])
    return lines


class Server(NamedTuple):
    """Costs under a name, and the memory that bounds its batches."""

    name: str
    cost: BatchCost
    memory: RooflineCost

    def sequences(self, context: int) -> int:
        """The most sequences of so many cached tokens that fit beside the weights."""
        passes = [self.memory.target, self.memory.draft_passes]
        free = MEMORY_SHARE * self.memory.target.hardware.memory_bytes
        free -= sum(pass_.weight_bytes for pass_ in passes if pass_)
        return int(free / sum(float(pass_.kv_bytes(context)) for pass_ in passes if pass_))


def servers(config: Config) -> list[Server]:
    """Published constants, then a roofline of each hardware."""
    rooflines = []
    for hardware in config["hardware"]:
        target = Roofline(find_architecture(config["target"]), find_hardware(hardware))
        cost = RooflineCost(target, find_drafter(config["drafter"], target.model))
        rooflines.append(Server(f"roofline {hardware.upper()}", cost, cost))
    constants = batch_cost(read_cost(config["constants"]))
    return [Server("SpecDecode-Bench, H100", constants, rooflines[0].memory), *rooflines]


def server_map(trace: Trace, server: Server, config: Config, seed: int) -> dict[int, SpeedupMap]:
    """By context, over the batches that the memory holds."""
    maps = {}
    for context in config["contexts"]:
        arms: list[FixedK | DraftLengthRule] = [FixedK(k=k) for k in range(1, config["max_draft_tokens"] + 1)]
        arms.append(TurboSpec(server.cost, config["max_draft_tokens"]))
        batches = [batch for batch in config["batches"] if batch <= server.sequences(context)]
        maps[context] = speedup_map(trace, server.cost, arms, batches, contexts=[context], seed=seed)
    return maps


def server_maps(trace: Trace, config: Config, seed: int, report: Progress) -> dict[str, dict[int, SpeedupMap]]:
    """By server."""
    asked, maps = servers(config), {}
    for number, server in enumerate(asked):
        report("maps", number, len(asked))
        maps[server.name] = server_map(trace, server, config, seed)
    return maps


def drafted_ms(config: Config) -> float:
    """Milliseconds of a drafted token by the costs of a single batch."""
    two_s, one_s = (float(read_cost(config["one_batch"]).draft(k, 0)) for k in (2, 1))
    return 1e3 * (two_s - one_s)


def map_rows(maps: Maps) -> Iterator[Predicted]:
    """Yield, by costs, context and batch, the best fixed K with its speedup, and TurboSpec's speedup."""
    for server, by_context in maps.items():
        for context, speedups in by_context.items():
            for cell in speedups.cells:
                label = max(speedups.lengths, key=lambda label: cell.speedup[label].estimate)
                rule = next(cell.speedup[name] for name in cell.speedup if name not in speedups.lengths)
                yield Predicted(
                    server, context, cell.batch, speedups.lengths[label], cell.speedup[label], rule.estimate
                )
