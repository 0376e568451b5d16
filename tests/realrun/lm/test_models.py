"""Loading pairs and prompts; models that give NaN or overflow are refused in a line, -inf logits are legal."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import realrun.pairs.prompts
from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.drafters.independent import IndependentKind
from realrun.lm.cached import CachedLM
from realrun.measure.record import RecordSettings, record
from realrun.pairs.drafter_files import LAB_WEIGHTS
from realrun.pairs.library_text import SourceFile, docstring_spans, held_out, library_files
from realrun.pairs.pair import Pair, load_pair
from realrun.pairs.prompts import lab_prompts, study_prompts
from specsim.policy.registry import make_policy
from tests.support.checks import refusal
from tests.support.commands import assert_refused, call
from tests.support.tiny import tiny_model, tiny_pair, tiny_prompts, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, layers in (("target", 2), ("draft", 1), ("stranger", 1)):
        tiny_model(layers, seed=layers, dtype=torch.float32).save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    text = (folder / "stranger" / "tokenizer.json").read_text()
    tokenizer = json.loads(text)
    vocab = tokenizer["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    (folder / "stranger" / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_a_pair_is_loaded_by_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = load_pair(str(folder / "target"), str(folder / "draft"), dtype="float64")
    assert pair.dtype == torch.float64 and pair.device.type == "cpu" and pair.eos_token_ids == (0,)
    assert pair.target.config.num_hidden_layers == 2 and not pair.target.training
    assert (pair.target_name, pair.draft_name) == ("target", "draft")  # never an absolute path
    monkeypatch.chdir(folder)
    relative = load_pair("./target", "draft", dtype="bfloat16")
    assert not relative.target_name.startswith("/") and relative.dtype == torch.bfloat16


def test_a_pair_that_cannot_be_loaded_is_refused(folder: Path) -> None:
    target, draft = str(folder / "target"), str(folder / "draft")
    refusal(lambda: load_pair(target, str(folder / "stranger")), "tokenizers that differ")
    refusal(lambda: load_pair(target, draft, dtype="int4"), "int4", "bfloat16")
    refusal(lambda: load_pair(str(folder / "absent"), draft), "absent")
    refusal(lambda: load_pair(target, str(folder)), str(folder))
    refusal(lambda: load_pair(target, draft, device="abacus"), "abacus")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:3"])
def test_a_missing_cuda_device_is_refused(folder: Path, device: str) -> None:
    pair = str(folder / "target"), str(folder / "draft")
    refusal(lambda: load_pair(*pair, device=device), device, "--device cpu")


def test_prompts_name_the_file_that_they_were_cut_from() -> None:
    names = [source.name for source in library_files("held_out")]
    cut = [prompt.source for prompt in study_prompts(tiny_tokenizer(), len(names) + 20, 8)]
    assert set(cut) <= set(names) and len(set(cut)) < len(cut)  # the second round through the files
    alone = [prompt.source for prompt in lab_prompts(tiny_tokenizer(), 6, 8)]
    assert set(alone) <= set(names) and len(set(alone)) == 6


def test_the_split_by_file_is_stable() -> None:
    """These names are held out, or not, under every version of Python and of this program."""
    names = ["argparse.py", "asyncio/locks.py", "heapq.py", "json/decoder.py", "os.py", "test/test_json.py"]
    names += [f"module_{i}.py" for i in range(26)]
    expected = [name for name in names if hashlib.sha256(name.encode()).digest()[0] % 16 == 0]
    assert [name for name in names if held_out(name)] == expected
    share = sum(held_out(f"package/module_{i}.py") for i in range(8000)) / 8000
    assert abs(share - 1 / 16) < 4 * (15 / 256 / 8000) ** 0.5


@pytest.fixture(scope="module")
def splits() -> tuple[list[SourceFile], list[SourceFile]]:
    return library_files("train"), library_files("held_out")


def test_splits_are_disjoint_sorted_and_repeatable(splits: tuple[list[SourceFile], list[SourceFile]]) -> None:
    train, held = ([source.name for source in split] for split in splits)
    assert not set(train) & set(held) and len(train) > 5 * len(held) > 0
    for names in (train, held):
        assert len(set(names)) == len(names)
        assert not [name for name in names if name.startswith("/") or "site-packages" in name]
    assert library_files("held_out") == splits[1]


@pytest.fixture
def library(splits: tuple[list[SourceFile], list[SourceFile]], monkeypatch: pytest.MonkeyPatch) -> list[SourceFile]:
    """Only held-out files can be read; asking for training files fails."""
    monkeypatch.setattr(realrun.pairs.prompts, "library_files", lambda split: {"held_out": splits[1]}[split])
    return splits[1]


def test_lab_prompts_are_pieces_of_held_out_files_in_three_domains(library: list[SourceFile]) -> None:
    tokenizer, count = tiny_tokenizer(), 7
    prompts = lab_prompts(tokenizer, count, prompt_tokens=40)
    assert prompts == lab_prompts(tokenizer, count, prompt_tokens=40)
    domains = [p.domain for p in prompts]
    assert len(prompts) == count and set(domains) == {"code", "prose", "tests"}
    assert max(map(domains.count, domains)) - min(map(domains.count, set(domains))) <= 1
    assert all(len(p.tokens) == 40 for p in prompts)
    assert len({tuple(p.tokens) for p in prompts}) == count
    known = "".join(chr(code) for code in range(32, 127)) + "\n"
    for prompt in prompts:
        piece = "".join(known[token - 1] if token else "\0" for token in prompt.tokens)
        assert any(
            piece in re.sub(r"[^\x20-\x7e\n]", "\0", source.text)
            for source in library
            if source.is_test == (prompt.domain == "tests")
        )


def test_more_lab_prompts_than_there_are_is_refused(library: list[SourceFile]) -> None:
    refusal(lambda: lab_prompts(tiny_tokenizer(), 100_000, 40), "ask for fewer")


def test_the_labs_byte_level_tokenizer_is_loss_free() -> None:
    tokenizer = AutoTokenizer.from_pretrained(LAB_WEIGHTS / "target")
    for text in ("def f(x):\n\treturn 3.14\r\n", "naïve 雪 \x00\x7f", "  trailing  ", "<b>"):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text and 0 not in ids
    assert tokenizer.eos_token_id == 0 and len(tokenizer) == 2048


def test_docstring_spans_are_the_lines_of_long_docstrings() -> None:
    long = "word " * 100
    source = (
        f'"""Module. {long}"""\n'
        'import os\n\x0c\nTEXT = "a\\x0cb"  # a form feed ends no line\n'
        f'def f():\n    """{long}\n    more\n    """\n    return "{long}"\n'
        'class C:\n    """Short."""\n'
        f"    async def g(self):\n        '''{long}'''\n"
        f"def h():\n    x = '''{long}'''\n"
    )
    pieces = [source[start:end] for start, end in docstring_spans(source)]
    assert pieces == [
        f'"""Module. {long}"""\n',
        f'    """{long}\n    more\n    """\n',
        f"        '''{long}'''\n",
    ]


def test_docstring_spans_of_broken_or_unfinished_text() -> None:
    assert docstring_spans("def f(:\n") == [] and docstring_spans("") == [] and docstring_spans("\0") == []
    text = f'"""{"x" * 400}"""'  # no newline at the end
    assert docstring_spans(text) == [(0, len(text))]


MODES = {"greedy": Sampler(), "gumbel": Sampler("gumbel", 0.8), "rejection": Sampler("rejection", 0.8)}
POLICIES = {
    "baseline": None,
    "chain": make_policy("fixed_k", {"k": 3}),
    "tree": make_policy("eagle2", {"top_k": 2, "depth": 2, "nodes": 6}),
}


def spoiled(model: Any, weight: str = "model.layers.0.mlp.down_proj.weight") -> Any:
    """Ten NaN weights in one layer."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        dict(model.named_parameters())[weight].view(-1)[3:13] = torch.nan
    return model


def pair_of(which: str) -> Pair:
    pair = tiny_pair()
    target, draft = pair.target, pair.drafter.model
    target, draft = (spoiled(target), draft) if which == "target" else (target, spoiled(draft))
    return Pair(target, IndependentKind(draft), tiny_tokenizer(), "t", "d", ())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("which", ["target", "drafter"])
def test_nothing_is_recorded_of_a_model_that_gives_nan(which: str, mode: str) -> None:
    settings = RecordSettings(max_draft_tokens=3, max_new_tokens=8, sampler=MODES[mode])
    message = refusal(lambda: record(pair_of(which), tiny_prompts(2), settings))
    assert (
        f"the {which} " in message and "first in layer model.layers.0.mlp.down_proj" in message and "float64" in message
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("which", ["target", "drafter"])
def test_nothing_is_decoded_with_a_model_that_gives_nan(which: str, policy: str, mode: str) -> None:
    pair = pair_of(which)
    decoder = Decoder(*pair.make_drafter(), (), MODES[mode])

    def decode() -> None:
        decoder.decode([5, 6, 7], 8, POLICIES[policy])

    if (which, policy) == ("drafter", "baseline"):
        decode()
    else:
        assert f"the {which} " in refusal(decode)


def test_an_overflow_in_float16_is_found_where_it_begins() -> None:
    """Weights that float32 holds easily: their product is above 65,504."""
    model = tiny_model(2, seed=1, dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(3e4)
        model.model.layers[1].mlp.gate_proj.weight.mul_(3e4)
    decoder = Decoder(CachedLM(model), tiny_pair().make_drafter()[1], (), Sampler())
    decoder.decode([5, 6, 7], 8, None)
    half = copy.deepcopy(model).half()
    decoder = Decoder(CachedLM(half), tiny_pair().make_drafter()[1], (), Sampler())
    message = refusal(lambda: decoder.decode([5, 6, 7], 8, None))
    assert "model.layers.1." in message and "float16" in message and "--dtype float32" in message


def test_logits_of_minus_infinity_are_legal(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a model gives them that rules tokens out."""
    pair = tiny_pair()
    decoder = Decoder(*pair.make_drafter(), (), Sampler())
    plain = CachedLM.forward

    def forward(self: CachedLM, tokens: Any) -> torch.Tensor:
        return plain(self, tokens).clone().index_fill_(1, torch.tensor([1, 2]), -torch.inf)

    monkeypatch.setattr(CachedLM, "forward", forward)
    tokens = decoder.decode([5, 6, 7], 8, POLICIES["chain"]).tokens
    assert len(tokens) == 8 and not {1, 2} & {*tokens}


def test_the_command_says_model_layer_and_number_type_in_one_line(tmp_path: Path) -> None:
    pair = tiny_pair()
    for name, model in (("target", spoiled(pair.target)), ("draft", pair.drafter.model)):
        model.save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
    (tmp_path / "p.jsonl").write_text('{"text": "abcdef"}\n')
    given = ["--target", tmp_path / "target", "--draft-model", tmp_path / "draft", "--prompts", tmp_path / "p.jsonl"]
    result = call("realrun", "record", tmp_path / "trace", *given, "--max-new-tokens", 8, "--dtype", "float32")
    assert_refused(result, tmp_path / "target", "model.layers.0.mlp.down_proj", "float32")
    assert not (tmp_path / "trace").exists()
