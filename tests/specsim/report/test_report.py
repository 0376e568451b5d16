"""The report: a single file, complete, escaped, the same every time, all or nothing; and results of every kind."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib
import pytest

from specsim import doctor, leaderboard, tune
from specsim.compare.document import as_document
from specsim.cost.roofline.published import published_error
from specsim.io.errors import InputError
from specsim.io.files import write_text
from specsim.replaying.intervals import Estimate
from specsim.replaying.rounds import PARTS
from specsim.report import figures as result_figures
from specsim.report import hardware_figures, leaderboard_figures, validation_figures
from specsim.report import validation_figures as figures
from specsim.report.board import BoardOptions
from specsim.report.documents import VALIDATION_COLUMNS, validation_rows
from specsim.report.experiment import Reliability, Validation
from specsim.report.files import BY_KEY, KINDS
from specsim.report.page import comparable_text, page, speculation_text, truncated_text
from specsim.report.table import as_text
from specsim.report.validation import render_validation
from specsim.trace.files import write_trace
from tests.support.commands import assert_refused, call, json_of
from tests.support.reference import RampCost, small_trace

NAMESPACES = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
FIGURES = ("k-curve", "scatter", "ladder", "histogram", "reliability")
VOID_ELEMENTS = {"meta", "br"}


def rendered(document: dict[str, Any]) -> str:
    return render_validation(Validation.from_json(document, "the validation", "validate again"))


def estimate(value: float) -> dict[str, float]:
    return {"estimate": value, "low": 0.98 * value, "high": 1.02 * value}


def row(policy: str, label: str, role: str, predicted: float, measured: float, **params: Any) -> dict[str, Any]:
    ladder = {"eq14": 1.2 * measured, "profile": predicted, "measured": measured}
    return {
        "policy": policy,
        "label": label,
        "params": params,
        "role": role,
        "predicted": estimate(predicted),
        "measured": estimate(measured),
        "error_percent": 100 * (predicted / measured - 1),
        "train_speedup": predicted,
        "truncated_share": 0.0,
        "rounds_identical_percent": 99.996,
        "output_identical_percent": 100.0,
        "ladder": ladder,
        "v_d": 0.6,
        "r_d": 0.5,
        "hm": 0.545,
        "tau": 2.4,
        "oracle_regret": 0.25,
        "forecast": estimate(1.04 * predicted),
        "error_parts": {**dict.fromkeys(PARTS, 0.5), "by_verified": []},
        "sequence_seconds": [1.0] * 7,
        "wall_clock_speedup": estimate(0.9 * measured),
        "wall_clock_differs": measured > 1.4,
        "tokens_per_s": 66.67 * measured,
        "ms_per_token": 15.0 / measured,
    }


PROBE = {
    "kind": "specsim-probe", "version": 1, "target": "big & wise", "drafter": "small", "contexts": [8], "sweeps": 2,
    "mean_s": {"verify": [[0.015]], "draft_step": [[0.001]], "autoregressive": [0.015]},
    "relative_half_width": {"verify": [0.01], "draft_step": 0.01, "autoregressive": 0.01},
}  # fmt: skip


@pytest.fixture
def document() -> dict[str, Any]:
    return validation_document()


def validation_document() -> dict[str, Any]:
    return {
        "kind": "specsim-validation",
        "target": "big & wise",
        "drafter": "small",
        "drafter_kind": "model",
        "drafter_facts": {},
        "block_expansion": None,
        "device": "cpu",
        "dtype": "float32",
        "decoding": {"mode": "gumbel", "temperature": 0.8},
        "environment": {"numpy": "2.0", "threads": 2},
        "prompts": {"source": "mine.jsonl", "count": 15, "digest": "0123456789abcdef"},
        "load": {"others_percent": 12.0, "stolen_percent": 0.5},
        "options": {"trials": 8, "repeats": 3, "tuning_share": 0.5, "seed": 0},
        "autoregressive_sequence_seconds": [1.0] * 7,
        "null_arm": estimate(1.0),
        "median_abs_error_percent": 1.0,
        "p90_abs_error_percent": 2.0,
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
            "target": "big & wise",
            "drafter": "small",
            "baseline_tokens_per_s": 66.0,
            "costs": {"source": "profile.json"},
            "kind": "specsim-forecast",
            "version": 1,
            "deploy": "fixed_k(k=1)",
        },
        "noise_floor_percent": 1.0,
        "machine_state": {
            **dict.fromkeys(("before", "after"), PROBE),
            "changes": [{"part": "verify", "factor": 1.02, "low": 1.01, "high": 1.03, "significant": True}],
        },
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
    text = rendered(document)
    page = Page(text)
    assert set(re.findall(r'https?://[^\s"<>)]*', text)) <= NAMESPACES
    assert not {"link", "img", "iframe", "object"} & set(page.names)
    assert page.names.count("script") == 1 and "<script>" in text  # of its own
    assert all(link.startswith("#") for link in page.links)
    assert "@import" not in text
    assert "<?xml" not in text


def test_ids_are_unique_and_references_resolve(document: dict[str, Any]) -> None:
    text = rendered(document)
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    references = {link[1:] for link in page.links} | set(re.findall(r"url\(#([^)]*)\)", text))
    assert references
    assert references <= set(page.ids)


def test_every_label_and_figure_is_there(document: dict[str, Any]) -> None:
    page = Page(rendered(document))
    assert page.names.count("svg") == page.names.count("figcaption") == len(FIGURES)
    for name in FIGURES:
        assert any(i.startswith(f"{name}-") for i in page.ids), name
    for r in document["rows"]:
        assert page.text.count(r["label"]) >= 2  # in the table and on the ladder
    for words in (
        "1.500 [1.470, 1.530] times the speed without speculation",
        "1.7 % in the median",
        "sampling with shared Gumbel noise at temperature 0.8",
        "ECE 0.052",
        "4,321",
        "code",
        "fixed_k(k=1), forecast 1.620, measured 1.200",
        "73.1 %",
    ):
        assert words in page.text


def test_rows_stand_by_measured_speedup_with_the_baseline_among_them(document: dict[str, Any]) -> None:
    body = rendered(document).split("<tbody>")[1].split("</tbody>")[0]
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
    assert "green line" not in rendered(document)
    document["rows"] = everything[2:3]
    assert "green line" in rendered(document)


def test_all_bins_empty_but_one(document: dict[str, Any]) -> None:
    document["reliability"].update(
        count=[0, 0, 0, 5], mean_confidence=[None, None, None, 0.9], accept_rate=[None, None, None, 1.0]
    )
    text = figures.reliability_diagram(Reliability.from_json(document["reliability"], "bins", ""))
    assert "nan" not in text.lower()


def test_writing_is_deterministic_and_leaves_the_input_and_matplotlib_alone(
    tmp_path: Path, document: dict[str, Any]
) -> None:
    before, settings = copy.deepcopy(document), dict(matplotlib.rcParams)
    write_text(tmp_path / "a" / "first.html", rendered(document))
    with matplotlib.rc_context({"font.size": 30, "text.usetex": True, "svg.fonttype": "path"}):
        write_text(tmp_path / "a" / "second.html", rendered(document))
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
        write_text(path, rendered(document))
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    assert path.read_text() == "the old report"


@pytest.mark.parametrize("key", [key for key in validation_document() if key != "kind"])
def test_missing_key_is_named(tmp_path: Path, document: dict[str, Any], key: str) -> None:
    del document[key]
    with pytest.raises(InputError, match=rf"the validation is malformed .*`{key}`.*; validate again"):
        write_text(tmp_path / "report.html", rendered(document))
    assert list(tmp_path.iterdir()) == []


def test_other_kinds_and_empty_results_are_refused(document: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="has no rows"):
        rendered({**document, "rows": []})
    with pytest.raises(InputError, match="'specsim-profile' - at `\\$.kind`"):
        rendered({**document, "kind": "specsim-profile"})


def test_marks_say_their_values(document: dict[str, Any]) -> None:
    text = rendered(document)
    titles = re.findall(r"<(?:use|path) [^>]*><title>([^<]*)</title></(?:use|path)>", text)
    assert "measured, K = 1: 1.200 (95 % interval 1.176 to 1.224)" in titles
    assert "max_confidence($x^2$), Eq. 14: +20.00 %" in titles
    assert sum("rounds accept" in title for title in titles) == 8  # a bar each, of both
    assert 'id="told' not in text and "-told" not in text


def test_the_verdict_comes_first(document: dict[str, Any]) -> None:
    text = rendered({**document, "noise_floor_percent": 7.0})
    first = text.index('<p class="verdict">')
    assert text[first:].startswith('<p class="verdict">The run is too noisy') and first < text.index('class="lead"')


def test_rates_of_baseline_and_best_stand_in_the_table(document: dict[str, Any]) -> None:
    titles, cells = as_text(
        VALIDATION_COLUMNS, validation_rows(Validation.from_json(document, "the validation", "validate again"))
    )
    table = {row[0]: dict(zip(titles, row, strict=True)) for row in cells}
    assert (table["autoregressive"]["tokens/s"], table["autoregressive"]["ms/token"]) == ("66.7", "15.00")
    best = table["adaedl(gamma=0.2, lambda0<0.3)"]
    assert (best["tokens/s"], best["ms/token"]) == ("100.0", "10.00")
    assert (best["forecast"][:5], best["measured speedup"][:5], best["wall clock"]) == ("1.581", "1.500", "1.350")
    assert "predicted" not in " ".join(titles)


def test_medians_and_sums_that_differ_are_named(document: dict[str, Any]) -> None:
    text = Page(rendered(document)).text
    remark = "Medians and plain sums differ by more than the noise floor: adaedl(gamma=0.2, lambda0<0.3): 1.350 by"
    assert remark in text and "fixed_k(k=1): 1.080 by" not in text
    assert "median of 3 repeats" in text and "15.00 ms per baseline token" in text


def test_where_every_policy_is_slower_the_verdict_is_not_to_speculate(document: dict[str, Any]) -> None:
    for entry in document["rows"]:
        entry["measured"] = estimate(entry["measured"]["estimate"] / 3)
    text = Page(rendered(document)).text
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
    assert speculation_text("k", Estimate(*speedup), floor_percent).startswith(begins)


def test_rows_that_asked_for_more_than_was_recorded_are_named() -> None:
    rows = [("eagle2", 1 / 23), ("fixed_k", 0.0)]
    assert truncated_text(rows) == ["rounds that asked for more than the recorded trees hold: eagle2: 4.35 %"]
    assert truncated_text(rows[1:]) == []


def test_runs_whose_baseline_tokens_differ_are_not_comparable() -> None:
    """5 % is the most: 14.0 and 14.7 ms may be compared, 14.0 and 14.8 ms may not."""
    assert comparable_text([14.0, 14.7]) == comparable_text([14.0]) == comparable_text([]) == []
    (line,) = comparable_text([14.0, 14.8, 38.0])
    assert "not comparable" in line and "14.0 to 38.0 ms" in line


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
    board = leaderboard(trace, RampCost(), policies=["fixed_k"], trials=2)
    with TemporaryDirectory() as folder:
        write_trace(trace, Path(folder, "trace"))
        given = ["cost", "compare", "--trace", Path(folder, "trace"), "--target", "llama-3.1-8b", "--drafter", "eagle"]
        given += ["--gpus", "h100", "--batch", 1, "--policy", "fixed_k", "--trials", 2, "--json"]
        compared = call("specsim", *given)
        (counters := Path(folder, "counters.json")).write_text(
            json.dumps({"drafted": [400] * 3, "accepted": [260, 150, 90]})
        )
        advised = call(
            "specsim", "advise", counters, "--gpu", "h100", "--target", "llama-3.1-8b", "--drafter", "eagle", "--json"
        )
    return [
        tune(trace, RampCost(), "fixed_k", trials=2).as_dict(),
        as_document([board, board], BoardOptions(cost="ramp")).as_dict(),
        json.loads(compared.out),
        recorded(STUDIES / "drafters/recorded/board.json"),
        validation_document(),
        json.loads(advised.out),
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


@pytest.mark.parametrize("number", range(5))
@pytest.mark.usefixtures("_no_figures")
def test_a_page_shows_every_remark_of_its_document(number: int) -> None:
    document = copy.deepcopy(documents()[number])
    lists = (value for value in document.values() if isinstance(value, list) and value and isinstance(value[0], dict))
    inner = document["holdout"] if "holdout" in document else next(lists)[0]
    document["warnings"], inner["cost_notes"] = NOTES[1:], NOTES[:1]
    inner |= {"label": "cape", "approximate": True, "truncated_rounds": 3, "truncated_share": 0.25, "rounds": 12}
    text = shown(document)
    assert "Note: a warning<" in text and "costs: &lt;b&gt;not calibrated&lt;/b&gt;<" in text
    assert "Note: biased: " in text and "recorded trees hold: cape: 25.00 %" in text
    assert text.index('class="note"') < text.index("<svg")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file of each kind."""
    folder, trace = tmp_path_factory.mktemp("results"), small_trace()
    board = leaderboard(trace, RampCost(), policies=["fixed_k", "adaedl"], trials=4)
    documents: dict[str, Any] = {
        "tuning": tune(trace, RampCost(), "fixed_k", trials=4).as_dict(),
        "leaderboard": as_document([board], BoardOptions()).as_dict(),
    }
    paths = {}
    for name, document in documents.items():
        paths[name] = folder / f"{name}.json"
        paths[name].write_text(json.dumps(document))
    return paths


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tuning", "Predicted, on held-out sequences: "),
        ("leaderboard", "No policy is significantly faster than no speculation"),
    ],
)
def test_a_page_begins_with_its_verdict(name: str, message: str, results: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    assert call("specsim", "report", results[name], "--out", out).code == 0
    text = out.read_text()
    page = Page(text)
    verdict = re.search(r'<p class="verdict">([^<]*)</p>', text)
    assert verdict and message in verdict[1]
    assert page.names.count("svg") >= 1 and text.count("</title></use>") + text.count("</title></path>") > 1
    assert "https://" not in text.replace("http://www.w3.org", "")


@pytest.mark.parametrize(
    "given",
    [
        ("tune", "--policy", "fixed_k", "--trials", 2),
        ("cost", "compare", "--gpus", "h100", "--policy", "fixed_k", "--trials", 2),
    ],
    ids=["tuning", "hardware"],
)
def test_a_headline_has_its_costs_and_their_error_beside_it(given: tuple[Any, ...], tmp_path: Path) -> None:
    """The error of published runs, as the file that ships has it."""
    trace = "example:lab-model"
    pair = ("--target", "llama-3.1-8b", "--drafter", "eagle3", "--engine", "vllm")
    where = ("--trace", trace, *pair) if "compare" in given else (trace, "--gpu", "h100", *pair)
    document = json_of(call("specsim", *given, *where, "--json"))
    (tmp_path / "result.json").write_text(json.dumps(document))
    assert call("specsim", "report", tmp_path / "result.json", "--out", tmp_path / "report.html").code == 0
    tile = re.search(r'<div class="tile"><b>([\d.]+)</b><span>(.*?)</span>', (tmp_path / "report.html").read_text())
    assert tile is not None
    source = "data sheet and vllm&#39;s overhead" if "compare" in given else "llama-3.1-8b with eagle3 on h100, vllm"
    said = re.search(r"([\d.]+) to ([\d.]+) over prompts, ([\d.]+) to ([\d.]+) with the error .*, costs: (.*)", tile[2])
    assert said is not None and said[5] == source
    low, high, least, most = map(float, said.groups()[:4])
    error = published_error("speedup", ("dense", "eagle", "batch 1"))
    assert error is not None and (least / low, most / high) == pytest.approx(error.band, abs=0.02)
    assert low < float(tile[1]) < high


def test_advice_is_drawn_by_draft_length_and_by_load(tmp_path: Path) -> None:
    counts = tmp_path / "counts.json"
    counts.write_text('{"drafted": [9000, 9000, 9000], "accepted": [7200, 5000, 2000]}')
    args = ("advise", counts, "--gpu", "h100", "--target", "llama-3.1-8b", "--drafter", "eagle3", "--json")
    document = json_of(call("specsim", *args))
    assert (document["kind"], document["version"], document["asked"]["gpu"]) == ("specsim-advice", 1, "h100")
    at_16 = document["by_load"]["batches"].index(16)
    for length in json_of(call("specsim", *args, "--batch", 16))["lengths"]:
        assert document["by_load"]["speedups"][str(length["k"])][at_16] == pytest.approx(
            length["speedup"]["estimate"], rel=0.05
        )
    (tmp_path / "advice.json").write_text(json.dumps(document))
    assert call("specsim", "report", tmp_path / "advice.json", "--out", tmp_path / "a.html").code == 0
    text = (tmp_path / "a.html").read_text()
    page = Page(text)
    assert page.names.count("svg") == 2 and f"K = {document['k']}" in " ".join(page.words)
    document["k"] = None  # not decidable
    (tmp_path / "advice.json").write_text(json.dumps(document))
    assert call("specsim", "report", tmp_path / "advice.json", "--out", tmp_path / "b.html").code == 0
    assert "Not decidable" in (tmp_path / "b.html").read_text()


def test_results_are_joined_with_a_list_of_verdicts_and_ids_of_their_own(
    results: dict[str, Path], tmp_path: Path
) -> None:
    twice = [*results.values(), results["tuning"]]
    assert call("specsim", "report", *twice, "--out", tmp_path / "all.html").code == 0
    text = (tmp_path / "all.html").read_text()
    page = Page(text)
    assert text.count("<li>") == text.count('<section class="result"') == len(twice)
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links} | set(re.findall(r"url\(#([^)]*)\)", text)) <= set(page.ids)


def test_what_is_no_result_is_named(results: dict[str, Path], tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text('{"kind": "specsim-profile"}')
    assert_refused(call("specsim", "report", other, "--out", tmp_path / "report.html"), other, "not a result")
    half = tmp_path / "half.json"
    half.write_text('{"best_params": {}}')
    assert_refused(call("specsim", "report", half, "--out", tmp_path / "report.html"), half, "holdout")
    there = tmp_path / "there.html"
    there.write_text("mine")
    assert_refused(call("specsim", "report", results["tuning"], "--out", there), there, "--overwrite")
