"""Shipped traces and costs are served by name wherever a path is, and are what their commands give."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import specsim
from specsim.cost.files import with_batch
from specsim.cost.profile import ProfileCost
from specsim.cost.roofline.architecture import find_architecture
from specsim.cost.roofline.cost import RooflineCost, find_drafter
from specsim.cost.roofline.hardware import find_hardware
from specsim.cost.roofline.passes import Roofline
from specsim.io.errors import InputError
from specsim.io.examples import FOLDER, example_files, located
from specsim.trace.files import depth_at
from tests.support.commands import call, json_of

TRACE, COST = "example:lab-eagle", "example:llama-3.1-8b-eagle-h100"


def test_every_trace_says_how_it_was_recorded() -> None:
    for name in example_files("trace"):
        meta = specsim.read_trace(name).meta
        of = ("smollm2", "tasks.jsonl") if "smollm2" in name else ("lab-deep:40", "the lab's held-out prompts")
        assert (meta["target"], meta["prompts"]["source"]) == of
        assert {"date", "device", "threads", "git_revision", "torch"} <= set(meta["provenance"])


def test_traces_are_of_one_output_so_that_they_join() -> None:
    eagle, lookup = (specsim.read_trace(f"example:lab-{name}") for name in ("eagle", "lookup"))
    joined = specsim.join_traces({"eagle": eagle, "lookup": lookup})
    assert len(joined.token) == len(eagle.token) and not np.array_equal(eagle.match_len, lookup.match_len)


@pytest.mark.parametrize("gpu", ["a100", "h100", "h200", "l40s"])
def test_a_gpus_costs_are_its_rooflines(gpu: str) -> None:
    target = Roofline(find_architecture("llama-3.1-8b"), find_hardware(gpu), dtype="bfloat16")
    priced = RooflineCost(target, find_drafter("eagle", target.model))
    assert specsim.read_cost(f"example:llama-3.1-8b-eagle-{gpu}") == priced
    assert specsim.read_cost(f"example:llama-3.1-8b-eagle-{gpu}", batch=8) == with_batch(priced, 8)


def test_an_unknown_name_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(InputError, match=r"unknown trace example:lab; choose from example:lab-eagle, "):
        specsim.read_trace("example:lab")
    with pytest.raises(InputError, match=r"unknown cost example:lab-eagle; choose from example:lab-deep"):
        specsim.read_cost("example:lab-eagle")
    assert located("traces/example:lab", "trace") == Path("traces/example:lab")


def test_trees_of_the_eagle_example_are_recorded_as_wide_as_they_are_searched() -> None:
    trace = specsim.read_trace(TRACE)
    assert (trace.tree.width, trace.tree.nodes) == (10, 128)
    assert specsim.tune(trace, specsim.read_cost(COST), "pct", trials=8, jobs=1).holdout.speedup > 1
    board = specsim.leaderboard(trace, specsim.read_cost(COST), policies=["fixed_k", "eagle2"], trials=40, jobs=1)
    eagle2 = next(row for row in board.rows if row.label == "eagle2, tuned")
    assert eagle2.speedup > 2.4 and eagle2.policy.settings["top_k"] > 1


def test_commands_take_examples(tmp_path: Path) -> None:
    named = [TRACE, "--cost", COST, "--json"]
    fixed = ["--policy", "fixed_k", "--set", "k=3"]
    run = json_of(call("specsim", "replay", *named, *fixed))
    held = specsim.predict(specsim.read_trace(TRACE), specsim.read_cost(COST), "fixed_k", k=3)
    assert run["speedup"]["estimate"] == held.speedup.estimate
    board = json_of(call("specsim", "leaderboard", *named, "--policy", "fixed_k", "--trials", "4"))
    assert board["boards"][0]["trace"] == TRACE
    tree = call("specsim", "tree", "search", TRACE, "--nodes", "8", "--json")
    fit = call("specsim", "acceptance", "fit", TRACE, "--model", "iid", "--out", str(tmp_path / "model.json"))
    assert [tree.code, fit.code, depth_at(TRACE)] == [0, 0, 8]


def test_a_claim_rests_on_an_example(tmp_path: Path) -> None:
    claims = tmp_path / "speed.claims.toml"
    fixed = ["--policy", "fixed_k", "--set", "k=3"]
    assert call("specsim", "claims", "record", str(claims), TRACE, "--cost", COST, *fixed).code == 0
    assert f'trace = "{TRACE}"' in claims.read_text()
    assert call("specsim", "claims", "check", str(claims)).code == 0


def test_the_list_names_every_example_with_its_size_and_source() -> None:
    rows = json_of(call("specsim", "example", "--list", "--json"))["examples"]
    assert {row["name"] for row in rows} == {*example_files("trace"), *example_files("cost")}
    assert sum(row["bytes"] for row in rows) == sum(path.stat().st_size for path in FOLDER.iterdir())
    assert all(row["holds"] and row["source"] for row in rows)
    assert TRACE in call("specsim", "example", "--list").out


def test_two_drafters_have_profiles_of_one_machine() -> None:
    made = set()
    for drafter in ("eagle", "model"):
        trace, cost = specsim.read_trace(f"example:lab-{drafter}"), specsim.read_cost(f"example:lab-deep-{drafter}")
        assert isinstance(cost, ProfileCost)
        assert cost.max_tree_tokens <= trace.tree.nodes + 1  # searches stay within both
        verify_s = [float(cost.verify(tokens, 100)) for tokens in range(1, trace.depth + 2)]
        assert verify_s == sorted(verify_s)  # noise is less than what a token takes
        provenance = json.loads(example_files("cost")[f"example:lab-deep-{drafter}"].read_text())["provenance"]
        made.add((provenance["device"], provenance["threads"], provenance["date"][:10]))
    assert len(made) == 1
