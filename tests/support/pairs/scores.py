"""Predictors whose scores spread over (0, 1)."""

from __future__ import annotations

import torch

from realrun.decode.acceptance_predictor import Predictor
from realrun.pairs.pair import Pair


def random_predictor(pair: Pair, matrices: int = 3) -> Predictor:
    """Scores that spread over (0, 1)."""
    generator = torch.Generator().manual_seed(9)
    d_target, d_draft = pair.target.config.hidden_size, pair.draft_config.hidden_size

    def normal(*shape: int) -> torch.Tensor:
        return 0.3 * torch.randn(*shape, generator=generator, dtype=torch.float64)

    facts = {"fingerprint": pair.fingerprint, "target": pair.target_name, "drafter": pair.draft_name}
    return Predictor(normal(matrices, d_target), normal(d_draft), normal(matrices), facts)
