"""Numbers that sentences of the documentation say: `python -m docs.tables` writes them where they stand.

    <!-- value: between runs -->1.7<!-- -->

The owner of a value is a recorded run or a constant of the code. Names with a dot
are figures of the papers' audit with their format:

    <!-- value: eesd.eq14_one_ratio_error:.2f -->1.75<!-- -->
"""

from __future__ import annotations

import csv
import json
import re
import statistics
from collections.abc import Callable

from docs.pages import HOME, ROOT
from realrun.measure.interleaving import TURN_ROUNDS
from realrun.pairs.pair import LAB_DEEP_LAYERS
from specsim.cost.files import read_cost
from specsim.engines.advise import NEAR_PERCENT
from specsim.engines.conventions import CONVENTIONS
from specsim.replaying.intervals import FEW, LARGEST_FLOOR_PERCENT, REPEATS
from studies.measurement.runs import read_runs, spread_percent
from studies.papers.findings import VERDICTS, audit, filled

PLACE = re.compile(r"<!-- value: (?P<name>[^\n]+?) -->(?P<said>.*?)<!-- -->")
PUBLISHED = ROOT / "studies" / "published" / "report.md"
RUNS = ROOT / "studies" / "measurement" / "recorded" / "runs.json"
ENGINES = ROOT / "tests" / "specsim" / "engines"  # what engines were recorded to do


def runs_of_one_commit() -> int:
    """Validations that the deviation between runs was measured on."""
    return sum(map(len, read_runs(RUNS).values()))


def between_runs() -> str:
    """Standard deviation of a speedup between runs of one commit, in percent."""
    return f"{spread_percent(read_runs(RUNS)):.1f}"


def prompts_with_rounds() -> int:
    """Prompts whose rounds vLLM counted by prompt lookup and by suffix decoding, the same."""
    counted = json.loads((ENGINES / "rounds.json").read_text())
    (prompts,) = {len(rounds) for name in ("vllm-ngram", "vllm-suffix") for rounds in counted[name].values()}
    return prompts


def identical_rounds() -> str:
    """Rounds of engines that really ran and are identical in the replay, of all."""
    checks = [json.loads(path.read_text()) for path in (HOME / "recorded" / "engines").glob("*.json")]
    settings = [setting for check in checks for setting in check["settings"]]
    identical, rounds = (sum(setting[key] for setting in settings) for key in ("rounds_identical", "rounds"))
    return f"{identical:,} of {rounds:,}"


def _study_rows(name: str) -> list[dict[str, str]]:
    """Rows of a study's full table."""
    with (ROOT / "studies" / name / "table.csv").open(newline="") as file:
        return [*csv.DictReader(file)]


def _speedups_of_another_gpu() -> str:
    """Median error of speedups on an H200, forecast from an H100's passes, in percent."""
    errors = [abs(float(row["another GPU's passes: error"])) for row in _study_rows("gpu_speedups")]
    return f"{statistics.median(errors):.1f}"


def _held_out(system: str) -> str:
    """Median error, in percent, of speedups predicted for one published system by a fit to all the others."""
    (row,) = [row for row in _study_rows("published") if row["what"] == "speedup" and row["system"] == system]
    return f"{float(row['preset, held-out']):.0f}"


def _range(series: str, part: str, digits: int) -> str:
    """From the least to the largest of some figures of the audit: those of a series whose names end so."""
    findings = audit().findings.items()
    values = [finding.value for name, finding in findings if name.startswith(series) and name.endswith(part)]
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def _alphas() -> str:
    """Rows of EDD's tables whose alpha is tau over depth, of all."""
    (alphas,) = [series for series in audit().series if series["series"] == "edd.alpha"]
    return f"{alphas['supports']} of {sum(alphas[verdict] for verdict in VERDICTS)} rows"


def _drafted_ms() -> str:
    """By the costs fitted to vLLM's published runs with EAGLE."""
    cost = read_cost("vllm-llama3.1-8b-eagle-h100")
    return f"{1e3 * float(cost.draft(2, 0) - cost.draft(1, 0)):.2f}"


def _published(row: str) -> str:
    """Median error of predictions of published runs, in percent, by a row of their report."""
    lines = [line.split(" | ") for line in PUBLISHED.read_text().splitlines() if line.startswith("| ")]
    (cells,) = [line for line in lines if line[0] == f"| {row}"]
    return f"{float(cells[lines[0].index('preset, held-out: median error, %')]):.0f}"


def _published_choices() -> tuple[str, str]:
    """Tasks of published runs in which the predicted K is near the best, of all; and what it loses, in percent."""
    near = re.search(r"within 1 % of the best in (\d+ of \d+) tasks, and loses ([\d.]+) %", PUBLISHED.read_text())
    assert near is not None
    return near[1], near[2]


VALUES: dict[str, Callable[[], object]] = {
    "layers of lab-deep": lambda: LAB_DEEP_LAYERS,
    "rounds of a turn": lambda: TURN_ROUNDS,
    "resamples": lambda: f"{REPEATS:,}",
    "few sequences": lambda: FEW,
    "largest noise floor": lambda: f"{LARGEST_FLOOR_PERCENT:g}",
    "runs of one commit": runs_of_one_commit,
    "between runs": between_runs,
    "identical rounds of engines": identical_rounds,
    "speedups of another GPU": _speedups_of_another_gpu,
    "published EAGLE-3 on vLLM": lambda: _held_out("h100, vllm#20780"),
    "published served token": lambda: _published("TPOT of a server, dense"),
    "published speedup": lambda: _published("speedup of chains, batch 1, dense"),
    "published speedup of experts": lambda: _published("speedup of chains, experts"),
    "published K near the best": lambda: _published_choices()[0],
    "published loss of K": lambda: _published_choices()[1],
    "prompts with rounds of vllm": prompts_with_rounds,
    "ms of a drafted token on vLLM": _drafted_ms,
    "advised K is near": lambda: f"{NEAR_PERCENT:g}",
    "version of vllm": lambda: CONVENTIONS["vllm"].version,
    "version of llamacpp": lambda: CONVENTIONS["llamacpp"].version,
    "version of sglang's trees": lambda: json.loads((ENGINES / "fixtures/sglang_trees.json").read_text())["sglang"],
    "EESD table 8: verification": lambda: _range("eesd.breakdown.", ".verify_ratio", 2),
    "EESD table 8: others": lambda: _range("eesd.breakdown.", ".others", 0),
    "EESD table 8: T_d / T_t": lambda: _range("eesd.breakdown.", ".measured_ratio", 3),
    "EESD by Eq. 14: T_d / T_t": lambda: _range("eesd.cost_ratio.", "_ts", 3),
    "EDD: rows whose alpha is tau over depth": _alphas,
}


def value(name: str) -> str:
    """What a page says where it names this value."""
    return str(VALUES[name]()) if name in VALUES else filled(f"{{{name}}}")


def written(text: str) -> str:
    """A page with its values as their owners have them."""
    return PLACE.sub(lambda match: f"<!-- value: {match['name']} -->{value(match['name'])}<!-- -->", text)
