"""Stop signals, judged: how much of the gap between the best fixed K and the oracle each one closes, at what cost.

Every rule is tuned on one part of a trace and replayed on the other. The oracle is the fastest chain policy that knows
what will be accepted.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import timeit
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numba as nb
import numpy as np
import torch
from sklearn.metrics import roc_auc_score

from realrun.decode.acceptance_predictor import score_of
from realrun.decode.sampling import Sampler
from realrun.measure.record import RecordSettings
from realrun.measure.reuse import recorded_trace
from realrun.pairs.pair import load_pair
from realrun.pairs.prompts import study_prompts
from specsim.cost.files import read_cost
from specsim.cost.model import CostModel
from specsim.cost.profile import with_scores
from specsim.io.arrays import Floats
from specsim.io.progress import Progress
from specsim.learn.calibration import drafted_tokens
from specsim.learn.search import best_policy
from specsim.learn.settings import SearchSettings
from specsim.policy.base import Policy
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.base import Step
from specsim.policy.chain.beta_ts import BetaTS
from specsim.policy.chain.cali_ts import CaliTS
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.max_confidence import MaxConfidence
from specsim.policy.chain.p_min import LlamaCpp, PMin, keep_drafting_by_top10
from specsim.policy.chain.renewal_stop import RenewalStop
from specsim.replaying.intervals import CONFIDENCE, Estimate, ratio_interval, resample, tails
from specsim.replaying.oracles import chain_oracle_seconds
from specsim.replaying.priced import PricedTrace
from specsim.trace.files import read_trace
from specsim.trace.trace import Trace
from studies.common import Config, Document, parts, smollm2_costs
from studies.thompson.gains import seconds

CONFIDENT, ENTROPY, TOP10, SCORE, POSTERIOR = "confidence", "entropy", "top-10", "predictor", "posterior"
COLUMNS = {CONFIDENT: "confidence", ENTROPY: "entropy_nats", TOP10: "top10_confidence", SCORE: "score"}  # of a trace
FIXED, ORACLE, THRESHOLD, RUN = "best fixed K", "oracle", "threshold", "stop signals: "
CALLS, TURNS = 20, 200  # of a decision that is timed


@nb.njit
def keep_by_score(state, params, step, depth, u):  # type: ignore[no-untyped-def]
    return step.score >= params.p_min, state


@dataclass(frozen=True)
class ScoreThreshold(PMin):
    """Continue drafting while the trained predictor's score is at least p_min."""

    name = "score_threshold"
    source = "Liu et al. 2024 (EESD), Eq. 5 alone"
    features = ("score",)
    keep_drafting = staticmethod(keep_by_score)

    def cost(self, model: CostModel) -> CostModel:
        return with_scores(model)


@dataclass(frozen=True)
class Top10Threshold(PMin):
    """Continue drafting while the confidence among the ten best is at least p_min; the last token is verified."""

    name = "top10_threshold"
    features = ("top10_confidence",)
    keep_drafting = staticmethod(keep_drafting_by_top10)


class Rule(NamedTuple):
    """A rule that stops drafts by these signals."""

    signals: tuple[str, ...]
    name: str
    kind: type[Policy]
    fixed: dict[str, Any]

    @property
    def label(self) -> str:
        return f"{' + '.join(self.signals)}: {self.name}"


def rules(depth: int) -> list[Rule]:
    """List the rules for drafts of up to `depth` tokens."""
    learned = "learned, with depth and past rounds"
    return [
        Rule((CONFIDENT,), THRESHOLD, MaxConfidence, {"dynamic": False}),
        Rule((ENTROPY,), THRESHOLD, AdaEDL, {"dynamic": False}),
        Rule((TOP10,), THRESHOLD, Top10Threshold, {}),
        Rule((TOP10,), "as llama.cpp, drops the token", LlamaCpp, {"max_draft_tokens": depth}),
        Rule((SCORE,), THRESHOLD, ScoreThreshold, {}),
        Rule((POSTERIOR,), "Beta-TS", BetaTS, {}),
        Rule((SCORE, POSTERIOR), "Cali-TS", CaliTS, {}),
        Rule((CONFIDENT,), learned, RenewalStop, {"signal": "confidence"}),
        Rule((ENTROPY,), learned, RenewalStop, {"signal": "entropy"}),
        Rule((CONFIDENT, ENTROPY), learned, RenewalStop, {"signal": "all"}),
        Rule((CONFIDENT, ENTROPY, SCORE), learned, RenewalStop, {"signal": "all"}),
    ]


def gap_closed(rule_s: Floats, fixed_s: Floats, oracle_s: Floats) -> Estimate:
    """Share of the gap between two speedups, a fixed draft length's and the oracle's, that a rule closes.

    (S_rule - S_fixed) / (S_oracle - S_fixed) of seconds per sequence [S] each; the baseline cancels.
    """

    def share(rows: Any) -> Any:
        rule, fixed, oracle = (times[rows].sum(-1) for times in (rule_s, fixed_s, oracle_s))
        return oracle * (fixed - rule) / (rule * (fixed - oracle))

    low, high = np.quantile(share(resample(len(rule_s))), tails(len(rule_s), CONFIDENCE))
    return Estimate(float(share(np.arange(len(rule_s)))), float(low), float(high))


def ranking(trace: Trace, signal: str) -> float:
    """Area under the ROC curve by which a signal tells accepted tokens from rejected ones, behind accepted drafts."""
    tokens = drafted_tokens(trace)
    values = getattr(trace, COLUMNS[signal])[tokens.verified] * (-1 if signal == ENTROPY else 1)
    return float(roc_auc_score(tokens.accepted[tokens.verified], values))


def train(folder: Path, config: Config) -> tuple[str, str]:
    """Train EESD and its predictor for the lab's target; return the folders of both."""
    drafter, predictor = str(folder / "eesd"), str(folder / "predictor")
    for recipe, out, options in (("eesd", drafter, []), ("predictor", predictor, ["--drafter", drafter])):
        command = [sys.executable, "-m", "realrun", "train", recipe, *shlex.split(config[recipe]), *options]
        subprocess.run([*command, "--out", out], check=True)
    return drafter, predictor


def lab_trace(drafter: str, predictor: str, folder: Path, config: Config, progress: Progress) -> Trace:
    """Record the lab's target, greedily, with a drafter that has a predictor."""
    pair = load_pair("lab", drafter=drafter, predictor=predictor)
    settings = RecordSettings(config["depth"], config["max_new_tokens"], Sampler())
    prompts = study_prompts(pair.tokenizer, config["prompts"])
    return recorded_trace(pair, prompts, settings, folder, partial(progress, "record"))


def traces(out: Path, config: Config, progress: Progress) -> Iterator[tuple[str, Trace, CostModel]]:
    """Give each trace with its costs, by the drafter's name."""
    trace = lab_trace("model", "lab", out / "model", config, progress)
    yield "lab, draft model", trace, read_cost("example:lab-deep-model")
    trace = lab_trace(*train(out, config), out / "exit", config, progress)
    yield "lab, EESD", trace, read_cost("eesd-llama2-13b")
    yield "SmolLM2, EAGLE", read_trace("example:smollm2-eagle"), smollm2_costs()[0]


def judged(trace: Trace, cost: CostModel, config: Config) -> Iterator[Document]:
    """Tune every rule on one part of the trace, and compare it with the best fixed K and the oracle on the other."""
    search = SearchSettings(trials=config["trials"], seed=config["seed"], jobs=1)
    train_on, held = (PricedTrace(part, cost) for part in parts(trace, config))
    fixed = best_policy(FixedK, train_on, search)
    fixed_s, oracle_s = seconds(held, fixed, config), chain_oracle_seconds(held.trace, held.table())

    def row(label: str, settings: str, times: Floats) -> Document:
        speedup, closed = ratio_interval(held.baseline_s, times), gap_closed(times, fixed_s, oracle_s)
        numbers = {"predicted": speedup.as_dict(), "gap_to_oracle_closed": closed.as_dict()}
        return {"policy": settings.partition("(")[0], "form": label, "settings": settings, **numbers}

    yield row(FIXED, str(fixed), fixed_s)
    yield row(ORACLE, ORACLE, oracle_s)
    for rule in rules(trace.depth):
        if SCORE in rule.signals and trace.score is None:
            continue
        pair = train_on, held
        if SCORE in rule.signals and rule.kind is RenewalStop:  # in the place of the drafted token's probability,
            # which says no more than the confidence: greedy drafts are the likeliest tokens
            pair = tuple(PricedTrace(replace(part.trace, prob=part.trace.score), with_scores(cost)) for part in pair)
        policy = best_policy(rule.kind, pair[0], replace(search, fixed=rule.fixed))
        area = {"roc_area": ranking(held.trace, rule.signals[0])} if rule.name == THRESHOLD else {}
        yield row(rule.label, str(policy), seconds(pair[1], policy, config)) | area


def decision_us(config: Config) -> dict[str, float]:
    """Time a decision of every rule on this machine, in microseconds: its statistics of a token's logits, and the rule.

    By signals and rule. Logits and states are random, of the sizes of `config`.
    """
    generator = torch.Generator().manual_seed(config["seed"])
    logits = 4 * torch.randn(1, config["vocabulary"], generator=generator)
    hidden, weight = (torch.randn(shape, generator=generator) for shape in ((1, config["width"]), (config["width"],)))
    target_part, sampler = torch.zeros(1), Sampler()
    read: dict[str, Callable[[torch.Tensor], object]] = {
        CONFIDENT: lambda probs: float(probs.amax()),
        ENTROPY: lambda probs: float(torch.special.entr(probs).sum()),
        TOP10: lambda _: float(sampler.top10_confidence(logits)),
        SCORE: lambda _: float(score_of(target_part, hidden, weight)),
        POSTERIOR: lambda _: None,  # the rule's own state
    }

    def once(rule: Rule, params: Any, state: tuple[float, ...]) -> None:
        probs = logits.softmax(-1) if {CONFIDENT, ENTROPY} & {*rule.signals} else logits
        for signal in rule.signals:
            read[signal](probs)
        rule.kind.keep_drafting(state, params, Step(0.5, 0.5, 1.0, 0.5, 0.5), 1, 0.5)  # type: ignore[attr-defined]

    calls = {}
    for rule in rules(config["depth"]):
        params = rule.kind(**rule.fixed).params
        calls[rule.label] = partial(once, rule, params, rule.kind.initial_state(params))
        calls[rule.label]()  # compiles
    with torch.inference_mode():  # in turns, the fastest of which other processes disturb least
        turns = [[timeit.timeit(call, number=CALLS) for call in calls.values()] for _ in range(TURNS)]
    return dict(zip(calls, (1e6 / CALLS * np.min(turns, axis=0)).tolist(), strict=True))


def find(out: Path, config: Config, progress: Progress) -> Document:
    """Return a row for each drafter and rule, with the fixed K and the oracle between which it stands."""
    us = decision_us(config)
    return {
        "rows": [
            {"run": f"{RUN}{name}", **row, "decision_us": us.get(row["form"], "")}
            for name, trace, cost in traces(out, config, progress)
            for row in judged(trace, cost, config)
        ]
    }
