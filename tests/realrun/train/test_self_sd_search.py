"""The search for skipped sublayers: finds the best set, goes on after a kill, leaves a drafter that loads."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain, combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import realrun.train.self_sd
from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.drafters.self_sd import SelfSDKind
from realrun.lm.variants import NOTHING, SkippedSublayers
from realrun.measure.record import RecordSettings, record
from realrun.pairs.drafter_files import load_drafter
from realrun.pairs.pair import Pair
from realrun.train.self_sd import (
    JOURNAL,
    REPORT,
    Search,
    SelfSDSettings,
    Trial,
    measure_costs,
    sublayers,
    suggest,
    train_self_sd,
)
from specsim.io.errors import InputError
from specsim.policy.chain.fixed_k import FixedK
from specsim.replaying.prediction import predict_policy
from specsim.replaying.priced import PricedTrace
from tests.support.checks import refusal
from tests.support.small_targets import alone, quiet, small_target
from tests.support.tiny import tiny_prompts
from tests.support.trainings import LAYERS, made_up_costs

SETTINGS = SelfSDSettings(trials=7, max_new_tokens=16, max_draft_tokens=4, cost_repeats=4)
PROMPTS = tiny_prompts(3)


def pair() -> Pair:
    return alone(small_target(layers=LAYERS))


@pytest.fixture
def _exact_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(realrun.train.self_sd, "measure_costs", made_up_costs)


def searched(out: Path, **changes: Any) -> dict[str, Any]:
    return train_self_sd(pair(), PROMPTS, replace(SETTINGS, **changes), out, quiet).as_dict()


@pytest.mark.usefixtures("_exact_costs")
def test_all_is_written_down_and_the_drafter_loads(tmp_path: Path) -> None:
    document = searched(tmp_path)
    assert len(document["trials"]) == SETTINGS.trials
    assert document["best"]["value"] == max(trial["value"] for trial in document["trials"])
    assert json.loads((tmp_path / REPORT).read_text())["trials"] == document["trials"]
    model = pair().target
    target, loaded = load_drafter(tmp_path, model)
    assert isinstance(loaded, SelfSDKind) and target is model
    assert loaded.facts == {name: document[name] for name in ("attention", "mlp")}
    refusal(lambda: load_drafter(tmp_path, small_target(layers=4)), "trained on tiny/target")


@pytest.mark.usefixtures("_exact_costs")
def test_a_set_is_worth_what_its_recorded_trace_says(tmp_path: Path) -> None:
    document = searched(tmp_path)
    _, drafter = load_drafter(tmp_path, pair().target)
    assert isinstance(drafter, SelfSDKind)
    settings = RecordSettings(SETTINGS.max_draft_tokens, SETTINGS.max_new_tokens)
    trace = record(replace(pair(), drafter=drafter), PROMPTS, settings)
    search = Search(pair(), [], SETTINGS, made_up_costs())
    by_length = [
        predict_policy(PricedTrace(trace, search.cost(drafter.skips)), FixedK(k)).speedup.estimate for k in range(1, 5)
    ]
    assert document["predicted_speedup"] == max(by_length) == document["prediction"]["speedup"]["estimate"]
    assert document["k"] == 1 + by_length.index(max(by_length))
    assert document["first_token_accepted_share"] == (trace.match_len > 0).mean()


@pytest.mark.usefixtures("_exact_costs")
def test_the_search_finds_the_best_of_all_sets(tmp_path: Path) -> None:
    document = searched(tmp_path, trials=40)  # of 64
    whole = range(LAYERS)
    every = [frozenset(s) for s in chain.from_iterable(combinations(whole, n) for n in range(LAYERS + 1))]
    texts = [
        (p.tokens, Decoder(*pair().make_drafter(), (), Sampler()).decode(p.tokens, 16, None).tokens) for p in PROMPTS
    ]
    search = Search(pair(), texts, SETTINGS, made_up_costs())
    values = [search.try_out(SkippedSublayers(*both)).value for both in product(every, every) if any(both)]
    assert document["best"]["value"] == max(values)
    assert np.median([trial["value"] for trial in document["trials"]]) > np.median(values)


@pytest.mark.usefixtures("_exact_costs")
def test_a_torn_trial_is_searched_again(tmp_path: Path) -> None:
    whole = searched(tmp_path / "whole")

    def killed(what: str, done: int, total: int) -> None:
        if (what, done) == ("search", 5):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_self_sd(pair(), PROMPTS, SETTINGS, tmp_path / "killed", killed)
    with open(tmp_path / "killed" / JOURNAL, "ab") as journal:
        journal.write(b'{"op_code":4,')  # a line that was being written
    again = train_self_sd(pair(), PROMPTS, SETTINGS, tmp_path / "killed", quiet).as_dict()
    for key in ("trials", "best", "prediction", "attention", "mlp"):
        assert again[key] == whole[key]


@pytest.mark.usefixtures("_exact_costs")
def test_a_search_can_be_given_more_trials(tmp_path: Path) -> None:
    short, longer = searched(tmp_path, trials=4), searched(tmp_path, trials=6)
    assert longer["trials"][:4] == short["trials"] and len(longer["trials"]) == 6
    assert longer["trials"] == searched(tmp_path / "at once", trials=6)["trials"]


@pytest.mark.usefixtures("_exact_costs")
def test_a_folder_of_another_search_is_refused(tmp_path: Path) -> None:
    searched(tmp_path, trials=2)
    for name, value in {"seed": 1, "max_draft_tokens": 3, "keep_ends": 1, "temperature": 0.7}.items():
        with pytest.raises(InputError, match=f"another search.*{name}") as caught:
            searched(tmp_path, trials=2, **{name: value})
        assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("_exact_costs")
def test_the_ends_are_kept_where_asked(tmp_path: Path) -> None:
    document = searched(tmp_path, keep_ends=1, trials=8)
    assert {layer for trial in document["trials"] for name in ("attention", "mlp") for layer in trial[name]} == {1}
    refusal(lambda: searched(tmp_path / "none", keep_ends=2), "leaves none of 3 layers")


def test_no_prompts_or_too_long_ones_are_refused(tmp_path: Path) -> None:
    refusal(lambda: train_self_sd(pair(), [], SETTINGS, tmp_path, quiet), "at least 1")
    refusal(lambda: searched(tmp_path, max_new_tokens=140), "160 positions")


def test_measured_costs_bind_at_the_corners_and_in_between() -> None:
    costs = measure_costs(pair(), (4, 30), SETTINGS.max_draft_tokens, 8, Sampler(), 0, quiet)
    search = Search(pair(), [], SETTINGS, costs)
    everything = frozenset(range(LAYERS))
    corner = np.array(costs.draft_step)
    assert corner.shape == (2, 2, SETTINGS.max_draft_tokens, 2) and (corner > 0).all()
    for skips, expected in [
        (NOTHING, corner[0, 0]),
        (SkippedSublayers(frozenset(), everything), corner[0, 1]),
        (SkippedSublayers(everything, frozenset()), corner[1, 0]),
        (SkippedSublayers(everything, everything), corner[1, 1]),
        (SkippedSublayers(frozenset({2}), frozenset()), 2 / 3 * corner[0, 0] + 1 / 3 * corner[1, 0]),
    ]:
        np.testing.assert_allclose(search.cost(skips).draft_step_s, expected)
    assert corner[0, 0].mean() > corner[1, 1].mean()  # skipping everything saves time
    assert search.cost(NOTHING).catch_up_s.tolist() == [0.0, 0.0]


def test_the_measured_objective_decodes_for_real(tmp_path: Path) -> None:
    document = searched(tmp_path, objective="measured", trials=4)
    for trial in document["trials"]:
        assert trial["value"] == trial["tokens_per_s"] > 0
    again = searched(tmp_path, objective="measured", trials=4)  # all is known, nothing is timed again
    assert again["trials"] == document["trials"] and again["costs"] == document["costs"]


def suggested(trials: int, seed: int = 5) -> list[SkippedSublayers]:
    """One set after the other, each worth its attention sublayers less its MLPs."""
    choices = sublayers(2, 0)
    tried: list[Trial] = []
    for _ in range(trials):
        skips = suggest(choices, tried, seed)
        tried.append(Trial(skips, 1, 0.0, float(len(skips.attention) - len(skips.mlp))))
    return [trial.skips for trial in tried]


def test_suggestions_depend_on_seed_and_trials_alone() -> None:
    assert suggested(14) == suggested(14) != suggested(14, seed=6)


def test_no_set_comes_twice_before_all_have_been_tried() -> None:
    sets = suggested(16)
    assert len(set(sets[:15])) == 15 and NOTHING not in sets  # all of 16 but the one that skips nothing
    assert sets[15] in sets[:15]


def test_costs_that_contradict_themselves_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(realrun.train.self_sd, "measure_costs", made_up_costs)
    assert searched(tmp_path / "right", trials=2)["warnings"] == []
    right = made_up_costs()
    wrong = replace(right, draft_step=(np.array(right.draft_step) * 0.5).tolist())
    monkeypatch.setattr(realrun.train.self_sd, "measure_costs", lambda *_: wrong)
    (warning,) = searched(tmp_path / "wrong", trials=2)["warnings"]
    assert "at most 1 is possible" in warning
    wrong = made_up_costs()
    wrong.draft_step[1][0] = (np.array(wrong.draft_step[0][0]) * 1.3).tolist()
    monkeypatch.setattr(realrun.train.self_sd, "measure_costs", lambda *_: wrong)
    (warning,) = searched(tmp_path / "slower", trials=2)["warnings"]
    assert "made measured draft steps slower" in warning
