"""Chain rejection, against the reference, by exact enumeration of its distribution, and known bugs of others."""

from __future__ import annotations

import importlib
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import speckernels
from speckernels.ops.chain_rejection import MAX_VOCABULARY, ChainVerified, chain_rejection
from speckernels.ops.chain_rejection.reference import weights
from tests.support.exact_distribution import BELOW_ONE, Path, continue_text, distance, dyadic_rows, outcomes
from tests.support.kernel_trees import Refusals, assert_same, thread_orders
from tests.support.mutants import Mutant

TOLERANCE = 1e-9  # thresholds are found to 2^-36, weights are multiples of 2^-40
BAD_TOKENS = (-1, -(2**62), 2**40)
BAD_UNIFORMS = (0.0, BELOW_ONE, 1.0, -0.5, math.nan)
MUTANTS = [
    Mutant("csrc/rejection.cu", "double(drafted)) < double(wanted)", "double(drafted)) <= double(wanted)",
           "u of 0 accepts a token of probability 0"),
    Mutant("csrc/rejection.cu", "target >= sums[section]", "target > sums[section]", "draws a token of weight 0"),
    Mutant("csrc/rejection.cu", "&arrived[row], 1) == splits - 1", "&arrived[row], 1) == splits - 2",
           "the last block but one draws"),
    Mutant("csrc/rejection.cu", "weight(row_of_draft[token]) > 0", "weight(row_of_draft[token]) >= 0",
           "subtracts a draft row that was not drawn from"),
    Mutant("csrc/rejection.cu", "if (total == 0) {  // nothing is left: draw from the target's row\n    residual",
           "if (total < 0) {\n    residual", "no fallback where the residual is 0"),
    Mutant("csrc/rejection.cu", "atomicMin(&first_failure, step)", "first_failure = step",
           "the last failing thread decides where the chain ends"),
    Mutant("csrc/rejection.cu", "(prob < 1 ? prob : 1.0f)", "prob", "infinite probabilities overflow"),
    Mutant("ops/chain_rejection/triton.py", "tl.where(given & (passes == 0), step, drafts)",
           "tl.where(given & (passes == 0), step, drafts - 1)",
           "the last draft token is never accepted"),
    Mutant("ops/chain_rejection/triton.py", "before + tl.cumsum(these, 0) <= drawn_at",
           "before + tl.cumsum(these, 0) < drawn_at", "draws a token of weight 0"),
    Mutant("ops/chain_rejection/triton.py", "        before += tl.sum(these)\n", "",
           "each block of the vocabulary starts anew"),
]  # fmt: skip


def random_rows(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Peaked distributions, float32, the last axis the vocabulary."""
    return (torch.randn(*shape, generator=generator) * 2).softmax(-1)


def spoil(rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Make a few values, and a few whole rows, what no probabilities should be."""
    rows = rows.clone()
    for value in (math.nan, -0.25, math.inf, 0.0, 1e-20):
        rows[torch.rand(rows.shape, generator=generator) < 0.02] = value
    rows *= torch.tensor([1.0, 1.0, 0.98, 1.02, 0.0, 1e6])[torch.randint(6, rows.shape[:-1], generator=generator)][
        ..., None
    ]
    return rows


def spoil_uniforms(uniforms: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    edges = torch.tensor(BAD_UNIFORMS, dtype=torch.float64)
    edges = edges[torch.randint(len(BAD_UNIFORMS), uniforms.shape, generator=generator)]
    return torch.where(torch.rand(uniforms.shape, generator=generator) < 0.3, edges, uniforms)


def random_case(batch: int, drafts: int, vocabulary: int, seed: int, spoilt: bool) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    target = random_rows(generator, batch, drafts + 1, vocabulary)
    # Drafts between the target and something else, and some equal to it.
    likeness = torch.rand(batch, 1, 1, generator=generator).round(decimals=1)
    other = random_rows(generator, batch, drafts, vocabulary)
    draft = target[:, :drafts] * likeness + other * (1 - likeness)
    tokens = torch.multinomial(draft.reshape(-1, vocabulary), 1, generator=generator) if drafts else torch.empty(0)
    tokens = tokens.reshape(batch, drafts).long()
    uniforms = torch.rand(batch, drafts + 1, dtype=torch.float64, generator=generator)
    if spoilt:
        draft, target = spoil(draft, generator), spoil(target, generator)
        bad = torch.tensor([*BAD_TOKENS, vocabulary])[torch.randint(4, tokens.shape, generator=generator)]
        tokens = torch.where(torch.rand(tokens.shape, generator=generator) < 0.1, bad, tokens)
        uniforms = spoil_uniforms(uniforms, generator)
    return tokens, draft, target, uniforms


def check(device: str) -> None:
    shapes = [(5, 0, 7), (6, 1, 1), (24, 3, 5), (12, 8, 33), (3, 40, 3), (4, 3, 1000), (2, 2, 8200), (1, 1, 9001)]
    for number, (batch, drafts, vocabulary) in enumerate(shapes):
        for spoilt in (False, True):
            case = random_case(batch, drafts, vocabulary, number, spoilt)
            with speckernels.use_backend("reference"):
                expected = chain_rejection(*case)
            for order in thread_orders("rejection", device):
                got = chain_rejection(*(tensor.to(device) for tensor in case))
                what = f"batch {batch}, {drafts} drafts, vocabulary {vocabulary}, spoilt {spoilt}, order {order}"
                assert_same(ChainVerified(*(t.cpu() for t in got)), expected, what)


def emitted_distribution(draft: torch.Tensor, target: torch.Tensor, paths: dict[Path, int]) -> dict[Path, float]:
    """Distribution of the first k + 1 tokens: drafts of k, verification, and the target beyond it.

    draft, target : [rows, V]; paths : the row after each path of up to k tokens
    """
    vocabulary = target.shape[-1]
    drafts = max(map(len, paths))
    chains = list(itertools.product(range(vocabulary), repeat=drafts))
    tokens = torch.tensor(chains)
    index = torch.tensor([[paths[chain[:place]] for place in range(drafts + 1)] for chain in chains])
    drawn = draft[index[:, :drafts]].double().gather(-1, tokens[..., None])[..., 0].prod(-1)
    possible = drawn > 0
    tokens, index, drawn = tokens[possible], index[possible], drawn[possible]

    def run(row: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        at = index[row]
        result = chain_rejection(tokens[row], draft[at[:, :drafts]], target[at], uniforms)
        last = result.emitted.gather(1, result.accepted[:, None].long())[:, 0]
        return torch.arange(drafts) < result.accepted[:, None], last

    runs = outcomes(run, len(tokens), list(range(drafts)), drafts, vocabulary)
    rows = {path: target[row].tolist() for path, row in paths.items()}
    distribution: dict[Path, float] = {}
    for row, path_prob, decisions, last in zip(runs.rows, runs.path_prob, runs.decisions, runs.last, strict=True):
        start = tuple(tokens[row, : int(decisions.sum())].tolist())
        for token in range(vocabulary):
            chance = float(drawn[row] * path_prob * last[token])
            continue_text(distribution, rows.__getitem__, (*start, token), chance, drafts + 1)
    return distribution


@pytest.mark.parametrize(("vocabulary", "drafts", "seed"), [(3, 2, 0), (3, 2, 1), (5, 1, 2), (4, 2, 3)])
def test_distribution_is_the_targets(vocabulary: int, drafts: int, seed: int) -> None:
    """Every draft, with its probability, and every decision, with its threshold."""
    generator = torch.Generator().manual_seed(seed)
    every = [p for length in range(drafts + 1) for p in itertools.product(range(vocabulary), repeat=length)]
    draft, target = (dyadic_rows(generator, len(every), vocabulary) for _ in range(2))
    expected: dict[Path, float] = {}
    continue_text(expected, dict(zip(every, target.tolist(), strict=True)).__getitem__, (), 1.0, drafts + 1)
    distribution = emitted_distribution(draft, target, {path: row for row, path in enumerate(every)})
    assert distance(distribution, expected) < TOLERANCE


def test_distribution_departs_no_further_than_the_sums() -> None:
    """Rows that are not quite normalised, as of half precision, move the distribution by their excess alone."""
    excess = 1e-3
    paths: dict[Path, int] = {(): 0, (0,): 0, (1,): 0, (2,): 0}
    draft, target = torch.tensor([[0.2, 0.3, 0.5]]), torch.tensor([[0.6, 0.3, 0.1]])
    expected: dict[Path, float] = {}
    continue_text(expected, lambda path: target[0].tolist(), (), 1.0, 1)
    for factors in ((1 + excess, 1), (1, 1 + excess), (1 - excess, 1), (1, 1 - excess)):
        distribution = emitted_distribution(draft * factors[0], target * factors[1], paths)
        total = sum(distribution.values())
        first = {(x,): sum(p for path, p in distribution.items() if path[0] == x) / total for x in range(3)}
        assert distance(first, expected) < excess


def verify(tokens: list[int], draft: list[list[float]], target: list[list[float]], uniforms: list[float]) -> list[int]:
    """Emitted tokens of one chain, without their padding."""
    result = chain_rejection(
        torch.tensor([tokens], dtype=torch.int64),
        torch.tensor(draft).reshape(1, len(tokens), len(target[0])),
        torch.tensor([target]),
        torch.tensor([uniforms], dtype=torch.float64),
    )
    count = int(result.accepted[0])
    assert (result.emitted[0, count + 1 :] == -1).all() and (result.emitted[0, :count] >= 0).all()
    return result.emitted[0, : count + 1].tolist()


@pytest.mark.usefixtures("_backend")
@pytest.mark.parametrize("uniform", [0.0, 0.5, BELOW_ONE])
def test_residual_of_total_zero_gives_a_token_of_the_target(uniform: float) -> None:
    """FlashInfer's chain sampling leaves its token unset there."""
    # The draft says more than the target everywhere: rounding of equal rows, exaggerated.
    assert verify([1], [[0.5, 0.5]], [[0.0, 0.4], [1.0, 0.0]], [0.9, uniform]) == [1]
    emitted = verify([0], [[0.5, 0.5]], [[0.25, 0.25], [1.0, 0.0]], [0.75, uniform])
    assert emitted == [0 if uniform < 0.5 else 1]


@pytest.mark.usefixtures("_backend")
@pytest.mark.parametrize("token", [-1, 3, 2**40, -(2**62)])
def test_token_out_of_range_ends_the_chain(token: int) -> None:
    """A negative token is read out of bounds by others; here the target speaks at its place."""
    draft = [[0.0, 1.0, 0.0]] * 2
    target = [[0.0, 1.0, 0.0], [0.25, 0.25, 0.5], [0.0, 1.0, 0.0]]
    for uniform, last in ((0.0, 0), (0.2, 0), (0.25, 1), (0.6, 2), (BELOW_ONE, 2)):
        assert verify([1, token], draft, target, [0.5, 0.0, uniform]) == [1, last]
        assert verify([token, 1], draft, target, [0.0, 0.0, uniform]) == [1]


@pytest.mark.usefixtures("_backend")
def test_token_that_the_draft_cannot_have_drawn_ends_the_chain() -> None:
    for uniform, last in ((0.0, 0), (0.5, 1)):
        assert verify([0], [[0.0, 1.0]], [[0.5, 0.5], [1.0, 0.0]], [0.0, uniform]) == [last]


@pytest.mark.usefixtures("_backend")
def test_uniform_of_zero_accepts_no_token_of_probability_zero() -> None:
    """SGLang's `u <= p` does (issue 35771)."""
    assert verify([0], [[0.5, 0.5]], [[0.0, 1.0], [1.0, 0.0]], [0.0, 0.0]) == [1]
    assert verify([0], [[1.0, 0.0]], [[math.nan, 1.0], [1.0, 0.0]], [0.0, 0.0]) == [1]
    assert verify([0], [[1.0, 0.0]], [[-1.0, 1.0], [1.0, 0.0]], [0.0, 0.0]) == [1]


@pytest.mark.usefixtures("_backend")
@pytest.mark.parametrize("vocabulary", [1, 5, 31, 33, 1000, 1025, 4097])
def test_last_token_of_nonzero_weight_is_drawn_and_none_beyond(vocabulary: int) -> None:
    """Tails: others return an id at or beyond V (vLLM PR 44744)."""
    for first, last in {(0, vocabulary - 1), (vocabulary // 2, vocabulary // 2), (vocabulary // 3, vocabulary - 1)}:
        row = torch.zeros(1, 1, vocabulary)
        row[0, 0, [first, last]] = 0.3
        none = torch.empty(1, 0, dtype=torch.int64)
        for uniform, token in ((0.0, first), (BELOW_ONE, last), (1.0, last), (-1.0, first), (math.nan, first)):
            uniforms = torch.tensor([[uniform]], dtype=torch.float64)
            result = chain_rejection(none, torch.empty(1, 0, vocabulary), row, uniforms)
            assert result.emitted.tolist() == [[token]]


@pytest.mark.usefixtures("_backend")
def test_smallest_weight_is_reachable() -> None:
    tiny = 2.0**-40
    assert verify([], [], [[0.5, 0.5, tiny]], [BELOW_ONE]) == [2]
    assert verify([], [], [[0.5, 0.5, tiny / 2]], [BELOW_ONE]) == [1]  # rounds down to nothing


@pytest.mark.usefixtures("_backend")
def test_target_of_nothing_but_zeros_or_nan_emits_minus_one() -> None:
    """NaN logits give id = V elsewhere."""
    for nothing in (0.0, math.nan, -1.0):
        assert verify([1], [[0.5, 0.5]], [[nothing, nothing], [1.0, 0.0]], [0.0, 0.5]) == [-1]
        assert verify([1], [[0.0, 1.0]], [[0.0, 1.0], [nothing, nothing]], [0.0, 0.5]) == [1, -1]


@pytest.mark.usefixtures("_backend")
def test_nan_in_a_row_is_left_out() -> None:
    assert verify([0], [[1.0, math.nan]], [[0.0, 1.0], [0.0, 0.0]], [0.0, 0.5]) == [1]
    assert verify([], [], [[math.nan, 0.25, math.nan, 0.25]], [0.5]) == [3]


@pytest.mark.parametrize("backend", ["reference", "cuda"])  # 4 million tokens take interpreted Triton too long
def test_sums_of_the_largest_vocabulary_do_not_overflow(backend: str) -> None:
    ones = torch.ones(1, 1, MAX_VOCABULARY)  # a total of 2^62
    uniforms = torch.tensor([[BELOW_ONE]], dtype=torch.float64)
    with speckernels.use_backend(backend):
        result = chain_rejection(torch.empty(1, 0, dtype=torch.int64), ones[:, :0], ones, uniforms)
    assert result.emitted.tolist() == [[MAX_VOCABULARY - 1]]


def test_counters_are_left_as_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are shared with later launches."""
    kept = torch.zeros(2, dtype=torch.int32)
    backend = importlib.import_module("speckernels.ops.chain_rejection.cuda")
    monkeypatch.setattr(backend, "counters", lambda like, count: kept[:count])
    case = random_case(2, 2, 8200, 0, False)
    with speckernels.use_backend("cuda"):
        first = chain_rejection(*case)
        assert not kept.any()
        assert_same(chain_rejection(*case), first, "second launch")


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(0, 5), st.integers(1, 40), st.integers(0, 10_000), st.booleans())
def test_reference_emits_only_what_the_target_can_say(
    batch: int, drafts: int, vocabulary: int, seed: int, spoilt: bool
) -> None:
    tokens, draft, target, uniforms = random_case(batch, drafts, vocabulary, seed, spoilt)
    accepted, emitted = chain_rejection(tokens, draft, target, uniforms)
    for row, count in enumerate(accepted.tolist()):
        assert emitted[row, :count].tolist() == tokens[row, :count].tolist()
        assert (emitted[row, count + 1 :] == -1).all()
        possible = weights(target[row]) > 0
        for place, token in enumerate(emitted[row, : count + 1].tolist()):
            assert possible[place, token] if token >= 0 else place == count and not possible[place].any()


def samples() -> list[tuple[Any, ...]]:
    return [random_case(3, 4, 9, 0, False)]


def refusals() -> Refusals:
    tokens, draft, target, uniforms = random_case(2, 3, 5, 0, False)
    good = {"draft_tokens": tokens, "draft_probs": draft, "target_probs": target, "uniforms": uniforms}
    return good, [
        (r"draft_tokens is int32 \[2, 3\]; give int64 \[B, k\]", {"draft_tokens": tokens.int()}),
        (r"target_probs is float32 \[2, 3, 5\]; give float32 \[2, 4, any\]", {"target_probs": draft}),
        (r"draft_probs is float64 \[2, 3, 5\]; give float32 \[2, 3, 5\]", {"draft_probs": draft.double()}),
        (r"uniforms is float32 \[2, 4\]; give float64 \[2, 4\]", {"uniforms": uniforms.float()}),
        ("a vocabulary of 1 to 4194304 tokens", {"draft_probs": draft[..., :0], "target_probs": target[..., :0]}),
        ("uniforms is on meta; move it to cpu", {"uniforms": uniforms.to("meta")}),
    ]
