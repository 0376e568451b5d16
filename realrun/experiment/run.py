"""`realrun validate` from end to end, with its files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from realrun.experiment.document import as_document, rounds_table
from realrun.experiment.forecast import ForecastCosts, forecast, sealed_forecast
from realrun.experiment.settings import Candidate, ExperimentSettings, ValidationSettings
from realrun.experiment.validate import TUNED, candidates, measure
from realrun.lm.clock import clock_name
from realrun.lm.variants.block_expansion import expansion_of
from realrun.measure.profile import LIMIT_S, TREE_TOKENS, contexts_between, profile
from realrun.measure.reuse import check_job, recorded_trace, recording_identity
from realrun.own_files import claim, read_own
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt, prompt_facts
from realrun.provenance import device_name
from speckernels import backend_for
from specsim.cost.files import cost_path, read_cost
from specsim.cost.model import CostModel
from specsim.cost.profile import noisy_profile, profile_from_json
from specsim.io.arrays import Ints
from specsim.io.files import digest, file_digest, remove_folder, replacing, write_json, write_table, write_text
from specsim.io.progress import Progress
from specsim.learn.journal import source_digest
from specsim.learn.settings import SearchSettings
from specsim.trace.trace import Trace

UNFINISHED = "validation.partial"  # folder, in the output's, of what is there before the result
IDENTITY, PROFILE = "settings.json", "tuning_profile.json"  # in it
ANEW = "pass --overwrite"
OTHER = f"{ANEW} or another --out"
# Standard deviation of the logarithm of a speedup between costs and a run, by the costs' age.
FRESH_RUN_ERROR, OLD_RUN_ERROR = 0.02, 0.06
DRAWN = 16  # profiles, for the noise that costs bring into a forecast
PROFILE_LIMIT_S, PROFILE_SHARE = LIMIT_S, 0.3  # longest profile, and share of the minutes for it


def validate(
    pair: Pair,
    prompts: Sequence[Prompt],
    settings: ValidationSettings,
    out: Path,
    progress: Progress = lambda what, done, total: None,
) -> dict[str, Any]:
    """Record, profile, tune and forecast on one part of the prompts, then decode the other for real, and compare.

    Parameters
    ----------
    pair : Pair
    prompts : sequence of Prompt
    settings : ValidationSettings
    out : Path
        Folder for trace, profile, rounds, validation.json and report.html; a trace that is there is used again. Of a
        validation that was interrupted so are the policies it had tuned and the sequences it had decoded.
        tuning_profile.json, tuned.json and forecast.json hold what was known before the first held-out token was
        decoded: costs, policies, and the speedups that these forecast.
    progress : callable, optional
        Told (what, done, total).

    Returns
    -------
    dict
        The document of validation.json: a row for each policy with forecast and measured speedup, their intervals,
        and the share of rounds that are identical in replay and real run.

    Raises
    ------
    InputError
        If the folder holds a trace or an unfinished validation of other settings, or there are too few prompts.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import realrun
    >>> from realrun.pairs.prompts import lab_prompts
    >>> from specsim.policy.registry import POLICIES
    >>> pair = realrun.load_pair(drafter="prompt-lookup", threads=1)
    >>> record = realrun.RecordSettings(max_draft_tokens=2, max_new_tokens=8)
    >>> settings = realrun.ValidationSettings(record, (POLICIES["fixed_k"],), trials=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     out, prompts = Path(folder) / "validation", lab_prompts(pair.tokenizer, 4)
    ...     document = realrun.validate(pair, prompts, settings, out)
    >>> document["rows"][0]["rounds_identical_percent"]
    100.0
    """
    before = None if settings.cost is None else read_cost(settings.cost)
    tuning, held = check_job(out, prompts, tuning_share=settings.tuning_share, seed=settings.seed)
    out.mkdir(parents=True, exist_ok=True)
    work, folder = out / UNFINISHED, settings.trace or out / "trace"
    if settings.overwrite:
        remove_folder(work)
    sealed = settings.overwrite or not folder.exists()

    def recorded(sequences: Ints | None = None) -> Trace:
        def report(done: int, total: int) -> None:
            progress("record" if sequences is None else "record tuning prompts", done, total)

        return recorded_trace(
            pair, prompts, settings.record, folder, report, overwrite=settings.overwrite, sequences=sequences
        )

    train = recorded(tuning)
    claim(work / IDENTITY, identity_of(pair, prompts, settings), f"{work} holds an unfinished validation", OTHER)
    costs = forecast_costs(pair, prompts, settings, before, work, progress)
    chosen, skipped = tuned_policies(train, costs.cost, settings, work, progress)
    forecasts = sealed_forecast(
        work, forecast(chosen, train, costs, held_out=len(held), sealed=sealed, seed=settings.seed)
    )
    holdout = recorded().select(held)
    result = measure(
        pair, train, holdout, [prompts[number] for number in held], chosen, costs, forecasts, settings, progress, work
    )
    write_json(result.profile, out / "profile.json")
    document = {
        **as_document(result),
        "skipped": [{"policy": name, "reason": reason} for name, reason in skipped],
        "prompts": prompt_facts(prompts, settings.record.prompts_source),
        "load": result.measurement.load._asdict(),
        "options": settings.options,
    }
    with replacing(out / "rounds.parquet") as temporary:
        write_table(rounds_table(result), temporary)
    write_json(document, out / "validation.json")
    from specsim.report.validation import render_validation  # matplotlib is slow to load

    write_text(out / "report.html", render_validation(document))
    keep_forecast(work, out)
    remove_folder(work)
    return document


def forecast_costs(
    pair: Pair,
    prompts: Sequence[Prompt],
    settings: ValidationSettings,
    before: CostModel | None,
    work: Path,
    progress: Progress,
) -> ForecastCosts:
    """Return the costs to tune under and to forecast by: from before, rescaled by a probe, or a profile made now.

    before : the costs of `settings.cost`
    """
    if settings.tuned is not None:
        before, source = settings.tuned.cost, "the validation that is repeated"
    elif before is not None:
        source = str(settings.cost)
    if before is None:
        document = tuning_profile(pair, prompts, settings, work / PROFILE, progress)
        facts = {"source": "measured just before", **_origin(document)}
        drawn = drawn_costs(document, settings.seed)
        return ForecastCosts(profile_from_json(document, "just measured"), None, drawn, FRESH_RUN_ERROR, facts)
    return ForecastCosts(before, None, [], OLD_RUN_ERROR, {"source": source})


def drawn_costs(document: Mapping[str, Any], seed: int) -> list[CostModel]:
    """Draw costs that the measurement behind a profile could have given as well."""
    rng = np.random.default_rng(seed)
    return [profile_from_json(noisy_profile(document, rng), "just measured") for _ in range(DRAWN)]


def tuning_profile(
    pair: Pair, prompts: Sequence[Prompt], settings: ExperimentSettings, path: Path, progress: Progress
) -> dict[str, Any]:
    """Measure what rounds cost before anything is decoded, or read it from this file of an earlier start."""
    if not path.is_file():
        document = profile(
            pair,
            contexts=contexts_of(prompts, settings.record.max_new_tokens),
            depth=settings.record.max_draft_tokens,
            limit_s=profile_limit_s(settings.minutes),
            sampler=settings.record.sampler,
            seed=settings.seed,
            tree_tokens=TREE_TOKENS if settings.record.tree_nodes else 0,
            progress=lambda done, total: progress("profile", done, total),
        )
        write_json(document, path)
    return read_own(path, again=ANEW)


def contexts_of(prompts: Sequence[Prompt], new_tokens: int) -> list[int]:
    """Choose contexts to profile over all that rounds on these prompts may meet."""
    lengths = [len(prompt.tokens) for prompt in prompts]
    return contexts_between(min(lengths) - 1, max(lengths) + new_tokens - 2)


def profile_limit_s(minutes: float) -> float:
    """Return the seconds that a profile may take in an experiment of these minutes, 0 of one without a limit."""
    return min(PROFILE_LIMIT_S, 60 * minutes * PROFILE_SHARE) if minutes else PROFILE_LIMIT_S


def _origin(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return what tells a profile from others: its digest, and where and when it was measured."""
    made = document.get("provenance", {})
    return {"digest": digest(json.dumps(document)), **{name: made.get(name) for name in ("date", "device")}}


def tuned_policies(
    train: Trace, cost: CostModel, settings: ValidationSettings, work: Path, progress: Progress
) -> tuple[list[Candidate], list[tuple[str, str]]]:
    """Tune every policy on the tuning prompts, or take those that an earlier validation tuned."""
    if settings.tuned is not None:
        return list(settings.tuned.candidates), []
    search = SearchSettings(trials=settings.trials, seed=settings.seed)
    return candidates(train, cost, search, kinds=settings.kinds, progress=progress, kept=work / TUNED)


def keep_forecast(work: Path, out: Path) -> None:
    """Move to the result what was known before anything was decoded: profiles, tuned policies and forecasts."""
    for path in [*work.glob("tun*.json"), *work.glob("forecast*.json")]:
        path.replace(out / path.name)


def conditions_of(pair: Pair, settings: ExperimentSettings) -> dict[str, Any]:
    """Return the conditions under which sequences are decoded, by machine, target and tuning settings."""
    return {
        "layers": pair.target.config.num_hidden_layers,  # identity blocks are in no fingerprint, but take time
        "block_expansion": expansion_of(pair.target),
        "device": device_name(pair.device),
        "threads": torch.get_num_threads(),
        "clock": clock_name(),
        "kernels": backend_for(pair.device),
        "policies": {kind.name: source_digest(kind) for kind in settings.policies},
        "trials": settings.trials,
        "tuning_share": settings.tuning_share,
        "seed": settings.seed,
    }


def identity_of(pair: Pair, prompts: Sequence[Prompt], settings: ValidationSettings) -> dict[str, Any]:
    """Return all that tuned policies and decoded sequences depend on; repeats may be added."""
    tuned = settings.tuned
    policies = tuned and [[candidate.policy.name, candidate.policy.settings] for candidate in tuned.candidates]
    return {
        **recording_identity(pair, prompts, settings.record),
        **conditions_of(pair, settings),
        "cost": None if settings.cost is None else file_digest(cost_path(settings.cost)),
        "tuned": policies and digest(json.dumps(policies)),
    }
