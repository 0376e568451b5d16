"""`realrun compare` from end to end: restarts of both versions in turns, until every row is decided or time is up."""

from __future__ import annotations

import inspect
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from realrun.decode.sampling import Sampler
from realrun.kept_files import claim, read_kept
from realrun.machine_load import Ticks, load_from, watch
from realrun.pairs.pair import load_pair
from realrun.pairs.prompts import Prompt, prompt_digest, prompt_facts
from realrun.versions import verdict
from realrun.versions.restart import BASE, HEAD, NULL, RestartFile, Run, decode_all, started
from realrun.versions.sides import find_side
from specsim.io.arrays import Floats
from specsim.io.errors import InputError
from specsim.io.files import file_digest, remove_folder, write_json
from specsim.io.progress import Progress
from specsim.policy.base import Policy
from specsim.policy.registry import NAMED
from specsim.replaying.intervals import NO_SPECULATION, Estimate

RESULT, RESTARTS, IDENTITY = "compare.json", "restarts", "settings.json"  # in the output folder
ANEW = "pass --overwrite or another --out"


@dataclass(frozen=True)
class CompareSettings:
    """How two versions decode, and for how long.

    Attributes
    ----------
    pair : arguments of `realrun.load_pair`
    policies : decoded beside the baseline
    sampler : how tokens are chosen
    max_new_tokens : most output tokens per prompt
    seed : of all randomness
    minutes : no restart begins that would end later; two are made in any case. Prompts are left out so that eight
        restarts fit, at least one is decoded; 0 decodes all in two restarts
    max_slowdown_percent : slowdown that is looked for
    clock : "wall", or "cpu", which is steadier on a busy machine and times one CPU thread
    kernels : "auto", or as `--kernels`

    Examples
    --------
    >>> import realrun
    >>> realrun.CompareSettings({"drafter": "prompt-lookup"}, [], minutes=1).max_slowdown_percent
    2.0
    """

    pair: Mapping[str, Any]
    policies: Sequence[Policy]
    sampler: Sampler = field(default_factory=Sampler)
    max_new_tokens: int = 32
    seed: int = 0
    minutes: float = 5.0
    max_slowdown_percent: float = 2.0
    clock: str = "wall"
    kernels: str = "auto"

    def job(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Return what the processes are started with."""
        return {
            "pair": _not_default(self.pair, load_pair),
            "sampler": _not_default(vars(self.sampler), Sampler),
            "policies": [None, *([_name_of(policy), dict(policy.settings)] for policy in self.policies)],
            "policy_files": [file_digest(Path(file)) for file in map(_own_file, self.policies) if file],
            "prompts": [prompt.tokens for prompt in prompts],
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
            "clock": "" if self.clock == "wall" else self.clock,
            "kernels": "" if self.kernels == "auto" else self.kernels,
        }


def _not_default(arguments: Mapping[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Leave out arguments at their defaults, which other versions of the function may not have yet."""
    parameters = inspect.signature(function).parameters
    return {
        name: arguments[name]
        for name in parameters
        if name in arguments and arguments[name] != parameters[name].default
    }


def _own_file(policy: Policy) -> str:
    """Return the file of a policy that is not built in, else ""."""
    kind = type(policy)
    return "" if NAMED.get(policy.name) is kind else inspect.getfile(kind)


def _name_of(policy: Policy) -> str:
    """Return the name by which another process finds the policy: a built-in's, or FILE.py:NAME."""
    file = _own_file(policy)
    return f"{file}:{policy.name}" if file else policy.name


def compare(
    base: str,
    head: str,
    prompts: Sequence[Prompt],
    settings: CompareSettings,
    out: Path,
    *,
    overwrite: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> dict[str, Any]:
    """Decode the same prompts with two versions of the code at once, and tell whether the second is slower.

    Each restart starts three processes: the base, the head, and the base once more (the A/A test). They decode the same
    prompts with the baseline and every policy, taking turns of two rounds, so that all see the same machine. A process
    can be faster or slower than another of the same code for as long as it lives; so restarts are the sample, not
    rounds, and prompts are left out for more restarts.

    Parameters
    ----------
    base, head : str
        The versions: a checkout (folder with realrun/), an environment (folder with bin/python), or both as
        CHECKOUT@ENVIRONMENT.
    prompts : sequence of Prompt
    settings : CompareSettings
    out : Path
        Folder for compare.json and finished restarts, which are used again after an interruption.
    overwrite : bool
        Whether to start anew and replace what is in the folder.
    progress : callable, optional
        Told (what, done, total).

    Returns
    -------
    dict
        The document of compare.json: versions, and a row for the baseline and each policy with the change of seconds
        per token in percent (positive is slower) and its interval, its verdict, and what the change is made of.

    Raises
    ------
    InputError
        If a side is no version, its code cannot decode the job, or the folder holds a finished or another comparison.

    Examples
    --------
    A version with itself; `minutes=0` decodes all prompts in the fewest restarts, which are two.

    >>> import tempfile
    >>> from pathlib import Path
    >>> import realrun
    >>> from realrun.pairs.prompts import Prompt
    >>> settings = realrun.CompareSettings({"drafter": "prompt-lookup"}, [], max_new_tokens=2, minutes=0)
    >>> checkout = str(Path(realrun.__file__).parents[1])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     document = realrun.compare(checkout, checkout, [Prompt("all", [5, 6, 7])], settings, Path(folder))
    >>> document["restarts"], document["rows"][0]["rounds_identical_percent"]
    (2, 100.0)
    """
    sides = [find_side(base), find_side(head)]
    if overwrite:
        remove_folder(out / RESTARTS)
        (out / RESULT).unlink(missing_ok=True)
    if (out / RESULT).exists():
        raise InputError(f"{out} holds a finished comparison; {ANEW}")
    job, restarts, versions = settings.job(prompts), kept_restarts(out / RESTARTS), dict[str, Any]()
    while not versions or not finished(restarts, settings):
        number, start_s, load = len(restarts), time.monotonic(), watch()
        with started(sides, job, number) as (workers, versions):
            identity = json.loads(json.dumps({**job, "prompts": prompt_digest(prompts), **versions}))  # as it is read
            claim(out / RESTARTS / IDENTITY, identity, f"{out} holds restarts", ANEW)
            if finished(restarts, settings):
                break
            limit_s = 60 * settings.minutes / verdict.LOOKS[-2] - (time.monotonic() - start_s)
            order = np.random.default_rng((settings.seed, number))
            numbers, runs = decode_all(
                workers,
                len(job["policies"]),
                restarts[0]["prompts"] if restarts else order.permutation(len(prompts)).tolist(),
                math.inf if restarts or not settings.minutes else limit_s,
                order,
                partial(progress, f"restart {number + 1}"),
            )
        spent_s, ticks = time.monotonic() - start_s, list(load())  # now that the processes have ended
        restarts.append({"prompts": numbers, "spent_s": spent_s, "ticks": ticks, "runs": runs})
        write_json(restarts[-1], out / RESTARTS / f"{number}.json")
    document = {
        "kind": "realrun-compare",
        "rows": rows_of(restarts, settings),
        "restarts": len(restarts),
        "spent_s": sum(restart["spent_s"] for restart in restarts),
        "load": load_from(Ticks(*restart["ticks"]) for restart in restarts)._asdict(),
        "options": {
            **vars(settings),
            "sampler": vars(settings.sampler),
            "policies": [str(policy) for policy in settings.policies],
        },
        **versions,
        "prompts": prompt_facts([prompts[number] for number in sorted(restarts[0]["prompts"])], ""),
        "prompts_left_out": len(prompts) - len(restarts[0]["prompts"]),
    }
    write_json(document, out / RESULT)
    return document


def kept_restarts(folder: Path) -> list[RestartFile]:
    """Read the restarts that an earlier start of the command finished."""
    documents: Any = map(partial(read_kept, shape=RestartFile), (folder / f"{number}.json" for number in count()))
    return [*takewhile(lambda document: document is not None, documents)]


def finished(restarts: Sequence[RestartFile], settings: CompareSettings) -> bool:
    """Tell whether every row is decided at a look, or there is no time for another restart."""
    made = len(restarts)
    if made < verdict.LEAST_RESTARTS:
        return False
    spent_s = [restart["spent_s"] for restart in restarts]
    if made >= verdict.LOOKS[-1] or sum(spent_s) + max(spent_s) > 60 * settings.minutes:
        return True
    return made in verdict.LOOKS and all(row["exceeds"] is not None for row in rows_of(restarts, settings))


def rows_of(restarts: Sequence[RestartFile], settings: CompareSettings) -> list[dict[str, Any]]:
    """Return a row for the baseline and each policy."""
    confidence = verdict.confidence_of_a_look(1 + len(settings.policies))
    limit = settings.max_slowdown_percent
    names: list[Policy | None] = [None, *settings.policies]
    return [
        {
            "label": NO_SPECULATION if policy is None else str(policy),
            "policy": policy and policy.name,
            "params": {} if policy is None else dict(policy.settings),
            **_row([restart["runs"][arm] for restart in restarts], confidence, limit),
        }
        for arm, policy in enumerate(names)
    ]


def _row(runs: Sequence[Sequence[Sequence[Run]]], confidence: float, limit_percent: float) -> dict[str, Any]:
    """Compare head and base. runs : [restart][process][prompt]"""
    seconds, tokens, rounds = (  # [restart, process, prompt]
        np.array([[[run[key] for run in process] for process in restart] for restart in runs])
        for key in ("seconds", "tokens", "rounds")
    )
    # [process, restart], of all prompts
    token_s, round_s = (np.log(seconds.sum(axis=2) / counts.sum(axis=2)).T for counts in (tokens, rounds))
    same_rounds, same_text = (
        [base[key] == head[key] for restart in runs for base, head in zip(restart[BASE], restart[HEAD], strict=True)]
        for key in ("log", "text")
    )
    acceptance = of_text = verdict.EXACT
    if not all(same_rounds):
        mean_s, tokens_, rounds_ = (column.mean(axis=0) for column in (seconds, tokens, rounds))
        acceptance = verdict.over_prompts(tokens_[HEAD], rounds_[HEAD], tokens_[BASE], rounds_[BASE])
        of_text = verdict.over_prompts(mean_s[HEAD], tokens_[HEAD], mean_s[BASE], tokens_[BASE])
    tau = tokens.sum(axis=(0, 2)) / rounds.sum(axis=(0, 2))
    slowdown, null_change = _changes(token_s, confidence, of_text)
    round_time, _ = _changes(round_s, confidence)
    tau_change = verdict.change_percent(float(np.log(tau[HEAD] / tau[BASE])), [acceptance], confidence)
    return {
        "slowdown_percent": slowdown.as_dict(),
        "verdict": verdict.verdict(slowdown, limit_percent),
        "exceeds": verdict.exceeds(slowdown, limit_percent),
        "round_time_percent": round_time.as_dict(),
        "tau_percent": tau_change.as_dict(),
        "tau": {"base": float(tau[BASE]), "head": float(tau[HEAD])},
        "rounds_identical_percent": 100 * float(np.mean(same_rounds)),
        "output_identical_percent": 100 * float(np.mean(same_text)),
        "null_percent": null_change.as_dict(),
        "restart_token_ms": (1e3 * np.exp(token_s)).tolist(),
    }


def _changes(logs: Floats, confidence: float, *more: verdict.Spread) -> tuple[Estimate, Estimate]:
    """Compute the changes, in percent, of head and of null against base. logs : [process, restart]"""
    base, head, null = logs[BASE], logs[HEAD], logs[NULL]
    of_head, of_null = verdict.over_restarts(head, base, null)
    return (
        verdict.change_percent(float((head - (base + null) / 2).mean()), [of_head, *more], confidence),
        verdict.change_percent(float((null - base).mean()), [of_null], confidence),
    )
