"""The page of an HTML report and its parts.

Parts are rendered by the macros of page.html, which escape every text, so no text of a document becomes HTML.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specsim.replaying.intervals import LARGEST_FLOOR_PERCENT, Estimate, against_baseline

if TYPE_CHECKING:
    from specsim.report.board import RankedBoard
    from specsim.report.experiment import (
        BoardRow,
        Choice,
        DrafterBoard,
        ForecastFacts,
        JoinedRow,
        JoinedValidation,
        MachineState,
        Prompts,
        Row,
        Time,
        Validation,
    )

MOST_APART_PERCENT = 5.0  # between the baseline tokens of runs that are compared
MINUS = "\u2212"
NEAR_PERCENT = 1.0  # below the best speedup: the simplest policy so close to it is recommended
METRICS = {
    "v_d": "Draft acceptance rate: accepted over drafted tokens.",
    "r_d": "Share of output tokens that were drafted: accepted over output tokens.",
    "tau": "Mean acceptance length: output tokens per verification step, the target's own token included. Without "
    "drafting tau is 1.",
}
WALL_CLOCK = (
    "Speedup from plain sums over all repeats, interruptions included. The measured speedup takes the median of each "
    "round's repeats instead."
)
NOTES = {"warnings": "", "cost_notes": "costs: "}  # keys of a document's remarks, and what their text begins with
APPROXIMATE = "biased: made by an old version, which drew the acceptance of sampled drafts anew; run the command again"


class Result(NamedTuple):
    """The content of a result's page.

    Parameters
    ----------
    kind : what sort of result it is, in a few words
    title : what it is of, plain text
    verdict : the answer in at most two sentences of plain text; the first line of the page
    body : parts that this module rendered; any other text is escaped
    notes : what the document warns of, shown below the verdict
    """

    kind: str
    title: str
    verdict: str
    body: Sequence[str]
    notes: Sequence[str]


@cache
def macros() -> Any:
    """Load the macros of page.html, which escape every text."""
    from jinja2 import Environment, FileSystemLoader

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("page.html").module


def page(result: Result) -> str:
    """Render the whole page of a result: a file that needs no network."""
    look, script = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("look.css", "look.js"))
    return str(macros().page(result, look, script))


def joined(results: Sequence[Result]) -> Result:
    """Join several results, each with its verdict at the top; ids of figures stay distinct."""
    body = [macros().contents(results)]
    for number, result in enumerate(results):
        place = f"result-{number}"
        html = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{place}-", str(macros().content(result)))
        body.append(macros().section(place, html))
    return Result("Results", f"{len(results)} results", "The verdict of each, in the order given:", body, [])


def notes_of(document: Any) -> list[str]:
    """Every warning and cost note in a document, wherever it stands, each once."""
    notes: dict[str, None] = {}
    truncated: list[tuple[str, float]] = []
    parts = [document]
    for part in parts:
        if isinstance(part, Mapping):
            for key, start in NOTES.items():
                notes |= dict.fromkeys(f"{start}{note}" for note in part.get(key, ()))
            notes |= {APPROXIMATE: None} if part.get("approximate") is True else {}
            share = part.get("truncated_share")
            if share is None and part.get("truncated_rounds"):
                share = part["truncated_rounds"] / part["rounds"]
            truncated += [(part.get("label", part.get("policy")), share)] if share else []
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    return [*notes, *truncated_text(truncated)]


def heading(text: str, level: int = 2) -> str:
    """Render a heading."""
    return macros().heading(text, level)


def stack(pieces: Iterable[str], kind: str = "stack") -> str:
    """Render parts in order in a box of this class."""
    return macros().stack(list(pieces), kind)


def lead(text: str) -> str:
    """Render a paragraph on how a result came about."""
    return macros().lead(text)


def tiles(boxes: Iterable[tuple[str, str]]) -> str:
    """Render large values with a line of text each, side by side."""
    return macros().tiles(list(boxes))


def figure(kind: str, title: str, svg: str, caption: str) -> str:
    """Render a figure with its title above and what it says below. kind : "wide" for the whole width, else ""."""
    return macros().figure(kind, title, svg, caption)


def definitions(terms: Mapping[str, str]) -> list[str]:
    """Render terms with what they mean."""
    return [macros().definitions(terms)]


def facts(pairs: Iterable[tuple[str, Any]]) -> str:
    """Render a table of names and values."""
    return macros().facts(list(pairs))


def with_interval(value: Estimate) -> str:
    """Render an estimate with its interval."""
    return macros().with_range(*(f"{number:.3f}" for number in (value.estimate, value.low, value.high)))


def prompts_text(prompts: Prompts) -> str:
    """Write the number of prompts, their source and their hash."""
    return f"{prompts.count:,}, {prompts.source} ({prompts.digest})"


def load_text(others_percent: float | None, stolen_percent: float | None) -> str:
    """Say how busy the machine was during the measurement."""
    if others_percent is None or stolen_percent is None:
        return "load unknown on this system"
    return f"{others_percent:.0f} % of CPU time used by other processes, {stolen_percent:.1f} % steal"


def floor_text(floor_percent: float, null_arm: Estimate) -> str:
    """Write the noise floor of a measurement, and whether it is too large to rank policies."""
    noisy = f", too noisy to rank policies (above {LARGEST_FLOOR_PERCENT} %)"
    noise = f"{floor_percent:.2f} %{noisy if floor_percent > LARGEST_FLOOR_PERCENT else ''}"
    return f"noise floor: {noise}; A/A test: {null_arm}"


def truncated_text(shares: Iterable[tuple[str, float]]) -> list[str]:
    """Name the rows, of label and share of rounds, that asked for more nodes than the trace holds; none if none did."""
    cut = [f"{label}: {100 * share:.2f} %" for label, share in shares if share]
    return [f"rounds that asked for more than the recorded trees hold: {', '.join(cut)}"] if cut else []


def spread_text(speedup: Estimate, cost: str = "", cost_band: Sequence[float] | None = None) -> str:
    """Say how far off a predicted speedup may be, and which costs it rests on.

    cost : name of the costs, "" where unknown
    cost_band : the 5th and 95th percentile of measured over predicted speedup with such costs; None where unknown
    """
    low, high = speedup.low, speedup.high
    parts = [f"{low:.2f} to {high:.2f} over prompts"]
    if cost_band:
        parts.append(f"{low * cost_band[0]:.2f} to {high * cost_band[1]:.2f} with the error of such costs")
    return ", ".join([*parts, *([f"costs: {cost}"] if cost else [])])


def speculation_text(fastest: str, speedup: Estimate, floor_percent: float = 0.0) -> str:
    """Say whether to speculate: the fastest policy against the baseline, which is a candidate like any policy.

    Parameters
    ----------
    fastest : label of the policy with the highest speedup
    speedup : over a board, with the interval that holds for all its policies at once
    floor_percent : noise floor of a measurement, 0 where nothing was measured
    """
    reached = f"{speedup} times the speed without speculation"
    verdict = against_baseline(speedup, floor_percent)
    if verdict == "faster":
        return f"Fastest: {fastest}, {reached}."
    if verdict == "slower":
        return f"Do not speculate here: the fastest policy, {fastest}, reaches {reached}."
    return f"No policy is significantly faster than no speculation: the fastest, {fastest}, reaches {reached}."


def simplest(rows: Iterable[tuple[float, int]]) -> int:
    """Place of the row with the fewest settings of those within `NEAR_PERCENT` of the best; the first of several.

    rows : speedup and number of settings of each
    """
    rows = list(rows)
    least = (1 - NEAR_PERCENT / 100) * max(speedup for speedup, _ in rows)
    return min((settings, place) for place, (speedup, settings) in enumerate(rows) if speedup >= least)[1]


def recommendation_text(board: RankedBoard) -> list[str]:
    """Say which row of a leaderboard to use, and the engines' flags; nothing if none is significantly faster."""
    recommended = board.recommended
    if recommended is None or against_baseline(board.rows[0].speedup) != "faster":
        return []
    (row,) = [row for row in board.rows if row.label == recommended.label]
    near = f"the simplest policy within {recommended.within_percent:g} % of the best"
    lines = [f"Recommended: {row.label} ({row.settings}), {near}."]
    flags = recommended.flags or {}
    if engines := recommended.for_engines:
        (fixed,) = [row for row in board.rows if row.label == engines.label]
        flags = engines.flags
        best = f"{fixed.label} ({fixed.settings}), {fixed.speedup}"
        lines.append(f"{' and '.join(flags)} do not have this rule; their best: {best}.")
    return [*lines, *(f"{engine}: {flag}" for engine, flag in flags.items())]


def choice_text(choice: Choice) -> str:
    """Say what the forecast chose before anything was decoded, what that measured, and what the choice cost."""
    reached = f"forecast {choice.forecast_speedup:.3f}, measured {choice.measured_speedup}"
    text = f"Choice by the forecast made before decoding: {choice.forecast}, {reached}"
    if choice.forecast == choice.measured:
        return f"{text}, the measured best."
    regret = f"{choice.regret}{'' if choice.significant else ', not significant'}"
    return f"{text}; the measured best is {choice.measured}; gap of the choice to it: {regret}."


def forecast_text(made: ForecastFacts, rows: Sequence[Row | BoardRow]) -> str:
    """Say when the forecast was made, from which costs, and how often its intervals held."""
    inside = sum(row.forecast.low <= row.measured <= row.forecast.high for row in rows if row.forecast and row.measured)
    when = f"at {made.made}, {'before' if made.sealed else 'after'} the held-out prompts were recorded"
    return (
        f"The forecast was made {when}, from {made.sequences.tuning:,} tuning prompts and costs "
        f"{made.costs['source']}. {inside} of {len(rows)} measured speedups lie inside its 95 % intervals."
    )


def state_text(state: MachineState) -> str:
    """Say whether the machine's state moved between the probes before and after."""
    moved = [f"{part.part} {100 * (part.factor - 1):+.1f} %" for part in state.changes if part.significant]
    return f"Machine state between the probes before and after: {', '.join(moved) or 'no significant change'}."


def time_text(time: Time) -> str:
    """Say how long a validation took, and what its minutes left out."""
    prompts, limit = time.prompts, f" of {time.minutes:g}" if time.minutes else ""
    return (
        f"Time: {time.spent_s / 60:.1f}{limit} minutes; {prompts.recorded} of {prompts.given} prompts recorded, "
        f"{prompts.decoded} of them held out and decoded."
    )


def wall_clock_text(rows: Iterable[Row | JoinedRow | BoardRow]) -> list[str]:
    """Name the rows whose wall-clock speedup differs from the speedup by medians, in a line; none if none does."""
    differ = [
        f"{row.label}: {row.wall_clock_speedup:.3f} by the clock, {row.measured:.3f} by medians"
        for row in rows
        if row.wall_clock_differs
    ]
    return [f"Medians and plain sums differ by more than the noise floor: {'; '.join(differ)}."] if differ else []


def repeats_text(repeats: int) -> str:
    """Say what a measured round is."""
    return "once, round by round" if repeats == 1 else f"median of {repeats} repeats, round by round"


def comparable_text(token_ms: Sequence[float]) -> list[str]:
    """Warn, in a line, of runs that are not comparable because their baselines differ; none if they are comparable.

    token_ms : of the baseline in each run
    """
    if not token_ms or max(token_ms) <= min(token_ms) * (1 + MOST_APART_PERCENT / 100):
        return []
    return [
        f"Speedups of different runs are not comparable here: the baseline token took {min(token_ms):.1f} to "
        f"{max(token_ms):.1f} ms, more than {MOST_APART_PERCENT:g} % apart, so the runs saw different machines."
    ]


def machine_text(result: Validation | JoinedValidation | DrafterBoard) -> str:
    """Say how busy the machine was, how long a baseline token took on it, and by which clock."""
    clock = ", by process CPU time" if result.environment.get("clock") == "cpu" else ""
    assert result.load is not None and result.baseline is not None  # as in a board that was decoded
    load = load_text(result.load.others_percent, result.load.stolen_percent)
    return f"{load}; {result.baseline.ms_per_token:.2f} ms per baseline token{clock}"


SAMPLING = {
    "greedy-draft": "sampling with greedy drafts",
    "gumbel": "sampling with shared Gumbel noise",
    "rejection": "rejection sampling",
}


def decoding_text(decoding: Mapping[str, Any] | str) -> str:
    """Say how a trace was decoded. decoding : mode and temperature, or the mode alone."""
    if isinstance(decoding, str):
        return SAMPLING.get(decoding, f"{decoding} decoding")
    mode = decoding["mode"]
    if mode == "greedy":  # at no temperature
        return "greedy decoding"
    temperature, top_p, top_k = decoding["temperature"], decoding.get("top_p", 1.0), decoding.get("top_k", 0)
    cuts = [f"top-k {top_k}"] * bool(top_k) + [f"top-p {top_p:g}"] * (top_p < 1)
    return f"{SAMPLING.get(mode, mode)} at {' and '.join([f'temperature {temperature:g}', *cuts])}"


def percent(value: float | None) -> str:
    """Round a percentage down, so that 100 % means all; n.a. for None."""
    return "n.a." if value is None else f"{math.floor(round(value * 100, 6)) / 100:g} %"


def signed_percent(value: float) -> str:
    return f"{value:+.1f} %".replace("-", MINUS)


def value_text(value: Any) -> str:
    """Write a setting's value with at most three digits."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
