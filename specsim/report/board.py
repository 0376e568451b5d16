"""What a leaderboard of policies is written as: leaderboard.json of `specsim leaderboard`."""

from __future__ import annotations

from typing import Any, Literal

from specsim.replaying.document import Document
from specsim.replaying.intervals import Estimate
from specsim.report.experiment import Difference, Parts, PartSeconds, Skipped


class Recorded(Document, frozen=True):
    """Where a trace is from; None where its file does not say."""

    target: str | None
    drafter: str | None
    decoding: dict[str, Any] | str | None
    device: str | None
    dtype: str | None
    date: str | None


class RankedRow(Document, frozen=True):
    """A variant of a policy on the held-out sequences, as `specsim.compare.leaderboard.Row` has it.

    speedup : with an interval that holds for all rows at once
    learned_rule_gap : to the rule learned from the same signals; None of trees, or without a rule
    draft_tokens_quantiles : of drafted tokens that a round verified, by share of the rounds
    rounds_by_draft_tokens : rounds by that number, from 0 on
    seeds : replays that are averaged
    leader_minus_this : None of the leader
    """

    label: str
    settings: str
    tuned: bool
    policy: str
    params: dict[str, Any]
    speedup: Estimate
    v_d: float
    r_d: float
    hm: float
    tau: float
    oracle_regret: float
    learned_rule_gap: float | None
    train_speedup: float
    mean_draft_tokens: float
    draft_tokens_quantiles: dict[str, int]
    rounds_by_draft_tokens: list[int]
    token_seconds: PartSeconds
    truncated_trials: int
    truncated_share: float
    seeds: int
    tied_with_leader: bool
    leader_minus_this: Difference | None
    sequence_seconds: list[float]
    domain_speedups: dict[str, float]


class EngineChoice(Document, frozen=True):
    """The best policy that engines have a flag for, and the flags."""

    label: str
    flags: dict[str, str]


class Recommended(Document, frozen=True):
    """The simplest policy near the best, the engines' flags that make them draft so, or what they have instead."""

    label: str
    within_percent: float
    flags: dict[str, str] | None = None
    for_engines: EngineChoice | None = None


class RankedBoard(Document, frozen=True):
    """Policies ranked on a trace at a maximal draft length, as `specsim.compare.leaderboard.Board` has them."""

    trace: str
    max_draft: int
    recorded: Recorded
    sequences: Parts
    output_tokens: int
    baseline_token_seconds: float
    oracle: Estimate
    oracle_of: str
    learned_rule: str | None
    learned_rule_speedup: Estimate | None
    rows: list[RankedRow]
    recommended: Recommended | None
    cost_band: list[float] | None
    unjudged: str
    skipped: list[Skipped]
    warnings: list[str]


class StandingRow(Document, frozen=True):
    """A variant over several traces: geometric mean of its speedups, and its rank on each."""

    label: str
    speedup: float
    ranks: list[int]
    mean_rank: float


class Combined(Document, frozen=True):
    """Standings over several traces at a maximal draft length, best first."""

    max_draft: int
    traces: list[str]
    standings: list[StandingRow]


class BoardOptions(Document, frozen=True):
    """How boards were made; None where an option says nothing."""

    cost: str | None = None
    draft_cost: str | None = None
    batch: int | None = None
    trials: int | None = None
    tuning_share: float | None = None
    seeds: int | None = None
    seed: int | None = None


class Leaderboard(Document, tag_field="kind", tag="specsim-leaderboard", frozen=True):
    """leaderboard.json: a board for each trace and maximal draft length, and standings over the traces."""

    version: Literal[1]
    options: BoardOptions
    boards: list[RankedBoard]
    combined: list[Combined]
