"""How a pass over an output is called, and what it gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy.typing as npt

from realrun.decode.acceptance_predictor import Scorer
from realrun.decode.sampling import Sampler
from realrun.proposals.trees import TreeSize

Columns = dict[str, npt.NDArray[Any]]  # of a trace, [T] or [T, depth]


class Recorder(Protocol):
    """Says what the drafter proposes after prompt + output[:t], for every t at once."""

    def __call__(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        depth: int,
        sampler: Sampler,
        sequence: int,
        scorer: Scorer | None = None,
        tree: TreeSize | None = None,
    ) -> Columns:
        """Columns as in `specsim.trace.trace` for an output of T tokens, [T] or [T, depth].

        Parameters
        ----------
        prompt, output : token ids
        depth : int
            Tokens drafted at every position.
        sampler, sequence
            How tokens are chosen, and the sequence's number, which keys its noise.
        scorer
            The predictor's, after the target's states of T rounds; adds the column "score".
        tree
            Adds the trees, the fields of `realrun.proposals.trees.Trees`, as columns "tree_parent", ...
        """
