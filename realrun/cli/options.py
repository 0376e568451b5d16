"""Arguments and options that the `realrun` commands share."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specsim.cli.console import MAX_SEED

if TYPE_CHECKING:
    from realrun.pairs.pair import Pair
    from realrun.pairs.prompts import Prompt


class Mode(StrEnum):
    """How the target chooses tokens."""

    greedy = "greedy"
    gumbel = "gumbel"
    rejection = "rejection"


class Kernels(StrEnum):
    """What computes attention and draft statistics."""

    auto = "auto"
    reference = "reference"
    triton = "triton"
    cuda = "cuda"


TargetOption = Annotated[str, typer.Option(help='Target model: local folder, hub id, or "lab".')]
DraftOption = Annotated[str, typer.Option(help='Draft model: local folder, hub id, or "lab".')]
DrafterOption = Annotated[
    str,
    typer.Option(
        help="How to draft: model (the --draft model), prompt-lookup (copies what followed the same words before, "
        "with any target), a drafter inside the lab's target (eesd, medusa-1, medusa-2, self-sd, edd, eagle, space), "
        "or a folder made by `realrun train`; --draft is then ignored."
    ),
]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
DtypeOption = Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")]
ThreadsOption = Annotated[
    int, typer.Option(help="CPU threads; 1 is steadiest for small models, 0 leaves torch's choice.", min=0)
]
PromptsOption = Annotated[
    Path | None, typer.Option(help='JSON Lines of {"text", "domain"}; default: the lab\'s held-out prompts.')
]
CountOption = Annotated[int, typer.Option(help="Prompts to use.", min=1)]
TokensOption = Annotated[int, typer.Option(help="Output tokens per prompt.", min=1)]
DepthOption = Annotated[int, typer.Option(help="D, longest draft recorded, in tokens.", min=1, max=64)]
TreeNodesOption = Annotated[
    int,
    typer.Option(
        help="Nodes of the drafter's tree to record at every position, those of largest path probability; 0: no trees. "
        "A tree policy replays exactly as far as its nodes were recorded. Recording 128 takes about five times as long "
        "as decoding alone (the lab on one CPU thread). Not in rejection mode.",
        min=0,
    ),
]
TreeWidthOption = Annotated[int, typer.Option(help="Children of a node to record, at most.", min=1)]
ModeOption = Annotated[
    Mode,
    typer.Option(
        help="Greedy; sampling with Gumbel noise (also exact in replay); or classical rejection sampling, whose replay "
        "is approximate."
    ),
]
TemperatureOption = Annotated[float, typer.Option(help="Sampling temperature; greedy ignores it.")]
TopPOption = Annotated[
    float, typer.Option(help="Sample from the most probable tokens that together have this probability.")
]
SeedOption = Annotated[int, typer.Option(help="Seed of all randomness.", min=0, max=MAX_SEED)]
KernelsOption = Annotated[
    Kernels,
    typer.Option(
        help="Kernels of attention and draft statistics. auto: CUDA C++ or Triton on a GPU, plain torch on a CPU. "
        "By name they run anywhere, with a static cache: on a CPU Triton is interpreted and CUDA C++ runs on "
        "emulated threads, which is slow, but gives the rounds that a GPU gives."
    ),
]
PredictorOption = Annotated[
    str,
    typer.Option(
        help="Acceptance predictor, whose scores are recorded and which runs where a policy reads them: a file of "
        '`realrun train predictor`, "lab", "none", or "auto": what lies in the folder of a drafter inside the target, '
        "and the lab's for the lab's own pair."
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
OverwriteOption = Annotated[bool, typer.Option(help="Record anew, replacing the trace that is there.")]


def silence_libraries() -> None:
    """Switch the libraries' own progress bars and remarks off."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def load_alone(target: str, device: str, dtype: str, threads: int) -> Pair:
    """Load a target as `load` loads a pair; as its own drafter."""
    silence_libraries()
    from realrun.pairs.pair import load_target

    return load_target(target, device=device, dtype=dtype, threads=threads or None)


def load(
    target: str,
    draft: str,
    device: str,
    dtype: str,
    threads: int,
    predictor: str = "none",
    drafter: str = "model",
    beside: Pair | None = None,
) -> Pair:
    """Load a pair; threads 0 leaves torch's choice. beside : as for `realrun.pairs.pair.load_pair`."""
    silence_libraries()
    from realrun.pairs.pair import load_pair

    return load_pair(
        target,
        draft,
        device=device,
        dtype=dtype,
        threads=threads or None,
        predictor=predictor,
        drafter=drafter,
        beside=beside,
    )


def load_prompts(pair: Pair, file: Path | None, count: int) -> list[Prompt]:
    """Prompts of the file, or the lab's held-out ones."""
    from realrun.pairs.prompts import lab_prompts, read_prompts

    return lab_prompts(pair.tokenizer, count) if file is None else read_prompts(file, pair.tokenizer, count)
