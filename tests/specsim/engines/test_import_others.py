"""Importers of formats of which no run of ours is at hand: a file by hand per version, and their counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specsim.acceptance.sources import read_counters, read_rounds, read_source
from specsim.engines.formats.records import ImportedRecords, as_counts
from specsim.engines.formats.registry import read_format
from specsim.io.errors import InputError
from specsim.trace.files import read_trace
from tests.specsim.engines.test_import import counts_of, rounds_of, sums
from tests.support.commands import assert_refused, call, json_of

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


LENGTHS = """# key = num_speculative_tokens
_metadata:
  draft-model: someone/drafter
a-model:
  thinking_on:
    1: 1.80
    2: 2.40
    3: 2.35
  thinking_off:
    1: 1.90
"""


def test_inferencex_means_by_k(tmp_path: Path) -> None:
    path = tmp_path / "al.yaml"
    path.write_text(LENGTHS)
    imported = read_format("inferencex", [path])
    on = {f"a-model thinking_on, K = {k}": length for k, length in ((1, 1.8), (2, 2.4), (3, 2.35))}
    assert imported.averages == {**on, "a-model thinking_off, K = 1": 1.9} and imported.source is None
    assert len(imported.notes) == 1 and "accepted less at K = 3" in imported.notes[0]
    assert "2.35" in call("specsim", "import", "inferencex", path).out
    assert_refused(call("specsim", "import", "inferencex", path, "--out", tmp_path / "c.json"), "means without counts")
    for spoilt, message in (
        ("2: 3.40", "length 3.4 at K = 2"),
        ("1: 2.00", "has it twice"),
        ("- 2", "not a line of such"),
    ):
        path.write_text(LENGTHS.replace("2: 2.40", spoilt))
        with pytest.raises(InputError, match=message):
            read_format("inferencex", [path])


def test_a_dense_trace_is_replayed_and_ranked(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    records = []
    for _ in range(12):
        length = 40
        summary = {"prompt_token_ids": [1, 2, 3], "generated_token_ids": rng.integers(1, 99, length).tolist()}
        records.append({**summary, "acc_eagle": {"acc_len": (1 + rng.integers(0, 5, length)).tolist()}})
    path, out, cost = lines(tmp_path / "a.jsonl", *records), tmp_path / "trace", tmp_path / "cost.json"
    summary = json_of(call("specsim", "import", "specdecode-bench", path, "--out", out, "--json"))
    assert summary["holds"] == "dense trace" and summary["requests"] == 12
    trace = read_trace(out)
    assert trace.meta["import"]["engine"] == "specdecode-bench" and trace.output_tokens.tolist() == [40] * 12
    cost.write_text('{"s_d": 0.001, "s_t": 0.01}')
    replayed = json_of(call("specsim", "replay", out, "--policy", "fixed_k", "--set", "k=3", "--cost", cost, "--json"))
    rounds = 0
    for record in records:
        accepted, t = record["acc_eagle"]["acc_len"], 0
        while t < 40:
            t += min(accepted[t] - 1, 3, 40 - t - 1) + 1
            rounds += 1
    assert replayed["rounds"] == rounds and replayed["output_tokens"] == 480


def test_exllama_rounds_and_sums(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    imported = read("exllamav3", path, {"draft_stats": [[5, 4, 2], [8, 4, 4]]}, {"draft_stats": [[3, 2, 0]]})
    assert sums(imported) == (3, 10, 6, [2, 2, 1, 1])
    totals = read("exllamav3", path, {"accepted_draft_tokens": 6, "rejected_draft_tokens": 4, "text": "..."})
    assert totals.source is None and totals.sums == (None, 10, 6)
    with pytest.raises(InputError, match="not .position, window, accepted"):
        read("exllamav3", path, {"draft_stats": [[5, 4]]})
    with pytest.raises(InputError, match="accepts 5 of 4 drafted tokens in round 1"):
        read("exllamav3", path, {"draft_stats": [[5, 4, 5]]})


def test_arctic_steps_as_lines_and_as_csv(tmp_path: Path) -> None:
    steps = [(0, 4, 2), (1, 0, 0), (2, 3, 3), (0, 2, 1)]
    rows = [{"step": s, "match_len": 9, "score": 0.5, "num_spec_toks": d, "num_accept_toks": a} for s, d, a in steps]
    table = tmp_path / "a.csv"
    table.write_text(
        "step,match_len,score,num_spec_toks,num_accept_toks\n" + "".join(f"{s},9,0.5,{d},{a}\n" for s, d, a in steps)
    )
    for imported in (read("arctic", tmp_path / "a.jsonl", *rows), read_format("arctic", [table])):
        assert imported.requests == 2 and rounds_of(imported).drafted.tolist() == [4, 0, 3, 2]
        assert rounds_of(imported).sequence_id.tolist() == [0, 0, 0, 1]
    table.write_text("step,spec\n1,2\n")
    with pytest.raises(InputError, match="not a table of steps"):
        read_format("arctic", [table])


def lab(path: Path, **changes: list[object]) -> Path:
    columns: dict[str, list[Any]] = {
        "model": ["m"] * 3, "speculator": ["s"] * 3, "config": ["c"] * 3, "category": ["x"] * 3,
        "prompt_idx": [0, 0, 1], "turn": [0, 0, 0], "round_idx": [1, 0, 0], "accept": [2, 0, 1],
        "acc0": [True, False, True], "acc1": [True, True, False],
    }  # fmt: skip
    pq.write_table(pa.table({**columns, **changes}), path)
    return path


def test_inference_lab_by_its_flags(tmp_path: Path) -> None:
    """The second row is the first round; its second flag is of a token after a rejection."""
    imported = read_format("inference-lab", [lab(tmp_path / "a.parquet")])
    assert rounds_of(imported).accepted.tolist() == [0, 2, 1] and rounds_of(imported).drafted.tolist() == [2] * 3
    with_bonus = read_format("inference-lab", [lab(tmp_path / "a.parquet", accept=[3, 1, 2])])
    assert rounds_of(with_bonus).accepted.tolist() == [0, 2, 1] and "bonus included" in with_bonus.definition
    for changes, message in (
        ({"accept": [3, 0, 1]}, "not the sum of acc0"),
        ({"config": ["c", "c", "d"]}, "several configs"),
    ):
        with pytest.raises(InputError, match=message):
            read_format("inference-lab", [lab(tmp_path / "a.parquet", **changes)])


def test_what_is_written_is_what_other_commands_read(tmp_path: Path) -> None:
    path, out = lines(tmp_path / "a.jsonl", META), tmp_path / "counters.json"
    assert "acceptance fit" in call("specsim", "import", "sglang-responses", path, "--out", out).out
    assert read_counters(out).accepted.tolist() == REACHED
    answers, rounds = lines(tmp_path / "b.jsonl", {"choices": [{"accept_lengths": [1, 4, 2]}]}), tmp_path / "r.parquet"
    assert call("specsim", "import", "accept-lengths", answers, "--out", rounds).code == 0
    assert read_rounds(rounds).accepted.tolist() == [0, 3, 1] and read_source(rounds)


@pytest.mark.parametrize(
    "kind", ["sglang-responses", "tensorrt-llm", "accept-lengths", "specdecode-bench", "exllamav3", "aiperf"]
)
def test_other_json_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    for text in ("", "7", "[1]", "{}", '{"a": 1}\n{"a": 2}\n', '{"a": 1}\n{"a": \n{"a": 3}\n', "[{}]"):
        (tmp_path / "a").write_text(text)
        with pytest.raises(InputError) as refused:
            read_format(kind, [tmp_path / "a"])
        assert "\n" not in str(refused.value)
