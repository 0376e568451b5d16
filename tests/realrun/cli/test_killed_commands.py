"""Commands that are killed or interrupted at any moment end, started again, with the answer of an undisturbed run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from realrun.drafters.medusa import MedusaHeads
from realrun.experiment.pipeline import UNFINISHED
from realrun.pairs.drafter_files import describe_target, save_drafter
from specsim.trace.files import read_trace
from tests.support.commands import call
from tests.support.killed_commands import DEPTH, SIGNALS, Commands, quicken
from tests.support.tiny import tiny_pair, tiny_tokenizer

KILLS = 20
LIMIT_S = 20.0  # of the moments of kills, at first
TEXTS = ["def f(x):", "The end", "import os", "Speculative", "one two three", "return 0", "while True", "class A:"]
POLICIES = ("fixed_k", "max_confidence", "beta_ts")  # the last of which carries a state from sequence to sequence


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny pair on disk, prompts, text to train on, and an untrained drafter."""
    home, pair = tmp_path_factory.mktemp("killed"), tiny_pair()
    for name, model in (("target", pair.target), ("draft", pair.drafter.model)):
        model.save_pretrained(home / name)
        tiny_tokenizer().save_pretrained(home / name)
    (home / "prompts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (home / "text").mkdir()
    for number in range(20):
        (home / "text" / f"{number}.txt").write_text(" ".join(TEXTS) * 20)
    facts = {"target": describe_target(pair.target, "target"), "heads": 2}
    save_drafter(home / "heads", "medusa", MedusaHeads(pair.target, 2).state_dict(), facts)
    return home


def files_of(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.rglob(pattern))


def trace_of(folder: Path) -> Any:
    trace = read_trace(folder)
    columns = {name: value.tolist() for name, value in vars(trace).items() if isinstance(value, np.ndarray)}
    meta = {key: value for key, value in trace.meta.items() if key not in ("record_seconds", "provenance", "checksums")}
    return columns, meta


def validation_of(folder: Path) -> Any:
    document = json.loads((folder / "validation.json").read_text())
    rows = [
        [row["policy"], row["params"], row["role"], row["measured_tau"], row["measured_v_d"]]
        for row in sorted(document["rows"], key=lambda row: row["label"])
    ]
    assert all(row["rounds_identical_percent"] == row["output_identical_percent"] == 100.0 for row in document["rows"])
    rounds = [
        {key: value for key, value in row.items() if not key.endswith("_s")}
        for row in pq.read_table(folder / "rounds.parquet").to_pylist()
    ]
    return trace_of(folder / "trace"), rows, sorted(rounds, key=json.dumps)


def board_of(folder: Path) -> Any:
    document = json.loads((folder / "leaderboard.json").read_text())
    rows = sorted([row["label"], row["policy"], row["params"], row["tau"]] for row in document["rows"])
    assert all(row["rounds_identical_percent"] == row["output_identical_percent"] == 100.0 for row in document["rows"])
    runs = [
        (
            path.name,
            [
                (run["tokens"], [[*round_.values()][:5] for round_ in run["rounds"]])
                for run in json.loads(path.read_text())["runs"]
            ],
        )
        for path in files_of(folder / "decoded", "*-*.json")
    ]
    return [trace_of(path) for path in files_of(folder, "trace")], rows, runs


def drafter_of(folder: Path) -> Any:
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    tensors = {
        name: value.view(torch.int16).tolist() for name, value in load_file(folder / "drafter.safetensors").items()
    }
    return tensors, log


class Case(NamedTuple):
    """A command into a folder, and its answer: what does not depend on the clock."""

    arguments: Callable[[Path, Path], list[object]]
    answer: Callable[[Path], Any]


def pair_options(home: Path) -> list[object]:
    models: list[object] = ["--target", home / "target", "--draft-model", home / "draft"]
    return [*models, "--prompts", home / "prompts.jsonl", "--max-new-tokens", 12, "--dtype", "float64"]


CHOSEN = [word for name in POLICIES for word in ("--policy", name)]
SEARCH: list[object] = ["--max-draft-tokens", DEPTH, *CHOSEN, "--trials", 4, "--repeats", 3, "--minutes", 0]
CASES = {
    "record": Case(
        lambda home, out: ["record", out, *pair_options(home), "--max-draft-tokens", DEPTH, "--tree-nodes", 6],
        trace_of,
    ),
    "validate": Case(lambda home, out: ["validate", "--out", out, *pair_options(home), *SEARCH], validation_of),
    "leaderboard": Case(
        lambda home, out: [
            *("board", "--out", out, *pair_options(home), *SEARCH, "--tree-nodes", 0),
            *("--drafters", f"model,prompt-lookup,{home / 'heads'}"),
        ],
        board_of,
    ),
    "train eesd": Case(
        lambda home, out: [
            *("train", "eesd", "--out", out, "--target", home / "target", "--text", home / "text", "--layers", 1),
            "--smoke-test",
        ],
        drafter_of,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIGNALS)
@pytest.mark.parametrize("command", CASES)
def test_a_command_that_was_stopped_at_any_moment_ends_as_one_that_was_not(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, name: str
) -> None:
    case, commands = CASES[command], Commands(tmp_path)
    out, rng = tmp_path / "work" / "out", np.random.default_rng([*f"{command} {name}".encode()])

    def words() -> list[str]:
        return [*map(str, case.arguments(home, out))]

    out.parent.mkdir()
    with monkeypatch.context() as patch:
        quicken(patch)
        assert call("realrun", *words()).code == 0  # compiles what processes forked from here run
    shutil.rmtree(out)
    undisturbed = commands.run(words())
    assert undisturbed.code == 0, undisturbed.err
    expected, limit_s = case.answer(out), LIMIT_S
    kills, most_lost, codes = 0, 0, set[int]()
    while kills < KILLS:
        shutil.rmtree(out.parent)
        out.parent.mkdir()
        moment_s = float(rng.uniform(0, limit_s))
        first = commands.run(words(), SIGNALS[name], moment_s)
        if first.code == 0:  # it was faster, or not there yet
            limit_s = max(moment_s, limit_s / 2)
            continue
        limit_s *= 1.1  # some take longer than others
        codes.add(first.code)
        if name == "SIGINT":
            assert first.code == 130, first.err
            assert first.err.splitlines()[-1].startswith("interrupted"), first.err
        # A kill may come when all is done but the exit; a validation would then be measured anew.
        if (out / "validation.json").is_file() and not (out / UNFINISHED).exists():
            assert case.answer(out) == expected
            continue
        kills += 1
        second = commands.run(words())
        if command == "record" and "exists" in second.err:  # it was whole already
            assert second.code == 2
        else:
            assert second.code == 0, (first.err, second.err)
        assert case.answer(out) == expected
        assert not [path for path in out.parent.rglob("*") if path.name.startswith(".") or "partial" in path.name]
        lost = first.began + second.began
        lost.subtract(undisturbed.began)
        assert all(count >= 0 for count in lost.values()), lost
        most_lost = max(most_lost, lost.total())
        assert lost.total() <= 1, lost
    print(f"\n| {command} | {name} | {kills} | {kills} | {most_lost} unit of {dict(undisturbed.began)} | {codes}")
