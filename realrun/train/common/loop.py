"""The loop of all trainings on text: AdamW, cosine schedule with warm-up, continuation after a kill or Ctrl-C.

The batch of a step and torch's own noise (dropout) depend only on seed and step, and a checkpoint holds everything else
that a step needs. A run that is killed at any moment and started again therefore ends with the same loss curve, and on
a CPU with bit-identical weights.
"""

from __future__ import annotations

import json
import math
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from realrun.train.common.folder import (
    CHECKPOINT,
    LOG,
    Tensors,
    checkpoint,
    claim,
    read_facts,
    save_checkpoint,
)
from specsim.io.errors import InputError, Interrupted
from specsim.io.files import digest
from specsim.io.progress import Progress
from specsim.io.settings import Settings, setting

HELD_OUT_WINDOWS = 32
ROWS_PER_HELD_OUT = 10  # held-out figures are in every tenth row of the log, the first and the last
MAX_GRADIENT_NORM = 1.0
CHECKPOINT_SHARE = 0.05  # of the time, at most, goes into checkpoints
DIVERGED_FACTOR, DIVERGED_NATS = 2.0, 1.0  # training diverged if loss > factor x first loss + nats
WEIGHT_DECAY = 0.0

Tokens = npt.NDArray[np.int32]  # [n], or [n, 2] as `marked` makes them
Text = Tokens | Sequence[tuple[Tokens, float]]  # token arrays with the share of windows that each gives
LossAndParts = tuple[torch.Tensor, dict[str, float]]


@dataclass(frozen=True)
class LoopSettings(Settings):
    """Settings of the loop. A step processes batch_windows windows of window_tokens tokens.

    steps : optimizer steps
    batch_windows, window_tokens : windows of a step, and tokens of a window
    warmup_steps : steps in which the learning rate rises linearly, before it falls as a cosine to zero (MEDUSA 4.0.1);
        None for a tenth of the steps, from 10 (or half the steps, if that is less) to 40
    seed : seed of windows and torch's noise
    device : device that computes the losses
    dtype : "bfloat16" computes under torch.autocast: frozen parts in the target's type, trained parts in float32
    micro_windows : windows that pass through the model at once, for memory; 0 for all of a step's
    log_every : steps between two rows of the log, which hold means; None for 10, or a tenth of a short training
    betas : AdamW's decay rates of the means of the gradient and of its square
    checkpoint_s : least seconds between two checkpoints, 0 for one after every step; does not change the result
    """

    steps: int = setting(low=1)
    batch_windows: int = setting(8, low=1)
    window_tokens: int = setting(256, low=1)
    warmup_steps: int | None = setting(20, low=0)
    seed: int = setting(0)
    device: str = setting("cpu")
    dtype: Literal["float32", "bfloat16", "float64"] = setting("float32")
    micro_windows: int = setting(0, low=0)
    log_every: int | None = setting(10, low=1)
    checkpoint_s: float = setting(60.0)
    betas: tuple[float, ...] = setting((0.9, 0.95))

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"betas {self.betas}; give two numbers from 0 to below 1, for example 0.9,0.95")

    @property
    def warmup(self) -> int:
        """Count the steps in which the learning rate rises."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        # AdamW's first steps change every weight by the full learning rate, however short the training.
        return min(40, self.steps // 2, max(10, self.steps // 10))

    @property
    def row_steps(self) -> int:
        """Count the steps of a row of the log."""
        return max(1, min(10, self.steps // 10)) if self.log_every is None else self.log_every

    def lasting(self, tokens: float) -> LoopSettings:
        """Copy the settings, for a training over so many tokens."""
        return replace(self, steps=max(1, round(tokens / (self.batch_windows * self.window_tokens))))

    @property
    def tokens(self) -> int:
        """Count the tokens that the training processes, repeats included."""
        return self.steps * self.batch_windows * self.window_tokens

    def as_dict(self) -> dict[str, Any]:
        """Make the JSON form with all defaults resolved."""
        return {**asdict(self), "warmup_steps": self.warmup, "log_every": self.row_steps}

    @property
    def decisive(self) -> dict[str, Any]:
        """Select the settings that influence the result."""
        return {name: value for name, value in self.as_dict().items() if name != "checkpoint_s"}

    def compute(self) -> AbstractContextManager[Any]:
        """Make the context in which losses are computed."""
        kind = torch.device(self.device).type
        return torch.autocast(kind, dtype=torch.bfloat16, enabled=self.dtype == "bfloat16")

    def lr_factor(self, step: int, steps: int) -> float:
        """Compute the share of the peak learning rate at this step, from 0, of `steps`."""
        rise = self.warmup
        if step < rise:
            return (step + 1) / rise
        return 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


class ParameterGroup(NamedTuple):
    """Parameters that AdamW changes, and the peak of their learning rate."""

    params: list[torch.Tensor]
    lr: float


@dataclass(frozen=True)
class LogRow:
    """A row of the log.

    means : "loss" and its parts, means in nats over the steps since the row before; empty at step 0
    held_out : the job's figures of HELD_OUT_WINDOWS fixed windows; None in most rows
    """

    step: int
    means: dict[str, float] = field(default_factory=dict)
    held_out: dict[str, float] | None = None

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> LogRow:
        """Read what `as_dict` made."""
        means = {name: value for name, value in row.items() if name not in ("step", "held_out")}
        return cls(row["step"], means, row.get("held_out"))

    def as_dict(self) -> dict[str, Any]:
        held_out = {} if self.held_out is None else {"held_out": self.held_out}
        return {"step": self.step, **self.means, **held_out}


class Job(Protocol):
    """Definition of a training: parameters, loss and held-out metrics."""

    def parameter_groups(self) -> list[ParameterGroup]:
        """List AdamW's groups."""

    def loss(self, batch: torch.Tensor, step: int, answers: torch.Tensor | None = None) -> LossAndParts:
        """Compute the loss of a batch int64 [B, T + 1], a scalar in nats, and its parts for the log.

        answers : bool [B, T + 1], the tokens whose prediction counts; None for all
        """

    def state(self) -> Tensors:
        """Collect the trained tensors."""

    def load_state(self, tensors: Tensors) -> None:
        """Restore what `state` collected."""

    def held_out(self, batch: torch.Tensor, answers: torch.Tensor | None = None) -> dict[str, float]:
        """Compute figures of held-out windows int64 [B, T + 1]. answers : as for the loss"""

    def chosen(self, text: Sequence[tuple[Tokens, float]]) -> Tensors:
        """Choose, by the training text, tensors that are not trained but belong into the file."""
        return {}

    def close(self) -> None:
        """Restore the target."""
        return


def run_loop(
    job: Job,
    settings: LoopSettings,
    train_tokens: Text,
    held_tokens: Tokens,
    folder: Path,
    plan: Mapping[str, Any],
    progress: Progress,
    limit_s: float = math.inf,
) -> list[LogRow]:
    """Train, or continue the training in FOLDER; return the rows of the log.

    train_tokens : a token array, or several with the share of windows that each gives
    plan : what determines the result beside the loop's settings and the text, such as the target's digest
    limit_s : seconds after which training ends; the learning rate reaches 0 by then

    Each row is appended to FOLDER/log.jsonl.

    Raises InputError for too little text, a folder of another plan, a damaged checkpoint, or a loss that is not finite
    or diverges; Interrupted after Ctrl-C, with a checkpoint written.
    """
    sources: Sequence[tuple[Tokens, float]] = (
        [(train_tokens, 1.0)] if isinstance(train_tokens, np.ndarray) else train_tokens
    )
    for tokens in (*(tokens for tokens, _ in sources), held_tokens):
        if len(tokens) < settings.window_tokens + 2:
            raise InputError(
                f"a text of {len(tokens)} tokens gives no windows of {settings.window_tokens}; give more text or "
                "shorter windows"
            )
    claim(folder, {**plan, **settings.decisive, "text_digests": digests_of(sources, held_tokens)})
    cuda = [torch.device(settings.device)] if torch.device(settings.device).type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        return _Run(job, settings, sources, held_tokens, folder, progress).to_end(limit_s)


class _Run:
    """State of a run: the step to do next, the rows so far, and the losses since the last row."""

    def __init__(
        self,
        job: Job,
        settings: LoopSettings,
        sources: Sequence[tuple[Tokens, float]],
        held_tokens: Tokens,
        folder: Path,
        progress: Progress,
    ):
        self.job, self.settings, self.sources, self.folder, self.progress = job, settings, sources, folder, progress
        self.held = windows([(held_tokens, 1.0)], HELD_OUT_WINDOWS, settings.window_tokens, (settings.seed, 1, 0))
        first, second = settings.betas
        groups = job.parameter_groups()
        self.optimizer = torch.optim.AdamW(
            [group._asdict() for group in groups], betas=(first, second), weight_decay=WEIGHT_DECAY
        )
        self.peaks = [group.lr for group in groups]
        self.step, self.seconds = 0, 0.0
        self.planned = settings.steps  # fewer where a time limit allows no more
        self.history: list[LogRow] = []
        self.recent: list[dict[str, float]] = []
        if (folder / CHECKPOINT).exists():
            self._resume()
        (folder / LOG).write_text("".join(json.dumps(row.as_dict()) + "\n" for row in self.history))

    def to_end(self, limit_s: float) -> list[LogRow]:
        settings, ended, wait_s = self.settings, False, self.settings.checkpoint_s
        begun = saved = time.monotonic()
        first = self.step
        if not self.history:
            self._add(LogRow(0, held_out=self._held_out()))
        self.progress("train", self.step, settings.steps)
        with stop_asked() as stopping:
            while self.step < settings.steps and not ended:
                begin = time.monotonic()
                self._train_step()
                self.seconds += time.monotonic() - begin
                if limit_s < math.inf:
                    elapsed_s = time.monotonic() - begun
                    affordable = (limit_s - elapsed_s) * (self.step - first) / elapsed_s
                    self.planned = min(settings.steps, self.step + max(0, int(affordable)))
                    ended = elapsed_s >= limit_s
                last = ended or self.step == settings.steps
                if last or self.step % settings.row_steps == 0:
                    self._add(self._row(last))
                stop = stopping()
                if last or stop or time.monotonic() - saved >= wait_s:
                    begin = time.monotonic()
                    self._checkpoint()
                    saved = time.monotonic()
                    spent_s = saved - begin
                    wait_s = settings.checkpoint_s and max(settings.checkpoint_s, spent_s / CHECKPOINT_SHARE)
                self.progress("train", self.step, settings.steps)
                if stop:
                    raise interrupted(self.step, settings.steps, self.folder)
        return self.history

    def _train_step(self) -> None:
        settings, step = self.settings, self.step
        batch = windows(self.sources, settings.batch_windows, settings.window_tokens, (settings.seed, 0, step))
        torch.manual_seed(int(np.random.SeedSequence((settings.seed, 2, step)).generate_state(1)[0]))
        means: dict[str, float] = {}
        for piece in batch.split(settings.micro_windows or len(batch)):
            tokens, answers = split_marks(piece.to(settings.device))
            with settings.compute():
                loss, parts = self.job.loss(tokens, step, answers)
            weight = share_of(piece, batch)
            (loss * weight).backward()
            for name, value in {"loss": float(loss.detach()), **parts}.items():
                means[name] = means.get(name, 0.0) + weight * value
        if not math.isfinite(means["loss"]):
            raise InputError(f"the loss is {means['loss']} at step {step + 1}; give a lower learning rate")
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * settings.lr_factor(step, self.planned)
        torch.nn.utils.clip_grad_norm_(
            [p for group in self.optimizer.param_groups for p in group["params"]], MAX_GRADIENT_NORM
        )
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.recent.append(means)
        self.step += 1

    def _row(self, last: bool) -> LogRow:
        means = {name: sum(step[name] for step in self.recent) / len(self.recent) for name in self.recent[0]}
        start = self.history[1].means["loss"] if len(self.history) > 1 else self.recent[0]["loss"]
        if means["loss"] > DIVERGED_FACTOR * start + DIVERGED_NATS:
            raise InputError(
                f"training diverged: the loss rose from {start:.3g} to {means['loss']:.3g} nats by step {self.step}; "
                "give a lower learning rate or more steps of warm-up (--warmup)"
            )
        self.recent = []
        held_out = last or self.step % (self.settings.row_steps * ROWS_PER_HELD_OUT) == 0
        return LogRow(self.step, means, self._held_out() if held_out else None)

    def _add(self, row: LogRow) -> None:
        self.history.append(row)
        with (self.folder / LOG).open("a") as handle:
            handle.write(json.dumps(row.as_dict()) + "\n")

    def _held_out(self) -> dict[str, float]:
        """Compute means over the held-out windows, with as many windows at once as in training."""
        pieces = self.held.split(self.settings.micro_windows or self.settings.batch_windows)
        means: dict[str, float] = {}
        with torch.no_grad(), self.settings.compute():
            for piece in pieces:
                tokens, answers = split_marks(piece.to(self.settings.device))
                for name, value in self.job.held_out(tokens, answers).items():
                    means[name] = means.get(name, 0.0) + share_of(piece, self.held) * value
        return means

    def _checkpoint(self) -> None:
        """Write all that the run needs to continue, and after the last step what a second start reads."""
        history = [row.as_dict() for row in self.history]
        facts = {"step": self.step, "seconds": self.seconds, "history": history, "recent": self.recent}
        optimizer = self.optimizer if self.step < self.settings.steps else None
        save_checkpoint(self.folder / CHECKPOINT, {"state": self.job.state()}, optimizer, run=facts)

    def _resume(self) -> None:
        with checkpoint(self.folder / CHECKPOINT, self.optimizer) as (parts, facts):
            self.job.load_state(parts["state"])
            run = facts["run"]
            self.step, self.seconds, self.recent = (run[name] for name in ("step", "seconds", "recent"))
            self.history = [LogRow.from_json(row) for row in run["history"]]


def peak_memory() -> int:
    """Most bytes that this process has held: of the GPU where it used one, else of the machine."""
    if torch.cuda.is_available() and (most := torch.cuda.max_memory_allocated()):
        return most
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # which Linux counts in KiB


def seconds_trained(folder: Path) -> float:
    """Read the seconds that the finished run in this folder took, without held-out figures and checkpoints."""
    return float(read_facts(folder / CHECKPOINT)["run"]["seconds"])


def windows(sources: Sequence[tuple[Tokens, float]], count: int, length: int, seed: tuple[int, ...]) -> torch.Tensor:
    """Draw random windows, int64 [count, length + 1], from a counter-based seed; each from a source, by its share.

    If a source says which tokens are answers, windows are [count, length + 1, 2], as `marked` has them.
    """
    rng = np.random.default_rng(seed)
    shares = np.array([share for _, share in sources])
    chosen = rng.choice(len(sources), size=count, p=shares / shares.sum())
    starts = rng.random(count)
    rows = []
    for source, at in zip(chosen.tolist(), starts.tolist(), strict=True):
        tokens = sources[source][0]
        start = int(at * (len(tokens) - length))
        rows.append(tokens[start : start + length + 1])
    if any(tokens.ndim == 2 for tokens, _ in sources):
        rows = [marked(row) for row in rows]
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def marked(tokens: Tokens, answer: bool = True) -> Tokens:
    """Put beside tokens [n], as a second column, 1 if they are an answer and 0 if they carry no loss: int32 [n, 2].

    Tokens that are marked stay as they are. Text without marks is an answer as a whole.
    """
    return tokens if tokens.ndim == 2 else np.stack([tokens, np.full_like(tokens, answer)], axis=1)


def split_marks(batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Separate windows from their marks: int64 [B, T + 1] and bool [B, T + 1], None for text without marks."""
    return (batch, None) if batch.dim() == 2 else (batch[..., 0], batch[..., 1].bool())


def share_of(piece: torch.Tensor, batch: torch.Tensor) -> float:
    """Compute the share of a batch's predicted tokens that a piece of its windows has; of answers if marked."""
    if batch.dim() == 2:
        return len(piece) / len(batch)
    return int(piece[:, 1:, 1].sum()) / max(1, int(batch[:, 1:, 1].sum()))


def digests_of(sources: Sequence[tuple[Tokens, float]], held_tokens: Tokens) -> list[list[Any]]:
    """List each token array's digest and share of the windows; the share of the held-out text is 0."""
    return [[text_digest(tokens), share] for tokens, share in [*sources, (held_tokens, 0.0)]]


def text_digest(tokens: Tokens) -> str:
    """Hash all tokens."""
    return digest(np.ascontiguousarray(tokens, dtype=np.int32).tobytes())


def wide(x: torch.Tensor) -> torch.Tensor:
    """Cast to float32 at least, for losses."""
    return x.float() if x.dtype.itemsize < 4 else x


def interrupted(step: int, steps: int, folder: Path) -> Interrupted:
    """Make the exception to raise after that checkpoint."""
    return Interrupted(f"step {step} of {steps} is kept in {folder}; the same command goes on")


@contextmanager
def stop_asked() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether the user has pressed Ctrl-C; a second Ctrl-C interrupts at once.

    It never tells so outside the main thread, which receives the signals, or if they are ignored, as under nohup.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        yield lambda: False
        return
    pressed = False

    def note(number: int, frame: Any) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:
        yield lambda: False
        return
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)
