"""SPACE: the cost of a step by tokens per step and speedup, sums and means, and two printed formulas."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
from scipy.stats import norm

from studies.papers.record import Finding, Verdict, finding, mean_finding, slug
from studies.papers.tables import read_table, recompute, stated

SAMPLING = {"space_1": "greedy", "space_5": "random"}
TARGET_PROBS, CANDIDATE_PROBS = np.array([0.5, 0.5]), np.array([0.9, 0.1])
MOST_MASKS = 8
RUNS = 10  # of table 5


def audit() -> Iterator[Finding]:
    """Yield all findings of this module."""
    yield from step_costs()
    yield from means()
    yield from overall()
    yield copied_row()
    yield from sampled_quality()
    yield from residual()
    yield from mask_rule()


def step_costs() -> Iterator[Finding]:
    """Cost of a step, in plain decoding steps: tokens per step over speedup. Below 1 is impossible."""
    costs: dict[tuple[str, str], list[float]] = {}  # by table and data set
    for table, sampling in SAMPLING.items():
        for row in read_table(table).rows:
            cost, allowed = recompute(lambda a, b: a / b, row["tokens_per_step"], row["speedup"])
            costs.setdefault((table, row["dataset"]), []).append(cost)
            possible, text = allowed.high >= 1, "cost of a step in plain decoding steps"
            if not possible:
                text = f"speedup {row['speedup']} exceeds the {row['tokens_per_step']} tokens per step"
            name, place = f"space.step_cost.{slug(sampling, row['dataset'], row['target'])}", row.place("speedup")
            yield finding(name, cost, "steps", possible, text, place, within=allowed, flaw="F16")
    for (table, dataset), values in costs.items():
        name = f"space.step_cost_mean.{slug(SAMPLING[table], dataset)}"
        yield mean_finding(name, values, "steps", "supports", "mean cost of a step over models", table)


def means() -> Iterator[Finding]:
    """Statements of the text about tables 1 and 3."""
    rows = read_table("space_1").rows
    speedups = [row.number("speedup") for row in rows]
    code = [row.number("speedup") for row in rows if row["dataset"] == "humaneval_x"]
    for name, what, value in (
        ("humaneval_x_speedup_mean", "mean speedup on HumanEval-X", float(np.mean(code))),
        ("humaneval_x_speedup_min", "smallest speedup on HumanEval-X", min(code)),
        ("humaneval_x_speedup_max", "largest speedup on HumanEval-X", max(code)),
        ("speedup_min", "smallest speedup of table 1", min(speedups)),
    ):
        row = stated("space", name)
        agrees, text = row.interval("value").contains(value), f"{what}; the text says {row['value']}"
        yield finding(f"space.{name}", value, "x", agrees, text, "space_1", row.place())
    samples = sum(row.number("samples") for row in read_table("space_3").rows)
    row = stated("space", "training_samples")
    agrees = samples == row.number("value")
    text = f"table 3's samples sum to {samples:.0f}, the text says {row['value']}"
    yield finding("space.training_samples", samples, "samples", agrees, text, "space_3", row.place(), erratum="F19")


def overall() -> Iterator[Finding]:
    """Table 4's overall speedup, compared with the mean of its eight categories."""
    table = read_table("space_4")
    categories = [column for column in table.units if column != "overall"]
    for row in table.rows:
        cells = [row[column] for column in categories]
        mean, allowed = recompute(lambda *speedups: np.mean(speedups), *cells)
        harmonic = float(1 / (1 / np.array(cells, dtype=float)).mean())
        text = (
            f"mean of the eight categories {mean:.3f}, harmonic {harmonic:.3f}; the printed overall is {row['overall']}"
        )
        agrees, end, place = allowed.meets(row.interval("overall")), slug(row["target"]), row.place("overall")
        yield finding(f"space.category_mean.{end}", mean, "x", agrees, text, place, within=allowed, flaw="F18")
        yield finding(f"space.category_harmonic.{end}", harmonic, "x", "cannot decide", text, place)
    row, value = stated("space", "mt_bench_speedup_mean"), float(np.mean([row.number("overall") for row in table.rows]))
    agrees = row.interval("value").contains(value)
    text = f"mean of the printed overall speedups; the text says {row['value']}"
    yield finding("space.mt_bench_speedup_mean", value, "x", agrees, text, "space_4", row.place())


def copied_row() -> Finding:
    """Two models with the same figures."""
    models = ("LLaMA-2-13B", "LLaMA-2-70B")
    small, large = (read_table("space_5").row(target, "humaneval_x") for target in models)
    columns = ("tokens_per_step", "tokens_per_step_spread", "speedup", "speedup_spread")
    same = all(small[column] == large[column] for column in columns)
    greedy = [read_table("space_1").row(target, "humaneval_x")["tokens_per_step"] for target in models]
    text = (
        f"LLaMA-2-13B and -70B print the same tokens per step and speedup, {small['tokens_per_step']} and "
        f"{small['speedup']}; greedy {greedy[0]} and {greedy[1]} tokens"
    )
    places = [row.place("tokens_per_step") for row in (small, large)]
    return finding("space.copied_row", small.number("speedup"), "x", not same, text, *places, erratum="F17")


def deviation(quality: float, spread: float, baseline: float, baseline_spread: float) -> float:
    """Difference of two means over ten runs in standard errors, if the spreads are standard deviations."""
    return abs(quality - baseline) / (np.hypot(spread, baseline_spread) / np.sqrt(RUNS))


def sampled_quality() -> Iterator[Finding]:
    """Is the quality under sampling that of the baseline, as equal text distributions imply?"""
    rows = [row for row in read_table("space_5").rows if row["quality_spread"]]
    limit = float(norm.ppf(1 - 0.05 / (2 * len(rows))))  # 95 % for all rows together
    beyond = 0
    columns = ("quality", "quality_spread", "quality_baseline", "quality_baseline_spread")
    for row in rows:
        value, allowed = recompute(deviation, *(row[column] for column in columns))
        beyond += allowed.low > limit
        verdict: Verdict = "supports" if value <= limit else "contradicts" if allowed.low > limit else "cannot decide"
        text = f"standard errors between quality {row['quality']} and the baseline's {row['quality_baseline']}"
        name, place = f"space.quality_deviation.{slug(row['target'])}", row.place("quality")
        yield finding(name, value, "", verdict, text, place, within=allowed, erratum="C1")
    text = f"of {len(rows)} models differ in quality by more than chance if the spread is a standard deviation"
    yield finding("space.quality_differs", beyond, "models", not beyond, text, "space_5", erratum="C1")


def residual() -> Iterator[Finding]:
    """One token of target (0.5, 0.5) and candidates (0.9, 0.1), with two ways to draw the replacement."""
    accepted = np.minimum(TARGET_PROBS, CANDIDATE_PROBS)
    positive = np.maximum(TARGET_PROBS - CANDIDATE_PROBS, 0)
    for name, replacement, text in (
        ("from_target", TARGET_PROBS, "if the replacement is drawn from Q, as in Algorithm 1"),
        ("from_residual", positive / positive.sum(), "if it is drawn from the positive part of Q - P"),
    ):
        first = float((accepted + (1 - accepted.sum()) * replacement)[0])
        lossless = abs(first - TARGET_PROBS[0]) < 1e-12
        text = f"probability of a token that the target gives 0.5, {text}"
        yield finding(f"space.rejection.{name}", first, "", lossless, text, "space: algorithm 1", erratum="C1")


def mask_rule() -> Iterator[Finding]:
    """Eq. 6's i - j < k between mask tokens, compared with the rule of the text: the same group."""
    default = int(stated("space", "masks")["value"])
    for masks in range(1, MOST_MASKS + 1):
        groups: list[int | None] = []  # of each added token: its group, None for a candidate
        for group in range(masks + 1):
            groups += [None] * bool(group) + [group] * masks
        pairs = [
            (i, j) for i, j in product(range(len(groups)), repeat=2) if i >= j and None not in (groups[i], groups[j])
        ]
        wrong = sum(i - j < masks and groups[i] != groups[j] for i, j in pairs)
        missing = sum(i - j >= masks and groups[i] == groups[j] for i, j in pairs)
        at_k = f"at k = {masks}" + (", the default" if masks == default else "")
        for name, count, unit, agrees, equation, text in (
            ("added_tokens", len(groups), "tokens", len(groups) == masks * (masks + 2), 5, "added tokens, k (k + 2)"),
            ("mask_links", wrong, "links", wrong == 0, 6, f"links between groups that Eq. 6 allows {at_k}"),
            ("mask_links_missing", missing, "links", not missing, 6, f"links in a group that Eq. 6 forbids {at_k}"),
        ):
            full, source = f"space.{name}.k{masks}", f"space: Eq. {equation}"
            yield finding(full, count, unit, agrees, text, source, erratum="C2")
