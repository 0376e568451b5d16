"""Record a dense trace: decode once, then ask the drafter at every position at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from realrun.cached_lm import CachedLM
from realrun.choice import Choice
from realrun.decode import Decoder
from realrun.drafters.draft_model import DraftModel
from realrun.models import Pair
from realrun.predictor import Scorer, producing_states
from realrun.prompts import Prompt
from realrun.provenance import provenance
from speckernels import backend_for
from specsim.errors import InputError
from specsim.metrics import distinct_trigrams
from specsim.trace import Trace

CHUNK = 256  # positions whose branches share one forward pass
STATISTICS = 4  # columns of Choice.statistics
NO_RANK = -1
MAX_RANK = np.iinfo(np.int16).max

Columns = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class RecordSettings:
    """What to record. Lengths in tokens."""

    depth: int = 16
    max_new_tokens: int = 128
    choice: Choice = Choice()

    def __post_init__(self) -> None:
        if not 1 <= self.depth <= 64:
            raise InputError(f"depth={self.depth} is outside [1, 64]; choose a depth inside")


@torch.inference_mode()
def dense_columns(
    lm: CachedLM,
    prompt: Sequence[int],
    output: Sequence[int],
    depth: int,
    choice: Choice,
    sequence: int,
    scorer: Scorer | None = None,
) -> Columns:
    """What the draft model proposes after prompt + output[:t], for every t at once.

    One teacher-forced pass gives every first token. Then, step by step, one branch per
    position grows by a token: all branches share the prefix's cache, and a mask lets a
    branch see the prefix up to its position and its own earlier tokens. Columns as in
    `specsim.trace`, [T] or [T, depth].

    scorer : the predictor's, after the target's states of T rounds; gives the column of scores
    """
    total, first = len(output), len(prompt)
    statistics = torch.empty(total, depth, STATISTICS, dtype=torch.float64)
    scores = torch.zeros(total, depth, dtype=torch.float64)
    lm.reset()
    lm.keep_hidden = scorer is not None
    logits = lm.forward([*prompt, *output[:-1]])[first - 1 :]
    drafted = choice.statistics(logits, sequence, 0)
    statistics[:, 0] = drafted.cpu()
    if scorer is not None and lm.hidden is not None:
        scores[:, 0] = scorer(lm.hidden[first - 1 :], 1).cpu()
    truth = torch.tensor(output, device=logits.device)
    rank = (logits > logits.gather(-1, truth[:, None])).sum(-1).cpu().numpy()
    tokens = drafted[:, 0].long()
    prefix = lm.length
    for begin in range(0, total, CHUNK):
        rows = torch.arange(begin, min(begin + CHUNK, total), device=logits.device)
        branch = tokens[rows]
        for step in range(1, depth):
            mask = _branch_mask(rows + first, prefix, step, lm.model.dtype)
            logits = lm.run_model(
                input_ids=branch[None], position_ids=(rows + first + step - 1)[None], attention_mask=mask
            )
            drafted = choice.statistics(logits, sequence, begin + step)
            statistics[begin : begin + len(rows), step] = drafted.cpu()
            if scorer is not None and lm.hidden is not None:
                scores[begin : begin + len(rows), step] = scorer(lm.hidden, step + 1, begin).cpu()
            branch = drafted[:, 0].long()
        lm.cache.crop(-(depth - 1) * len(rows))
    columns = _columns(statistics.numpy(), rank, np.asarray(output), depth)
    return columns if scorer is None else {**columns, "score": scores.numpy().astype(np.float32)}


def _branch_mask(visible: torch.Tensor, prefix: int, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive mask [1, 1, n, prefix + steps * n]; branch j sees visible[j] prefix tokens and itself."""
    n = len(visible)
    seen = torch.arange(prefix, device=visible.device)[None] < visible[:, None]
    own = torch.eye(n, dtype=torch.bool, device=visible.device).repeat(1, steps)
    mask = torch.zeros(n, prefix + steps * n, dtype=dtype, device=visible.device)
    mask.masked_fill_(~torch.cat([seen, own], dim=1), torch.finfo(dtype).min)
    return mask[None, None]


def _columns(
    statistics: npt.NDArray[np.float64],
    rank: npt.NDArray[np.int64],
    output: npt.NDArray[np.int64],
    depth: int,
) -> Columns:
    total = len(output)
    draft_token = statistics[:, :, 0].astype(np.int32)
    position = np.arange(total)[:, None] + np.arange(depth)[None]  # output position of each drafted token
    inside = position < total
    position = np.minimum(position, total - 1)
    match = (draft_token == output[position]) & inside
    return {
        "token": output.astype(np.int32),
        "match_len": np.logical_and.accumulate(match, axis=1).sum(axis=1).astype(np.uint8),
        "draft_token": draft_token,
        "prob": statistics[:, :, 1].astype(np.float32),
        "confidence": statistics[:, :, 2].astype(np.float32),
        "entropy_nats": statistics[:, :, 3].astype(np.float32),
        # An independent draft model sees only tokens, so on the true path its distribution at
        # depth i is its first distribution i - 1 positions later.
        "true_rank": np.where(inside, np.minimum(rank, MAX_RANK)[position], NO_RANK).astype(np.int16),
    }


def record(
    pair: Pair,
    prompts: Sequence[Prompt],
    settings: RecordSettings,
    progress: Callable[[int, int], None] | None = None,
) -> Trace:
    """Decode every prompt with the target alone and record the draft model densely.

    In rejection mode the target judges the drafts as well (`realrun.record_rejection`).
    """
    from realrun.record_rejection import rejection_columns  # which imports this file

    decoder = Decoder(pair.target, DraftModel(pair.draft, pair.eos_token_ids), pair.eos_token_ids, settings.choice)
    lm = CachedLM(pair.draft)
    judge = CachedLM(pair.target) if settings.choice.mode == "rejection" else None
    room = min(decoder.target.max_positions, lm.max_positions)
    longest = max(len(prompt.tokens) for prompt in prompts) + settings.max_new_tokens + settings.depth
    if longest > room:
        raise InputError(
            f"longest prompt, output and depth make {longest} tokens, the models have {room} positions; shorten them"
        )
    predictor = None if pair.predictor is None else pair.predictor.cast(pair.device, pair.dtype)
    outputs: list[npt.NDArray[np.int64]] = []
    columns: list[Columns] = []
    generate_s = dense_s = 0.0
    for sequence, prompt in enumerate(prompts):
        start = decoder.clock()
        decoded = decoder.decode(prompt.tokens, settings.max_new_tokens, None, sequence=sequence)
        generated = decoder.clock()
        scorer = None
        if predictor is not None:
            scorer = predictor.after(producing_states(pair.target, prompt.tokens, decoded.tokens))
        asked = (prompt.tokens, decoded.tokens, settings.depth, settings.choice, sequence, scorer)
        columns.append(dense_columns(lm, *asked) if judge is None else rejection_columns(lm, judge, *asked))
        dense_s += decoder.clock() - generated
        generate_s += generated - start
        outputs.append(np.asarray(decoded.tokens))
        if progress:
            progress(sequence + 1, len(prompts))
    lengths = [len(output) for output in outputs]
    arrays = {name: np.concatenate([c[name] for c in columns]) for name in columns[0]}
    meta = {
        "target": pair.target_name,
        "drafter": pair.draft_name,
        "drafter_kind": DraftModel.kind,
        "weights": pair.fingerprint,
        "predictor": None if pair.predictor is None else pair.predictor.digest,
        "decoding": settings.choice.as_dict(),
        "depth": settings.depth,
        "eos_token_id": list(pair.eos_token_ids),
        "max_new_tokens": settings.max_new_tokens,
        "dtype": str(pair.dtype).removeprefix("torch."),
        "device": pair.device.type,
        "kernels": backend_for(pair.device),
        "distinct_trigram_share": distinct_trigrams(outputs),
        "first_token_accepted_share": float((arrays["match_len"] > 0).mean()),
        "record_seconds": {"generate": generate_s, "dense": dense_s},
        "provenance": provenance(pair.device, pair.dtype),
    }
    return Trace(
        meta=meta,
        sequence_id=np.arange(len(prompts)),
        domain=np.array([prompt.domain for prompt in prompts], dtype=np.str_),
        prompt_tokens=np.array([len(prompt.tokens) for prompt in prompts]),
        budget_tokens=np.full(len(prompts), settings.max_new_tokens),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        **arrays,
    )


def elapsed_ratio(trace: Trace) -> float:
    """Seconds of decoding and dense recording over seconds of decoding alone."""
    seconds = trace.meta["record_seconds"]
    return float((seconds["generate"] + seconds["dense"]) / seconds["generate"])
