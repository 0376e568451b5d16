"""Every training at a size of five steps, with what shows that it learns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from realrun.train.common.distill import TrainingText
from realrun.train.common.loop import LoopSettings, Tokens
from realrun.train.common.lora import AdapterSettings
from realrun.train.common.on_text import TextRun, Trained
from realrun.train.common.trainings import TextOptions, Training
from realrun.train.eagle import Eagle3Settings, EagleSettings
from realrun.train.edd import EddSettings, VdmSettings
from realrun.train.eesd import EesdSettings
from realrun.train.medusa import MedusaCommand
from realrun.train.predictor import PredictorSettings
from realrun.train.registry import TRAININGS
from realrun.train.self_sd import SearchCosts, SelfSDSettings
from realrun.train.space import SpaceSettings
from tests.support.small_targets import alone, quiet, small_target
from tests.support.tiny import VOCAB, tiny_pair, tiny_prompts

LAYERS = 3  # of the small target
LOOP = LoopSettings(5, 4, 24, warmup_steps=1, dtype="float64", log_every=2, checkpoint_s=0.0)


def words(seed: int, length: int = 3000, count: int = 12) -> Tokens:
    """Words of a small vocabulary in random order: a text that a model can learn something of."""
    rng = np.random.default_rng(seed)
    known = np.random.default_rng(7).integers(1, VOCAB, (count, 6))
    return known[rng.integers(0, len(known), length // 6)].ravel().astype(np.int32)


def word_text(seed: int = 0, count: int = 12) -> TrainingText:
    return TrainingText([(words(seed, count=count), 1.0)], words(seed + 1, count=count))


@dataclass(frozen=True)
class Case:
    """A training with settings. other : a change of them; falls : share of held-out figures that remains at most"""

    name: str
    settings: Any
    other: dict[str, Any]
    falls: dict[str, float] = field(default_factory=dict)
    steps: int = 40

    @property
    def training(self) -> Training:
        (training_,) = (training for training in TRAININGS if training.name == self.name)
        return training_

    @property
    def on_text(self) -> bool:
        return self.training.shared is TextOptions

    def target(self, architecture: str = "llama") -> Pair:
        return alone(small_target(architecture)) if not self.training.beside_draft else tiny_pair()

    def result(
        self,
        out: Path,
        pair: Pair | None = None,
        *,
        loop: LoopSettings = LOOP,
        text: TrainingText | None = None,
        prompts: list[Prompt] | None = None,
        progress: Callable[[str, int, int], None] = quiet,
        **changes: Any,
    ) -> Trained:
        pair, settings = pair or self.target(), replace(self.settings, **changes)
        if self.on_text:
            trained = self.training.run(pair, settings, TextRun(text or word_text(), loop, out, progress=progress))
        else:
            trained = self.training.run(pair, prompts or tiny_prompts(12), settings, out, progress)
        return trained

    def run(self, *given: Any, **named: Any) -> dict[str, Any]:
        """Its document."""
        return self.result(*given, **named).as_dict()


ADAPTER = AdapterSettings(rank=4, alpha=8, dropout=0.2)
JOINT: dict[str, Any] = {"joint": True, "backbone_lr": 1e-2, "lambda_0": 0.5}
CASES: dict[str, Case] = {
    "eesd": Case("eesd", EesdSettings(1, lr=1e-2), {"lr": 0.02}, {"nats": 0.8}),
    "eesd shared": Case("eesd", EesdSettings(1, lr=1e-2, draft_vocabulary=40), {"exit_layers": 2}, {"nats": 0.95}),
    "medusa": Case("medusa", MedusaCommand(3, lr=1e-2), {"heads": 2}, {"head_1": 0.9, "head_2": 0.9, "head_3": 0.9}),
    "medusa two stages": Case(
        "medusa", MedusaCommand(3, lr=1e-2, **JOINT), {"lambda_0": 0.2}, {"head_1": 0.9, "head_3": 0.9}
    ),
    "medusa one stage": Case(
        "medusa",
        MedusaCommand(3, one_stage=True, backbone_loss="text", **JOINT),
        {"backbone_loss": "distill"},
        {"head_1": 0.9, "backbone": 0.8},
    ),
    "medusa direct": Case(
        "medusa", MedusaCommand(3, direct=True, **JOINT), {"lambda_0": 0.2}, {"head_1": 0.9, "head_3": 0.9}
    ),
    "self-sd": Case(
        "self-sd", SelfSDSettings(5, max_new_tokens=8, max_draft_tokens=4, cost_repeats=2), {"max_draft_tokens": 3}
    ),
    "edd": Case("edd", EddSettings(lr=1e-2), {"longest_block": 9}, {"divergence": 0.9}),
    "vdm": Case("vdm", VdmSettings(lr=1e-2), {"loss": "text"}, {"divergence": 0.9}),
    "edd shared": Case("edd", EddSettings(lr=1e-2, draft_vocabulary=40), {"longest_block": 9}, {"divergence": 0.9}),
    "vdm shared": Case("vdm", VdmSettings(lr=1e-2, draft_vocabulary=40), {"loss": "text"}, {"divergence": 0.9}),
    "eagle": Case("eagle", EagleSettings(lr=1e-2), {"noise": 0.2}, {"divergence": 0.9, "regression": 0.9}),
    "eagle3": Case("eagle3", Eagle3Settings(3, lr=1e-2), {"draft_steps": 2}, {"divergence": 0.9}),
    "eagle3 shared": Case(
        "eagle3", Eagle3Settings(3, lr=1e-2, draft_vocabulary=40), {"draft_steps": 2}, {"divergence": 0.9}
    ),
    "space": Case(
        "space",
        SpaceSettings(3, lr=2e-2, examples=4, adapter=ADAPTER),
        {"p_ar": 0.9},
        {"mask_1": 0.95, "tuned": 0.8},
        steps=100,
    ),
    "space full": Case(
        "space", SpaceSettings(3, full=True, lr=5e-3, examples=4), {"masks": 2}, {"mask_1": 0.9, "tuned": 0.8}
    ),
    "predictor": Case(
        "predictor",
        PredictorSettings(max_new_tokens=8, max_draft_tokens=4, temperatures=(0.0, 0.8), epochs=3, batch=64),
        {"epochs": 2},
    ),
}


def made_up_costs(*_: Any) -> SearchCosts:
    """Costs of Self-SD that no clock decides: 1 unit for a sublayer of attention, 2 for an MLP, a half else."""
    corners = [[3 * LAYERS + 0.5, LAYERS + 0.5], [2 * LAYERS + 0.5, 0.5]]
    step = np.broadcast_to(np.array(corners)[:, :, None, None], (2, 2, 4, 2)).tolist()
    whole = 3 * LAYERS + 0.5
    rounds = {"catch_up": [0, 0], "verify": [[whole] * 2] * 5, "autoregressive": [whole] * 2}
    return SearchCosts([1, 60], step, {**rounds, "policy_step": 0.0, "round_overhead": 0.1})
