"""Fit an experiment into minutes: which prompts are recorded, and which policies and prompts are decoded.

The most telling comes first: the policy that the forecast would deploy, then the best variant of every other policy by
forecast, then the other variants, on prompts spread evenly over the domains. Times are estimated from decoding steps,
so they hold as long as the machine stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict

from realrun.experiment.settings import Candidate, ExperimentSettings
from realrun.kept_files import read_kept
from realrun.pairs.prompts import Prompt, spread
from specsim.io.files import write_json
from specsim.trace.files import read_trace

RECORD_STEPS = 2.0  # time of a recorded token, in decoding steps: its own, and the proposals behind it; trees take more
RECORD_SHARE = 0.25  # of the minutes, at most for recording
DECODE_FACTOR = 1.4  # time of decoding with all arms over the arms' own rounds: probes of costs take turns too
END_S = 15.0  # for the probe and the report after decoding
LEAST_PROMPTS, LEAST_HELD_OUT, ENOUGH_HELD_OUT = 8, 4, 12
ENOUGH_POLICIES = 2


class PlanFile(TypedDict, total=False):
    """Plan that an earlier start of the same job wrote: number of prompts to record; numbers of what is decoded."""

    step_s: float
    prompts: int
    policies: list[int]
    held_out: list[int]


class Plan:
    """Prompts and policies that fit into the minutes of an experiment; a file keeps them for a later start.

    step_s : function that measures the seconds of a decoding step, called where the file does not tell them
    """

    def __init__(self, path: Path, settings: ExperimentSettings, step_s: Callable[[], float]):
        self.path, self.settings, self.measure_step_s = path, settings, step_s
        self.kept: dict[str, Any] = read_kept(path, PlanFile) or {}

    @property
    def reason(self) -> str:
        """Explain in the result why a policy was not decoded."""
        return f"left out to fit --minutes {self.settings.minutes:g}"

    @property
    def prompt_s(self) -> float:
        """Compute the seconds that decoding a prompt takes without speculation."""
        if "step_s" not in self.kept:
            self._keep({"step_s": self.measure_step_s()})
        return float(self.kept["step_s"]) * self.settings.record.max_new_tokens

    def to_record(self, prompts: Sequence[Prompt], recorded: Path | None) -> Sequence[Prompt]:
        """Select the prompts to record. recorded : a finished trace of this job, whose prompts stay as they are"""
        if not self.settings.minutes:
            return prompts
        if "prompts" not in self.kept:
            affordable = int(60 * self.settings.minutes * RECORD_SHARE / (RECORD_STEPS * self.prompt_s))
            count = max(LEAST_PROMPTS, affordable) if recorded is None else read_trace(recorded).sequences
            self._keep({"prompts": min(count, len(prompts))})
        return spread(prompts, self.kept["prompts"])

    def to_decode(
        self, tuned: Sequence[Candidate], held_out: Sequence[Prompt], spent_s: float, *, least_policies: int = 1
    ) -> tuple[list[Candidate], list[int]]:
        """Choose the policies and held-out prompts to decode in the time that is left; prompts by number."""
        if not self.settings.minutes or not self.settings.repeats:  # without repeats nothing is decoded
            return list(tuned), list(range(len(held_out)))
        if "policies" not in self.kept:
            left_s = 60 * self.settings.minutes - spent_s - END_S
            baseline_s = DECODE_FACTOR * self.settings.repeats * self.prompt_s
            speedups = [candidate.train_speedup or 1.0 for candidate in tuned]
            best_first = by_kind([candidate.policy.name for candidate in tuned], speedups)
            policies, prompts = fitting(
                [speedups[number] for number in best_first], len(held_out), left_s / baseline_s, least_policies
            )
            order = {id(prompt): number for number, prompt in enumerate(held_out)}
            chosen = sorted(order[id(prompt)] for prompt in spread(held_out, prompts))
            self._keep({"policies": sorted(best_first[:policies]), "held_out": chosen})
        return [tuned[number] for number in self.kept["policies"]], self.kept["held_out"]

    def _keep(self, more: dict[str, Any]) -> None:
        self.kept |= more
        write_json(self.kept, self.path)


def by_kind(names: Sequence[str], speedups: Sequence[float]) -> list[int]:
    """Order policies, by number: the fastest of each name, fastest first, then the others alike."""
    fastest_first = sorted(range(len(speedups)), key=lambda number: -speedups[number])
    met = [names[number] for number in fastest_first]
    return sorted(fastest_first, key=lambda number: met.index(names[number]) != fastest_first.index(number))


def fitting(speedups: Sequence[float], prompts: int, affordable: float, least_policies: int = 1) -> tuple[int, int]:
    """Count the policies, from the first on, and the prompts that two baselines and the policies can decode.

    Few policies on enough prompts tell more than many on few: policies are left out until `ENOUGH_POLICIES` are left or
    `ENOUGH_HELD_OUT` prompts fit, then prompts, then policies again. The least is `least_policies` policies on
    `LEAST_HELD_OUT` prompts, whatever fits.

    Parameters
    ----------
    speedups : forecast of every policy
    prompts : held-out prompts
    affordable : time, in that of the baseline on one prompt
    """

    def too_long(policies: int, prompts: int) -> bool:
        return prompts * (2 + sum(1 / speedup for speedup in speedups[:policies])) > affordable

    policies = len(speedups)
    while policies > max(ENOUGH_POLICIES, least_policies) and too_long(policies, min(prompts, ENOUGH_HELD_OUT)):
        policies -= 1
    while prompts > LEAST_HELD_OUT and too_long(policies, prompts):
        prompts -= 1
    while policies > least_policies and too_long(policies, prompts):
        policies -= 1
    return policies, prompts
