"""Replays of tree policies against plain decoding, token by token, over the same recorded trees."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numba as nb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specsim.cost.model import CostModel
from specsim.io.errors import InputError
from specsim.io.rng import uniform
from specsim.learn.predict import predict
from specsim.policy.base import build_policy, setting
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.tree.base import TreePolicy
from specsim.policy.tree.cape import Cape
from specsim.policy.tree.cartesian import Cartesian
from specsim.policy.tree.eagle2 import Eagle2
from specsim.policy.tree.sparse_tree import SparseTree
from specsim.policy.tree.static import StaticTree, check_shape
from specsim.policy.tree.vct import VCT
from specsim.replaying.checks import check_covered, check_replayable, unsupported_reason
from specsim.replaying.oracles import reachable_depth
from specsim.replaying.replay import Replay, replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace
from tests.support.checks import refusal
from tests.support.reference import BUCKET, RampCost
from tests.support.tree_traces import tree_trace


class LeafyCost(RampCost):
    """Every part of a round with a tree costs something of its own, in seconds."""

    @property
    def max_tree_tokens(self) -> int:
        return 400

    def wider(self, n_nodes: int, context: Any) -> Any:
        return 3e-5 * (n_nodes - 1) + 1e-7 * np.asarray(context, dtype=float) * (n_nodes - 1)

    def tree_verify(self, n_tokens: int, context: Any) -> Any:
        return 1.1e-2 + 1.3e-4 * n_tokens + 2 * self.slope * np.asarray(context, dtype=float)

    def tree_policy_step(self) -> float:
        return 7e-6

    def tree_round_overhead(self) -> float:
        return 6e-4


COST = LeafyCost()


@nb.njit
def initial_state(params):
    return (0.0,)


@nb.njit
def expand(state, params, tree, first, end, u, widths):
    for i in range(first, end):
        if tree.path[i] >= params.expand_at * (0.5 + u) / (1.0 + state[0] / 4.0):
            widths[i] = max(1, int(params.width) - tree.depth[i])
    return state


@nb.njit
def select(state, params, tree, count, keep):
    for i in range(1, count):
        keep[i] = tree.path[i] >= params.keep_at and tree.rank[i] < 3
    return min(params.keep_at, params.expand_at * 0.5 / (1.0 + state[0] / 4.0))


@nb.njit
def update(state, params, depth, accepted):
    return (0.5 * state[0] + accepted - 0.1 * depth,)


@dataclass(frozen=True)
class Whim(TreePolicy):
    """Expands by chance and by how well the last rounds went."""

    width: int = setting(3, 1, 8)
    expand_at: float = setting(0.2, 0.0, 1.0)
    keep_at: float = setting(0.05, 0.0, 1.0)
    max_depth: int = setting(4, 1, 8, bounds="depth")

    name = "whim"
    source = "test"
    max_nodes = 200
    initial_state = staticmethod(initial_state)
    expand = staticmethod(expand)
    select = staticmethod(select)
    update = staticmethod(update)

    @property
    def max_width(self) -> int:
        return self.width


@dataclass
class Node:
    """A drafted node of the plain decoder: its number in the record, None if it is not there."""

    recorded: int | None
    parent: int
    rank: int
    depth: int
    path: float
    width: int = 0
    children: list[int] = field(default_factory=list)


class WhimRule:
    """Whim, written from its words."""

    def __init__(self, policy: Whim) -> None:
        self.policy, self.mood = policy, 0.0

    def begin(self) -> None:
        self.mood = 0.0

    def width(self, node: Node, number: int, u: float) -> int:
        bar = self.policy.expand_at * (0.5 + u) / (1 + self.mood / 4)
        return max(1, self.policy.width - node.depth) if node.path >= bar else 0

    def keeps(self, node: Node) -> bool:
        return node.path >= self.policy.keep_at and node.rank < 3

    def observe(self, depth: int, accepted: int) -> None:
        self.mood = 0.5 * self.mood + accepted - 0.1 * depth


class StaticRule:
    """A fixed tree."""

    def __init__(self, policy: StaticTree) -> None:
        self.shape = policy.shape

    def begin(self) -> None:
        pass

    def width(self, node: Node, number: int, u: float) -> int:
        return self.shape[number]

    def keeps(self, node: Node) -> bool:
        return True

    def observe(self, depth: int, accepted: int) -> None:
        pass


class PlainTrees:
    """Decodes with trees of really appended tokens, compared with the text; counts what is in the draft cache."""

    def __init__(self, trace: Trace, cost: CostModel, rule: Any, deepest: int, seed: int = 0) -> None:
        self.trace, self.cost, self.rule, self.deepest, self.seed = trace, cost, rule, deepest, seed
        contexts = [
            int(p) - 1 + t for p, n in zip(trace.prompt_tokens, trace.output_tokens, strict=True) for t in range(n)
        ]
        self.lowest, self.highest = min(contexts), max(contexts)
        self.rounds: list[tuple[int, ...]] = []
        self.seconds = np.zeros((trace.sequences, 4))
        self.round_s: list[list[float]] = []  # draft, policy, verify, other

    def run(self) -> PlainTrees:
        for s in range(self.trace.sequences):
            self.rule.begin()
            self.sequence(s)
        return self

    def sequence(self, s: int) -> None:
        trace = self.trace
        start, end = int(trace.offsets[s]), int(trace.offsets[s + 1])
        text = trace.token[start:end].tolist()
        prompt, budget = int(trace.prompt_tokens[s]), int(trace.budget_tokens[s])
        output: list[int] = []
        in_draft_cache = prompt - 1
        while len(output) < len(text):
            t = len(output)
            context = min(max(((prompt + t - 1) // BUCKET + 0.5) * BUCKET, self.lowest), self.highest)
            tree, passes = self.grow(start + t, min(self.deepest, budget - t - 1), int(trace.sequence_id[s]), t)
            draft_s = 0.0
            for place, expanded in enumerate(passes):
                before_s = float(self.cost.draft(place, context)) if place else 0.0
                draft_s += float(self.cost.draft(place + 1, context)) - before_s
                draft_s += float(self.cost.wider(expanded, context))
            if passes and prompt + t - 1 > in_draft_cache:
                draft_s += float(self.cost.catch_up(context))
            kept = {0}
            for number, node in enumerate(tree[1:], start=1):
                if node.parent in kept and self.rule.keeps(node):
                    kept.add(number)
            last = accepted = 0
            while True:
                wanted = text[t + accepted] if t + accepted < len(text) else None
                matching = [c for c in tree[last].children if c in kept and self.token(start + t, tree[c]) == wanted]
                if not matching:
                    break
                last, accepted = matching[0], accepted + 1
            if len(tree) > 1:
                self.rule.observe(max(tree[k].depth for k in kept), accepted)
                in_draft_cache = prompt + t + accepted - (accepted > 0 and tree[last].width == 0)
            asked = len(passes) + (tree[-1].depth < min(self.deepest, budget - t - 1))
            place = len([number for number in kept if 0 < number <= last])  # among the verified nodes
            self.rounds.append((s, t, len(tree) - 1, accepted, len(kept) - 1, place))
            self.round_s.append(
                [
                    draft_s,
                    asked * self.cost.tree_policy_step(),
                    float(self.cost.tree_verify(len(kept), context)),
                    self.cost.tree_round_overhead(),
                ]
            )
            self.seconds[s] += self.round_s[-1]
            output += text[t : t + accepted + 1]
        assert output == text

    def grow(self, row: int, limit: int, sequence: int, t: int) -> tuple[list[Node], list[int]]:
        """All drafted nodes in level order, and how many nodes each pass expanded."""
        record = self.trace.tree
        tree, passes, level = [Node(0, -1, 0, 0, 1.0)], [], [0]
        for depth in range(1, limit + 1):
            u = uniform(self.seed, sequence, t, depth - 1)
            for number in level:
                tree[number].width = self.rule.width(tree[number], number, u)
            below = []
            for number in level:
                node = tree[number]
                first = int(record.first_child[row, node.recorded]) if node.recorded is not None else 0
                known = int(record.first_child[row, node.recorded + 1]) - first if node.recorded is not None else 0
                for rank in range(node.width):
                    at = first + rank if rank < known else None
                    prob = -1.0 if at is None else record.prob[row, at - 1]
                    path = -1.0 if at is None else float(np.float32(node.path) * np.float32(prob))
                    below.append(len(tree))
                    node.children.append(len(tree))
                    tree.append(Node(at, number, rank, depth, path))
            if not below:
                break
            passes.append(sum(tree[number].width > 0 for number in level))
            level = below
        return tree, passes

    def token(self, row: int, node: Node) -> int:
        """The node's token; of an unrecorded node, the true token if its rank is the true rank."""
        if node.recorded is not None:
            return int(self.trace.tree.token[row, node.recorded - 1])
        right = self.trace.true_rank[row, node.depth - 1] == node.rank
        return int(self.trace.token[row + node.depth - 1]) if right else -1


def compare(result: Replay, plain: PlainTrees) -> None:
    assert result.rounds.rows() == plain.rounds
    np.testing.assert_allclose(result.seconds, plain.seconds, rtol=1e-9)
    log = result.rounds
    parts = np.stack([log.draft_s, log.policy_s, log.verify_s, log.other_s], axis=1)
    np.testing.assert_allclose(parts, plain.round_s, rtol=1e-9, atol=1e-15)
    sums = np.bincount(log.sequence, log.baseline_s, minlength=len(result.autoregressive_s))
    np.testing.assert_allclose(sums, result.autoregressive_s, rtol=1e-9)
    for values, counts in (
        (log.drafted, result.drafted),
        (log.accepted, result.accepted),
        (log.verified, result.verified),
    ):
        np.testing.assert_array_equal(counts, np.bincount(log.sequence, values, minlength=len(counts)))


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    width=st.integers(1, 4),
    expand_at=st.floats(0.0, 0.6),
    keep_at=st.floats(0.0, 0.3),
    max_depth=st.integers(1, 4),
)
def test_a_growing_tree_replays_as_it_decodes(
    seed: int, width: int, expand_at: float, keep_at: float, max_depth: int
) -> None:
    trace = tree_trace(seed, sequences=3, tokens=25, depth=4, width=4, nodes=341, vocabulary=7)
    policy = Whim(width, expand_at, keep_at, max_depth)
    result = replay(trace, policy, cost_table(trace, COST, policy), seed=seed, log=True)
    compare(result, PlainTrees(trace, COST, WhimRule(policy), max_depth, seed).run())
    assert result.truncated.sum() == 0


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 10_000), nodes=st.integers(1, 30))
def test_a_static_tree_replays_as_it_decodes(seed: int, nodes: int) -> None:
    """A random shape: children are dealt to nodes at random, at most four each, to depth four."""
    rng = np.random.default_rng(seed)
    children: list[list[int]] = [[]]
    depth = [0]
    while len(depth) <= nodes:
        open_nodes = [i for i in range(len(depth)) if len(children[i]) < 4 and depth[i] < 4]
        at = int(rng.choice(open_nodes))
        children[at].append(len(depth))
        children.append([])
        depth.append(depth[at] + 1)
    order, head = [0], 0
    while head < len(order):
        order += children[order[head]]
        head += 1
    policy = SparseTree(children=tuple(float(len(children[i])) for i in order))
    check_shape("given", policy.shape)
    trace = tree_trace(seed, sequences=3, tokens=25, depth=5, width=4, nodes=20, vocabulary=9)
    result = replay(trace, policy, cost_table(trace, COST, policy), log=True)
    whole = tree_trace(seed, sequences=3, tokens=25, depth=5, width=4, nodes=1364, vocabulary=9)
    compare(result, PlainTrees(whole, COST, StaticRule(policy), policy.max_draft_tokens).run())
    assert policy.max_draft_tokens == max(depth) and policy.max_verified_nodes == nodes


@pytest.mark.parametrize("policy", [Whim(3, 0.15, 0.04, 4), Cartesian(s1=3, s2=2, s3=2)], ids=["growing", "static"])
def test_nodes_that_are_accepted_because_they_are_the_text_give_the_lossless_replay(policy: TreePolicy) -> None:
    trace = tree_trace(5, sequences=6, tokens=30, depth=4, width=4, nodes=341, vocabulary=7)
    plausible = trace.tree.on_path(trace.token, trace.offsets)
    judged = replace(trace, tree=replace(trace.tree, plausible=plausible))
    table = cost_table(trace, COST, policy)
    lossless, result = (replay(each, policy, table, log=True) for each in (trace, judged))
    assert result.rounds.rows() == lossless.rounds.rows() and not result.truncated.any()
    np.testing.assert_allclose(result.seconds, lossless.seconds, rtol=1e-12)
    np.testing.assert_array_equal(reachable_depth(judged), reachable_depth(trace))


def test_a_verifier_by_plausibility_needs_every_node_of_a_shape_on_record() -> None:
    """The text tells where a lossless round ends, also below nodes that are not recorded; plausibility is not known."""
    policy = Cartesian(s1=3, s2=2, s3=2)
    whole, part = (tree_trace(3, sequences=40, tokens=30, depth=4, width=4, nodes=nodes) for nodes in (341, 12))
    table = cost_table(whole, COST, policy)
    exact, cut, lossless = (
        replay(each, policy, table, log=True)
        for each in (
            *(replace(t, tree=replace(t.tree, plausible=t.tree.on_path(t.token, t.offsets))) for t in (whole, part)),
            part,
        )
    )
    assert not lossless.truncated.any() and cut.truncated.any()
    for s in np.flatnonzero(cut.truncated == 0):
        assert exact.rounds[exact.rounds.sequence == s].rows() == cut.rounds[cut.rounds.sequence == s].rows()


@pytest.mark.parametrize("nodes", [6, 12, 24, 48])
def test_what_the_record_lacks_is_counted_and_never_guessed(nodes: int) -> None:
    """Where no round was truncated, all is as with the whole record; and truncation goes away with more nodes."""
    whole = tree_trace(3, sequences=40, tokens=30, depth=4, width=4, nodes=341)
    part = tree_trace(3, sequences=40, tokens=30, depth=4, width=4, nodes=nodes)
    policy = Whim(4, 0.15, 0.04, 4)
    table = cost_table(whole, COST, policy)
    exact, cut = replay(whole, policy, table, log=True), replay(part, policy, table, log=True)
    untouched = np.flatnonzero(cut.truncated == 0)
    for s in untouched:
        assert exact.rounds[exact.rounds.sequence == s].rows() == cut.rounds[cut.rounds.sequence == s].rows()
        np.testing.assert_array_equal(exact.seconds[s], cut.seconds[s])
    assert {6: cut.truncated.sum() > 100, 48: cut.truncated.sum() == 0}.get(nodes, True)
    assert nodes < 24 or len(untouched) > 0


def test_one_node_after_another_is_a_chain() -> None:
    """A path of k nodes costs and accepts what a fixed K does where costs of trees are those of chains."""
    trace = tree_trace(1, sequences=5, tokens=40, depth=5)
    for k in (1, 3, 5):
        path = SparseTree(children=tuple([1.0] * k + [0.0]))
        chain = replay(trace, FixedK(k=k), cost_table(trace, RampCost()), log=True)
        result = replay(trace, path, cost_table(trace, FlatTrees(), path), log=True)
        assert result.rounds.rows() == chain.rounds.rows()
        parts = [0, 2, 3]  # the policy is asked about levels, of a chain about tokens
        np.testing.assert_allclose(result.seconds[:, parts], chain.seconds[:, parts], rtol=1e-12)


@pytest.mark.parametrize(
    ("limits", "match"), [({"max_nodes": 2, "max_expanded": 99}, "max_nodes"), ({"max_expanded": 1}, "max_expanded")]
)
def test_a_policy_that_does_more_than_it_says_is_caught(
    limits: dict[str, int], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs are looked up for as many nodes as the policy announces."""
    trace = tree_trace(0, sequences=2, tokens=12, depth=3)
    for name, limit in limits.items():
        monkeypatch.setattr(Whim, name, limit)  # a kind of its own would be compiled anew
    policy = Whim(expand_at=0.01, max_depth=3)
    refusal(lambda: replay(trace, policy, cost_table(trace, COST, policy)), match=match)


class FlatTrees(RampCost):
    """Trees cost what chains of as many tokens cost."""

    @property
    def max_tree_tokens(self) -> int:
        return 40


def test_what_a_trace_or_costs_cannot_serve_is_refused() -> None:
    trace = tree_trace(0, sequences=2, tokens=12, depth=3, width=3)
    table = cost_table(trace, COST)
    for policy, match in (
        (Whim(max_depth=4), "drafts up to 4 tokens, the trace is recorded to depth 3"),
        (Whim(width=4, max_depth=3), "up to 4 children of a node, the trace is recorded to 3; give --set width=3, or"),
    ):
        with pytest.raises(InputError, match=match):
            replay(trace, policy, table)
    policy = Whim(max_depth=3)
    refusal(lambda: replay(replace(trace, tree=None), policy, table), "tree-nodes")
    assert unsupported_reason(replace(trace, tree=None), SparseTree) is None
    sampled = replace(trace, meta={**trace.meta, "decoding": {"mode": "rejection"}})
    assert "a trace of rejection sampling" in str(unsupported_reason(sampled, SparseTree))
    refusal(lambda: replay(sampled, policy, table), "a trace of rejection sampling")
    refusal(lambda: replay(trace, policy, cost_table(trace, RampCost(), policy)), "does not price trees")
    with pytest.raises(InputError, match="trees of up to 40 tokens, policy whim.* may need 201"):
        replay(trace, policy, cost_table(trace, FlatTrees(), policy))


def test_a_refusal_says_which_settings_to_give() -> None:
    """Each of those that is enough alone, at its largest such value; else those that are together."""
    trace = tree_trace(0, sequences=2, tokens=12, depth=5, width=3)
    table = cost_table(trace, FlatTrees())
    for policy, wanted in (
        (Eagle2(depth=5, nodes=30), ["top_k=3"]),
        (Eagle2(depth=5, nodes=50, top_k=3), ["nodes=39"]),
        (VCT(), ["width=1", "depth=3", "level_nodes=9"]),
        (Cape(), ["width_30=3 --set width_60=3"]),
        (FixedK(k=9), ["k=5"]),
    ):
        with pytest.raises(InputError) as refused:
            replay(trace, policy, table)
        assert f"; give {' or '.join(f'--set {advised}' for advised in wanted)}, or " in str(refused.value)
        for advised in wanted:
            changes = dict(pair.split("=") for pair in advised.split(" --set "))
            lowered = build_policy(type(policy), {**policy.settings, **changes})
            check_replayable(trace, lowered)
            check_covered(trace, lowered, table)


def test_a_trace_without_trees_is_refused_for_them_before_there_is_an_oracle() -> None:
    trace = replace(tree_trace(0, sequences=2, tokens=12, depth=5, width=3), tree=None, true_rank=None)
    refusal(lambda: predict(trace, FlatTrees(), "eagle2"), "policy eagle2: needs recorded trees")


def test_a_prediction_says_how_many_rounds_asked_for_more_than_the_trace_holds() -> None:
    prediction = predict(tree_trace(0, sequences=4, tokens=12, depth=5), COST, "fixed_k", k=2)
    rounds = prediction.rounds
    assert not prediction.notes
    noted = f"3 of {rounds} rounds asked for more than the recorded trees hold"
    assert replace(prediction, truncated_rounds=3).notes == [noted]


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0), (1, 1, 1), (0, 1), (2, 0, -1), (0, 2, 0)])
def test_child_counts_of_no_tree_are_refused(shape: tuple[int, ...]) -> None:
    refusal(lambda: check_shape("given", shape), "given")
