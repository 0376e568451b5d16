"""Throughput against latency of a server, for every draft length and rule at several loads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from specsim.cost.batches import BatchCost, Pad
from specsim.cost.files import CostLike, as_cost
from specsim.io.errors import InputError
from specsim.io.progress import Counter, no_progress
from specsim.io.user_file import is_file_name
from specsim.io.workers import Workers
from specsim.policy.base import Policy
from specsim.serving.arrivals import requests_of_trace
from specsim.serving.costs import batch_cost
from specsim.serving.draft_length import DraftLengthRule, ScheduledK
from specsim.serving.drafts import drafts_of
from specsim.serving.latency import ServingSummary, summarise_run
from specsim.serving.policies import PolicyOrRule, cost_notes, fit_policies
from specsim.serving.presets import ServerName, find_server
from specsim.serving.rules.budget import Budget
from specsim.serving.rules.oracle import Oracle
from specsim.serving.rules.registry import make_rule
from specsim.serving.serve import Served
from specsim.trace.files import TraceLike, read_plain_trace
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

USERS = (1, 4, 16, 64, 256)
LEAST_REQUESTS, REQUESTS_PER_USER, MOST_REQUESTS = 200, 8, 10**7
DEEPEST = 8  # of fixed draft lengths
FITTED = "budget, fitted to these requests"


@dataclass(frozen=True)
class FrontierPoint:
    """A policy or rule at a load.

    users : each of whom sends the next request as soon as the last is answered
    k : of a fixed draft length; None of other rules
    knows : information that no engine has: "requests" for the rule `budget` with confidence calibrated on the requests
        that it serves, "acceptance" for the greedy clairvoyant rule, "" for all others
    summary : rates and latencies
    slower_than_bound : relative excess of the highest tokens per second at this load over these. All points count,
        also the greedy clairvoyant rule and no speculation
    slower_than_informed : the same without the clairvoyant rule: what a better rule that sees only confidences could
        gain; negative only for the clairvoyant rule
    on_frontier : whether an engine can run it, and no other such point has both more tokens per second and a lower 90th
        percentile of the time per output token
    """

    users: int
    k: int | None
    knows: Literal["", "requests", "acceptance"]
    summary: ServingSummary
    slower_than_bound: float
    slower_than_informed: float
    on_frontier: bool

    @property
    def p90_s(self) -> float:
        """90th percentile over requests of seconds per output token."""
        return self.summary.tpot_s.p90

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, repr=False, kw_only=True)
class ServingFrontier(Served):
    """Throughput against latency by load, see `FrontierPoint`.

    users, server, pad : as asked
    tpot_bounds_s : limits on seconds per output token: one of the 90th percentile over requests, or several, which
        requests have in turn
    points : by load: fixed draft lengths, rules, and rules that no engine can run
    """

    users: tuple[int, ...]
    server: str
    pad: Pad
    tpot_bounds_s: tuple[float, ...]
    points: tuple[FrontierPoint, ...]

    def __repr__(self) -> str:
        best = ", ".join(f"{users} users {self.best(users).summary.label}" for users in self.users)
        return f"best by load: {best}"

    def best(self, users: int, *, fixed: bool = False) -> FrontierPoint:
        """Of the points that an engine can run at this load, the one with the most tokens per second within the limit.

        Where none keeps the limit, that of the most tokens per second. With a limit of each request, the point with the
        most requests per second that keep their own. fixed : among fixed draft lengths alone
        """
        here = [p for p in self.points if p.users == users and not p.knows and (p.k is not None or not fixed)]
        if len(self.tpot_bounds_s) > 1:
            return max(here, key=lambda point: point.summary.goodput_per_s or 0.0)
        keeping = [p for p in here if not self.tpot_bounds_s or p.p90_s <= self.tpot_bounds_s[0]]
        return max(keeping, key=lambda p: p.summary.tokens_per_s) if keeping else min(here, key=lambda p: p.p90_s)

    def schedule(self) -> dict[int, int]:
        """The best fixed K from each load on where it changes, as `serve` and `export_flags` take it."""
        lengths: dict[int, int] = {}
        for users in self.users:
            k = self.best(users, fixed=True).k or 0
            if not lengths or lengths[max(lengths)] != k:
                lengths[users if lengths else 1] = k
        return lengths

    def to_frame(self) -> pd.DataFrame:
        """Tabulate points: tokens per second, percentiles of seconds per output token, and gaps."""
        import pandas as pd  # slow to import

        return pd.json_normalize([point.as_dict() for point in self.points], sep="_")

    def as_dict(self) -> dict[str, Any]:
        asked = {
            "users": list(self.users),
            "server": self.server,
            "pad": self.pad,
            "tpot_bounds_s": list(self.tpot_bounds_s),
        }
        points = [point.as_dict() for point in self.points]
        return {**self.about(), **asked, "points": points, "schedule": self.schedule()}

    def plot(self) -> Figure:
        """Tokens per second against the 90th percentile of milliseconds per output token, a line per policy.

        Returns
        -------
        matplotlib.figure.Figure
            Shown by a notebook; `savefig` writes it.
        """
        from specsim.report.figures import frontier_figure  # matplotlib is slow to import

        return frontier_figure([point.as_dict() for point in self.points])


def serve_frontier(
    trace: TraceLike,
    cost: CostLike,
    rules: PolicyOrRule | Iterable[PolicyOrRule] = (),
    *,
    users: int | Iterable[int] = USERS,
    max_draft_tokens: int | None = None,
    requests: int | None = None,
    kv_tokens: int | None = None,
    tpot_ms: float | Iterable[float] = (),
    server: ServerName = "vllm",
    pad: Pad | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    tuning_share: float = 0.5,
    seed: int = 0,
    workers: Workers | None = None,
    progress: Counter = no_progress,
) -> ServingFrontier:
    """Compare draft lengths and rules of a server at several loads: throughput, latency, and gaps to bounds.

    Parameters
    ----------
    trace, cost, tuning_share, seed
        As in `serve`.
    rules : str, Path, class, rule or several, optional
        Rules of `rules`, your own FILE.py, or policies, beside every fixed K and the bounds.
    users : int or iterable of int
        Loads: users who send the next request as soon as the last is answered.
    max_draft_tokens : int, optional
        Largest fixed K; default 8, or the depth of the trace.
    requests : int, optional
        Requests of a load; default 8 per user, and at least 200.
    kv_tokens : int, optional
        Tokens that the server's KV cache holds; default: unlimited.
    tpot_ms : float or iterable of float, optional
        Limit on milliseconds per output token, of 90 % of the requests. Several are the limits of single requests,
        which have them in turn.
    server, pad
        As in `serve`.
    settings : mapping, optional
        Settings of each rule, by its name.
    workers : Workers, optional
        Processes that share loads and rules; default, and for rules of your own FILE.py: this one. They read a trace
        that is given by its path.
    progress : callable, optional
        Called with (done, total).

    Returns
    -------
    ServingFrontier
        `points`; `best(users)` and `schedule()` choose among them; `plot()` is a figure, `to_frame()` a pandas table.

    Raises
    ------
    InputError
        As in `serve`, and for settings of a rule that is not compared.

    References
    ----------
    The greedy clairvoyant rule: `specsim.serving.rules.oracle`; the budget: `specsim.serving.rules.budget`.

    Examples
    --------
    >>> import specsim
    >>> compared = specsim.serve_frontier(
    ...     "example:lab-model", "example:llama-3.1-8b-eagle-h100", "turbospec", users=[1, 8], max_draft_tokens=3)
    >>> sorted({point.summary.label for point in compared.points if point.knows})
    ['budget, fitted to these requests', 'clairvoyant, greedy']
    """
    model, whole = as_cost(cost), read_plain_trace(trace)
    padding = find_server(server).pad if pad is None else pad
    priced = batch_cost(model, padding)
    loads = tuple([users] if isinstance(users, int) else users)
    bounds_s = tuple(ms / 1e3 for ms in ([tpot_ms] if isinstance(tpot_ms, int | float) else tpot_ms))
    if not loads or min(loads) < 1 or not all(0 < bound < math.inf for bound in bounds_s):
        raise InputError(f"users={list(loads)}, tpot_ms={tpot_ms}; give at least 1 user, and limits above 0")
    most = max(requests or 0, REQUESTS_PER_USER * max(loads))
    if most > MOST_REQUESTS:
        raise InputError(f"{most:,} requests of a load are more than {MOST_REQUESTS:,}; give fewer users or requests")
    longest = max_draft_tokens or min(DEEPEST, whole.depth)
    named = [rules] if isinstance(rules, str | Mapping | type) or not isinstance(rules, Iterable) else [*rules]
    given = dict(settings or {})
    asked = [(rule, given.pop(str(rule), {})) for rule in named]
    if given:
        raise InputError(f"settings of {', '.join(given)}, which is not compared; give it as a rule as well")
    fixed = [ScheduledK({1: k}) for k in range(longest + 1)]
    part, ready, learned_on = fit_policies(
        whole, priced, [*((arm, {}) for arm in fixed), *asked], tuning_share=tuning_share, seed=seed
    )
    arms: list[_Arm] = [_Arm(each) for each in ready]
    if part.informed:
        arms.append(_Arm(make_rule(Budget, {}, part, priced), "requests", FITTED))
    arms.append(_Arm(Oracle(priced, max_draft_tokens=whole.depth), "acceptance"))
    if any(is_file_name(str(rule)) for rule in named):  # other processes do not know the file's classes
        workers = None
    remote = workers is not None and isinstance(trace, str | PathLike)
    source = _Source(str(trace), learned_on, tuning_share, seed) if remote else part
    tasks = [
        _Task(
            source,
            arm,
            priced,
            load,
            requests or max(LEAST_REQUESTS, REQUESTS_PER_USER * load),
            server,
            kv_tokens,
            bounds_s,
            seed,
        )
        for load in loads
        for arm in arms
    ]
    about: dict[str, Any] = {"learned_on": learned_on, "sequences": part.sequences}
    notes = cost_notes(model, part, longest, max(loads))
    del whole, part  # where workers read the trace themselves, its memory is free for them
    summaries: dict[int, ServingSummary] = {}
    with nullcontext(_here) if workers is None else workers.ready() as run:
        for number, summary in run(_summary, list(enumerate(tasks))):
            summaries[number] = summary
            progress(len(summaries), len(tasks))
    points = [
        point
        for at, load in enumerate(loads)
        for point in _points(load, arms, [summaries[at * len(arms) + number] for number in range(len(arms))], longest)
    ]
    return ServingFrontier(
        **about,
        cost_notes=notes,
        users=loads,
        server=server,
        pad=padding,
        tpot_bounds_s=bounds_s,
        points=_on_frontier(points),
    )


class _Source(NamedTuple):
    """A trace that every worker reads, and which of its sequences are reported on."""

    path: str
    learned_on: int
    tuning_share: float
    seed: int


class _Arm(NamedTuple):
    """A policy or rule; `knows` as in `FrontierPoint`; a label that replaces the rule's own."""

    rule: Policy | DraftLengthRule
    knows: Literal["", "requests", "acceptance"] = ""
    label: str | None = None


class _Task(NamedTuple):
    source: Trace | _Source
    arm: _Arm
    cost: BatchCost
    users: int
    requests: int
    server: str
    kv_tokens: int | None
    bounds_s: tuple[float, ...]
    seed: int


def _summary(number: int, task: _Task) -> tuple[int, ServingSummary]:
    from specsim.serving.continuous import run_server  # numba is slow to import

    trace = _part(task.source) if isinstance(task.source, _Source) else task.source
    sent = requests_of_trace(trace, task.requests, seed=task.seed)
    drafts = drafts_of(trace, task.arm.rule, seed=task.seed, served=True)
    drafts = replace(drafts, label=task.arm.label or drafts.label)
    limits: dict[str, Any] = {"slots": task.users, "users": task.users, "kv_tokens": task.kv_tokens}
    run = run_server(drafts, task.cost, sent, server=task.server, **limits)
    own_bounds_s = np.resize(task.bounds_s, len(sent)) if task.bounds_s else None
    return number, summarise_run(run, tpot_bound_s=own_bounds_s)


@lru_cache(maxsize=1)
def _part(source: _Source) -> Trace:
    """Read the sequences that are reported on, once in each process."""
    whole = read_plain_trace(source.path)
    if not source.learned_on:
        return whole
    return whole.select(split_sequences(whole, tuning_share=source.tuning_share, seed=source.seed)[1])


def _here(call: Callable[..., Any], tasks: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
    return (call(*task) for task in tasks)


def _points(users: int, arms: Sequence[_Arm], found: Sequence[ServingSummary], longest: int) -> Iterator[FrontierPoint]:
    """Points of a load, not yet marked as on the frontier. found : summaries by arm"""
    most = max(each.tokens_per_s for each in found)
    informed = max(each.tokens_per_s for arm, each in zip(arms, found, strict=True) if arm.knows != "acceptance")
    for at, (arm, each) in enumerate(zip(arms, found, strict=True)):
        yield FrontierPoint(
            users=users,
            k=at if at <= longest else None,
            knows=arm.knows,
            summary=each,
            slower_than_bound=most / each.tokens_per_s - 1,
            slower_than_informed=informed / each.tokens_per_s - 1,
            on_frontier=False,
        )


def _on_frontier(points: Sequence[FrontierPoint]) -> tuple[FrontierPoint, ...]:
    rivals = [(p.summary.tokens_per_s, p.p90_s) for p in points if not p.knows]

    def leads(own: FrontierPoint) -> bool:
        return not own.knows and not any(
            rate > own.summary.tokens_per_s and p90_s < own.p90_s for rate, p90_s in rivals
        )

    return tuple(replace(point, on_frontier=leads(point)) for point in points)
