"""The report on engines that size drafts themselves: what they gain over a schedule, and what they leave."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from specsim.report.table import Column, plain
from studies.common import Config, Document
from studies.figures import Line, line_panels, point
from studies.report import Report

OFF, FIXED, SCHEDULE = "no speculation", "one K", "schedule by batch"
ADAPTIVE, OWN = "adaptive verification", "adaptive, profile at own context"
STEP, BOUNDED, BOTH = "adaptive, whole steps timed", "adaptive, fits bounded", "adaptive, both"
INFORMED, BOUND = "budget fitted to what it serves", "clairvoyant, greedy"
SHOWN = (ADAPTIVE, OWN, STEP, "budget", INFORMED, BOUND)  # in the figure
SAID = (1, 16, 128)  # batches in the table and the answer

Row = Mapping[str, Any]
SIGNED = plain(lambda value: f"{value:+.1f}")


def compared_rows(found: Document) -> list[dict[str, Any]]:
    """Return the best ceiling of every rule, and how far it is from the rest, in percent.

    below_informed : by how much the best row but the clairvoyant one is faster; below_bound : the best of all
    """
    rows = []
    for _, cell in groupby(found["rows"], key=lambda row: (row["server"], row["trace"], row["batch"])):
        here = [*cell]
        best = {row["rule"]: row for row in sorted(here, key=lambda row: float(row["tokens_per_s"]))}
        rates = {rule: row["tokens_per_s"] for rule, row in best.items()}
        informed = max(rate for rule, rate in rates.items() if rule != BOUND)
        others = {
            "over_one_k": rates[FIXED], "over_schedule": rates[SCHEDULE], "below_informed": informed,
            "below_bound": max(rates.values()),
        }  # fmt: skip
        for rule in dict.fromkeys(row["rule"] for row in here):
            row = best[rule]
            place = {key: row[key] for key in ("server", "trace", "batch", "rule", "k")}
            far = {
                name: round(
                    100 * (row["tokens_per_s"] / rate - 1 if "over" in name else rate / row["tokens_per_s"] - 1), 2
                )
                for name, rate in others.items()
            }
            rows.append({**place, "tokens_per_s": round(row["tokens_per_s"], 1), **far})
    return rows


def report(config: Config, found: Document, profile: Document) -> Report:
    """Return the report. found : see `studies.self_tuning.run.compared`; profile : the batch profile of the CPU"""
    rows, found = compared_rows(found), {**found, "window": config["traffic"]["window"]}
    servers, trace = [server["name"] for server in config["servers"]], config["traces"][0]
    shown = [
        row
        for row in rows
        if row["trace"] == trace and row["rule"] == ADAPTIVE and row["batch"] in SAID and row["server"] in servers[:2]
    ]
    return Report(
        question="Should an engine size its drafts itself, with which ceiling, and what does it leave?",
        answer=answer(rows, servers[0], trace, found),
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
            Column("over one K %", "over_one_k", SIGNED),
            Column("over schedule %", "over_schedule", SIGNED),
            Column("best rule that sees confidence, beyond %", "below_informed", SIGNED),
            Column("bound, beyond %", "below_bound", SIGNED),
        ],
        shown=shown,
        table=rows,
        trust=[*proposals(rows, found, servers, trace), *trust(config, found, profile)],
    )


def answer(rows: Sequence[Row], server: str, trace: str, found: Document) -> str:
    """Return what adaptive verification gains and leaves on the first server."""
    here = {(row["rule"], row["batch"]): row for row in rows if (row["server"], row["trace"]) == (server, trace)}
    against = listed(here[ADAPTIVE, batch]["over_schedule"] for batch in SAID)
    at_own = listed(here[OWN, batch]["over_schedule"] for batch in SAID)
    best = listed(-here[SCHEDULE, batch]["below_informed"] for batch in SAID)
    bound = listed(-here[SCHEDULE, batch]["below_bound"] for batch in SAID)
    return (
        f"Not as it is: on the {server}, at batches {', '.join(map(str, SAID))}, vLLM's adaptive verification with its "
        f"best ceiling changes the rate of a schedule of K by batch by {against}, and by {at_own} with its costs "
        f"profiled at the served context. The schedule itself is {best} from the best rule that sees confidences, and "
        f"{bound} from the bound: nearly all of what is left takes clairvoyance. {traffic_text(found)}"
    )


def listed(values: Iterable[float]) -> str:
    """Write percentages."""
    return f"{', '.join(f'{value:+.1f}' for value in values)} %"


def traffic_text(found: Document) -> str:
    """Return what a change of traffic does."""
    of = {(row["other"], row["rule"]): row for row in found["traffic"]}
    code, none = of["code", ADAPTIVE], of[0.0, ADAPTIVE]
    learned = code["learned"]
    settled = "It does not settle" if learned is None else f"It has learned within {learned + found['window']} steps"
    return (
        f"{settled}, and chat after code is as fast as before ({back(code)}). Through text of which nothing is "
        f"accepted it stops trying ({none['verified_1']:.2f} tokens a request, {none['verified_0']:.2f} before); back "
        f"in chat a fit overshoots, and the next {none['steps_2']:,} steps are {back(none)} against before "
        f"({back(of[0.0, BOUNDED])} if fits are bounded)."
    )


def back(row: Row) -> str:
    """Write the rate in chat after other text, against before."""
    return f"{100 * (row['rate_2'] / row['settled'] - 1):+.1f} %"


def proposals(rows: Sequence[Row], found: Document, servers: Sequence[str], trace: str) -> list[str]:
    """Return what a few lines in the engine would mend, and by how much."""
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
        f"where {100 * known:.0f} % is accepted, {back(of[known, STEP])} without and {back(of[known, BOTH])} with it"
        for known in sorted({row["other"] for row in found["traffic"] if row["other"] != "code"})
    )
    return [
        "Why it loses: at start-up every token of a pass is a request with a cache of its own of 8,192 tokens, so that "
        "verifying one more looks like reading another cache; what a step takes beside its passes is not seen; all K "
        "tokens are drafted whatever is verified. Profiled at the served context (an environment variable) it gains "
        f"{over(OWN, servers[0])}; with ceiling 7, {contexts}.",
        "Proposal 1: time whole steps of batches that verify K + 1 tokens a request, at served contexts. Gain over "
        f"today's rule: {'; '.join(over(STEP, server) for server in servers[:3])}.",
        "Proposal 2, two lines: let no coefficient move by more than 1 in a fit, or beyond 4. After a stretch of "
        "rejections, a Newton step divides by a weight that has vanished, and the coefficients end far off, in vLLM's "
        f"own code, too. Chat after such text with whole steps timed, against before: {returned}.",
    ]


def trust(config: Config, found: Document, profile: Document) -> list[str]:
    """Return how far to trust this."""
    gpu, asked = config["servers"][0], config["traffic"]
    return [
        f"Prompts: {', '.join(f'{count} of {trace}' for trace, count in found['sequences'].items())}, half of them for "
        "what is tuned offline, the others served; acceptance is of these small models. Ceilings: the best of those "
        "tried. No intervals: differences below about 3 % are not significant.",
        f"Costs of the H100 are of {gpu['target']}, from data sheets: of the passes alone, or with the overheads of "
        "engines in published runs, which charge every sequence of a step that verifies; newer ones may charge less. "
        f"At {gpu['context']:,} cached tokens; batches are full, prompts are not read.",
        f"Costs of the CPU are measured: {profile['target']}, {profile['provenance']['device']}, noise floor "
        f"{100 * profile['noise_floor']:.1f} %, load not recorded; vLLM has no adaptive verification there.",
        f"Traffic: batch {asked['batch']}, ceiling {asked['ceiling']}, {asked['requests']} requests a text. Text "
        "of which little is accepted is chat of whose accepted tokens a share remains.",
        "The bound is the most of any row, greedy clairvoyance and no speculation among them.",
    ]


def lines(rows: Sequence[Row], server: str, trace: str) -> dict[str, Line]:
    """Return by how many percent each rule beats the schedule, by batch."""
    found: dict[str, Line] = {}
    for rule in SHOWN:
        mine = [row for row in rows if (row["rule"], row["server"], row["trace"]) == (rule, server, trace)]
        found[rule] = ([row["batch"] for row in mine], [point(row["over_schedule"]) for row in mine])
    return found
