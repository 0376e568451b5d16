"""One command's output as another's input: a trace says what to profile and what to validate."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from realrun.decode.sampling import Sampler
from realrun.measure.reuse import prompts_of
from realrun.pairs.prompts import Prompt
from specsim.io.files import file_digest, write_table
from specsim.trace.files import SEQUENCES, read_trace, write_trace
from tests.support.checks import edit_meta, refusal
from tests.support.commands import Result, assert_refused, call, json_of
from tests.support.tiny import tiny_model, tiny_tokenizer

TEXTS = ["a", "in", "def f(x):", "The cat sat on the mat", "import numpy as np", "b = 2 * a"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, prompts from one token on, and a trace of them with trees."""
    home = tmp_path_factory.mktemp("home")
    for name, seed in (("target", 1), ("draft", 2)):
        tiny_model(1, seed).float().save_pretrained(home / name)
        tiny_tokenizer().save_pretrained(home / name)
    rows = [{"text": text, "domain": "ab"[number % 2]} for number, text in enumerate(TEXTS)]
    (home / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    json_of(record(home, "trace", "--tree-nodes", 6, "--tree-width", 3, "--mode", "greedy"))
    return home


def models(home: Path, draft: str = "draft") -> list[object]:
    return ["--target", home / "target", "--draft-model", home / draft]


def record(home: Path, out: str, *more: object) -> Result:
    sizes = ["--max-new-tokens", 12, "--max-draft-tokens", 3, "--prompts", home / "prompts.jsonl"]
    return call("realrun", "record", home / out, *models(home), *sizes, *more, "--json")


def profile(home: Path, out: Path, *more: object) -> Result:
    return call("realrun", "profile", out, *models(home), "--minutes", 0, *more, "--json")


def test_a_trace_holds_its_prompts(home: Path) -> None:
    trace, tokenizer = read_trace(home / "trace"), tiny_tokenizer()
    assert trace.prompts is not None
    assert [tokenizer.decode(prompt).replace(" ", "") for prompt in trace.prompts] == [
        t.replace(" ", "") for t in TEXTS
    ]
    chosen = trace.select([4, 0])
    assert chosen.prompts is not None and trace.select([]).prompts is not None
    assert [prompt.tolist() for prompt in chosen.prompts] == [trace.prompts[4].tolist(), trace.prompts[0].tolist()]
    assert prompts_of(trace, "trace")[2] == Prompt("a", trace.prompts[2].tolist())


@pytest.mark.parametrize("trees", [True, False])
def test_a_profile_is_for_what_the_trace_holds(
    home: Path, tmp_path: Path, trees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def noted(pair: object, **how: Any) -> dict[str, Any]:
        asked.update(how)
        return {}

    monkeypatch.setattr("realrun.measure.profile.profile", noted)
    if not trees:
        json_of(record(home, "chains", "--mode", "rejection", "--temperature", 0.7, "--top-p", 0.9))
    json_of(profile(home, tmp_path / "profile.json", "--for", home / ("trace" if trees else "chains")))
    sampler = Sampler("greedy", 0.8) if trees else Sampler("rejection", 0.7, top_p=0.9)
    assert asked["contexts"][0] == 2 and asked["contexts"][-1] == 22 + 12 - 2 and asked["depth"] == 3
    assert asked["sampler"] == sampler
    assert asked["tree_tokens"] == 7 or not trees


@pytest.mark.slow
def test_a_profile_for_a_trace_prices_all_that_it_holds(home: Path, tmp_path: Path) -> None:
    document = json_of(profile(home, tmp_path / "profile.json", "--for", home / "trace"))
    assert len(document["median_s"]["draft_step"]) == 3 and document["median_s"]["tree"]["sizes"][-1] == 7
    priced = [home / "trace", "--cost", tmp_path / "profile.json", "--json"]
    for policy in ("fixed_k", "vct --set width=2 --set depth=2"):
        assert json_of(call("specsim", "replay", *priced, "--policy", *policy.split()))["rounds"] > 0


@pytest.mark.parametrize(
    "option",
    ["--contexts 2,9", "--max-draft-tokens 3", "--tree-nodes 0", "--mode greedy", "--temperature 1", "--top-p 1"],
)
def test_what_the_trace_says_is_not_said_again(home: Path, tmp_path: Path, option: str) -> None:
    result = profile(home, tmp_path / "profile.json", "--for", home / "trace", *option.split())
    assert_refused(result, "--for", option.split()[0])


def test_a_profile_of_another_pair_is_refused(home: Path, tmp_path: Path) -> None:
    same = call(
        "realrun", "profile", tmp_path / "p.json", *models(home, "target"), "--for", home / "trace", "--minutes", 0
    )
    assert_refused(same, home / "trace", "weights", "give the models of the trace")
    other = profile(home, tmp_path / "p.json", "--for", home / "trace", "--dtype", "float64")
    assert_refused(other, home / "trace", "dtype float32", "float64")
    assert_refused(profile(home, tmp_path / "p.json", "--for", home / "draft"), "meta.json is missing")


def test_a_profile_is_not_replaced_unasked(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    out.write_text("old")
    contexts = ["--contexts", "4", "--max-draft-tokens", 1, "--tree-nodes", 0]
    assert_refused(profile(home, out, *contexts), out, "--overwrite")
    assert out.read_text() == "old"
    json_of(profile(home, out, *contexts, "--overwrite"))
    assert json.loads(out.read_text())["contexts"] == [4]


@pytest.mark.parametrize(
    "command",
    ["cost-grid llama-68m", "scripted llama-2-7b llama-68m TRACE", "typical"],
    ids=lambda line: line.split()[0],
)
def test_no_result_is_replaced_unasked(home: Path, tmp_path: Path, command: str) -> None:
    (tmp_path / "out.json").write_text("old")
    words = [str(home / "trace") if word == "TRACE" else word for word in command.split()]
    assert_refused(call("realrun", *words, "--out", tmp_path / "out.json"), "out.json", "--overwrite")


def validated(home: Path, out: Path, *more: object) -> Result:
    few = ["--policy", "fixed_k", "--trials", 2, "--repeats", 3, "--seed", 5]
    return call("realrun", "validate", "--out", out, *models(home), *few, *more, "--json")


@pytest.fixture(scope="module")
def long(home: Path) -> Path:
    """A trace of prompts that a validation can profile, three tokens and more."""
    rows = [{"text": text} for text in TEXTS[2:]]
    (home / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = ["--max-new-tokens", 12, "--max-draft-tokens", 3, "--prompts", home / "long.jsonl"]
    json_of(call("realrun", "record", home / "long", *models(home), *sizes, "--temperature", 0.7, "--json"))
    return home / "long"


def test_a_recorded_trace_is_validated(home: Path, long: Path, tmp_path: Path) -> None:
    """Prompts and settings are the recording's; nothing is recorded again."""
    before = {path.name: path.read_bytes() for path in long.iterdir()}
    document = json_of(validated(home, tmp_path / "out", "--trace", long))
    meta = read_trace(long).meta
    assert document["decoding"] == meta["decoding"] and document["prompts"] == meta["prompts"]
    assert {row["rounds_identical_percent"] for row in document["rows"]} == {100.0}
    assert before == {path.name: path.read_bytes() for path in long.iterdir()}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("forecast.json", "profile.json", "report.html", "rounds.parquet", "tuned.json", "tuning_profile.json"),
        "validation.json",
    ]  # fmt: skip


@pytest.mark.parametrize("option", ["--prompts p.jsonl", "--num-prompts 2", "--max-new-tokens 12", "--overwrite"])
def test_a_validation_of_a_trace_takes_no_other_settings(home: Path, long: Path, tmp_path: Path, option: str) -> None:
    assert_refused(validated(home, tmp_path / "out", "--trace", long, *option.split()), "--trace", option.split()[0])


def test_a_validation_of_another_pair_or_without_prompts_is_refused(home: Path, long: Path, tmp_path: Path) -> None:
    other = call("realrun", "validate", "--out", tmp_path / "out", *models(home, "target"), "--trace", long, "--json")
    assert_refused(other, long)
    older: Any = read_trace(long)
    write_trace(type(older)(**{**vars(older), "prompt": None}), tmp_path / "older")
    assert_refused(
        validated(home, tmp_path / "out", "--trace", tmp_path / "older"), "older", "does not hold its prompts"
    )


@pytest.mark.parametrize("damage", ["too few", "negative", "no list"])
def test_damaged_prompts_are_refused(long: Path, tmp_path: Path, damage: str) -> None:
    shutil.copytree(long, tmp_path / "trace")
    path = tmp_path / "trace" / SEQUENCES
    table = pq.ParquetFile(path).read()
    prompts = table.column("prompt").to_pylist()
    values: Any = {
        "too few": [prompt[1:] for prompt in prompts],
        "negative": [[-1] * len(prompt) for prompt in prompts],
    }
    column = pa.array([1] * len(prompts)) if damage == "no list" else pa.array(values[damage], pa.list_(pa.int32()))
    write_table(table.set_column(table.column_names.index("prompt"), "prompt", column), path)
    edit_meta(tmp_path / "trace", lambda meta: meta["checksums"].update({SEQUENCES: file_digest(path)}))
    refusal(lambda: read_trace(tmp_path / "trace"), str(path), "'prompt'")
