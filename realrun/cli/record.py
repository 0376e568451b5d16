"""`realrun record`: a dense trace of a pair."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from realrun.cli.options import OVERWRITE_HELP, KernelSettings, PairSettings, RecordOptions
from specsim.cli.command import Answer
from specsim.cli.console import print_facts, progress_bar
from specsim.cli.options import SeedSettings
from specsim.cli.settings import argument, setting


@dataclass(frozen=True, kw_only=True)
class TraceFolder(SeedSettings):
    out: Path = argument("Trace folder to write.")
    overwrite: bool = setting(False, OVERWRITE_HELP, flag="--overwrite/--no-overwrite")


def record(pair: PairSettings, options: RecordOptions, machine: KernelSettings, folder: TraceFolder) -> Answer:
    """Record a trace of a target and its drafter.

    At every position of the target's output, the trace holds what the drafter would propose there. Finished sequences
    are kept in OUT.partial; after an interruption the same command goes on with them.
    """
    from realrun.measure.partial import partial_of
    from realrun.measure.record import longest_prompt, summary
    from realrun.measure.reuse import clear_finished, recorded_trace
    from specsim.io.files import working_in
    from specsim.trace.files import check_free

    out, overwrite = folder.out, folder.overwrite
    clear_finished(out)
    check_free(out, overwrite=overwrite)
    settings = options.settings(pair.target, folder.seed)
    with working_in(partial_of(out)), machine.in_use(), progress_bar() as report:
        loaded = pair.load(machine)
        prompts = options.load(loaded, longest_prompt(loaded, options.max_new_tokens, options.max_draft_tokens))
        trace = recorded_trace(loaded, prompts, settings, out, partial(report, "record"), overwrite=overwrite)
    document = {"trace": str(out), **summary(trace)}
    return Answer(document, partial(print_facts, "recorded", document))
