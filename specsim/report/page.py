"""What every HTML report shares: the page around it and its parts.

Parts are `Markup`. All else that is put into one is escaped, so that no text of a document becomes HTML.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup

MOST_APART_PERCENT = 5.0  # between the baseline tokens of runs that are compared
MINUS = "\u2212"
NOTES = {"warnings": "", "cost_notes": "costs: "}  # keys of a document's remarks, and what their text begins with


class Result(NamedTuple):
    """What a page shows of one result.

    Parameters
    ----------
    kind : what sort of result it is, in a few words
    title : what it is of, plain text
    verdict : what it says, in one or two sentences of plain text; the first line of the page
    body : the rest; text in it is escaped unless it is Markup
    notes : what the document warns of, shown below the verdict
    """

    kind: str
    title: str
    verdict: str
    body: Sequence[str]
    notes: Sequence[str]

    @property
    def html(self) -> Markup:
        """Its parts, the title and the verdict first."""
        parts = [
            Markup('<p class="eyebrow">{}</p>').format(self.kind),
            Markup("<h1>{}</h1>").format(self.title),
            Markup('<p class="verdict">{}</p>').format(self.verdict),
            *(Markup('<p class="note">Note: {}</p>').format(note) for note in self.notes),
            *self.body,
        ]
        return Markup("\n").join(parts)


def page(result: Result) -> str:
    """The whole page of a result: one file that needs no network."""
    look, script = (Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("look.css", "look.js"))
    return Markup(
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<title>{}</title>\n<style>{}</style>\n</head>\n<body>\n<main>\n"
        "{}\n</main>\n<script>{}</script>\n</body>\n</html>\n"
    ).format(result.title, Markup(look), result.html, Markup(script))  # noqa: S704 (files of this package)


def joined(results: Sequence[Result]) -> Result:
    """Several results as one, each with its verdict at the top; ids of figures stay apart."""
    lines, body = [], []
    for number, result in enumerate(results):
        place = f"result-{number}"
        lines.append(Markup('<li><a href="#{}">{}</a>: {}</li>').format(place, result.title, result.verdict))
        html = Markup(re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{place}-", str(result.html)))  # noqa: S704 (was Markup)
        body.append(Markup('<section class="result" id="{}">{}</section>').format(place, html))
    contents = Markup('<ol class="contents">{}</ol>').format(Markup("").join(lines))
    verdict = "The verdict of each, in the order given:"
    return Result("Results", f"{len(results)} results", verdict, [contents, *body], [])


def notes_of(document: Any) -> list[str]:
    """Every warning and cost note in a document, wherever it stands, each once."""
    notes: dict[str, None] = {}
    parts = [document]
    for part in parts:
        if isinstance(part, Mapping):
            for key, start in NOTES.items():
                notes |= dict.fromkeys(f"{start}{note}" for note in part.get(key, ()))
            parts += part.values()
        elif isinstance(part, list):
            parts += part
    return [*notes]


def heading(text: str, level: int = 2) -> Markup:
    return Markup("<h{level}>{}</h{level}>").format(text, level=level)


def stack(parts: Iterable[str], kind: str = "stack") -> Markup:
    """Parts one after another in a box of this class."""
    return Markup('<div class="{}">{}</div>').format(kind, Markup("").join(parts))


def lead(text: str) -> Markup:
    """A paragraph on how a result came about."""
    return Markup('<p class="lead">{}</p>').format(text)


def tiles(boxes: Iterable[tuple[str, str]]) -> Markup:
    """Large values with a line of text each, side by side."""
    tile = Markup('<div class="tile"><b>{}</b><span>{}</span></div>')
    return stack((tile.format(*box) for box in boxes), "grid tiles")


def figure(kind: str, title: str, svg: str, caption: str) -> Markup:
    """A figure with its title above and what it says below. kind : "wide" for the whole width, else ""."""
    return Markup(
        '<figure class="{}"><h3>{}</h3><div class="scroll">{}</div><figcaption>{}</figcaption></figure>'
    ).format(kind, title, svg, caption)


def definitions(terms: Mapping[str, str]) -> list[Markup]:
    lines = (Markup("<dt>{}</dt><dd>{}</dd>").format(*term) for term in terms.items())
    return [Markup("<dl>"), *lines, Markup("</dl>")]


def facts(pairs: Iterable[tuple[str, Any]]) -> Markup:
    """A table of names and values."""
    lines = Markup("").join(line(pair) for pair in pairs)
    return Markup('<table class="facts"><tbody>{}</tbody></table>').format(lines)


def table(kind: str, head: Sequence[str], lines: Sequence[str]) -> Markup:
    """A table of `line`s."""
    cells = Markup("").join(Markup('<th scope="col">{}</th>').format(cell) for cell in head)
    return Markup('<div class="scroll {}"><table><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>').format(
        kind, cells, Markup("").join(lines)
    )


def line(cells: Iterable[Any], kind: str | None = None) -> Markup:
    """One row of a table. kind : its class"""
    row = Markup("<tr>") if kind is None else Markup('<tr class="{}">').format(kind)
    return row + Markup("").join(Markup("<td>{}</td>").format(cell) for cell in cells) + Markup("</tr>")


def with_interval(value: Mapping[str, float]) -> Markup:
    return Markup('{:.3f}<span class="ci">{:.3f}&ndash;{:.3f}</span>').format(
        value["estimate"], value["low"], value["high"]
    )


def prompts_text(prompts: Mapping[str, Any]) -> str:
    """Where prompts come from, how many they are, and the hash that tells them from others."""
    return f"{prompts['count']:,}, {prompts['source']} ({prompts['digest']})"


def load_text(load: Mapping[str, Any]) -> str:
    """In words, of other processes while something was measured."""
    others, stolen = load["others_percent"], load["stolen_percent"]
    if others is None or stolen is None:
        return "this system does not tell how busy it was"
    return f"other processes used {others:.0f} % of the CPUs' time, {stolen:.1f} % was stolen by other guests"


def floor_text(document: Mapping[str, Any]) -> str:
    """The noise floor of a measurement, in words that say so where it tells no policies apart."""
    from specsim.speedup.intervals import LARGEST_FLOOR_PERCENT, interval_text  # numpy, which pages do without

    floor = document["noise_floor_percent"]
    busy = f": more than {LARGEST_FLOOR_PERCENT} %, so this run cannot tell policies apart"
    null = interval_text(document["null_arm"])
    return f"noise floor: {floor:.2f} %{busy if floor > LARGEST_FLOOR_PERCENT else ''} (two baselines: {null})"


def truncated_text(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line of the rows that asked for more nodes than a trace holds, and in how many rounds; none if none did."""
    cut = [f"{row['label']}: {100 * row['truncated_share']:.2f} %" for row in rows if row["truncated_share"]]
    return [f"rounds that asked for more than the recorded trees hold: {', '.join(cut)}"] if cut else []


def speculation_text(fastest: str, speedup: Mapping[str, float], floor_percent: float = 0.0) -> str:
    """Say whether to speculate: the fastest policy against the baseline, which is a candidate like any policy.

    Parameters
    ----------
    fastest : label of the policy with the highest speedup
    speedup : of keys estimate, low, high; over a board, the interval that holds for all its policies at once
    floor_percent : noise floor of a measurement, 0 where nothing was measured
    """
    from specsim.speedup.intervals import against_baseline, interval_text  # numpy, which pages do without

    reached = f"{interval_text(speedup)} times the speed without speculation"
    verdict = against_baseline(speedup, floor_percent)
    if verdict == "faster":
        return f"Fastest: {fastest}, {reached}."
    if verdict == "slower":
        return f"Do not speculate here: the fastest policy, {fastest}, reaches {reached}."
    return f"No policy is significantly faster than no speculation: the fastest, {fastest}, reaches {reached}."


def choice_text(choice: Mapping[str, Any]) -> str:
    """Say what the forecast chose before anything was decoded, what that measured, and what the choice cost."""
    from specsim.speedup.intervals import interval_text  # numpy, which pages do without

    reached = f"forecast {choice['forecast_speedup']:.3f}, measured {interval_text(choice['measured_speedup'])}"
    text = f"Choice by the forecast made before decoding: {choice['forecast']}, {reached}"
    if choice["forecast"] == choice["measured"]:
        return f"{text}, the measured best."
    regret = f"{interval_text(choice['regret'])}{'' if choice['significant'] else ', not significant'}"
    return f"{text}; the measured best is {choice['measured']}; regret of the choice: {regret}."


def wall_clock_text(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line of the rows whose wall-clock speedup differs from the one by medians; none if none does."""
    differ = [
        f"{row['label']}: {row['wall_clock_speedup']['estimate']:.3f} by the clock, {row['measured']['estimate']:.3f} "
        "by medians"
        for row in rows
        if row.get("wall_clock_differs")
    ]
    return [f"Medians and plain sums differ by more than the noise floor: {'; '.join(differ)}."] if differ else []


def repeats_text(repeats: int) -> str:
    """Say what a measured round is: the median of its repeats, or of two, as older results have them, the fastest."""
    if repeats == 2:
        return "fastest of two repeats, round by round"
    return "one run" if repeats == 1 else f"median of {repeats} repeats, round by round"


def baseline_ms(document: Mapping[str, Any]) -> float | None:
    """Milliseconds per token without speculation in a result; None where nothing was measured."""
    if "baseline" in document:
        return float(document["baseline"]["ms_per_token"]) if document["baseline"] else None
    if "autoregressive_sequence_seconds" in document:
        return 1e3 * float(sum(document["autoregressive_sequence_seconds"])) / float(document["output_tokens"])
    seconds = document.get("autoregressive_token_seconds")
    return None if seconds is None else 1e3 * float(seconds)


def comparable_text(documents: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line where runs must not be compared, as their baseline tokens took different times; none where they may.

    documents : results of real runs by name
    """
    token_ms = [value for document in documents.values() if (value := baseline_ms(document)) is not None]
    if not token_ms or max(token_ms) <= min(token_ms) * (1 + MOST_APART_PERCENT / 100):
        return []
    return [
        f"Speedups of different runs are not comparable here: the baseline token took {min(token_ms):.1f} to "
        f"{max(token_ms):.1f} ms, more than {MOST_APART_PERCENT:g} % apart, so the runs saw different machines."
    ]


def machine_text(document: Mapping[str, Any]) -> str:
    """Say how busy the machine was, how long a baseline token took on it, and by which clock."""
    clock = ", by process CPU time" if document["environment"].get("clock") == "cpu" else ""
    token_ms = baseline_ms(document)
    speed = "" if token_ms is None else f"; {token_ms:.2f} ms per baseline token{clock}"
    return f"{load_text(document['load'])}{speed}"


def decoding_text(decoding: Mapping[str, Any] | str) -> str:
    """How a trace was decoded, in words. decoding : mode and temperature, or the mode alone."""
    if isinstance(decoding, str):
        return f"{decoding} decoding"
    mode = decoding["mode"]
    if mode == "greedy":  # at no temperature
        return "greedy decoding"
    temperature, top_p, top_k = decoding["temperature"], decoding.get("top_p", 1.0), decoding.get("top_k", 0)
    cuts = [f"top-k {top_k}"] * bool(top_k) + [f"top-p {top_p:g}"] * (top_p < 1)
    return f"{mode.capitalize()} sampling at {' and '.join([f'temperature {temperature:g}', *cuts])}"


def percent(value: float | None) -> str:
    """Rounded down, so that 100 % means all of them; n.a. for None."""
    return "n.a." if value is None else f"{math.floor(round(value * 100, 6)) / 100:g} %"


def signed_percent(value: float) -> str:
    return f"{value:+.1f} %".replace("-", MINUS)


def value_text(value: Any) -> str:
    """A setting's value, short."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def range_text(one: Mapping[str, Any]) -> str:
    """The values of a sweep that come within 1 % of its best speedup."""
    near = one["near_best"]
    if not near:  # only the tuned value, between two of the grid
        return value_text(one["tuned"])
    if isinstance(near[0], (str, bool)):
        return ", ".join(map(str, near))
    return value_text(near[0]) if len(near) == 1 else f"{value_text(near[0])} to {value_text(near[-1])}"
