"""Describe a training as a command, `realrun train NAME`; `realrun.train.registry` lists all trainings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from realrun.decode.sampling import Sampler
from realrun.measure.record import longest_prompt
from realrun.pairs.pair import Pair, is_lab
from realrun.pairs.prompts import (
    Prompt,
    check_prompts_file,
    check_training_prompts,
    lab_prompts,
    leave_out_long,
    read_conversations,
    read_prompts,
    spread,
    training_prompts,
)
from realrun.train.common.distill import DistillSettings, TextSettings, TrainingText, read_text, training_text
from realrun.train.common.loop import LoopSettings
from realrun.train.common.on_text import TextRun, Trained
from specsim.io.errors import InputError
from specsim.io.progress import Progress
from specsim.io.settings import Settings, setting

QUESTIONS = 6_000  # of specsim's own, to train on
ASKED_SHARE = 0.6  # of the text beside them, where a chat model makes up the questions
SPARE_TOKENS = 2  # positions left free for rounds whose costs are measured


def sampler_at(temperature: float, seed: int) -> Sampler:
    """Choose how training text is decoded: greedily at 0, else as the commands sample by default."""
    return Sampler("greedy-draft", temperature, seed) if temperature else Sampler()


class SharedOptions(Settings):
    """Options that trainings of a kind share, and how these trainings are started."""

    def check(self, target: str) -> None:
        """Raise InputError, before models are loaded, if there is nothing to train on."""
        raise NotImplementedError

    def start(self, run: Callable[..., Trained], pair: Pair, settings: Any, out: Path, progress: Progress) -> Trained:
        """Run a training, or continue the training in OUT."""
        raise NotImplementedError


@dataclass(frozen=True)
class TextOptions(SharedOptions):
    """Options of the training text, the length of the training and its windows."""

    text: Path | None = setting(
        None,
        doc='Folder of *.txt, *.md, *.py, or *.jsonl with {"text"} per line; every tenth document is held out; '
        "or the text file of `realrun gpu` (default for the lab's target: its training text).",
    )
    prompts: Path | None = setting(
        None,
        doc="JSON Lines of questions or conversations (messages, ShareGPT, Alpaca) in place of --text: ten or more, "
        "with the target's answers, whatever --generated-share (default for targets other than the lab's: "
        f"{QUESTIONS:,} of specsim's own, and others that a chat model makes up).",
    )
    own_answers: float = setting(
        1.0,
        low=0,
        high=1,
        doc="With --prompts: share of the text whose answers are the target's; the rest are the file's own answers.",
    )
    loss_on: Literal["answers", "all"] = setting(
        "all", doc="Take the loss on answers alone, or on questions too (all); plain text counts as a whole."
    )
    tokens: float = setting(2.0, low=0, smoke=0.02, doc="Million tokens to train on; windows of the text repeat.")
    epochs: float | None = setting(
        None, above=0, smoke=None, doc="Passes over the text, in place of --tokens: its windows are drawn at random."
    )
    minutes: float = setting(
        0.0, low=0, doc="End after this time, without that of making the text, if --tokens take longer; 0: no limit."
    )
    generated_share: float = setting(
        0.5, low=0, high=1, doc="Share of training windows from text written by the target; 0 for none."
    )
    generated: float = setting(
        0.3, low=0, smoke=0.004096, doc="Million tokens that the target writes, prompts included."
    )
    distill: DistillSettings = setting(DistillSettings)
    batch: int = setting(8, low=1, smoke=8, doc="Windows per step.")
    window: int = setting(256, low=2, smoke=64, doc="Tokens per window.")
    micro: int = setting(0, low=0, doc="Windows per forward pass, to save memory; 0 for all of a step.")
    warmup: int | None = setting(None, low=0, doc="Warm-up steps (default: a tenth of the steps, from 10 to 40).")
    betas: tuple[float, ...] = setting((0.9, 0.95), doc="AdamW's beta_1 and beta_2.")
    cache: Path | None = setting(
        None,
        doc="Folder for encoded and generated text, which several trainings can share (default: --out).",
    )
    float32: bool = setting(False, doc="Write the drafter in float32 instead of bfloat16.")
    dtype: Literal["float32", "bfloat16", "float64"] = setting(
        "float32", doc="Number type of the target; with bfloat16, trained parts stay in float32."
    )
    seed: int = setting(0)
    device: str = setting("cpu")

    def check(self, target: str) -> None:
        if self.text is not None and self.prompts is not None:
            raise InputError("--text and --prompts are both text to train on; give one of them")
        if self.prompts is not None:
            check_prompts_file(self.prompts)
        elif self.own_answers < 1:
            raise InputError("--own-answers takes the rest of the answers from --prompts FILE; give it")

    def start(self, run: Callable[..., Trained], pair: Pair, settings: Any, out: Path, progress: Progress) -> Trained:
        """Call run(pair, settings, text_run)."""
        questions: Sequence[Prompt] = ()
        asked_share = 0.0
        if self.prompts is not None:
            questions = read_conversations(self.prompts, pair.tokenizer, pair.eos_token_ids)
        elif self.text is None and not is_lab(pair.target_name):
            questions = training_prompts(pair.tokenizer, QUESTIONS, self.distill.seed)
            asked_share = ASKED_SHARE if pair.tokenizer.chat_template else 0.0
        text: TextSettings | TrainingText
        if self.text is not None and self.text.is_file():
            text = read_text(self.text)
        else:
            tokens = round(self.generated * 1e6)
            text = TextSettings(
                self.text,
                self.generated_share,
                tokens,
                self.distill,
                questions,
                asked_share,
                self.own_answers,
                self.loss_on,
            )
        loop = LoopSettings(
            1,
            self.batch,
            self.window,
            self.warmup,
            self.seed,
            self.device,
            self.dtype,
            self.micro,
            log_every=None,
            betas=self.betas,
        )
        count = self.tokens * 1e6
        if self.epochs is not None:
            if not isinstance(text, TrainingText):
                text = training_text(pair, text, self.cache or out, progress)
            count = self.epochs * sum(len(tokens) for tokens, _ in text.sources)
        stored = torch.float32 if self.float32 else torch.bfloat16
        limit_s = 60 * self.minutes or math.inf
        text_run = TextRun(text, loop.lasting(count), out, self.cache, stored, progress, limit_s)
        return run(pair, settings, text_run)


def num_prompts_setting(of_the_labs: int) -> Any:
    """Make the setting of how many prompts to use. of_the_labs : default number of the lab's prompts"""
    return setting(
        None,
        low=1,
        smoke=lambda asked: min(asked or of_the_labs, 3),
        doc="Number of prompts, spread evenly over the domains of the file (default: the whole file, or "
        f"{of_the_labs} of the lab's).",
    )


@dataclass(frozen=True)
class PromptOptions(SharedOptions):
    """Options of the prompts that are decoded for training."""

    lab_count: ClassVar[int] = 12
    prompts: Path | None = setting(
        None,
        doc='JSON Lines of {"text": ...} or {"messages": [...]} to decode (default for the lab\'s target: pieces of '
        "its training text).",
    )
    num_prompts: int | None = num_prompts_setting(lab_count)

    def check(self, target: str) -> None:
        check_training_prompts(target, self.prompts)

    def start(self, run: Callable[..., Trained], pair: Pair, settings: Any, out: Path, progress: Progress) -> Trained:
        """Call run(pair, prompts, settings, out, progress)."""
        if self.prompts is None:
            prompts = lab_prompts(pair.tokenizer, self.num_prompts or self.lab_count, split="train")
        else:
            prompts = read_prompts(self.prompts, pair.tokenizer)
            longest = longest_prompt(pair, settings.max_new_tokens, settings.max_draft_tokens)
            prompts = leave_out_long(prompts, longest - SPARE_TOKENS)
            prompts = spread(prompts, self.num_prompts or len(prompts))
        return run(pair, prompts, settings, out, progress)


@dataclass(frozen=True)
class Training:
    """A training, as `realrun train` offers it.

    name : name of the command
    settings : settings of this training alone; fields with a `doc` become options
    run : called as `shared.start` says, for example run(pair, settings, text_run)
    help : help of the command; its first paragraph is a single line
    shared : options shared by trainings of this kind, on text or on prompts
    defaults : defaults of shared options that differ here
    trains : "drafter" or "predictor"
    beside_draft : whether the training needs a pair, not a target alone
    smoke_test : whether --smoke-test is offered; the settings need `smoke` values then
    printed : gives the options that the paper prints, by name, for `--recipe paper`; called with the command's options;
        None where no paper does
    """

    name: str
    settings: type[Settings]
    run: Callable[..., Trained]
    help: str
    shared: type[SharedOptions] = TextOptions
    defaults: Mapping[str, float] = field(default_factory=dict)
    trains: str = "drafter"
    beside_draft: bool = False
    smoke_test: bool = True
    printed: Callable[..., Mapping[str, float | tuple[float, ...]]] | None = None
