"""Importers of formats of which no run of ours is at hand: a file by hand per version, and their counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specsim.acceptance.sources import read_counters, read_rounds, read_source
from specsim.engines.formats.records import ImportedRecords
from specsim.engines.formats.registry import read_format
from specsim.engines.import_records import as_counts
from specsim.io.errors import InputError
from tests.specsim.engines.test_import import counts_of, rounds_of, sums
from tests.support.commands import assert_refused, call

META: dict[str, Any] = {  # of a real response: 69 of 231 drafts in 33 passes, 7 drafts beside the root
    "completion_tokens": 100, "spec_accept_rate": 0.2987012987012987, "spec_accept_length": 3.0303030303030303,
    "spec_num_correct_drafts": 69, "spec_num_proposed_drafts": 231, "spec_verify_ct": 33,
    "spec_correct_drafts_histogram": [4, 10, 7, 7, 3, 1, 0, 1],
}  # fmt: skip
REACHED = [29, 19, 12, 5, 2, 1, 1]


def lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(kind: str, path: Path, *records: object) -> ImportedRecords:
    return read_format(kind, [lines(path, *records)])


def test_sglang_by_its_names_of_today_and_before(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    before = {"spec_verify_ct": 33, "spec_accept_histogram": META["spec_correct_drafts_histogram"]}
    forms = [
        META,
        {"text": "...", "meta_info": META},
        {"choices": [{"index": 0, "meta_info": META}]},
        {**before, "spec_accept_token_num": 69, "spec_draft_token_num": 231},
        {**before, "spec_accept_token_num": 69 + 33, "spec_draft_token_num": 231 + 33},  # with bonus and root
    ]
    for form in forms:
        assert sums(read("sglang-responses", path, form)) == (33, 231, 69, REACHED)
    both = read("sglang-responses", path, META, {"meta_info": {"completion_tokens": 5}}, META)
    assert sums(both) == (66, 462, 138, [2 * times for times in REACHED])
    assert both.output_tokens == (100, 100) and [*both.skipped.values()] == [1]
    assert both.totals.output_tokens / both.totals.rounds == META["spec_accept_length"]


def test_nodes_of_a_tree_are_not_taken_for_depths(tmp_path: Path) -> None:
    tree = {
        **META,
        "spec_correct_drafts_histogram": [4, 5, 7, 7, 8, 2],
        "spec_num_correct_drafts": 5 + 14 + 21 + 32 + 10,
    }
    imported = read("sglang-responses", tmp_path / "a.jsonl", tree)
    assert imported.source is None and imported.sums == (33, 231, 82)
    assert imported.notes == ("231 drafts in 33 passes of at most 5 steps: these are nodes of trees",)
    with pytest.raises(InputError, match="do not give acceptance by position; run SGLang with --speculative-eagle-to"):
        as_counts(imported)
    with pytest.raises(InputError, match="70 drafts accepted, but 69 by its histogram"):
        read("sglang-responses", tmp_path / "a.jsonl", {**META, "spec_num_correct_drafts": 70})
    with pytest.raises(InputError, match="counts 33 of 34 passes"):
        read("sglang-responses", tmp_path / "a.jsonl", {**META, "spec_verify_ct": 34})
    adaptive = {**META, "spec_num_proposed_drafts": 150}
    with pytest.raises(InputError, match="differ in length .150 tokens in 33 drafts of up to 7.*not adaptively"):
        read("sglang-responses", tmp_path / "a.jsonl", adaptive)


def test_sglang_without_a_histogram_gives_sums(tmp_path: Path) -> None:
    meta = {key: value for key, value in META.items() if "histogram" not in key}
    imported = read("sglang-responses", tmp_path / "a.jsonl", meta)
    assert imported.source is None and imported.sums == (33, 231, 69)
    assert_refused(
        call("specsim", "import", "sglang-responses", tmp_path / "a.jsonl", "--out", tmp_path / "c.json"), "histogram"
    )


def test_averages_of_sglangs_log_and_their_definition(tmp_path: Path) -> None:
    line = (
        "Decode batch, #running-req: 3, #token: 108, accept len: 2.17, accept rate: 0.39, cap len: 3.00, "
        "block accept len: 2.10, cuda graph: True"
    )
    log = tmp_path / "log"
    log.write_text(f"[2026-01-01 00:00:00] {line}\n" * 2 + line[:60])
    imported = read_format("sglang-log", [log])
    assert imported.source is None and imported.averages["accept len"] == pytest.approx(2.17)
    assert "accept rate = (accept len - 1) / 3: 3 draft tokens beside the root" in imported.notes
    text = call("specsim", "import", "sglang-log", log).out
    assert "2.17" in text and "sglang-responses" in text


def iteration(number: int, rounds: int, drafted: int, accepted: int) -> dict[str, object]:
    drafts = {"numRequestsWithDraftTokens": rounds, "numDraftTokens": drafted, "numAcceptedTokens": accepted}
    return {"iter": number, "specDecodingStats": {**drafts, "acceptanceLength": 2.5, "draftOverhead": 0.1}}


def test_iterations_of_tensorrt_llm_count_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    polls = [iteration(3, 8, 24, 12), iteration(4, 8, 24, 10), iteration(4, 8, 24, 10), iteration(7, 4, 12, 5)]
    imported = read("tensorrt-llm", path, *polls, {"iter": 5, "specDecodingStats": None})
    assert imported.source is None and imported.sums == (20, 60, 27)
    assert [*imported.skipped.values()] == [1, 1] and "1 iterations between" in imported.notes[0]
    single = read("tensorrt-llm", path, iteration(1, 8, 8, 6), iteration(2, 7, 7, 5))
    assert (counts_of(single).drafted.tolist(), counts_of(single).accepted.tolist()) == ([15], [11])
    with pytest.raises(InputError, match="iteration 3 comes twice with other counts"):
        read("tensorrt-llm", path, iteration(3, 8, 24, 12), iteration(3, 8, 24, 11))
    with pytest.raises(InputError, match="25 of 24 drafts accepted"):
        read("tensorrt-llm", path, iteration(3, 8, 24, 25))


def test_accept_lengths_with_and_without_the_bonus(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for extra in (0, 1):
        choices = [{"turns": ["..."], "accept_lengths": [extra + n for n in (0, 3, 1)]}, {"accept_lengths": [extra]}]
        imported = read("accept-lengths", path, {"question_id": 1, "choices": choices}, {"no": 1})
        assert rounds_of(imported).accepted.tolist() == [0, 3, 1, 0]
        assert rounds_of(imported).drafted.tolist() == [3] * 4
        assert rounds_of(imported).sequence_id is not None and imported.skipped == {"lines without choices": 1}
        assert ("never 0" in imported.notes[0]) == bool(extra)
    with pytest.raises(InputError, match="every round of .* has length 1"):
        read("accept-lengths", path, {"choices": [{"accept_lengths": [1, 1]}]})


def test_what_is_written_is_what_other_commands_read(tmp_path: Path) -> None:
    path, out = lines(tmp_path / "a.jsonl", META), tmp_path / "counters.json"
    assert "acceptance fit" in call("specsim", "import", "sglang-responses", path, "--out", out).out
    assert read_counters(out).accepted.tolist() == REACHED
    answers, rounds = lines(tmp_path / "b.jsonl", {"choices": [{"accept_lengths": [1, 4, 2]}]}), tmp_path / "r.parquet"
    assert call("specsim", "import", "accept-lengths", answers, "--out", rounds).code == 0
    assert read_rounds(rounds).accepted.tolist() == [0, 3, 1] and read_source(rounds)


@pytest.mark.parametrize("kind", ["sglang-responses", "tensorrt-llm", "accept-lengths", "aiperf"])
def test_other_json_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    for text in ("", "7", "[1]", "{}", '{"a": 1}\n{"a": 2}\n', '{"a": 1}\n{"a": \n{"a": 3}\n', "[{}]"):
        (tmp_path / "a").write_text(text)
        with pytest.raises(InputError) as refused:
            read_format(kind, [tmp_path / "a"])
        assert "\n" not in str(refused.value)
