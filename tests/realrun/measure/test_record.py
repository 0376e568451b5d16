"""Dense recording: at every position, exactly what the drafter would propose there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

import realrun.proposals.chain
from realrun.decode.decoder import Decoder
from realrun.decode.draft_model import DraftModel
from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import Sampler
from realrun.lm.cached import CachedLM
from realrun.measure.record import RecordSettings, elapsed_ratio, record
from realrun.pairs.prompts import Prompt
from realrun.proposals.chain import branch_columns, true_ranks
from realrun.proposals.recorder import Columns, RecordRequest
from specsim.io.errors import InputError
from specsim.trace.trace import Trace
from tests.support.tiny import random_prompts, tiny_pair, tiny_prompts

CHOICES = {"greedy": Sampler(), "gumbel": Sampler("gumbel", 0.8, seed=4)}
mode = pytest.mark.parametrize("sampler", CHOICES.values(), ids=CHOICES.keys())


def target_output(prompt: Sequence[int], count: int, sampler: Sampler, sequence: int) -> list[int]:
    pair = tiny_pair()
    decoder = Decoder(pair.target, DraftModel(pair.drafter.model, ()), (), sampler)
    return decoder.decode(prompt, count, None, sequence=sequence).tokens


@torch.inference_mode()
def step_by_step(prompt: Sequence[int], output: Sequence[int], depth: int, sampler: Sampler, sequence: int) -> Columns:
    """The definition of a dense row: the real drafter, asked at every position."""
    drafter = DraftModel(tiny_pair().drafter.model, ())
    rows: dict[str, list[object]] = {name: [] for name in ("draft_token", "match_len", "steps")}
    for t in range(len(output)):
        context = [*prompt, *output[:t]]
        drafter.begin(context[:-1])
        draft = drafter.propose(context, RoundContext(sampler, sequence, t, depth), lambda step, depth: True)
        match = 0
        while match < depth and t + match < len(output) and draft.tokens[match] == output[t + match]:
            match += 1
        rows["draft_token"].append(draft.tokens)
        rows["match_len"].append(match)
        rows["steps"].append([step[:3] for step in draft.steps])
    steps = np.asarray(rows["steps"], dtype=np.float32)
    return {
        "draft_token": np.asarray(rows["draft_token"]),
        "match_len": np.asarray(rows["match_len"]),
        **{name: steps[:, :, i] for i, name in enumerate(("prob", "confidence", "entropy_nats"))},
    }


@mode
@pytest.mark.parametrize("chunk", [1, 7, 256])
@pytest.mark.parametrize("depth", [1, 2, 6])
def test_branch_columns_are_what_the_drafter_proposes(
    sampler: Sampler, chunk: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(realrun.proposals.chain, "CHUNK", chunk)
    lm = CachedLM(tiny_pair().drafter.model)
    for sequence, prompt in [(0, random_prompts(1)[0]), (5, [3])]:
        output = target_output(prompt, 24, sampler, sequence)
        dense = branch_columns(lm, RecordRequest(prompt, output, depth, sampler, sequence))
        expected = step_by_step(prompt, output, depth, sampler, sequence)
        for name in ("draft_token", "match_len"):
            np.testing.assert_array_equal(dense[name], expected[name], name)
        for name in ("prob", "confidence", "entropy_nats"):
            assert dense[name].dtype == np.float32
            np.testing.assert_array_max_ulp(dense[name], expected[name], maxulp=1)
        np.testing.assert_array_equal(dense["token"], output)
        assert dense["match_len"].max() > 0
        # All branches are gone from the cache, the prefix is whole.
        assert lm.cache.get_seq_length() == lm.length == len(prompt) + len(output) - 1
        fresh = CachedLM(tiny_pair().drafter.model)
        with torch.inference_mode():
            fresh.prefill([*prompt, *output[:-1]])
        assert torch.equal(lm.cache.layers[0].keys, fresh.cache.layers[0].keys)


RANK_CHOICES = {
    **CHOICES,
    "nucleus": Sampler("gumbel", 0.8, seed=4, top_p=0.7),
    "top-k": Sampler("gumbel", 0.8, seed=4, top_k=10),
}


@pytest.mark.parametrize("sampler", RANK_CHOICES.values(), ids=RANK_CHOICES.keys())
def test_the_true_rank_is_the_place_in_the_order_in_which_siblings_are_drafted(sampler: Sampler) -> None:
    (prompt,) = random_prompts(1, seed=3)
    output, depth = target_output(prompt, 15, sampler, 2), 4
    dense = branch_columns(CachedLM(tiny_pair().drafter.model), RecordRequest(prompt, output, depth, sampler, 2))
    ranks = set()
    for t in range(len(output)):
        for i in range(depth):
            if t + i >= len(output):
                assert dense["true_rank"][t, i] == -1
                continue
            with torch.inference_mode():
                context = torch.tensor([[*prompt, *output[: t + i]]])
                logits = tiny_pair().drafter.model(input_ids=context, use_cache=False).logits[0, -1:]
            order = sampler.candidates(logits, 2, [t + i], logits.shape[1])[0][0].tolist()
            assert order.index(output[t + i]) == dense["true_rank"][t, i]
            assert i or (dense["true_rank"][t, 0] == 0) == (dense["match_len"][t] > 0)
            ranks.add(int(dense["true_rank"][t, i]))
    assert len(ranks) > 2


def test_of_equal_tokens_the_one_of_lowest_index_stands_first() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0]] * 5)
    assert true_ranks(logits, range(5), Sampler(), 0).tolist() == [3, 0, 1, 4, 2]
    # 3 and 0 are outside the nucleus: neither can be drawn.
    assert true_ranks(logits, range(5), Sampler("gumbel", 1.0, top_p=0.8), 0)[[0, 3]].tolist() == [3, 4]


@pytest.fixture(scope="module")
def eos_trace() -> tuple[Trace, list[Prompt], tuple[int, ...]]:
    """Six sequences, some of which end early."""
    prompts = tiny_prompts(6)
    outputs = [target_output(p.tokens, 20, CHOICES["gumbel"], s) for s, p in enumerate(prompts)]
    eos = (outputs[0][6], outputs[1][0])
    pair = replace(tiny_pair(), eos_token_ids=eos)
    return record(pair, prompts, RecordSettings(5, 20, CHOICES["gumbel"])), prompts, eos


def test_recorded_output_is_the_targets_own_up_to_the_end_of_text(
    eos_trace: tuple[Trace, list[Prompt], tuple[int, ...]],
) -> None:
    trace, prompts, eos = eos_trace
    for s, prompt in enumerate(prompts):
        plain = target_output(prompt.tokens, 20, CHOICES["gumbel"], s)
        ends = [t for t, token in enumerate(plain) if token in eos]
        expected = plain[: ends[0] + 1] if ends else plain
        assert trace.token[trace.offsets[s] : trace.offsets[s + 1]].tolist() == expected
    assert trace.output_tokens.min() == 1 and trace.output_tokens[0] == 7
    assert trace.domain.tolist() == [p.domain for p in prompts]
    assert trace.prompt_tokens.tolist() == [len(p.tokens) for p in prompts]
    assert trace.meta["eos_token_id"] == list(eos) and trace.meta["decoding"] == CHOICES["gumbel"].as_dict()
    assert elapsed_ratio(trace) > 1


def test_no_match_reaches_beyond_the_end_of_the_output(
    eos_trace: tuple[Trace, list[Prompt], tuple[int, ...]],
) -> None:
    trace, _, _ = eos_trace
    remaining = np.repeat(trace.output_tokens, trace.output_tokens) - trace.position
    assert (trace.match_len <= remaining).all() and (trace.match_len == remaining).any()


def test_a_context_that_exceeds_the_models_is_refused() -> None:
    prompts = [Prompt("all", [1] * 100)]
    with pytest.raises(InputError, match=r"161 tokens.*160 positions") as caught:
        record(tiny_pair(), prompts, RecordSettings(max_draft_tokens=11, max_new_tokens=50))
    assert "\n" not in str(caught.value)
    trace = record(tiny_pair(), prompts, RecordSettings(max_draft_tokens=10, max_new_tokens=50))
    assert trace.output_tokens.tolist() == [50]


def test_the_files_of_prompts_are_recorded_where_any_is_known() -> None:
    settings = RecordSettings(2, 4)
    own, cut = tiny_prompts(1), Prompt("code", [1, 2, 3], "heapq.py")
    named = record(tiny_pair(), [*own, cut], settings).source
    assert named is not None and named.tolist() == ["", "heapq.py"]
    assert record(tiny_pair(), own, settings).source is None
