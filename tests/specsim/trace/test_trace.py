"""Trace folders, of one drafter and of several: round trip, atomic writing, and a clear line for every damaged file."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import specsim
from specsim.io import files
from specsim.io.errors import InputError
from specsim.io.files import file_digest
from specsim.trace.accepted import accepted_by, rule_of
from specsim.trace.files import pack_trace, read_trace, write_trace
from specsim.trace.joined import JoinedTrace, foretold, join_traces
from specsim.trace.trace import NO_TOKEN, Trace
from specsim.trace.typical import typical_thresholds
from tests.support import ROOT, checks
from tests.support.checks import edit_meta
from tests.support.joined_traces import DEPTH, guessing_part, joined_trace, lookup_part, texts
from tests.support.reference import small_trace
from tests.support.tree_traces import tree_trace

META, SEQUENCES, STEPS, TREES = "meta.json", "sequences.parquet", "steps.parquet", "trees.parquet"
COLUMNS = {
    SEQUENCES: ("sequence_id", "domain", "prompt_tokens", "budget_tokens", "output_tokens"),
    STEPS: ("sequence_id", "t", "token", "match_len", "draft_token", "prob", "confidence", "entropy_nats"),
}
Table = pa.Table


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_trace(small_trace(), tmp_path / "trace")
    return tmp_path / "trace"


def edit(folder: Path, name: str, change: Callable[[Table], Table]) -> None:
    """Rewrite a table and its checksum, so that only the content is wrong."""
    pq.write_table(change(pq.read_table(folder / name)), folder / name)
    edit_meta(folder, lambda meta: meta["checksums"].update({name: file_digest(folder / name)}))


def with_column(table: Table, name: str, values: Any) -> Table:
    return table.set_column(table.column_names.index(name), name, values)


def with_value(name: str, row: int, value: Any) -> Callable[[Table], Table]:
    """Replace a value, keeping the column's type."""

    def change(table: Table) -> Table:
        column = table.column(name).to_pylist()
        column[row] = value(column[row]) if callable(value) else value
        return with_column(table, name, pa.array(column, table.schema.field(name).type))

    return change


def refusal(folder: Path, *names: str) -> str:
    """The refusal's line, which names the folder's file."""
    return checks.refusal(lambda: read_trace(folder), str(folder), *names)


def assert_equal(first: Trace, second: Trace) -> None:
    for field in dataclasses.fields(Trace):
        if field.name != "meta":
            np.testing.assert_array_equal(getattr(first, field.name), getattr(second, field.name), field.name)


OPTIONAL = {
    "true_rank": np.arange(612, dtype=np.int16).reshape(102, 6),
    "text_accept": np.linspace(0, 1, 612, dtype=np.float32).reshape(102, 6),
    "score": np.linspace(1, 0, 612, dtype=np.float32).reshape(102, 6),
    "top10_confidence": np.linspace(1, 0.1, 612, dtype=np.float32).reshape(102, 6),
}


@pytest.mark.parametrize("optional", [(), ("score",), tuple(OPTIONAL)])
def test_what_is_written_is_read(tmp_path: Path, optional: tuple[str, ...]) -> None:
    trace = small_trace(**{name: OPTIONAL[name] for name in optional})
    write_trace(trace, tmp_path / "deep" / "trace")
    again = read_trace(tmp_path / "deep" / "trace")
    assert_equal(again, trace)
    assert again.meta.items() >= trace.meta.items()
    for field in dataclasses.fields(Trace):
        value = getattr(again, field.name)
        if isinstance(value, np.ndarray) and field.name != "domain":
            assert value.dtype == getattr(trace, field.name).dtype
            assert value.flags.writeable and value.flags.c_contiguous


def test_traces_and_replays_are_compared_and_kept_in_sets(folder: Path) -> None:
    """A notebook's `==`, `in` and caches: arrays have no truth value, so each equals itself alone."""
    a, b = read_trace(folder), read_trace(folder)
    assert a == a and a != b and b in [a, b] and len({a, b, a}) == 2
    run, other = (specsim.replay(trace, {"s_d": 0.001, "s_t": 0.01}, "fixed_k", k=1) for trace in (a, b))
    assert run != other and other in [run, other] and len({run, other}) == 2


def test_a_trace_is_readable_with_pandas_alone(folder: Path) -> None:
    trace = small_trace()
    steps, sequences = pd.read_parquet(folder / STEPS), pd.read_parquet(folder / SEQUENCES)
    assert sequences["domain"].tolist() == ["code", "prose", "code", "prose", "code"]
    assert steps.groupby("sequence_id")["t"].max().tolist() == (sequences["output_tokens"] - 1).tolist()
    np.testing.assert_array_equal(np.stack(steps["draft_token"].to_list()), trace.draft_token)
    np.testing.assert_array_equal(np.stack(steps["entropy_nats"].to_list()), trace.entropy_nats)
    assert set(sequences.columns) == set(COLUMNS[SEQUENCES]) and set(steps.columns) == set(COLUMNS[STEPS])


def test_a_packed_trace_reads_as_its_folder(folder: Path, tmp_path: Path) -> None:
    pack_trace(folder, tmp_path / "packed.zip")
    assert_equal(read_trace(tmp_path / "packed.zip"), read_trace(folder))
    assert not list(tmp_path.glob(".packed*"))


def test_an_existing_folder_is_kept_unless_told_otherwise(folder: Path) -> None:
    other = small_trace(seed=1)
    checks.refusal(lambda: write_trace(other, folder), "exists", str(folder))
    assert_equal(read_trace(folder), small_trace())
    write_trace(other, folder, overwrite=True)
    assert_equal(read_trace(folder), other)
    assert [path.name for path in folder.parent.iterdir()] == ["trace"]


def fail(*arguments: Any, **options: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("moment", ["tables", "meta", "swap", "swap in two steps"])
def test_a_failed_write_leaves_the_old_state_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, overwrite: bool
) -> None:
    folder = tmp_path / "trace"
    if overwrite:
        write_trace(small_trace(), folder)
    real_replace, refused = os.replace, list[Path]()

    def refuse_new(source: Path, target: Path) -> None:
        if Path(target) == folder and not refused:
            refused.append(source)
            raise KeyboardInterrupt
        real_replace(source, target)

    new = small_trace(seed=1)
    with monkeypatch.context() as patch:
        if moment == "tables":
            patch.setattr(pq, "write_table", fail)
        elif moment == "meta":
            patch.setattr(json, "dumps", fail)
        else:
            patch.setattr(os, "replace", refuse_new)
            patch.setattr("specsim.io.files.ctypes.CDLL", fail if moment == "swap" else lambda *name, **how: None)
        with pytest.raises(KeyboardInterrupt):
            write_trace(new, folder, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == (["trace"] if overwrite else [])
    if overwrite:
        assert_equal(read_trace(folder), small_trace())


REPLACED = """
import sys
from pathlib import Path
from specsim.io.files import replacing_folder

folder = Path(sys.argv[1])
number = 0
while True:
    number += 1
    with replacing_folder(folder) as work:
        for name in ("a", "b"):
            (work / name).write_text(str(number))
    print(number, flush=True)
"""


def test_a_kill_while_a_folder_is_replaced_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    for _ in range(5):
        command = [sys.executable, "-c", REPLACED, str(folder)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as writer:
            for _ in range(20):
                writer.stdout.readline()
            writer.kill()
        whole = {(folder / name).read_text() for name in ("a", "b")}
        assert len(whole) == 1
    with files.replacing_folder(folder) as work:
        (work / "a").write_text("last")
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


@pytest.mark.parametrize("name", [SEQUENCES, STEPS, TREES])
def test_damaged_bytes_are_noticed(folder: Path, name: str) -> None:
    write_trace(tree_trace(0, sequences=2, tokens=20), folder, overwrite=True)
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:-100])
    assert "truncated or altered" in refusal(folder, name)
    edit_meta(folder, lambda meta: meta["checksums"].update({name: file_digest(folder / name)}))
    assert "not a readable Parquet file" in refusal(folder, name)
    middle = len(data) // 2
    (folder / name).write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    assert "truncated or altered" in refusal(folder, name)
    (folder / name).unlink()
    assert "is missing" in refusal(folder, name)


def test_a_folder_without_meta_is_no_trace(tmp_path: Path) -> None:
    assert "not a trace" in refusal(tmp_path, META)
    assert "nowhere does not exist" in refusal(tmp_path / "nowhere")
    assert refusal(Path("lab-eagle")).endswith("or example:lab-eagle")


def meta_with(**values: Any) -> Callable[[Path], None]:
    return lambda folder: edit_meta(folder, lambda meta: meta.update(values))


def altered(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Leave the checksum of meta.json as it was: replays believe what it says."""

    def damage(folder: Path) -> None:
        meta = json.loads((folder / META).read_text())
        change(meta)
        (folder / META).write_text(json.dumps(meta))

    return damage


def table_with(name: str, change: Callable[[Table], Table]) -> Callable[[Path], None]:
    return lambda folder: edit(folder, name, change)


def values_of(column: str, values: pa.Array) -> Callable[[Table], Table]:
    return lambda table: with_column(table, column, values)


def cast(column: str, length: int, kind: pa.DataType) -> Callable[[Table], Table]:
    """The first numbers of a column's lists, as lists of this type."""
    return lambda table: with_column(
        table, column, pa.array([row[:length] for row in table.column(column).to_pylist()]).cast(kind)
    )


WHOLE = "do not fit|expected (lists of )?whole numbers"
KEYS = "target", "drafter", "decoding", "depth", "eos_token_id", "dtype", "device", "checksums", "schema_version"
DAMAGE: list[tuple[Callable[[Path], Any], str, str]] = [  # what is done to a folder, to which file, and what is said
    *((lambda folder, content=content: (folder / META).write_bytes(content), META, says) for content, says in (
        (b"", ""), (b"{", "not valid JSON"), (b"\xff{}", "not valid JSON"), (b"[1, 2]", ""), (b"3", ""), (b"{}", ""),
    )),
    *((altered(lambda meta, new=new: meta.update(new)), META, "altered")
      for new in ({"decoding": "gumbel"}, {"eos_token_id": [3]}, {"mine": 1})),
    (altered(lambda meta: meta["checksums"].pop(META)), META, "altered"),
    *((lambda folder, key=key: edit_meta(folder, lambda meta: meta.pop(key)), META, key.replace("_", "[_ ]"))
      for key in KEYS),
    *((meta_with(schema_version=version), META, f"schema version {version}") for version in (2, "1")),
    *((meta_with(checksums=sums), META, "") for sums in (None, {}, {STEPS: "0"})),
    *((meta_with(depth=depth), META, "") for depth in (None, "6", 0, 256)),
    *((table_with(name, lambda table, column=column: table.drop_columns([column])), name, f"lacks column '{column}'")
      for name in COLUMNS for column in COLUMNS[name]),
    *((table_with(name, with_value(column, 2, None)), name, f"'{column}' has nulls")
      for name in COLUMNS for column in COLUMNS[name]),
    *((table_with(STEPS, with_value(column, 7, lambda old, bad=bad: [*old[:3], bad, *old[4:]])), STEPS,
       f"'{column}'.*{'nulls' if bad is None else 'not finite at row 7'}")
      for column in ("prob", "confidence", "entropy_nats") for bad in (float("nan"), float("inf"), None)),
    *((table_with(STEPS, cast(column, 5, pa.list_(pa.float32(), 5))), STEPS, f"'{column}'.*expected lists")
      for column in ("draft_token", "prob")),
    (table_with(STEPS, cast("prob", 6, pa.list_(pa.float32()))), STEPS, "'prob'.*expected lists of 6"),
    *((table_with(name, values_of(column, values)), name, f"'{column}'.*({WHOLE})") for name, column, values in (
        (STEPS, "match_len", pa.array([256] * 102)),  # 0 if cut to eight bits
        (STEPS, "match_len", pa.array([0.5] * 102)),
        (STEPS, "token", pa.array([2**40] * 102)),
        (STEPS, "token", pa.array(["x"] * 102)),
        (SEQUENCES, "prompt_tokens", pa.array([float("nan")] * 5)),
        (STEPS, "draft_token", pa.array([["x"] * 6] * 102, pa.list_(pa.string(), 6))),
    )),
    *((table_with(STEPS, change), STEPS, SEQUENCES) for change in (
        lambda table: table.slice(0, 101),
        lambda table: pa.concat_tables([table, table.slice(101)]),
        lambda table: table.take([1, 0, *range(2, 102)]),
        with_value("sequence_id", 50, 99),
        with_value("t", 3, 4),
    )),
    (table_with(STEPS, with_value("match_len", 5, 7)), STEPS, "match_len exceeds the depth 6"),
    *((table_with(SEQUENCES, with_value(column, 2, value)), SEQUENCES, "") for column, value in (
        ("prompt_tokens", 0), ("output_tokens", -1), ("budget_tokens", 0), ("budget_tokens", 24),  # of an output of 25
    )),
    (lambda folder: [edit(folder, name, lambda table: table.slice(0, 0)) for name in COLUMNS], "", "no output tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "file", "says"), DAMAGE)
def test_what_is_damaged_is_refused_in_a_line(
    folder: Path, damage: Callable[[Path], Any], file: str, says: str
) -> None:
    damage(folder)
    text = refusal(folder, file)
    assert re.search(says, text), text


def test_draft_limit_is_what_budget_eos_and_depth_allow() -> None:
    """Depth 3, token 0 ends a text; budget 5 of which 4 were used."""
    draft = [[4, 4, 4], [4, 0, 4], [0, 0, 4], [4, 4, 4]]
    trace = Trace(
        meta={"eos_token_id": 0},
        sequence_id=np.array([0]),
        domain=np.array(["a"]),
        prompt_tokens=np.array([1]),
        budget_tokens=np.array([5]),
        offsets=np.array([0, 4]),
        token=np.array([4, 4, 4, 0], dtype=np.int32),
        match_len=np.zeros(4, dtype=np.uint8),
        draft_token=np.array(draft, dtype=np.int32),
        prob=np.zeros((4, 3)),
        confidence=np.zeros((4, 3)),
        entropy_nats=np.zeros((4, 3)),
    )
    assert trace.draft_limit.tolist() == [3, 2, 1, 1]  # the EOS proposed counts; remaining budget 1
    tight = replace(trace, budget_tokens=np.array([4]))
    assert tight.draft_limit.tolist() == [3, 2, 1, 0]
    for nothing in (None, []):
        assert replace(trace, meta={"eos_token_id": nothing}).draft_limit.tolist() == [3, 3, 2, 1]
    assert replace(trace, meta={"eos_token_id": [7, 4]}).draft_limit.tolist() == [1, 1, 2, 1]


def test_select_takes_sequences_in_the_order_given() -> None:
    trace = small_trace(score=OPTIONAL["score"])
    part = trace.select([3, 0])
    rows = [*range(66, 69), *range(40)]  # lengths 40, 1, 25, 3, 33
    assert part.sequence_id.tolist() == [13, 10] and part.offsets.tolist() == [0, 3, 43]
    assert part.prompt_tokens.tolist() == [47, 30] and part.domain.tolist() == ["prose", "code"]
    for name in (*COLUMNS[STEPS][2:], "score", "draft_limit"):
        np.testing.assert_array_equal(getattr(part, name), getattr(trace, name)[rows])
    assert part.position.tolist() == [*range(3), *range(40)]
    assert part.true_rank is None
    assert_equal(trace.select(range(5)), trace)


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
    "space": (lambda: with_meta(OTHER, drafter_kind="space"), "b/ cannot be joined: its drafter is of kind space"),
    "joined": (joined_trace, "b/ cannot be joined: its drafter is of kind joined"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_differs_is_named_with_its_first_place(what: str) -> None:
    other, message = REFUSED[what]
    checks.refusal(lambda: join_traces({"a/": ONE, "b/": other()}), match=message)


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


def test_a_folder_and_what_it_is_packed_into_give_the_joined_trace_again(tmp_path: Path) -> None:
    joined, folder, packed = joined_trace(), tmp_path / "joined", tmp_path / "packed.zip"
    write_trace(joined, folder)
    pack_trace(folder, packed)
    for path in (folder, packed):
        again = read_trace(path)
        assert isinstance(again, JoinedTrace) and len(again.parts) == 3
        for column, read in zip(joined.columns, again.columns, strict=True):
            np.testing.assert_array_equal(column, read)
    checks.refusal(lambda: write_trace(joined, folder), "exists")
    write_trace(joined.select([0]), folder, overwrite=True)
    assert read_trace(folder).sequences == 1


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
        checks.refusal(lambda: read_trace(folder), match=message)
    listing.write_text(json.dumps(good))
    shutil.rmtree(folder / "2")
    write_trace(guessing_part(texts(seed=1), 0.5, 2), folder / "2")
    checks.refusal(lambda: read_trace(folder), "cannot be joined: ", " of sequence 0 differs")


def test_a_recording_of_sampled_drafts_from_before_is_read_and_says_its_rule() -> None:
    """Recorded when traces held acceptance by drafted prefix, which is no longer read."""
    trace = read_trace(Path(__file__).with_name("sampled_drafts_v3.zip"))
    assert rule_of(trace) == "sampled-draft" and trace.text_prob is None
    checks.refusal(lambda: accepted_by(trace, "equal-samples"), "which this trace lacks; record it again")
    # A greedy draft is kept as far as the output's tokens are the drafter's likeliest.
    leading = [next(depth for depth, rank in enumerate([*row, 1]) if rank) for row in trace.true_rank.tolist()]
    assert accepted_by(trace, "greedy-draft").match_len.tolist() == leading and 0 < sum(leading) < 4 * len(leading)


@pytest.mark.parametrize(
    ("text", "epsilon_and_delta"),
    [("typical", (0.09, None)), ("typical:0.1", (0.1, None)), ("typical:0.1:0.3", (0.1, 0.3)), ("greedy", None)],
)
def test_the_numbers_of_typical_acceptance_are_read(text: str, epsilon_and_delta: Any) -> None:
    assert typical_thresholds(text) == epsilon_and_delta
    checks.refusal(
        lambda: typical_thresholds("typical:1:2:3"), "give typical, typical:EPSILON or typical:EPSILON:DELTA"
    )
