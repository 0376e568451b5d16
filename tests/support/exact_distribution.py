"""The exact distribution of a verification's outcome, from the verification itself.

Each decision is a threshold in its own uniform: below it a draft token is accepted. Halving
finds the threshold, which is the probability; no sampling is involved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

BELOW_ONE = 1 - 2.0**-53
HALVINGS = 36  # thresholds to 2^-36, far below the tolerance of the tests


@dataclass(frozen=True)
class Outcomes:
    """What can happen: m outcomes of the given inputs.

    rows : int64 [m], which input; path_prob : float64 [m], given that input
    decisions : bool [m, J], last : float64 [m, V], the distribution of the last token
    """

    rows: torch.Tensor
    path_prob: torch.Tensor
    decisions: torch.Tensor
    last: torch.Tensor


Path = tuple[int, ...]
# Rows and uniforms [m, U] to decisions bool [m, J] and the last token [m]
Run = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def outcomes(run: Run, rows: int, columns: list[int], last_column: int, vocabulary: int) -> Outcomes:
    """All outcomes for each input and their probabilities.

    columns : the uniform that takes decision j, in the order of the decisions, each of which
        may depend on those before
    """
    row = torch.arange(rows)
    path_prob = torch.ones(rows, dtype=torch.float64)
    uniforms = torch.full((rows, max(*columns, last_column) + 1), 0.5, dtype=torch.float64)

    def accepts(decision: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def decide(u: torch.Tensor) -> torch.Tensor:
            uniforms[:, columns[decision]] = u
            return run(row, uniforms)[0][:, decision]

        return decide

    for decision, column in enumerate(columns):
        below = threshold(accepts(decision), len(row))
        yes, no = (below > 0).nonzero()[:, 0], (below < 1).nonzero()[:, 0]
        branches = torch.cat([yes, no])
        path_prob = torch.cat([path_prob[yes] * below[yes], path_prob[no] * (1 - below[no])])
        row, uniforms = row[branches], uniforms[branches]
        uniforms[: len(yes), column] = 0
        uniforms[len(yes) :, column] = BELOW_ONE

    def at_most(token: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def decide(u: torch.Tensor) -> torch.Tensor:
            uniforms[:, last_column] = u
            return run(row, uniforms)[1] <= token

        return decide

    cumulative = torch.stack([threshold(at_most(token), len(row)) for token in range(vocabulary)], 1)
    last = torch.diff(cumulative, dim=1, prepend=torch.zeros(len(row), 1, dtype=torch.float64))
    return Outcomes(row, path_prob, run(row, uniforms)[0], last)


def threshold(decide: Callable[[torch.Tensor], torch.Tensor], count: int) -> torch.Tensor:
    """The u in [0, 1] below which decide(u [count]) is true, for decisions that are monotone."""
    low = torch.zeros(count, dtype=torch.float64)
    high = torch.ones(count, dtype=torch.float64)
    always = decide(torch.full((count,), BELOW_ONE, dtype=torch.float64))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        yes = decide(middle)
        low, high = torch.where(yes, middle, low), torch.where(yes, high, middle)
    return torch.where(always, 1.0, low)


def path_to(node: int, tokens: Sequence[int], parents: Sequence[int]) -> Path:
    """Tokens from the top to this node, -1 the pending token."""
    return () if node < 0 else (*path_to(parents[node], tokens, parents), tokens[node])


def drafts(kind: str, parents: Sequence[int], q: Callable[[Path], list[Any]]) -> list[tuple[list[int], Any]]:
    """Every tree of tokens that can be drafted, with its probability; token 0 where a parent below -1 says padding."""
    trees: list[tuple[list[int], Any]] = [([], 1)]
    for node, parent in enumerate(parents):
        longer = []
        for tokens, chance in trees:
            if parent < -1:
                longer.append(([*tokens, 0], chance))
                continue
            left = q(path_to(parent, tokens, parents))
            for sibling in range(node):
                if kind != "iid" and parents[sibling] == parent:
                    left[tokens[sibling]] = 0 if kind == "without_replacement" else -1
            if kind == "top_k":
                longer.append(([*tokens, left.index(max(left))], chance))
            elif sum(left) == 0:  # all drawn: a token that verification skips
                longer.append(([*tokens, len(left) - 1], chance))
            else:
                longer += [([*tokens, x], chance * prob / sum(left)) for x, prob in enumerate(left) if prob]
        trees = longer
    return trees


def continue_text(
    distribution: dict[Path, Any], target: Callable[[Path], Sequence[Any]], path: Path, path_prob: Any, length: int
) -> None:
    """Add to the distribution of the first `length` tokens what the target alone says after this path."""
    if path_prob == 0:
        return
    if len(path) >= length:
        distribution[path[:length]] = distribution.get(path[:length], 0) + path_prob
    else:
        for token, prob in enumerate(target(path)):
            continue_text(distribution, target, (*path, token), path_prob * prob, length)


def distance(distribution: Mapping[Path, Any], other: Mapping[Path, Any]) -> float:
    """Total variation."""
    paths = {*distribution, *other}
    return sum(abs(float(distribution.get(path, 0)) - float(other.get(path, 0))) for path in paths) / 2


def dyadic_rows(
    generator: torch.Generator, rows: int, vocabulary: int, least: int = 0, parts: int = 64
) -> torch.Tensor:
    """Distributions of whole 1/64, each token at least `least` of them: sums and weights are exact."""
    parts = 64
    uneven = torch.rand(rows, vocabulary, generator=generator) ** 3
    drawn = torch.multinomial(uneven, parts - least * vocabulary, replacement=True, generator=generator)
    return (torch.nn.functional.one_hot(drawn, vocabulary).sum(1).float() + least) / parts
