"""Greedy verification, against the reference, a walk in plain Python, and known bugs of others."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import speckernels
from speckernels.ops.greedy_verify import greedy_verify
from speckernels.ops.results import Verified
from tests.support.kernel_trees import SHAPES, Refusals, assert_same, forest, path_to_root, thread_orders
from tests.support.mutants import Mutant

VOCABULARY = 4  # few tokens, so that siblings repeat and paths tie
STRANGE_TOKENS = (0, -1, -(2**62), 2**62)
MUTANTS = [
    Mutant("csrc/tree_verify.cu", "int parent = parents[first + node]", "int parent = max(parents[first + node], 0)",
           "padding hangs on the root"),
    Mutant("csrc/tree_verify.cu", "(MAX_NODES - 1 - node));", "node);", "the last of equals wins"),
    Mutant("csrc/tree_verify.cu", "token = tokens[first + on_path[node + 1]]", "token = tokens[first + on_path[node]]",
           "emits the root and drops the last accepted token"),
    Mutant("csrc/tree_verify.cu", "accepts(first + parent, token)", "accepts(first + node, token)",
           "verified by its own row"),
    Mutant("csrc/tree_verify.cu", "  if (node == 0) best = 0;\n  __syncthreads();\n",
           "  __syncthreads();\n  if (node == 0) best = 0;\n", "the best is reset while others report"),
    Mutant("csrc/tree_verify.cu", "choices[parent_row] == token", "choices[parent_row] >= token",
           "smaller tokens pass"),
    Mutant("ops/greedy_verify/triton.py", "verified & (token == choice)", "inside & (token == choice)",
           "padding of token -1 equals a choice that is not there"),
    Mutant("ops/greedy_verify/triton.py", "parent = tl.load(parents + first + node, mask=inside, other=-1)",
           "parent = tl.maximum(tl.load(parents + first + node, mask=inside, other=-1), 0)",
           "padding hangs on the root"),
    Mutant("ops/greedy_verify/triton.py", "(BLOCK - 1 - node)", "(node * 0)", "ties are not resolved"),
    Mutant("ops/greedy_verify/triton.py", "emitted + first + step - 1", "emitted + first + step",
           "emitted one place late"),
    Mutant("ops/greedy_verify/triton.py", "choices + first + last", "choices + first",
           "the root's choice last"),
]  # fmt: skip


def likely_accepted(parents: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens that often equal the choice after their parent, and the choices."""
    generator = torch.Generator().manual_seed(seed)
    choices = torch.randint(VOCABULARY, parents.shape, generator=generator)
    choices[torch.rand(parents.shape, generator=generator) < 0.05] = -1  # rows without a usable logit
    tokens = choices.gather(1, parents.clamp(min=0).long())
    tokens[torch.rand(parents.shape, generator=generator) < 0.2] = 1
    strange = torch.tensor(STRANGE_TOKENS)[torch.randint(len(STRANGE_TOKENS), parents.shape, generator=generator)]
    # Half the padding equals the root's choice, half is out of range.
    outside = (parents < 0) & (torch.rand(parents.shape, generator=generator) < 0.5)
    return torch.where(outside, strange, tokens), choices


def check(device: str) -> None:
    for nodes in (1, 5, 32, 63, 123):
        parents = forest(SHAPES, nodes, seed=nodes)
        tokens, choices = likely_accepted(parents, seed=nodes + 1)
        for case, (these, chosen) in enumerate(
            ((tokens, choices), (tokens, tokens * 0 + 3), (tokens * 0, choices * 0))
        ):
            with speckernels.use_backend("reference"):
                expected = greedy_verify(these, parents, chosen)
            for order in thread_orders("tree_verify", device):
                got = greedy_verify(these.to(device), parents.to(device), chosen.to(device))
                assert_same(Verified(*(t.cpu() for t in got)), expected, f"case {case}, {nodes} nodes, order {order}")


def verify(tokens: list[int], parents: list[int], choices: list[int]) -> tuple[list[int], list[int]]:
    """Path and emitted tokens of one tree, without their padding."""
    result = greedy_verify(torch.tensor([tokens]), torch.tensor([parents], dtype=torch.int32), torch.tensor([choices]))
    count = int(result.accepted[0])
    assert (result.path[0, count + 1 :] == -1).all() and (result.emitted[0, count + 1 :] == -1).all()
    return result.path[0, : count + 1].tolist(), result.emitted[0, : count + 1].tolist()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(1, 60), st.integers(0, 1000))
def test_reference_is_the_longest_walk(shape: str, nodes: int, seed: int) -> None:
    parents = forest((shape,), nodes, seed)
    tokens, choices = likely_accepted(parents, seed)
    links, drafted, chosen = parents[0].tolist(), tokens[0].tolist(), choices[0].tolist()
    paths = [path_to_root(links, node) for node in range(nodes)]
    valid = [path for path in paths if path[0] == 0 and all(drafted[b] == chosen[a] >= 0 for a, b in pairwise(path))]
    longest = max(valid, key=len)  # the first of equals
    path, emitted = verify(drafted, links, chosen)
    assert path == longest
    assert emitted == [drafted[node] for node in longest[1:]] + [chosen[longest[-1]]]


@pytest.mark.usefixtures("_backend")
def test_medusa_padding_of_token_zero_is_not_accepted() -> None:
    """MEDUSA pads its tree with token 0; a target that chooses 0 would accept the padding."""
    assert verify([7, 0, 0, 0], [-1, -1, -1, -1], [0, 0, 0, 0]) == ([0], [0])
    assert verify([7, 5, 0, 0], [-1, 0, -1, -1], [5, 0, 0, 0]) == ([0, 1], [5, 0])
    assert verify([7, 0, 0, 0], [-1, -1, 1, 2], [0, 0, 0, 0]) == ([0], [0])  # nor what hangs on it


@pytest.mark.usefixtures("_backend")
def test_tokens_out_of_range_are_not_accepted() -> None:
    assert verify([7, -1, -(2**40), 2**40], [-1, 0, 0, -1], [-1, 3, 3, 2**40]) == ([0], [-1])


@pytest.mark.usefixtures("_backend")
def test_of_repeated_siblings_the_longest_path_wins() -> None:
    assert verify([0, 4, 4, 5, 6], [-1, 0, 0, 2, 3], [4, 9, 5, 6, 8]) == ([0, 2, 3, 4], [4, 5, 6, 8])
    assert verify([0, 4, 4, 4], [-1, 0, 0, 0], [4, 1, 2, 3]) == ([0, 1], [4, 1])  # equals: the first


@pytest.mark.usefixtures("_backend")
def test_all_children_rejected() -> None:
    assert verify([0, 1, 2, 3], [-1, 0, 0, 0], [9, 9, 9, 9]) == ([0], [9])
    assert verify([0, 1, 2, 3], [-1, 0, 1, 2], [9, 2, 3, 4]) == ([0], [9])  # good ones below a rejected one


@pytest.mark.usefixtures("_backend")
def test_root_alone() -> None:
    assert verify([5], [-1], [6]) == ([0], [6])


@pytest.mark.usefixtures("_backend")
def test_links_that_are_no_tree_are_not_followed() -> None:
    assert verify([0, 1, 1, 1, 1], [-1, 2, 1, 3, 1000], [1, 1, 1, 1, 1]) == ([0], [1])


@pytest.mark.usefixtures("_backend")
def test_no_trees_give_nothing() -> None:
    none = torch.empty(0, 4, dtype=torch.int64)
    assert greedy_verify(none, none.int(), none).path.shape == (0, 4)


def test_largest_tree() -> None:
    parents = forest(("chain", "random"), 1024, seed=0)
    tokens = torch.zeros(2, 1024, dtype=torch.int64)
    results = []
    for backend in ("reference", "cuda"):
        with speckernels.use_backend(backend):
            results.append(greedy_verify(tokens, parents, tokens))
    assert results[0].accepted[0] == 1023
    assert_same(results[1], results[0], "1024 nodes")


def samples() -> list[tuple[Any, ...]]:
    parents = forest(SHAPES, 33, seed=0)
    tokens, choices = likely_accepted(parents, seed=0)
    return [(tokens, parents, choices)]


def refusals() -> Refusals:
    parents, tokens = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int64)
    return {"tokens": tokens, "parents": parents, "choices": tokens}, [
        (r"parents is int64 \[2, 3\]; give int32 \[B, n\] with 1 to 1024 nodes", {"parents": parents.long()}),
        (r"tokens is int32 \[2, 3\]; give int64 \[2, 3\]", {"tokens": parents}),
        (r"choices is int64 \[2, 2\]; give int64 \[2, 3\]", {"choices": tokens[:, :2]}),
        ("choices is on meta; move it to cpu", {"choices": tokens.to("meta")}),
    ]
