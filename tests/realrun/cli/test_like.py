"""`realrun validate --like`: a finished validation done again, so that the two can be compared row by row."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import realrun.experiment.run as run_module
import realrun.experiment.validate as validate_module
from specsim.trace.files import read_trace
from tests.support.commands import Result, assert_refused, call, json_of
from tests.support.tiny import tiny_model, tiny_tokenizer

TEXTS = ["in a", "def f(x):", "The cat sat on the mat", "import numpy as np", "b = 2 * a"]
OPTIONS = {"trials": 2, "repeats": 3, "tuning_share": 0.4, "seed": 5}
FILE = """\
from dataclasses import dataclass

from specsim.policy.chain.fixed_k import FixedK


@dataclass(frozen=True)
class Mine(FixedK):
    name = "mine"
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, prompts, and old/: a validation of a policy that learns, one that is tuned and one in a file."""
    home = tmp_path_factory.mktemp("home")
    for name, seed in (("target", 1), ("draft", 2)):
        tiny_model(1, seed).float().save_pretrained(home / name)
        tiny_tokenizer().save_pretrained(home / name)
    (home / "prompts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (home / "mine.py").write_text(FILE)
    sizes = ["--max-new-tokens", 10, "--max-draft-tokens", 3, "--prompts", home / "prompts.jsonl", "--temperature", 0.7]
    given = [part for name, value in OPTIONS.items() for part in (f"--{name.replace('_', '-')}", value)]
    policies = ["--policy", "fixed_k", "--policy", "renewal_stop", *mine(home)]
    json_of(call("realrun", "validate", "--out", home / "old", *models(home), *sizes, *given, *policies, "--json"))
    return home


def mine(home: Path) -> list[object]:
    return ["--policy-file", home / "mine.py"]


def models(home: Path, draft: str = "draft") -> list[object]:
    return ["--target", home / "target", "--draft-model", home / draft]


def again(home: Path, out: Path, *more: object, old: Path | None = None, draft: str = "draft") -> Result:
    like = ["--like", old or home / "old", *mine(home)]
    return call("realrun", "validate", "--out", out, *models(home, draft), *like, *more, "--json")


def by_label(document: dict[str, Any], *keys: str) -> dict[str, list[Any]]:
    return {row["label"]: [row[key] for key in keys] for row in document["rows"]}


def test_all_rows_are_in_common_and_nothing_is_tuned(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((validate_module, "_tuned"), (run_module, "profile")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("it is tuned or profiled anew"))
    old = json.loads((home / "old" / "validation.json").read_text())
    new = json_of(again(home, tmp_path / "new"))
    same = ("policy", "params", "role", "sequence_tokens", "tau", "rounds_identical_percent")
    assert by_label(new, *same) == by_label(old, *same) and len(new["rows"]) >= 4
    assert new["options"] == old["options"] == OPTIONS
    assert [new[key] for key in ("decoding", "prompts", "sequences")] == [
        old[key] for key in ("decoding", "prompts", "sequences")
    ]
    diff = call("specsim", "claims", "diff", home / "old", tmp_path / "new", "--json")
    rows = json.loads(diff.out)["rows"]
    assert {row["name"] for row in rows} == {row["label"] for row in old["rows"]}
    assert all(row["change"] != "not comparable" for row in rows)
    # What it leaves serves for the next.
    assert (read_trace(tmp_path / "new" / "trace").token == read_trace(home / "old" / "trace").token).all()
    third = json_of(again(home, tmp_path / "third", old=tmp_path / "new"))
    assert by_label(third, "params") == by_label(old, "params")


SAID = ["--prompts p", "--num-prompts 2", "--max-new-tokens 10", "--mode gumbel", "--policy fixed_k", "--trials 2"]


@pytest.mark.parametrize("option", [*SAID, "--repeats 5", "--tuning-share 0.5", "--seed 1", "--overwrite"])
def test_what_it_says_is_not_said_again(home: Path, tmp_path: Path, option: str) -> None:
    assert_refused(again(home, tmp_path / "new", *option.split()), "--like", option.split()[0])


def test_another_pair_or_machine_is_refused(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "new"
    assert_refused(again(home, out, draft="target"), "weights")
    assert_refused(again(home, out, "--dtype", "float64"), "dtype", "float64")
    try:
        assert_refused(again(home, tmp_path / "other", "--threads", 2), "1 threads", "--threads 1")
    finally:
        torch.set_num_threads(1)
    assert_refused(again(home, home / "old"), home / "old", "--out")
    assert not (out / "validation.json").exists()


Change = Callable[[dict[str, Any]], object]
WRONG: dict[str, tuple[Change, str]] = {
    "kind": (lambda document: document.update(kind="specsim-leaderboard"), "kind"),
    "one of before": (lambda document: document.pop("options"), "required field `options`"),
    "an option's type": (lambda document: document["options"].update(trials="2"), "options.trials"),
    "no rows": (lambda document: document.update(rows=[]), "no rows"),
    "no settings": (lambda document: document["rows"][0].pop("params"), "required field `params`"),
    "policy": (lambda document: document["rows"][0].update(policy="fixed_l"), "--policy-file"),
    "setting": (lambda document: document["rows"][0].update(policy="fixed_k", params={"m": 1}), "'m'"),
    "setting's range": (lambda document: document["rows"][0].update(policy="fixed_k", params={"k": -1}), "k=-1"),
    "prompts": (lambda document: document["prompts"].update(digest="0" * 16), "other prompts"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_its_files_do_not_say_is_named(home: Path, tmp_path: Path, case: str) -> None:
    change, word = WRONG[case]
    shutil.copytree(home / "old", tmp_path / "old")
    path = tmp_path / "old" / "validation.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    assert_refused(again(home, tmp_path / "new", old=tmp_path / "old"), tmp_path / "old", word)


@pytest.mark.parametrize("file", ["validation.json", "profile.json", "trace"])
def test_what_is_missing_is_named(home: Path, tmp_path: Path, file: str) -> None:
    (tmp_path / "old").mkdir()
    for name in {"validation.json", "profile.json", "trace"} - {file}:
        (tmp_path / "old" / name).symlink_to(home / "old" / name)
    assert_refused(again(home, tmp_path / "new", old=tmp_path / "old"), tmp_path / "old", file.split(".")[0])


def test_a_trace_that_lies_elsewhere_is_named(home: Path, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for name in ("validation.json", "profile.json"):
        (tmp_path / "old" / name).symlink_to(home / "old" / name)
    new = json_of(again(home, tmp_path / "new", "--trace", home / "old" / "trace", old=tmp_path / "old"))
    assert new["rows"] and not (tmp_path / "new" / "trace").exists()
