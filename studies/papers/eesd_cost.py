"""EESD: the cost ratio T_d / T_t that Eq. 14 implies, how far one ratio goes, and what table 8 measures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from scipy.optimize import minimize_scalar

from specsim.cost.roofline.architecture import find_architecture
from specsim.speedup.formulas import eq14_speedup
from studies.papers.eesd import TARGETS, head_weights
from studies.papers.eesd_runs import (
    BETA,
    CALI,
    DETAILED,
    SHORT,
    Run,
    implied_cost_ratio,
    output_tokens,
    run,
    runs,
)
from studies.papers.record import Finding, Verdict, finding, slug
from studies.papers.tables import Interval, image, read_table

RATIOS = (-0.2, 1.5)  # where a fit looks
SELF_SD_BAND = Interval(0.3, 0.9)  # the paper does not say which sublayers are skipped
EXITS = {"70B": 6, "13B": 4}  # layers of the early exit, its own included
DRAFT_MODELS = {"68M": "llama-68m", "1.1B": "tinyllama-1.1b", "7B": "llama-2-7b"}  # shapes, by the end of their names
TWO_PARAMETER_TARGETS = ("LLaMA-2-70B", "LLaMA-2-70B-chat", "LLaMA-2-13B", "Vicuna-13B")


def audit() -> Iterator[Finding]:
    """All findings of this file."""
    implied = [ratio(one) for one in runs()]
    yield from implied
    negative = sum(one.high < 0 for one in implied if one.high is not None)
    yield finding(
        "eesd.cost_ratio_negative", negative, "rows", negative == 0, "rows whose T_d / T_t is negative", *DETAILED
    )
    above = sum(one.verdict == "contradicts" for one in implied)
    yield finding(
        "eesd.cost_ratio_above_band",
        above,
        "rows",
        "cannot decide",
        "rows whose T_d / T_t is above what the drafter's size explains, overheads inside; none is below",
        *DETAILED,
        erratum="A15",
    )
    yield from one_ratio()
    yield from by_weights()
    yield from two_parameters()
    measured = [each for row in read_table("eesd_8").rows for each in breakdown(row["target"], row["method"])]
    yield from measured
    too_much = [one.value for one in measured if one.name.endswith("eq14_error")]
    yield finding(
        "eesd.eq14_measured_error",
        float(np.mean(too_much)),
        "%",
        min(too_much) <= 0,
        "by so much Eq. 14 promises too much with the T_d / T_t that table 8 measures; range over rows",
        "eesd_8",
        "eesd_11",
        within=Interval.over(too_much),
        erratum="A15",
    )


def draft_share(one: Run) -> tuple[float, float] | None:
    """What a drafted token reads of the target's weights, and runs of its layers; None where it is not said."""
    if one.method == "Self SD":
        return None
    target = find_architecture(TARGETS[one.size])
    total = target.stack_parameters + head_weights(target)
    if one.method == "Medusa":  # four heads in one pass draft four tokens
        return (target.hidden_size**2 + head_weights(target)) / total, 1 / target.num_layers
    if one.method in (BETA, CALI):
        drafter = target.first(EXITS[one.size])
    else:
        drafter = find_architecture(DRAFT_MODELS[one.row["drafter"].removesuffix("-chat").rpartition("-")[2]])
    return (drafter.stack_parameters + head_weights(drafter)) / total, drafter.num_layers / target.num_layers


def band(one: Run) -> Interval:
    """Plausible T_d / T_t: from the share of weights less a tenth to twice the share of weights or of layers."""
    shares = draft_share(one)
    return SELF_SD_BAND if shares is None else Interval(0.9 * shares[0], 2 * max(shares))


def ratio(one: Run) -> Finding:
    """T_d / T_t that makes Eq. 14 true, beside what the drafter's size explains."""
    value = implied_cost_ratio(one.v_d, one.r_d, one.speedup)
    allowed = image(implied_cost_ratio, *one.intervals("v_d", "r_d", "speedup"))
    plausible = band(one)
    shares = draft_share(one)
    weights = "" if shares is None else f", {shares[0]:.4f} of the weights"
    agrees = allowed.meets(plausible)
    return finding(
        f"eesd.cost_ratio.{one.slug}",
        value,
        "",
        agrees,
        f"T_d / T_t by Eq. 14; the drafter's size explains {plausible.low:.3f} to {plausible.high:.3f}{weights}",
        one.row.place(),
        within=allowed,
        erratum="A15" if agrees else "F10",
    )


def predicted(cost_ratio: float, one: Run) -> float:
    """Speedup by Eq. 14 with this T_d / T_t."""
    return float(eq14_speedup(one.v_d, one.r_d, cost_ratio))


def fit(group: Sequence[Run]) -> float:
    """The one T_d / T_t with the least relative squared error of Eq. 14 over these runs."""

    def loss(cost_ratio: float) -> float:
        return float(sum((predicted(cost_ratio, one) / one.speedup - 1) ** 2 for one in group))

    return float(minimize_scalar(loss, bounds=RATIOS, method="bounded", options={"xatol": 1e-9}).x)


def errors(cost_ratio: float, group: Sequence[Run]) -> list[float]:
    """Absolute errors of Eq. 14's speedups, in percent."""
    return [100 * abs(predicted(cost_ratio, one) / one.speedup - 1) for one in group]


def groups() -> dict[str, list[Run]]:
    """Runs by target and arm, those that are on two data sets or more."""
    found: dict[str, list[Run]] = {}
    for one in runs():
        found.setdefault(one.group, []).append(one)
    return {name: group for name, group in sorted(found.items()) if len(group) > 1}


def one_ratio() -> Iterator[Finding]:
    """How far one T_d / T_t per target and arm goes, fitted on all data sets and on the others."""
    all_errors: list[float] = []
    all_left_out: list[float] = []
    own_left_out: list[float] = []
    for name, group in groups().items():
        places = [one.row.place() for one in group]
        implied = [implied_cost_ratio(one.v_d, one.r_d, one.speedup) for one in group]
        over_rows = Interval.over(implied)
        fitted = errors(fit(group), group)
        left_out = [error for one in group for error in errors(fit([x for x in group if x is not one]), [one])]
        all_errors += fitted
        all_left_out += left_out
        if group[0].method in (BETA, CALI):
            own_left_out += left_out
        figures: dict[str, tuple[float, str, str, Interval | None]] = {
            "one_ratio": (fit(group), "", "the T_d / T_t that fits all data sets; range over rows", over_rows),
            "ratio_mean": (float(np.mean(implied)), "", "mean T_d / T_t over data sets; range over rows", over_rows),
            "ratio_spread": (over_rows.high - over_rows.low, "", "largest less least T_d / T_t", None),
            "one_ratio_error": (
                float(np.mean(fitted)),
                "%",
                "mean error of speedup with one T_d / T_t; range over rows",
                Interval.over(fitted),
            ),
            "one_ratio_left_out": (float(np.mean(left_out)), "%", "the same, fitted on the other data sets", None),
        }
        for what, (value, unit, text, within) in figures.items():
            full = f"eesd.{what}.{name}"
            yield finding(full, value, unit, "supports", text, *places, within=within, erratum="A15")
    for name, values, text in (
        ("eq14_one_ratio_error", all_errors, "mean error of Eq. 14 with one T_d / T_t per target and method"),
        ("eq14_left_out_error", all_left_out, "the same, each data set predicted from the others"),
        ("eq14_left_out_error_eesd", own_left_out, "the same, EESD's own two methods alone"),
    ):
        yield finding(f"eesd.{name}", float(np.mean(values)), "%", "supports", text, *DETAILED, erratum="A15")


def by_weights() -> Iterator[Finding]:
    """Eq. 14 with the share of weights as T_d / T_t, nothing fitted."""
    for method in (BETA, CALI):
        signed = []
        for one in runs():
            if one.method == method and (shares := draft_share(one)) is not None:
                signed.append(100 * (predicted(shares[0], one) / one.speedup - 1))
        yield finding(
            f"eesd.eq14_by_weights.{slug(SHORT[method])}",
            float(np.mean(signed)),
            "%",
            "contradicts",
            "mean error of Eq. 14 with the share of weights as T_d / T_t: it promises too much; range over rows",
            *DETAILED,
            within=Interval.over(signed),
            erratum="A15",
        )


def two_parameters() -> Iterator[Finding]:
    """1 / S = a r / v + b (1 - r): can the tables tell the draft's cost a from the verification's b?"""
    for target in TWO_PARAMETER_TARGETS:
        group = [one for one in runs() if one.target == target and one.method in (BETA, CALI)]
        drafts = np.array([one.r_d / one.v_d for one in group])
        rounds = np.array([1 - one.r_d for one in group])
        measured = np.array([one.speedup for one in group])
        design = np.stack([drafts, rounds], axis=1) * measured[:, None]
        draft, verify = np.linalg.lstsq(design, np.ones(len(group)), rcond=None)[0]
        error = 100 * np.abs(1 / (draft * drafts + verify * rounds) / measured - 1).mean()
        alone = fit(group)
        figures = {
            "draft_alone": (alone, "", "T_d / T_t where verification costs T_t"),
            "draft_alone_error": (float(np.mean(errors(alone, group))), "%", "mean error of that"),
            "draft": (float(draft), "", "T_d / T_t where verification's cost is fitted too"),
            "verify": (float(verify), "", "verification over T_t, fitted"),
            "error": (float(error), "%", "mean error of both"),
        }
        verdict: Verdict = "contradicts" if draft < 0 else "cannot decide"
        places = [one.row.place() for one in group]
        for name, (value, unit, text) in figures.items():
            full = f"eesd.two_costs.{slug(target)}.{name}"
            yield finding(
                full, value, unit, verdict if name == "draft" else "cannot decide", text, *places, erratum="A15"
            )


def breakdown(target: str, method: str) -> Iterator[Finding]:
    """Table 8's seconds as costs per token and round, and Eq. 14 with them."""
    row = read_table("eesd_8").row(target, method)
    one, tokens = run("xsum", target, method), output_tokens()
    draft_s, verify_s, sampling_s, others_s = (row.number(column) for column in row.table.units)
    total_s = draft_s + verify_s + sampling_s + others_s
    drafts, rounds = tokens * one.r_d / one.v_d, tokens * (1 - one.r_d)
    target_s = one.baseline.number("time_s") / tokens
    measured = draft_s / drafts / target_s
    promised = predicted(measured, one)

    def too_much(v_d: float, r_d: float, speedup: float) -> float:
        ratio = draft_s / (tokens * r_d / v_d) / target_s
        return 100 * (float(eq14_speedup(v_d, r_d, ratio)) / speedup - 1)

    error_range = image(too_much, *one.intervals("v_d", "r_d", "speedup"))
    agrees = abs(total_s - one.time_s) <= 0.006  # four roundings of half a millisecond and one of 5 ms
    yield finding(
        f"eesd.breakdown.{slug(target, SHORT[method])}.sum",
        total_s,
        "s",
        agrees,
        f"table 8's four parts; table 11 prints {one.row['time_s']}",
        row.place(),
        one.row.place("time_s"),
    )
    figures: dict[str, tuple[float, str, Verdict, str]] = {
        "drafts": (drafts, "tokens", "supports", "tokens drafted, by v_d and r_d"),
        "rounds": (rounds, "rounds", "supports", "target passes, by r_d"),
        "draft": (1e3 * draft_s / drafts, "ms", "supports", "T_d, drafting per drafted token"),
        "verify": (1e3 * verify_s / rounds, "ms", "supports", "a verification"),
        "target": (1e3 * target_s, "ms", "supports", "T_t, of the autoregressive row"),
        "measured_ratio": (measured, "", "supports", "T_d / T_t as measured"),
        "verify_ratio": (verify_s / rounds / target_s, "", "supports", "a verification over T_t; Eq. 13 takes 1"),
        "others": (100 * others_s / total_s, "%", "contradicts", "of the time is others, which Eq. 13 leaves out"),
        "sampling": (100 * sampling_s / total_s, "%", "supports", "of the time is the control itself"),
        "eq14": (promised, "x", "contradicts", f"Eq. 14 with the measured T_d / T_t; printed {one.row['speedup']}"),
        "parts": (one.baseline.number("time_s") / total_s, "x", "supports", "the baseline's time over table 8's parts"),
    }
    for name, (value, unit, verdict, text) in figures.items():
        full = f"eesd.breakdown.{slug(target, SHORT[method])}.{name}"
        yield finding(full, value, unit, verdict, text, row.place(), one.row.place(), erratum="A15")
    yield finding(
        f"eesd.breakdown.{slug(target, SHORT[method])}.eq14_error",
        100 * (promised / one.speedup - 1),
        "%",
        error_range.low <= 0,
        "by so much Eq. 14 with the measured T_d / T_t promises too much",
        row.place(),
        one.row.place(),
        within=error_range,
        erratum="A15",
    )
