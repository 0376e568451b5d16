"""Layers with sliding windows, and the caches that drafting needs for them.

After a draft is rolled back, tokens that had left a window are in it again. The cache therefore keeps all keys and
values of every layer, and the masks implement the window.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from specsim.io.errors import InputError

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_types(config: Any) -> list[str]:
    """List each layer's type, FULL or SLIDING.

    Raises InputError if a layer's cache cannot be rolled back token by token: recurrent states, chunks of tokens.
    """
    text = config.get_text_config()
    named = {*(getattr(text, "layer_types", None) or ())} - {FULL, SLIDING}
    kinds = [type(layer) for layer in DynamicCache(config=text).layers]
    other = named or {kind.__name__ for kind in kinds} - {DynamicLayer.__name__, DynamicSlidingWindowLayer.__name__}
    if other:
        raise InputError(
            f"{text.model_type} models have layers of type {', '.join(sorted(other))}, whose cache cannot drop the "
            "last tokens, so drafts could not be rolled back; choose a model whose every layer caches keys and values"
        )
    return [SLIDING if kind is DynamicSlidingWindowLayer else FULL for kind in kinds]


def window_of(config: Any) -> int | None:
    """Give the tokens, its own included, that a row of a SLIDING layer sees; None if no layer has a window."""
    return int(config.get_text_config().sliding_window) if SLIDING in layer_types(config) else None


def make_cache(config: Any) -> Any:
    """Make the library's own cache, but let it keep what has left a window."""
    cache: Any = DynamicCache(config=config)
    cache.layers = [DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in cache.layers]
    return cache


def within_window(mask: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, window: int) -> torch.Tensor:
    """Hide, in a bool or additive mask [..., n, k], slots `window` positions or more before a row.

    rows, slots : positions [..., n] and [..., k]
    """
    near = rows[..., :, None] - slots[..., None, :] < window
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
    return {FULL: mask, SLIDING: near} if getattr(config.get_text_config(), "layer_types", None) else near
