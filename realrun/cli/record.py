"""`realrun record`: a dense trace of a pair."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import typer

from realrun.cli.options import OVERWRITE_HELP, KernelSettings, PairSettings, RecordOptions, refuse_beside
from specsim.cli.command import Answer
from specsim.cli.console import print_facts, progress_bar
from specsim.cli.options import SeedSettings
from specsim.io.errors import InputError
from specsim.io.settings import argument, setting


@dataclass(frozen=True, kw_only=True)
class TraceFolder(SeedSettings):
    out: Path = argument("Trace folder to write.")
    overwrite: bool = setting(False, OVERWRITE_HELP, flag="--overwrite/--no-overwrite")
    engine: str | None = setting(
        None, "Record inside this engine, in float32 on the CPU: vllm or llamacpp. Default: transformers."
    )
    typical: bool = setting(
        False,
        "Record the target's probability of every tree node as well, for replays of typical acceptance "
        "(`specsim replay --accept typical`).",
        flag="--typical/--no-typical",
    )
    batch: int = setting(1, "Maximum batch size (vLLM).", low=1)


DECIDED = "device", "dtype", "kernels", "predictor", "tree_nodes", "tree_width"  # by --engine


def record(
    ctx: typer.Context, pair: PairSettings, options: RecordOptions, machine: KernelSettings, folder: TraceFolder
) -> Answer:
    """Record a trace of a target and its drafter.

    At every position of the target's output, the trace holds what the drafter would propose there. Finished sequences
    are kept in OUT.partial; after an interruption the same command goes on with them.

    With --engine vllm the drafts are vLLM's own, of a draft model, prompt lookup, an EAGLE or an EAGLE-3 drafter;
    with --mode greedy or greedy-draft. With --engine llamacpp, llama.cpp decodes greedily, and its draft model
    continues the text at every position. Neither drafts ahead of the first output token, so that position has no
    draft. An interrupted recording starts anew. vLLM needs an environment of its own: `nox -s vllm` makes it in the
    source tree, or SPECSIM_VLLM_PYTHON names its interpreter.

    Example: realrun record trace --engine vllm --mode greedy --num-prompts 12 --batch 4
    """
    from realrun.engines.dense import record_with_engine
    from realrun.engines.registry import find_engine
    from realrun.measure.record import longest_prompt, partial_of, summary
    from realrun.measure.reuse import clear_finished, recorded_trace
    from specsim.engines.lossless import check_known
    from specsim.io.files import working_in
    from specsim.trace.files import check_free, write_trace

    out, overwrite = folder.out, folder.overwrite
    depth, tokens = options.max_draft_tokens, options.max_new_tokens
    clear_finished(out)
    check_free(out, overwrite=overwrite)
    settings = dataclasses.replace(options.settings(pair.target, folder.seed), typical=folder.typical)
    engine = None
    if folder.engine is not None:
        refuse_beside(ctx, "engine", DECIDED)
        engine = find_engine(folder.engine)
        engine.check_dense(settings.sampler)
        if settings.sampler.mode != "greedy":
            check_known(engine.name, engine.version(), "cpu")
    elif folder.batch > 1:
        raise InputError("--batch is for recordings inside vLLM; give --engine vllm, or remove it")
    with working_in(partial_of(out)), machine.in_use(), progress_bar() as report:
        loaded = pair.load(machine)
        if engine is None:
            prompts = options.load(loaded, longest_prompt(loaded, tokens, depth))
            trace = recorded_trace(loaded, prompts, settings, out, partial(report, "record"), overwrite=overwrite)
        else:
            prompts = options.load(loaded, longest_prompt(loaded, tokens + depth, depth))
            trace = record_with_engine(loaded, prompts, settings, engine, batch=folder.batch)
            write_trace(trace, out, overwrite=overwrite)
    document = {"trace": str(out), **summary(trace)}
    return Answer(document, partial(print_facts, "recorded", document))
