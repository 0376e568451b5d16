"""`realrun train edd`, `vdm` and `eagle`: drafters of one layer beside a target, with or without its states."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from realrun.options import DeviceOption, JsonOption, SeedOption, TargetOption, ThreadsOption, load_alone
from realrun.training_options import (
    BatchOption,
    CacheOption,
    Float32Option,
    GeneratedOption,
    LrOption,
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


class DecoderLoss(StrEnum):
    """What a one-layer decoder is trained towards."""

    kl = "kl"
    text = "text"


LossOption = Annotated[
    DecoderLoss, typer.Option(help="Towards the target's distribution (kl), or the text's tokens (text).")
]


def edd(
    out: OutOption,
    target: TargetOption = "lab",
    text: TextOption = None,
    states_after: Annotated[
        int | None,
        typer.Option(
            help="Layers of the target below the states that are read as soft prompts. Default: all but 3, the "
            "fourth-to-last state.",
            min=1,
        ),
    ] = None,
    shortest_block: Annotated[
        int, typer.Option(help="Tokens of the shortest block; a block stands for a round.", min=2)
    ] = 5,
    longest_block: Annotated[
        int, typer.Option(help="And of the longest; the length is drawn anew in every step.", min=2)
    ] = 10,
    loss: LossOption = DecoderLoss.kl,
    tokens: MillionsOption = 2.0,
    generated_share: ShareOption = 0.5,
    generated: GeneratedOption = 0.3,
    temperature: TemperatureOption = 1.0,
    lr: LrOption = 6e-3,
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
    """Train EDD, the Effective Draft Decoder.

    One layer, with embedding and head copied from the target, which reads the target's states of all verified
    tokens as soft prompts. Then `realrun record --drafter OUT`.

    Example: realrun train edd --out edd --tokens 2
    """
    from realrun.training.edd import EddSettings, train_edd

    pair = load_alone(target, device, dtype, threads)
    source = text_settings(text, generated_share, generated, temperature, seed, smoke)
    loop = loop_settings(tokens, batch, window, micro, warmup, seed, device, dtype, smoke)
    settings = EddSettings(states_after, shortest_block, longest_block, loss.value, lr, source)
    with progress_bar() as report:
        document = train_edd(pair, settings, loop, out, report, cache=cache, dtype=stored_type(float32))
    print_training(document, json)


def vdm(
    out: OutOption,
    target: TargetOption = "lab",
    text: TextOption = None,
    loss: LossOption = DecoderLoss.kl,
    tokens: MillionsOption = 2.0,
    generated_share: ShareOption = 0.5,
    generated: GeneratedOption = 0.3,
    temperature: TemperatureOption = 1.0,
    lr: LrOption = 6e-3,
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
    """Train a vanilla draft model: EDD's decoder without the target's states.

    An independent model of one layer, with embedding and head copied from the target: what EDD is
    to be compared with.

    Example: realrun train vdm --out vdm --tokens 2
    """
    from realrun.training.edd import EddSettings, train_edd

    pair = load_alone(target, device, dtype, threads)
    source = text_settings(text, generated_share, generated, temperature, seed, smoke)
    loop = loop_settings(tokens, batch, window, micro, warmup, seed, device, dtype, smoke)
    settings = EddSettings(states_after=0, loss=loss.value, lr=lr, text=source)
    with progress_bar() as report:
        document = train_edd(pair, settings, loop, out, report, cache=cache, dtype=stored_type(float32))
    print_training(document, json)


def eagle(
    out: OutOption,
    target: TargetOption = "lab",
    text: TextOption = None,
    class_weight: Annotated[
        float, typer.Option(help="Weight of the cross-entropy beside the regression of features.", min=0)
    ] = 0.1,
    noise: Annotated[
        float, typer.Option(help="Largest noise that is added to a component of the features read.", min=0)
    ] = 0.1,
    tokens: MillionsOption = 2.0,
    generated_share: ShareOption = 0.5,
    generated: GeneratedOption = 0.3,
    temperature: TemperatureOption = 1.0,
    lr: LrOption = 6e-3,
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
    """Train EAGLE's drafter.

    One layer that continues the features which the target's head reads; the head itself stays the
    target's. Then `realrun record --drafter OUT`.

    Example: realrun train eagle --out eagle --tokens 2
    """
    from realrun.training.eagle import EagleSettings, train_eagle

    pair = load_alone(target, device, dtype, threads)
    source = text_settings(text, generated_share, generated, temperature, seed, smoke)
    loop = loop_settings(tokens, batch, window, micro, warmup, seed, device, dtype, smoke)
    settings = EagleSettings(class_weight, noise, lr, source)
    with progress_bar() as report:
        document = train_eagle(pair, settings, loop, out, report, cache=cache, dtype=stored_type(float32))
    print_training(document, json)
