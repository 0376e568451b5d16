"""Cost profiles: a document that the simulator accepts, measured with caches put back every time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import realrun.measure.profile as profile_module
from realrun.decode.sampling import Sampler
from realrun.measure.profile import LEAST_SWEEPS, profile
from realrun.measure.stream import Stream
from realrun.measure.sweeps import Prober, Sweeps
from specsim.cost.files import read_cost
from specsim.cost.profile import profile_from_json
from specsim.io.errors import InputError
from specsim.io.files import write_json
from tests.support.clock import time_passes
from tests.support.tiny import tiny_pair

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
    with pytest.raises(InputError, match="asked for"):
        cost.verify(DEPTH + 2, 30)


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


def test_quartiles_surround_the_medians(document: dict[str, Any]) -> None:
    for read in (
        lambda table: table["draft_step"],
        lambda table: table["verify"],
        lambda table: table["autoregressive"],
        lambda table: table["policy_step"],
    ):
        low, middle, high = (np.asarray(read(document[name])) for name in TABLES)
        assert (low <= middle).all() and (middle <= high).all()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_a_shallow_short_profile_measures_every_cell(depth: int, seed: int) -> None:
    short = profile(tiny_pair(), contexts=[4, 9], depth=depth, limit_s=0, seed=seed, tree_tokens=0)
    for name in EVERY_TABLE:
        assert np.isfinite([*np.ravel(short[name]["draft_step"]), *np.ravel(short[name]["verify"])]).all()


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
    passes = time_passes(monkeypatch, lambda tokens, _: 1e-3 * (10 + tokens))
    calm = profile(tiny_pair(), **how)["mean_s"]
    np.testing.assert_allclose(calm["verify"], 1e-3 * np.arange(11, 15)[:, None] * np.ones(3), rtol=0.01)
    half = passes() / 2
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
    profile(tiny_pair(), contexts=[4, 9], depth=4, limit_s=3, tree_tokens=0)
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
    with pytest.raises(InputError, match=f"{next(iter(wrong))}="):
        profile(tiny_pair(), contexts=[4], **wrong)


@pytest.mark.parametrize("contexts", [[], [9, 4], [4, 4], [1, 9], [0], [4, 154]])
def test_contexts_that_cannot_be_measured_are_refused(contexts: list[int]) -> None:
    with pytest.raises(InputError, match="context") as caught:
        profile(tiny_pair(), contexts=contexts, depth=5)
    assert "\n" not in str(caught.value)


def test_the_longest_context_fits_the_models_exactly() -> None:
    profile(tiny_pair(), contexts=[153], depth=5, limit_s=0, tree_tokens=3)


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("broken", ["content", "replace"])
def test_a_failed_write_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exists: bool, broken: str
) -> None:
    path = tmp_path / "profile.json"
    if exists:
        write_json({"old": 1}, path)

    def no_space(*args: object) -> None:
        raise OSError("no space left")

    if broken == "replace":
        monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises((OSError, TypeError)):
        write_json({"new": 2, "bad": object() if broken == "content" else 0}, path)
    assert [p.name for p in tmp_path.iterdir()] == ["profile.json"] * exists
    if exists:
        assert json.loads(path.read_text()) == {"old": 1}


@pytest.mark.parametrize("trial", range(12))
def test_the_overhead_that_is_written_can_be_read(trial: int) -> None:
    """Differences of costs are noise where they are small, and a profile holds no negative time."""
    profile_from_json(profile(tiny_pair(), contexts=[4], depth=2, limit_s=0, seed=trial, tree_tokens=3), "here")
