"""First departures of real runs from their replay: near ties in low precision, defects where a pass is wrong."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.drafters.independent import IndependentKind
from realrun.experiment.validate import Divergence, departures_summary, divergences, ulp
from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import Pair, load_pair
from realrun.pairs.prompts import Prompt, lab_prompts
from specsim.cost.model import ConstantCost
from specsim.policy.base import Policy
from specsim.policy.registry import make_policy
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from tests.support.tiny import tiny_pair, tiny_prompts

SAMPLERS = {"greedy": Sampler(), "gumbel": Sampler("gumbel", 0.8, seed=4)}
samplers = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)


def low_pair(dtype: torch.dtype = torch.bfloat16) -> Pair:
    """The tiny pair, its weights rounded to bfloat16, in this type."""
    pair = tiny_pair()
    models = [copy.deepcopy(model).to(torch.bfloat16).to(dtype) for model in (pair.target, pair.drafter.model)]
    return replace(pair, target=models[0], drafter=IndependentKind(models[1]))


def found_in(
    pair: Pair, trace: Trace, prompts: list[Prompt], policy: Policy, sampler: Sampler, decoder: Decoder
) -> list[Divergence]:
    log = replay(trace, policy, cost_table(trace, ConstantCost(1e-3, 5e-3)), log=True).rounds
    assert log is not None
    budget = int(trace.budget_tokens[0])
    runs = [decoder.decode(p.tokens, budget, policy, sequence=number, seed=3) for number, p in enumerate(prompts)]
    return divergences(decoder, policy, trace, prompts, log, runs, seed=3)


def decoder_of(pair: Pair, sampler: Sampler) -> Decoder:
    return Decoder(*pair.make_drafter(), pair.eos_token_ids, sampler)


def test_a_step_of_a_number_type() -> None:
    assert ulp(1.0, torch.bfloat16) == 2**-7 and ulp(-12.5, torch.bfloat16) == 2**-4
    assert ulp(1.5, torch.float64) == 2**-52 and ulp(0.0, torch.float32) > 0


@samplers
def test_in_float64_nothing_departs(sampler: Sampler) -> None:
    pair, prompts, policy = tiny_pair(), tiny_prompts(4), make_policy("fixed_k", {"k": 3})
    trace = record(pair, prompts, RecordSettings(4, 16, sampler))
    assert found_in(pair, trace, prompts, policy, sampler, decoder_of(pair, sampler)) == []


@samplers
def test_what_departs_in_bfloat16_is_a_near_tie(sampler: Sampler) -> None:
    """Recorded by passes that round otherwise: here in float32, of the same weights."""
    pair, prompts, departures = low_pair(), tiny_prompts(24), []
    trace = record(low_pair(torch.float32), prompts, RecordSettings(4, 24, sampler))
    for name, settings in (("fixed_k", {"k": 3}), ("max_confidence", {"lambda0": 0.4, "max_draft_tokens": 4})):
        policy = make_policy(name, settings)
        departures += found_in(pair, trace, prompts, policy, sampler, decoder_of(pair, sampler))
    assert departures
    counts = departures_summary(departures)
    assert (
        counts["first"] == {"near tie": len(departures), "defect": 0, "not examined": 0}
        and counts["largest_tie_ulps"] > 0
    )


@samplers
@pytest.mark.parametrize("which", ["target", "drafter"])
def test_a_wrong_pass_is_a_defect(which: str, sampler: Sampler) -> None:
    """As a kernel that is broken would make it: logits that are no rounding away."""
    pair, prompts, policy = low_pair(), tiny_prompts(6), make_policy("fixed_k", {"k": 3})
    trace = record(pair, prompts, RecordSettings(4, 16, sampler))
    decoder = decoder_of(pair, sampler)
    lm: Any = decoder.target if which == "target" else decoder.drafter.lm
    forward = lm.forward
    lm.forward = lambda tokens: forward(tokens).flip(-1)
    departures = found_in(pair, trace, prompts, policy, sampler, decoder)
    causes = departures_summary(departures)["first"]
    assert causes["defect"] > len(prompts) / 2 and causes["not examined"] == 0
    assert {departure.what for departure in departures if departure.cause == "defect"} == {
        "text" if which == "target" else "draft"
    }


def test_trees_and_gaps_of_no_logits_are_not_examined() -> None:
    unexamined = Divergence(0, 5, "text", None)
    assert (unexamined.cause, replace(unexamined, gap_ulps=3.0).cause, replace(unexamined, gap_ulps=300.0).cause) == (
        "not examined",
        "near tie",
        "defect",
    )
    counts = departures_summary([unexamined, replace(unexamined, gap_ulps=300.0)])
    assert counts["defects"] == [{"sequence": 0, "t": 5, "what": "text", "gap_ulps": 300.0}]
    assert counts["largest_tie_ulps"] is None


@pytest.mark.slow
@samplers
def test_every_departure_of_the_lab_in_bfloat16_is_a_near_tie(sampler: Sampler) -> None:
    pair = load_pair(dtype="bfloat16", threads=1)
    prompts, policy = lab_prompts(pair.tokenizer, 12), make_policy("fixed_k", {"k": 5})
    trace = record(pair, prompts, RecordSettings(8, 96, sampler))
    counts = departures_summary(found_in(pair, trace, prompts, policy, sampler, decoder_of(pair, sampler)))
    assert counts["first"]["defect"] == counts["first"]["not examined"] == 0
