"""Options that the commands which train drafters share, and what they mean."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specsim.cli.console import print_json, print_table

if TYPE_CHECKING:
    import torch

    from realrun.training.common.distill import TextSettings
    from realrun.training.common.loop import LoopSettings

OutOption = Annotated[
    Path, typer.Option(help="Folder for the drafter; a run that was killed goes on from what is there.")
]
TextOption = Annotated[
    Path | None,
    typer.Option(
        help='Folder of *.txt, *.md, *.py, or *.jsonl with {"text"} a line; every tenth document is held out. '
        "Default: the lab's training text."
    ),
]
MillionsOption = Annotated[
    float, typer.Option("--tokens", help="Tokens to see in training, in millions; windows of the text repeat.", min=0)
]
ShareOption = Annotated[
    float, typer.Option(help="Share of training windows that the target wrote itself; 0 turns this off.", min=0, max=1)
]
GeneratedOption = Annotated[
    float, typer.Option(help="Tokens that the target writes for it, prompts included, in millions.", min=0)
]
TemperatureOption = Annotated[
    float, typer.Option(help="Temperature of the half of that text that is not greedy.", min=0.01)
]
CacheOption = Annotated[
    Path | None,
    typer.Option(help="Folder that keeps encoded and generated text, for several trainings to share. Default: --out."),
]
LrOption = Annotated[float, typer.Option(help="Peak of the learning rate.")]
BatchOption = Annotated[int, typer.Option(help="Windows of a step.", min=1)]
WindowOption = Annotated[int, typer.Option(help="Tokens of a window.", min=2)]
MicroOption = Annotated[
    int, typer.Option(help="Windows that pass through the model at once; lower it if memory is full. 0: all.", min=0)
]
WarmupOption = Annotated[
    int | None, typer.Option(help="Steps of warm-up. Default: 40, of short trainings a tenth.", min=0)
]
TypeOption = Annotated[
    str, typer.Option("--dtype", help="float32, or bfloat16: the target's type, trained parts stay in float32.")
]
Float32Option = Annotated[bool, typer.Option("--float32", help="Write the drafter in float32 instead of bfloat16.")]
SmokeOption = Annotated[
    bool, typer.Option("--smoke-test", help="Little text and short windows, to see in seconds that all works.")
]


def text_settings(
    folder: Path | None, share: float, generated: float, temperature: float, seed: int, smoke: bool
) -> TextSettings:
    """What to train on, from a command's options; generated in millions of tokens."""
    from realrun.training.common.distill import DistillSettings, TextSettings

    if smoke:
        distill = DistillSettings(prompt_tokens=16, new_tokens=48, batch=32, temperature=temperature, seed=seed)
        return TextSettings(folder, share, 4096, distill)
    return TextSettings(folder, share, round(generated * 1e6), DistillSettings(temperature=temperature, seed=seed))


def loop_settings(
    tokens: float,
    batch: int,
    window: int,
    micro: int,
    warmup: int | None,
    seed: int,
    device: str,
    dtype: str,
    smoke: bool,
) -> LoopSettings:
    """How to train, from a command's options; tokens in millions."""
    from realrun.training.common.loop import LoopSettings

    if smoke:
        tokens, batch, window = 0.02, 8, 64
    steps = max(1, round(tokens * 1e6 / (batch * window)))
    rise = min(40, steps // 10) if warmup is None else warmup
    return LoopSettings(steps, batch, window, rise, seed, device, dtype, micro, log_every=max(1, min(10, steps // 10)))


def stored_type(float32: bool) -> torch.dtype:
    """The type of a drafter's file."""
    import torch

    return torch.float32 if float32 else torch.bfloat16


def print_training(document: dict[str, Any], json: bool) -> None:
    """Print what a finished training gave: held-out figures before and after."""
    if json:
        print_json(document)
        return
    start, end = document["held_out"]["start"], document["held_out"]["end"]
    seconds = document["seconds"]
    title = (
        f"held-out text; {document['tokens']:,} tokens in {seconds:.0f} s, {document['tokens'] / seconds:,.0f} a second"
    )
    print_table(title, ["", "start", "end"], [[name, f"{start[name]:.4f}", f"{end[name]:.4f}"] for name in end])
    print(f"drafter: {document['drafter']}")
