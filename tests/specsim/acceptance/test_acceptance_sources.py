"""Files of rounds and counters: reading and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specsim.acceptance.sources import Counters, Rounds, describe, read_counters, read_rounds, read_source
from specsim.io.errors import InputError
from specsim.trace.files import write_trace
from specsim.trace.trace import Trace
from tests.support.reference import small_trace

GOOD = {
    "policy": ["a", "a", "a", "b"],
    "sequence_id": [3, 3, 4, 3],
    "round": [0, 1, 0, 0],
    "t": [0, 3, 0, 0],
    "drafted": [4, 2, 0, 1],
    "accepted": [2, 2, 0, 0],
    "draft_s": [0.1, 0.1, 0.0, 0.1],
}


def write(tmp_path: Path, columns: dict[str, Any]) -> Path:
    path = tmp_path / "rounds.parquet"
    pq.write_table(pa.table(columns), path)
    return path


def test_rounds_are_read_whole_and_by_policy(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    rounds = read_rounds(path)
    assert rounds.drafted.tolist() == GOOD["drafted"] and rounds.accepted.tolist() == GOOD["accepted"]
    assert rounds.t.tolist() == GOOD["t"]
    selected = read_source(path, policy="b")
    assert isinstance(selected, Rounds) and selected.drafted.tolist() == [1]
    minimal = read_rounds(write(tmp_path, {"drafted": [2], "accepted": [1]}))
    assert minimal.policy is None and minimal.t is None and minimal.sequence_id is None


def test_dropped_tokens_do_not_count_as_drafted(tmp_path: Path) -> None:
    rounds = read_rounds(write(tmp_path, {**GOOD, "verified": [3, 2, 0, 0]}))
    assert rounds.drafted.tolist() == [3, 2, 0, 0]
    with pytest.raises(InputError, match="2 of 1 drafted tokens accepted in row 0"):
        read_rounds(write(tmp_path, {**GOOD, "verified": [1, 2, 0, 0]}))


def test_two_runs_of_one_policy_are_separated_by_their_start(tmp_path: Path) -> None:
    columns = {"policy": ["a"] * 4, "sequence_id": [3] * 4, "t": [0, 3, 0, 1], "drafted": [4] * 4}
    rounds = read_rounds(write(tmp_path, {**columns, "accepted": [2, 1, 0, 4]}))
    assert len(rounds.drafted) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accepted": [5, 2, 0, 0]}, "5 of 4 drafted tokens accepted in row 0"),
        ({"accepted": [-1, 2, 0, 0]}, "-1 of 4"),
        ({"accepted": None}, "lacks column 'accepted'"),
        ({"drafted": [4, None, 0, 1]}, "nulls"),
        ({"drafted": [4.0, 2.0, 0.0, 1.0]}, "expected whole numbers"),
        ({"drafted": [0] * 4, "accepted": [0] * 4}, "no round that drafted"),
        ({"t": [0, 4, 0, 0]}, "the round after that of sequence 3 at t = 0 with 2 accepted is missing"),
        ({"t": [-1, 2, 0, 0]}, "negative position"),
    ],
)
def test_bad_rounds_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    columns = {key: value for key, value in {**GOOD, **change}.items() if value is not None}
    with pytest.raises(InputError, match=message):
        read_rounds(write(tmp_path, columns))


def test_an_unknown_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no rounds of policy 'c'; it has: a, b"):
        read_rounds(write(tmp_path, GOOD), policy="c")
    with pytest.raises(InputError, match="no column 'policy'"):
        read_rounds(write(tmp_path, {"drafted": [2], "accepted": [1]}), policy="c")
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1")
    with pytest.raises(InputError, match="not a readable Parquet"):
        read_rounds(broken)


def counters(tmp_path: Path, document: Any) -> Path:
    path = tmp_path / "counters.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_counters_are_read_down_to_the_last_depth_used(tmp_path: Path) -> None:
    source = read_source(counters(tmp_path, {"drafted": [9, 9, 0], "accepted": [7, 5, 0], "model": "x"}))
    assert isinstance(source, Counters)
    assert source.drafted.tolist() == [9, 9] and source.accepted.tolist() == [7, 5]
    assert describe(source) == {"source": "counters", "rounds": 9}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{", "not valid JSON"),
        ([1], "Expected `object`, got `array`"),
        ({"drafted": [3]}, "missing required field `accepted`"),
        ({"drafted": [3], "accepted": [0.5]}, r"Expected `int`, got `float` - at `\$.accepted\[0\]`"),
        ({"drafted": [3], "accepted": [-1]}, "'accepted' is not a list of counts"),
        ({"drafted": [3, 3], "accepted": [1]}, "2 depths drafted but 1 accepted"),
        ({"drafted": [3], "accepted": [4]}, "accepted must not exceed drafted"),
        ({"drafted": [3, 3], "accepted": [1, 2]}, "must not grow"),
        ({"drafted": [3, 4], "accepted": [2, 2]}, "must not grow"),
        ({"drafted": [0], "accepted": [0]}, "no token was drafted"),
    ],
)
def test_bad_counters_are_refused(document: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        read_counters(counters(tmp_path, document))


def test_traces_are_sources_too(tmp_path: Path) -> None:
    trace = small_trace()
    write_trace(trace, tmp_path / "trace")
    source = read_source(tmp_path / "trace")
    assert isinstance(source, Trace)
    assert describe(source) == {"source": "dense trace", "sequences": 5, "output_tokens": 102}
    np.testing.assert_array_equal(source.match_len, trace.match_len)
    with pytest.raises(InputError, match="--policy selects rounds"):
        read_source(tmp_path / "trace", policy="a")
    with pytest.raises(InputError, match="does not exist"):
        read_source(tmp_path / "nowhere")
