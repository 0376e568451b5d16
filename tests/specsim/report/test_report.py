"""The validation report: a single file, complete, escaped, the same every time, and all or nothing."""

from __future__ import annotations

import copy
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from specsim.io.errors import InputError
from specsim.io.files import write_text
from specsim.replaying.rounds import PARTS
from specsim.report import validation_figures as figures
from specsim.report.documents import VALIDATION_COLUMNS, validation_rows
from specsim.report.page import comparable_text, speculation_text, truncated_text
from specsim.report.table import as_text
from specsim.report.validation import KEYS, render_validation

NAMESPACES = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
FIGURES = ("k-curve", "scatter", "ladder", "histogram", "reliability")
VOID_ELEMENTS = {"meta", "br"}


def estimate(value: float) -> dict[str, float]:
    return {"estimate": value, "low": 0.98 * value, "high": 1.02 * value}


def row(policy: str, label: str, role: str, predicted: float, measured: float, **params: Any) -> dict[str, Any]:
    ladder = {"eq14": 1.2 * measured, "constant": 1.1 * measured, "profile": predicted, "measured": measured}
    return {
        "policy": policy,
        "label": label,
        "params": params,
        "role": role,
        "predicted": estimate(predicted),
        "measured": estimate(measured),
        "error_percent": 100 * (predicted / measured - 1),
        "rounds_identical_percent": 99.996,
        "output_identical_percent": 100.0,
        "ladder": ladder,
        "v_d": 0.6,
        "r_d": 0.5,
        "hm": 0.545,
        "tau": 2.4,
        "oracle_regret": 0.25,
        "forecast": estimate(1.04 * predicted),
        "error_parts": dict.fromkeys(PARTS, 0.5),
        "wall_clock_speedup": estimate(0.9 * measured),
        "wall_clock_differs": measured > 1.4,
        "tokens_per_s": 66.67 * measured,
        "ms_per_token": 15.0 / measured,
    }


@pytest.fixture
def document() -> dict[str, Any]:
    return validation_document()


def validation_document() -> dict[str, Any]:
    return {
        "kind": "specsim-validation",
        "target": "big & wise",
        "drafter": "small",
        "device": "cpu",
        "dtype": "float32",
        "decoding": {"mode": "gumbel", "temperature": 0.8},
        "environment": {"numpy": "2.0", "threads": 2},
        "prompts": {"source": "mine.jsonl", "count": 15, "digest": "0123456789abcdef"},
        "load": {"others_percent": 12.0, "stolen_percent": 0.5},
        "options": {"repeats": 3},
        "baseline": {"tokens_per_s": 66.67, "ms_per_token": 15.0},
        "sequences": {"tuning": 8, "holdout": 7},
        "output_tokens": 4321,
        "distinct_trigram_share": 0.93,
        "first_token_accepted_share": 0.7312,
        "rows": [
            row("fixed_k", "fixed_k(k=1)", "fixed_k", 1.21, 1.20, k=1),
            row("fixed_k", "fixed_k(k=3)", "fixed_k", 0.95, 0.97, k=3),
            row("adaedl", "adaedl(gamma=0.2, lambda0<0.3)", "tuned", 1.52, 1.50, gamma=0.2),
            row("max_confidence", "max_confidence($x^2$)", "default", 1.31, 1.35),
        ],
        "errors": {
            "forecast": {
                "median_abs_percent": 1.68,
                "p90_abs_percent": 4.0,
                "largest_percent": 5.0,
                "mean_percent": 1.0,
            }
        },
        "forecast": {
            "made": "2026-11-01T10:00:00+00:00",
            "sealed": True,
            "sequences": {"tuning": 8, "holdout": 7},
            "costs": {"source": "profile.json"},
        },
        "noise_floor_percent": 1.0,
        "machine_state": {"changes": [{"part": "verify", "factor": 1.02, "significant": True}]},
        "time": {"minutes": 5, "spent_s": 240.0, "prompts": {"given": 15, "recorded": 15, "decoded": 7}},
        "skipped": [],
        "choice": {
            "forecast": "fixed_k(k=1)",
            "forecast_speedup": 1.62,
            "measured_speedup": estimate(1.2),
            "measured": "adaedl(gamma=0.2, lambda0<0.3)",
            "regret": {"estimate": 0.3, "low": 0.1, "high": 0.5},
            "significant": True,
        },
        "k_curve": {"k": [1, 2, 3], "predicted": [estimate(v) for v in (1.21, 1.1, 0.95)]},
        "accepted_histogram": {"label": "adaedl", "predicted": [50, 30, 20, 0], "measured": [49, 31, 20, 0]},
        "reliability": {
            "edges": [0, 0.25, 0.5, 0.75, 1],
            "count": [0, 10, 20, 3000],
            "mean_confidence": [None, 0.4, 0.6, 0.9],
            "accept_rate": [None, 0.3, 0.65, 0.85],
            "ece": 0.0517,
        },
        "domains": {
            "code": {
                "sequences": 7,
                "output_tokens": 4321,
                "predicted_speedup_best": 1.52,
                "measured_speedup_best": 1.5,
            }
        },
    }


class Page(HTMLParser):
    """Collects what the tests ask about, and checks that elements nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.stack: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID_ELEMENTS:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        values = dict(attrs)
        self.ids += [values["id"] or ""] if "id" in values else []
        self.links += [values[key] or "" for key in ("href", "src", "xlink:href") if key in values]

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def test_file_is_self_contained(document: dict[str, Any]) -> None:
    text = render_validation(document)
    page = Page(text)
    assert set(re.findall(r'https?://[^\s"<>)]*', text)) <= NAMESPACES
    assert not {"link", "img", "iframe", "object"} & set(page.names)
    assert page.names.count("script") == 1 and "<script>" in text  # of its own
    assert all(link.startswith("#") for link in page.links)
    assert "@import" not in text
    assert "<?xml" not in text


def test_ids_are_unique_and_references_resolve(document: dict[str, Any]) -> None:
    text = render_validation(document)
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    references = {link[1:] for link in page.links} | set(re.findall(r"url\(#([^)]*)\)", text))
    assert references
    assert references <= set(page.ids)


def test_every_label_and_figure_is_there(document: dict[str, Any]) -> None:
    page = Page(render_validation(document))
    assert page.names.count("svg") == page.names.count("figcaption") == len(FIGURES)
    for name in FIGURES:
        assert any(i.startswith(f"{name}-") for i in page.ids), name
    for r in document["rows"]:
        assert page.text.count(r["label"]) >= 2  # in the table and on the ladder
    for words in (
        "1.500 [1.470, 1.530] times the speed without speculation",
        "1.7 % in the median",
        "Gumbel sampling at temperature 0.8",
        "ECE 0.052",
        "4,321",
        "code",
        "fixed_k(k=1), forecast 1.620, measured 1.200",
        "73.1 %",
    ):
        assert words in page.text


def test_rows_stand_by_measured_speedup_with_the_baseline_among_them(document: dict[str, Any]) -> None:
    body = render_validation(document).split("<tbody>")[1].split("</tbody>")[0]
    first_cells = re.findall(r'<tr class="(\w*)"><td>([^<]*)', body)
    assert [label.partition("(")[0] for _, label in first_cells] == [
        "adaedl",
        "max_confidence",
        "fixed_k",
        "autoregressive",
        "fixed_k",
    ]
    assert [kind for kind, _ in first_cells] == ["best", "", "", "baseline", ""]
    assert "99.99 %" in body  # 99.996 is not all of them


def test_without_adaptive_or_fixed_policies(document: dict[str, Any]) -> None:
    everything = document["rows"]
    document["rows"] = everything[:2]
    assert "green line" not in render_validation(document)
    document["rows"] = everything[2:3]
    assert "green line" in render_validation(document)


def test_all_bins_empty_but_one(document: dict[str, Any]) -> None:
    document["reliability"].update(
        count=[0, 0, 0, 5], mean_confidence=[None, None, None, 0.9], accept_rate=[None, None, None, 1.0]
    )
    text = figures.reliability_diagram(document["reliability"])
    assert "nan" not in text.lower()


def test_writing_is_deterministic_and_leaves_the_input_and_matplotlib_alone(
    tmp_path: Path, document: dict[str, Any]
) -> None:
    before, settings = copy.deepcopy(document), dict(matplotlib.rcParams)
    write_text(tmp_path / "a" / "first.html", render_validation(document))
    with matplotlib.rc_context({"font.size": 30, "text.usetex": True, "svg.fonttype": "path"}):
        write_text(tmp_path / "a" / "second.html", render_validation(document))
    first, second = sorted((tmp_path / "a").iterdir())
    assert (first.name, second.name) == ("first.html", "second.html")
    assert first.read_bytes() == second.read_bytes()
    assert document == before
    assert dict(matplotlib.rcParams) == settings


@pytest.mark.parametrize("where", ["specsim.report.validation_figures.error_ladder", "os.replace"])
def test_nothing_is_left_behind_on_failure(
    tmp_path: Path, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("stop here")

    path = tmp_path / "report.html"
    path.write_text("the old report")
    monkeypatch.setattr(where, fail)
    with pytest.raises(RuntimeError, match="stop here"):
        write_text(path, render_validation(document))
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    assert path.read_text() == "the old report"


@pytest.mark.parametrize("key", KEYS)
def test_missing_key_is_named(tmp_path: Path, document: dict[str, Any], key: str) -> None:
    del document[key]
    with pytest.raises(InputError, match=rf"lacks {key};"):
        write_text(tmp_path / "report.html", render_validation(document))
    assert list(tmp_path.iterdir()) == []


def test_other_kinds_and_empty_results_are_refused(document: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="has no rows"):
        render_validation({**document, "rows": []})
    with pytest.raises(InputError, match="kind is 'specsim-profile'"):
        render_validation({**document, "kind": "specsim-profile"})


def test_marks_say_their_values(document: dict[str, Any]) -> None:
    text = render_validation(document)
    titles = re.findall(r"<(?:use|path) [^>]*><title>([^<]*)</title></(?:use|path)>", text)
    assert "measured, K = 1: 1.200 (95 % interval 1.176 to 1.224)" in titles
    assert "max_confidence($x^2$), Eq. 14: +20.00 %" in titles
    assert sum("rounds accept" in title for title in titles) == 8  # a bar each, of both
    assert 'id="told' not in text and "-told" not in text


def test_the_verdict_comes_first(document: dict[str, Any]) -> None:
    text = render_validation({**document, "noise_floor_percent": 7.0})
    first = text.index('<p class="verdict">')
    assert text[first:].startswith('<p class="verdict">The run is too noisy') and first < text.index('class="lead"')


def test_rates_of_baseline_and_best_stand_in_the_table(document: dict[str, Any]) -> None:
    titles, cells = as_text(VALIDATION_COLUMNS, validation_rows(document))
    table = {row[0]: dict(zip(titles, row, strict=True)) for row in cells}
    assert (table["autoregressive"]["tokens/s"], table["autoregressive"]["ms/token"]) == ("66.7", "15.00")
    best = table["adaedl(gamma=0.2, lambda0<0.3)"]
    assert (best["tokens/s"], best["ms/token"]) == ("100.0", "10.00")
    assert (best["forecast"][:5], best["measured speedup"][:5], best["wall clock"]) == ("1.581", "1.500", "1.350")
    assert "predicted" not in " ".join(titles)


def test_medians_and_sums_that_differ_are_named(document: dict[str, Any]) -> None:
    text = Page(render_validation(document)).text
    remark = "Medians and plain sums differ by more than the noise floor: adaedl(gamma=0.2, lambda0<0.3): 1.350 by"
    assert remark in text and "fixed_k(k=1): 1.080 by" not in text
    assert "median of 3 repeats" in text and "15.00 ms per baseline token" in text


def test_where_every_policy_is_slower_the_verdict_is_not_to_speculate(document: dict[str, Any]) -> None:
    for entry in document["rows"]:
        entry["measured"] = estimate(entry["measured"]["estimate"] / 3)
    text = Page(render_validation(document)).text
    assert "Do not speculate here: the fastest policy, adaedl(gamma=0.2, lambda0<0.3), reaches 0.500" in text
    assert "Fastest:" not in text


@pytest.mark.parametrize(
    ("speedup", "floor_percent", "begins"),
    [
        ((1.2, 1.1, 1.3), 3.0, "Fastest: k, 1.200 [1.100, 1.300]"),
        ((1.2, 0.9, 1.5), 3.0, "No policy is significantly faster than no speculation"),
        ((1.02, 1.01, 1.03), 3.0, "No policy is significantly faster than no speculation"),  # below the noise floor
        ((0.9, 0.7, 1.1), 3.0, "No policy is significantly faster than no speculation"),
        ((0.8, 0.7, 0.9), 3.0, "Do not speculate here: the fastest policy, k, reaches 0.800"),
    ],
)
def test_not_speculating_is_a_candidate(speedup: tuple[float, ...], floor_percent: float, begins: str) -> None:
    given = dict(zip(("estimate", "low", "high"), speedup, strict=True))
    assert speculation_text("k", given, floor_percent).startswith(begins)


def test_rows_that_asked_for_more_than_was_recorded_are_named() -> None:
    rows = [{"label": "eagle2", "truncated_share": 1 / 23}, {"label": "fixed_k", "truncated_share": 0.0}]
    assert truncated_text(rows) == ["rounds that asked for more than the recorded trees hold: eagle2: 4.35 %"]
    assert truncated_text(rows[1:]) == []


def test_runs_whose_baseline_tokens_differ_are_not_comparable() -> None:
    """5 % is the most: 14.0 and 14.7 ms may be compared, 14.0 and 14.8 ms may not."""

    def measured(token_ms: float) -> dict[str, Any]:
        return {"baseline": {"ms_per_token": token_ms}}

    assert comparable_text({"a": measured(14.0), "b": measured(14.7)}) == []
    assert comparable_text({"a": measured(14.0)}) == comparable_text({}) == []
    (line,) = comparable_text({"a": measured(14.0), "b": measured(14.8), "c": measured(38.0)})
    assert "not comparable" in line and "14.0 to 38.0 ms" in line
