"""Replay equals the real run, and the real run equals the target alone: on the lab, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from realrun.decode.decoder import Decoder
from realrun.decode.draft_model import DraftModel
from realrun.decode.sampling import Sampler
from realrun.experiment.validate import output_identical, rounds_identical
from realrun.measure.record import RecordSettings, elapsed_ratio, record
from realrun.pairs.library_text import library_files
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt, lab_prompts
from specsim.cost.model import ConstantCost
from specsim.learn.fit import fit
from specsim.policy.registry import CHAIN_POLICIES, make_policy
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace

SIZES = [  # (prompts, output tokens)
    pytest.param((4, 40), id="4x40"),
    pytest.param((21, 128), id="21x128", marks=pytest.mark.slow),
]
CHOICES = {"greedy": Sampler("greedy"), "gumbel": Sampler("gumbel", 0.8, seed=11)}
SETTINGS = [
    ("fixed_k", {"k": 4}),
    ("max_confidence", {"lambda0": 0.4, "dynamic": True}),
    ("max_confidence", {"lambda0": 0.3, "dynamic": False}),
    ("adaedl", {"lambda0": 0.1, "dynamic": True}),
    ("adaedl", {"lambda0": -0.2, "dynamic": False}),
    ("time_gain", {"cost_ratio": 0.2}),
    ("hugging_face", {"max_draft_tokens": 16}),
    ("hugging_face", {"schedule": "heuristic", "num_assistant_tokens": 5, "assistant_confidence_threshold": 0.0}),
    ("hugging_face", {"schedule": "heuristic_transient", "num_assistant_tokens": 5}),
    ("llama_cpp", {"p_min": 0.5, "max_draft_tokens": 16}),
    ("p_min", {}),
    ("space_k", {"k": 5}),
    ("beta_ts", {"alpha0": 1.0, "beta0": 1.0}),
    ("beta_ts", {"alpha0": 1140.0, "beta0": 360.0}),
    ("beta_ts", {"alpha0": 1.0, "beta0": 1.0, "counting": "printed", "theta": "per_round", "carry": True}),
    ("cali_ts", {}),
    ("cali_ts", {"counting": "printed", "theta": "per_round", "carry": True}),
    ("cali_ts_confidence", {}),
    ("renewal_stop", {}),
]


@dataclass(frozen=True)
class Recorded:
    """A trace of the lab and what it was recorded from."""

    sampler: Sampler
    trace: Trace
    prompts: list[Prompt]
    new_tokens: int


@pytest.fixture(scope="module", params=SIZES)
def size(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


@pytest.fixture(scope="module", params=["gumbel", pytest.param("greedy", marks=pytest.mark.slow)])
def recorded(request: pytest.FixtureRequest, size: tuple[int, int], lab_pair64: Pair) -> Recorded:
    sampler, (count, new_tokens) = CHOICES[request.param], size
    prompts = lab_prompts(lab_pair64.tokenizer, count)
    return Recorded(sampler, record(lab_pair64, prompts, RecordSettings(16, new_tokens, sampler)), prompts, new_tokens)


def test_every_policy_is_tested_here() -> None:
    assert {name for name, _ in SETTINGS} == set(CHAIN_POLICIES)


@pytest.mark.parametrize("spec", SETTINGS, ids=lambda spec: str(make_policy(*spec)))
def test_every_round_and_every_output_is_identical(
    recorded: Recorded, spec: tuple[str, dict[str, Any]], lab_pair64: Pair
) -> None:
    name, settings = spec
    table = cost_table(recorded.trace, ConstantCost(1e-3, 5e-3))
    policy = fit(CHAIN_POLICIES[name], settings, recorded.trace, table)
    replayed = replay(recorded.trace, policy, table, seed=3, log=True)
    drafter = DraftModel(lab_pair64.drafter.model, lab_pair64.eos_token_ids, lab_pair64.predictor)
    decoder = Decoder(lab_pair64.target, drafter, lab_pair64.eos_token_ids, recorded.sampler)
    runs, state = [], None
    for number, prompt in enumerate(recorded.prompts):
        runs.append(decoder.decode(prompt.tokens, recorded.new_tokens, policy, sequence=number, seed=3, state=state))
        state = runs[-1].state
    assert rounds_identical(replayed, runs) == 1.0
    assert sum(len(run.rounds) for run in runs) == replayed.num_rounds.sum()
    assert output_identical(recorded.trace, runs) == 1.0


@torch.inference_mode()
def test_recorded_outputs_are_the_targets_own_choices(recorded: Recorded, lab_pair64: Pair) -> None:
    """Checked without our loop and without a cache: one plain forward pass over each output."""
    sampler, trace = recorded.sampler, recorded.trace
    for number, prompt in enumerate(recorded.prompts):
        output = trace.token[trace.offsets[number] : trace.offsets[number + 1]].tolist()
        ids = torch.tensor([prompt.tokens + output])
        logits = lab_pair64.target(input_ids=ids, use_cache=False).logits[0, len(prompt.tokens) - 1 : -1]
        assert sampler.tokens(logits, number, 0).tolist() == output
        if sampler.mode == "greedy":
            assert logits.argmax(-1).tolist() == output


def test_the_traces_look_like_real_text(recorded: Recorded) -> None:
    """A pair that always or never agrees, or text that loops, would teach nothing."""
    meta = recorded.trace.meta
    assert 0.4 < meta["first_token_accepted_share"] < 0.85
    if recorded.sampler.mode == "gumbel":
        assert meta["distinct_trigram_share"] > 0.6


@pytest.mark.slow
@torch.inference_mode()
def test_the_target_clearly_beats_its_draft_model(lab_pair32: Pair) -> None:
    """On evenly spread windows of the held-out files."""
    parts = [np.asarray(lab_pair32.tokenizer(f.text, verbose=False)["input_ids"]) for f in library_files("held_out")]
    text = torch.from_numpy(np.concatenate(parts))
    windows = torch.stack([text[at : at + 257] for at in np.linspace(0, len(text) - 257, 32).astype(int)])
    target, draft = (
        model(input_ids=windows[:, :-1], use_cache=False).logits.float().flatten(0, 1)
        for model in (lab_pair32.target, lab_pair32.drafter.model)
    )
    following = windows[:, 1:].flatten()
    target_nats, draft_nats = (float(F.cross_entropy(logits, following)) for logits in (target, draft))
    assert draft_nats - target_nats > 0.3 and target_nats < math.log(2048) / 2
    assert 0.5 <= float((target.argmax(-1) == draft.argmax(-1)).float().mean()) <= 0.85


@pytest.mark.bench
def test_recording_costs_at_most_four_times_generating(lab_pair32: Pair, prompts: list[Prompt]) -> None:
    record(lab_pair32, prompts[:1], RecordSettings(2, 8, CHOICES["gumbel"]))  # warm-up
    trace = record(lab_pair32, prompts[:3], RecordSettings(16, 256, CHOICES["gumbel"]))
    assert elapsed_ratio(trace) < 4
