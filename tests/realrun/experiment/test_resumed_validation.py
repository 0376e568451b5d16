"""A validation that was interrupted goes on with what it kept, and ends as one that was not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

import realrun.experiment.forecast as forecast_costs_module
import realrun.experiment.measuring as measuring_module
import realrun.experiment.validate as validate_module
import realrun.measure.reuse as reuse
import specsim.report.validation as page
from realrun.decode.sampling import Sampler
from realrun.experiment.run import UNFINISHED, validate
from realrun.experiment.settings import ValidationSettings
from realrun.measure.record import RecordSettings
from specsim.policy.registry import POLICIES
from tests.support.checks import refusal
from tests.support.killed_commands import DEPTH, GIVEN_COSTS
from tests.support.tiny import tiny_pair, tiny_prompts

KINDS = tuple(POLICIES[name] for name in ("fixed_k", "hugging_face", "renewal_stop"))  # one carries a state
SETTINGS = ValidationSettings(
    RecordSettings(DEPTH, 12, Sampler("gumbel", 0.8, 0)), kinds=KINDS, trials=3, repeats=3, seed=3
)
MODES = {
    "gumbel": SETTINGS,
    "rejection": replace(SETTINGS, record=RecordSettings(DEPTH, 12, Sampler("rejection", 0.8))),
}
STAGES = ["record", "profile", "tune", "decode"]
# What is left to do after an interruption; the held-out prompts are recorded after tuning.
LEFT = {
    "record tuning prompts": STAGES,
    "tune": ["tune", "record", "decode"],
    "record": ["record", "decode"],
    "decode": ["decode"],
}


@pytest.fixture(autouse=True)
def stages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done, a word for each unit of work; all under the same costs, with no figures, which take long."""
    done: list[str] = []

    def noted(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            done.append(stage)
            return function(*args, **options)

        return call

    monkeypatch.setattr(page, "render_validation", lambda document: "")
    monkeypatch.setattr(reuse, "record", noted("record", reuse.record))
    monkeypatch.setattr(forecast_costs_module, "profile", noted("profile", lambda *_, **__: GIVEN_COSTS))
    monkeypatch.setattr(validate_module, "_tuned", noted("tune", validate_module._tuned))
    monkeypatch.setattr(measuring_module, "decode_sequence", noted("decode", measuring_module.decode_sequence))
    return done


def run(out: Path, settings: ValidationSettings = SETTINGS, stop: tuple[str, int] | None = None) -> Any:
    def progress(what: str, done: int, total: int) -> None:
        if stop == (what, done):
            raise KeyboardInterrupt

    return validate(tiny_pair(), tiny_prompts(), settings, out, progress)


def answer(out: Path) -> Any:
    """What no clock decides."""
    document = json.loads((out / "validation.json").read_text())
    keys = ("policy", "params", "role", "measured_tau", "measured_v_d", "rounds_identical_percent")
    rounds = [
        {key: value for key, value in row.items() if not key.endswith("_s")}
        for row in pq.read_table(out / "rounds.parquet").to_pylist()
    ]
    rows = sorted(json.dumps([row[key] for key in keys]) for row in document["rows"])
    return rows, sorted(map(json.dumps, rounds)), document["sequences"], document["output_tokens"]


@pytest.fixture(scope="module", params=MODES)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, int]:
    """A mode, the answer of an undisturbed validation under given costs, and how often it tuned."""
    out, tune = tmp_path_factory.mktemp(request.param) / "out", validate_module._tuned
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forecast_costs_module, "profile", lambda *_, **__: GIVEN_COSTS)
        patch.setattr(page, "render_validation", lambda document: "")
        tuned: list[Any] = []
        patch.setattr(validate_module, "_tuned", lambda *given: tuned.append(given) or tune(*given))
        run(out, MODES[request.param])
    return request.param, answer(out), len(tuned)


@pytest.mark.parametrize(
    "stop", [("record tuning prompts", 2), ("tune", 2), ("record", 5), ("decode", 1), ("decode", 5)]
)
def test_it_goes_on_and_ends_with_the_same_answer(
    whole: tuple[str, Any, int], tmp_path: Path, stages: list[str], stop: tuple[str, int]
) -> None:
    mode, expected, tuned = whole
    out, settings = tmp_path / "out", MODES[mode]
    with pytest.raises(BaseException, match=r"[25] of 6 sequences|^$"):  # Interrupted of a recording, KeyboardInterrupt
        run(out, settings, stop)
    first = stages.copy()
    stages.clear()
    document = run(out, settings)
    assert set(stages) == {*LEFT[stop[0]]}
    assert first.count("profile") + stages.count("profile") == 1
    assert first.count("tune") + stages.count("tune") == tuned
    assert first.count("decode") + stages.count("decode") == 3 * document["sequences"]["holdout"]
    assert answer(out) == expected
    assert sorted(path.name for path in out.iterdir()) == [
        *("forecast.json", "profile.json", "report.html", "rounds.parquet", "trace", "tuned.json"),
        *("tuning_profile.json", "validation.json"),
    ]


def test_it_goes_on_from_the_probe_that_its_policies_were_tuned_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes: list[Any] = []
    probe = forecast_costs_module.probe
    monkeypatch.setattr(
        forecast_costs_module, "probe", lambda *args, **options: probes.append(probe(*args, **options)) or probes[-1]
    )
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out", SETTINGS, ("decode", 1))
    document = run(tmp_path / "out")
    before, after = probes  # which the second start made alone
    states = document["machine_state"]
    assert [states["before"]["mean_s"], states["after"]["mean_s"]] == [before["mean_s"], after["mean_s"]]


def test_a_finished_one_is_measured_anew_on_its_trace(tmp_path: Path, stages: list[str]) -> None:
    out = tmp_path / "out"
    run(out)
    stages.clear()
    run(out, replace(SETTINGS, repeats=5, trials=2))
    assert {*stages} == {"profile", "tune", "decode"}


def test_what_another_configuration_left_unfinished_is_refused(tmp_path: Path, stages: list[str]) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(out, SETTINGS, ("decode", 1))
    for name, other in (("trials", {"trials": 9}), ("policies", {"kinds": KINDS[:2]}), ("seed", {"seed": 4})):
        words = (str(out / UNFINISHED), f"{name}=", "unfinished validation", "--overwrite")
        refusal(lambda changed=other: run(out, replace(SETTINGS, **changed)), *words)  # type: ignore[misc]
    stages.clear()
    run(out, replace(SETTINGS, repeats=5))  # more of the same is no other one
    assert stages.count("decode") == 5 * 3 - 1
    with pytest.raises(KeyboardInterrupt):
        run(out, replace(SETTINGS, trials=2), ("decode", 1))
    stages.clear()
    run(out, replace(SETTINGS, overwrite=True))
    assert {*stages} == {*STAGES}


def test_a_sequence_that_is_damaged_or_lacks_is_decoded_again_with_those_after_it(
    tmp_path: Path, stages: list[str]
) -> None:
    """Policies carry their state over; sequences of other repeats do not depend on it."""
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out", SETTINGS, ("decode", 5))
    for name in ("removed", "damaged"):
        out = tmp_path / name
        shutil.copytree(tmp_path / "out", out)
        path = out / UNFINISHED / "decoded" / "0-1.json"
        path.unlink() if name == "removed" else path.write_text(path.read_text()[:100])
        stages.clear()
        run(out)
        assert stages == ["decode"] * 6  # 0-1, 0-2, 1-2 and the third repeat
