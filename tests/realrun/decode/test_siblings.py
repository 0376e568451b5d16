"""Siblings: their order and probabilities by shared noise, and their draws in rejection mode."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from scipy import stats

from realrun.decode.draft import Siblings
from realrun.decode.draft_model import draw_siblings
from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import Sampler, Stream, gumbel_noise
from realrun.lm.kernels import use_kernels
from tests.support.sampling_distribution import FedChoice, threshold, warped

VOCAB, WIDTH = 61, 5
CHOICES = [
    Sampler(),
    Sampler("gumbel", 0.7, seed=4),
    Sampler("gumbel", 1.0, seed=5, top_p=0.85),
    Sampler("gumbel", 1.3, seed=6, top_p=0.3),
]
LEVEL = [7, 7, 7, 8, 8, 10, 9, 7]  # positions in runs and out of order


def random_logits(rows: int, vocabulary: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2.5 * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)).to(dtype)


@pytest.mark.parametrize("sampler", CHOICES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_siblings_are_in_order_of_log_q_plus_noise_and_their_prob_is_its_softmax(
    sampler: Sampler, dtype: torch.dtype, kernels: str
) -> None:
    logits = random_logits(len(LEVEL), VOCAB, dtype)
    with use_kernels(kernels):
        tokens, probs = sampler.candidates(logits, 3, LEVEL, WIDTH)
    assert tokens.shape == probs.shape == (len(LEVEL), WIDTH)
    assert tokens.dtype == torch.int64 and probs.dtype == dtype
    for row, position in enumerate(LEVEL):
        q = np.array(warped(logits[row].tolist(), sampler.temperature, sampler.top_p))
        noise = gumbel_noise(sampler.seed, 3, position, 1, VOCAB, logits.device)[0].numpy()
        if sampler.mode == "greedy":
            q, noise = np.array(warped(logits[row].tolist(), 1.0, 1.0)), np.zeros(VOCAB)
        weights = q * np.exp(noise)
        order = sorted(range(VOCAB), key=lambda token: (-weights[token], token))
        assert tokens[row].tolist() == order[:WIDTH]
        tolerance = 1e-12 if dtype == torch.float64 else 1e-6
        np.testing.assert_allclose(probs[row], (weights / weights.sum())[order[:WIDTH]], rtol=0, atol=tolerance)


@pytest.mark.parametrize("sampler", CHOICES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_the_first_sibling_is_what_a_chain_drafts(sampler: Sampler, dtype: torch.dtype, kernels: str) -> None:
    """In bfloat16 many logits are equal."""
    logits = random_logits(120, 400, dtype, seed=1)
    with use_kernels(kernels):
        tokens, _ = sampler.candidates(logits, 2, range(50, 170), 3)
        assert torch.equal(tokens[:, 0], sampler.statistics(logits, 2, 50)[:, 0].long())
        assert torch.equal(tokens[:, 0], sampler.tokens(logits, 2, 50))


@pytest.mark.parametrize("sampler", CHOICES, ids=str)
def test_siblings_do_not_depend_on_how_many_are_asked_for_nor_with_which_rows(sampler: Sampler) -> None:
    logits = random_logits(len(LEVEL), VOCAB, torch.float32, seed=2).round()  # equal logits
    tokens, probs = sampler.candidates(logits, 0, LEVEL, VOCAB)
    torch.testing.assert_close(probs.sum(-1), torch.ones(len(LEVEL)))
    for width in (1, 2, 7, VOCAB + 9):
        some = sampler.candidates(logits, 0, LEVEL, width)
        assert torch.equal(some[0], tokens[:, :width]) and torch.equal(some[1], probs[:, :width])
    for row, position in enumerate(LEVEL):
        alone = sampler.candidates(logits[row : row + 1], 0, [position], 7)
        assert torch.equal(alone[0][0], tokens[row, :7]) and torch.equal(alone[1][0], probs[row, :7])


@pytest.mark.parametrize("width", [3, 32, 33, 40])
def test_of_equals_the_lowest_index_comes_first(width: int) -> None:
    """Of which the kernels' top-k, 32 at most, and the plain one give the same."""
    logits = torch.zeros(2, 50)
    logits[0, [9, 30, 41]] = 1.0
    logits[1, :] = -torch.inf
    logits[1, [44, 6]] = torch.tensor([2.0, -3.0])
    first = [[9, 30, 41, *(x for x in range(50) if x not in (9, 30, 41))], [44, 6, *(set(range(50)) - {44, 6})]]
    for kernels in ("auto", "reference"):
        with use_kernels(kernels):
            tokens, probs = Sampler().candidates(logits, 0, [0, 0], width)
        assert tokens.tolist() == [row[:width] for row in first]
        assert probs[1, 2:].tolist() == [0.0] * (width - 2)


@pytest.mark.parametrize("sampler", CHOICES, ids=str)
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_the_targets_choice_at_any_positions_is_that_at_each(sampler: Sampler, kernels: str) -> None:
    logits = random_logits(len(LEVEL), VOCAB, torch.float32, seed=3)
    with use_kernels(kernels):
        one_by_one = [sampler.tokens(logits[row : row + 1], 1, at).item() for row, at in enumerate(LEVEL)]
        assert sampler.tokens_at(logits, 1, LEVEL).tolist() == one_by_one
        assert sampler.tokens_at(logits, 1, range(len(LEVEL))).tolist() == sampler.tokens(logits, 1, 0).tolist()


def test_siblings_by_noise_are_draws_without_replacement() -> None:
    logits = torch.tensor([[1.0, 0.4, 0.0, -0.7]], dtype=torch.float64)
    sampler, samples = Sampler("gumbel", 0.8, seed=1), 6000
    q = warped(logits[0].tolist(), 0.8, 1.0)
    tokens, _ = sampler.candidates(logits.expand(samples, -1), 0, range(samples), 2)
    pairs = list(itertools.permutations(range(4), 2))
    counts = [int(((tokens[:, 0] == a) & (tokens[:, 1] == b)).sum()) for a, b in pairs]
    assert sum(counts) == samples
    expected = np.array([q[a] * q[b] / (1 - q[a]) for a, b in pairs])
    assert stats.chisquare(counts, expected * samples).pvalue > 1e-3
    assert stats.chisquare(counts, np.full(12, samples / 12)).pvalue < 1e-6  # the test can fail


def test_the_prob_given_the_noise_tells_more_of_the_targets_choice_than_q() -> None:
    """Target and drafter differ a little and share the noise: the log-loss of "the first sibling is the target's"."""
    target = random_logits(4000, 30, torch.float64, seed=4)
    drafter = target + 0.7 * random_logits(4000, 30, torch.float64, seed=5) / 2.5
    sampler = Sampler("gumbel", 1.0, seed=2)
    tokens, probs = sampler.candidates(drafter, 0, range(4000), 1)
    hit = (tokens[:, 0] == sampler.tokens(target, 0, 0)).double()
    assert 0.3 < float(hit.mean()) < 0.95
    q = drafter.softmax(-1).gather(-1, tokens)

    def log_loss(probs: torch.Tensor) -> float:
        return float(torch.nn.functional.binary_cross_entropy(probs[:, 0].clamp(max=1 - 1e-9), hit))

    assert log_loss(probs) < 0.9 * log_loss(q)


# --- Drawn siblings ---------------------------------------------------------------------------


@dataclass(frozen=True)
class SpyingChoice(Sampler):
    """Notes which uniforms are asked for."""

    asked: list[tuple[Stream, int, int, int]] = field(default_factory=list)

    def uniform(self, stream: Stream, sequence: int, position: int, depth: int) -> float:
        self.asked.append((stream, sequence, position, depth))
        return super().uniform(stream, sequence, position, depth)


@pytest.mark.parametrize("kind", ["iid", "without_replacement"])
def test_each_child_has_the_uniform_of_its_number(kind: Siblings) -> None:
    sampler, logits = SpyingChoice("rejection", 0.9, seed=3), random_logits(4, VOCAB, torch.float64)
    widths = [2, 0, 3, 1]
    drawn = draw_siblings(logits, kind, widths, RoundContext(sampler, 6, 40), 11)
    assert sorted(sampler.asked) == [("draft", 6, 40, node) for node in range(11, 17)]
    assert drawn.tokens.shape == drawn.probs.shape == (4, 3)
    assert drawn.rows is not None and torch.equal(drawn.rows, sampler.probs(logits))
    first = 11
    for row, width in enumerate(widths):
        assert drawn.tokens[row, width:].tolist() == [-1] * (3 - width)
        assert drawn.probs[row, width:].tolist() == [0.0] * (3 - width)
        if width:
            alone = draw_siblings(logits[row : row + 1], kind, [width], RoundContext(sampler, 6, 40), first)
            assert torch.equal(alone.tokens[0], drawn.tokens[row, :width])
            assert torch.equal(drawn.probs[row, :width], drawn.rows[row, alone.tokens[0]])
        first += width


def test_one_child_each_is_what_a_chain_draws() -> None:
    sampler, logits = Sampler("rejection", 1.1, seed=8, top_p=0.9), random_logits(30, VOCAB, torch.float32)
    for kind, (depth, row) in itertools.product(("iid", "without_replacement"), enumerate(logits, 1)):
        (described,), probs = sampler.draft(row[None], 1, 20, depth)
        drawn = draw_siblings(row[None], kind, [1], RoundContext(sampler, 1, 20), depth)  # type: ignore[arg-type]
        assert drawn.tokens.item() == described[0] and drawn.probs.item() == described[1]
        assert probs is not None and drawn.rows is not None and torch.equal(drawn.rows, probs)


@pytest.mark.parametrize("kind", ["iid", "without_replacement"])
def test_draws_have_the_distribution_of_their_kind(kind: Siblings) -> None:
    """By the thresholds of each child's uniform, given those before."""
    logits = torch.tensor([[0.5, -0.3, 1.1, 0.0]], dtype=torch.float64)
    sampler = FedChoice("rejection", 0.8)
    q = warped(logits[0].tolist(), 0.8, 1.0)

    def tokens() -> list[int]:
        return draw_siblings(logits, kind, [3], RoundContext(sampler, 0, 0), 1).tokens[0].tolist()

    def check(before: tuple[int, ...]) -> None:
        node = len(before) + 1
        left = [0.0 if kind != "iid" and token in before else prob for token, prob in enumerate(q)]

        def at_most(u: float, token: int) -> bool:
            sampler.fed["draft", node] = u
            return tokens()[node - 1] <= token

        cuts = [threshold(lambda u, token=token: at_most(u, token)) for token in range(4)]
        np.testing.assert_allclose(np.diff(cuts, prepend=0.0), np.array(left) / sum(left), atol=1e-7)
        for token in range(4) if node < 3 else ():
            if left[token]:
                sampler.fed["draft", node] = (cuts[token] + (cuts[token - 1] if token else 0.0)) / 2
                check((*before, token))

    sampler.fed.update({("draft", node): 0.5 for node in (1, 2, 3)})
    check(())


def test_where_nothing_is_left_to_draw_the_token_is_no_draw() -> None:
    """It has probability 0 or repeats a sibling, so verification passes over it."""
    logits = torch.tensor([[0.0, 3.0, -1.0], [0.0, 0.1, 9.0]], dtype=torch.float64)
    sampler = Sampler("rejection", 1.0, top_p=0.5)  # one token each
    drawn = draw_siblings(logits, "without_replacement", [3, 3], RoundContext(sampler, 0, 0), 1)
    assert drawn.tokens[:, 0].tolist() == [1, 2]
    for row in range(2):
        for token, prob in zip(drawn.tokens[row, 1:].tolist(), drawn.probs[row, 1:].tolist(), strict=True):
            assert 0 <= token < 3 and (prob == 0 or token == drawn.tokens[row, 0])


def test_top_k_takes_the_most_probable() -> None:
    sampler, logits = SpyingChoice("rejection", 0.6, top_p=0.9), random_logits(3, VOCAB, torch.float64, seed=6)
    tokens, probs = sampler.candidates(logits, 0, [0, 0, 0], 4)
    assert sampler.asked == []
    for row in range(3):
        q = warped(logits[row].tolist(), 0.6, 0.9)
        order = sorted(range(VOCAB), key=lambda token: (-q[token], token))
        assert tokens[row].tolist() == order[:4]
        assert probs[row].tolist() == pytest.approx([q[token] for token in order[:4]])
    few, probs = sampler.candidates(logits[:, :3], 0, [0, 0, 0], 7)
    assert few.shape == (3, 3) and math.isclose(float(probs[0].sum()), 1.0)
