"""Drafters that draft a part of the vocabulary by the target's head: from their file, replayed and really run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.drafters.eagle import Eagle
from realrun.drafters.edd import one_layer_model, own_state
from realrun.drafters.eesd import EarlyExit
from realrun.drafters.kind import DRAFT_TOKENS
from realrun.drafters.medusa import MedusaHeads
from realrun.experiment.validate import output_identical, rounds_identical
from realrun.lm.head import partial_head
from realrun.lm.kernels import use_kernels
from realrun.measure.record import RecordSettings, record
from realrun.pairs.drafter_files import describe_target, load_drafter, save_drafter
from realrun.pairs.pair import Pair
from specsim.cost.model import ConstantCost
from specsim.policy.registry import make_policy
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from tests.support.pairs.medusa import CHOICES
from tests.support.pairs.state import PROMPTS, TOKENS
from tests.support.small_targets import alone, small_target

SOME = range(0, 97, 2)
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "eagle": (lambda target: Eagle(target, 3).state_dict(), {}),
    "eesd": (lambda target: EarlyExit(target, 2, shared=True).state_dict(), {"layers": 2, "exit_layers": 1}),
    "edd": (lambda target: own_state(one_layer_model(target, 3), shared=True), {"states_after": 2}),
    "vdm": (lambda target: own_state(one_layer_model(target, 3), shared=True), {}),
    "medusa": (lambda target: MedusaHeads(target, 3, shared=True).state_dict(), {"heads": 3}),
}


def loaded(kind: str, folder: Path, architecture: str = "llama") -> tuple[Pair, Mapping[str, torch.Tensor]]:
    """A target with a random drafter of even tokens, and its file's tensors."""
    target = small_target(architecture)
    make, facts = KINDS[kind]
    tensors = {**make(target), DRAFT_TOKENS: torch.tensor(SOME, dtype=torch.int32)}
    save_drafter(folder, kind, tensors, {"target": describe_target(target, "tiny"), **facts})
    same, drafter = load_drafter(folder, target)
    assert same is target and drafter.facts == {**facts, "draft_vocabulary": len(SOME)}
    return replace(alone(target), drafter=drafter), tensors


@pytest.mark.parametrize("sampler", CHOICES.values(), ids=CHOICES.keys())
@pytest.mark.parametrize("kind", KINDS)
def test_rounds_are_replayed_and_the_text_is_the_targets(kind: str, sampler: Sampler, tmp_path: Path) -> None:
    pair, policy = loaded(kind, tmp_path)[0], make_policy("fixed_k", {"k": 3})
    trace = record(pair, PROMPTS, RecordSettings(3, TOKENS, sampler))
    assert not (trace.draft_token % 2).any()
    assert 0 < (trace.match_len > 0).mean() < 1
    replayed = replay(trace, policy, cost_table(trace, ConstantCost(1e-3, 5e-3)), log=True)
    texts = []
    for kernels in ("auto", "reference"):  # the lean pass, and static caches
        with use_kernels(kernels):
            decoder = Decoder(*pair.make_drafter(), (), sampler)
            runs = [decoder.decode(p.tokens, TOKENS, policy, sequence=i) for i, p in enumerate(PROMPTS)]
        assert rounds_identical(replayed, runs) == output_identical(trace, runs) == 1.0
        texts.append([run.log() for run in runs])
    assert texts[0] == texts[1]
    plain = Decoder(*alone(small_target()).make_drafter(), (), sampler)
    assert [run.tokens for run in runs] == [
        plain.decode(p.tokens, TOKENS, None, sequence=i).tokens for i, p in enumerate(PROMPTS)
    ]


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])  # tied and untied
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_holds_neither_embedding_nor_head(kind: str, architecture: str, tmp_path: Path) -> None:
    pair, tensors = loaded(kind, tmp_path, architecture)
    assert not any("embed" in name or "head" in name or tensor.shape == (97, 32) for name, tensor in tensors.items())
    before = {name: tensor.clone() for name, tensor in pair.target.state_dict().items()}
    decoder = Decoder(*pair.make_drafter(), (), Sampler())
    decoder.decode(PROMPTS[0].tokens, 8, make_policy("fixed_k", {"k": 2}))
    assert all(torch.equal(tensor, before[name]) for name, tensor in pair.target.state_dict().items())


@torch.inference_mode()
def test_a_part_of_a_head_gives_its_tokens_the_heads_logits_and_others_none() -> None:
    head, tokens, hidden = torch.nn.Linear(8, 11, bias=False), torch.tensor([2, 3, 7]), torch.randn(2, 5, 8)
    logits, whole = partial_head(head, tokens)(hidden), head(hidden)
    torch.testing.assert_close(logits[..., tokens], whole[..., tokens])
    others = [token for token in range(11) if token not in tokens.tolist()]
    assert np.isneginf(logits[..., others].numpy()).all() and logits.shape == whole.shape
