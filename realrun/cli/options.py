"""Arguments and options that the `realrun` commands share."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specsim.cli.console import MAX_SEED
from specsim.errors import InputError

if TYPE_CHECKING:
    from realrun.pairs.pair import Pair
    from realrun.pairs.prompts import Prompt


LAB_COUNT = 36  # of the lab's prompts, unless told


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


class ClockName(StrEnum):
    """What rounds are timed by."""

    wall = "wall"
    cpu = "cpu"


ClockOption = Annotated[
    ClockName,
    typer.Option(
        help="Clock: wall, or cpu, the CPU time of this process, which other processes do not move (CPU, one thread)."
    ),
]
RepeatsOption = Annotated[
    int, typer.Option(help="Timed runs of every prompt, of which the median counts: odd, 3 or more.")
]
TargetOption = Annotated[
    str,
    typer.Option(
        help='Target model, whose text is to come faster: local folder, hub id, "lab", or "lab-deep", the lab\'s with '
        "blocks that pass their input on, 40 layers in all (lab-deep:24 has 24): it says what the lab's says and takes "
        "as long as a model so deep."
    ),
]
DraftModelOption = Annotated[
    str,
    typer.Option(
        "--draft-model",
        help='Smaller model of the same vocabulary, with which the drafter "model" drafts: folder, hub id or "lab".',
    ),
]
TokenizerDifferenceOption = Annotated[
    bool,
    typer.Option(
        "--allow-tokenizer-difference",
        help="Take a draft model whose tokenizer lacks tokens of the target's, or has more, if both give an id to the "
        "same token: what it lacks it reads as a mean token and never proposes.",
    ),
]
DrafterOption = Annotated[
    str,
    typer.Option(
        help="How to draft: model (with --draft-model), prompt-lookup (copies what followed the same words before, "
        "with any target), a drafter inside the lab's target (eesd, medusa-1, medusa-2, self-sd, edd, eagle, space; "
        "or lab:eesd), or a folder made by `realrun train`. All but model ignore --draft-model."
    ),
]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
DTYPE_HELP = (
    "Number type of the models: float32, float64, bfloat16 or float16; bfloat16-float32-logits and "
    "float16-float32-logits are those with logits in float32, of which fewer are equal."
)
DtypeOption = Annotated[str, typer.Option(help=DTYPE_HELP)]
ThreadsOption = Annotated[
    int, typer.Option(help="CPU threads; 1 is steadiest for small models, 0 leaves torch's choice.", min=0)
]
PromptsOption = Annotated[
    Path | None,
    typer.Option(
        help='JSON Lines of {"text": ...}, {"prompt": ...}, {"messages": [...]} (a chat, put into words by the '
        'tokenizer\'s template), each with a "domain" if you like, or lines of MT-Bench, Spec-Bench, ShareGPT, GSM8K '
        "or Alpaca, of which the first question is asked. Models of your own need some; default: the lab's held-out "
        "prompts.",
        show_default=False,
    ),
]
NumPromptsOption = Annotated[
    int | None,
    typer.Option(
        "--num-prompts",
        help="Prompts to use, as many of each domain as of another; each is one sequence. Default: the whole file, or "
        "36 of the lab's.",
        min=1,
        show_default=False,
    ),
]
MaxNewTokensOption = Annotated[int, typer.Option("--max-new-tokens", help="Output tokens per prompt.", min=1)]
MaxDraftTokensOption = Annotated[
    int,
    typer.Option(
        "--max-draft-tokens",
        help="D, longest draft of a round, in tokens: so far a trace is recorded and a profile measured, and policies "
        "that would draft further are cut to it.",
        min=1,
        max=64,
    ),
]
TreeNodesOption = Annotated[
    int,
    typer.Option(
        "--tree-nodes",
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
        help="How the target chooses tokens: greedy; gumbel, sampling with Gumbel noise (replayed exactly, too); or "
        "rejection, classical rejection sampling, whose replay is approximate."
    ),
]
TemperatureOption = Annotated[float, typer.Option(help="Sampling temperature; greedy ignores it.")]
TopPOption = Annotated[
    float, typer.Option(help="Sample from the most probable tokens that together have this probability.")
]
TopKOption = Annotated[int, typer.Option(help="Sample from this many most probable tokens; 0: all.", min=0)]
PolicyFileOption = Annotated[
    list[str],
    typer.Option(
        "--policy-file",
        help="Add policies of your own to those: FILE.py, or FILE.py:NAME for one of several; repeat for more.",
        metavar="FILE.py",
    ),
]
TrialsOption = Annotated[int, typer.Option(help="Configurations to try per policy, offline on the trace.", min=1)]
TuningShareOption = Annotated[
    float, typer.Option(help="Share of the prompts to tune on; the others show what was gained.")
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
SmokeTestOption = Annotated[
    bool,
    typer.Option("--smoke-test", help="Toy sizes, to see within seconds that all works; the numbers mean nothing."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
OverwriteOption = Annotated[bool, typer.Option(help="Record anew, replacing the trace that is there.")]


def how_to_go_on(overwrite: bool) -> str:
    """After an interruption; --overwrite would start anew once more."""
    return "the same command without --overwrite goes on" if overwrite else "the same command goes on"


def refuse_beside(ctx: typer.Context, decider: str, decided: Sequence[str]) -> None:
    """InputError where an option was given beside the one that decides it; both by their parameters' names."""
    flags = {one.name: one.opts[0] for one in ctx.command.params}
    for name in decided:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise InputError(f"{flags[decider]} says what {flags[name]} says; leave one of them out")


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

    pair = load_target(target, device=device, dtype=dtype, threads=threads or None)
    _say_padding({"target": pair.target})
    return pair


def load(
    target: str,
    draft_model: str,
    device: str,
    dtype: str,
    threads: int,
    predictor: str = "none",
    drafter: str = "model",
    beside: Pair | None = None,
    allow_tokenizer_difference: bool = False,
) -> Pair:
    """Load a pair; threads 0 leaves torch's choice. The last two as for `realrun.pairs.pair.load_pair`."""
    silence_libraries()
    from realrun.pairs.pair import load_pair

    pair = load_pair(
        target,
        draft_model,
        device=device,
        dtype=dtype,
        threads=threads or None,
        predictor=predictor,
        drafter=drafter,
        beside=beside,
        allow_tokenizer_difference=allow_tokenizer_difference,
    )
    models = {} if beside is not None else {"target": pair.target}
    _say_padding(
        models | ({"draft model": pair.drafter.weights(pair.target)[0]} if pair.drafter.origin == "model" else {})
    )
    return pair


def _say_padding(models: dict[str, Any]) -> None:
    """On standard error, what was left out of these models' vocabularies."""
    from realrun.pairs.vocabulary import padding_notes

    for note in padding_notes(models):
        print(note, file=sys.stderr)


def load_prompts(pair: Pair, file: Path | None, num_prompts: int | None, longest: int) -> list[Prompt]:
    """Prompts of the file that have no more tokens than `longest`, or the lab's held-out ones.

    Says so, on standard error, where a file is not used whole.
    """
    from realrun.pairs.prompts import lab_prompts, leave_out_long, read_prompts, spread

    if file is None:
        return lab_prompts(pair.tokenizer, num_prompts or LAB_COUNT)
    prompts = leave_out_long(read_prompts(file, pair.tokenizer), longest)
    chosen = spread(prompts, num_prompts or len(prompts))
    if len(chosen) < len(prompts):
        counts = Counter(prompt.domain for prompt in chosen)
        shares = ", ".join(f"{count} {domain}" for domain, count in counts.items())
        print(f"prompts: {len(chosen)} of the {len(prompts)} in {file} ({shares})", file=sys.stderr)
    return chosen
