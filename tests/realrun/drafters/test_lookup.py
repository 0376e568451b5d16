"""Prompt lookup: what it proposes by brute force, recording, replay of rounds without a draft."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from realrun.decode.decoder import Decoder
from realrun.decode.draft import Draft
from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import Sampler
from realrun.drafters import lookup
from realrun.drafters.independent import IndependentKind
from realrun.drafters.lookup import RULE, LookupDrafter, LookupKind, step_of
from realrun.measure.profile import profile
from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import LOOKUP, Pair, load_pair
from realrun.pairs.prompts import Prompt
from specsim.cost.model import ConstantCost
from specsim.cost.profile import profile_from_json
from specsim.io.errors import InputError
from specsim.learn.calibration import verified_tokens
from specsim.lookup.from_text import TokenText, lookup_trace
from specsim.lookup.ngram import RULES
from specsim.policy.chain.base import Step
from specsim.policy.registry import make_policy
from specsim.replaying.expected import expected_replay
from specsim.replaying.oracles import chain_oracle_seconds
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.files import read_trace, write_trace
from specsim.trace.trace import NO_TOKEN, Trace
from tests.realrun.cli.test_drafter_commands import home as home
from tests.specsim.lookup.test_lookup import ngram_draft
from tests.support.checks import refusal
from tests.support.clock import SetClock
from tests.support.tiny import VOCAB, tiny_pair, tiny_prompts

DEPTH, TOKENS = 6, 48
CHOICES = {"greedy": Sampler(), "gumbel": Sampler("gumbel", 0.25, seed=4)}
choices = pytest.mark.parametrize("mode", CHOICES)
FIXED = make_policy("fixed_k", {"k": DEPTH})


@cache
def lookup_pair(eos_token_ids: tuple[int, ...] = ()) -> Pair:
    return dataclasses.replace(tiny_pair(eos_token_ids), drafter=LookupKind(), draft_name=LOOKUP)


@cache
def recorded(mode: str) -> tuple[Pair, list[Prompt], Trace]:
    # Greedy decoding of the tiny target ends in loops; two of the prompts repeat themselves.
    pair, prompts = lookup_pair(), [*tiny_prompts(4), *(Prompt("all", [7, 8, 9, 5] * k) for k in (2, 3))]
    return pair, prompts, record(pair, prompts, RecordSettings(DEPTH, TOKENS, CHOICES[mode]))


@choices
def test_a_trace_holds_what_it_proposes_at_every_position(mode: str) -> None:
    _, prompts, trace = recorded(mode)
    silent = 0
    for s, prompt in enumerate(prompts):
        rows = range(int(trace.offsets[s]), int(trace.offsets[s + 1]))
        output = trace.token[rows.start : rows.stop].tolist()
        for t, row in enumerate(rows):
            drafted = ngram_draft(prompt.tokens + output[:t], DEPTH, RULE)
            assert trace.draft_token[row].tolist() == (drafted or [NO_TOKEN] * DEPTH)
            assert trace.draft_limit[row] == (min(DEPTH, TOKENS - t - 1) if drafted else 0)
            right = np.cumprod([a == b for a, b in zip(drafted, output[t:], strict=False)]).sum()
            assert trace.match_len[row] == right
            silent += not drafted
    assert silent > 5 and (trace.match_len > 1).sum() > 5


def test_a_drafted_end_of_text_is_the_last() -> None:
    pair = lookup_pair(eos_token_ids=(9,))
    drafter = LookupDrafter(pair.make_drafter()[0], (9,))
    drafter.begin([7, 8, 9, 5, 7])
    draft = drafter.propose([7, 8, 9, 5, 7, 8], RoundContext(Sampler(), 0, 0, DEPTH), lambda step, depth: True)
    assert draft.tokens == [9]


def test_rejection_sampling_is_told_that_the_draft_was_certain() -> None:
    sampler = Sampler("rejection", 1.0, seed=1)
    pair = lookup_pair()
    drafts: list[Draft] = []

    class Watched(LookupDrafter):
        def propose(self, *asked):  # type: ignore[no-untyped-def]
            drafts.append(super().propose(*asked))
            return drafts[-1]

    target, _ = pair.make_drafter()
    decoder = Decoder(target, Watched(target, ()), (), sampler)
    runs = [decoder.decode([7, 8, 9, 5] * 3, TOKENS, FIXED, sequence=s) for s in range(3)]
    assert sum(r.accepted for run in runs for r in run.rounds) > 0
    for draft in drafts:
        assert len(draft.probs) == len(draft.tokens)
        for token, probs in zip(draft.tokens, draft.probs, strict=True):
            assert probs.shape == (VOCAB,) and probs[token] == 1 and torch.count_nonzero(probs) == 1


def test_it_refuses_what_it_cannot_do() -> None:
    pair, prompts, _ = recorded("greedy")
    with pytest.raises(InputError, match="chains only; record it with --tree-nodes 0"):
        record(pair, prompts, RecordSettings(DEPTH, TOKENS, tree_nodes=8))
    with pytest.raises(InputError, match="not recorded in rejection mode"):
        record(pair, prompts, RecordSettings(DEPTH, TOKENS, Sampler("rejection")))
    decoder = Decoder(*pair.make_drafter(), (), Sampler())
    with pytest.raises(InputError, match="prompt lookup chains only"):
        decoder.decode(prompts[0].tokens, 4, make_policy("vct", {"width": 2, "depth": 2}))
    refusal(lambda: decoder.decode(prompts[0].tokens, 4, make_policy("cali_ts")), "score", "choose another policy")
    with pytest.raises(InputError, match="ten likeliest tokens, .*choose another policy"):
        decoder.decode(prompts[0].tokens, 4, make_policy("llama_cpp"))
    refusal(lambda: load_pair(drafter=LOOKUP, predictor="lab"), "leave --predictor lab out")


def test_a_trace_with_silent_rounds_is_written_and_read(tmp_path: Path) -> None:
    _, _, trace = recorded("gumbel")
    write_trace(trace, tmp_path / "trace")
    again = read_trace(tmp_path / "trace")
    assert np.array_equal(again.draft_limit, trace.draft_limit) and (again.draft_limit == 0).sum() > trace.sequences
    gap = trace.draft_token.copy()
    row = int(np.argmax((gap >= 0).all(axis=1)))
    gap[row, 1] = NO_TOKEN
    write_trace(dataclasses.replace(trace, draft_token=gap), tmp_path / "gap")
    refusal(lambda: read_trace(tmp_path / "gap"), "draft_token has a gap")


def test_a_draft_may_be_shorter_than_the_depth() -> None:
    _, _, trace = recorded("gumbel")
    cut = trace.draft_token.copy()
    cut[:, 2:] = NO_TOKEN
    short = dataclasses.replace(trace, draft_token=cut)
    whole = trace.draft_limit
    assert np.array_equal(short.draft_limit, np.minimum(whole, 2))
    replayed = replay(short, FIXED, cost_table(short, ConstantCost(1e-3, 1e-2)), log=True)
    assert replayed.rounds is not None and replayed.rounds.drafted.max() == 2


def test_what_is_not_proposed_is_never_read() -> None:
    """Neither by a replay nor by what judges confidences: columns beyond the limit may hold anything."""
    _, _, trace = recorded("gumbel")
    beyond = np.arange(DEPTH) >= trace.draft_limit[:, None]
    changed = {
        name: np.where(beyond, np.float32(0.77), getattr(trace, name))
        for name in ("prob", "confidence", "entropy_nats")
    }
    other = dataclasses.replace(trace, **changed)
    policy = make_policy("adaedl", {"gamma": 0.2, "lambda0": 0.2, "dynamic": False, "max_draft_tokens": DEPTH})
    logs = [replay(t, policy, cost_table(t, ConstantCost(1e-3, 1e-2)), log=True).rounds for t in (trace, other)]
    assert logs[0] is not None and logs[1] is not None and logs[0].rows() == logs[1].rows()
    for a, b in zip(verified_tokens(trace), verified_tokens(other), strict=True):
        assert np.array_equal(a, b)


@choices
def test_no_policy_beats_the_oracle_where_drafts_lag(mode: str) -> None:
    """Under costs of catching up, which rounds with nothing to draft do not owe."""
    _, _, trace = recorded(mode)
    table = cost_table(trace, ConstantCost(1e-4, 1e-2))
    table = dataclasses.replace(table, catch_up_s=np.full_like(table.catch_up_s, 5e-3))
    least = chain_oracle_seconds(trace, table)
    for k in range(1, DEPTH + 1):
        assert (least <= replay(trace, make_policy("fixed_k", {"k": k}), table).speculative_s + 1e-12).all()


@pytest.mark.slow
def test_the_expectation_of_a_policy_that_draws_counts_silent_rounds() -> None:
    _, _, trace = recorded("gumbel")
    policy = make_policy("beta_ts", {"alpha0": 2.0, "max_draft_tokens": DEPTH})
    table = cost_table(trace, ConstantCost(1e-3, 1e-2))
    expected = expected_replay(trace, policy, table)  # type: ignore[arg-type]
    seeds = [replay(trace, policy, table, seed=seed) for seed in range(400)]
    for name in ("num_rounds", "drafted", "accepted"):
        sums = np.array([getattr(result, name).sum() for result in seeds])
        error = sums.std(ddof=1) / math.sqrt(len(sums))
        assert abs(sums.mean() - getattr(expected, name).sum()) < 4 * error + 1e-9


def test_a_profile_prices_the_look_and_no_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, clock, look_s = lookup_pair(), SetClock(monkeypatch), 2e-3

    def slow_step(*asked: Any) -> Step:
        clock.take(look_s)
        return step_of(*asked)

    monkeypatch.setattr(lookup, "step_of", slow_step)
    document = profile(pair, contexts=[2, 40], depth=DEPTH, limit_s=0, tree_tokens=9)
    median = document["median_s"]
    assert "tree" not in median and document["drafter_facts"] == {"longest_ngram": RULE.max_ngram}
    assert np.shape(median["draft_step"]) == (DEPTH, 2) and median["catch_up"] == [0.0, 0.0]
    np.testing.assert_allclose(median["draft_step"], look_s, rtol=0.01)
    assert np.max(median["autoregressive"]) < look_s
    assert profile_from_json(document, "here").max_tree_tokens == 0


def test_drafters_share_one_target_in_memory(home: Path) -> None:
    target, dtype = str(home / "llama" / "target"), "float64"
    plain = load_pair(target, drafter=LOOKUP, dtype=dtype)
    assert isinstance(plain.drafter, LookupKind) and not plain.drafter.trees
    for kind in ("eesd", "medusa", "self-sd"):
        folder = str(home / "llama" / kind)
        shared = load_pair(target, drafter=folder, dtype=dtype, beside=plain)
        assert shared.target is plain.target and shared.drafter.trees
        assert shared.fingerprint == load_pair(target, drafter=folder, dtype=dtype).fingerprint
    beside = load_pair(target, target, dtype=dtype, beside=plain)
    assert (
        beside.target is plain.target
        and isinstance(beside.drafter, IndependentKind)
        and beside.drafter.model is not plain.target
    )


@pytest.mark.parametrize("repeats", [2, 3, 4])
def test_by_its_rule_it_drafts_what_transformers_does(repeats: int) -> None:
    """Rounds of `generate` with prompt lookup; its last drafts count as far as the limit lets them be accepted."""
    prompt = [7, 8, 9, 5] * repeats
    lengths: list[int] = []
    taken: list[int] = []

    class Watched(PromptLookupCandidateGenerator):
        def get_candidates(self, input_ids, **options):  # type: ignore[no-untyped-def]
            candidates = super().get_candidates(input_ids, **options)
            lengths.append(candidates[0].shape[1] - input_ids.shape[1])
            return candidates

        def update_candidate_strategy(self, input_ids, scores, num_matches):  # type: ignore[no-untyped-def]
            taken.append(int(num_matches))

    with mock.patch("transformers.generation.utils.PromptLookupCandidateGenerator", Watched):
        text = lookup_pair().target.generate(
            torch.tensor([prompt]), max_new_tokens=TOKENS, prompt_lookup_num_tokens=DEPTH, do_sample=False
        )
    output = text[0, len(prompt) :].tolist()
    assert len(output) == TOKENS
    trace = lookup_trace([TokenText(prompt, output, "all", TOKENS)], RULES["transformers"], DEPTH)
    rounds = replay(trace, FIXED, cost_table(trace, ConstantCost(1.0, 10.0)), log=True).rounds
    assert rounds is not None and rounds.accepted.tolist() == taken
    left = (TOKENS - rounds.t - 1).tolist()
    assert rounds.drafted.tolist() == [min(pair) for pair in zip(lengths, left, strict=True)]
