"""The papers' qualitative results as questions to a leaderboard; every answer is a paired difference."""

from __future__ import annotations

from specsim.policy.registry import CHAIN_POLICIES
from specsim.ranking.leaderboard import Board, Row
from specsim.report.markdown import verdict
from specsim.speedup.intervals import Comparison, paired_difference
from studies.words import order_of

TS = ("beta_ts", "cali_ts")
THRESHOLD = ("max_confidence", "adaedl", "p_min", "time_gain", "hugging_face")  # of one number
FIXED, RENEWAL = "fixed_k, tuned", "renewal_stop, fitted"
OTHERS = tuple(name for name in CHAIN_POLICIES if name != "renewal_stop")
QUESTIONS: tuple[tuple[str, str | tuple[str, ...], str | tuple[str, ...]], ...] = (  # rows, or policies at their best
    ("Beta-TS, weak prior, against fixed K, tuned", "beta_ts, weak prior", FIXED),
    ("Beta-TS, strong prior, against fixed K, tuned", "beta_ts, strong prior", FIXED),
    ("Beta-TS, strong prior, against K = 4", "beta_ts, strong prior", "fixed_k, K = 4"),
    ("Beta-TS, tuned prior, against fixed K, tuned", "beta_ts, tuned", FIXED),
    ("Cali-TS against fixed K, tuned", ("cali_ts",), FIXED),
    ("Cali-TS against the best Beta-TS", ("cali_ts",), ("beta_ts",)),
    ("AdaEDL against Max-Confidence, both with lambda moving", "adaedl, dynamic", "max_confidence, dynamic"),
    ("AdaEDL against fixed K, tuned (Base-SPD)", ("adaedl",), FIXED),
    ("Max-Confidence against fixed K, tuned (Base-SPD)", ("max_confidence",), FIXED),
    ("RenewalStop against the best threshold policy", RENEWAL, THRESHOLD),
    ("RenewalStop against the best Thompson sampling", RENEWAL, TS),
    ("RenewalStop against the best of all others", RENEWAL, OTHERS),
)
MOST_LAMBDA = 0.9
RULES = {"fixed_k": "Base-SPD", "max_confidence": "Max-Confidence", "adaedl": "AdaEDL"}  # rising, AdaEDL's table 1


def best(board: Board, *names: str) -> Row | None:
    """Of these policies' rows the one that is best on the tuning sequences, so that the reported do not flatter it."""
    rows = (row for row in board.rows if row.policy.name in names)
    return max(rows, key=lambda row: row.train_speedup, default=None)


def row(board: Board, label: str) -> Row | None:
    return next((row for row in board.rows if row.label == label), None)


def compare(board: Board, a: Row | None, b: Row | None) -> Comparison | None:
    """Speedup of a less speedup of b on the held-out sequences."""
    if a is None or b is None:
        return None
    return paired_difference(board.baseline_s, a.speculative_s, b.speculative_s)


def chosen(board: Board, wanted: str | tuple[str, ...]) -> Row | None:
    """The row of this label, or the best of these policies' rows."""
    return row(board, wanted) if isinstance(wanted, str) else best(board, *wanted)


def questions(board: Board) -> list[tuple[str, str]]:
    """(question, answer) for one board."""
    asked = [(text, chosen(board, a), chosen(board, b)) for text, a, b in QUESTIONS]
    return [(text, verdict(compare(board, a, b))) for text, a, b in asked if a is not None and b is not None]


def rule_order(board: Board) -> str:
    """The rules of AdaEDL's table 1, each in its best form, by rising speedup, and whether that is its order."""
    found = {name: one for name in RULES if (one := best(board, name)) is not None}

    def apart(a: str, b: str) -> bool:
        comparison = compare(board, found[a], found[b])
        return comparison is not None and comparison.significant

    values = {name: one.prediction.speedup.estimate for name, one in found.items()}
    return order_of(values, list(RULES), RULES, apart)


def lambda_loss(board: Board, label: str) -> float | None:
    """Mean loss of speedup, in percent of the best, over the search range of lambda_0 from 0 to 0.9."""
    for sweep in board.sweeps:
        if sweep.label == label and sweep.setting == "lambda0":
            inside = [s for v, s in zip(sweep.values, sweep.speedups, strict=True) if 0 <= v <= MOST_LAMBDA]
            top = max([*sweep.speedups, sweep.at_tuned])
            return 100 * (1 - sum(inside) / len(inside) / top)
    return None
