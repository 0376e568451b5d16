"""The `acceptance` commands, from counters to a generated trace."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from specsim.acceptance.files import load_model, save_model
from specsim.acceptance.generate import generate
from specsim.trace.files import read_trace, write_trace
from tests.support.acceptance_examples import difficulty, fixed_k_rounds
from tests.support.commands import Result, assert_refused, call, json_of


def acceptance(*words: object) -> Result:
    return call("specsim", "acceptance", *words)


def counters(tmp_path: Path) -> Path:
    path = tmp_path / "counters.json"
    path.write_text('{"drafted": [1000, 1000], "accepted": [800, 600]}')
    return path


def test_from_counters_to_a_trace(tmp_path: Path) -> None:
    model, out = tmp_path / "model.json", tmp_path / "trace"
    text = acceptance("fit", counters(tmp_path), "--model", "per_position", "--out", model).out
    assert "0.800" in text and "0.750" in text
    sizes = ("--sequences", 3, "--output-tokens", 40, "--max-draft-tokens", 2)
    document = json_of(acceptance("generate", model, "--out", out, *sizes, "--json"))
    assert (document["sequences"], document["output_tokens"], document["depth"]) == (3, 120, 2)
    assert read_trace(out).meta["synthetic"]["parameters"] == {"alpha": [0.8, 0.75]}
    assert "120" in acceptance("generate", model, "--out", out, *sizes, "--overwrite").out


def test_from_rounds_of_one_policy_and_from_a_trace(tmp_path: Path) -> None:
    trace = generate(difficulty(), 8, 60, 4, seed=1)
    rounds, path = fixed_k_rounds(trace, 4), tmp_path / "rounds.parquet"
    names = ("policy", "sequence_id", "t", "drafted", "accepted")
    pq.write_table(pa.table({name: getattr(rounds, name) for name in names}), path)
    arguments = ("fit", path, "--model", "iid", "--policy", "fixed_k(k=4)", "--json")
    document = json_of(acceptance(*arguments, "--out", tmp_path / "iid.json"))
    assert document["fitted_to"] == {"source": "rounds", "rounds": len(rounds.drafted)}
    assert asdict(load_model(tmp_path / "iid.json")) == document["parameters"]
    unknown = acceptance("fit", path, "--model", "iid", "--policy", "x", "--out", tmp_path / "x.json")
    assert_refused(unknown, "no rounds of policy 'x'")
    write_trace(trace, tmp_path / "trace")
    text = acceptance("fit", tmp_path / "trace", "--model", "difficulty", "--out", tmp_path / "difficulty.json").out
    assert "hidden_drift" in text
    assert load_model(tmp_path / "difficulty.json").name == "difficulty"


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    model = tmp_path / "model.json"
    save_model(difficulty(), model)
    assert_refused(acceptance("fit", counters(tmp_path), "--model", "iid", "--out", model), "exists")
    (tmp_path / "trace").mkdir()
    assert_refused(acceptance("generate", model, "--out", tmp_path / "trace"), "exists")
    acceptance("fit", counters(tmp_path), "--model", "iid", "--out", model, "--overwrite")
    assert load_model(model).name == "iid"
