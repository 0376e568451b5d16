"""A Hugging Face causal language model and its key-value cache: a single sequence at batch 1.

Layers may have sliding windows. After a draft is rolled back, tokens that had left a window are in it again. The cache
therefore keeps all keys and values of every layer, and the masks implement the window.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from math import prod
from mmap import ACCESS_COPY, mmap
from typing import Any, Protocol

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import (
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from specsim.io.errors import InputError

FULL, SLIDING, RECURRENT = "full_attention", "sliding_attention", "recurrent"
CHUNKED, CONVOLUTION = "chunked_attention", "conv"
NAMED_TYPES = {
    FULL,
    SLIDING,
    CHUNKED,
    "linear_attention",
    "hybrid",
    CONVOLUTION,
    "mlp",
    "moe",
}  # in a config's layer_types
MASKED_ATTENTION = ("eager", "sdpa")  # of the library's attention functions, those that read any 4-D mask
FIRST_ROOM = 256  # rows that a growing buffer holds at first


def layer_types(config: Any) -> list[str]:
    """List each layer's type, FULL, SLIDING or RECURRENT (one state summarises all tokens so far).

    Raises InputError if drafts cannot be rolled back in a layer's cache.
    """
    text = config.get_text_config()
    named = getattr(text, "layer_types", None) or ()
    layers = DynamicCache(config=text).layers
    types = [_type_of(layer, name) for layer, name in zip_longest(layers, named)]
    other = {*named} - NAMED_TYPES or {type(layers[i]).__name__ for i, kind in enumerate(types) if kind is None}
    if other:
        raise InputError(
            f"{text.model_type} models have layers of type {', '.join(sorted(other))}, whose cache cannot drop the "
            "last tokens, so drafts could not be rolled back; choose a model whose every layer caches keys and values"
        )
    whole = [isinstance(layer, DynamicLayer) and type(layer) is not DynamicSlidingWindowLayer for layer in layers]
    if RECURRENT in types and not any(whole):
        raise InputError(
            f"{text.model_type} models have recurrent layers and no layer that caches all keys and values, so drafts "
            "could not be rolled back; choose a model with layers of full attention"
        )
    return [kind or FULL for kind in types]


def _type_of(layer: Any, name: str | None) -> str | None:
    """Find a layer's type from its cache and its name in the configuration; None if it is of another type.

    A layer that reads another layer's keys and values has a dummy cache; it may have a sliding window.
    """
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return RECURRENT
    if isinstance(layer, DummyLayer):
        return SLIDING if name == SLIDING else FULL
    if type(layer) is DynamicSlidingWindowLayer:
        return SLIDING
    return FULL if type(layer) is DynamicLayer else None


def has_recurrent_layers(config: Any) -> bool:
    """Check whether a model has layers whose states cannot drop tokens (`realrun.lm.recurrent`)."""
    return RECURRENT in layer_types(config)


def has_convolutions(config: Any) -> bool:
    """Check whether a model has convolutions whose cache can drop tokens (`realrun.lm.recurrent`)."""
    return CONVOLUTION in (getattr(config.get_text_config(), "layer_types", None) or ())


def feeds_again(config: Any) -> bool:
    """Check whether such a target needs a second pass after a rejection, which LFM2's convolutions do not."""
    return has_recurrent_layers(config) and not has_convolutions(config)


class ChunkSize(int):
    """Size of the chunks in place of a sliding window: a row sees its own chunk up to itself (Llama 4)."""


def refuse_recurrent_layers(model: Any, why: str) -> None:
    """Raise InputError if the model has recurrent layers; `why` completes the message."""
    if has_recurrent_layers(model.config):
        raise InputError(
            f"{type(model).__name__} has recurrent layers, {why}; choose an independent draft model or prompt-lookup"
        )


def window_of(config: Any) -> int | None:
    """Give the tokens, its own included, that a row of a SLIDING layer sees; None if no layer has a window."""
    text = config.get_text_config()
    if CHUNKED in (getattr(text, "layer_types", None) or ()):
        return ChunkSize(text.attention_chunk_size)
    return int(config.get_text_config().sliding_window) if SLIDING in layer_types(config) else None


def make_cache(config: Any) -> Any:
    """Make the library's own cache, but let it keep what has left a window."""
    cache: Any = DynamicCache(config=config)
    cache.layers = [DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in cache.layers]
    return cache


def within_window(mask: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, window: int) -> torch.Tensor:
    """Hide slots outside a row's window, or before its chunk, in a bool or additive mask [..., n, k].

    rows, slots : positions [..., n] and [..., k]
    """
    rows, slots = rows[..., :, None], slots[..., None, :]
    near = rows // window == slots // window if isinstance(window, ChunkSize) else rows - slots < window
    return mask & near if mask.dtype == torch.bool else mask.masked_fill(~near, torch.finfo(mask.dtype).min)


def masks_of(config: Any, window: int | None, mask: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> Any:
    """Make the attention masks of a model of this configuration from an additive mask [B, 1, n, k] without windows.

    window : its `window_of`, which takes a millisecond to compute, as long as some passes
    rows, slots : positions [n] and [k], or with a batch in front, [B, n] and [B, k]
    """
    if window is None:
        return mask
    if rows.ndim == 2:
        rows, slots = rows[:, None], slots[:, None]
    near = within_window(mask, rows, slots, window)
    # Models whose layers differ take a mask for each type of layer.
    differ = getattr(config.get_text_config(), "layer_types", None)
    return {FULL: mask, SLIDING: near, CHUNKED: near} if differ else near


def grown(buffer: torch.Tensor, rows: int, most: int = sys.maxsize) -> torch.Tensor:
    """Give a buffer [..., r, d] room for `rows` rows; it at least doubles, up to `most`, so that copies stay rare."""
    have = buffer.shape[-2]
    if rows <= have:
        return buffer
    shape = (*buffer.shape[:-2], max(rows, min(most, max(2 * have, FIRST_ROOM))), buffer.shape[-1])
    if buffer.device.type == "cpu" and prod(shape):  # pages of zeros that take memory when a row is written
        pages = mmap(-1, prod(shape) * buffer.itemsize, access=ACCESS_COPY)  # of this process alone
        larger = torch.frombuffer(pages, dtype=buffer.dtype).view(shape)
    else:
        larger = buffer.new_zeros(shape)
    larger[..., :have, :] = buffer
    return larger


def max_positions(config: Any) -> int:
    """Count the tokens that a model of this configuration can read; without such a limit, any number."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return sys.maxsize if limit is None else int(limit)


class Describe(Protocol):
    """Computes statistics of a row by operations that a CUDA graph can record together with the pass before them."""

    def __call__(self, logits: torch.Tensor, position: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Compute statistics [c], of which the first is the chosen token.

        logits : [1, V]; position : int64 [1], of the row in the text; hidden : [1, d], the state behind the logits
        """


class CachedLM:
    """Feeds tokens to a model and keeps its cache; `length` tokens are in the cache.

    Behind them there may be the nodes of a draft tree, appended level by level or all at once
    by `forward_nodes`. `keep_nodes` makes a path of them the next tokens of the cache;
    everything else (forward, prefill, truncate, reset) drops them.

    nodes : tree nodes behind the `length` tokens
    known_tokens : ids from here on have the logit -inf because a draft model's tokenizer lacks them; None if it
        lacks none
    hidden : where `keep_hidden` is set, what the last pass fed to the model's head, [n, d]: the
        last layer's states after the final norm, a row for every row of logits. A prefill
        leaves only the row of its last token; None before the first token. Like logits,
        it may lie at an address that the next pass of the same size overwrites
    reads_target_states : whether this is a drafter that takes something from the target for every verified token, so
        that each round begins with some to ingest
    caches_pending_token : of such a drafter, whether the row of a round's pending token stays cached
    describes : whether `describe` is available: a pass and the statistics of its last row in a single launch
    recurrent : whether layers have states that `truncate` may restore by another pass; see `realrun.lm.recurrent`
    refed : tokens that the last `truncate` fed again to restore them
    """

    reads_target_states = caches_pending_token = describes = recurrent = False
    refed = 0
    keep_hidden = False
    hidden: torch.Tensor | None = None
    nodes = 0

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self.device = model.device
        self.max_positions = max_positions(model.config)
        self.known_tokens = getattr(model.config, "known_tokens", None)
        self.window = window_of(model.config)
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.cache: Any = make_cache(self.model.config)
        self.slot_positions = torch.empty(0, dtype=torch.long, device=self.device)  # of models with windows
        self.length = self.nodes = 0
        self.hidden = None

    def warm(self, sizes: Iterable[int], length: int = 0, tree_nodes: int = 0) -> None:
        """Prepare passes of these sizes before timing starts; forgets everything.

        length : tokens, and nodes behind them, that the cache is to hold
        tree_nodes : the most nodes of a tree that grows by several passes of these sizes; 0 if
            all nodes of a tree come in the same pass
        """
        self.reset()

    def forward(self, tokens: Sequence[int]) -> torch.Tensor:
        """Append tokens to the cache; logits [n, V] after each of them."""
        return self._append(tokens, keep=0)

    def describe(self, tokens: Sequence[int], describe: Describe, follows: bool = False) -> torch.Tensor:
        """Append tokens to the cache; statistics [c] of the last of them, which the next call overwrites.

        follows : whether `tokens` is the token that the previous call chose
        """
        if self.nodes:
            self.truncate(self.length)
        end = self.length + len(tokens)
        self._check_positions(end)
        statistics = self._describe(tokens, describe, follows)
        self.length = end
        return statistics

    def warm_description(self, sizes: Iterable[int], describe: Describe) -> None:
        """Prepare `describe` for passes of these sizes, after `warm`."""

    def forget_description(self, describe: Describe) -> None:
        """Drop the graphs that were recorded for this description."""

    def _describe(self, tokens: Sequence[int], describe: Describe, follows: bool) -> torch.Tensor:
        raise NotImplementedError("only passes over static caches describe")

    def prefill(self, tokens: Sequence[int]) -> None:
        """Append tokens, if any, to the cache and drop their logits."""
        if tokens:
            self._append(tokens, keep=1)

    def forward_nodes(self, tokens: Sequence[int], depths: Sequence[int], visible: torch.Tensor) -> torch.Tensor:
        """Append n nodes of a draft tree behind the cached tokens and earlier nodes; logits [n, V] after each.

        depths : [n], edges from the tree's root, which may be a node itself or the last cached
            token; node i stands at position length + depths[i]
        visible : bool [n, nodes + n] on the CPU, which of the nodes, earlier nodes first, each
            sees: its ancestors and itself. All see the cached tokens

        Raises InputError where the model reads no tree masks, or has too few positions.
        References: Miao et al. 2024, arXiv:2305.09781, section 4.2 (tree attention).
        """
        end = self.nodes + len(tokens)
        assert len(depths) == len(tokens) and visible.shape == (len(tokens), end)
        self.check_trees()
        self._check_positions(self.length + max(depths) + 1)
        logits = self._forward_nodes(tokens, depths, visible)
        self.nodes = end
        return self._of_known(logits)

    def keep_nodes(self, path: Sequence[int]) -> None:
        """Make these nodes, the numbers since `length` last changed, the next cached tokens; drop all others.

        path : ascending, from 0; a path of the tree that starts at depth 0
        """
        assert all(a < b for a, b in zip([-1, *path], [*path, self.nodes], strict=True))
        if path and path[-1] >= len(path):  # else they are in place
            self._move_nodes(path)
        self._crop(self.length + len(path))
        self.length, self.nodes = self.length + len(path), 0

    def append_rows(
        self, tokens: Sequence[int], positions: Sequence[int], seen: torch.Tensor, keep: int = 0
    ) -> torch.Tensor:
        """Append n nodes that need not see all cached tokens; logits [n, V] after each, or after the last `keep`.

        For recording every position at once. positions : [n]; seen : bool [n, length + nodes + n] on the CPU, which
        of the tokens and nodes each sees
        """
        dtype = self.model.dtype
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
        logits = self.run_model(
            input_ids=torch.tensor([tokens], device=self.device),
            position_ids=torch.tensor([positions], device=self.device),
            attention_mask=mask[None, None].to(self.device),
            logits_to_keep=keep,
        )
        self.nodes += len(tokens)
        return logits

    def _append(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        if self.nodes:
            self.truncate(self.length)
        end = self.length + len(tokens)
        self._check_positions(end)
        logits = self._forward(tokens, keep)
        self.length = end
        return self._of_known(logits)

    def _of_known(self, logits: torch.Tensor) -> torch.Tensor:
        """Set the logits [..., V] of unknown ids to -inf, in place."""
        if self.known_tokens is not None and self.known_tokens < logits.shape[-1]:
            logits[..., self.known_tokens :] = -torch.inf
        return logits

    def _check_positions(self, positions: int) -> None:
        if positions > self.max_positions:
            raise InputError(
                f"{positions} tokens exceed the {self.max_positions} positions of the model; shorten prompt or output"
            )

    def check_trees(self) -> None:
        """Raise InputError unless the model reads tree masks."""
        attention = self.model.config._attn_implementation
        if attention not in MASKED_ATTENTION:
            raise InputError(
                f"{attention} attention takes no mask of draft trees; load "
                f"{type(self.model).__name__} with attn_implementation {' or '.join(MASKED_ATTENTION)}"
            )

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        """Compute logits after the last `keep` tokens, or after all tokens if keep is 0."""
        positions = torch.arange(self.length, self.length + len(tokens), device=self.device)
        return self.run_model(
            input_ids=torch.tensor([tokens], device=self.device), position_ids=positions[None], logits_to_keep=keep
        )

    def _forward_nodes(self, tokens: Sequence[int], depths: Sequence[int], visible: torch.Tensor) -> torch.Tensor:
        end = self.length + self.nodes + len(tokens)
        dtype = self.model.dtype
        mask = torch.zeros(len(tokens), end, dtype=dtype)
        mask[:, self.length :].masked_fill_(~visible, torch.finfo(dtype).min)
        positions = torch.tensor([self.length + depth for depth in depths], device=self.device)
        return self.run_model(
            input_ids=torch.tensor([tokens], device=self.device),
            position_ids=positions[None],
            attention_mask=mask.to(self.device)[None, None],
        )

    def run_model(self, **inputs: Any) -> torch.Tensor:
        """Run the library's own pass over the cache: logits [n, V]; keeps hidden rows if `keep_hidden` is set."""
        inputs |= {"past_key_values": self.cache, "use_cache": True}
        if "attention_mask" in inputs:
            self._check_scaling(self.cache.get_seq_length() + inputs["input_ids"].shape[1])
        if self.window is not None:
            rows = inputs["position_ids"][0]
            # Slots that were dropped since the last pass are at the end.
            self.slot_positions = torch.cat([self.slot_positions[: self.cache.get_seq_length()], rows])
            if "attention_mask" in inputs:
                mask = inputs["attention_mask"]
                inputs["attention_mask"] = masks_of(self.model.config, self.window, mask, rows, self.slot_positions)
        if not self.keep_hidden:
            return self._of_known(self.model(**inputs).logits[0])
        head = self.model.get_output_embeddings()
        if head is None:
            raise InputError(f"{type(self.model).__name__} has no output embedding to take hidden states at")
        fed: list[torch.Tensor] = []
        hook = head.register_forward_pre_hook(lambda module, arguments: fed.append(arguments[0]))
        try:
            logits: torch.Tensor = self.model(**inputs).logits[0]
        finally:
            hook.remove()
        self.hidden = fed[0][0]
        return self._of_known(logits)

    def fork(self, text: Sequence[int]) -> None:
        """Move the cache to the end of this text, in models that record one branch at a time; others do nothing."""

    def _check_scaling(self, rows: int) -> None:
        """Raise InputError where a model scales attention by cache slot, which in a tree is not the position."""
        config = self.model.config.get_text_config()
        if getattr(config, "attn_temperature_tuning", False) and rows >= config.floor_scale:
            raise InputError(
                f"{config.model_type} models scale attention by cache slot from {config.floor_scale} tokens on, and "
                f"slots of a tree are not positions ({rows} tokens and nodes); shorten the text or draft chains"
            )

    def drop_rows(self, count: int) -> None:
        """Drop the last `count` rows that `run_model` left in the library's cache."""
        self.cache.crop(-count)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens of the cache, and no nodes."""
        length = min(length, self.length)
        self._crop(length)
        self.length, self.nodes = length, 0

    def _crop(self, end: int) -> None:
        surplus = self.length + self.nodes - end
        if surplus:
            self.cache.crop(-surplus)

    def _move_nodes(self, path: Sequence[int]) -> None:
        """Copy these nodes' keys and values, in place, to the slots that follow the cached tokens."""
        source = torch.tensor([self.length + node for node in path], device=self.device)
        if self.window is not None:
            self.slot_positions[self.length : self.length + len(path)] = self.slot_positions[source]
        for layer in self.cache.layers:
            for cached in () if layer.keys is None else (layer.keys, layer.values):  # None if it reads another layer's
                cached[:, :, self.length : self.length + len(path)] = cached[:, :, source]
