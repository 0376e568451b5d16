"""A model or drafter with missing, extra or misshapen tensors is refused by their names, before anything is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from realrun.drafters.lookup import LookupKind
from realrun.pairs.drafter_files import load_drafter
from realrun.pairs.pair import load_target
from realrun.train.common.folder import CHECKPOINT
from tests.support.checks import refusal
from tests.support.commands import assert_refused, call
from tests.support.families import COMPOSITES, FAMILIES, check_decoding
from tests.support.small_targets import text_folder
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.trainings import CASES, LOOP

LOST = "model.layers.0.self_attn.q_proj.weight"
Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], object]


def saved(folder: Path, model: Any = None, **options: Any) -> Path:
    model = tiny_model(2, seed=1, dtype=torch.float32) if model is None else model
    model.save_pretrained(folder, **options)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def changed(folder: Path, change: Change, file: str = "model.safetensors") -> Path:
    """Change the tensors of a file in the folder and keep its header."""
    path = folder / file
    with safe_open(path, framework="pt") as handle:
        metadata = handle.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata=metadata)
    return folder


def without(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


def sharded(folder: Path) -> Path:
    """A sharded checkpoint whose file and index lack a tensor."""
    saved(folder, max_shard_size="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    changed(folder, without(LOST), index["weight_map"].pop(LOST))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def eagle_head(folder: Path) -> Path:
    """As EAGLE-1 was published: its config.json is that of a Llama of one layer."""
    saved(folder, tiny_model(1, seed=2, dtype=torch.float32))
    names = {"model.layers.0.": "layers.0.", "model.embed_tokens.": "embed_tokens."}
    whole = load_file(folder / "model.safetensors")
    tensors = {
        new + name.removeprefix(old): t for name, t in whole.items() for old, new in names.items() if old in name
    }
    save_file({**tensors, "fc.weight": torch.zeros(32, 64)}, folder / "model.safetensors", {"format": "pt"})
    return folder


def pickled_eagle_head(folder: Path) -> Path:
    path = eagle_head(folder) / "model.safetensors"
    torch.save(load_file(path), folder / "pytorch_model.bin")
    path.unlink()
    return folder


def damaged(folder: Path) -> Path:
    (saved(folder) / "model.safetensors").write_bytes(b"x" * 9)
    return folder


MODELS: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "missing": (lambda path: changed(saved(path), without(LOST)), ("LlamaForCausalLM", f"lacks {LOST}")),
    "missing of a shard": (sharded, (f"lacks {LOST}",)),
    "unexpected": (
        lambda path: changed(saved(path), lambda tensors: tensors.update({"model.bias": torch.zeros(2)})),
        ("also has model.bias",),
    ),
    "another shape": (
        lambda path: changed(saved(path), lambda tensors: tensors.update({LOST: torch.zeros(32, 31)})),
        (f"has in another shape {LOST} (32 x 31 instead of 32 x 32)",),
    ),
    "head of EAGLE": (eagle_head, ("a drafter of kind eagle", "--drafter")),
    "pickled head of EAGLE": (pickled_eagle_head, ("a drafter of kind eagle", "--drafter")),
    "damaged": (damaged, ("cannot load",)),
}
ROLES = {
    "target": ("record", "OUT", "--drafter", "prompt-lookup", "--target"),
    "draft model": ("record", "OUT", "--target", "TARGET", "--draft-model"),
    "training": ("train", "eagle", "--out", "OUT", "--text", "TEXT", "--target"),
}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("fault", MODELS)
def test_a_model_that_is_not_whole_is_refused(fault: str, role: str, tmp_path: Path) -> None:
    make, names = MODELS[fault]
    out, model = tmp_path / "out", make(tmp_path / "model")
    texts = {
        "TARGET": lambda: saved(tmp_path / "target"),
        "TEXT": lambda: text_folder(tmp_path / "text"),
        "OUT": lambda: out,
    }
    words = [texts[word]() if word in texts else word for word in ROLES[role]]
    assert_refused(call("realrun", *words, model), model, *names)
    assert not out.exists()


FILE_KINDS = [
    name for name, case in CASES.items() if case.on_text and "two stages" not in name and "direct" not in name
]


@pytest.mark.parametrize("name", FILE_KINDS)
def test_a_drafter_without_any_one_of_its_tensors_is_refused(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    pair, file = case.target(), tmp_path / "drafter.safetensors"
    case.run(tmp_path, pair, loop=replace(LOOP, steps=1))
    whole = file.read_bytes()
    for lost in load_file(file):
        changed(tmp_path, without(lost), file.name)
        refusal(lambda: load_drafter(tmp_path, pair.target), f"lacks {lost};", "train it again")
        file.write_bytes(whole)
    load_drafter(tmp_path, pair.target)


def test_a_checkpoint_of_a_training_without_any_one_of_its_tensors_is_refused(tmp_path: Path) -> None:
    def kill(what: str, done: int, total: int) -> None:
        if (tmp_path / CHECKPOINT).exists():
            raise KeyboardInterrupt

    case = CASES["eagle"]
    with pytest.raises(KeyboardInterrupt):
        case.run(tmp_path, progress=kill)
    whole = (tmp_path / CHECKPOINT).read_bytes()
    for lost in load_file(tmp_path / CHECKPOINT):
        changed(tmp_path, without(lost), CHECKPOINT)
        refusal(lambda: case.run(tmp_path), f"lacks {lost};", "delete it to train anew")
        (tmp_path / CHECKPOINT).write_bytes(whole)
    case.run(tmp_path)


@pytest.mark.parametrize("family", COMPOSITES)
def test_a_composite_checkpoint_gives_its_text_model(family: str, tmp_path: Path) -> None:
    config, kind = COMPOSITES[family](FAMILIES[family]()), hf.AutoModelForImageTextToText
    config.get_text_config().pad_token_id = 0
    torch.manual_seed(4)
    saved(tmp_path / "model", kind.from_config(config))
    eager = {"experts_implementation": "eager", "dtype": torch.float64}
    whole: Any = kind.from_pretrained(tmp_path / "model", **eager)
    pair = load_target(str(tmp_path / "model"), dtype="float64")
    tokens = torch.tensor([[5, 17, 40, 3, 88, 21, 60, 9, 11, 30]])
    with torch.inference_mode():
        assert torch.equal(pair.target(input_ids=tokens).logits, whole(input_ids=tokens).logits)
    check_decoding(replace(pair, drafter=LookupKind(), eos_token_ids=()))
    text = next(
        name
        for name in load_file(tmp_path / "model" / "model.safetensors")
        if "layers.1" in name and "vision" not in name
    )
    changed(tmp_path / "model", without(text))
    refusal(lambda: load_target(str(tmp_path / "model")), f"lacks model.layers.{text.partition('.layers.')[2]}")


def test_a_composite_without_a_text_model_of_its_own_is_refused(tmp_path: Path) -> None:
    hf.Qwen3VLConfig().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    refusal(lambda: load_target(str(tmp_path)), "qwen3_vl model", "text model")
