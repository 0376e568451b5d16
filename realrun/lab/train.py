"""Train the lab's models: tokenizer, target, then the draft model.

The learning rate warms up, stays constant, and falls linearly to zero over the last
30 % of the tokens. Checkpoints of the constant phase do not depend on the total, so a
run can be resumed with a smaller or a larger number of tokens.
"""

from __future__ import annotations

# transformers wraps Module.to in a way that type checkers misread.
# mypy: disable-error-code="arg-type,call-arg"
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from realrun.lab.models import END_OF_TEXT_ID, VOCAB_SIZE, Role, Size, lab_config
from realrun.lab.tokenizer import train_tokenizer
from realrun.pairs.library_text import Split, library_files
from realrun.training.common.folder import CHECKPOINT, add_row, save_checkpoint
from realrun.training.common.folder import checkpoint as read_checkpoint
from realrun.training.common.interrupt import interrupted, stop_asked
from realrun.training.common.text import encode, read_tokens, save_tokens
from specsim.errors import InputError
from specsim.printable import unescaped

DECAY_SHARE = 0.3
LONG_SHARE = 0.15  # the last part trains on windows twice as long


@dataclass(frozen=True)
class TrainSettings:
    """One training run; tokens counts training tokens seen, repeats included.

    From `distill_after_tokens` on, the loss is the divergence from the teacher's
    distribution instead of the cross-entropy with the text. With `limit_s` training ends
    after that many seconds at the latest, and the learning rate falls in time for it.
    """

    role: Role
    tokens: int
    size: Size = "embedded"
    batch_tokens: int = 8192
    window_tokens: int = 256
    muon_lr: float = 5e-3
    adamw_lr: float = 3e-3
    weight_decay: float = 0.05
    warmup_steps: int = 50
    distill_after_tokens: int = 0
    checkpoint_s: float = 300.0
    limit_s: float = math.inf
    seed: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.tokens < self.batch_tokens:
            raise InputError(f"{self.tokens} tokens for the {self.role} are less than one batch; ask for more")

    @property
    def steps(self) -> int:
        return self.tokens // self.batch_tokens


def lr_factor(step: int, steps: int, warmup_steps: int) -> float:
    """Warm-up, constant, linear decay over the last DECAY_SHARE of the steps."""
    decay_start = steps * (1 - DECAY_SHARE)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if step < decay_start:
        return 1.0
    return max(0.0, (steps - step) / (steps - decay_start))


def encode_split(tokenizer: PreTrainedTokenizerBase, split: Split, cache: Path, every: int = 1) -> np.ndarray:
    """All files of a split, or every n-th, as one token array, files separated by end-of-text.

    What lies in the cache is taken as it is.
    """
    path = cache / f"{split}.npy"
    if not path.exists():
        texts = [source.text for source in library_files(split)[::every]]
        save_tokens(encode(tokenizer, END_OF_TEXT_ID, texts), path)
    return read_tokens(path)


def windows(tokens: np.ndarray, count: int, length: int, seed: tuple[int, ...]) -> torch.Tensor:
    """Random windows, int64 [count, length + 1], drawn from a counter-based seed."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, len(tokens) - length - 1, size=count)
    return torch.from_numpy(np.stack([tokens[s : s + length + 1] for s in starts]).astype(np.int64))


def split_parameters(model: torch.nn.Module) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Matrices of the layers go to Muon, embeddings and norms to AdamW."""
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and ".layers." in name else rest).append(parameter)
    return matrices, rest


@torch.no_grad()
def held_out_nats(model: LlamaForCausalLM, tokens: np.ndarray, device: str, count: int = 64) -> float:
    """Mean loss in nats per token on fixed held-out windows of 256 tokens."""
    batch = windows(tokens, count, 256, (1234,)).to(device)
    total = 0.0
    for chunk in batch.split(16):
        logits = model(input_ids=chunk[:, :-1], use_cache=False).logits.float()
        total += float(F.cross_entropy(logits.flatten(0, 1), chunk[:, 1:].flatten(), reduction="sum"))
    return total / batch[:, 1:].numel()


class Trainer:
    """fp32 master weights, bf16 compute; every checkpoint holds all state to resume."""

    def __init__(self, settings: TrainSettings, work: Path, teacher: LlamaForCausalLM | None):
        self.settings = settings
        self.folder = work / settings.role
        self.teacher = teacher
        torch.manual_seed(settings.seed)
        self.master = LlamaForCausalLM(lab_config(settings.role, settings.size))
        self.master.to(settings.device)
        self.compute = LlamaForCausalLM(lab_config(settings.role, settings.size))
        self.compute.to(device=settings.device, dtype=torch.bfloat16)
        matrices, rest = split_parameters(self.master)
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices,
                lr=settings.muon_lr,
                weight_decay=settings.weight_decay,
                momentum=0.95,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(rest, lr=settings.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.base_lrs = [settings.muon_lr, settings.adamw_lr]
        self.step = 0
        self.planned_steps = settings.steps
        self.resume()
        self.publish()

    def publish(self) -> None:
        """Copy the master weights into the model that computes."""
        with torch.no_grad():
            for low, high in zip(self.compute.parameters(), self.master.parameters(), strict=True):
                low.copy_(high)

    @property
    def distilling(self) -> bool:
        return self.teacher is not None and self.step * self.settings.batch_tokens >= self.settings.distill_after_tokens

    def train_step(self, batch: torch.Tensor) -> float:
        inputs, labels = batch[:, :-1], batch[:, 1:].flatten()
        logits = self.compute(input_ids=inputs, use_cache=False).logits.flatten(0, 1)
        if self.distilling:
            assert self.teacher is not None
            with torch.no_grad():
                teacher_logits = self.teacher(input_ids=inputs, use_cache=False).logits.flatten(0, 1)
            # Cross-entropy with the teacher's distribution: the divergence plus a constant.
            loss = F.cross_entropy(logits.float(), teacher_logits.float().softmax(-1))
        else:
            loss = F.cross_entropy(logits.float(), labels)
        loss.backward()
        for low, high in zip(self.compute.parameters(), self.master.parameters(), strict=True):
            high.grad = low.grad.float() if low.grad is not None else None
            low.grad = None
        torch.nn.utils.clip_grad_norm_(self.master.parameters(), 1.0)
        factor = lr_factor(self.step, self.planned_steps, self.settings.warmup_steps)
        for optimizer, lr in zip(self.optimizers, self.base_lrs, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = lr * factor
            optimizer.step()
        self.publish()
        self.step += 1
        return float(loss.detach())

    def checkpoint(self) -> None:
        """Write weights and optimizer state as one safetensors file, atomically."""
        model = {name: value for name, value in self.master.state_dict().items() if name != "lm_head.weight"}
        save_checkpoint(self.folder / CHECKPOINT, {"model": model}, self.optimizers, step=self.step)

    def resume(self) -> None:
        path = self.folder / CHECKPOINT
        if not path.exists():
            return
        with read_checkpoint(path, self.optimizers, self.settings.device) as (parts, facts):
            self.master.load_state_dict(parts["model"], strict=False)  # the head is the embedding
            self.step = int(facts["step"])

    def run(self, train: np.ndarray, held: np.ndarray, console: Console) -> None:
        settings = self.settings
        start = last_save = time.monotonic()
        first_step, ended = self.step, False
        smooth = math.nan
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.folder.mkdir(parents=True, exist_ok=True)
        hidden = not console.is_terminal
        with stop_asked() as stopping, Progress(*columns, console=console, disable=hidden) as progress:
            task = progress.add_task(f"{settings.role}", total=settings.steps, completed=self.step, status="")
            while self.step < settings.steps and not ended:
                long = self.step >= self.planned_steps * (1 - LONG_SHARE)
                length = settings.window_tokens * (2 if long else 1)
                batch = windows(train, settings.batch_tokens // length, length, (settings.seed, self.step)).to(
                    settings.device
                )
                loss = self.train_step(batch)
                elapsed = time.monotonic() - start
                ended = elapsed >= settings.limit_s
                if settings.limit_s < math.inf:
                    affordable = (settings.limit_s - elapsed) * (self.step - first_step) / elapsed
                    self.planned_steps = min(settings.steps, self.step + max(0, int(affordable)))
                smooth = loss if math.isnan(smooth) else 0.98 * smooth + 0.02 * loss
                progress.update(task, completed=self.step, status=f"{smooth:.3f} nats")
                if stopping():
                    self.checkpoint()
                    raise interrupted(self.step, settings.steps, self.folder)
                if time.monotonic() - last_save > settings.checkpoint_s or self.step == settings.steps or ended:
                    self.checkpoint()
                    last_save = time.monotonic()
                    held_loss = held_out_nats(self.compute, held, settings.device)
                    row = {
                        "step": self.step,
                        "time": time.time(),
                        "train_nats": smooth,
                        "held_out_nats": held_loss,
                    }
                    add_row(self.folder, row)
                    progress.update(task, status=f"{smooth:.3f} / {held_loss:.3f} nats")


def prepare_tokenizer(work: Path) -> PreTrainedTokenizerBase:
    """Train the tokenizer once; later calls read it back."""
    folder = work / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        texts = (source.text for source in library_files("train"))
        train_tokenizer(texts, VOCAB_SIZE).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def export(work: Path, role: Role, out: Path, size: Size = "embedded") -> None:
    """Write a trained model as a Hugging Face folder in bf16 with the tokenizer."""
    if not (work / role / CHECKPOINT).exists():
        raise InputError(f"{work / role} holds no checkpoint; train the {role} first")
    settings = TrainSettings(role=role, tokens=8192, size=size)
    trainer = Trainer(settings, work, None)
    trainer.compute.save_pretrained(out / role)
    AutoTokenizer.from_pretrained(work / "tokenizer").save_pretrained(out / role)


def train(settings: TrainSettings, work: Path, teacher_path: Path | None = None) -> int:
    """Train one model of the lab, resuming from its last checkpoint in `work`; the steps done in all."""
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = prepare_tokenizer(work)
    train_tokens = encode_split(tokenizer, "train", work)
    held_tokens = encode_split(tokenizer, "held_out", work)
    teacher = None
    if teacher_path is not None:
        teacher = LlamaForCausalLM.from_pretrained(teacher_path, dtype=torch.bfloat16)
        teacher.to(settings.device)
    trainer = Trainer(settings, work, teacher)
    trainer.run(train_tokens, held_tokens, Console(file=unescaped(sys.stderr)))
    return trainer.step


def train_lab(
    work: Path,
    out: Path,
    *,
    target_tokens: int,
    draft_tokens: int,
    distill_tokens: int,
    size: Size = "embedded",
    device: str = "cpu",
    seed: int = 0,
) -> None:
    """Train both models, the draft model last: first on text, then on the target's distributions."""
    train(TrainSettings("target", target_tokens, size=size, device=device, seed=seed), work)
    export(work, "target", out, size)
    settings = TrainSettings(
        "draft", draft_tokens + distill_tokens, size, distill_after_tokens=draft_tokens, device=device, seed=seed
    )
    train(settings, work, out / "target")
    export(work, "draft", out, size)
