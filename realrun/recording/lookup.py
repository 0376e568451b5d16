"""What prompt lookup proposes at every position of an output at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from realrun.decode.sampling import Sampler
from realrun.drafters.acceptance_predictor import Scorer
from realrun.drafters.lookup import NgramIndex
from realrun.recording.chain import Columns
from realrun.recording.trees import TreeSize
from specsim.trace.trace import NO_TOKEN, STEP_LISTS


def lookup_columns(
    vocabulary: int,
    prompt: Sequence[int],
    output: Sequence[int],
    depth: int,
    sampler: Sampler,
    sequence: int,
    scorer: Scorer | None = None,
    tree: TreeSize | None = None,
) -> Columns:
    """What is proposed after prompt + output[:t], for every t; see `realrun.recording.chain.dense_columns`.

    Where nothing is, draft_token holds NO_TOKEN. There are no ranks of true tokens, since lookup orders none.
    """
    assert tree is None, "record refuses"
    total = len(output)
    columns: Columns = {name: np.zeros((total, depth), dtype) for name, dtype in STEP_LISTS.items()}
    columns["draft_token"][:] = NO_TOKEN
    match_len = np.zeros(total, np.uint8)
    index = NgramIndex(vocabulary)
    index.extend(prompt)
    for t, token in enumerate(output):
        if index.matched:
            drafted = [index.token(i) for i in range(1, depth + 1)]
            steps = [index.step(i) for i in range(1, depth + 1)]
            columns["draft_token"][t] = drafted
            for name in ("prob", "confidence", "entropy_nats"):
                columns[name][t] = [getattr(step, name) for step in steps]
            right = [a == b for a, b in zip(drafted, output[t : t + depth], strict=False)]
            match_len[t] = right.index(False) if False in right else len(right)
        index.extend([token])
    return {"token": np.asarray(output, dtype=np.int32), "match_len": match_len, **columns}
