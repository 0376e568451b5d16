"""EDD and PCT: tau against depth and alpha, and the cost model tau s_t / (s_t + n s_d) with and without overhead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar

from studies.papers.record import Finding, Verdict, finding, mean_finding, slug
from studies.papers.tables import Interval, Row, read_table, recompute, stated

METHODS = ("VDM", "MEDUSA-1", "EAGLE", "EDD", "VCT", "CAPE", "EAGLE-2", "PCT")
GROUPS = {
    "all": METHODS,
    "chains": ("VDM", "EAGLE", "EDD"),
    "edd": ("EDD",),
    "trees": ("VCT", "CAPE", "EAGLE-2", "PCT"),
    "pct": ("PCT",),
}
SIZES = ("7B", "13B")
WEIGHTS = {"7B": 6.6e9, "13B": 13e9}
PEAK_FLOPS = 155e12  # of an RTX A6000 in half precision
CAPE_NODES = 23  # as measured in this project's lab; the paper does not say
CAPPED_VCT_NODES = 43  # 3, then 10 a level
TABLES = ("edd_1", "edd_2", "edd_costs")


class Entry(NamedTuple):
    """One row of tables 1 to 3 with the costs of its target's size."""

    row: Row
    target: str
    method: str
    dataset: str

    @property
    def slug(self) -> str:
        return slug(self.target, self.method, self.dataset)

    @property
    def tau(self) -> float:
        return self.row.number("tau")

    @property
    def printed(self) -> float:
        """Printed speedup."""
        return self.row.number("speedup")

    @property
    def size(self) -> str:
        return "13B" if self.target.endswith("13B") else "7B"

    @property
    def costs(self) -> tuple[float, float]:
        """Milliseconds of a draft pass and of a target pass."""
        row = read_table("edd_costs").row(self.size)
        return row.number("draft_ms"), row.number("target_ms")

    @property
    def depth(self) -> float | None:
        """Stated depth; PCT has none."""
        name = {"PCT": "", "EAGLE-2": "eagle2_depth", "VCT": "vct_depth"}.get(self.method, "chain_draft_tokens")
        return stated("edd", name).number("value") if name else None

    @property
    def passes(self) -> float:
        """Draft passes per round: the depth; one for heads; PCT's mean depth, tau over alpha."""
        if self.method == "MEDUSA-1":
            return 1.0
        return self.depth or self.tau / self.row.number("alpha")

    def overhead(self, tau: float, speedup: float, passes: float | None = None) -> float:
        """Milliseconds of a round that neither draft passes nor the target pass explain."""
        draft, target = self.costs
        return tau * target / speedup - target - (passes or self.passes) * draft

    def speedup(self, overhead_ms: float = 0.0) -> float:
        """Speedup by the cost model."""
        draft, target = self.costs
        return self.tau * target / (target + self.passes * draft + overhead_ms)

    def error(self, overhead_ms: float = 0.0) -> float:
        """Relative error of that speedup."""
        return self.speedup(overhead_ms) / self.printed - 1


@cache
def entries() -> tuple[Entry, ...]:
    """All rows of tables 1 and 2."""
    rows = (*read_table("edd_1").rows, *read_table("edd_2").rows)
    return tuple(Entry(row, row["target"], row["method"], row["dataset"]) for row in rows)


def of_size(size: str) -> list[Entry]:
    return [entry for entry in entries() if entry.size == size]


def pairs(method: str, against: str) -> list[tuple[Entry, Entry]]:
    """Rows of both methods on the same target and data set."""
    others = {entry[1:]: entry for entry in entries()}
    return [(e, others[e.target, against, e.dataset]) for e in entries() if e.method == method]


def audit() -> Iterator[Finding]:
    """Yield all findings of this module."""
    yield from depths()
    yield from overheads()
    yield from without_overhead()
    yield from one_overhead()
    yield from per_node()
    yield from full_tree()
    yield from nodes_cost_time()
    yield from text_claims()
    yield from ablation()


def depths() -> Iterator[Finding]:
    """Is alpha tau over depth?"""
    agreeing: dict[str, list[bool]] = {}
    for entry in entries():
        row, depth = entry.row, entry.depth
        if depth is None:
            name, text = f"edd.pct_depth.{slug(entry.target, entry.dataset)}", "PCT's mean depth, tau over alpha"
            value, allowed = recompute(lambda tau, alpha: tau / alpha, row["tau"], row["alpha"])
            yield finding(name, value, "tokens", "supports", text, row.place(), within=allowed, erratum="B1")
            continue
        value, allowed = recompute(lambda tau, depth=depth: tau / depth, row["tau"])
        agrees = allowed.meets(row.interval("alpha"))
        agreeing.setdefault(entry.method, []).append(agrees)
        text = f"tau / depth is {row['tau']} / {depth:.0f} = {value:.3f}; printed alpha {row['alpha']}"
        name, place = f"edd.alpha.{entry.slug}", row.place("alpha")
        yield finding(name, value, "", agrees, text, place, within=allowed, erratum="B1", flaw="F13")
    for method in METHODS:
        if method in agreeing:
            off = agreeing[method].count(False)
            text = f"rows of {len(agreeing[method])} whose alpha is not tau / depth"
            yield finding(f"edd.alpha_off.{slug(method)}", off, "rows", off == 0, text, *TABLES[:2], erratum="B1")
    rates = [(entry.tau - 1) / 5 for entry in entries() if entry.row.table.name == "edd_1"]
    text = "mean of (tau - 1) / depth in table 1, the share of drafted tokens accepted"
    yield mean_finding("edd.accepted_share", rates, "", "cannot decide", text, "edd_1", erratum="B1")


def overheads() -> Iterator[Finding]:
    """Time of a round outside of its passes, by method and size."""
    overhead_ms: dict[tuple[str, str], list[float]] = {}
    for entry in entries():
        value, allowed = recompute(entry.overhead, entry.row["tau"], entry.row["speedup"])
        overhead_ms.setdefault((entry.method, entry.size), []).append(value)
        name, text = f"edd.overhead.{entry.slug}", "time of a round outside of draft and target passes"
        place, possible = entry.row.place(), allowed.high >= 0
        yield finding(name, value, "ms", possible, text, place, within=allowed, erratum="B13")
    for method in METHODS:
        for size in SIZES:
            first = next(entry for entry in of_size(size) if entry.method == method)
            for what, unit, scale, text in (
                ("overhead_mean", "ms", 1.0, "mean over rows"),
                ("overhead_share", "%", 100 / first.costs[1], "share of a target pass, mean over rows"),
            ):
                values = [scale * value for value in overhead_ms[method, size]]
                name, places = f"edd.{what}.{slug(method, size)}", (first.row.table.name, "edd_costs")
                yield mean_finding(name, values, unit, "supports", text, *places, erratum="B13")


def without_overhead() -> Iterator[Finding]:
    """Error of the cost model without overhead, which overestimates."""
    for method in METHODS:
        errors = [100 * entry.error() for entry in entries() if entry.method == method]
        name, text = (
            f"edd.no_overhead_error.{slug(method)}",
            "tau s_t / (s_t + n s_d) exceeds the printed speedup by this much",
        )
        yield mean_finding(name, errors, "%", "contradicts", text, *TABLES, erratum="B13")


def least(loss: Callable[[float], float], most: float) -> float:
    """Argument from 0 to `most` with the smallest loss."""
    return float(minimize_scalar(loss, bounds=(0, most), method="bounded", options={"xatol": 1e-9}).x)


def fit_overhead(group: Sequence[Entry]) -> float:
    """Overhead with the smallest squared relative error over these rows, in milliseconds."""
    return least(lambda ms: float(sum(entry.error(ms) ** 2 for entry in group)), 40.0)


def one_overhead() -> Iterator[Finding]:
    """One overhead for all rows of a size."""
    for size in SIZES:
        for name, methods in GROUPS.items():
            group = [entry for entry in of_size(size) if entry.method in methods]
            ms = fit_overhead(group)
            error = np.mean([100 * abs(entry.error(ms)) for entry in group])
            for what, value, unit, text in (
                ("overhead_ms", ms, "ms", "the overhead a round that fits best"),
                ("overhead_percent", 100 * ms / group[0].costs[1], "%", "of a target pass is that overhead"),
                ("error", error, "%", "mean error of speedup with it"),
            ):
                full, text = f"edd.one_overhead.{slug(size, name)}.{what}", f"{text}; {name}, {len(group)} rows"
                yield finding(full, value, unit, "supports", text, *TABLES, erratum="B13")


def per_node() -> Iterator[Finding]:
    """A cost per verified node in addition to an overhead, on EDD with 7B targets."""
    group = [entry for entry in of_size("7B") if entry.method in (*GROUPS["edd"], *GROUPS["trees"])]
    share, eagle2 = (stated("edd", name).number("value") for name in ("pct_share_of_eagle2_nodes", "eagle2_nodes"))
    nodes = {"EDD": 5.0, "EAGLE-2": eagle2, "CAPE": float(CAPE_NODES), "PCT": share * eagle2}
    full, capped = {**nodes, "VCT": float(tree_nodes())}, {**nodes, "VCT": float(CAPPED_VCT_NODES)}

    def errors(fixed_ms: float, node_ms: float, nodes: dict[str, float]) -> list[float]:
        return [entry.error(fixed_ms + node_ms * nodes[entry.method]) for entry in group]

    def squares(fixed_ms: float, node_ms: float, nodes: dict[str, float]) -> float:
        return float(sum(error**2 for error in errors(fixed_ms, node_ms, nodes)))

    def mean_error(fixed_ms: float, node_ms: float, nodes: dict[str, float]) -> float:
        return 100 * float(np.mean(np.abs(errors(fixed_ms, node_ms, nodes))))

    fixed = fit_overhead(of_size("7B"))
    node = least(lambda ms: squares(fixed, ms, full), 1.0)
    mean_node = least(lambda ms: mean_error(fixed, ms, full), 1.0)
    # overhead and cost per node, each the best for the other
    capped_fixed = least(lambda a: squares(a, least(lambda b: squares(a, b, capped), 1.0), capped), 40.0)
    capped_node = least(lambda b: squares(capped_fixed, b, capped), 1.0)
    for what, value, unit, text in (
        ("ms", node, "ms", "per verified node with VCT's full tree, plus the overhead of all 7B rows"),
        ("least_mean_ms", mean_node, "ms", "the same by the smallest mean error instead of least squares"),
        ("error_without", mean_error(fixed, 0.0, full), "%", "mean error with the overhead alone"),
        ("error", mean_error(fixed, node, full), "%", "mean error with both"),
        ("capped_overhead_ms", capped_fixed, "ms", "a round if VCT has 43 nodes, fitted together"),
        ("capped_ms", capped_node, "ms", "per verified node if VCT has 43 nodes"),
        ("capped_error", mean_error(capped_fixed, capped_node, capped), "%", "mean error of those two"),
    ):
        yield finding(f"edd.per_node.{what}", value, unit, "cannot decide", text, *TABLES, erratum="B13")


def tree_nodes() -> int:
    """Number of nodes of VCT's full tree."""
    width, depth = (int(stated("edd", name)["value"]) for name in ("vct_width", "vct_depth"))
    return sum(width**level for level in range(1, depth + 1))


def full_tree() -> Iterator[Finding]:
    """Could VCT verify its full tree in the time it has?"""
    nodes = tree_nodes()
    text = "nodes of width 3 and depth 5"
    yield finding("edd.vct_nodes", nodes, "nodes", "cannot decide", text, "edd_2", erratum="B11")
    for entry in entries():
        if (entry.method, entry.dataset) == ("VCT", "mt_bench"):
            draft, target = entry.costs
            left = entry.tau * target / entry.printed - entry.passes * draft
            matmul = 1e3 * 2 * WEIGHTS[entry.size] * nodes / PEAK_FLOPS
            figures: tuple[tuple[str, float, str, Verdict, str], ...] = (
                ("left", left, "ms", "cannot decide", "left for one verification of the full tree"),
                ("matmul", matmul, "ms", "cannot decide", "that its multiplications take at 155 TFLOP/s"),
                ("peak_share", 100 * matmul / left, "%", "contradicts", "of the peak rate needed: not credible"),
            )
            for what, value, unit, verdict, text in figures:
                name, places = f"edd.full_tree.{slug(entry.target)}.{what}", (entry.row.place(), "edd_costs")
                yield finding(name, value, unit, verdict, text, *places, erratum="B11")


def nodes_cost_time() -> Iterator[Finding]:
    """CAPE against VCT of the same depth: fewer nodes, fewer tokens, yet often faster."""
    cape_vct = pairs("CAPE", "VCT")
    fewer = [cape.tau < vct.tau for cape, vct in cape_vct]
    faster = sum(cape.printed >= vct.printed and cape.tau < vct.tau for cape, vct in cape_vct)
    verdict: Verdict = "supports" if all(fewer) and faster > len(fewer) / 2 else "cannot decide"
    text = (
        f"of {len(fewer)} pairs CAPE accepts less than VCT at the same depth and is as fast or faster: nodes cost time"
    )
    yield finding("edd.cape_against_vct", faster, "rows", verdict, text, "edd_2", erratum="B13")
    times = [[entry.tau * entry.costs[1] / entry.printed for entry in pair] for pair in cape_vct]
    name, text = "edd.vct_extra_time", "additional time of a round of VCT compared with CAPE"
    extra = [vct - cape for cape, vct in times]
    yield mean_finding(name, extra, "ms", "supports", text, "edd_2", "edd_costs", erratum="B13")


def text_claims() -> Iterator[Finding]:
    """Statements of the text about the tables."""
    pct = {(entry.target, entry.dataset): entry for entry in entries() if entry.method == "PCT"}
    speedups = Interval.over([entry.printed for entry in pct.values()])
    for name, value in (("min", speedups.low), ("max", speedups.high)):
        row = stated("edd", f"pct_speedup_{name}")
        text, agrees = f"{name} of PCT's speedups; the text says {row['value']}", value == row.number("value")
        yield finding(f"edd.pct_speedup.{name}", value, "x", agrees, text, "edd_2", row.place())
    ratios = [edd.tau / vdm.tau for edd, vdm in pairs("EDD", "VDM")]
    yield mean_finding("edd.tau_over_vdm", ratios, "x", "supports", "mean of EDD's tau over VDM's", "edd_1")
    for (target, dataset), small in pct.items():
        if target.endswith("-7B"):
            large = pct[target.replace("-7B", "-13B"), dataset]
            gain = large.printed - small.printed
            text = (
                f"PCT's {large.row['speedup']} at 13B minus {small.row['speedup']} at 7B; the text says it gains more"
            )
            places = (small.row.place("speedup"), large.row.place("speedup"))
            name = f"edd.gain_by_size.{slug(target.removesuffix('-7B'), dataset)}"
            yield finding(name, gain, "x", gain > 0, text, *places, flaw="F15")


def ablation() -> Iterator[Finding]:
    """Table 3's rows, compared with its costs."""
    table = read_table("edd_3")
    first, pct = table.rows[0], read_table("edd_2").row("LLaMA2-Chat-7B", "PCT", "mt_bench")
    same = all(first[column] == pct[column] for column in table.units)
    name, text, places = "edd.ablation_full_row", "table 3's first row is table 2's", (first.place(), pct.place())
    yield finding(name, first.number("speedup"), "x", same, text, *places)
    for row in table.rows:
        entry, name = Entry(row, "LLaMA2-Chat-7B", "PCT", "mt_bench"), slug(row["variant"])
        value, allowed = recompute(
            lambda tau, speedup, alpha, entry=entry: entry.overhead(tau, speedup, tau / alpha),
            *(row[column] for column in ("tau", "speedup", "alpha")),
        )
        possible, text = allowed.high >= 0, f"depth of {row['variant']}, tau over alpha"
        yield finding(f"edd.ablation_depth.{name}", entry.passes, "tokens", "supports", text, row.place())
        text, places = "time of a round outside of draft and target passes", (row.place("speedup"), "edd_costs")
        if not possible:
            text += f": speedup {row['speedup']} exceeds what tau and the costs allow, {entry.speedup():.2f}"
        full = f"edd.ablation_overhead.{name}"
        yield finding(full, value, "ms", possible, text, *places, within=allowed, erratum="B13", flaw="F14")
