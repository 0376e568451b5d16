"""Checks of a dense record against a reference of the drafter, position by position and node by node of its tree."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

import numpy as np
import torch

from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.pairs.pair import Pair
from realrun.proposals.recorder import Columns, RecordRequest
from realrun.proposals.trees import Trees
from specsim.trace.tree_record import TreeRecord, record_from_nodes

Reference = Callable[[Sequence[int], Sequence[int]], torch.Tensor]  # logits [1, V] after context and drafted tokens
Path = tuple[int, ...]  # of ranks from the root; a node's name
Siblings = Callable[[Sequence[int]], tuple[np.ndarray, np.ndarray]]  # tokens from the root -> children's tokens, probs


def output_of(pair: Pair, prompt: Sequence[int], count: int, sampler: Sampler, sequence: int) -> list[int]:
    """What the target says, whatever the drafter."""
    return Decoder(*pair.make_drafter(), (), sampler).decode(prompt, count, None, sequence=sequence).tokens


def one_by_one(siblings: Siblings, depth: int, nodes: int) -> tuple[dict[Path, tuple[int, np.float32]], np.float32]:
    """The definition of a record: token and prob of its nodes, and the largest path outside."""
    waiting: list[tuple[float, int, Path, list[int], np.float32]] = []
    outside: dict[Path, np.float32] = {}
    recorded: dict[Path, tuple[int, np.float32]] = {}

    def meet(name: Path, tokens: list[int], path: np.float32) -> None:
        """Take a node into the record, and look at its children."""
        outside.pop(name, None)
        if len(name) == depth:
            return
        children, probs = siblings(tokens)
        for rank, (token, prob) in enumerate(zip(children, np.float32(probs), strict=True)):
            below, on_chain = (*name, rank), rank == 0 and not any(name)
            if on_chain:
                recorded[below] = int(token), prob
                meet(below, [*tokens, int(token)], path * prob)
                continue
            outside[below] = path * prob
            described[below] = int(token), prob
            heapq.heappush(waiting, (-float(path * prob), len(below), below, [*tokens, int(token)], path * prob))

    described: dict[Path, tuple[int, np.float32]] = {}
    meet((), [], np.float32(1))
    while waiting and len(recorded) < nodes:
        _, _, name, tokens, path = heapq.heappop(waiting)
        recorded[name] = described[name]
        meet(name, tokens, path)
    return recorded, max(outside.values(), default=np.float32(0))


def as_names(tree: TreeRecord, position: int) -> dict[Path, tuple[int, np.float32]]:
    """A recorded tree in the form of `one_by_one`."""
    names: list[Path] = [()]
    for parent, rank in zip(tree.parent[position], tree.rank[position], strict=True):
        if parent >= 0:
            names.append((*names[parent], int(rank)))
    values = zip(tree.token[position].tolist(), tree.prob[position], strict=True)
    return dict(zip(names[1:], values, strict=False))


def as_record(trees: Trees, width: int) -> TreeRecord:
    return record_from_nodes(**trees._asdict(), width=width)


def paths_outside_chain(nodes: dict[Path, tuple[int, np.float32]]) -> list[np.float32]:
    paths = {(): np.float32(1)}
    for name in sorted(nodes, key=len):
        paths[name] = paths[name[:-1]] * nodes[name][1]
    return sorted(paths[name] for name in nodes if any(name))


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
