"""The speckernels command, in-process: one JSON object or a table, one line of error and code 2."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from typing import Any, NamedTuple

import pytest

from speckernels import cli
from speckernels.cli import Built, Kernel, parse_report
from speckernels.runtime import build as builder
from speckernels.runtime import dispatch

COMMANDS = ["info", "build"]


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


@pytest.mark.parametrize("name", COMMANDS)
def test_help(command: Any, name: str) -> None:
    result = command(name, "--help")
    assert result.code == 0 and "--json" in result.out


def test_no_command_shows_help(command: Any) -> None:
    result = command()
    assert result.code == cli.BAD_INPUT and all(name in result.out + result.err for name in COMMANDS)


def test_bad_input_is_one_line(command: Any) -> None:
    result = command("nonsense")
    assert result.code == cli.BAD_INPUT and result.out == ""
    assert result.err.startswith("error: ") and result.err.count("\n") == 1 and "nonsense" in result.err


def test_info_names_backends_and_reasons(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "find_nvcc", lambda: None)
    result = command("info", "--json")
    document = json.loads(result.out)
    assert result.code == 0
    assert set(document["operations"]) == set(dispatch.OPERATIONS)
    assert "no nvcc" in document["backends"]["cuda"]
    assert set(document["versions"]) == {"torch", "triton", "cuda", "speckernels", "python"}
    table = command("info").out
    assert "flashinfer" in table and document["device"] in table and "Accept each node with p(token)" in table
    assert "..." not in command("--help").out.partition("Commands:")[2]  # summaries are whole


def built(source: str, architectures: Any) -> Built:
    kernels = [Kernel(f"{source}_{size}", arch, 30 + size, 0, size, 0) for arch in architectures for size in (0, 4)]
    return Built(source, None if source == "compact_kv" else 1.5, tuple(kernels))


def test_build_shows_registers_spills_and_seconds(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speckernels.cli.build_source", built)
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


def test_compiler_report() -> None:
    report = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z3onev' for 'sm_90a'
ptxas info    : Function properties for _Z3onev
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 16 bytes stack frame, 4096 bytes smem
ptxas info    : Compiling entry function '_Z3twov' for 'sm_80'
ptxas info    : Function properties for _Z3twov
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 24 registers, used 0 barriers, 400 bytes cmem[0]
"""
    first, second = parse_report(report)
    assert (first.name, first.architecture, first.registers) == ("_Z3onev", "90a", 40)
    assert (first.stack_bytes, first.spill_bytes, first.shared_bytes) == (16, 12, 4096)
    assert (second.architecture, second.registers, second.spill_bytes, second.shared_bytes) == ("80", 24, 0, 0)
