"""Engines that choose draft lengths themselves, against schedules and bounds: `python -m studies self_tuning`.

Simulates full batches of each size on an H100, with costs of its data sheet and of an engine's overheads, and on a CPU,
with measured costs. Acceptance is that of shipped traces. Rules that learn offline do so on half of the sequences; the
other half is served.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np

from specsim.cli.console import progress_bar
from specsim.cost.batches import BatchCost, DoesNotFit
from specsim.cost.files import as_cost
from specsim.io.arrays import Ints, Seconds
from specsim.io.json import from_keys, read_json
from specsim.io.progress import Progress
from specsim.report.table import Column
from specsim.serving.arrivals import shuffled
from specsim.serving.costs import batch_cost
from specsim.serving.draft_length import DraftLengthRule, Running, ScheduledK
from specsim.serving.drafts import drafts_of
from specsim.serving.lockstep import Lockstep, lockstep
from specsim.serving.rules.adaptive_verification import AdaptiveVerification, Learned
from specsim.serving.rules.oracle import Oracle
from specsim.serving.rules.registry import RULES, make_rule
from specsim.trace.files import read_plain_trace
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace
from studies.common import Config, Document, cached, claim, gpu_costs
from studies.figures import Line, line_panels, point
from studies.report import SIGNED, Report

OFF, FIXED, SCHEDULE = "no speculation", "one K", "schedule by batch"
ADAPTIVE, OWN = "adaptive verification", "adaptive, profile at own context"
STEP, BOUNDED, BOTH = "adaptive, whole steps timed", "adaptive, fits bounded", "adaptive, both"
INFORMED, BOUND = "budget fitted to what it serves", "clairvoyant, greedy"
SHOWN = (ADAPTIVE, OWN, STEP, "budget", INFORMED, BOUND)  # in the figure
SAID = (1, 16, 128)  # batches in the table and the answer

FOUND, PROFILE = "found.json", "batches.json"
RECORDED = ("config.json", FOUND, PROFILE)
CHAT = "conversation"  # a domain of the first trace
MOST, FAR = 1.0, 4.0  # change of a coefficient in a fit, and distance from 0


@dataclass(frozen=True)
class WholeSteps(AdaptiveVerification):
    """A proposal: the budget follows from the seconds of whole steps at the served contexts, not of profiled passes."""

    def profiled_s(self, running: Running, count: Ints) -> Seconds:
        drafted_s = self.round_s(len(running.request), running)[-1] - self.verify_s(
            running, len(running.request) * self.max_draft_tokens
        )
        return np.asarray(drafted_s + self.verify_s(running, count))


@dataclass(frozen=True)
class Bounded(AdaptiveVerification):
    """A proposal: a fit changes no coefficient by more than `MOST`, or beyond `FAR`, so that it cannot overshoot."""

    def refit(self, state: Learned) -> Learned:
        after = super().refit(state)
        slope = np.clip(after.slope, max(state.slope - MOST, 0.0), min(state.slope + MOST, FAR))
        low, high = np.maximum(state.intercepts - MOST, -FAR), np.minimum(state.intercepts + MOST, FAR)
        return after._replace(slope=float(slope), intercepts=np.clip(after.intercepts, low, high))


@dataclass(frozen=True)
class Both(WholeSteps, Bounded):
    """Both proposals."""


@dataclass(frozen=True)
class Served:
    """Tokens per second of a rule on a server at a batch. k : its ceiling; None if it has none"""

    server: str
    trace: str
    batch: int
    rule: str
    k: int | None
    tokens_per_s: float


@dataclass(frozen=True)
class Compared(Served):
    """A rule with its best ceiling K, and its gains and gaps in percent.

    below_informed, below_bound : by how much the fastest rule exceeds it, without and with the clairvoyant one
    """

    over_one_k: float
    over_schedule: float
    below_informed: float
    below_bound: float


@dataclass(frozen=True)
class AtContext:
    """Tokens per second with a start-up profile at the served context over those with one at 8,192 tokens."""

    context: int
    batch: int
    own_over_8192: float


@dataclass(frozen=True)
class Followed:
    """How a rule follows chat, other text and chat again: rates, verified tokens of a request, steps of each part.

    other : a domain, or the share of chat's accepted tokens that stay accepted
    settled : tokens per second in chat, after a while
    learned, learned_again : steps until the rate in chat is near that; None if it never is
    """

    rule: str
    other: str | float
    settled: float
    rate_0: float
    rate_1: float
    rate_2: float
    verified_0: float
    verified_1: float
    verified_2: float
    steps_0: int
    steps_1: int
    steps_2: int
    learned: int | None
    learned_again: int | None

    @property
    def back(self) -> str:
        """The change of the tokens per second in chat from before the other text to after it."""
        return f"{100 * (self.rate_2 / self.settled - 1):+.1f} %"


@dataclass(frozen=True)
class Found:
    """What was simulated. sequences : of each trace"""

    rows: list[Served]
    sequences: dict[str, int]
    contexts: list[AtContext]
    traffic: list[Followed]


def costs_of(server: Config, out: Path) -> BatchCost:
    """Return the costs of a server, from a data sheet or from a batch profile in the folder of results."""
    if "profile" in server:
        return batch_cost(as_cost(out / server["profile"]))
    return batch_cost(gpu_costs({"gpu": server["hardware"], "engine": None, **server}), "graphs")


def served(
    trace: Trace, rule: DraftLengthRule, cost: BatchCost, server: Config, batch: int, config: Config
) -> Lockstep:
    """Decode sequences under a rule in a batch that stays full until the last ones."""
    count = trace.sequences * -(-max(trace.sequences, config["turns"] * batch) // trace.sequences)
    order = shuffled(trace.sequences, count, np.random.default_rng(config["seed"]))
    return lockstep(drafts_of(trace, rule), cost, batch, order=order, refill=True, context=server["context"])


def rate(run: Lockstep) -> float:
    """Return the tokens per second while the batch is full."""
    tokens, seconds = run.per_sequence(full_only=True)
    return float(tokens.sum() / seconds.sum())


def rows_of(
    trace: Trace, name: str, cost: BatchCost, server: Config, config: Config, progress: Progress
) -> list[Served]:
    """Compare the rules on a trace, batch by batch."""
    tuning, others = split_sequences(trace, tuning_share=config["tuning_share"], seed=config["seed"])
    train, part = trace.select(tuning), trace.select(others)
    lengths = [k for k in config["lengths"] if k <= server["max_draft_tokens"]]
    tuned = np.array(
        [
            [rate(served(train, ScheduledK({1: k}), cost, server, batch, config)) for k in (0, *lengths)]
            for batch in server["batches"]
        ]
    )
    one_k = lengths[int(np.log(tuned[:, 1:]).mean(axis=0).argmax())]  # of the best mean over batches
    rows: list[Served] = []
    adaptive = {ADAPTIVE: {}, OWN: {"profile_context": server["context"]}}
    for number, batch in enumerate(server["batches"]):
        progress(f"{server['name']}: {name}", number, len(server["batches"]))
        best = (0, *lengths)[int(tuned[number].argmax())]
        options = {"max_num_seqs": max(server["batches"])}
        if "profile" in server:  # whose measured contexts do not reach vLLM's default
            options["profile_context"] = server["context"]
        arms: list[tuple[str, int | None, DraftLengthRule]] = [
            (label, k, ScheduledK({1: k})) for label, k in ((OFF, 0), (FIXED, one_k), (SCHEDULE, best))
        ]
        for k in lengths:
            arms += [
                (label, k, AdaptiveVerification(cost, max_draft_tokens=k, **{**options, **settings}))
                for label, settings in adaptive.items()
            ]
            arms += [(STEP, k, WholeSteps(cost, max_draft_tokens=k))]
        arms += [(rule, None, make_rule(RULES[rule], {}, train, cost)) for rule in config["rules"]]
        arms += [
            (INFORMED, None, make_rule(RULES["budget"], {}, part, cost)),
            (BOUND, None, Oracle(cost, max_draft_tokens=trace.depth)),
        ]
        for label, k, rule in arms:
            reached = rate(served(part, rule, cost, server, batch, config))
            rows.append(Served(server["name"], name, batch, label, k, reached))
    return rows


def contexts_of(trace: Trace, cost: BatchCost, server: Config, config: Config) -> list[AtContext]:
    """Compare a start-up profile at 8,192 cached tokens with one at the served context, for several contexts."""
    rows = []
    for context in config["profile_contexts"]:
        for batch in (1, 4, 16):
            here = {**server, "context": context}
            arms = [AdaptiveVerification(cost, profile_context=at) for at in (8192, context)]
            try:
                rates = [rate(served(trace, arm, cost, here, batch, config)) for arm in arms]
            except DoesNotFit:
                continue
            rows.append(AtContext(context, batch, rates[1] / rates[0]))
    return rows


def traffic(trace: Trace, cost: BatchCost, server: Config, config: Config, other: str | float) -> list[Followed]:
    """Serve chat, then other text, then chat for twice as long. other : see `Followed`"""
    asked = config["traffic"]
    chat = np.flatnonzero(trace.domain == CHAT)
    both = trace.select(chat if isinstance(other, float) else np.flatnonzero(np.isin(trace.domain, [CHAT, other])))
    is_away = both.domain == other
    if isinstance(other, float):
        known = np.random.default_rng(config["seed"]).random((len(both.token), trace.depth)) < other
        match = np.minimum(both.match_len, known.cumprod(axis=1).sum(axis=1)).astype(both.match_len.dtype)
        is_away = np.arange(2 * len(chat)) >= len(chat)
        both = replace(both.select([*range(len(chat))] * 2), match_len=np.concatenate([both.match_len, match]))
    here, there = (np.resize(np.flatnonzero(mask), asked["requests"]) for mask in (~is_away, is_away))
    rows = []
    for label, kind in ((ADAPTIVE, AdaptiveVerification), (STEP, WholeSteps), (BOUNDED, Bounded), (BOTH, Both)):
        run = lockstep(
            drafts_of(both, kind(cost, max_draft_tokens=asked["ceiling"])),
            cost,
            asked["batch"],
            order=np.concatenate([here, there, here, here]),
            refill=True,
            context=server["context"],
        )
        step, seconds = run.rounds.batch_round, run.seconds.total_s
        others = np.flatnonzero(np.bincount(step, is_away[run.rounds.sequence]) > 0)
        full = np.flatnonzero(run.seconds.sequences == asked["batch"])
        bounds = [0, others[0], others[-1] + 1, full[-1] + 1]
        emitted, verified = (np.bincount(step, getattr(run.rounds, name)) for name in ("emitted", "verified"))
        parts = [slice(*bounds[at : at + 2]) for at in range(3)]
        rates = [emitted[part].sum() / seconds[part].sum() for part in parts]
        half = slice(others[0] // 2, others[0])
        settled = float(emitted[half].sum() / seconds[half].sum())
        ends = [slice(max(part.start, part.stop - asked["window"]), part.stop) for part in parts]
        learned = [steps_until(emitted[part], seconds[part], settled, asked) for part in (parts[0], parts[2])]
        verified_tokens = [float(verified[end].mean() / asked["batch"]) for end in ends]
        steps = np.diff(bounds).tolist()
        rows.append(Followed(label, other, settled, *map(float, rates), *verified_tokens, *steps, *learned))
    return rows


def steps_until(emitted: Ints, seconds: Seconds, settled: float, asked: Config) -> int | None:
    """Steps after which the rate over a window stays near the settled one; None if it never does."""
    window = np.ones(asked["window"])
    rates = np.convolve(emitted, window, "valid") / np.convolve(seconds, window, "valid")
    below = np.flatnonzero(rates < (1 - asked["near"]) * settled)
    last = int(below[-1]) + 1 if len(below) else 0
    return last if last < len(rates) else None


def compared(out: Path, config: Config, progress: Progress) -> Document:
    """Compare all rules on all servers and traces; return the document of `Found`."""
    traces: Mapping[str, Trace] = {name: read_plain_trace(f"example:{name}") for name in config["traces"]}
    rows = []
    for server in config["servers"]:
        cost = costs_of(server, out)
        for name, trace in traces.items():
            shallow = trace.shallower(server["max_draft_tokens"])
            rows += rows_of(shallow, name, cost, server, config, progress)
    server, trace = config["servers"][0], traces[config["traces"][0]]
    cost = costs_of(server, out)
    others = (*config["traffic"]["known"], "code")
    found = Found(
        rows,
        {name: trace.sequences for name, trace in traces.items()},
        contexts_of(trace, cost, server, config),
        [row for other in others for row in traffic(trace, cost, server, config, other)],
    )
    return asdict(found)


def main(out: Path, config: Config) -> None:
    """Simulate what is not there yet, and write the report."""
    again = "measure it with `realrun batch-profile`, or copy the recorded one"
    profile = read_json(out / PROFILE, str(out / PROFILE), dict, missing=again, invalid=again)
    claim(out, config)
    with progress_bar() as progress:
        document = cached(out / FOUND, partial(compared, out, config, progress))
    found = from_keys(document, Found, str(out / FOUND), "remove it, to simulate again")
    report(config, found, profile).write(out)


def faster(rate: float, other: float) -> float:
    """Return by how many percent a rate exceeds another."""
    return round(100 * (rate / other - 1), 2)


def compared_rows(served_rows: Sequence[Served]) -> list[Compared]:
    """Compare the rules of each server, trace and batch."""
    rows = []
    for _, cell in groupby(served_rows, key=lambda row: (row.server, row.trace, row.batch)):
        here = [*cell]
        best = {row.rule: row for row in sorted(here, key=lambda row: row.tokens_per_s)}
        rates = {rule: row.tokens_per_s for rule, row in best.items()}
        informed = max(rate for rule, rate in rates.items() if rule != BOUND)
        for rule in dict.fromkeys(row.rule for row in here):
            rate = rates[rule]
            rows.append(
                Compared(
                    **{**vars(best[rule]), "tokens_per_s": round(rate, 1)},
                    over_one_k=faster(rate, rates[FIXED]),
                    over_schedule=faster(rate, rates[SCHEDULE]),
                    below_informed=faster(informed, rate),
                    below_bound=faster(max(rates.values()), rate),
                )
            )
    return rows


def report(config: Config, found: Found, profile: Document) -> Report:
    """Return the report. profile : the batch profile of the CPU"""
    rows = compared_rows(found.rows)
    servers, trace = [server["name"] for server in config["servers"]], config["traces"][0]
    shown = [
        row
        for row in rows
        if row.trace == trace and row.rule == ADAPTIVE and row.batch in SAID and row.server in servers[:2]
    ]
    return Report(
        question="Should an engine choose draft lengths itself, up to which K, and what could it gain?",
        answer=f"{answer(rows, servers[0], trace)} {traffic_text(found, config['traffic']['window'])}",
        figure=line_panels(
            {server: lines(rows, server, trace) for server in servers},
            ("batch", "% faster than the schedule"),
            "self_tuning",
            level=0.0,
            log_x=True,
            rows=2,
        ),
        figure_name="self_tuning",
        caption=f"Tokens per second against a schedule of K by batch, with the acceptance of {trace}",
        columns=[
            Column("server", "server"),
            Column("batch", "batch"),
            Column("best ceiling K", "k"),
            Column("gain over one K, %", "over_one_k", SIGNED),
            Column("gain over schedule, %", "over_schedule", SIGNED),
            Column("gap to best non-clairvoyant rule, %", "below_informed", SIGNED),
            Column("gap to bound, %", "below_bound", SIGNED),
        ],
        shown=[vars(row) for row in shown],
        table=[vars(row) for row in rows],
        trust=[*proposals(rows, found, servers, trace), *trust(config, found, profile)],
    )


def answer(rows: Sequence[Compared], server: str, trace: str) -> str:
    """Return what adaptive verification gains on a server, and how far the schedule is from the bounds."""
    here = {(row.rule, row.batch): row for row in rows if (row.server, row.trace) == (server, trace)}
    against = listed(here[ADAPTIVE, batch].over_schedule for batch in SAID)
    at_own = listed(here[OWN, batch].over_schedule for batch in SAID)
    best = listed(-here[SCHEDULE, batch].below_informed for batch in SAID)
    bound = listed(-here[SCHEDULE, batch].below_bound for batch in SAID)
    return (
        f"Not with vLLM's defaults: on the {server}, at batches {', '.join(map(str, SAID))}, adaptive verification "
        f"with its best ceiling K is {against} from a schedule of K by batch in tokens per second, and {at_own} if its "
        f"costs are profiled at the served context. The schedule itself is {best} from the best rule that sees the "
        f"drafter's confidences and {bound} from the bound, so nearly all of the remaining gain takes clairvoyance."
    )


def listed(values: Iterable[float]) -> str:
    """Write percentages."""
    return f"{', '.join(f'{value:+.1f}' for value in values)} %"


def traffic_text(found: Found, window: int) -> str:
    """Return how adaptive verification follows a change of traffic. window : of the rates, in steps"""
    of = {(row.other, row.rule): row for row in found.traffic}
    code, none = of["code", ADAPTIVE], of[0.0, ADAPTIVE]
    learned = code.learned
    settled = "It does not settle" if learned is None else f"It settles within {learned + window} steps"
    return (
        f"{settled}, and chat after code is as fast as before ({code.back}). On text of which nothing is accepted it "
        f"verifies {none.verified_1:.2f} tokens a request instead of {none.verified_0:.2f}. When chat returns, a "
        f"fit overshoots: the next {none.steps_2:,} steps are {none.back} from before ({of[0.0, BOUNDED].back} if "
        "fits are bounded)."
    )


def proposals(rows: Sequence[Compared], found: Found, servers: Sequence[str], trace: str) -> list[str]:
    """Return why the rule is slow, and what two changes of the engine would gain."""
    here = {(row.rule, row.batch, row.server): row.tokens_per_s for row in rows if row.trace == trace}

    def over(rule: str, server: str) -> str:
        gains = listed(100 * (here[rule, batch, server] / here[ADAPTIVE, batch, server] - 1) for batch in SAID)
        return f"{gains} ({server})"

    largest = {row.context: row for row in found.contexts if row.context != 8192}
    contexts = ", ".join(
        f"{100 * (row.own_over_8192 - 1):+.0f} % at {context:,} tokens and batch {row.batch}"
        for context, row in largest.items()
    )
    of = {(row.other, row.rule): row for row in found.traffic}
    returned = "; ".join(
        f"where {100 * known:.0f} % is accepted, {of[known, STEP].back} without and {of[known, BOTH].back} with"
        for known in sorted({row.other for row in found.traffic if row.other != "code"})
    )
    return [
        "Why it loses: in the start-up profile every token of a pass is a request with 8,192 cached tokens, "
        "so verifying one more seems to cost as much as reading another KV cache. The profile omits the time of a step "
        "outside its passes. All K tokens are drafted, however few are verified. Profiled at the served context (an "
        f"environment variable) the rule gains {over(OWN, servers[0])}; with ceiling 7, {contexts}.",
        "Proposal 1: time whole steps of batches that verify K + 1 tokens a request, at served contexts. Gain over "
        f"vLLM's rule: {'; '.join(over(STEP, server) for server in servers[:3])}.",
        "Proposal 2, two lines: limit every coefficient to 4, and its change in a fit to 1. After many rejections a "
        "Newton step divides by a weight close to 0, in vLLM's code as well, and the coefficients end far off. Chat "
        f"after such text against before, with whole steps timed: {returned}.",
    ]


def trust(config: Config, found: Found, profile: Document) -> list[str]:
    """Return prompts, costs, traffic and what limits the answer."""
    gpu, asked = config["servers"][0], config["traffic"]
    return [
        f"Prompts: {', '.join(f'{count} of {trace}' for trace, count in found.sequences.items())}, half for tuning, "
        "half served; acceptance is that of these small models. The best ceiling is selected on the served prompts, so "
        "its figure is optimistic. No intervals: differences below about 3 % are not significant.",
        f"Costs of the H100 are estimates for {gpu['target']} from data sheets, without an engine's overheads or with "
        "those of published runs. These charge for every sequence that verifies; newer engines may charge less. "
        f"Requests have {gpu['context']:,} cached tokens, batches stay full, and nothing is prefilled.",
        f"Costs of the CPU are measured: {profile['target']}, {profile['provenance']['device']}, noise floor "
        f"{100 * profile['noise_floor']:.1f} %, load not recorded; vLLM has no adaptive verification there.",
        f"Traffic: batch {asked['batch']}, ceiling {asked['ceiling']}, {asked['requests']} requests of each "
        "text. The text of low acceptance is chat that keeps only a share of its accepted tokens.",
        "The bound is the highest rate of any row, also of the greedy clairvoyant rule and of no speculation.",
    ]


def lines(rows: Sequence[Compared], server: str, trace: str) -> dict[str, Line]:
    """Return by how many percent each rule beats the schedule, by batch."""
    found: dict[str, Line] = {}
    for rule in SHOWN:
        mine = [row for row in rows if (row.rule, row.server, row.trace) == (rule, server, trace)]
        found[rule] = ([row.batch for row in mine], [point(row.over_schedule) for row in mine])
    return found
