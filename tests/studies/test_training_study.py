"""The study of what training decides: intervals over seeds and prompts, and its policies."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from specsim.policy.tree.base import new_tree
from specsim.policy.tree.pct import PCT
from studies.papers.tables import read_table
from studies.training import seeds
from studies.training.seeds import Replayed


@pytest.fixture(scope="module")
def decoders() -> ModuleType:
    pytest.importorskip("torch")
    return importlib.import_module("studies.training.decoders")


def replayed(speedup: float, *, rounds: float = 10.0, truncated: float = 0.0, prompts: int = 8) -> Replayed:
    """Prompts alike but for their length, 24 tokens and more each."""
    length = np.arange(1.0, prompts + 1)
    return Replayed(
        baseline_s=3 * length,
        seconds=3 * length / speedup,
        tokens=24 * length,
        rounds=rounds * length,
        drafted=40 * length,
        accepted=10 * length,
        truncated=truncated * length,
    )


def test_one_seed_that_is_worse_leaves_a_difference_open() -> None:
    """Prompts alone would separate it: each seed's difference is the same on all of them."""
    better = {seed: replayed(speedup) for seed, speedup in enumerate((1.5, 1.4, 1.0))}
    base = {seed: replayed(1.1) for seed in range(3)}
    difference = seeds.speedup_difference(better, base)
    assert difference.estimate == pytest.approx(0.2) and difference.low < 0 < difference.high
    sure = {seed: replayed(speedup) for seed, speedup in enumerate((1.31, 1.3, 1.29))}
    assert seeds.speedup_difference(sure, base).low > 0


def test_shares_are_pooled_over_seeds_and_prompts() -> None:
    runs = {0: replayed(1.0), 1: replayed(2.0)}
    assert seeds.share(runs, "accepted", "drafted") == 0.25
    assert str(seeds.tau(runs)).startswith("2.400 ")


def test_variants_are_set_against_the_base() -> None:
    pytest.importorskip("torch")
    report = importlib.import_module("studies.training.report")
    variants = {
        "EDD + PCT": {0: replayed(1.5), 1: replayed(1.52)},
        "without states": {0: replayed(1.2, rounds=12, truncated=3), 1: replayed(1.21, rounds=12, truncated=3)},
    }
    base, without = report.seed_rows(variants, "EDD + PCT", {"method": "EDD"}, priced=True)
    assert base["method"] == "EDD" and "tau_difference" not in base
    assert base["speedup"]["estimate"] == pytest.approx(1.51)
    assert without["tau_difference"]["estimate"] == pytest.approx(-0.4) and without["tau_difference"]["high"] < 0
    assert without["speedup_difference"]["estimate"] == pytest.approx(-0.305)
    assert without["rounds_truncated_percent"] == 25
    (row, _) = report.seed_rows(variants, None, {}, priced=False)
    assert "speedup" not in row and "tau_difference" not in row


def test_the_papers_speedups_are_those_of_its_table(decoders: ModuleType) -> None:
    printed = [row.number("speedup") for row in read_table("edd_3").rows]
    assert printed == list(decoders.PAPER_SPEEDUPS.values())


def test_sure_trees_keep_the_likeliest_nodes_and_are_tuned_as_pct_is(decoders: ModuleType) -> None:
    tree, count = new_tree(), 40
    tree.path[1:count] = np.random.default_rng(0).permutation(np.linspace(0.005, 0.9, count - 1))
    kept = {}
    for kind in (PCT, decoders.SureTree):
        policy = kind(max_nodes=8)
        keep = np.zeros(count, dtype=np.bool_)
        kind.select((0.0,), policy.params, tree, count, keep)
        kept[kind.name] = np.flatnonzero(keep).tolist()
    likeliest = np.sort(1 + np.argsort(-tree.path[1:count])[:8]).tolist()
    assert kept == {"pct": likeliest, "sure_tree": likeliest}
    searched = {field.name: field.metadata["tune"] for field in dataclasses.fields(PCT)}
    assert {field.name: field.metadata["tune"] for field in dataclasses.fields(decoders.SureTree)} == searched
    assert decoders.SureTree.variants == PCT.variants


def test_sure_trees_expand_sure_children_of_unlikely_nodes_but_none_that_would_be_dropped(
    decoders: ModuleType,
) -> None:
    tree, widths = new_tree(), np.zeros(4, dtype=np.int32)
    tree.prob[1:4], tree.path[1:4] = (0.9, 0.9, 0.05), (0.05, 0.001, 0.05)
    policy = decoders.SureTree(cost_ratio=0.2, leaf_threshold=0.01, width=3)
    decoders.SureTree.expand((0.0,), policy.params, tree, 1, 4, 0.5, widths)
    assert widths.tolist() == [0, 3, 0, 0]
    PCT.expand((0.0,), policy.params, tree, 1, 4, 0.5, (other := np.zeros(4, dtype=np.int32)))
    assert other.tolist() == [0, 0, 0, 0]  # the chance of the whole path is below the threshold


def test_replays_are_kept_as_they_were(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    run = importlib.import_module("studies.training.run")
    replays = {"sweep": {5: {"PCT": {0: replayed(1.5), 1: replayed(1.6)}}}, "facts": {"EAGLE": {"tokens": 7}}}
    first, again = (run.cached(tmp_path / "replays.json", lambda: replays) for _ in range(2))
    for back in (first, again):
        assert back["facts"] == replays["facts"] and list(back["sweep"]) == [5]
        assert seeds.speedup(back["sweep"][5]["PCT"]) == seeds.speedup(replays["sweep"][5]["PCT"])
        assert list(back["sweep"][5]["PCT"]) == [0, 1]
