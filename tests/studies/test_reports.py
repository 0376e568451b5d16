"""What all studies share: reports written again from what was recorded, the command, and comparisons."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specsim.cost.model import ConstantCost
from specsim.io.files import write_json, write_text
from specsim.policy.registry import make_policy
from specsim.replaying.priced import PricedTrace
from specsim.report.table import SPEEDUP, Column
from studies import __main__ as command
from studies import comparisons
from studies.common import parts, with_replays
from studies.figures import COLORS, dots, line_panels
from studies.report import Report, csv_text, error_line, load_line, markdown_table
from tests.support.checks import refusal
from tests.support.tree_traces import tree_trace

WRITTEN = ("report.md", "table.csv")
ESTIMATE = {"estimate": 1.23456789, "low": 1.1, "high": 1.5}


@pytest.mark.parametrize("name", command.STUDIES)
def test_a_shipped_report_is_written_again_from_what_was_recorded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    home = tmp_path / "studies" / name
    shutil.copytree(command.HOME / name, home)
    shipped = {file: (home / file).read_text() for file in WRITTEN}
    for file in WRITTEN:
        (home / file).unlink()
    monkeypatch.setattr(command, "HOME", tmp_path / "studies")
    command.main([name], out=tmp_path / "out")
    assert {file: (home / file).read_text() for file in WRITTEN} == shipped


@pytest.mark.parametrize("name", command.STUDIES)
def test_a_report_has_one_figure_one_short_table_and_a_link_to_all_rows(name: str) -> None:
    text = (command.HOME / name / "report.md").read_text()
    assert len(text.split()) < 700
    assert text.startswith("# ") and text.splitlines()[0].endswith("?")
    figures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert len(figures) == 1 and (command.HOME / name / figures[0]).is_file()
    head, rule, *body = [line for line in text.splitlines() if line.startswith("|")]
    assert len(body) <= 8 and head.count("|") - 1 <= 7 and set(rule) <= {"|", "-"}
    with (command.HOME / name / "table.csv").open() as file:
        lines = [*csv.DictReader(file)]
    assert f"[Full table as CSV](table.csv) ({len(lines)} rows)." in text
    assert (command.HOME / name / "table.csv").stat().st_size < 50_000
    trust = text.partition("## How far to trust this\n")[2]
    assert all(word in trust.lower() for word in ("prompts", "load", "noise floor"))


def test_a_report_shows_part_of_its_table(tmp_path: Path) -> None:
    rows = [{"policy": "a", "speedup": ESTIMATE, "rounds": 12}, {"policy": "b", "speedup": ESTIMATE}]
    report = Report(
        question="Which?",
        answer="a.",
        figure=dots([("a", {"predicted": ESTIMATE, "measured": ESTIMATE})], "dots", "Speedups", "speedup", level=1),
        figure_name="dots",
        caption="Speedups",
        columns=[Column("policy", "policy"), Column("speedup", "speedup", SPEEDUP)],
        shown=rows[:1],
        table=rows,
        trust=["Prompts: two."],
    )
    report.write(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| a | 1.235 [1.100, 1.500] |" in text and "| b |" not in text and "(2 rows)" in text
    assert (tmp_path / "figures" / "dots.svg").read_text().startswith("<svg")
    assert csv_text(rows).splitlines() == [
        "policy,speedup,speedup_low,speedup_high,rounds",
        "a,1.23457,1.1,1.5,12",
        "b,1.23457,1.1,1.5,",
    ]


def test_a_row_has_a_dot_per_estimate_and_only_named_rows_a_label() -> None:
    rows = [(label, {"forecast": ESTIMATE, "text known": ESTIMATE, "own": ESTIMATE}) for label in ("idle", "", "busy")]
    drawn = dots(rows, "n", "title", "error, %", level=0.0)
    assert [drawn.count(f">{text}<") for text in ("forecast", "text known", "own", "idle", "busy")] == [1] * 5
    colors = [drawn.count(f"fill: {color}; stroke: #ffffff") for color in COLORS[:4]]
    assert colors == [len(rows) + 1] * 3 + [0]  # and the legend's


def test_lines_keep_their_color_over_panels() -> None:
    line = ([1.0, 2.0], [ESTIMATE, ESTIMATE])
    drawn = line_panels({"a panel": {"K": line, "tree": line}, "another": {"tree": line}}, ("x", "y"), "n", level=1.0)
    assert drawn.count(">tree<") == 1 and drawn.count(">a panel<") == 1
    assert drawn == line_panels(
        {"a panel": {"K": line, "tree": line}, "another": {"tree": line}}, ("x", "y"), "n", level=1.0
    )


def test_prediction_errors_are_medians_by_fidelity_of_the_costs() -> None:
    rungs = [(1.5, 1.1, 1.0), (None, 1.6, 2.0), (2.2, 2.0, 2.0)]  # Eq. 14 knows no trees
    names = ("eq14", "profile", "measured")
    rows = [{"ladder": dict(zip(names, values, strict=True)), "error_percent": -9.0} for values in rungs]
    assert error_line([{"rows": rows}]) == (
        "Prediction error, median: 30.0 % with Eq. 14, 10.0 % with measured costs (90th percentile 9.0 %)."
    )


def test_load_that_was_not_recorded_is_said_so() -> None:
    busy, unknown = ({"load": {"others_percent": share}} for share in (52.4, None))
    assert load_line({"a": busy, "b": unknown}) == "Load: other processes used 52 % (a), n.a. (b) of the CPUs' time."
    assert load_line({"b": unknown}) == "Load: not recorded."


def test_a_table_ends_with_an_empty_line() -> None:
    assert markdown_table(["a", "b"], [["1", "2"]]) == ["| a | b |", "|---|---|", "| 1 | 2 |", ""]


class Toy:
    """A study that counts its real runs."""

    RECORDED: tuple[str, ...] = ("*/validation.json", "*/trace/*")
    real_runs = 0

    def main(self, out: Path, config: dict[str, int]) -> None:
        done = out / "greedy" / "validation.json"
        if not done.is_file():
            self.real_runs += 1
            write_json({"seed": config["seed"], "run": self.real_runs}, done)
            write_text(out / "greedy" / "trace" / "meta.json", "{}")
            write_text(out / "greedy" / "rounds.parquet", "large")
        write_text(out / "figures" / "speedup.svg", "<svg/>")
        write_text(out / "report.md", f"of {json.loads(done.read_text())}")


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    study = Toy()
    monkeypatch.setattr(command, "HOME", tmp_path / "studies")
    monkeypatch.setattr(command, "STUDIES", ("toy",))
    monkeypatch.setattr(command, "import_module", {"studies.toy.run": study}.__getitem__)
    write_text(tmp_path / "studies" / "toy" / "config.toml", "seed = 3")
    return study


def test_a_real_run_is_recorded_and_its_report_written_from_that_ever_after(toy: Toy, tmp_path: Path) -> None:
    home = tmp_path / "studies" / "toy"
    refusal(lambda: command.main(out=tmp_path / "first"), "has no recorded run; run it with --real")
    command.main(["toy"], real=True, out=tmp_path / "first")
    kept = sorted(path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file())
    assert kept == [
        "config.toml",
        "figures/speedup.svg",
        "recorded/greedy/trace/meta.json",
        "recorded/greedy/validation.json",
        "report.md",
    ]
    (home / "report.md").unlink()
    write_text(home / "figures" / "of-another-day.svg", "<svg/>")
    command.main(out=tmp_path / "second")
    assert toy.real_runs == 1
    assert (home / "report.md").read_text() == "of {'seed': 3, 'run': 1}"
    assert (home / "recorded" / "greedy" / "validation.json").read_text() == '{"seed":3,"run":1}\n'
    assert [path.name for path in (home / "figures").iterdir()] == ["speedup.svg"]


def test_every_study_says_what_it_needs_of_a_real_run() -> None:
    assert "drafters" in command.STUDIES
    assert [name for name in command.STUDIES if not command.patterns(name)] == ["papers", "published"]


@pytest.mark.parametrize("real", [False, True])
def test_a_study_that_runs_nothing_needs_no_record(toy: Toy, tmp_path: Path, real: bool) -> None:
    toy.RECORDED = ()
    command.main(["toy"], real=real, out=tmp_path / "out")
    assert (tmp_path / "studies" / "toy" / "report.md").read_text() == "of {'seed': 3, 'run': 1}"
    assert not (tmp_path / "studies" / "toy" / command.RECORDED).exists()


def test_a_study_that_does_not_exist_is_named(toy: Toy, tmp_path: Path) -> None:
    refusal(lambda: command.main(["toy", "tom"], out=tmp_path), "there is no study tom; choose of toy")
    assert toy.real_runs == 0


def test_what_was_really_run_differs_by_more_than_the_noise_floor() -> None:
    base = np.linspace(1, 2, 16)
    rows = {name: {"sequence_seconds": base / s, "measured": {"estimate": s}} for name, s in (("a", 1.3), ("b", 1.28))}
    document = {"autoregressive_sequence_seconds": base, "noise_floor_percent": 1.0}
    noisy = {**document, "noise_floor_percent": 2.0}
    assert comparisons.differ_measured(document, rows["a"], rows["b"])
    assert not comparisons.differ_measured(noisy, rows["a"], rows["b"])
    assert comparisons.measured_gap(document, rows["a"], rows["b"], "b") == "0.020 [0.020, 0.020] above b"
    assert comparisons.measured_gap(noisy, rows["b"], rows["a"], "a") == (
        "0.020 [0.020, 0.020] below a, not significant"
    )


def test_the_best_of_several_is_picked_on_the_tuning_prompts() -> None:
    def row(policy: str, label: str, train: float, measured: float) -> dict[str, Any]:
        return {"policy": policy, "label": label, "train_speedup": train, "measured": {"estimate": measured}}

    greedy = [row("fixed_k", "k=3", 1.5, 1.2), row("fixed_k", "k=9", 1.0, 1.9), row("adaedl", "a", 1.1, 1.3)]
    best = comparisons.best_by(greedy, "policy")
    assert {name: row["label"] for name, row in best.items()} == {"fixed_k": "k=3", "adaedl": "a"}
    assert comparisons.first_best([]) is None


def test_rows_get_their_speedup_on_the_tuning_prompts_and_their_truncated_rounds() -> None:
    config = {"tuning_share": 0.5, "seed": 0}
    trace, cost = tree_trace(3, sequences=6, depth=5, width=5, nodes=12), ConstantCost(1.0, 10.0)
    rows = [{"policy": "pct", "params": {"max_depth": 5}}, {"policy": "fixed_k", "params": {"k": 3}}]
    document = with_replays({"rows": rows}, trace, cost, config)
    train, holdout = (PricedTrace(part, cost) for part in parts(trace, config))
    policy = make_policy("pct", {"max_depth": 5})
    assert document["rows"][0]["train_speedup"] == train.replay(policy).speedup != holdout.replay(policy).speedup
    replayed = holdout.replay(policy)
    assert document["rows"][0]["truncated_share"] == replayed.truncated.sum() / replayed.num_rounds.sum() > 0
    assert document["rows"][1]["truncated_share"] == 0 and document["step_ratio"] == pytest.approx(0.1)
