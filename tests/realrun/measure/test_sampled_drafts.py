"""Replays of sampled drafts against the law of rejection sampling, on a Markov pair of three tokens.

The law is enumerated for fixed K, and simulated for other policies, by Leviathan et al. 2023, Algorithm 1: drafts from
q, kept with min(1, p/q), replaced from (p - q)+. A round's start depends on what was accepted before it, because tokens
after which the pair disagrees follow one another.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from realrun.decode.sampling import Sampler
from realrun.proposals.chain import rejection_columns
from realrun.proposals.recorder import RecordRequest
from specsim.cost.model import ConstantCost
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.base import ChainPolicy, Step
from specsim.policy.chain.beta_ts import BetaTS
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.max_confidence import MaxConfidence
from specsim.replaying.kernel import step_functions
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from tests.support.reference import build_trace

STICKY = np.array(
    [[[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8]], [[0.85, 0.1, 0.05], [0.7, 0.2, 0.1], [0.7, 0.1, 0.2]]]
)
DEPTH, TEXTS, LENGTH = 6, 60, 300
POLICIES = [
    *(FixedK(k=k) for k in (1, 3, 6)),
    AdaEDL(dynamic=False, lambda0=0.4, gamma=0.2, max_draft_tokens=DEPTH),
    MaxConfidence(dynamic=False, lambda0=0.75, max_draft_tokens=DEPTH),
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
    lm.forward = lambda tokens: logits[torch.tensor(tokens)]
    lm.run_model = lambda input_ids, **_: logits[input_ids[0]]
    return lm


@cache
def recorded(temperature: float) -> Trace:
    """Texts drawn from the target with numpy, and what the recorder drafts along them."""
    rng, target = np.random.default_rng(1), at(temperature)[0]
    lms = [markov_lm(probs) for probs in STICKY]
    columns = []
    for sequence in range(TEXTS):
        text = [0]
        while len(text) <= LENGTH:
            text.append(int(rng.choice(3, p=target[text[-1]])))
        request = RecordRequest(text[:1], text[1:], DEPTH, Sampler("rejection", temperature, seed=7), sequence)
        columns.append(rejection_columns(lms[1], lms[0], request))
    blank = build_trace(rng, np.zeros((TEXTS * LENGTH, DEPTH), dtype=bool), [LENGTH] * TEXTS, prompts=[1] * TEXTS)
    decoding = {"mode": "rejection", "temperature": temperature, "seed": 7}
    return replace(
        blank,
        meta={**blank.meta, "eos_token_id": None, "decoding": decoding},
        **{name: np.concatenate([part[name] for part in columns]) for name in columns[0]},
    )


def simulated(policy: ChainPolicy, temperature: float, texts: int) -> np.ndarray:
    """Tokens and drafted tokens per round of real runs [texts, 2], of the rounds that no end of text shortens."""
    rng, (p, q), functions = np.random.default_rng(2), at(temperature), step_functions(policy)
    entropies, counts = -(q * np.log(q)).sum(-1), np.zeros((texts, 2))
    cumulative = q.cumsum(-1)
    for number in range(texts):
        last, t, rounds, state = 0, 0, 0, functions.initial_state(policy.params)
        while t < LENGTH - DEPTH:
            draft: list[int] = []
            while len(draft) < policy.max_draft_tokens:
                before = draft[-1] if draft else last
                draft.append(int(np.searchsorted(cumulative[before], rng.random())))
                if len(draft) == policy.max_draft_tokens:
                    break
                step = Step(q[before, draft[-1]], q[before].max(), entropies[before], 0.0, 0.0)
                proceed, state = functions.keep_drafting(state, policy.params, step, len(draft), rng.random())
                if not proceed:
                    break
            accepted = 0
            for token in draft:
                if rng.random() * q[last, token] >= p[last, token]:
                    break
                last, accepted = token, accepted + 1
            rest = p[last] if accepted == len(draft) else (p[last] - q[last]).clip(0)
            last = int(rng.choice(3, p=rest / rest.sum()))
            state = functions.update(state, policy.params, len(draft), accepted)
            t, rounds = t + accepted + 1, rounds + 1
            counts[number] += accepted + 1, len(draft)
        counts[number] /= rounds
    return counts


def enumerated(k: int, temperature: float) -> float:
    """Tokens per round of fixed K in the long run."""
    p, q = at(temperature)
    kept, replaced = np.minimum(p, q), np.maximum(p - q, 0.0)
    paths = [np.linalg.matrix_power(kept, accepted) for accepted in range(k + 1)]
    ends = [*(path @ replaced for path in paths[:-1]), paths[-1] @ p]  # [from, last token emitted] by tokens accepted
    start = np.linalg.matrix_power(sum(ends), 200)[0]
    return float(sum((accepted + 1) * (start @ end).sum() for accepted, end in enumerate(ends)))


def replayed(policy: ChainPolicy, trace: Trace) -> np.ndarray:
    """As `simulated`, of the trace."""
    rounds = replay(trace, policy, cost_table(trace, ConstantCost(1e-3, 1e-2)), seed=3, log=True).rounds
    assert rounds is not None
    whole = rounds[rounds.t < LENGTH - DEPTH]
    values = (np.bincount(whole.sequence, weights) for weights in (whole.accepted + 1, whole.drafted))
    return np.column_stack([*values]) / np.bincount(whole.sequence)[:, None]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_replay_follows_the_law_of_rejection_sampling(policy: ChainPolicy, temperature: float) -> None:
    ours, real = replayed(policy, recorded(temperature)), simulated(policy, temperature, TEXTS)
    error = np.sqrt((ours.var(axis=0) + real.var(axis=0)) / TEXTS)
    assert (np.abs(ours.mean(axis=0) - real.mean(axis=0)) <= 4 * error).all()
    if isinstance(policy, FixedK):
        for counts in (ours, real):
            tokens = counts[:, 0]
            assert abs(tokens.mean() - enumerated(policy.k, temperature)) < 4 * tokens.std() / np.sqrt(TEXTS)
