"""The command `typical`: MEDUSA's typical acceptance against loss-free decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from realrun.cli.options import (
    DeviceOption,
    DrafterOption,
    DraftModelOption,
    DtypeOption,
    JsonOption,
    MaxNewTokensOption,
    NumPromptsOption,
    PromptsOption,
    SeedOption,
    TargetOption,
    ThreadsOption,
    TokenizerDifferenceOption,
    load,
    load_prompts,
)
from specsim.cli.console import parse_numbers, parse_settings, print_json, print_table, progress_bar
from specsim.speedup.intervals import interval_text


def typical(
    target: TargetOption = "lab",
    draft_model: DraftModelOption = "lab",
    allow_tokenizer_difference: TokenizerDifferenceOption = False,
    drafter: DrafterOption = "medusa-1",
    prompts: PromptsOption = None,
    num_prompts: NumPromptsOption = None,
    max_new_tokens: MaxNewTokensOption = 128,
    temperature: Annotated[float, typer.Option(help="Temperature of sampling and of the rule.")] = 0.7,
    epsilons: Annotated[str | None, typer.Option(help="Thresholds, comma-separated. Default: 0.01 to 0.25.")] = None,
    delta: Annotated[float | None, typer.Option(help="The rule's second threshold. Default: sqrt(epsilon).")] = None,
    policy: Annotated[str, typer.Option(help="Tree policy that says what is drafted.")] = "sparse_tree",
    set_: Annotated[
        list[str], typer.Option("--set", help="A setting of it, NAME=VALUE; repeat for more.", metavar="NAME=VALUE")
    ] = [],  # noqa: B006 (typer reads the default, nobody changes it)
    out: Annotated[Path | None, typer.Option(help="JSON file to write as well.")] = None,
    seed: SeedOption = 0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    threads: ThreadsOption = 1,
    json: JsonOption = False,
) -> None:
    """Speed and quality of typical acceptance over its threshold, with greedy and sampled decoding beside it.

    Speed is tokens per target pass, quality the target's log-likelihood of the output. Typical acceptance
    is lossy: what it writes is not what the target would have written.
    """
    from realrun.pairs.prompts import prompts_source
    from realrun.recording.record import longest_prompt
    from realrun.validation.typical_acceptance import EPSILONS, TypicalSettings, compare_typical
    from specsim.files import check_writable, write_json
    from specsim.policy.base import build_policy
    from specsim.policy.registry import find_policies
    from specsim.tuning.space import cap_depth

    if out is not None:
        check_writable(out)
    source = prompts_source(target, prompts)
    settings = TypicalSettings(_thresholds(epsilons) or EPSILONS, delta, temperature, max_new_tokens, seed, source)
    (kind,) = find_policies([policy]).values()
    where = target, draft_model, device, dtype, threads
    pair = load(*where, "none", drafter, allow_tokenizer_difference=allow_tokenizer_difference)
    cut: dict[str, Any] = cap_depth(kind, pair.drafter.max_depth) if pair.drafter.max_depth else {}
    chosen = build_policy(kind, {**cut, **parse_settings(set_)})
    with progress_bar() as report:
        longest = longest_prompt(pair, max_new_tokens, chosen.max_draft_tokens)
        texts = load_prompts(pair, prompts, num_prompts, longest)
        document = compare_typical(pair, texts, chosen, settings, lambda done, total: report("decode", done, total))
    if out is not None:
        write_json(document, out)
    if json:
        print_json(document)
        return

    rows = [
        [
            f"{arm['arm']}, epsilon {arm['epsilon']:g}, delta {arm['delta']:.3g}" if "epsilon" in arm else arm["arm"],
            interval_text(arm["acceleration_rate"]),
            interval_text(arm["log_likelihood_nats"]),
            interval_text(arm["log_likelihood_at_temperature_nats"]),
            f"{arm['distinct_trigram_share']:.3f}",
        ]
        for arm in document["arms"]
    ]
    columns = [
        "acceptance",
        "tokens per target pass",
        "nats per token",
        f"at temperature {temperature:g}",
        "distinct trigrams",
    ]
    title = f"{document['drafter']}, {chosen.name}, {document['prompts']['count']} prompts, 95 % intervals"
    print_table(title, columns, rows)


def _thresholds(text: str | None) -> tuple[float, ...]:
    return () if text is None else tuple(parse_numbers(text, "--epsilons", float, "0.05,0.1,0.2"))
