"""`realrun validate --join`: every drafter alone and switching policies, predicted and really decoded."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from realrun.decode.sampling import Sampler
from realrun.drafters.lookup import LookupKind
from realrun.experiment.run import validate_joined
from realrun.experiment.settings import ValidationSettings
from realrun.measure.record import RecordSettings
from realrun.pairs.pair import Pair, load_pair
from realrun.pairs.prompts import Prompt, lab_prompts
from specsim.cost.files import read_cost
from specsim.cost.joined import JoinedCost
from specsim.io.errors import InputError
from specsim.policy.base import Policy
from specsim.policy.registry import SWITCH_POLICIES, build_policy
from specsim.replaying.priced import PricedTrace
from specsim.trace.files import read_trace
from specsim.trace.joined import JoinedTrace, join_traces
from specsim.trace.split import split_sequences
from tests.support.commands import assert_refused, call
from tests.support.tiny import tiny_pair, tiny_prompts

RECORD = RecordSettings(3, 12, Sampler())
KINDS = (SWITCH_POLICIES["switch_match"], SWITCH_POLICIES["first_that_drafts"])


def tiny_pairs() -> list[Pair]:
    return [replace(tiny_pair(), drafter=LookupKind(), draft_name="lookup"), tiny_pair()]


def tiny_texts() -> list[Prompt]:
    return [*tiny_prompts(2), *(Prompt("all", [7, 8, 9, 5] * k) for k in (2, 3))]


def joined_in(out: Path) -> JoinedTrace:
    return join_traces({name: read_trace(out / name) for name in ("trace-1", "trace-2")})


def replayed(row: dict[str, Any], out: Path, seed: int = 0) -> tuple[float, list[int]]:
    """The speedup of a row's policy by the files, and its rounds of each drafter."""
    trace, cost = joined_in(out), read_cost(out / "cost.json")
    _, held = split_sequences(trace, tuning_share=0.5, seed=seed)
    policy: Policy = build_policy(SWITCH_POLICIES[row["policy"]], row["params"])
    assert isinstance(cost, JoinedCost)
    run = PricedTrace(trace.select(held), cost).replay(policy, seed=seed, log=True)
    assert run.rounds is not None
    return run.speedup, [int((run.rounds.drafter == number).sum()) for number in (1, 2)]


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    out = tmp_path_factory.mktemp("joined") / "out"
    settings = ValidationSettings(RECORD, KINDS, trials=4, repeats=3)
    return validate_joined(tiny_pairs(), tiny_texts(), settings, out).as_dict(), out


def test_every_row_is_decoded_as_it_is_replayed(document: tuple[dict[str, Any], Path]) -> None:
    result, out = document
    assert json.loads((out / "validation.json").read_text()) == result
    assert not (out / "validation.partial").exists()
    assert [row["role"] for row in result["rows"]].count("alone") == 2 and len(result["rows"]) == 4
    for row in result["rows"]:
        assert row["rounds_identical_percent"] == row["output_identical_percent"] == 100, row["label"]
        speedup, rounds = replayed(row, out)
        assert row["predicted"]["estimate"] == pytest.approx(speedup) and row["rounds_of_drafters"] == rounds
        assert row["oracle_regret"] >= 0
    alone = {row["params"]["drafter"] for row in result["rows"] if row["role"] == "alone"}
    assert alone == {1, 2}


def test_the_best_switch_is_set_against_the_best_single_drafter(document: tuple[dict[str, Any], Path]) -> None:
    result, _ = document
    rows = {row["label"]: row for row in result["rows"]}
    single, switch = (rows[result["switching"][name]] for name in ("best_single", "best_switch"))
    assert single["role"] == "alone" and switch["role"] != "alone"
    for how in ("predicted", "measured"):
        difference = result["switching"][how]["difference"]
        assert difference["estimate"] == pytest.approx(switch[how]["estimate"] - single[how]["estimate"])
        assert difference["low"] <= difference["estimate"] <= difference["high"]


def test_a_finished_trace_is_used_again_and_another_refused(document: tuple[dict[str, Any], Path]) -> None:
    _, out = document
    before = (out / "trace-1" / "meta.json").read_bytes()
    settings = ValidationSettings(RECORD, KINDS[:1], trials=2, repeats=3)
    assert len(validate_joined(tiny_pairs(), tiny_texts(), settings, out).rows) == 3
    assert (out / "trace-1" / "meta.json").read_bytes() == before
    with pytest.raises(InputError, match="trace-1 was recorded"):
        validate_joined(tiny_pairs(), tiny_texts(), replace(settings, record=replace(RECORD, max_new_tokens=9)), out)


def test_what_cannot_be_joined_is_refused_before_any_work(tmp_path: Path) -> None:
    for record, message in (
        (replace(RECORD, tree_nodes=4), "draft chains"),
        (replace(RECORD, sampler=Sampler("rejection")), "draws its own text"),
    ):
        with pytest.raises(InputError, match=message):
            validate_joined(tiny_pairs(), tiny_texts(), ValidationSettings(record), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    line = ("realrun", "validate", "--join", "prompt-lookup", "--out", tmp_path / "out")
    assert_refused(call(*line, "--trace", tmp_path), "--join", "--trace")


@cache
def lab_pairs() -> tuple[Pair, ...]:
    model = load_pair(dtype="float64", predictor=None)
    names = ("prompt-lookup", "eagle")
    return tuple(load_pair(dtype="float64", drafter=name, beside=model, predictor=None) for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", [Sampler(), Sampler("gumbel", 0.8, seed=4)], ids=lambda sampler: sampler.mode)
@pytest.mark.parametrize("beside", ["eagle", "model", "both"])
def test_on_the_lab_every_round_of_every_policy_is_the_replays(beside: str, sampler: Sampler, tmp_path: Path) -> None:
    lookup, eagle = lab_pairs()
    model = load_pair(dtype="float64", beside=lookup, predictor=None)
    pairs = {"eagle": [lookup, eagle], "model": [lookup, model], "both": [lookup, eagle, model]}[beside]
    settings = ValidationSettings(RecordSettings(6, 48, sampler), trials=8, repeats=3)
    result = validate_joined(pairs, lab_prompts(lookup.tokenizer, 6), settings, tmp_path / "out").as_dict()
    assert {row["policy"] for row in result["rows"]} == SWITCH_POLICIES.keys()
    for row in result["rows"]:
        assert row["rounds_identical_percent"] == row["output_identical_percent"] == 100, row["label"]
