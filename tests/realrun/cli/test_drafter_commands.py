"""Drafters inside the target by command: trained, loaded from their folders, refused, recorded, profiled, validated."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM
from typer.testing import CliRunner, Result

from realrun.cli.main import app
from realrun.decode.acceptance_predictor import FILE as PREDICTOR_FILE
from realrun.decode.acceptance_predictor import load_predictor, save_predictor
from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.drafters.eagle import Eagle
from realrun.drafters.edd import one_layer_model, own_state
from realrun.drafters.eesd import EarlyExit
from realrun.drafters.independent import IndependentKind
from realrun.drafters.medusa import MedusaHeads, MedusaKind
from realrun.lm.variants import SkippedSublayers
from realrun.pairs.drafter_files import FILE, LAB_DRAFTERS, describe_target, read_drafter, save_drafter
from realrun.pairs.pair import Pair, load_pair
from realrun.train.registry import TRAININGS
from specsim.io.errors import InputError
from specsim.io.settings import from_options, options_of
from specsim.policy.registry import make_policy
from specsim.trace.files import read_trace
from tests.realrun.train.test_lora import target as float_target
from tests.support.checks import refusal
from tests.support.commands import on_any_machine
from tests.support.pairs.inside import (
    INSIDE,
    SKIPS,
    STATES_AFTER,
    early_exit_pair,
    marked,
    skipping_pair,
    target_of,
)
from tests.support.small_targets import ARCHITECTURES, small_target, text_folder
from tests.support.tiny import POSITIONS, VOCAB, random_predictor, tiny_tokenizer
from tests.support.toy_training import TOY, ToySettings

HEADS = 3
FACTS: dict[str, dict[str, Any]] = {
    "eesd": {"layers": 1, "exit_layers": 1},
    "medusa": {"heads": HEADS},
    "self-sd": {"attention": [1], "mlp": [1]},
    "edd": {"states_after": STATES_AFTER},
    "eagle": {},
}
inside = pytest.mark.parametrize("kind", marked(INSIDE, ("edd", "eagle")))
TARGETS = ("llama", "qwen2", "mistral")
ADAPTED = "model.layers.1.self_attn.q_proj"


def target_like(architecture: str) -> Any:
    if architecture == "llama":
        return target_of().float()
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": POSITIONS,
        "initializer_range": 0.15,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    torch.manual_seed(3)
    if architecture == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**sizes)).eval()
    return MistralForCausalLM(MistralConfig(**sizes, sliding_window=None)).eval()


def tensors_of(kind: str, target: Any) -> Mapping[str, torch.Tensor]:
    if kind == "eesd":
        return EarlyExit(target, 1).state_dict()
    if kind == "edd":
        return own_state(one_layer_model(target))
    if kind == "eagle":
        return Eagle(target).state_dict()
    return MedusaHeads(target, HEADS).state_dict() if kind == "medusa" else {}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ARCHITECTURE/target, ARCHITECTURE/KIND for every kind of drafter, and prompts.jsonl."""
    home = tmp_path_factory.mktemp("drafters")
    for architecture in TARGETS:
        target = target_like(architecture)
        target.save_pretrained(home / architecture / "target")
        tiny_tokenizer().save_pretrained(home / architecture / "target")
        described = describe_target(target, f"tiny/{architecture}")
        for kind in INSIDE:
            facts = {"target": described, **FACTS[kind]}
            save_drafter(home / architecture / kind, kind, tensors_of(kind, target), facts)
    texts = ["def f(x):", "The end", "import os", "Speculative", "one two three", "return 0"] * 4
    lines = [json.dumps({"text": text, "domain": "ab"[i % 2]}) for i, text in enumerate(texts)]
    (home / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return home


def load(home: Path, kind: str, dtype: str = "float64", **options: Any) -> Pair:
    return load_pair(str(home / "llama" / "target"), drafter=str(home / "llama" / kind), dtype=dtype, **options)


def command(*words: object) -> str:
    """What the command prints; InputErrors come through."""
    with on_any_machine():
        result = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(result.exception, InputError):
        raise result.exception
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


@inside
def test_a_drafter_is_loaded_by_its_folder(kind: str, home: Path) -> None:
    pairs = {dtype: load(home, kind, dtype) for dtype in ("float64", "float32", "bfloat16")}
    for dtype, pair in pairs.items():
        assert pair.drafter.name == pair.draft_name == kind and pair.target_name == "target" and pair.predictor is None
        assert pair.drafter.facts == FACTS[kind] and pair.eos_token_ids == (0,)
        (module,) = pair.drafter.weights(pair.target)
        assert {str(p.dtype) for p in (*module.parameters(), *pair.target.parameters())} == {f"torch.{dtype}"}
        assert not module.training
    assert len({pair.fingerprint for pair in pairs.values()}) == 1
    by_file = load(home, f"{kind}/{FILE}")
    assert by_file.draft_name == kind and by_file.fingerprint == pairs["float64"].fingerprint
    plain = load_pair(str(home / "llama" / "target"), str(home / "llama" / "target"), dtype="float64")
    assert plain.drafter.name == "model" and plain.drafter.facts == {} and plain.fingerprint != by_file.fingerprint


@inside
def test_the_predictor_in_the_drafters_folder_is_its_own(kind: str, home: Path, tmp_path: Path) -> None:
    target, bare = str(home / "llama" / "target"), load(home, kind)
    folder = tmp_path / "mine"
    facts = {"target": describe_target(bare.target, "t"), **FACTS[kind]}
    save_drafter(folder, kind, tensors_of(kind, bare.target), facts)
    get = partial(load_pair, target, drafter=str(folder), dtype="float64")
    refusal(lambda: get(predictor="lab"), "predictor", "does not exist")
    assert get().predictor is None
    predictor = random_predictor(bare)
    save_predictor(predictor, folder / PREDICTOR_FILE)
    for name in ("auto", "lab", str(folder), str(folder / PREDICTOR_FILE)):
        loaded = get(predictor=name).predictor
        assert loaded is not None and loaded.facts == predictor.facts
    assert get(predictor="none").predictor is None and get(predictor=None).predictor is None
    assert load_pair(target, drafter=str(folder / FILE)).predictor is not None
    # Another drafter's is passed over where nobody asked for it.
    stranger = replace(predictor, facts={**predictor.facts, "fingerprint": "another"})
    save_predictor(stranger, folder / PREDICTOR_FILE)
    assert get().predictor is None
    refusal(lambda: get(predictor=str(folder)), "other weights", "another")


def test_what_is_no_drafter_is_refused(home: Path, tmp_path: Path) -> None:
    target = str(home / "llama" / "target")

    def load_from(folder: Path | str) -> Callable[[], object]:
        return lambda: load_pair(target, drafter=str(folder))

    refusal(load_from("abacus"), "abacus", *LAB_DRAFTERS, "realrun train")
    refusal(load_from(tmp_path), FILE, "does not exist")
    refusal(load_from(home / "llama" / "target" / "model.safetensors"), "is not a drafter in the format")
    (tmp_path / FILE).write_bytes(b"no safetensors")
    refusal(load_from(tmp_path), FILE, "damaged")
    bare = target_like("llama")
    described = describe_target(bare, "t")
    cases: list[tuple[str, Mapping[str, torch.Tensor], dict[str, Any], list[str]]] = [
        ("eesd", {}, {"layers": 1, "exit_layers": 1}, ["does not fit its target"]),
        ("eesd", tensors_of("eesd", bare), {"layers": 1}, ["does not fit its target", "exit_layers"]),
        ("eesd", tensors_of("eesd", bare), {"layers": "1", "exit_layers": 1}, ["malformed", "layers"]),
        ("eesd", tensors_of("eesd", bare), {"layers": 3, "exit_layers": 1}, ["after 3 of 3 layers"]),
        *[
            ("eesd", tensors_of("eesd", bare), {"layers": 1, "exit_layers": count}, ["does not fit its target"])
            for count in (0, 2)
        ],
        ("medusa", tensors_of("medusa", bare), {"heads": 2}, ["does not fit its target"]),
        ("medusa", {f"adapter.{ADAPTED}.A": torch.ones(2, 32)}, {"heads": 2}, ["does not fit its target", "adapter"]),
        ("self-sd", {}, {"mlp": [0]}, ["does not fit its target", "attention"]),
    ]
    for kind, tensors, facts, names in cases:
        save_drafter(tmp_path, kind, tensors, {"target": described, **facts})
        refusal(load_from(tmp_path), *([str(tmp_path), *names] if "layers" not in names[0] else names))
    save_drafter(tmp_path, "self-sd", {}, {"target": None, **FACTS["self-sd"]})
    refusal(load_from(tmp_path), "malformed", "null", "target")


def test_fingerprints_tell_drafters_apart() -> None:
    """Also those whose first tensors are the same."""
    target = target_of()

    def medusa(heads: MedusaHeads) -> Pair:
        return Pair(target, MedusaKind(heads), tiny_tokenizer(), "t", "d", ())

    other_head, other_exit = MedusaHeads(target, 2), early_exit_pair(target)
    with torch.no_grad():
        other_head.vocabulary[1] += 1
        other_exit.drafter.model.lm_head.weight += 1
    pairs = [
        Pair(target, IndependentKind(target), tiny_tokenizer(), "t", "d", ()),
        early_exit_pair(target),
        early_exit_pair(target, layers=2),
        early_exit_pair(target, exit_layers=2),
        early_exit_pair(target, exit_layers=0),
        other_exit,
        medusa(MedusaHeads(target, 2)),
        medusa(MedusaHeads(target, 3)),
        medusa(other_head),
        skipping_pair(target, SkippedSublayers(frozenset(), frozenset())),
        skipping_pair(target),
        skipping_pair(target, SkippedSublayers(SKIPS.attention, frozenset())),
        skipping_pair(target, SkippedSublayers(frozenset(), SKIPS.mlp)),
    ]
    assert len({pair.fingerprint for pair in pairs}) == len(pairs)
    assert early_exit_pair(target).fingerprint == pairs[1].fingerprint


def test_a_tuned_target_is_the_same_in_every_number_type(tmp_path: Path) -> None:
    target = target_like("llama").bfloat16().float()  # as targets come
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    generator = torch.Generator().manual_seed(0)
    adapter = {
        f"adapter.{ADAPTED}.{part}": 0.1 * torch.randn(*shape, generator=generator)
        for part, shape in {"A": (2, 32), "B": (32, 2)}.items()
    }
    facts = {"target": describe_target(target, "t"), "heads": HEADS, "adapter": {"rank": 2, "alpha": 4}}
    save_drafter(tmp_path / "tuned", "medusa", {**tensors_of("medusa", target), **adapter}, facts)
    save_drafter(tmp_path / "untuned", "medusa", tensors_of("medusa", target), facts)
    pairs = [
        load_pair(str(tmp_path / "target"), drafter=str(tmp_path / name), dtype=dtype)
        for name in ("tuned", "untuned")
        for dtype in ("float64", "float32", "bfloat16")
    ]
    prints = [pair.fingerprint for pair in pairs]
    assert prints == [prints[0]] * 3 + [prints[-1]] * 3 and prints[0] != prints[-1]
    change = pairs[0].target.get_submodule(ADAPTED).weight - target.get_submodule(ADAPTED).weight
    low, high = (adapter[f"adapter.{ADAPTED}.{part}"].double() for part in "AB")
    torch.testing.assert_close(change, 2 * high @ low, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", marked(INSIDE, ("self-sd", "medusa", "edd", "eagle")))
def test_the_main_job_by_command(kind: str, home: Path, tmp_path: Path) -> None:
    """Train the predictor into the drafter's folder, then validate Cali-TS, twice; then ask for another drafter."""
    bare, folder = load(home, kind, "float32"), tmp_path / "drafter"
    facts = {"target": describe_target(bare.target, "t"), **FACTS[kind]}
    save_drafter(folder, kind, tensors_of(kind, bare.target), facts)
    pair = ["--target", home / "llama" / "target", "--drafter", folder]
    prompts = ["--prompts", home / "prompts.jsonl"]
    training = ["--max-new-tokens", 8, "--max-draft-tokens", 4, "--epochs", 2, "--num-prompts", 24]
    learnt = json.loads(command("train", "predictor", "--out", folder, *pair, *prompts, *training, "--json"))
    assert learnt["drafter_kind"] == kind and learnt["fingerprint"] == bare.fingerprint
    assert set(learnt["held_out"]) == {"predictor", "confidence", "base rate"}
    lengths = ["--num-prompts", 4, "--max-new-tokens", 10, "--max-draft-tokens", 3]
    job = ["validate", "--out", tmp_path / "job", *prompts, *lengths]
    policies = ["--policy", "fixed_k", "--policy", "cali_ts", "--trials", 2, "--repeats", 3]
    document = json.loads(command(*job, *pair, *policies, "--json"))
    recorded = {key: value for key, value in document["drafter_facts"].items() if key != "training"}
    assert document["drafter_kind"] == kind and recorded == FACTS[kind]
    rows = {row["policy"]: row for row in document["rows"]}
    assert set(rows) == {"fixed_k", "cali_ts"}
    assert all(row["rounds_identical_percent"] == 100 for row in rows.values())
    trace = read_trace(tmp_path / "job" / "trace")
    assert trace.meta["predictor"] == load_predictor(folder).digest
    written = (tmp_path / "job" / "trace" / "meta.json").read_bytes()
    command(*job, *pair, *policies)
    assert (tmp_path / "job" / "trace" / "meta.json").read_bytes() == written
    # The same name and the same kind, other weights or other sublayers.
    if kind == "self-sd":
        save_drafter(folder, kind, {}, {**facts, "attention": [2]})
    else:
        tensors = dict(tensors_of(kind, bare.target))
        scaled = {"eesd": "head.weight", "medusa": "vocabulary", "edd": "model.norm.weight", "eagle": "fuse.weight"}
        name = scaled[kind]
        tensors[name] = tensors[name] * 2
        save_drafter(folder, kind, tensors, facts)
    refusal(lambda: command(*job, *pair, *policies), "weights=", "--overwrite")
    other = "medusa" if kind == "eesd" else "eesd"
    elsewhere = [*pair[:2], "--drafter", home / "llama" / other]
    refusal(lambda: command(*job, *elsewhere, *policies), "weights=", other, "--overwrite")


def test_the_commands_refuse_drafters_in_one_line(home: Path, tmp_path: Path) -> None:
    out, qwen = tmp_path / "out", home / "qwen2" / "target"
    wrong = ["--target", qwen, "--drafter", home / "llama" / "eesd"]
    prompts = ["--prompts", home / "prompts.jsonl"]
    for words in (
        ["record", out, *prompts],
        ["profile", out],
        ["validate", "--out", out, *prompts],
        ["train", "predictor", "--out", out, *prompts],
    ):
        refusal(lambda words=words: command(*words, *wrong), "LlamaForCausalLM", "Qwen2ForCausalLM")
        refusal(lambda words=words: command(*words, "--drafter", "abacus"), "abacus", "realrun train")
    assert not out.exists()


# `realrun train`: every training by command, and a new one as a user adds it.


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
    expected |= {"--recipe"} if training.printed is not None else set()
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
    refusal(lambda: command(*(word if word != 2 else 1 for word in asked)), "below=2, asked for 1")
    for refused in (["--below", 0], ["--towards", "nowhere"], ["--patience", 4]):
        assert invoke("toy", *asked[2:], *refused).exit_code == 2
    refusal(lambda: command(*asked, "--slope", 0), "slope=0.0 of ToySettings is out of range; give more than 0")
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
    refusal(lambda: command(*asked[:-2], "--examples", 4, "--p-ar", 1.0), "p_ar=0.5, asked for 1.0")
    refusal(lambda: command(*asked, "--full"), "full=false, asked for true")
    pair = load_pair(str(home), drafter=str(out), dtype="float64")
    assert pair.drafter.name == "space" and pair.drafter.max_depth == 3 and pair.drafter.facts == {"masks": 3}
    run = Decoder(*pair.make_drafter(), pair.eos_token_ids, Sampler())
    policy, prompt = make_policy("fixed_k", {"k": 3}), [5, 6, 7]
    assert run.decode(prompt, 20, policy).tokens == run.decode(prompt, 20, None).tokens
