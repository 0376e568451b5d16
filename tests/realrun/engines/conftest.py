"""vLLM where it is installed, and what stands in for its interpreter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from realrun.engines.vllm import VllmEngine
from specsim.io.errors import InputError

# Stands in for an interpreter with vLLM: notes what it is asked, and answers as it was told. For a recording it answers
# dense.json and the folder dense, or those of chunked prompts or of a batch where the test has written such.
INTERPRETER = """#!{python}
import json, pathlib, shutil, sys
here = pathlib.Path(__file__).parent
if sys.argv[1] == "-c":
    print((here / "version").read_text() if (here / "version").exists() else "0.32.0")
else:
    job = json.loads(pathlib.Path(sys.argv[2]).read_text())
    name = "answer"
    if job.get("recording"):
        kind = "chunked" if job["step_tokens"] else "together" if job["batch"] > 1 else "dense"
        name = kind if (here / kind).exists() else "dense"
        shutil.copytree(here / name, job["recording"], dirs_exist_ok=True)
    (here / "asked.json").write_text(json.dumps(job))
    pathlib.Path(sys.argv[3]).write_text((here / (name + ".json")).read_text())
"""


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an interpreter that answers answer.json."""
    python = tmp_path / "python"
    python.write_text(INTERPRETER.format(python=sys.executable))
    python.chmod(0o755)
    monkeypatch.setenv("SPECSIM_VLLM_PYTHON", str(python))
    return tmp_path


@pytest.fixture(scope="module")
def vllm() -> VllmEngine:
    engine = VllmEngine()
    try:
        engine.check_installed()
    except InputError as error:
        pytest.skip(str(error))
    return engine
