"""Train EAGLE's drafter on the features of a frozen target (Li et al. 2024, arXiv:2401.15077, 4.2).

    L = SmoothL1(f_hat, f) + w CrossEntropy(softmax(head(f)), head(f_hat)),      w = 0.1

f is the input of the target's head, and f_hat the drafter's output for the embeddings of all tokens so far and the true
features before them. Uniform noise is added to these features because in drafting they are the drafter's own.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from realrun.drafters.eagle import Eagle, EagleKind
from realrun.lm.layer_stack import capped, layer_pass
from realrun.pairs.pair import Pair
from realrun.train.common.loop import wide
from realrun.train.common.on_text import (
    DRAFT_VOCABULARY,
    Method,
    ModuleJob,
    TextRun,
    agreement,
    kl_nats,
    mean_over,
    predicted,
    train_on_text,
)
from realrun.train.common.trainings import Training
from specsim.io.settings import Settings, setting

LAB_WIDTH, LAB_LR = 256, 6e-3
LEARNING_RATE = (
    "Peak learning rate (default: 0.006 for targets as narrow as the lab's, and less in inverse proportion to the "
    "square of a wider target's width)."
)
OBJECTIVE = "smooth L1 of the features + class_weight x cross-entropy with the target's distribution"


@dataclass(frozen=True)
class EagleSettings(Settings):
    """Settings of EAGLE's drafter."""

    class_weight: float = setting(
        0.1, low=0, doc="Weight of the cross-entropy; the regression of features has weight 1."
    )
    noise: float = setting(0.1, low=0, doc="Maximum noise added to each component of the input features.")
    lr: float | None = setting(None, above=0, doc=LEARNING_RATE)
    draft_vocabulary: int | None = setting(
        None,
        low=1,
        doc=DRAFT_VOCABULARY,
    )
    for_vllm: bool = setting(
        False,
        "Train the layer that vLLM runs: without its first norm, and without a bias before it.",
        flag="--for-vllm",
    )


def with_lr(settings: EagleSettings, target: Any) -> EagleSettings:
    """Fill in the learning rate for a target of this width."""
    return replace(settings, lr=settings.lr or usual_lr(target))


def usual_lr(target: Any) -> float:
    """Choose the peak learning rate for a target of this width.

    It was found for the lab's 256; at 576 (SmolLM2) 0.006 diverges and 0.001 to 0.0015 train, and EAGLE's authors take
    3e-5 at 4,096, EAGLE-3's 5e-5.
    """
    width = max(LAB_WIDTH, int(target.config.hidden_size))
    return LAB_LR * (LAB_WIDTH / width) ** 2


class EagleTraining(ModuleJob):
    """Trains EAGLE's layer; the target and its head are frozen."""

    def __init__(self, target: Any, settings: EagleSettings, seed: int = 0):
        settings = with_lr(settings, target)
        assert settings.lr is not None
        super().__init__(target, Eagle(target, seed, for_vllm=settings.for_vllm), settings.lr)
        self.eagle, self.settings, self.draft_vocabulary = self.module, settings, settings.draft_vocabulary

    def loss(
        self, batch: torch.Tensor, step: int, answers: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """Compute L of a batch [B, T + 1], and its parts "regression" and "classification", the latter in nats."""
        features, counted = self._features(batch), predicted(answers)
        noise = (torch.rand_like(features) * 2 - 1) * self.settings.noise
        ours = feature_pass(self.eagle, self.target, batch[:, :-1], features + noise)
        regression = mean_over(F.smooth_l1_loss(wide(ours), wide(features), reduction="none").mean(-1), counted)
        drafted, theirs = wide(self._head(ours)), wide(self._head(features))
        nats = F.cross_entropy(drafted.flatten(0, 1), theirs.softmax(-1).flatten(0, 1), reduction="none")
        classification = mean_over(nats, None if counted is None else counted.flatten())
        parts = {"regression": float(regression.detach()), "classification": float(classification.detach())}
        return regression + self.settings.class_weight * classification, parts

    @torch.no_grad()
    def held_out(self, batch: torch.Tensor, answers: torch.Tensor | None = None) -> dict[str, float]:
        """Compute figures of first drafted tokens, whose preceding features are all the target's.

        divergence : KL(target || drafter) in nats; agreement : how often both prefer the same token;
        regression : the loss of features
        """
        features, counted = self._features(batch), predicted(answers)
        ours = feature_pass(self.eagle, self.target, batch[:, :-1], features)
        theirs, drafted = self._head(features), self._head(ours)
        return {
            "divergence": float(kl_nats(theirs, drafted, counted)),
            "agreement": float(agreement(theirs, drafted, counted)),
            "regression": float(
                mean_over(F.smooth_l1_loss(wide(ours), wide(features), reduction="none").mean(-1), counted)
            ),
        }

    def _head(self, features: torch.Tensor) -> torch.Tensor:
        """Compute the target's logits [B, T, V] of features [B, T, d]."""
        return capped(self.target.config, self.target.get_output_embeddings()(features))

    @torch.no_grad()
    def _features(self, batch: torch.Tensor) -> torch.Tensor:
        """Compute the target's features [B, T, d] of all tokens of a batch [B, T + 1] but the last."""
        features: torch.Tensor = self.target.model(input_ids=batch[:, :-1], use_cache=False).last_hidden_state
        return features


def feature_pass(eagle: Eagle, target: Any, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Compute the drafter's output [B, T, d] for tokens [B, T], each fused with the feature [B, T, d] before it."""
    inner = target.model
    embedded = inner.embed_tokens(tokens)
    before = F.pad(features, (0, 0, 1, 0))[:, :-1].to(embedded.dtype)  # [B, T, d], zeros before the first token
    x = eagle.fused(embedded, before)
    count = tokens.shape[1]
    seen = torch.ones(count, count, dtype=torch.bool, device=x.device).tril_()
    if eagle.for_vllm:
        seen[1:, 0] = False  # the first token has no row when drafting
    return layer_pass(target, eagle.layers[0], x, torch.arange(count, device=x.device), seen)


def train_eagle(pair: Pair, settings: EagleSettings, run: TextRun) -> dict[str, Any]:
    """Train a drafter of the pair's target; see `train_on_text`."""
    EagleKind.check_target(pair.target)
    job = EagleTraining(pair.target, settings, run.loop.seed)
    return train_on_text(pair, Method.of("eagle", asdict(job.settings), OBJECTIVE), lambda: job, run)


EAGLE = Training(
    "eagle",
    EagleSettings,
    train_eagle,
    """Train EAGLE's drafter.

    Trains a layer that predicts the next feature (the input of the target's head); the head stays the
    target's. Then `realrun record --drafter OUT`.

    Example: realrun train eagle --out eagle --tokens 2
    """,
)
