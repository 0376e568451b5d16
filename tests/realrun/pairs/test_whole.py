"""Every model and drafter is loaded whole, or refused with the tensors' names before anything is written."""

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

from realrun.engines.gguf_file import write_gguf
from realrun.pairs.pair import load_target
from tests.support.checks import refusal
from tests.support.commands import assert_refused, call
from tests.support.families import COMPOSITES, own_text
from tests.support.small_targets import text_folder
from tests.support.tiny import tiny_model, tiny_pair, tiny_tokenizer
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
    """The folder with changed tensors, under the header that was there."""
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
    """Without a tensor, in its file and in the index."""
    saved(folder, max_shard_size="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    changed(folder, without(LOST), index["weight_map"].pop(LOST))
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def eagle_head(folder: Path) -> Path:
    """As EAGLE-1 was published: it calls itself a Llama of one layer."""
    saved(folder, tiny_model(1, seed=2, dtype=torch.float32))
    names = {"model.layers.0.": "layers.0.", "model.embed_tokens.": "embed_tokens."}
    whole = load_file(folder / "model.safetensors")
    tensors = {new + name.removeprefix(old): t for name, t in whole.items() for old, new in names.items() if old in name}
    save_file({**tensors, "fc.weight": torch.zeros(32, 64)}, folder / "model.safetensors", {"format": "pt"})
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
    "head of EAGLE": (eagle_head, ("an EAGLE drafter", "--drafter")),
    "damaged": (lambda path: [(saved(path) / "model.safetensors").write_bytes(b"x" * 9), path][1], ("cannot load",)),
}
ROLES = {
    "target": ("record", "--drafter", "prompt-lookup", "--target"),
    "draft model": ("record", "--draft-model"),
    "training": ("train", "eagle", "--steps", 1, "--target"),
}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("fault", MODELS)
def test_a_model_that_is_not_whole_is_refused(fault: str, role: str, tmp_path: Path) -> None:
    make, names = MODELS[fault]
    command, *words = ROLES[role]
    out, text = tmp_path / "out", text_folder(tmp_path / "text")
    where = [out] if command == "record" else ["--text", text, "--out", out]
    result = call("realrun", command, *words, make(tmp_path / "model"), *where)
    assert_refused(result, tmp_path / "model", *names)
    assert not out.exists()


def test_a_gguf_file_that_is_not_whole_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, file = tiny_model(2, seed=1, dtype=torch.float32), tmp_path / "tiny.gguf"
    state = model.state_dict()
    monkeypatch.setattr(model, "state_dict", lambda: {name: state[name] for name in state if name != LOST})
    write_gguf(model, [0], file)
    assert_refused(call("realrun", "convert", file, tmp_path / "out"), file, f"lacks {LOST}")
    result = call("realrun", "record", tmp_path / "trace", "--target", file, "--drafter", "prompt-lookup")
    assert_refused(result, file, f"lacks {LOST}")
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


FILE_KINDS = [name for name, case in CASES.items() if case.on_text and "two stages" not in name and "direct" not in name]


@pytest.mark.parametrize("name", FILE_KINDS)
def test_a_drafter_without_any_one_of_its_tensors_is_refused(name: str, tmp_path: Path) -> None:
    from realrun.pairs.drafter_files import load_drafter

    case = CASES[name]
    pair, file = case.target(), tmp_path / "drafter.safetensors"
    case.run(tmp_path, pair, loop=replace(LOOP, steps=1))
    whole = file.read_bytes()
    for lost in load_file(file):
        changed(tmp_path, without(lost), file.name)
        refusal(lambda: load_drafter(tmp_path, pair.target), f"lacks {lost};", "train it again")
        file.write_bytes(whole)
    load_drafter(tmp_path, pair.target)


def test_a_checkpoint_of_a_training_without_a_tensor_is_refused(tmp_path: Path) -> None:
    pass


@pytest.mark.parametrize("family", COMPOSITES)
def test_a_composite_checkpoint_gives_its_text_model(family: str, tmp_path: Path) -> None:
    pass
