"""Draft statistics in Triton: one program per part of a row; the last of a row to finish merges its parts."""

from __future__ import annotations

import struct

import torch

from speckernels.ops.draft_statistics import MAX_SPLITS, MAX_TOP_K, empty_results, result_type, split, with_unit_stride
from speckernels.runtime.launch import multiprocessors
from speckernels.runtime.triton_runtime import INTERPRETED, Variant, launch, tl, triton

PROGRAMS = 4  # that a multiprocessor runs at once, of 4 warps each
BLOCK = 4096  # elements that a program reads at a time
NONE = 2**31 - 1  # index of no element
MINUS_INFINITY = tl.constexpr(float("-inf"))
ABSENT = tl.constexpr(NONE)


@triton.jit
def _usable(x, LARGEST: tl.constexpr):
    x = tl.where(x > MINUS_INFINITY, x, MINUS_INFINITY)  # NaN compares false
    return tl.where(x > LARGEST, LARGEST, x)


@triton.jit
def _scaled(logits, temperature, X: tl.constexpr, LARGEST: tl.constexpr):
    x = logits.to(X)
    x = tl.div_rn(x, temperature) if x.dtype == tl.float32 else x / temperature
    return _usable(x, LARGEST)


@triton.jit
def _distance(x, maximum):
    """x - maximum, finite; e to the lowest value is 0."""
    return tl.maximum(x - tl.where(maximum > MINUS_INFINITY, maximum, 0.0), -1000.0)


@triton.jit
def _first(x, index):
    """The largest x and its lowest index; NONE if there is none."""
    best = tl.max(x, 0)
    lowest = tl.min(tl.where((x == best) & (x > MINUS_INFINITY), index, ABSENT), 0)
    return best, lowest


@triton.jit
def _after(x, index, bound, bound_index):
    """x, -inf where it does not come after (bound, bound_index)."""
    return tl.where((x < bound) | ((x == bound) & (index > bound_index)), x, MINUS_INFINITY)


@triton.jit(do_not_specialize=["temperature_bits", "splits", "top_k"])
def _kernel(
    logits, noise, token_ids, temperature_bits, counters, parts, indices, entries, entry_ids,
    values, top_ids, top_probs, logits_stride, noise_stride, vocabulary, splits, chunk, top_k,
    NOISY: tl.constexpr, GIVEN: tl.constexpr, TOP: tl.constexpr, X: tl.constexpr, LARGEST: tl.constexpr,
    BLOCK: tl.constexpr, MAX_SPLITS: tl.constexpr, MAX_TOP_K: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    row = slot // splits
    start = (slot % splits).to(tl.int32) * chunk
    end = tl.minimum(start + chunk, vocabulary)
    logits += row * logits_stride
    if NOISY:
        noise += row * noise_stride
    # In float64 and rounded to X: a scalar argument would be float32.
    temperature = temperature_bits.to(tl.float64, bitcast=True).to(X)

    # z = sum of exp(x - maximum), s = sum of (x - maximum) exp(x - maximum)
    maximum = tl.full([], MINUS_INFINITY, X)
    z = tl.full([], 0, X)
    s = tl.full([], 0, X)
    score = tl.full([], MINUS_INFINITY, X)
    score_index = tl.full([], ABSENT, tl.int32)
    rank = tl.arange(0, MAX_TOP_K)
    list_x = tl.full([MAX_TOP_K], MINUS_INFINITY, X)
    list_id = ABSENT - rank  # distinct, so that one is replaced at a time
    for offset in range(start, end, BLOCK):
        index = offset + tl.arange(0, BLOCK)
        inside = index < end
        x = _scaled(tl.load(logits + index, mask=inside, other=MINUS_INFINITY), temperature, X, LARGEST)
        tile_score = x
        if NOISY:
            tile_score = _usable(x + tl.load(noise + index, mask=inside, other=0.0).to(X), LARGEST)
        best, best_index = _first(tile_score, index)
        if best > score:  # tiles come in rising order
            score, score_index = best, best_index

        raised = tl.maximum(maximum, tl.max(x, 0))
        change, distance = _distance(maximum, raised), _distance(x, raised)
        factor, weight = tl.exp(change), tl.exp(distance)
        s = factor * (s + change * z) + tl.sum(distance * weight, 0)
        z = factor * z + tl.sum(weight, 0)
        maximum = raised

        if TOP:  # the best of the tile takes the place of the worst of the list while it is better
            best, best_index = _first(x, index)
            worst = tl.min(tl.where(rank < top_k, list_x, LARGEST), 0)
            worst_id = tl.max(tl.where((rank < top_k) & (list_x == worst), list_id, -1), 0)
            while (best > worst) | ((best == worst) & (best_index < worst_id) & (best > MINUS_INFINITY)):
                replaced = (rank < top_k) & (list_x == worst) & (list_id == worst_id)
                list_x = tl.where(replaced, best, list_x)
                list_id = tl.where(replaced, best_index, list_id)
                worst = tl.min(tl.where(rank < top_k, list_x, LARGEST), 0)
                worst_id = tl.max(tl.where((rank < top_k) & (list_x == worst), list_id, -1), 0)
                best, best_index = _first(_after(x, index, best, best_index), index)

    tl.store(parts + slot * 4, maximum)
    tl.store(parts + slot * 4 + 1, z)
    tl.store(parts + slot * 4 + 2, s)
    tl.store(parts + slot * 4 + 3, score)
    tl.store(indices + slot, score_index)
    if TOP:
        tl.store(entries + slot * MAX_TOP_K + rank, list_x)
        tl.store(entry_ids + slot * MAX_TOP_K + rank, list_id)
    tl.debug_barrier()  # all of the program's stores come before its count
    arrived = tl.atomic_add(counters + row, 1, sem="acq_rel")
    if arrived == splits - 1:
        part = tl.arange(0, MAX_SPLITS)
        used = part < splits
        source = parts + (row * splits + part) * 4
        maxima = tl.load(source, mask=used, other=MINUS_INFINITY, cache_modifier=".cg")
        part_z = tl.load(source + 1, mask=used, other=0.0, cache_modifier=".cg")
        part_s = tl.load(source + 2, mask=used, other=0.0, cache_modifier=".cg")
        scores = tl.load(source + 3, mask=used, other=MINUS_INFINITY, cache_modifier=".cg")
        part_index = tl.load(indices + row * splits + part, mask=used, other=ABSENT, cache_modifier=".cg")

        maximum = tl.max(maxima, 0)
        empty = maximum == MINUS_INFINITY
        change = _distance(maxima, maximum)
        factor = tl.exp(change)
        z = tl.sum(factor * part_z, 0)
        s = tl.sum(factor * (part_s + change * part_z), 0)
        score, score_index = _first(scores, part_index)
        token = tl.where(score_index == ABSENT, -1, score_index).to(tl.int64)
        if GIVEN:
            token = tl.load(token_ids + row)
        token = tl.where(empty, -1, token)
        known = (token >= 0) & (token < vocabulary)
        x = _scaled(tl.load(logits + token, mask=known, other=MINUS_INFINITY), temperature, X, LARGEST)
        z = tl.where(empty, 1.0, z)
        log_z = tl.log(z)
        tl.store(values + row * 5, token.to(X))
        tl.store(values + row * 5 + 1, tl.where(x > MINUS_INFINITY, tl.exp(_distance(x, maximum)) / z, 0.0))
        tl.store(values + row * 5 + 2, tl.where(empty, 0.0, 1.0 / z))
        tl.store(values + row * 5 + 3, tl.maximum(log_z - s / z, 0.0))
        tl.store(values + row * 5 + 4, maximum + log_z)
        if TOP:
            place = tl.arange(0, MAX_SPLITS * MAX_TOP_K)
            used = (place < splits * MAX_TOP_K) & (place % MAX_TOP_K < top_k)
            source = row * splits * MAX_TOP_K + place
            x = tl.load(entries + source, mask=used, other=MINUS_INFINITY, cache_modifier=".cg")
            index = tl.load(entry_ids + source, mask=used, other=ABSENT, cache_modifier=".cg")
            for chosen in range(top_k):
                best, best_index = _first(x, index)
                tl.store(top_ids + row * top_k + chosen, tl.where(best_index == ABSENT, -1, best_index))
                prob = tl.where(best_index == ABSENT, 0.0, tl.exp(_distance(best, maximum)) / z)
                tl.store(top_probs + row * top_k + chosen, prob)
                x = _after(x, index, best, best_index)


def draft_statistics(
    logits: torch.Tensor,
    noise: torch.Tensor | None,
    temperature: float,
    token_ids: torch.Tensor | None,
    top_k: int,
) -> tuple[torch.Tensor, ...]:
    results = empty_results(logits, top_k)
    rows, vocabulary = logits.shape
    if rows == 0:
        return tuple(results)
    dtype = result_type(logits)
    if INTERPRETED and logits.dtype == torch.bfloat16:  # the interpreter takes bfloat16 for integers
        logits = logits.float()
    logits = with_unit_stride(logits)
    noise = None if noise is None else with_unit_stride(noise)
    splits, chunk = split(rows, vocabulary, PROGRAMS * multiprocessors(logits.device))
    slots = rows * splits
    entries = slots * MAX_TOP_K if top_k else 0
    (bits,) = struct.unpack("<q", struct.pack("<d", temperature))
    launch(
        _kernel, (slots,),
        logits, noise, None if token_ids is None else token_ids.contiguous(), bits,
        logits.new_zeros(rows, dtype=torch.int32),
        logits.new_empty(slots * 4, dtype=dtype), logits.new_empty(slots, dtype=torch.int32),
        logits.new_empty(entries, dtype=dtype), logits.new_empty(entries, dtype=torch.int32),
        *results, logits.stride(0), 0 if noise is None else noise.stride(0), vocabulary, splits, chunk, top_k,
        **_constants(dtype, noise is not None, token_ids is not None, top_k > 0), num_warps=8,
    )  # fmt: skip
    return tuple(results)


def _constants(dtype: torch.dtype, noisy: bool, given: bool, top: bool) -> dict[str, object]:
    sizes = {"BLOCK": BLOCK, "MAX_SPLITS": MAX_SPLITS, "MAX_TOP_K": MAX_TOP_K}
    number = {"X": tl.float64 if dtype == torch.float64 else tl.float32, "LARGEST": torch.finfo(dtype).max}
    return {"NOISY": noisy, "GIVEN": given, "TOP": top, **number, **sizes}


def compiled_variants() -> list[Variant]:
    integers = dict.fromkeys(("logits_stride", "noise_stride", "temperature_bits"), "i64")
    integers |= dict.fromkeys(("vocabulary", "splits", "chunk", "top_k"), "i32")
    integers |= {"counters": "*i32", "indices": "*i32", "entry_ids": "*i32", "top_ids": "*i64"}

    def variant(logits: str, dtype: torch.dtype, noisy: bool, given: bool, top: bool) -> Variant:
        x = "*fp64" if dtype == torch.float64 else "*fp32"
        signature = integers | dict.fromkeys(("parts", "entries", "values", "top_probs"), x) | {"logits": logits}
        absent: dict[str, object] = {}
        for name, kind, present in (("noise", x, noisy), ("token_ids", "*i64", given)):
            if present:
                signature[name] = kind
            else:
                absent[name] = None
        return Variant(_kernel, signature, absent | _constants(dtype, noisy, given, top))

    return [
        variant("*fp32", torch.float32, noisy=False, given=False, top=False),
        variant("*bf16", torch.float32, noisy=True, given=True, top=False),
        variant("*fp16", torch.float32, noisy=False, given=True, top=True),
        variant("*fp64", torch.float64, noisy=True, given=False, top=True),
    ]
