"""The tables of every kind of document: leaderboards of policies, of drafters, and validations."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import asdict

from specsim.replaying.forecast import ErrorSummary
from specsim.replaying.rounds import PARTS
from specsim.report.board import RankedBoard, RankedRow
from specsim.report.experiment import DrafterBoard, Validation
from specsim.report.page import heading, macros, percent
from specsim.report.table import (
    DIFFERENCE,
    ERROR,
    IDENTICAL,
    PAGE,
    SHARE,
    SPEEDUP,
    TERMINAL,
    THREE,
    TWO,
    Colored,
    Column,
    Format,
    Row,
    as_html,
    as_number,
    behind_leader,
    plain,
    ranked,
)

PREDICTED = Colored("p", "predicted", " speedup")
OWN_ROUNDS = Colored("p", "from the run's\nown rounds")
MEASURED = Colored("m", "measured", " speedup")
YES = plain(lambda value: "yes" if value else "no")


def _board_policy(row: Row) -> str:
    return macros().policy(row["label"], row.get("settings"), row.get("tied_with_leader"))


def token_s(row: RankedRow) -> float:
    """Seconds per output token of a leaderboard's row."""
    parts = row.token_seconds
    return parts.draft + parts.policy + parts.verify + parts.other


def _verified_html(row: Row) -> str:
    q = row["draft_tokens_quantiles"]
    return macros().with_range(f"{row['mean_draft_tokens']:.2f}", q["0.1"], q["0.9"])


def _verified_text(row: Row) -> str:
    q = row["draft_tokens_quantiles"]
    return f"{row['mean_draft_tokens']:.2f} ({q['0.1']}-{q['0.9']})"


def slower_than_leader(row: Row) -> str | None:
    """Tell whether a row is significantly slower than the leader; None for rows that are not compared."""
    if row.get("tied_with_leader"):
        return "not significant"
    return "yes" if behind_leader(row) else None


BOARD_COLUMNS = (
    Column("", "place", only=PAGE),
    Column("policy", None, Format(lambda row: str(row["label"]), _board_policy)),
    Column("speedup [95 %]", "speedup", SPEEDUP, "speedup"),
    Column("behind", behind_leader, DIFFERENCE, "to the leader"),
    Column("slower?", slower_than_leader, only=TERMINAL),
    Column("v_d", "v_d", THREE),
    Column("r_d", "r_d", THREE, only=PAGE),
    Column("tau", "tau", TWO),
    Column(
        "verified\ntokens",
        lambda row: row if "mean_draft_tokens" in row else None,
        Format(_verified_text, _verified_html),
        only=PAGE,
    ),
    Column("gap to oracle", "oracle_regret", SHARE, "gap to\noracle"),
    Column("gap to learned rule", lambda row: row.get("learned_rule_gap"), SHARE, "gap to\nlearned rule", only=PAGE),
    Column("tokens/s", lambda row: 1 / row["token_s"] if "token_s" in row else None, TWO, only=PAGE),
    Column("ms/token", lambda row: 1e3 * row["token_s"] if "token_s" in row else None, TWO, only=PAGE),
    Column("on tuning part", "train_speedup", THREE, "on tuning\npart", only=PAGE),
    Column("seeds", "seeds", only=PAGE),
    Column("settings", "settings", only=TERMINAL),
)


def board_rows(board: RankedBoard) -> list[Row]:
    """Rows of `BOARD_COLUMNS`: the oracle, then the policies with the baseline among them."""
    oracle = {"label": f"oracle of {board.oracle_of}", "speedup": board.oracle, "oracle_regret": 0.0}
    references: list[Row] = [{**oracle, "place": "", "row_class": "oracle"}]
    if board.learned_rule_speedup:
        gaps = {"learned_rule_gap": 0.0, "oracle_regret": board.oracle / board.learned_rule_speedup - 1}
        rule = {"label": "rule learned from the same signals", "speedup": board.learned_rule_speedup, **gaps}
        references.append({**rule, "place": "", "row_class": "oracle"})
    baseline = {"label": "autoregressive", "speedup": 1.0, "tau": 1.0}
    rows = [{**asdict(row), "token_s": token_s(row)} for row in board.rows]
    return [*references, *ranked(rows, baseline, "speedup")]


FORECAST = Column("forecast", "forecast", SPEEDUP)
WALL_CLOCK = Column("wall clock", "wall_clock_speedup", Format(lambda value: f"{as_number(value):.3f}", SPEEDUP.html))


def _drafter_policy(row: Row) -> str:
    star = " \u2605" if row["best_of_drafter"] else ""
    return macros().policy(f"{row['form']}{star}", row["settings"], row["tied_with_leader"])


def drafters_columns(*, measured: bool) -> list[Column]:
    """Columns of the ranking. measured : whether the rows were really decoded, too"""
    own = plain(lambda row: row["drafter"] + (" (own target)" if row.get("own_target") else ""))
    policy = Format(lambda row: row["form"] + (" *" if row["best_of_drafter"] else ""), _drafter_policy)
    predicted = Column("predicted speedup", "speedup", SPEEDUP, PREDICTED)
    real = [
        FORECAST,
        Column("measured speedup", "measured", SPEEDUP, MEASURED),
        WALL_CLOCK,
        Column("from own rounds", "speedup", SPEEDUP, OWN_ROUNDS),
        Column("error %", "error_percent", ERROR, "error"),
        Column("rounds identical %", "rounds_identical_percent", IDENTICAL, "rounds\nidentical"),
    ]
    return [
        Column("", "place", only=PAGE),
        Column("drafter", None, own),
        Column("policy", lambda row: row if "form" in row else None, policy),
        *(real if measured else [predicted]),
        Column("behind", behind_leader, DIFFERENCE, "to the leader"),
        Column("slower?", slower_than_leader, only=TERMINAL),
        Column("without loops", lambda row: row.get("without_loops"), SPEEDUP, "without\nloops"),
        Column("tau", "tau", TWO),
        Column("v_d", "v_d", THREE),
        Column("r_d", "r_d", THREE, only=PAGE),
        Column("settings", "settings", only=TERMINAL),
    ]


def drafters_rows(board: DrafterBoard) -> list[Row]:
    """Rows of `drafters_columns`, the baseline among them."""
    baseline = {"drafter": "autoregressive", "speedup": 1.0, "measured": 1.0, "tau": 1.0}
    measured = board.rows[0].measured is not None
    return ranked([row.as_cells() for row in board.rows], baseline, "measured" if measured else "speedup")


DRAFTER_COLUMNS = (
    Column("drafter", "name"),
    Column("kind", "kind"),
    Column("depth", "depth"),
    Column("trees", "trees", YES),
    Column("own target", "own_target", YES),
    Column("s_d / s_t", "step_ratio", THREE),
    Column(
        "first token accepted",
        lambda drafter: 100 * drafter["first_token_accepted_share"],
        plain(percent),
        "first token\naccepted",
    ),
)


def _validated_policy(row: Row) -> str:
    name, _, settings = row["label"].partition("(")
    return macros().with_role(name, settings.removesuffix(")"), row["role"])


def _forecast_error(row: Row) -> float | None:
    forecast = row.get("forecast")
    return None if forecast is None else 100 * (forecast / row["measured"] - 1)


VALIDATION_COLUMNS = (
    Column("policy", None, Format(lambda row: str(row["label"]), _validated_policy)),
    Column("settings", "role", only=TERMINAL),
    FORECAST,
    Column("measured speedup", "measured", SPEEDUP, MEASURED),
    WALL_CLOCK,
    Column("tokens/s", "tokens_per_s", plain(lambda rate: f"{rate:.1f}")),
    Column("ms/token", "ms_per_token", TWO),
    Column("forecast error %", _forecast_error, ERROR, "forecast\nerror"),
    Column("from own rounds", "predicted", SPEEDUP, OWN_ROUNDS, only=PAGE),
    Column("error %", "error_percent", ERROR, "error", only=PAGE),
    Column("rounds identical %", "rounds_identical_percent", IDENTICAL, "rounds\nidentical"),
    Column("output identical %", "output_identical_percent", IDENTICAL, "output\nidentical", only=PAGE),
    Column("v_d", "v_d", THREE, only=PAGE),
    Column("r_d", "r_d", THREE, only=PAGE),
    Column("tau", "tau", TWO),
    Column("overhead", "overhead", TWO, only=PAGE),
    Column("gap to oracle", "oracle_regret", Format(SHARE.text, lambda share: percent(100 * share)), "gap to\noracle"),
)
PERCENT = plain(lambda value: f"{value:.2f}")
SIGNED = plain(lambda value: f"{value:+.2f}")
ERROR_COLUMNS = (
    Column("errors of", "name"),
    Column("text", "text"),
    Column("costs", "costs"),
    Column("median %", "median_abs_percent", PERCENT),
    Column("90th percentile %", "p90_abs_percent", PERCENT),
    Column("largest %", "largest_percent", SIGNED),
    Column("mean %", "mean_percent", SIGNED),
)
ERRORS = {  # key in "errors": what is compared with the measurement, its text, its costs
    "forecast": ("forecast", "tuning prompts", "from before"),
    "forecast_without_probe": ("forecast without the probe", "tuning prompts", "from before, as they were"),
    "text_known": ("replay, text known", "held-out prompts", "from before"),
    "text_known_without_probe": ("the same without the probe", "held-out prompts", "from before, as they were"),
    "costs_known": ("replay, costs known", "tuning prompts", "of this run"),
    "decomposition": ("decomposition", "held-out prompts", "of this run"),
}


def error_rows(errors: Mapping[str, ErrorSummary]) -> list[Row]:
    """Rows of `ERROR_COLUMNS`."""
    return [
        {"name": name, "text": text, "costs": costs, **asdict(errors[key])}
        for key, (name, text, costs) in ERRORS.items()
        if key in errors
    ]


def error_table(errors: Mapping[str, ErrorSummary]) -> list[str]:
    """Render the errors of the forecast and of replays that knew more; nothing if nothing was measured."""
    rows = error_rows(errors)
    return [heading("Errors against the measurement"), as_html("errors", ERROR_COLUMNS, rows)] if rows else []


PART_ERROR = plain(lambda percent: f"{percent:+.2f}")
ERROR_PART_COLUMNS = (
    Column("policy", "label"),
    *(Column(part, part, PART_ERROR) for part in PARTS),
)
DOMAIN_COLUMNS = (
    Column("domain", "name"),
    Column("sequences", "sequences", plain("{:,}".format)),
    Column("output tokens", "output_tokens", plain("{:,}".format)),
    Column("from own rounds", "predicted_speedup_best", THREE, OWN_ROUNDS),
    Column("measured speedup", "measured_speedup_best", THREE, MEASURED),
    Column(
        "error %", lambda row: (row["predicted_speedup_best"] / row["measured_speedup_best"] - 1) * 100, ERROR, "error"
    ),
)


def validation_rows(validation: Validation) -> list[Row]:
    """Rows of `VALIDATION_COLUMNS`, by measured speedup, the baseline among the policies."""
    baseline = {"label": "autoregressive", "role": "baseline", "measured": 1.0, "tau": 1.0, "overhead": 1.0}
    rows = sorted(validation.rows, key=lambda row: -row.measured)
    return ranked([row.as_cells() for row in rows], {**baseline, **asdict(validation.baseline)}, "measured")
