"""Plain decoding over a recorded trace, token by token, and small traces to try it on.

Written from the definition of a round, not from the kernel: tokens are really appended
and compared, the drafter's cache is really counted. Slow on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from specsim.cost.model import CostModel
from specsim.trace.trace import Trace

BUCKET = 16  # contexts are priced at the middle of buckets of this many tokens


@dataclass(frozen=True)
class RampCost(CostModel):
    """A cost model in which every argument matters, in seconds."""

    slope: float = 3e-7  # per cached token

    def draft(self, n_tokens: int, context: Any) -> Any:
        return 1.2e-3 * n_tokens + 1e-3 * math.sqrt(n_tokens) + self.slope * n_tokens * np.asarray(context, dtype=float)

    def catch_up(self, context: Any) -> Any:
        return 2.5e-4 + self.slope * np.asarray(context, dtype=float)

    def verify(self, n_tokens: int, context: Any) -> Any:
        return 1e-2 + 1e-4 * n_tokens**1.5 + 2 * self.slope * np.asarray(context, dtype=float)

    def refeed(self, n_tokens: int, context: Any) -> Any:
        return 7e-3 + 5e-4 * n_tokens**2 + self.slope * np.asarray(context, dtype=float)

    def policy_step(self) -> float:
        return 2e-5

    def round_overhead(self) -> float:
        return 4e-4

    def autoregressive_step(self, context: Any) -> Any:
        return 9e-3 + 2 * self.slope * np.asarray(context, dtype=float)


@dataclass(frozen=True)
class FlatCost(CostModel):
    """Every part of a round costs something of its own, whatever the context, in seconds."""

    step_s: float = 1e-3
    catch_up_s: float = 4e-4
    pass_s: float = 1e-2
    per_token: float = 3e-4
    ask: float = 5e-5
    overhead: float = 2e-4

    def draft(self, n_tokens: int, context: Any) -> Any:
        return n_tokens * self.step_s + np.zeros(np.shape(context))

    def catch_up(self, context: Any) -> Any:
        return self.catch_up_s + np.zeros(np.shape(context))

    def verify(self, n_tokens: int, context: Any) -> Any:
        return self.pass_s + self.per_token * (n_tokens - 1) + np.zeros(np.shape(context))

    def policy_step(self) -> float:
        return self.ask

    def round_overhead(self) -> float:
        return self.overhead

    def autoregressive_step(self, context: Any) -> Any:
        return self.pass_s + np.zeros(np.shape(context))


class FixedLength:
    """Draft k tokens, whatever they are."""

    def __init__(self, k: int) -> None:
        self.longest = k

    def begin_sequence(self) -> None:
        pass

    def wants_more(self, confidence: float, entropy_nats: float) -> bool:
        return True

    def observe(self, drafted: int, accepted: int) -> None:
        pass


def draft_confidence(confidence: float, entropy_nats: float) -> float:
    """Score of Max-Confidence."""
    return confidence


def entropy_score(gamma: float) -> Callable[[float, float], float]:
    """Score of AdaEDL."""
    return lambda confidence, entropy_nats: 1 - math.sqrt(gamma * entropy_nats)


@dataclass
class Threshold:
    """Draft on while a score reaches lambda; lambda moves by AdaEDL's Algorithm 1 if dynamic.

    Algorithm 1 as in the code it adapts: its line 11 compares drafted tokens with L.
    """

    score: Callable[[float, float], float]
    lambda0: float
    dynamic: bool
    alpha: float
    epsilon: float
    longest: int  # L

    def begin_sequence(self) -> None:
        self.lam, self.ar = self.lambda0, 0.0

    def wants_more(self, confidence: float, entropy_nats: float) -> bool:
        return self.score(confidence, entropy_nats) >= self.lam

    def observe(self, drafted: int, accepted: int) -> None:
        if not self.dynamic:
            return
        self.ar = 0.5 * self.ar + 0.5 * (accepted / drafted)
        target = self.lam
        if self.ar < self.alpha:
            target = self.lam + self.epsilon
        elif self.length_judged_by_line_11(drafted, accepted) != self.longest:
            target = self.lam - self.epsilon
        self.lam = min(1.0, 0.9 * self.lam + (1 - 0.9) * target)

    def length_judged_by_line_11(self, drafted: int, accepted: int) -> int:
        return drafted


@dataclass
class Decoded:
    """What a rule did: a row (sequence, t, drafted, accepted) per round and its seconds, sums per sequence."""

    rounds: list[tuple[int, int, int, int]] = field(default_factory=list)
    round_s: list[list[float]] = field(default_factory=list)  # draft, policy, verify, other, without speculation
    policy_steps: list[int] = field(default_factory=list)
    seconds: list[list[float]] = field(default_factory=list)  # draft, policy, verify, other
    autoregressive_s: list[float] = field(default_factory=list)

    def total(self, column: int, sequences: int) -> list[int]:
        """Sum of a column of `rounds` per sequence."""
        sums = [0] * sequences
        for row in self.rounds:
            sums[row[0]] += row[column]
        return sums


class Decoder:
    """Speculative decoding of every sequence of a trace under a stopping rule."""

    def __init__(self, trace: Trace, rule: FixedLength | Threshold, cost: RampCost) -> None:
        self.trace, self.rule, self.cost = trace, rule, cost
        ids = trace.meta["eos_token_id"]
        self.eos = set() if ids is None else {ids} if isinstance(ids, int) else set(ids)
        ends = [int(p) + int(n) for p, n in zip(trace.prompt_tokens, np.diff(trace.offsets), strict=True)]
        self.lowest, self.highest = min(map(int, trace.prompt_tokens)) - 1, max(ends) - 2
        self.recurrent = bool(trace.meta.get("second_pass"))
        self.prices: dict[tuple[str, int, int], float] = {}

    def run(self) -> Decoded:
        result = Decoded()
        for s in range(len(self.trace.sequence_id)):
            self.rule.begin_sequence()
            self.decode(s, result)
        return result

    def decode(self, s: int, result: Decoded) -> None:
        trace, rule = self.trace, self.rule
        rows = slice(int(trace.offsets[s]), int(trace.offsets[s + 1]))
        wanted = trace.token[rows].tolist()
        proposals = trace.draft_token[rows].tolist()
        confidences, entropies = trace.confidence[rows].tolist(), trace.entropy_nats[rows].tolist()
        prompt, budget = int(trace.prompt_tokens[s]), int(trace.budget_tokens[s])
        output: list[int] = []
        in_draft_cache = prompt - 1  # all but the pending token
        asked = 0
        draft_s = verify_s = other_s = 0.0
        plain_s = [self.price("autoregressive_step", None, prompt + t - 1) for t in range(len(wanted))]
        while len(output) < len(wanted):
            t, draft = len(output), []
            room = min(rule.longest, trace.depth, budget - t - 1)  # the target adds a token
            context = prompt + t - 1
            asked_before, round_draft_s = asked, 0.0
            while len(draft) < room:
                lacking = prompt + t + len(draft) - in_draft_cache - 1
                round_draft_s += self.step_s(len(draft) + 1, lacking, context)
                in_draft_cache = prompt + t + len(draft)
                draft.append(proposals[t][len(draft)])
                if len(draft) == room or self.ends_draft(draft[-1]):
                    break
                asked += 1
                if not rule.wants_more(confidences[t][len(draft) - 1], entropies[t][len(draft) - 1]):
                    draft = self.stopped(draft)
                    break
            accepted = 0
            while accepted < len(draft) and [draft[accepted]] == wanted[t + accepted : t + accepted + 1]:
                accepted += 1
            round_verify_s = self.price("verify", len(draft) + 1, context)
            if self.recurrent and accepted < len(draft) and t + accepted + 1 < len(wanted):
                round_verify_s += self.price("refeed", accepted + 1, context)
            draft_s += round_draft_s
            verify_s += round_verify_s
            other_s += self.cost.round_overhead()
            if draft:
                rule.observe(len(draft), accepted)
            result.rounds.append((s, t, len(draft), accepted))
            policy_s = (asked - asked_before) * self.cost.policy_step()
            emitted_s = sum(plain_s[t : t + accepted + 1])
            result.round_s.append([round_draft_s, policy_s, round_verify_s, self.cost.round_overhead(), emitted_s])
            output += draft[:accepted] + self.from_target(wanted[t + accepted :], len(draft), accepted)
            in_draft_cache = min(in_draft_cache, prompt + t + accepted)
        assert output == wanted, "decoding is loss-free"
        result.policy_steps.append(asked)
        result.seconds.append([draft_s, asked * self.cost.policy_step(), verify_s, other_s])
        result.autoregressive_s.append(sum(plain_s))

    def step_s(self, place: int, lacking: int, context: int) -> float:
        """Seconds of the place-th draft step of a round, with so many tokens to catch up on."""
        before_s = self.price("draft", place - 1, context) if place > 1 else 0.0
        return self.price("draft", place, context) - before_s + lacking * self.price("catch_up", None, context)

    def ends_draft(self, token: int) -> bool:
        return token in self.eos

    def stopped(self, draft: list[int]) -> list[int]:
        """The draft to verify once the rule says stop: the token that failed is kept."""
        return draft

    def from_target(self, rest: list[int], drafted: int, accepted: int) -> list[int]:
        """The target's own token: a correction, or a bonus after a fully accepted draft."""
        return rest[:1]

    def price(self, call: str, n_tokens: int | None, context: int) -> float:
        """Seconds of a call, at the middle of its context bucket but inside the contexts met."""
        key = (call, n_tokens, context // BUCKET)
        if key not in self.prices:
            middle = min(max((context // BUCKET + 0.5) * BUCKET, self.lowest), self.highest)
            arguments = (middle,) if n_tokens is None else (n_tokens, middle)
            self.prices[key] = float(getattr(self.cost, call)(*arguments))
        return self.prices[key]


def build_trace(
    rng: np.random.Generator,
    hits: np.ndarray,
    lengths: list[int],
    *,
    prompts: list[int] | None = None,
    spare_budget: list[int] | None = None,
    ends_by_eos: list[bool] | None = None,
    vocabulary: int = 1000,
    confidence: np.ndarray | None = None,
    entropy_nats: np.ndarray | None = None,
    **optional: np.ndarray,
) -> Trace:
    """A consistent trace of random tokens. hits [N, D]: draft i at row t equals y[t+i-1].

    Token 0 ends a text. It is the last token of the sequences that end by it, and any wrong
    draft may be it. A sequence that does not end by it ends by its budget.
    """
    total, depth = hits.shape
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    assert offsets[-1] == total
    by_eos = np.zeros(len(lengths), dtype=bool) if ends_by_eos is None else np.array(ends_by_eos)
    token = rng.integers(1, vocabulary, size=total).astype(np.int32)
    token[offsets[1:][by_eos] - 1] = 0
    ahead = np.arange(total)[:, None] + np.arange(depth)
    inside = ahead < np.repeat(offsets[1:], lengths)[:, None]
    truth = token[np.minimum(ahead, total - 1)]
    wrong = rng.integers(0, vocabulary, size=hits.shape, dtype=np.int32)
    wrong = np.where(inside & (wrong == truth), (truth + 1) % vocabulary, wrong)
    match = hits & inside
    spare = np.zeros(len(lengths), dtype=np.int64) if spare_budget is None else np.array(spare_budget)
    shape = (total, depth)
    confidence = rng.random(shape) if confidence is None else confidence
    entropy_nats = rng.exponential(size=shape) if entropy_nats is None else entropy_nats
    return Trace(
        meta={
            "target": "none",
            "drafter": "none",
            "decoding": "greedy",
            "depth": depth,
            "eos_token_id": 0,
            "dtype": "float32",
            "device": "cpu",
        },
        sequence_id=np.arange(10, 10 + len(lengths), dtype=np.int64),
        domain=np.array([("code", "prose")[s % 2] for s in range(len(lengths))]),
        prompt_tokens=np.array(prompts or [20] * len(lengths), dtype=np.int64),
        budget_tokens=np.array(lengths, dtype=np.int64) + np.where(by_eos, spare, 0),
        offsets=offsets,
        token=token,
        match_len=np.where(match.all(axis=1), depth, match.argmin(axis=1)).astype(np.uint8),
        draft_token=np.where(match, truth, wrong).astype(np.int32),
        prob=(confidence**2).astype(np.float32),
        confidence=confidence.astype(np.float32),
        entropy_nats=entropy_nats.astype(np.float32),
        **optional,
    )


def small_trace(seed: int = 0, **optional: np.ndarray) -> Trace:
    """Five sequences of 1 to 40 tokens, depth 6, some ended by EOS."""
    rng = np.random.default_rng(seed)
    lengths = [40, 1, 25, 3, 33]
    return build_trace(
        rng,
        rng.random((sum(lengths), 6)) < 0.8,
        lengths,
        prompts=[30, 1, 12, 47, 5],
        spare_budget=[4, 0, 2, 1, 3],
        ends_by_eos=[True, True, False, False, True],
        vocabulary=30,
        **optional,
    )


def recurrent(trace: Trace) -> Trace:
    """The same trace of a target with recurrent layers, so that a rejection costs a second pass."""
    return replace(trace, meta={**trace.meta, "second_pass": True})


def copies(trace: Trace, count: int) -> Trace:
    """The first sequence of a trace, many times under ids of their own, so that each copy draws afresh."""
    return replace(trace.select(np.zeros(count, dtype=np.int64)), sequence_id=np.arange(count))
