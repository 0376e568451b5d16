"""`realrun engine drafter-check`: compare what an engine drafts in several ways of running it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from realrun.cli.options import DepthSettings, DrafterSettings, MachineSettings, PromptSettings
from specsim.cli.command import Answer
from specsim.cli.console import progress_bar
from specsim.io.settings import setting


@dataclass(frozen=True, kw_only=True)
class DrafterCheckOptions(DepthSettings, PromptSettings):
    """Which engine runs, and how."""

    engine: str = setting(..., "Engine to run: vllm.")
    k: tuple[int, ...] = setting((3,), "Draft lengths K of normal runs, each a run of its own.")
    batch: int = setting(4, "Maximum batch size of the batched run.", low=2)


def drafter_check(options: DrafterCheckOptions, models: DrafterSettings) -> Answer:
    """Check an engine's drafter for consistency.

    Records what the engine's drafter proposes at every position. Checks that the rounds of normal runs are those of the
    replay, and that no draft changes when prompts are read in chunks or when several sequences run at once. Exits with
    1 if something differs. An inconsistent drafter changes acceptance, but not the output, so that no metric of the
    engine shows the defect. vLLM needs an environment of its own: `nox -s vllm` makes it in this folder, or
    SPECSIM_VLLM_PYTHON names its interpreter.

    Example: realrun engine drafter-check --engine vllm --target MODEL --drafter EAGLE3_FOLDER --num-prompts 12
    """
    from realrun.decode.sampling import Sampler
    from realrun.engines.check import recorded_tokens, settings_of
    from realrun.engines.drafter_check import drafter_check as run_check
    from realrun.engines.registry import find_engine
    from realrun.measure.record import longest_prompt
    from realrun.pairs.prompts import prompts_source
    from specsim.io.errors import InputError

    engine, depth, tokens = find_engine(options.engine), options.max_draft_tokens, options.max_new_tokens
    engine.check_dense(Sampler("greedy"))
    settings_of(engine, list(options.k), [], options.batch)  # refuses what it cannot run
    if max(options.k) > depth:
        raise InputError(f"--k {max(options.k)} is more than --max-draft-tokens {depth}; give a smaller K")
    source = prompts_source(models.target, options.prompts)
    with progress_bar() as report:
        pair = models.load(MachineSettings())
        prompts = options.load(pair, longest_prompt(pair, recorded_tokens(engine, depth, tokens) + depth, depth))
        document = run_check(
            pair,
            prompts,
            engine,
            list(options.k),
            tokens,
            depth=depth,
            batch=options.batch,
            source=source,
            progress=report,
        )
    return Answer(document, partial(_print_check, document), document["passed"])


def _print_check(document: dict[str, Any]) -> None:
    drafter = f"{document['target']} with {document['drafter']}, drafts of up to {document['depth']} tokens"
    size = f"{document['prompts']['count']} prompts, up to {document['max_new_tokens']} tokens"
    print(f"{document['engine']} {document['version']}, {drafter}: {size}")
    for row in document["checks"]:
        total, unit = row["total"], row["unit"]
        gap = f", probabilities within {row['largest_prob_difference']:.1g}" if "largest_prob_difference" in row else ""
        result = f"equal ({total:,} {unit}{gap})"
        if not row["passed"]:
            result = f"{total - row['equal']:,} of {total:,} {unit} differ"
            if "other_tokens" in row:
                result += f", {row['other_tokens']:,} of them in drafted tokens"
            result += f"; first: {row['first_difference']}"
        print(f"{row['check']}: {result}")
        for tie in row["near_ties"]:
            print(f"numerically tied logits: {tie}")
    print(
        "the drafter proposes the same tokens in all of these runs"
        if document["passed"]
        else "the drafter's proposals depend on how the engine runs"
    )
