"""The report of a validation run: a self-contained HTML file, predicted beside measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import asdict

from specsim.io.errors import InputError
from specsim.replaying.intervals import LARGEST_FLOOR_PERCENT, against_baseline
from specsim.report import page
from specsim.report import validation_figures as figures
from specsim.report.documents import (
    DOMAIN_COLUMNS,
    ERROR_PART_COLUMNS,
    VALIDATION_COLUMNS,
    error_table,
    validation_rows,
)
from specsim.report.experiment import Row, Validation
from specsim.report.table import as_html

DEEPENED = (
    "The target has identity blocks added (block expansion): it accepts like the trained model and costs as much as a "
    "model of its depth."
)
DEFINITIONS = {
    "Speedup": "Total baseline seconds over total speculative seconds, both over the held-out sequences. "
    "Decode time only: the prompt's pass is in neither. Both run on the same machine by the same code path.",
    "Interval": "95 % expanded percentile bootstrap over sequences, the independent units; tokens are not. "
    "Below a dozen sequences, Student's t.",
    "Forecast": "The speedup that the replay of the tuning prompts promised at costs from before, written down before "
    "the first held-out token was decoded. Its interval covers other prompts, the noise of the costs and the variation "
    "between runs.",
    "Replay, text known": "The held-out text, replayed at the costs of the forecast: its error is that of the costs.",
    "Replay, costs known": "The tuning text, replayed at the costs of this run: its error is that of the prompts.",
    "Decomposition": "The held-out text, replayed at the costs of this run. It knows what it is compared with, and is "
    "no forecast.",
    "Wall clock": page.WALL_CLOCK,
    "From the run's own rounds": "The policy, replayed on the recorded trace and priced with what rounds cost while "
    "all policies, both baselines and probes of rarer rounds took turns: each round of theirs is a sample of its "
    "parts' costs. It decomposes what was measured, and is no forecast.",
    "Noise floor": "How far from 1 the ratio of the two baselines, which differ by chance alone, may lie by its "
    "interval. A difference between speedups is significant if it is larger and its interval excludes 0.",
    "Error by part": "Seconds predicted less seconds measured, in percent of the policy's measured seconds, so that "
    "the parts sum to the error of its time: positive is a part predicted to take longer than it did.",
    "Error": f"Speedup from the run's own rounds over the measured speedup, {page.MINUS} 1. A positive error is "
    "optimistic.",
    "Rounds identical": "Share of replayed rounds that the real run repeated exactly: same start, same "
    "drafted and same accepted length. A round that asked for more nodes than were recorded may not be.",
    "Output identical": "Share of sequences whose output equals the baseline's, token for token.",
    **page.METRICS,
    "Overhead": "Mean measured time of a round over that of an autoregressive step. Tau over overhead is the measured "
    "speedup (Cai et al. 2024, section 4), but where outputs are longer or shorter than the baseline's.",
    "Gap to oracle": "Gap to the oracle: predicted time beyond that of the fastest policy, one that knows what will be "
    "accepted.",
    "Ladder": "A policy predicted with fewer simplifications from rung to rung. Eq. 14 knows v_d, r_d and "
    "a single ratio s_d / s_t; the cost profile charges what was measured at each context and draft length.",
    "ECE": "Expected calibration error: mean distance between confidence and acceptance over the bins, "
    "weighted by their token counts.",
}


def render_validation(validation: Validation) -> str:
    """Render `validation_result` as a self-contained HTML page; the same document gives the same bytes."""
    return page.page(validation_result(validation, page.notes_of(validation.as_dict())))


def validation_result(validation: Validation, notes: Sequence[str]) -> page.Result:
    """What a page shows of a validation. notes : of its document

    Raises InputError if it has no row.
    """
    if not validation.rows:
        raise InputError("report: the validation result has no rows; validate at least 1 policy")
    rows = sorted(validation.rows, key=lambda row: -row.measured)
    body = (
        *_lead(validation, rows),
        page.heading("Policies, by measured speedup"),
        as_html("policies", VALIDATION_COLUMNS, validation_rows(validation)),
        *map(page.lead, page.wall_clock_text(rows)),
        *error_table(validation.errors),
        *_left_out(validation),
        page.heading("Error of the predicted time by part, %", 3),
        as_html(
            "parts",
            ERROR_PART_COLUMNS,
            ({"label": row.label, **asdict(row.error_parts)} for row in rows if row.error_parts),
        ),
        page.heading("Figures"),
        page.stack(_figures(validation, rows), "grid figures"),
        page.heading("Domains, under the best policy"),
        as_html(
            "domains", DOMAIN_COLUMNS, ({"name": name, **asdict(part)} for name, part in validation.domains.items())
        ),
        page.macros().columns(
            [page.heading("Recording"), page.facts(_recording(validation))],
            [page.heading("Environment"), page.facts(validation.environment.items())],
        ),
        page.heading("Definitions"),
        *page.definitions(DEFINITIONS),
    )
    title = f"{validation.target} with {validation.drafter}"
    return page.Result(_conditions(validation), title, _verdict(validation, rows), body, notes)


def _conditions(validation: Validation) -> str:
    """Name the device, the number type, the batch, the prompts and the date."""
    parts = [
        "Validation of predicted speedups",
        f"{validation.dtype} on {validation.device}",
        "batch 1",
        f"{validation.prompts.count:,} prompts",
        str(validation.environment.get("date", ""))[:10],
    ]
    return " \u00b7 ".join(filter(None, parts))


def _recommended(rows: Sequence[Row], floor_percent: float) -> list[str]:
    """Name the policy with the fewest settings of those near the best measured one; none if none surely gains."""
    if against_baseline(rows[0].measured, floor_percent) != "faster":
        return []
    row = rows[page.simplest((row.measured, len(row.params)) for row in rows)]
    flags = f" Flags: specsim export ENGINE --k {row.params['k']}." if row.policy == "fixed_k" else ""
    return [
        f"Recommended: {row.label}, the simplest policy within {page.NEAR_PERCENT:g} % of the best measured.{flags}"
    ]


def _verdict(validation: Validation, rows: Sequence[Row]) -> str:
    """Say what was fastest and how far predictions were off; first of all, whether the run was too noisy."""
    top, floor_percent = rows[0], validation.noise_floor_percent
    fastest = page.speculation_text(top.label, top.measured, floor_percent)
    error = validation.errors["forecast"].median_abs_percent
    verdict = f"{fastest} Forecasts miss the measured speedups by {error:.1f} % in the median."
    if floor_percent > LARGEST_FLOOR_PERCENT:
        floor = f"{floor_percent:.1f} %"
        verdict = f"The run is too noisy to rank policies: two equal baselines may differ by {floor}. {verdict}"
    return verdict


def _lead(validation: Validation, rows: Sequence[Row]) -> list[str]:
    top, choice, sequences = rows[0], validation.choice, validation.sequences
    text = (
        f"A dense trace of {validation.target} with the drafter {validation.drafter} was recorded on "
        f"{validation.device} in {validation.dtype} under {page.decoding_text(validation.decoding)}; "
        f"policies were tuned on {sequences.tuning:,} sequences and then run for real on "
        f"{sequences.holdout:,} others, {validation.output_tokens:,} output tokens."
    )
    if validation.block_expansion:
        text += f" {DEEPENED}"
    if validation.decoding["mode"] == "rejection":
        text += (
            " Under rejection sampling every real run draws its own text, so forecast and run agree in distribution, "
            "and their rounds cannot be compared one by one."
        )
    identical = [row.rounds_identical_percent for row in rows if row.rounds_identical_percent is not None]
    error = validation.errors["forecast"].median_abs_percent
    boxes = [
        (f"{top.measured:.2f}", f"best measured speedup, {top.label}"),
        (f"{error:.1f} %", f"median absolute error of {len(rows)} forecasts"),
        *([(f"{choice.regret:.2f}", "gap of the forecast's choice to the measured best")] if choice else []),
        (f"{validation.noise_floor_percent:.1f} %", "noise floor (A/A test of the baseline)"),
        (page.percent(min(identical)), "rounds as replayed, in the worst policy")
        if identical
        else ("n.a.", "rounds as replayed: every run of rejection sampling draws its own text"),
    ]
    lines = [
        text,
        *_recommended(rows, validation.noise_floor_percent),
        page.forecast_text(validation.forecast, rows),
        page.state_text(validation.machine_state),
        page.time_text(validation.time),
        *([page.choice_text(choice)] if choice else []),
    ]
    return [*map(page.lead, lines), page.tiles(boxes)]


def _left_out(validation: Validation) -> list[str]:
    if not validation.skipped:
        return []
    return [
        page.heading("Not compared", 3),
        page.facts((left_out.policy, left_out.reason) for left_out in validation.skipped),
    ]


def _figures(validation: Validation, rows: Sequence[Row]) -> list[str]:
    adaptive = figures.best_adaptive(rows)
    line = f"the green line is {adaptive.label} as measured, " if adaptive else ""
    parts = (
        (
            "",
            "Speedup against draft length",
            figures.speedup_against_k(validation.k_curve, rows),
            (
                "Orange points on the blue curve mean that the replay knew the machine's answer for fixed K; "
                f"{line}and bands and bars are 95 % intervals."
            ),
        ),
        (
            "",
            "From the run's own rounds against measured",
            figures.predicted_against_measured(rows),
            (
                "On the diagonal a prediction is exact, above it optimistic; the grey band is an error of at most "
                "5 % and each cross spans both 95 % intervals."
            ),
        ),
        (
            "wide",
            "Prediction error by cost-model fidelity",
            figures.error_ladder(rows),
            (
                "Each line is a policy and each mark a way of predicting it, placed by its signed error; the "
                "measured speedup is the zero line, its 95 % interval the orange bar."
            ),
        ),
        (
            "",
            "Accepted tokens per round",
            figures.accepted_histogram(validation.accepted_histogram),
            (
                "Equal pairs of bars mean that the real run accepted drafts just as the replay said; the numbers "
                "are measured percentages."
            ),
        ),
        (
            "",
            "Is the drafter's confidence calibrated?",
            figures.reliability_diagram(validation.reliability),
            (
                "Points below the diagonal are bins where the drafter was more confident than right; the bars "
                "below count the tokens in each bin."
            ),
        ),
    )
    return [page.figure(*part) for part in parts]


def _recording(validation: Validation) -> Iterable[tuple[str, str]]:
    yield from ((name, getattr(validation, name)) for name in ("target", "drafter", "device", "dtype"))
    yield "decoding", page.decoding_text(validation.decoding)
    yield "prompts", page.prompts_text(validation.prompts)
    yield "machine", page.machine_text(validation)
    yield "measured", page.repeats_text(validation.options.repeats)
    yield "sequences", f"{validation.sequences.tuning:,} for tuning, {validation.sequences.holdout:,} held out"
    yield "output tokens, held out", f"{validation.output_tokens:,}"
    yield "distinct trigrams in the output", f"{100 * validation.distinct_trigram_share:.1f} %"
    yield "first drafted token is the target's", f"{100 * validation.first_token_accepted_share:.1f} %"
