"""The report of a validation run: one HTML file with everything in it, predicted beside measured."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from specsim.errors import InputError
from specsim.report import figures
from specsim.report.figures import Row

KIND = "specsim-validation"
KEYS = (
    "target",
    "drafter",
    "device",
    "dtype",
    "decoding",
    "environment",
    "sequences",
    "output_tokens",
    "distinct_trigram_share",
    "first_token_accepted_share",
    "rows",
    "median_abs_error_percent",
    "best",
    "k_curve",
    "accepted_histogram",
    "reliability",
    "domains",
)
SPEEDUPS = ('<span class="p">predicted</span> speedup', '<span class="m">measured</span> speedup')
MINUS = "\u2212"

DEFINITIONS = {
    "Speedup": "Total baseline seconds over total speculative seconds, both over the hold-out sequences. "
    "Decode time only: the prompt's pass is in neither. Both run on the same machine by the same code path.",
    "Interval": "95 % percentile bootstrap over sequences, the independent units; tokens are not.",
    "Predicted": "The policy, replayed on the recorded trace and priced with the measured cost profile.",
    "Error": f"Predicted / measured {MINUS} 1: positive is optimistic, more than the machine gave.",
    "Rounds identical": "Share of replayed rounds that the real run repeated exactly: same start, same "
    "drafted and same accepted length.",
    "Output identical": "Share of sequences whose output equals the baseline's, token for token.",
    "v_d": "Accepted over drafted tokens: how much of the drafting was worth it.",
    "r_d": "Accepted over output tokens: how much of the output the drafter supplied.",
    "HM": "Harmonic mean of v_d and r_d.",
    "tau": "Output tokens per target pass, the target's own included: a round that accepts a drafted tokens "
    "emits a + 1, and without drafting tau is 1.",
    "Ladder": "One policy predicted with fewer simplifications from rung to rung. Eq. 14 knows v_d, r_d and "
    "one ratio s_d / s_t; the next rung charges s_d per draft step and s_t per target pass, round by round; "
    "the cost profile charges what was measured at each context and draft length.",
    "ECE": "Expected calibration error: mean distance between confidence and acceptance over the bins, "
    "weighted by their token counts.",
}

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


def write_validation_report(path: Path, document: Mapping[str, Any]) -> None:
    """Write the report as one self-contained HTML file; a kill leaves the old file or the new one.

    Parameters
    ----------
    path : where to write; missing parent folders are made
    document : the validation result, JSON-able, its `kind` "specsim-validation"

    Raises
    ------
    InputError
        If the document is of another kind, lacks a key or has no row.
    """
    page = render_validation(document)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, work = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(page)
        os.chmod(work, 0o644)
        os.replace(work, path)
    except BaseException:
        Path(work).unlink(missing_ok=True)
        raise


def render_validation(document: Mapping[str, Any]) -> str:
    """The page itself; the same document gives the same bytes."""
    _check(document)
    rows = sorted(document["rows"], key=lambda row: -row["measured"]["estimate"])
    title = escape(f"{document['target']} with {document['drafter']}")
    body = (
        '<p class="eyebrow">Validation of predicted speedups</p>',
        f"<h1>{title}</h1>",
        _lead(document, rows),
        "<h2>Policies, by measured speedup</h2>",
        _policy_table(rows),
        "<h2>Figures</h2>",
        f'<div class="grid figures">{_figures(document, rows)}</div>',
        "<h2>Domains, under the best policy</h2>",
        _domain_table(document["domains"]),
        '<div class="grid columns">',
        "<section><h2>Recording</h2>",
        _facts(_recording(document)),
        "</section>",
        "<section><h2>Environment</h2>",
        _facts(document["environment"].items()),
        "</section></div>",
        "<h2>Definitions</h2>",
        "<dl>",
        *(f"<dt>{escape(term)}</dt><dd>{escape(text)}</dd>" for term, text in DEFINITIONS.items()),
        "</dl>",
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Validation: {title}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _check(document: Mapping[str, Any]) -> None:
    if document.get("kind") != KIND:
        raise InputError(f"report: kind is {document.get('kind')!r}, not {KIND!r}; give a validation result")
    missing = [key for key in KEYS if key not in document]
    if missing:
        raise InputError(f"report: the validation result lacks {', '.join(missing)}; validate again")
    if not document["rows"]:
        raise InputError("report: the validation result has no row; validate at least one policy")


def _lead(document: Mapping[str, Any], rows: Sequence[Row]) -> str:
    best, top = document["best"], rows[0]
    measured = top["measured"]
    error = f"{document['median_abs_error_percent']:.1f} %"
    sequences = document["sequences"]
    lead = (
        f"A dense trace of {document['target']} with the drafter {document['drafter']} was recorded on "
        f"{document['device']} in {document['dtype']} under {_decoding(document)}; policies were tuned on "
        f"{sequences['tuning']:,} sequences and then run for real on {sequences['holdout']:,} others, "
        f"{document['output_tokens']:,} output tokens. The fastest was {top['label']}, measured at "
        f"{measured['estimate']:.3f} times autoregressive speed (95 % interval {measured['low']:.3f} to "
        f"{measured['high']:.3f}), and the predictions miss the measured speedups by {error} in the median."
    )
    named = "the measured best" if best["predicted"] == best["measured"] else best["predicted"]
    identical = min(row["rounds_identical_percent"] for row in rows)
    tiles = (
        (f"{measured['estimate']:.2f}", f"best measured speedup, {top['label']}"),
        (error, f"median absolute error of {len(rows)} predicted speedups"),
        (f"{best['loss_percent']:.1f} %", f"lost by trusting the prediction: it names {named}"),
        (_percent(identical), "rounds as replayed, in the worst policy"),
    )
    boxes = (f'<div class="tile"><b>{escape(v)}</b><span>{escape(text)}</span></div>' for v, text in tiles)
    return f'<p class="lead">{escape(lead)}</p><div class="grid tiles">{"".join(boxes)}</div>'


def _policy_table(rows: Sequence[Row]) -> str:
    identical = ("rounds<br>identical", "output<br>identical")
    head = ("policy", *SPEEDUPS, "error", *identical, "v_d", "r_d", "HM", "tau")
    baseline = ("autoregressive", "1.000", "1.000", *("&ndash;",) * 6, "1.00")
    # The baseline takes its place in the order: what stands below it made decoding slower.
    ahead = sum(row["measured"]["estimate"] >= 1 for row in rows)
    lines = [_line(_policy_cells(row), "best" if i == 0 else "") for i, row in enumerate(rows)]
    lines.insert(ahead, _line(baseline, "baseline"))
    return _table("policies", head, lines)


def _policy_cells(row: Row) -> tuple[str, ...]:
    role = row["role"].replace("_k", " K")
    return (
        f'{escape(row["label"])}<span class="role {escape(row["role"])}">{escape(role)}</span>',
        _with_interval(row["predicted"]),
        _with_interval(row["measured"]),
        _signed_percent(row["error_percent"]),
        _percent(row["rounds_identical_percent"]),
        _percent(row["output_identical_percent"]),
        *(f"{row[name]:.3f}" for name in ("v_d", "r_d", "hm")),
        f"{row['tau']:.2f}",
    )


def _figures(document: Mapping[str, Any], rows: Sequence[Row]) -> str:
    adaptive = figures.best_adaptive(rows)
    line = f"the green line is {adaptive['label']} as measured, " if adaptive else ""
    parts = (
        (
            "",
            "Speedup against draft length",
            figures.speedup_against_k(document["k_curve"], rows),
            (
                "Orange points on the blue curve mean that the replay knew the machine's answer for fixed K; "
                f"{line}and bands and bars are 95 % intervals."
            ),
        ),
        (
            "",
            "Predicted against measured",
            figures.predicted_against_measured(rows),
            (
                "On the diagonal a prediction is exact, above it optimistic; the grey band is an error of at most "
                "5 % and each cross spans both 95 % intervals."
            ),
        ),
        (
            "wide",
            "What each simplification costs",
            figures.error_ladder(rows),
            (
                "Each line is one policy and each mark one way of predicting it, placed by its signed error; the "
                "measured speedup is the zero line, its 95 % interval the orange bar."
            ),
        ),
        (
            "",
            "Accepted tokens per round",
            figures.accepted_histogram(document["accepted_histogram"]),
            (
                "Equal pairs of bars mean that the real run accepted drafts just as the replay said; the numbers "
                "are measured percentages."
            ),
        ),
        (
            "",
            "Is the drafter's confidence honest?",
            figures.reliability_diagram(document["reliability"]),
            (
                "Points below the diagonal are bins where the drafter was more confident than right; the bars "
                "below count the tokens in each bin."
            ),
        ),
    )
    return "".join(
        f'<figure class="{kind}"><h3>{escape(title)}</h3><div class="scroll">{svg}</div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
        for kind, title, svg, caption in parts
    )


def _domain_table(domains: Mapping[str, Mapping[str, Any]]) -> str:
    head = ("domain", "sequences", "output tokens", *SPEEDUPS, "error")
    lines = []
    for name, domain in domains.items():
        predicted, measured = domain["predicted_speedup_best"], domain["measured_speedup_best"]
        sizes = (f"{domain[key]:,}" for key in ("sequences", "output_tokens"))
        error = _signed_percent((predicted / measured - 1) * 100)
        lines.append(_line((escape(name), *sizes, f"{predicted:.3f}", f"{measured:.3f}", error)))
    return _table("domains", head, lines)


def _recording(document: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    sequences = document["sequences"]
    yield from ((name, document[name]) for name in ("target", "drafter", "device", "dtype"))
    yield "decoding", _decoding(document)
    yield "sequences", f"{sequences['tuning']:,} for tuning, {sequences['holdout']:,} held out"
    yield "output tokens, held out", f"{document['output_tokens']:,}"
    yield "distinct trigrams in the output", f"{document['distinct_trigram_share']:.1%}".replace("%", " %")
    yield "first drafted token is the target's", f"{document['first_token_accepted_share']:.1%}".replace("%", " %")


def _facts(pairs: Iterable[tuple[str, Any]]) -> str:
    lines = "".join(f"<tr><td>{escape(str(k))}</td><td>{escape(str(v))}</td></tr>" for k, v in pairs)
    return f'<table class="facts"><tbody>{lines}</tbody></table>'


def _table(kind: str, head: Sequence[str], lines: Sequence[str]) -> str:
    cells = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    return (
        f'<div class="scroll {kind}"><table><thead><tr>{cells}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _line(cells: Iterable[str], kind: str = "") -> str:
    """One row of cells that are HTML already."""
    return f'<tr class="{kind}">' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _with_interval(value: Mapping[str, float]) -> str:
    return f'{value["estimate"]:.3f}<span class="ci">{value["low"]:.3f}&ndash;{value["high"]:.3f}</span>'


def _decoding(document: Mapping[str, Any]) -> str:
    mode, temperature = document["decoding"]["mode"], document["decoding"]["temperature"]
    greedy = mode == "greedy"
    return "greedy decoding" if greedy else f"{mode.capitalize()} sampling at temperature {temperature:g}"


def _percent(value: float) -> str:
    """Rounded down, so that 100 % means all of them."""
    return f"{math.floor(round(value * 100, 6)) / 100:g} %"


def _signed_percent(value: float) -> str:
    return f"{value:+.1f} %".replace("-", MINUS)
