"""Self-speculation with a sparse cache: what it drafts is what the library says under a mask that is written out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.drafters.sparse_cache import SINKS
from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import load_pair
from realrun.pairs.prompts import lab_prompts
from realrun.proposals.recorder import RecordRequest
from realrun.proposals.target_cache import target_cache_columns
from realrun.proposals.trees import TreeSize
from tests.support.checks import refusal
from tests.support.dense_records import check_columns, check_trees
from tests.support.drafting import Case, case_pair
from tests.support.small_targets import small_target
from tests.support.tiny import random_prompts

MODES = {"greedy": Sampler(), "gumbel": Sampler("gumbel", 0.8, seed=4)}


@torch.inference_mode()
def library_logits(context: Sequence[int], drafted: Sequence[int], window: int = 6) -> torch.Tensor:
    """Logits [1, V] after context and drafted tokens; the library's model, over a cache that the target has filled."""
    model, past, pending = small_target(layers=4), DynamicCache(), len(context) - 1
    if pending:
        model(input_ids=torch.tensor([context[:-1]]), past_key_values=past)
    sinks = min(SINKS, window // 2)
    mask = torch.full((1, 1, 1 + len(drafted), len(context) + len(drafted)), -1e300, dtype=torch.float64)
    for row in range(1 + len(drafted)):
        for slot in range(pending + row + 1):
            if slot < sinks or slot >= pending or pending + row - slot <= window - sinks:
                mask[0, 0, row, slot] = 0
    fed = torch.tensor([[context[-1], *drafted]])
    logits: torch.Tensor = model(input_ids=fed, past_key_values=past, attention_mask=mask).logits[0, -1:]
    return logits


@pytest.mark.parametrize("sampler", MODES.values(), ids=MODES)
@torch.inference_mode()
def test_columns_and_trees_are_what_the_library_says(sampler: Sampler) -> None:
    pair = case_pair(Case("sparse-cache"))
    (prompt,) = random_prompts(1, seed=3, lengths=(12, 13))  # longer than the window
    output = Decoder(*pair.make_drafter(), (), sampler).decode(prompt, 7, None).tokens
    split, drafter = pair.make_drafter()
    request = RecordRequest(prompt, output, 3, sampler)
    check_columns(target_cache_columns(split, drafter.lm, request), request, library_logits)
    grown = RecordRequest(prompt, output, 3, sampler, tree=TreeSize(12, 3))
    check_trees(target_cache_columns(split, drafter.lm, grown), grown, library_logits)


@pytest.mark.slow
def test_a_window_as_long_as_the_text_accepts_all_and_a_short_one_some() -> None:
    shares = []
    for window in (512, 16):
        pair = load_pair(drafter=f"sparse-cache:{window}", dtype="float64")
        assert (pair.draft_name, pair.drafter.facts) == (f"sparse-cache:{window}", {"window": window})
        trace = record(pair, lab_prompts(pair.tokenizer, 1), RecordSettings(max_draft_tokens=2, max_new_tokens=16))
        shares.append(float(np.mean(trace.match_len[trace.draft_limit == 2] == 2)))
    assert shares[0] == 1.0
    assert 0.0 < shares[1] < 1.0


def test_a_window_that_is_none_is_refused() -> None:
    for name in ("sparse-cache:0", "sparse-cache:x", "sparse-cache:"):
        refusal(lambda name=name: load_pair(drafter=name), name, "sparse-cache:512")  # type: ignore[misc]
