"""Continuation of many prompts at once by a target, greedy or sampled.

Models that the fused pass supports decode over a static cache on a GPU: a step is a CUDA graph, and nothing waits for
the device between steps. A sequence that has ended keeps its row, but attends to nothing any more. Other models, and
all models on the CPU, decode through the library's cache, which grows by a copy at every step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from realrun.lm.choice import static_serves
from realrun.lm.static.llama import StaticLlama
from realrun.train.common.loop import Tokens
from specsim.io.arrays import Ints

CHECK_EVERY = 16  # steps on a GPU: to look whether all sequences have ended is to wait for the device
PIECE = 16  # tokens of each prompt that a pass over the static cache takes
CAPACITY_STEP = 128  # slots by which the static cache grows, so that few sizes are recorded

# (next tokens [B] or None for the prompts, whether a sequence has ended [B]) -> logits [B, V]
Follow = Callable[[torch.Tensor | None, torch.Tensor], torch.Tensor]

_kept: list[StaticLlama] = []  # of the last batch; the next batch that fits into it needs no recording


@torch.inference_mode()
def generate(
    target: PreTrainedModel,
    prompts: Sequence[Tokens],
    new_tokens: int,
    eos_token_ids: Sequence[int] = (),
    temperature: float = 1.0,
    seed: int | None = None,
) -> torch.Tensor:
    """Continue B prompts, the longest of P tokens: int64 [B, P + n] on the CPU, a shorter prompt behind padding.

    n = new_tokens, less if all sequences end earlier.

    seed : of the sampling; None is greedy.
    Tokens of a row after its end of text are meaningless. A cache on a GPU is kept for the next batch: call `free`
    after the last.
    """
    device = target.device
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    known = getattr(target.config, "known_tokens", None)  # later ids are none of the tokenizer's
    eos = torch.tensor(list(eos_token_ids), dtype=torch.long, device=device)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    lengths = np.array([*map(len, prompts)])
    longest = int(lengths.max())
    padded = np.stack([np.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts]).astype(np.int64)
    follow = _static(target, prompts, new_tokens) if static_serves(target) else _dynamic(target, padded, lengths)
    every = CHECK_EVERY if device.type == "cuda" else 1
    feed, new = None, []
    for count in range(1, new_tokens + 1):
        logits = follow(feed, ended)
        if known is not None:
            logits[:, known:] = -torch.inf
        if generator is None:
            feed = logits.argmax(-1)
        else:  # the tokens that torch.multinomial draws, which waits for the device to check the shares
            shares = torch.softmax(logits.float() / temperature, -1)
            feed = shares.div_(torch.empty_like(shares).exponential_(generator=generator)).argmax(-1)
        new.append(feed)
        ended |= torch.isin(feed, eos)
        if count % every == 0 and bool(ended.all()):
            break
    return torch.cat([torch.from_numpy(padded), torch.stack(new, dim=1).cpu()], dim=1)


def free() -> None:
    """Free the GPU memory that `generate` keeps for its next batch."""
    if _kept:
        _kept.clear()
        gc.collect()  # layers and their model refer to each other
        torch.cuda.empty_cache()  # graphs' memory, too; without a GPU it does nothing


def _static(target: PreTrainedModel, prompts: Sequence[Tokens], new_tokens: int) -> Follow:
    """Decode over a static cache. If it has more rows than prompts, the last rows stay empty."""
    batch, longest = len(prompts), max(map(len, prompts))
    lm = _with_room(target, batch, longest + new_tokens)
    padded = np.zeros((lm.batch, min(_rounded(longest, PIECE), lm.capacity)), np.int64)
    lengths = np.zeros(lm.batch, np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
        lengths[row] = len(prompt)
    cached = torch.from_numpy(lengths).to(lm.device)  # [lm.batch], tokens before the next
    tokens = torch.zeros(lm.batch, 1, dtype=torch.long, device=lm.device)
    rows = slice(None, batch)

    def follow(feed: torch.Tensor | None, ended: torch.Tensor) -> torch.Tensor:
        if feed is None:
            return lm.logits_of(_last_states(lm, torch.from_numpy(padded).to(lm.device), cached)[rows])
        tokens[rows, 0] = feed
        cached[rows].masked_fill_(ended, 0)  # what has ended need not read its cache
        logits = lm.step(tokens, cached)[rows, 0]
        cached[rows].add_(1)
        return logits

    return follow


def _last_states(lm: StaticLlama, padded: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Cache prompts int64 [B, P], padded behind their lengths [B]; the states [B, d] of their last tokens.

    Padding enters the cache behind a sequence's length, where its next tokens overwrite it.
    """
    every = torch.arange(len(padded), device=lm.device)
    last, start = lm.embedding.new_zeros(len(padded), lm.embedding.shape[1]), 0
    for piece in padded.split(PIECE, dim=1):
        n = piece.shape[1]
        states = lm.step_states(piece, torch.full_like(lengths, start))
        place = lengths - 1 - start  # of the last token in this piece
        here = (place >= 0) & (place < n)
        last = torch.where(here[:, None], states[every, place.clamp(0, n - 1)], last)
        start += n
    return last


def _with_room(target: PreTrainedModel, batch: int, length: int) -> StaticLlama:
    """Find or make a static cache for so many sequences of this length."""
    kept = next((lm for lm in _kept if lm.model is target), None)
    if kept is None or kept.batch < batch or kept.capacity < length:
        if kept is not None:
            batch, length = max(batch, kept.batch), max(length, kept.capacity)
            del kept
        free()
        most = int(target.config.max_position_embeddings)
        capacity = max(length, min(_rounded(length, CAPACITY_STEP), most))
        # Compiled operations would take longer to compile than they save.
        kept = StaticLlama(target, capacity=capacity, batch=batch, compiled=False)
        _kept.append(kept)
    return kept


def _rounded(count: int, step: int) -> int:
    return -(-count // step) * step


def _dynamic(target: PreTrainedModel, padded: Ints, lengths: Ints) -> Follow:
    """Decode through the library's cache. padded : int64 [B, P], prompts behind their padding; lengths : [B]"""
    cache = DynamicCache(config=target.config)
    padding = padded.shape[1] - lengths
    first = torch.from_numpy(padding).to(target.device)[:, None] if padding.any() else None  # slots of first tokens

    def follow(feed: torch.Tensor | None, ended: torch.Tensor) -> torch.Tensor:
        fed = torch.from_numpy(padded).to(target.device) if feed is None else feed[:, None]
        places = {}
        if first is not None:
            at = torch.arange(cache.get_seq_length() + fed.shape[1], device=target.device)
            positions = (at[-fed.shape[1] :] - first).clamp(min=0)
            places = {"attention_mask": (at >= first).long(), "position_ids": positions}
        logits: torch.Tensor = target(
            input_ids=fed, past_key_values=cache, use_cache=True, logits_to_keep=1, **places
        ).logits
        return logits[:, -1]

    return follow
