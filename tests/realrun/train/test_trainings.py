"""What holds for every training: it goes on after a kill, refuses what is another's, writes its files, and learns."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import realrun.train.self_sd
from realrun.decode.decoder import Decoder
from realrun.decode.draft_model import DraftModel
from realrun.decode.sampling import Sampler
from realrun.measure.record import RecordSettings, record
from realrun.pairs.drafter_files import LAB_DRAFTERS, has_lab_drafter, load_drafter, read_drafter, training_recipe
from realrun.pairs.pair import Pair, load_pair
from realrun.train.common.folder import CHECKPOINT, LOG, PLAN
from realrun.train.common.loop import LoopSettings
from realrun.train.common.lora import AdapterSettings
from realrun.train.medusa import Medusa2Settings
from realrun.train.registry import TRAININGS
from realrun.train.self_sd import JOURNAL, SelfSDSettings
from realrun.train.space import SpaceSettings
from specsim.io.errors import InputError
from specsim.policy.chain.fixed_k import FixedK
from tests.support.checks import refusal
from tests.support.small_targets import alone, small_target
from tests.support.tiny import random_prompts, tiny_pair, tiny_prompts
from tests.support.trainings import CASES, LOOP, Case, made_up_costs, word_text

UNTIMED = ("seconds", "tokens_per_second", "peak_memory_bytes", "provenance", "drafter", "predictor")
ON_TEXT = [name for name, case in CASES.items() if case.on_text]
FROZEN = ("eesd", "medusa", "edd", "vdm", "eagle", "eagle3")
slow = pytest.mark.slow


def some(names: list[str] | tuple[str, ...], fast: str) -> Any:
    """All of these, of which the default run takes one."""
    return pytest.mark.parametrize("name", [name if name == fast else pytest.param(name, marks=slow) for name in names])


@pytest.fixture(autouse=True, scope="module")
def _exact_costs() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(realrun.train.self_sd, "measure_costs", made_up_costs)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """(folder, document) of every case, trained once."""
    done: dict[str, tuple[Path, dict[str, Any]]] = {}

    def get(name: str) -> tuple[Path, dict[str, Any]]:
        if name not in done:
            out = tmp_path_factory.mktemp("trained") / "out"
            done[name] = out, CASES[name].run(out)
        return done[name]

    return get


class Killed(BaseException):
    pass


def stopping(after: int) -> Callable[[str, int, int], None]:
    """Progress that kills at so manieth call."""
    calls: list[str] = []

    def progress(what: str, done: int, total: int) -> None:
        calls.append(what)
        if len(calls) == after:
            raise Killed

    return progress


def timeless(value: Any) -> Any:
    """A document without what a clock or a path decides."""
    if isinstance(value, dict):
        return {key: timeless(inner) for key, inner in value.items() if key not in UNTIMED}
    return value


def file_of(case: Case, document: dict[str, Any]) -> Path:
    return Path(document[case.training.trains])


def test_every_training_is_tested_here() -> None:
    elsewhere = {"draft"}  # its folder is a model: test_exit_and_heads_training.py
    assert {case.name for case in CASES.values()} | elsewhere == {training.name for training in TRAININGS}


@pytest.mark.parametrize("name", CASES)
def test_killed_twice_it_ends_with_the_same_curve_and_weights(name: str, trained: Any, tmp_path: Path) -> None:
    case, (whole_out, whole) = CASES[name], trained(name)
    pair = case.target()
    before = copy.deepcopy(pair.target.state_dict())
    for calls in (4, 2):
        with pytest.raises(Killed):
            case.run(tmp_path / "out", pair, progress=stopping(calls))
        assert not (tmp_path / "out" / file_of(case, whole).name).exists()
        assert all(torch.equal(value, before[key]) for key, value in pair.target.state_dict().items())
        torch.manual_seed(calls)  # whatever happened in between
    again = case.run(tmp_path / "out", pair)
    assert timeless(again) == timeless(whole)
    assert all(torch.equal(value, before[key]) for key, value in pair.target.state_dict().items())
    assert all(parameter.grad is None for parameter in pair.target.parameters())
    for path in (LOG, PLAN, JOURNAL):
        ours, theirs = tmp_path / "out" / path, whole_out / path
        assert ours.exists() == theirs.exists() and (not ours.exists() or ours.read_bytes() == theirs.read_bytes())
    files = [file_of(case, whole).name, *([] if name == "self-sd" else [CHECKPOINT])]
    for file in files:
        ours, theirs = (load_file(folder / file) for folder in (tmp_path / "out", whole_out))
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("name", CASES)
def test_another_seed_is_another_training(name: str, trained: Any, tmp_path: Path) -> None:
    case, (out, document) = CASES[name], trained(name)
    change: dict[str, Any] = {"loop": replace(LOOP, seed=1)} if case.on_text else {"seed": 1}
    if name != "self-sd":  # whose first sets are the same for all
        assert case.run(tmp_path / "out", **change)["history"] != document["history"]
    refusal(lambda: case.run(out, **change), "seed")


@pytest.mark.parametrize("name", CASES)
def test_what_is_anothers_is_refused_in_one_line(name: str, trained: Any, tmp_path: Path) -> None:
    case, (out, document) = CASES[name], trained(name)
    target = tiny_pair((0,)) if case.training.beside_draft else alone(small_target("qwen3"))
    if case.training.beside_draft:
        target = replace(target, target=small_target("qwen3", layers=2))
    another = next(other for key, other in CASES.items() if other.on_text and other.name != case.name)
    (tmp_path / "file").write_text("")
    attempts: dict[str, Callable[[], object]] = {
        next(iter(case.other)).removeprefix("backbone_"): lambda: case.run(out, **case.other),
        "weights|architecture|target|Qwen3": lambda: case.run(out, target),
        "is a file; give a folder as --out": lambda: case.run(tmp_path / "file"),
    }
    if case.on_text:
        attempts["text_digests"] = lambda: case.run(out, text=word_text(5))
        attempts["steps=5, asked for 6"] = lambda: case.run(out, loop=replace(LOOP, steps=6))
        attempts["drafter="] = lambda: another.run(out)
    else:
        attempts["prompts"] = lambda: case.run(out, prompts=tiny_prompts(12, seed=5))
    before = file_of(case, document).read_bytes()
    for says, attempt in attempts.items():
        with pytest.raises(InputError, match=says) as caught:
            attempt()
        message = str(caught.value)
        assert "\n" not in message and ("--out" in message or "another search" in message)
    assert file_of(case, document).read_bytes() == before


@pytest.mark.parametrize("name", CASES)
def test_a_finished_training_is_read_not_repeated(name: str, trained: Any) -> None:
    case, (out, document) = CASES[name], trained(name)
    assert json.loads(json.dumps(document)) and file_of(case, document).exists()
    assert str(out) not in json.dumps({**document, case.training.trains: ""})
    if case.on_text:
        log = [json.loads(line) for line in (out / LOG).read_text().splitlines()]
        assert log == document["history"] and [row["step"] for row in log] == [0, 2, 4, 5]
        assert document["tokens"] == 5 * 4 * 24 and document["parameters"] > 0
        facts = read_drafter(out).facts
        assert facts["held_out"] == {"start": log[0]["held_out"], "end": log[-1]["held_out"]}
    # What has no influence on the result may differ.
    again = case.result(out, loop=replace(LOOP, checkpoint_s=9.0)) if case.on_text else case.result(out)
    assert {**timeless(again.as_dict()), "loop": 0} == {**timeless(document), "loop": 0}
    title, columns, rows = again.summary()
    assert title and rows and all(len(row) == len(columns) for row in rows)


@some([name for name, case in CASES.items() if case.falls], fast="eesd")
def test_it_learns(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    loop = replace(LOOP, steps=case.steps, batch_windows=8, warmup_steps=3, log_every=10)
    held_out = case.run(tmp_path / "out", loop=loop)["held_out"]
    for figure, share in case.falls.items():
        assert held_out["end"][figure] < share * held_out["start"][figure], figure


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        pytest.param(name, architecture, marks=[] if architecture == "llama" else slow)
        for name in FROZEN
        for architecture in ("llama", "qwen2", "qwen3", "mistral")
    ],
)
def test_the_drafter_decodes_what_its_target_would(name: str, architecture: str, tmp_path: Path) -> None:
    case, target = CASES[name], small_target(architecture)
    document = case.run(tmp_path / "out", alone(target))
    _, drafter = load_drafter(tmp_path / "out", target)
    assert document["kind"] == name and drafter.name == ("model" if name == "vdm" else name)
    assert document["parameters"] == sum(value.numel() for value in read_drafter(tmp_path / "out").tensors.values())
    pair = replace(alone(target), drafter=drafter)
    loop, plain = Decoder(*pair.make_drafter(), (), Sampler()), Decoder(target, DraftModel(target, ()), (), Sampler())
    for prompt in random_prompts(2):
        assert loop.decode(prompt, 16, FixedK(3)).tokens == plain.decode(prompt, 16, None).tokens


@pytest.mark.parametrize("name", ON_TEXT)
def test_bfloat16_trains_float32_masters_on_a_bfloat16_target(name: str, tmp_path: Path) -> None:
    target = small_target(dtype=torch.bfloat16)
    document = CASES[name].run(tmp_path, alone(target), loop=replace(LOOP, dtype="bfloat16"))
    assert np.isfinite(list(document["held_out"]["end"].values())).all() and target.dtype == torch.bfloat16
    masters = [v.dtype for k, v in load_file(tmp_path / CHECKPOINT).items() if k.startswith("state.")]
    assert masters and set(masters) == {torch.float32}
    stored = [value.dtype for value in read_drafter(tmp_path).tensors.values() if value.is_floating_point()]
    assert set(stored) == {torch.bfloat16}
    assert load_drafter(tmp_path, target)[0].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "changes"),
    [("eesd", {}), ("medusa", {}), ("edd", {}), ("vdm", {}), ("eagle", {"noise": 0.0}), ("eagle3", {})],
)
def test_pieces_of_a_batch_give_the_whole_batchs_step(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Blocks are of one length in all pieces; EAGLE's noise is drawn for each, and so are dropout and masks."""
    whole, pieces = (
        CASES[name].run(tmp_path / str(micro), loop=replace(LOOP, micro_windows=micro), **changes)["history"]
        for micro in (0, 3)  # 3 and 1 windows of 4
    )
    for row, other in zip(whole[1:], pieces[1:], strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-9)


@pytest.mark.parametrize(("name", "ahead"), [("medusa", 3), ("medusa one stage", 3), ("space", 3)])
def test_windows_too_short_for_what_is_drafted_at_once_are_refused(name: str, ahead: int, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"windows of 3 tokens are too short for {ahead} drafted at once"):
        CASES[name].run(tmp_path / "out", loop=replace(LOOP, window_tokens=3))
    with pytest.raises(InputError, match="windows of 200 tokens; this target reads at most 160"):
        CASES[name].run(tmp_path / "out", loop=replace(LOOP, window_tokens=200))
    assert not (tmp_path / "out" / "drafter.safetensors").exists()


@pytest.mark.parametrize("name", ["medusa one stage", "space"])
def test_only_training_an_adapter_needs_peft(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(InputError, match="needs the package peft; install it with `pip install peft`") as refusal:
        CASES[name].run(tmp_path / "none")
    assert "\n" not in str(refusal.value) and not (tmp_path / "none").exists()
    CASES["space full"].run(tmp_path / "full")


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (Medusa2Settings, {"loss": "both"}, "loss='both' of Medusa2Settings is unknown; choose one of text, distill"),
        (Medusa2Settings, {"schedule": "ramp"}, "schedule='ramp'"),
        (Medusa2Settings, {"lambda_0": 0.0}, "lambda_0=0.0 of .* give more than 0"),
        (AdapterSettings, {"rank": 0}, "rank=0"),
        (AdapterSettings, {"alpha": -1.0}, "alpha=-1.0"),
        (AdapterSettings, {"dropout": 1.0}, "dropout=1.0 of .* less than 1"),
        (SpaceSettings, {"masks": 0}, "masks=0 of SpaceSettings is out of range; give at least 1 and at most 16"),
        (SpaceSettings, {"masks": 17}, "masks=17 of SpaceSettings"),
        (SpaceSettings, {"p_ar": 1.5}, "p_ar=1.5 of .* give at least 0 and at most 1"),
        (SpaceSettings, {"lr": 0.0}, "lr=0.0 of .* give more than 0"),
        (SpaceSettings, {"examples": 0}, "examples=0 of"),
        (SelfSDSettings, {"trials": 0}, "trials=0 of"),
        (SelfSDSettings, {"objective": "luck"}, "objective='luck' of .* choose one of predicted, measured"),
        (SelfSDSettings, {"keep_ends": -1}, "keep_ends=-1 of"),
        (SelfSDSettings, {"cost_repeats": 1}, "cost_repeats=1 of .* give at least 2"),
        (SelfSDSettings, {"max_draft_tokens": 0}, "max_draft_tokens=0 of"),
        (SelfSDSettings, {"temperature": -1.0}, "temperature=-1.0 of"),
    ],
)
def test_settings_that_are_refused(kind: Any, settings: dict[str, Any], message: str) -> None:
    refusal(lambda: kind(**settings), match=message)


def test_settings_of_edd_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for changes, says in (
        ({"states_after": 4}, "^states after 4 of 3 layers; choose 1 to 3$"),
        ({"states_after": -1}, "^states_after=-1 of EddSettings is out of range; give at least 1$"),
        ({"shortest_block": 1}, "^shortest_block=1 of EddSettings is out of range; give at least 2$"),
        ({"shortest_block": 6, "longest_block": 5}, "give the shortest first$"),
        ({"loss": "l2"}, "^loss='l2' of EddSettings is unknown; choose one of kl, text$"),
        ({"lr": 0.0}, "give more than 0$"),
    ):
        with pytest.raises(InputError, match=says):
            CASES["edd"].run(tmp_path / "a", **changes)
    for name, value in (("lr", 0.0), ("class_weight", -1.0), ("noise", -0.1), ("lr", float("nan"))):
        with pytest.raises(InputError, match=f"{name}=.* of EagleSettings is out of range; give"):
            CASES["eagle"].run(tmp_path / "a", **{name: value})
    assert not (tmp_path / "a").exists()


def test_the_default_of_edds_states_is_no_other_training(tmp_path: Path) -> None:
    document = CASES["edd"].run(tmp_path)
    assert len({row["block"] for row in document["history"][1:]}) > 1  # drawn anew in every step
    CASES["edd"].run(tmp_path, states_after=1)  # of three layers, one below the fourth-to-last state
    with pytest.raises(InputError, match=r"states_after=1, asked for 2; .*give another --out$"):
        CASES["edd"].run(tmp_path, states_after=2)


# A trace tells how its drafter was trained: every setting that decides a training changes what it says.


SHORT = replace(LOOP, steps=2)
OTHER_LOOP: dict[str, Any] = {
    "steps": 3, "batch_windows": 2, "window_tokens": 20, "warmup_steps": 2, "seed": 1, "dtype": "float32",
    "micro_windows": 2, "log_every": 1, "betas": (0.8, 0.999),
}  # fmt: skip


def recipe_of(case: str, folder: Path, loop: LoopSettings = SHORT, **options: Any) -> dict[str, Any]:
    """What a file says after a training that ran."""
    CASES[case].run(folder, loop=loop, **options)
    return training_recipe(folder)


def test_every_setting_that_decides_a_training_is_in_its_recipe(tmp_path: Path) -> None:
    whole = {field.name for field in dataclasses.fields(LoopSettings)} - {"checkpoint_s", "device"}
    assert set(OTHER_LOOP) == whole  # the device is the only one here, the time between checkpoints decides nothing
    recipes = [recipe_of("eesd", tmp_path / "as it is")]
    recipes += [recipe_of("eesd", tmp_path / n, replace(SHORT, **{n: v})) for n, v in OTHER_LOOP.items()]
    recipes += [
        recipe_of("eesd", tmp_path / n, **{n: v}) for n, v in {"lr": 0.02, "layers": 2, "exit_layers": 0}.items()
    ]
    recipes += [recipe_of("eesd", tmp_path / "other text", text=word_text(3))]
    assert len({json.dumps(recipe, sort_keys=True) for recipe in recipes}) == len(recipes)
    assert all(recipe["not_recorded"] == [] for recipe in recipes)
    assert recipe_of("eesd", tmp_path / "saved less often", replace(SHORT, checkpoint_s=60.0)) == recipes[0]


def test_the_optimizer_is_the_one_that_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[torch.optim.Optimizer] = []
    really, clipped = torch.optim.AdamW, list[float]()
    monkeypatch.setattr(torch.optim, "AdamW", lambda *given, **named: ran.append(really(*given, **named)) or ran[-1])
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(
        torch.nn.utils, "clip_grad_norm_", lambda parameters, norm: clipped.append(norm) or clip(parameters, norm)
    )
    recipe = recipe_of("medusa direct", tmp_path)
    (optimizer,) = ran
    optimizer_facts, group = recipe["optimizer"], optimizer.param_groups[0]
    assert optimizer_facts["name"] == type(optimizer).__name__ and set(clipped) == {
        optimizer_facts["max_gradient_norm"]
    }
    assert (
        tuple(optimizer_facts["betas"]) == group["betas"] and optimizer_facts["weight_decay"] == group["weight_decay"]
    )
    assert recipe["learning_rates"] == [0.01, 0.04] and recipe["settings"]["schedule"] == "constant"


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.on_text])
def test_a_trace_tells_the_recipe_of_its_drafter(case: str, tmp_path: Path) -> None:
    pair = CASES[case].target()
    recipe = recipe_of(case, tmp_path, pair=pair)
    target, drafter = load_drafter(tmp_path, pair.target)
    trained = Pair(target, drafter, pair.tokenizer, "tiny", case, (), training=recipe)
    trace = record(trained, tiny_prompts(2), RecordSettings(3, 6))
    assert trace.meta["drafter_facts"] == {**drafter.facts, "training": recipe}
    assert recipe["objective"] and recipe["text_digests"] and recipe["not_recorded"] == []


def test_two_stages_tell_both(tmp_path: Path) -> None:
    both, direct = (recipe_of(f"medusa {name}", tmp_path / name) for name in ("two stages", "direct"))
    first = both["first_stage"]
    assert first["method"] == "medusa-1" and first["learning_rates"] == [0.01] and first["heads"] == 3
    assert first == training_recipe(tmp_path / "two stages" / "heads")
    assert direct["first_stage"] is None and not (tmp_path / "direct" / "heads").exists()


@pytest.mark.parametrize("name", [*filter(has_lab_drafter, LAB_DRAFTERS)])
def test_older_weights_say_what_is_not_known_of_them(name: str) -> None:
    pair = load_pair("lab", drafter=name)
    assert pair.training is not None and pair.drafter_facts["training"]["not_recorded"]
    assert "training" not in pair.drafter.facts  # else older predictors would be of another pair
