"""Every kernel compiles for every architecture, without a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from speckernels.runtime import build, dispatch
from tests.support import ROOT

BUILD_LIMIT_S = 120
BANDWIDTH_BOUND = ("draft_statistics", "tree_attention", "compact_kv", "rejection")

CROSS_COMPILE = """
import importlib, json, sys
sizes = {}
for name in sys.argv[1:]:
    for number, variant in enumerate(importlib.import_module(f"speckernels.{name}.triton").compiled_variants()):
        for capability in (80, 90):
            sizes[f"{name} {number} {capability}"] = len(variant.compile(capability))
print(json.dumps(sizes))
"""


def operations_of(source: str) -> list[str]:
    """The operations whose CUDA backend calls this source."""
    package = Path(build.__file__).parent
    return [name for name in dispatch.OPERATIONS if f'"{source}"' in (package / name / "cuda.py").read_text()]


def test_nvcc_builds_everything_without_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_compiled: Callable[[str, str, str], None]
) -> None:
    """--Werror all-warnings is among the flags, so a warning is an error."""
    monkeypatch.setenv("SPECKERNELS_CACHE", str(tmp_path))
    start = time.perf_counter()
    libraries = build.build_all()
    assert time.perf_counter() - start < BUILD_LIMIT_S
    assert set(libraries) == set(build.sources())
    for source, library in libraries.items():
        assert operations_of(source), f"no operation uses {source}.cu"
        report = library.with_suffix(".txt").read_text()
        for architecture in build.ARCHITECTURES:
            assert f"'sm_{architecture}'" in report
            for name in operations_of(source):
                record_compiled(name, "cuda", f"sm_{architecture}")
        if source in BANDWIDTH_BOUND:
            spills = [int(n) for n in re.findall(r"(\d+) bytes spill", report)]
            assert spills and not any(spills)

    again = time.perf_counter()
    assert build.build_all() == libraries
    assert time.perf_counter() - again < 1.0  # cached by content


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
    with pytest.raises(RuntimeError, match=r"broken\.cu does not compile"):
        build.build_host("broken")


def test_triton_compiles_without_a_gpu(record_compiled: Callable[[str, str, str], None]) -> None:
    """In a process of its own, since this one interprets Triton."""
    run = subprocess.run(
        [sys.executable, "-c", CROSS_COMPILE, *dispatch.OPERATIONS],
        env=os.environ | {"TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    sizes = json.loads(run.stdout)
    for name in dispatch.OPERATIONS:
        for capability in (80, 90):
            assert any(key.startswith(f"{name} ") and key.endswith(f" {capability}") for key in sizes)
            record_compiled(name, "triton", f"sm_{capability}")
    assert min(sizes.values()) > 0


def test_the_script_for_the_sanitizer_runs() -> None:
    """Here on emulated threads; on a GPU compute-sanitizer watches it."""
    script = ROOT / "tests" / "kernels" / "sanitize.py"
    run = subprocess.run([sys.executable, str(script), "greedy_verify"], capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout == "greedy_verify: agrees with the reference\n", run.stderr
