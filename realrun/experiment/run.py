"""`realrun validate` from end to end, with its files."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realrun.experiment.document import as_document, rounds_table
from realrun.experiment.forecast import ForecastCosts, costs_before, decoding_step_s, forecast_costs, probed
from realrun.experiment.pipeline import ANEW, IDENTITY, OTHER, UNFINISHED, Contender, Validation, identity_of, log
from realrun.experiment.settings import ValidationSettings
from realrun.experiment.validate import validation_of
from realrun.kept_files import claim, read_own
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt, prompt_facts
from specsim.cost.files import cost_path
from specsim.cost.probe import changes
from specsim.io.files import file_digest, replacing, write_json, write_table, write_text
from specsim.io.progress import Progress

PAIR = "pair"  # the only contender
PROBE, PROFILE = "probe.json", "tuning_profile.json"  # in the folder of an unfinished validation


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
    work = out / UNFINISHED
    experiment = _Validation(pair, prompts, settings, out, work, progress)
    experiment.begin(out)
    outcome = experiment.run()
    result = validation_of(outcome, settings.seed)
    after = probed(pair, prompts, settings, experiment.before, progress)
    write_json(result.profile, out / "profile.json")
    changed = [change._asdict() for change in changes(experiment.state, after)]
    document = {
        **as_document(result),
        "machine_state": {"before": experiment.state, "after": after, "changes": changed},
        "time": {
            "minutes": settings.minutes,
            "spent_s": time.monotonic() - experiment.begun_s,
            "prompts": {
                "given": len(prompts),
                "recorded": len(experiment.prompts),
                "decoded": result.holdout.sequences,
            },
        },
        "skipped": [{"policy": policy, "reason": reason} for _, policy, reason in outcome.skipped],
        "prompts": prompt_facts(experiment.prompts, settings.record.prompts_source),
        "load": result.measurement.load._asdict(),
        "options": settings.options,
    }
    with replacing(out / "rounds.parquet") as temporary:
        write_table(rounds_table(result), temporary)
    write_json(document, out / "validation.json")
    from specsim.report.validation import render_validation  # matplotlib is slow to load

    write_text(out / "report.html", render_validation(document))
    experiment.finish(out)
    return document


class _Validation(Validation):
    """A validation of a pair, whose costs may be from before."""

    settings: ValidationSettings

    def __init__(
        self,
        pair: Pair,
        prompts: Sequence[Prompt],
        settings: ValidationSettings,
        out: Path,
        work: Path,
        progress: Progress,
    ):
        self.before = costs_before(settings)
        contender = Contender(pair, {settings.trace or out / "trace": pair}, settings.record)
        super().__init__({PAIR: contender}, pair, prompts, settings, work, progress, overwrite=settings.overwrite)

    def begin(self, out: Path) -> None:
        super().begin(out)
        path = self.folder / PROBE
        if not path.is_file():  # of an earlier start, whose policies were tuned at that state
            write_json(probed(self.plain, self.given, self.settings, self.before, self.progress), path)
        self.state = read_own(path, again=ANEW)
        step_s = decoding_step_s(self.state)
        log.info(f"without speculation: {1 / step_s:.1f} tokens per second, {1e3 * step_s:.1f} ms per token")

    def claim(self) -> None:
        cost = None if self.settings.cost is None else file_digest(cost_path(self.settings.cost))
        identity = {**identity_of(self.plain, self.prompts, self.settings), "cost": cost}
        claim(self.folder / IDENTITY, identity, f"{self.folder} holds an unfinished validation", OTHER)

    def costs(self) -> Mapping[str, ForecastCosts]:
        path = self.folder / PROFILE
        return {
            PAIR: forecast_costs(self.plain, self.prompts, self.settings, self.before, self.state, path, self.progress)
        }
