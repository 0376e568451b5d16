"""No text of a document becomes HTML of a page, whatever it stands in, and no remark of a document is dropped."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from specsim import doctor, leaderboard, tune
from specsim.compare.document import as_document
from specsim.cost.linear import LinearCost, LinearPass
from specsim.policy.chain.fixed_k import FixedK
from specsim.report import figures as result_figures
from specsim.report import hardware_figures, leaderboard_figures, validation_figures
from specsim.report.files import BY_KEY, KINDS
from specsim.report.page import page
from specsim.serving.speedup_map import speedup_map
from specsim.trace.files import write_trace
from tests.specsim.report.test_report import validation_document
from tests.support.commands import call
from tests.support.reference import RampCost, small_trace

STUDIES = Path(__file__).parents[3] / "studies"
HOSTILE = "<script>alert(1)</script>\"'><img src=x>"
NOTES = ["<b>not calibrated</b>", "a warning"]


def recorded(path: Path) -> dict[str, Any]:
    """With two rows, which show all that more do."""
    document: dict[str, Any] = json.loads(path.read_text())
    return {**document, "rows": document["rows"][:2], "skipped": document.get("skipped", [])[:1]}


@cache
def documents() -> list[dict[str, Any]]:
    """One of each kind that a page shows."""
    trace = small_trace()
    costs = LinearCost(LinearPass(0.010, 0.0002), LinearPass(0.001, 0.0001))
    board = leaderboard(trace, RampCost(), policies=["fixed_k"], trials=2)
    with TemporaryDirectory() as folder:
        write_trace(trace, Path(folder, "trace"))
        given = ["cost", "compare", "--trace", Path(folder, "trace"), "--target", "llama-3.1-8b", "--drafter", "eagle"]
        given += ["--gpus", "h100", "--batch", 1, "--policy", "fixed_k", "--trials", 2, "--json"]
        compared = call("specsim", *given)
    claim = {"name": "c", "claimed": "at least 1", "recomputed": None, "order": None, "verdict": "holds",
             "passed": True, "source": "paper"}  # fmt: skip
    return [
        tune(trace, RampCost(), "fixed_k", trials=2).as_dict(),
        as_document([board, board], {"cost": "ramp"}),
        speedup_map(trace, costs, [FixedK(1), FixedK(2)], [1, 8], contexts=[None]).as_dict(),
        json.loads(compared.out),
        {"kind": "specsim-claims", "claims": [claim], "verdicts": {"holds": 1}},
        recorded(STUDIES / "drafters/recorded/board.json"),
        validation_document(),
        doctor(
            STUDIES.parent / "docs/recorded/bench/k12.json", STUDIES.parent / "docs/recorded/bench/k3.json"
        ).as_dict(),
    ]


def shown(document: dict[str, Any]) -> str:
    render = KINDS.get(str(document.get("kind"))) or next(BY_KEY[key] for key in BY_KEY if key in document)
    return page(render(document))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value that is no list or mapping."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))
    else:
        yield path


def put(document: dict[str, Any], path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        document = document[key]
    document[path[-1]] = value


def number_of_tags(text: str) -> int:
    return text.count("<script") + text.count("<img")


@pytest.fixture
def _no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing would take most of the time."""
    for module in (leaderboard_figures, validation_figures, result_figures, hardware_figures):
        for name, function in vars(module).items():
            if getattr(function, "__annotations__", {}).get("return") == "str":
                monkeypatch.setattr(module, name, lambda *given, **options: "<svg></svg>")


def with_hostile_text(document: dict[str, Any]) -> dict[str, Any]:
    changed = copy.deepcopy(document)
    for path in places(document):
        value: Any = document
        for key in path:
            value = value[key]
        if isinstance(value, str) and path[-1] not in ("kind", "mode", "best"):
            put(changed, path, value + HOSTILE)
    named = json.dumps(changed).replace("fixed_k(", json.dumps(f"fixed_k{HOSTILE}(")[1:-1])  # as keys, too
    return dict(json.loads(named))


def test_every_kind_of_page_is_swept() -> None:
    kinds = {str(document.get("kind")) for document in documents()}
    assert set(KINDS) <= kinds and all(any(key in document for document in documents()) for key in BY_KEY)


@pytest.mark.parametrize("number", range(7))
@pytest.mark.filterwarnings("ignore")  # of figures without anything in them
def test_no_text_of_a_document_becomes_html(number: int) -> None:
    """All at once, figures too."""
    document = documents()[number]
    assert number_of_tags(shown(with_hostile_text(document))) == number_of_tags(shown(document))


@pytest.mark.parametrize("number", range(7))
@pytest.mark.usefixtures("_no_figures")
def test_no_text_becomes_html_where_another_value_belongs(number: int) -> None:
    """Values singly, numbers and truths too; in a list a single place."""
    document = documents()[number]
    tags = number_of_tags(shown(document))
    alike = {tuple("#" if isinstance(key, int) else key for key in path): path for path in places(document)}
    refused = 0
    for path in alike.values():
        changed = copy.deepcopy(document)
        put(changed, path, HOSTILE)
        try:
            text = shown(changed)
        except (KeyError, TypeError, IndexError, AttributeError, ValueError, StopIteration):
            refused += 1  # as the command refuses such a file
            continue
        assert number_of_tags(text) == tags, path
    assert refused < len(alike)


@pytest.mark.parametrize("number", range(7))
@pytest.mark.usefixtures("_no_figures")
def test_a_page_shows_every_remark_of_its_document(number: int) -> None:
    document = copy.deepcopy(documents()[number])
    lists = (value for value in document.values() if isinstance(value, list) and value and isinstance(value[0], dict))
    inner = document["holdout"] if "holdout" in document else next(lists)[0]
    document["warnings"], inner["cost_notes"] = NOTES[1:], NOTES[:1]
    inner |= {"label": "cape", "approximate": True, "truncated_rounds": 3, "truncated_share": 0.25, "rounds": 12}
    text = shown(document)
    assert "Note: a warning<" in text and "costs: &lt;b&gt;not calibrated&lt;/b&gt;<" in text
    assert "Note: approximate: " in text and "recorded trees hold: cape: 25.00 %" in text
    assert text.index('class="note"') < text.index("<svg")
