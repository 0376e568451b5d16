"""A recording that is interrupted goes on from the sequences that it kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import realrun.measure.reuse as reuse
from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.measure.record import RecordSettings, record
from realrun.measure.reuse import recorded_trace
from specsim.io.errors import Interrupted
from specsim.trace.files import read_trace
from specsim.trace.trace import Trace
from tests.support.commands import call
from tests.support.tiny import tiny_pair, tiny_prompts

SETTINGS = RecordSettings(4, 12, Sampler("gumbel", 0.8, seed=3), tree_nodes=8, tree_width=3)
PROMPTS = tiny_prompts(4)


def stop_after(sequences: int) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if done == sequences:
            raise KeyboardInterrupt

    return progress


def go_on(done: int, total: int) -> None: ...


def assert_same(trace: Trace, expected: Trace) -> None:
    for field in dataclasses.fields(Trace):
        if field.name in ("meta", "tree"):
            continue
        assert np.array_equal(getattr(trace, field.name), getattr(expected, field.name)), field.name
    assert trace.tree is not None and expected.tree is not None
    for field in dataclasses.fields(trace.tree):
        assert np.array_equal(getattr(trace.tree, field.name), getattr(expected.tree, field.name)), field.name


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sequences that were decoded."""
    met: list[int] = []
    decode = Decoder.decode

    def noted(self: Decoder, *arguments: Any, **options: Any) -> Any:
        met.append(options["sequence"])
        return decode(self, *arguments, **options)

    monkeypatch.setattr(Decoder, "decode", noted)
    return met


@pytest.fixture
def interrupted(tmp_path: Path) -> Path:
    """The folder of a trace of which two sequences were recorded."""
    folder = tmp_path / "trace"
    with pytest.raises(Interrupted, match=r"2 of 4 sequences are kept in .*trace\.partial; the same command"):
        recorded_trace(tiny_pair(), PROMPTS, SETTINGS, folder, stop_after(2))
    assert not folder.exists()
    return folder


def test_it_goes_on_and_ends_with_the_same_trace(interrupted: Path, decoded: list[int]) -> None:
    trace = recorded_trace(tiny_pair(), PROMPTS, SETTINGS, interrupted, go_on)
    assert decoded == [2, 3]
    assert_same(trace, record(tiny_pair(), PROMPTS, SETTINGS))
    assert_same(read_trace(interrupted), trace)
    assert [path.name for path in interrupted.parent.iterdir()] == ["trace"]
    assert trace.meta["record_seconds"]["generate"] > 0


@pytest.mark.parametrize("name", ["000001.npz", "recording.json"])
def test_what_a_kill_or_a_disk_damaged_is_recorded_again(interrupted: Path, decoded: list[int], name: str) -> None:
    path = interrupted.with_name("trace.partial") / name
    path.write_bytes(path.read_bytes()[:100])
    trace = recorded_trace(tiny_pair(), PROMPTS, SETTINGS, interrupted, go_on)
    assert decoded == ([1, 2, 3] if name.endswith("npz") else [0, 1, 2, 3])
    assert_same(trace, record(tiny_pair(), PROMPTS, SETTINGS))


@pytest.mark.parametrize("changed", [{"max_new_tokens": 11}, {"sampler": Sampler("gumbel", 0.8, seed=4)}])
def test_sequences_of_other_settings_are_not_taken(
    interrupted: Path, decoded: list[int], changed: dict[str, Any]
) -> None:
    settings = dataclasses.replace(SETTINGS, **changed)
    trace = recorded_trace(tiny_pair(), PROMPTS, settings, interrupted, go_on)
    assert decoded == [0, 1, 2, 3]
    assert_same(trace, record(tiny_pair(), PROMPTS, settings))


def test_an_old_trace_stays_until_the_new_one_is_whole(interrupted: Path) -> None:
    pair = tiny_pair()
    old = recorded_trace(pair, PROMPTS, SETTINGS, interrupted, go_on)
    longer = dataclasses.replace(SETTINGS, max_new_tokens=14)
    with pytest.raises(Interrupted, match="3 of 4"):
        recorded_trace(pair, PROMPTS, longer, interrupted, stop_after(3), overwrite=True)
    assert_same(read_trace(interrupted), old)
    new = recorded_trace(pair, PROMPTS, longer, interrupted, go_on, overwrite=True)
    assert_same(new, record(pair, PROMPTS, longer))


def test_the_command_says_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["record", tmp_path / "trace", "--drafter", "prompt-lookup", "--num-prompts", 3, "--max-new-tokens", 6]
    monkeypatch.setattr(reuse, "record", lambda *given: record(*given[:3], stop_after(1), *given[4:]))
    result = call("realrun", *arguments)
    assert result.code == 130 and result.out == ""
    partial = tmp_path / "trace.partial"
    assert result.err.splitlines()[-1] == (
        f"interrupted: 1 of 3 sequences are kept in {partial}; the same command goes on"
    )
    monkeypatch.setattr(reuse, "record", record)
    assert call("realrun", *arguments).code == 0
    assert read_trace(tmp_path / "trace").sequences == 3 and not partial.exists()
