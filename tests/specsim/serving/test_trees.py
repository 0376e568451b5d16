"""Static trees in batches: as each sequence's replay at batch 1, by hand, token by token, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from specsim.cost.batch_profile import BatchProfileCost
from specsim.cost.roofline.architecture import find_architecture
from specsim.cost.roofline.cost import Overheads, RooflineCost, find_drafter
from specsim.cost.roofline.hardware import find_hardware
from specsim.cost.roofline.passes import Roofline
from specsim.policy.tree.cartesian import Cartesian
from specsim.policy.tree.eagle2 import Eagle2
from specsim.policy.tree.sparse_tree import SparseTree
from specsim.policy.tree.static import StaticTree, expanded_per_level
from specsim.policy.tree.vct import VCT
from specsim.replaying.replay import replay
from specsim.serving.arrivals import Requests
from specsim.serving.continuous import run_server
from specsim.serving.costs import round_seconds
from specsim.serving.drafts import drafts_of
from specsim.serving.lockstep import lockstep
from specsim.trace.trace import Trace
from tests.support.checks import refusal
from tests.support.commands import assert_refused, call, json_of
from tests.support.serving_costs import COST, assert_rounds_are_those_of_each_sequence_alone, exact_table
from tests.support.tree_traces import tree_trace

# A root of three children, of which the first has 2 and the second 1; the first of those 2 has 1.
SPARSE = SparseTree(children=(3, 2, 1, 0, 1, 0, 0, 0))
TREES = [VCT(width=2, depth=3), Cartesian(s1=3, s2=2, s3=1), SPARSE]


def ranks_trace(rank: list[list[int]], lengths: list[int], prompts: list[int]) -> Trace:
    """A trace in which the target's own token has these ranks at every position [N, D]."""
    trace = tree_trace(0, sequences=1, tokens=len(rank), depth=len(rank[0]))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    left = np.repeat(offsets[1:], lengths)[:, None] - np.arange(len(rank))[:, None] - np.arange(len(rank[0]))
    return dataclasses.replace(
        trace, offsets=offsets, budget_tokens=np.array(lengths), prompt_tokens=np.array(prompts),
        sequence_id=np.arange(len(lengths)), domain=np.array(["code"] * len(lengths)), tree=None,
        true_rank=np.where(left > 0, np.array(rank), -1).astype(np.int16),
    )  # fmt: skip


@pytest.mark.parametrize("policy", TREES, ids=lambda policy: policy.name)
def test_a_batch_of_one_takes_as_long_as_the_replay(policy: StaticTree) -> None:
    trace = tree_trace(1)
    alone = replay(trace, policy, exact_table(trace, COST, trees=True))
    tokens, seconds = lockstep(drafts_of(trace, policy), COST, 1).per_sequence()
    assert tokens.tolist() == trace.output_tokens.tolist()
    assert seconds == pytest.approx(alone.speculative_s, rel=1e-12)


@pytest.mark.parametrize("refill", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 3, 9])
@pytest.mark.parametrize("policy", TREES, ids=lambda policy: policy.name)
def test_rounds_of_a_batch_are_those_of_each_sequence_replayed_alone(
    policy: StaticTree, batch: int, refill: bool
) -> None:
    trace = tree_trace(3, sequences=5, tokens=30)
    rounds = lockstep(drafts_of(trace, policy), COST, batch, refill=refill).rounds
    assert_rounds_are_those_of_each_sequence_alone(rounds, trace, policy)


# Two sequences of 5 and 4 tokens, 10 and 20 of their prompts cached, under the tree SPARSE of 7 nodes: 3, 3 and 1 by
# level, drafted by passes over 1, 2 and 1 nodes. Both are in both rounds.
#
# round 1   A: ranks 0, 0, 0: to the deepest leaf, 3 accepted      B: ranks 1, 0: to a leaf, 2 accepted; 7 nodes each
# round 2   A: 1 token left, nothing to draft, 14 cached            B: the same, 23 cached
RANKS = [[0, 0, 0], *[[3, 3, 3]] * 4, [1, 0, 0], *[[3, 3, 3]] * 3]
HAND_MS = [
    # drafts: 3 passes of 2 + 0.1 a token + 0.0005 a cached token, over 2 tokens, each a step further; the second is
    # over 4 nodes in place of 2. Verification of 16 tokens: 10 + 0.3 a token + 0.002 a cached token; 1.5 beside.
    (3 * 2.2 + 0.0005 * (30 + 32 + 34) + 0.2) + (10 + 16 * 0.3 + 30 * 0.002) + 1.5,
    (10 + 2 * 0.3 + 37 * 0.002) + 1.5,
]


def test_a_small_tree_by_hand() -> None:
    trace = ranks_trace(RANKS, [5, 4], [11, 21])
    run = lockstep(drafts_of(trace, SPARSE), COST, 2)
    assert run.rounds.drafted.tolist() == [7, 0, 7, 0] and run.rounds.accepted.tolist() == [3, 0, 2, 0]
    assert run.rounds.emitted.tolist() == [4, 1, 3, 1]
    assert run.rounds.behind.tolist() == [0, 1, 0, 1]  # leaves were never in a draft pass
    assert 1e3 * run.seconds.total_s == pytest.approx(HAND_MS, rel=1e-12)


def test_only_a_path_that_ends_at_a_leaf_leaves_a_token_behind() -> None:
    """Of the tree SPARSE, rank 0 leads to a node with children, 0 and 1 to a leaf, 2 to a leaf; 3 is no child."""
    rank = [[0, 3, 3], [3, 3, 3], [0, 1, 3], *[[3, 3, 3]] * 2, [2, 3, 3], *[[3, 3, 3]] * 4]
    run = lockstep(drafts_of(ranks_trace(rank, [10], [5]), SPARSE), COST, 1).rounds
    assert run.accepted.tolist()[:4] == [1, 2, 1, 0] and run.t.tolist()[:4] == [0, 2, 5, 7]
    assert run.behind.tolist()[:4] == [0, 0, 1, 1]


def test_a_request_that_ends_early_cuts_its_tree() -> None:
    """Of 3 tokens in place of 25: with 2 left to draft, the tree's first two levels, and with none nothing."""
    trace = ranks_trace([[0, 3, 3], *[[3, 3, 3]] * 24], [25], [9])
    requests = Requests(np.zeros(1), np.array([9]), np.array([3]), np.array([0]))
    run = run_server(drafts_of(trace, SPARSE), COST, requests, slots=1)
    assert run.rounds["drafted"].tolist() == [6, 0] and run.rounds["accepted"].tolist() == [1, 0]
    # Two levels: 1 and 2 nodes expanded; then nothing, as the prefill before.
    first = COST.drafter.fixed_s * 2 + COST.drafter.token_s * 3 + COST.drafter.cached_token_s * (8 + 9)
    first += COST.target.fixed_s + COST.target.token_s * 7 + COST.target.cached_token_s * 8 + COST.step_s + COST.round_s
    assert run.steps["seconds"][1] == pytest.approx(first, rel=1e-12)


@pytest.mark.parametrize("drafter", ["eagle", "llama-3.2-1b", {"kind": "medusa", "heads": 4}])
@pytest.mark.parametrize("policy", TREES, ids=lambda policy: policy.name)
def test_like_sequences_under_a_roofline_take_what_its_passes_take(drafter: Any, policy: StaticTree) -> None:
    batch, context = 6, 900
    target = Roofline(find_architecture("llama-3.1-8b"), find_hardware("h100"))
    cost = RooflineCost(target, find_drafter(drafter, target.model), batch=batch, overheads=Overheads(1e-3, 5e-4))
    trees = drafts_of(tree_trace(1), policy)
    nodes, levels = len(policy.shape) - 1, len(policy.level_sizes) - 1
    zeros = np.zeros(batch, np.int64)
    took = round_seconds(cost, zeros, zeros + nodes, zeros, zeros + context, True, trees.tree)
    assert took.verify_s == pytest.approx([float(cost.tree_verify(nodes + 1, context))], rel=1e-12)
    wider_s = sum(float(cost.wider(count, context)) for count in expanded_per_level(policy.shape)[:-1])
    assert took.draft_s == pytest.approx([float(cost.draft(levels, context)) + wider_s], rel=1e-12)


def test_what_cannot_be_batched_is_refused() -> None:
    trace = tree_trace(2, tokens=20)
    refusal(lambda: drafts_of(trace, Eagle2()), "eagle2", "grow by confidence")
    refusal(lambda: drafts_of(dataclasses.replace(trace, true_rank=None), TREES[0]), "vct", "true_rank")
    refusal(lambda: drafts_of(trace, VCT(width=2, depth=8)), "depth 5")
    axes = np.array([1, 4]), np.array([1, 200]), np.array([1, 20])
    measured = BatchProfileCost(*axes, np.ones((2, 2, 2)), np.ones((2, 2, 1)), np.ones((2, 2)))
    refusal(lambda: lockstep(drafts_of(trace, SPARSE), measured, 2), "of chains alone, a tree has 8")
    space = dataclasses.replace(trace, meta={**trace.meta, "drafter_kind": "space"})
    refusal(lambda: drafts_of(space, SPARSE), "sparse_tree", "verification pass")


def test_commands_take_trees(tmp_path: Any) -> None:
    from specsim.trace.files import write_trace

    write_trace(tree_trace(5, sequences=6, tokens=30), tmp_path / "trace")
    given = [tmp_path / "trace", "--cost", "specdecode-bench-llama3.1-8b-eagle-h100", "--json"]
    tree = ["--policy", "cartesian", "--set", "s1=2", "--set", "s2=2", "--set", "s3=0", "--set", "s4=0"]
    done = json_of(call("specsim", "serve", "simulate", *given, *tree, "--batch", "1,4"))
    assert [entry["batch"] for entry in done["batches"]] == [1, 4]
    ranked = json_of(call("specsim", "serve", "schedule", *given, "--policy", "vct", "--batch", "1,2"))
    assert any(label.startswith("vct") for label in ranked["cells"][0]["speedup"])
    assert_refused(call("specsim", "serve", "simulate", *given, "--policy", "eagle2"), "eagle2", "static trees")
