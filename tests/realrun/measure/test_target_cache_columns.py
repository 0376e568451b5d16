"""Dense records of drafters that read the target's cache: what each says after every branch, by the library alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import realrun.proposals.chain
import realrun.proposals.target_cache
import realrun.proposals.trees
from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.pairs.pair import Pair
from realrun.proposals.recorder import RecordRequest
from realrun.proposals.target_cache import target_cache_columns, target_cache_recorder
from realrun.proposals.trees import TreeSize
from tests.realrun.drafters import test_self_sd
from tests.realrun.drafters.test_state_drafters import REFERENCES
from tests.support.dense_records import check_columns, check_trees
from tests.support.drafting import self_sd_pair
from tests.support.pairs.medusa import CHOICES
from tests.support.pairs.state import state_pair
from tests.support.tiny import random_prompts

slow = pytest.mark.slow
CASES = [  # drafters over fused parts of a target and over the library's
    *[(kind, "llama") for kind in ("edd", "eagle", "eagle3", "self-sd")],
    *[pytest.param(kind, "mistral-sdpa", marks=slow) for kind in ("edd", "eagle", "eagle3")],
    *[pytest.param("self-sd", name, marks=slow) for name in ("qwen2", "mistral")],
]
mode = pytest.mark.parametrize("sampler", CHOICES.values(), ids=CHOICES)
cases = pytest.mark.parametrize(("kind", "target"), CASES)


def pair_and_reference(kind: str, target: str) -> tuple[Pair, Any]:
    """A pair, and the logits [1, V] of its drafter after a context and drafted tokens."""
    if kind == "self-sd":
        return self_sd_pair(target), lambda *branch: test_self_sd.plain_logits(target, *branch)
    pair, reference = state_pair(kind, target), REFERENCES[kind]
    return pair, lambda *branch: reference(pair, *branch)[None]


def output_of(pair: Pair, prompt: Sequence[int], count: int, sampler: Sampler, sequence: int) -> list[int]:
    return Decoder(*pair.make_drafter(), (), sampler).decode(prompt, count, None, sequence=sequence).tokens


@mode
@cases
@pytest.mark.parametrize("chunk", [3, pytest.param(256, marks=slow)])
@torch.inference_mode()
def test_columns_and_ranks_are_what_the_library_says(
    sampler: Sampler, kind: str, target: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(realrun.proposals.target_cache, "CHUNK", chunk)
    monkeypatch.setattr(realrun.proposals.target_cache, "CHUNK_NODES", 4 * chunk)
    pair, reference = pair_and_reference(kind, target)
    split, drafter = pair.make_drafter()
    for sequence, prompt in [(0, random_prompts(1)[0]), (5, [3])]:
        output = output_of(pair, prompt, 7, sampler, sequence)
        request = RecordRequest(prompt, output, 3, sampler, sequence)
        dense = target_cache_columns(split, drafter.lm, request)
        assert drafter.lm.nodes == 0 and split.length == len(prompt) + len(output) - 1
        check_columns(dense, request, reference)


@cases
@torch.inference_mode()
def test_rejection_traces_hold_the_drafters_distributions_and_the_targets_verdict(
    kind: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The share `accept_prob`, by a pass of the library over every drafted prefix."""
    monkeypatch.setattr(realrun.proposals.chain, "CHUNK", 3)
    sampler, depth, count = Sampler("rejection", 0.8, seed=4, top_p=0.9), 3, 7
    pair, reference = pair_and_reference(kind, target)
    split, drafter = pair.make_drafter()
    for sequence, prompt in [(0, random_prompts(1)[0]), (5, [3])]:
        output = output_of(pair, prompt, count, sampler, sequence)
        request = RecordRequest(prompt, output, depth, sampler, sequence, lambda hidden, *_: hidden.sum(-1))
        dense = target_cache_recorder(split, drafter.lm, sampler)(request)
        greedy = target_cache_columns(split, drafter.lm, replace(request, sampler=Sampler()), ranks=False)
        np.testing.assert_allclose(dense["score"][:, 0], greedy["score"][:, 0], rtol=1e-6)
        same = dense["draft_token"][:, 0] == greedy["draft_token"][:, 0]
        np.testing.assert_allclose(dense["score"][same, 1], greedy["score"][same, 1], rtol=1e-6)
        for t, i in itertools.product(range(count), range(depth)):
            branch, context = dense["draft_token"][t].tolist(), [*prompt, *output[:t]]
            q = sampler.probs(reference(context, branch[:i]))[0]
            text = torch.tensor([[*context, *branch[:i]]])
            p = sampler.probs(pair.target(input_ids=text, use_cache=False).logits[0, -1:])[0]
            accept = min(1.0, float(p[branch[i]] / q[branch[i]])) if t + i < count else 0.0
            assert dense["accept_prob"][t, i] == pytest.approx(accept, rel=1e-5)
            assert dense["prob"][t, i] == pytest.approx(float(q[branch[i]]), rel=1e-5)
            assert dense["confidence"][t, i] == pytest.approx(float(q.max()), rel=1e-5)
            entropy = float(torch.special.entr(q).sum())
            assert dense["entropy_nats"][t, i] == pytest.approx(entropy, rel=1e-5, abs=1e-6)
            if t + i < count:
                logits = reference(context, output[t : t + i])
                order = sampler.candidates(logits, sequence, [t + i], logits.shape[1])[0][0].tolist()
                assert dense["true_rank"][t, i] == order.index(output[t + i])


@mode
@cases
@torch.inference_mode()
def test_trees_are_what_best_first_expansion_finds_one_node_after_the_other(
    sampler: Sampler, kind: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(realrun.proposals.trees, "CHUNK_NODES", 60)  # of three positions
    monkeypatch.setattr(realrun.proposals.trees, "PASS_NODES", 4)
    pair, reference = pair_and_reference(kind, target)
    (prompt,) = random_prompts(1, seed=8)
    output = output_of(pair, prompt, 5, sampler, 2)
    split, drafter = pair.make_drafter()
    request = RecordRequest(prompt, output, 4, sampler, 2, tree=TreeSize(20, 4))
    check_trees(target_cache_columns(split, drafter.lm, request), request, reference)
