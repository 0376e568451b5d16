"""`realrun record`: a dense trace of a pair."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from realrun.cli.options import (
    DeviceOption,
    DrafterOption,
    DraftModelOption,
    DtypeOption,
    JsonOption,
    Kernels,
    KernelsOption,
    MaxDraftTokensOption,
    MaxNewTokensOption,
    Mode,
    ModeOption,
    NumPromptsOption,
    OverwriteOption,
    PredictorOption,
    PromptsOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    ThreadsOption,
    TokenizerDifferenceOption,
    TopKOption,
    TopPOption,
    TreeNodesOption,
    TreeWidthOption,
    load,
    load_prompts,
)
from specsim.cli.console import print_json, print_table, progress_bar


def record(
    out: Annotated[Path, typer.Argument(help="Trace folder to write.", show_default=False)],
    target: TargetOption = "lab",
    draft_model: DraftModelOption = "lab",
    allow_tokenizer_difference: TokenizerDifferenceOption = False,
    drafter: DrafterOption = "model",
    predictor: PredictorOption = "auto",
    prompts: PromptsOption = None,
    num_prompts: NumPromptsOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    max_draft_tokens: MaxDraftTokensOption = 16,
    tree_nodes: TreeNodesOption = 0,
    tree_width: TreeWidthOption = 10,
    mode: ModeOption = Mode.gumbel,
    temperature: TemperatureOption = 0.8,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    seed: SeedOption = 0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    threads: ThreadsOption = 1,
    kernels: KernelsOption = Kernels.auto,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
) -> None:
    """Record a dense trace: what the drafter would propose at every position of the target's output.

    Finished sequences are kept in OUT.partial until the trace is whole; started again after an interruption, the same
    command goes on with them.
    """
    from realrun.decode.sampling import Sampler
    from realrun.lm.kernels import use_kernels
    from realrun.pairs.prompts import prompts_source
    from realrun.recording.partial import partial_of
    from realrun.recording.record import RecordSettings, longest_prompt, summary
    from realrun.recording.reuse import clear_finished, recorded_trace
    from specsim.files import working_in
    from specsim.trace.files import check_free

    clear_finished(out)
    check_free(out, overwrite=overwrite)
    sampler = Sampler(mode.value, temperature, seed, top_p, top_k)
    source = prompts_source(target, prompts)
    settings = RecordSettings(max_draft_tokens, max_new_tokens, sampler, tree_nodes, tree_width, source)
    where = target, draft_model, device, dtype, threads
    with working_in(partial_of(out)), use_kernels(kernels.value), progress_bar() as report:
        pair = load(*where, predictor, drafter, allow_tokenizer_difference=allow_tokenizer_difference)
        chosen = load_prompts(pair, prompts, num_prompts, longest_prompt(pair, max_new_tokens, max_draft_tokens))
        trace = recorded_trace(
            pair, chosen, settings, out, lambda done, total: report("record", done, total), overwrite=overwrite
        )
    document = {"trace": str(out), **summary(trace)}
    if json:
        print_json(document)
    else:
        rows = [[k, f"{v:.3f}" if isinstance(v, float) else str(v)] for k, v in document.items()]
        print_table("recorded", ["", "value"], rows)
