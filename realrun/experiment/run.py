"""`realrun validate` from end to end, with its files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from realrun.experiment.budget import Plan
from realrun.experiment.document import as_document, rounds_table
from realrun.experiment.forecast import costs_before, decoding_step_s, forecast, forecast_costs, probed, sealed_forecast
from realrun.experiment.settings import ExperimentSettings, ValidationSettings
from realrun.experiment.validate import TUNED, candidates, measure
from realrun.kept_files import claim, read_own
from realrun.lm.clock import clock_name
from realrun.lm.variants import expansion_of
from realrun.measure.reuse import check_job, recorded_trace, recording_identity
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt, prompt_facts
from realrun.provenance import device_name
from speckernels import backend_for
from specsim.cost.files import cost_path
from specsim.cost.probe import changes
from specsim.io.arrays import Ints
from specsim.io.files import file_digest, remove_folder, replacing, write_json, write_table, write_text
from specsim.io.progress import Progress
from specsim.learn.settings import SearchSettings
from specsim.learn.storage import source_digest
from specsim.trace.trace import Trace

UNFINISHED = "validation.partial"  # folder, in the output's, of what is there before the result
IDENTITY, PROBE, PROFILE, PLAN = "settings.json", "probe.json", "tuning_profile.json", "plan.json"  # in it
ANEW = "pass --overwrite"
OTHER = f"{ANEW} or another --out"


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
    >>> settings = realrun.ValidationSettings(record, (POLICIES["fixed_k"],), trials=2, minutes=0.1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     out, prompts = Path(folder) / "validation", lab_prompts(pair.tokenizer, 4)
    ...     document = realrun.validate(pair, prompts, settings, out)
    >>> document["rows"][0]["rounds_identical_percent"]
    100.0
    """
    begun_s = time.monotonic()
    before = costs_before(settings)
    check_job(out, prompts, tuning_share=settings.tuning_share, seed=settings.seed)
    out.mkdir(parents=True, exist_ok=True)
    work, folder = out / UNFINISHED, settings.trace or out / "trace"
    if settings.overwrite:
        remove_folder(work)
    sealed = settings.overwrite or not folder.exists()
    if not (work / PROBE).is_file():  # of an earlier start, whose policies were tuned at that state
        write_json(probed(pair, prompts, settings, before, progress), work / PROBE)
    state = read_own(work / PROBE, again=ANEW)
    plan = Plan(work / PLAN, settings, lambda: decoding_step_s(state))
    given, prompts = prompts, plan.to_record(prompts, None if sealed else folder)
    tuning, held = check_job(out, prompts, tuning_share=settings.tuning_share, seed=settings.seed)

    def recorded(sequences: Ints | None = None) -> Trace:
        def report(done: int, total: int) -> None:
            progress("record" if sequences is None else "record tuning prompts", done, total)

        return recorded_trace(
            pair, prompts, settings.record, folder, report, overwrite=settings.overwrite, sequences=sequences
        )

    train = recorded(tuning)
    claim(work / IDENTITY, identity_of(pair, prompts, settings), f"{work} holds an unfinished validation", OTHER)
    costs = forecast_costs(pair, prompts, settings, before, state, work / PROFILE, progress)
    search = SearchSettings(trials=settings.trials, seed=settings.seed)
    tuned, skipped = candidates(train, costs.cost, search, kinds=settings.kinds, progress=progress, kept=work / TUNED)
    chosen, decoded = plan.to_decode(tuned, [prompts[number] for number in held], time.monotonic() - begun_s)
    held = held[decoded]
    skipped += [(candidate.variant, plan.reason) for candidate in tuned if candidate not in chosen]
    forecasts = sealed_forecast(
        work, forecast(chosen, train, costs, held_out=len(held), sealed=sealed, seed=settings.seed)
    )
    holdout = recorded().select(held)
    result = measure(
        pair, train, holdout, [prompts[number] for number in held], chosen, costs, forecasts, settings, progress, work
    )
    after = probed(pair, given, settings, before, progress)
    write_json(result.profile, out / "profile.json")
    document = {
        **as_document(result),
        "machine_state": {"before": state, "after": after, "changes": [c._asdict() for c in changes(state, after)]},
        "time": {
            "minutes": settings.minutes,
            "spent_s": time.monotonic() - begun_s,
            "prompts": {"given": len(given), "recorded": len(prompts), "decoded": len(held)},
        },
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
        "minutes": settings.minutes,  # by which held-out prompts are chosen, whose numbers name decoded sequences
    }


def identity_of(pair: Pair, prompts: Sequence[Prompt], settings: ValidationSettings) -> dict[str, Any]:
    """Return all that tuned policies and decoded sequences depend on; repeats may be added."""
    return {
        **recording_identity(pair, prompts, settings.record),
        **conditions_of(pair, settings),
        "cost": None if settings.cost is None else file_digest(cost_path(settings.cost)),
    }
