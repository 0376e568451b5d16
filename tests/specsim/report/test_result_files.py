"""Result files: what ships, what a folder holds, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specsim.cli.main import app
from specsim.io.errors import InputError
from specsim.report.result_files import list_results

STAGE = {
    "kind": "specsim-campaign",
    "version": 1,
    "stage": "kernels",
    "reduced": False,
    "complete": True,
    "provenance": {"device": "NVIDIA H200", "date": "2026-01-01T00:00:00+00:00"},
}


def test_what_ships_can_be_read() -> None:
    for result in list_results():
        assert result.date and result.device != "unknown"


def test_list_says_when_no_gpu_result_is_there(tmp_path: Path) -> None:
    (tmp_path / "kernels.json").write_text(json.dumps(STAGE | {"provenance": {"device": "some CPU", "date": "d"}}))
    done = CliRunner().invoke(app, ["data", "list", "--folder", str(tmp_path)])
    assert done.exit_code == 0
    assert "No GPU result" in done.output
    assert "kernels.json" in done.output


def test_list_as_json(tmp_path: Path) -> None:
    (tmp_path / "kernels.json").write_text(json.dumps(STAGE))
    done = CliRunner().invoke(app, ["data", "list", "--json", "--folder", str(tmp_path)])
    document = json.loads(done.stdout)
    assert document["from_gpu"] == 1
    assert document["results"][0]["summary"] == "stage kernels, complete"


def test_an_unfinished_stage_gives_its_reason(tmp_path: Path) -> None:
    (tmp_path / "lab.json").write_text(json.dumps(STAGE | {"complete": False, "error": "RuntimeError: full"}))
    assert list_results(tmp_path)[0].summary == "stage kernels, unfinished: RuntimeError: full"


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not valid JSON"), ("[1]", "names no kind"), ('{"a": 1}', "names no kind")]
)
def test_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(InputError, match=message):
        list_results(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a folder"):
        list_results(tmp_path / "nowhere")


def test_a_packed_trace_is_a_result(tmp_path: Path) -> None:
    (tmp_path / "t.zip").write_bytes(b"no zip")
    with pytest.raises(InputError, match="not a readable packed trace"):
        list_results(tmp_path)
