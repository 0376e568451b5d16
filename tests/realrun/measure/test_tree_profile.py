"""Costs of trees: measured by trees of the sizes asked for, read by the simulator, and adding up to real rounds."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import realrun.measure.rounds
from realrun.cli.main import app
from realrun.decode.decoder import Decoder
from realrun.decode.draft import Draft
from realrun.decode.draft_model import DraftModel
from realrun.decode.rounds import Round, RoundContext
from realrun.decode.sampling import Sampler
from realrun.lm.llama import FusedLlama
from realrun.measure.profile import profile, profile_slice
from realrun.measure.rounds import (
    MAX_TREE_TOKENS,
    PASSES,
    MeasuredTree,
    ScriptedTreeVerifier,
    ScriptedVerifier,
    passes,
    scripted_round,
    scripted_tree_round,
    tree_sizes,
)
from realrun.measure.stream import Stream
from realrun.pairs.pair import Pair
from specsim.cost.files import read_cost
from specsim.cost.profile import profile_from_json
from specsim.cost.table import compile_table
from specsim.io.errors import InputError
from specsim.io.files import write_json
from specsim.policy.base import setting
from specsim.policy.tree.base import MAX_DRAFTED, limit_widths, new_tree
from specsim.policy.tree.static import StaticTree
from tests.support.tiny import VOCAB, tiny_pair

CONTEXTS, DEPTH, TREE_TOKENS = [4, 30, 70], 3, 12
TABLES = ("p25_s", "median_s", "p75_s")
EVERY_TABLE = ("mean_s", *TABLES)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    sampler = Sampler("gumbel", 0.7)
    return profile(tiny_pair(), contexts=CONTEXTS, depth=DEPTH, limit_s=0, sampler=sampler, tree_tokens=TREE_TOKENS)


def test_the_simulator_reads_the_trees(document: dict[str, Any], tmp_path: Path) -> None:
    write_json(document, tmp_path / "profile.json")
    assert json.loads((tmp_path / "profile.json").read_text()) == document
    cost = read_cost(tmp_path / "profile.json")
    assert cost.max_tree_tokens == TREE_TOKENS
    table = compile_table(cost, max_draft_tokens=DEPTH, contexts=(4, 70), trees=True)
    assert table.tree is not None and len(table.tree.verify_s) == len(table.tree.wider_s) == TREE_TOKENS + 1
    assert (table.tree.verify_s[1:] > 0).all()
    for size, seconds in zip(document["mean_s"]["tree"]["sizes"], document["mean_s"]["tree"]["verify"], strict=True):
        np.testing.assert_allclose(cost.tree_verify(size, CONTEXTS), seconds, rtol=1e-12)
    with pytest.raises(InputError, match="tree-nodes"):
        cost.tree_verify(TREE_TOKENS + 1, 30)


def test_tables_have_their_shapes(document: dict[str, Any]) -> None:
    sizes = tree_sizes(TREE_TOKENS)
    for name in EVERY_TABLE:
        tree = document[name]["tree"]
        assert tree["sizes"] == sizes
        assert np.shape(tree["wider"]) == np.shape(tree["verify"]) == (len(sizes), len(CONTEXTS))
        assert np.min(tree["wider"]) >= 0 and min(np.min(tree["verify"]), tree["policy_step"]) > 0
    low, middle, high = (np.asarray(document[name]["tree"]["verify"]) for name in TABLES)
    assert (low <= middle).all() and (middle <= high).all()


def test_a_tree_of_the_pending_token_alone_is_a_round_that_drafts_nothing(document: dict[str, Any]) -> None:
    for name in EVERY_TABLE:
        assert document[name]["tree"]["verify"][0] == document[name]["verify"][0]


@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [
        (0, []),
        (1, [1]),
        (5, [1, 2, 3, 4, 5]),
        (9, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (64, [1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 23, 32, 47, 64]),
        (65, [1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 23, 32, 47, 64, 65]),
        (511, [1, 2, 3, 4, 5, 6, 7, 8, 11, 16, 23, 32, 47, 64, 95, 128, 191, 256, 383, 511]),
    ],
)
def test_sizes_end_with_the_largest_tree(tokens: int, sizes: list[int]) -> None:
    assert tree_sizes(tokens) == sizes


@pytest.mark.parametrize("tokens", [-1, 512])
def test_sizes_that_cannot_be_measured_are_refused(tokens: int) -> None:
    with pytest.raises(InputError, match="tree_tokens"):
        profile(tiny_pair(), contexts=[4], tree_tokens=tokens)


def test_no_trees_are_measured_unless_asked_for() -> None:
    plain = profile(tiny_pair(), contexts=[4], depth=1, limit_s=0, tree_tokens=0)
    assert all("tree" not in plain[name] for name in EVERY_TABLE)
    assert profile_from_json(plain, "here").max_tree_tokens == 0


def test_a_chain_of_one_and_rejection_sampling_have_trees_too() -> None:
    shallow = profile(tiny_pair(), contexts=[4], depth=1, limit_s=0, sampler=Sampler("rejection", 0.9), tree_tokens=4)
    assert profile_from_json(shallow, "here").max_tree_tokens == 4


def test_trees_need_their_positions() -> None:
    """A draft of one token ends two positions after the context, a measured tree PASSES after."""
    profile(tiny_pair(), contexts=[157], depth=1, limit_s=0, tree_tokens=0)
    with pytest.raises(InputError, match="context 157"):
        profile(tiny_pair(), contexts=[157], depth=1, limit_s=0, tree_tokens=2)
    profile(tiny_pair(), contexts=[158 - PASSES], depth=1, limit_s=0, tree_tokens=2)


@pytest.mark.parametrize("level_nodes", [1, 3, 15, 16, 64, 341, 342, MAX_TREE_TOKENS])
@pytest.mark.parametrize("verified_nodes", [0, 1, 2, 40, MAX_TREE_TOKENS - 1])
def test_a_measured_tree_has_the_passes_and_the_tokens_asked_for(level_nodes: int, verified_nodes: int) -> None:
    levels = passes(level_nodes)
    policy, tree = MeasuredTree(level_nodes, verified_nodes, levels), new_tree()
    widths, first, count = np.zeros(MAX_DRAFTED + 1, np.int32), 0, 1
    parents, expanded_nodes = [-1], set[int]()
    for level in range(levels):
        end = count
        policy.expand((0.0,), policy.params, tree, first, end, 0.5, widths)
        drafted, expanded = limit_widths(widths, first, end, MAX_DRAFTED + 1 - count)
        assert expanded == (level_nodes if level else 1) and drafted >= level_nodes
        count += drafted
        parents += [node for node in range(first, end) for _ in range(widths[node])]
        expanded_nodes |= {node for node in range(first, end) if widths[node]}
        tree.depth[end:count] = level + 1
        first = end
    assert levels == (PASSES if level_nodes < 16 else 3 if level_nodes < 342 else 2)
    keep = np.zeros(count, np.bool_)
    policy.select((0.0,), policy.params, tree, count, keep)
    verified = np.flatnonzero(keep)
    assert verified[0] == 0 and len(verified) == verified_nodes + 1 and len(parents) == count
    assert keep[[parents[node] for node in verified[1:]]].all()
    room = MAX_DRAFTED - level_nodes * levels
    unexpanded = sum(node not in expanded_nodes for node in verified)
    assert unexpanded >= min((verified_nodes + 1) // 2, room)
    if level_nodes * (levels - 1) >= verified_nodes // 2:  # the others come from expanded levels
        assert unexpanded == min((verified_nodes + 1) // 2, room)


CHAINS = [(size, behind) for size in (0, 1, 5) for behind in (0, 1)]
TREES = [(1, 1), (1, 2), (1, 9), (5, 1), (5, 20), (20, 3)]  # nodes of a level, tokens of the verification step


@pytest.mark.parametrize("sampler", [Sampler(), Sampler("gumbel", 0.8), Sampler("rejection", 0.8)], ids=str)
@pytest.mark.parametrize(("kind", "sizes"), [*(("chain", s) for s in CHAINS), *(("tree", s) for s in TREES)])
@torch.inference_mode()
def test_a_measured_round_leaves_both_caches_as_they_were(sampler: Sampler, kind: str, sizes: tuple[int, int]) -> None:
    pair, rng, context = tiny_pair(), np.random.default_rng(0), 12
    drafter = DraftModel(pair.drafter.model, ())
    loop = Decoder(pair.target, drafter, (), sampler, ScriptedVerifier(), ScriptedTreeVerifier())
    tokens = rng.integers(1, VOCAB, context + 1).tolist()
    loop.target.prefill(tokens[:-1])
    drafter.begin(tokens[:-1])
    fused = [lm for lm in (loop.target, drafter.lm) if isinstance(lm, FusedLlama)]
    assert len(fused) == 2

    def cached() -> list[torch.Tensor]:
        return [part[:, :, :context].clone() for lm in fused for part in (lm.keys, lm.values)]

    run: Any = scripted_round if kind == "chain" else scripted_tree_round
    before = cached()
    for _ in range(3):  # what is accepted is drawn anew
        round_ = run(loop, tokens, context, *sizes, rng)
        assert loop.target.length == drafter.lm.length == context
        for was, now in zip(before, cached(), strict=True):
            torch.testing.assert_close(now, was, rtol=0, atol=1e-12)
        if kind == "chain":
            size, behind = sizes
            assert (round_.drafted, round_.verified, len(round_.step_s), round_.asked) == (
                *[size] * 3,
                max(0, size - 1),
            )
            assert round_.fed == (1 + behind if size else 0)
        else:
            level_nodes, size = sizes
            assert round_.level_nodes == (1, *[level_nodes] * (passes(level_nodes) - 1))
            assert len(round_.step_s) == len(round_.level_nodes) and round_.verified == size - 1
            assert round_.asked > 0 and round_.policy_s > 0 and round_.fed == 1


def test_the_scripted_verifier_works_and_accepts_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Sampler] = []

    def worker(sampler: Sampler) -> Any:
        asked.append(sampler)
        return lambda *judged: ([], 1)

    monkeypatch.setattr(realrun.measure.rounds, "tree_verifier_for", worker)
    verifier, draft = ScriptedTreeVerifier(), Draft(tokens=[5, 6, 7, 8], parents=[-1, -1, 1, 2])
    for accept, path in ((-1, []), (0, [0]), (1, [1]), (3, [1, 2, 3])):
        verifier.accept = accept
        assert verifier(torch.zeros(5, 9), draft, RoundContext(Sampler(), 0, 0))[0] == path
    assert len(asked) == 4


@dataclass(frozen=True)
class AnyTree(StaticTree):
    """A static tree of given child counts."""

    children: tuple[float, ...] = setting((1.0,), 0, MAX_DRAFTED)

    name = "any_tree"
    source = "these tests"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(int, self.children))


def random_tree(nodes: int, deepest: int, rng: np.random.Generator) -> AnyTree:
    """A tree of so many nodes beside the root, in level order, at most `deepest` levels below it."""
    depths, children = [0], dict[int, list[int]]()
    while len(depths) <= nodes:
        parent = int(rng.integers(len(depths)))
        if depths[parent] < deepest:
            children.setdefault(parent, []).append(len(depths))
            depths.append(depths[parent] + 1)
    order = [0]
    for node in order:
        order += children.get(node, [])
    return AnyTree(tuple(float(len(children.get(node, []))) for node in order))


def predicted_over_measured(pair: Pair, contexts: list[int], slices: int, prompts: list[list[int]]) -> list[float]:
    """Of each of some random trees, the median over its rounds of the profile's seconds over the real ones."""
    rng, sampler = np.random.default_rng(3), Sampler("gumbel", 0.8)
    trees = [random_tree(nodes, 5, rng) for nodes in (3, 9, 20, 45)]
    loop = Decoder(pair.target, DraftModel(pair.drafter.model, ()), (), sampler)
    sweeps = list[Stream]()
    rounds: dict[int, list[tuple[int, bool, Draft, Round]]] = defaultdict(list)
    limit = contexts[-1] - contexts[0]
    with torch.inference_mode():
        for number in range(slices):  # in turn, since a shared machine drifts
            measured = profile_slice(
                pair, sweeps, 4, contexts=contexts, depth=5, sampler=sampler, seed=number, tree_tokens=65
            )
            for index, tree in enumerate(trees):
                tokens = list(prompts[number % len(prompts)])
                end = len(tokens) + limit
                loop.decode(tokens, 8, tree)
                loop.target.reset()
                loop.target.prefill(tokens[:-1])
                assert isinstance(loop.drafter, DraftModel)
                loop.drafter.begin(tokens[:-1])
                start = len(tokens)
                while len(tokens) + tree.max_draft_tokens < end:
                    context, t, behind = len(tokens) - 1, len(tokens) - start, loop.drafter.lm.length < len(tokens) - 1
                    log: list[Round] = []
                    _, draft = loop.round(
                        tokens, RoundContext(loop.sampler, 0, t, tree.max_draft_tokens, 0), tree, (0.0,), log
                    )
                    rounds[index].append((context, behind, draft, log[0]))
    cost = profile_from_json(measured, "here")
    ratios = []
    for index in range(len(trees)):
        shares = []
        for context, behind, draft, done in rounds[index]:
            context = min(max(context, contexts[0]), contexts[-1])
            seconds = cost.draft(len(draft.level_nodes), context) + behind * cost.catch_up(context)
            seconds += sum(cost.wider(nodes, context) for nodes in draft.level_nodes)
            seconds += cost.tree_verify(len(draft.tokens) + 1, context) + cost.tree_round_overhead()
            seconds += len(draft.level_nodes) * cost.tree_policy_step()
            shares.append(float(seconds) / done.seconds)
        ratios.append(float(np.median(shares)))
    return ratios


@pytest.mark.bench
def test_the_parts_add_up_to_rounds_of_other_trees() -> None:
    """Loosely, as the machine is shared: a part that was forgotten or counted twice shows all the same."""
    prompt = np.random.default_rng(1).integers(1, VOCAB, 20).tolist()
    ratios = predicted_over_measured(tiny_pair(), [18, 100], 2, [prompt])
    assert all(0.6 < ratio < 1.6 for ratio in ratios), ratios


@pytest.mark.bench
def test_the_parts_add_up_on_the_lab(lab_pair32: Pair, prompts: list[Any]) -> None:
    ratios = predicted_over_measured(lab_pair32, [60, 120], 4, [prompt.tokens for prompt in prompts])
    assert all(0.8 < ratio < 1.25 for ratio in ratios), ratios


def test_the_command_measures_trees_of_the_size_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    options = ["--contexts", "16", "--max-draft-tokens", "2", "--minutes", "0", "--tree-nodes"]
    for nodes, tokens in ((0, 0), (5, 6)):
        result = CliRunner().invoke(app, ["profile", str(out), *options, str(nodes), "--overwrite"])
        assert result.exit_code == 0, result.output
        assert ("verify tree of 5" in " ".join(result.output.split())) == (tokens == 6)
        assert read_cost(out).max_tree_tokens == tokens
