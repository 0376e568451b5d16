"""MEDUSA-2: heads and backbone trained together (Cai et al. 2024, 3.2.2, 3.3.2, 4.0.1).

    L = L_LM + lambda_0 sum_{k=1}^{K} 0.8^k L_k,      L_k = -log p_t^(k)(y_{t+k+1})

L_LM keeps the backbone what it was: the cross-entropy -log p_t^(0)(y_{t+1}) with the text, or, where the
text was made by the target itself, KL(p_original || p) with the same model, its adapter off.
The backbone learns through a low-rank adapter, at a quarter of the heads' learning rate. In two
stages, the heads were trained as MEDUSA-1 before (errata E5); in one, lambda_0, the weight of the heads'
loss, rises as a sine to its peak at the end (E6). Departures: the backbone is not quantised, and a tied
head has no adapter (`realrun.training.common.lora`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F

from realrun.drafters.medusa import MedusaHeads
from realrun.pairs.drafter_files import describe_target, save_drafter, weights_digest
from realrun.provenance import provenance
from realrun.training.common.distill import check_length
from realrun.training.common.loop import LoopSettings, Tensors, Text, Tokens, run_facts, run_loop, wide
from realrun.training.common.lora import Adapter, AdapterSettings
from realrun.training.medusa import head_logits, head_losses
from specsim.errors import InputError
from specsim.progress import Progress


@dataclass(frozen=True)
class Medusa2Settings:
    """What is joined and how. Left out, numbers follow from the loss as in the paper (4.1.1 and 4.2.1).

    loss : of the backbone, "text" for cross-entropy with the text, "distill" for KL from the original
    lambda_0 : weight of the heads' loss, at its peak; 0.2 beside "text", 0.01 beside "distill"
    schedule : "constant" lambda_0, for heads that were trained before, or "sine", rising to it
    backbone_lr : peak of the adapter's learning rate; 5e-4 beside "text", 1e-4 beside "distill"
    heads_lr_factor : how many times the adapter's the heads' is
    decay : lambda_k = decay^k
    """

    loss: Literal["text", "distill"] = "distill"
    lambda_0: float | None = None
    schedule: Literal["constant", "sine"] = "constant"
    backbone_lr: float | None = None
    heads_lr_factor: float = 4.0
    decay: float = 0.8
    adapter: AdapterSettings = field(default_factory=AdapterSettings)

    def __post_init__(self) -> None:
        if self.loss not in ("text", "distill"):
            raise InputError(f"loss {self.loss!r} of MEDUSA-2 is unknown; known: text, distill")
        if self.schedule not in ("constant", "sine"):
            raise InputError(f"schedule {self.schedule!r} of MEDUSA-2 is unknown; known: constant, sine")
        text = self.loss == "text"
        if self.lambda_0 is None:
            object.__setattr__(self, "lambda_0", 0.2 if text else 0.01)
        if self.backbone_lr is None:
            object.__setattr__(self, "backbone_lr", 5e-4 if text else 1e-4)
        for name in ("lambda_0", "backbone_lr", "heads_lr_factor", "decay"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} of MEDUSA-2 is {getattr(self, name)}; give more than 0")

    def heads_weight(self, step: int, steps: int) -> float:
        """lambda_0 at this step, from 0, of so many."""
        assert self.lambda_0 is not None
        return self.lambda_0 * (math.sin(math.pi / 2 * (step + 1) / steps) if self.schedule == "sine" else 1.0)


def train_medusa2(
    target: Any,
    heads: MedusaHeads,
    settings: Medusa2Settings,
    loop: LoopSettings,
    train_tokens: Text,
    held_tokens: Tokens,
    out: Path,
    progress: Progress,
    *,
    target_name: str,
    facts: Mapping[str, Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Train heads and adapter from these heads on, and write them to OUT/drafter.safetensors; the file's facts.

    Goes on from what OUT holds. Target and heads are afterwards as before.

    heads : the start, of MEDUSA-1, or fresh ones with a sine schedule
    facts : more of them for the file, such as where the text comes from
    dtype : of the file. The tuned backbone is the one that the file gives, and so are the held-out figures

    Raises InputError where peft is missing, the target cannot be adapted, or `run_loop` refuses.
    """
    if loop.window_tokens <= len(heads):
        raise InputError(
            f"windows of {loop.window_tokens} tokens are too short for {len(heads)} heads; give longer windows"
        )
    check_length(target, loop.window_tokens, "windows")
    described = describe_target(target, target_name)
    plan = {
        "drafter": "medusa-2",
        "target": described,
        "start": weights_digest(heads),
        "stored": str(dtype).removeprefix("torch."),
        **asdict(settings),
    }
    job = JointTraining(target, heads, settings, loop.steps, loop.seed, dtype)
    try:
        history = run_loop(job, loop, train_tokens, held_tokens, out, plan, progress)
        tensors = {name: value.detach().to(dtype, copy=True) for name, value in job.file_tensors().items()}
    finally:
        job.adapter.remove()
    adapter = {"rank": settings.adapter.rank, "alpha": settings.adapter.alpha}
    whole = {
        "target": described,
        "heads": len(heads),
        "adapter": adapter,
        "method": "medusa-2",
        "settings": asdict(settings),
        "parameters": sum(value.numel() for value in tensors.values()),
        **(facts or {}),
        **run_facts(loop, history, out),
        "provenance": provenance(target.device, target.dtype),
    }
    save_drafter(out, "medusa", tensors, whole)
    return whole


class JointTraining:
    """What MEDUSA-2 trains, for `realrun.training.common.loop`. The target carries the adapter until `adapter.remove`.

    stored : the type that figures of held-out text are rounded to
    """

    def __init__(
        self,
        target: Any,
        heads: MedusaHeads,
        settings: Medusa2Settings,
        steps: int,
        seed: int = 0,
        stored: torch.dtype = torch.bfloat16,
    ):
        self.target, self.settings, self.steps, self.stored = target, settings, steps, stored
        self.heads = copy.deepcopy(heads)
        if self.heads.residual.dtype.itemsize < 4:
            self.heads.float()
        self.heads.requires_grad_(True)
        self.adapter = Adapter(target, settings.adapter, seed)

    def parameter_groups(self) -> list[dict[str, Any]]:
        assert self.settings.backbone_lr is not None
        lr = self.settings.backbone_lr
        return [
            {"params": list(self.adapter.tensors().values()), "lr": lr},
            {"params": list(self.heads.parameters()), "lr": lr * self.settings.heads_lr_factor},
        ]

    def loss(self, batch: torch.Tensor, step: int) -> tuple[torch.Tensor, dict[str, float]]:
        """L of a batch [B, T + 1], and "backbone" and "head_1" to "head_K", in nats a token."""
        with self.adapter.dropping():
            logits, hidden = self._pass(batch[:, :-1])
        if self.settings.loss == "distill":
            backbone = divergence_nats(self._original(batch[:, :-1]), logits)
        else:
            backbone = _cross_entropy(logits, batch[:, 1:])
        heads = head_losses(self.heads, hidden.to(self.heads.residual.dtype), batch)
        joint = torch.stack([self.settings.decay**k * loss for k, loss in enumerate(heads, start=1)]).sum()
        parts = {"backbone": backbone, **{f"head_{k}": loss for k, loss in enumerate(heads, start=1)}}
        total = backbone + self.settings.heads_weight(step, self.steps) * joint
        return total, {name: float(part.detach()) for name, part in parts.items()}

    def state(self) -> Tensors:
        heads = {f"heads.{name}": value for name, value in self.heads.named_parameters()}
        return heads | self.adapter.tensors()

    @torch.no_grad()
    def load_state(self, tensors: Tensors) -> None:
        for name, value in self.state().items():
            value.copy_(tensors[name])

    def file_tensors(self) -> Tensors:
        """The state by its names in a drafter's file."""
        return {name.removeprefix("heads."): value for name, value in self.state().items()}

    @torch.no_grad()
    def held_out(self, batch: torch.Tensor) -> dict[str, float]:
        """Of the drafter as it would be stored.

        original, backbone : cross-entropy with the text in nats, adapter off and on
        divergence, agreement : KL(original || backbone) in nats, and how often both prefer the same token
        head_k, head_k_text, head_k_agreement : cross-entropy of head k with the text in nats, how often it
            prefers the text's token, and how often what the backbone itself prefers k tokens later
        """
        with self._as_stored():
            logits, hidden = self._pass(batch[:, :-1])
            original = self._original(batch[:, :-1])
            preferred = logits.argmax(-1)
            figures = {
                "original": _cross_entropy(original, batch[:, 1:]),
                "backbone": _cross_entropy(logits, batch[:, 1:]),
                "divergence": divergence_nats(original, logits),
                "agreement": (preferred == original.argmax(-1)).double().mean(),
            }
            for k, head in enumerate(head_logits(self.heads, hidden.to(self.heads.residual.dtype)), start=1):
                guess, labels = head.argmax(-1), batch[:, k + 1 :]
                figures[f"head_{k}"] = _cross_entropy(head, labels)
                figures[f"head_{k}_text"] = (guess == labels).double().mean()
                figures[f"head_{k}_agreement"] = (guess == preferred[:, k:]).double().mean()
        return {name: float(value) for name, value in figures.items()}

    def _pass(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [B, T, V] of the backbone, and what its head was fed [B, T, d]."""
        fed: list[torch.Tensor] = []
        head = self.target.get_output_embeddings()
        hook = head.register_forward_pre_hook(lambda module, arguments: fed.append(arguments[0]))
        try:
            logits = self.target(input_ids=tokens, use_cache=False).logits
        finally:
            hook.remove()
        return logits, fed[0]

    @torch.no_grad()
    def _original(self, tokens: torch.Tensor) -> torch.Tensor:
        with self.adapter.off():
            logits: torch.Tensor = self.target(input_ids=tokens, use_cache=False).logits
        return logits

    @contextmanager
    def _as_stored(self) -> Iterator[None]:
        masters = {name: value.detach().clone() for name, value in self.state().items()}
        self.load_state({name: value.to(self.stored) for name, value in masters.items()})
        try:
            yield
        finally:
            self.load_state(masters)


def divergence_nats(original: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Mean of KL(p_original || p) over positions, of two sets of logits [B, T, V]."""
    ours, theirs = (F.log_softmax(wide(x), dim=-1).flatten(0, 1) for x in (logits, original))
    return F.kl_div(ours, theirs, reduction="batchmean", log_target=True)


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(wide(logits).flatten(0, 1), labels.flatten())
