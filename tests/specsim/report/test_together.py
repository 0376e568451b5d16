"""Results of every kind are shown by the same command, on a single page, each with its verdict first."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from specsim import leaderboard, tune
from specsim.claims.check import as_document as claims_document
from specsim.claims.check import check_files
from specsim.compare.document import as_document
from specsim.cost.linear import LinearCost, LinearPass
from specsim.cost.roofline.published import published_errors
from specsim.policy.chain.fixed_k import FixedK
from specsim.serving.speedup_map import speedup_map
from tests.specsim.report.test_report import Page
from tests.support.commands import assert_refused, call, json_of
from tests.support.reference import RampCost, small_trace

CLAIMS = """
[[claim]]
name = "{name}"
document = "found.json"
at = ["speed"]
at_least = {bound}
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file of each kind."""
    folder, trace = tmp_path_factory.mktemp("results"), small_trace()
    board = leaderboard(trace, RampCost(), policies=["fixed_k", "adaedl"], trials=4)
    costs = LinearCost(LinearPass(0.010, 0.0002), LinearPass(0.001, 0.0001))
    served = speedup_map(trace, costs, [FixedK(1), FixedK(2)], [1, 8, 64], contexts=[None, 512])
    documents: dict[str, Any] = {
        "tuning": tune(trace, RampCost(), "fixed_k", trials=4).as_dict(),
        "leaderboard": as_document([board], {}),
        "batches": served.as_dict(),
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
        ("batches", "At a context of 512"),
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
        ("serve", "schedule", "--batch", "1,8", "--max-draft-tokens", 2),
        ("cost", "compare", "--gpus", "h100", "--policy", "fixed_k", "--trials", 2),
    ],
    ids=["tuning", "batches", "hardware"],
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
    (error,) = [e for e in published_errors() if (e.what, e.experts, e.batch) == ("speedup", False, "1")]
    assert (least / low, most / high) == pytest.approx((error.low, error.high), abs=0.02)
    assert low < float(tile[1]) < high


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


def test_a_claim_that_fails_stands_first(tmp_path: Path) -> None:
    (tmp_path / "found.json").write_text('{"speed": 2.0}')
    file = tmp_path / "own.claims.toml"
    file.write_text(
        "version = 1\n"
        + "".join(CLAIMS.format(name=name, bound=bound) for name, bound in (("fine", 1.5), ("off", 2.5)))
    )
    document = claims_document(check_files([file]))
    (tmp_path / "claims.json").write_text(json.dumps(document))
    assert call("specsim", "report", tmp_path / "claims.json", "--out", tmp_path / "report.html").code == 0
    text = (tmp_path / "report.html").read_text()
    assert "1 of 2 claims do not pass: off (contradicted)." in text
    body = text.split("<tbody>")[1]
    assert body.index("off") < body.index("fine")
    ticks = re.findall(r">([\d.]+)</text>", text)
    assert ticks and not any("." in tick for tick in ticks)  # claims are counted whole


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
