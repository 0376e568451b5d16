"""`realrun typical`: MEDUSA's typical acceptance against lossless decoding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer

from realrun.cli.options import DrafterSettings, MachineSettings, PromptSettings, capped_policy, refuse_beside
from specsim.cli.command import Answer
from specsim.cli.console import claim_file, parse_settings, print_table, progress_bar
from specsim.cli.options import OVERWRITE_FILE_HELP, SET_HELP, SeedSettings
from specsim.io.errors import InputError
from specsim.io.settings import setting


@dataclass(frozen=True, kw_only=True)
class TreeDrafterSettings(DrafterSettings):
    """A pair whose drafter proposes trees."""

    drafter: str = setting("eagle", "Draft head of the lab's target, or a folder made by `realrun train`.")


@dataclass(frozen=True, kw_only=True)
class TypicalOptions(PromptSettings, SeedSettings):
    """Thresholds and policy of typical acceptance."""

    temperature: float = setting(0.7, "Temperature of sampling and of the acceptance rule.")
    epsilons: tuple[float, ...] | None = setting(None, "Thresholds, comma-separated. Default: 0.01 to 0.25.")
    delta: float | None = setting(None, "Second threshold of the rule. Default: sqrt(epsilon).")
    policy: str = setting("sparse_tree", "Tree policy that decides what is drafted.")
    trace: Path | None = setting(
        None,
        "Trace of `realrun record --typical`: its prompts and temperature are taken, and the rates of its replays are "
        "printed beside the real runs'.",
    )
    set_: list[str] = setting([], SET_HELP, metavar="NAME=VALUE")
    out: Path | None = setting(None, "JSON file to write as well.")
    overwrite: bool = setting(False, OVERWRITE_FILE_HELP, flag="--overwrite")


REPLAYED = "replayed_acceleration_rate"
FROM_TRACE = "prompts", "num_prompts", "max_new_tokens", "temperature"  # by --trace


def typical(
    ctx: typer.Context, models: TreeDrafterSettings, options: TypicalOptions, machine: MachineSettings
) -> Answer:
    """Compare typical acceptance with lossless.

    Typical acceptance is compared over its threshold with greedy and sampled decoding. Speed is tokens per target
    pass, quality the target's log-likelihood of the output. Typical acceptance is lossy: it does not write what the
    target would have written.
    """
    from realrun.decode.sampling import Sampler
    from realrun.experiment.typical_acceptance import EPSILONS, TypicalSettings, compare_typical
    from realrun.measure.record import longest_prompt
    from realrun.measure.reuse import check_pair, prompts_of, sampler_of
    from realrun.pairs.prompts import prompts_source
    from specsim.io.files import write_json
    from specsim.policy.registry import find_policies
    from specsim.trace.files import read_plain_trace
    from specsim.trace.typical import typically_accepted

    if options.out is not None:
        claim_file(options.out, overwrite=options.overwrite)
    source = prompts_source(models.target, options.prompts)
    temperature, tokens, trace = options.temperature, options.max_new_tokens, None
    if options.trace is not None:
        refuse_beside(ctx, "trace", FROM_TRACE)
        trace, source = read_plain_trace(options.trace), str(options.trace)
        typically_accepted(trace)  # refused before models are loaded
        sampler, tokens = sampler_of(trace, source), int(trace.budget_tokens.max())
        temperature = sampler.temperature
        if sampler != Sampler("greedy-draft", temperature, sampler.seed):
            raise InputError(f"{source} was not recorded with --mode greedy-draft alone; record it so, without --top-p")
    settings = TypicalSettings(options.epsilons or EPSILONS, options.delta, temperature, tokens, options.seed, source)
    (kind,) = find_policies([options.policy]).values()
    pair = models.load(machine)
    policy = capped_policy(pair, kind, parse_settings(options.set_))
    with progress_bar() as report:
        if trace is None:
            prompts = options.load(pair, longest_prompt(pair, tokens, policy.max_draft_tokens))
        else:
            check_pair(trace, pair, source)
            prompts = prompts_of(trace, source)
        document = compare_typical(pair, prompts, policy, settings, partial(report, "decode"), trace)
    if options.out is not None:
        write_json(document, options.out)
    return Answer(document, partial(_print_arms, document, policy.name, temperature))


def _print_arms(document: dict[str, Any], policy: str, temperature: float) -> None:
    from specsim.replaying.intervals import interval_text

    replayed = [arm[REPLAYED] for arm in document["arms"] if REPLAYED in arm]
    rows = [
        [
            f"{arm['arm']}, epsilon {arm['epsilon']:g}, delta {arm['delta']:.3g}" if "epsilon" in arm else arm["arm"],
            interval_text(arm["acceleration_rate"]),
            *([f"{arm[REPLAYED]['estimate']:.3f}" if REPLAYED in arm else ""] if replayed else []),
            interval_text(arm["log_likelihood_nats"]),
            interval_text(arm["log_likelihood_at_temperature_nats"]),
            f"{arm['distinct_trigram_share']:.3f}",
        ]
        for arm in document["arms"]
    ]
    at_temperature = f"at temperature {temperature:g}"
    by_replay = ["by replay"] if replayed else []
    columns = ["acceptance", "tokens per target pass", *by_replay, "nats per token", at_temperature]
    columns.append("distinct trigrams")
    title = f"{document['drafter']}, {policy}, {document['prompts']['count']} prompts, 95 % intervals"
    if lacking := max((rate["truncated_rounds"] for rate in replayed), default=0):
        title += f"; in up to {lacking} rounds the trace lacks nodes: record a larger tree"
    print_table(title, columns, rows)
