"""EAGLE's drafter sees what it should: true features up to the pending token, and behind it what it has put out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from realrun.drafters.eagle import Eagle, EagleKind, parents_and_levels
from realrun.drafters.kind import DRAFT_TOKENS
from realrun.pairs.drafter_files import describe_target, load_drafter, save_drafter
from realrun.pairs.pair import Pair
from realrun.train.eagle import EagleSettings, EagleTraining, feature_pass, with_lr
from tests.support.pairs.state import PROMPTS, layer_alone, state_pair


def reference(pair: Pair, context: Sequence[int], drafted: Sequence[int], true: int | None = None) -> torch.Tensor:
    """Logits [V] of the drafter, by the library's layers and without a cache.

    The row of a token is made of its embedding and the feature before it: none for the first, the target's
    up to the pending token, and the drafter's own behind it. vLLM's first token has no row, unless it is pending.
    true : how many features are the target's
    """
    inner, eagle, known = pair.target.model, pair.drafter.eagle, len(context) - 1 if true is None else true
    rowless = int(eagle.for_vllm and len(context) > 1)
    tokens = [*context, *drafted][rowless:]
    embedded = inner.embed_tokens(torch.tensor(tokens))
    before = torch.zeros(1, embedded.shape[1], dtype=embedded.dtype)
    if known:
        features = inner(input_ids=torch.tensor([context[:known]]), use_cache=False).last_hidden_state[0]
        before = torch.cat([before, features])[rowless:]
    while True:
        rows = torch.cat([embedded[: len(before)], before], dim=1) @ eagle.fuse.weight.T
        rows = rows if eagle.for_vllm else rows + eagle.fuse.bias
        out = layer_alone(eagle.layers[0], inner.rotary_emb, rows, rowless)
        if len(before) == len(tokens):
            logits: torch.Tensor = pair.target.get_output_embeddings()(out[-1:])[0]
            return logits
        before = torch.cat([before, out[-1:]])


@torch.inference_mode()
def test_a_feature_more_or_less_of_the_target_would_be_seen() -> None:
    pair, text = state_pair("eagle"), PROMPTS[2].tokens
    whole = reference(pair, text, [3, 5])
    for true in (len(text) - 2, len(text)):
        assert float((reference(pair, text, [3, 5], true) - whole).abs().max()) > 1e-3


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=14), st.integers(0, 13))
def test_parents_and_levels_are_read_from_who_sees_whom(drawn: list[int], before: int) -> None:
    count = len(drawn)
    before = min(before, count - 1)
    parents = [number % (node + 1) - 1 for node, number in enumerate(drawn)]
    sees = np.eye(count, dtype=np.bool_)
    for node, parent in enumerate(parents):
        if parent >= 0:
            sees[node] |= sees[parent]
    levels: list[int] = []
    for node in range(before, count):
        parent = parents[node]
        levels.append(levels[parent - before] + 1 if parent >= before else 0)
    parent, level = parents_and_levels(sees[before:], before)
    assert parent.tolist() == parents[before:] and level.tolist() == levels


def test_a_drafter_is_a_fusing_projection_and_one_layer() -> None:
    pair = state_pair("eagle")
    size, layer = 32, sum(p.numel() for p in pair.target.model.layers[0].parameters())
    assert sum(p.numel() for p in pair.drafter.eagle.parameters()) == 2 * size * size + size + layer
    assert {*pair.drafter.eagle.state_dict()} - {*state_pair("eagle-vllm").drafter.eagle.state_dict()} == {
        "fuse.bias", "layers.0.input_layernorm.weight"
    }  # fmt: skip
    eagle, same, other = (Eagle(pair.target, seed) for seed in (1, 1, 2))
    assert torch.equal(eagle.fuse.weight, same.fuse.weight) and not torch.equal(eagle.fuse.weight, other.fuse.weight)
    x, y = torch.randn(2, 3, 32, dtype=torch.float64)
    expected = x @ eagle.fuse.weight[:, :32].T + y @ eagle.fuse.weight[:, 32:].T + eagle.fuse.bias
    torch.testing.assert_close(eagle.fused(x, y), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["eagle", "eagle-vllm"])
@torch.inference_mode()
def test_a_row_in_training_is_that_of_drafting(kind: str) -> None:
    pair, text = state_pair(kind), torch.tensor([PROMPTS[2].tokens])
    features = pair.target.model(input_ids=text, use_cache=False).last_hidden_state
    logits = pair.target.get_output_embeddings()(feature_pass(pair.drafter.eagle, pair.target, text, features))[0]
    for count in range(2, text.shape[1] + 1):
        expected = reference(pair, text[0, :count].tolist(), [])
        torch.testing.assert_close(logits[count - 1], expected, rtol=0, atol=1e-10)


# A draft vocabulary


def with_vocabulary(tokens: range) -> Pair:
    """The fitted pair, which drafts these tokens alone."""
    pair = state_pair("eagle")
    eagle = Eagle(pair.target, vocabulary=torch.tensor(tokens))
    eagle.load_state_dict(pair.drafter.eagle.state_dict())
    return replace(pair, drafter=EagleKind(eagle.eval()), predictor=None)


def test_only_tokens_of_the_vocabulary_are_drafted() -> None:
    pair, text, some = with_vocabulary(range(10, 20)), PROMPTS[0].tokens, [*range(10, 20)]
    target, drafter = pair.make_drafter()
    with torch.inference_mode():
        target.prefill(text[:-1])
        logits = drafter.lm.forward(text)[-1]
    assert logits.isfinite().nonzero().flatten().tolist() == some
    torch.testing.assert_close(logits[some], reference(pair, text, [])[some])


def test_a_training_chooses_its_most_frequent_tokens(tmp_path: Path) -> None:
    pair = state_pair("eagle")
    text = [(np.array([5, 5, 9, 9, 9, 2, 40], dtype=np.int32), 0.5), (np.array([40, 40, 2], dtype=np.int32), 0.5)]
    job = EagleTraining(pair.target, EagleSettings(draft_vocabulary=3))
    chosen = job.chosen(text)
    assert chosen[DRAFT_TOKENS].tolist() == [2, 9, 40] and chosen[DRAFT_TOKENS].dtype == torch.int32
    assert EagleTraining(pair.target, EagleSettings()).chosen(text) == {}
    facts = {"target": describe_target(pair.target, "tiny")}
    save_drafter(tmp_path, "eagle", {**pair.drafter.eagle.state_dict(), **chosen}, facts)
    _, kind = load_drafter(tmp_path, pair.target)
    assert kind.facts == {"draft_vocabulary": 3} and kind.eagle.vocabulary.tolist() == [2, 9, 40]


@pytest.mark.parametrize(
    ("width", "low", "high"),
    [
        (256, 6e-3, 6e-3),  # the lab's, by search
        (576, 1e-3, 1.5e-3),  # SmolLM2's: both trained, and 6e-3 diverged
        (4096, 2e-5, 4.5e-5),  # Li et al. 2024, 5: 3e-5
    ],
)
def test_the_usual_learning_rate_is_of_the_size_that_trained(width: int, low: float, high: float) -> None:
    target = SimpleNamespace(config=SimpleNamespace(hidden_size=width))
    lr = with_lr(EagleSettings(), target).lr
    assert lr is not None and low <= lr <= high
    assert with_lr(EagleSettings(lr=0.5), target).lr == 0.5
