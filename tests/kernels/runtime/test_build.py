"""Every kernel compiles for every architecture, without a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import triton

import speckernels
from speckernels.runtime import build, dispatch, errors
from tests.support import ROOT

BANDWIDTH_BOUND = ("draft_statistics", "tree_attention", "tree_attention_hopper", "compact_kv", "rejection")
SMALL = ("compact_kv", "typical_acceptance")  # sources, and operations, that compile in seconds

CROSS_COMPILE = """
import importlib, json, sys
capabilities, *names = sys.argv[1:]
sizes = {}
for name in names:
    for number, variant in enumerate(importlib.import_module(f"speckernels.ops.{name}.triton").compiled_variants()):
        for capability in map(int, capabilities.split()):
            compiled, limit = variant.compile(capability), variant.shared_limit_bytes
            assert limit is None or compiled.metadata.shared <= limit, (name, number, compiled.metadata.shared)
            # What chooses tokens is not contracted; products of matrices are, whatever the flag.
            assert name == "tree_attention" or "fma.rn.f32" not in compiled.asm["ptx"], (name, number)
            sizes[f"{name} {number} {capability}"] = len(compiled.asm["cubin"])
print(json.dumps(sizes))
"""


def operations_of(source: str) -> list[str]:
    """The operations whose CUDA backend calls this source."""
    package = Path(speckernels.__file__).parent
    return [name for name in dispatch.OPERATIONS if f'"{source}"' in (package / "ops" / name / "cuda.py").read_text()]


def nothing_compiles(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a library was compiled that lay in the cache")


@pytest.mark.parametrize(
    ("names", "architectures"),
    [
        pytest.param(SMALL[:1], build.ARCHITECTURES[:1], id="one"),
        pytest.param((), build.ARCHITECTURES, id="all", marks=pytest.mark.slow),
    ],
)
def test_nvcc_builds_without_warnings(
    names: tuple[str, ...],
    architectures: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_compiled: Callable[[str, str, str], None],
) -> None:
    """--Werror all-warnings is among the flags, so a warning is an error."""
    monkeypatch.setenv("SPECKERNELS_CACHE", str(tmp_path))
    if names:
        monkeypatch.setattr(build, "sources", lambda: names)
    libraries = build.build_all(architectures, strict=True)
    assert set(libraries) == set(build.sources())
    for source, library in libraries.items():
        assert operations_of(source), f"no operation uses {source}.cu"
        report = library.with_suffix(".txt").read_text()
        for architecture in architectures:
            assert f"'sm_{architecture}'" in report
            for name in operations_of(source):
                record_compiled(name, "cuda", f"sm_{architecture}")
        if source in BANDWIDTH_BOUND:
            spills = [int(n) for n in re.findall(r"(\d+) bytes spill", report)]
            assert spills and not any(spills)
    monkeypatch.setattr(subprocess, "run", nothing_compiles)
    assert build.build_all(architectures, strict=True) == libraries


@pytest.mark.slow
def test_hopper_gets_its_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes, products of warpgroups and nothing in memory that belongs into registers; the compiler adds no wait."""
    monkeypatch.setenv("SPECKERNELS_CACHE", str(tmp_path))
    library = build.build_device("tree_attention_hopper", ("90a",), strict=True)
    report = library.with_suffix(".txt").read_text()
    assert "Potential Performance Loss" not in report and "injected" not in report
    disassembler = triton.knobs.nvidia.cuobjdump.path
    listing = subprocess.run([disassembler, "-sass", library], capture_output=True, text=True, check=True).stdout
    kernels = {}
    for text in listing.split("Function : ")[1:]:
        shape = re.search(r"5ShapeILi(\d+)ELi(\d+)E", text.split("\n", 1)[0])
        assert shape is not None
        words = Counter(re.findall(r"\b(?:HGMMA\.64x\d+|HMMA|UTMALDG\.4D|USETMAXREG|STL|LDL)", text))
        kernels[tuple(map(int, shape.groups())), "__half" in text.split("\n", 1)[0]] = words
    assert len(kernels) == 8
    for ((dim, warpgroups), _), words in kernels.items():
        products = Counter({"HGMMA.64x128": 2 * dim // 16}) + Counter({f"HGMMA.64x{dim}": 2 * 128 // 16})
        assert {word: count for word, count in words.items() if "MMA" in word} == products
        assert words["UTMALDG.4D"] and bool(words["USETMAXREG"]) == (warpgroups == 2)
        assert not words["STL"] and not words["LDL"]


def test_cache_follows_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECKERNELS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "values.h").write_text("#define VALUE 1\n")
    (folder / "probe.cu").write_text('#include "values.h"\nextern "C" int probe() { return VALUE; }\n')
    monkeypatch.setattr(build, "source_folder", lambda: folder)
    first = build.build_host("probe")
    assert build.build_host("probe") == first
    (folder / "values.h").write_text("#define VALUE 2\n")  # a header counts
    assert build.build_host("probe") != first


def test_a_source_that_fails_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECKERNELS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "broken.cu").write_text("int f( {")
    monkeypatch.setattr(build, "source_folder", lambda: tmp_path)
    with pytest.raises(errors.Unavailable, match=r"broken\.cu does not compile"):
        build.build_host("broken")


def test_a_source_that_fails_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing compiler takes seconds; a decoding run calls thousands of times."""
    asked = []

    def fail(source: str) -> Path:
        asked.append(source)
        raise errors.Unavailable("no compiler")

    build._loaded.cache_clear()
    monkeypatch.setattr(build, "build_host", fail)
    for _ in range(3):
        with pytest.raises(errors.Unavailable, match="no compiler"):
            build.load("nowhere", None)
    assert asked == ["nowhere"]


def test_a_cache_can_be_carried_to_where_the_compiler_lies_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECKERNELS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "probe.cu").write_text('extern "C" int probe() { return 1; }\n')
    monkeypatch.setattr(build, "source_folder", lambda: tmp_path)
    libraries = set()
    for place in ("here", "there"):
        compiler = tmp_path / place / "g++"
        compiler.parent.mkdir()
        compiler.write_text(f'#!/bin/sh\nexec {os.environ.get("CXX", "g++")} "$@"\n')
        compiler.chmod(0o755)
        monkeypatch.setenv("CXX", str(compiler))
        libraries.add(build.build_host("probe"))
    assert len(libraries) == 1


def test_a_new_warning_of_the_compiler_stops_only_the_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags of a user's build hold no -Werror."""
    commands = []

    def noted(command: list[str], **options: Any) -> Any:
        commands.append(command)
        return subprocess.CompletedProcess(command, 1, "", "stopped here")

    monkeypatch.setenv("SPECKERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "_version", lambda compiler: "1")
    monkeypatch.setattr(build, "find_nvcc", lambda: "/usr/bin/nvcc")
    monkeypatch.setattr(subprocess, "run", noted)
    for strict in (False, True):
        with pytest.raises(errors.Unavailable, match="stopped here"):
            build.build_device(SMALL[0], ("90a",), strict=strict)
    assert ["--Werror" in command for command in commands] == [False, True]


@pytest.mark.parametrize(
    ("names", "capabilities"),
    [
        pytest.param(SMALL, (80,), id="some"),
        pytest.param(tuple(dispatch.OPERATIONS), (80, 90), id="all", marks=pytest.mark.slow),
    ],
)
def test_triton_compiles_without_a_gpu(
    names: tuple[str, ...], capabilities: tuple[int, ...], record_compiled: Callable[[str, str, str], None]
) -> None:
    """In a process of its own, since this one interprets Triton."""
    run = subprocess.run(
        [sys.executable, "-c", CROSS_COMPILE, " ".join(map(str, capabilities)), *names],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    sizes = json.loads(run.stdout)
    for name in names:
        for capability in capabilities:
            assert any(key.startswith(f"{name} ") and key.endswith(f" {capability}") for key in sizes)
            record_compiled(name, "triton", f"sm_{capability}")
    assert min(sizes.values()) > 0


def test_the_script_for_the_sanitizer_runs() -> None:
    """Here on emulated threads; on a GPU compute-sanitizer watches it."""
    script = ROOT / "tests" / "kernels" / "sanitize.py"
    run = subprocess.run([sys.executable, str(script), "compact_kv"], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout == "compact_kv: agrees with the reference\n", run.stderr
