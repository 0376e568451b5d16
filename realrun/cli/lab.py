"""`realrun lab`: train and examine the embedded pair."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import typer

from realrun.cli.options import MachineSettings, ModelSettings
from specsim.cli.command import Answer, command
from specsim.cli.console import print_facts, progress_bar
from specsim.cli.options import SeedSettings
from specsim.io.settings import setting

lab = typer.Typer(help="Train and evaluate the bundled lab models.", no_args_is_help=True)


@dataclass(frozen=True, kw_only=True)
class LabTraining(SeedSettings):
    """How long the lab's models are trained, and where."""

    work: Path = setting(Path("lab-work"), "Folder for checkpoints; a second run resumes from it.")
    out: Path = setting(Path("lab-weights"), "Folder for the trained models.")
    target_tokens: float = setting(17, "Training tokens of the target, in millions.")
    draft_tokens: float = setting(12, "Training tokens of the draft model, in millions.")
    distill_tokens: float = setting(4, "Additional distillation tokens, in millions.")
    device: str = setting("cpu", "cpu, cuda, cuda:1, ...")
    threads: int = setting(0, "CPU threads; 0: torch's own choice.", low=0)


@command(lab)
def train(options: LabTraining) -> None:
    """Train tokenizer, target and draft model.

    They learn from Python's standard library. Takes hours on a CPU.
    """
    import torch

    from realrun.lab.train import train_lab
    from specsim.io.files import working_in

    if options.threads:
        torch.set_num_threads(options.threads)
    million = 1_000_000
    with working_in(options.work), progress_bar() as progress:
        train_lab(
            options.work,
            options.out,
            target_tokens=int(options.target_tokens * million),
            draft_tokens=int(options.draft_tokens * million),
            distill_tokens=int(options.distill_tokens * million),
            device=options.device,
            seed=options.seed,
            progress=progress,
        )


@command(lab)
def evaluate(models: ModelSettings, machine: MachineSettings) -> Answer:
    """Measure held-out loss and agreement.

    Loss is in nats per token; agreement is how often the top tokens of both models are equal.
    """
    from realrun.lab.evaluate import evaluate as run_evaluate

    document = run_evaluate(models.load(machine))
    return Answer(document, partial(print_facts, "held-out text", document, number=".3f"))
