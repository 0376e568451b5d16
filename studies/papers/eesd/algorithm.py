"""Simulation of EESD's algorithms as printed: what they learn and draft (docs/errata.md, A2, A4, A9).

The algorithms draw theta anew for every token, so drafting continues with the posterior's mean and a round's length
is geometric: the simulation draws whole lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from specsim.io.arrays import Floats
from studies.papers.record import Finding, Verdict, finding, slug
from studies.papers.tables import Interval

SOURCE = "eesd: algorithms 1 to 3"
TOKENS = 512
GENERATIONS = 400
ROUNDS = 60_000
READINGS = ("literal", "clamped", "printed", "exact")
ACCEPT_PROBS = (0.55, 0.65, 0.75, 0.82)
FIXED_LENGTH = 4
PRIOR = (6.0, 3.0)  # of the Beta distribution that lengths are drawn with


class Drafting(NamedTuple):
    """Rounds, drafted tokens, accepted tokens, and draws with an invalid Beta parameter, by simulated generation."""

    rounds: Floats
    drafted: Floats
    accepted: Floats
    invalid: Floats


def simulate(accept: float, reading: str, rng: np.random.Generator) -> Drafting:
    """Simulate Beta-TS from a Beta(1, 1) prior under one reading of Algorithm 2's r and n, lines 18 and 19."""
    alpha, beta = np.ones(GENERATIONS), np.ones(GENERATIONS)
    remaining = np.full(GENERATIONS, TOKENS)
    sums = np.zeros((4, GENERATIONS))  # the fields of Drafting
    while (running := remaining > 0).any():
        invalid = (alpha <= 0) | (beta <= 0)
        stop = np.where(invalid, 1.0, beta / np.where(invalid, 1.0, alpha + beta))
        drafted = np.minimum(rng.geometric(stop), np.maximum(remaining, 1))
        accepted = np.minimum(rng.geometric(1 - accept, GENERATIONS) - 1, drafted)
        sums += running * np.stack([np.ones(GENERATIONS), drafted, accepted, invalid * drafted])
        if reading == "printed":  # |Q_v| counts the target's token
            r, n = accepted, np.maximum(np.minimum(accepted + 2, drafted), accepted)
        else:
            r, n = accepted, np.minimum(accepted + 1, drafted)
            if reading != "exact":  # |Q_v| counts accepted tokens alone
                r = accepted - 1 if reading == "literal" else np.maximum(accepted - 1, 0)
        alpha, beta = alpha + running * r, beta + running * (n - r)
        remaining = remaining - running * (accepted + 1)
    return Drafting(*sums)


def ratio_of_sums(above: Floats, below: Floats) -> tuple[float, Interval]:
    """Ratio of two sums over generations, with its 95 % interval."""
    ratio = float(above.sum() / below.sum())
    half = float(1.96 * (above - ratio * below).std(ddof=1) * np.sqrt(len(above)) / below.sum())
    return ratio, Interval(ratio - half, ratio + half)


def audit() -> Iterator[Finding]:
    """Yield all findings of this module."""
    rng = np.random.default_rng(0)
    for accept in ACCEPT_PROBS:
        for reading in READINGS:
            yield from drafting(accept, reading, simulate(accept, reading, rng))
    yield from calibrated(rng)
    yield from redrawn(rng)


def drafting(accept: float, reading: str, simulated: Drafting) -> Iterator[Finding]:
    """Tokens drafted and accepted per round under a reading, at this acceptance probability."""
    verdict: Verdict = "contradicts" if reading in ("literal", "clamped") else "cannot decide"
    erratum = "A2" if verdict == "contradicts" else "A3"
    figures = [
        ("drafted", "tokens", "drafted a round", simulated.drafted, simulated.rounds),
        ("accepted", "tokens", "accepted a round", simulated.accepted, simulated.rounds),
    ]
    if reading == "literal":
        invalid = 100 * simulated.invalid
        figures.append(("invalid", "%", "draws with a Beta parameter of 0 or below", invalid, simulated.drafted))
    for what, unit, text, above, below in figures:
        mean, within = ratio_of_sums(above, below)
        name = f"eesd.simulated_{what}.p{100 * accept:.0f}.{reading}"
        text = f"{text}, {reading} reading at p = {accept}; 95 % of simulations"
        yield finding(name, mean, unit, verdict, text, SOURCE, within=within, erratum=erratum)


def calibrated(rng: np.random.Generator) -> Iterator[Finding]:
    """Eqs. 8 and 10 as printed, (theta_0 + t) / (t + 1), after 512 tokens; and with failures counted too."""
    for accept in (0.3, 0.6, 0.9):
        accepted = np.zeros(GENERATIONS)
        judged, output = accepted.copy(), accepted.copy()
        while (running := output < TOKENS).any():
            in_round = np.minimum(rng.geometric(1 - accept, GENERATIONS) - 1, FIXED_LENGTH)
            accepted += running * in_round
            judged += running * np.minimum(in_round + 1, FIXED_LENGTH)
            output += running * (in_round + 1)
        figures: tuple[tuple[str, Floats, Verdict, str], ...] = (
            ("printed", (0.5 + accepted) / (1 + accepted), "contradicts", f"Eq. 8 after {TOKENS} tokens"),
            ("counted", (0.5 + accepted) / (1 + judged), "cannot decide", "the same with failures counted"),
        )
        for what, values, verdict, text in figures:
            name = f"eesd.calibrated_{what}.{slug(str(accept))}"
            within = Interval(*np.quantile(values, [0.025, 0.975]))
            text = f"{text}, true value {accept}; 95 % of generations"
            yield finding(name, values.mean(), "", verdict, text, SOURCE, within=within, erratum="A4")


def redrawn(rng: np.random.Generator) -> Iterator[Finding]:
    """Mean draft length if theta is drawn for every token, and if it is drawn once a round."""
    alpha, beta = PRIOR
    mean = alpha / (alpha + beta)
    per_round = rng.geometric(1 - rng.beta(alpha, beta, ROUNDS)).astype(float)
    per_token = np.ones(ROUNDS)
    drafting = np.ones(ROUNDS, dtype=bool)
    while drafting.any():
        drafting &= rng.random(ROUNDS) < rng.beta(alpha, beta, ROUNDS)
        per_token += drafting
    for what, exact, lengths, text in (
        ("per_token", 1 / (1 - mean), per_token, "theta drawn for every token, as printed: 1 / (1 - its mean)"),
        ("per_round", (alpha + beta - 1) / (beta - 1), per_round, "theta drawn once a round"),
    ):
        name, text = f"eesd.theta_drawn.{what}", f"mean draft of Beta(6, 3), {text}"
        yield finding(name, exact, "tokens", "cannot decide", text, SOURCE, erratum="A9")
        simulated, within = ratio_of_sums(lengths, np.ones(ROUNDS))
        name, text = f"{name}_simulated", f"{text}, simulated; 95 % interval"
        yield finding(name, simulated, "tokens", "cannot decide", text, SOURCE, within=within, erratum="A9")
