"""EESD: the cost ratio T_d / T_t that Eq. 14 implies, how well one ratio fits, and what table 8 measures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from scipy.optimize import minimize_scalar

from specsim.acceptance.formulas import eq14_speedup
from specsim.cost.roofline.architecture import find_architecture
from studies.papers.eesd.arithmetic import TARGETS, head_weights
from studies.papers.eesd.runs import (
    BETA,
    CALI,
    DETAILED,
    SHORT,
    Run,
    find_run,
    implied_cost_ratio,
    output_tokens,
    runs,
)
from studies.papers.record import Finding, Verdict, finding, mean_finding, slug
from studies.papers.tables import Interval, read_table, recompute

RATIOS = (-0.2, 1.5)  # search range of a fit
SELF_SD_BAND = Interval(0.3, 0.9)  # the paper does not say which sublayers are skipped
EXITS = {"70B": 6, "13B": 4}  # layers of the early exit, its own included
DRAFT_MODELS = {"68M": "llama-68m", "1.1B": "tinyllama-1.1b", "7B": "llama-2-7b"}  # shapes, by the end of their names
TWO_PARAMETER_TARGETS = ("LLaMA-2-70B", "LLaMA-2-70B-chat", "LLaMA-2-13B", "Vicuna-13B")


def audit() -> Iterator[Finding]:
    """Yield all findings of this module."""
    ratios = [implied_ratio(run) for run in runs()]
    yield from ratios
    negative = sum(ratio.high < 0 for ratio in ratios if ratio.high is not None)
    text = "rows whose T_d / T_t is negative"
    yield finding("eesd.cost_ratio_negative", negative, "rows", negative == 0, text, *DETAILED)
    above = sum(ratio.verdict == "contradicts" for ratio in ratios)
    text = "rows whose T_d / T_t exceeds what the drafter's size explains, which includes overheads; none is below"
    yield finding("eesd.cost_ratio_above_band", above, "rows", "cannot decide", text, *DETAILED, erratum="A15")
    yield from one_ratio()
    yield from by_weights()
    yield from two_parameters()
    parts = [part for row in read_table("eesd_8").rows for part in breakdown(row["target"], row["method"])]
    yield from parts
    errors = [part.value for part in parts if part.name.endswith("eq14_error")]
    text = "Eq. 14 overestimates the speedup by this much with the T_d / T_t that table 8 measures"
    name, places = "eesd.eq14_measured_error", ("eesd_8", "eesd_11")
    yield mean_finding(name, errors, "%", min(errors) <= 0, text, *places, erratum="A15")


def draft_share(run: Run) -> tuple[float, float] | None:
    """Shares of the target's weights and layers that a drafted token uses; None if the paper does not say."""
    if run.method == "Self SD":
        return None
    target = find_architecture(TARGETS[run.size])
    total = target.stack_parameters + head_weights(target)
    if run.method == "Medusa":  # four heads in one pass draft four tokens
        return (target.hidden_size**2 + head_weights(target)) / total, 1 / target.num_layers
    if run.method in (BETA, CALI):
        drafter = target.first(EXITS[run.size])
    else:
        drafter = find_architecture(DRAFT_MODELS[run.row["drafter"].removesuffix("-chat").rpartition("-")[2]])
    return (drafter.stack_parameters + head_weights(drafter)) / total, drafter.num_layers / target.num_layers


def implied_ratio(run: Run) -> Finding:
    """T_d / T_t for which Eq. 14 holds, compared with what the drafter's size explains."""
    value, allowed = recompute(implied_cost_ratio, *run.cells("v_d", "r_d", "speedup"))
    shares = draft_share(run)
    # from the share of weights less a tenth to twice the share of weights or of layers
    plausible = SELF_SD_BAND if shares is None else Interval(0.9 * shares[0], 2 * max(shares))
    text = f"T_d / T_t by Eq. 14; the drafter's size explains {plausible.low:.3f} to {plausible.high:.3f}"
    if shares is not None:
        text += f", {shares[0]:.4f} of the weights"
    name, place, agrees = f"eesd.cost_ratio.{run.slug}", run.row.place(), allowed.meets(plausible)
    return finding(name, value, "", agrees, text, place, within=allowed, erratum="A15", flaw="F10")


def predicted(cost_ratio: float, run: Run) -> float:
    """Speedup by Eq. 14 with this T_d / T_t."""
    return float(eq14_speedup(run.v_d, run.r_d, cost_ratio))


def fit(group: Sequence[Run]) -> float:
    """T_d / T_t with the smallest relative squared error of Eq. 14 over these runs."""

    def loss(cost_ratio: float) -> float:
        return float(sum((predicted(cost_ratio, run) / run.speedup - 1) ** 2 for run in group))

    return float(minimize_scalar(loss, bounds=RATIOS, method="bounded", options={"xatol": 1e-9}).x)


def errors(cost_ratio: float, group: Sequence[Run]) -> list[float]:
    """Absolute errors of Eq. 14's speedups, in percent."""
    return [100 * abs(predicted(cost_ratio, run) / run.speedup - 1) for run in group]


def left_out_fits(group: Sequence[Run]) -> list[tuple[Run, float]]:
    """Each run with the T_d / T_t fitted on the others."""
    return [(run, fit([other for other in group if other is not run])) for run in group]


def groups() -> dict[str, list[Run]]:
    """Runs by target and arm, of those with at least two data sets."""
    by_group: dict[str, list[Run]] = {}
    for run in runs():
        by_group.setdefault(run.group, []).append(run)
    return {name: group for name, group in sorted(by_group.items()) if len(group) > 1}


def one_ratio() -> Iterator[Finding]:
    """Error of one T_d / T_t per target and arm, fitted on all data sets and on the others."""
    all_errors: list[float] = []
    all_left_out: list[float] = []
    own_left_out: list[float] = []
    for name, group in groups().items():
        implied, ratio = [run.cost_ratio for run in group], fit(group)
        over_rows, fitted = Interval.over(implied), errors(ratio, group)
        left_out = [error for run, other_ratio in left_out_fits(group) for error in errors(other_ratio, [run])]
        all_errors += fitted
        all_left_out += left_out
        if group[0].method in (BETA, CALI):
            own_left_out += left_out
        mean_error = "mean error of speedup with one T_d / T_t; range over rows"
        figures: tuple[tuple[str, Any, str, str, Interval | None], ...] = (
            ("one_ratio", ratio, "", "T_d / T_t that fits all data sets; range over rows", over_rows),
            ("ratio_mean", np.mean(implied), "", "mean T_d / T_t over data sets; range over rows", over_rows),
            ("ratio_spread", over_rows.high - over_rows.low, "", "largest minus smallest T_d / T_t", None),
            ("one_ratio_error", np.mean(fitted), "%", mean_error, Interval.over(fitted)),
            ("one_ratio_left_out", np.mean(left_out), "%", "the same, fitted on the other data sets", None),
        )
        places = [run.row.place() for run in group]
        for what, value, unit, text, within in figures:
            full = f"eesd.{what}.{name}"
            yield finding(full, value, unit, "supports", text, *places, within=within, erratum="A15")
    for name, values, text in (
        ("eq14_one_ratio_error", all_errors, "mean error of Eq. 14 with one T_d / T_t per target and method"),
        ("eq14_left_out_error", all_left_out, "the same, each data set predicted from the others"),
        ("eq14_left_out_error_eesd", own_left_out, "the same, EESD's own two methods alone"),
    ):
        yield finding(f"eesd.{name}", np.mean(values), "%", "supports", text, *DETAILED, erratum="A15")


def by_weights() -> Iterator[Finding]:
    """Error of Eq. 14 with the share of weights as T_d / T_t, without a fit."""
    for method in (BETA, CALI):
        shares = [(run, share[0]) for run in runs() if run.method == method and (share := draft_share(run))]
        signed = [100 * (predicted(share, run) / run.speedup - 1) for run, share in shares]
        text = "mean error of Eq. 14 with the share of weights as T_d / T_t: it overestimates the speedup"
        name = f"eesd.eq14_by_weights.{slug(SHORT[method])}"
        yield mean_finding(name, signed, "%", "contradicts", text, *DETAILED, erratum="A15")


def two_parameters() -> Iterator[Finding]:
    """1 / S = a r / v + b (1 - r): can the tables separate the draft's cost a from the verification's b?"""
    for target in TWO_PARAMETER_TARGETS:
        group = [run for run in runs() if run.target == target and run.method in (BETA, CALI)]
        drafts = np.array([run.r_d / run.v_d for run in group])
        rounds = np.array([1 - run.r_d for run in group])
        measured = np.array([run.speedup for run in group])
        design = np.stack([drafts, rounds], axis=1) * measured[:, None]
        draft, verify = np.linalg.lstsq(design, np.ones(len(group)), rcond=None)[0]
        error = 100 * np.abs(1 / (draft * drafts + verify * rounds) / measured - 1).mean()
        alone = fit(group)
        places = [run.row.place() for run in group]
        for name, value, unit, text in (
            ("draft_alone", alone, "", "T_d / T_t if verification costs T_t"),
            ("draft_alone_error", np.mean(errors(alone, group)), "%", "mean error of that"),
            ("draft", draft, "", "T_d / T_t if verification's cost is fitted too"),
            ("verify", verify, "", "verification over T_t, fitted"),
            ("error", error, "%", "mean error of both"),
        ):
            verdict: Verdict = "contradicts" if name == "draft" and draft < 0 else "cannot decide"
            full = f"eesd.two_costs.{slug(target)}.{name}"
            yield finding(full, value, unit, verdict, text, *places, erratum="A15")


def breakdown(target: str, method: str) -> Iterator[Finding]:
    """Table 8's seconds as costs per token and round, and Eq. 14 with them."""
    row = read_table("eesd_8").row(target, method)
    run, tokens = find_run("xsum", target, method), output_tokens()
    draft_s, verify_s, sampling_s, others_s = (row.number(column) for column in row.table.units)
    total_s = draft_s + verify_s + sampling_s + others_s
    drafts, rounds = tokens * run.r_d / run.v_d, tokens * (1 - run.r_d)
    target_s = run.baseline.number("time_s") / tokens
    measured, verify_ratio = draft_s / drafts / target_s, verify_s / rounds / target_s
    promised = predicted(measured, run)

    def overestimate(v_d: float, r_d: float, speedup: float) -> float:
        ratio = draft_s / (tokens * r_d / v_d) / target_s
        return 100 * (float(eq14_speedup(v_d, r_d, ratio)) / speedup - 1)

    _, error_range = recompute(overestimate, *run.cells("v_d", "r_d", "speedup"))
    end, places = slug(target, SHORT[method]), (row.place(), run.row.place())
    agrees = abs(total_s - run.time_s) <= 0.006  # four roundings of half a millisecond and one of 5 ms
    text, time_place = f"table 8's four parts; table 11 prints {run.time_s}", run.row.place("time_s")
    yield finding(f"eesd.breakdown.{end}.sum", total_s, "s", agrees, text, row.place(), time_place)
    figures: tuple[tuple[str, float, str, bool, str], ...] = (
        ("drafts", drafts, "tokens", True, "tokens drafted, by v_d and r_d"),
        ("rounds", rounds, "rounds", True, "target passes, by r_d"),
        ("draft", 1e3 * draft_s / drafts, "ms", True, "T_d, drafting per drafted token"),
        ("verify", 1e3 * verify_s / rounds, "ms", True, "a verification"),
        ("target", 1e3 * target_s, "ms", True, "T_t, of the autoregressive row"),
        ("measured_ratio", measured, "", True, "T_d / T_t as measured"),
        ("verify_ratio", verify_ratio, "", True, "a verification over T_t; Eq. 13 assumes 1"),
        ("others", 100 * others_s / total_s, "%", False, "of the time is others, which Eq. 13 leaves out"),
        ("sampling", 100 * sampling_s / total_s, "%", True, "of the time is the control itself"),
        ("eq14", promised, "x", False, f"Eq. 14 with the measured T_d / T_t; printed {run.row['speedup']}"),
        ("parts", run.baseline.number("time_s") / total_s, "x", True, "the baseline's time over table 8's parts"),
    )
    for name, value, unit, verdict, text in figures:
        yield finding(f"eesd.breakdown.{end}.{name}", value, unit, verdict, text, *places, erratum="A15")
    name, error = f"eesd.breakdown.{end}.eq14_error", 100 * (promised / run.speedup - 1)
    text, agrees = "Eq. 14 with the measured T_d / T_t overestimates the speedup by this much", error_range.low <= 0
    yield finding(name, error, "%", agrees, text, *places, within=error_range, erratum="A15")
