"""A file that is damaged, of another version or of another kind is refused in one line that names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from realrun.decode.acceptance_predictor import Predictor, load_predictor, save_predictor
from realrun.pairs.drafter_files import FILE, describe_target, read_drafter, save_drafter
from specsim.acceptance.files import load_model, save_model
from specsim.acceptance.per_position import PerPosition
from specsim.cost.files import read_cost
from specsim.cost.grid import GRID_KIND, GRID_VERSION, read_grid
from specsim.cost.profile import PROFILE_KIND, PROFILE_VERSION
from specsim.io.errors import InputError
from specsim.learn.journal import Journal
from specsim.report.result_files import list_results
from specsim.trace.files import read_trace, write_trace
from tests.support.reference import small_trace
from tests.support.tiny import tiny_pair

SECONDS = {
    "draft_step": [[1e-3] * 2] * 4, "catch_up": [0] * 2, "verify": [[1e-2] * 2] * 5, "autoregressive": [1e-2] * 2,
    "policy_step": 0, "round_overhead": 0,
}  # fmt: skip
PROFILE = {"kind": PROFILE_KIND, "version": PROFILE_VERSION, "contexts": [0, 200], "median_s": SECONDS}
GRID = {
    "kind": GRID_KIND, "version": GRID_VERSION, "model": "m", "batches": [1], "contexts": [0, 64], "tokens": [1, 2],
    "median_s": [[[0.01, 0.011], [0.012, 0.013]]], "missing": [],
    "provenance": {"device": "a device", "dtype": "bfloat16"},
}  # fmt: skip


class Kind(NamedTuple):
    """A kind of file: what writes one, what reads it, and which file of a folder is damaged."""

    write: Callable[[Path], object]
    read: Callable[[Path], object]
    file: str = ""


def json_file(document: dict[str, Any]) -> Callable[[Path], object]:
    return lambda path: path.write_text(json.dumps(document))


def write_drafter(path: Path) -> None:
    facts = {"target": describe_target(tiny_pair().target, "t"), "layers": 1, "exit_layers": 0}
    save_drafter(path, "eesd", {"norm.weight": torch.ones(32)}, facts)


def write_predictor(path: Path) -> None:
    facts = {"fingerprint": "f", "target": "t", "drafter": "d"}
    save_predictor(Predictor(torch.ones(2, 8), torch.ones(8), torch.ones(2), facts), path)


def write_journal(path: Path) -> None:
    journal = Journal(path, {"a": 1})
    journal.batch(lambda: {"n": 1})
    journal.close()


KINDS = {
    "trace, meta": Kind(lambda path: write_trace(small_trace(), path), read_trace, "meta.json"),
    "trace, steps": Kind(lambda path: write_trace(small_trace(), path), read_trace, "steps.parquet"),
    "profile": Kind(json_file(PROFILE), read_cost),
    "constant cost": Kind(json_file({"s_d": 0.001, "s_t": 0.01}), read_cost),
    "cost grid": Kind(json_file(GRID), read_grid),
    "result": Kind(json_file(GRID), lambda path: list_results(path.parent)),
    "drafter": Kind(write_drafter, read_drafter, FILE),
    "predictor": Kind(write_predictor, load_predictor),
    "acceptance model": Kind(lambda path: save_model(PerPosition((0.8, 0.6)), path), load_model),
    "journal": Kind(write_journal, lambda path: Journal(path, {"a": 1}).close()),
}


def flipped(content: bytes) -> bytes:
    """The first byte of a text or a header, of which no part is left out by any reader."""
    return bytes([content[0] ^ 0x80]) + content[1:]


def another_version(content: bytes) -> bytes:
    for name in (b'"version": ', b'"schema_version": '):
        content = content.replace(name, name + b"9")
    return content


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda content: content[: len(content) // 2],
    "a flipped byte": flipped,
    "no text": lambda content: b"\xff\xfe\x00" + content,
    "another kind": lambda content: b'{"kind": 7}',
    "another version": another_version,
}
# A journal's last line may be torn, and then it goes on; a constant cost has no version, and Parquet none of ours.
NOT_APPLICABLE = {
    ("journal", "truncated"), ("constant cost", "another version"), ("trace, steps", "another version"),
    ("drafter", "another version"), ("predictor", "another version"),
}  # fmt: skip


def refused(read: Callable[[Path], object], path: Path) -> str:
    with pytest.raises(InputError) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "damage"), [(name, damage) for name in KINDS for damage in DAMAGE if (name, damage) not in NOT_APPLICABLE]
)
def test_a_damaged_file_is_refused_in_one_line_that_names_it(name: str, damage: str, tmp_path: Path) -> None:
    kind, path = KINDS[name], tmp_path / "file.json"
    kind.write(path)
    kind.read(path)  # as it is, it is read
    file = path / kind.file if kind.file else path
    content = file.read_bytes()
    assert DAMAGE[damage](content) != content
    file.write_bytes(DAMAGE[damage](content))
    assert "file.json" in refused(kind.read, path)


@pytest.mark.parametrize("name", ["drafter", "predictor"])
def test_weights_of_another_format_are_refused(name: str, tmp_path: Path) -> None:
    kind, path = KINDS[name], tmp_path / "file.json"
    kind.write(path)
    file = path / kind.file if kind.file else path
    with safe_open(file, framework="pt") as handle:
        tensors = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
        metadata = dict(handle.metadata())
    save_file(tensors, file, metadata={**metadata, "format": "another 9"})
    assert "this program reads" in refused(kind.read, path)


@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("journal", "result")])  # begun there; a folder
def test_a_file_that_is_not_there_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    assert "nothing" in refused(KINDS[name].read, tmp_path / "nothing")
