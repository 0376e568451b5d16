"""What every HTML report shares: the page around it, its tables, and writing it whole or not at all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

MINUS = "\u2212"

CSS = """
:root { --ink: #1f2328; --muted: #656d76; --rule: #e4e7eb; --soft: #f6f8fa; --edge: #b6bcc4;
  --sans: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink); font: 16px/1.55 var(--sans); }
main { max-width: 1240px; margin: 0 auto; padding: 48px 28px 72px; }
h1 { font-size: 30px; line-height: 1.2; letter-spacing: -.015em; margin: 0 0 14px; }
h2 { font-size: 20px; letter-spacing: -.01em; margin: 56px 0 14px; }
.eyebrow { color: var(--muted); font-size: 13px; letter-spacing: .06em; margin: 0 0 8px; }
.lead { font-size: 18px; max-width: 54em; margin: 0; text-wrap: pretty; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(var(--least), 1fr)); }
.tiles { --least: 200px; gap: 14px; margin-top: 28px; }
.figures { --least: min(100%, 480px); gap: 44px 36px; }
.columns { --least: min(100%, 420px); gap: 0 48px; }
.tile { background: var(--soft); border-radius: 10px; padding: 16px 18px; }
.tile b { display: block; font-size: 28px; line-height: 1.15; letter-spacing: -.02em; }
.tile span { display: block; color: var(--muted); font-size: 14px; line-height: 1.4; margin-top: 4px;
  overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
table, .tile b, svg text { font-variant-numeric: tabular-nums; }
th, td { padding: 8px 7px; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--rule); }
th { color: var(--muted); font-weight: 600; font-size: 13px; line-height: 1.35; vertical-align: bottom;
  border-color: var(--edge); }
:is(th, td):first-child { text-align: left; padding-left: 0; }
td:first-child { white-space: normal; }
.policies :is(th, td):is(:nth-child(2), :nth-child(3)) { text-align: left; padding-left: 14px; }
.domains { max-width: 820px; }
.baseline td { background: var(--soft); color: var(--muted); }
.best td { font-weight: 600; }
.ci { color: var(--muted); font-weight: 400; font-size: 12px; padding-left: 5px; }
.role { display: inline-block; margin-left: 8px; padding: 0 7px; border-radius: 9px; font-size: 12px;
  font-weight: 500; line-height: 18px; background: #eaeef2; color: #4b535c; }
.role.tuned { background: #dcf1ea; color: #00624a; }
.p { color: #0072b2; } .m { color: #b34e00; }
figure { margin: 0; min-width: 0; } figure.wide { grid-column: 1 / -1; }
figure h3 { font-size: 16px; margin: 0 0 8px; }
figcaption { color: var(--muted); font-size: 14px; margin-top: 8px; max-width: 62em; }
svg { display: block; width: 100%; height: auto; min-width: 430px; }
.wide svg { min-width: 820px; }
svg text { font-family: var(--sans) !important; }
.facts td { white-space: normal; overflow-wrap: anywhere; text-align: left; vertical-align: top; }
.facts td:first-child { color: var(--muted); width: 38%; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 8px 28px; margin: 0; font-size: 15px; }
dt { font-weight: 600; }
dd { margin: 0; max-width: 60em; color: #3b424a; }
@media (max-width: 600px) {
  main { padding: 28px 16px 48px; } h1 { font-size: 24px; } .lead { font-size: 16px; }
  dl { grid-template-columns: 1fr; gap: 2px; } dd { margin-bottom: 10px; }
}
"""


def page(title: str, body: Iterable[str], *, css: str = CSS) -> str:
    """The whole page. title : HTML already; body : parts that are HTML already."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{css}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def tiles(boxes: Iterable[tuple[str, str]]) -> str:
    """Large values with a line of text each, side by side."""
    shown = (f'<div class="tile"><b>{escape(v)}</b><span>{escape(text)}</span></div>' for v, text in boxes)
    return f'<div class="grid tiles">{"".join(shown)}</div>'


def figure(kind: str, title: str, svg: str, caption: str) -> str:
    """A figure with its title above and what it says below. kind : "wide" for the whole width, else ""."""
    return (
        f'<figure class="{kind}"><h3>{escape(title)}</h3><div class="scroll">{svg}</div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def definitions(terms: Mapping[str, str]) -> list[str]:
    return ["<dl>", *(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in terms.items()), "</dl>"]


def facts(pairs: Iterable[tuple[str, Any]]) -> str:
    """A table of names and values."""
    lines = "".join(f"<tr><td>{escape(str(k))}</td><td>{escape(str(v))}</td></tr>" for k, v in pairs)
    return f'<table class="facts"><tbody>{lines}</tbody></table>'


def table(kind: str, head: Sequence[str], lines: Sequence[str]) -> str:
    """A table of `line`s. head : cells that are HTML already."""
    cells = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    return (
        f'<div class="scroll {kind}"><table><thead><tr>{cells}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def line(cells: Iterable[str], kind: str = "") -> str:
    """One row of cells that are HTML already."""
    return f'<tr class="{kind}">' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def with_interval(value: Mapping[str, float]) -> str:
    return f'{value["estimate"]:.3f}<span class="ci">{value["low"]:.3f}&ndash;{value["high"]:.3f}</span>'


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
    busy = f": more than {LARGEST_FLOOR_PERCENT} %, so this machine was too busy to tell policies apart"
    null = interval_text(document["null_arm"])
    return f"noise floor: {floor:.2f} %{busy if floor > LARGEST_FLOOR_PERCENT else ''} (two baselines: {null})"


def best_text(best: Mapping[str, Any]) -> str:
    """The predicted best beside the measured best, in words."""
    if best["predicted"] == best["measured"]:
        return f"predicted best: {best['predicted']}, which is the measured best"
    told = "" if best["resolved"] else ", which the noise does not resolve"
    below = f"{best['loss_percent']:.2f} % below the measured best {best['measured']}"
    return f"predicted best: {best['predicted']}, {below}{told}"


def decoding_text(decoding: Mapping[str, Any] | str) -> str:
    """How a trace was decoded, in words. decoding : mode and temperature, or the mode alone."""
    if isinstance(decoding, str):
        return f"{decoding} decoding"
    mode = decoding["mode"]
    if mode == "greedy":  # at no temperature
        return "greedy decoding"
    temperature, top_p = decoding["temperature"], decoding.get("top_p", 1.0)
    nucleus = "" if top_p == 1 else f" and top-p {top_p:g}"
    return f"{mode.capitalize()} sampling at temperature {temperature:g}{nucleus}"


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
