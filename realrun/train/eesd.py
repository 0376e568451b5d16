"""Train EESD's early exit: layers, norm and head on the target's frozen first N layers (Liu et al. 2024, 3.1, 3.2).

The loss is the cross-entropy with the next token of the text, a share of which the target has written. A step runs the
first N layers and the exit's, not the target's other layers. The paper's ablations are settings: no exit layer
(`exit_layers` 0) and no self-distillation (`generated_share` 0 of the text).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from realrun.drafters.eesd import EarlyExit, EESDKind, as_model
from realrun.pairs.pair import Pair
from realrun.train.common.loop import LossAndParts
from realrun.train.common.on_text import (
    OWN_OR_TARGETS_HEAD,
    Method,
    ModuleJob,
    TextRun,
    TrainedOnText,
    agreement,
    cross_entropy_nats,
    predicted,
    train_on_text,
)
from realrun.train.common.trainings import Training
from specsim.io.settings import Settings, setting

PRINTED = {"lr": 1e-3, "batch": 64, "window": 2048, "epochs": 4.0}  # for 13B, table 9 (70B: 4096 tokens, 6 epochs)
OBJECTIVE = "cross-entropy with the text's next token"


@dataclass(frozen=True)
class EesdSettings(Settings):
    """Settings of an early exit."""

    layers: int = setting(2, low=1, doc="Number of the target's first layers that the drafter shares.")
    exit_layers: int = setting(1, low=0, doc="Trained layers on top; 0 for only a norm and a head.")
    lr: float = setting(3e-3, above=0, doc="Peak learning rate.")
    draft_vocabulary: int | None = setting(None, low=1, doc=OWN_OR_TARGETS_HEAD)


class EarlyExitTraining(ModuleJob):
    """Trains EESD's early exit; the target is frozen."""

    def __init__(self, target: Any, settings: EesdSettings):
        early_exit = EarlyExit(target, settings.layers, settings.exit_layers, settings.draft_vocabulary is not None)
        super().__init__(target, early_exit, settings.lr)
        self.model, self.draft_vocabulary = as_model(target, self.module), settings.draft_vocabulary

    def loss(self, batch: torch.Tensor, step: int, answers: torch.Tensor | None = None) -> LossAndParts:
        """Compute the cross-entropy with the next token of a batch [B, T + 1], in nats per token."""
        logits = self.model(input_ids=batch[:, :-1], use_cache=False).logits
        return cross_entropy_nats(logits, batch[:, 1:], predicted(answers)), {}

    @torch.no_grad()
    def held_out(self, batch: torch.Tensor, answers: torch.Tensor | None = None) -> dict[str, float]:
        """nats : the loss; agreement : how often the exit and the target prefer the same token after a text's."""
        logits, theirs = (model(input_ids=batch[:, :-1], use_cache=False).logits for model in (self.model, self.target))
        return {
            "nats": float(cross_entropy_nats(logits, batch[:, 1:], predicted(answers))),
            "agreement": float(agreement(logits, theirs, predicted(answers))),
        }


def train_eesd(pair: Pair, settings: EesdSettings, run: TextRun) -> TrainedOnText:
    """Train an early exit of the pair's target; see `train_on_text`."""
    EESDKind.check_target(pair.target)
    job = EarlyExitTraining(pair.target, settings)
    return train_on_text(pair, Method("eesd", settings, OBJECTIVE), lambda: job, run)


EESD = Training(
    "eesd",
    EesdSettings,
    train_eesd,
    """Train EESD's early exit.

    Trains a layer, norm and head on the target's frozen first N layers. A deeper exit (larger
    --layers) agrees with the target more often and drafts slower; try a few with the same --cache.
    Then `realrun record --drafter OUT`, and `realrun train predictor --drafter OUT` for Cali-TS.

    Example: realrun train eesd --out exit2 --layers 2 --tokens 2
    """,
    printed=lambda **_: PRINTED,
)
