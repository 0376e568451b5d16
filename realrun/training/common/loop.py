"""The training loop that all trained drafters share: AdamW, cosine with warm-up, resume after a kill.

The batch of a step and torch's own noise (dropout) depend on seed and step alone, and a checkpoint
holds all else that a step needs. So a run that is killed at any moment and started again ends with
the same loss curve, and on a CPU with bit-identical weights.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from specsim.errors import InputError
from specsim.files import digest, replacing, write_json
from specsim.progress import Progress

PLAN, CHECKPOINT, LOG = "plan.json", "checkpoint.safetensors", "log.jsonl"
HELD_OUT_WINDOWS = 32
ROWS_PER_HELD_OUT = 10  # every tenth row of the log, the first and the last have held-out figures
MAX_GRADIENT_NORM = 1.0

Tokens = npt.NDArray[np.int32]
Text = Tokens | Sequence[tuple[Tokens, float]]  # token arrays with the share of windows that each gives
Tensors = dict[str, torch.Tensor]
Row = dict[str, Any]


@dataclass(frozen=True)
class LoopSettings:
    """How to train. A step sees batch_windows windows of window_tokens tokens.

    warmup_steps : the learning rate rises linearly so long, then falls as a cosine to zero
        (MEDUSA 4.0.1)
    micro_windows : windows that pass through the model at once, for memory; 0 for all of a step's
    dtype : "bfloat16" computes under torch.autocast: frozen parts in the target's type, trained ones
        in float32
    log_every : steps of which one row of the log holds the means
    checkpoint_s : seconds between two checkpoints; has no influence on the result
    """

    steps: int
    batch_windows: int = 8
    window_tokens: int = 256
    warmup_steps: int = 20
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    micro_windows: int = 0
    log_every: int = 10
    checkpoint_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_windows", "window_tokens", "log_every"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} of a training is {getattr(self, name)}; give at least 1")
        if self.warmup_steps < 0 or self.micro_windows < 0:
            raise InputError("warmup_steps and micro_windows of a training cannot be negative; 0 turns them off")
        if self.dtype not in ("float32", "bfloat16", "float64"):
            raise InputError(f"training in {self.dtype} is not stable; choose float32 or bfloat16")

    @property
    def tokens(self) -> int:
        """Tokens that training sees, repeats included."""
        return self.steps * self.batch_windows * self.window_tokens

    @property
    def decisive(self) -> dict[str, Any]:
        """All that has influence on the result."""
        return {name: value for name, value in asdict(self).items() if name != "checkpoint_s"}

    def compute(self) -> AbstractContextManager[Any]:
        """What losses are computed under."""
        kind = torch.device(self.device).type
        return torch.autocast(kind, dtype=torch.bfloat16, enabled=self.dtype == "bfloat16")

    def lr_factor(self, step: int) -> float:
        """Share of the peak learning rate at this step, from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return 0.5 * (1 + math.cos(math.pi * (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)))


class Job(Protocol):
    """What is trained."""

    def parameter_groups(self) -> list[dict[str, Any]]:
        """AdamW's groups, each with "params" and its own "lr", the peak."""

    def loss(self, batch: torch.Tensor, step: int) -> tuple[torch.Tensor, dict[str, float]]:
        """The loss, a scalar in nats, of a batch int64 [B, T + 1]; and its parts for the log."""

    def state(self) -> Tensors:
        """The trained tensors."""

    def load_state(self, tensors: Tensors) -> None:
        """Take up what `state` gave."""

    def held_out(self, batch: torch.Tensor) -> dict[str, float]:
        """Figures of windows int64 [B, T + 1] that training never sees."""


def run_loop(
    job: Job,
    settings: LoopSettings,
    train_tokens: Text,
    held_tokens: Tokens,
    folder: Path,
    plan: Mapping[str, Any],
    progress: Progress,
) -> list[Row]:
    """Train, or go on from what FOLDER holds; the rows of the log.

    train_tokens : one token array, or several with the share of windows that each gives
    plan : what decides the result beside the loop's settings and the text, such as the target's digest

    A row has "step", "loss" and its parts, means in nats over the steps since the row before, and some
    have "held_out", what the job says of HELD_OUT_WINDOWS fixed windows; that of step 0 has
    nothing else. FOLDER/log.jsonl grows by each.

    Raises InputError for too little text, a folder of another plan, a damaged checkpoint, or a
    loss that is no number.
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
    data = [[text_digest(tokens), share] for tokens, share in [*sources, (held_tokens, 0.0)]]
    claim(folder, {**plan, **settings.decisive, "text_digests": data})
    cuda = [torch.device(settings.device)] if torch.device(settings.device).type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        return _Run(job, settings, sources, held_tokens, folder, progress).to_end()


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
        groups = job.parameter_groups()
        self.peaks = [group["lr"] for group in groups]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
        self.step, self.seconds = 0, 0.0
        self.history: list[Row] = []
        self.recent: list[dict[str, float]] = []
        if (folder / CHECKPOINT).exists():
            self._resume()
        (folder / LOG).write_text("".join(json.dumps(row) + "\n" for row in self.history))

    def to_end(self) -> list[Row]:
        settings = self.settings
        saved = time.monotonic()
        if not self.history:
            self._row({"step": 0, "held_out": self._held_out()})
        self.progress("train", self.step, settings.steps)
        while self.step < settings.steps:
            begin = time.monotonic()
            self._train_step()
            self.seconds += time.monotonic() - begin
            last = self.step == settings.steps
            if last or self.step % settings.log_every == 0:
                self._row(self._means())
            if last or time.monotonic() - saved >= settings.checkpoint_s:
                self._checkpoint()
                saved = time.monotonic()
            self.progress("train", self.step, settings.steps)
        return self.history

    def _train_step(self) -> None:
        settings, step = self.settings, self.step
        batch = windows(self.sources, settings.batch_windows, settings.window_tokens, (settings.seed, 0, step))
        torch.manual_seed(int(np.random.SeedSequence((settings.seed, 2, step)).generate_state(1)[0]))
        means: dict[str, float] = {}
        for piece in batch.split(settings.micro_windows or settings.batch_windows):
            with settings.compute():
                loss, parts = self.job.loss(piece.to(settings.device), step)
            weight = len(piece) / len(batch)
            (loss * weight).backward()
            for name, value in {"loss": float(loss.detach()), **parts}.items():
                means[name] = means.get(name, 0.0) + weight * value
        if not math.isfinite(means["loss"]):
            raise InputError(f"the loss is {means['loss']} at step {step + 1}; give a lower learning rate")
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * settings.lr_factor(step)
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRADIENT_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.recent.append(means)
        self.step += 1

    def _means(self) -> Row:
        """A row of the log about the steps since the last one."""
        row: Row = {"step": self.step}
        row |= {name: sum(means[name] for means in self.recent) / len(self.recent) for name in self.recent[0]}
        self.recent = []
        if self.step == self.settings.steps or self.step % (self.settings.log_every * ROWS_PER_HELD_OUT) == 0:
            row["held_out"] = self._held_out()
        return row

    def _row(self, row: Row) -> None:
        self.history.append(row)
        with (self.folder / LOG).open("a") as handle:
            handle.write(json.dumps(row) + "\n")

    def _held_out(self) -> dict[str, float]:
        """Means over the held-out windows, as many at once as in training."""
        pieces = self.held.split(self.settings.micro_windows or self.settings.batch_windows)
        means: dict[str, float] = {}
        with torch.no_grad(), self.settings.compute():
            for piece in pieces:
                for name, value in self.job.held_out(piece.to(self.settings.device)).items():
                    means[name] = means.get(name, 0.0) + len(piece) / len(self.held) * value
        return means

    def _checkpoint(self) -> None:
        tensors = {f"state.{name}": value for name, value in self.job.state().items()}
        for index, slots in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{slot}": torch.as_tensor(value) for slot, value in slots.items()}
        facts = {"step": self.step, "seconds": self.seconds, "history": self.history, "recent": self.recent}
        whole = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        with replacing(self.folder / CHECKPOINT) as temporary:
            save_file(whole, temporary, metadata={"run": json.dumps(facts)})

    def _resume(self) -> None:
        path = self.folder / CHECKPOINT
        try:
            tensors, facts = load_file(path), _facts(path)
            self.job.load_state({k.removeprefix("state."): v for k, v in tensors.items() if k.startswith("state.")})
        except (SafetensorError, KeyError, TypeError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0]
            raise InputError(f"checkpoint {path} is damaged ({reason}); delete it to train anew") from None
        whole = self.optimizer.state_dict()
        for key, value in tensors.items():
            if key.startswith("optimizer."):
                _, index, slot = key.split(".")
                whole["state"].setdefault(int(index), {})[slot] = value.clone()
        self.optimizer.load_state_dict(whole)
        self.step, self.seconds = facts["step"], facts["seconds"]
        self.history, self.recent = facts["history"], facts["recent"]


def _facts(path: Path) -> dict[str, Any]:
    """The run's state that is no tensor."""
    with safe_open(path, framework="pt") as handle:
        return dict(json.loads((handle.metadata() or {})["run"]))


def training_seconds(folder: Path) -> float:
    """Seconds that the steps of the finished run in this folder took; held-out figures and checkpoints left out."""
    return float(_facts(folder / CHECKPOINT)["seconds"])


def run_facts(settings: LoopSettings, history: Sequence[Row], folder: Path) -> dict[str, Any]:
    """What a drafter's file says of the finished run in this folder."""
    seconds = training_seconds(folder)
    return {
        "loop": asdict(settings),
        "tokens": settings.tokens,
        "seconds": round(seconds, 1),
        "tokens_per_second": round(settings.tokens / seconds),
        "held_out": {"start": history[0]["held_out"], "end": history[-1]["held_out"]},
    }


def windows(sources: Sequence[tuple[Tokens, float]], count: int, length: int, seed: tuple[int, ...]) -> torch.Tensor:
    """Random windows, int64 [count, length + 1], drawn from a counter-based seed; a source each, by its share."""
    rng = np.random.default_rng(seed)
    shares = np.array([share for _, share in sources])
    chosen = rng.choice(len(sources), size=count, p=shares / shares.sum())
    starts = rng.random(count)
    rows = []
    for source, at in zip(chosen.tolist(), starts.tolist(), strict=True):
        tokens = sources[source][0]
        start = int(at * (len(tokens) - length))
        rows.append(tokens[start : start + length + 1])
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def text_digest(tokens: Tokens) -> str:
    """A short hash of all tokens."""
    return digest(np.ascontiguousarray(tokens, dtype=np.int32).tobytes())


def claim(folder: Path, plan: Mapping[str, Any]) -> None:
    """Leave the plan in the folder, or InputError if another one is there."""
    refuse_another(folder, plan, whole=True)
    path = folder / PLAN
    if not path.exists():
        write_json(plan, path)


def refuse_another(folder: Path, plan: Mapping[str, Any], *, whole: bool = False) -> None:
    """InputError if the folder holds the plan of another training; where not whole, this is a part of one."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; give a folder as --out")
    path = folder / PLAN
    if not path.exists():
        return
    there, plan = json.loads(path.read_text()), json.loads(json.dumps(plan))  # tuples become lists, as in the file
    for key in dict.fromkeys([*plan, *there] if whole else plan):
        if there.get(key) != plan.get(key):
            raise InputError(
                f"{folder} holds a training with {key}={json.dumps(there.get(key))}, asked for "
                f"{json.dumps(plan.get(key))}; give another --out"
            )


def wide(x: torch.Tensor) -> torch.Tensor:
    """At least float32, for losses."""
    return x.float() if x.dtype.itemsize < 4 else x
