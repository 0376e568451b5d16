"""Models with short convolutions among the attention layers (LFM2), whose cache can drop the last tokens.

A convolution reads its last few inputs. transformers can keep all inputs since the cache was last cropped, so that
tokens are dropped exactly and without a second pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from realrun.lm.cached import CachedLM
from realrun.lm.recurrent import RecurrentLM
from specsim.io.errors import InputError


class ConvolutionLM(RecurrentLM):
    """CachedLM of such a model: no trees, because a convolution reads all rows before its own.

    earliest : the shortest length to which tokens can be dropped without feeding the text again
    """

    def reset(self) -> None:
        super().reset()
        self.cache.activate_past_recording()
        self.earliest = 0

    def forward(self, tokens: Sequence[int]) -> torch.Tensor:
        return CachedLM.forward(self, tokens)

    def prefill(self, tokens: Sequence[int]) -> None:
        CachedLM.prefill(self, tokens)

    def truncate(self, length: int) -> None:
        length = min(length, self.length)
        text, self.refed = self.text[:length], 0
        if length < self.earliest:
            self.reset()
            self.prefill(text)
            self.refed = length
        elif self.length:
            self.cache.crop(length - self.length)
            self.text, self.length, self.earliest = text, length, length

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        logits = super()._forward(tokens, keep)
        if not self.cache.is_croppable:
            raise InputError(
                f"{self.model.config.model_type} models have layers of type conv, whose cache cannot drop the last "
                "tokens in this version of transformers; install a newer one"
            )
        return logits
