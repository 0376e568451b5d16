"""The speckernels command, in-process: one JSON object or a table, one line of error and code 2."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from speckernels import cli
from speckernels.bench import machine, read_document, runner
from speckernels.bench.resources import Built, Kernel
from speckernels.bench.rows import Ceilings
from speckernels.runtime import build as builder
from speckernels.runtime import dispatch

COMMANDS = ["bench", "plot", "info", "build"]


class Result(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command line."""

    def run(*words: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["speckernels", *map(str, words)])
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as leaving:
            cli.main()
        return Result(int(leaving.value.code or 0), out.getvalue(), err.getvalue())

    return run


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "measure_ceilings", lambda device: Ceilings(10.0, 0.1, "float32", 0.5, None))
    monkeypatch.setattr(runner, "QUICK_REPEATS", 3)
    monkeypatch.setattr(runner, "QUICK_CASE_LIMIT_S", 0.0)
    monkeypatch.setattr(runner, "UNTIMED_REPEATS", 1)


@pytest.mark.parametrize("name", COMMANDS)
def test_help(command: Any, name: str) -> None:
    result = command(name, "--help")
    assert result.code == 0 and "--json" in result.out


def test_no_command_shows_help(command: Any) -> None:
    result = command()
    assert result.code == cli.BAD_INPUT and all(name in result.out + result.err for name in COMMANDS)


@pytest.mark.usefixtures("fast")
def test_bench_writes_a_file_a_table_and_progress(command: Any, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    words = ("bench", "--op", "compact_kv", "--quick", "--minutes", 2, "--device", "cpu", "--out", out)
    result = command(*words)
    assert result.code == 0
    assert "compact_kv" in result.out and "1/1 correct" in result.out and "GB/s" in result.out
    assert "[0/1] compact_kv, batch=2 moved=8 nodes=16" in result.err
    rows = read_document(out).rows
    assert {row.backend for row in rows} == {"torch", "triton", "cuda"}
    again = command(*words, "--json")
    assert [row["date"] for row in json.loads(again.out)["rows"]] == [row.date for row in rows]

    figures = command("plot", out, "--out", tmp_path / "figures")
    assert figures.code == 0
    assert [Path(line).name for line in figures.out.splitlines()] == ["ratio_to_floor.png"]
    assert json.loads(command("plot", out, "--out", tmp_path, "--json").out) == {
        "files": [str(tmp_path / "ratio_to_floor.png")]
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("bench", "--op", "tree", "--device", "cpu"), "operation 'tree' is unknown; known: draft_statistics"),
        (("bench", "--backend", "jax", "--device", "cpu"), "backend 'jax' is unknown; known: torch"),
        (("bench", "--device", "tpu9"), "device 'tpu9' cannot be used"),
        (("bench", "--device", "meta"), "device 'meta' cannot be used"),
        (("bench", "--minutes", "0"), "minutes"),
        (("plot", "nowhere.json"), "nowhere.json does not exist"),
        (("nonsense",), "nonsense"),
    ],
)
def test_bad_input_is_one_line(command: Any, words: tuple[str, ...], message: str) -> None:
    result = command(*words)
    assert result.code == cli.BAD_INPUT and result.out == ""
    assert result.err.startswith("error: ") and result.err.count("\n") == 1 and message in result.err


def test_info_names_backends_and_reasons(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "find_nvcc", lambda: None)
    result = command("info", "--json")
    document = json.loads(result.out)
    assert result.code == 0
    assert set(document["operations"]) == set(dispatch.OPERATIONS)
    assert "no nvcc" in document["backends"]["cuda"]
    assert set(document["versions"]) == {"torch", "triton", "cuda", "speckernels", "python"}
    table = command("info").out
    assert "flashinfer" in table and document["device"] in table


def built(source: str, architectures: Any) -> Built:
    kernels = [Kernel(f"{source}_{size}", arch, 30 + size, 0, size, 0) for arch in architectures for size in (0, 4)]
    return Built(source, None if source == "compact_kv" else 1.5, tuple(kernels))


def test_build_shows_registers_spills_and_seconds(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speckernels.bench.resources.build_source", built)
    result = command("build", "--arch", "80", "--arch", "90a")
    assert result.code == 0
    lines = [line.split() for line in result.out.splitlines() if "90a" in line or "cached" in line]
    assert any("compact_kv" in line and "cached" in line and "34" in line for line in lines)
    document = json.loads(command("build", "--json").out)
    assert {source["source"] for source in document["sources"]} == set(builder.sources())
    assert {kernel["architecture"] for source in document["sources"] for kernel in source["kernels"]} == set(
        builder.ARCHITECTURES
    )


def test_build_without_a_compiler_says_what_to_do(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "find_nvcc", lambda: None)
    result = command("build")
    assert result.code == cli.BAD_INPUT and "no nvcc found" in result.err


@pytest.mark.skipif(builder.find_nvcc() is None, reason="no nvcc")
def test_build_of_a_real_source(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "sources", lambda: ["compact_kv"])
    (source,) = json.loads(command("build", "--arch", "90a", "--json").out)["sources"]
    assert source["kernels"]
    for kernel in source["kernels"]:
        assert "compact" in kernel["name"] and kernel["architecture"] == "90a"
        assert kernel["registers"] > 8 and kernel["spill_bytes"] == 0


def test_a_case_is_profiled_by_the_command_that_is_printed(command: Any) -> None:
    printed = command("profile", "--op", "compact_kv", "--backend", "triton")
    assert printed.code == 0, printed.err
    ncu, _, own = printed.out.partition(" -m speckernels ")
    assert ncu.startswith("ncu --set full --clock-control none --nvtx --nvtx-include speckernels/")
    done = command(*shlex.split(own))
    assert done.code == 0 and done.out.startswith("compact_kv, "), done.err
    assert "no case of compact_kv has nodes=7" in command("profile", "--op", "compact_kv", "--case", "nodes=7").err
