"""AdaEDL: what table 1's rates say of acceptance and cost, gains, and the entropy score as a bound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy.optimize import brute, minimize, minimize_scalar

from specsim.speedup.formulas import adaedl_score, mean_tokens_per_round
from studies.papers.record import Finding, Verdict, finding, slug
from studies.papers.tables import Interval, read_table, stated

DATASETS = ("cnn_dm", "dolly_15k", "wmt_19")
LENGTHS = (3, 7, 16)
BASELINE, FIXED, CONFIDENCE, OWN = "Autoregressive", "Base-SPD", "Max-Confidence-SPD", "AdaEDL"
MOST_COST = 0.6  # T_d / T_t where a fit looks
DRAWS = 20_000
TARGET_PARAMS_M = 6700  # of Llama2-7B
LAMBDAS = (0.2, 0.4, 0.6, 0.8)


class Model(NamedTuple):
    """Geometric acceptance: a token's chance, a draft's cost and a verification's, in target passes."""

    accept: float
    draft: float
    verify: float

    def speedup(self, length: float) -> float:
        """Of drafts of this length."""
        return float(mean_tokens_per_round(self.accept, length)) / (self.verify + self.draft * length)

    def oracle_speedup(self) -> float:
        """Of drafts that stop exactly where the target stops agreeing: K - 1 = accepted."""
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


def audit() -> Iterator[Finding]:
    """All findings of this file."""
    shared = fit_shared()
    yield from fits("own", own := {dataset: fit_own(dataset) for dataset in DATASETS})
    yield from fits("shared", shared)
    yield from fits("shared_verify", fit_shared(verify=True))
    costs = [model.draft for model in own.values()]
    text = "largest over least draft cost where each data set is fitted alone; models and GPU are the same"
    yield finding("adaedl.own_cost_spread", max(costs) / min(costs), "x", "cannot decide", text, "adaedl_1")
    params = stated("adaedl", "drafter_params").number("value") / TARGET_PARAMS_M
    text = "parameters of drafter over target; the fitted draft cost is far above it, so it is overhead"
    yield finding("adaedl.params_ratio", params, "", "cannot decide", text, "adaedl_stated")
    yield from headroom(own, shared)
    yield from gains()
    yield from text_claims()
    yield from bound()
    yield from threshold()


def squares(dataset: str, model: Model) -> float:
    """Squared log errors of Base-SPD's three rates."""
    baseline = rates()[dataset, BASELINE, LENGTHS[0]]
    return sum(np.log(baseline * model.speedup(k) / rates()[dataset, FIXED, k]) ** 2 for k in LENGTHS)


def fit_accept(dataset: str, draft: float, verify: float) -> Model:
    """The acceptance that fits a data set best at these costs."""

    def loss(accept: float) -> float:
        return squares(dataset, Model(accept, draft, verify))

    return Model(
        float(minimize_scalar(loss, bounds=(0, 0.9999), method="bounded", options={"xatol": 1e-8}).x), draft, verify
    )


def loss_of(datasets: Sequence[str], draft: float, verify: float = 1.0) -> float:
    return sum(squares(dataset, fit_accept(dataset, draft, verify)) for dataset in datasets)


def least_cost(datasets: Sequence[str]) -> float:
    """The draft cost that fits best; the error has several minima, so a grid comes first."""
    grid = np.linspace(0, MOST_COST, 61)
    start = int(np.argmin([loss_of(datasets, draft) for draft in grid]))
    bounds = (grid[max(start - 1, 0)], grid[min(start + 1, len(grid) - 1)])
    found = minimize_scalar(
        lambda draft: loss_of(datasets, draft), bounds=bounds, method="bounded", options={"xatol": 1e-7}
    )
    return float(found.x)


@cache
def fit_own(dataset: str) -> Model:
    """Acceptance and draft cost of one data set."""
    return fit_accept(dataset, least_cost([dataset]), 1.0)


@cache
def fit_shared(*, verify: bool = False) -> Mapping[str, Model]:
    """One draft cost, and verification cost where asked, for all data sets."""
    draft, passes = least_cost(DATASETS), 1.0
    if verify:

        def loss(costs: Sequence[float]) -> float:
            return loss_of(DATASETS, costs[0], costs[1])

        start = brute(loss, (slice(0.0, 0.2, 0.02), slice(0.7, 1.3, 0.1)), finish=None)
        draft, passes = minimize(loss, start, method="Nelder-Mead", options={"xatol": 1e-5, "fatol": 1e-10}).x
    return {dataset: fit_accept(dataset, float(draft), float(passes)) for dataset in DATASETS}


def fits(name: str, models: Mapping[str, Model]) -> Iterator[Finding]:
    """A fit's parameters, its rates and its error."""
    words = {
        "own": "each data set with a draft cost of its own",
        "shared": "one draft cost for all",
        "shared_verify": "one draft and one verification cost for all",
    }[name]
    for dataset, model in models.items():
        errors = []
        end = slug(name, dataset)
        for length in LENGTHS:
            rate = rates()[dataset, BASELINE, LENGTHS[0]] * model.speedup(length)
            printed = rates()[dataset, FIXED, length]
            errors.append(100 * abs(rate / printed - 1))
            text = f"Base-SPD of {length} tokens, {words}; printed {printed:.2f}"
            yield finding(f"adaedl.fit_rate.{end}.k{length}", rate, "tokens/s", "supports", text, "adaedl_1")
        for what, value, unit, text in (
            ("accept_prob", model.accept, "", "chance that a token is accepted"),
            ("draft_cost", model.draft, "", "T_d / T_t"),
            ("verify_cost", model.verify, "", "a verification over T_t"),
            ("error", float(np.mean(errors)), "%", "mean error of the three rates"),
        ):
            yield finding(f"adaedl.fit.{end}.{what}", value, unit, "supports", f"{text}, {words}", "adaedl_1")


def headroom(own: Mapping[str, Model], shared: Mapping[str, Model]) -> Iterator[Finding]:
    """What the best fixed length, AdaEDL and an oracle of the draft length reach."""
    alternatives = (own, shared, fit_shared(verify=True))
    for dataset, model in shared.items():
        baseline = rates()[dataset, BASELINE, LENGTHS[0]]
        length = max(range(1, 17), key=model.speedup)
        best = {name: max(rates()[dataset, name, k] for k in LENGTHS) for name in (FIXED, OWN)}
        oracles = [baseline * each[dataset].oracle_speedup() for each in alternatives]
        oracle = baseline * model.oracle_speedup()
        shares = [100 * (best[OWN] - best[FIXED]) / (each - best[FIXED]) for each in oracles]
        share = 100 * (best[OWN] - best[FIXED]) / (oracle - best[FIXED])
        figures: tuple[tuple[str, float, str, str, Interval | None], ...] = (
            ("best_length", length, "tokens", "the best fixed length by the fit with one draft cost", None),
            ("best_length_rate", baseline * model.speedup(length), "tokens/s", "its rate", None),
            ("adaedl_rate", best[OWN], "tokens/s", "AdaEDL's best printed rate", None),
            (
                "oracle_rate",
                oracle,
                "tokens/s",
                "an oracle that drafts what is accepted; range over three fits",
                Interval.over(oracles),
            ),
            (
                "share",
                share,
                "%",
                "of the way from the best Base-SPD to the oracle is AdaEDL's; range over three fits",
                Interval.over(shares),
            ),
        )
        for what, value, unit, text, within in figures:
            yield finding(
                f"adaedl.headroom.{slug(dataset)}.{what}", value, unit, "cannot decide", text, "adaedl_1", within=within
            )


def gains() -> Iterator[Finding]:
    """AdaEDL over the fixed length and over Max-Confidence."""
    over: dict[str, list[float]] = {FIXED: [], CONFIDENCE: []}
    for dataset in DATASETS:
        for length in LENGTHS:
            for other, values in over.items():
                gain = 100 * (rates()[dataset, OWN, length] / rates()[dataset, other, length] - 1)
                values.append(gain)
                text = f"AdaEDL over {other} at most {length} tokens"
                full = f"adaedl.gain.{slug(dataset, f'k{length}', other)}"
                yield finding(full, gain, "%", gain > 0, text, f"adaedl_1: {length}: {dataset}")
        best = [max(rates()[dataset, name, k] for k in LENGTHS) for name in (OWN, FIXED)]
        text = "AdaEDL at its best over Base-SPD at its best"
        yield finding(
            f"adaedl.best_gain.{slug(dataset)}", 100 * (best[0] / best[1] - 1), "%", "supports", text, "adaedl_1"
        )
    low, high, most = (stated("adaedl", f"gain_over_{name}") for name in ("fixed_min", "fixed_max", "adaptive_max"))
    for what, value, said in (("min", min(over[FIXED]), low), ("max", max(over[FIXED]), high)):
        agrees = said.interval("value").meets(Interval(value, value))
        text = f"table 1's gains over Base-SPD: {what} {value:.1f} %; the abstract says {said['value']} %"
        yield finding(
            f"adaedl.gain_over_fixed.{what}", value, "%", agrees, text, "adaedl_1", said.place(), erratum="F20"
        )
    values = over[CONFIDENCE]
    agrees = max(values) <= most.interval("value").high
    text = f"largest gain over Max-Confidence, least {min(values):.1f} %; the abstract says up to {most['value']} %"
    yield finding(
        "adaedl.gain_over_confidence",
        max(values),
        "%",
        agrees,
        text,
        "adaedl_1",
        most.place(),
        within=Interval.over(values),
    )


def text_claims() -> Iterator[Finding]:
    """Ratios that the text quotes of Pythia, and what is left at high temperature."""
    plain, fixed, own = (stated("adaedl", f"pythia_{name}") for name in ("autoregressive", "base_spd", "adaedl"))
    for name, row in (("base_spd", fixed), ("adaedl", own)):
        said = stated("adaedl", f"pythia_{name}_gain")
        gain = 100 * (row.number("value") / plain.number("value") - 1)
        agrees = said.interval("value").meets(Interval(gain, gain))
        text = f"over autoregressive decoding, {row['value']} / {plain['value']}; the text says {said['value']} %"
        yield finding(f"adaedl.pythia_gain.{name}", gain, "%", agrees, text, row.place(), said.place())
    gain = 100 * (own.number("value") / fixed.number("value") - 1)
    yield finding(
        "adaedl.pythia_gain.over_base_spd", gain, "%", "supports", "AdaEDL over Base-SPD", own.place(), fixed.place()
    )
    drop = stated("adaedl", "base_spd_drop_when_hot")
    left = rates()["cnn_dm", FIXED, 3] * (1 - drop.number("value") / 100)
    below = left < rates()["cnn_dm", BASELINE, 3]
    text = f"Base-SPD of 3 tokens less {drop['value']} %; the text says it ends below autoregressive decoding"
    yield finding("adaedl.hot_rate", left, "tokens/s", below, text, "adaedl_1: 3, Base-SPD: cnn_dm", drop.place())


def bound() -> Iterator[Finding]:
    """Random pairs of distributions: Pinsker's bound on acceptance holds, the entropy score is none."""
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
    text = f"violations of Pinsker's bound in {DRAWS} random pairs"
    yield finding(
        "adaedl.pinsker_violations", violated, "pairs", violated == 0, text, "adaedl: appendix B", erratum="D8"
    )
    text = "of these pairs have a score above the true acceptance: it bounds nothing; 95 % of simulations"
    within = Interval(share - half, share + half)
    yield finding(
        "adaedl.score_above_acceptance",
        share,
        "%",
        "contradicts",
        text,
        "adaedl: appendix B",
        within=within,
        erratum="D8",
    )


def threshold() -> Iterator[Finding]:
    """How slowly the threshold moves, and the entropies at which drafting stops."""
    memory, step, gamma = (
        stated("adaedl", name).number("value") for name in ("threshold_memory", "threshold_step", "entropy_factor")
    )
    change = (1 - memory) * step
    yield finding(
        "adaedl.threshold_step",
        change,
        "",
        "cannot decide",
        "change of lambda per round",
        "adaedl_stated",
        erratum="D2",
    )
    text = "rounds in which lambda moves by 0.1"
    yield finding(
        "adaedl.threshold_rounds", 0.1 / change, "rounds", "cannot decide", text, "adaedl_stated", erratum="D2"
    )
    verdict: Verdict = "cannot decide"
    for value in LAMBDAS:
        entropy = (1 - value) ** 2 / gamma
        text = f"entropy at which drafting stops at lambda {value}"
        full = f"adaedl.stop_entropy.{slug(str(value))}"
        yield finding(full, entropy, "nats", verdict, text, "adaedl_stated", erratum="D6")
