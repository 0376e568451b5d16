"""Rules that choose how much is drafted and verified in each step of a server, for all of its running requests.

A step asks a rule up to four times: how many tokens to draft at most (`choose`), after each draft pass which requests
draft another (`go_on`), how many drafted tokens to verify (`verify`), and what it learns from the outcome (`update`).
Engines' schedules answer the first question alone, with the same K for all requests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from specsim.acceptance.formulas import mean_tokens_per_round
from specsim.cost.batches import BatchCost, BatchTokens
from specsim.io.arrays import Bools, FloatArray, Ints, Seconds
from specsim.io.errors import InputError
from specsim.policy.base import Settings, check_setting, parse_settings, reads_of, setting
from specsim.trace.trace import Trace

State = Any  # of a rule: what it has seen so far
CONTEXT_BUCKET = 16  # tokens, down to which rules round contexts that costs are looked up at
EXACT_CONTEXT = 32  # tokens; shorter contexts are not rounded
TABLES = 4096  # that are kept, of a kind
MAX_DRAFT = "longest draft in tokens"


class Running(NamedTuple):
    """What an engine knows of its R running requests before a step: an array [R] per field, and a count.

    request : number of the request, the same in all of its steps
    cached : tokens in its cache
    remaining : output tokens that it may still emit
    verified, accepted : drafted tokens of its earlier steps
    behind : tokens besides the pending token that the drafter's cache lacks: what was emitted while it did not draft
    sequences : requests in the step as the engine counts them, which may be those of the last step
    match : drafted tokens that would be accepted; only for a rule that `foresees`
    prompts, prompt_tokens, prompts_ending : requests that the step prefills, their new tokens, and how many of these
        prefills it completes; only in `verify` of a rule that `trims_filled_steps`
    """

    request: Ints
    cached: Ints
    remaining: Ints
    verified: Ints
    accepted: Ints
    behind: Ints
    sequences: int
    match: Ints | None = None
    prompts: int = 0
    prompt_tokens: int = 0
    prompts_ending: int = 0

    def select(self, requests: Bools) -> Running:
        """The same facts about these requests only. requests : mask [R]"""
        own = {name: getattr(self, name)[requests] for name in self._fields[:6]}
        return self._replace(**own, match=None if self.match is None else self.match[requests])

    @property
    def context_bucket(self) -> int:
        """Mean cached tokens of a request, rounded down so that few costs are looked up, none beyond the cost table."""
        context = int(self.cached.sum()) // len(self.cached)
        return context if context < EXACT_CONTEXT else context // CONTEXT_BUCKET * CONTEXT_BUCKET


class DraftRounds(NamedTuple):
    """A round of each of several requests, [R] per array.

    drafted, verified, accepted, emitted : tokens; those drafted but not verified are dropped
    behind : tokens besides the pending token that the drafter has yet to take in after the round
    row : row of the trace at which the next round starts; a text that has ended starts again
    speculates : whether the step tried to draft
    survival : [R, i], of the drafted tokens; None where the rule reads no confidence, or nothing is drafted
    """

    drafted: Ints
    verified: Ints
    accepted: Ints
    emitted: Ints
    behind: Ints
    row: Ints
    speculates: bool
    survival: FloatArray | None = None


@dataclass(frozen=True)
class DraftLengthRule:
    """Base of the rules: frozen settings, and pure functions of a state that belongs to the server.

    Subclasses are frozen dataclasses whose settings are `specsim.setting` fields, `max_draft_tokens` among them. A rule
    sees no more of a draft than an engine would at that time: `go_on` gets the survival of tokens drafted so far.

    Examples
    --------
    >>> import specsim
    >>> specsim.rules()["turbospec"].source
    'Liu et al. 2024 (TurboSpec, formerly SmartSpec), arXiv:2406.14066'
    """

    name: ClassVar[str]
    source: ClassVar[str]  # paper or engine
    learns: ClassVar[bool] = False  # whether `fit` learns from the trace, so that it needs sequences of its own
    features: ClassVar[tuple[str, ...]] = ()  # trace columns that `survival` reads; see `specsim.policy.base.reads_of`
    trims_filled_steps: ClassVar[bool] = False  # whether `verify` is called after the prefills are scheduled
    foresees: ClassVar[bool] = False  # whether it knows what will be accepted: a bound, not a rule of an engine

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if "tune" in field.metadata:
                check_setting(self.name, field, getattr(self, field.name))

    @classmethod
    def fit(cls, settings: Settings, train: Trace, cost: BatchCost) -> Self:
        """Make the rule with these settings, given as values or text, and fit the rest to data and costs."""
        return cls(**parse_settings(cls, settings))

    @property
    def label(self) -> str:
        """Name and settings of the rule, in a line."""
        chosen = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if "tune" in field.metadata and getattr(self, field.name) != field.default
        ]
        return f"{self.name}({', '.join(chosen)})" if chosen else self.name

    @property
    def max_draft_tokens(self) -> int:
        raise NotImplementedError

    @property
    def looks_behind(self) -> bool:
        """Whether `verify` may decide about a token by the distributions behind it, which depend on that token."""
        return False

    @property
    def biases_sampled_drafts(self) -> bool:
        """Whether the output is no sample of the target where drafts are sampled."""
        drops = type(self).verify is not DraftLengthRule.verify
        return drops and (self.looks_behind or reads_of(self.features) != "distribution")

    def initial_state(self) -> State:
        return None

    def survival(self, trace: Trace) -> FloatArray | None:
        """Chance [N, D], as the rule reads it, that the first 1..D tokens of a draft are all accepted, by position.

        Of each depth it may use what the drafter has shown up to there. None: the rule reads no confidence, so that
        `go_on` and `verify` are not asked.
        """
        return None

    def choose(self, state: State, running: Running) -> int | Ints:
        """Most tokens to draft, of all requests or each [R]; 0 is a step without speculation."""
        raise NotImplementedError

    def go_on(self, state: State, running: Running, survival: FloatArray, drafted: Ints, going: Bools) -> Bools:
        """Which requests [R] draft another token.

        survival : [R, i], of the tokens drafted so far, 0 where a request has drafted fewer than i
        drafted : [R], tokens so far
        going : [R], whether the request has drafted i tokens, and may draft more
        """
        return going

    def verify(self, state: State, running: Running, survival: FloatArray, drafted: Ints) -> Ints:
        """Tokens [R] of each draft to verify, at most `drafted`. survival : [R, i], of drafted tokens, else 0"""
        return drafted

    def update(self, state: State, running: Running, rounds: DraftRounds) -> State:
        """The state after a step."""
        return state


@dataclass(frozen=True)
class ScheduledK(DraftLengthRule):
    """A K per batch size, as engines' schedules have it.

    lengths : from a batch of so many sequences on, K; 0 turns speculation off. Has batch 1

    Raises InputError where batch 1 is missing, or a batch or K is none.

    >>> rule = ScheduledK({1: 5, 4: 3, 16: 0})
    >>> [rule.at(sequences) for sequences in (1, 3, 4, 15, 16, 500)]
    [5, 5, 3, 3, 0, 0]
    """

    lengths: Mapping[int, int]

    name = "schedule"
    source = "vLLM's num_speculative_tokens_per_batch_size; TensorRT-LLM's draft_len_schedule"

    def __post_init__(self) -> None:
        if 1 not in self.lengths or min(self.lengths) < 1 or min(self.lengths.values()) < 0:
            raise InputError(
                f"schedule {dict(self.lengths)}: give a draft length of 0 or more from batch 1 on, such as 1:5,4:3,16:0"
            )

    @property
    def label(self) -> str:
        return "K by batch " + ",".join(f"{batch}:{k}" for batch, k in sorted(self.lengths.items()))

    @property
    def max_draft_tokens(self) -> int:
        return max(self.lengths.values())

    def at(self, sequences: int) -> int:
        """K of a batch of so many sequences."""
        return self.lengths[max(batch for batch in self.lengths if batch <= sequences)]

    def choose(self, state: State, running: Running) -> int:
        return self.at(running.sequences)


def as_schedule(schedule: Mapping[int, int] | str) -> ScheduledK:
    """The rule of a mapping of batches to K, or of its text: "1:5,4:3,16:0"."""
    if not isinstance(schedule, str):
        return ScheduledK(dict(schedule))
    try:
        pairs = [part.split(":") for part in schedule.split(",")]
        lengths = {int(batch): int(k) for batch, k in pairs}
    except ValueError:
        raise InputError(f"schedule {schedule!r} is not a list of BATCH:K; write for example 1:5,4:3,16:0") from None
    if len(lengths) < len(pairs):
        raise InputError(f"schedule {schedule!r} names a batch twice; give each batch once")
    return ScheduledK(lengths)


def fixed_length(k: int) -> ScheduledK:
    """The same K at every batch; 0 is decoding without speculation."""
    return ScheduledK({1: k})


@dataclass(frozen=True)
class PricedRule(DraftLengthRule):
    """Base of rules that weigh the cost of a step, at the contexts of `Running.context_bucket`."""

    cost: BatchCost = dataclasses.field(repr=False)

    @classmethod
    def fit(cls, settings: Settings, train: Trace, cost: BatchCost) -> Self:
        return cls(cost, **parse_settings(cls, settings))

    @cached_property
    def tables(self) -> StepTables:
        """Predicted seconds, each computed once."""
        return StepTables(self.cost, self.max_draft_tokens)

    def verify_s(self, running: Running, count: int | Ints) -> Seconds:
        """Seconds of a target pass over all pending tokens and so many drafted ones, in sum over requests."""
        return self.tables.verify(len(running.request), running.context_bucket)[count]

    def draft_s(self, running: Running, place: int | Ints, requests: int | Ints) -> Seconds:
        """Seconds of the draft pass at this place, from 0, over so many of the requests; of 0 requests none."""
        room = 1 << (len(running.request) - 1).bit_length()  # a power of 2, so that few tables are computed
        return self.tables.draft(room, running.context_bucket)[place, requests]

    def round_s(self, sequences: int, running: Running) -> Seconds:
        """Seconds of a step of so many sequences by K, from 0 to the longest draft, the same K for all."""
        return self.tables.round(sequences, running.context_bucket)

    def catch_up_s(self, running: Running) -> float:
        """Seconds that the first draft pass takes longer because the drafter's cache has fallen behind."""
        count, behind = len(running.request), int(running.behind.sum()) // len(running.behind)
        if behind <= 1:  # as after any draft that was accepted whole
            return 0.0
        rounded = max(behind.bit_length() - 3, 0)  # lowest bits are dropped, so that few costs are computed
        return self.tables.catch_up(count, running.context_bucket, behind >> rounded << rounded)

    def step_s(self, running: Running, rounds: DraftRounds) -> float:
        """Seconds of a step in which these rounds were decoded."""
        places = np.bincount(rounds.drafted, minlength=1)[:0:-1].cumsum()[::-1]  # requests of each draft pass
        draft_s = sum(float(self.draft_s(running, place, requests)) for place, requests in enumerate(places.tolist()))
        other_s = self.cost.step_s + rounds.speculates * self.cost.round_s
        return draft_s + float(self.verify_s(running, int(rounds.verified.sum()))) + other_s


class StepTables:
    """Seconds of passes over a server's requests, computed where they are first asked for.

    cost : of passes; longest : draft in tokens
    """

    def __init__(self, cost: BatchCost, longest: int) -> None:
        def verify(sequences: int, context: int) -> Seconds:
            """[R x longest + 1], by drafted tokens in the pass."""
            each = 1 + np.arange(sequences * longest + 1) / sequences
            return cost.batch_verify(BatchTokens.alike(sequences, each, context))

        def draft(sequences: int, context: int) -> Seconds:
            """Seconds [longest, R + 1] of a draft pass, by its place in the draft and the requests in it."""
            place, count = np.arange(longest)[:, None], np.arange(1, sequences + 1)
            tokens = BatchTokens.alike(count, 1, context + place)
            passes = np.broadcast_to(cost.batch_draft(place, tokens), (longest, sequences))
            return np.concatenate([np.zeros((longest, 1)), passes], axis=1)

        def whole(sequences: int, context: int) -> Seconds:
            """[longest + 1], of steps by K."""
            k = np.arange(longest + 1)
            step_s = cost.batch_draft(k[:-1], BatchTokens.alike(sequences, 1, context + k[:-1]))
            draft_s = np.concatenate([[0.0], np.cumsum(step_s)])
            verify_s = cost.batch_verify(BatchTokens.alike(sequences, k + 1, context))
            total: Seconds = draft_s + verify_s + cost.step_s + np.where(k > 0, cost.round_s, 0.0)
            return total

        def catch_up(sequences: int, context: int, behind: int) -> float:
            """Extra seconds of a draft pass that reads `behind` tokens of each sequence besides the pending one."""
            late, up = (BatchTokens.alike(sequences, 1 + more, context) for more in (behind, 0))
            return float(cost.batch_draft(0, late) - cost.batch_draft(0, up))

        self.verify, self.draft = lru_cache(TABLES)(verify), lru_cache(TABLES)(draft)
        self.round, self.catch_up = lru_cache(TABLES)(whole), lru_cache(TABLES)(catch_up)


@dataclass(frozen=True)
class TurboSpec(PricedRule):
    """The K that promises the most accepted tokens per second, from a moving estimate of acceptance.

    The expected tokens of a round, (1 - a^(K+1)) / (1 - a) per sequence, over the predicted seconds of such a round at
    the batch and contexts as they are. The estimate is an exponentially weighted share of accepted tokens among
    verified ones. It starts at `accept_prob`, which counts as `prior_tokens` verified tokens, and goes back there while
    nothing is drafted, so that speculation that was given up is tried again; the paper leaves both open.

    cost : what rounds are predicted to take
    """

    max_draft_tokens: int = setting(8, 1, 255, bounds="depth", doc=MAX_DRAFT)
    accept_prob: float = setting(0.7, 0.0, 1.0, doc="acceptance rate before anything is seen")
    prior_tokens: float = setting(10.0, 1e-6, 1e9, doc="weight of accept_prob, in verified tokens")
    memory: float = setting(0.95, 0.0, 0.9999, doc="weight of a step relative to the next step")

    name = "turbospec"
    source = "Liu et al. 2024 (TurboSpec, formerly SmartSpec), arXiv:2406.14066"

    @property
    def label(self) -> str:
        return f"turbospec K<={self.max_draft_tokens}"

    def initial_state(self) -> State:
        return 0.0, 0.0  # accepted and verified tokens, the older the lighter

    def choose(self, state: State, running: Running) -> int:
        accepted, verified = state
        prior = self.prior_tokens
        estimate = (accepted + prior * self.accept_prob) / (verified + prior)
        tokens = mean_tokens_per_round(min(estimate, 1.0), np.arange(self.max_draft_tokens + 1))
        return int(np.argmax(tokens / self.round_s(running.sequences, running)))

    def update(self, state: State, running: Running, rounds: DraftRounds) -> State:
        # A rejected token ends what is verified of a draft.
        verified = rounds.accepted + (rounds.accepted < rounds.verified)
        return self.memory * state[0] + float(rounds.accepted.sum()), self.memory * state[1] + float(verified.sum())


def schedule_ranges(schedule: dict[int, int], largest_batch: int) -> list[list[int]]:
    """[first batch, last batch, K] of every part of a schedule, as vLLM takes them."""
    starts = sorted(schedule)
    ends = [start - 1 for start in starts[1:]] + [max(largest_batch, starts[-1])]
    return [[start, end, schedule[start]] for start, end in zip(starts, ends, strict=True)]
