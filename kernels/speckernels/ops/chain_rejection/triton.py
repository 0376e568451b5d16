"""Chain rejection in Triton: one program per chain."""

from __future__ import annotations

import torch

from speckernels.ops.chain_rejection import empty_results
from speckernels.runtime.triton_runtime import Variant, launch, tl, triton

TOKENS_PER_STEP = 1024
SCALE = tl.constexpr(2.0**40)
BELOW_ONE = tl.constexpr(1 - 2.0**-53)


@triton.jit
def weights(probs):
    """Probabilities as multiples of 2^-40."""
    return (tl.where(probs > 0, tl.minimum(probs, 1.0), 0.0) * SCALE).to(tl.int64)


@triton.jit
def in_unit_interval(uniforms):
    """Clamp uniforms to [0, 1); NaN gives 0."""
    # Some versions round a bare constant to float32, which would be 1.
    below_one = tl.full(uniforms.shape, BELOW_ONE, tl.float64)
    return tl.where(uniforms > 0, tl.minimum(uniforms, below_one), 0.0)


@triton.jit
def _residual(target, draft, draft_end, token, vocabulary):
    """Target's row minus the draft's, at least 0; only tokens below draft_end are subtracted."""
    drafted = weights(tl.load(draft + token, mask=token < draft_end, other=0.0))
    return tl.maximum(weights(tl.load(target + token, mask=token < vocabulary, other=0.0)) - drafted, 0)


@triton.jit
def _total(target, draft, draft_end, vocabulary, BLOCK: tl.constexpr):
    total = tl.full((), 0, tl.int64)
    for start in range(0, vocabulary, BLOCK):
        total += tl.sum(_residual(target, draft, draft_end, start + tl.arange(0, BLOCK), vocabulary))
    return total


@triton.jit
def _kernel(
    draft_tokens, draft_probs, target_probs, uniforms, accepted, emitted, drafts, vocabulary,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    draft_probs += row * drafts * vocabulary
    target_probs += row * (drafts + 1) * vocabulary
    uniforms += row * (drafts + 1)

    step = tl.arange(0, STEPS)
    given = step < drafts
    tokens = tl.load(draft_tokens + row * drafts + step, mask=given, other=-1)
    inside = (tokens >= 0) & (tokens < vocabulary)
    at = step.to(tl.int64) * vocabulary + tokens
    drafted = weights(tl.load(draft_probs + at, mask=inside, other=0.0))
    wanted = weights(tl.load(target_probs + at, mask=inside, other=0.0))
    uniform = in_unit_interval(tl.load(uniforms + step, mask=given, other=0.0))
    passes = (drafted > 0) & (uniform * drafted.to(tl.float64) < wanted.to(tl.float64))
    stop = tl.min(tl.where(given & (passes == 0), step, drafts))

    # Subtract nothing where all were accepted, or where the draft cannot have drawn the token.
    draft_end = tl.where(tl.sum(((step == stop) & (drafted > 0)).to(tl.int32)) > 0, vocabulary, 0)
    target = target_probs + stop.to(tl.int64) * vocabulary
    draft = draft_probs + stop.to(tl.int64) * vocabulary
    total = _total(target, draft, draft_end, vocabulary, BLOCK)
    if total == 0:
        draft_end = tl.full((), 0, tl.int32)
        total = _total(target, draft, draft_end, vocabulary, BLOCK)

    drawn_at = (in_unit_interval(tl.load(uniforms + drafts)) * total.to(tl.float64)).to(tl.int64)
    last = tl.full((), 0, tl.int64)
    before = tl.full((), 0, tl.int64)
    for start in range(0, vocabulary, BLOCK):
        token = start + tl.arange(0, BLOCK)
        these = _residual(target, draft, draft_end, token, vocabulary)
        passed = (token < vocabulary) & (before + tl.cumsum(these, 0) <= drawn_at)
        last += tl.sum(passed.to(tl.int64))
        before += tl.sum(these)
    last = tl.where(total > 0, last, -1)

    tl.store(accepted + row, stop)
    out = tl.where(step < stop, tokens, tl.where(step == stop, last, -1))
    tl.store(emitted + row * (drafts + 1) + step, out, mask=step <= drafts)


def chain_rejection(
    draft_tokens: torch.Tensor, draft_probs: torch.Tensor, target_probs: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    results = empty_results(draft_tokens)
    batch, drafts = draft_tokens.shape
    vocabulary = target_probs.shape[-1]
    if batch == 0:
        return tuple(results)
    launch(
        _kernel, (batch,),
        draft_tokens, draft_probs, target_probs, uniforms, *results, drafts, vocabulary,
        STEPS=max(32, triton.next_power_of_2(drafts + 1)), BLOCK=block_of(vocabulary),
    )  # fmt: skip
    return tuple(results)


def block_of(vocabulary: int) -> int:
    """Number of tokens that a program processes at once."""
    return int(min(TOKENS_PER_STEP, max(32, triton.next_power_of_2(vocabulary))))


def compiled_variants() -> list[Variant]:
    signature = {"draft_tokens": "*i64", "draft_probs": "*fp32", "target_probs": "*fp32", "uniforms": "*fp64"}
    signature |= {"accepted": "*i32", "emitted": "*i64", "drafts": "i32", "vocabulary": "i32"}
    return [Variant(_kernel, signature, {"STEPS": 32, "BLOCK": block}) for block in (32, TOKENS_PER_STEP)]
