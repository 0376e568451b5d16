"""What real runs are written as: validation.json of a pair or of several drafters, leaderboard.json of drafters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from msgspec import UNSET, UnsetType

from specsim.cost.probe import ProbeDocument
from specsim.io.json import read_json
from specsim.replaying.document import Document
from specsim.replaying.forecast import ErrorSummary
from specsim.replaying.intervals import Comparison, Estimate


class Parts(Document, frozen=True):
    """Numbers of prompts to tune on and held out."""

    tuning: int
    holdout: int


class Prompts(Document, frozen=True):
    """Where prompts are from, how many, and a hash of their tokens."""

    source: str
    count: int
    digest: str


class Load(Document, frozen=True):
    """Shares of the CPU time of all cores, in percent; None if the system does not report them.

    others_percent : used by other processes; stolen_percent : given by the host to other guests (steal)
    """

    others_percent: float | None
    stolen_percent: float | None


class Rate(Document, frozen=True):
    """Speed of decoding."""

    tokens_per_s: float
    ms_per_token: float


class Options(Document, frozen=True):
    """How an experiment was tuned and measured."""

    trials: int
    repeats: int
    tuning_share: float
    seed: int


class Skipped(Document, frozen=True, kw_only=True):
    """A policy that was left out, and why. drafter : None where there is only one"""

    drafter: str | None = None
    policy: str
    reason: str


class Choice(Document, frozen=True):
    """What the forecast chose before anything was decoded, beside the measured best.

    forecast, measured : labels of the two; either may be no speculation
    measured_speedup : of the forecast's best
    regret : the measured best's speedup less that
    """

    forecast: str
    forecast_speedup: float
    measured_speedup: Estimate
    measured: str
    regret: Estimate
    significant: bool


class ForecastFacts(Document, frozen=True):
    """A forecast without its rows.

    sealed : whether none of the held-out prompts had been decoded
    drafter : several names where several drafters are compared
    costs : "source", where the costs are from, and what else is known of them
    deploy : label of the fastest, which may be no speculation
    """

    made: str
    sealed: bool
    target: str
    drafter: str | list[str]
    sequences: Parts
    baseline_tokens_per_s: float
    costs: dict[str, Any]
    kind: Literal["specsim-forecast"]
    version: Literal[1]
    deploy: str


class SizeError(Document, frozen=True):
    """Error of the verification of rounds that verified so many tokens beside the pending one, in percent."""

    tokens: int
    rounds: int
    verify: float


class SecondPass(Document, frozen=True):
    """Rounds of a target with recurrent layers that fed tokens again, and the share of the time in percent."""

    rounds: int
    predicted: float
    measured: float


class ErrorParts(Document, frozen=True):
    """Predicted minus measured seconds, in percent of the policy's measured seconds; the four parts sum to the error.

    A positive error is a part predicted to take longer than it did.
    """

    draft: float
    policy: float
    verify: float
    other: float
    by_verified: list[SizeError]
    second_pass: SecondPass | None = None


class Defect(Document, frozen=True):
    """A first departure from the replay that is no near tie."""

    sequence: int
    t: int
    what: str
    gap_ulps: float | None


class Departures(Document, frozen=True):
    """Sequences by the cause of their first departure from the replay; the largest gap of near ties."""

    first: dict[str, int]
    largest_tie_ulps: float | None
    defects: list[Defect]


class Ladder(Document, frozen=True):
    """Speedups by simplification: EESD's Eq. 14 (None of trees), a replay, and the measurement."""

    eq14: float | None
    profile: float
    measured: float


class Row(Document, kw_only=True, frozen=True):
    """A policy of a validation: predicted and measured on the same held-out prompts.

    params : the policy's settings; role : where they come from: tuned, fitted, default, fixed_k or given
    predicted : speedup by replay at the costs of this run
    wall_clock_speedup : of plain sums, interruptions included; wall_clock_differs : whether by more than noise
    train_speedup : on the tuning prompts, as forecast
    forecast : speedup promised before anything was decoded; `forecast_without_probe` at costs as they were before a
        probe rescaled them
    text_known, costs_known : speedups by replays that knew the held-out text, or the costs of this run
    error_percent : of `predicted`
    measured_tau, measured_v_d, overhead : of all repeats; overhead is the mean time of a round in decoding steps
    resolved : whether it differs significantly from the fastest; None of the fastest
    """

    policy: str
    label: str
    params: dict[str, Any]
    role: str
    predicted: Estimate
    measured: Estimate
    wall_clock_speedup: Estimate
    wall_clock_differs: bool
    train_speedup: float | None
    error_percent: float
    truncated_share: float
    rounds_identical_percent: float | None
    ladder: Ladder
    forecast: Estimate | None = None
    forecast_without_probe: float | UnsetType | None = UNSET
    text_known_without_probe: float | UnsetType | None = UNSET
    text_known: float | None = None
    costs_known: float | None = None
    error_parts: ErrorParts | None = None
    v_d: float
    r_d: float
    hm: float
    tau: float
    oracle_regret: float | None
    sequence_seconds: list[float]
    output_identical_percent: float | UnsetType | None = UNSET
    sequence_tokens: list[int] | None = None
    measured_tau: float | None = None
    overhead: float | None = None
    acceleration_over_overhead: float | None = None
    acceleration_over_overhead_off_percent: float | None = None
    measured_v_d: float | None = None
    divergences: Departures | None = None
    tokens_per_s: float | None = None
    ms_per_token: float | None = None
    resolved: bool | UnsetType | None = UNSET


class KCurve(Document, frozen=True):
    """Predicted speedup by fixed K."""

    k: list[int]
    predicted: list[Estimate]


class Histogram(Document, frozen=True):
    """Rounds of a policy by accepted tokens, from 0 on."""

    label: str
    predicted: list[int]
    measured: list[int]


class Reliability(Document, frozen=True):
    """Acceptance of verified tokens by the drafter's confidence, in bins; None in an empty bin. ece : over all bins"""

    edges: list[float]
    count: list[int]
    mean_confidence: list[float | None]
    accept_rate: list[float | None]
    ece: float


class Domain(Document, frozen=True):
    """The best policy on the held-out prompts of a domain."""

    sequences: int
    output_tokens: int
    predicted_speedup_best: float
    measured_speedup_best: float


class Change(Document, frozen=True):
    """By how much a part of a round takes longer in the probe after than in that before, with its 95 % interval."""

    part: str
    factor: float
    low: float
    high: float
    significant: bool


class MachineState(Document, frozen=True):
    """Probes of the machine before and after, and what changed between them."""

    before: ProbeDocument
    after: ProbeDocument
    changes: list[Change]


class PromptCounts(Document, frozen=True):
    """Prompts that were given, that fitted the minutes, and that were held out and decoded."""

    given: int
    recorded: int
    decoded: int


class Time(Document, frozen=True):
    """Minutes that a validation had, 0 for no limit, and seconds that it took."""

    minutes: float
    spent_s: float
    prompts: PromptCounts


class Validation(Document, tag_field="kind", tag="specsim-validation", frozen=True):
    """validation.json of a pair.

    drafter_facts, decoding, environment : as the trace, the sampler and the machine describe themselves
    null_arm : the A/A test, the baseline's seconds over those of its repetition
    rows : by measured speedup, fastest first
    errors : of the forecast and of replays that knew more, by name
    accepted_histogram, domains : of the fastest policy
    """

    target: str
    drafter: str
    drafter_kind: str
    drafter_facts: dict[str, Any]
    block_expansion: dict[str, int] | None
    device: str
    dtype: str
    decoding: dict[str, Any]
    environment: dict[str, str | int]
    sequences: Parts
    forecast: ForecastFacts
    output_tokens: int
    distinct_trigram_share: float
    first_token_accepted_share: float
    autoregressive_sequence_seconds: list[float]
    load: Load
    null_arm: Estimate
    noise_floor_percent: float
    baseline: Rate
    choice: Choice | None
    rows: list[Row]
    median_abs_error_percent: float
    p90_abs_error_percent: float
    errors: dict[str, ErrorSummary]
    k_curve: KCurve
    accepted_histogram: Histogram
    reliability: Reliability
    domains: dict[str, Domain]
    machine_state: MachineState
    time: Time
    skipped: list[Skipped]
    prompts: Prompts
    options: Options

    @classmethod
    def read(cls, path: Path) -> Validation:
        """Read validation.json, whatever it is called; InputError where it is another file."""
        invalid = "validate again"
        document = read_json(path, f"validation {path}", missing="make it with `realrun validate`", invalid=invalid)
        return cls.from_json(document, f"validation {path}", invalid)


class Difference(Document, frozen=True):
    """A difference of speedups on the same prompts, as `Comparison` has it."""

    difference: Estimate
    p_not_better: float
    sequences: int
    significant: bool

    @classmethod
    def of(cls, comparison: Comparison) -> Difference:
        """Describe a comparison."""
        return cls(comparison.difference, comparison.p_not_better, comparison.sequences, comparison.significant)


class JoinedRow(Document, frozen=True):
    """A policy of a validation of several drafters, with fields as in `Row`.

    same_text_rounds_identical_percent : of rounds that end before the first token that differs from the recording; None
        without such rounds
    rounds_of_drafters : rounds that each drafter drafted
    """

    policy: str
    label: str
    params: dict[str, Any]
    role: str
    predicted: Estimate
    train_speedup: float | None
    measured: Estimate
    wall_clock_speedup: Estimate
    wall_clock_differs: bool
    error_percent: float
    rounds_identical_percent: float
    output_identical_percent: float
    same_text_rounds_identical_percent: float | None
    oracle_regret: float | None
    tau: float
    rounds_of_drafters: list[int]
    forecast: Estimate
    text_known: float
    costs_known: float


class Switching(Document, frozen=True):
    """The best switching policy against the best single drafter, both chosen on the tuning prompts.

    resolved : whether the measured difference is significant and larger than the noise floor
    """

    best_single: str
    best_switch: str
    predicted: Difference
    measured: Difference
    resolved: bool


class JoinedValidation(Document, tag_field="kind", tag="specsim-joined-validation", frozen=True):
    """validation.json of several drafters over a target, with fields as in `Validation`."""

    target: str
    drafters: list[str]
    decoding: dict[str, Any]
    environment: dict[str, str | int]
    sequences: Parts
    forecast: ForecastFacts
    output_tokens: int
    load: Load
    null_arm: Estimate
    noise_floor_percent: float
    baseline: Rate
    choice: Choice | None
    rows: list[JoinedRow]
    median_abs_error_percent: float
    errors: dict[str, ErrorSummary]
    switching: Switching
    skipped: list[Skipped]
    prompts: Prompts
    options: Options


class PartSeconds(Document, frozen=True):
    """Seconds per output token by part of a round."""

    draft: float
    policy: float
    verify: float
    other: float


class BoardRow(Document, kw_only=True, frozen=True):
    """A drafter with a policy; what is measured is None where nothing was decoded. Other fields are as in `Row`.

    role : in which the policy is compared, such as fixed K; form : of the policy, as `specsim leaderboard` names it
    own_target : whether the drafter came with a target of its own, tuned with it
    speedup : by replay at the costs of this run
    leader_minus_this : of the ranking; None of the leader
    tied_with_leader : whether that difference is not significant
    without_loops : the speedup over prompts whose text does not repeat itself; None of fewer than two
    """

    label: str
    drafter: str
    role: str
    policy: str
    form: str
    settings: str
    params: dict[str, Any]
    own_target: bool
    best_of_drafter: bool
    train_speedup: float
    forecast: Estimate
    speedup: Estimate
    leader_minus_this: Difference | None
    tied_with_leader: bool
    without_loops: Estimate | None
    tau: float
    v_d: float
    r_d: float
    hm: float
    truncated_share: float
    token_seconds: PartSeconds
    sequence_seconds: list[float]
    measured: Estimate | None
    wall_clock_speedup: Estimate | None = None
    wall_clock_differs: bool | None = None
    error_percent: float | None
    rounds_identical_percent: float | None
    output_identical_percent: float | None
    same_text_rounds_identical_percent: float | UnsetType | None = UNSET
    measured_sequence_seconds: list[float] | None
    text_known: float | None = None
    costs_known: float | None = None


class BoardDrafter(Document, frozen=True):
    """A drafter of a leaderboard. step_ratio : s_d / s_t; contexts : at which costs were measured"""

    name: str
    kind: str
    facts: Mapping[str, int | str | list[int]]
    trees: bool
    own_target: bool
    depth: int
    first_token_accepted_share: float
    step_ratio: float
    contexts: list[int]


class DrafterBoard(Document, tag_field="kind", tag="specsim-drafter-leaderboard", frozen=True):
    """leaderboard.json of drafters; what is measured is None where nothing was decoded.

    looping_prompts : held-out prompts whose text repeats itself
    rows : best first; other fields as in `Validation`
    """

    version: Literal[1]
    target: str
    device: str
    dtype: str
    decoding: dict[str, Any]
    environment: dict[str, str | int]
    output_tokens: int
    autoregressive_token_seconds: float
    drafters: list[BoardDrafter]
    load: Load | None
    null_arm: Estimate | None
    noise_floor_percent: float | None
    baseline: Rate | None
    choice: Choice | None
    baseline_sequence_seconds: list[float] | None
    block_expansion: dict[str, int] | None
    prompts: Prompts
    sequences: Parts
    looping_prompts: int
    rows: list[BoardRow]
    skipped: list[Skipped]
    median_abs_error_percent: float | None
    errors: dict[str, ErrorSummary]
    forecast: ForecastFacts
    options: Options
