"""Speculation on a server: in batches, under load, and the draft length for each batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from os import PathLike
from typing import TYPE_CHECKING, Any

from specsim.cost.batches import Pad
from specsim.cost.files import CostLike, as_cost, with_batch
from specsim.cost.model import CostModel
from specsim.cost.table import context_range
from specsim.io.errors import InputError
from specsim.io.progress import Counter, no_progress
from specsim.learn.fit import fit, needs_fitting
from specsim.learn.space import cap_depth
from specsim.policy.base import Policy, Settings, build_policy
from specsim.policy.registry import PolicyName, find_policy, make_policy
from specsim.replaying.intervals import Estimate, interval_columns, ratio_of_ratios
from specsim.replaying.result import Result
from specsim.replaying.table import cost_table
from specsim.serving.arrivals import asked_requests
from specsim.serving.costs import batch_cost
from specsim.serving.draft_length import DraftLengthRule, TurboSpec, as_schedule
from specsim.serving.drafts import drafts_of
from specsim.serving.latency import ServingSummary, summarise_run
from specsim.serving.lockstep import Lockstep, lockstep
from specsim.serving.presets import ServerName, find_server
from specsim.serving.rules.registry import find_rule, make_rule
from specsim.serving.speedup_map import SpeedupMap, speedup_map
from specsim.trace.files import TraceLike, read_plain_trace
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

    from specsim.policy.registry import PolicyName

SLOTS = 256  # as vLLM's max_num_seqs
PolicyOrRule = PolicyName | Policy | DraftLengthRule | type[DraftLengthRule] | Mapping[int, int]
BATCHES, MAP_BATCHES = (1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, repr=False, kw_only=True)
class Served(Result):
    """What all results of serving have in common: where they come from.

    learned_on : sequences that policies learned from, none of which they are reported on
    sequences : those reported on
    cost_notes : what the costs say of their own seconds
    """

    learned_on: int
    sequences: int
    cost_notes: tuple[str, ...]

    @property
    def conditions(self) -> list[str]:
        """Conditions of these numbers, in words."""
        return [f"learned on {self.learned_on} others"] if self.learned_on else []

    @property
    def notes(self) -> list[str]:
        """Caveats of these numbers, in words."""
        return [*self.conditions, *self.cost_notes]

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        common = {field.name: getattr(self, field.name) for field in fields(Served)}
        return {**common, "cost_notes": list(self.cost_notes)}


@dataclass(frozen=True, repr=False, kw_only=True)
class DraftSchedule(Served, SpeedupMap):
    """Speedups by batch and context, see `SpeedupMap` for its fields."""

    def __repr__(self) -> str:
        lengths = ",".join(f"{batch}:{k}" for batch, k in self.schedule(self.contexts[0]).items())
        return f"schedule {lengths} of batches up to {self.largest_batch(self.contexts[0])}"

    def to_frame(self) -> pd.DataFrame:
        """Tabulate batches and contexts: tokens per second without speculation, then every speedup."""
        import pandas as pd  # slow to import

        return pd.DataFrame(
            {
                "context": cell.context,
                "batch": cell.batch,
                "baseline_tokens_per_s": cell.baseline_tokens_per_s,
                "best": cell.best,
                **{label: float(speedup) for label, speedup in cell.speedup.items()},
            }
            for cell in self.cells
        )

    def as_dict(self) -> dict[str, Any]:
        return {**super().as_dict(), **SpeedupMap.as_dict(self)}


@dataclass(frozen=True, repr=False, kw_only=True)
class BatchResults(Served):
    """A policy or rule in batches that start together.

    label : of the policy or rule
    batches : of each size, with speculation, without, and the speedup with its 95 % interval over sequences
    """

    label: str
    batches: tuple[tuple[Lockstep, Lockstep, Estimate], ...]

    def __repr__(self) -> str:
        return f"{self.label}: " + ", ".join(f"batch {on.batch} {float(gain):.3f}" for on, _, gain in self.batches)

    def to_frame(self) -> pd.DataFrame:
        """Tabulate batches: speedup with its 95 % interval, output tokens per second, mean batch."""
        import pandas as pd  # slow to import

        return pd.DataFrame(
            {
                "batch": on.batch,
                **interval_columns(speedup),
                "baseline_tokens_per_s": off.tokens_per_s,
                "tokens_per_s": on.tokens_per_s,
                "mean_batch": on.mean_batch,
            }
            for on, off, speedup in self.batches
        )

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        entries = [
            {**on.as_dict(), "speedup": speedup.as_dict(), "baseline": off.as_dict()}
            for on, off, speedup in self.batches
        ]
        return {**super().as_dict(), "batches": entries}


@dataclass(frozen=True, repr=False, kw_only=True)
class ServerResult(Served):
    """A server under load, without speculation and with it.

    arrivals, slots, server, kv_tokens, users, block_tokens, step_tokens, pad, tpot_bound_s, ttft_bound_s : as asked
    left_out : recorded requests without output
    baseline, speculation : the two runs
    """

    arrivals: str
    left_out: int
    slots: int
    server: str
    kv_tokens: int | None
    users: int | None
    block_tokens: int | None
    step_tokens: int | None
    pad: Pad
    tpot_bound_s: float | None
    ttft_bound_s: float | None
    baseline: ServingSummary
    speculation: ServingSummary

    def __repr__(self) -> str:
        off, on = self.baseline, self.speculation
        rates = f"{off.tokens_per_s:,.0f} tok/s without speculation, {on.tokens_per_s:,.0f} with it"
        return f"{on.label}, {on.requests} requests ({self.arrivals}): {rates}"

    def to_frame(self) -> pd.DataFrame:
        """Tabulate the two runs: rates per second, tokens per round, latencies in seconds."""
        import pandas as pd  # slow to import

        return pd.json_normalize([self.baseline.as_dict(), self.speculation.as_dict()], sep="_").set_index("label")

    def as_dict(self) -> dict[str, Any]:
        """The JSON form."""
        asked = {field.name: getattr(self, field.name) for field in fields(self)[4:-2]}
        runs = {"baseline": self.baseline.as_dict(), "speculation": self.speculation.as_dict()}
        return {**super().as_dict(), **asked, **runs}


def serve(
    trace: TraceLike,
    cost: CostLike,
    policy: PolicyOrRule = "fixed_k",
    *,
    arrivals: str | PathLike[str] = "poisson:20",
    requests: int | None = None,
    slots: int = SLOTS,
    server: ServerName = "vllm",
    kv_tokens: int | None = None,
    block_tokens: int | None = None,
    step_tokens: int | None = None,
    pad: Pad | None = None,
    tpot_ms: float | None = None,
    ttft_ms: float | None = None,
    tuning_share: float = 0.5,
    seed: int = 0,
    **settings: Any,
) -> ServerResult:
    """Simulate a server with continuous batching, without speculation and with it.

    Parameters
    ----------
    trace, tuning_share, seed
        As in `predict`.
    cost : CostModel, str, Path or mapping
        A batch-aware cost model: linear, roofline or a batch profile.
    policy : str, Path, class, Policy, mapping or rule
        A policy of chains or static trees as in `predict`; a rule of `rules`, such as "turbospec", which chooses draft
        lengths by the load; or a schedule of K by batch, such as {1: 5, 4: 3, 16: 0}.
    arrivals : str or Path
        "poisson:RATE" (requests per second), "closed:USERS", or a file of recorded arrivals.
    requests : int, optional
        Number of requests (default 1000, or all in the arrivals file).
    slots : int
        Largest batch of the server, in sequences.
    server : {"vllm", "sglang", "llamacpp"}
        Engine whose scheduler is simulated: which requests a step decodes and prefills, and what its token budget
        limits.
    kv_tokens : int, optional
        Tokens that the server's KV cache holds; default: unlimited.
    block_tokens : int, optional
        Tokens of a block of the KV cache, which requests take as they need them; where none is free, the request
        admitted last gives its blocks back and is computed again, as in vLLM. Default: a request reserves its whole
        length, and none is preempted.
    step_tokens : int, optional
        Token budget of a step, such as vLLM's max_num_batched_tokens: prompts are read in chunks; vLLM also shortens
        drafts, and lets requests wait that exceed the budget. Default: the engine's on an 80 GB GPU.
    pad : {"none", "longest", "graphs", "sequences"}, optional
        How the engine pads ragged batches: every draft to the longest, or a pass to the next CUDA graph by its tokens
        or its sequences. Default: as the engine does.
    tpot_ms, ttft_ms : float, optional
        Most milliseconds per output token, and to the first token, of a request that counts as good.
    **settings
        Settings of the policy.

    Returns
    -------
    ServerResult
        `baseline` and `speculation`: tokens and requests per second, latencies in seconds; `to_frame()` is a pandas
        table.

    Raises
    ------
    InputError
        For costs of batch size 1 only, policies that cannot be batched, and arrivals that cannot be read.

    References
    ----------
    Yu et al. 2022, Orca (continuous batching); Liu et al. 2024, arXiv:2406.14066 (goodput).

    Examples
    --------
    >>> import specsim
    >>> result = specsim.serve("example:lab-model", "example:llama-3.1-8b-eagle-h100", k=3, requests=200)
    >>> result.speculation.tokens_per_round > result.baseline.tokens_per_round
    True
    """
    padding = find_server(server).pad if pad is None else pad
    model, part, arm, learned_on = _one_policy(trace, cost, policy, settings, tuning_share, seed, padding)
    asked, users = asked_requests(part, arrivals, requests, seed=seed)
    longest_text = int((asked.prompt_tokens + asked.output_tokens).max())
    limits: dict[str, Any] = {"slots": slots, "server": server, "kv_tokens": kv_tokens, "users": users}
    limits |= {"block_tokens": block_tokens, "step_tokens": step_tokens}
    tpot_bound_s, ttft_bound_s = (None if bound_ms is None else bound_ms / 1e3 for bound_ms in (tpot_ms, ttft_ms))
    from specsim.serving.continuous import run_server  # numba is slow to import

    priced = batch_cost(model, padding)
    off, on = (
        summarise_run(
            run_server(drafts_of(part, each, seed=seed, served=True), priced, asked, **limits),
            tpot_bound_s=tpot_bound_s,
            ttft_bound_s=ttft_bound_s,
        )
        for each in (None, arm)
    )
    return ServerResult(
        learned_on=learned_on,
        sequences=part.sequences,
        cost_notes=cost_notes(model, part, arm.max_draft_tokens, slots, (0, longest_text)),
        arrivals=str(arrivals),
        left_out=asked.left_out,
        pad=padding,
        **limits,
        tpot_bound_s=tpot_bound_s,
        ttft_bound_s=ttft_bound_s,
        baseline=off,
        speculation=on,
    )


def serve_batches(
    trace: TraceLike,
    cost: CostLike,
    policy: PolicyOrRule = "fixed_k",
    *,
    batches: int | Iterable[int] = BATCHES,
    tuning_share: float = 0.5,
    seed: int = 0,
    **settings: Any,
) -> BatchResults:
    """Decode a trace in batches of sequences that start together, without speculation and with it.

    Parameters
    ----------
    trace, cost, policy, tuning_share, seed, **settings
        As in `serve`.
    batches : int or iterable of int
        Sequences that start together; every round waits for the longest draft, and the batch shrinks as texts end.

    Returns
    -------
    BatchResults
        `batches`; `to_frame()` is a pandas table of speedups and tokens per second.

    Raises
    ------
    InputError
        As in `serve`.

    Examples
    --------
    >>> import specsim
    >>> result = specsim.serve_batches("example:lab-model", "example:llama-3.1-8b-eagle-h100", batches=[1, 8], k=3)
    >>> result.to_frame()["batch"].tolist()
    [1, 8]
    """
    model, part, arm, learned_on = _one_policy(trace, cost, policy, settings, tuning_share, seed)
    drafts, plain, sizes = drafts_of(part, arm, seed=seed), drafts_of(part, None), _several(batches)
    notes = cost_notes(model, part, arm.max_draft_tokens, max(sizes))
    results = []
    for size in sizes:
        on, off = (lockstep(arm_drafts, batch_cost(model), size) for arm_drafts in (drafts, plain))
        results.append((on, off, ratio_of_ratios(*on.per_sequence(), *off.per_sequence())))
    return BatchResults(
        learned_on=learned_on,
        sequences=part.sequences,
        cost_notes=notes,
        label=drafts.label,
        batches=tuple(results),
    )


def serve_schedule(
    trace: TraceLike,
    cost: CostLike,
    *,
    batches: int | Iterable[int] = MAP_BATCHES,
    contexts: int | Iterable[int] | None = None,
    max_draft_tokens: int | None = None,
    policies: PolicyName | Iterable[PolicyOrRule] = (),
    tuning_share: float = 0.5,
    seed: int = 0,
    progress: Counter = no_progress,
) -> DraftSchedule:
    """Find the best draft length K for each batch and context, and the batch beyond which speculation loses.

    Batches are full: the next sequence takes the place of a finished sequence at once.

    Parameters
    ----------
    trace, cost, tuning_share, seed
        As in `serve`.
    batches : int or iterable of int
        Increasing. The table ends before the first that does not fit into memory; `left_out` says so.
    contexts : int or iterable of int, optional
        Cached tokens of every sequence; default: those of the trace.
    max_draft_tokens : int, optional
        Largest K; default 8, or the depth of the trace.
    policies : str, Path, class, or several, optional
        More policies, of chains or static trees, to rank.
    progress : callable, optional
        Called with (done, total).

    Returns
    -------
    DraftSchedule
        `schedule()` is K from each batch on, as `serve` and `export_flags` take it; `break_even` the batch beyond
        which speculation loses; `to_frame()` a pandas table of speedups.

    Raises
    ------
    InputError
        As in `serve`, and for batches that do not increase.

    Examples
    --------
    >>> import specsim
    >>> cost = "example:llama-3.1-8b-eagle-h100"
    >>> best = specsim.serve_schedule("example:lab-model", cost, batches=[1, 256], max_draft_tokens=3)
    >>> best.schedule()[1] >= best.schedule().get(256, 0)
    True
    """
    model, whole = as_cost(cost), read_plain_trace(trace)
    priced = batch_cost(model)
    longest = max_draft_tokens or min(8, whole.depth)
    sizes = _several(batches)
    at: list[int | None] = [None] if contexts is None else [*_several(contexts)]
    named: list[tuple[PolicyOrRule, Settings]] = [("fixed_k", {"k": k}) for k in range(1, longest + 1)]
    others = [policies] if isinstance(policies, str | PathLike | type) else policies
    named += [(TurboSpec.name, {"max_draft_tokens": longest}), *((policy, {}) for policy in others)]
    part, arms, learned_on = fit_policies(whole, model, named, tuning_share=tuning_share, seed=seed)
    speedups = speedup_map(part, priced, arms, sizes, contexts=at, seed=seed, progress=progress)
    largest = max(cell.batch for cell in speedups.cells)
    notes = cost_notes(model, part, longest, largest, [context for context in at if context is not None])
    return DraftSchedule(
        **vars(speedups), learned_on=learned_on, sequences=part.sequences, cost_notes=(*speedups.left_out, *notes)
    )


def _one_policy(
    trace: TraceLike,
    cost: CostLike,
    policy: PolicyOrRule,
    settings: Settings,
    share: float,
    seed: int,
    pad: Pad = "none",
) -> tuple[CostModel, Trace, Policy | DraftLengthRule, int]:
    """Costs, the sequences to report on, the policy or rule, and the number of sequences that it learned from."""
    model = as_cost(cost)
    priced = batch_cost(model, pad)  # refuses costs of batch size 1 only
    whole = read_plain_trace(trace)
    part, (ready,), learned_on = fit_policies(whole, priced, [(policy, settings)], tuning_share=share, seed=seed)
    return model, part, ready, learned_on


def _several(numbers: int | Iterable[int]) -> Sequence[int]:
    return [numbers] if isinstance(numbers, int) else list(numbers)


def cost_notes(
    model: CostModel, trace: Trace, longest: int, batch: int, contexts: Sequence[int] = ()
) -> tuple[str, ...]:
    """Notes of the cost model on drafts and batches up to these sizes, at these contexts or those of the trace."""
    met = contexts or context_range(trace)
    return tuple(with_batch(model, batch).notes(longest, (min(met), max(met))))


def fit_policies(
    trace: Trace,
    cost: CostModel,
    requested: Sequence[tuple[PolicyOrRule, Settings]],
    *,
    tuning_share: float,
    seed: int,
) -> tuple[Trace, list[Policy | DraftLengthRule], int]:
    """Return the sequences to report on, the policies or rules, and the number of sequences that they learned from.

    If a policy learns, it does so on part of the sequences, at the costs of batch size 1, and all policies are reported
    on the others.
    """
    policies = [_resolve(policy, settings) for policy, settings in requested]
    rest, train = trace, trace
    kinds = [policy for policy in policies if isinstance(policy, type)]
    learns = any(kind.learns if issubclass(kind, DraftLengthRule) else needs_fitting(kind) for kind in kinds)
    if learns:
        tuning, others = split_sequences(trace, tuning_share=tuning_share, seed=seed)
        rest, train = trace.select(others), trace.select(tuning)
    ready = [_ready(policy, settings, train, cost) for policy, (_, settings) in zip(policies, requested, strict=True)]
    return rest, ready, train.sequences if learns else 0


def _ready(
    policy: Policy | DraftLengthRule | type[Policy] | type[DraftLengthRule],
    settings: Settings,
    train: Trace,
    cost: CostModel,
) -> Policy | DraftLengthRule:
    if isinstance(policy, Policy | DraftLengthRule):
        return policy
    if issubclass(policy, DraftLengthRule):
        return make_rule(policy, settings, train, batch_cost(cost))
    arguments = {**cap_depth(policy, train.depth), **settings}
    if needs_fitting(policy):
        return fit(policy, arguments, train, cost_table(train, cost))
    return build_policy(policy, arguments)


def _resolve(
    policy: PolicyOrRule, settings: Settings
) -> Policy | DraftLengthRule | type[Policy] | type[DraftLengthRule]:
    """A policy or rule with its settings, or the class of one that has none yet."""
    if isinstance(policy, Policy):
        return make_policy(policy, settings)
    if isinstance(policy, Mapping | DraftLengthRule):
        if settings:
            raise InputError(f"a schedule or a finished rule takes no settings; leave out {', '.join(settings)}")
        return as_schedule(policy) if isinstance(policy, Mapping) else policy
    if isinstance(policy, str | PathLike) and (rule := find_rule(policy)) is not None:
        return rule
    return policy if isinstance(policy, type) and issubclass(policy, DraftLengthRule) else find_policy(policy)
