"""Train EESD's early exit: layers, norm and head on the target's frozen first N layers (Liu et al. 2024, 3.1, 3.2).

The loss is the cross-entropy with the next token of the text, of which a share was written by the
target itself. A step runs the first N layers and the exit's; the target's other layers rest. The
paper's ablations are settings: no exit layer (`exit_layers` 0) and no self-distillation
(`generated_share` 0 of the text).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from realrun.drafters.eesd import EarlyExit, as_model
from realrun.drafters.files import describe_target, save_drafter
from realrun.models import Pair
from realrun.provenance import provenance
from realrun.training.distill import TextSettings, check_length, training_text
from realrun.training.loop import LoopSettings, Progress, Tensors, refuse_another, run_facts, run_loop, wide
from specsim.errors import InputError


@dataclass(frozen=True)
class EesdSettings:
    """layers : N, that stay below; exit_layers : E, trained on top, 0 for a norm and a head alone; lr : its peak"""

    layers: int = 2
    exit_layers: int = 1
    lr: float = 3e-3
    text: TextSettings = field(default_factory=TextSettings)

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise InputError(f"a learning rate of {self.lr}; give more than 0")


class EarlyExitTraining:
    """What EESD trains, for `realrun.training.loop`: float32 masters of the exit; the target is frozen."""

    def __init__(self, target: Any, settings: EesdSettings):
        self.target, self.lr = target.requires_grad_(False), settings.lr
        self.exit = EarlyExit(target, settings.layers, settings.exit_layers)
        if target.dtype.itemsize < 4:
            self.exit.float()
        self.exit.requires_grad_(True)
        self.model = as_model(target, self.exit)

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.exit.parameters()), "lr": self.lr}]

    def loss(self, batch: torch.Tensor, step: int) -> tuple[torch.Tensor, dict[str, float]]:
        """Cross-entropy with the next token of a batch [B, T + 1], in nats a token."""
        logits = self.model(input_ids=batch[:, :-1], use_cache=False).logits
        return F.cross_entropy(wide(logits).flatten(0, 1), batch[:, 1:].flatten()), {}

    def state(self) -> Tensors:
        return self.exit.state_dict()

    def load_state(self, tensors: Tensors) -> None:
        self.exit.load_state_dict(tensors)

    @torch.no_grad()
    def held_out(self, batch: torch.Tensor) -> dict[str, float]:
        """nats : the loss; agreement : how often the exit and the target prefer the same token after a text's."""
        logits, theirs = (model(input_ids=batch[:, :-1], use_cache=False).logits for model in (self.model, self.target))
        return {
            "nats": float(F.cross_entropy(wide(logits).flatten(0, 1), batch[:, 1:].flatten())),
            "agreement": float((logits.argmax(-1) == theirs.argmax(-1)).double().mean()),
        }


def train_eesd(
    pair: Pair,
    settings: EesdSettings,
    loop: LoopSettings,
    out: Path,
    progress: Progress,
    *,
    cache: Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Train an early exit of the pair's target and write it to OUT/drafter.safetensors; facts and history.

    Goes on from what OUT holds of a run with the same settings.

    cache : for the encoded and the generated text, OUT unless given; several trainings may share it
    dtype : of the file
    """
    job = EarlyExitTraining(pair.target, settings)
    described = describe_target(pair.target, pair.target_name)
    own = {key: value for key, value in asdict(settings).items() if key != "text"}
    plan = {"drafter": "eesd", "target": described, **own}
    refuse_another(out, {**plan, **loop.decisive})  # before any text is made
    check_length(pair.target, loop.window_tokens, "windows")
    text = training_text(pair, settings.text, cache or out, progress)
    history = run_loop(job, loop, text.sources, text.held_out, out, {**plan, "text": text.facts}, progress)
    facts = {
        "target": described,
        **own,
        "parameters": sum(parameter.numel() for parameter in job.exit.parameters()),
        "text": text.facts,
        **run_facts(loop, history, out),
        "provenance": provenance(pair.device, pair.dtype),
    }
    path = save_drafter(out, "eesd", {name: value.to(dtype) for name, value in job.state().items()}, facts)
    return {"drafter": str(path), "kind": "eesd", **facts, "history": history}
