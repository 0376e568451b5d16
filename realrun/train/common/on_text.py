"""The frame of trainings on text: base classes, text, loop and file are the same for every drafter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from realrun.drafters.kind import DRAFT_TOKENS
from realrun.pairs.drafter_files import FILE, describe_target, save_drafter
from realrun.pairs.pair import Pair
from realrun.provenance import provenance
from realrun.train.common.distill import TextSettings, TrainingText, check_length, training_text
from realrun.train.common.folder import Tensors, refuse_another
from realrun.train.common.loop import (
    MAX_GRADIENT_NORM,
    WEIGHT_DECAY,
    Job,
    LogRow,
    LoopSettings,
    ParameterGroup,
    Tokens,
    digests_of,
    marked,
    peak_memory,
    run_loop,
    seconds_trained,
    wide,
)
from specsim.io.errors import InputError
from specsim.io.progress import Progress
from specsim.io.settings import Settings

DRAFT_VOCABULARY = (
    "Draft only so many tokens, the most frequent ones of the training text; a draft step then reads less of the "
    "target's head (default: all)."
)
OWN_OR_TARGETS_HEAD = (
    "Draft only so many tokens, the most frequent ones of the training text, by the target's own head: a smaller file "
    "and faster steps (default: all tokens, by a head that is trained too)."
)


class ModuleJob(Job):
    """Trains all parameters of a module, in float32 at least, beside a frozen target.

    target : frozen
    module : trained; of the target's type, it is widened to float32 at least
    lr : peak of the learning rate
    draft_vocabulary : number of tokens to draft; None for all
    """

    draft_vocabulary: int | None = None

    def __init__(self, target: Any, module: Any, lr: float):
        self.target, self.module, self.lr = target.requires_grad_(False), module, lr
        if target.dtype.itemsize < 4:
            module.float()
        module.requires_grad_(True)

    def parameter_groups(self) -> list[ParameterGroup]:
        return [ParameterGroup(list(self.module.parameters()), self.lr)]

    def state(self) -> Tensors:
        return dict(self.module.state_dict())

    def chosen(self, text: Sequence[tuple[Tokens, float]]) -> Tensors:
        """Choose the tokens to draft, in ascending order."""
        if self.draft_vocabulary is None:
            return {}
        size = self.target.config.vocab_size
        counts = sum(np.bincount(rows[:, 0], rows[:, 1], size) for rows in (marked(tokens) for tokens, _ in text))
        most = np.argsort(-np.asarray(counts), kind="stable")[: self.draft_vocabulary]
        return {DRAFT_TOKENS: torch.from_numpy(np.sort(most).astype(np.int32))}

    def load_state(self, tensors: Tensors) -> None:
        self.module.load_state_dict(tensors)


class TunedTargetJob(Job):
    """Changes the target itself; figures of held-out text are of what the file will hold.

    stored : type that the drafter's file rounds to
    """

    stored: torch.dtype

    @torch.no_grad()
    def load_state(self, tensors: Tensors) -> None:
        for name, value in self.state().items():
            value.copy_(tensors[name])

    @contextmanager
    def as_stored(self) -> Iterator[None]:
        """Round the trained values, during the block, as the drafter's file does."""
        exact = {name: value.detach().clone() for name, value in self.state().items()}
        self.load_state({name: value.to(self.stored) for name, value in exact.items()})
        try:
            yield
        finally:
            self.load_state(exact)


def cross_entropy_nats(logits: torch.Tensor, labels: torch.Tensor, counted: torch.Tensor | None = None) -> torch.Tensor:
    """Compute the mean cross-entropy of logits [..., V] with tokens [...], in nats.

    counted : bool [...], the rows that the mean is over; None for all
    """
    if counted is None:
        return F.cross_entropy(wide(logits).flatten(0, -2), labels.flatten())
    nats = F.cross_entropy(wide(logits).flatten(0, -2), labels.flatten(), reduction="none")
    return mean_over(nats, counted.flatten())


def kl_nats(theirs: torch.Tensor, ours: torch.Tensor, counted: torch.Tensor | None = None) -> torch.Tensor:
    """Compute the mean over rows of KL(theirs || ours), in nats, of two sets of logits [..., V].

    counted : bool [...], the rows that the mean is over; None for all
    """
    p, q = (F.log_softmax(wide(x), dim=-1).flatten(0, -2) for x in (theirs, ours))
    if counted is None:
        return F.kl_div(q, p, reduction="batchmean", log_target=True)
    return mean_over(F.kl_div(q, p, reduction="none", log_target=True).sum(-1), counted.flatten())


def agreement(ours: torch.Tensor, theirs: torch.Tensor, counted: torch.Tensor | None = None) -> torch.Tensor:
    """Compute how often two sets of logits [..., V] prefer the same token, over the counted rows."""
    return mean_over((ours.argmax(-1) == theirs.argmax(-1)).double(), counted)


def mean_over(values: torch.Tensor, counted: torch.Tensor | None) -> torch.Tensor:
    """Compute the mean of values [...] over the counted ones, bool [...]; None for all. Of none it is 0."""
    return values.mean() if counted is None else (values * counted).sum() / counted.sum().clamp(min=1)


def predicted(answers: torch.Tensor | None, ahead: int = 1) -> torch.Tensor | None:
    """Mark the rows, bool [B, T + 1 - ahead], whose token `ahead` later counts. answers : bool [B, T + 1], or None"""
    return None if answers is None else answers[:, ahead:]


def silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class TextRun:
    """Text and length of a training, and where its drafter is written.

    text : text to be encoded and written by the target, or ready token arrays
    loop : steps, windows, number type and seed
    out : folder of the drafter. A run with the same settings that was killed goes on from what it holds
    cache : folder of the encoded and the generated text, `out` unless given; several trainings may share it
    stored : number type of the drafter's file
    limit_s : seconds of training, after which it ends however many of the loop's steps are left
    progress : called with (stage, done, total)
    """

    text: TextSettings | TrainingText
    loop: LoopSettings
    out: Path
    cache: Path | None = None
    stored: torch.dtype = torch.bfloat16
    progress: Progress = silent
    limit_s: float = math.inf

    @property
    def stored_name(self) -> str:
        return str(self.stored).removeprefix("torch.")


@dataclass(frozen=True)
class Method:
    """A method that trains drafters of a kind.

    settings : what determines the result beside target, loop and text
    objective : the loss, in words; the file does not mention it if empty
    kind : the drafter's kind, as its file names it; the method's name unless given
    ahead : tokens that the drafter proposes at once; windows are longer
    """

    name: str
    settings: Settings
    objective: str = ""
    kind: str = ""
    ahead: int = 0

    def plan_as_dict(self, run: TextRun) -> dict[str, Any]:
        """Make the part of the training's plan that the method decides."""
        return asdict(self.settings)

    def as_dict(self) -> dict[str, Any]:
        """Make what the drafter's file says of the method."""
        return {"method": self.name, **asdict(self.settings)}


class Summary(NamedTuple):
    """The table that a finished training prints."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Trained(Protocol):
    """A finished training, whose file lies at `path`."""

    @property
    def path(self) -> Path: ...

    def as_dict(self) -> dict[str, Any]: ...

    def summary(self) -> Summary: ...


@dataclass(frozen=True)
class TrainedOnText:
    """A finished training on text.

    path : of the drafter
    tensors : of its file, in the type that they are stored in
    seconds : that the loop took, without held-out figures and checkpoints
    parameters : how many were trained
    """

    path: Path
    pair: Pair
    method: Method
    run: TextRun
    text: TrainingText
    tensors: Tensors
    history: Sequence[LogRow]
    seconds: float
    learning_rates: Sequence[float]
    parameters: int

    @property
    def tokens(self) -> int:
        """Count the tokens trained on, fewer than planned if time was out."""
        return self.history[-1].step * self.run.loop.tokens // self.run.loop.steps

    @cached_property
    def file_document(self) -> dict[str, Any]:
        """What the drafter's file says of it."""
        method, loop = self.method, self.run.loop
        return {
            "target": describe_target(self.pair.target, self.pair.target_name),
            **method.as_dict(),
            "parameters": self.parameters,
            **({"objective": method.objective} if method.objective else {}),
            "optimizer": {
                "name": "AdamW",
                "betas": loop.betas,
                "weight_decay": WEIGHT_DECAY,
                "max_gradient_norm": MAX_GRADIENT_NORM,
            },
            "schedule": "learning rate: linear warm-up, then a cosine to 0",
            "learning_rates": self.learning_rates,
            "text": self.text.facts,
            "text_digests": digests_of(self.text.sources, self.text.held_out),
            "stored": self.run.stored_name,
            "loop": loop.as_dict(),
            "tokens": self.tokens,
            "seconds": round(self.seconds, 1),
            "tokens_per_second": round(self.tokens / self.seconds),
            "peak_memory_bytes": peak_memory(),
            "held_out": {"start": self.history[0].held_out, "end": self.history[-1].held_out},
            "provenance": provenance(self.pair.device, self.pair.number_type),
        }

    def as_dict(self) -> dict[str, Any]:
        kind, history = self.method.kind or self.method.name, [row.as_dict() for row in self.history]
        return {"drafter": str(self.path), "kind": kind, **self.file_document, "history": history}

    def summary(self) -> Summary:
        """Make the table of held-out figures before and after."""
        start, end = self.history[0].held_out or {}, self.history[-1].held_out or {}
        speed = round(self.tokens / self.seconds)
        worse = end.get("agreement", 0.0) < start.get("agreement", 0.0)
        return Summary(
            f"held-out text; {self.tokens:,} tokens in {round(self.seconds, 1):.0f} s, {speed:,} a second"
            + worse * "; agreement with the target fell: the drafter drafts worse than it began",
            ["", "start", "end"],
            [[name, f"{start[name]:.4f}", f"{end[name]:.4f}"] for name in end],
        )


def train_on_text(pair: Pair, method: Method, make_job: Callable[[], Job], run: TextRun) -> TrainedOnText:
    """Train a drafter of the pair's target and write OUT/drafter.safetensors.

    See `tensors_from_text` for the parameters and errors.
    """
    trained = tensors_from_text(pair, method, make_job, run)
    save_drafter(run.out, method.kind or method.name, trained.tensors, trained.file_document)
    return trained


def tensors_from_text(pair: Pair, method: Method, make_job: Callable[[], Job], run: TextRun) -> TrainedOnText:
    """Train on text, without writing the drafter's file.

    pair : only its target and tokenizer are used
    method : plan and description of the training
    make_job : makes the job after the text is ready. The target is restored afterwards
    run : text, loop and folder

    Raises InputError if the folder holds another training, windows are too short or longer than the target reads, or
    `run_loop` raises it.
    """
    if run.loop.window_tokens <= method.ahead:
        raise InputError(
            f"windows of {run.loop.window_tokens} tokens are too short for {method.ahead} drafted at once; "
            "give longer windows"
        )
    target = describe_target(pair.target, pair.target_name)
    plan = {"drafter": method.name, "target": target, **method.plan_as_dict(run)}
    refuse_another(run.out, {**plan, **run.loop.decisive})  # before any text is made
    check_length(pair.target, run.loop.window_tokens, "windows")
    text = run.text
    if not isinstance(text, TrainingText):
        text = training_text(pair, text, run.cache or run.out, run.progress)
    job = make_job()
    try:
        chosen = job.chosen(text.sources)
        plan = {**plan, "text": text.facts}
        history = run_loop(job, run.loop, text.sources, text.held_out, run.out, plan, run.progress, run.limit_s)
        tensors = {name: value.detach().to(run.stored, copy=True) for name, value in job.state().items()}
        groups = job.parameter_groups()
    finally:
        job.close()
    return TrainedOnText(
        path=run.out / FILE,
        pair=pair,
        method=method,
        run=run,
        text=text,
        tensors={**tensors, **chosen},
        history=history,
        seconds=seconds_trained(run.out),
        learning_rates=[group.lr for group in groups],
        parameters=sum(parameter.numel() for group in groups for parameter in group.params),
    )
