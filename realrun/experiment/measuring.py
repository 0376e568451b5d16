"""A measurement in turns with all its repeats; what every sequence gave is kept, so that an interrupted one goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np

from realrun.decode.rounds import Decoded, Round
from realrun.experiment.measured_costs import MeasuredCosts
from realrun.experiment.timing import Arm, Timings, decode_sequence, turned, warm_up
from realrun.machine_load import Load, Ticks, load_from, watch
from realrun.measure.stream import Samples, Stream
from realrun.measure.turns import TURN_ROUNDS
from realrun.own_files import read_kept
from realrun.pairs.prompts import Prompt
from specsim.io.files import write_json
from specsim.io.progress import Counter
from specsim.trace.trace import Trace

PROBES = "probes.json"  # those that were still missing at the end


class RunFile(TypedDict):
    """A decoded sequence, and the state of a policy that has one."""

    tokens: list[int]
    rounds: list[list[Any]]
    state: list[float] | None


class KeptFile(TypedDict):
    """Of one sequence in one repeat: the arms by name and settings, and what they gave."""

    arms: list[list[Any]]
    runs: list[RunFile]
    probes: Samples
    ticks: list[float]


class Costs(NamedTuple):
    """Costs to be known, and the numbers of the arms whose rounds tell of them."""

    measured: MeasuredCosts
    arms: Sequence[int]


class Kept(NamedTuple):
    """Of one sequence in one repeat: every arm's run, the samples of probes among them, and the machine's ticks."""

    runs: list[Decoded]
    probes: Mapping[str, Any]
    ticks: Ticks


def measure_in_turns(
    arms: Sequence[Arm],
    costs: Mapping[str, Costs],
    prompts: Sequence[Prompt],
    trace: Trace,
    folder: Path | None,
    *,
    repeats: int,
    seed: int,
    progress: Counter,
) -> tuple[Timings, Load]:
    """What every arm took in every repeat, and how busy others kept the machine meanwhile.

    All arms decode a sequence at once, as `realrun.experiment.timing` says. What the folder holds of these arms is
    read, with the state of every policy that goes on from sequence to sequence: so rounds are those of a measurement
    that nothing interrupted.

    Parameters
    ----------
    costs : by name; the probes of one of them take turns with the arms on each sequence
    prompts : of the trace's sequences, whose budgets and numbers they take
    folder : where a file for each repeat and sequence is kept; None keeps nothing
    progress : called with the sequences done in all repeats and their number
    """
    timings, ticks, warm = Timings(), list[Ticks](), False
    samplers, names = [arm.decoder.sampler for arm in arms], list(costs)
    missing = (folder and read_kept(folder / PROBES, dict[str, Samples])) or {}
    for name, samples in missing.items():
        costs[name].measured.resume(samples, texts=0)
    for repeat in range(repeats):
        order, states, going_on = np.random.default_rng((seed, repeat)), [None] * len(arms), True
        if trace.approximate:  # one text says little of a replay that averages over outcomes
            for arm, sampler in zip(arms, samplers, strict=True):
                arm.decoder.sampler = replace(sampler, seed=sampler.seed + repeat)
        for index, prompt in enumerate(prompts):
            number = repeat * len(prompts) + index
            measured = costs[names[number % len(names)]].measured
            path = None if folder is None else folder / f"{repeat}-{index}.json"
            # Behind one that is measured anew, others would go on from other states.
            kept = _kept(read_kept(path, KeptFile), arms) if path and going_on else None
            if kept is None:
                going_on = False
                if not warm:
                    progress(number, repeats * len(prompts))  # the first takes long
                    warm_up([*arms, *turned(arms)], prompts, trace)
                    warm = True
                load, probing = watch(), measured.probing(prompt, index)
                shift = repeat % TURN_ROUNDS
                runs = decode_sequence(
                    turned(arms) if (repeat + index) % 2 else arms,
                    prompt,
                    trace,
                    index,
                    states,
                    seed=seed,
                    order=order,
                    beside=probing,
                    shift=shift,
                )
                kept = Kept(runs, probing.samples.as_dict(), load())
                if path is not None:
                    write_json(_as_json(arms, kept), path)
            else:
                measured.resume(kept.probes)
            states = [run.state for run in kept.runs]
            ticks.append(kept.ticks)
            for place, run in enumerate(kept.runs):
                timings.add(place, index, run)
            for one in costs.values():
                one.measured.saw((arms[at].policy, len(prompt.tokens), kept.runs[at].rounds) for at in one.arms)
            progress(number + 1, repeats * len(prompts))
    for name, one in costs.items():
        found = Stream()
        for samples in (missing.get(name, found.as_dict()), one.measured.finish(prompts[-1], len(prompts) - 1)):
            found.merge(samples)
        missing[name] = found.as_dict()
    if folder is not None:
        write_json(missing, folder / PROBES)
    return timings, load_from(ticks)


def _names(arms: Sequence[Arm]) -> list[list[Any]]:
    """What tells arms from those of another measurement, as JSON gives it back."""
    return json.loads(json.dumps([[arm.name, arm.policy and arm.policy.settings] for arm in arms]))


def _as_json(arms: Sequence[Arm], kept: Kept) -> dict[str, Any]:
    runs = [
        {"tokens": run.tokens, "rounds": [astuple(one) for one in run.rounds], "state": run.state} for run in kept.runs
    ]
    return {"arms": _names(arms), "runs": runs, "probes": kept.probes, "ticks": kept.ticks}


def _kept(document: Any, arms: Sequence[Arm]) -> Kept | None:
    """What a file holds; None where it is of other arms, or there is none."""
    if document is None or document["arms"] != _names(arms):
        return None
    runs = [
        Decoded(
            run["tokens"],
            [_round(one) for one in run["rounds"]],
            prefill_s=0.0,  # which nothing is made of
            state=None if run["state"] is None else tuple(run["state"]),
        )
        for run in document["runs"]
    ]
    return Kept(runs, document["probes"], Ticks(*document["ticks"]))


def _round(values: Sequence[Any]) -> Round:
    fields: Any = [tuple(value) if isinstance(value, list) else value for value in values]
    return Round(*fields)
