"""Samples of rounds: each part of a round lands where it belongs, and tables give back the costs that rounds had."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from realrun.decode.rounds import Round
from realrun.measure.stream import Stream
from specsim.policy.registry import make_policy
from tests.support.tree_policies import CoinTree

NOTHING = Round(0, 0, 0, 0, 0, 0.0, 0.0, 0.25, 0.125)
CHAIN = Round(4, 3, 1, 3, 1, 0.75, 0.5, 8.0, 1.0, step_s=(0.25, 0.125, 0.25), fed=1, asked=2)
TREE = Round(4, 9, 1, 5, 2, 0.75, 0.5, 8.0, 1.0, step_s=(0.25, 0.125, 0.25), level_nodes=(1, 4, 2), fed=1, asked=4)


def samples(stream: Stream) -> tuple[dict[Any, Any], dict[str, list[float]]]:
    return {key: points for key, points in stream.points.items() if points}, dict(stream.each)


def added(round_: Round, **how: Any) -> tuple[dict[Any, Any], dict[str, list[float]]]:
    stream = Stream()
    stream.add(round_, 30, **how)
    return samples(stream)


def test_every_part_of_a_chain_has_its_place() -> None:
    points, each = added(CHAIN)
    assert points == {
        ("verify", 4): [(30, 8.0)],
        ("draft", 1): [(30, 0.25)],
        ("draft", 2): [(30, 0.125)],
        ("draft", 3): [(30, 0.25)],
    }
    assert each == {"overhead": [1.0 + 0.125], "policy": [0.25]}  # what drafting took beside its steps is overhead


def test_the_first_step_of_a_draft_that_lags_behind_is_told_apart() -> None:
    behind = replace(CHAIN, fed=2)
    points, _ = added(behind)
    assert points["behind",] == [(30, 0.25)] and ("draft", 1) not in points and ("draft", 2) in points
    points, _ = added(behind, scored=True)
    assert points["scored behind",] == [(30, 0.25)] and ("scored draft", 2) in points
    assert not any(key[0] in ("draft", "behind") for key in points)
    points, _ = added(behind, target_states=True)  # every draft of this drafter starts with several tokens
    assert points["draft", 1] == [(30, 0.25)] and ("behind",) not in points
    points, _ = added(replace(TREE, fed=2), tree=True)
    assert points["tree behind",] == [(30, 0.25)] and ("tree draft", 1, 1) not in points


def test_every_part_of_a_tree_has_its_place() -> None:
    points, each = added(TREE, tree=True)
    assert points == {
        ("tree verify", 6): [(30, 8.0)],
        ("tree draft", 1, 1): [(30, 0.25)],
        ("tree draft", 4, 2): [(30, 0.125)],
        ("tree draft", 2, 3): [(30, 0.25)],
    }
    assert each == {"tree overhead": [1.125], "tree policy": [0.125]}


def test_a_tree_of_which_nothing_is_verified_is_a_plain_pass() -> None:
    points, each = added(replace(TREE, verified=0), tree=True)
    assert points["verify", 1] == [(30, 8.0)] and ("tree verify", 1) not in points
    assert each.keys() == {"tree overhead", "tree policy"}


def test_passes_with_masks_are_counted_by_all_their_tokens() -> None:
    points, each = added(CHAIN, masks=5)
    assert points["tree verify", (3 + 1) * (5 + 1)] == [(30, 8.0)] and ("verify", 4) not in points
    assert ("draft", 3) in points and each.keys() == {"overhead", "policy"}


def test_a_round_that_drafts_nothing_says_what_a_pass_costs_and_no_more() -> None:
    points, each = added(NOTHING)
    assert points == {("verify", 1): [(30, 0.25)]} and each == {}


def test_a_policy_that_is_not_asked_tells_nothing_of_its_cost() -> None:
    _, each = added(replace(CHAIN, asked=0))
    assert each.keys() == {"overhead"}


def test_the_baseline_is_a_step_and_a_pass_over_one_token() -> None:
    stream = Stream()
    stream.add_run([NOTHING, replace(NOTHING, t=1)], 7, None, masks=False)
    points, each = samples(stream)
    assert points == {("autoregressive",): [(6, 0.375), (7, 0.375)], ("verify", 1): [(6, 0.25), (7, 0.25)]}
    assert each == {}


def test_a_run_says_for_itself_what_its_policy_did() -> None:
    """Contexts are the cached tokens: those of the prompt and of the output, but for the pending one."""
    stream = Stream()
    stream.add_run([CHAIN], 7, make_policy("fixed_k", {"k": 3}), masks=False)
    stream.add_run([TREE], 17, CoinTree(), masks=False)
    stream.add_run([CHAIN], 27, make_policy("fixed_k", {"k": 5}), masks=True)
    assert stream.points["verify", 4] == [(10, 8.0)]
    assert stream.points["tree verify", 6] == [(20, 8.0)]
    assert stream.points["tree verify", 4 * 6] == [(30, 8.0)]
    assert [c for c, _ in stream.points["draft", 2]] == [10, 30]


def test_counts_are_of_all_that_begins_alike() -> None:
    stream = Stream()
    for round_ in (TREE, replace(TREE, level_nodes=(1, 4, 4))):
        stream.add(round_, 30, tree=True)
    assert stream.count("tree draft", 4) == 3 and stream.count("tree draft", 4, 2) == 2
    assert stream.count("tree draft") == 6 and stream.count("draft") == stream.count("tree") == 0


def test_samples_survive_their_file_and_add_up() -> None:
    stream, other = Stream(), Stream()
    stream.add(CHAIN, 30)
    stream.add(TREE, 40, tree=True)
    document = json.loads(json.dumps(stream.as_dict()))
    other.merge(document)
    assert samples(other) == samples(stream)
    other.merge(document)
    assert other.points["verify", 4] == [(30, 8.0)] * 2 and other.each["policy"] == [0.25] * 2
    other.add(CHAIN, 50)
    assert stream.points["verify", 4] == [(30, 8.0)] and stream.each["policy"] == [0.25]


# Tables.

CONTEXTS, DEPTH = [10, 40, 90], 3


def verify_s(tokens: int, context: float) -> float:
    return 1e-2 + 1e-3 * (tokens % 2) + 1e-3 * tokens + 1e-5 * context  # an odd number of rows costs more


def step_s(place: int, context: float) -> float:
    return 2e-3 / place + 1e-6 * context


def wider_s(nodes: int) -> float:
    return 1e-4 * (nodes - 1)


BEHIND_S, SCORE_S = 5e-4, 3e-4
SIZES = [1, 2, 4, 8]


def known(stream: Stream) -> Stream:
    """Rounds of all kinds, at contexts that lie between those of the grid."""
    for context in range(CONTEXTS[0], CONTEXTS[-1] + 1, 2):
        took_s = verify_s(1, context)
        stream.add_baseline(Round(0, 0, 0, 0, 0, 0.0, 0.0, took_s, 1e-4), context)
        for drafted in range(1, DEPTH + 1):
            for behind, scored in ((0, False), (1, False), (0, True)):
                steps = [step_s(place, context) + scored * SCORE_S for place in range(1, drafted + 1)]
                steps[0] += behind * BEHIND_S
                verify = verify_s(drafted + 1, context)
                round_ = Round(0, drafted, 0, drafted, 0, sum(steps) + 2e-4, 3e-5 * drafted, verify, 3e-4, tuple(steps))
                stream.add(replace(round_, fed=1 + behind, asked=drafted), context, scored=scored)
        for nodes, tokens in zip(SIZES, SIZES[::-1], strict=True):
            levels = (1, nodes, nodes, nodes, nodes)
            steps = [step_s(min(place, DEPTH), context) + wider_s(n) for place, n in enumerate(levels, start=1)]
            verify = verify_s(tokens, context)
            round_ = Round(0, 9, 0, tokens - 1, 0, sum(steps) + 4e-4, 25e-5, verify, 1e-4, tuple(steps), levels, 1, 5)
            stream.add(round_, context, tree=True)
    return stream


def test_tables_give_back_the_costs_that_the_rounds_had() -> None:
    for name, table in known(Stream()).tables(CONTEXTS, DEPTH, SIZES, masks=False).items():
        near = {"atol": 2e-7, "err_msg": name}
        at = np.array(CONTEXTS)
        np.testing.assert_allclose(table["draft_step"], [step_s(place, at) for place in range(1, DEPTH + 1)], **near)
        np.testing.assert_allclose(table["catch_up"], [BEHIND_S] * 3, **near)
        np.testing.assert_allclose(table["verify"], [verify_s(n, at) for n in range(1, DEPTH + 2)], **near)
        np.testing.assert_allclose(table["autoregressive"], verify_s(1, at) + 1e-4, **near)
        np.testing.assert_allclose(table["score_step"], SCORE_S, **near)
        np.testing.assert_allclose((table["policy_step"], table["round_overhead"]), (3e-5, 5e-4), **near)
        tree = table["tree"]
        assert tree["sizes"] == SIZES
        np.testing.assert_allclose(tree["wider"], [[wider_s(n)] * 3 for n in SIZES], **near)
        np.testing.assert_allclose(tree["verify"], [verify_s(n, at) for n in SIZES], **near)
        np.testing.assert_allclose((tree["policy_step"], tree["round_overhead"]), (5e-5, 5e-4), **near)


def test_sizes_that_were_not_met_lie_between_those_that_were() -> None:
    stream = known(Stream())
    del stream.points["tree verify", 4], stream.points["verify", 3]
    table = stream.tables(CONTEXTS, DEPTH, SIZES, masks=False)["mean_s"]
    single, two, eight = (np.array(table["tree"]["verify"][i]) for i in (0, 1, 3))
    np.testing.assert_allclose(table["tree"]["verify"][2], two + (eight - two) * 2 / 6)
    np.testing.assert_allclose(table["verify"][2], (np.array(table["verify"][1]) + table["verify"][3]) / 2)
    assert (single > 0).all()


def test_sizes_that_were_met_are_told_though_nobody_asked_for_them() -> None:
    stream = known(Stream())
    stream.add(Round(0, 9, 0, 5, 0, 1.0, 1.0, 0.5, 0.0, (1.0,), (1,), 1, 1), 40, tree=True)
    tree = stream.tables(CONTEXTS, DEPTH, SIZES, masks=False)["mean_s"]["tree"]
    assert tree["sizes"] == [1, 2, 4, 6, 8] and tree["verify"][3][1] == pytest.approx(0.5)


def test_no_difference_is_negative() -> None:
    """A difference may be so by noise, a time may not."""
    stream = Stream()
    for context in CONTEXTS:
        stream.add_baseline(NOTHING, context)
        stream.add(CHAIN, context)
        stream.add(replace(CHAIN, fed=2, step_s=(0.2, 0.1, 0.2)), context)
        stream.add(replace(CHAIN, step_s=(0.2, 0.1, 0.2)), context, scored=True)
        stream.add(replace(TREE, step_s=(0.2, 0.1, 0.2), other_s=-1.0), context, tree=True)
    for table in stream.tables(CONTEXTS, DEPTH, [1, 6], masks=False).values():
        assert table["catch_up"] == [0.0] * 3 and table["score_step"] == table["tree"]["round_overhead"] == 0.0
        assert not np.any(table["tree"]["wider"])


def test_without_trees_and_with_masks_there_are_other_tables() -> None:
    assert "tree" not in known(Stream()).tables(CONTEXTS, DEPTH, [], masks=False)["mean_s"]
    stream = Stream()
    for context in CONTEXTS:
        stream.add_baseline(NOTHING, context)
        stream.add(CHAIN, context, masks=3)
    tree = stream.tables(CONTEXTS, DEPTH, [1], masks=True)["mean_s"]["tree"]
    assert tree["sizes"] == [1, 16] and not np.any(tree["wider"])
    np.testing.assert_allclose(tree["verify"], [[0.25] * 3, [8.0] * 3], atol=1e-6)
    assert tree["policy_step"] == pytest.approx(0.25) and tree["round_overhead"] == pytest.approx(1.125)
