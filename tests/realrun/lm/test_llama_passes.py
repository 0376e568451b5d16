"""The fused, the static and the batched pass give the library's own logits, for any cutting, rollback and batch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import realrun.lm.static.llama as stack
from realrun.lm.batched_llama import BatchedLlama
from realrun.lm.cached import CachedLM, grown
from realrun.lm.choice import make_lm
from realrun.lm.kernels import use_kernels
from realrun.lm.llama import FusedLlama, _adjacent, supported
from realrun.lm.static.llama import PLAIN, StaticLlama
from tests.support.checks import refusal
from tests.support.families import family_model
from tests.support.llama_models import FLOAT64, VOCAB, qwen3, recorded, small_model, with_garbage
from tests.support.tiny import POSITIONS as TINY_POSITIONS
from tests.support.tiny import VOCAB as TINY_VOCAB

MODELS: dict[str, Callable[[], Any]] = {
    "llama": small_model,
    "tied": lambda: small_model(tie_word_embeddings=True),
    "no groups": lambda: small_model(num_key_value_heads=6),
    "one key head": lambda: small_model(num_key_value_heads=1),
    "head size": lambda: small_model(head_dim=16),
    "linear rope": lambda: small_model(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}),
    "qwen3": qwen3,
    "tied qwen3": lambda: qwen3(tie_word_embeddings=True),
}
models = pytest.mark.parametrize("name", MODELS)


@models
@torch.inference_mode()
def test_logits_equal_the_librarys_over_any_cutting_and_rollback(name: str) -> None:
    model = MODELS[name]()
    plain, passes = CachedLM(model), [with_garbage(StaticLlama(model)), FusedLlama(model)]
    rng = np.random.default_rng(5)
    for round_number in range(16):
        tokens = rng.integers(0, VOCAB, rng.integers(1, 8)).tolist()
        if round_number % 4 == 2:
            for lm in (plain, *passes):
                lm.prefill(tokens)
        else:
            expected = plain.forward(tokens)
            for lm in passes:
                torch.testing.assert_close(lm.forward(tokens), expected, **FLOAT64)
        length = int(rng.integers(0, min(plain.length, 40) + 1))
        for lm in (plain, *passes):
            lm.truncate(length)
            assert lm.length == length


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@torch.inference_mode()
def test_ragged_sequences_in_a_batch_equal_one_by_one(name: str) -> None:
    model, rng = MODELS[name](), np.random.default_rng(1)
    lengths = [0, 1, 7, 30]
    batch = with_garbage(StaticLlama(model, batch=len(lengths)))
    single = [CachedLM(model) for _ in lengths]
    for b, (lm, length) in enumerate(zip(single, lengths, strict=True)):
        context = rng.integers(0, VOCAB, length).tolist()
        lm.prefill(context)
        alone = StaticLlama(model)
        alone.prefill(context)
        batch.keys[:, b, :, :length], batch.values[:, b, :, :length] = (
            part[:, 0, :, :length] for part in (alone.keys, alone.values)
        )
    for n in (1, 4, 1, 2):  # the second is taken back by one token
        tokens = torch.from_numpy(rng.integers(0, VOCAB, (len(lengths), n)))
        logits = batch.step(tokens, torch.tensor([lm.length for lm in single], dtype=torch.int32))
        assert logits.shape == (len(lengths), n, VOCAB)
        for b, lm in enumerate(single):
            torch.testing.assert_close(logits[b], lm.forward(tokens[b].tolist()), **FLOAT64)
            if n == 4:
                lm.truncate(lm.length - 1)
    assert batch.length == 0  # `step` leaves lengths to its caller


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("make", [FusedLlama, lambda model: with_garbage(StaticLlama(model))], ids=["fused", "static"])
@torch.inference_mode()
def test_a_long_prompt_equals_the_librarys(
    make: Callable[[Any], CachedLM], start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond LONG_PASS and MAX_STEP_TOKENS, from an empty cache and behind one; buffers grow."""
    monkeypatch.setattr(stack, "PIECE_TOKENS", 100)
    model = small_model(max_position_embeddings=600)
    tokens = np.random.default_rng(2).integers(0, VOCAB, 380).tolist()
    lm, plain = make(model), CachedLM(model)
    for each in (lm, plain):
        each.prefill(tokens[:start])
    torch.testing.assert_close(lm.forward(tokens[start:]), plain.forward(tokens[start:]), **FLOAT64)
    for each in (lm, plain):
        each.truncate(300)
        each.prefill(tokens[:120])
    torch.testing.assert_close(lm.forward(tokens[:3]), plain.forward(tokens[:3]), **FLOAT64)


@torch.inference_mode()
def test_attention_may_lay_out_its_result_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's memory-efficient kernel returns [B, n, H, D] transposed: no view of it has the query's shape."""
    library = torch.nn.functional.scaled_dot_product_attention

    def transposed(*args: Any, **kwargs: Any) -> torch.Tensor:
        return library(*args, **kwargs).transpose(1, 2).contiguous().transpose(1, 2)

    model = small_model(max_position_embeddings=600)
    assert model.config.num_attention_heads > model.config.num_key_value_heads > 1
    tokens = np.random.default_rng(2).integers(0, VOCAB, 300).tolist()
    lm, plain = with_garbage(StaticLlama(model)), CachedLM(model)
    expected = plain.forward([*tokens[:5], *tokens])[5:]
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", transposed)
    lm.prefill(tokens[:5])
    torch.testing.assert_close(lm.forward(tokens), expected, **FLOAT64)  # behind a cache, and longer than a step
    tree = FusedLlama(model)
    for each in (lm, tree):
        each.reset()
        each.prefill(tokens[:5])
    depths, visible = [0] * len(tokens), torch.eye(len(tokens), dtype=torch.bool)
    torch.testing.assert_close(
        lm.forward_nodes(tokens, depths, visible), tree.forward_nodes(tokens, depths, visible), **FLOAT64
    )


@torch.inference_mode()
def test_a_cache_that_grows_keeps_what_it_holds() -> None:
    model = small_model()
    lm, plain = StaticLlama(model, capacity=4), CachedLM(model)
    for n in (3, 2, 9, 1, 40):
        tokens = list(range(n))
        torch.testing.assert_close(lm.forward(tokens), plain.forward(tokens), **FLOAT64)
    assert lm.capacity == 55  # what is needed, as twice the last capacity would be less
    refusal(lambda: lm.forward([1] * 10), "64 positions")
    assert lm.length == 55


@pytest.mark.parametrize("capacity", [0, 65])
def test_a_capacity_that_the_model_cannot_have_is_refused(capacity: int) -> None:
    refusal(lambda: StaticLlama(small_model(), capacity=capacity), f"{capacity} tokens")


@pytest.mark.parametrize("shape", [(1, 3), (2, 0), (2, 257), (6,)])
def test_a_step_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    lm = StaticLlama(small_model(), batch=2)
    refusal(lambda: lm.step(torch.zeros(shape, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)), "give [2, n]")


@torch.inference_mode()
def test_bfloat16_stays_within_its_rounding() -> None:
    """Passes round differently; each must stay as near to float64 as the library's, within a factor of two."""
    for make in (small_model, qwen3):
        low, tokens = make().to(torch.bfloat16), list(range(1, 40))
        truth = CachedLM(make()).forward(tokens)
        theirs = (CachedLM(low).forward(tokens).double() - truth).norm()
        for lm in (StaticLlama(low), FusedLlama(low)):
            assert 0 < (lm.forward(tokens).double() - truth).norm() < 2 * theirs


def test_models_open_with_the_pass_for_their_device_and_kernels() -> None:
    model, biased = small_model(), small_model(attention_bias=True)
    assert type(make_lm(model)) is FusedLlama
    with use_kernels("auto"):
        assert type(make_lm(model)) is FusedLlama
    with use_kernels("reference"):
        assert type(make_lm(model)) is StaticLlama
        assert type(make_lm(biased)) is CachedLM
    assert type(make_lm(model)) is FusedLlama
    assert type(make_lm(qwen3())) is FusedLlama


@pytest.mark.parametrize(
    "model",
    [
        small_model("mistral"),
        small_model(attention_bias=True),
        small_model(hidden_act="gelu"),
        small_model(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}),
        qwen3(use_sliding_window=True, sliding_window=8, max_window_layers=0),
        qwen3(attention_bias=True),
    ],
    ids=["mistral", "bias", "gelu", "dynamic rope", "window", "qwen3 bias"],
)
def test_other_models_use_the_librarys_own_pass(model: Any) -> None:
    assert not supported(model) and type(make_lm(model)) is CachedLM


@torch.inference_mode()
def test_weights_are_joined_in_place_and_once() -> None:
    model = small_model()
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    before = model(input_ids=ids).logits.clone()
    first, second = FusedLlama(model), FusedLlama(model)
    attention = model.model.layers[1].self_attn
    assert first.layers[1].qkv.data_ptr() == second.layers[1].qkv.data_ptr() == attention.q_proj.weight.data_ptr()
    storage = attention.q_proj.weight.untyped_storage().data_ptr()
    assert attention.v_proj.weight.untyped_storage().data_ptr() == storage
    assert torch.equal(model(input_ids=ids).logits, before)


@torch.inference_mode()
def test_every_size_is_recorded_once_and_prompts_never() -> None:
    model = small_model()
    with recorded(model, capacity=20) as (lm, recorder):
        plain = CachedLM(model)
        lm.warm([1, 2, 3, 2], 20)
        assert recorder.captured == 3
        for _ in range(2):
            lm.reset()
            plain.reset()
            lm.prefill([1, 2, 3, 4, 5])
            plain.prefill([1, 2, 3, 4, 5])
            for tokens in ([7], [8, 9], [7, 7, 7]):
                torch.testing.assert_close(lm.forward(tokens), plain.forward(tokens), **FLOAT64)
        assert recorder.captured == 3
        lm.forward([1, 2, 3, 4])  # not warmed: when it is used
        assert recorder.captured == 4


@torch.inference_mode()
def test_buffers_that_move_are_recorded_anew() -> None:
    model = small_model()
    with recorded(model, capacity=8) as (lm, recorder):
        plain = CachedLM(model)
        for _ in range(12):
            torch.testing.assert_close(lm.forward([5]), plain.forward([5]), **FLOAT64)
        assert recorder.captured == 2 and lm.capacity == 16


@pytest.mark.slow
@pytest.mark.parametrize("norms", [False, True])
@torch.inference_mode()
def test_compiled_pieces_equal_the_plain_ones(norms: bool) -> None:
    """Of a GPU's pass, this much can be tried without one. Any number of rows uses one compiled variant."""
    model = (qwen3() if norms else small_model(head_dim=16)).float()
    lm, compiled = StaticLlama(model), StaticLlama(model, compiled=True)
    assert lm._ops is PLAIN and compiled._ops is not PLAIN
    counted = torch._dynamo.utils.counters["stats"]
    for n in (2, 5):
        # Float32 through three layers.
        tokens = list(range(n))
        torch.testing.assert_close(compiled.forward(tokens), lm.forward(tokens), rtol=1e-4, atol=1e-5)
        if n == 2:
            variants = counted["unique_graphs"]
    assert counted["unique_graphs"] == variants
    assert torch.equal(compiled.keys[:, :, :, :7].isnan(), lm.keys[:, :, :, :7].isnan())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [small_model, qwen3])
@torch.inference_mode()
def test_replayed_graphs_equal_eager_launches(make: Callable[[], Any], dtype: torch.dtype) -> None:
    model = make().to(device="cuda", dtype=dtype)
    rng = np.random.default_rng(3)
    eager, plain = StaticLlama(model, graphs=False), StaticLlama(model, graphs=False, compiled=False)
    replayed = StaticLlama(model)
    replayed.warm([1, 2, 5], 64)
    truth = StaticLlama(make().to("cuda"), graphs=False, compiled=False)
    passes = (replayed, eager, plain, truth)
    for lm in passes:
        with_garbage(lm).prefill(list(range(20)))
    for n in (1, 2, 5, 1, 1, 5, 2):
        tokens = rng.integers(0, VOCAB, n).tolist()
        by_graph, by_launch, by_torch, exact = (lm.forward(tokens).double() for lm in passes)
        assert torch.equal(by_graph, by_launch)
        # Compiled pieces round less often than torch's: within twice its error of the exact logits.
        assert (by_graph - exact).norm() < 2 * (by_torch - exact).norm() + 1e-6 * exact.norm()
        for lm in passes:
            lm.truncate(lm.length - n // 2)


# --- Several sequences ---


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
@torch.inference_mode()
def test_ragged_rows_have_the_logits_of_sequences_of_their_own(family: str) -> None:
    """Rows of other lengths, fed other numbers of tokens, cut back to others, and some of them gone."""
    model = family_model(family).double()
    rng = np.random.default_rng(3)
    batched, alone = BatchedLlama(model), [FusedLlama(model) for _ in range(4)]
    batched.reset(4)
    for lm in alone:
        prompt = rng.integers(0, TINY_VOCAB, rng.integers(0, 30)).tolist()
        batched.add(prompt)
        lm.prefill(prompt)
    compared = 0
    for turn in range(12):
        tokens = [rng.integers(0, TINY_VOCAB, rng.integers(0, 6)).tolist() for _ in alone]
        tokens[0] = tokens[0] or [1]
        logits = batched.forward(tokens)
        for row, (lm, fed) in enumerate(zip(alone, tokens, strict=True)):
            if fed:
                torch.testing.assert_close(logits[row, : len(fed)], lm.forward(fed), rtol=0, atol=1e-12)
                compared += len(fed)
        lengths = np.array([int(rng.integers(max(lm.length - 4, 0), lm.length + 1)) for lm in alone])
        batched.truncate(lengths)
        for lm, length in zip(alone, lengths.tolist(), strict=True):
            lm.truncate(length)
        if turn in (5, 9):  # the first of them leaves, then one in the middle
            gone = 0 if turn == 5 else 1
            batched.drop(gone)
            alone[gone] = alone[-1]
            alone.pop()
        assert batched.lengths.tolist() == [lm.length for lm in alone]
    assert len(alone) == 2 and compared > 60


@torch.inference_mode()
def test_a_row_may_be_filled_up_beyond_the_last_position() -> None:
    model = family_model("Llama").double()
    batched, alone = BatchedLlama(model), FusedLlama(model)
    batched.reset(2)
    full = np.random.default_rng(0).integers(0, TINY_VOCAB, TINY_POSITIONS - 1).tolist()
    for tokens in (full, [5]):
        batched.add(tokens)
    alone.prefill(full)
    logits = batched.forward([[7], [1, 2, 3, 4]])
    torch.testing.assert_close(logits[0, :1], alone.forward([7]), rtol=0, atol=1e-12)


def test_other_models_are_refused() -> None:
    refusal(lambda: BatchedLlama(family_model("Qwen2")), "Qwen2ForCausalLM", "choose another")


@pytest.mark.parametrize("gap", [0, 4])
def test_weights_that_lie_side_by_side_are_joined_without_a_copy(gap: int) -> None:
    """As gate and up projections do in a mapped file; others are copied."""
    buffer = torch.randn(5 * 4 + gap)
    weights = [buffer[:8].view(2, 4), buffer[8 + gap :].view(3, 4)]
    joint = _adjacent(weights)
    assert torch.equal(joint, torch.cat(weights))
    assert (joint.data_ptr() == buffer.data_ptr()) == (gap == 0)
    turned = torch.randn(32)  # columns first, so that a row's numbers lie apart
    apart = [turned[:16].view(4, 4).T, turned[16:].view(4, 4).T]
    assert torch.equal(_adjacent(apart), torch.cat(apart))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_does_not_write_into_the_cache() -> None:
    rows = grown(torch.zeros(2, 0, 4), 5)
    child = os.fork()
    if not child:
        rows[...] = 1
        os._exit(0)
    os.waitpid(child, 0)
    assert rows.shape == (2, 256, 4) and not rows.any()
