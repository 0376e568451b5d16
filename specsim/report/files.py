"""`specsim report`: any result files as a page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from specsim.io.errors import InputError
from specsim.io.json import read_json
from specsim.report.advice import KIND as ADVICE
from specsim.report.advice import advice_result
from specsim.report.board import Leaderboard
from specsim.report.doctor import KIND as DOCTOR
from specsim.report.doctor import Checkup, doctor_result
from specsim.report.drafters import drafters_result
from specsim.report.experiment import DrafterBoard, Validation
from specsim.report.hardware import comparison_result
from specsim.report.leaderboard import leaderboard_result
from specsim.report.page import Result, joined, notes_of, page
from specsim.report.tuning import tuning_result
from specsim.report.validation import validation_result

Render = Callable[[Mapping[str, Any]], Result]
IN_FOLDER = ("validation.json", "leaderboard.json", "comparison.json")
KINDS: dict[str, Render] = {
    "specsim-validation": lambda document: validation_result(
        Validation.from_json(document, "the validation", "validate again"), notes_of(document)
    ),
    "specsim-leaderboard": lambda document: leaderboard_result(
        Leaderboard.from_json(document, "the leaderboard", "rank again"), notes_of(document)
    ),
    "specsim-drafter-leaderboard": lambda document: drafters_result(
        DrafterBoard.from_json(document, "the leaderboard", "give what `realrun board` wrote"), notes_of(document)
    ),
    DOCTOR: lambda document: doctor_result(
        Checkup.from_json(document, "the diagnosis", "give what `specsim doctor --json` printed")
    ),
    ADVICE: advice_result,
    "specsim-cost-comparison": comparison_result,
}
BY_KEY: dict[str, Render] = {  # of documents that name no kind: a key that no other has
    "best_params": tuning_result,
}
MAKE = (
    "give what `realrun validate`, a leaderboard or `specsim cost compare` wrote, or what `specsim advise`, "
    "`tune` or `doctor` of a server print with --json"
)


def render_files(paths: Iterable[Path]) -> str:
    """The page of these files; InputError says which of them is no result."""
    results = [read_result(path) for path in paths]
    return page(results[0] if len(results) == 1 else joined(results))


def read_result(path: Path) -> Result:
    """Read a result file, or the result in a folder."""
    if path.is_dir():
        path = next((path / name for name in IN_FOLDER if (path / name).is_file()), path / IN_FOLDER[0])
    document = read_json(path, f"result {path}", missing=MAKE, invalid="make it again")
    if isinstance(document, dict):
        if render := KINDS.get(str(document.get("kind"))):
            return _rendered(render, document, path)
        for key, by_key in BY_KEY.items():
            if key in document:
                return _rendered(by_key, document, path)
    raise InputError(f"{path} is not a result that a report can show; {MAKE}")


def _rendered(render: Render, document: Mapping[str, Any], path: Path) -> Result:
    try:
        return render(document)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise InputError(
            f"{path} lacks what its report shows ({type(error).__name__}: {error!s:.200}); make it again"
        ) from None
