"""`realrun validate` from end to end, with its files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from realrun.experiment.document import as_document, rounds_table
from realrun.experiment.settings import ExperimentSettings, ValidationSettings
from realrun.experiment.validate import predict_and_measure
from realrun.lm.clock import clock_name
from realrun.lm.variants.block_expansion import expansion_of
from realrun.measure.profile import TREE_TOKENS, profile
from realrun.measure.reuse import check_job, recorded_trace
from realrun.own_files import claim, read_own
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt, prompt_facts
from realrun.provenance import device_name
from speckernels import backend_for
from specsim.cost.contexts import context_range
from specsim.cost.profile import ProfileCost, profile_from_json
from specsim.io.files import digest, file_digest, remove_folder, replacing, write_json, write_table, write_text
from specsim.io.progress import Progress
from specsim.learn.journal import source_digest
from specsim.trace.meta import META
from specsim.trace.trace import Trace

UNFINISHED = "validation.partial"  # folder, in the output's, of what is there before the result
IDENTITY, PROFILE = "settings.json", "tuning_profile.json"  # in it
ANEW = "pass --overwrite"
OTHER = f"{ANEW} or another --out"
TUNING_LIMIT_S = 0.0  # after the fewest sweeps: policies are tuned under this profile; predictions have their own costs


def validate(
    pair: Pair,
    prompts: Sequence[Prompt],
    settings: ValidationSettings,
    out: Path,
    progress: Progress = lambda what, done, total: None,
) -> dict[str, Any]:
    """Record, profile, tune on one part of the prompts, predict and really decode the other, and compare.

    Parameters
    ----------
    pair : Pair
    prompts : sequence of Prompt
    settings : ValidationSettings
    out : Path
        Folder for trace, profile, rounds, validation.json and report.html; a trace that is there is used again. Of a
        validation that was interrupted so are the policies it had tuned and the sequences it had decoded.
        tuning_profile.json and tuned.json hold what was known before anything was decoded: the costs that policies
        were tuned under, and the speedups that these forecast.
    progress : callable, optional
        Told (what, done, total).

    Returns
    -------
    dict
        The document of validation.json: a row for each policy with predicted and measured speedup, their intervals,
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
    check_job(out, prompts, tuning_share=settings.tuning_share, seed=settings.seed)
    out.mkdir(parents=True, exist_ok=True)
    if settings.overwrite:
        remove_folder(out / UNFINISHED)
    folder = settings.trace or out / "trace"
    trace = recorded_trace(
        pair,
        prompts,
        settings.record,
        folder,
        lambda done, total: progress("record", done, total),
        overwrite=settings.overwrite,
    )
    work = out / UNFINISHED
    claim(work / IDENTITY, identity_of(pair, folder, settings), f"{work} holds an unfinished validation", OTHER)
    tuned = settings.tuned
    cost = tuning_cost(pair, trace, settings, work / PROFILE, progress) if tuned is None else tuned.cost
    result = predict_and_measure(pair, trace, prompts, cost, settings, progress, work)
    write_json(result.profile, out / "profile.json")
    document = {
        **as_document(result),
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


def tuning_cost(pair: Pair, trace: Trace, settings: ValidationSettings, path: Path, progress: Progress) -> ProfileCost:
    """Measure what rounds cost before anything is decoded, or read it from this file of an earlier start."""
    if not path.is_file():
        document = profile(
            pair,
            contexts=[*dict.fromkeys(context_range(trace))],
            depth=trace.depth,
            limit_s=TUNING_LIMIT_S,
            sampler=settings.record.sampler,
            seed=settings.seed,
            tree_tokens=TREE_TOKENS if settings.record.tree_nodes else 0,
            progress=lambda done, total: progress("profile", done, total),
        )
        write_json(document, path)
    return profile_from_json(read_own(path, again=ANEW), "just measured")


def keep_forecast(work: Path, out: Path) -> None:
    """Move tuning profiles and tuned policies, which were known before anything was decoded, beside the result."""
    for path in work.glob("tun*.json"):
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


def identity_of(pair: Pair, trace: Path, settings: ValidationSettings) -> dict[str, Any]:
    """Return all that tuned policies and decoded sequences depend on; repeats may be added."""
    tuned = settings.tuned
    policies = tuned and [[candidate.policy.name, candidate.policy.settings] for candidate in tuned.candidates]
    return {
        "weights": pair.fingerprint,
        **conditions_of(pair, settings),
        "dtype": pair.number_type,
        "predictor": None if pair.predictor is None else pair.predictor.digest,
        "trace": file_digest(trace / META),  # which has the digests of its other files
        "tuned": policies and digest(json.dumps(policies)),
    }
