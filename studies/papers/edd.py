"""EDD and PCT: tau against depth and alpha, and the cost model tau s_t / (s_t + n s_d) with and without overhead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar

from studies.papers.record import Finding, Verdict, finding, slug
from studies.papers.tables import Interval, Row, image, read_table, stated

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
CAPE_NODES = 23  # as on the lab; the paper does not say
CAPPED_VCT_NODES = 43  # 3, then 10 a level


class Drafted(NamedTuple):
    """One row of tables 1 to 3 with the costs of its target's size."""

    row: Row
    target: str
    method: str
    dataset: str

    @property
    def slug(self) -> str:
        return slug(self.target, self.method, self.dataset)

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
        """The stated depth; PCT has none."""
        name = {"PCT": "", "EAGLE-2": "eagle2_depth", "VCT": "vct_depth"}.get(self.method, "chain_draft_tokens")
        return stated("edd", name).number("value") if name else None

    @property
    def passes(self) -> float:
        """Draft passes a round: the depth; one for heads; PCT's mean depth by tau and alpha."""
        if self.method == "MEDUSA-1":
            return 1.0
        return self.depth or self.row.number("tau") / self.row.number("alpha")

    def alpha_allowed(self, depth: float) -> Interval:
        """What tau over this depth can be."""
        return image(lambda tau: tau / depth, self.row.interval("tau"))

    def alpha_agrees(self, depth: float) -> bool:
        return self.alpha_allowed(depth).meets(self.row.interval("alpha"))

    def overhead(self, tau: float, speedup: float, passes: float | None = None) -> float:
        """Milliseconds of a round that neither draft passes nor the target pass explain."""
        draft, target = self.costs
        return tau * target / speedup - target - (passes or self.passes) * draft

    def speedup(self, overhead_ms: float = 0.0) -> float:
        """What the cost model makes of tau."""
        draft, target = self.costs
        return self.row.number("tau") * target / (target + self.passes * draft + overhead_ms)

    def error(self, overhead_ms: float = 0.0) -> float:
        """Its relative error."""
        return self.speedup(overhead_ms) / self.row.number("speedup") - 1


@cache
def drafted() -> tuple[Drafted, ...]:
    """All rows of tables 1 and 2."""
    rows = (*read_table("edd_1").rows, *read_table("edd_2").rows)
    return tuple(Drafted(row, row["target"], row["method"], row["dataset"]) for row in rows)


def audit() -> Iterator[Finding]:
    """All findings of this file."""
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
    for one in drafted():
        row, depth = one.row, one.depth
        tau = row.number("tau")
        if depth is None:
            full, text = f"edd.pct_depth.{slug(one.target, one.dataset)}", "PCT's mean depth, tau over alpha"
            allowed = image(lambda t, a: t / a, row.interval("tau"), row.interval("alpha"))
            yield finding(full, one.passes, "tokens", "supports", text, row.place(), within=allowed, erratum="B1")
            continue
        allowed, agrees = one.alpha_allowed(depth), one.alpha_agrees(depth)
        yield finding(
            f"edd.alpha.{one.slug}",
            tau / depth,
            "",
            agrees,
            f"tau / depth is {row['tau']} / {depth:.0f} = {tau / depth:.3f}; printed alpha {row['alpha']}",
            row.place("alpha"),
            within=allowed,
            erratum="B1" if agrees else "F13",
        )
    for method in METHODS:
        agree = [one.alpha_agrees(depth) for one in drafted() if one.method == method and (depth := one.depth)]
        if agree:
            off = agree.count(False)
            text = f"rows of {len(agree)} whose alpha is not tau / depth"
            tables = ("edd_1", "edd_2")
            yield finding(f"edd.alpha_off.{slug(method)}", off, "rows", off == 0, text, *tables, erratum="B1")
    rates = [(one.row.number("tau") - 1) / 5 for one in drafted() if one.row.table.name == "edd_1"]
    text = "mean of (tau - 1) / depth in table 1, the share of drafted tokens accepted; range over rows"
    within = Interval.over(rates)
    yield finding(
        "edd.accepted_share", float(np.mean(rates)), "", "cannot decide", text, "edd_1", within=within, erratum="B1"
    )


def overheads() -> Iterator[Finding]:
    """What a round takes beside its passes, by method and size."""
    for one in drafted():
        allowed = image(lambda t, s, o=one: o.overhead(t, s), one.row.interval("tau"), one.row.interval("speedup"))
        value = one.overhead(one.row.number("tau"), one.row.number("speedup"))
        text = "time of a round beside draft and target passes"
        yield finding(
            f"edd.overhead.{one.slug}",
            value,
            "ms",
            allowed.high >= 0,
            text,
            one.row.place(),
            within=allowed,
            erratum="B13",
        )
    for method in METHODS:
        for size in SIZES:
            rows = [one for one in drafted() if (one.method, one.size) == (method, size)]
            values = [one.overhead(one.row.number("tau"), one.row.number("speedup")) for one in rows]
            target = rows[0].costs[1]
            for what, unit, scale in (("overhead_mean", "ms", 1.0), ("overhead_share", "%", 100 / target)):
                scaled = [scale * value for value in values]
                text = "mean over rows; range over rows" + ("" if unit == "ms" else ", of a target pass")
                within = Interval.over(scaled)
                full = f"edd.{what}.{slug(method, size)}"
                places = (rows[0].row.table.name, "edd_costs")
                yield finding(
                    full, float(np.mean(scaled)), unit, "supports", text, *places, within=within, erratum="B13"
                )


def without_overhead() -> Iterator[Finding]:
    """The cost model without overhead: it promises too much."""
    for method in METHODS:
        errors = [100 * one.error() for one in drafted() if one.method == method]
        yield finding(
            f"edd.no_overhead_error.{slug(method)}",
            float(np.mean(errors)),
            "%",
            "contradicts",
            "tau s_t / (s_t + n s_d) promises so much more speedup than printed; range over rows",
            "edd_1",
            "edd_2",
            "edd_costs",
            within=Interval.over(errors),
            erratum="B13",
        )


def least(loss: Callable[[float], float], most: float) -> float:
    return float(minimize_scalar(loss, bounds=(0, most), method="bounded", options={"xatol": 1e-9}).x)


def fit_overhead(rows: Sequence[Drafted]) -> float:
    """The one overhead with the least squared relative error."""
    return least(lambda ms: float(sum(one.error(ms) ** 2 for one in rows)), 40.0)


def one_overhead() -> Iterator[Finding]:
    """One overhead for all rows of a size."""
    for size in SIZES:
        for name, methods in GROUPS.items():
            rows = [one for one in drafted() if one.size == size and one.method in methods]
            ms = fit_overhead(rows)
            errors = [100 * abs(one.error(ms)) for one in rows]
            for what, value, unit, text in (
                ("overhead_ms", ms, "ms", "the one overhead a round that fits best"),
                ("overhead_percent", 100 * ms / rows[0].costs[1], "%", "of a target pass is that overhead"),
                ("error", float(np.mean(errors)), "%", "mean error of speedup with it"),
            ):
                full = f"edd.one_overhead.{slug(size, name)}.{what}"
                text = f"{text}; {name}, {len(rows)} rows"
                yield finding(full, value, unit, "supports", text, "edd_1", "edd_2", "edd_costs", erratum="B13")


def per_node() -> Iterator[Finding]:
    """A cost per verified node beside an overhead, on EDD with 7B targets."""
    rows = [one for one in drafted() if one.size == "7B" and one.method in (*GROUPS["edd"], *GROUPS["trees"])]
    share = stated("edd", "pct_share_of_eagle2_nodes").number("value")
    nodes = {"EDD": 5.0, "EAGLE-2": stated("edd", "eagle2_nodes").number("value"), "CAPE": float(CAPE_NODES)}
    nodes["PCT"] = share * nodes["EAGLE-2"]

    def error(fixed_ms: float, node_ms: float, of: dict[str, float]) -> float:
        return float(sum(one.error(fixed_ms + node_ms * of[one.method]) ** 2 for one in rows))

    def mean_error(fixed_ms: float, node_ms: float, of: dict[str, float]) -> float:
        return 100 * float(np.mean([abs(one.error(fixed_ms + node_ms * of[one.method])) for one in rows]))

    fixed = fit_overhead([one for one in drafted() if one.size == "7B"])
    full = {**nodes, "VCT": float(tree_nodes())}
    node = least(lambda ms: error(fixed, ms, full), 1.0)
    mean_node = least(lambda ms: mean_error(fixed, ms, full), 1.0)
    capped = {**nodes, "VCT": float(CAPPED_VCT_NODES)}
    capped_fixed, capped_node = _both(lambda a, b: error(a, b, capped))
    for what, value, unit, text in (
        ("ms", node, "ms", "per verified node with VCT's full tree, beside the overhead of all 7B rows"),
        ("least_mean_ms", mean_node, "ms", "the same by the least mean error in place of least squares"),
        ("error_without", mean_error(fixed, 0.0, full), "%", "mean error with the overhead alone"),
        ("error", mean_error(fixed, node, full), "%", "mean error with both"),
        ("capped_overhead_ms", capped_fixed, "ms", "a round if VCT has 43 nodes, fitted together"),
        ("capped_ms", capped_node, "ms", "per verified node if VCT has 43 nodes"),
        ("capped_error", mean_error(capped_fixed, capped_node, capped), "%", "mean error of those two"),
    ):
        yield finding(
            f"edd.per_node.{what}", value, unit, "cannot decide", text, "edd_1", "edd_2", "edd_costs", erratum="B13"
        )


def _both(loss: Callable[[float, float], float]) -> tuple[float, float]:
    """Overhead and cost per node, each the best for the other."""
    fixed = least(lambda a: loss(a, least(lambda b: loss(a, b), 1.0)), 40.0)
    return fixed, least(lambda b: loss(fixed, b), 1.0)


def tree_nodes() -> int:
    """Nodes of VCT's full tree."""
    width, depth = (int(stated("edd", name)["value"]) for name in ("vct_width", "vct_depth"))
    return sum(width**level for level in range(1, depth + 1))


def full_tree() -> Iterator[Finding]:
    """Could VCT verify its full tree in the time it has?"""
    nodes = tree_nodes()
    yield finding(
        "edd.vct_nodes", nodes, "nodes", "cannot decide", "nodes of width 3 and depth 5", "edd_2", erratum="B11"
    )
    for one in drafted():
        if (one.method, one.dataset) == ("VCT", "mt_bench"):
            draft, target = one.costs
            left = one.row.number("tau") * target / one.row.number("speedup") - one.passes * draft
            least_ms = 1e3 * 2 * WEIGHTS[one.size] * nodes / PEAK_FLOPS
            for what, value, unit, text in (
                ("left", left, "ms", "left for one verification of the full tree"),
                ("matmul", least_ms, "ms", "that its multiplications take at 155 TFLOP/s"),
                ("peak_share", 100 * least_ms / left, "%", "of the peak rate that it would need: not credible"),
            ):
                verdict: Verdict = "contradicts" if what == "peak_share" else "cannot decide"
                full = f"edd.full_tree.{slug(one.target)}.{what}"
                yield finding(full, value, unit, verdict, text, one.row.place(), "edd_costs", erratum="B11")


def nodes_cost_time() -> Iterator[Finding]:
    """CAPE against VCT, of the same depth: fewer nodes, fewer tokens, yet often faster."""
    faster, fewer, extra = 0, 0, []
    pairs = [(one, other) for one in drafted() for other in drafted() if _same_but(one, other, "CAPE", "VCT")]
    for cape, vct in pairs:
        fewer += cape.row.number("tau") < vct.row.number("tau")
        faster += cape.row.number("speedup") >= vct.row.number("speedup") and cape.row.number("tau") < vct.row.number(
            "tau"
        )
        times = [one.row.number("tau") * one.costs[1] / one.row.number("speedup") for one in (vct, cape)]
        extra.append(times[0] - times[1])
    verdict: Verdict = "supports" if fewer == len(pairs) and faster > len(pairs) / 2 else "cannot decide"
    text = (
        f"of {len(pairs)} pairs CAPE accepts less than VCT at the same depth and is as fast or faster: nodes cost time"
    )
    yield finding("edd.cape_against_vct", faster, "rows", verdict, text, "edd_2", erratum="B13")
    text = "a round of VCT takes longer than one of CAPE; range over rows"
    within = Interval.over(extra)
    yield finding(
        "edd.vct_extra_time",
        float(np.mean(extra)),
        "ms",
        "supports",
        text,
        "edd_2",
        "edd_costs",
        within=within,
        erratum="B13",
    )


def _same_but(one: Drafted, other: Drafted, method: str, against: str) -> bool:
    return (one.target, one.dataset, one.method, other.method) == (other.target, other.dataset, method, against)


def text_claims() -> Iterator[Finding]:
    """What the text says of the tables."""
    pct = {(one.target, one.dataset): one for one in drafted() if one.method == "PCT"}
    speedups = [one.row.number("speedup") for one in pct.values()]
    for name, value in (("min", min(speedups)), ("max", max(speedups))):
        row = stated("edd", f"pct_speedup_{name}")
        text = f"{name} of PCT's speedups; the text says {row['value']}"
        yield finding(f"edd.pct_speedup.{name}", value, "x", value == row.number("value"), text, "edd_2", row.place())
    ratios = [
        one.row.number("tau") / other.row.number("tau")
        for one in drafted()
        for other in drafted()
        if _same_but(one, other, "EDD", "VDM")
    ]
    within = Interval.over(ratios)
    text = "mean of EDD's tau over VDM's; range over rows"
    yield finding("edd.tau_over_vdm", float(np.mean(ratios)), "x", "supports", text, "edd_1", within=within)
    for (target, dataset), small in pct.items():
        if target.endswith("-7B"):
            large = pct[target.replace("-7B", "-13B"), dataset]
            gain = large.row.number("speedup") - small.row.number("speedup")
            text = f"PCT's {large.row['speedup']} at 13B less {small.row['speedup']} at 7B; said to gain more"
            places = (small.row.place("speedup"), large.row.place("speedup"))
            full = f"edd.gain_by_size.{slug(target.removesuffix('-7B'), dataset)}"
            yield finding(full, gain, "x", gain > 0, text, *places, erratum="" if gain > 0 else "F15")


def ablation() -> Iterator[Finding]:
    """Table 3's rows against its costs."""
    table = read_table("edd_3")
    full = read_table("edd_2").row("LLaMA2-Chat-7B", "PCT", "mt_bench")
    same = all(table.rows[0][column] == full[column] for column in table.units)
    text = "table 3's first row is table 2's"
    yield finding(
        "edd.ablation_full_row", table.rows[0].number("speedup"), "x", same, text, table.rows[0].place(), full.place()
    )
    for row in table.rows:
        one = Drafted(row, "LLaMA2-Chat-7B", "PCT", "mt_bench")
        columns = [row.interval(column) for column in ("tau", "speedup", "alpha")]
        allowed = image(lambda tau, speedup, alpha, o=one: o.overhead(tau, speedup, tau / alpha), *columns)
        value, possible = one.overhead(row.number("tau"), row.number("speedup")), allowed.high >= 0
        name = slug(row["variant"])
        text = f"depth of {row['variant']}, tau over alpha"
        yield finding(f"edd.ablation_depth.{name}", one.passes, "tokens", "supports", text, row.place())
        text = "time of a round beside draft and target passes"
        text += (
            "" if possible else f": speedup {row['speedup']} is more than tau and the costs allow, {one.speedup():.2f}"
        )
        yield finding(
            f"edd.ablation_overhead.{name}",
            value,
            "ms",
            possible,
            text,
            row.place("speedup"),
            "edd_costs",
            within=allowed,
            erratum="B13" if possible else "F14",
        )
