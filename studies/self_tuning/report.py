"""Report on engines that choose draft lengths themselves: their gain over a schedule, and their gap to bounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from specsim.report.table import Column
from studies.common import Config, Document
from studies.figures import Line, line_panels, point
from studies.report import SIGNED, Report

OFF, FIXED, SCHEDULE = "no speculation", "one K", "schedule by batch"
ADAPTIVE, OWN = "adaptive verification", "adaptive, profile at own context"
STEP, BOUNDED, BOTH = "adaptive, whole steps timed", "adaptive, fits bounded", "adaptive, both"
INFORMED, BOUND = "budget fitted to what it serves", "clairvoyant, greedy"
SHOWN = (ADAPTIVE, OWN, STEP, "budget", INFORMED, BOUND)  # in the figure
SAID = (1, 16, 128)  # batches in the table and the answer

Row = Mapping[str, Any]


def faster(rate: float, other: float) -> float:
    """Return by how many percent a rate exceeds another."""
    return round(100 * (rate / other - 1), 2)


def compared_rows(found: Document) -> list[dict[str, Any]]:
    """Return every rule's row with its best ceiling K, and its gains and gaps in percent, by server, trace and batch.

    below_informed, below_bound : by how much the fastest rule exceeds it, without and with the clairvoyant one
    """
    rows = []
    for _, cell in groupby(found["rows"], key=lambda row: (row["server"], row["trace"], row["batch"])):
        here = [*cell]
        best = {row["rule"]: row for row in sorted(here, key=lambda row: float(row["tokens_per_s"]))}
        rates = {rule: row["tokens_per_s"] for rule, row in best.items()}
        informed = max(rate for rule, rate in rates.items() if rule != BOUND)
        for rule in dict.fromkeys(row["rule"] for row in here):
            rate = rates[rule]
            rows.append(
                {
                    **best[rule],
                    "tokens_per_s": round(rate, 1),
                    "over_one_k": faster(rate, rates[FIXED]),
                    "over_schedule": faster(rate, rates[SCHEDULE]),
                    "below_informed": faster(informed, rate),
                    "below_bound": faster(max(rates.values()), rate),
                }
            )
    return rows


def report(config: Config, found: Document, profile: Document) -> Report:
    """Return the report. found : see `studies.self_tuning.run.compared`; profile : the batch profile of the CPU"""
    rows = compared_rows(found)
    servers, trace = [server["name"] for server in config["servers"]], config["traces"][0]
    shown = [
        row
        for row in rows
        if row["trace"] == trace and row["rule"] == ADAPTIVE and row["batch"] in SAID and row["server"] in servers[:2]
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
        shown=shown,
        table=rows,
        trust=[*proposals(rows, found, servers, trace), *trust(config, found, profile)],
    )


def answer(rows: Sequence[Row], server: str, trace: str) -> str:
    """Return what adaptive verification gains on a server, and how far the schedule is from the bounds."""
    here = {(row["rule"], row["batch"]): row for row in rows if (row["server"], row["trace"]) == (server, trace)}
    against = listed(here[ADAPTIVE, batch]["over_schedule"] for batch in SAID)
    at_own = listed(here[OWN, batch]["over_schedule"] for batch in SAID)
    best = listed(-here[SCHEDULE, batch]["below_informed"] for batch in SAID)
    bound = listed(-here[SCHEDULE, batch]["below_bound"] for batch in SAID)
    return (
        f"Not with vLLM's defaults: on the {server}, at batches {', '.join(map(str, SAID))}, adaptive verification "
        f"with its best ceiling K is {against} from a schedule of K by batch in tokens per second, and {at_own} if its "
        f"costs are profiled at the served context. The schedule itself is {best} from the best rule that sees the "
        f"drafter's confidences and {bound} from the bound, so nearly all of the remaining gain takes clairvoyance."
    )


def listed(values: Iterable[float]) -> str:
    """Write percentages."""
    return f"{', '.join(f'{value:+.1f}' for value in values)} %"


def traffic_text(found: Document, window: int) -> str:
    """Return how adaptive verification follows a change of traffic. window : of the rates, in steps"""
    of = {(row["other"], row["rule"]): row for row in found["traffic"]}
    code, none = of["code", ADAPTIVE], of[0.0, ADAPTIVE]
    learned = code["learned"]
    settled = "It does not settle" if learned is None else f"It settles within {learned + window} steps"
    return (
        f"{settled}, and chat after code is as fast as before ({back(code)}). On text of which nothing is accepted it "
        f"verifies {none['verified_1']:.2f} tokens a request instead of {none['verified_0']:.2f}. When chat returns, a "
        f"fit overshoots: the next {none['steps_2']:,} steps are {back(none)} from before ({back(of[0.0, BOUNDED])} if "
        "fits are bounded)."
    )


def back(row: Row) -> str:
    """Write the change of the tokens per second in chat from before the other text to after it."""
    return f"{100 * (row['rate_2'] / row['settled'] - 1):+.1f} %"


def proposals(rows: Sequence[Row], found: Document, servers: Sequence[str], trace: str) -> list[str]:
    """Return why the rule is slow, and what two changes of the engine would gain."""
    here = {(row["rule"], row["batch"], row["server"]): row["tokens_per_s"] for row in rows if row["trace"] == trace}

    def over(rule: str, server: str) -> str:
        gains = listed(100 * (here[rule, batch, server] / here[ADAPTIVE, batch, server] - 1) for batch in SAID)
        return f"{gains} ({server})"

    largest = {row["context"]: row for row in found["contexts"] if row["context"] != 8192}
    contexts = ", ".join(
        f"{100 * (row['own_over_8192'] - 1):+.0f} % at {context:,} tokens and batch {row['batch']}"
        for context, row in largest.items()
    )
    of = {(row["other"], row["rule"]): row for row in found["traffic"]}
    returned = "; ".join(
        f"where {100 * known:.0f} % is accepted, {back(of[known, STEP])} without and {back(of[known, BOTH])} with"
        for known in sorted({row["other"] for row in found["traffic"] if row["other"] != "code"})
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


def trust(config: Config, found: Document, profile: Document) -> list[str]:
    """Return prompts, costs, traffic and what limits the answer."""
    gpu, asked = config["servers"][0], config["traffic"]
    return [
        f"Prompts: {', '.join(f'{count} of {trace}' for trace, count in found['sequences'].items())}, half for tuning, "
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


def lines(rows: Sequence[Row], server: str, trace: str) -> dict[str, Line]:
    """Return by how many percent each rule beats the schedule, by batch."""
    found: dict[str, Line] = {}
    for rule in SHOWN:
        mine = [row for row in rows if (row["rule"], row["server"], row["trace"]) == (rule, server, trace)]
        found[rule] = ([row["batch"] for row in mine], [point(row["over_schedule"]) for row in mine])
    return found
