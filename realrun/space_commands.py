"""`realrun train space`: a target that learns to propose its own next tokens."""

from __future__ import annotations

from typing import Annotated

import typer

from realrun.options import DeviceOption, JsonOption, SeedOption, TargetOption, ThreadsOption, load_alone
from realrun.training_options import (
    BatchOption,
    CacheOption,
    Float32Option,
    GeneratedOption,
    MicroOption,
    MillionsOption,
    OutOption,
    ShareOption,
    SmokeOption,
    TemperatureOption,
    TextOption,
    TypeOption,
    WarmupOption,
    WindowOption,
    loop_settings,
    print_training,
    stored_type,
    text_settings,
)
from specsim.console import progress_bar


def space(
    out: OutOption,
    target: TargetOption = "lab",
    text: TextOption = None,
    masks: Annotated[int, typer.Option(help="k, tokens that are proposed at once.", min=1, max=16)] = 5,
    p_ar: Annotated[float, typer.Option(help="Share of examples without masks.", min=0, max=1)] = 0.5,
    full: Annotated[bool, typer.Option("--full", help="Train all of the target, not a low-rank adapter.")] = False,
    rank: Annotated[int, typer.Option(help="Of the adapter.", min=1)] = 32,
    examples: Annotated[int, typer.Option(help="Places of every window at which masks are put.", min=1)] = 16,
    tokens: MillionsOption = 2.0,
    generated_share: ShareOption = 0.5,
    generated: GeneratedOption = 0.3,
    temperature: TemperatureOption = 1.0,
    lr: Annotated[
        float | None, typer.Option(help="Peak of the learning rate. Default: 1e-3, with --full 2e-4.")
    ] = None,
    batch: BatchOption = 8,
    window: WindowOption = 256,
    micro: MicroOption = 0,
    warmup: WarmupOption = None,
    cache: CacheOption = None,
    seed: SeedOption = 0,
    device: DeviceOption = "cpu",
    dtype: TypeOption = "float32",
    threads: ThreadsOption = 1,
    float32: Float32Option = False,
    smoke: SmokeOption = False,
    json: JsonOption = False,
) -> None:
    """Train SPACE: a target with mask tokens that propose its next ones.

    The target itself learns, so that its output is afterwards the tuned one's; --p-ar 1 is plain fine-tuning,
    for comparison. Then `realrun record --drafter OUT`. Needs peft unless --full.

    Example: realrun train space --out space5 --masks 5 --tokens 2
    """
    from realrun.drafters.files import FILE
    from realrun.training.distill import training_text
    from realrun.training.loop import refuse_another
    from realrun.training.lora import AdapterSettings
    from realrun.training.space import SpaceSettings, space_plan, train_space

    pair = load_alone(target, device, dtype, threads)
    rate = lr or (2e-4 if full else 1e-3)
    settings = SpaceSettings(masks, p_ar, full, rate, examples, AdapterSettings(rank=rank))
    loop = loop_settings(tokens, batch, window, micro, warmup, seed, device, dtype, smoke)
    plan = space_plan(pair.target, settings, pair.target_name, stored_type(float32))
    refuse_another(out, {**plan, **loop.decisive})  # before any text is made
    with progress_bar() as report:
        source = training_text(
            pair, text_settings(text, generated_share, generated, temperature, seed, smoke), cache or out, report
        )
        facts = train_space(
            pair.target,
            settings,
            loop,
            source.sources,
            source.held_out,
            out,
            report,
            target_name=pair.target_name,
            facts={"text": source.facts},
            dtype=stored_type(float32),
        )
    print_training({"drafter": str(out / FILE), "kind": "space", **facts}, json)
