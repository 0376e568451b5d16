"""Typical acceptance, against the reference and the paper's formula in probabilities."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import speckernels
from speckernels.ops.results import Verified
from speckernels.ops.typical_acceptance import LOGITS_TYPES, log_threshold, typical_acceptance
from tests.support.kernel_trees import ON_GPU, SHAPES, Refusals, assert_same, forest, path_to_root, thread_orders
from tests.support.mutants import Mutant

VOCABULARY = 7
NEAR_A_TIE = 1e-5  # relative; logsumexp and entropy are float32, so nearer ones may go either way
MUTANTS = [
    Mutant("csrc/typical_acceptance.cu", "log_prob > unsure)", "log_prob < unsure)",
           "the entropy's threshold turned round"),
    Mutant("csrc/typical_acceptance.cu", "(log_prob > log_epsilon || log_prob > unsure)",
           "(log_prob > log_epsilon && log_prob > unsure)", "above the larger of both"),
    Mutant("csrc/typical_acceptance.cu", "log_prob > log_epsilon ||", "log_prob >= log_epsilon ||", "a tie accepts"),
    Mutant("csrc/typical_acceptance.cu", "unsure == unsure && (", "(", "an unknown entropy accepts"),
    Mutant("csrc/typical_acceptance.cu", "if (token >= vocabulary) return false;", "token %= vocabulary;",
           "tokens beyond the vocabulary wrap round"),
    Mutant("csrc/typical_acceptance.cu", "token * token_stride]", "token]", "strides are ignored"),
    Mutant("csrc/typical_acceptance.cu", "int parent = parents[first + node]",
           "int parent = max(parents[first + node], 0)", "padding hangs on the root"),
    Mutant("csrc/typical_acceptance.cu", "(MAX_NODES - 1 - node));", "node);", "the last of equals wins"),
    Mutant("csrc/typical_acceptance.cu", "token = tokens[first + on_path[node + 1]]",
           "token = tokens[first + on_path[node]]", "emits the root and drops the last accepted token"),
    Mutant("csrc/typical_acceptance.cu", "accepts(first + parent, token)", "accepts(first + node, token)",
           "verified by its own row"),
    Mutant("csrc/typical_acceptance.cu", "  if (node == 0) best = 0;\n  __syncthreads();\n",
           "  __syncthreads();\n  if (node == 0) best = 0;\n", "the best is reset while others report"),
    Mutant("ops/typical_acceptance/triton.py", "parent = tl.load(parents + first + node, mask=inside, other=-1)",
           "parent = tl.maximum(tl.load(parents + first + node, mask=inside, other=-1), 0)",
           "padding hangs on the root"),
    Mutant("ops/typical_acceptance/triton.py", "(BLOCK - 1 - node)", "(node * 0)", "ties are not resolved"),
    Mutant("ops/typical_acceptance/triton.py", "emitted + first + step - 1", "emitted + first + step",
           "emitted one place late"),
    Mutant("ops/typical_acceptance/triton.py", "choices + first + last", "choices + first",
           "the root's choice last"),
    Mutant("ops/typical_acceptance/triton.py", "verified & (unsure == unsure) & enough", "verified & enough",
           "an unknown entropy accepts"),
    Mutant("ops/typical_acceptance/triton.py", "(log_prob > log_epsilon) |", "(log_prob >= log_epsilon) |",
           "a tie accepts"),
    Mutant("ops/typical_acceptance/triton.py", "tl.where(verified, parent, 0)", "tl.where(verified, node, 0)",
           "verified by its own row"),
    Mutant("ops/typical_acceptance/triton.py", "log_delta - tl.load", "log_delta + tl.load",
           "unsure where the target is sure"),
]  # fmt: skip


THRESHOLDS = ((0.3, 0.6), (0.05, 0.2), (1.0, 1.0), (0.0, 0.5), (0.4, 0.0))


def inputs(parents: torch.Tensor, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Tokens drawn from their parents' rows, logits, logsumexp, entropy and choices."""
    generator = torch.Generator().manual_seed(seed)
    logits = (2 * torch.randn(*parents.shape, VOCABULARY, generator=generator)).to(dtype)
    log_probs = logits.double().log_softmax(-1)
    row = parents.clamp(0, parents.shape[1] - 1).long()
    by_parent = log_probs.exp().gather(1, row[..., None].expand_as(log_probs))
    tokens = torch.multinomial(by_parent.flatten(0, 1), 1, generator=generator).view(parents.shape)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return [tokens, logits, logits.double().logsumexp(-1).float(), entropy.float(), logits.float().argmax(-1)]


def awkward(values: list[torch.Tensor], parents: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """The same with values that are not numbers, infinite, or out of range here and there."""
    generator = torch.Generator().manual_seed(seed)
    tokens, logits, logsumexp, entropy, choices = (value.clone() for value in values)

    def some(shape: torch.Size) -> torch.Tensor:
        return torch.rand(shape, generator=generator) < 0.04

    for value in (math.nan, math.inf, -math.inf):
        logits[some(logits.shape)] = value
        logsumexp[some(logsumexp.shape)] = value
        entropy[some(entropy.shape)] = value
    for token in (-1, VOCABULARY, 2**40, -(2**40)):
        tokens[some(tokens.shape)] = token
    return [torch.where(parents < 0, 0, tokens), logits, logsumexp, entropy, choices]


def strided(logits: torch.Tensor, case: int) -> torch.Tensor:
    """The same logits stored differently."""
    if case == 0:
        return logits
    if case == 1:  # each token's logits of all nodes together
        return logits.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.full((*logits.shape[:2], VOCABULARY + 3), math.nan, dtype=logits.dtype)
    wide[..., :VOCABULARY] = logits
    return wide[..., :VOCABULARY]


def check(device: str) -> None:
    # A tie with either threshold: 0.5 in logarithms, rounded as backends have it, and entropy 2.5 at delta 1.
    epsilon = log_threshold(0.5)
    for logit, entropy in ((epsilon, 0.0), (-2.5, 2.5), (math.nan, 0.0), (0.0, math.nan), (-math.inf, 0.0)):
        for x in (logit, math.nextafter(logit, math.inf)):
            parents = forest(("chain",), 2, seed=0)
            row = torch.full((1, 2), entropy)
            logits = torch.full((1, 2, 2), x, dtype=torch.float64)
            zeros = torch.zeros(1, 2, dtype=torch.int64)
            verify_alike(device, parents, [zeros, logits, torch.zeros(1, 2), row, zeros], (0.5, 1.0))
    case = 0
    for nodes in (1, 5, 63, 123):
        parents = forest(SHAPES if nodes < 60 else ("random", "padded"), nodes, seed=nodes)
        for dtype in LOGITS_TYPES:
            clean = inputs(parents, dtype, seed=nodes)
            for values in (clean, awkward(clean, parents, seed=nodes)):
                values[1] = strided(values[1], case % 3)
                case += 1
                for thresholds in (THRESHOLDS[0], THRESHOLDS[case % len(THRESHOLDS)]):
                    verify_alike(device, parents, values, thresholds)


def verify_alike(
    device: str, parents: torch.Tensor, values: list[torch.Tensor], thresholds: tuple[float, float]
) -> None:
    """The backend in force gives the reference's answer."""
    tokens, *rest = values
    with speckernels.use_backend("reference"):
        expected = typical_acceptance(tokens, parents, *rest, *thresholds)
    for order in thread_orders("typical_acceptance", device):
        there = [value.to(device) for value in rest]
        there[0] = torch.empty_strided(rest[0].shape, rest[0].stride(), dtype=rest[0].dtype, device=device)
        there[0].copy_(rest[0])
        got = typical_acceptance(tokens.to(device), parents.to(device), *there, *thresholds)
        what = f"{list(rest[0].shape)} {rest[0].dtype}, thresholds {thresholds}, order {order}"
        assert_same(Verified(*(t.cpu() for t in got)), expected, what)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(1, 40), st.integers(0, 1000), st.floats(0.01, 0.9), st.floats(0.01, 2.0))
def test_reference_is_the_papers_rule(shape: str, nodes: int, seed: int, epsilon: float, delta: float) -> None:
    """MEDUSA section 3.3.2: p(x_{n+k} | x_1 ... x_{n+k-1}) > min(epsilon, delta exp(-H))."""
    parents = forest((shape,), nodes, seed)
    tokens, logits, logsumexp, entropy, choices = inputs(parents, torch.float32, seed)
    probs = logits[0].double().softmax(-1)
    enough = (delta * (torch.special.entr(probs).sum(-1).neg()).exp()).clamp(max=epsilon)
    links = parents[0].tolist()
    tie, valid = False, []
    for node in range(nodes):
        path = path_to_root(links, node)
        margins = [float(probs[a, tokens[0, b]] / enough[a]) for a, b in pairwise(path)]
        tie = tie or any(abs(margin - 1) < NEAR_A_TIE for margin in margins)
        if path[0] == 0 and all(margin > 1 for margin in margins):
            valid.append(path)
    longest = max(valid, key=len)
    result = typical_acceptance(tokens, parents, logits, logsumexp, entropy, choices, epsilon, delta)
    if not tie:
        count = int(result.accepted[0])
        assert result.path[0, : count + 1].tolist() == longest
        assert result.emitted[0, :count].tolist() == tokens[0, longest[1:]].tolist()
        assert result.emitted[0, count] == choices[0, longest[-1]]


def accepted(token: int, logits: list[float], epsilon: float, delta: float, **replaced: float) -> int:
    """Accepted tokens of a root with one child; all rows alike."""
    row = torch.tensor(logits, dtype=torch.float64).expand(1, 2, -1)
    log_probs = row.log_softmax(-1)
    rows = {"logsumexp": row.logsumexp(-1).float(), "entropy": -(log_probs.exp() * log_probs).nansum(-1).float()}
    rows |= {name: torch.full((1, 2), value) for name, value in replaced.items()}
    result = typical_acceptance(
        torch.tensor([[0, token]]),
        torch.tensor([[-1, 0]], dtype=torch.int32),
        row,
        *rows.values(),
        torch.zeros(1, 2, dtype=torch.int64),
        epsilon,
        delta,
    )
    return int(result.accepted)


@pytest.mark.usefixtures("_backend")
def test_thresholds() -> None:
    even = [0.0] * 4  # p = 0.25, entropy log 4
    assert accepted(1, even, epsilon=0.24, delta=9.0) == 1
    assert accepted(1, even, epsilon=0.26, delta=9.0) == 0
    assert accepted(1, even, epsilon=0.9, delta=0.96) == 1  # 0.96 / 4 < 0.25
    assert accepted(1, even, epsilon=0.9, delta=1.04) == 0


@pytest.mark.usefixtures("_backend")
def test_a_tie_is_not_accepted() -> None:
    epsilon = log_threshold(0.5)
    assert accepted(0, [epsilon, 0.0], 0.5, 1.0, logsumexp=0.0, entropy=0.0) == 0
    assert accepted(0, [math.nextafter(epsilon, 1.0), 0.0], 0.5, 1.0, logsumexp=0.0, entropy=0.0) == 1
    assert accepted(0, [-2.5, 0.0], 0.5, 1.0, logsumexp=0.0, entropy=2.5) == 0
    assert accepted(0, [math.nextafter(-2.5, 0.0), 0.0], 0.5, 1.0, logsumexp=0.0, entropy=2.5) == 1


@pytest.mark.usefixtures("_backend")
def test_not_a_number_is_never_accepted() -> None:
    assert accepted(0, [3.0, 0.0], 0.1, 0.1) == 1
    assert accepted(0, [math.nan, 0.0], 0.1, 0.1, logsumexp=1.0, entropy=0.1) == 0
    assert accepted(0, [3.0, 0.0], 0.1, 0.1, entropy=math.nan) == 0
    assert accepted(0, [3.0, 0.0], 0.1, 0.1, logsumexp=math.nan) == 0
    assert accepted(0, [-math.inf, -math.inf], 0.1, 0.1, logsumexp=-math.inf, entropy=0.0) == 0


@pytest.mark.usefixtures("_backend")
def test_probability_zero_is_not_accepted_at_threshold_zero() -> None:
    assert accepted(0, [-math.inf, 0.0], 0.0, 0.0) == 0
    assert accepted(0, [-700.0, 0.0], 0.0, 0.0) == 1


@pytest.mark.usefixtures("_backend")
def test_tokens_outside_the_vocabulary_are_not_accepted() -> None:
    for token in (-1, 2, 2**40, -(2**62)):
        assert accepted(token, [0.0, 0.0], 0.1, 0.1) == 0


@pytest.mark.usefixtures("_backend")
def test_medusa_padding_of_token_zero_is_not_accepted() -> None:
    """Likely as token 0 may be, padding is no draft."""
    parents = torch.tensor([[-1, -1, -1]], dtype=torch.int32)
    zeros = torch.zeros(1, 3, dtype=torch.int64)
    logits = torch.tensor([9.0, 0.0]).expand(1, 3, 2)
    result = typical_acceptance(
        zeros, parents, logits, logits.logsumexp(-1), torch.zeros(1, 3), zeros, epsilon=0.1, delta=0.1
    )
    assert result.path.tolist() == [[0, -1, -1]] and result.emitted.tolist() == [[0, -1, -1]]


def certain(choices: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Logits, logsumexp and entropy of rows that give their choice all probability."""
    logits = torch.full((*choices.shape, int(choices.max()) + 1), -math.inf)
    logits.scatter_(-1, choices[..., None], 0.0)
    return logits, torch.zeros(choices.shape), torch.zeros(choices.shape)


def verify(tokens: list[int], parents: list[int], choices: list[int]) -> tuple[list[int], list[int]]:
    """Path and emitted tokens of one tree, without their padding, where the target is certain of its choices."""
    drafted, chosen, links = torch.tensor([tokens]), torch.tensor([choices]), torch.tensor([parents]).int()
    result = typical_acceptance(drafted, links, *certain(chosen), chosen, 0.5, 1.0)
    count = int(result.accepted[0])
    assert (result.path[0, count + 1 :] == -1).all() and (result.emitted[0, count + 1 :] == -1).all()
    return result.path[0, : count + 1].tolist(), result.emitted[0, : count + 1].tolist()


@pytest.mark.usefixtures("_backend")
def test_of_repeated_siblings_the_longest_path_wins() -> None:
    assert verify([0, 4, 4, 5, 6], [-1, 0, 0, 2, 3], [4, 9, 5, 6, 8]) == ([0, 2, 3, 4], [4, 5, 6, 8])
    assert verify([0, 4, 4, 4], [-1, 0, 0, 0], [4, 1, 2, 3]) == ([0, 1], [4, 1])  # equals: the first


@pytest.mark.usefixtures("_backend")
def test_all_children_rejected() -> None:
    assert verify([0, 1, 2, 3], [-1, 0, 0, 0], [9, 9, 9, 9]) == ([0], [9])
    assert verify([0, 1, 2, 3], [-1, 0, 1, 2], [9, 2, 3, 4]) == ([0], [9])  # good ones below a rejected one


@pytest.mark.usefixtures("_backend")
def test_what_hangs_on_padding_is_not_accepted() -> None:
    assert verify([7, 5, 0, 0], [-1, 0, -1, -1], [5, 0, 0, 0]) == ([0, 1], [5, 0])
    assert verify([7, 0, 0, 0], [-1, -1, 1, 2], [0, 0, 0, 0]) == ([0], [0])


@pytest.mark.usefixtures("_backend")
def test_root_alone() -> None:
    assert verify([5], [-1], [6]) == ([0], [6])


@pytest.mark.usefixtures("_backend")
def test_links_that_are_no_tree_are_not_followed() -> None:
    assert verify([0, 1, 1, 1, 1], [-1, 2, 1, 3, 1000], [1, 1, 1, 1, 1]) == ([0], [1])


def test_largest_tree() -> None:
    parents = forest(("chain", "random"), 1024, seed=0)
    tokens = torch.zeros(2, 1024, dtype=torch.int64)
    results = []
    for backend in ("reference", "cuda"):
        with speckernels.use_backend(backend):
            results.append(typical_acceptance(tokens, parents, *certain(tokens), tokens, 0.5, 1.0))
    assert results[0].accepted[0] == 1023
    assert_same(results[1], results[0], "1024 nodes")


@ON_GPU
def test_offsets_beyond_32_bits(backend: str) -> None:
    nodes, vocabulary = 512, 2**22 + 5
    logits = torch.zeros(1, nodes, vocabulary, dtype=torch.float16, device="cuda")
    assert logits.numel() > 2**31
    parents = forest(("chain",), nodes, seed=0).cuda()
    tokens = torch.full((1, nodes), vocabulary - 1, device="cuda")
    logits[0, torch.arange(nodes), -1] = 20.0  # so likely that all are accepted
    logits[0, -2, -1] = 0.0  # but the last
    rows = torch.full((1, nodes), 20.0, device="cuda")
    with speckernels.use_backend(backend):
        result = typical_acceptance(tokens, parents, logits, rows, rows * 0, tokens, 0.1, 0.1)
    assert result.accepted.item() == nodes - 2


def samples() -> list[tuple[Any, ...]]:
    parents = forest(SHAPES, 33, seed=0)
    tokens, *rest = inputs(parents, torch.float32, seed=0)
    return [(tokens, parents, *rest, 0.3, 0.5)]


def refusals() -> Refusals:
    parents = forest(("chain",), 3, seed=0)
    names = ("tokens", "logits", "logsumexp", "entropy_nats", "choices")
    good = dict(zip(names, inputs(parents, torch.float32, seed=0), strict=True))
    logits, logsumexp = good["logits"], good["logsumexp"]
    return good | {"parents": parents, "epsilon": 0.1, "delta": 0.1}, [
        (r"parents is int64 \[1, 3\]; give int32 \[B, n\] with 1 to 1024 nodes", {"parents": parents.long()}),
        (r"tokens is int32 \[1, 3\]; give int64 \[1, 3\]", {"tokens": parents}),
        (r"choices is int64 \[1, 2\]; give int64 \[1, 3\]", {"choices": good["choices"][:, :2]}),
        ("choices is on meta; move it to cpu", {"choices": good["choices"].to("meta")}),
        (r"logits is float32 \[1, 3\]; give float16 or .* or float64 \[1, 3, any\]", {"logits": logits[..., 0]}),
        (r"logsumexp is float64 \[1, 3\]; give float32 \[1, 3\]", {"logsumexp": logsumexp.double()}),
        ("epsilon is nan; give a finite threshold of at least 0", {"epsilon": math.nan}),
        (r"delta is -1\.0; give", {"delta": -1.0}),
    ]
