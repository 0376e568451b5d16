"""`realrun train eesd`, `medusa` and `self-sd`: drafters that live inside a target."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from realrun.cli.options import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    SeedOption,
    TargetOption,
    ThreadsOption,
    load_alone,
)
from realrun.cli.training_options import (
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
from specsim.cli.console import print_json, print_table, progress_bar

if TYPE_CHECKING:
    import torch

    from realrun.pairs.pair import Pair
    from realrun.training.common.loop import LoopSettings
    from realrun.training.medusa import MedusaSettings


class Objective(StrEnum):
    """What a set of skipped sublayers is chosen for."""

    predicted = "predicted"
    measured = "measured"


class BackboneLoss(StrEnum):
    """What keeps MEDUSA-2's backbone as it was."""

    text = "text"
    distill = "distill"


def eesd(
    out: OutOption,
    target: TargetOption = "lab",
    text: TextOption = None,
    layers: Annotated[int, typer.Option(help="N, the target's first layers that the drafter shares.", min=1)] = 2,
    exit_layers: Annotated[int, typer.Option(help="Trained layers on top; 0: a norm and a head alone.", min=0)] = 1,
    tokens: MillionsOption = 2.0,
    generated_share: ShareOption = 0.5,
    generated: GeneratedOption = 0.3,
    temperature: TemperatureOption = 1.0,
    lr: LrOption = 3e-3,
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
    """Train EESD's early exit.

    One layer, norm and head learn on the target's frozen first N layers. A deeper exit (larger
    --layers) agrees with the target more often and drafts slower; try a few, with one --cache for
    all. Then `realrun record --drafter OUT`, and `realrun train predictor --drafter OUT` for Cali-TS.

    Example: realrun train eesd --out exit2 --layers 2 --tokens 2
    """
    from realrun.training.eesd import EesdSettings, train_eesd

    pair = load_alone(target, device, dtype, threads)
    source = text_settings(text, generated_share, generated, temperature, seed, smoke)
    loop = loop_settings(tokens, batch, window, micro, warmup, seed, device, dtype, smoke)
    settings = EesdSettings(layers, exit_layers, lr, source)
    with progress_bar() as report:
        document = train_eesd(pair, settings, loop, out, report, cache=cache, dtype=stored_type(float32))
    print_training(document, json)


def medusa(
    out: OutOption,
    target: TargetOption = "lab",
    text: TextOption = None,
    heads: Annotated[int, typer.Option(help="K; head k drafts the k-th token ahead.", min=1, max=16)] = 4,
    tokens: MillionsOption = 1.0,
    generated_share: ShareOption = 0.5,
    generated: GeneratedOption = 0.3,
    temperature: TemperatureOption = 1.0,
    lr: LrOption = 3e-3,
    decay: Annotated[float, typer.Option(help="Head k's loss weighs this to the power k.")] = 0.8,
    joint: Annotated[
        bool,
        typer.Option("--joint", help="MEDUSA-2: train the target too, through a low-rank adapter. Needs peft."),
    ] = False,
    one_stage: Annotated[
        bool,
        typer.Option(
            "--one-stage",
            help="With --joint: fresh heads, whose loss gains weight as a sine; else heads trained alone come first.",
        ),
    ] = False,
    heads_from: Annotated[
        Path | None,
        typer.Option(help="With --joint: a MEDUSA-1 drafter to start from. Default: train one in OUT/heads."),
    ] = None,
    joint_tokens: Annotated[
        float | None, typer.Option(help="With --joint: tokens of that stage, in millions. Default: --tokens.", min=0)
    ] = None,
    backbone_loss: Annotated[
        BackboneLoss,
        typer.Option(help="With --joint: keep the target near itself (distill) or near the text."),
    ] = BackboneLoss.distill,
    lambda_0: Annotated[
        float | None,
        typer.Option(help="With --joint: weight of the heads' loss. Default: 0.01 with distill, 0.2 with text."),
    ] = None,
    backbone_lr: Annotated[
        float | None,
        typer.Option(help="With --joint: the adapter's; heads have 4 times as much. Default: 1e-4, with text 5e-4."),
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
    """Train MEDUSA-1's or MEDUSA-2's heads.

    They stand on the target's last state. It is frozen in MEDUSA-1; --joint is MEDUSA-2. Then
    `realrun record --drafter OUT`.

    Example: realrun train medusa --out heads4 --heads 4 --tokens 1
    """
    from realrun.training.medusa import MedusaSettings, train_medusa
    from specsim.errors import InputError

    if not joint and (one_stage or heads_from or joint_tokens or lambda_0 or backbone_lr):
        raise InputError("--one-stage, --heads-from, --joint-tokens, --lambda-0 and --backbone-lr go with --joint")
    pair = load_alone(target, device, dtype, threads)
    source = text_settings(text, generated_share, generated, temperature, seed, smoke)
    settings = MedusaSettings(heads, lr, decay, source)
    loop = loop_settings(tokens, batch, window, micro, warmup, seed, device, dtype, smoke)
    if not joint:
        with progress_bar() as report:
            document = train_medusa(pair, settings, loop, out, report, cache=cache, dtype=stored_type(float32))
        print_training(document, json)
        return
    second = loop
    if joint_tokens is not None:
        second = loop_settings(joint_tokens, batch, window, micro, warmup, seed, device, dtype, smoke)
    chosen = {"loss": backbone_loss.value, "lambda_0": lambda_0, "backbone_lr": backbone_lr, "decay": decay}
    document = _joint(
        pair, settings, chosen, (loop, second), out, cache or out, heads_from, one_stage, stored_type(float32)
    )
    print_training(document, json)


def self_sd(
    out: OutOption,
    target: TargetOption = "lab",
    prompts: Annotated[
        Path | None,
        typer.Option(help='JSON Lines of {"text", "domain"} to try on; default: pieces of the lab\'s training text.'),
    ] = None,
    count: Annotated[int, typer.Option("--num-prompts", help="Prompts to use.", min=1)] = 12,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens that the target writes after each.", min=1)] = 64,
    trials: Annotated[int, typer.Option(help="Sets of sublayers to try.", min=1)] = 200,
    depth: Annotated[int, typer.Option("--max-draft-tokens", help="Longest draft, in tokens.", min=1, max=64)] = 8,
    objective: Annotated[
        Objective,
        typer.Option(help="The simulator's speedup at the best draft length, or tokens/s of really decoding."),
    ] = Objective.predicted,
    temperature: Annotated[float, typer.Option(help="Of the calibration text; 0 is greedy.", min=0)] = 0.0,
    keep_ends: Annotated[int, typer.Option(help="Layers at either end of which nothing is skipped.", min=0)] = 0,
    seed: SeedOption = 0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    threads: ThreadsOption = 1,
    smoke: Annotated[bool, typer.Option("--smoke-test", help="A search of seconds, to see that all works.")] = False,
    json: JsonOption = False,
) -> None:
    """Search the sublayers that Self-SD skips.

    Nothing is trained. Then `realrun record --drafter OUT`.

    Example: realrun train self-sd --out skips --trials 200
    """
    from realrun.pairs.prompts import lab_prompts, read_prompts
    from realrun.training.self_sd.search import SelfSDSettings, train_self_sd

    if smoke:
        count, max_new_tokens, trials, depth = min(count, 3), 16, 8, 4
    pair = load_alone(target, device, dtype, threads)
    settings = SelfSDSettings(
        trials=trials,
        max_new_tokens=max_new_tokens,
        depth=depth,
        objective=objective.value,
        temperature=temperature,
        keep_ends=keep_ends,
        cost_repeats=8 if smoke else 40,
        seed=seed,
    )
    if prompts is None:
        chosen = lab_prompts(pair.tokenizer, count, split="train")
    else:
        chosen = read_prompts(prompts, pair.tokenizer, count)
    with progress_bar() as report:
        document = train_self_sd(pair, chosen, settings, out, report)
    if json:
        print_json(document)
        return
    names = {"attention": "attention skipped in layers", "mlp": "MLP skipped in layers"}
    rows = [[what, ", ".join(map(str, document[name])) or "none"] for name, what in names.items()]
    rows.append(["best draft length", str(document["k"])])
    rows.append(["first draft token accepted", f"{document['first_token_accepted_share']:.3f}"])
    rows.append(["predicted speedup", f"{document['predicted_speedup']:.2f}"])
    print_table(f"best of {len(document['trials'])} sets, on calibration text", ["", ""], rows)
    print(f"drafter: {document['drafter']}")


def _joint(
    pair: Pair,
    settings: MedusaSettings,
    chosen: dict[str, Any],
    loops: tuple[LoopSettings, LoopSettings],
    out: Path,
    cache: Path,
    heads_from: Path | None,
    one_stage: bool,
    stored: torch.dtype,
) -> dict[str, Any]:
    """MEDUSA-2 in one stage or two."""
    from dataclasses import asdict

    from realrun.drafters.medusa import MedusaHeads, MedusaKind
    from realrun.pairs.drafter_files import FILE, describe_target, load_drafter
    from realrun.training.common.distill import training_text
    from realrun.training.common.loop import refuse_another
    from realrun.training.medusa import train_medusa
    from realrun.training.medusa2 import Medusa2Settings, train_medusa2
    from specsim.errors import InputError

    if one_stage and heads_from is not None:
        raise InputError("--one-stage starts from fresh heads; leave out --heads-from, or --one-stage")
    second = Medusa2Settings(**chosen, schedule="sine" if one_stage else "constant")
    described = describe_target(pair.target, pair.target_name)
    known = {"drafter": "medusa-2", "target": described, **asdict(second), **loops[1].decisive}
    refuse_another(out, known)  # before heads are trained
    with progress_bar() as report:
        if one_stage:
            heads = MedusaHeads(pair.target, settings.heads)
        else:
            if heads_from is None:
                heads_from = out / "heads"
                train_medusa(pair, settings, loops[0], heads_from, report, cache=cache, dtype=stored)
            tuned, start = load_drafter(heads_from, pair.target)
            if not isinstance(start, MedusaKind) or tuned is not pair.target:
                raise InputError(f"{heads_from} holds no MEDUSA-1 drafter; train one with `realrun train medusa`")
            heads = start.heads
        text = training_text(pair, settings.text, cache, report)
        facts = train_medusa2(
            pair.target,
            heads,
            second,
            loops[1],
            text.sources,
            text.held_out,
            out,
            report,
            target_name=pair.target_name,
            facts={"text": text.facts},
            dtype=stored,
        )
    return {"drafter": str(out / FILE), "kind": "medusa", **facts}


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
    from realrun.pairs.drafter_files import FILE
    from realrun.training.common.distill import training_text
    from realrun.training.common.loop import refuse_another
    from realrun.training.common.lora import AdapterSettings
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
