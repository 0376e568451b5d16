"""The report on drafting ahead: which settings pay, and at which cost ratio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specsim.learn.draft_ahead import AheadRow, DraftAhead
from specsim.report.table import SHARE, SPEEDUP, Column
from studies.figures import line_panels
from studies.report import Report


class Case(NamedTuple):
    """A trace at the costs of a machine."""

    trace: str
    machine: str
    result: DraftAhead


ByRatio = Mapping[str, Mapping[float, DraftAhead]]


def report(cases: Sequence[Case], by_ratio: ByRatio) -> Report:
    """Return the report. by_ratio : by trace and cost ratio, at constant costs"""
    shown = [shown_row(case, row) for case in cases for row in (most_prepared(case.result), case.result.rows[-1])]
    gains = {case: most_prepared(case.result).gain for case in cases}
    return Report(
        question="When does drafting ahead pay?",
        answer=f"On a device of its own, with {most_prepared(cases[0].result).prepared} outcomes of each verification "
        "prepared, decoding has so many times the speed of plain speculation: "
        + ", ".join(f"{gain:.2f} ({named(case.trace)}, {case.machine})" for case, gain in gains.items())
        + "; by cost ratio the gain is largest "
        + " and ".join(f"at {peak(results)} ({named(trace)})" for trace, results in by_ratio.items())
        + ". PEARL, which prepares for one outcome, pays "
        + " and ".join(f"{pays(results)} ({named(trace)})" for trace, results in by_ratio.items())
        + ".",
        figure=line_panels(
            {named(trace): lines(results) for trace, results in by_ratio.items()},
            ("cost ratio c: draft step / pass of the target", "speed relative to plain speculation"),
            "gains",
            level=1,
        ),
        figure_name="gains",
        caption="Gain over plain speculation at its best draft length, by cost ratio and prepared outcomes, constant "
        "costs",
        columns=[
            Column("trace", "trace"),
            Column("costs", "costs"),
            Column("mode (outcomes), K", "setting"),
            Column("hit rate", "hit_rate", SHARE),
            Column("plain: K, speedup", "plain"),
            Column("speedup", "speedup", SPEEDUP),
            Column("gain", "gain", SPEEDUP),
        ],
        shown=shown,
        table=[
            *(csv_row(case.trace, case.machine, row) for case in cases for row in case.result.rows),
            *(
                csv_row(trace, f"ratio {ratio:g}", row)
                for trace, results in by_ratio.items()
                for ratio, result in results.items()
                for row in result.rows
            ),
        ],
        trust=[
            "Prompts: "
            + ", ".join(
                f"{result.learned_on} of {named(trace)} for calibration and draft lengths, {result.sequences} held out"
                for trace, result in first_of(cases).items()
            )
            + ". Intervals (95 %) are over held-out prompts.",
            "Hits are counted in recorded ranks, and equal those of a drafter that really drafts ahead in every round "
            "(tests/realrun/decode/test_drafting_ahead.py). Seconds are computed: a miss waits for nothing "
            "but the new draft, and what passes between two devices takes no time.",
            "Costs are of other models than the traces, whose acceptance is combined with them. Machine, load, noise "
            "floor: none, because nothing was timed.",
            "smollm2-eagle reads the target's states. Its prepared drafts are made from its own states, up to the "
            "trace's depth, which lowers its acceptance and limits K; an engine that hands it the target's states "
            "during the next verification could do better.",
            "lab-model is sampled with noise that target and drafter share, by which it ranks its candidates. With "
            "independent noise the bonus token is harder to foresee.",
        ],
    )


def named(trace: str) -> str:
    """Return an example's name without its prefix."""
    return trace.partition(":")[2] or trace


def most_prepared(result: DraftAhead) -> AheadRow:
    """Return the row with the most prepared outcomes."""
    return max(result.rows, key=lambda row: row.prepared)


def first_of(cases: Sequence[Case]) -> dict[str, DraftAhead]:
    """Return a result of each trace."""
    return {case.trace: case.result for case in reversed(cases)}


def peak(results: Mapping[float, DraftAhead]) -> str:
    """Write at which cost ratio preparing the most outcomes gains most, and how much."""
    ratio = max(results, key=lambda ratio: most_prepared(results[ratio]).gain)
    return f"{ratio:g}, {most_prepared(results[ratio]).gain:.2f}"


def pays(results: Mapping[float, DraftAhead]) -> str:
    """Write from which cost ratio on PEARL is significantly faster than plain speculation."""
    gaining = [ratio for ratio, result in results.items() if result.rows[-1].gain.low > 1]
    return f"from a cost ratio of {min(gaining):g} on" if gaining else "at no cost ratio"


def lines(results: Mapping[float, DraftAhead]) -> dict[str, tuple[list[float], list[dict[str, float]]]]:
    """Return the gain of every mode but plain speculation, by cost ratio."""
    modes = [(row.mode, row.prepared) for row in next(iter(results.values())).rows[1:]]
    label = {mode: "PEARL" if mode[0] == "pearl" else f"{mode[1]} prepared" for mode in modes}
    return {
        label[mode]: (list(results), [result.rows[place].gain.as_dict() for result in results.values()])
        for place, mode in enumerate(modes, start=1)
    }


def shown_row(case: Case, row: AheadRow) -> dict[str, Any]:
    """Return what the report's table has of a row."""
    plain = case.result.rows[0]
    return {
        **row.as_dict(),
        "trace": named(case.trace),
        "costs": case.machine,
        "setting": f"{row.mode} ({row.prepared}), {row.k}",
        "plain": f"{plain.k}, {plain.speedup:.3f}",
        "hit_rate": float(row.hit_rate),
    }


def csv_row(trace: str, costs: str, row: AheadRow) -> dict[str, Any]:
    """Return what table.csv has of a row."""
    return {"trace": named(trace), "costs": costs, **row.as_dict()}
