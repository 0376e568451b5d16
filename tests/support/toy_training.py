"""A training as a user would add it: an early exit without layers of its own that imitates the target's choices."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from realrun.drafters.eesd import EarlyExit, as_model
from realrun.pairs.pair import Pair
from realrun.train.common.loop import LossAndParts
from realrun.train.common.on_text import Method, ModuleJob, TextRun, TrainedOnText, kl_nats, train_on_text
from realrun.train.common.trainings import Training
from specsim.io.settings import Settings, setting


@dataclass(frozen=True)
class ToySettings(Settings):
    below: int = setting(1, low=1, doc="Layers below the toy's head.")
    towards: Literal["target", "text"] = setting("target", doc="What the toy imitates.")
    slope: float | None = setting(None, above=0, doc="Learning rate of the toy.")
    curious: bool = setting(False, doc="Be curious.")
    patience: int = setting(3)


class Toy(ModuleJob):
    def __init__(self, target: Any, settings: ToySettings):
        super().__init__(target, EarlyExit(target, settings.below, 0), settings.slope or 1e-2)
        self.model = as_model(target, self.module)

    def loss(self, batch: torch.Tensor, step: int, answers: torch.Tensor | None = None) -> LossAndParts:
        tokens = batch[:, :-1]
        with torch.no_grad():
            theirs = self.target(input_ids=tokens, use_cache=False).logits
        return kl_nats(theirs, self.model(input_ids=tokens, use_cache=False).logits), {}

    @torch.no_grad()
    def held_out(self, batch: torch.Tensor, answers: torch.Tensor | None = None) -> dict[str, float]:
        return {"divergence": float(self.loss(batch, 0)[0])}


@dataclass(frozen=True)
class ToyMethod(Method):
    settings: ToySettings

    def as_dict(self) -> dict[str, Any]:
        return {"layers": self.settings.below, "exit_layers": 0, "settings": asdict(self.settings)}


def train_toy(pair: Pair, settings: ToySettings, run: TextRun) -> TrainedOnText:
    return train_on_text(pair, ToyMethod("toy", settings, kind="eesd"), lambda: Toy(pair.target, settings), run)


TOY = Training("toy", ToySettings, train_toy, "Train a toy.\n\nExample: realrun train toy --out toy")
