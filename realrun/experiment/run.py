"""`realrun validate` from end to end, with its files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from realrun.experiment.document import as_document, rounds_table
from realrun.experiment.timing import check_repeats
from realrun.experiment.validate import Tuned, predict_and_measure
from realrun.lm.clock import clock_name
from realrun.lm.variants.block_expansion import expansion_of
from realrun.measure.profile import TREE_TOKENS, profile
from realrun.measure.record import RecordSettings
from realrun.measure.reuse import check_job, recorded_trace
from realrun.own_files import read_own, refuse_other
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt, prompt_facts
from realrun.provenance import device_name
from speckernels import backend_for
from specsim.cost.contexts import context_range
from specsim.cost.profile import profile_from_json
from specsim.io.files import digest, file_digest, remove_folder, replacing, write_json, write_table, write_text
from specsim.io.progress import Progress
from specsim.learn.journal import source_digest
from specsim.policy.base import Policy
from specsim.policy.registry import POLICIES
from specsim.trace.meta import META

UNFINISHED = "validation.partial"  # folder, in the output's, of what is there before the result
IDENTITY, PROFILE = "settings.json", "tuning_profile.json"  # in it
ANEW = "pass --overwrite"
TUNING_REPEATS = 6  # of every round in the profile that policies are tuned under; predictions have costs of their own


@dataclass(frozen=True)
class ValidationSettings:
    """How to record, tune and decode.

    Attributes
    ----------
    record : what is recorded, and how tokens are chosen
    kinds : policies to compare; None: all that the trace can serve
    trace : a recorded trace of these prompts and settings; None: the one in the output folder, recorded if need be
    trials : configurations to try per policy
    repeats : timed runs of every held-out prompt and policy, an odd number from 3 on
    tuning_share : share of the prompts to tune on, in (0, 1)
    seed : of all randomness
    overwrite : whether a validation that is there is replaced
    tuned : policies to compare as an earlier validation tuned them, in place of tuning `kinds`

    Examples
    --------
    >>> import realrun
    >>> realrun.ValidationSettings(realrun.RecordSettings(max_draft_tokens=8), trials=20).repeats
    3
    """

    record: RecordSettings
    kinds: tuple[type[Policy], ...] | None = None
    trials: int = 100
    repeats: int = 3
    tuning_share: float = 0.5
    seed: int = 0
    overwrite: bool = False
    trace: Path | None = None
    tuned: Tuned | None = None

    def __post_init__(self) -> None:
        check_repeats(self.repeats)


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
    claim(work, identity_of(pair, folder, settings))
    if settings.tuned is None and not (work / PROFILE).is_file():
        tuning_costs = profile(
            pair,
            contexts=[*dict.fromkeys(context_range(trace))],
            depth=trace.depth,
            repeats=TUNING_REPEATS,
            sampler=settings.record.sampler,
            seed=settings.seed,
            tree_tokens=TREE_TOKENS if settings.record.tree_nodes else 0,
            progress=lambda done, total: progress("profile", done, total),
        )
        write_json(tuning_costs, work / PROFILE)
    tuned = settings.tuned
    result = predict_and_measure(
        pair,
        trace,
        prompts,
        profile_from_json(read_own(work / PROFILE, again=ANEW), "just measured") if tuned is None else tuned.cost,
        kinds=settings.kinds,
        tuned=None if tuned is None else tuned.candidates,
        trials=settings.trials,
        repeats=settings.repeats,
        tuning_share=settings.tuning_share,
        seed=settings.seed,
        progress=progress,
        folder=work,
    )
    write_json(result.profile, out / "profile.json")
    facts = {
        "prompts": prompt_facts(prompts, settings.record.prompts_source),
        "load": result.load._asdict(),
        "options": {name: getattr(settings, name) for name in ("trials", "repeats", "tuning_share", "seed")},
    }
    document = {**as_document(result), **facts}
    with replacing(out / "rounds.parquet") as temporary:
        write_table(rounds_table(result), temporary)
    write_json(document, out / "validation.json")
    from specsim.report.validation import render_validation  # matplotlib is slow to load

    write_text(out / "report.html", render_validation(document))
    keep_forecast(work, out)
    remove_folder(work)
    return document


def keep_forecast(work: Path, out: Path) -> None:
    """Keep beside the result what was known before anything was decoded: tuning profiles and tuned policies."""
    for path in work.glob("tun*.json"):
        path.replace(out / path.name)


def identity_of(pair: Pair, trace: Path, settings: ValidationSettings) -> dict[str, Any]:
    """All that tuned policies and decoded sequences depend on; there may be more repeats of them."""
    kinds, tuned = POLICIES.values() if settings.kinds is None else settings.kinds, settings.tuned
    return {
        "weights": pair.fingerprint,
        "layers": pair.target.config.num_hidden_layers,  # identity blocks are in no fingerprint, but take time
        "block_expansion": expansion_of(pair.target),
        "predictor": None if pair.predictor is None else pair.predictor.digest,
        "trace": file_digest(trace / META),  # which has the digests of its other files
        "device": device_name(pair.device),
        "threads": torch.get_num_threads(),
        "clock": clock_name(),
        "dtype": pair.number_type,
        "kernels": backend_for(pair.device),
        "policies": {kind.name: source_digest(kind) for kind in kinds},
        "tuned": tuned and digest(json.dumps([[one.policy.name, one.policy.settings] for one in tuned.candidates])),
        "trials": settings.trials,
        "tuning_share": settings.tuning_share,
        "seed": settings.seed,
    }


def claim(work: Path, identity: dict[str, Any]) -> None:
    """Make the folder this validation's, or find that it is; InputError if it is another's."""
    path = work / IDENTITY
    if not path.is_file():
        write_json(identity, path)
    found = read_own(path, again=ANEW)
    refuse_other(f"{work} holds an unfinished validation", found, identity, f"{ANEW} or another --out")
