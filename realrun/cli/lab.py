"""`realrun lab`: train and examine the embedded pair."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from realrun.cli.options import (
    DeviceOption,
    DraftModelOption,
    DtypeOption,
    JsonOption,
    SeedOption,
    TargetOption,
    ThreadsOption,
    load,
)
from specsim.cli.console import print_json, print_table

lab = typer.Typer(help="Train and examine the embedded lab's models.", no_args_is_help=True)


@lab.command()
def train(
    work: Annotated[Path, typer.Option(help="Folder for checkpoints; a second run resumes from it.")] = Path(
        "lab-work"
    ),
    out: Annotated[Path, typer.Option(help="Folder for the trained models.")] = Path("lab-weights"),
    target_tokens: Annotated[float, typer.Option(help="Training tokens of the target, in millions.")] = 17,
    draft_tokens: Annotated[float, typer.Option(help="Training tokens of the draft model, in millions.")] = 12,
    distill_tokens: Annotated[float, typer.Option(help="Further tokens of distillation, in millions.")] = 4,
    device: DeviceOption = "cpu",
    threads: ThreadsOption = 0,
    seed: SeedOption = 0,
) -> None:
    """Train tokenizer, target and draft model from Python's standard library. Hours on a CPU."""
    import torch

    from realrun.lab.train import train_lab
    from specsim.files import working_in

    if threads:
        torch.set_num_threads(threads)
    million = 1_000_000
    with working_in(work):
        train_lab(
            work,
            out,
            target_tokens=int(target_tokens * million),
            draft_tokens=int(draft_tokens * million),
            distill_tokens=int(distill_tokens * million),
            device=device,
            seed=seed,
        )


@lab.command()
def evaluate(
    target: TargetOption = "lab",
    draft_model: DraftModelOption = "lab",
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    threads: ThreadsOption = 1,
    json: JsonOption = False,
) -> None:
    """Held-out loss of both models in nats per token, and how often their top tokens agree."""
    from realrun.lab.evaluate import evaluate as run_evaluate

    document = run_evaluate(load(target, draft_model, device, dtype, threads))
    if json:
        print_json(document)
    else:
        print_table("held-out text", ["", "value"], [[k, f"{v:.3f}"] for k, v in document.items()])
