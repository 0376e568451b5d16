"""Checks of a dense record against a reference of the drafter, position by position and node by node."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from realrun.proposals.recorder import Columns, RecordRequest
from realrun.proposals.trees import Trees
from tests.realrun.measure.test_record_trees import as_names, as_record, one_by_one

Reference = Callable[[Sequence[int], Sequence[int]], torch.Tensor]  # logits [1, V] after context and drafted tokens


def check_columns(dense: Columns, request: RecordRequest, logits_after: Reference) -> None:
    """Drafted tokens, their statistics, ranks and match lengths at every position."""
    output, sampler, sequence = request.output, request.sampler, request.sequence
    for t in range(len(output)):
        context, drafted = [*request.prompt, *output[:t]], list[int]()
        for i in range(request.depth):
            token, *features = sampler.statistics(logits_after(context, drafted), sequence, t + i)[0].tolist()
            drafted.append(int(token))
            assert dense["draft_token"][t, i] == drafted[-1]
            for name, value in zip(("prob", "confidence", "entropy_nats"), features, strict=True):
                np.testing.assert_allclose(dense[name][t, i], value, rtol=1e-6, atol=1e-9)
            if t + i >= len(output):
                assert dense["true_rank"][t, i] == -1
                continue
            logits = logits_after(context, output[t : t + i])
            order = sampler.candidates(logits, sequence, [t + i], logits.shape[1])[0][0].tolist()
            assert order.index(output[t + i]) == dense["true_rank"][t, i]
        right = [a == b for a, b in zip(drafted, output[t:], strict=False)] + [False]
        assert dense["match_len"][t] == right.index(False)


def check_trees(columns: Columns, request: RecordRequest, logits_after: Reference) -> None:
    """The tree of every position, against best-first expansion of a single node at a time."""
    assert request.tree is not None
    sampler, width = request.sampler, request.tree.width
    trees = Trees(**{name: columns[f"tree_{name}"] for name in Trees._fields})
    recorded = as_record(trees, width)
    for t in range(len(request.output)):

        def siblings(tokens: Sequence[int], t: int = t) -> tuple[np.ndarray, np.ndarray]:
            logits = logits_after([*request.prompt, *request.output[:t]], tokens)
            children, probs = sampler.candidates(logits, request.sequence, [t + len(tokens)], width)
            return children[0].numpy(), np.float32(probs[0].double().numpy())

        expected, horizon = one_by_one(siblings, request.depth, request.tree.nodes)
        nodes = as_names(recorded, t)
        assert {name: token for name, (token, _) in nodes.items()} == {n: token for n, (token, _) in expected.items()}
        for name, (_, prob) in nodes.items():
            np.testing.assert_allclose(prob, expected[name][1], rtol=1e-5)
        np.testing.assert_allclose(trees.horizon[t], horizon, rtol=1e-5)
