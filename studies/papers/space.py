"""SPACE: what a step costs by tokens per step and speedup, sums and means, and two formulas as printed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
from scipy.stats import norm

from studies.papers.record import Finding, Verdict, finding, slug
from studies.papers.tables import Interval, Row, image, read_table, stated

SAMPLING = {"space_1": "greedy", "space_5": "random"}
TARGET_PROBS, CANDIDATE_PROBS = (0.5, 0.5), (0.9, 0.1)
MOST_MASKS = 8
RUNS = 10  # of table 5


def audit() -> Iterator[Finding]:
    """All findings of this file."""
    yield from step_costs()
    yield from means()
    yield from overall()
    yield copied_row()
    yield from sampled_quality()
    yield from residual()
    yield from mask_rule()


def step_costs() -> Iterator[Finding]:
    """Tokens per step over speedup: the cost of a step in plain decoding steps, below 1 impossible."""
    by_group: dict[tuple[str, str], list[float]] = {}
    for table, sampling in SAMPLING.items():
        for row in read_table(table).rows:
            cost = row.number("tokens_per_step") / row.number("speedup")
            by_group.setdefault((sampling, row["dataset"]), []).append(cost)
            allowed = image(lambda a, b: a / b, row.interval("tokens_per_step"), row.interval("speedup"))
            possible = allowed.high >= 1
            text = "cost of a step in plain decoding steps"
            if not possible:
                text = f"speedup {row['speedup']} is more than the {row['tokens_per_step']} tokens of a step"
            yield finding(
                f"space.step_cost.{slug(sampling, row['dataset'], row['target'])}",
                cost,
                "steps",
                possible,
                text,
                row.place("speedup"),
                within=allowed,
                erratum="" if possible else "F16",
            )
    for (sampling, dataset), costs in by_group.items():
        table = next(name for name, word in SAMPLING.items() if word == sampling)
        text = "mean cost of a step over models; range over rows"
        within = Interval.over(costs)
        yield finding(
            f"space.step_cost_mean.{slug(sampling, dataset)}",
            float(np.mean(costs)),
            "steps",
            "supports",
            text,
            table,
            within=within,
        )


def means() -> Iterator[Finding]:
    """What the text says of tables 1, 3 and 4."""
    greedy = read_table("space_1").rows
    code = [row.number("speedup") for row in greedy if row["dataset"] == "humaneval_x"]
    everything = [row.number("speedup") for row in greedy]
    for name, what, value in (
        ("humaneval_x_speedup_mean", "mean speedup on HumanEval-X", float(np.mean(code))),
        ("humaneval_x_speedup_min", "least speedup on HumanEval-X", min(code)),
        ("humaneval_x_speedup_max", "largest speedup on HumanEval-X", max(code)),
        ("speedup_min", "least speedup of table 1", min(everything)),
    ):
        row = stated("space", name)
        agrees = row.interval("value").meets(Interval(value, value))
        yield finding(
            f"space.{name}", value, "x", agrees, f"{what}; the text says {row['value']}", "space_1", row.place()
        )
    samples, said = (
        sum(row.number("samples") for row in read_table("space_3").rows),
        stated("space", "training_samples"),
    )
    agrees = samples == said.number("value")
    text = f"table 3's samples sum to {samples:.0f}, the text says {said['value']}"
    yield finding("space.training_samples", samples, "samples", agrees, text, "space_3", said.place(), erratum="F19")


def overall() -> Iterator[Finding]:
    """Table 4's overall speedup beside the mean of its eight categories."""
    table, printed = read_table("space_4"), []
    for row in table.rows:
        categories = [column for column in table.units if column != "overall"]
        values = np.array([row.number(column) for column in categories])
        bounds = [row.interval(column) for column in categories]
        allowed = Interval(
            float(np.mean([each.low for each in bounds])), float(np.mean([each.high for each in bounds]))
        )
        agrees, mean, harmonic = allowed.meets(row.interval("overall")), values.mean(), 1 / (1 / values).mean()
        printed.append(row.number("overall"))
        text = (
            f"mean of the eight categories {mean:.3f}, harmonic {harmonic:.3f}; overall is printed as {row['overall']}"
        )
        verdict: Verdict = "supports" if agrees else "contradicts"
        for what, value, within in (("mean", mean, allowed), ("harmonic", harmonic, None)):
            yield finding(
                f"space.category_{what}.{slug(row['target'])}",
                float(value),
                "x",
                verdict if what == "mean" else "cannot decide",
                text,
                row.place("overall"),
                within=within,
                erratum="F18" if what == "mean" and not agrees else "",
            )
    said, value = stated("space", "mt_bench_speedup_mean"), float(np.mean(printed))
    agrees = said.interval("value").meets(Interval(value, value))
    text = f"mean of the printed overall speedups; the text says {said['value']}"
    yield finding("space.mt_bench_speedup_mean", value, "x", agrees, text, "space_4", said.place())


def copied_row() -> Finding:
    """Two models with the same figures."""
    rows = [read_table("space_5").row(target, "humaneval_x") for target in ("LLaMA-2-13B", "LLaMA-2-70B")]
    columns = ("tokens_per_step", "tokens_per_step_spread", "speedup", "speedup_spread")
    same = all(rows[0][column] == rows[1][column] for column in columns)
    greedy = {row["target"]: row for row in _greedy_code()}
    text = (
        f"LLaMA-2-13B and -70B print the same tokens per step and speedup, {rows[0]['tokens_per_step']} and "
        f"{rows[0]['speedup']}; greedy {greedy['LLaMA-2-13B']['tokens_per_step']} and "
        f"{greedy['LLaMA-2-70B']['tokens_per_step']} tokens"
    )
    places = [row.place("tokens_per_step") for row in rows]
    return finding("space.copied_row", rows[0].number("speedup"), "x", not same, text, *places, erratum="F17")


def _greedy_code() -> list[Row]:
    return [row for row in read_table("space_1").rows if row["dataset"] == "humaneval_x"]


def deviation(quality: float, spread: float, baseline: float, baseline_spread: float) -> float:
    """A difference of two means over ten runs in its standard errors, spreads being standard deviations."""
    return abs(quality - baseline) / (np.hypot(spread, baseline_spread) / np.sqrt(RUNS))


def sampled_quality() -> Iterator[Finding]:
    """Is quality under sampling the baseline's, as the same distribution of texts would make it?"""
    rows = [row for row in read_table("space_5").rows if row["quality_spread"]]
    limit = float(norm.ppf(1 - 0.05 / (2 * len(rows))))  # 95 % for all rows together
    beyond = 0
    for row in rows:
        columns = ("quality", "quality_spread", "quality_baseline", "quality_baseline_spread")
        value = deviation(*(row.number(column) for column in columns))
        allowed = image(deviation, *(row.interval(column) for column in columns))
        beyond += allowed.low > limit
        verdict: Verdict = "contradicts" if allowed.low > limit else "supports" if value <= limit else "cannot decide"
        text = f"standard errors between quality {row['quality']} and the baseline's {row['quality_baseline']}"
        name = f"space.quality_deviation.{slug(row['target'])}"
        yield finding(name, value, "", verdict, text, row.place("quality"), within=allowed, erratum="C1")
    text = f"of {len(rows)} models differ in quality by more than chance, the spread taken as a standard deviation"
    verdict = "contradicts" if beyond else "supports"
    yield finding("space.quality_differs", beyond, "models", verdict, text, "space_5", erratum="C1")


def residual() -> Iterator[Finding]:
    """One token of target (0.5, 0.5) and candidates (0.9, 0.1), with the replacement drawn in both ways."""
    target, candidate = np.array(TARGET_PROBS), np.array(CANDIDATE_PROBS)
    accepted = np.minimum(target, candidate)
    left = np.maximum(target - candidate, 0)
    for name, replacement, text in (
        ("from_target", target, "with the replacement drawn from Q, as Algorithm 1 does"),
        ("from_residual", left / left.sum(), "with it drawn from the positive part of Q - P"),
    ):
        first = float((accepted + (1 - accepted.sum()) * replacement)[0])
        exact = abs(first - target[0]) < 1e-12
        text = f"chance of a token that the target gives 0.5, {text}"
        yield finding(f"space.rejection.{name}", first, "", exact, text, "space: algorithm 1", erratum="C1")


def mask_rule() -> Iterator[Finding]:
    """Eq. 6's i - j < k between mask tokens beside the rule of the text, the same group."""
    said = int(stated("space", "masks")["value"])
    for masks in range(1, MOST_MASKS + 1):
        groups: list[int | None] = []  # of each added token: its group, None for a candidate
        for group in range(masks + 1):
            groups += [None] * bool(group) + [group] * masks
        pairs = [
            (i, j) for i, j in product(range(len(groups)), repeat=2) if i >= j and None not in (groups[i], groups[j])
        ]
        wrong = sum(i - j < masks and groups[i] != groups[j] for i, j in pairs)
        missing = sum(i - j >= masks and groups[i] == groups[j] for i, j in pairs)
        added = "added tokens, k (k + 2)"
        agrees = len(groups) == masks * (masks + 2)
        yield finding(
            f"space.added_tokens.k{masks}", len(groups), "tokens", agrees, added, "space: Eq. 5", erratum="C2"
        )
        text = f"links between groups that Eq. 6 allows at k = {masks}{', the default' if masks == said else ''}"
        yield finding(f"space.mask_links.k{masks}", wrong, "links", wrong == 0, text, "space: Eq. 6", erratum="C2")
        text = f"links within a group that Eq. 6 forbids at k = {masks}"
        yield finding(
            f"space.mask_links_missing.k{masks}", missing, "links", missing == 0, text, "space: Eq. 6", erratum="C2"
        )
