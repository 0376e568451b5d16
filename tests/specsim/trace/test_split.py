"""The split of sequences, by prompt, text and domain."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID
from specsim.io.errors import InputError
from specsim.trace.files import read_trace, write_trace
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace


def trace_of(*source: str, domain: str = "code") -> Trace:
    """A sequence from each of these files; "" is a text of its own."""
    trace = generate(IID(0.7), len(source), 6, 3)
    return dataclasses.replace(trace, source=np.array(source), domain=np.full(len(source), domain))


def before(trace: Trace, share: float, seed: int) -> tuple[list[int], list[int]]:
    """The split by prompt, as it was before traces named their files."""
    rng = np.random.default_rng(seed)
    sides: tuple[list[int], list[int]] = [], []
    for domain in np.unique(trace.domain):
        members = rng.permutation(np.flatnonzero(trace.domain == domain)).tolist()
        cut = round(len(members) * share)
        sides[0].extend(members[:cut])
        sides[1].extend(members[cut:])
    return sorted(sides[0]), sorted(sides[1])


@pytest.mark.parametrize("seed", range(8))
def test_prompts_of_one_file_fall_on_one_side(seed: int) -> None:
    files = ["a", "b", "c", "d", "e", "f"] * 3  # as `study_prompts` goes round the files
    trace = trace_of(*files)
    tuning, held = split_sequences(trace, tuning_share=2 / 3, seed=seed)
    sides = [{files[sequence] for sequence in side.tolist()} for side in (tuning, held)]
    assert not sides[0] & sides[1]
    assert (len(tuning), len(held)) == (12, 6)
    assert sorted([*tuning, *held]) == [*range(18)]


@pytest.mark.parametrize("share", [0.25, 0.5, 0.667])
def test_traces_without_files_split_as_before(share: float) -> None:
    domains = np.array(["code", "prose", "code", "tests", "code", "prose", "tests", "code", "prose", "code"])
    trace = dataclasses.replace(generate(IID(0.7), 10, 6, 3), domain=domains)
    named = dataclasses.replace(trace, source=np.array(["", "x", "", "", "y", "", "", "", "", ""]))
    for seed in range(5):
        for split in (trace, named):  # a file with a single prompt changes nothing
            tuning, held = split_sequences(split, tuning_share=share, seed=seed)
            assert (tuning.tolist(), held.tolist()) == before(trace, share, seed)


def test_whole_files_come_as_near_to_the_share_as_they_can() -> None:
    tuning, held = split_sequences(trace_of(*"aaaaab"), tuning_share=0.5)
    assert sorted((len(tuning), len(held))) == [1, 5]


def test_one_file_alone_is_not_split() -> None:
    with pytest.raises(InputError, match=r"4 sequences from 1 files cannot be split"):
        split_sequences(trace_of(*"aaaa"))


def test_domains_too_small_to_split_are_split_together() -> None:
    trace = generate(IID(0.7), 4, 6, 3)
    apart, mixed = (dataclasses.replace(trace, domain=np.array(list(names))) for names in ("abcd", "abcc"))
    assert [part.tolist() for part in split_sequences(apart)] == [part.tolist() for part in split_sequences(trace)]
    assert [len(part) for part in split_sequences(mixed)] == [1, 3]  # a domain of two is still split in half


def test_files_are_written_and_read(tmp_path: Path) -> None:
    trace = trace_of("a.py", "", "b.py", "a.py")
    write_trace(trace, tmp_path / "trace")
    again = read_trace(tmp_path / "trace")
    assert again.source.tolist() == ["a.py", "", "b.py", "a.py"]
    assert again.select([2, 0]).source.tolist() == ["b.py", "a.py"]
    write_trace(dataclasses.replace(trace, source=None), tmp_path / "old")
    assert read_trace(tmp_path / "old").source is None
