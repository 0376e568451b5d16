"""How rejection sampling and top-p choose tokens: distributions, uniforms, kernels, settings."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from realrun.decode.decoder import Decoder
from realrun.decode.draft_model import DraftModel
from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import Sampler, Stream, draw, nucleus
from realrun.decode.verify import verify_by_kernel, verify_chain
from realrun.experiment.validate import output_identical, rounds_identical
from realrun.lm.kernels import use_kernels
from realrun.measure.record import RecordSettings, record
from specsim.cost.model import ConstantCost
from specsim.io.errors import InputError
from specsim.policy.registry import make_policy
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from tests.support.sampling_distribution import threshold, warped
from tests.support.tiny import random_prompts, tiny_pair, tiny_prompts


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


def test_gumbel_choices_within_the_nucleus_follow_its_distribution() -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -1.5], dtype=torch.float64)
    sampler = Sampler("gumbel", 0.9, 3, 0.8)
    probs = np.array(warped(logits.tolist(), 0.9, 0.8))
    chosen = np.concatenate([sampler.tokens(logits.expand(1000, -1), n, 0).numpy() for n in range(10)])
    counts = np.bincount(chosen, minlength=6)
    assert not counts[probs == 0].any()
    assert stats.chisquare(counts[probs > 0], probs[probs > 0] * len(chosen)).pvalue > 1e-3


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


@pytest.mark.parametrize("top_p", [0.0, -0.5, 1.01, float("nan")])
def test_a_bad_top_p_is_refused(top_p: float) -> None:
    with pytest.raises(InputError, match="top_p"):
        Sampler("rejection", 1.0, 0, top_p)


def test_a_negative_top_k_is_refused() -> None:
    with pytest.raises(InputError, match=r"top_k=-1 is below 0; 0 keeps every token"):
        Sampler("rejection", top_k=-1)


def test_rejection_needs_a_temperature() -> None:
    with pytest.raises(InputError, match="temperature"):
        Sampler("rejection", 0.0)
