"""Fit an experiment into minutes: which prompts are recorded, and which policies and prompts are decoded.

The most telling comes first: the policy that the forecast would deploy, then its rivals by forecast, on prompts spread
evenly over the domains. Times are estimated from decoding steps, so they hold as long as the machine stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from realrun.pairs.prompts import Prompt, spread

RECORD_STEPS = 4.0  # time of a recorded token, in decoding steps: its own, then the drafter's proposals behind it
RECORD_SHARE = 0.25  # of the minutes, at most for recording
DECODE_FACTOR = 1.4  # time of decoding with all arms over the arms' own rounds: probes of costs take turns too
LEAST_PROMPTS, LEAST_HELD_OUT, ENOUGH_HELD_OUT = 8, 4, 12
ENOUGH_POLICIES = 4


class Plan(NamedTuple):
    """What is decoded of the candidates, best first, and of the held-out prompts, and the estimated seconds."""

    policies: list[int]
    held_out: list[int]
    estimate_s: float


def prompts_to_record(prompts: Sequence[Prompt], *, minutes: float, step_s: float, new_tokens: int) -> Sequence[Prompt]:
    """Select the prompts that can be recorded in a share of these minutes; 0 minutes: all.

    step_s : time of a decoding step; new_tokens : output tokens of a prompt, at most
    """
    each_s = RECORD_STEPS * step_s * new_tokens
    count = max(LEAST_PROMPTS, int(60 * minutes * RECORD_SHARE / each_s))
    return spread(prompts, count) if minutes > 0 and count < len(prompts) else prompts


def plan(
    speedups: Sequence[float],
    held_out: Sequence[Prompt],
    *,
    limit_s: float,
    step_s: float,
    new_tokens: int,
    repeats: int,
) -> Plan:
    """Choose policies and held-out prompts that two baselines and the policies can decode within a limit.

    Few policies on enough prompts tell more than many on few: policies are left out until `ENOUGH_POLICIES` are left or
    `ENOUGH_HELD_OUT` prompts fit, then prompts, then policies again. The least is one policy on `LEAST_HELD_OUT`
    prompts, whatever the limit.

    Parameters
    ----------
    speedups : forecast of every policy
    held_out : prompts
    limit_s : for decoding
    step_s : time of a decoding step; new_tokens : output tokens of a prompt; repeats : of every prompt and policy
    """
    best_first = sorted(range(len(speedups)), key=lambda number: -speedups[number])
    order = {id(prompt): number for number, prompt in enumerate(held_out)}

    def seconds(policies: int, prompts: int) -> float:
        arms = 2 + sum(1 / speedups[number] for number in best_first[:policies])
        return DECODE_FACTOR * prompts * repeats * step_s * new_tokens * arms

    policies, prompts = len(best_first), len(held_out)
    while policies > ENOUGH_POLICIES and seconds(policies, min(prompts, ENOUGH_HELD_OUT)) > limit_s:
        policies -= 1
    while prompts > LEAST_HELD_OUT and seconds(policies, prompts) > limit_s:
        prompts -= 1
    while policies > 1 and seconds(policies, prompts) > limit_s:
        policies -= 1
    chosen = sorted(order[id(prompt)] for prompt in spread(held_out, prompts))
    return Plan(sorted(best_first[:policies]), chosen, seconds(policies, prompts))
