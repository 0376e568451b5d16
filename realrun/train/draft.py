"""Train an independent draft model: a few of the target's layers, distilled from the target.

The draft model starts as the target with only some of its layers, spread evenly (Sanh et al. 2019, DistilBERT,
arXiv:1910.01108, section 3), and learns the target's distribution, KL(target || draft). Embedding and head stay the
target's: they are most of a small model, and already fit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any

import numpy as np
import torch

from realrun.lm.cached import layer_types
from realrun.lm.number_type import cast_like
from realrun.lm.variants import config_of_layers, without_head
from realrun.pairs.pair import Pair
from realrun.pairs.whole import save_model
from realrun.train.common.folder import Tensors
from realrun.train.common.loop import LossAndParts, ParameterGroup
from realrun.train.common.on_text import (
    Method,
    ModuleJob,
    TextRun,
    TrainedOnText,
    agreement,
    kl_nats,
    predicted,
    tensors_from_text,
)
from realrun.train.common.trainings import Training
from specsim.io.errors import InputError
from specsim.io.settings import Settings, setting

OBJECTIVE = "KL(target || draft model)"
LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")


@dataclass(frozen=True)
class DraftModelSettings(Settings):
    """Settings of a draft model."""

    layers: int = setting(3, low=1, doc="Number of the target's layers that the draft model starts from.")
    lr: float = setting(1e-3, above=0, doc="Peak learning rate.")


def with_fewer_layers(target: Any, layers: int) -> Any:
    """Copy a model with `layers` of its layers: the first, the last and some evenly between; InputError if too many."""
    total = int(target.config.num_hidden_layers)
    if layers > total:
        raise InputError(f"--layers {layers} is more than the target's {total}; give fewer")
    chosen = [int(number) for number in np.linspace(0, total - 1, layers).round()]
    try:
        config = config_of_layers(target.config, chosen)
        layer_types(config)  # refuses, for example, recurrent layers only
        model = cast_like(type(target)(config), target)
    except ValueError as error:  # for example, layers that read another layer's cache
        raise _not_taken_out(target, error) from None
    places = {str(number): str(place) for place, number in enumerate(chosen)}
    state = {
        name if match is None else LAYER.sub(places[match[0]], name, count=1): tensor
        for name, tensor in target.state_dict().items()
        if (match := LAYER.search(name)) is None or match[0] in places
    }
    try:
        model.load_state_dict(state)
    except RuntimeError as error:  # for example, a tensor with rows for every layer
        raise _not_taken_out(target, error) from None
    return model.eval()


def _not_taken_out(target: Any, error: Exception) -> InputError:
    reason = shorten(str(error), 200, placeholder=" ...")
    return InputError(f"layers of {type(target).__name__} do not make a model by themselves ({reason}); train eagle")


class DraftModelTraining(ModuleJob):
    """Trains a draft model's layers and last norm; embedding and head stay as they are."""

    def __init__(self, target: Any, settings: DraftModelSettings):
        self.model = with_fewer_layers(target, settings.layers)
        super().__init__(target, without_head(self.model), settings.lr)
        self.model.get_input_embeddings().requires_grad_(False)
        self.model.get_output_embeddings().requires_grad_(False)

    def parameter_groups(self) -> list[ParameterGroup]:
        return [ParameterGroup(list(self._trained().values()), self.lr)]

    def state(self) -> Tensors:
        return {name: parameter.data for name, parameter in self._trained().items()}

    def load_state(self, tensors: Tensors) -> None:
        self.module.load_state_dict(tensors, strict=False)

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        return {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}

    def loss(self, batch: torch.Tensor, step: int, answers: torch.Tensor | None = None) -> LossAndParts:
        """Compute KL(target || draft model) after every token of a batch [B, T + 1], in nats per token."""
        with torch.no_grad():
            theirs = self.target(input_ids=batch[:, :-1], use_cache=False).logits
        ours = self.model(input_ids=batch[:, :-1], use_cache=False).logits
        return kl_nats(theirs, ours, predicted(answers)), {}

    @torch.no_grad()
    def held_out(self, batch: torch.Tensor, answers: torch.Tensor | None = None) -> dict[str, float]:
        """nats : the loss; agreement : how often draft model and target prefer the same token."""
        ours, theirs = (model(input_ids=batch[:, :-1], use_cache=False).logits for model in (self.model, self.target))
        return {
            "nats": float(kl_nats(theirs, ours, predicted(answers))),
            "agreement": float(agreement(ours, theirs, predicted(answers))),
        }


def train_draft_model(pair: Pair, settings: DraftModelSettings, run: TextRun) -> TrainedOnText:
    """Train a draft model of the pair's target and write it to `run.out` as a model folder; see `train_on_text`."""
    job = DraftModelTraining(pair.target, settings)
    method = Method("draft-model", settings, OBJECTIVE, kind="model")
    trained = tensors_from_text(pair, method, lambda: job, run)
    save_model(job.model.to(run.stored), pair.tokenizer, run.out)
    return replace(trained, path=run.out)


DRAFT_MODEL = Training(
    "draft",
    DraftModelSettings,
    train_draft_model,
    """Train a draft model from the target's layers.

    Takes a few of the target's layers with its embedding and head, and distils them from the target.
    Then `realrun record --draft-model OUT`; engines load the folder as well.

    Example: realrun train draft --target smollm2 --out draft3 --layers 3 --minutes 30
    """,
)
