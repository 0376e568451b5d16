"""Speculation in batches, predicted for servers and really decoded: `python -m studies.batches.run [OUT]`.

Takes the acceptance of the lab's traces to servers, whose costs are published constants and rooflines, and decodes the
lab itself in batches, beside what is predicted for it. A second start goes on with what is there.

Writes OUT/report.md and OUT/figures/, in which every number comes from the runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from realrun.decode.sampling import Sampler
from realrun.pairs.pair import load_pair
from realrun.pairs.prompts import study_prompts
from realrun.recording.record import RecordSettings
from realrun.recording.reuse import recorded_trace
from specsim.cli.console import progress_bar
from specsim.cost.step_times import Judged
from specsim.files import write_text
from specsim.progress import Progress
from specsim.report.markdown import markdown_table
from specsim.serving.speedup_map import SpeedupMap
from specsim.speedup.intervals import interval_text
from specsim.trace.files import read_trace
from specsim.trace.trace import Trace
from studies.batches import figures, real
from studies.batches.real import NULL, Case
from studies.batches.servers import (
    MEMORY_SHARE,
    acceptance_rows,
    cost_rows,
    drafted_ms,
    map_rows,
    one_batch_rows,
    schedule_rows,
    server_maps,
)
from studies.common import Config, Document, claim, run_study

RECORDED = ("config.json", "traces/*/*", "real/trace/*", f"real/{real.MEASURED}")
GOAL_PERCENT = 7.0  # median error of the speedups of real batches


def traces(out: Path, config: Config, seed: int, report: Progress) -> dict[str, Trace]:
    """The lab's, by way of decoding; recorded where they are not there."""
    asked, found = config["traces"], {}
    for run in asked["runs"]:
        folder = out / "traces" / run["name"]
        if not folder.is_dir():
            pair = load_pair(
                asked["target"], dtype=config["dtype"], threads=config["threads"], drafter=asked["drafter"]
            )
            prompts = study_prompts(pair.tokenizer, asked["prompts"])
            sampler = Sampler(run["mode"], run["temperature"], seed=seed)
            settings = RecordSettings(asked["depth"], asked["max_new_tokens"], sampler)
            recorded_trace(pair, prompts, settings, folder, partial(report, f"record {run['name']}"))
        found[run["name"]] = read_trace(folder)
    return found


def case_rows(cases: Sequence[Case]) -> Iterator[list[str]]:
    """Every arm at every batch."""
    for case in cases:
        arm = "baseline again" if case.k == NULL else f"K={case.k}"
        texts = [interval_text(one.as_dict()) for one in (case.predicted, case.measured)]
        seconds = [f"{case.predicted_s:.2f}", f"{case.measured_s:.2f}"]
        yield [str(case.batch), arm, *texts, f"{100 * case.error:+.1f}", *seconds]


def best_rows(cases: Sequence[Case]) -> Iterator[list[str]]:
    """Per batch, the K that is predicted to be best and the one that was."""
    for batch in sorted({case.batch for case in cases}):
        drafting = [case for case in cases if case.batch == batch and case.k != NULL]
        told = max(drafting, key=lambda case: case.predicted.estimate)
        best = max(drafting, key=lambda case: case.measured.estimate)
        behind = 100 * (1 - told.measured.estimate / best.measured.estimate)
        yield [str(batch), f"{told.k}", f"{best.k}", f"{behind:.1f}"]


def step_rows(judged: Sequence[Judged]) -> Iterator[list[str]]:
    """Every form's errors on passes that it was not fitted to."""
    for one in judged:
        errors = (f"{100 * error:.1f}" for error in (one.median_error, one.p90_error))
        yield [one.form, *errors, f"{1e3 * one.rmse_s:.2f}"]


def real_lines(cases: Sequence[Case], about: Document, config: Config) -> list[str]:
    """Of the lab decoded in batches."""
    made, load = about["made"], about["load"]
    drafting, again = ([case for case in cases if (case.k == NULL) == null] for null in (False, True))
    errors = np.array([100 * abs(case.error) for case in drafting])
    seconds = np.array([100 * abs(case.predicted_s / case.measured_s - 1) for case in cases])
    floor = max(100 * abs(case.measured.estimate - 1) for case in again)
    met = "met" if np.median(errors) <= GOAL_PERCENT else "not met"
    busy = "not known" if load.others_percent is None else f"{load.others_percent:.0f} %"
    differing = (
        "All rounds are those of the simulation."
        if not about["differing"]
        else f"In {about['differing']} sequences rounds are not those of the simulation."
    )
    return [
        "## The lab, really decoded in batches",
        "",
        f"{config['target']} and its draft model on {made['device']}, {made['threads']} thread, {made['dtype']}, "
        f"{made['date'][:10]}: {config['prompts']} prompts, {config['max_new_tokens']} tokens each, greedy, in static "
        "batches that shrink as texts end. At every batch the baseline, the baseline again, every K and probes took "
        f"turns of two rounds, {config['repeats']} times over; a round counts at the median of its repeats. Costs of "
        "the prediction are the probes' alone (rounds at three contexts and every K, on random text): no round of what "
        f"is predicted is among them. Meanwhile others used {busy} of the processors' time. {differing}",
        "",
        f"Absolute error of the predicted speedups: median {np.median(errors):.1f} % (goal {GOAL_PERCENT:.0f} %: "
        f"{met}), largest {errors.max():.1f} %; of the predicted seconds, baselines included: median "
        f"{np.median(seconds):.1f} %. The baseline run again differs from the baseline by up to {floor:.1f} %.",
        "",
        *markdown_table(
            ["batch", "arm", "predicted speedup", "measured speedup", "error %", "predicted s", "measured s"],
            case_rows(cases),
        ),
        "![Real batches](figures/real.svg)",
        "",
        *markdown_table(
            ["batch", "best K predicted", "best K measured", "predicted one behind by %"], best_rows(cases)
        ),
        "Forms that serving papers and engines have for the time of a step (`specsim cost fit`), fitted to half of the "
        f"passes that the probes measured, and how far they are off on the other {about['step_times'][0].held_out}:",
        "",
        *markdown_table(["form", "median error %", "90th percentile", "RMSE, ms"], step_rows(about["step_times"])),
    ]


def report_text(
    found: Mapping[str, Trace],
    maps: Mapping[tuple[str, str], Mapping[int, SpeedupMap]],
    cases: Sequence[Case],
    about: Document,
    config: Config,
) -> str:
    """The whole report as Markdown."""
    asked, recorded = config["servers"], config["traces"]
    lengths = [f"K={k}" for k in range(1, asked["max_draft_tokens"] + 1)]
    first, *_ = found
    columns = ["batch"]
    for context in asked["contexts"]:
        columns += [f"context {context}", "goodput rule"]
    lines = [
        "# Speculation in batches",
        "",
        "## Servers, predicted",
        "",
        f"The acceptance of the lab's target with its EAGLE drafter, {recorded['prompts']} prompts of "
        f"{recorded['max_new_tokens']} tokens, at the costs of {asked['target']} with EAGLE: as SpecDecode-Bench's "
        f"simulator has them, fitted to vLLM on an H100 at batches 1 to 64 ({asked['constants']}), and by rooflines of "
        "data sheets, which nothing calibrates. The fitted costs charge drafting once a round and next to nothing per "
        "drafted token, and their source does not say which K they were fitted to. They price long drafts too low: "
        f"vLLM's published runs at batch 1 take {drafted_ms(asked):.2f} ms for each drafted token. Read their largest "
        "K with care, and batches above 64 as extrapolated. All sequences have the same context, batches are full, and "
        "a sequence that ends makes room for the next. Batches that do not fit into "
        f"{100 * MEMORY_SHARE:.0f} % of the memory beside the weights are left out. Speedups are over the same batch "
        "without speculation, with 95 % intervals over sequences. The goodput rule (TurboSpec) chooses K in every "
        "round by the load and a moving estimate of acceptance.",
        "",
        "Tokens per round:",
        "",
        *markdown_table(["trace", "sequences", *lengths], acceptance_rows(found, asked)),
        f"What steps cost at context {asked['contexts'][len(asked['contexts']) // 2]}: one without speculation, and in "
        "such steps a draft of one token, one of 4, and a step that verifies 5 tokens of every sequence:",
        "",
        *markdown_table(["costs", "batch", "step, ms", "1 draft", "4 drafts", "step of 5 tokens"], cost_rows(asked)),
    ]
    lines += [
        "At batch 1 and the contexts of the traces, the best K by the costs fitted to vLLM's published runs with EAGLE "
        f"({asked['one_batch']}, K = 2 to 7), and by SpecDecode-Bench's. The second promises more because it leaves "
        "out the price of drafted tokens:",
        "",
        *markdown_table(["trace", "vLLM's runs", "SpecDecode-Bench"], one_batch_rows(found, asked)),
    ]
    for (trace, server), by_context in maps.items():
        if trace == first:
            lines += [f"### {server}, {trace}", "", *markdown_table(columns, map_rows(by_context, asked))]
    lines += [f"![Speedup by batch, {name}](figures/servers-{name}.svg)\n" for name in found]
    lines += [
        "### K by batch, and where speculation loses",
        "",
        "A schedule says from which batch on which K is best, 0 for none. The last column is the batch beyond which "
        "even the best K loses; where it still gains at the largest batch that fits, it is over that.",
        "",
        *markdown_table(["trace", "costs", "context", "from batch: K", "loses beyond"], schedule_rows(maps)),
        *real_lines(cases, about, config["real"]),
    ]
    return "\n".join(lines)


def main(out: Path, config: Config) -> None:
    """Run what is not there, and write the report."""
    claim(out, config)
    asked, seed = config["real"], config["seed"]
    with progress_bar() as report:
        found = traces(out, config, seed, report)
        if not (out / "real" / real.MEASURED).is_file():
            pair = load_pair(asked["target"], dtype=config["dtype"], threads=config["threads"], drafter="model")
            real.measure(out / "real", pair, asked, seed, report)
        maps = server_maps(found, config["servers"], seed, report)
    cases, about = real.results(out / "real", asked)
    for name in found:
        mine = {server: by_context for (trace, server), by_context in maps.items() if trace == name}
        figure = figures.server_speedups(mine, config["servers"]["batches"], f"servers-{name}")
        write_text(out / "figures" / f"servers-{name}.svg", figure)
    write_text(out / "figures" / "real.svg", figures.real_speedups(cases, "real"))
    write_text(out / "report.md", report_text(found, maps, cases, about, config))


if __name__ == "__main__":
    run_study(main, __file__)
