"""Train the lab's models by the loop of all trainings: tokenizer, target, then the draft model.

The learning rate warms up, stays constant, and falls linearly to zero over the last
30 % of the steps. Checkpoints of the constant phase do not depend on the number of steps, so a
run can be resumed with fewer or more tokens.
"""

from __future__ import annotations

# transformers wraps Module.to in a way that type checkers misread.
# mypy: disable-error-code="arg-type,call-arg"
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerBase

from realrun.lab.models import END_OF_TEXT_ID, VOCAB_SIZE, Role, Size, lab_config
from realrun.lab.tokenizer import train_tokenizer
from realrun.pairs.library_text import Split, library_files
from realrun.train.common.folder import CHECKPOINT, Tensors, checkpoint
from realrun.train.common.jobs import cross_entropy_nats
from realrun.train.common.loop import Job, LoopSettings, run_loop
from realrun.train.common.on_text import silent
from realrun.train.common.text import encode, read_tokens, save_tokens
from specsim.io.errors import InputError
from specsim.io.progress import Progress

DECAY_SHARE = 0.3
LONG_SHARE = 0.15  # the last part trains on windows twice as long


@dataclass(frozen=True)
class LabLoop(LoopSettings):
    """Loop with a learning rate that stays constant for long, and twice as long windows at the end."""

    def lr_factor(self, step: int, steps: int) -> float:
        decay_start = steps * (1 - DECAY_SHARE)
        if step < self.warmup:
            return (step + 1) / self.warmup
        if step < decay_start:
            return 1.0
        return max(0.0, (steps - step) / (steps - decay_start))

    def batch_shape(self, step: int, steps: int) -> tuple[int, int]:
        longer = 2 if step >= steps * (1 - LONG_SHARE) else 1
        return self.batch_windows // longer, self.window_tokens * longer

    @property
    def decisive(self) -> dict[str, Any]:
        """All that has influence on the constant phase: the number of steps has none."""
        return {name: value for name, value in super().decisive.items() if name != "steps"}


@dataclass(frozen=True)
class TrainSettings:
    """How to train a model of the lab; `tokens` counts training tokens seen, repeats included.

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
            raise InputError(
                f"{self.tokens} tokens for the {self.role} are less than a batch; give at least {self.batch_tokens}"
            )

    @property
    def loop(self) -> LabLoop:
        return LabLoop(
            steps=self.tokens // self.batch_tokens,
            batch_windows=self.batch_tokens // self.window_tokens,
            window_tokens=self.window_tokens,
            warmup_steps=self.warmup_steps,
            seed=self.seed,
            device=self.device,
            dtype="bfloat16",
            checkpoint_s=self.checkpoint_s,
        )

    @property
    def plan(self) -> dict[str, Any]:
        """Settings that determine the weights, besides loop and text."""
        names = ("role", "size", "muon_lr", "adamw_lr", "weight_decay", "distill_after_tokens")
        return {name: getattr(self, name) for name in names}


class LabTraining(Job):
    """A model of the lab, its matrices trained by Muon, embeddings and norms by AdamW."""

    def __init__(self, settings: TrainSettings, teacher: LlamaForCausalLM | None):
        self.settings, self.teacher = settings, teacher
        with torch.random.fork_rng([]):
            torch.manual_seed(settings.seed)
            self.model = LlamaForCausalLM(lab_config(settings.role, settings.size))
        self.model.to(settings.device)

    def optimizers(self) -> list[torch.optim.Optimizer]:
        settings = self.settings
        parameters = dict(self.model.named_parameters())
        matrices = {name for name, parameter in parameters.items() if parameter.ndim == 2 and ".layers." in name}
        muon = torch.optim.Muon(
            [parameters[name] for name in parameters if name in matrices],
            lr=settings.muon_lr,
            weight_decay=settings.weight_decay,
            momentum=0.95,
            adjust_lr_fn="match_rms_adamw",
        )
        rest = [parameters[name] for name in parameters if name not in matrices]
        return [muon, torch.optim.AdamW(rest, lr=settings.adamw_lr, betas=(0.9, 0.95), weight_decay=0.0)]

    def loss(self, batch: torch.Tensor, step: int) -> tuple[torch.Tensor, dict[str, float]]:
        """Cross-entropy of a batch [B, T + 1] with the text, or with the teacher's distribution, in nats."""
        logits = self.model(input_ids=batch[:, :-1], use_cache=False).logits
        if self.teacher is None or step * self.settings.batch_tokens < self.settings.distill_after_tokens:
            return cross_entropy_nats(logits, batch[:, 1:]), {}
        with torch.no_grad():
            theirs = self.teacher(input_ids=batch[:, :-1], use_cache=False).logits
        # The divergence plus a constant.
        return F.cross_entropy(logits.float().flatten(0, 1), theirs.float().softmax(-1).flatten(0, 1)), {}

    def state(self) -> Tensors:
        """The weights but for the head, which is the embedding."""
        return {name: value for name, value in self.model.state_dict().items() if name != "lm_head.weight"}

    def load_state(self, tensors: Tensors) -> None:
        self.model.load_state_dict(tensors, strict=False)

    def held_out(self, batch: torch.Tensor) -> dict[str, float]:
        """nats : cross-entropy with the text"""
        logits = self.model(input_ids=batch[:, :-1], use_cache=False).logits
        return {"nats": float(cross_entropy_nats(logits, batch[:, 1:]))}


def encode_split(tokenizer: PreTrainedTokenizerBase, split: Split, cache: Path, every: int = 1) -> np.ndarray:
    """Encode all files of a split, or every n-th, as one token array; what lies in the cache is taken as it is."""
    path = cache / f"{split}.npy"
    if not path.exists():
        texts = [source.text for source in library_files(split)[::every]]
        save_tokens(encode(tokenizer, END_OF_TEXT_ID, texts), path)
    return read_tokens(path)


def prepare_tokenizer(work: Path) -> PreTrainedTokenizerBase:
    """Train the tokenizer once; later calls read it back."""
    folder = work / "tokenizer"
    if not (folder / "tokenizer.json").exists():
        texts = (source.text for source in library_files("train"))
        train_tokenizer(texts, VOCAB_SIZE).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def train(settings: TrainSettings, work: Path, teacher_path: Path | None = None, progress: Progress = silent) -> int:
    """Train a model of the lab, from its last checkpoint in `work` on; return the steps done in all."""
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = prepare_tokenizer(work)
    text, held_out = (encode_split(tokenizer, split, work) for split in ("train", "held_out"))
    teacher = None
    if teacher_path is not None:
        teacher = LlamaForCausalLM.from_pretrained(teacher_path, dtype=torch.bfloat16)
        teacher.to(settings.device)
    job, folder = LabTraining(settings, teacher), work / settings.role
    rows = run_loop(job, settings.loop, text, held_out, folder, settings.plan, progress, settings.limit_s)
    return int(rows[-1]["step"])


def export(work: Path, role: Role, out: Path, size: Size = "embedded") -> None:
    """Write a trained model as a Hugging Face folder in bf16 with the tokenizer."""
    path = work / role / CHECKPOINT
    if not path.exists():
        raise InputError(f"{work / role} holds no checkpoint; train the {role} first")
    model = LlamaForCausalLM(lab_config(role, size))
    with checkpoint(path, []) as (parts, _):
        model.load_state_dict(parts["state"], strict=False)
    model.bfloat16().save_pretrained(out / role)
    AutoTokenizer.from_pretrained(work / "tokenizer").save_pretrained(out / role)


def train_lab(
    work: Path,
    out: Path,
    *,
    target_tokens: int,
    draft_tokens: int,
    distill_tokens: int,
    device: str = "cpu",
    seed: int = 0,
    progress: Progress = silent,
) -> None:
    """Train both models, the draft model last: first on text, then on the target's distributions."""
    target = TrainSettings("target", target_tokens, device=device, seed=seed)
    tokens = draft_tokens + distill_tokens
    draft = TrainSettings("draft", tokens, distill_after_tokens=draft_tokens, device=device, seed=seed)
    for settings, teacher in ((target, None), (draft, out / "target")):

        def report(what: str, done: int, total: int, role: Role = settings.role) -> None:
            progress(role, done, total)

        train(settings, work, teacher, report)
        export(work, settings.role, out)
