"""Recorded traces of rejection sampling: probabilities as plain passes give them, and a real run's distribution."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import LlamaForCausalLM

import realrun.proposals.chain as rejection_recording
from realrun.decode.decoder import Decoder, Decoding
from realrun.decode.draft_model import DraftModel
from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import Sampler
from realrun.experiment.run import validate
from realrun.experiment.settings import ValidationSettings
from realrun.lm.cached import CachedLM
from realrun.measure.profile import profile
from realrun.measure.record import RecordSettings, record
from realrun.proposals.chain import drafted_with, rejection_columns
from realrun.proposals.recorder import Columns, RecordRequest
from specsim.cost.model import ConstantCost
from specsim.policy.registry import POLICIES as POLICY_KINDS
from specsim.policy.registry import make_policy
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.files import read_trace, write_trace
from specsim.trace.outcomes import as_recorded
from specsim.trace.trace import Trace
from tests.support.tiny import random_prompts, tiny_pair, tiny_prompts

CHOICE = Sampler("rejection", 0.8, seed=4, top_p=0.9)
DEPTH = 4


def columns_for(prompt: list[int], count: int, depth: int, sequence: int = 0, sampler: Sampler = CHOICE) -> Columns:
    pair = tiny_pair()
    decoder = Decoder(pair.target, DraftModel(pair.drafter.model, ()), (), sampler)
    output = decoder.decode(prompt, count, None, sequence=sequence).tokens
    request = RecordRequest(prompt, output, depth, sampler, sequence)
    return rejection_columns(CachedLM(pair.drafter.model), CachedLM(pair.target), request)


@torch.inference_mode()
def plain_probs(model: LlamaForCausalLM, tokens: list[int], sampler: Sampler) -> np.ndarray:
    """What is sampled from after these tokens: one pass without cache or mask, warped in numpy."""
    logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].double().numpy()
    probs = np.exp((logits - logits.max()) / sampler.temperature)
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    outside = order[np.cumsum(probs[order]) - probs[order] >= sampler.top_p]
    probs[outside] = 0
    return np.asarray(probs / probs.sum())


@pytest.mark.parametrize("sampler", [CHOICE, Sampler("rejection", 1.3, seed=1)], ids=str)
def test_features_and_acceptance_equal_plain_passes_over_every_branch(sampler: Sampler) -> None:
    pair, count = tiny_pair(), 9
    (prompt,) = random_prompts(1, seed=6)
    columns = columns_for(prompt, count, DEPTH, sampler=sampler)
    output = columns["token"].tolist()
    certain = 0
    for t, i in itertools.product(range(count), range(DEPTH)):
        branch = columns["draft_token"][t].tolist()
        context, token = [*prompt, *output[:t], *branch[:i]], branch[i]
        q = plain_probs(pair.drafter.model, context, sampler)
        p = plain_probs(pair.target, context, sampler)
        assert q[token] > 0
        expected = min(1.0, p[token] / q[token]) if t + i < count else 0.0
        certain += expected == 1.0
        assert columns["accept_prob"][t, i] == pytest.approx(expected, rel=1e-5)
        assert columns["prob"][t, i] == pytest.approx(q[token], rel=1e-5)
        assert columns["confidence"][t, i] == pytest.approx(q.max(), rel=1e-5)
        entropy = -(q[q > 0] * np.log(q[q > 0])).sum()
        assert columns["entropy_nats"][t, i] == pytest.approx(entropy, rel=1e-5, abs=1e-6)
        rank = (q > q[output[t + i]]).sum() if t + i < count and branch[:i] == output[t : t + i] else None
        if rank is not None and q[output[t + i]] > 0:
            assert columns["true_rank"][t, i] == rank
    assert 3 < certain < count * DEPTH  # both cases are there


def test_the_match_is_what_equals_the_output() -> None:
    (prompt,) = random_prompts(1, seed=2)
    columns = columns_for(prompt, 30, DEPTH)
    output = columns["token"].tolist()
    for t, row in enumerate(columns["draft_token"].tolist()):
        match = 0
        while match < DEPTH and t + match < 30 and row[match] == output[t + match]:
            match += 1
        assert columns["match_len"][t] == match
        # A token that the target would always reject was never accepted.
        assert (columns["accept_prob"][t, :match] > 0).all()
    assert 0 < columns["match_len"].mean() < DEPTH


def test_chunks_of_positions_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    (prompt,) = random_prompts(1, seed=3)
    whole = columns_for(prompt, 20, DEPTH)
    monkeypatch.setattr(rejection_recording, "CHUNK", 7)
    for name, values in columns_for(prompt, 20, DEPTH).items():
        np.testing.assert_allclose(values, whole[name], rtol=1e-6, atol=1e-9, err_msg=name)


def test_positions_and_sequences_draft_independently() -> None:
    (prompt,) = random_prompts(1, seed=3)
    drafts = [columns_for(prompt, 20, DEPTH, sequence)["draft_token"] for sequence in range(2)]
    assert (drafts[0][0] != drafts[1][0]).any()  # the same context, another sequence
    rows = torch.full((4000, 5), 0.2, dtype=torch.float64)
    wanted, following = torch.zeros(4000, dtype=torch.int64), torch.zeros(4000, dtype=torch.bool)
    first, second = (drafted_with(rows, rows, wanted, following, RoundContext(CHOICE, 0, 0), depth) for depth in (1, 2))
    for other in (second, first.roll(1)):  # another depth, the next position
        table = np.histogram2d(first.numpy(), other.numpy(), bins=5)[0]
        assert stats.chi2_contingency(table).pvalue > 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_drafts_drawn_with_the_output_follow_q_and_its_acceptance(seed: int) -> None:
    """Over outputs x ~ p: d is distributed as q and accepted with min(1, p/q), and d = x iff accepted."""
    n, vocabulary = 20_000, 5
    generator = torch.Generator().manual_seed(seed)
    q, p = (1.5 * torch.randn(2, vocabulary, generator=generator, dtype=torch.float64)).softmax(-1)
    wanted = torch.multinomial(p, n, replacement=True, generator=generator)
    yes = torch.ones(n, dtype=torch.bool)
    sampler = Sampler("rejection", 1.0, seed)
    drafted = drafted_with(q.expand(n, -1), p.expand(n, -1), wanted, yes, RoundContext(sampler, 0, 0), 1)
    accepted = drafted == wanted
    table = np.stack([np.bincount(drafted[part], minlength=vocabulary) for part in (accepted, ~accepted)]).ravel()
    distribution = torch.cat([torch.minimum(p, q), (q - p).clamp(min=0)]).numpy()
    assert not table[distribution == 0].any()
    assert stats.chisquare(table[distribution > 0], n * distribution[distribution > 0]).pvalue > 1e-3
    off_path = drafted_with(q.expand(n, -1), p.expand(n, -1), wanted, ~yes, RoundContext(sampler, 0, 0), 1)
    counts = np.bincount(off_path, minlength=vocabulary)
    assert stats.chisquare(counts, n * q.numpy()).pvalue > 1e-3


# --- Replay beside real runs ---------------------------------------------------------------------

POLICIES = [make_policy("fixed_k", {"k": 1}), make_policy("fixed_k", {"k": 5})]


@cache
def tiny_trace() -> Trace:
    return record(tiny_pair(), tiny_prompts(40, seed=1), RecordSettings(5, 32, Sampler("rejection", 0.8, seed=3)))


def test_a_recorded_trace_is_valid_and_says_what_it_is(tmp_path: Path) -> None:
    write_trace(tiny_trace(), tmp_path / "t")
    trace = read_trace(tmp_path / "t")
    assert trace.approximate and trace.accept_prob is not None
    assert trace.meta["decoding"] == {"mode": "rejection", "temperature": 0.8, "seed": 3}
    assert 0.4 < trace.meta["first_token_accepted_share"] < 0.9
    first = trace.accept_prob[:, 0]
    # The share of first tokens that were accepted, against what their probabilities say.
    sd = np.sqrt((first * (1 - first)).sum()) / len(first)
    assert abs((trace.match_len > 0).mean() - first.mean()) < 4 * sd


def test_replay_of_recorded_outcomes_follows_real_runs() -> None:
    """Rounds of every prompt: real runs with other seeds differ by sampling alone."""
    trace, prompts, sampler = as_recorded(tiny_trace()), tiny_prompts(40, seed=1), Sampler("rejection", 0.8)
    decoders = [Decoder(*tiny_pair().make_drafter(), (), replace(sampler, seed=seed)) for seed in (101, 102)]
    for policy in POLICIES:
        replayed = replay(trace, policy, cost_table(trace, ConstantCost(1e-3, 1e-2))).num_rounds
        real = [
            np.mean([len(decoder.decode(prompt.tokens, 32, policy, sequence=s).rounds) for decoder in decoders])
            for s, prompt in enumerate(prompts)
        ]
        difference = replayed - np.array(real)
        assert 0 < abs(difference.mean()) < 2 * difference.std(ddof=1) / np.sqrt(len(prompts))


def test_other_modes_record_no_probabilities() -> None:
    trace = record(tiny_pair(), tiny_prompts(1), RecordSettings(2, 6, Sampler("gumbel", 0.8)))
    assert trace.accept_prob is None and not trace.approximate


def test_an_end_of_text_ends_what_is_accepted() -> None:
    """Nothing is accepted beyond a recorded end; emitted tokens never exceed the output."""
    plain = columns_for(random_prompts(1, seed=9)[0], 20, 3)
    eos = int(plain["token"][8])
    pair, prompts = tiny_pair((eos,)), tiny_prompts(6, seed=9)
    trace = record(pair, prompts, RecordSettings(5, 30, CHOICE))
    assert trace.accept_prob is not None
    ended = trace.output_tokens < trace.budget_tokens
    assert ended.any()
    left = np.repeat(trace.offsets[1:], trace.output_tokens) - np.arange(len(trace.token))
    beyond = np.arange(5) >= left[:, None]
    assert (trace.accept_prob[beyond] == 0).all()
    result = replay(trace, POLICIES[1], cost_table(trace, ConstantCost(1e-3, 1e-2)))
    assert (result.accepted + result.num_rounds >= result.output_tokens).all()
    assert (result.accepted <= result.output_tokens).all()


def test_a_profile_does_the_rejection_verifiers_work() -> None:
    document = profile(tiny_pair(), contexts=[4, 9], depth=2, limit_s=0, sampler=CHOICE)
    assert document["decoding"] == CHOICE.as_dict()
    assert np.isfinite(document["median_s"]["verify"]).all()


def test_a_validation_in_rejection_mode_is_approximate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realrun.experiment.validate.POLICIES", {"fixed_k": POLICY_KINDS["fixed_k"]})
    prompts = tiny_prompts(6)
    settings = ValidationSettings(RecordSettings(3, 16, CHOICE), trials=2)
    seeds: list[int] = []

    def noted(decoder: Decoder, *args: Any) -> Decoding:
        seeds.append(decoder.sampler.seed)
        return Decoding(decoder, *args)

    monkeypatch.setattr("realrun.experiment.timing.Decoding", noted)
    document = validate(tiny_pair(), prompts, settings, tmp_path / "out")
    first = read_trace(tmp_path / "out" / "trace").meta["decoding"]["seed"]
    assert set(seeds) == {first, first + 1, first + 2}  # each repeat decodes a text of its own
    assert document["approximate"] is True
    for row in document["rows"]:
        assert row["rounds_identical_percent"] is None and row["output_identical_percent"] is None
        assert np.isfinite(row["error_percent"])
    page = (tmp_path / "out" / "report.html").read_text()
    assert "predictions are approximate" in page and "top-p 0.9" in page and "n.a." in page
