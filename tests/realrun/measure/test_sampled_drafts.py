"""Replays at a temperature against the law of every rule of acceptance, on a Markov pair of three tokens.

The law is enumerated for fixed K, and simulated for other policies, from the rules' definitions. A round's start
depends on what was accepted before it, because tokens after which the pair disagrees follow one another.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numba as nb
import numpy as np
import pytest
import torch

from realrun.decode.sampling import Sampler, gumbel_noise
from realrun.proposals.chain import branch_columns
from realrun.proposals.recorder import RecordRequest
from specsim.cost.model import ConstantCost
from specsim.io.errors import InputError
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.base import ChainPolicy, Step
from specsim.policy.chain.beta_ts import BetaTS
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.max_confidence import MaxConfidence
from specsim.replaying.checks import check_replayable
from specsim.replaying.kernel import step_functions
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.accepted import Rule, accepted_by, rule_of
from specsim.trace.trace import Trace
from tests.support.reference import build_trace

STICKY = np.array(
    [[[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]], [[0.85, 0.1, 0.05], [0.7, 0.2, 0.1], [0.7, 0.1, 0.2]]]
)
DEPTH, TEXTS, LENGTH, SEED = 6, int(os.environ.get("TEXTS", "60")), 300, 7
SKIPPED = 30  # first positions of a text, where rounds do not start as they do in the long run
MODES = ("greedy-draft", "gumbel", "rejection")
POLICIES = [
    *(FixedK(k=k) for k in (1, 3, 6)),
    AdaEDL(dynamic=False, lambda0=0.7, gamma=0.2, max_draft_tokens=DEPTH),
    MaxConfidence(dynamic=False, lambda0=0.83, max_draft_tokens=DEPTH),
    BetaTS(max_draft_tokens=DEPTH),
]


def at(temperature: float) -> np.ndarray:
    """Target's and drafter's probabilities [2, from, to]."""
    warped = STICKY ** (1 / temperature)
    return np.asarray(warped / warped.sum(-1, keepdims=True))


def markov_lm(probs: np.ndarray) -> Any:
    """A model, as the recorder calls it, whose logits depend on the token before."""
    logits = torch.tensor(probs).log()
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=3), dtype=torch.float64)
    lm = SimpleNamespace(model=model, hidden=None, length=0, reset=lambda: None, drop_rows=lambda rows: None)
    lm.recurrent, lm.fork = False, lambda text: None
    lm.forward = lambda tokens: logits[torch.tensor(tokens)]
    lm.run_model = lambda input_ids, **_: logits[input_ids[0]]
    return lm


@cache
def recorded(mode: str, temperature: float) -> Trace:
    """Texts drawn from the target with the noise of shared drafts, and what the recorder drafts along them."""
    rng, target = np.random.default_rng(1), at(temperature)[0]
    target_lm, draft_lm = (markov_lm(probs) for probs in STICKY)
    sampler, columns = Sampler(mode, temperature, seed=SEED), []  # type: ignore[arg-type]
    for sequence in range(TEXTS):
        noise = gumbel_noise(SEED, sequence, 0, LENGTH, 3, torch.device("cpu")).numpy()
        text = [0]
        for row in noise:
            text.append(int((np.log(target[text[-1]]) + row).argmax()))
        chances = target[text[:-1], text[1:]]
        request = RecordRequest(text[:1], text[1:], DEPTH, sampler, sequence, target_prob=chances)
        columns.append(branch_columns(draft_lm, request, target_lm))
    blank = build_trace(rng, np.zeros((TEXTS * LENGTH, DEPTH), dtype=bool), [LENGTH] * TEXTS, prompts=[1] * TEXTS)
    return replace(
        blank,
        meta={**blank.meta, "eos_token_id": None, "decoding": sampler.as_dict()},
        **{name: np.concatenate([part[name] for part in columns]) for name in columns[0]},
    )


def simulated(policy: ChainPolicy, mode: str, temperature: float) -> np.ndarray:
    """Rounds, their tokens and drafted tokens of real runs [TEXTS, 3], of rounds that no end of text shortens."""
    counts, functions, mode_number = np.zeros((TEXTS, 3)), step_functions(policy), MODES.index(mode)
    own = functions.initial_state, functions.keep_drafting, functions.update
    rng = np.random.default_rng(2)
    _simulate(*own, policy.params, policy.max_draft_tokens, *at(temperature), mode_number, counts, rng)
    return counts


@nb.njit
def _simulate(initial_state, keep_drafting, update, params, longest, p, q, mode, counts, rng):  # type: ignore[no-untyped-def]
    draft = np.zeros(longest, np.int64)
    for number in range(len(counts)):
        last, t, state = 0, 0, initial_state(params)
        noise = -np.log(-np.log(rng.random((LENGTH, 3))))  # of a position, whichever round comes to it
        while t < LENGTH - DEPTH:
            drafted, before = 0, last
            while drafted < longest:
                if MODES[mode] == "rejection":
                    reached = q[before].cumsum()
                    token = int(np.searchsorted(reached, rng.random() * reached[2]))
                else:
                    shared = noise[t + drafted] if MODES[mode] == "gumbel" else np.zeros(3)
                    token = int((np.log(q[before]) + shared).argmax())
                entropy = -(q[before] * np.log(q[before])).sum()
                step = Step(q[before, token], q[before].max(), entropy, 0.0, 0.0)
                draft[drafted] = before = token
                drafted += 1
                if drafted < longest:
                    goes_on, state = keep_drafting(state, params, step, drafted, rng.random())
                    if not goes_on:
                        break
            accepted, rejected = 0, False
            while accepted < drafted and not rejected:
                token = draft[accepted]
                rest = np.maximum(p[last] - q[last], 0.0)
                if MODES[mode] != "rejection":
                    last = int((np.log(p[last]) + noise[t + accepted]).argmax())
                    rejected = last != token
                elif rng.random() * q[last, token] < p[last, token]:
                    last = token
                else:
                    last = int(np.searchsorted(rest.cumsum(), rng.random() * rest.sum()))
                    rejected = True
                accepted += not rejected
            if not rejected:  # the target adds a token
                last = int((np.log(p[last]) + noise[t + accepted]).argmax())
            state = update(state, params, drafted, accepted)
            if t >= SKIPPED:
                counts[number] += np.array([1.0, accepted + 1.0, drafted])
            t += accepted + 1


def enumerated(k: int, rule: Rule, temperature: float) -> float:
    """Tokens per round of fixed K in the long run."""
    p, q = at(temperature)
    likeliest = np.eye(3)[q.argmax(-1)]
    kept = {"greedy-draft": p * likeliest, "sampled-draft": np.minimum(p, q), "equal-samples": p * q}[rule]
    paths = [np.linalg.matrix_power(kept, accepted) for accepted in range(k + 1)]
    ends = [*(path @ (p - kept) for path in paths[:-1]), paths[-1] @ p]  # [from, last token emitted] by accepted tokens
    start = np.linalg.matrix_power(sum(ends), 200)[0]
    return float(sum((accepted + 1) * (start @ end).sum() for accepted, end in enumerate(ends)))


def replayed(policy: ChainPolicy, trace: Trace) -> np.ndarray:
    """As `simulated`, of the trace."""
    rounds = replay(trace, policy, cost_table(trace, ConstantCost(1e-3, 1e-2)), seed=3, log=True).rounds
    assert rounds is not None
    whole = rounds[(rounds.t >= SKIPPED) & (rounds.t < LENGTH - DEPTH)]
    weights = (np.ones(len(whole)), whole.accepted + 1, whole.drafted)
    return np.column_stack([np.bincount(whole.sequence, each, TEXTS) for each in weights])


def per_round(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and drafted tokens per round, and the standard errors of these ratios over texts."""
    ratio = counts[:, 1:].sum(axis=0) / counts[:, 0].sum()
    errors = counts[:, 1:] - ratio * counts[:, :1]
    return ratio, np.sqrt((errors**2).sum(axis=0)) / counts[:, 0].sum()


def z_of(counts: np.ndarray, law: float) -> float:
    """Distance of the tokens per round from the law, in standard errors."""
    ratio, error = per_round(counts)
    return float((ratio[0] - law) / error[0])


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("mode", MODES)
def test_a_replay_follows_the_law_of_its_mode(policy: ChainPolicy, mode: str, temperature: float) -> None:
    trace = recorded(mode, temperature)
    ours, real = replayed(policy, trace), simulated(policy, mode, temperature)
    (ratio, error), (real_ratio, real_error) = per_round(ours), per_round(real)
    assert (np.abs(ratio - real_ratio) <= 4 * np.hypot(error, real_error)).all()
    rule = rule_of(trace)
    if isinstance(policy, FixedK) and rule is not None:
        assert [abs(z_of(counts, enumerated(policy.k, rule, temperature))) < 4 for counts in (ours, real)] == [True] * 2


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("rule", ["greedy-draft", "sampled-draft", "equal-samples"])
def test_one_recording_is_replayed_under_every_rule(rule: Rule, temperature: float) -> None:
    laws = [enumerated(k, rule, temperature) for k in (1, 3, 6)]
    for mode in MODES:
        trace = recorded(mode, temperature)
        if mode == "gumbel" and rule == "greedy-draft":
            with pytest.raises(InputError, match="needs ranks without noise, which this trace lacks; record it again"):
                accepted_by(trace, rule)
            continue
        other = accepted_by(trace, rule, seed=5)
        for k, law in zip((1, 3, 6), laws, strict=True):
            assert abs(z_of(replayed(FixedK(k=k), other), law)) < 4, (mode, k)
        if other is not trace:
            with pytest.raises(InputError, match="drafter's confidence, .* recorded with alone; leave out --accept"):
                check_replayable(other, AdaEDL(max_draft_tokens=DEPTH))


def test_a_greedy_draft_is_kept_alike_whatever_was_recorded() -> None:
    """Along one text, the ranks of a recording of sampled drafts say what greedy drafts would have matched."""
    from_ranks = accepted_by(recorded("rejection", 1.0), "greedy-draft")
    np.testing.assert_array_equal(from_ranks.match_len, recorded("greedy-draft", 1.0).match_len)


def test_what_an_old_recording_lacks_is_said() -> None:
    trace = replace(recorded("greedy-draft", 1.0), text_prob=None, text_accept=None)
    assert rule_of(trace) == "greedy-draft" and accepted_by(trace, "greedy-draft") is trace
    with pytest.raises(InputError, match="probabilities along the text, which this trace lacks; record it again"):
        accepted_by(trace, "sampled-draft")
