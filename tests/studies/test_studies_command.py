"""The studies' own command: reports from recorded runs, or from real ones that are then recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specsim.io.errors import InputError
from specsim.io.files import write_json, write_text
from studies import __main__ as command


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
    with pytest.raises(InputError, match="has no recorded run; run it with --real"):
        command.main(out=tmp_path / "first")
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
    with pytest.raises(InputError, match="there is no study tom; choose of toy"):
        command.main(["toy", "tom"], out=tmp_path)
    assert toy.real_runs == 0
