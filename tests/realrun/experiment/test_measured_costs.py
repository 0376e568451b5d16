"""Costs of a measurement's own rounds, completed by probes: each drafter has all that its policies may ask for."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import realrun.measure.sweeps as probes
from realrun.decode.rounds import Round
from realrun.decode.sampling import Sampler
from realrun.drafters.lookup import LookupKind
from realrun.experiment.measuring import MeasuredCosts, Run
from realrun.measure.interleaving import take_turns
from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from specsim.cost.profile import profile_from_json
from specsim.policy.registry import make_policy
from specsim.trace.trace import Trace
from tests.support.pairs.inside import pair_of
from tests.support.tiny import tiny_pair

PROMPTS = [Prompt("all", list(range(5, 15))), Prompt("all", [30, 40, 50, 60])]
SAMPLER = Sampler("gumbel", 0.8, seed=4)
ENOUGH = 3
PAIRS = {"model": tiny_pair, "prompt-lookup": lambda: replace(tiny_pair(), drafter=LookupKind())}
PAIRS |= {kind: (lambda kind=kind: pair_of(kind)) for kind in ("edd", "medusa")}


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "ENOUGH", ENOUGH)


def measured_costs(pair: Pair, texts: int = 2) -> tuple[MeasuredCosts, Trace]:
    trace = record(pair, PROMPTS, RecordSettings(3, 16, SAMPLER))
    trees = 4 if pair.drafter.trees else 0
    return MeasuredCosts(pair, trace, tree_tokens=trees, sampler=SAMPLER, seed=0, texts=texts), trace


def baseline_runs(trace: Trace, seconds: float) -> list[Run]:
    """Made up: every step takes so long."""
    return [
        (None, int(prompt), [Round(t, 0, 0, 0, 0, 0.0, 0.0, seconds, 0.0) for t in range(tokens)])
        for prompt, tokens in zip(trace.prompt_tokens, trace.output_tokens, strict=True)
    ]


def chain_runs(trace: Trace, seconds: float, k: int = 2) -> list[Run]:
    round_ = Round(0, k, 0, k, 0, k * seconds, k * seconds, seconds, seconds, (seconds,) * k, (), 1, k)
    policy = make_policy("fixed_k", {"k": k})
    return [
        (policy, int(prompt), [replace(round_, t=t) for t in range(tokens - k)])
        for prompt, tokens in zip(trace.prompt_tokens, trace.output_tokens, strict=True)
    ]


@pytest.mark.parametrize("kind", PAIRS)
def test_probes_alone_give_every_drafter_a_whole_profile(kind: str) -> None:
    """Also prompt lookup, on texts that repeat nothing."""
    costs, trace = measured_costs(PAIRS[kind]())
    for index, prompt in enumerate(PROMPTS):
        take_turns([costs.probing(prompt, index)], np.random.default_rng(0))
    for tokens in range(1, trace.depth + 1):
        assert costs.probed.count("draft", tokens) >= ENOUGH and costs.probed.count("verify", tokens + 1) >= ENOUGH
    document = json.loads(json.dumps(costs.document(baseline_runs(trace, 0.25), repeats=1)))
    cost = profile_from_json(document, "here")
    np.testing.assert_allclose(cost.autoregressive_s, 0.25)
    assert (cost.draft_step_s > 0).all() and (cost.verify_s > 0).all()
    assert len(cost.verify_s) == trace.depth + 1 and document["repeats"] == 1
    low, high = cost.contexts[[0, -1]]
    assert low == trace.prompt_tokens.min() - 1 and high >= (trace.prompt_tokens + trace.output_tokens).max() - 2


def test_the_arms_rounds_and_the_probes_are_weighed_alike() -> None:
    costs, trace = measured_costs(tiny_pair())
    for index, prompt in enumerate(PROMPTS):
        take_turns([costs.probing(prompt, index)], np.random.default_rng(0))
    probes_alone = costs.document(baseline_runs(trace, 0.25), 1)["median_s"]
    slow_s = 100.0  # beyond any probe, however busy the machine
    both = costs.document([*baseline_runs(trace, 0.25), *chain_runs(trace, slow_s)], 1)["median_s"]
    assert np.max(probes_alone["verify"][1:]) < 0.2 * slow_s and probes_alone["verify"][3] == both["verify"][3]
    np.testing.assert_allclose(both["verify"][2], slow_s, rtol=0.1)  # there are more rounds of arms than probes
    np.testing.assert_allclose(both["draft_step"][0], slow_s, rtol=0.1)
    again = costs.document(baseline_runs(trace, 0.25), 1)["median_s"]
    assert again == probes_alone  # no document leaves anything behind for the next


def test_what_the_arms_have_shown_is_not_probed() -> None:
    costs, trace = measured_costs(tiny_pair(), texts=1)
    for k in (1, 2, 3):
        shown = chain_runs(trace, 0.5, k)
        other = make_policy("adaedl", {"max_draft_tokens": k})  # two policies, as none is to be priced by itself alone
        costs.saw([*shown, *((other, prompt_tokens, rounds) for _, prompt_tokens, rounds in shown)])
    take_turns([costs.probing(PROMPTS[0], 0)], np.random.default_rng(0))
    assert not any(costs.probed.count(what) for what in ("draft", "behind")) and costs.probed.count("tree verify", 4)
    assert costs.probed.count("verify") == costs.probed.count("verify", 1)  # of trees of nothing but the pending token


def test_probes_go_on_from_a_file_and_are_finished_where_texts_were_too_few() -> None:
    costs, _ = measured_costs(tiny_pair(), texts=5)
    take_turns([costs.probing(PROMPTS[0], 0)], np.random.default_rng(0))
    samples = json.loads(json.dumps(costs.probed.as_dict()))
    assert 0 < costs.probed.count("verify", 4) < ENOUGH
    resumed, trace = measured_costs(tiny_pair(), texts=5)
    resumed.resume(samples)
    assert json.loads(json.dumps(resumed.probed.as_dict())) == samples

    def short_of(costs: MeasuredCosts) -> list[Any]:
        chains = [("draft", place) for place in (1, 2, 3)] + [("verify", size) for size in (2, 3, 4)]
        wanted = [*chains, *(("tree verify", size) for size in (2, 3, 4)), *(("tree draft", n) for n in (2, 3, 4))]
        return [what for what in wanted if costs.probed.count(*what) < ENOUGH]

    assert short_of(resumed)
    resumed.finish(PROMPTS[1], 1)
    assert not short_of(resumed)
    before = json.dumps(resumed.probed.as_dict())
    resumed.finish(PROMPTS[1], 1)
    assert json.dumps(resumed.probed.as_dict()) == before
    assert profile_from_json(resumed.document(baseline_runs(trace, 0.25), 2), "here").max_tree_tokens == 4
