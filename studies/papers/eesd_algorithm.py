"""EESD's algorithms as printed, simulated: what they learn, and what they draft (docs/errata.md, A2, A4, A9).

Theta is drawn anew for every token there, so drafting continues with the posterior's mean and a round's length is
geometric: lengths are drawn at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from specsim.arrays import Floats
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
    """Of each simulated generation: its rounds, tokens drafted and accepted, and draws without a distribution."""

    rounds: Floats
    drafted: Floats
    accepted: Floats
    invalid: Floats


def simulate(accept: float, reading: str, rng: np.random.Generator) -> Drafting:
    """Beta-TS from a Beta(1, 1) prior under one reading of Algorithm 2's r and n, lines 18 and 19."""
    alpha, beta = np.ones(GENERATIONS), np.ones(GENERATIONS)
    left = np.full(GENERATIONS, TOKENS)
    sums = np.zeros((4, GENERATIONS))  # rounds, drafted, accepted, draws without a distribution
    while (running := left > 0).any():
        invalid = (alpha <= 0) | (beta <= 0)
        stop = np.where(invalid, 1.0, beta / np.where(invalid, 1.0, alpha + beta))
        drafted = np.minimum(rng.geometric(stop), np.maximum(left, 1))
        accepted = np.minimum(rng.geometric(1 - accept, GENERATIONS) - 1, drafted)
        sums += running * np.stack([np.ones(GENERATIONS), drafted, accepted, invalid * drafted])
        if reading == "printed":  # |Q_v| counts the target's token
            r, n = accepted, np.maximum(np.minimum(accepted + 2, drafted), accepted)
        else:
            r, n = accepted, np.minimum(accepted + 1, drafted)
            if reading != "exact":  # |Q_v| is what was accepted
                r = accepted - 1 if reading == "literal" else np.maximum(accepted - 1, 0)
        alpha, beta = alpha + running * r, beta + running * (n - r)
        left = left - running * (accepted + 1)
    return Drafting(*sums)


def per(above: Floats, below: Floats) -> tuple[float, Interval]:
    """Ratio of two sums over generations, with its 95 % interval."""
    ratio = float(above.sum() / below.sum())
    half = float(1.96 * (above - ratio * below).std(ddof=1) * np.sqrt(len(above)) / below.sum())
    return ratio, Interval(ratio - half, ratio + half)


def audit() -> Iterator[Finding]:
    """All findings of this file."""
    rng = np.random.default_rng(0)
    for accept in ACCEPT_PROBS:
        for reading in READINGS:
            yield from drafting(accept, reading, simulate(accept, reading, rng))
    yield from calibrated(rng)
    yield from redrawn(rng)


def drafting(accept: float, reading: str, of: Drafting) -> Iterator[Finding]:
    """What a reading drafts where tokens are accepted with this chance."""
    erratum = "A2" if reading in ("literal", "clamped") else "A3"
    verdict: Verdict = "contradicts" if erratum == "A2" else "cannot decide"
    end = f"p{100 * accept:.0f}.{reading}"
    about = f"of the {reading} reading where p = {accept}; 95 % of simulations"
    for what, values in (("drafted", of.drafted), ("accepted", of.accepted)):
        name, text = f"eesd.simulated_{what}.{end}", f"{what} a round, {about}"
        mean, within = per(values, of.rounds)
        yield finding(name, mean, "tokens", verdict, text, SOURCE, within=within, erratum=erratum)
    if reading == "literal":
        name, text = f"eesd.simulated_invalid.{end}", f"draws with a Beta parameter of 0 or below, {about}"
        share, within = per(100 * of.invalid, of.drafted)
        yield finding(name, share, "%", verdict, text, SOURCE, within=within, erratum=erratum)


def calibrated(rng: np.random.Generator) -> Iterator[Finding]:
    """Eqs. 8 and 10 as printed, (theta_0 + t) / (t + 1), after 512 tokens, and with failures counted too."""
    for accept in (0.3, 0.6, 0.9):
        accepted = np.zeros(GENERATIONS)
        judged, output = accepted.copy(), accepted.copy()
        while (running := output < TOKENS).any():
            got = np.minimum(rng.geometric(1 - accept, GENERATIONS) - 1, FIXED_LENGTH)
            accepted += running * got
            judged += running * np.minimum(got + 1, FIXED_LENGTH)
            output += running * (got + 1)
        literal, counted = (0.5 + accepted) / (1 + accepted), (0.5 + accepted) / (1 + judged)
        figures: tuple[tuple[str, Floats, Verdict, str], ...] = (
            ("printed", literal, "contradicts", f"Eq. 8 after {TOKENS} tokens where {accept} is true"),
            ("counted", counted, "cannot decide", f"the same with failures counted where {accept} is true"),
        )
        for what, values, verdict, text in figures:
            name = f"eesd.calibrated_{what}.{slug(str(accept))}"
            low, high = np.quantile(values, [0.025, 0.975])
            full = f"{text}; 95 % of generations"
            yield finding(name, values.mean(), "", verdict, full, SOURCE, within=Interval(low, high), erratum="A4")


def redrawn(rng: np.random.Generator) -> Iterator[Finding]:
    """Mean draft length where theta is drawn for every token, and once a round."""
    alpha, beta = PRIOR
    mean = alpha / (alpha + beta)
    per_round = rng.geometric(1 - rng.beta(alpha, beta, ROUNDS)).astype(float)
    per_token = np.ones(ROUNDS)
    going = np.ones(ROUNDS, dtype=bool)
    while going.any():
        going &= rng.random(ROUNDS) < rng.beta(alpha, beta, ROUNDS)
        per_token += going
    for what, exact, values, text in (
        ("per_token", 1 / (1 - mean), per_token, "theta drawn for every token, as printed: 1 / (1 - its mean)"),
        ("per_round", (alpha + beta - 1) / (beta - 1), per_round, "theta drawn once a round"),
    ):
        name = f"eesd.theta_drawn.{what}"
        yield finding(name, exact, "tokens", "cannot decide", f"mean draft of Beta(6, 3), {text}", SOURCE, erratum="A9")
        simulated, within = per(values, np.ones(ROUNDS))
        text = f"{text}, simulated; 95 % interval"
        full = f"{name}_simulated"
        yield finding(full, simulated, "tokens", "cannot decide", text, SOURCE, within=within, erratum="A9")
