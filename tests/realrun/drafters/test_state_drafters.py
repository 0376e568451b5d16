"""EDD, EAGLE and EAGLE-3: what a round ingests and costs, their files; rejection sampling inside the target."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from realrun.decode.decoder import Decoder
from realrun.decode.draft_model import DraftModel
from realrun.decode.sampling import Sampler
from realrun.drafters.eagle import Eagle, EagleKind, parents_and_levels
from realrun.drafters.eagle3 import Eagle3, Eagle3Kind, default_config, default_states
from realrun.drafters.edd import (
    EDDKind,
    EffectiveDraftDecoderLM,
    check_split,
    default_split,
    one_layer_model,
    own_state,
)
from realrun.drafters.independent import IndependentKind
from realrun.drafters.kind import DRAFT_TOKENS, DrafterKind
from realrun.drafters.medusa import MedusaHeads, MedusaKind
from realrun.drafters.space import SpaceKind, with_mask
from realrun.drafters.state_drafter import StateDrafterLM
from realrun.lm.layer_stack import model_parts
from realrun.lm.llama import FusedStack
from realrun.lm.split_target import SplitTarget
from realrun.measure.profile import profile
from realrun.measure.sweeps import CATCH_UP
from realrun.pairs.drafter_files import describe_target, load_drafter, save_drafter
from realrun.pairs.pair import Pair
from realrun.train.eagle import (
    Eagle3Settings,
    Eagle3Training,
    EagleSettings,
    EagleTraining,
    feature_pass,
    unrolled,
    with_lr,
)
from realrun.train.edd import states_and_logits
from specsim.io.errors import InputError
from specsim.policy.base import Policy
from specsim.policy.registry import make_policy
from tests.support.checks import refusal
from tests.support.clock import SetClock
from tests.support.drafting import rounds_of
from tests.support.pairs.medusa import CHOICES
from tests.support.pairs.state import KINDS, PROMPTS, TARGETS, TOKENS, layer_alone, state_pair, watch
from tests.support.small_vocabulary import SAMPLED, models, p_value
from tests.support.split_targets import LIBRARY, NAMES, close_to, stacked, target_of
from tests.support.tiny import random_prompts, tiny_tokenizer
from tests.support.tree_policies import CoinTree, KeepNone

CLOSE = {"rtol": 0.0, "atol": 1e-10}


def edd_reference(pair: Pair, context: Sequence[int], drafted: Sequence[int]) -> torch.Tensor:
    """Logits [V] of the decoder, by the library's layers and without a cache.

    Row by row: the target's states of all tokens of the context but the pending one, then the embeddings of
    that one and of what was drafted, all at the positions of their tokens.
    """
    inner, known = pair.drafter.decoder.model, len(context) - 1
    rows = inner.embed_tokens(torch.tensor([*context[known:], *drafted]))
    if known:
        output = pair.target(input_ids=torch.tensor([context[:known]]), use_cache=False, output_hidden_states=True)
        rows = torch.cat([output.hidden_states[pair.drafter.split][0], rows])
    out = layer_alone(inner.layers[0], inner.rotary_emb, rows)
    logits: torch.Tensor = pair.drafter.decoder.get_output_embeddings()(inner.norm(out[-1:]))[0]
    return logits


@torch.inference_mode()
def test_the_states_and_only_those_of_verified_tokens_decide() -> None:
    """The check above would see it: a edd_reference that lacks a state, or has one more, says something else."""
    pair = state_pair("edd")
    text = PROMPTS[2].tokens
    whole = edd_reference(pair, text, [])
    inner = pair.drafter.decoder.model
    output = pair.target(input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True)
    own = inner.embed_tokens(torch.tensor(text[-1:]))
    for states in (output.hidden_states[2][0], output.hidden_states[2][0, 1:-1], output.hidden_states[1][0, :-1]):
        out = layer_alone(inner.layers[0], inner.rotary_emb, torch.cat([states, own]))
        logits = pair.drafter.decoder.get_output_embeddings()(inner.norm(out[-1:]))[0]
        assert float((logits - whole).abs().max()) > 1e-2
    assert len(text) > 4


@pytest.mark.parametrize("name", ["llama", "qwen2-sdpa"])
def test_a_decoder_starts_with_the_targets_embedding_norm_and_head(name: str) -> None:
    target = target_of(name)
    decoder, other = one_layer_model(target, seed=1), one_layer_model(target, seed=2)
    theirs = target.state_dict()
    for key, value in decoder.state_dict().items():
        if ".layers." in key:
            assert "norm" in key or not torch.equal(value, theirs[key])  # of one shape, and random
            assert "proj.weight" not in key or not torch.equal(value, other.state_dict()[key])
        else:
            assert torch.equal(value, theirs[key]) and value.data_ptr() != theirs[key].data_ptr()
    assert len(decoder.model.layers) == 1 and type(decoder) is type(target) and decoder.dtype == target.dtype
    assert decoder.config._attn_implementation == target.config._attn_implementation
    assert ("lm_head.weight" in own_state(decoder)) == (name != "llama")
    state = torch.get_rng_state()
    one_layer_model(target, seed=3)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_decoder_in_16_bits_has_the_targets_rotary_frequencies() -> None:
    target = copy.deepcopy(target_of("llama"))
    for parameter in target.parameters():  # as in a model that is loaded in bfloat16
        parameter.data = parameter.data.bfloat16()
    frequencies = one_layer_model(target).model.rotary_emb.inv_freq
    assert torch.equal(frequencies, target.model.rotary_emb.inv_freq)


# --- Keys and values alone ------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_filling_slots_leaves_the_keys_and_values_of_a_pass(name: str) -> None:
    """In pieces, over slots that were taken before, and behind the first room of the buffers."""
    target = target_of(name)
    parts = model_parts(target)
    ran, filled = parts.stack(target.model.layers[2:3]), parts.stack(target.model.layers[2:3])
    rows = torch.randn(300, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if name not in LIBRARY:
        rows = rows[:150]  # the fused pass knows as many positions as the model has
    count = len(rows)
    for start, end in ((0, 9), (9, 10), (10, 60), (40, 70), (70, count)):
        x = rows[start:end] + (0.5 if end == 60 else 0.0)  # written anew by the next
        ran.run(x, start, slice(start, end), parts.causal_mask(end - start, end))
        assert filled.fill(x, start, slice(start, end)) is None  # type: ignore[func-returns-value]
        for ran_layer, filled_layer in zip(stacked(ran, end), stacked(filled, end), strict=True):
            for a, b in zip(ran_layer, filled_layer, strict=True):
                assert torch.equal(a, b) and float(a[:, -1].abs().max()) > 0
    # What runs behind them sees them.
    more = rows[:2]
    mask = parts.causal_mask(2, count + 2)
    out = [stack.run(more, count, slice(count - 2, count), mask) for stack in (ran, filled)]
    torch.testing.assert_close(*out, **close_to(name))


@torch.inference_mode()
def test_library_stacks_fill_one_layer() -> None:
    target = target_of("qwen2-sdpa")
    with pytest.raises((AssertionError, ValueError)):
        model_parts(target).stack(target.model.layers[:2]).fill(torch.randn(6, 32, dtype=torch.float64), 0, slice(0, 5))


@torch.inference_mode()
def test_rows_of_a_round_end_with_it() -> None:
    """Fed on after a truncation, at whatever length, the pass says what a new one does."""
    pair = state_pair("edd")
    (text,) = random_prompts(1, seed=4, lengths=(30, 31))
    target = SplitTarget(pair.target, pair.drafter.split)
    lm = EffectiveDraftDecoderLM(target, pair.drafter.decoder)
    lm_state: list[Any] = []
    for verified, drafted, length in ((4, 5, 9), (6, 2, 5), (6, 3, 6), (12, 6, 0), (20, 1, 40)):
        target.prefill(text[target.length : verified])
        logits = lm.forward(text[lm.length : verified + drafted])
        assert len(logits) == drafted  # of rows that are the drafter's own
        for number, row in enumerate(logits):
            expected = edd_reference(pair, text[: verified + 1], text[verified + 1 : verified + 1 + number])
            torch.testing.assert_close(row, expected, **CLOSE)
        lm.truncate(length)
        assert lm.length == lm.state_rows == min(length, verified)
        lm_state.append(lm.state_rows)
    assert len(set(lm_state)) > 3


def eagle_reference(
    pair: Pair, context: Sequence[int], drafted: Sequence[int], true: int | None = None
) -> torch.Tensor:
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
    whole = eagle_reference(pair, text, [3, 5])
    for true in (len(text) - 2, len(text)):
        assert float((eagle_reference(pair, text, [3, 5], true) - whole).abs().max()) > 1e-3


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
        expected = eagle_reference(pair, text[0, :count].tolist(), [])
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
    torch.testing.assert_close(logits[some], eagle_reference(pair, text, [])[some])


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


def layer_outputs(
    weights: dict[str, torch.Tensor], config: Any, x: torch.Tensor, hidden: torch.Tensor, first: int
) -> torch.Tensor:
    """The decoder layer's output [n, d] of embeddings x and hidden states [n, d], from position `first` on.

    Each row sees those before it.
    """
    own = {name.removeprefix("midlayer."): value for name, value in weights.items() if name.startswith("midlayer.")}
    heads, groups = config.num_attention_heads, config.num_attention_heads // config.num_key_value_heads

    def normed(rows: torch.Tensor, name: str) -> torch.Tensor:
        norm = LlamaRMSNorm(rows.shape[-1], config.rms_norm_eps)
        norm.weight.data = own[f"{name}.weight"]
        return norm(rows)

    joint = torch.cat([normed(x, "input_layernorm"), normed(hidden, "hidden_norm")], dim=1)
    q, k, v = (
        (joint @ own[f"self_attn.{name}_proj.weight"].T).view(len(x), -1, config.head_dim).transpose(0, 1)
        for name in "qkv"
    )
    places = torch.arange(first, first + len(x))[None]
    q, k = apply_rotary_pos_emb(q[None], k[None], *LlamaRotaryEmbedding(config)(x, places))
    k, v = k[0].repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = q[0] @ k.transpose(1, 2) / config.head_dim**0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x), dtype=torch.bool).triu(1), -torch.inf)
    mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), heads * config.head_dim)
    residual = hidden + mixed @ own["self_attn.o_proj.weight"].T
    y = normed(residual, "post_attention_layernorm")
    gate, up = (y @ own[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return residual + (F.silu(gate) * up) @ own["mlp.down_proj.weight"].T


def eagle3_reference(pair: Pair, context: Sequence[int], drafted: Sequence[int]) -> torch.Tensor:
    """Logits [V] of the drafter, without a cache.

    A row holds a token's embedding and the hidden state before it: the target's fused states up to the pending token,
    behind it the drafter's output. Rows begin with the second token, unless the first is pending: it has zeros then.
    """
    eagle, inner = pair.drafter.eagle, pair.target.model
    weights = eagle.state_dict()
    low, middle, high = eagle.states_after
    if len(context) > 1:
        asked = {"use_cache": False, "output_hidden_states": True}
        every = inner(input_ids=torch.tensor([context[:-1]]), **asked).hidden_states
        hidden = torch.cat([every[low][0], every[middle][0], every[high][0]], dim=1) @ weights["fc.weight"].T
        tokens = [*context[1:], *drafted]
    else:
        hidden = torch.zeros(1, weights["fc.weight"].shape[0], dtype=torch.float64)
        tokens = [*context, *drafted]
    embedded = inner.embed_tokens.weight[tokens]
    while True:
        out = layer_outputs(weights, eagle.config, embedded[: len(hidden)], hidden, int(len(context) > 1))
        if len(hidden) == len(tokens):
            norm = LlamaRMSNorm(out.shape[1], eagle.config.rms_norm_eps)
            norm.weight.data = weights["norm.weight"]
            logits: torch.Tensor = norm(out[-1]) @ weights["lm_head.weight"].T  # of the draft vocabulary
            return logits
        hidden = torch.cat([hidden, out[-1:]])


def test_the_states_are_those_that_vllm_and_sglang_read() -> None:
    """After 2, L // 2 and L - 3 layers: vLLM 0.32, get_eagle3_default_aux_hidden_state_layers."""
    assert default_states(32) == (2, 16, 29) and default_states(80) == (2, 40, 77) and default_states(7) == (2, 3, 4)
    for layers in range(3, 40):
        states = default_states(layers)
        assert list(states) == sorted({*states}) and len(states) == 3 and states[0] >= 1 and states[2] <= layers
    refusal(lambda: default_states(2), "EAGLE-3 reads 3 states and this target has 2 layers; train EAGLE instead")


# Training


def batch_of(count: int, tokens: int) -> torch.Tensor:
    return torch.randint(1, 97, (count, tokens), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("drafted", [None, 30])
@torch.inference_mode()
def test_the_loss_is_that_of_drafts_of_the_text_one_by_one(drafted: int | None) -> None:
    """Cross-entropies of every draft step of every round, by the written-out drafter, and the head's tokens alone."""
    pair, batch, steps = state_pair("eagle3"), batch_of(2, 9), 3
    job = Eagle3Training(copy.deepcopy(pair.target), Eagle3Settings(steps, draft_vocabulary=drafted))
    text = [(np.arange(97, dtype=np.int32).repeat(np.arange(97) % 5 + 1), 1.0)]
    job.chosen(text)
    pair = replace(pair, drafter=Eagle3Kind(job.module))
    tokens = [*range(97)] if drafted is None else job.module.tokens.tolist()
    assert drafted is None or (len(tokens) == drafted and tokens != [*range(drafted)])
    by_step: list[list[float]] = [[] for _ in range(steps)]
    for row in batch[:, :-1].tolist():
        theirs = pair.target(input_ids=torch.tensor([row]), use_cache=False).logits[0]
        for k in range(steps):
            for pending in range(1, len(row) - k):
                if int(theirs[pending + k].argmax()) in tokens:
                    log_q = eagle3_reference(pair, row[: pending + 1], row[pending + 1 : pending + 1 + k]).log_softmax(
                        -1
                    )
                    p = theirs[pending + k, tokens].softmax(-1)
                    by_step[k].append(-float((p * log_q).sum()))
    assert drafted is None or 0 < len(by_step[0]) < 2 * 7
    means = [sum(nats) / len(nats) for nats in by_step]
    loss, parts = job.loss(batch, 0)
    assert float(loss) == pytest.approx((means[0] + 0.8 * means[1] + 0.64 * means[2]) / 2.44, abs=1e-10)
    assert parts == {"first": pytest.approx(means[0], abs=1e-10)}


@pytest.mark.parametrize("name", ["llama", pytest.param("qwen2-sdpa", marks=pytest.mark.slow)])
@torch.inference_mode()
def test_training_makes_the_rows_of_drafting(name: str) -> None:
    """Of first drafted tokens and, unrolled, of the drafts behind them."""
    pair, tokens = state_pair("eagle3", name), batch_of(1, 12)
    eagle, text = pair.drafter.eagle, tokens[0].tolist()
    states, _ = states_and_logits(pair.target, tokens, *eagle.states_after)
    trained = [hidden[0] for hidden in unrolled(eagle, pair.target, tokens, states, 4)]
    target, lm = pair.drafter.make_passes(pair.target)
    for pending in range(1, 12 - 3):
        target.prefill(text[target.length : pending])
        lm.truncate(pending)
        for k in range(4):
            lm.forward(text[lm.length : pending + 1 + k])
            torch.testing.assert_close(lm.feature, trained[k][pending - 1], rtol=0, atol=1e-10)


slow = pytest.mark.slow
kinds = pytest.mark.parametrize("kind", KINDS)


def decoder_of(pair: Pair, sampler: Sampler) -> tuple[Decoder, StateDrafterLM]:
    target, drafter = pair.make_drafter()
    assert isinstance(drafter.lm, StateDrafterLM)
    return Decoder(target, drafter, pair.eos_token_ids, sampler), drafter.lm


def small_pair(kind: str) -> Pair:
    """A target over four tokens and a random drafter, which disagree."""
    target, _ = models()
    generator = torch.Generator().manual_seed(6)
    if kind == "space":
        target = with_mask(target, torch.randn(8, generator=generator, dtype=torch.float64))
        return Pair(target, SpaceKind(3), tiny_tokenizer(), "small", kind, ())
    drafts: dict[str, Any] = {"edd": one_layer_model, "eagle": Eagle, "medusa": MedusaHeads}
    draft = drafts[kind](target, 3 if kind == "medusa" else 6).eval()
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.mul_(2.0)
            if kind == "medusa":  # whose heads begin as the target's own
                parameter += 0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    kinds: dict[str, DrafterKind] = {
        "edd": EDDKind(draft, 1), "eagle": EagleKind(draft), "medusa": MedusaKind(draft)
    }  # fmt: skip
    return Pair(target, kinds[kind], tiny_tokenizer(), "small", kind, ())


REJECTION = [
    ("edd", "vct", {"width": 2, "depth": 2}),
    ("eagle", "fixed_k", {"k": 3}),
    ("medusa", "vct", {"width": 2, "depth": 3}),
    ("space", "fixed_k", {"k": 3}),
    pytest.param("edd", "fixed_k", {"k": 3}, marks=slow),
    pytest.param("eagle", "vct", {"width": 2, "depth": 2}, marks=slow),
]


@pytest.mark.parametrize(("kind", "name", "settings"), REJECTION)
@pytest.mark.parametrize("samples", [200, pytest.param(1500, marks=slow)])
def test_rejection_sampling_follows_the_target(kind: str, name: str, settings: dict[str, Any], samples: int) -> None:
    decoder = Decoder(*small_pair(kind).make_drafter(), (), SAMPLED)
    assert p_value(decoder, make_policy(name, settings), samples) > 1e-3


REFERENCES = {
    "edd": edd_reference, "eagle": eagle_reference, "eagle-vllm": eagle_reference, "eagle3": eagle3_reference
}  # fmt: skip
POLICIES = [
    make_policy("fixed_k", {"k": 4}),
    make_policy("vct", {"width": 2, "depth": 4}),
    CoinTree(),
    KeepNone(2),
]


@pytest.mark.parametrize("sampler", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("name", [TARGETS[0], *(pytest.param(name, marks=slow) for name in TARGETS[1:])])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
@pytest.mark.parametrize("kind", REFERENCES)
@torch.inference_mode()
def test_every_row_equals_the_librarys_without_a_cache(kind: str, policy: Policy, name: str, sampler: Sampler) -> None:
    """Along chains and branches of trees, over rounds that accept much or little, or draft nothing."""
    pair = state_pair(kind, name)
    for prompt in PROMPTS[:2]:
        decoder, lm = decoder_of(pair, sampler)
        rows = watch(lm)
        rounds = [round_ for _, round_, _ in rounds_of(decoder, prompt.tokens, policy, 7)]
        assert any(round_.accepted < round_.drafted for round_ in rounds[:-1])
        assert max(len(row.drafted) for row in rows) >= policy.max_draft_tokens - 1
        for row in rows:
            expected = REFERENCES[kind](pair, row.context, row.drafted)
            torch.testing.assert_close(row.logits, expected, rtol=0, atol=1e-10)


# --- What a round ingests, and what it costs ---------------------------------------------------


@kinds
def test_a_round_ingests_at_once_what_the_last_one_accepted(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """EDD keeps no row of the last round; EAGLE's of the pending token was made of a true feature and stays.

    EAGLE-3's first token has no row.
    """
    filled: list[int] = []
    fill = FusedStack.fill
    monkeypatch.setattr(FusedStack, "fill", lambda self, x, *rest: filled.append(len(x)) or fill(self, x, *rest))
    loop, _ = decoder_of(state_pair(kind), Sampler())
    accepted = set()
    for prompt in PROMPTS[1:]:
        filled.clear()
        decoded = loop.decode(prompt.tokens, TOKENS, make_policy("fixed_k", {"k": 4}))
        ingested = [r.accepted + (kind == "edd") for r in decoded.rounds if r.t + r.accepted + 1 < TOKENS - 1]
        accepted.update(r.accepted for r in decoded.rounds)
        first = len(prompt.tokens) - 1 - {"edd": 0, "eagle": 1, "eagle3": 2}[kind]
        assert filled == [rows for rows in (first, *ingested) if rows]
    assert len(accepted) > 3


@kinds
def test_a_profile_counts_it_as_part_of_the_first_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pause_s, rows = SetClock(monkeypatch), 0.008, Counter[int]()
    fill, propose = FusedStack.fill, DraftModel.propose
    inside = False

    def slow_fill(self: FusedStack, x: torch.Tensor, *rest: Any) -> None:
        if inside:
            rows[len(x)] += 1
            clock.take(pause_s)
        fill(self, x, *rest)

    def proposing(self: Any, *asked: Any) -> Any:
        nonlocal inside
        inside = True
        try:
            return propose(self, *asked)
        finally:
            inside = False

    monkeypatch.setattr(FusedStack, "fill", slow_fill)
    monkeypatch.setattr(DraftModel, "propose", proposing)
    document = profile(state_pair(kind), contexts=[8, 30], depth=3, limit_s=0, tree_tokens=0)
    for table in ("median_s", "p25_s", "p75_s"):
        assert document[table]["catch_up"] == [0.0, 0.0]
    for context in range(2):
        first, *others = (step[context] for step in document["median_s"]["draft_step"])
        assert max(others) < 0.1 * pause_s
        assert (first if kind == "edd" else document["p75_s"]["draft_step"][0][context]) >= pause_s
    # As many as the longest draft, and of EDD's the row of the token that was pending; and what is caught up on.
    behind = {tokens for tokens in CATCH_UP if tokens < 30}
    assert set(rows) == set(range(1, 5 if kind == "edd" else 4)) | behind


# --- Files ----------------------------------------------------------------------------------------


def save(folder: Path, kind: str, target: Any, draft: Any, **facts: Any) -> Path:
    tensors = own_state(draft) if kind in ("edd", "vdm") else draft.state_dict()
    return save_drafter(folder, kind, tensors, {"target": describe_target(target, "tiny/target"), **facts})


def draft_of(kind: str, target: Any, seed: int = 3) -> Any:
    if kind == "eagle3":
        return Eagle3(target, seed=seed).eval()
    return (Eagle(target, seed) if kind == "eagle" else one_layer_model(target, seed)).eval()


@pytest.mark.parametrize("kind", ["edd", "vdm", "eagle", "eagle3"])
def test_files_that_do_not_fit_their_target_are_refused(kind: str, tmp_path: Path) -> None:
    target = target_of("llama")
    facts = {"edd": {"states_after": 2}, "eagle3": {"config": dict(default_config(target))}}.get(kind, {})

    def refused(says: str, place: Path) -> None:
        refusal(lambda: load_drafter(place, target), match=says)

    tensors = draft_of(kind, target)
    state = own_state(tensors) if kind in ("edd", "vdm") else tensors.state_dict()
    described = {"target": describe_target(target, "t")}
    parts = {"eagle": ["fuse.bias"], "eagle3": ["fc.weight", "midlayer.hidden_norm.weight", "lm_head.weight"]}
    for missing in parts.get(kind, ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"]):
        less = {name: value for name, value in state.items() if name != missing}
        refused("does not fit its target", save_drafter(tmp_path / "less", kind, less, {**described, **facts}))
    if kind == "edd":
        refused(r"does not fit its target \('states_after'\)", save_drafter(tmp_path / "mute", kind, state, described))
        deep = save(tmp_path / "5", kind, target, tensors, states_after=5)
        refused("states after 5 of 4 layers; choose 1 to 4", deep)


def test_fingerprints_tell_them_apart() -> None:
    pairs = [state_pair(kind) for kind in KINDS]
    edd, eagle, eagle3 = pairs
    pairs += [
        replace(edd, drafter=EDDKind(edd.drafter.decoder, 3)),
        replace(edd, drafter=IndependentKind(edd.drafter.decoder)),
        replace(eagle, drafter=EagleKind(draft_of("eagle", eagle.target))),
        replace(eagle3, drafter=Eagle3Kind(draft_of("eagle3", eagle3.target))),
    ]
    assert len({pair.fingerprint for pair in pairs}) == len(pairs)
    assert edd.drafter.facts == {"states_after": 2} and eagle.drafter.facts == {}
    assert eagle3.drafter.facts == {"states_after": [1, 2, 3]}


def test_the_default_states_are_the_fourth_to_last() -> None:
    """Of a list that starts with the embeddings, 32 layers have number 29 there (errata B9)."""
    target = copy.deepcopy(target_of("llama"))
    for layers, split in ((32, 29), (40, 37), (4, 1), (2, 1), (1, 1)):
        target.config.num_hidden_layers = layers
        assert default_split(target) == split
        states = range(layers + 1)
        assert split == max(1, states[-4] if layers > 2 else 1)
    for split in (0, 5, -1):
        target.config.num_hidden_layers = 4
        with pytest.raises(InputError, match=f"states after {split} of 4 layers; choose 1 to 4"):
            check_split(target, split)
