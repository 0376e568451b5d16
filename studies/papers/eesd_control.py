"""EESD: how long its drafts are by v_d and r_d, and which reading of Thompson control can draft so."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from scipy.optimize import brentq

from specsim.arrays import Floats
from specsim.speedup.formulas import eq14_speedup, mean_tokens_per_round
from studies.papers.eesd import percent_hm
from studies.papers.eesd_runs import (
    BETA,
    DETAILED,
    SHORT,
    Run,
    accept_prob,
    accepted_per_round,
    drafted_per_round,
    implied_cost_ratio,
    output_tokens,
    run,
    runs,
)
from studies.papers.record import Finding, Verdict, finding, slug
from studies.papers.tables import Interval, image, read_table, stated

FAR_BELOW = 0.8  # of the stated length; last rounds are cut short, and a ratio of means is no mean of ratios
FIXED = {
    "Vanilla SD": "vanilla_and_self_draft_tokens",
    "Self SD": "vanilla_and_self_draft_tokens",
    "Medusa": "medusa_heads",
}
UNUSUAL = {  # errata of rows whose length is not the stated one
    "gsm8k.llama_2_13b.vanilla_tinyllama_1_1b": "F7",
    "xsum.llama_2_70b_chat.vanilla_llama_2_7b_chat": "F3",
    "humaneval.codellama_2_13b.medusa": "F8",
    "mt_bench.llama_2_13b.medusa": "F8",
    "mt_bench.vicuna_13b.vanilla_vicuna_7b": "F9",
}
PRIOR_MEANS = np.arange(25, 50) / 50
PRIOR_WEIGHTS = 10 ** (np.arange(51) / 10)  # in observed tokens
STEPS = 24  # of the differential equation
SHORT_DRAFT = 4


def audit() -> Iterator[Finding]:
    """All findings of this file."""
    yield from lengths()
    yield from readings()
    yield from priors()
    yield from fixed_k_rows()


def lengths() -> Iterator[Finding]:
    """Tokens accepted and drafted per round, beside the stated draft length."""
    by_method: dict[str, list[float]] = {}
    for one in runs():
        drafted = drafted_per_round(one.v_d, one.r_d)
        by_method.setdefault(one.method, []).append(drafted)
        yield finding(
            f"eesd.accepted_per_round.{one.slug}",
            accepted_per_round(one.r_d),
            "tokens",
            "supports",
            "accepted per round by r_d",
            one.row.place("r_d"),
            within=image(accepted_per_round, *one.intervals("r_d")),
        )
        yield length(one, drafted)
    for method, values in by_method.items():
        yield finding(
            f"eesd.draft_length.{slug(SHORT[method])}",
            float(np.mean(values)),
            "tokens",
            "contradicts" if method == "Self SD" else "supports",
            "mean draft length over rows; range over rows" + ("; its stop was active" if method == "Self SD" else ""),
            *DETAILED,
            within=Interval.over(values),
            erratum="A17" if method == "Self SD" else "",
        )


def length(one: Run, drafted: float) -> Finding:
    """One run's draft length."""
    allowed = image(drafted_per_round, *one.intervals("v_d", "r_d"))
    verdict: Verdict = "supports"
    told = ""
    if one.method in FIXED:
        told = stated("eesd", FIXED[one.method])["value"]
        low_enough = allowed.low <= float(told)
        verdict = "supports" if low_enough and drafted >= FAR_BELOW * float(told) else "contradicts"
    erratum = "A17" if one.method == "Self SD" else UNUSUAL[one.slug] if verdict == "contradicts" else ""
    return finding(
        f"eesd.drafted_per_round.{one.slug}",
        drafted,
        "tokens",
        verdict,
        "drafted per round by v_d and r_d" + (f", stated {told}" if told else ""),
        one.row.place(),
        within=allowed,
        erratum=erratum,
    )


def printed_rule(accept: Floats | float) -> Floats:
    """Long-run mean of the posterior where |Q_v| counts the target's token: theta = p / (1 + (1 - p) theta)."""
    reject = 1 - np.asarray(accept)
    return (np.sqrt(1 + 4 * reject * accept) - 1) / (2 * reject)


def readings() -> Iterator[Finding]:
    """What each reading of Algorithm 2 would draft in the long run, beside what the tables say."""
    group = [one for one in runs() if one.method == BETA]
    drafted = np.array([drafted_per_round(one.v_d, one.r_d) for one in group])
    go_on, accept = np.array([accept_prob(one.v_d, one.r_d) for one in group]).T
    lengths = {
        "literal": np.ones(len(group)),
        "printed": 1 / (1 - printed_rule(accept)),
        "exact": 1 / (1 - accept),
        "constant": np.full(len(group), drafted.mean()),
    }
    for i, one in enumerate(group):
        place, name = one.row.place(), slug(one.dataset, one.target)
        for what, value, text in (
            ("go_on", go_on[i], "chance that drafting continues, by the draft length"),
            ("accept_prob", accept[i], "chance that a token is accepted, i.i.d., by v_d and r_d"),
            ("go_on_printed", printed_rule(accept[i]), "the same in the long run, by the printed n"),
        ):
            yield finding(f"eesd.{what}.{name}", float(value), "", "supports", text, place, erratum="A3")
        for what in ("printed", "exact"):
            full = f"eesd.length_{what}.{name}"
            text = f"tokens a round in the long run with the {what} n; the tables say {drafted[i]:.2f}"
            yield finding(full, lengths[what][i], "tokens", "cannot decide", text, place, erratum="A3")
    for what, predicted in lengths.items():
        yield finding(
            f"eesd.length_error.{what}",
            float(np.sqrt(np.mean((predicted - drafted) ** 2))),
            "tokens",
            "contradicts" if what == "literal" else "cannot decide",
            f"root mean square error of the 12 draft lengths, {what} reading",
            *DETAILED,
            within=None if what == "literal" else Interval(predicted.min(), predicted.max()),
            erratum="A2" if what == "literal" else "A3",
        )
    spread = Interval(accept.min(), accept.max())
    text = "lengths hardly move while acceptance does: its least and largest; range over rows"
    yield finding(
        "eesd.accept_prob_range",
        spread.high - spread.low,
        "",
        "cannot decide",
        text,
        *DETAILED,
        within=spread,
        erratum="A3",
    )


def clamped_rule(accept: Floats, theta: Floats) -> Floats:
    return accept**2 * theta


def averaged(rule: Callable[[Floats, Floats], Floats], observed: Floats, accept: Floats) -> Floats:
    """The posterior's mean over a generation, [weights, means, runs]: d theta / d o = (rule - theta) / (n0 + o)."""
    weight = PRIOR_WEIGHTS[:, None, None]
    theta = np.broadcast_to(PRIOR_MEANS[None, :, None], (len(PRIOR_WEIGHTS), len(PRIOR_MEANS), len(accept)))
    step, total = observed / STEPS, np.zeros(theta.shape)
    for k in range(STEPS):
        grown = np.log((weight + (k + 1) * step) / (weight + k * step))
        middle = theta + grown / 2 * (rule(accept, theta) - theta)
        theta = theta + grown * (rule(accept, middle) - middle)
        total += middle
    return np.asarray(total / STEPS)


def priors() -> Iterator[Finding]:
    """The prior that each reading needs for the published lengths."""
    group = [one for one in runs() if one.method == BETA]
    drafted = np.array([drafted_per_round(one.v_d, one.r_d) for one in group])
    rounds = np.array([output_tokens() / (accepted_per_round(one.r_d) + 1) for one in group])
    theta, accept = np.array([accept_prob(one.v_d, one.r_d) for one in group]).T
    judged = rounds / (1 - accept * theta)  # tokens that the target judges: accepted ones and the first rejected
    printed = rounds * (1 + (1 - accept) * theta) / (1 - accept * theta)
    rules: dict[str, tuple[Callable[[Floats, Floats], Floats], Floats]] = {
        "clamped": (clamped_rule, judged),
        "printed": (lambda p, mean: p / (1 + (1 - p) * mean), printed),
        "exact": (lambda p, mean: p + 0 * mean, judged),
    }
    for name, (rule, observed) in rules.items():
        means = averaged(rule, observed, accept)
        squares = ((means - theta) ** 2).sum(axis=2)
        i, j = np.unravel_index(int(squares.argmin()), squares.shape)
        lengths = 1 / (1 - means[i, j])
        figures = {
            "mean": (PRIOR_MEANS[j], "", "mean of the prior that fits the published lengths best"),
            "weight": (PRIOR_WEIGHTS[i], "tokens", "weight of that prior in observed tokens"),
            "theta_error": (np.sqrt(squares[i, j] / len(group)), "", "root mean square error of theta with it"),
            "length_error": (np.sqrt(np.mean((lengths - drafted) ** 2)), "tokens", "of the draft lengths with it"),
        }
        for what, (value, unit, text) in figures.items():
            full = f"eesd.prior.{name}.{what}"
            yield finding(full, float(value), unit, "cannot decide", f"{text}, {name} reading", *DETAILED, erratum="A3")


def of_fixed_k(accept: float, length: float) -> tuple[float, float]:
    """v_d and r_d of drafts of a fixed length, i.i.d. acceptance."""
    accepted = float(mean_tokens_per_round(accept, length)) - 1
    return accepted / length, accepted / (accepted + 1)


def accept_prob_of_hm(hm_percent: float, length: float) -> float:
    """The chance that a token is accepted, i.i.d., for which drafts of a fixed length have this HM."""
    return float(brentq(lambda accept: percent_hm(*of_fixed_k(accept, length)) - hm_percent, 0.3, 0.99))


def fixed_k_rows() -> Iterator[Finding]:
    """Table 4's row without control, K = 10: predicted from Beta-TS, and what it says of K = 4."""
    longest = stated("eesd", "ablation_draft_tokens").number("value")
    for dataset in ("gsm8k", "xsum"):
        one = run(dataset, "LLaMA-2-13B", BETA)
        row = read_table("eesd_4").row("w/o TS, K = 10", dataset)
        ratio = implied_cost_ratio(one.v_d, one.r_d, one.speedup)
        _, accept = accept_prob(one.v_d, one.r_d)
        v_d, r_d = of_fixed_k(accept, longest)
        own = accept_prob_of_hm(row.number("hm_percent"), longest)
        own_v, own_r = of_fixed_k(own, longest)
        own_ratio = implied_cost_ratio(own_v, own_r, row.number("speedup"))
        short = of_fixed_k(own, SHORT_DRAFT)
        at_4, at_4_own = (float(eq14_speedup(*short, each)) for each in (ratio, own_ratio))
        most = one.intervals("speedup")[0].high
        figures: dict[str, tuple[float, str, Verdict, str, str]] = {
            "hm_from_beta_ts": (
                percent_hm(v_d, r_d),
                "%",
                "contradicts",
                f"HM of K = 10 by Beta-TS's row, i.i.d.; printed {row['hm_percent']}",
                "F11",
            ),
            "speedup_from_beta_ts": (
                float(eq14_speedup(v_d, r_d, ratio)),
                "x",
                "contradicts",
                f"speedup of K = 10 by Beta-TS's row, i.i.d.; printed {row['speedup']}",
                "F11",
            ),
            "accept_prob_beta_ts": (accept, "", "cannot decide", "acceptance by Beta-TS's row, i.i.d.", ""),
            "accept_prob": (own, "", "cannot decide", "acceptance that gives the printed HM at K = 10, i.i.d.", ""),
            "v_d": (own_v, "", "cannot decide", "v_d of that", ""),
            "r_d": (own_r, "", "cannot decide", "r_d of that", ""),
            "cost_ratio": (own_ratio, "", "supports", f"T_d / T_t of that; {ratio:.3f} by Beta-TS's row", ""),
            "speedup_at_4": (
                at_4,
                "x",
                "contradicts" if at_4 > most else "supports",
                f"speedup of K = 4 by that, i.i.d., T_d / T_t of Beta-TS; Beta-TS prints {one.row['speedup']}",
                "A3",
            ),
            "speedup_at_4_own_ratio": (
                at_4_own,
                "x",
                "contradicts" if at_4_own > most else "supports",
                f"the same with the T_d / T_t of the K = 10 row; Beta-TS prints {one.row['speedup']}",
                "A3",
            ),
        }
        for what, (value, unit, verdict, text, erratum) in figures.items():
            places = (row.place(), one.row.place())
            yield finding(f"eesd.fixed_k.{dataset}.{what}", value, unit, verdict, text, *places, erratum=erratum)
