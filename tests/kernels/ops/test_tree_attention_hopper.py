"""Tree attention by TMA and wgmma: chosen where it is asked for and fits, and right on emulated threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import speckernels
from speckernels.ops.tree_attention import TMA_ENVIRONMENT, cuda, tree_attention
from tests.kernels.ops.test_tree_attention import (
    LARGE_CASES,
    LAYOUTS,
    Case,
    Tails,
    arguments,
    assert_close,
    check_case,
    check_tails,
)
from tests.support import ROOT
from tests.support.mutants import Mutant

SOURCE = "tree_attention_hopper"
LIMIT_S = 100
# In one part, so that the ring of tiles goes round: heads of 64 have 8 slots, those of 128 have 6, two for 128 keys.
WHOLE = [
    Case(4, 1, 64, 16, (900, 0), 1000, torch.float16),  # one warpgroup
    Case(4, 1, 128, 33, (520, 131), 600, torch.bfloat16, LAYOUTS[1]),  # two, and two tiles of rows
]
CASES = [
    Case(6, 2, 128, 40, (700,), 840, torch.float16, LAYOUTS[2]),  # three parts
    Case(8, 1, 80, 9, (300, 126), 400, torch.bfloat16),  # fills 128 columns in part
]
TAILS_CASES = [
    Tails(16, 2, 64, 9, ((40, 9), (0, 0), (300, 40), (3, 1)), 2, torch.float16),
    Tails(4, 1, 96, 33, ((130, 70), (400, 0)), 3, torch.bfloat16, 100),
    Tails(8, 1, 56, 9, ((390, 140), (128, 0)), 4, torch.float16, 90),
]
FILE = f"csrc/{SOURCE}.cu"
MUTANTS = [
    Mutant(FILE, "step * 16 * 128", "step * 8 * 128", "a descriptor that begins in the wrong row of the values"),
    Mutant(FILE, "1024, S::HALF_BYTES)", "1024)", "a descriptor without the offset of its second 64 columns"),
    Mutant(FILE, "half * S::HALF_BYTES + within", "half * S::HALF_BYTES", "the first 16 columns of the keys again"),
    Mutant(FILE, "place.warp / 4 * 64 * 128", "0", "all warpgroups take the rows of the first"),
    Mutant(FILE, "place.warp / 4 * 64 * 128", "place.warp * 16 * 128", "a descriptor for each warp"),
    Mutant(FILE, "chunk % 8 ^ local % 8", "chunk % 8", "a query that is not swizzled"),
    Mutant(FILE, "SHARED_MEMORY(shared, 1024)", "SHARED_MEMORY(shared, 128)", "rows that begin between patterns"),
    Mutant(FILE, "      ring.wait_full(2 * tile - 1);\n", "", "values that have yet to come"),
    Mutant(FILE, "i / S::SLOTS & 1", "0", "the parity of the first round for good"),
    Mutant(FILE, "(i / S::SLOTS - 1) & 1", "i / S::SLOTS & 1", "the parity of the wrong round"),
    Mutant(FILE, "    ring.wait_empty(i);\n", "", "a slot filled again while it is read"),
    Mutant(FILE, "barrier_init(ring.empty + slot, S::WARPS)", "barrier_init(ring.empty + slot, S::WARPS / 2)",
           "a slot that half of the warps give back"),
    Mutant(FILE, "barrier_expect(full, S::TILE_BYTES)", "barrier_expect(full, 2 * S::TILE_BYTES)",
           "waits for bytes that are not fetched"),
    Mutant(FILE, "i % 2 ? values : keys", "keys", "keys for values"),
    Mutant(FILE, "warpgroup_wait<1>", "warpgroup_wait<2>", "scores that are read before they are there"),
    Mutant(FILE, "      warpgroup_wait<0>(sums[0]);\n      ring.release(2 * tile - 1);",
           "      ring.release(2 * tile - 1);\n      warpgroup_wait<0>(sums[0]);",
           "gives values back before they are read"),
    Mutant(FILE, "warpgroup_fence(scores[0], weights, sums[0]);", "", "registers used without a fence"),
    Mutant(FILE, "  copy_async_wait<0>();\n  async_proxy_fence();", "  copy_async_wait<0>();",
           "a query that the async proxy does not see"),
    Mutant(FILE, "  named_barrier<S::THREADS>();\n\n", "", "a query that other threads have yet to copy"),
    Mutant(FILE, "      async_proxy_fence();\n      named_barrier<S::THREADS>();", "      async_proxy_fence();",
           "values behind the tail that other threads have yet to clear"),
    Mutant(FILE, "if (moved) multiply_rows<S>(sums, rescale);", "", "old sums keep an old maximum"),
    Mutant(FILE, "(tile + 1) * S::KEYS > w.of.context", "tile * S::KEYS > w.of.context", "a tail without its mask"),
    Mutant(FILE, "if (used < S::KEYS)", "if (used < 0)", "values behind the tail times weight 0"),
]  # fmt: skip


@contextmanager
def asked_for(parts: int | None = None) -> Iterator[list[str]]:
    """Gives the sources that were called. parts : that the cache is cut into; by default as many as are planned"""
    called: list[str] = []
    call, split_count = cuda.call, cuda.split_count

    def noted(source: str, *args: Any) -> None:
        called.append(source)
        call(source, *args)

    with pytest.MonkeyPatch.context() as patch, speckernels.use_backend("cuda"):
        patch.setenv(TMA_ENVIRONMENT, "1")
        patch.setattr(cuda, "call", noted)
        patch.setattr(cuda, "split_count", lambda *plan: parts or split_count(*plan))
        yield called


def check(device: str) -> None:
    for parts, cases in ((1, WHOLE), (None, CASES)):
        with asked_for(parts) as called:
            for case in cases:
                check_case(case, device, SOURCE)
            assert set(called) == {SOURCE}
    for parts in (1, None):
        with asked_for(parts) as called:
            for tails in TAILS_CASES:
                check_tails(tails, device, source=SOURCE)
            assert set(called) == {SOURCE}


@pytest.mark.parametrize("case", [*WHOLE, *CASES], ids=str)
def test_agrees_with_the_reference(case: Case) -> None:
    with asked_for(1 if case in WHOLE else None) as called:
        check_case(case, "cpu", SOURCE)
    assert set(called) == {SOURCE}


@pytest.mark.parametrize("case", TAILS_CASES, ids=str)
def test_tails_of_any_length(case: Tails) -> None:
    with asked_for() as called:
        check_tails(case, "cpu", source=SOURCE)
    assert set(called) == {SOURCE}


@st.composite
def tails(draw: st.DrawFn) -> Tails:
    nodes, kv_heads = draw(st.integers(16, 40)), draw(st.integers(1, 2))
    return Tails(
        4 * kv_heads,
        kv_heads,
        draw(st.sampled_from((8, 64, 72, 128))),
        nodes,
        draw(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 150)), min_size=1, max_size=2)),
        draw(st.integers(0, 4)),
        draw(st.sampled_from((torch.float16, torch.bfloat16))),
        draw(st.sampled_from((0, 300))),
    )


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(tails(), st.sampled_from((None, 1, 2)), st.integers(0, 1000))
def test_whatever_a_tree_has(case: Tails, parts: int | None, seed: int) -> None:
    with asked_for(parts):
        check_tails(case, "cpu", seed, SOURCE)


def test_the_present_kernel_serves_what_it_does_not() -> None:
    """Fewer rows than 64, larger heads, expanded caches; and all where nobody asks for it."""
    many, few = Case(4, 1, 32, 16, (5,), 30, torch.float16), Case(4, 1, 32, 15, (5,), 30, torch.float16)
    large = Case(4, 1, 136, 16, (5,), 30, torch.float16)
    with asked_for() as called:
        for case in (many, few, large):
            args = arguments(case)
            assert_close(tree_attention(*args), case, args)
        query, keys, values, *others = arguments(Case(4, 1, 32, 16, (5, 5), 30, torch.float16))
        tree_attention(query, keys[:1].expand_as(keys), values, *others)
    present = "tree_attention"
    assert called == [SOURCE, *[present] * 3]
    with asked_for() as called, pytest.MonkeyPatch.context() as patch:
        patch.delenv(TMA_ENVIRONMENT)
        tree_attention(*arguments(many))
    assert called == [present]


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_in_a_process_of_its_own(device: str) -> None:
    """On a GPU a kernel that waits for ever ends with its process."""
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is of compute capability 9.0")
    paths = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels")))}
    command = [sys.executable, "-m", "tests.kernels.ops.test_tree_attention_hopper", device]
    subprocess.run(command, cwd=ROOT, env=os.environ | paths, check=True, timeout=LIMIT_S)


def check_large() -> None:
    with asked_for() as called:
        for case in LARGE_CASES:
            args = arguments(case, "cuda")
            assert_close(tree_attention(*args), case, args)
    assert SOURCE in called


if __name__ == "__main__":
    check(sys.argv[1])
    if sys.argv[1] == "cuda":
        check_large()
