"""Drafters whose single pass drafts a whole block: DFlash (arXiv:2602.06036), P-EAGLE (arXiv:2602.01469), DSpark.

A round's pass has one row for the pending token and one for each mask token after it, at the positions that follow
the text. Context rows represent the text. They are computed from the target's hidden states after several of its
layers, which a projection `fc` fuses into one state per token.

    DFlash   A context row is a token's fused state after a norm; every layer computes keys and values from it. The rows
             of a block attend to the context and to each other. The pending token's row drafts nothing, unless
             `draws_anchor` is set.
    P-EAGLE  Rows are EAGLE-3's: a token's embedding and the fused state of the token before it. Mask rows have a
             learned state in place of the target's. Every row attends to the rows before it; all rows of a block draft.
    DSpark   DFlash with a Markov head: each token adds w2 w1[token] to the logits of the next token, optionally gated
             by the row's state. In most of its checkpoints the pending token's row drafts as well.

A smaller block of DFlash or DSpark drafts other tokens than the first ones of a larger block, because its rows attend
to fewer masks. A smaller block of P-EAGLE drafts the same tokens.

References: vLLM's model_executor/models/qwen3_dflash.py and llama_eagle3.py, whose weight names are used here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

from realrun.decode.acceptance_predictor import Predictor
from realrun.decode.draft_model import DraftModel
from realrun.decode.sampling import Sampler
from realrun.drafters.eagle3 import (
    EMBEDDING,
    HEAD,
    Fusion,
    MidLayer,
    cut_vocabulary,
    layer_config,
    mid_layer,
    plain_layer,
)
from realrun.drafters.kind import DrafterFacts, DrafterKind, draft_vocabulary
from realrun.lm.cached import CachedLM, grown
from realrun.lm.choice import static_serves
from realrun.lm.head import Float32Head, PartialHead, gives_float32, logits_type, spread
from realrun.lm.layer_stack import model_parts
from realrun.lm.split_target import SplitTarget
from realrun.lm.static.split import StaticSplitTarget
from realrun.lm.variants import core_of, layers_below
from realrun.proposals.positionwise import Positionwise, positionwise_columns
from realrun.proposals.recorder import Columns, Recorder, RecordRequest
from specsim.cost.roofline.config import ModelConfig
from specsim.io.errors import InputError

DFLASH, P_EAGLE = "dflash", "p-eagle"
W1, W2, GATE = (f"markov_head.{name}.weight" for name in ("markov_w1", "markov_w2", "gate_proj"))
BLOCKS = 16  # blocks that recording computes at once

KeysValues = list[tuple[torch.Tensor, ...]]  # of every layer: keys and values, [Hkv, n, D] each


class MarkovHead(torch.nn.Module):
    """DSpark's head: the bias that a token adds to the logits of the next token. Named as in checkpoints."""

    def __init__(self, vocabulary: int, drafted: int, rank: int, size: int, gated: bool):
        super().__init__()
        self.markov_w1 = torch.nn.Embedding(vocabulary, rank)
        self.markov_w2 = torch.nn.Linear(rank, drafted, bias=False)
        self.gate_proj = torch.nn.Linear(size + rank, rank) if gated else None

    def forward(self, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Compute the bias [n, V] of states [n, d] and the tokens before them, int64 [n]."""
        embedded = self.markov_w1(previous)
        if self.gate_proj is not None:
            embedded = embedded * torch.sigmoid(self.gate_proj(torch.cat([states, embedded], dim=-1)))
        bias: torch.Tensor = self.markov_w2(embedded)
        return bias


class Block(Fusion):
    """The trained modules, under the names of published checkpoints.

    config : config.json of the layers, with these keys added: form, "dflash" or "p-eagle"; states_after, the numbers of
        target layers after which states are read, ascending; mask, the id of the mask token; tokens, the number of
        tokens that a block drafts in training; draws_anchor, whether the pending token's row drafts the first of them;
        causal, whether a row of DFlash attends only to the block's rows before it
    own : names of the tensors in the drafter's file; a head or embedding that the file lacks is the target's
    tokens : int64 [n], the draft vocabulary of the drafter's own head; None for all tokens
    """

    layers: Any
    mask: torch.Tensor  # [d], embedding of the mask token

    def __init__(self, target: Any, config: ModelConfig, own: Sequence[str] = (), tokens: torch.Tensor | None = None):
        self._check(config, target)
        sizes, chosen = layer_config(config), tuple(config["states_after"])
        size, eps = int(sizes.hidden_size), sizes.rms_norm_eps
        super().__init__(sizes, len(chosen))
        self.facts, self.config, self.tokens = config, sizes, tokens
        self.form, self.states_after = config["form"], chosen
        self.layers = torch.nn.ModuleList(plain_layer(sizes, number) for number in range(int(sizes.num_hidden_layers)))
        self.norm = LlamaRMSNorm(size, eps=eps)
        if self.form == DFLASH:
            self.hidden_norm = LlamaRMSNorm(size, eps=eps)
        else:
            self.layers[0] = mid_layer(sizes)
            self.mask_hidden = torch.nn.Parameter(torch.zeros(1, 1, len(chosen) * size))
        rows, vocabulary = None if tokens is None else len(tokens), int(target.config.vocab_size)
        if EMBEDDING in own:
            self.embed_tokens = torch.nn.Embedding(vocabulary, size)
        if HEAD in own:
            linear = Float32Head if gives_float32(target) else torch.nn.Linear
            self.lm_head = linear(size, rows or vocabulary, bias=False)
        rank = int(config.get("markov_rank") or 0)
        self.markov_head = MarkovHead(vocabulary, rows or vocabulary, rank, size, GATE in own) if rank else None
        self.to(target.device, target.dtype)
        self.rotary = LlamaRotaryEmbedding(self.config).to(target.device)
        self.out_features, self.logits_type = vocabulary, logits_type(target)
        # In lists, so that the target's modules do not become part of this module's state.
        head = self.lm_head if HEAD in own else target.get_output_embeddings()
        embedding = self.embed_tokens if EMBEDDING in own else target.get_input_embeddings()
        self._head = [head if tokens is None else PartialHead(head, tokens, vocabulary)]
        self._embedding = [embedding]
        mask = torch.zeros_like(self.norm.weight) if EMBEDDING in own else mask_embedding(target, int(config["mask"]))
        self.register_buffer("mask", mask.detach(), persistent=False)

    @staticmethod
    def _check(config: ModelConfig, target: Any) -> None:
        """Raise InputError unless the drafter's layer numbers and hidden size fit the target."""
        chosen, layers = [*config["states_after"]], int(core_of(target).config.num_hidden_layers)
        own = "give the target that it was trained for"
        if not chosen or chosen != sorted({*chosen}) or not 0 <= chosen[0] <= chosen[-1] <= layers:
            raise InputError(
                f"the drafter reads states after {', '.join(map(str, chosen))} of its target's layers, and this target "
                f"has {layers}; {own}"
            )
        size = int(target.config.get_text_config().hidden_size)
        if (config["hidden_size"], config.get("target_hidden_size") or size) != (size, size):
            raise InputError(f"the drafter has hidden size {config['hidden_size']}, this target {size}; {own}")

    @property
    def masks_first(self) -> int:
        """Return the number of the block's row that drafts its first token."""
        return int(self.form == DFLASH and not self.facts.get("draws_anchor"))

    @property
    def shift(self) -> int:
        """Count the tokens at the beginning of the text that have no context row."""
        return int(self.form == P_EAGLE)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Compute logits [n, V] of normed states [n, d]."""
        logits: torch.Tensor = self._head[0](states)
        return logits

    def bias(self, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """Compute the bias [n, V] of the logits of the tokens after `previous`, int64 [n], with states [n, d]."""
        assert self.markov_head is not None
        some = self.markov_head(states, previous).to(self.logits_type)
        return some if self.tokens is None else spread(some, self.tokens, self.out_features)

    def fuse(self, states: torch.Tensor) -> torch.Tensor:
        fused = super().fuse(states)
        return self.hidden_norm(fused) if self.form == DFLASH else fused

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self._embedding[0](tokens)
        return embedded

    def context(self, tokens: torch.Tensor, states: torch.Tensor, cached: KeysValues, start: int) -> KeysValues:
        """Compute every layer's keys and values of the context rows of n tokens, which follow `start` others.

        tokens : int64 [n], unused by DFlash
        states : the target's [n, k d]: after the tokens themselves for DFlash, after the tokens before them for P-EAGLE
        cached : keys and values of the rows before
        """
        n, positions = len(states), torch.arange(start, start + len(states), device=states.device)
        fused = self.fuse(states)
        if self.form == DFLASH:
            return [self._keys_values(layer.self_attn, fused, positions) for layer in self.layers]
        slots = len(cached[0][0][0])
        seen = torch.ones(n, slots + n, dtype=torch.bool, device=states.device).tril_(slots)
        x, made = torch.cat([self.embed(tokens), fused], dim=-1), KeysValues()
        for layer, before in zip(self.layers, cached, strict=True):
            x, new = self._through(layer, x[None], positions[None], before, seen[None])
            x = x[0]
            made.append((new[0][0], new[1][0]))
        return made

    def run(
        self, pending: torch.Tensor, state: torch.Tensor | None, cached: KeysValues, before: torch.Tensor, drafted: int
    ) -> torch.Tensor:
        """Compute the normed states [m, drafted, d] of m blocks that share the context rows.

        pending : int64 [m], the blocks' pending tokens
        state : the target's states [m, k d] of the tokens before those; only P-EAGLE reads them
        before : int64 [m], the number of tokens before each pending token
        """
        m, rows = len(pending), drafted + self.masks_first
        masks = self.mask.expand(m, rows - 1, -1)
        x = torch.cat([self.embed(pending)[:, None], masks], dim=1)
        if self.form == P_EAGLE:
            assert state is not None
            fused = self.fuse(torch.cat([state[:, None], self.mask_hidden.expand(m, rows - 1, -1)], dim=1))
            x = torch.cat([x, fused], dim=-1)
        positions = before[:, None] + torch.arange(rows, device=before.device)
        slots = torch.arange(len(cached[0][0][0]), device=before.device)
        prefix = (slots < before[:, None] - self.shift)[:, None].expand(m, rows, -1)
        own = torch.ones(rows, rows, dtype=torch.bool, device=before.device)
        if self.form == P_EAGLE or self.facts.get("causal"):
            own = own.tril()
        seen = torch.cat([prefix, own.expand(m, rows, rows)], dim=-1)
        for layer, keys_values in zip(self.layers, cached, strict=True):
            x, _ = self._through(layer, x, positions, keys_values, seen)
        states: torch.Tensor = self.norm(x[:, self.masks_first :])
        return states

    def along(self, text: torch.Tensor, states: torch.Tensor, first: int, drafted: int) -> torch.Tensor:
        """Compute `run` for the blocks whose pending tokens are those of a text from position `first` on.

        text : int64 [T]; states : the target's [T, k d] after these tokens
        """
        shift = self.shift
        cached = self.context(text[shift:], states[: len(states) - shift], self.nothing, shift)
        before = torch.arange(first, len(text), device=text.device)
        above = F.pad(states, (0, 0, 1, 0))[before]  # before the first token there is no state
        parts = [
            self.run(text[before[i:j]], above[i:j], cached, before[i:j], drafted)
            for i, j in pairwise([*range(0, len(before), BLOCKS), len(before)])
        ]
        return torch.cat(parts)

    @property
    def nothing(self) -> KeysValues:
        """Keys and values of an empty context."""
        none = self.fc.weight.new_empty(self.config.num_key_value_heads, 0, self.layers[0].self_attn.head_dim)
        return [(none, none) for _ in self.layers]

    def _keys_values(self, attention: Any, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute keys and values [..., Hkv, n, D] of x [..., n, d] at positions [..., n]."""
        keys, values = (
            projection(x).unflatten(-1, (-1, attention.head_dim)) for projection in (attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "k_norm"):
            keys = attention.k_norm(keys)
        return self._rotated(keys.transpose(-3, -2), positions), values.transpose(-3, -2)

    def _rotated(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        flat = positions.reshape(1, -1)
        cos, sin = (part[0].unflatten(0, positions.shape).unsqueeze(-3) for part in self.rotary(heads, flat))
        rotated: torch.Tensor = heads * cos + rotate_half(heads) * sin
        return rotated

    def _through(
        self,
        layer: Any,
        x: torch.Tensor,
        positions: torch.Tensor,
        cached: tuple[torch.Tensor, ...],
        seen: torch.Tensor,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run a layer over rows x [m, n, d]; return its output and the rows' keys and values.

        cached : keys and values of the context; seen : bool [m, n, context + n], the slots that each row attends to
        """
        attention = layer.self_attn
        x, normed = layer.opened(x) if isinstance(layer, MidLayer) else (x, layer.input_layernorm(x))
        queries = attention.q_proj(normed).unflatten(-1, (-1, attention.head_dim))
        if hasattr(attention, "q_norm"):
            queries = attention.q_norm(queries)
        new = self._keys_values(attention, normed, positions)
        keys, values = (
            torch.cat([old.expand(len(x), *old.shape), own], dim=2) for old, own in zip(cached, new, strict=True)
        )
        heads = F.scaled_dot_product_attention(
            self._rotated(queries.transpose(1, 2), positions), keys, values, seen[:, None], enable_gqa=True
        )
        x = x + attention.o_proj(heads.transpose(1, 2).flatten(2))
        return x + layer.mlp(layer.post_attention_layernorm(x)), new


def mask_embedding(target: Any, mask: int) -> torch.Tensor:
    """Look up the target's embedding [d] of the mask token, which may be padding beyond the tokenizer's tokens."""
    embedding = target.get_input_embeddings()
    rows, padding = len(embedding.weight), getattr(target, "padding_embeddings", ())
    if mask < rows:
        found: torch.Tensor = embedding(torch.tensor(mask, device=embedding.weight.device))
        return found
    if mask - rows >= len(padding):
        raise InputError(
            f"the drafter's mask token is {mask} and this target has {rows} embeddings; give the target that it was "
            "trained for"
        )
    return padding[mask - rows] * getattr(embedding, "embed_scale", 1.0)


class BlockLM(CachedLM):
    """The drafter's pass over a target that keeps its hidden states after the layers that the drafter reads.

    rows : number of tokens with context rows; length : these and, during a round, the pending and drafted tokens
    step : number of the block's rows whose logits were returned in this round
    """

    reads_target_states = True

    def __init__(self, target: SplitTarget | StaticSplitTarget, block: Block, drafted: int):
        self.target, self.block, self.drafted = target, block, drafted
        super().__init__(target.model)

    def reset(self) -> None:
        self.length = self.nodes = self.rows = self.step = 0
        self.hidden = None
        self.buffers = [[*pair] for pair in self.block.nothing]

    @property
    def cached(self) -> KeysValues:
        """Keys and values of the context rows."""
        slots = max(self.rows - self.block.shift, 0)
        return [(keys[:, :slots], values[:, :slots]) for keys, values in self.buffers]

    def fill(self, tokens: Sequence[int]) -> None:
        """Compute the context rows of the next tokens, which the target has verified."""
        start, end, shift = self.rows, self.rows + len(tokens), self.block.shift
        first = max(start, shift)
        if first < end:
            states = self.target.states[first - shift : end - shift]
            ids = torch.tensor(tokens[first - start :], device=self.device)
            made = self.block.context(ids, states, self.cached, first)
            for buffers, new in zip(self.buffers, made, strict=True):
                buffers[:] = [grown(buffer, end - shift) for buffer in buffers]
                for buffer, part in zip(buffers, new, strict=True):
                    buffer[:, first - shift : end - shift] = part
        self.rows = end

    def truncate(self, length: int) -> None:
        """Keep only context rows, of `length` tokens at most."""
        self.rows = self.length = min(self.rows, length)
        self.nodes = self.step = 0

    def keep_nodes(self, path: Sequence[int]) -> None:
        self.truncate(self.rows)

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        if self.length + len(tokens) <= self.target.length:
            self.fill(tokens)
            return torch.empty(0, self.block.out_features, dtype=self.block.logits_type, device=self.device)
        if self.length <= self.target.length:
            self.fill(tokens[:-1])
            self.states = self._block(tokens[-1])
        return self._next_row(tokens[-1:])

    def _block(self, pending: int) -> torch.Tensor:
        """Run the round's pass; return the normed states [drafted, d]."""
        before, block = self.rows, self.block
        # Before the first token there is no state.
        state = (
            self.target.states[before - 1 : before] if before else self.target.states.new_zeros(1, block.fc.in_features)
        )
        at = torch.tensor([before], device=self.device)
        return block.run(torch.tensor([pending], device=self.device), state, self.cached, at, self.drafted)[0]

    def _forward_nodes(self, tokens: Sequence[int], depths: Sequence[int], visible: torch.Tensor) -> torch.Tensor:
        return self._next_row(tokens)

    def _next_row(self, previous: Sequence[int]) -> torch.Tensor:
        """Return the logits [n, V] of the block's next row after n tokens, on which only the Markov bias depends."""
        if self.step == self.drafted:
            raise InputError(f"a block drafts at most {self.drafted} tokens; lower the policy's limit")
        states = self.states[self.step : self.step + 1]
        self.step += 1
        if self.keep_hidden:
            self.hidden = states
        logits = self.block.logits(states).expand(len(previous), -1)
        if self.block.markov_head is None:
            return logits
        return logits + self.block.bias(states.expand(len(previous), -1), torch.tensor(previous, device=self.device))

    def check_trees(self) -> None:
        """Do nothing: the rows do not read drafted tokens, so that they need no tree mask."""


class BlockProposals(Positionwise):
    """The blocks' proposals at T positions. rows : their normed states [T, drafted, d]."""

    def __init__(self, block: Block, rows: torch.Tensor):
        self.block, self.rows, self.chained = block, rows, block.markov_head is not None

    def bias(self, states: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        return self.block.bias(states, previous)

    def states(self, step: int) -> torch.Tensor:
        return self.rows[:, step]

    def logits(self, step: int, states: torch.Tensor) -> torch.Tensor:
        return self.block.logits(states)


@torch.inference_mode()
def block_columns(target: SplitTarget, block: Block, drafted: int, request: RecordRequest) -> Columns:
    """Record what blocks of `drafted` tokens draft at every position; a `Recorder` once the first three are bound."""
    if request.depth > drafted:
        raise InputError(f"a block drafts at most {drafted} tokens, not {request.depth}; lower the depth")
    text, first = [*request.prompt, *request.output[:-1]], len(request.prompt)
    target.reset()
    target.prefill(text)
    rows = block.along(torch.tensor(text, device=target.device), target.states[: len(text)], first - 1, drafted)
    return positionwise_columns(target.model, BlockProposals(block, rows), request)


@dataclass(frozen=True, eq=False)
class BlockKind(DrafterKind):
    """A block drafter: its file holds the state of `Block`, the tables of its vocabulary and the fact "config".

    drafted : number of tokens that a block drafts
    """

    block: Block
    drafted: int

    name: ClassVar[str] = "block"

    @classmethod
    def check_target(cls, target: Any) -> None:
        model_parts(target)

    @classmethod
    def load(cls, target: Any, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> tuple[Any, Self]:
        own, size, config = dict(tensors), int(target.config.vocab_size), ModelConfig(facts["config"])
        tokens = cut_vocabulary(own, size, HEAD, W2)
        embedding = own.get(EMBEDDING)
        for name in (W1, EMBEDDING, *((W2,) if HEAD not in own else ())):
            if name in own:
                own[name] = own[name][:size]
        block = Block(target, config, [*own], None if tokens is None else tokens.to(target.device))
        block.load_state_dict(own)
        if embedding is not None:
            block.mask = embedding[int(config["mask"])].to(block.mask)
        return target, cls.of_block(block.eval().requires_grad_(False))

    @classmethod
    def of_block(cls, block: Block) -> Self:
        """Make the drafter of these modules, with blocks as long as in training."""
        return cls(block, int(block.facts["tokens"]))

    @property
    def trees(self) -> bool:  # type: ignore[override]
        """Say whether it drafts trees; a Markov head does not, because siblings would depend on their parent."""
        return self.block.markov_head is None

    def of(self, drafted: int) -> Self:
        """Copy this drafter for blocks of this many tokens."""
        if not 1 <= drafted <= self.trained:
            raise InputError(
                f"blocks of {drafted} tokens are not supported; this drafter was trained for 1 to {self.trained}"
            )
        return replace(self, drafted=drafted)

    @property
    def trained(self) -> int:
        """Return the number of tokens that a block drafts in training."""
        return int(self.block.facts["tokens"])

    def make_passes(self, target: Any, *, static: bool = False) -> tuple[Any, BlockLM]:
        """Make the target's pass, over a static cache if asked, and the drafter's eager pass over its states."""
        form = StaticSplitTarget if static else SplitTarget
        split = form(target, *(layers_below(target, layers) for layers in self.block.states_after))
        return split, BlockLM(split, self.block, self.drafted)

    def make_drafter(
        self, target: Any, eos_token_ids: Sequence[int], predictor: Predictor | None
    ) -> tuple[CachedLM, DraftModel]:
        split, lm = self.make_passes(target, static=static_serves(target))
        drafter = DraftModel(lm, eos_token_ids, predictor)
        drafter.max_depth = self.drafted
        return split, drafter

    def make_recorder(self, target: Any, sampler: Sampler) -> Recorder:
        return partial(block_columns, self.make_passes(target)[0], self.block, self.drafted)

    @property
    def max_depth(self) -> int:
        return self.drafted

    @property
    def facts(self) -> DrafterFacts:
        return {
            "form": self.block.form,
            "block": self.drafted,
            "trained_block": self.trained,
            "states_after": [*self.block.states_after],
            **draft_vocabulary(self.block.tokens),
        }

    def weights(self, target: Any) -> Sequence[torch.nn.Module]:
        return (self.block,)
