"""A model with recurrent layers that keeps its last states, for drafters that read them.

Models of attention alone keep them as `realrun.lm.split_target.SplitTarget`, which runs their layers in parts.
"""

from __future__ import annotations

from typing import Any

import torch

from realrun.lm.cached import grown
from realrun.lm.recurrent import RecurrentLM


class RecurrentStates(RecurrentLM):
    """Keeps the output of the last layer, ahead of the final norm.

    states : [room, d], by position; norm : the final norm
    """

    def __init__(self, model: Any):
        self.norm = model.model.norm
        super().__init__(model)

    def reset(self) -> None:
        super().reset()
        size = int(self.model.config.get_text_config().hidden_size)
        self.states = torch.empty(0, size, dtype=self.model.dtype, device=self.device)

    def run_model(self, **inputs: Any) -> torch.Tensor:
        fed: list[torch.Tensor] = []
        hook = self.norm.register_forward_pre_hook(lambda module, arguments: fed.append(arguments[0]))
        try:
            logits = super().run_model(**inputs)
        finally:
            hook.remove()
        end = self.length + fed[0].shape[1]
        self.states = grown(self.states, end)
        self.states[self.length : end] = fed[0][0]
        return logits
