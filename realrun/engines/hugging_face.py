"""transformers: `generate` with the draft model as its assistant, or with prompt lookup."""

from __future__ import annotations

from realrun.engines.engine import Engine
from specsim.lookup.ngram import RULES


class HuggingFaceEngine(Engine):
    """With a constant draft length and no confidence threshold, which the library would move by a curve it fits."""

    name = "transformers"
    package = "transformers"
    lookup_rule = RULES["transformers"]
