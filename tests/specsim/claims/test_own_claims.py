"""The claims that this repository makes of itself, which pytest collects from claims/: enough, and none too loose."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomlkit

from specsim.claims.check import check_files
from specsim.claims.files import claim_files, read_claims

ROOT = Path(__file__).parents[3]
TIMED = ROOT / "claims" / "timed"


def own_files(*, timed: bool) -> list[Path]:
    return [path for path in claim_files([ROOT / "claims"]) if (TIMED in path.parents) == timed]


def test_there_is_a_claim_for_every_kind_of_figure() -> None:
    claims = [claim for path in own_files(timed=False) for claim in read_claims(path)]
    kinds = {type(subject).__name__ for claim in claims for subject in claim.subjects}
    assert len(claims) >= 60 and {claim.form for claim in claims} == {"value", "ratio", "order"}
    assert kinds == {"ReplaySubject", "RunSubject", "ValueSubject", "FindingSubject"}


def test_claims_that_need_a_clock_are_of_what_nox_measures() -> None:
    claims = [claim for path in own_files(timed=True) for claim in read_claims(path)]
    measured = {(claim.home / subject.document).resolve() for claim in claims for subject in claim.subjects}
    (file,) = measured
    assert file == ROOT / "results" / "claims" / "speed.json"
    assert f"--benchmark-json={file.relative_to(ROOT)}" in (ROOT / "noxfile.py").read_text()


@pytest.mark.slow
def test_no_figure_can_move_by_more_than_its_tolerance(tmp_path: Path) -> None:
    """Every expected value is moved by twice its tolerance and more; what held drifts, all of it."""
    for name in ("specsim", "studies"):
        (tmp_path / name).symlink_to(ROOT / name)
    moved = {}
    for path in own_files(timed=False):
        document = tomlkit.parse(path.read_text())
        defaults = document.get("defaults", {})
        for entry in document["claim"]:
            if "expected" in entry:
                reach = entry.get("tolerance")
                percent = entry.get("tolerance_percent", defaults.get("tolerance_percent"))
                reach = abs(entry["expected"]) * percent / 100 if reach is None else reach
                entry["expected"] += 2.1 * reach + 1e-6 * abs(entry["expected"]) + 1e-9
                moved[path.name, entry["name"]] = "drifted"
        (tmp_path / "claims").mkdir(exist_ok=True)
        (tmp_path / "claims" / path.name).write_text(tomlkit.dumps(document))
    assert len(moved) > 300
    found = {}
    for path in claim_files([tmp_path / "claims"]):
        found.update({(path.name, one.claim.name): one.verdict for one in check_files([path])})
    assert {key: verdict for key, verdict in found.items() if key in moved and verdict != "drifted"} == {}
