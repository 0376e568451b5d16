"""Cost profiles of chains and trees, measured with caches put back every time; probes that bring one up to date."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import realrun.measure.profile as profile_module
import realrun.measure.rounds
from realrun.decode.decoder import Decoder
from realrun.decode.draft import Draft
from realrun.decode.draft_model import DraftModel
from realrun.decode.rounds import Round, RoundContext
from realrun.decode.sampling import Sampler
from realrun.drafters.independent import IndependentKind
from realrun.lm.llama import FusedLlama
from realrun.measure.probe import probe
from realrun.measure.profile import LEAST_SWEEPS, profile, profile_slice
from realrun.measure.record import RecordSettings, longest_prompt, record
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
from realrun.measure.sweeps import Probe, Prober, Sweeps
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from specsim.cost.files import read_cost
from specsim.cost.probe import Probe as MachineProbe
from specsim.cost.probe import changes, with_probe
from specsim.cost.profile import profile_from_json
from specsim.cost.table import compile_table
from specsim.io.files import write_json
from specsim.policy.base import setting
from specsim.policy.tree.base import MAX_DRAFTED, limit_widths, new_tree
from specsim.policy.tree.static import StaticTree
from tests.support.checks import refusal
from tests.support.clock import time_passes
from tests.support.commands import assert_refused, call, json_of
from tests.support.tiny import VOCAB, tiny_model, tiny_pair, tiny_tokenizer

CONTEXTS, DEPTH = [4, 30, 70], 5
TABLES = ("p25_s", "median_s", "p75_s")
EVERY_TABLE = ("mean_s", *TABLES)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return profile(
        tiny_pair(), contexts=CONTEXTS, depth=DEPTH, limit_s=0, sampler=Sampler("gumbel", 0.7), tree_tokens=0
    )


def test_the_simulator_reads_a_profile(document: dict[str, Any], tmp_path: Path) -> None:
    write_json(document, tmp_path / "deep" / "profile.json")
    assert json.loads((tmp_path / "deep" / "profile.json").read_text()) == document
    cost = read_cost(tmp_path / "deep" / "profile.json")
    for tokens in range(1, DEPTH + 2):
        np.testing.assert_array_equal(cost.verify(tokens, CONTEXTS), document["mean_s"]["verify"][tokens - 1])
    refusal(lambda: cost.verify(DEPTH + 2, 30), "asked for")


@pytest.mark.parametrize("shorter", ["drafter", "target"])
def test_the_model_of_fewer_positions_bounds_what_is_measured(shorter: str) -> None:
    long, short = (tiny_model(2, seed=1, max_position_embeddings=size) for size in (160, 64))
    target, draft = (long, short) if shorter == "drafter" else (short, long)
    pair = Pair(target, IndependentKind(draft), tiny_tokenizer(), "tiny/target", "tiny/draft", ())
    message = "context 60 and depth 5 exceed the models' 64 positions"
    refusal(lambda: profile(pair, contexts=[4, 60], depth=5, limit_s=0, sampler=Sampler(), tree_tokens=0), message)
    settings = RecordSettings(max_draft_tokens=5, max_new_tokens=20)
    refusal(lambda: record(pair, [Prompt("all", [1] * 40)], settings), "65 tokens", "64 positions")
    assert record(pair, [Prompt("all", [1] * 39)], settings).output_tokens.tolist() == [20]
    assert longest_prompt(pair, 20, 5) == 39


def test_tables_have_their_shapes_and_positive_times(document: dict[str, Any]) -> None:
    assert document["contexts"] == CONTEXTS and document["target"] == "tiny/target"
    for name in EVERY_TABLE:
        table = document[name]
        assert np.shape(table["draft_step"]) == (DEPTH, len(CONTEXTS))
        assert np.shape(table["catch_up"]) == (len(CONTEXTS),)
        assert np.shape(table["verify"]) == (DEPTH + 1, len(CONTEXTS))
        assert np.shape(table["autoregressive"]) == (len(CONTEXTS),)
    for name in ("mean_s", "median_s"):
        for key in ("draft_step", "verify", "autoregressive", "policy_step"):
            assert np.min(document[name][key]) > 0


def test_catching_up_on_many_tokens_is_measured_where_the_context_has_them(document: dict[str, Any]) -> None:
    """Of the contexts 4, 30 and 70, the last has 64 tokens to lack."""
    many = document["mean_s"]["catch_up_many"]
    assert many["tokens"] == [2, 4, 8, 16, 32, 64] and np.shape(many["seconds"]) == (6, len(CONTEXTS))
    cost = profile_from_json(document, "given")
    np.testing.assert_allclose(cost.catch_up_by(16, CONTEXTS), many["seconds"][3], rtol=1e-9)


@pytest.mark.parametrize("lacking", [4, 16])
def test_a_probe_that_catches_up_feeds_all_that_its_cache_lacks(lacking: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, stream, fed = tiny_pair(), Stream(), list[int]()
    prober = Prober(pair, depth=2, tree_tokens=0, sampler=Sampler(), seed=0)
    prober.begin([5, 6, 7, 8] * 6)
    forward = prober.drafter.lm.forward
    monkeypatch.setattr(prober.drafter.lm, "forward", lambda tokens: (fed.append(len(tokens)), forward(tokens))[1])
    prober.catch_up(stream, lacking)
    assert fed == [lacking + 1] * 2 and stream.count("catch up", lacking) == 1 == stream.count("catch up")
    assert prober.drafter.lm.length == prober.target.length == prober.context


def test_progress_counts_the_precise_times() -> None:
    """Two contexts, of each a decoding step, a draft step, passes of 1 and 2 tokens, and trees of 2 and 3."""
    seen: list[tuple[int, int]] = []
    document = profile(
        tiny_pair(),
        contexts=[4, 9],
        depth=1,
        precision=0.9,
        limit_s=2,
        tree_tokens=3,
        progress=lambda *step: seen.append(step),
    )
    assert [total for _, total in seen] == [2 * 6] * document["sweeps"]
    precise, times = document["precision"]["precise"], document["precision"]["times"]
    assert times == 12 and precise <= seen[-1][0] <= times  # or the share of the limit that is over


def test_a_machine_that_slows_down_while_it_is_profiled_moves_all_costs_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured one context after the other, the first would keep their times, and the last would double them."""
    how: dict[str, Any] = {"contexts": CONTEXTS, "depth": 3, "limit_s": 0, "tree_tokens": 0}
    monkeypatch.setattr(profile_module, "LEAST_SWEEPS", 12)
    clock = time_passes(monkeypatch, lambda tokens, _: 1e-3 * (10 + tokens))
    calm = profile(tiny_pair(), **how)["mean_s"]
    np.testing.assert_allclose(calm["verify"], 1e-3 * np.arange(11, 15)[:, None] * np.ones(3), rtol=0.01)
    half = clock.passes / 2
    time_passes(monkeypatch, lambda tokens, done: 1e-3 * (10 + tokens) * (2.0 if done > half else 1.0))
    slowed = profile(tiny_pair(), **how)
    ratios = [
        np.ravel(slowed["mean_s"][key]) / np.ravel(calm[key]) for key in ("verify", "autoregressive", "draft_step")
    ]
    assert np.concatenate(ratios).min() > 1.35 and np.concatenate(ratios).max() < 1.65
    assert np.min(slowed["relative_half_width"]["verify"]) > 0.1  # intervals show that the machine changed


def test_only_what_is_not_precise_is_measured_further_and_all_of_it_in_every_fifth_sweep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only passes of 3 tokens take times that vary; after the first sweeps, the others wait for a full sweep."""
    rng, swept, run = np.random.default_rng(0), list[Stream](), Sweeps.run

    def noted(sweeps: Sweeps, wanted: Any = None) -> float:
        seconds = run(sweeps, wanted)
        swept.append(sweeps.done[-1])
        return seconds

    monkeypatch.setattr(Sweeps, "run", noted)
    time_passes(monkeypatch, lambda tokens, _: 0.01 * (rng.uniform(0.5, 1.5) if tokens == 3 else 1.0))
    profile(tiny_pair(), contexts=[4, 9], depth=4, limit_s=8, tree_tokens=0)
    passes = [{key[1] for key in sweep.points if key[0] == "verify"} for sweep in swept]
    assert passes[:5] == [{1, 2, 3, 4, 5}] * 5 and passes[5:9] == [{3}] * 4
    assert passes[9] == {1, 2, 3, 4, 5}


def test_precision_ends_the_profile_before_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only passes move, every interval is narrow as soon as it may be believed."""
    time_passes(monkeypatch, lambda tokens, _: 1e-3 * (10 + tokens))
    document = profile(tiny_pair(), contexts=[4, 9], depth=2, tree_tokens=0)
    assert document["sweeps"] == LEAST_SWEEPS and document["precision"]["largest"] < 0.01


@pytest.mark.parametrize("wrong", [{"precision": 0.0}, {"precision": 1.0}, {"limit_s": -1.0}, {"limit_s": np.nan}])
def test_a_precision_and_a_limit_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    refusal(lambda: profile(tiny_pair(), contexts=[4], **wrong), match=f"{next(iter(wrong))}=")


@pytest.mark.parametrize("contexts", [[], [9, 4], [4, 4], [1, 9], [0], [4, 154]])
def test_contexts_that_cannot_be_measured_are_refused(contexts: list[int]) -> None:
    refusal(lambda: profile(tiny_pair(), contexts=contexts, depth=5), "context")


def test_the_longest_context_fits_the_models_exactly() -> None:
    document = profile(tiny_pair(), contexts=[153], depth=5, limit_s=0, tree_tokens=3)
    assert document["contexts"] == [153] and np.min(document["mean_s"]["verify"]) > 0


# Trees: measured by trees of the sizes asked for, read by the simulator, and adding up to real rounds.


TREE_DEPTH, TREE_TOKENS = 3, 12


@pytest.fixture(scope="module")
def with_trees() -> dict[str, Any]:
    sampler = Sampler("gumbel", 0.7)
    return profile(
        tiny_pair(), contexts=CONTEXTS, depth=TREE_DEPTH, limit_s=0, sampler=sampler, tree_tokens=TREE_TOKENS
    )


def test_the_simulator_reads_the_trees(with_trees: dict[str, Any], tmp_path: Path) -> None:
    write_json(with_trees, tmp_path / "profile.json")
    assert json.loads((tmp_path / "profile.json").read_text()) == with_trees
    cost = read_cost(tmp_path / "profile.json")
    assert cost.max_tree_tokens == TREE_TOKENS
    table = compile_table(cost, max_draft_tokens=TREE_DEPTH, contexts=(4, 70), trees=True)
    assert table.tree is not None and len(table.tree.verify_s) == len(table.tree.wider_s) == TREE_TOKENS + 1
    assert (table.tree.verify_s[1:] > 0).all()
    for size, seconds in zip(
        with_trees["mean_s"]["tree"]["sizes"], with_trees["mean_s"]["tree"]["verify"], strict=True
    ):
        np.testing.assert_allclose(cost.tree_verify(size, CONTEXTS), seconds, rtol=1e-12)
    refusal(lambda: cost.tree_verify(TREE_TOKENS + 1, 30), "tree-nodes")


def test_tables_have_their_shapes(with_trees: dict[str, Any]) -> None:
    sizes = tree_sizes(TREE_TOKENS)
    for name in EVERY_TABLE:
        tree = with_trees[name]["tree"]
        assert tree["sizes"] == sizes
        assert np.shape(tree["wider"]) == np.shape(tree["verify"]) == (len(sizes), len(CONTEXTS))
        assert np.min(tree["wider"]) >= 0 and min(np.min(tree["verify"]), tree["policy_step"]) > 0
    low, middle, high = (np.asarray(with_trees[name]["tree"]["verify"]) for name in TABLES)
    assert (low <= middle).all() and (middle <= high).all()


def test_a_tree_of_the_pending_token_alone_is_a_round_that_drafts_nothing(with_trees: dict[str, Any]) -> None:
    for name in EVERY_TABLE:
        assert with_trees[name]["tree"]["verify"][0] == with_trees[name]["verify"][0]


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
    refusal(lambda: profile(tiny_pair(), contexts=[4], tree_tokens=tokens), "tree_tokens")


def test_a_chain_of_one_and_rejection_sampling_have_trees_too() -> None:
    shallow = profile(tiny_pair(), contexts=[4], depth=1, limit_s=0, sampler=Sampler("rejection", 0.9), tree_tokens=4)
    assert profile_from_json(shallow, "here").max_tree_tokens == 4


def test_trees_need_their_positions() -> None:
    """A draft of one token ends two positions after the context, a measured tree PASSES after."""
    profile(tiny_pair(), contexts=[157], depth=1, limit_s=0, tree_tokens=0)
    refusal(lambda: profile(tiny_pair(), contexts=[157], depth=1, limit_s=0, tree_tokens=2), "context 157")
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


def test_a_measured_round_begins_with_an_idle_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, what was prepared for it would otherwise be waited for, and counted, in its first draft step."""
    prober = Prober(tiny_pair(), depth=3, tree_tokens=0, sampler=Sampler(), seed=0)
    prober.begin([*range(1, 20)])
    events: list[str] = []
    for owner, name in ((prober.drafter, "commit"), (prober.decoder, "clock"), (prober.decoder, "round")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, real=real, name=name: (events.append(name), real(*a))[1])
    prober.run(Probe(2), Stream())
    assert [events[at - 2 : at] for at, name in enumerate(events) if name == "round"] == [["commit", "clock"]] * 2


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
    cost = measured.cost
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


# Probes: what they measure is what moved, and a profile from before then holds for the machine as it is now.


PROBED = [8, 40]


def calm(tokens: int, _: int) -> float:
    return 1e-3 * (10 + tokens)


def loaded(tokens: int, _: int) -> float:
    """Small passes suffer most, drafts of one token among them."""
    return calm(tokens, 0) * {1: 1.5, 2: 1.3, 3: 1.2, 4: 1.15}.get(tokens, 1.1)


def test_a_profile_with_a_probe_is_the_profile_that_the_machine_would_have_now(monkeypatch: pytest.MonkeyPatch) -> None:
    how: dict[str, Any] = {"contexts": PROBED, "depth": 6, "limit_s": 0, "tree_tokens": 0}
    with monkeypatch.context() as patch:
        time_passes(patch, calm)
        before, first = read_cost(profile(tiny_pair(), **how)), probe(tiny_pair(), contexts=[20], limit_s=0)
    with monkeypatch.context() as patch:
        time_passes(patch, loaded)
        after, second = read_cost(profile(tiny_pair(), **how)), probe(tiny_pair(), contexts=[20], limit_s=0)
    now = with_probe(before, MachineProbe.from_json(second))
    for n in range(1, 8):
        np.testing.assert_allclose(now.verify(n, PROBED), after.verify(n, PROBED), rtol=0.01)
    np.testing.assert_allclose(now.autoregressive_step(PROBED), after.autoregressive_step(PROBED), rtol=0.01)
    np.testing.assert_allclose(now.draft(6, PROBED), after.draft(6, PROBED), rtol=0.01)
    moved = {change.part: change.factor for change in changes(*map(MachineProbe.from_json, (first, second)))}
    expected = {"pass of 1": 1.5, "pass of 2": 1.3, "pass of 3": 1.2, "pass of 4": 1.15, "pass of 5": 1.1}
    assert moved == pytest.approx({**expected, "draft step": 1.5, "decoding step": 1.5}, rel=0.01)
    assert all(change.significant for change in changes(*map(MachineProbe.from_json, (first, second))))


def test_a_probe_says_how_precise_it_is_and_what_else_ran() -> None:
    document = probe(tiny_pair(), contexts=PROBED, limit_s=0)
    assert document["sweeps"] == LEAST_SWEEPS and {"others_percent", "stolen_percent"} == document["load"].keys()
    assert np.shape(document["mean_s"]["verify"]) == (5, 2) and np.shape(document["mean_s"]["draft_step"]) == (4, 2)
    assert len(document["relative_half_width"]["verify"]) == 5 and document["relative_half_width"]["draft_step"] > 0


@pytest.mark.parametrize("wrong", [{"contexts": [9, 4]}, {"contexts": [158]}, {"limit_s": -1.0}])
def test_what_cannot_be_probed_is_refused(wrong: dict[str, Any]) -> None:
    refusal(lambda: probe(tiny_pair(), **{"contexts": [8], **wrong}), match="context|limit_s")


def test_the_commands_probe_and_calibrate(tmp_path: Path) -> None:
    for name, seed in (("target", 1), ("draft", 2)):
        tiny_model(1, seed).float().save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
    models = ["--target", tmp_path / "target", "--draft-model", tmp_path / "draft"]
    sizes = ["--contexts", "8,40", "--max-draft-tokens", 4, "--tree-nodes", 4, "--minutes", 0]
    json_of(call("realrun", "profile", tmp_path / "profile.json", *models, *sizes, "--json"))
    out = ["--contexts", "20", "--seconds", 0, "--out", tmp_path / "probe.json"]
    document = json_of(call("realrun", "probe", *models, *out, "--json"))
    assert json.loads((tmp_path / "probe.json").read_text()) == document
    assert_refused(call("realrun", "probe", *models, *out), "probe.json", "--overwrite")
    shown = call("realrun", "probe", *models, "--contexts", "20", "--seconds", 0)
    assert shown.out.count("\n") == 1 and "decoding step" in shown.out
    files = [tmp_path / "profile.json", tmp_path / "probe.json"]
    now = json_of(call("specsim", "cost", "calibrate", *files, "--out", tmp_path / "now.json", "--json"))
    expected = with_probe(read_cost(files[0]), MachineProbe.from_json(document))
    written = read_cost(tmp_path / "now.json")
    for n in (1, 3, 5):
        np.testing.assert_allclose(written.verify(n, [8, 25, 40]), expected.verify(n, [8, 25, 40]))
        np.testing.assert_allclose(written.tree_verify(n, [8, 25, 40]), expected.tree_verify(n, [8, 25, 40]))
    assert now["probed"]["probe"]["date"] == document["provenance"]["date"]
    write_json({**document, "drafter": "another"}, tmp_path / "other.json")
    other = [tmp_path / "profile.json", tmp_path / "other.json"]
    assert_refused(call("specsim", "cost", "calibrate", *other, "--out", tmp_path / "n.json"), "another", "drafter")
    assert not (tmp_path / "n.json").exists()
