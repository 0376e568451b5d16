"""What commands refuse before they load a model: folders in use or not writable, prompts that are missing."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

import realrun.pairs.pair
from realrun.cli.options import load_prompts
from realrun.measure.record import Partial, longest_prompt
from realrun.pairs.pair import load_pair, load_target
from specsim.io import files
from specsim.io.files import working_in
from specsim.trace.files import read_trace
from tests.support import ROOT
from tests.support.checks import refusal
from tests.support.commands import assert_refused, call
from tests.support.tiny import POSITIONS, tiny_pair, tiny_tokenizer

# Each with where it works, if not in its folder itself.
LONG = {
    "record": (["record", "OUT"], "OUT.partial"),
    "validate": (["validate", "--out", "OUT"], "OUT"),
    "board": (["board", "--out", "OUT"], "OUT"),
    "compare": (["compare", "--base", str(ROOT), "--head", str(ROOT), "--out", "OUT"], "OUT"),
    "train eesd": (["train", "eesd", "--out", "OUT"], "OUT"),
    "train self-sd": (["train", "self-sd", "--out", "OUT"], "OUT"),
    "train predictor": (["train", "predictor", "--out", "OUT"], "OUT"),
}
FILES = {
    "profile": ["profile", "OUT"],
    "cost-grid": ["cost-grid", "llama-3.2-1b", "--out", "OUT"],
    "scripted": ["scripted", "llama-3.1-8b", "llama-3.2-1b", "absent", "--out", "OUT"],
    "typical": ["typical", "--out", "OUT"],
}
PROMPTS = [name for name in LONG if name != "train eesd"] + ["typical"]


@pytest.fixture(autouse=True)
def _no_models(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any, **options: Any) -> None:
        raise AssertionError("a model was loaded")

    if "models" not in request.keywords:
        for name in ("load_pair", "load_target"):
            monkeypatch.setattr(realrun.pairs.pair, name, load)


def words(arguments: list[str], out: Path) -> list[str]:
    return [word.replace("OUT", str(out)) for word in arguments]


@pytest.mark.parametrize("command", LONG)
def test_two_commands_do_not_work_in_one_folder(tmp_path: Path, command: str) -> None:
    arguments, where = LONG[command]
    out = tmp_path / "out"
    with working_in(Path(where.replace("OUT", str(out)))):
        assert_refused(call("realrun", *words(arguments, out)), "another process works in", out)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("command", [*LONG, *FILES])
def test_a_full_disk_is_found_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files.os, "fsync", full)
    arguments = LONG[command][0] if command in LONG else FILES[command]
    assert_refused(call("realrun", *words(arguments, tmp_path / "out")), tmp_path, "the disk is full")
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("command", PROMPTS)
def test_a_missing_prompt_file_is_found_before_any_model_is_loaded(tmp_path: Path, command: str) -> None:
    arguments = LONG[command][0] if command in LONG else FILES[command]
    result = call("realrun", *words(arguments, tmp_path / "out"), "--prompts", tmp_path / "absent.jsonl")
    assert_refused(result, "absent.jsonl", "does not exist")


def test_prompts_too_long_are_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, pair = tmp_path / "p.jsonl", tiny_pair()
    longest = longest_prompt(pair, 20, 4)
    assert longest == POSITIONS - 24
    sizes = [5, longest + 1, longest, 9, *[longest + 2] * 6, 4]
    path.write_text("".join(json.dumps({"text": "a" * size}) + "\n" for size in sizes))
    assert [len(prompt.tokens) for prompt in load_prompts(pair, path, None, longest)] == [5, longest, 9, 4]
    assert capsys.readouterr().err == (
        f"prompts: 7 of 11 left out, as they are longer than the {longest} tokens that output and draft leave of the "
        f"models' positions: {', '.join(f'{path}:{line}' for line in (2, 5, 6, 7, 8))} and 2 more\n"
    )
    assert len(load_prompts(pair, path, 4, longest)) == 4  # of those that fit
    refusal(lambda: load_prompts(pair, path, None, 3), "all 11 prompts are longer than the 3 tokens", "shorten them")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    home, pair = tmp_path_factory.mktemp("models"), tiny_pair()
    for name, model in (("target", pair.target), ("draft", pair.drafter.model)):
        model.save_pretrained(home / name)
        tiny_tokenizer().save_pretrained(home / name)
    prompts = home / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"text": "a" * size}) + "\n" for size in (5, 150, 9)))
    return ["--target", home / "target", "--draft-model", home / "draft", "--prompts", prompts, "--dtype", "float64"]


def test_a_prompt_too_long_does_not_stop_the_others(
    models: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(realrun.pairs.pair, "load_pair", load_pair)
    monkeypatch.setattr(realrun.pairs.pair, "load_target", load_target)
    result = call("realrun", "record", tmp_path / "trace", *models, "--max-new-tokens", 8)
    assert result.code == 0 and "1 of 3 left out" in result.err and "prompts.jsonl:2" in result.err
    assert read_trace(tmp_path / "trace").prompt_tokens.tolist() == [5, 9]


def test_what_a_kill_right_before_the_end_leaves_is_cleared(
    models: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace is whole, its sequences are still beside it; those of another recording stay."""
    monkeypatch.setattr(realrun.pairs.pair, "load_pair", load_pair)
    monkeypatch.setattr(realrun.pairs.pair, "load_target", load_target)
    arguments = ["record", tmp_path / "trace", *models, "--max-new-tokens", 8]

    def killed(*_: object) -> None:
        raise SystemExit(9)

    with monkeypatch.context() as patch:
        patch.setattr(Partial, "remove", killed)
        assert call("realrun", *arguments).code == 9
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace", "trace.partial"]
    assert_refused(call("realrun", *arguments), "exists")
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]
    with monkeypatch.context() as patch:
        patch.setattr(Partial, "put", killed)
        assert call("realrun", *arguments[:-1], 9, "--overwrite").code == 9
    assert_refused(call("realrun", *arguments), "exists")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace", "trace.partial"]
