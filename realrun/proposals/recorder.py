"""Interface of dense recording: settings, and the proposals at every position of an output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from realrun.decode.acceptance_predictor import Scorer
from realrun.decode.sampling import Sampler
from realrun.proposals.trees import TreeSize
from specsim.io.arrays import Floats

Columns = dict[str, npt.NDArray[Any]]  # of a trace, [T] or [T, depth]


@dataclass(frozen=True)
class RecordRequest:
    """A text, and what to record of the drafter's proposals after prompt + output[:t], for every t.

    prompt, output : token ids The output has T tokens
    depth : tokens drafted at every position
    sampler : how tokens are chosen
    sequence : the sequence's number, which keys its noise
    scorer : the predictor's scorer of T rounds; adds the column "score"
    tree : adds the trees, the fields of `realrun.proposals.trees.Trees`, as columns "tree_parent", ...
    target_prob : the target's probability of each output token, [T], at the temperature; adds the columns "text_prob"
        and "text_accept"
    """

    prompt: Sequence[int]
    output: Sequence[int]
    depth: int
    sampler: Sampler
    sequence: int = 0
    scorer: Scorer | None = None
    tree: TreeSize | None = None
    target_prob: Floats | None = None


Recorder = Callable[[RecordRequest], Columns]  # columns as in `specsim.trace.trace`
