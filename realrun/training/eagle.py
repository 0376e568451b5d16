"""Train EAGLE's drafter on the features of a frozen target (Li et al. 2024, arXiv:2401.15077, 4.2).

    L = SmoothL1(f_hat, f) + w CrossEntropy(softmax(head(f)), head(f_hat)),      w = 0.1

f is what the target's head reads, f_hat what the drafter makes of the embeddings of all tokens so far
and of the true features before them, to which uniform noise is added, as in drafting they will be
the drafter's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from realrun.drafters.eagle import Eagle
from realrun.pairs.pair import Pair
from realrun.training.common.distill import TextSettings
from realrun.training.common.frozen import train_on_frozen_target
from realrun.training.common.loop import LoopSettings, Tensors, wide
from realrun.training.edd import kl_nats
from specsim.errors import InputError
from specsim.progress import Progress


@dataclass(frozen=True)
class EagleSettings:
    """class_weight : w; noise : largest that is added to a feature's component; lr : its peak"""

    class_weight: float = 0.1
    noise: float = 0.1
    lr: float = 6e-3
    text: TextSettings = field(default_factory=TextSettings)

    def __post_init__(self) -> None:
        if not (self.lr > 0 and self.class_weight >= 0 and self.noise >= 0):
            raise InputError(
                f"learning rate {self.lr}, class weight {self.class_weight} and noise {self.noise} of EAGLE; give a "
                "rate above 0 and no negative number"
            )


class EagleTraining:
    """What EAGLE trains, for `realrun.training.common.loop`: float32 masters; the target is frozen, its head too."""

    def __init__(self, target: Any, settings: EagleSettings, seed: int = 0):
        self.target, self.settings = target.requires_grad_(False), settings
        self.eagle = Eagle(target, seed)
        if target.dtype.itemsize < 4:
            self.eagle.float()
        self.eagle.requires_grad_(True)

    def parameter_groups(self) -> list[dict[str, Any]]:
        return [{"params": list(self.eagle.parameters()), "lr": self.settings.lr}]

    def loss(self, batch: torch.Tensor, step: int) -> tuple[torch.Tensor, dict[str, float]]:
        """L of a batch [B, T + 1], and its parts "regression" and "classification", the latter in nats."""
        features = self._features(batch)
        noise = (torch.rand_like(features) * 2 - 1) * self.settings.noise
        ours = feature_pass(self.eagle, self.target, batch[:, :-1], features + noise)
        regression = F.smooth_l1_loss(wide(ours), wide(features))
        head = self.target.get_output_embeddings()
        classification = F.cross_entropy(wide(head(ours)).flatten(0, 1), wide(head(features)).softmax(-1).flatten(0, 1))
        parts = {"regression": float(regression.detach()), "classification": float(classification.detach())}
        return regression + self.settings.class_weight * classification, parts

    def state(self) -> Tensors:
        return self.eagle.state_dict()

    def load_state(self, tensors: Tensors) -> None:
        self.eagle.load_state_dict(tensors)

    @torch.no_grad()
    def held_out(self, batch: torch.Tensor) -> dict[str, float]:
        """Of first drafted tokens, before which all features are true.

        divergence : KL(target || drafter) in nats; agreement : how often both prefer the same token;
        regression : the loss of features
        """
        features = self._features(batch)
        ours = feature_pass(self.eagle, self.target, batch[:, :-1], features)
        head = self.target.get_output_embeddings()
        theirs, drafted = head(features), head(ours)
        return {
            "divergence": float(kl_nats(theirs, drafted)),
            "agreement": float((theirs.argmax(-1) == drafted.argmax(-1)).double().mean()),
            "regression": float(F.smooth_l1_loss(wide(ours), wide(features))),
        }

    @torch.no_grad()
    def _features(self, batch: torch.Tensor) -> torch.Tensor:
        """The target's features [B, T, d] of all tokens of a batch [B, T + 1] but the last."""
        features: torch.Tensor = self.target.model(input_ids=batch[:, :-1], use_cache=False).last_hidden_state
        return features


def feature_pass(eagle: Eagle, target: Any, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """What the drafter puts out [B, T, d] after tokens [B, T], each fused with the feature [B, T, d] before it."""
    inner = target.model
    embedded = inner.embed_tokens(tokens)
    before = F.pad(features, (0, 0, 1, 0))[:, :-1].to(embedded.dtype)
    x = eagle.fused(embedded, before)
    count = tokens.shape[1]
    seen = torch.ones(count, count, dtype=torch.bool, device=x.device).tril_()
    mask = torch.zeros(seen.shape, dtype=x.dtype, device=x.device).masked_fill_(~seen, torch.finfo(x.dtype).min)
    positions = torch.arange(count, device=x.device)[None]
    out: torch.Tensor = eagle.layers[0](
        x,
        attention_mask=mask[None, None],
        position_ids=positions,
        position_embeddings=inner.rotary_emb(x, position_ids=positions),
    )
    return out


def train_eagle(
    pair: Pair,
    settings: EagleSettings,
    loop: LoopSettings,
    out: Path,
    progress: Progress,
    *,
    cache: Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:
    """Train a drafter of the pair's target, as `train_on_frozen_target` does; facts and history."""
    job = EagleTraining(pair.target, settings, loop.seed)
    return train_on_frozen_target(pair, "eagle", "eagle", job, settings, loop, out, progress, cache=cache, dtype=dtype)
