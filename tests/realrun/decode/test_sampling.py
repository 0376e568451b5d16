"""Choosing tokens: noise that belongs to its place alone, exact samples by it, top-p and top-k, draws, and siblings."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from realrun.decode.decoder import Decoder
from realrun.decode.draft_model import DraftModel
from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import Sampler, Stream, draw, gumbel_noise, nucleus
from realrun.decode.verify import verify_by_kernel, verify_chain
from realrun.experiment.validate import output_identical, rounds_identical
from realrun.lm.kernels import use_kernels
from realrun.measure.record import RecordSettings, record
from specsim.cost.model import ConstantCost
from specsim.policy.registry import make_policy
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from tests.support.checks import refusal
from tests.support.sampling_distribution import threshold, warped
from tests.support.tiny import random_prompts, tiny_pair, tiny_prompts

CPU = torch.device("cpu")
VOCAB = 97


def reference_gumbel(seed: int, sequence: int, position: int, token: int) -> float:
    """SplitMix64 in plain integers, chained over the key, as the module's docstring defines the noise."""
    mask, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x &= mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    key = 0
    for part in (seed, sequence, position):
        key = mix(key + part + golden)
    uniform = ((mix(key + token * golden) >> 12) + 0.5) / 2**52
    return -math.log(-math.log(uniform))


def test_noise_equals_a_plain_splitmix64() -> None:
    for seed, sequence, position in [(0, 0, 0), (3, 1, 63), (2**63 + 5, 7, 64), (2**32 - 1, 2**31, 1000)]:
        noise = gumbel_noise(seed, sequence, position, 1, VOCAB, CPU)[0].tolist()
        expected = [reference_gumbel(seed, sequence, position, token) for token in range(VOCAB)]
        assert noise == pytest.approx(expected, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(("start", "count"), [(0, 200), (63, 2), (64, 1), (60, 70), (127, 130)])
def test_noise_does_not_depend_on_how_it_is_asked_for(start: int, count: int) -> None:
    whole = gumbel_noise(5, 2, start, count, VOCAB, CPU)
    assert whole.shape == (count, VOCAB) and whole.dtype == torch.float64
    for position in reversed(range(start, start + count)):
        gumbel_noise(6, 1, position, 1, VOCAB, CPU)  # evicts cached blocks
        assert torch.equal(gumbel_noise(5, 2, position, 1, VOCAB, CPU)[0], whole[position - start])


def test_noise_is_distinct_over_seed_sequence_position_and_token() -> None:
    parts = [gumbel_noise(seed, sequence, 0, 100, VOCAB, CPU) for seed in range(4) for sequence in range(4)]
    values = torch.cat(parts).flatten()
    assert len(values.unique()) == len(values)


def test_noise_is_standard_gumbel() -> None:
    noise = gumbel_noise(11, 0, 0, 2000, VOCAB, CPU).numpy()
    assert np.isfinite(noise).all()
    n, sd = noise.size, math.pi / math.sqrt(6)
    assert abs(noise.mean() - np.euler_gamma) < 4 * sd / math.sqrt(n)
    # A standard Gumbel has kurtosis 5.4, so its variance estimate has variance sd^4 x 4.4 / n.
    assert abs(noise.var() - sd**2) < 4 * sd**2 * math.sqrt(4.4 / n)
    assert stats.kstest(noise.ravel()[::7], "gumbel_r").pvalue > 1e-3
    neighbours = np.corrcoef(noise[:-1].ravel(), noise[1:].ravel())[0, 1]
    assert abs(neighbours) < 4 / math.sqrt(n)


def p_value(chosen: np.ndarray, probs: np.ndarray) -> float:
    counts = np.bincount(chosen, minlength=len(probs))
    return stats.chisquare(counts[probs > 0], probs[probs > 0] * counts[probs > 0].sum()).pvalue


@pytest.mark.parametrize(("temperature", "top_p"), [(0.5, 1.0), (1.0, 1.0), (1.7, 1.0), (0.9, 0.8)])
def test_choices_follow_the_softmax_at_the_temperature_within_the_nucleus(temperature: float, top_p: float) -> None:
    logits = [2.0, 1.0, 0.5, 0.0, -1.0, -1.5]
    sampler = Sampler("gumbel", temperature, 3, top_p)
    rows = torch.tensor(logits, dtype=torch.float64).expand(3000, -1)
    chosen = np.concatenate([sampler.tokens(rows, sequence, 0).numpy() for sequence in range(10)])
    probs, others = (np.array(warped(logits, t, top_p)) for t in (temperature, 1.1 * temperature))
    assert not np.bincount(chosen, minlength=6)[probs == 0].any()
    assert p_value(chosen, probs) > 1e-3
    assert p_value(chosen, others) < 1e-6  # the test can fail


def test_greedy_is_the_argmax_and_ignores_temperature_and_seed() -> None:
    logits = torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(0))
    for sampler in (Sampler(), Sampler("greedy", 0.0, 7)):
        assert torch.equal(sampler.tokens(logits, 3, 5), logits.argmax(-1))
        confidence = sampler.statistics(logits, 3, 5)[:, 2]
        torch.testing.assert_close(confidence, logits.softmax(-1).amax(-1))


@pytest.mark.parametrize(
    "sampler",
    [
        Sampler(),
        Sampler("gumbel", 0.6, seed=2),
        Sampler("gumbel", 1.3, top_p=0.7),
        Sampler("rejection", 0.8, top_p=0.4),
    ],
    ids=str,
)
@pytest.mark.parametrize("vocabulary", [4, 10, 60])
def test_top10_confidence_is_the_largest_of_the_ten_largest_probabilities_over_their_sum(
    sampler: Sampler, vocabulary: int
) -> None:
    logits = 2 * torch.randn(50, vocabulary, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    ranked = sampler.probs(logits).sort(dim=-1, descending=True).values[:, :10]
    confidence = sampler.top10_confidence(logits)
    torch.testing.assert_close(confidence, ranked[:, 0] / ranked.sum(-1), rtol=1e-12, atol=0)
    if vocabulary > 10 and sampler.top_p == 1:
        assert (confidence > ranked[:, 0]).all()
    one_by_one = torch.cat([sampler.top10_confidence(row[None]) for row in logits])
    assert torch.equal(confidence, one_by_one)


def test_half_precision_logits_are_compared_in_float32() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0]])
    sampler = Sampler("gumbel", 0.7)
    assert torch.equal(sampler.statistics(logits.bfloat16(), 0, 0), sampler.statistics(logits, 0, 0))


# --- Rejection sampling, top-p and top-k ---


def test_a_draw_has_the_distribution_of_its_weights() -> None:
    """By its thresholds; weights need not sum to 1, and a token of weight 0 is never drawn."""
    for weights in ([0.2, 0.0, 0.5, 0.3], [0.0, 3.0, 1.0], [0.0, 0.0, 0.25], [1.0]):
        row = torch.tensor([weights], dtype=torch.float64)
        cuts = [threshold(lambda u, x=x, row=row: int(draw(row, [u])) <= x) for x in range(len(weights))]
        np.testing.assert_allclose(np.diff(cuts, prepend=0.0), np.array(weights) / sum(weights), atol=1e-7)
        assert all(weights[int(draw(row, [u]))] > 0 for u in (2.0**-53, 0.5, 1 - 2.0**-53))


@torch.inference_mode()
def test_drafts_carry_their_distributions_in_rejection_mode_only() -> None:
    drafter = DraftModel(tiny_pair().drafter.model, ())
    (prompt,) = random_prompts(1)
    for sampler in (Sampler("rejection", 0.7, top_p=0.9), Sampler("gumbel", 0.7), Sampler()):
        drafter.prepare(len(prompt) + 5, sampler, 0, 6)
        drafter.begin(prompt[:-1])
        draft = drafter.propose(prompt, RoundContext(sampler, 0, 0, 4), lambda step, depth: True)
        if sampler.mode != "rejection":
            assert draft.probs == []
            continue
        assert len(draft.probs) == len(draft.tokens) == 4
        for token, probs, step in zip(draft.tokens, draft.probs, draft.steps, strict=True):
            assert probs.sum().item() == pytest.approx(1, abs=1e-12)
            entropy = -(probs[probs > 0] * probs[probs > 0].log()).sum().item()
            assert step[:3] == pytest.approx((probs[token].item(), probs.max().item(), entropy), rel=1e-6)


def test_every_draw_has_a_uniform_of_its_own() -> None:
    streams: tuple[Stream, ...] = ("draft", "judge", "last", "couple")
    values = [
        Sampler("rejection", 1.0, seed).uniform(stream, sequence, t, depth)
        for seed, stream, sequence, t, depth in itertools.product((0, 1), streams, (0, 1), range(6), range(5))
    ]
    assert len(set(values)) == len(values) and all(0 < u < 1 for u in values)


def random_chain(vocabulary: int, drafts: int, seed: int) -> tuple[list[int], list[torch.Tensor], torch.Tensor, list]:
    generator = torch.Generator().manual_seed(seed)
    target = (2 * torch.randn(drafts + 1, vocabulary, generator=generator)).softmax(-1)
    drafter = ((2 * torch.randn(drafts, vocabulary, generator=generator)).softmax(-1) + 2 * target[:drafts]) / 3
    tokens = torch.multinomial(drafter, 1, generator=generator)[:, 0].tolist() if drafts else []
    return tokens, list(drafter), target, torch.rand(drafts + 1, generator=generator, dtype=torch.float64).tolist()


@pytest.mark.parametrize(("kernels", "cases"), [("reference", 200), ("triton", 6)])
def test_the_lean_verifier_is_the_kernels(kernels: str, cases: int) -> None:
    lengths = set()
    with use_kernels(kernels):
        for seed in range(cases):
            chain = random_chain(50, seed % 6, seed)
            emitted = verify_chain(*chain)
            assert verify_by_kernel(*chain) == emitted
            lengths.add(len(emitted))
    assert len(lengths) > 2


def test_named_kernels_decode_the_same_tokens() -> None:
    pair, policy = tiny_pair(), make_policy("fixed_k", {"k": 3})
    sampler = Sampler("rejection", 0.8, seed=2, top_p=0.95)
    (prompt,) = random_prompts(1)

    def decoded() -> tuple[list[int], list[tuple[int, int, int]]]:
        run = Decoder(pair.target, DraftModel(pair.drafter.model, ()), (), sampler).decode(prompt, 20, policy)
        return run.tokens, run.log()

    fused = decoded()
    with use_kernels("reference"):
        assert decoded() == fused


def test_the_nucleus_is_the_fewest_most_probable_tokens_that_reach_the_mass() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (50, 9))
    for top_p in (1e-6, 0.3, 0.9, 0.999):
        inside = nucleus(torch.tensor(logits).softmax(-1), top_p).numpy()
        expected = [[prob > 0 for prob in warped(row, 1.0, top_p)] for row in logits]
        np.testing.assert_array_equal(inside, expected)
    assert nucleus(torch.full((1, 4), 0.25), 0.5).tolist() == [[True, True, False, False]]  # lowest first
    assert nucleus(torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64), 0.8).tolist() == [[True, True, False]]


@pytest.mark.parametrize(("top_k", "top_p"), [(10, 0.95), (3, 1.0), (0, 0.7), (1, 0.5), (400, 0.9)])
def test_temperature_top_k_and_top_p_warp_as_hugging_face_does(top_k: int, top_p: float) -> None:
    """SPACE samples with p = 0.95 and k = 10 (table 5); the library's own warpers, in its order."""
    logits = 3 * torch.randn(20, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    warpers = [TemperatureLogitsWarper(0.8)]
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    expected = logits
    for warper in warpers:
        expected = warper(torch.zeros(20, 0, dtype=torch.long), expected)
    for mode in ("gumbel", "rejection"):
        sampler = Sampler(mode, 0.8, 0, top_p, top_k)  # type: ignore[arg-type]
        torch.testing.assert_close(sampler.probs(logits), expected.softmax(-1), rtol=0, atol=1e-12)
        assert Sampler(**sampler.as_dict()) == sampler
    greedy = Sampler("greedy", 0.8, 0, top_p, top_k)
    assert torch.equal(greedy.probs(logits), logits.softmax(-1))  # greedy ignores both, as the temperature


def test_of_equal_logits_top_k_keeps_those_of_lowest_index() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    assert (Sampler("gumbel", top_k=2).probs(logits) > 0).tolist() == [[False, True, True, False, False]]


@pytest.mark.parametrize("mode", ["gumbel", "rejection"])
def test_features_are_those_of_the_warped_distribution(mode: str) -> None:
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 2
    sampler = Sampler(mode, 0.7, 4, 0.8)  # type: ignore[arg-type]
    expected = np.array(warped(logits[0].tolist(), 0.7, 0.8))
    np.testing.assert_allclose(sampler.probs(logits)[0], expected, atol=1e-12)
    positive = expected[expected > 0]
    assert 1 < len(positive) < 12
    for position in range(40):
        ((token, prob, confidence, entropy_nats),) = sampler.draft(logits, 0, position, 1)[0].tolist()
        assert prob == pytest.approx(expected[int(token)]) and prob > 0
        assert confidence == pytest.approx(expected.max())
        assert entropy_nats == pytest.approx(-(positive * np.log(positive)).sum())
    for backend in ("reference",) if mode == "gumbel" else ():
        fused = sampler.statistics(logits, 0, 3)
        with use_kernels(backend):
            torch.testing.assert_close(sampler.statistics(logits, 0, 3), fused)
            assert torch.equal(sampler.tokens(logits, 0, 3), fused[:, 0].long())


@pytest.mark.parametrize("sampler", [Sampler("gumbel", 0.9, 4, 0.85), Sampler("gumbel", 0.8, 4, 0.95, 10)], ids=str)
def test_gumbel_replay_stays_exact_with_top_p_and_top_k(sampler: Sampler) -> None:
    pair, prompts = tiny_pair(), tiny_prompts(4)
    trace = record(pair, prompts, RecordSettings(5, 24, sampler))
    assert Sampler(**trace.meta["decoding"]) == sampler
    policy = make_policy("max_confidence", {"lambda0": 0.4, "max_draft_tokens": 5})
    replayed = replay(trace, policy, cost_table(trace, ConstantCost(1e-3, 5e-3)), seed=3, log=True)
    decoder = Decoder(pair.target, DraftModel(pair.drafter.model, ()), (), sampler)
    runs = [decoder.decode(p.tokens, 24, policy, sequence=n, seed=3) for n, p in enumerate(prompts)]
    assert rounds_identical(replayed, runs) == output_identical(trace, runs) == 1.0


def test_decoding_settings_of_old_traces_are_read() -> None:
    old = {"mode": "gumbel", "temperature": 0.8, "seed": 1}
    assert Sampler(**old) == Sampler("gumbel", 0.8, 1, 1.0)  # type: ignore[arg-type]
    assert Sampler(**old).as_dict() == old  # type: ignore[arg-type]
    for sampler in (Sampler(), Sampler("rejection", 0.7, 3, 0.9), Sampler("gumbel", 0.7, 3, 0.5)):
        assert Sampler(**sampler.as_dict()) == sampler
    assert Sampler(**old, top_p=1.0) == Sampler(**old)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (("beam", 1.0), "mode"),
        *((("gumbel", temperature), "temperature") for temperature in (0.0, -1.0, 100.0, math.nan)),
        (("rejection", 0.0), "temperature"),
        *((("rejection", 1.0, 0, top_p), "top_p") for top_p in (0.0, -0.5, 1.01, math.nan)),
        (("rejection", 1.0, 0, 1.0, -1), "top_k=-1 is below 0; 0 keeps every token"),
    ],
)
def test_a_bad_setting_is_refused(given: tuple[Any, ...], says: str) -> None:
    refusal(lambda: Sampler(*given), says)


# --- Siblings: their order and probabilities by shared noise ---


FEW, WIDTH = 61, 5
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
    logits = random_logits(len(LEVEL), FEW, dtype)
    with use_kernels(kernels):
        tokens, probs = sampler.candidates(logits, 3, LEVEL, WIDTH)
    assert tokens.shape == probs.shape == (len(LEVEL), WIDTH)
    assert tokens.dtype == torch.int64 and probs.dtype == dtype
    for row, position in enumerate(LEVEL):
        q = np.array(warped(logits[row].tolist(), sampler.temperature, sampler.top_p))
        noise = gumbel_noise(sampler.seed, 3, position, 1, FEW, logits.device)[0].numpy()
        if sampler.mode == "greedy":
            q, noise = np.array(warped(logits[row].tolist(), 1.0, 1.0)), np.zeros(FEW)
        weights = q * np.exp(noise)
        order = sorted(range(FEW), key=lambda token: (-weights[token], token))
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
    logits = random_logits(len(LEVEL), FEW, torch.float32, seed=2).round()  # equal logits
    tokens, probs = sampler.candidates(logits, 0, LEVEL, FEW)
    torch.testing.assert_close(probs.sum(-1), torch.ones(len(LEVEL)))
    for width in (1, 2, 7, FEW + 9):
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
    logits = random_logits(len(LEVEL), FEW, torch.float32, seed=3)
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


def test_top_k_takes_the_most_probable() -> None:
    sampler, logits = Sampler("rejection", 0.6, top_p=0.9), random_logits(3, FEW, torch.float64, seed=6)
    tokens, probs = sampler.candidates(logits, 0, [0, 0, 0], 4)
    for row in range(3):
        q = warped(logits[row].tolist(), 0.6, 0.9)
        order = sorted(range(FEW), key=lambda token: (-q[token], token))
        assert tokens[row].tolist() == order[:4]
        assert probs[row].tolist() == pytest.approx([q[token] for token in order[:4]])
    few, probs = sampler.candidates(logits[:, :3], 0, [0, 0, 0], 7)
    assert few.shape == (3, 3) and math.isclose(float(probs[0].sum()), 1.0)
