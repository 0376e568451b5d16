"""The page of `specsim tune`: the tuned policy, and its gain over baselines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specsim.replaying.intervals import Estimate
from specsim.report import figures, page
from specsim.report.table import DIFFERENCE, SHARE, SPEEDUP, THREE, TWO, Column, as_html

CALLED = {"runner_up": "runner-up of the search", "default": "default settings", "best_fixed_k": "best fixed K"}


def _settings(params: Mapping[str, Any]) -> str:
    """Settings in words, less what was learned."""
    return ", ".join(
        f"{name}={page.value_text(value)}" for name, value in params.items() if not isinstance(value, list)
    )


def _rates(held: Mapping[str, Any]) -> list[tuple[str, str]]:
    names = {"seconds": "predicted", "ar_seconds": "predicted without speculation"}
    seconds = {name: held[key] for key, name in names.items()}
    return [
        (
            f"{held['output_tokens'] / value:,.1f} tok/s",
            f"{1e3 * value / held['output_tokens']:.2f} ms per token, {name}",
        )
        for name, value in seconds.items()
    ]


COLUMNS = (
    Column("policy", "label"),
    Column("speedup [95 %]", "speedup", SPEEDUP),
    Column("tuned gains", "gain", DIFFERENCE),
    Column("v_d", "v_d", THREE),
    Column("r_d", "r_d", THREE),
    Column("tau", "tau", TWO),
    Column("gap to oracle", lambda row: row.get("oracle_regret"), SHARE),
    Column("settings", lambda row: _settings(row["params"]) if "params" in row else None),
)
DEFINITIONS = {
    "Speedup": "Decoding time without speculation over decoding time with the policy, on held-out sequences.",
    "Tuned gains": "Speedup of the tuned policy less that of the row, on the same sequences; the 95 % intervals "
    "hold for all rows at once. The difference is not significant where its interval contains 0.",
    **page.METRICS,
    "Gap to oracle": "How much slower it is than a policy that knows what will be accepted.",
}


def tuning_result(document: Mapping[str, Any]) -> page.Result:
    """Describe a tuning. document : what `specsim tune --json` prints"""
    held, references = document["holdout"], document["references"]
    tuned = {**held, "label": f"{document['policy']}, tuned", "row_class": "best"}
    baseline = {"label": "autoregressive", "speedup": 1.0, "tau": 1.0, "row_class": "baseline"}
    others = [
        {**reference, "label": CALLED.get(name, name), "gain": reference["comparison"]["difference"]}
        for name, reference in references.items()
    ]
    speedup = Estimate(**held["speedup"])
    verdict = f"Predicted, on held-out sequences: {page.speculation_text(tuned['label'], speedup)}"
    if document["interrupted"]:
        verdict = f"Interrupted: this is the best so far. {verdict}"
    same = [row["label"] for row in others if not row["comparison"]["significant"]]
    ties = f"Its difference is not significant to: {', '.join(same)}." if same else ""
    spread = page.spread_text(speedup, document.get("cost", ""), document.get("cost_band"))
    boxes = (
        (f"{speedup:.2f}", f"predicted held-out speedup: {spread}"),
        *_rates(held),
        (f"{document['train']['speedup']['estimate']:.2f}", "tuning-set speedup"),
        (f"{document['trials']:,}", f"configurations tried, search: {document['search']}"),
    )
    rows = [tuned, *others]
    drawn = figures.lines_of_estimates(
        [row["label"] for row in rows], [row["speedup"] for row in rows], "tuning", "speedup, with 95 % intervals"
    )
    body = [
        page.lead(f"{document['trials']:,} configurations were tried. {ties}"),
        page.tiles(boxes),
        page.heading("Tuned policy against baselines"),
        as_html("tuning", COLUMNS, [tuned, baseline, *others]),
        page.stack([page.figure("wide", "Does tuning pay?", drawn, "Green is tuned; 1 is no speculation.")]),
    ]
    return page.Result(
        "A policy, tuned",
        f"Tuning {document['policy']}",
        verdict,
        [*body, page.heading("Definitions"), *page.definitions(DEFINITIONS)],
        page.notes_of(document),
    )
