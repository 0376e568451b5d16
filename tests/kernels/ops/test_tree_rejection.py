"""Tree rejection, against the reference, by exact enumeration of its distribution, and known bugs of others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import speckernels
from speckernels.ops.chain_rejection import chain_rejection
from speckernels.ops.chain_rejection.reference import SCALE, weights
from speckernels.ops.results import Verified
from speckernels.ops.tree_rejection import SiblingKind, tree_rejection
from speckernels.ops.tree_rejection.reference import shares
from tests.kernels.ops.test_chain_rejection import spoil_uniforms
from tests.support.exact_distribution import BELOW_ONE, Path, continue_text, distance, drafts, dyadic_rows, outcomes
from tests.support.kernel_trees import SHAPES, Refusals, assert_same, forest, path_to_root, thread_orders
from tests.support.mutants import Mutant

TOLERANCE = 1e-9  # thresholds are found to 2^-36, weights and rests are multiples of 2^-40
KINDS = list(SiblingKind)
MUTANTS = [
    Mutant("csrc/rejection.cu", "offered) < wanted)", "offered) <= wanted)", "u of 0 accepts a token of probability 0"),
    Mutant("csrc/rejection.cu", "if (kind == WITHOUT_REPLACEMENT) draft_total -= drafted;", "",
           "the draft is not renormalised without the token drawn"),
    Mutant("csrc/rejection.cu", "if (kind != IID && is_child", "if (kind == TOP_K && is_child",
           "a repeated sibling is verified without replacement"),
    Mutant("csrc/rejection.cu", "if (parents[node] != current) continue;", "if (parents[node] > current) continue;",
           "padding is verified"),
    Mutant("csrc/rejection.cu", "      subtracted = false;\n      draft", "      draft", "the parent's rest is kept"),
    Mutant("csrc/rejection.cu", "if (drafted == 0) continue;", "", "a token that was not drafted is verified"),
    Mutant("csrc/rejection.cu", "removed_any && is_child(i, nodes) ? 0", "false ? 0", "a removed token is drawn"),
    Mutant("csrc/rejection.cu", "      __syncthreads();  // all have read the sums\n", "",
           "sums change while others read them"),
    Mutant("csrc/rejection.cu", "token / section_width(vocabulary)] -= removed", "token % SECTIONS] -= removed",
           "removed from another section"),
    Mutant("csrc/rejection.cu", "weight(four.x) + weight(four.y)", "weight(four.x)", "one in four does not count"),
    Mutant("csrc/rejection.cu", "is_parent |= tree[child] == node", "is_parent |= tree[child] == child - 1",
           "sums of a draft that has children are left out"),
    Mutant("csrc/rejection.cu", "if (node > 0 && tree[node] < 0) return;", "if (tree[node] < 0) return;",
           "the root taken for padding"),
    Mutant("csrc/rejection.cu", "row_sums[current].draft[section]", "row_sums[0].draft[section]",
           "the root's draft everywhere"),
    Mutant("csrc/rejection.cu", "if (total == 0) {  // nothing is left: draw from the target's row\n    subtracted",
           "if (total < 0) {\n    subtracted", "no fallback where nothing is left"),
    Mutant("ops/tree_rejection/triton.py", "draft_total -= drafted", "draft_total -= 0",
           "the draft is not renormalised without the token drawn"),
    Mutant("ops/tree_rejection/triton.py", "& (token >= 0) & (token < vocabulary)", "& (token < vocabulary)",
           "a negative token is verified"),
    Mutant("ops/tree_rejection/triton.py", "total -= remaining", "total -= 0",
           "the target is not renormalised without the token removed"),
    Mutant("ops/tree_rejection/triton.py", "if is_parent &", "if (node == 0) &", "sums of the root's draft alone"),
    Mutant("ops/tree_rejection/triton.py", "start = tl.program_id(1) * part", "start = 0", "parts overlap"),
    Mutant("ops/tree_rejection/triton.py", "tl.store(rest + all_tokens, tl.full([NODES], 0, tl.int64), mask=child)",
           "pass", "a removed token is drawn"),
    Mutant("ops/tree_rejection/triton.py", "(index >= depth)", "(index > depth)",
           "the last token is not written"),
]  # fmt: skip


def drafted_tokens(
    parents: torch.Tensor, draft: torch.Tensor, kind: SiblingKind, generator: torch.Generator
) -> torch.Tensor:
    """Tokens [B, n] drawn as the kind says from the rows [B, n, V] of their parents."""
    batch, nodes, vocabulary = draft.shape
    tokens = torch.randint(vocabulary, (batch, nodes), generator=generator)
    for tree, node in itertools.product(range(batch), range(nodes)):
        parent = int(parents[tree, node])
        if parent < 0:
            continue
        row = draft[tree, parent].clone()
        if kind != SiblingKind.iid:
            row[tokens[tree, :node][parents[tree, :node] == parent]] = 0
        if kind == SiblingKind.top_k or not row.any():
            tokens[tree, node] = row.argmax()
        else:
            tokens[tree, node] = torch.multinomial(row, 1, generator=generator)
    return tokens


def random_case(
    parents: torch.Tensor, vocabulary: int, kind: SiblingKind, seed: int, spoilt: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    batch, nodes = parents.shape
    target, other = ((torch.randn(batch, nodes, vocabulary, generator=generator) * 2).softmax(-1) for _ in range(2))
    # Drafts between the target and something else, and some equal to it.
    likeness = torch.rand(batch, nodes, 1, generator=generator).round(decimals=1)
    draft = target * likeness + other * (1 - likeness)
    tokens = drafted_tokens(parents, draft, kind, generator)
    uniforms = torch.rand(batch, nodes + 1, dtype=torch.float64, generator=generator)
    uniforms[::2, :nodes] **= 0.1  # every other tree is verified strictly: many rejections in a row
    if spoilt:
        factors = torch.tensor([1.0, 1.0, 1.0, 0.98, 1.02, 0.0, 1e6])
        for rows in (draft, target):
            for value in (math.nan, -0.25, math.inf, 0.0, 1e-20):
                rows[torch.rand(rows.shape, generator=generator) < 0.02] = value
            rows *= factors[torch.randint(len(factors), (batch, nodes, 1), generator=generator)]
        strange = torch.tensor([-1, -(2**62), 2**40, vocabulary, 0, 0, vocabulary - 1, vocabulary - 1])
        strange = strange[torch.randint(len(strange), tokens.shape, generator=generator)]
        tokens = torch.where(torch.rand(tokens.shape, generator=generator) < 0.3, strange, tokens)
        uniforms = spoil_uniforms(uniforms, generator)
    return tokens, parents, None if kind == SiblingKind.top_k else draft, target, uniforms


def alike_case(kind: SiblingKind) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Rows of target and draft equal but for a factor, verified as strictly as can be: often nothing is left."""
    generator = torch.Generator().manual_seed(0)
    parents = forest(("star",) * 30, 4, seed=0)
    counts = torch.randint(1, 20, (30, 1, 3), generator=generator).expand(-1, 4, -1)
    factors = torch.tensor([0.75, 0.625, 0.875])[torch.randint(3, (30, 1, 1), generator=generator)]
    tokens = torch.tensor([0, 0, 1, 2]).expand(30, -1)
    uniforms = torch.full((30, 5), BELOW_ONE, dtype=torch.float64)
    uniforms[:, 4] = torch.rand(30, dtype=torch.float64, generator=generator)
    target = counts / 32
    return tokens, parents, None if kind == SiblingKind.top_k else target * factors, target, uniforms


def check(device: str) -> None:
    sizes = [(1, 7, SHAPES[:1]), (4, 1, SHAPES[:3]), (9, 5, SHAPES), (63, 40, ("binary",)), (8, 80, ("star",) * 20)]
    sizes += [(5, 4, ("star",) * 8), (4, 1100, ("star",))]
    cases = [("alike", kind, alike_case(kind)) for kind in KINDS]
    for (nodes, vocabulary, shapes), kind, spoilt in itertools.product(sizes, KINDS, (False, True)):
        case = random_case(forest(shapes, nodes, seed=nodes), vocabulary, kind, nodes + vocabulary, spoilt)
        cases.append((f"{nodes} nodes, vocabulary {vocabulary}, spoilt {spoilt}", kind, case))
    for what, kind, case in cases:
        with speckernels.use_backend("reference"):
            expected = tree_rejection(*case, kind)
        for order in thread_orders("rejection", device):
            got = tree_rejection(*(None if tensor is None else tensor.to(device) for tensor in case), kind)
            assert_same(Verified(*(t.cpu() for t in got)), expected, f"{kind.name}, {what}, order {order}")


# The distribution, by enumeration in fractions: no code shared with the operation, not even its integers.

Rows = Mapping[Path, Sequence[Fraction]]


def paths_of(tokens: Sequence[int], parents: Sequence[int]) -> list[Path]:
    """The tokens on the way from the root to each node."""
    return [tuple(tokens[node] for node in path_to_root(list(parents), n)[1:]) for n in range(len(parents))]


def drafted(kind: SiblingKind, parents: Sequence[int], draft: Rows) -> list[tuple[list[int], Fraction]]:
    """Every tree of tokens that can be drafted, the root's token 0 in front, with its probability."""
    trees = drafts(kind.name, [parent - 1 for parent in parents[1:]], lambda path: list(draft[path]))
    return [([0, *tokens], path_prob) for tokens, path_prob in trees]


def judge(
    rule: SiblingKind, children: Sequence[int], p: Sequence[Fraction], q: Sequence[Fraction]
) -> tuple[list[Fraction], list[Fraction]]:
    """The probability to accept each child once those before it are rejected, and the distribution after all are."""
    rest, offered, accept_probs, met = list(p), list(q), [], set()
    for x in children:
        if rule == SiblingKind.top_k:
            accept_probs.append(rest[x])
            rest[x] = Fraction(0)
        elif (rule == SiblingKind.without_replacement and x in met) or not offered[x]:
            accept_probs.append(Fraction(0))
            continue
        else:
            accept_probs.append(min(Fraction(1), rest[x] / offered[x]))
            rest = [max(a - b, Fraction(0)) for a, b in zip(rest, offered, strict=True)]
            if rule == SiblingKind.without_replacement:
                offered[x] = Fraction(0)
                offered = [b / (sum(offered) or 1) for b in offered]
        met.add(x)
        rest = [a / (sum(rest) or 1) for a in rest]
    return accept_probs, rest if sum(rest) else list(p)


def verified_distribution(
    rule: SiblingKind, tokens: Sequence[int], parents: Sequence[int], target: Rows, draft: Rows, length: int
) -> dict[Path, Fraction]:
    """Distribution of the first `length` tokens, given the draft."""
    paths = paths_of(tokens, parents)
    distribution: dict[Path, Fraction] = {}

    def walk(node: int, reached: Fraction) -> None:
        path = paths[node]
        children = [child for child in range(1, len(parents)) if parents[child] == node]
        accept_probs, rest = judge(rule, [tokens[c] for c in children], target[path], draft[path])
        for child, path_prob in zip(children, accept_probs, strict=True):
            if reached * path_prob:
                walk(child, reached * path_prob)
            reached *= 1 - path_prob
        for token, prob in enumerate(rest):
            continue_text(distribution, target.__getitem__, (*path, token), reached * prob, length)

    walk(0, Fraction(1))
    return distribution


def distribution_by_fractions(
    drawn: SiblingKind, rule: SiblingKind, parents: Sequence[int], target: Rows, draft: Rows, length: int
) -> dict[Path, Fraction]:
    total: dict[Path, Fraction] = {}
    for tokens, path_prob in drafted(drawn, parents, draft):
        for path, prob in verified_distribution(rule, tokens, parents, target, draft, length).items():
            total[path] = total.get(path, Fraction(0)) + path_prob * prob
    return total


def distribution_of_operation(
    drawn: SiblingKind, rule: SiblingKind, parents: Sequence[int], target: Rows, draft: Rows, length: int
) -> dict[Path, float]:
    """The same, from the operation's own decisions: each is a threshold in its uniform."""
    nodes, vocabulary = len(parents), len(target[()])
    trees, accept_probs = zip(*drafted(drawn, parents, draft), strict=True)
    tokens = torch.tensor(trees)
    links = torch.tensor([parents], dtype=torch.int32).expand(len(trees), -1)

    def rows(of: Rows) -> torch.Tensor:
        return torch.tensor([[[float(x) for x in of[path]] for path in paths_of(t, parents)] for t in trees])

    target_rows, draft_rows = rows(target), rows(draft)

    def run(row: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = None if rule == SiblingKind.top_k else draft_rows[row]
        result = tree_rejection(tokens[row], links[row], q, target_rows[row], uniforms, rule)
        is_accepted = (result.path[:, :, None] == torch.arange(1, nodes)).any(1)
        return is_accepted, result.emitted.gather(1, result.accepted[:, None].long())[:, 0]

    runs = outcomes(run, len(trees), list(range(1, nodes)), nodes, vocabulary)
    distribution: dict[Path, float] = {}
    for row, path_prob, decisions, last in zip(
        runs.rows.tolist(), runs.path_prob.tolist(), runs.decisions, runs.last.tolist(), strict=True
    ):
        start = tuple(tokens[row, 1:][decisions].tolist())
        for token, prob in enumerate(last):
            chance = float(accept_probs[row]) * path_prob * prob
            continue_text(distribution, target.__getitem__, (*start, token), chance, length)
    return distribution


def random_tables(vocabulary: int, depth: int, seed: int) -> tuple[Rows, Rows]:
    """Distributions after each path of up to `depth` tokens: the target's, and drafts that never run out."""
    generator = torch.Generator().manual_seed(seed)
    paths = [path for length in range(depth + 1) for path in itertools.product(range(vocabulary), repeat=length)]
    target = dyadic_rows(generator, len(paths), vocabulary).tolist()
    draft = dyadic_rows(generator, len(paths), vocabulary, least=1).tolist()
    return tuple(  # type: ignore[return-value]
        {path: [Fraction(x) for x in row] for path, row in zip(paths, table, strict=True)} for table in (target, draft)
    )


TREES = {
    "two levels": ([-1, 0, 0, 1, 1, 2], 3),
    "children in turns": ([-1, 0, 1, 0, 1, 3], 3),
    "three siblings": ([-1, 0, 0, 0], 4),
    "with padding": ([-1, 0, -1, 0, 1, -1], 3),
    "one child": ([-1, 0, 1], 5),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", TREES)
def test_distribution_is_the_targets(shape: str, kind: SiblingKind) -> None:
    """Every draft with its probability, every decision with its threshold: first tokens and all below."""
    parents, vocabulary = TREES[shape]
    length = max(len(path_to_root(parents, node)) for node in range(len(parents)))
    target, draft = random_tables(vocabulary, length - 1, seed=len(shape))
    expected: dict[Path, Fraction] = {}
    continue_text(expected, target.__getitem__, (), Fraction(1), length)
    exact = distribution_by_fractions(kind, kind, parents, target, draft, length)
    assert all(exact.get(path, 0) == path_prob for path, path_prob in expected.items())
    distribution = distribution_of_operation(kind, kind, parents, target, draft, length)
    assert distance(distribution, expected) < TOLERANCE


# How the siblings were drawn, the rule they are verified by, and the first token's bias in total variation.
MIXED = [
    (SiblingKind.without_replacement, SiblingKind.iid, 0.24),
    (SiblingKind.top_k, SiblingKind.iid, 0.65),
    (SiblingKind.top_k, SiblingKind.without_replacement, 0.44),
    # Draws that repeat are passed over, and the others are draws without replacement.
    (SiblingKind.iid, SiblingKind.without_replacement, 0),
    # The rule for fixed children draws from the target and looks whether the token is a child.
    (SiblingKind.iid, SiblingKind.top_k, 0),
    (SiblingKind.without_replacement, SiblingKind.top_k, 0),
]


@pytest.mark.parametrize(("drawn", "rule", "bias"), MIXED, ids=[f"{a.name} verified as {b.name}" for a, b, _ in MIXED])
def test_bias_of_each_other_rule(drawn: SiblingKind, rule: SiblingKind, bias: float) -> None:
    """Why drafts carry their kind: three of the six mistakes give another distribution than the target's."""
    parents = [-1, 0, 0, 0]
    paths = [(), *((x,) for x in range(4))]
    target = {path: [Fraction(x, 16) for x in (1, 4, 3, 8)] for path in paths}
    draft = {path: [Fraction(x, 16) for x in (9, 2, 4, 1)] for path in paths}
    distribution = distribution_of_operation(drawn, rule, parents, target, draft, 1)
    assert distance(distribution, distribution_by_fractions(drawn, rule, parents, target, draft, 1)) < TOLERANCE
    expected = {(x,): prob for x, prob in enumerate(target[()])}
    assert distance(distribution, expected) == pytest.approx(bias, abs=0.005 if bias else TOLERANCE)


@pytest.mark.parametrize("kind", [SiblingKind.iid, SiblingKind.without_replacement])
def test_chain_is_chain_rejection(kind: SiblingKind) -> None:
    """To the bit where rows are exactly normalised."""
    generator = torch.Generator().manual_seed(0)
    batch, drafts_, vocabulary = 400, 4, 6
    target = dyadic_rows(generator, batch * (drafts_ + 1), vocabulary).reshape(batch, drafts_ + 1, vocabulary)
    draft = dyadic_rows(generator, batch * (drafts_ + 1), vocabulary).reshape(batch, drafts_ + 1, vocabulary)
    tokens = torch.randint(-1, vocabulary + 1, (batch, drafts_ + 1), generator=generator)
    uniforms = torch.rand(batch, drafts_ + 1, dtype=torch.float64, generator=generator)
    parents = forest(("chain",), drafts_ + 1, 0).expand(batch, -1)
    root = torch.zeros(batch, 1, dtype=torch.float64)  # the root's uniform is not used
    tree = tree_rejection(tokens, parents, draft, target, torch.cat([root, uniforms], 1), kind)
    chain = chain_rejection(tokens[:, 1:], draft[:, :-1], target, uniforms)
    assert torch.equal(tree.accepted, chain.accepted) and torch.equal(tree.emitted, chain.emitted)
    assert len(chain.accepted.unique()) == drafts_ + 1


def test_many_rejections_lose_no_accuracy() -> None:
    """Rests are rounded to 2^-40 once per rejection, an error below V * 2^-40 in the distribution."""
    generator = torch.Generator().manual_seed(0)
    vocabulary, rejections = 50_000, 12
    p = (torch.randn(1, vocabulary, generator=generator, dtype=torch.float64) * 3).softmax(-1).float()
    q = (p * torch.rand(1, vocabulary, generator=generator).clamp(min=0.3)).double()
    q = (q / q.sum()).float()
    rest, offered = weights(p), weights(q)
    exact, exact_q, reached = rest.double() / rest.sum(), offered.double() / offered.sum(), 1.0
    for count in range(1, rejections + 1):
        rest = (shares(rest) - shares(offered)).clamp(min=0).long()
        exact = (exact - exact_q).clamp(min=0)
        reached *= float(exact.sum())
        exact = exact / exact.sum()
        error = (rest.double() / rest.sum() - exact).abs().sum() * reached
        assert error < count * vocabulary / SCALE


def verify(
    kind: SiblingKind,
    tokens: list[int],
    parents: list[int],
    draft: Sequence[Sequence[float]] | None,
    target: Sequence[Sequence[float]],
    uniforms: list[float],
) -> tuple[list[int], list[int]]:
    """Path and emitted tokens of one tree, without their padding. The root's uniform is left out."""
    result = tree_rejection(
        torch.tensor([tokens]),
        torch.tensor([parents], dtype=torch.int32),
        None if draft is None else torch.tensor([draft]),
        torch.tensor([target]),
        torch.tensor([[0.0, *uniforms]], dtype=torch.float64),
        kind,
    )
    count = int(result.accepted[0])
    assert (result.path[0, count + 1 :] == -1).all() and (result.emitted[0, count + 1 :] == -1).all()
    return result.path[0, : count + 1].tolist(), result.emitted[0, : count + 1].tolist()


HALVES = [0.5, 0.5, 0.0]
DRAWN = [SiblingKind.iid, SiblingKind.without_replacement]


def draft_for(kind: SiblingKind, rows: list[list[float]]) -> list[list[float]] | None:
    return None if kind == SiblingKind.top_k else rows


@pytest.mark.usefixtures("_backend")
@pytest.mark.parametrize("kind", KINDS)
def test_uniform_of_zero_accepts_no_token_of_probability_zero(kind: SiblingKind) -> None:
    """SGLang's `u <= p` does (issue 35771)."""
    for nothing in (0.0, math.nan, -1.0):
        target = [[nothing, 0.0, 1.0]] * 3
        got = verify(kind, [9, 0, 1], [-1, 0, 0], draft_for(kind, [HALVES] * 3), target, [0.0, 0.0, 0.0])
        assert got == ([0], [2])


@pytest.mark.usefixtures("_backend")
@pytest.mark.parametrize("kind", KINDS)
def test_token_out_of_range_is_passed_over(kind: SiblingKind) -> None:
    target = [[0.25, 0.25, 0.5]] * 4
    for bad in (-1, -(2**62), 3, 2**40):
        draft = draft_for(kind, [HALVES] * 4)
        for last, token in ((0.0, 0), (0.25, 1), (0.5, 2), (BELOW_ONE, 2)):  # nothing was subtracted
            got = verify(kind, [9, bad, bad, bad], [-1, 0, 0, 1], draft, target, [0.0, 0.0, 0.0, last])
            assert got == ([0], [token])
        got = verify(kind, [9, bad, 1, 0], [-1, 0, 0, 1], draft, target, [0.0, 0.0, 0.0, 0.6])
        assert got == ([0, 2], [1, 2])


@pytest.mark.usefixtures("_backend")
def test_repeated_sibling_is_another_draw_only_where_draws_are_independent() -> None:
    """q = (1/2, 1/2, 0) and p = (0, 1/4, 3/4): token 0 is rejected, twice."""
    tokens, parents, target = [9, 0, 0], [-1, 0, 0], [[0.0, 0.25, 0.75]] * 3
    for last in (0.0, 0.5, BELOW_ONE):
        # Once gives (0, 0, 3/4), whose rest after the other draw is (0, 0, 1).
        assert verify(SiblingKind.iid, tokens, parents, [HALVES] * 3, target, [0.0, 0.0, last]) == ([0], [2])
    # Without replacement the second can be no draw: the rest of one draw remains, here (0, 1/8, 3/8).
    draft, target = [[0.5, 0.125, 0.375]] * 3, [[0.0, 0.25, 0.75]] * 3
    for last, token in ((0.0, 1), (0.24, 1), (0.26, 2)):
        assert verify(SiblingKind.without_replacement, tokens, parents, draft, target, [0, 0, last]) == ([0], [token])
    # Of fixed children the second is not there either: (0, 1/4, 3/4) remains.
    for last, token in ((0.0, 1), (0.24, 1), (0.26, 2)):
        assert verify(SiblingKind.top_k, tokens, parents, None, target, [0, 0, last]) == ([0], [token])


@pytest.mark.usefixtures("_backend")
def test_repeated_sibling_is_not_accepted_with_what_is_left() -> None:
    """Token 0 is rejected by its uniform; its repetition must not get a second try at u = 0."""
    for kind in KINDS:
        draft = draft_for(kind, [[1.0, 0.0, 0.0]] * 3)
        assert verify(kind, [9, 0, 0], [-1, 0, 0], draft, [[0.5, 0.0, 0.5]] * 3, [0.75, 0.0, 0.0]) == ([0], [2])


@pytest.mark.usefixtures("_backend")
def test_child_beyond_an_exhausted_draft_is_passed_over() -> None:
    """Top-k of noisy scores pads with arbitrary tokens once the draft's support is used up."""
    tokens, parents, draft, target = [9, 0, 1], [-1, 0, 0], [[1.0, 0.0, 0.0]] * 3, [[0.5, 0.25, 0.25]] * 3
    for kind in DRAWN:
        for last, token in ((0.0, 1), (0.49, 1), (0.5, 2)):
            assert verify(kind, tokens, parents, draft, target, [0.75, 0.0, last]) == ([0], [token])


@pytest.mark.usefixtures("_backend")
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_left_gives_a_token_of_the_target(kind: SiblingKind) -> None:
    """A residual of 0 everywhere leaves a token unset elsewhere."""
    if kind == SiblingKind.top_k:
        # All that the target says is verified; the last child is accepted, whatever its uniform.
        target = [[0.25, 0.75, 0.0], *[[0.0, 0.0, 1.0]] * 2]
        got = verify(kind, [9, 0, 1], [-1, 0, 0], None, target, [BELOW_ONE, BELOW_ONE, 0.0])
        assert got == ([0, 2], [1, 2])
        return
    # Equal but for a factor: as computed, each share of the draft's is a last bit above the target's.
    target = [[6 / 32, 1 / 32, 2 / 32]] * 4
    draft = [[0.625 * x for x in row] for row in target]
    for last, token in ((0.0, 0), (0.66, 0), (0.67, 1), (0.78, 2)):
        got = verify(kind, [9, 0, 1, 2], [-1, 0, 0, 0], draft, target, [BELOW_ONE, BELOW_ONE, BELOW_ONE, last])
        assert got == ([0], [token])
    assert verify(kind, [9, 0], [-1, 0], [[0.0] * 3] * 2, target[:2], [0.0, 0.7]) == ([0], [1])


@pytest.mark.usefixtures("_backend")
@pytest.mark.parametrize("kind", KINDS)
def test_target_of_nothing_but_zeros_or_nan_emits_minus_one(kind: SiblingKind) -> None:
    """NaN logits give id = V elsewhere."""
    for nothing in (0.0, math.nan, -1.0):
        rows = [[nothing] * 3, [0.0, 1.0, 0.0]]
        assert verify(kind, [9, 1], [-1, 0], draft_for(kind, [HALVES] * 2), rows, [0.0, 0.0]) == ([0], [-1])
        got = verify(kind, [9, 1], [-1, 0], draft_for(kind, [HALVES] * 2), rows[::-1], [0.0, 0.0])
        assert got == ([0, 1], [1, -1])


@pytest.mark.usefixtures("_backend")
@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_never_accepted(kind: SiblingKind) -> None:
    """MEDUSA pads its tree with token 0; a target that is sure of 0 would accept the padding."""
    sure = [[1.0, 0.0]] * 4
    draft = draft_for(kind, sure)
    for parents in ([-1, -1, -1, -1], [-1, -1, 1, 2], [-1, 2, 3, 1], [-1, 1000, 2, -5]):
        assert verify(kind, [9, 0, 0, 0], parents, draft, sure, [0.0] * 4) == ([0], [0])
    assert verify(kind, [9, 0, 0, 0], [-1, -1, 0, 1], draft, sure, [0.0] * 4) == ([0, 2], [0, 0])


@pytest.mark.usefixtures("_backend")
@pytest.mark.parametrize("kind", KINDS)
def test_unnormalised_rows_count_as_normalised(kind: SiblingKind) -> None:
    """Sums a little off 1, as of half precision, do not move the distribution: rows are divided by them."""
    tokens, parents, target = [9, 0, 1], [-1, 0, 0], [[0.25, 0.5, 0.25]] * 3
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        uniforms = torch.rand(3, dtype=torch.float64, generator=generator).tolist()
        results = []
        for factor in (1.0, 0.5, 0.984375):
            draft = [[x / factor * 0.984375 for x in (0.5, 0.25, 0.25)]] * 3
            rows = [[x * factor for x in row] for row in target]
            results.append(verify(kind, tokens, parents, draft_for(kind, draft), rows, uniforms))
        assert results[0] == results[1] == results[2]


@pytest.mark.usefixtures("_backend")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocabulary", [1, 31, 33, 1025])
def test_root_alone(kind: SiblingKind, vocabulary: int) -> None:
    """The tail of the vocabulary: others return an id at or beyond V (vLLM PR 44744)."""
    row = [0.0] * vocabulary
    row[vocabulary // 2] = row[-1] = 0.3
    draft = draft_for(kind, [row])
    first, last = vocabulary // 2, vocabulary - 1
    for uniform, token in ((0.0, first), (BELOW_ONE, last), (1.0, last), (math.nan, first)):
        assert verify(kind, [3], [-1], draft, [row], [uniform]) == ([0], [token])


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(KINDS),
    st.sampled_from(SHAPES),
    st.integers(1, 20),
    st.integers(1, 12),
    st.integers(0, 10_000),
    st.booleans(),
)
def test_reference_emits_only_what_the_target_can_say(
    kind: SiblingKind, shape: str, nodes: int, vocabulary: int, seed: int, spoilt: bool
) -> None:
    case = random_case(forest((shape,), nodes, seed), vocabulary, kind, seed, spoilt)
    tokens, parents, _, target, _ = case
    path, accepted, emitted = tree_rejection(*case, kind)
    count = int(accepted[0])
    walked, output = path[0, : count + 1].tolist(), emitted[0, : count + 1].tolist()
    assert walked == path_to_root(parents[0].tolist(), walked[-1])
    assert output[:-1] == tokens[0, walked[1:]].tolist()
    assert (path[0, count + 1 :] == -1).all() and (emitted[0, count + 1 :] == -1).all()
    possible = weights(target[0, walked]) > 0
    for place, token in enumerate(output):
        assert possible[place, token] if token >= 0 else place == count and not possible[place].any()


def samples() -> list[tuple[Any, ...]]:
    return [(*random_case(forest(SHAPES, 9, 2), 7, SiblingKind.iid, 0, False), int(SiblingKind.iid))]


@pytest.mark.parametrize("kind", set(KINDS) - {SiblingKind.iid})
def test_registration_of_other_kinds(kind: SiblingKind) -> None:
    """All but the slow check, with torch.compile."""
    case = random_case(forest(SHAPES, 9, 2), 7, kind, 0, False)
    utilities = ["test_schema", "test_faketensor"]
    torch.library.opcheck(torch.ops.speckernels.tree_rejection.default, (*case, int(kind)), test_utils=utilities)


def refusals() -> Refusals:
    tokens, parents, draft, target, uniforms = random_case(forest(("chain",) * 2, 3, 0), 5, SiblingKind.iid, 0, False)
    assert draft is not None
    good = {"tokens": tokens, "parents": parents, "draft_probs": draft, "target_probs": target, "uniforms": uniforms}
    return good | {"kind": SiblingKind.iid}, [
        ("draft_probs must be None for siblings of kind top_k; give the kind", {"kind": SiblingKind.top_k}),
        ("draft_probs is needed for siblings of kind iid; give the kind", {"draft_probs": None}),
        ("7 is not a valid SiblingKind", {"kind": 7}),
        (r"tokens is int64 \[2, 2\]; give int64 \[2, 3\]", {"tokens": tokens[:, :2]}),
        (r"target_probs is float64 \[2, 3, 5\]; give float32 \[2, 3, any\]", {"target_probs": target.double()}),
        (r"draft_probs is float32 \[2, 3, 4\]; give float32 \[2, 3, 5\]", {"draft_probs": draft[..., :4]}),
        (r"uniforms is float64 \[2, 3\]; give float64 \[2, 4\]", {"uniforms": uniforms[:, 1:]}),
    ]
