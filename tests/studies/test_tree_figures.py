"""Figures of draft trees: what they draw, from plain data; the same bytes every time."""

from __future__ import annotations

import re
from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from studies.trees import figures

COSTS = ["measured", "paper"]
POINTS = [
    {"nodes": n, "tokens": 1 + n**0.3, "speedups": {"measured": 1.5 - n / 100 if n < 65 else None, "paper": 1 + n**0.2}}
    for n in (1, 4, 16, 64, 128)
]
WIDTHS = [{"width": w, "nodes": 6.0 * w**0.5, "tau": 2 + w**0.2} for w in range(1, 9)]
EAGLE2 = {"label": "EAGLE-2", "nodes": 49.5, "tau": 3.6}
DOMAINS = {
    "PCT": {"code": {"tau": 3.25, "nodes_percentiles": [2, 10, 20, 30, 38]},
            "prose": {"tau": 2.75, "nodes_percentiles": [5, 7, 9, 12, 14]}},
    "other": {"code": {"tau": 3.5, "nodes_percentiles": [0, 2, 4, 6, 8]},
              "prose": {"tau": 2.5, "nodes_percentiles": [3, 3, 3, 3, 3]}},
}  # fmt: skip
BINS = {
    "first children": {
        "count": [5, 0, 15],
        "mean_confidence": [0.1, None, 0.9],
        "accept_rate": [0.2, None, 0.8],
        "ece": 0.1,
    }
}
TREES = {
    "a fork": {"shape": [2, 1, 0, 0], "chances": [1, 0.6, 0.3, 0.4]},
    "a chain": {"shape": [1, 1, 0], "chances": [1, 0.6, 0.3]},
}
FIGURES: dict[str, Callable[[str], str]] = {
    "sizes": lambda name: figures.sizes(POINTS, POINTS, COSTS, name),
    "widths": lambda name: figures.widths(WIDTHS, EAGLE2, name),
    "domains": lambda name: figures.domains(DOMAINS, name),
    "reliability": lambda name: figures.reliability(BINS, name),
    "trees": lambda name: figures.trees(TREES, name),
}


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("text")]


@pytest.mark.parametrize("draw", FIGURES.values(), ids=FIGURES)
def test_figures_are_whole_svg_of_the_same_bytes_every_time(draw: Callable[[str], str]) -> None:
    svg = draw("one")
    assert svg == draw("one")
    assert texts(svg)
    ids = re.findall(r' id="([^"]+)"', svg)
    assert len(ids) == len(set(ids)) and not set(ids) & set(re.findall(r' id="([^"]+)"', draw("two")))


def test_sizes_have_a_panel_per_cost_with_units() -> None:
    shown = texts(FIGURES["sizes"]("s"))
    for title in ("acceptance length", "speedup, measured", "speedup, paper", "dense", "sparse, searched"):
        assert title in shown
    assert "tokens per round" in shown and shown.count("ratio, autoregressive = 1") == 2
    assert shown.count("nodes of the tree, root not counted") == 3


def test_sizes_leave_out_what_the_costs_do_not_cover() -> None:
    none = [{**point, "speedups": {"measured": None, "paper": 1.0}} for point in POINTS]
    # One mark per point: all in the panels of length and of the paper's cost, none where no cost covers the tree.
    assert figures.sizes(none, none, COSTS, "s").count("<use ") + 2 * len(POINTS) == figures.sizes(
        none, none, ["paper", "paper"], "s"
    ).count("<use ")


def test_widths_name_both_policies_in_both_panels() -> None:
    shown = texts(FIGURES["widths"]("w"))
    assert shown.count("PCT") == 2 and shown.count("EAGLE-2") == 2
    assert "nodes per round, mean" in shown and "tokens per round" in shown


def test_domains_show_the_acceptance_length_of_each_policy() -> None:
    shown = texts(FIGURES["domains"]("d"))
    for value in ("3.25", "2.75", "3.50", "2.50"):
        assert shown.count(value) == 1
    assert shown.count("code") == shown.count("prose") == 2
    assert {"PCT", "other"} <= set(shown)


def test_reliability_says_how_many_nodes_and_how_far_off() -> None:
    assert "first children: ECE 0.100, 20 nodes" in texts(FIGURES["reliability"]("r"))


def test_trees_are_drawn_with_ranks_and_depths() -> None:
    shown = texts(FIGURES["trees"]("t"))
    assert "a fork" in shown and "a chain" in shown
    ranks = [text for text in shown if text in ("0", "1")]
    # Ranks of the fork's nodes 0, 1, 0 and of the chain's 0, 0; depths 0 and 1 of both.
    assert sorted(ranks) == ["0"] * 6 + ["1"] * 3
