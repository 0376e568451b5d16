"""A leaner forward pass for Hugging Face Llama and Qwen3 models: same weights, same arithmetic, fewer calls.

At batch 1 a small model spends most of a pass between its operations, not in them. This
pass joins the projections that share an input, keeps keys and values in one buffer that is
written in place, and calls no module but the head. Results differ from the library's by rounding only.
Baseline and speculative decoding use it alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM, PreTrainedModel, Qwen3ForCausalLM

from realrun.lm.cached import CachedLM
from realrun.lm.variants.skipped_layers import NOTHING, SkippedSublayers

LONG_PASS = 64  # new tokens; beyond it, attention goes through the library's fused operation
FIRST_ROOM = 256  # cached tokens that the buffers hold at first
TREE_ROOM = 256  # slots that growing buffers may have beyond the model's positions, for a tree's nodes


@dataclass(frozen=True)
class Layer:
    """A layer's weights; those that share an input are rows of one matrix."""

    norm_in: torch.Tensor
    qkv: torch.Tensor  # [(Hq + 2 Hkv) * head_dim, hidden]
    q_norm: torch.Tensor | None  # [head_dim]; Qwen3 normalises every head
    k_norm: torch.Tensor | None
    out: torch.Tensor
    norm_mlp: torch.Tensor
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    down: torch.Tensor


def supported(model: PreTrainedModel) -> bool:
    """Plain Llama or Qwen3: no biases, SiLU, full attention, positions that do not depend on the sequence length."""
    if type(model) not in (LlamaForCausalLM, Qwen3ForCausalLM):
        return False
    config: Any = model.config
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return (
        not config.attention_bias
        and not getattr(config, "mlp_bias", False)
        and config.hidden_act == "silu"
        and rope_type in ("default", "llama3", "linear")
        and set(getattr(config, "layer_types", None) or ()) <= {"full_attention"}
    )


class LlamaLM(CachedLM):
    """CachedLM with the weights of a Llama or Qwen3 model taken out of their modules."""

    @torch.inference_mode()
    def __init__(self, model: Any):  # a LlamaForCausalLM or Qwen3ForCausalLM
        config = model.config
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = model.model.layers[0].self_attn.head_dim
        self.scaling = self.head_dim**-0.5
        self.eps = config.rms_norm_eps
        self.embedding = model.model.embed_tokens.weight
        self.norm_out = model.model.norm.weight
        self.head = model.lm_head
        self.layers = [_join(layer) for layer in model.model.layers]
        positions = torch.arange(config.max_position_embeddings, device=model.device)[None]
        cos, sin = model.model.rotary_emb(self.embedding[:1, :1], positions)
        half = self.head_dim // 2
        # rotate_half as a multiplication: the first half of the sine changes sign.
        sign = torch.cat([-torch.ones(half), torch.ones(half)]).to(sin)
        self.cos, self.sin = cos[0, :, None], (sin[0] * sign)[:, None]  # [positions, 1, D]
        super().__init__(model)

    def logits_of(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of states [..., d] after the final norm."""
        logits: torch.Tensor = self.head(hidden)
        return logits

    def _check_trees(self) -> None:
        """All models with these weights can do it."""

    def _crop(self, end: int) -> None:
        """The buffers need not know where the tokens end."""

    def _causal_mask(self, n: int, end: int) -> torch.Tensor:
        """[groups * n, L]: new token i sees the cache and the new tokens up to itself."""
        mask = torch.full((n, n), float("-inf"), dtype=self.model.dtype, device=self.device).triu_(1)
        return self._behind_cache(mask, end)

    def _tree_mask(self, visible: torch.Tensor, end: int) -> torch.Tensor:
        """[groups * n, L]: new node i sees the cached tokens and the nodes j where visible[i, j], [n, nodes + n]."""
        mask = torch.zeros(visible.shape, dtype=self.model.dtype).masked_fill_(~visible, float("-inf"))
        return self._behind_cache(mask.to(self.device), end)

    def _behind_cache(self, mask: torch.Tensor, end: int) -> torch.Tensor:
        """A mask [n, k] of the last k of `end` slots, for all slots and all query heads of a group."""
        return F.pad(mask, (end - mask.shape[1], 0)).repeat(self.heads // self.kv_heads, 1)


class FusedStack:
    """Consecutive layers of such a model with their keys and values, in buffers that grow.

    n new tokens or nodes, H heads, D head size, L slots. Slots are whose key or value lies where; the
    caller knows which are taken.
    """

    def __init__(self, lm: LlamaLM, layers: Sequence[Layer]):
        self.lm, self.layers = lm, layers
        shape = (len(layers), lm.kv_heads, 0, lm.head_dim)
        self.keys = torch.empty(shape, dtype=lm.model.dtype, device=lm.device)
        self.values = torch.empty_like(self.keys)

    def run(
        self,
        x: torch.Tensor,
        start: int,
        positions: slice | torch.Tensor,
        mask: torch.Tensor | None,
        skip: SkippedSublayers = NOTHING,
    ) -> torch.Tensor:
        """Hidden states [n, d] of these layers for input x [n, d]; keys and values enter slots `start` and on.

        positions : of the rows; mask : [groups * n, start + n], added to the scores; skip : sublayers passed over
        """
        end = start + len(x)
        self._reserve(end)
        turns = self.lm.cos[positions], self.lm.sin[positions]
        for number, layer in enumerate(self.layers):
            if number not in skip.attention:
                q = self._project(number, layer, x, start, turns)
                keys, values = self.keys[number, :, :end], self.values[number, :, :end]
                x = x + F.linear(self._attend(q, keys, values, mask), layer.out)
            if number not in skip.mlp:
                gate, up = F.linear(rms_norm(x, layer.norm_mlp, self.lm.eps), layer.gate_up).chunk(2, dim=-1)
                x = x + F.linear(F.silu(gate).mul_(up), layer.down)
        return x

    def fill(self, x: torch.Tensor, start: int, positions: slice) -> None:
        """Of a stack of one layer, the keys and values of rows x [n, d], whose output is not needed."""
        (layer,) = self.layers
        self._reserve(start + len(x))
        self._project(0, layer, x, start, (self.lm.cos[positions], self.lm.sin[positions]))

    def _project(
        self, number: int, layer: Layer, x: torch.Tensor, start: int, turns: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """Queries [n, H, D] of rows x [n, d] in this layer; their keys and values enter slots `start` and on.

        turns : cosines and sines of their positions
        """
        lm, end, (cos, sin) = self.lm, start + len(x), turns
        qkv = F.linear(rms_norm(x, layer.norm_in, lm.eps), layer.qkv)
        qkv = qkv.view(len(x), lm.heads + 2 * lm.kv_heads, lm.head_dim)
        qk, v = qkv.split([lm.heads + lm.kv_heads, lm.kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk.split([lm.heads, lm.kv_heads], dim=1)
            qk = torch.cat([rms_norm(q, layer.q_norm, lm.eps), rms_norm(k, layer.k_norm, lm.eps)], dim=1)
        qk = torch.addcmul(qk * cos, qk.roll(lm.head_dim // 2, dims=-1), sin)
        q, k = qk.split([lm.heads, lm.kv_heads], dim=1)
        self.keys[number, :, start:end] = k.transpose(0, 1)
        self.values[number, :, start:end] = v.transpose(0, 1)
        return q

    def move(self, slots: Sequence[int], start: int) -> None:
        """Copy the keys and values of these slots, in place, to slots `start` and on."""
        source = torch.tensor(slots, device=self.keys.device)
        for cached in (self.keys, self.values):
            cached[:, :, start : start + len(slots)] = cached[:, :, source]

    def _reserve(self, length: int) -> None:
        """Make room for `length` slots, at least doubling, so that copies stay rare."""
        have = self.keys.shape[2]
        if length > have:
            most = self.lm.max_positions + TREE_ROOM
            room = max(length, min(most, max(2 * have, FIRST_ROOM))) - have
            self.keys, self.values = (F.pad(part, (0, 0, 0, room)) for part in (self.keys, self.values))

    def _attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention output [n, H * D] for q [n, H, D] and keys, values [Hkv, L, D]."""
        lm = self.lm
        n, groups = len(q), lm.heads // lm.kv_heads
        # The query heads of one key-value head are rows of one matrix: [Hkv, groups * n, L].
        q = q.view(n, lm.kv_heads, groups, lm.head_dim).permute(1, 2, 0, 3)
        q = q.reshape(lm.kv_heads, groups * n, lm.head_dim)
        if n > LONG_PASS:  # a prompt: do not hold all its scores at once
            mixed = F.scaled_dot_product_attention(q[None], keys[None], values[None], attn_mask=mask, scale=lm.scaling)[
                0
            ]
        else:
            scores = torch.matmul(q, keys.transpose(1, 2)).mul_(lm.scaling)
            if mask is not None:
                scores += mask
            mixed = torch.matmul(scores.softmax(-1), values)
        return mixed.view(lm.kv_heads, groups, n, -1).permute(2, 0, 1, 3).reshape(n, -1)


class FusedLlama(LlamaLM):
    """One sequence over one stack of all layers."""

    def reset(self) -> None:
        """Forget everything; the buffers stay."""
        if not hasattr(self, "stack"):
            self.stack = FusedStack(self, self.layers)
        self.length = self.nodes = 0
        self.hidden = None

    @property
    def keys(self) -> torch.Tensor:
        """[layers, Hkv, room, D], as are `values`."""
        return self.stack.keys

    @property
    def values(self) -> torch.Tensor:
        return self.stack.values

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        n, end = len(tokens), self.length + len(tokens)
        mask = self._causal_mask(n, end) if n > 1 else None
        return self._pass(tokens, self.length, slice(self.length, end), mask, keep)

    def _forward_nodes(self, tokens: Sequence[int], depths: Sequence[int], visible: torch.Tensor) -> torch.Tensor:
        start = self.length + self.nodes
        positions = torch.tensor([self.length + depth for depth in depths], device=self.device)
        mask = None if bool(visible.all()) else self._tree_mask(visible, start + len(tokens))
        return self._pass(tokens, start, positions, mask, keep=0)

    def _move_nodes(self, path: Sequence[int]) -> None:
        self.stack.move([self.length + node for node in path], self.length)

    def _pass(
        self,
        tokens: Sequence[int],
        start: int,
        positions: slice | torch.Tensor,
        mask: torch.Tensor | None,
        keep: int,
    ) -> torch.Tensor:
        """Logits after the last `keep` tokens, or all if 0; see `FusedStack.run`."""
        x = F.embedding(torch.tensor(tokens, device=self.device), self.embedding)
        x = self.stack.run(x, start, positions, mask)
        x = rms_norm(x[-keep:] if keep else x, self.norm_out, self.eps)
        if self.keep_hidden:
            self.hidden = x
        return self.logits_of(x)


class FusedParts:
    """`realrun.lm.layer_stack.ModelParts` over these passes."""

    def __init__(self, model: Any):
        self.lm = FusedLlama(model)

    def stack(self, layers: Sequence[Any]) -> FusedStack:
        return FusedStack(self.lm, [_join(layer) for layer in layers])

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        return F.embedding(torch.tensor(tokens, device=self.lm.device), self.lm.embedding)

    def normed(self, x: torch.Tensor, norm: Any) -> torch.Tensor:
        return rms_norm(x, norm.weight, self.lm.eps)

    def logits(self, hidden: torch.Tensor, head: Any) -> torch.Tensor:
        logits: torch.Tensor = head(hidden)
        return logits

    def causal_mask(self, n: int, end: int) -> torch.Tensor | None:
        return self.lm._causal_mask(n, end) if n > 1 else None

    def tree_mask(self, visible: torch.Tensor, end: int) -> torch.Tensor | None:
        return None if bool(visible.all()) else self.lm._tree_mask(visible, end)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x over its root mean square along the last dimension, times the weight."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    # The library normalises in float32 whatever the model's type.
    return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype) * weight


def _join(layer: Any) -> Layer:
    """A layer's weights, with those that share an input in one matrix.

    The modules' weights become views into the joint matrix, so memory does not double.
    """
    attention, mlp = layer.self_attn, layer.mlp
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    return Layer(
        norm_in=layer.input_layernorm.weight,
        qkv=_joint(attention.q_proj, attention.k_proj, attention.v_proj),
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if k_norm is None else k_norm.weight,
        out=attention.o_proj.weight,
        norm_mlp=layer.post_attention_layernorm.weight,
        gate_up=_joint(mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj.weight,
    )


def _joint(*projections: torch.nn.Linear) -> torch.Tensor:
    rows = [projection.out_features for projection in projections]
    first = projections[0].weight
    size = sum(rows) * first.shape[1]
    if first.untyped_storage().size() >= size * first.element_size() and first.storage_offset() == 0:
        whole = first.as_strided((sum(rows), first.shape[1]), (first.shape[1], 1))
        if all(p.weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() for p in projections):
            return whole  # joined before
    joint = torch.cat([projection.weight for projection in projections])
    for projection, part in zip(projections, joint.split(rows), strict=True):
        projection.weight.data = part
    return joint
