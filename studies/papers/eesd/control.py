"""EESD: draft lengths by v_d and r_d, and which reading of Thompson control can draft so."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from scipy.optimize import brentq

from specsim.acceptance.formulas import eq14_speedup, mean_tokens_per_round
from specsim.io.arrays import Floats
from studies.papers.eesd.arithmetic import percent_hm
from studies.papers.eesd.runs import (
    BETA,
    DETAILED,
    SHORT,
    Run,
    accepted_per_round,
    drafted_per_round,
    find_run,
    implied_cost_ratio,
    output_tokens,
    runs,
)
from studies.papers.record import Finding, Verdict, finding, mean_finding, slug
from studies.papers.tables import Interval, read_table, recompute, stated

FAR_BELOW = 0.8  # of the stated length; last rounds are cut short, and a ratio of means is not the mean of ratios
FIXED = {
    "Vanilla SD": "vanilla_and_self_draft_tokens",
    "Self SD": "vanilla_and_self_draft_tokens",
    "Medusa": "medusa_heads",
}
UNUSUAL = {  # errata of rows whose length differs from the stated length
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
    """Yield all findings of this module."""
    yield from lengths()
    yield from readings()
    yield from priors()
    yield from fixed_k_rows()


def lengths() -> Iterator[Finding]:
    """Tokens accepted and drafted per round, and the stated draft length."""
    by_method: dict[str, list[float]] = {}
    for run in runs():
        by_method.setdefault(run.method, []).append(run.drafted)
        accepted, allowed = recompute(accepted_per_round, run.row["r_d"])
        name, place = f"eesd.accepted_per_round.{run.slug}", run.row.place("r_d")
        yield finding(name, accepted, "tokens", "supports", "accepted per round by r_d", place, within=allowed)
        yield length(run)
    for method, values in by_method.items():
        stopped = method == "Self SD"
        yield mean_finding(
            f"eesd.draft_length.{slug(SHORT[method])}",
            values,
            "tokens",
            not stopped,
            "mean draft length over rows" + ("; its early stop was active" if stopped else ""),
            *DETAILED,
            erratum="A17" if stopped else "",
        )


def length(run: Run) -> Finding:
    """Draft length of a run."""
    drafted, allowed = recompute(drafted_per_round, *run.cells("v_d", "r_d"))
    text, agrees = "drafted per round by v_d and r_d", True
    if run.method in FIXED:
        row = stated("eesd", FIXED[run.method])
        agrees = allowed.low <= row.number("value") and drafted >= FAR_BELOW * row.number("value")
        text = f"{text}, stated {row['value']}"
    erratum = "A17" if run.method == "Self SD" else "" if agrees else UNUSUAL[run.slug]
    name, place = f"eesd.drafted_per_round.{run.slug}", run.row.place()
    return finding(name, drafted, "tokens", agrees, text, place, within=allowed, erratum=erratum)


def printed_rule(accept: Floats | float) -> Floats:
    """Long-run mean of the posterior if |Q_v| counts the target's token: theta = p / (1 + (1 - p) theta)."""
    reject = 1 - np.asarray(accept)
    return (np.sqrt(1 + 4 * reject * accept) - 1) / (2 * reject)


def readings() -> Iterator[Finding]:
    """Long-run draft length of each reading of Algorithm 2, compared with the tables."""
    group = [run for run in runs() if run.method == BETA]
    drafted = np.array([run.drafted for run in group])
    go_on, accept = np.array([run.accept_prob for run in group]).T
    lengths = {
        "literal": np.ones(len(group)),
        "printed": 1 / (1 - printed_rule(accept)),
        "exact": 1 / (1 - accept),
        "constant": np.full(len(group), drafted.mean()),
    }
    for i, run in enumerate(group):
        for what, value, text in (
            ("go_on", go_on[i], "probability that drafting continues, by the draft length"),
            ("accept_prob", accept[i], "probability that a token is accepted, i.i.d., by v_d and r_d"),
            ("go_on_printed", printed_rule(accept[i]), "the same in the long run, by the printed n"),
        ):
            name = f"eesd.{what}.{slug(run.dataset, run.target)}"
            yield finding(name, float(value), "", "supports", text, run.row.place(), erratum="A3")
        for what in ("printed", "exact"):
            name = f"eesd.length_{what}.{slug(run.dataset, run.target)}"
            text = f"tokens a round in the long run with the {what} n; the tables give {drafted[i]:.2f}"
            yield finding(name, lengths[what][i], "tokens", "cannot decide", text, run.row.place(), erratum="A3")
    for what, predicted in lengths.items():
        error, literal = float(np.sqrt(np.mean((predicted - drafted) ** 2))), what == "literal"
        yield finding(
            f"eesd.length_error.{what}",
            error,
            "tokens",
            "contradicts" if literal else "cannot decide",
            f"root mean square error of the 12 draft lengths, {what} reading",
            *DETAILED,
            within=None if literal else Interval(predicted.min(), predicted.max()),
            erratum="A2" if literal else "A3",
        )
    spread = Interval(accept.min(), accept.max())
    name, value = "eesd.accept_prob_range", spread.high - spread.low
    text = "range of acceptance, while lengths hardly differ; range over rows"
    yield finding(name, value, "", "cannot decide", text, *DETAILED, within=spread, erratum="A3")


def averaged(rule: Callable[[Floats, Floats], Floats], observed: Floats, accept: Floats) -> Floats:
    """Posterior's mean over a generation, [weights, means, runs]: d theta / d o = (rule - theta) / (n0 + o)."""
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
    """Prior that each reading needs for the published lengths."""
    group = [run for run in runs() if run.method == BETA]
    drafted = np.array([run.drafted for run in group])
    rounds = np.array([output_tokens() / (accepted_per_round(run.r_d) + 1) for run in group])
    theta, accept = np.array([run.accept_prob for run in group]).T
    judged = rounds / (
        1 - accept * theta
    )  # tokens that the target judges: accepted tokens and the first rejected token
    printed = rounds * (1 + (1 - accept) * theta) / (1 - accept * theta)
    rules: dict[str, tuple[Callable[[Floats, Floats], Floats], Floats]] = {
        "clamped": (lambda p, mean: p**2 * mean, judged),
        "printed": (lambda p, mean: p / (1 + (1 - p) * mean), printed),
        "exact": (lambda p, mean: p + 0 * mean, judged),
    }
    for reading, (rule, observed) in rules.items():
        means = averaged(rule, observed, accept)
        squares = ((means - theta) ** 2).sum(axis=2)
        i, j = np.unravel_index(int(squares.argmin()), squares.shape)
        lengths = 1 / (1 - means[i, j])
        for what, value, unit, text in (
            ("mean", PRIOR_MEANS[j], "", "mean of the prior that fits the published lengths best"),
            ("weight", PRIOR_WEIGHTS[i], "tokens", "weight of that prior in observed tokens"),
            ("theta_error", np.sqrt(squares[i, j] / len(group)), "", "root mean square error of theta with it"),
            ("length_error", np.sqrt(np.mean((lengths - drafted) ** 2)), "tokens", "of the draft lengths with it"),
        ):
            name, text = f"eesd.prior.{reading}.{what}", f"{text}, {reading} reading"
            yield finding(name, value, unit, "cannot decide", text, *DETAILED, erratum="A3")


def rates_of_fixed_k(accept: float, length: float) -> tuple[float, float]:
    """v_d and r_d of drafts of a fixed length, i.i.d. acceptance."""
    accepted = float(mean_tokens_per_round(accept, length)) - 1
    return accepted / length, accepted / (accepted + 1)


def accept_prob_of_hm(hm_percent: float, length: float) -> float:
    """Acceptance probability, i.i.d., at which drafts of a fixed length have this HM."""
    return float(brentq(lambda accept: percent_hm(*rates_of_fixed_k(accept, length)) - hm_percent, 0.3, 0.99))


def fixed_k_rows() -> Iterator[Finding]:
    """Table 4's row without control, K = 10: predicted from Beta-TS, and what it implies about K = 4."""
    longest = stated("eesd", "ablation_draft_tokens").number("value")
    for dataset in ("gsm8k", "xsum"):
        beta = find_run(dataset, "LLaMA-2-13B", BETA)
        row = read_table("eesd_4").row("w/o TS, K = 10", dataset)
        ratio, (_, accept) = beta.cost_ratio, beta.accept_prob
        v_d, r_d = rates_of_fixed_k(accept, longest)
        own = accept_prob_of_hm(row.number("hm_percent"), longest)
        own_v, own_r = rates_of_fixed_k(own, longest)
        own_ratio = implied_cost_ratio(own_v, own_r, row.number("speedup"))
        short = rates_of_fixed_k(own, SHORT_DRAFT)
        at_4, at_4_own = (float(eq14_speedup(*short, cost_ratio)) for cost_ratio in (ratio, own_ratio))
        most, by_beta = beta.row.interval("speedup").high, "of K = 10 by Beta-TS's row, i.i.d.; printed"
        hm, speedup = percent_hm(v_d, r_d), float(eq14_speedup(v_d, r_d, ratio))
        printed = f"; Beta-TS prints {beta.row['speedup']}"
        text_4 = f"speedup of K = 4 by that, i.i.d., with Beta-TS's T_d / T_t{printed}"
        text_own = f"the same with the T_d / T_t of the K = 10 row{printed}"
        figures: tuple[tuple[str, float, str, Verdict | bool, str, str], ...] = (
            ("hm_from_beta_ts", hm, "%", False, f"HM {by_beta} {row['hm_percent']}", "F11"),
            ("speedup_from_beta_ts", speedup, "x", False, f"speedup {by_beta} {row['speedup']}", "F11"),
            ("accept_prob_beta_ts", accept, "", "cannot decide", "acceptance by Beta-TS's row, i.i.d.", ""),
            ("accept_prob", own, "", "cannot decide", "acceptance that gives the printed HM at K = 10, i.i.d.", ""),
            ("v_d", own_v, "", "cannot decide", "v_d of that", ""),
            ("r_d", own_r, "", "cannot decide", "r_d of that", ""),
            ("cost_ratio", own_ratio, "", True, f"T_d / T_t of that; {ratio:.3f} by Beta-TS's row", ""),
            ("speedup_at_4", at_4, "x", at_4 <= most, text_4, "A3"),
            ("speedup_at_4_own_ratio", at_4_own, "x", at_4_own <= most, text_own, "A3"),
        )
        for what, value, unit, verdict, text, erratum in figures:
            name, places = f"eesd.fixed_k.{dataset}.{what}", (row.place(), beta.row.place())
            yield finding(name, value, unit, verdict, text, *places, erratum=erratum)
