"""The `acceptance` commands, from counters to a generated trace."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner

from specsim.acceptance.files import load_model, save_model
from specsim.acceptance.generate import generate
from specsim.cli.acceptance import acceptance
from specsim.io.errors import InputError
from specsim.trace.files import read_trace, write_trace
from tests.support.acceptance_examples import difficulty, fixed_k_rounds

app = typer.Typer()
app.add_typer(acceptance, name="acceptance")


def call(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["acceptance", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def counters(tmp_path: Path) -> Path:
    path = tmp_path / "counters.json"
    path.write_text('{"drafted": [1000, 1000], "accepted": [800, 600]}')
    return path


def test_from_counters_to_a_trace(tmp_path: Path) -> None:
    model, out = tmp_path / "model.json", tmp_path / "trace"
    text = call("fit", counters(tmp_path), "--model", "per_position", "--out", model)
    assert "0.800" in text and "0.750" in text
    document = json.loads(
        call(
            "generate", model, "--out", out, "--sequences", 3, "--output-tokens", 40, "--max-draft-tokens", 2, "--json"
        )
    )
    assert (document["sequences"], document["output_tokens"], document["depth"]) == (3, 120, 2)
    trace = read_trace(out)
    assert trace.meta["synthetic"]["parameters"] == {"alpha": [0.8, 0.75]}
    report = json.loads(call("check", model, out, "--replicates", 5, "--json"))
    assert report["model"] == "per_position" and report["replicates"] == 5
    assert "total variation" in call("check", model, out, "--replicates", 5)
    assert "120" in call(
        "generate", model, "--out", out, "--sequences", 3, "--output-tokens", 40, "--max-draft-tokens", 2, "--overwrite"
    )


def test_from_rounds_of_one_policy_and_from_a_trace(tmp_path: Path) -> None:
    trace = generate(difficulty(), 8, 60, 4, seed=1)
    rounds, path = fixed_k_rounds(trace, 4), tmp_path / "rounds.parquet"
    names = ("policy", "sequence_id", "t", "drafted", "accepted")
    pq.write_table(pa.table({name: getattr(rounds, name) for name in names}), path)
    arguments = ("fit", path, "--model", "iid", "--policy", "fixed_k(k=4)", "--json")
    document = json.loads(call(*arguments, "--out", tmp_path / "iid.json"))
    assert document["fitted_to"] == {"source": "rounds", "rounds": len(rounds.drafted)}
    assert asdict(load_model(tmp_path / "iid.json")) == document["parameters"]
    with pytest.raises(InputError, match="no rounds of policy 'x'"):
        call("fit", path, "--model", "iid", "--policy", "x", "--out", tmp_path / "x.json")
    write_trace(trace, tmp_path / "trace")
    text = call("fit", tmp_path / "trace", "--model", "difficulty", "--out", tmp_path / "difficulty.json")
    assert "hidden_drift" in text
    assert load_model(tmp_path / "difficulty.json").name == "difficulty"


def test_nothing_is_overwritten_unasked(tmp_path: Path) -> None:
    model = tmp_path / "model.json"
    save_model(difficulty(), model)
    with pytest.raises(InputError, match="exists"):
        call("fit", counters(tmp_path), "--model", "iid", "--out", model)
    (tmp_path / "trace").mkdir()
    with pytest.raises(InputError, match="exists"):
        call("generate", model, "--out", tmp_path / "trace")
    call("fit", counters(tmp_path), "--model", "iid", "--out", model, "--overwrite")
    assert load_model(model).name == "iid"
