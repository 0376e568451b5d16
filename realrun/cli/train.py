"""The `realrun train` commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from realrun.cli.options import (
    DeviceOption,
    DrafterOption,
    DraftModelOption,
    DtypeOption,
    JsonOption,
    MaxNewTokensOption,
    NumPromptsOption,
    SeedOption,
    TargetOption,
    ThreadsOption,
    load,
)
from realrun.cli.train_drafters import eagle, edd, eesd, medusa, self_sd, space, vdm
from specsim.cli.console import parse_numbers, print_json, print_table, progress_bar

if TYPE_CHECKING:
    from realrun.pairs.pair import Pair
    from realrun.pairs.prompts import Prompt

train = typer.Typer(help="Train drafters, and what they need beside their models.", no_args_is_help=True)
for command in (eesd, medusa, self_sd, edd, vdm, eagle, space):
    train.command()(command)


@train.command()
def predictor(
    out: Annotated[Path, typer.Option(help="Folder for the predictor; a second run goes on from what is there.")],
    target: TargetOption = "lab",
    draft_model: DraftModelOption = "lab",
    drafter: DrafterOption = "model",
    prompts: Annotated[
        Path | None,
        typer.Option(help='JSON Lines of {"text", "domain"}; default: pieces of the lab\'s training text.'),
    ] = None,
    num_prompts: NumPromptsOption = 600,
    max_new_tokens: MaxNewTokensOption = 128,
    depth: Annotated[
        int, typer.Option("--max-draft-tokens", help="Longest draft to learn from, in tokens.", min=1, max=64)
    ] = 16,
    temperatures: Annotated[
        str, typer.Option(help="Temperatures that the prompts are decoded at in turn, comma-separated; 0 is greedy.")
    ] = "0,0.7,0.8,1",
    epochs: Annotated[int, typer.Option(help="Most passes over the samples.", min=1)] = 40,
    seed: SeedOption = 0,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = "float32",
    threads: ThreadsOption = 1,
    json: JsonOption = False,
) -> None:
    """Train a pair's acceptance predictor, theta_M of Cali-TS (EESD Eq. 5), on runs of the pair.

    Use other prompts than those that traces will be recorded on.
    """
    from realrun.training.predictor.data import PredictorSettings
    from realrun.training.predictor.train import train_predictor

    degrees = tuple(parse_numbers(temperatures, "--temperatures", float, "0,0.8"))
    settings = PredictorSettings(max_new_tokens, depth, degrees, epochs=epochs, seed=seed)
    pair = load(target, draft_model, device, dtype, threads, "none", drafter)
    with progress_bar() as report:
        document = train_predictor(pair, _prompts(pair, prompts, num_prompts), settings, out, report)
    if json:
        print_json(document)
    else:
        _print(document)


def _prompts(pair: Pair, file: Path | None, count: int) -> list[Prompt]:
    from realrun.pairs.prompts import lab_prompts, read_prompts

    if file is None:
        return lab_prompts(pair.tokenizer, count, split="train")
    return read_prompts(file, pair.tokenizer, count)


def _print(document: dict[str, Any]) -> None:
    rows = [
        [name, f"{values['log_loss_nats']:.4f}", f"{values['ece']:.4f}", f"{values['auc']:.4f}"]
        for name, values in document["held_out"].items()
    ]
    title = f"held-out sequences; {document['samples']} samples, epoch {document['best_epoch']} of {document['epochs']}"
    print_table(title, ["", "log-loss, nats", "calibration error", "area under ROC"], rows)
    print(f"predictor: {document['predictor']}")
