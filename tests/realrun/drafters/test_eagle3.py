"""EAGLE-3's drafter against its arithmetic written out, as vLLM's llama_eagle3.py has it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from realrun.drafters.eagle3 import Eagle3Kind, default_states
from realrun.pairs.pair import Pair
from realrun.train.eagle3 import Eagle3Settings, Eagle3Training, unrolled
from realrun.train.edd import states_and_logits
from specsim.io.errors import InputError
from tests.support.pairs.state import state_pair


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


def reference(pair: Pair, context: Sequence[int], drafted: Sequence[int]) -> torch.Tensor:
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
    with pytest.raises(InputError, match="EAGLE-3 reads 3 states and this target has 2 layers; train EAGLE instead"):
        default_states(2)


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
                    log_q = reference(pair, row[: pending + 1], row[pending + 1 : pending + 1 + k]).log_softmax(-1)
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
