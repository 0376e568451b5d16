"""EDD, VDM and EAGLE trained from end to end: what is learned, resuming, refusals, and the commands."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from realrun.decode.decoder import Decoder
from realrun.decode.draft_model import DraftModel
from realrun.decode.sampling import Sampler
from realrun.drafters.registry import DRAFTERS
from realrun.pairs.drafter_files import load_drafter, read_drafter
from realrun.pairs.pair import Pair
from realrun.training.common.distill import DistillSettings, TextSettings
from realrun.training.common.loop import LoopSettings
from realrun.training.eagle import EagleSettings, train_eagle
from realrun.training.edd import EddSettings, train_edd
from specsim.errors import InputError
from specsim.policy.registry import make_policy
from specsim.trace.files import read_trace
from tests.realrun.cli.test_drafter_commands import command
from tests.support.small_targets import alone, lines, quiet, small_target, text_folder
from tests.support.tiny import random_prompts, tiny_tokenizer

LOOP = LoopSettings(24, 4, 32, warmup_steps=3, dtype="float64", log_every=4, checkpoint_s=0.0)
TRAINED: dict[str, tuple[Any, Any]] = {
    "edd": (train_edd, EddSettings(lr=1e-2)),
    "vdm": (train_edd, EddSettings(states_after=0, lr=1e-2)),
    "eagle": (train_eagle, EagleSettings(lr=1e-2)),
}
slow = pytest.mark.slow
kinds = pytest.mark.parametrize("kind", TRAINED)
architectures = pytest.mark.parametrize(
    "architecture", ["llama", *(pytest.param(name, marks=slow) for name in ("qwen2", "qwen3", "mistral"))]
)


def train(kind: str, pair: Pair, out: Path, loop: LoopSettings = LOOP, **changes: Any) -> dict[str, Any]:
    run, settings = TRAINED[kind]
    text = TextSettings(text_folder(out.parent / "text"), 0.5, 600, DistillSettings(8, 16, 4))
    progress = changes.pop("progress", quiet)
    how = replace(settings, text=text, **changes)
    result: dict[str, Any] = run(pair, how, loop, out, progress, cache=out.parent / "c")
    return result


def refused(says: str, *asked: Any, **options: Any) -> None:
    with pytest.raises(InputError, match=says) as caught:
        train(*asked, **options)
    assert "\n" not in str(caught.value)


@kinds
@architectures
def test_training_learns_and_the_drafter_decodes_what_its_target_would(
    kind: str, architecture: str, tmp_path: Path
) -> None:
    target = small_target(architecture)
    before = copy.deepcopy(target.state_dict())
    document = train(kind, alone(target), tmp_path / "out", replace(LOOP, steps=2 * LOOP.steps))
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())  # it is frozen
    start, end = document["held_out"]["start"], document["held_out"]["end"]
    assert end["divergence"] < 0.8 * start["divergence"] and end["agreement"] > start["agreement"] + 0.1
    assert kind != "eagle" or end["regression"] < 0.9 * start["regression"]
    _, loaded = load_drafter(tmp_path / "out", target)
    assert document["kind"] == kind and type(loaded) is DRAFTERS[kind]
    assert document["parameters"] == sum(p.numel() for p in loaded.weights(target)[0].parameters())
    facts = read_drafter(tmp_path / "out").facts
    if kind != "eagle":
        assert (
            facts["states_after"] == loaded.facts.get("states_after", 0) == (kind == "edd")
        )  # of three layers, one below the states
    pair = replace(alone(target), drafter=loaded)
    loop, plain = Decoder(*pair.make_drafter(), (), Sampler()), Decoder(target, DraftModel(target, ()), (), Sampler())
    for prompt in random_prompts(2):
        assert loop.decode(prompt, 16, make_policy("fixed_k", {"k": 3})).tokens == plain.decode(prompt, 16, None).tokens


@kinds
def test_bfloat16_trains_float32_masters_on_a_bfloat16_target(kind: str, tmp_path: Path) -> None:
    target = small_target(dtype=torch.bfloat16)
    document = train(kind, alone(target), tmp_path / "out", replace(LOOP, dtype="bfloat16"))
    assert document["held_out"]["end"]["divergence"] < 0.9 * document["held_out"]["start"]["divergence"]
    masters = load_file(tmp_path / "out" / "checkpoint.safetensors")
    assert {value.dtype for key, value in masters.items() if key.startswith("state.")} == {torch.float32}
    assert {value.dtype for value in read_drafter(tmp_path / "out").tensors.values()} == {torch.bfloat16}
    _, loaded = load_drafter(tmp_path / "out", target)
    assert {parameter.dtype for parameter in loaded.weights(target)[0].parameters()} == {torch.bfloat16}


class Killed(BaseException):
    pass


@pytest.mark.parametrize("kind", ["edd", "eagle", pytest.param("vdm", marks=slow)])
@pytest.mark.parametrize("checkpoint_s", [0.0, pytest.param(1e9, marks=slow)])
def test_a_killed_training_ends_with_the_same_curve_and_weights(kind: str, checkpoint_s: float, tmp_path: Path) -> None:
    """Blocks and noise are drawn by step, so that what was lost is drawn again."""
    loop = replace(LOOP, steps=12, checkpoint_s=checkpoint_s)
    whole = train(kind, alone(small_target()), tmp_path / "a" / "out", loop)
    out = tmp_path / "b" / "out"
    for stop in (5, 8):

        def kill(what: str, done: int, total: int, stop: int = stop) -> None:
            if (what, done) == ("train", stop):
                raise Killed

        with pytest.raises(Killed):
            train(kind, alone(small_target()), out, loop, progress=kill)
        assert not (out / "drafter.safetensors").exists()
        torch.manual_seed(stop)  # whatever happened in between
    again = train(kind, alone(small_target()), out, loop)
    assert again["history"] == whole["history"] and len(whole["history"]) == 4
    there, here = (load_file(folder / "checkpoint.safetensors") for folder in (out, tmp_path / "a" / "out"))
    assert there.keys() == here.keys() and all(torch.equal(there[key], here[key]) for key in here)
    if kind == "edd":
        assert len({row["block"] for row in whole["history"][1:]}) > 1


@pytest.mark.parametrize(("kind", "changes"), [("edd", {}), ("vdm", {}), ("eagle", {"noise": 0.0})])
def test_pieces_of_a_batch_give_the_whole_batchs_step(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Blocks are of one length in all pieces; EAGLE's noise is drawn for each."""
    loop = replace(LOOP, steps=6, log_every=1)
    whole = train(kind, alone(small_target()), tmp_path / "a", loop, **changes)
    pieces = train(kind, alone(small_target()), tmp_path / "b", replace(loop, micro_windows=3), **changes)  # 3 and 1
    for one, other in zip(whole["history"][1:], pieces["history"][1:], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-9)


def test_a_folder_of_another_training_is_refused(tmp_path: Path) -> None:
    pair, loop, out = alone(small_target()), replace(LOOP, steps=3), tmp_path / "out"
    train("edd", pair, out, loop)
    refused("states_after=1, asked for 2; .*give another --out$", "edd", pair, out, loop, states_after=2)
    refused("give another --out$", "vdm", pair, out, loop)
    refused("give another --out$", "eagle", pair, out, loop)
    refused("longest_block=10, asked for 9", "edd", pair, out, loop, longest_block=9)
    refused('loss="kl", asked for "text"', "edd", pair, out, loop, loss="text")
    train("edd", pair, out, loop, states_after=1)  # what it is by default


def test_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    pair = alone(small_target())
    refused("^states after 4 of 3 layers; choose 1 to 3$", "edd", pair, tmp_path / "a", states_after=4)
    refused("^states after -1 of 3 layers; choose 1 to 3$", "edd", pair, tmp_path / "a", states_after=-1)
    for short, long in ((1, 5), (6, 5)):
        refused(
            "choose 2 or more, the shortest first$", "edd", pair, tmp_path, shortest_block=short, longest_block=long
        )
    refused("loss 'l2' of EDD is unknown; known: kl, text$", "edd", pair, tmp_path, loss="l2")
    refused("give more than 0$", "edd", pair, tmp_path, lr=0.0)
    for name, value in (("lr", 0.0), ("class_weight", -1.0), ("noise", -0.1), ("lr", float("nan"))):
        refused("give a rate above 0 and no negative number$", "eagle", pair, tmp_path, **{name: value})
    assert not (tmp_path / "a").exists()


# --- By command -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        pytest.param(kind, architecture, marks=[] if (kind, architecture) == ("edd", "llama") else slow)
        for architecture in ("llama", "qwen2", "lab")
        for kind in TRAINED
    ],
)
def test_train_record_profile_and_validate_by_command(kind: str, architecture: str, tmp_path: Path) -> None:
    out, target = tmp_path / "drafter", list[object]()
    if architecture != "lab":
        small_target(architecture, torch.float32).save_pretrained(tmp_path / "target")
        tiny_tokenizer().save_pretrained(tmp_path / "target")
        target = ["--target", tmp_path / "target"]
        text_folder(tmp_path / "text", documents=20, count=40)
        source = ["--text", tmp_path / "text"]
    else:
        source = []
    training = [*target, *source, "--smoke-test", "--json", *(["--states-after", 2] if kind == "edd" else [])]
    learnt = json.loads(command("train", kind, "--out", out, *training))
    assert (
        learnt["kind"] == kind and learnt["held_out"]["end"]["divergence"] < learnt["held_out"]["start"]["divergence"]
    )
    pair = [*target, "--drafter", out]
    (tmp_path / "prompts.jsonl").write_text(
        "".join(json.dumps({"text": lines(9)[at : at + 12], "domain": "ab"[at % 2]}) + "\n" for at in range(9))
    )
    prompts = ["--prompts", tmp_path / "prompts.jsonl", "--num-prompts", 4]
    sizes = ["--max-draft-tokens", 4, "--max-new-tokens", 10, "--tree-nodes", 20, "--tree-width", 3]
    command("record", tmp_path / "trace", *pair, *prompts, *sizes, "--dtype", "float64")
    trace = read_trace(tmp_path / "trace")
    facts = {"states_after": 2} if kind == "edd" else {}
    named = "model" if kind == "vdm" else kind
    assert trace.tree is not None and trace.meta["drafter_kind"] == named and trace.meta["drafter_facts"] == facts
    sizes = ["--contexts", "8,16", "--max-draft-tokens", "3", "--repeats", "2", "--tree-nodes", "4"]
    command("profile", tmp_path / "profile.json", *pair, *sizes)
    document = json.loads((tmp_path / "profile.json").read_text())
    assert document["drafter_kind"] == named and document["drafter"] == "drafter"
    lengths = ["--max-new-tokens", 10, "--max-draft-tokens", 3, "--trials", 2]
    job = ["validate", "--out", tmp_path / "job", *prompts, *lengths]
    policies = ["--policy", "fixed_k", "--repeats", 1]
    rows = json.loads(command(*job, *pair, *policies, "--json"))["rows"]
    assert rows and all(row["rounds_identical_percent"] == 100 for row in rows)
