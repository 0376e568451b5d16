"""AdaEDL: acceptance and cost implied by table 1's rates, gains, and the entropy score as a bound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy.optimize import brute, minimize, minimize_scalar

from specsim.acceptance.formulas import adaedl_score, mean_tokens_per_round
from studies.papers.record import Finding, finding, slug
from studies.papers.tables import Interval, read_table, stated

DATASETS = ("cnn_dm", "dolly_15k", "wmt_19")
LENGTHS = (3, 7, 16)
BASELINE, FIXED, CONFIDENCE, OWN = "Autoregressive", "Base-SPD", "Max-Confidence-SPD", "AdaEDL"
MOST_COST = 0.6  # largest T_d / T_t that a fit tries
DRAWS = 20_000
TARGET_PARAMS_M = 6700  # of Llama2-7B
LAMBDAS = (0.2, 0.4, 0.6, 0.8)
FITS = {
    "own": "each data set with its own draft cost",
    "shared": "one draft cost for all",
    "shared_verify": "one draft and one verification cost for all",
}


class Model(NamedTuple):
    """Geometric acceptance: a token's probability, and costs of a draft and a verification in target passes."""

    accept: float
    draft: float
    verify: float

    def speedup(self, length: float) -> float:
        """Speedup of drafts of this length."""
        return float(mean_tokens_per_round(self.accept, length)) / (self.verify + self.draft * length)

    def oracle_speedup(self) -> float:
        """Speedup of drafts that stop exactly where the target stops agreeing: K - 1 = accepted."""
        accepted = self.accept / (1 - self.accept)
        return (accepted + 1) / (self.verify + self.draft * accepted)


@cache
def rates() -> Mapping[tuple[str, str, int], float]:
    """Tokens per second by data set, method and longest draft."""
    return {
        (dataset, row["method"], int(row["max_draft_tokens"])): row.number(dataset)
        for row in read_table("adaedl_1").rows
        for dataset in DATASETS
    }


def baseline(dataset: str) -> float:
    """Tokens per second without speculation."""
    return rates()[dataset, BASELINE, LENGTHS[0]]


def best_rate(dataset: str, method: str) -> float:
    """Tokens per second at the best of the three lengths."""
    return max(rates()[dataset, method, length] for length in LENGTHS)


def audit() -> Iterator[Finding]:
    """Yield all findings of this module."""
    models = {name: fit_models(name) for name in FITS}
    for name in FITS:
        yield from fits(name, models[name])
    costs = [model.draft for model in models["own"].values()]
    text = "largest over smallest draft cost if each data set is fitted alone; models and GPU are the same"
    yield finding("adaedl.own_cost_spread", max(costs) / min(costs), "x", "cannot decide", text, "adaedl_1")
    params = stated("adaedl", "drafter_params").number("value") / TARGET_PARAMS_M
    text = "parameters of drafter over target; the fitted draft cost is far above it, so it is overhead"
    yield finding("adaedl.params_ratio", params, "", "cannot decide", text, "adaedl_stated")
    yield from headroom(models)
    yield from gains()
    yield from text_claims()
    yield from bound()
    yield from threshold()


def squares(dataset: str, model: Model) -> float:
    """Squared log errors of Base-SPD's three rates."""
    return sum(np.log(baseline(dataset) * model.speedup(k) / rates()[dataset, FIXED, k]) ** 2 for k in LENGTHS)


def fit_accept(dataset: str, draft: float, verify: float) -> Model:
    """Model with the acceptance that fits a data set best at these costs."""

    def loss(accept: float) -> float:
        return squares(dataset, Model(accept, draft, verify))

    fit = minimize_scalar(loss, bounds=(0, 0.9999), method="bounded", options={"xatol": 1e-8})
    return Model(float(fit.x), draft, verify)


def loss_of(datasets: Sequence[str], draft: float, verify: float = 1.0) -> float:
    """Squared log errors at these costs, each data set with its best acceptance."""
    return sum(squares(dataset, fit_accept(dataset, draft, verify)) for dataset in datasets)


def least_cost(datasets: Sequence[str]) -> float:
    """Draft cost that fits best; a grid comes first because the error has several minima."""
    grid = np.linspace(0, MOST_COST, 61)
    start = int(np.argmin([loss_of(datasets, draft) for draft in grid]))
    bounds = (grid[max(start - 1, 0)], grid[min(start + 1, len(grid) - 1)])

    def loss(draft: float) -> float:
        return loss_of(datasets, draft)

    return float(minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": 1e-7}).x)


@cache
def fit_models(fit: str) -> Mapping[str, Model]:
    """Models of the data sets by a name in FITS."""
    if fit == "own":
        return {dataset: fit_accept(dataset, least_cost([dataset]), 1.0) for dataset in DATASETS}
    draft, verify = least_cost(DATASETS), 1.0
    if fit == "shared_verify":

        def loss(costs: Sequence[float]) -> float:
            return loss_of(DATASETS, costs[0], costs[1])

        start = brute(loss, (slice(0.0, 0.2, 0.02), slice(0.7, 1.3, 0.1)), finish=None)
        draft, verify = minimize(loss, start, method="Nelder-Mead", options={"xatol": 1e-5, "fatol": 1e-10}).x
    return {dataset: fit_accept(dataset, float(draft), float(verify)) for dataset in DATASETS}


def fits(name: str, models: Mapping[str, Model]) -> Iterator[Finding]:
    """Parameters, rates and error of a fit."""
    for dataset, model in models.items():
        errors = []
        end = slug(name, dataset)
        for length in LENGTHS:
            rate, printed = baseline(dataset) * model.speedup(length), rates()[dataset, FIXED, length]
            errors.append(100 * abs(rate / printed - 1))
            text = f"Base-SPD of {length} tokens, {FITS[name]}; printed {printed:.2f}"
            yield finding(f"adaedl.fit_rate.{end}.k{length}", rate, "tokens/s", "supports", text, "adaedl_1")
        for what, value, unit, text in (
            ("accept_prob", model.accept, "", "probability that a token is accepted"),
            ("draft_cost", model.draft, "", "T_d / T_t"),
            ("verify_cost", model.verify, "", "a verification over T_t"),
            ("error", np.mean(errors), "%", "mean error of the three rates"),
        ):
            yield finding(f"adaedl.fit.{end}.{what}", value, unit, "supports", f"{text}, {FITS[name]}", "adaedl_1")


def headroom(models: Mapping[str, Mapping[str, Model]]) -> Iterator[Finding]:
    """Rates of the best fixed length, of AdaEDL and of an oracle of the draft length."""
    for dataset in DATASETS:
        shared = models["shared"][dataset]
        length = max(range(1, 17), key=shared.speedup)
        own, fixed = best_rate(dataset, OWN), best_rate(dataset, FIXED)
        oracles = {fit: baseline(dataset) * models[fit][dataset].oracle_speedup() for fit in FITS}
        shares = {fit: 100 * (own - fixed) / (oracle - fixed) for fit, oracle in oracles.items()}
        rate, end = baseline(dataset) * shared.speedup(length), slug(dataset)
        for what, value, unit, text in (
            ("best_length", length, "tokens", "the best fixed length by the fit with one draft cost"),
            ("best_length_rate", rate, "tokens/s", "its rate"),
            ("adaedl_rate", own, "tokens/s", "AdaEDL's best printed rate"),
        ):
            yield finding(f"adaedl.headroom.{end}.{what}", value, unit, "cannot decide", text, "adaedl_1")
        for what, by_fit, unit, text in (
            ("oracle_rate", oracles, "tokens/s", "an oracle that drafts what is accepted"),
            ("share", shares, "%", "of the way from the best Base-SPD to the oracle is AdaEDL's"),
        ):
            name, value, within = f"adaedl.headroom.{end}.{what}", by_fit["shared"], Interval.over([*by_fit.values()])
            text += "; range over three fits"
            yield finding(name, value, unit, "cannot decide", text, "adaedl_1", within=within)


def gains() -> Iterator[Finding]:
    """Gains of AdaEDL over the fixed length and over Max-Confidence."""
    over: dict[str, list[float]] = {FIXED: [], CONFIDENCE: []}
    for dataset in DATASETS:
        for length in LENGTHS:
            for method, values in over.items():
                gain = 100 * (rates()[dataset, OWN, length] / rates()[dataset, method, length] - 1)
                values.append(gain)
                name, text = slug(dataset, f"k{length}", method), f"AdaEDL over {method} at most {length} tokens"
                yield finding(f"adaedl.gain.{name}", gain, "%", gain > 0, text, f"adaedl_1: {length}: {dataset}")
        gain = 100 * (best_rate(dataset, OWN) / best_rate(dataset, FIXED) - 1)
        text = "AdaEDL at its best over Base-SPD at its best"
        yield finding(f"adaedl.best_gain.{slug(dataset)}", gain, "%", "supports", text, "adaedl_1")
    fixed, confidence = Interval.over(over[FIXED]), Interval.over(over[CONFIDENCE])
    for what, value in (("min", fixed.low), ("max", fixed.high)):
        row = stated("adaedl", f"gain_over_fixed_{what}")
        text = f"table 1's gains over Base-SPD: {what} {value:.1f} %; the abstract says {row['value']} %"
        name, agrees = f"adaedl.gain_over_fixed.{what}", row.interval("value").contains(value)
        yield finding(name, value, "%", agrees, text, "adaedl_1", row.place(), erratum="F20")
    row = stated("adaedl", "gain_over_adaptive_max")
    text = (
        f"largest gain over Max-Confidence, smallest {confidence.low:.1f} %; the abstract says up to {row['value']} %"
    )
    name, value, places = "adaedl.gain_over_confidence", confidence.high, ("adaedl_1", row.place())
    yield finding(name, value, "%", value <= row.interval("value").high, text, *places, within=confidence)


def text_claims() -> Iterator[Finding]:
    """Ratios that the text quotes for Pythia, and the rate at high temperature."""
    plain, fixed, own = (stated("adaedl", f"pythia_{name}") for name in ("autoregressive", "base_spd", "adaedl"))
    for name, row in (("base_spd", fixed), ("adaedl", own)):
        quoted = stated("adaedl", f"pythia_{name}_gain")
        gain = 100 * (row.number("value") / plain.number("value") - 1)
        agrees, places = quoted.interval("value").contains(gain), (row.place(), quoted.place())
        text = f"over autoregressive decoding, {row['value']} / {plain['value']}; the text says {quoted['value']} %"
        yield finding(f"adaedl.pythia_gain.{name}", gain, "%", agrees, text, *places)
    gain, places = 100 * (own.number("value") / fixed.number("value") - 1), (own.place(), fixed.place())
    yield finding("adaedl.pythia_gain.over_base_spd", gain, "%", "supports", "AdaEDL over Base-SPD", *places)
    drop = stated("adaedl", "base_spd_drop_when_hot")
    remaining = rates()["cnn_dm", FIXED, 3] * (1 - drop.number("value") / 100)
    text = f"Base-SPD of 3 tokens minus {drop['value']} %; the text says it ends below autoregressive decoding"
    agrees, places = remaining < baseline("cnn_dm"), ("adaedl_1: 3, Base-SPD: cnn_dm", drop.place())
    yield finding("adaedl.hot_rate", remaining, "tokens/s", agrees, text, *places)


def bound() -> Iterator[Finding]:
    """Random pairs of distributions: Pinsker's bound on acceptance holds, the entropy score is not a bound."""
    rng = np.random.default_rng(0)
    gamma = stated("adaedl", "entropy_factor").number("value")
    sizes = rng.choice((2, 3, 5, 10), DRAWS)
    inside = np.arange(10) < sizes[:, None]
    pair = []
    for _ in range(2):
        shape = rng.choice((0.1, 0.3, 1.0), DRAWS)[:, None]
        weight = np.where(inside, rng.gamma(np.broadcast_to(shape, inside.shape)) + 1e-12, 0.0)
        pair.append(weight / weight.sum(axis=1, keepdims=True))
    draft, target = pair
    accept = np.minimum(draft, target).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        divergence = np.where(inside, draft * np.log(draft / target), 0.0).sum(axis=1)
        entropy = -np.where(inside, draft * np.log(draft), 0.0).sum(axis=1)
    violated = int((1 - np.sqrt(np.maximum(divergence, 0) / 2) > accept + 1e-9).sum())
    above = adaedl_score(entropy, gamma) > accept + 1e-9
    share, half = 100 * above.mean(), 196 * above.std() / np.sqrt(DRAWS)
    source, text = "adaedl: appendix B", f"violations of Pinsker's bound in {DRAWS} random pairs"
    yield finding("adaedl.pinsker_violations", violated, "pairs", violated == 0, text, source, erratum="D8")
    text = "of these pairs have a score above the true acceptance: it is not a bound; 95 % of simulations"
    name, within = "adaedl.score_above_acceptance", Interval(share - half, share + half)
    yield finding(name, share, "%", "contradicts", text, source, within=within, erratum="D8")


def threshold() -> Iterator[Finding]:
    """Speed of the threshold's adaptation, and entropies at which drafting stops."""
    memory, step, gamma = (
        stated("adaedl", name).number("value") for name in ("threshold_memory", "threshold_step", "entropy_factor")
    )
    change = (1 - memory) * step
    figures = [
        ("threshold_step", change, "", "change of lambda per round", "D2"),
        ("threshold_rounds", 0.1 / change, "rounds", "rounds in which lambda changes by 0.1", "D2"),
    ]
    for value in LAMBDAS:
        name, text = f"stop_entropy.{slug(str(value))}", f"entropy at which drafting stops at lambda {value}"
        figures.append((name, (1 - value) ** 2 / gamma, "nats", text, "D6"))
    for name, value, unit, text, erratum in figures:
        yield finding(f"adaedl.{name}", value, unit, "cannot decide", text, "adaedl_stated", erratum=erratum)
