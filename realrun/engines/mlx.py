"""mlx-lm: the pair as Hugging Face has models; rounds by what it says of every token, and by the target's passes."""

from __future__ import annotations

from pathlib import Path

from realrun.drafters.independent import IndependentKind
from realrun.engines.engine import Engine
from realrun.pairs.pair import Pair
from specsim.io.errors import InputError


class MlxEngine(Engine):
    """With a draft model; it has no prompt lookup."""

    name = "mlx"
    package = "mlx-lm"

    def convert(self, pair: Pair, folder: Path) -> None:
        if not isinstance(pair.drafter, IndependentKind):
            raise InputError(
                f"mlx-lm is run with draft models, and {pair.draft_name} is of kind {pair.drafter.name}; give "
                "--draft-model"
            )
        super().convert(pair, folder)
