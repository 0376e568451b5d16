"""Samples of rounds: where each part lands, curves along contexts, tables of costs, and probes of what is missing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

import realrun.measure.sweeps as probes
from realrun.decode.rounds import Round
from realrun.decode.sampling import Sampler
from realrun.drafters.lookup import LookupKind
from realrun.lm.llama import FusedLlama
from realrun.measure.curve import FAR, along_contexts, centre, half_width, hat_functions, influences, spread
from realrun.measure.profile import LEAST_SWEEPS, profile
from realrun.measure.rounds import pass_tokens
from realrun.measure.stream import Stream
from realrun.measure.sweeps import Probe, ProbedText, Prober, probing_s
from realrun.pairs.pair import Pair
from specsim.cost.files import read_cost
from specsim.policy.registry import make_policy
from tests.support.clock import time_passes
from tests.support.pairs.inside import pair_of
from tests.support.pairs.medusa import medusa_pair
from tests.support.pairs.space import space_pair
from tests.support.tiny import VOCAB, tiny_pair
from tests.support.tree_policies import CoinTree

# Curves along contexts: lines found as they are, sums kept, interruptions bounded, few samples enough.


GRID = [10, 20, 40, 100]
grids = st.sets(st.integers(0, 500), min_size=1, max_size=5).map(sorted)
seconds = st.floats(0.5, 1.5)


def points_on(curve: dict[int, float], repeats: int) -> list[tuple[int, float]]:
    """Samples at every context from the first of the grid to its last, all on the curve."""
    grid, values = list(curve), list(curve.values())
    return [(c, float(np.interp(c, grid, values))) for c in range(grid[0], grid[-1] + 1)] * repeats


@given(grid=grids, at_first=st.floats(0.1, 1.0), at_last=st.floats(0.1, 1.0), repeats=st.integers(1, 3))
def test_a_line_is_found_as_it_is(grid: list[int], at_first: float, at_last: float, repeats: int) -> None:
    """But for the tilt, which counts for less than a hundredth of a sample."""
    line = np.interp(grid, [grid[0], grid[-1]], [at_first, at_last]) if len(grid) > 1 else np.array([at_first])
    curve = along_contexts(points_on(dict(zip(grid, line.tolist(), strict=True)), repeats), grid)
    np.testing.assert_allclose(curve, line, atol=5e-3)


@settings(max_examples=10)
@given(values=st.lists(seconds, min_size=4, max_size=4), q=st.sampled_from([None, 0.25, 0.5, 0.75]))
def test_many_samples_on_the_grid_outweigh_the_penalties(values: list[float], q: float | None) -> None:
    """Of n samples at each node, what the curve misses is the share of the penalties in n."""
    points = [(c, s) for c, s in zip(GRID, values, strict=True) for _ in range(20_000)]
    np.testing.assert_allclose(along_contexts(points, GRID, q), values, atol=5e-3)


@given(grid=grids, samples=st.lists(st.tuples(st.integers(0, 500), seconds), min_size=1, max_size=40))
def test_the_curve_gives_the_rounds_it_was_fitted_to_as_much_as_they_took(
    grid: list[int], samples: list[tuple[int, float]]
) -> None:
    """In sum, where none lies far from the curve and no bound is reached."""
    contexts, took_s = (np.array(column, dtype=np.float64) for column in zip(*samples, strict=True))
    values = along_contexts(samples, grid)
    fitted = hat_functions(contexts, grid) @ values
    far = FAR * spread(took_s - fitted)
    assume((np.abs(took_s - fitted) < 0.9 * far).all() or np.allclose(took_s, fitted, atol=1e-12))
    assume(values.min() > took_s.min() / 2)
    assert fitted.sum() == pytest.approx(took_s.sum(), rel=1e-2)


@pytest.mark.parametrize("late_s", [10.0, 1e3, 1e6])
def test_an_interruption_counts_for_no_more_than_a_few_spreads(late_s: float) -> None:
    rng = np.random.default_rng(0)
    points = [(int(c), float(s)) for c, s in zip(rng.integers(10, 101, 200), rng.normal(1, 0.05, 200), strict=True)]
    undisturbed = along_contexts(points, GRID)
    interrupted = along_contexts([*points, (40, 1.0 + late_s)], GRID)
    near = hat_functions(np.array([40.0]), GRID)[0] > 0
    assert np.abs(interrupted - undisturbed)[near].max() < FAR * 0.05 / 10
    assert (interrupted >= undisturbed - 1e-2).all()


@given(context=st.integers(0, 500), values=st.lists(seconds, min_size=1, max_size=9), grid=grids)
def test_samples_of_one_context_give_a_flat_curve(context: int, values: list[float], grid: list[int]) -> None:
    """Few as they may be: the penalties alone decide what lies elsewhere."""
    curve = along_contexts([(context, value) for value in values], grid)
    assert min(values) - 1e-9 <= curve.min() and curve.max() <= max(values) + 1e-9
    assert np.ptp(curve) < 1e-9


def test_two_samples_give_a_line() -> None:
    curve = along_contexts([(10, 1.0), (100, 2.0)], GRID)
    np.testing.assert_allclose(curve, np.interp(GRID, [10, 100], [1, 2]), atol=1e-3)
    assert (np.diff(curve) > 0).all()


def test_no_curve_leads_below_half_the_fastest_sample() -> None:
    steep = [(80, 1.0), (81, 1.1), (82, 1.2)] * 30  # the line through them is negative at 10 tokens
    assert along_contexts(steep, GRID)[0] == pytest.approx(0.5)
    assert along_contexts([(c, -s) for c, s in steep], GRID).min() >= -1.8  # differences may be negative
    for q in (None, 0.25, 0.5, 0.75):
        assert along_contexts(steep, GRID, q).min() > 0


@given(values=st.lists(seconds, min_size=1, max_size=30))
def test_quantiles_keep_the_curves_shape_and_their_order(values: list[float]) -> None:
    points = list(zip([10, 35, 90] * 10, values, strict=False))
    mean, low, middle, high = (along_contexts(points, GRID, q) for q in (None, 0.25, 0.5, 0.75))
    assert (low <= middle).all() and (middle <= high).all()
    if low.min() > min(values) / 2:
        for curve in (low, middle, high):
            assert np.ptp(curve - mean) < 1e-9 or mean.min() <= min(values) / 2 + 1e-12
    hats = hat_functions(np.array([c for c, _ in points], dtype=np.float64), GRID)
    took_s = np.array([s for _, s in points])
    assert (took_s <= hats @ middle + 1e-9).mean() >= 0.5 and (took_s >= hats @ middle - 1e-9).mean() >= 0.5


@given(values=st.lists(seconds, min_size=1, max_size=30))
def test_the_centre_of_what_lies_close_is_its_mean(values: list[float]) -> None:
    residuals = np.array(values) - np.mean(values)
    middle = centre(values)
    assert min(values) - 1e-9 <= middle <= max(values) + 1e-9
    if np.abs(residuals).max() <= FAR * spread(residuals):
        assert middle == pytest.approx(np.mean(values))
    assert centre(values, 0.5) == pytest.approx(np.median(values))


@given(contexts=st.lists(st.integers(0, 500), min_size=1, max_size=9), grid=grids)
def test_hat_functions_interpolate(contexts: list[int], grid: list[int]) -> None:
    hats = hat_functions(np.array(contexts, dtype=np.float64), grid)
    assert hats.shape == (len(contexts), len(grid)) and (hats >= 0).all()
    np.testing.assert_allclose(hats.sum(axis=1), 1)
    np.testing.assert_allclose(hats @ np.array(grid), np.clip(contexts, grid[0], grid[-1]), atol=1e-9)


def drawn_sweep(rng: np.random.Generator, true: np.ndarray[Any, Any], heavy: bool) -> list[tuple[int, float]]:
    """Samples of every context, three of each: 3 % noise of their own, 2 % of the sweep, which all have in common."""
    common, points = rng.normal(0.0, 0.02), []
    for context, seconds in zip(GRID, true.tolist(), strict=True):
        for _ in range(3):
            own = rng.normal(0.0, 0.03) + heavy * (rng.random() < 0.1) * rng.normal(0.0, 0.4)
            points.append((context, seconds * (1 + common + own)))
    return points


@pytest.mark.parametrize("heavy", [False, True], ids=["normal", "outliers"])
@pytest.mark.parametrize("sweeps", [3, 5, 20])
def test_intervals_of_correlated_samples_cover_the_truth(sweeps: int, heavy: bool) -> None:
    """Taken to be independent, the three samples of a sweep would give intervals that cover 80 % of the time."""
    rng, true = np.random.default_rng(sweeps), np.array([1.0, 1.1, 1.3, 1.6])
    covered = []
    for _ in range(300):
        means = influences([drawn_sweep(rng, true, heavy) for _ in range(sweeps)], GRID)
        covered.append(np.abs(means.values - true) <= means.relative_half_width * means.values)
    assert 0.92 < np.mean(covered) < 0.985


def test_intervals_cover_the_truth_where_they_decide_when_to_stop() -> None:
    """Stopping as soon as all intervals are narrow prefers sweeps that happen to be alike."""
    rng, true, covered = np.random.default_rng(4), np.array([1.0, 1.1, 1.3, 1.6]), []
    for _ in range(100):
        sweeps = [drawn_sweep(rng, true, False) for _ in range(LEAST_SWEEPS)]
        while (means := influences(sweeps, GRID)).relative_half_width.max() > 0.02:
            sweeps.append(drawn_sweep(rng, true, False))
        covered.append(np.abs(means.values - true) <= means.relative_half_width * means.values)
    assert np.mean(covered) > 0.9


def test_a_sum_of_times_has_the_interval_of_its_sweeps_sums() -> None:
    """Against scipy's interval of the mean over sweeps: what all parts have in common does not average out."""
    rng = np.random.default_rng(0)
    parts = [[[(10, float(s))] for s in 1 + 0.1 * n + rng.normal(0, 0.01, 12)] for n in range(3)]
    means = [influences(sweeps, [10]) for sweeps in parts]
    sums = np.sum([[sweep[0][1] for sweep in sweeps] for sweeps in parts], axis=0)
    low, high = stats.t.interval(0.95, 11, sums.mean(), stats.sem(sums))
    assert sum(mean.values[0] for mean in means) == pytest.approx(sums.mean(), rel=1e-6)
    assert half_width(np.sum([mean.moved for mean in means], axis=0)[:, 0]) == pytest.approx((high - low) / 2, rel=1e-6)


def test_a_single_sweep_has_no_interval() -> None:
    means = influences([[(10, 1.0), (20, 2.0)], [(10, 1.1)]], [10, 20])
    assert np.isnan(means.relative_half_width).tolist() == [False, True]


# Each part of a round lands where it belongs, and tables give back the costs that rounds had.


NOTHING = Round(0, 0, 0, 0, 0, 0.0, 0.0, 0.25, 0.125)
CHAIN = Round(4, 3, 1, 3, 1, 0.75, 0.5, 8.0, 1.0, step_s=(0.25, 0.125, 0.25), fed=1, asked=2)
TREE = Round(4, 9, 1, 5, 2, 0.75, 0.5, 8.0, 1.0, step_s=(0.25, 0.125, 0.25), level_nodes=(1, 4, 2), fed=1, asked=4)


def samples(stream: Stream) -> tuple[dict[Any, Any], dict[str, list[float]]]:
    return {key: points for key, points in stream.points.items() if points}, dict(stream.each)


def added(round_: Round, **how: Any) -> tuple[dict[Any, Any], dict[str, list[float]]]:
    stream = Stream()
    stream.add(round_, 30, **how)
    return samples(stream)


BEHIND, CATCHING_UP = replace(CHAIN, fed=2), replace(TREE, fed=2)
FIRST, REST = {("draft", 1): 0.25}, {("draft", 2): 0.125, ("draft", 3): 0.25}
LEVEL, LEVELS = {("tree draft", 1, 1): 0.25}, {("tree draft", 4, 2): 0.125, ("tree draft", 2, 3): 0.25}
COSTS = {"overhead": 1.0 + 0.125, "policy": 0.25}  # what drafting took beside its steps is overhead
TREE_COSTS = {"tree overhead": 1.125, "tree policy": 0.125}
PLACES: dict[str, tuple[Round, dict[str, Any], dict[Any, float], dict[str, float]]] = {
    "a chain": (CHAIN, {}, {("verify", 4): 8.0, **FIRST, **REST}, COSTS),
    "nothing drafted": (NOTHING, {}, {("verify", 1): 0.25}, {}),
    "a policy that is not asked": (replace(CHAIN, asked=0), {}, {("verify", 4): 8.0, **FIRST, **REST},
                                   {"overhead": 1.125}),
    "masks": (CHAIN, {"masks": 5}, {("tree verify", (3 + 1) * (5 + 1)): 8.0, **FIRST, **REST}, COSTS),
    "a draft that lags behind": (BEHIND, {}, {("verify", 4): 8.0, ("behind",): 0.25, **REST}, COSTS),
    "one that is scored": (BEHIND, {"scored": True}, {
        ("verify", 4): 8.0, ("scored behind",): 0.25, ("scored draft", 2): 0.125, ("scored draft", 3): 0.25}, COSTS),
    "one that always starts with several tokens": (
        BEHIND, {"target_states": True}, {("verify", 4): 8.0, **FIRST, **REST}, COSTS),
    "a tree": (TREE, {"tree": True}, {("tree verify", 6): 8.0, **LEVEL, **LEVELS}, TREE_COSTS),
    "a tree of which nothing is verified": (
        replace(TREE, verified=0), {"tree": True}, {("verify", 1): 8.0, **LEVEL, **LEVELS}, TREE_COSTS),
    "a tree that lags behind": (
        CATCHING_UP, {"tree": True}, {("tree verify", 6): 8.0, ("tree behind",): 0.25, **LEVELS}, TREE_COSTS),
}  # fmt: skip


@pytest.mark.parametrize("what", PLACES)
def test_every_part_of_a_round_has_its_place(what: str) -> None:
    round_, how, expected, costs = PLACES[what]
    points, each = added(round_, **how)
    assert points == {place: [(30, seconds)] for place, seconds in expected.items()}
    assert each == {name: [seconds] for name, seconds in costs.items()}


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


# Probes beside arms: of what is missing and nothing else, along the text, in caches that stay right.


PROMPT = [5, 6, 7, 8]
OUTPUT = np.random.default_rng(2).integers(1, VOCAB, 30).tolist()
LONGEST = len(PROMPT) + len(OUTPUT)
ENOUGH = 3
NOBODYS = Probe(99)  # a probe that is none of anybody's


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "ENOUGH", ENOUGH)


def lookup_pair() -> Pair:
    return replace(tiny_pair(), drafter=LookupKind())


PAIRS = {
    "model": tiny_pair,
    "prompt-lookup": lookup_pair,
    "medusa": medusa_pair,
    "medusa of one head": lambda: medusa_pair(heads=1),
    "space": space_pair,
    **{kind: (lambda kind=kind: pair_of(kind)) for kind in ("eesd", "self-sd", "edd")},
}


def prober_of(pair: Pair, depth: int = 2, tree_tokens: int = 3) -> Prober:
    prober = Prober(pair, depth=depth, tree_tokens=tree_tokens, sampler=Sampler(), seed=0)
    prober.warm(LONGEST)
    return prober


def probed_text(
    prober: Prober, met: Sequence[Stream], probed: Stream, texts_left: int = 1, output: Sequence[int] = OUTPUT
) -> ProbedText:
    return ProbedText(prober, met, probed, PROMPT, output, texts_left)


def run_to_its_end(text: ProbedText) -> int:
    turns = 0
    while not text.done:
        text.advance()
        turns += 1
    return turns


def lacking(prober: Prober, stream: Stream) -> list[Any]:
    """What there are too few samples of, of all that a profile of this pair can hold."""
    wanted: list[tuple[Any, ...]] = [("verify", 1)]
    for probe in prober.chains:
        wanted += (
            [("tree verify", pass_tokens(probe.masks, probe.tokens))]
            if probe.masks
            else [("verify", probe.tokens + 1), ("draft", probe.tokens)]
        )
    for size in prober.sizes:
        wanted += [("verify", 1) if size == 1 else ("tree verify", size)]
        wanted += [("tree draft", size)] * (prober.drafter.max_depth != 1)
    return [what for what in wanted if stream.count(*what) < ENOUGH]


@pytest.mark.parametrize("kind", PAIRS)
def test_probes_fill_what_is_missing_of_every_drafter(kind: str) -> None:
    prober = prober_of(PAIRS[kind](), tree_tokens=0 if kind in ("prompt-lookup", "space") else 3)
    met, probed = Stream(), Stream()
    text = probed_text(prober, [met], probed)
    owed = text.owed
    assert 0 < owed == run_to_its_end(text)
    assert not lacking(prober, probed) and probed_text(prober, [met], probed).done
    assert not any(met.points.values())


def test_the_quartiles_of_a_profile_are_those_of_its_samples() -> None:
    """Of 1 to 401 seconds at every context."""
    stream = known(Stream())
    stream.points["autoregressive",] = [(context, float(s)) for context in CONTEXTS for s in range(1, 402)]
    tables = stream.tables(CONTEXTS, DEPTH, SIZES, masks=False)
    for name, wanted in (("p25_s", 101), ("median_s", 201), ("p75_s", 301)):
        np.testing.assert_allclose(tables[name]["autoregressive"], wanted, rtol=0.01)


@pytest.mark.parametrize("kind", ["model", "medusa", "space", "eesd", "edd"])
def test_the_time_of_all_probes_is_foretold(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only passes move; those that read the text meanwhile are not foretold."""
    clock = time_passes(monkeypatch, lambda tokens, _: 1e-3 * (10 + tokens))
    pair, trees = PAIRS[kind](), 0 if kind == "space" else 5
    cost = read_cost(profile(pair, contexts=[8, 30], depth=4, limit_s=0, tree_tokens=trees))
    prober = prober_of(pair, depth=4, tree_tokens=trees)
    reading_s, text, begun_s = 0.0, probed_text(prober, [Stream()], Stream()), clock.now_s

    def reading(tokens: Sequence[int], extend: Any = prober.extend) -> None:
        nonlocal reading_s
        before_s = clock.now_s
        extend(tokens)
        reading_s += clock.now_s - before_s

    prober.extend = reading  # type: ignore[method-assign]
    run_to_its_end(text)
    foretold_s = probing_s(pair, cost, 20.0, depth=prober.depth, tree_tokens=trees)
    assert foretold_s == pytest.approx(clock.now_s - begun_s - reading_s, rel=0.15)


def test_probes_are_spread_over_the_texts_to_come() -> None:
    prober = prober_of(tiny_pair(), depth=4, tree_tokens=0)
    probed = Stream()
    turns = [run_to_its_end(probed_text(prober, [], probed, texts_left)) for texts_left in (4, 3, 2, 1)]
    assert not lacking(prober, probed)
    assert turns[0] == -(-5 * ENOUGH // 4) and max(turns) == turns[0]  # of nothing drafted, and of four lengths


def full(prober: Prober, but: Probe) -> Stream:
    """Enough samples of every probe but this one."""
    stream = Stream()
    round_ = Round(0, 0, 0, 0, 0, 1.0, 1.0, 1.0, 1.0, fed=1, asked=1)
    for _ in range(ENOUGH):
        stream.add_baseline(round_, 20)
        for probe in prober.chains:
            if probe != but:  # whose place other drafts reach, unlike its number of tokens
                steps = (1.0,) * probe.tokens
                stream.add(replace(round_, drafted=probe.tokens, verified=probe.tokens, step_s=steps), 20)
        for size in prober.sizes:
            stream.add(replace(round_, verified=size - 1, step_s=(1.0, 1.0), level_nodes=(1, size)), 20, tree=True)
    return stream


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_only_what_the_arms_do_too_seldom_is_probed(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    prober = prober_of(tiny_pair(), depth=4)
    arms = [full(prober, Probe(tokens)) for _ in range(2)]
    probed, ran = Stream(), Counter[Probe]()
    run = Prober.run

    def noted(self: Prober, probe: Probe, stream: Stream, behind: int = 0) -> None:
        ran[probe] += 1
        run(self, probe, stream, behind)

    monkeypatch.setattr(Prober, "run", noted)
    run_to_its_end(probed_text(prober, arms, probed))
    assert ran == {Probe(tokens): ENOUGH}
    assert len(probed.points["verify", tokens + 1]) == ENOUGH


def test_nothing_is_probed_where_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    prober = prober_of(tiny_pair(), depth=4)
    arms, probed = [full(prober, NOBODYS) for _ in range(2)], Stream()
    for name in ("begin", "run", "extend"):
        monkeypatch.setattr(Prober, name, None)  # calling it would raise
    text = probed_text(prober, arms, probed)
    assert text.done and text.position == 0 and not any(probed.points.values())


def test_what_one_arm_alone_does_is_probed_as_well() -> None:
    """So that its times can be predicted without its own."""
    prober = prober_of(tiny_pair(), depth=2, tree_tokens=0)
    everything, probed = full(prober, NOBODYS), Stream()
    assert probed_text(prober, [everything, Stream()], probed).owed == 3 * ENOUGH
    assert probed_text(prober, [everything, full(prober, Probe(2))], probed).owed == ENOUGH
    assert probed_text(prober, [everything, everything], probed).done


@pytest.mark.parametrize("output", [OUTPUT, OUTPUT[:2], OUTPUT[:1]], ids=len)
@pytest.mark.parametrize("kind", ["model", "edd", "medusa", "self-sd"])
@torch.inference_mode()
def test_caches_are_those_of_the_text_as_far_as_it_came(kind: str, output: list[int]) -> None:
    """Also where there are more probes than tokens."""
    prober, fresh = prober_of(PAIRS[kind](), depth=3), prober_of(PAIRS[kind](), depth=3)
    text = probed_text(prober, [], Stream(), output=output)
    positions = [text.position]
    while not text.done:
        text.advance()
        positions.append(text.position)
        if text.done:
            break
        assert prober.tokens == [*PROMPT, *output[: text.position]]
        fresh.begin(prober.tokens)
        assert prober.context == prober.target.length == fresh.target.length
        assert prober.drafter.lm.length == fresh.drafter.lm.length
        for own, other in ((prober.target, fresh.target), (prober.drafter.lm, fresh.drafter.lm)):
            if isinstance(own, FusedLlama) and isinstance(other, FusedLlama):
                for was, now in ((other.keys, own.keys), (other.values, own.values)):
                    cached = slice(0, own.length)
                    torch.testing.assert_close(now[:, :, cached], was[:, :, cached], rtol=0, atol=1e-12)
    assert positions == sorted(positions) and positions[-1] == len(output)


def test_probes_take_both_kinds_of_a_first_step() -> None:
    """A draft cache that lags behind has a token more to ingest."""
    prober = prober_of(tiny_pair(), depth=3, tree_tokens=0)
    probed = Stream()
    run_to_its_end(probed_text(prober, [], probed))
    assert probed.points["behind",] and probed.points["draft", 1]
    assert {context for context, _ in probed.points["behind",]} <= set(range(len(PROMPT) - 1, LONGEST))


def test_a_table_of_what_was_probed_has_no_gap() -> None:
    prober = prober_of(tiny_pair(), depth=3, tree_tokens=4)
    probed = Stream()
    run_to_its_end(probed_text(prober, [], probed))
    prober.begin(PROMPT)
    prober.baseline(probed, 2)
    for table in probed.tables([3, LONGEST], prober.depth, prober.sizes, masks=False).values():
        for part in (table["draft_step"], table["verify"], table["autoregressive"], table["tree"]["verify"]):
            assert np.min(part) > 0
