"""`realrun train`: every training by command, and a new one as a user adds it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from realrun.cli.main import app
from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.pairs.drafter_files import FILE, read_drafter
from realrun.pairs.pair import load_pair
from realrun.train.registry import TRAININGS
from specsim.io.errors import InputError
from specsim.io.settings import from_options, options_of
from specsim.policy.registry import make_policy
from tests.realrun.cli.test_drafter_commands import command
from tests.realrun.train.test_lora import target as float_target
from tests.support.small_targets import ARCHITECTURES, small_target, text_folder
from tests.support.tiny import tiny_tokenizer
from tests.support.toy_training import TOY, ToySettings

slow = pytest.mark.slow
NAMES = [training.name for training in TRAININGS]
FEW = ["--tokens", 0.0008, "--window", 32, "--batch", 4, "--generated-share", 0]


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["train", *(str(argument) for argument in arguments)])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of every architecture, text, and prompts."""
    root = tmp_path_factory.mktemp("targets")
    for name in ARCHITECTURES:
        small_target(name, torch.float32).save_pretrained(root / name)
        tiny_tokenizer().save_pretrained(root / name)
    text_folder(root / "text")
    prompts = [json.dumps({"text": f"prompt {number}"}) for number in range(3)]
    (root / "prompts.jsonl").write_text("\n".join(prompts))
    return root


def test_the_group_lists_every_training() -> None:
    printed = command("train", "--help")
    for training in TRAININGS:
        assert f"{training.name} " in printed and training.help.split(".")[0][:40] in printed


@pytest.mark.parametrize("name", NAMES)
def test_help_has_every_setting_with_its_default(name: str) -> None:
    (training,) = (training for training in TRAININGS if training.name == name)
    result = CliRunner().invoke(app, ["train", name, "--help"], env={"COLUMNS": "400"})
    printed = " ".join(result.stdout.split())
    assert training.help.split("\n")[0] in printed and "Example: realrun train" in printed
    lines = [line for line in result.stdout.partition("Models:")[2].splitlines() if line.startswith("  -")]
    offered = {next(word for word in line.split() if word.startswith("--")) for line in lines}
    expected = {f"--{option}" for option in ("out", "target", "seed", "device", "dtype", "threads", "json", "help")}
    expected |= {"--draft-model", "--drafter", "--allow-tokenizer-difference"} if training.beside_draft else set()
    expected |= {"--smoke-test"} if training.smoke_test else set()
    for option in (*options_of(training.settings), *options_of(training.shared)):
        expected.add(f"--{option.name.replace('_', '-')}")
        assert "".join(option.doc.split()) in "".join(printed.split())  # lines also end at hyphens
        assert all(choice in printed for choice in option.choices)
    assert offered == expected
    assert ("600 of the lab's" in printed) == (name == "predictor")


# One file and one line


def test_a_training_of_ones_own_is_a_file_and_a_line(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realrun.train.registry.TRAININGS", [*TRAININGS, TOY])
    assert "toy" in command("train", "--help") and "Train a toy." in command("train", "toy", "--help")
    asked = ["train", "toy", "--target", folders / "llama", "--text", folders / "text", "--out", tmp_path, *FEW]
    asked += ["--below", 2, "--slope", 0.02, "--curious", "--seed", 3, "--dtype", "float64"]
    document = json.loads(command(*asked, "--json"))
    assert document["settings"] == {"below": 2, "towards": "target", "slope": 0.02, "curious": True, "patience": 3}
    assert document["loop"]["steps"] == 6 and document["loop"]["seed"] == 3 and document["loop"]["dtype"] == "float64"
    assert document["held_out"]["end"]["divergence"] < document["held_out"]["start"]["divergence"]
    assert "divergence" in command(*asked)  # read, not trained again; as a table
    with pytest.raises(InputError, match="below=2, asked for 1"):
        command(*(word if word != 2 else 1 for word in asked))
    for refused in (["--below", 0], ["--towards", "nowhere"], ["--patience", 4]):
        assert invoke("toy", *asked[2:], *refused).exit_code == 2
    with pytest.raises(InputError, match="slope=0.0 of ToySettings is out of range; give more than 0"):
        command(*asked, "--slope", 0)
    pair = load_pair(str(folders / "llama"), drafter=str(tmp_path), dtype="float64")
    decoder = Decoder(*pair.make_drafter(), (), Sampler())
    policy = make_policy("fixed_k", {"k": 3})
    assert decoder.decode([5, 6], 20, policy).tokens == decoder.decode([5, 6], 20, None).tokens


def test_settings_are_made_of_options_by_name() -> None:
    assert from_options(ToySettings, {"below": 2, "patience": 9, "unknown": 1}) == ToySettings(below=2)
    assert [option.name for option in options_of(ToySettings)] == ["below", "towards", "slope", "curious"]
    ranges = {option.name: option.legal_range for option in options_of(ToySettings)}
    assert ranges["below"] == "at least 1" and ranges["slope"] == "more than 0"


# The trainings


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        pytest.param(kind, architecture, marks=[] if architecture == "llama" else slow)
        for kind in ("eesd", "medusa", "self-sd", "edd", "vdm", "eagle", "eagle3")
        for architecture in ARCHITECTURES
    ],
)
def test_the_commands_train_on_any_llama_like_target(
    kind: str, architecture: str, folders: Path, tmp_path: Path
) -> None:
    if kind == "self-sd":
        asked = ["--prompts", folders / "prompts.jsonl", "--smoke-test"]
    else:
        asked = ["--text", folders / "text", *(FEW if kind == "medusa" else ["--smoke-test"])]
    arguments = [kind, "--target", folders / architecture, *asked, "--out", tmp_path / "out"]
    document = json.loads(command("train", *arguments, "--json"))
    file = read_drafter(tmp_path / "out")
    assert file.kind == kind and file.facts["target"]["layers"] == 3 and document["drafter"].endswith(FILE)
    assert str(tmp_path) not in json.dumps(file.facts)
    if kind == "self-sd":
        settings = document["settings"]
        assert (settings["trials"], settings["max_new_tokens"], settings["max_draft_tokens"]) == (8, 16, 4)
        return
    if kind in ("edd", "vdm", "eagle", "eagle3"):
        assert document["held_out"]["end"]["divergence"] < document["held_out"]["start"]["divergence"]
        return
    steps, tokens = (39, 39 * 8 * 64) if kind == "eesd" else (6, 6 * 4 * 32)
    assert document["tokens"] == file.facts["tokens"] == tokens and document["history"][-1]["step"] == steps
    if kind == "eesd":
        distill = file.facts["text"]["distill"]
        assert (distill["prompt_tokens"], distill["new_tokens"], distill["batch"]) == (16, 48, 32)
    assert {value.dtype for value in file.tensors.values()} == {torch.bfloat16}
    assert f"held-out text; {tokens:,} tokens" in command("train", *arguments, "--float32")
    assert {value.dtype for value in read_drafter(tmp_path / "out").tensors.values()} == {torch.float32}


@pytest.mark.parametrize("stages", [[], ["--one-stage"]])
def test_the_command_trains_medusa_2(stages: list[str], folders: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    asked = ["medusa", "--joint", "--target", folders / "llama", "--text", folders / "text", *FEW, *stages]
    command("train", *asked, "--joint-tokens", 0.0005, "--out", tmp_path / "out", "--json")
    file = read_drafter(tmp_path / "out")
    assert file.facts["method"] == "medusa-2" and any(name.startswith("adapter.") for name in file.tensors)
    assert file.facts["loop"]["steps"] == 4 and file.facts["settings"]["decay"] == 0.8
    assert (tmp_path / "out" / "heads" / FILE).exists() == (not stages)
    if not stages:
        assert read_drafter(tmp_path / "out" / "heads").facts["loop"]["steps"] == 6
        asked += ["--heads-from", tmp_path / "out"]
        with pytest.raises(InputError, match="holds no MEDUSA-1 drafter; train it with"):
            command("train", *asked, "--out", tmp_path / "other")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["eesd", "--layers", 3, "--generated-share", 0], "an early exit after 3 of 3 layers; choose 1 to 2"),
        (["eesd", "--window", 200, "--tokens", 0.01], "windows of 200 tokens; this target reads at most 160"),
        (["medusa", "--lambda-0", 0.1], "go with --joint"),
        (["medusa", "--joint", "--one-stage", "--heads-from", "x"], "--one-stage starts from fresh heads"),
        (["medusa", "--joint", "--draft-vocabulary", "9"], "--draft-vocabulary goes with MEDUSA-1"),
        (["eagle", "--text", "x", "--prompts", "y"], "--text and --prompts are both text to train on"),
        (["eagle", "--prompts", "nowhere.jsonl"], "prompt file nowhere.jsonl does not exist"),
        (["eesd", "--smoke-test", "--text", "nowhere"], "text folder nowhere does not exist"),
        (["eesd", "--lr", 0], "lr=0.0 of EesdSettings is out of range; give more than 0"),
        (["predictor", "--temperatures", "0,warm"], "--temperatures '0,warm' is not a list of numbers"),
    ],
)
def test_the_commands_refuse_in_one_line(arguments: list[object], says: str, folders: Path, tmp_path: Path) -> None:
    learn_from = (
        ["--prompts", folders / "prompts.jsonl"] if arguments[0] == "predictor" else ["--text", folders / "text"]
    )
    given = [] if {"--text", "--prompts"} & {*arguments} else learn_from
    result = invoke(*arguments, *given, "--target", folders / "llama", "--out", tmp_path / "out")
    assert isinstance(result.exception, InputError) and says in str(result.exception)
    assert "\n" not in str(result.exception)


def test_a_number_type_that_training_does_not_know_is_refused(folders: Path, tmp_path: Path) -> None:
    result = invoke("eesd", "--dtype", "float16", "--target", folders / "llama", "--out", tmp_path / "out")
    assert result.exit_code == 2 and "float16" in result.output


def test_a_drafter_trained_on_a_deepened_target_is_the_trained_ones(folders: Path, tmp_path: Path) -> None:
    """Identity blocks are left out of training, so that what it gives serves the lab at any depth."""
    command("train", "edd", "--target", "lab-deep:9", "--text", folders / "text", "--out", tmp_path / "edd", *FEW)
    facts = read_drafter(tmp_path / "edd").facts
    assert facts["target"]["layers"] == 8 and facts["states_after"] == 5
    for target in ("lab", "lab-deep:10"):
        assert load_pair(target, drafter=str(tmp_path / "edd")).target_name.startswith("lab")


def test_spaces_command_trains_a_drafter_that_decodes(tmp_path: Path) -> None:
    """From text to rounds; a second run finds all done, and one with other settings is refused before any text."""
    home, out = tmp_path / "target", tmp_path / "space3"
    float_target().float().save_pretrained(home)
    tiny_tokenizer().save_pretrained(home)
    words_of = text_folder(tmp_path / "text")
    asked = ["train", "space", "--target", home, "--text", words_of, "--out", out, "--masks", 3, "--rank", 4]
    asked += ["--tokens", 0.002, "--window", 32, "--batch", 4, "--generated-share", 0, "--examples", 4]
    printed = command(*asked)
    assert "mask_3_agreement" in printed and "mask_4" not in printed and "drafter.safetensors" in printed
    facts = read_drafter(out).facts
    assert facts["loop"]["steps"] == 16 and facts["adapter"] == {"rank": 4, "alpha": 16.0}
    assert facts["settings"]["lr"] == 1e-3 and facts["text"]["corpus"] == "text"
    assert json.loads(command(*asked, "--json"))["held_out"] == facts["held_out"]
    with pytest.raises(InputError, match="p_ar=0.5, asked for 1.0"):
        command(*asked[:-2], "--examples", 4, "--p-ar", 1.0)
    with pytest.raises(InputError, match="full=false, asked for true"):
        command(*asked, "--full")
    pair = load_pair(str(home), drafter=str(out), dtype="float64")
    assert pair.drafter.name == "space" and pair.drafter.max_depth == 3 and pair.drafter.facts == {"masks": 3}
    run = Decoder(*pair.make_drafter(), pair.eos_token_ids, Sampler())
    policy, prompt = make_policy("fixed_k", {"k": 3}), [5, 6, 7]
    assert run.decode(prompt, 20, policy).tokens == run.decode(prompt, 20, None).tokens
