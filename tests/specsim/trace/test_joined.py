"""Joined traces: what may be joined, what is refused and why, and its folder."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specsim.io.errors import InputError
from specsim.trace.files import pack_trace, read_trace, write_trace
from specsim.trace.joined import JoinedTrace, foretold, join_traces
from specsim.trace.trace import NO_TOKEN, Trace
from tests.support.joined_traces import DEPTH, guessing_part, joined_trace, lookup_part, texts


def with_meta(trace: Trace, **changes: Any) -> Trace:
    return dataclasses.replace(trace, meta={**trace.meta, **changes})


def changed(trace: Trace, name: str, at: int, by: int = 1) -> Trace:
    values = getattr(trace, name).copy()
    values[at] += by
    return dataclasses.replace(trace, **{name: values})


def cut(trace: Trace, sequence: int) -> Trace:
    """Without the last output token of a sequence."""
    kept = np.delete(np.arange(len(trace.token)), trace.offsets[sequence + 1] - 1)
    offsets = trace.offsets - (np.arange(trace.sequences + 1) > sequence)
    names = ("token", "match_len", "draft_token", "prob", "confidence", "entropy_nats")
    return dataclasses.replace(trace, offsets=offsets, **{name: getattr(trace, name)[kept] for name in names})


GIVEN = texts()
ONE, OTHER = guessing_part(GIVEN, 0.8, 1), guessing_part(GIVEN, 0.5, 2)
REFUSED: dict[str, tuple[Callable[[], Trace], str]] = {
    "target": (lambda: with_meta(OTHER, target="large"), "a/ and b/ cannot be joined: target differs, tiny and large"),
    "decoding": (
        lambda: with_meta(OTHER, decoding={"mode": "gumbel", "temperature": 0.8, "seed": 0}),
        "decoding differs, greedy and .*gumbel",
    ),
    "eos": (lambda: with_meta(OTHER, eos_token_id=[1, 2]), r"eos_token_id differs, \[6\] and \[1, 2\]"),
    "sequences": (lambda: OTHER.select([0, 1]), "6 and 2 sequences"),
    "numbers": (lambda: changed(OTHER, "sequence_id", 3, 10), "the number of sequence 3 differs"),
    "prompt lengths": (lambda: guessing_part(texts(seed=0)[::-1], 0.5, 2), "the prompt's length of sequence 0 differs"),
    "prompts": (lambda: changed(OTHER, "prompt", 8), "the prompt of sequence 2 differs"),
    "limits": (lambda: changed(OTHER, "budget_tokens", 4), "the limit on output tokens of sequence 4 differs"),
    "outputs": (
        lambda: changed(OTHER, "token", int(OTHER.offsets[2]) + 5, 7),
        f"output token 5 of sequence 2 differs, {OTHER.token[OTHER.offsets[2] + 5]} and ",
    ),
    "lengths": (lambda: cut(OTHER, 1), "output token 19 of sequence 1 differs, . and none"),
    "rejection": (
        lambda: with_meta(OTHER, decoding={"mode": "rejection", "temperature": 1.0, "seed": 0}),
        "b/ cannot be joined: under rejection sampling",
    ),
    "space": (lambda: with_meta(OTHER, drafter_kind="space"), "b/ cannot be joined: its drafter is of kind space"),
    "joined": (joined_trace, "b/ cannot be joined: its drafter is of kind joined"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_differs_is_named_with_its_first_place(what: str) -> None:
    other, message = REFUSED[what]
    with pytest.raises(InputError, match=message) as caught:
        join_traces({"a/": ONE, "b/": other()})
    assert "\n" not in str(caught.value)


def test_one_trace_or_four_are_refused() -> None:
    for count in (1, 4):
        with pytest.raises(InputError, match=f"{count} traces to join; give 2 to 3"):
            join_traces({str(n): ONE for n in range(count)})


def test_greedy_decoding_has_no_seed_and_texts_say_nothing() -> None:
    seeded = with_meta(OTHER, decoding={"mode": "greedy", "temperature": 0.7, "seed": 3})
    assert join_traces({"a/": ONE, "b/": seeded}).parts[1].depth == DEPTH
    lookup = lookup_part(GIVEN)
    assert lookup.meta["decoding"] == "unknown" and lookup.meta["eos_token_id"] is None
    joined = join_traces({"lookup/": lookup, "a/": ONE})
    assert joined.parts[0].eos_token_ids == [6]  # so that a lookup's drafts end there too


def test_the_columns_are_those_of_the_parts_at_the_depth_of_the_shallowest() -> None:
    joined = join_traces({"lookup/": lookup_part(GIVEN, 7), "a/": ONE, "b/": OTHER})
    assert joined.depth == DEPTH == joined.meta["depth"] and joined.meta["drafter_kind"] == "joined"
    for number, part in enumerate((lookup_part(GIVEN), ONE, OTHER)):
        np.testing.assert_array_equal(joined.columns.match_len[number], np.minimum(part.match_len, DEPTH))
        np.testing.assert_array_equal(joined.columns.confidence[number], part.confidence)
        np.testing.assert_array_equal(joined.columns.draft_limit[number], part.draft_limit)
    lookup = joined.parts[0]
    known = joined.columns.foretold
    assert (known[:, 1:] == 1).all()
    assert ((known[:, 0] == 0) == (lookup.draft_token[:, 0] == NO_TOKEN)).all() and 0 < (known[:, 0] > 0).mean() < 1
    np.testing.assert_array_equal(known[known[:, 0] > 0, 0], lookup.prob[known[:, 0] > 0, 0])


def test_parts_of_a_joined_trace_are_selected_and_shortened_alike() -> None:
    joined = joined_trace()
    for shorter in (joined.select([4, 1]), joined.shortened(9), joined.shallower(2)):
        assert isinstance(shorter, JoinedTrace)
        for number, part in enumerate(shorter.parts):
            np.testing.assert_array_equal(part.token, shorter.token)
            np.testing.assert_array_equal(part.draft_limit, shorter.columns.draft_limit[number])
            np.testing.assert_array_equal(foretold(part), shorter.columns.foretold[:, number])
    assert joined.select([4, 1]).sequence_id.tolist() == [4, 1] and joined.shallower(2).depth == 2


def test_a_folder_gives_the_joined_trace_again(tmp_path: Path) -> None:
    joined, folder = joined_trace(), tmp_path / "joined"
    write_trace(joined, folder)
    again = read_trace(folder)
    assert isinstance(again, JoinedTrace) and len(again.parts) == 3
    for column, read in zip(joined.columns, again.columns, strict=True):
        np.testing.assert_array_equal(column, read)
    with pytest.raises(InputError, match="exists"):
        write_trace(joined, folder)
    write_trace(joined.select([0]), folder, overwrite=True)
    assert read_trace(folder).sequences == 1


def test_a_packed_joined_trace_reads_as_its_folder(tmp_path: Path) -> None:
    joined, folder, packed = joined_trace(), tmp_path / "joined", tmp_path / "packed.zip"
    write_trace(joined, folder)
    pack_trace(folder, packed)
    again = read_trace(packed)
    assert isinstance(again, JoinedTrace) and len(again.parts) == 3
    for column, read in zip(joined.columns, again.columns, strict=True):
        np.testing.assert_array_equal(column, read)


def test_what_is_no_trace_is_not_packed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a trace: it has neither meta.json nor joined.json"):
        pack_trace(tmp_path, tmp_path / "packed.zip")
    assert not (tmp_path / "packed.zip").exists()


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "joined"
    write_trace(joined_trace(), folder)
    listing = folder / "joined.json"
    good = json.loads(listing.read_text())
    for bad, message in (
        ({**good, "parts": 1}, "parts=1, not 2 to 3"),
        ({**good, "parts": 10**18}, "parts=1000000000000000000, not 2 to 3"),
        ({**good, "parts": "3"}, "joined.json.*join the traces again"),
        ({**good, "version": 2}, "joined.json.*join the traces again"),
    ):
        listing.write_text(json.dumps(bad))
        with pytest.raises(InputError, match=message):
            read_trace(folder)
    listing.write_text(json.dumps(good))
    shutil.rmtree(folder / "2")
    write_trace(guessing_part(texts(seed=1), 0.5, 2), folder / "2")
    with pytest.raises(InputError, match="cannot be joined: .* of sequence 0 differs"):
        read_trace(folder)
