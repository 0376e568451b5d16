"""The claims that this repository makes of itself, which pytest collects from claims/, none of them too loose."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from specsim.claims.check import check
from specsim.claims.claim import Claim, Statement
from specsim.claims.files import claim_files, read_claims

ROOT = Path(__file__).parents[3]
TIMED = ROOT / "claims" / "timed"


def kept_files(*, timed: bool) -> list[Path]:
    return [path for path in claim_files([ROOT / "claims"]) if (TIMED in path.parents) == timed]


def test_claims_that_need_a_clock_are_of_what_nox_measures() -> None:
    claims = [claim for path in kept_files(timed=True) for claim in read_claims(path)]
    measured = {(claim.home / subject.document).resolve() for claim in claims for subject in claim.subjects}
    (file,) = measured
    assert file == ROOT / "results" / "claims" / "speed.json"
    assert f"--benchmark-json={file.relative_to(ROOT)}" in (ROOT / "noxfile.py").read_text()


@pytest.mark.slow
def test_no_figure_can_move_by_more_than_its_tolerance() -> None:
    """Every expected value and every end of an interval is moved by twice its tolerance and more; all of it drifts."""
    moved = []
    for claim in (claim for path in kept_files(timed=False) for claim in read_claims(path)):
        statement = claim.statement
        if statement.expected is not None:
            moved.append(stating(claim, expected=beyond(statement, statement.expected)))
        if statement.interval is not None:
            low, high = statement.interval
            moved.append(stating(claim, interval=(low, beyond(statement, high))))
            moved.append(stating(claim, interval=(low - (beyond(statement, low) - low), high)))
    assert moved
    assert [claim.name for claim in moved if check(claim).verdict != "drifted"] == []


def stating(claim: Claim, **changes: object) -> Claim:
    """The claim with another statement."""
    return replace(claim, statement=msgspec.structs.replace(claim.statement, **changes))


def beyond(statement: Statement, value: float) -> float:
    """A larger value, beyond the tolerance."""
    return value + 2.1 * (statement.around(value)[1] - value) + 1e-6 * abs(value) + 1e-9
