"""What engines and their users published, line by line with its source: every sample is read, and its counts add up.

Formats change between versions; each of these was met in the wild. Counts were worked out from the printed numbers. Of
what no sample shows there are files by hand, one per version.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from specsim.acceptance.sources import read_counters, read_rounds, read_source
from specsim.engines.formats.records import ImportedRecords
from specsim.engines.formats.registry import FORMATS, UNTESTED, read_format
from specsim.engines.import_records import as_counts
from specsim.io.errors import InputError
from tests.specsim.engines.test_import import rounds_of, sums
from tests.support import ROOT
from tests.support.commands import assert_refused, call


def read(kind: str, folder: Path, text: str) -> ImportedRecords:
    path = folder / "sample"
    path.write_text(text)
    return read_format(kind, [path])


VLLM_LOG = {
    # vllm-project/vllm-ascend issue 13640, August 2026: 23 and 55 drafts of 7
    "two intervals of DSpark": (
        "(APIServer pid=79) INFO 08-05 12:25:03 [metrics.py:120] SpecDecoding metrics: Mean acceptance length: 2.91, "
        "Accepted throughput: 0.72 tokens/s, Drafted throughput: 2.64 tokens/s, Accepted: 44 tokens, Drafted: 161 "
        "tokens, Per-position acceptance rate: 0.739, 0.478, 0.261, 0.174, 0.130, 0.087, 0.043, Avg Draft acceptance "
        "rate: 27.3%\n"
        "(APIServer pid=79) INFO 08-05 12:25:13 [metrics.py:120] SpecDecoding metrics: Mean acceptance length: 2.93, "
        "Accepted throughput: 10.60 tokens/s, Drafted throughput: 38.50 tokens/s, Accepted: 106 tokens, Drafted: 385 "
        "tokens, Per-position acceptance rate: 0.691, 0.418, 0.382, 0.182, 0.127, 0.073, 0.055, Avg Draft acceptance "
        "rate: 27.5%\n",
        (78, 546, 150, [55, 34, 27, 14, 10, 6, 4]),
    ),
    # vllm-project/vllm-ascend issue 13665, August 2026: nothing of 99 drafts of 5 was accepted
    "nothing accepted": (
        "(APIServer pid=6485) INFO 08-05 20:20:43 [metrics.py:100] SpecDecoding metrics: Mean acceptance length: 1.00, "
        "Accepted throughput: 0.00 tokens/s, Drafted throughput: 1.23 tokens/s, Accepted: 0 tokens, Drafted: 495 "
        "tokens, Per-position acceptance rate: 0.000, 0.000, 0.000, 0.000, 0.000, Avg Draft acceptance rate: 0.0%\n",
        (99, 495, 0, [0, 0, 0, 0, 0]),
    ),
    # vllm-project/vllm pull request 24127, September 2025: the rate stands first
    "another order": (
        "(APIServer pid=2236552) INFO 09-09 11:51:35 [metrics.py:96] SpecDecoding metrics: Draft acceptance rate: "
        "88.8%, Mean acceptance length: 5.44, Accepted throughput: 4.37 tokens/s, Drafted throughput: 4.92 tokens/s, "
        "Accepted: 262 tokens, Drafted: 295 tokens, Per-position acceptance rate: 0.983, 0.949, 0.915, 0.881, 0.712\n",
        (59, 295, 262, [58, 56, 54, 52, 42]),
    ),
    # vllm-project/vllm pull request 15902, April 2025
    "April 2025": (
        "SpecDecoding metrics: Draft acceptance rate: 100.0%, Accepted: 66 tokens, Drafted: 66 tokens\n",
        (None, 66, 66),
    ),
}


def test_lines_of_two_versions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="lines of several versions of vllm"):
        read("vllm-log", tmp_path, VLLM_LOG["another order"][0] + VLLM_LOG["April 2025"][0])


@pytest.mark.parametrize("name", VLLM_LOG)
def test_lines_of_vllms_log(name: str, tmp_path: Path) -> None:
    text, wanted = VLLM_LOG[name]
    imported = read("vllm-log", tmp_path, text)
    assert (sums(imported) if len(wanted) == 4 else imported.sums) == wanted


# Results in public notes of 2026, of Qwen3.8-27B and others: drafts, drafted and accepted tokens, rates in percent.
BENCHES = [
    (6393, 19179, 14090, "83.42 72.91 64.07"),
    (7018, 21054, 13469, "72.87 62.95 56.10"),
    (37085, 111255, 60052, "76.70 51.51 33.72"),
    (499545, 3496815, 1550240, "74.34 58.00 49.10 43.19 38.03 29.14 18.53"),
]


@pytest.mark.parametrize("printed", BENCHES, ids=lambda printed: str(printed[0]))
def test_what_vllm_bench_serve_printed(printed: tuple[int, int, int, str], tmp_path: Path) -> None:
    drafts, drafted, accepted, percents = printed
    rates = [float(percent) for percent in percents.split()]
    lines = [
        "---------------Speculative Decoding---------------",
        f"{'Acceptance rate (%):':<40} {100 * accepted / drafted:<10.2f}",
        f"{'Acceptance length:':<40} {1 + accepted / drafts:<10.2f}",
        f"{'Drafts:':<40} {drafts:<10}",
        f"{'Draft tokens:':<40} {drafted:<10}",
        f"{'Accepted tokens:':<40} {accepted:<10}",
        "Per-position acceptance (%):",
        *(f"{f'  Position {i}:':<40} {rate:<10.2f}" for i, rate in enumerate(rates)),
        "==================================================",
    ]
    imported = read("vllm-bench", tmp_path, "\n".join(lines) + "\n")
    with pytest.raises(InputError, match="does not fit"):
        read("vllm-bench", tmp_path, "\n".join(lines).replace(f" {accepted} ", f" {accepted - 3000} "))
    rounds, *rest = sums(imported)
    assert (rounds, *rest[:2]) == (drafts, drafted, accepted)
    by_position = rest[2]
    assert sum(by_position) == accepted
    assert [round(100 * n / drafts, 2) for n in by_position] == pytest.approx(rates, abs=0.011)


# ggml-org/llama.cpp pull request 24536, June 2026: a request's lines, and the statistics, which have no prefix there.
LLAMACPP = """\
0.06.895.980 I slot print_timing: id  1 | task 0 | prompt eval time =     300.11 ms /    20 tokens (   15.01 ms per token,    66.64 tokens per second)
0.06.895.998 I slot print_timing: id  1 | task 0 |        eval time =    2296.72 ms /   256 tokens (    8.97 ms per token,   111.46 tokens per second)
0.06.896.015 I slot print_timing: id  1 | task 0 | draft acceptance = 0.64479 (  167 accepted /   259 generated), mean acceptance length =  2.92, acceptance rate per position = (0.805, 0.632, 0.483)
0.06.896.057 I statistics     draft-eagle3: #calls(b,g,a) =    1     87     87, #gen drafts =     87, #acc drafts =    70, #gen tokens =    259, #acc tokens =   167, #mean acc len = 2.92, #acc rate/pos = (0.805, 0.632, 0.483), dur(b,g,a) = 0.005, 325.555, 0.114 ms
"""  # noqa: E501


def test_lines_of_llamacpps_log(tmp_path: Path) -> None:
    for text in (LLAMACPP, "".join(LLAMACPP.splitlines(keepends=True)[:3])):
        imported = read("llamacpp-log", tmp_path, text)
        assert sums(imported) == (87, 259, 167, [70, 55, 42]) and imported.output_tokens == (256,)
    # pull request 12603, March 2025
    timings = {"prompt_n": 1, "predicted_n": 200, "predicted_ms": 11082.606, "draft_n": 347, "draft_n_accepted": 65}
    assert read("llamacpp-responses", tmp_path, json.dumps({"timings": timings})).sums == (None, 347, 65)


def test_responses_of_sglang(tmp_path: Path) -> None:
    # sgl-project/sglang pull request 33518, August 2026: 106 tokens in 43 passes of 5 drafts
    meta = {
        "spec_accept_rate": 0.2930232558139535, "spec_accept_length": 2.4651162790697674, "spec_num_correct_drafts": 63,
        "spec_num_proposed_drafts": 215, "spec_verify_ct": 43,
        "spec_correct_drafts_histogram": [11, 14, 11, 4, 0, 3],
    }  # fmt: skip
    chat = {"choices": [{"index": 0}], "usage": {"completion_tokens": 106}, "sglext": {"spec_tokens_details": meta}}
    for response in (chat, {"meta_info": {**meta, "completion_tokens": 106}}):
        imported = read("sglang-responses", tmp_path, json.dumps(response))
        assert sums(imported) == (43, 215, 63, [32, 18, 7, 3, 3]) and imported.output_tokens == (106,)
    # pull request 13754, November 2025: other names, no histogram
    older = {
        "prompt_tokens": 171, "completion_tokens": 200, "spec_accept_rate": 0.011702127659574468,
        "spec_accept_length": 1.0638297872340425, "spec_verify_ct": 188, "spec_accept_token_num": 11,
        "spec_draft_token_num": 940,
    }  # fmt: skip
    imported = read("sglang-responses", tmp_path, json.dumps({"meta_info": older}))
    assert imported.source is None and imported.sums == (188, 940, 11)
    refused = call("specsim", "import", "sglang-responses", tmp_path / "sample", "--out", tmp_path / "c.json")
    assert_refused(refused, "histogram")


SGLANG_LOG = {
    # sgl-project/sglang pull request 6081, May 2025: no accept rate
    "May 2025": (
        "[2025-05-31 18:31:21 DP0 TP0] Decode batch. #running-req: 8, #token: 37217, token usage: 0.13, accept len: "
        "2.90, cuda graph: True, gen throughput (token/s): 171.01, #queue-req: 0\n"
        "[2025-05-31 18:31:21 DP6 TP6] Decode batch. #running-req: 8, #token: 36267, token usage: 0.12, accept len: "
        "2.86, cuda graph: True, gen throughput (token/s): 168.28, #queue-req: 0\n",
        2.88,
        "2 lines have no accept rate",
    ),
    # mit-han-lab/fastrl pull request 4, December 2025: 9 draft tokens with the root
    "December 2025": (
        "2025-12-04 20:34:02 INFO 147907 [scheduler_metrics_mixin.py:287] Decode batch. #running-req: 48, #token: "
        "3894, token usage: 0.00, accept len: 1.00, accept rate: 0.11, cuda graph: True, gen throughput (token/s): "
        "6138.60, #queue-req: 0, \n",
        1.00,
        "accept rate = accept len / 9, with bonus and root",
    ),
}


@pytest.mark.parametrize("name", SGLANG_LOG)
def test_lines_of_sglangs_log(name: str, tmp_path: Path) -> None:
    text, length, note = SGLANG_LOG[name]
    imported = read("sglang-log", tmp_path, text)
    assert imported.averages["accept len"] == pytest.approx(length) and not imported.skipped
    assert ("accept rate" in imported.averages) == ("accept rate:" in text)
    assert any(note in remark for remark in imported.notes), imported.notes


def test_answers_that_eagle_published(tmp_path: Path) -> None:
    """The first four of its Llama-2-chat-70B file, December 2023, without their texts: rounds are counted from 0."""
    turns = [([334, 126], [1026, 471]), ([40, 92], [179, 399]), ([137, 16], [518, 42]), ([176, 63], [611, 206])]
    answers = [
        {"question_id": 81 + i, "choices": [{"index": 0, "turns": ["", ""], "idxs": idxs, "new_tokens": tokens}]}
        for i, (idxs, tokens) in enumerate(turns)
    ]
    imported = read("accept-lengths", tmp_path, "".join(json.dumps(answer) + "\n" for answer in answers))
    assert imported.source is None and imported.sums == (992, None, 2460) and imported.output_tokens == (3452,)
    assert "of draft trees these are paths" in imported.notes[0]  # EAGLE drafts trees; the answers do not say it
    answers[1]["choices"] = [{"idxs": [40], "new_tokens": [30]}]
    with pytest.raises(InputError, match="answer 2: fewer tokens than rounds"):
        read("accept-lengths", tmp_path, "".join(json.dumps(answer) + "\n" for answer in answers))


def test_a_record_that_aiperfs_model_wrote(tmp_path: Path) -> None:
    """Version 0.13, of the first of vLLM's responses: the same rounds as that response's."""
    fixture = ROOT / "tests" / "specsim" / "engines" / "fixtures" / "vllm_requests_k3.json"
    response = json.loads(fixture.read_text())[0]
    record = (
        '{"metadata":{},"metrics":{},"spec_decode_acceptance":{"engine":"vllm","mean_acceptance_length":'
        '2.041666666666667,"draft_acceptance_rate":0.3472222222222222,"acceptance_histogram":{"0":28,"1":3,"2":4,"3":13},'
        '"num_accepted_draft_tokens":50,"num_draft_tokens":144,"num_spec_steps":48,"num_spec_tokens":3,'
        '"completion_tokens":96,"per_step_accepted":[3,2,0,0,0,0,3,3,0,0,0,0,3,3,0,0,0,3,3,0,0,0,0,3,3,0,0,0,0,3,1,2,0,0,0,'
        '3,1,2,0,0,0,3,1,2,0,0,0,3],"per_step_drafted":[3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,3,'
        '3,3,3,3,3,3,3,3,3,3,3,3,3,3,3]},"error":null}\n'
    )
    imported = read("aiperf", tmp_path, record)
    assert rounds_of(imported).accepted.tolist() == response["per_step_accepted"]
    assert imported.output_tokens == (96,) and imported.engine == "vllm"


def test_help_and_documentation_say_which_readers_met_no_real_file() -> None:
    untested = {kind for kind, form in FORMATS.items() if not form.tested}
    lines = call("specsim", "import", "--help").out.splitlines()
    assert {line.split()[0] for line in lines if line.split()[1:2] == ["*"]} == untested
    assert any(UNTESTED in line for line in lines)
    page = (ROOT / "docs" / "howto" / "engines.md").read_text()
    page = page[page.index("<!-- table: import formats -->") :].partition("<!-- end of table -->")[0]
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert {kind for kind in FORMATS if UNTESTED in rows[kind]} == untested


def test_a_reader_that_met_no_real_file_says_so(tmp_path: Path) -> None:
    assert any(UNTESTED in note for note in read("sglang-bench", tmp_path, "Accept length: 2.50\n").notes)


META: dict[str, Any] = {  # of a real response: 69 of 231 drafts in 33 passes, 7 drafts beside the root
    "completion_tokens": 100, "spec_accept_rate": 0.2987012987012987, "spec_accept_length": 3.0303030303030303,
    "spec_num_correct_drafts": 69, "spec_num_proposed_drafts": 231, "spec_verify_ct": 33,
    "spec_correct_drafts_histogram": [4, 10, 7, 7, 3, 1, 0, 1],
}  # fmt: skip
REACHED = [29, 19, 12, 5, 2, 1, 1]


def lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read_lines(kind: str, path: Path, *records: object) -> ImportedRecords:
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
        assert sums(read_lines("sglang-responses", path, form)) == (33, 231, 69, REACHED)
    both = read_lines("sglang-responses", path, META, {"meta_info": {"completion_tokens": 5}}, META)
    assert sums(both) == (66, 462, 138, [2 * times for times in REACHED])
    assert both.output_tokens == (100, 100) and [*both.skipped.values()] == [1]
    assert both.totals.output_tokens / both.totals.rounds == META["spec_accept_length"]


def test_nodes_of_a_tree_are_not_taken_for_depths(tmp_path: Path) -> None:
    tree = {
        **META,
        "spec_correct_drafts_histogram": [4, 5, 7, 7, 8, 2],
        "spec_num_correct_drafts": 5 + 14 + 21 + 32 + 10,
        "completion_tokens": 33 + 82,
    }
    imported = read_lines("sglang-responses", tmp_path / "a.jsonl", tree)
    assert imported.source is None and imported.sums == (33, 231, 82)
    assert imported.notes == ("231 drafts in 33 passes of at most 5 steps: these are nodes of trees",)
    with pytest.raises(InputError, match="do not give acceptance by position; run SGLang with --speculative-eagle-to"):
        as_counts(imported)
    with pytest.raises(InputError, match="70 drafts accepted, but 69 by its histogram"):
        read_lines("sglang-responses", tmp_path / "a.jsonl", {**META, "spec_num_correct_drafts": 70})
    with pytest.raises(InputError, match="counts 33 of 34 passes"):
        read_lines("sglang-responses", tmp_path / "a.jsonl", {**META, "spec_verify_ct": 34})
    adaptive = {**META, "spec_num_proposed_drafts": 150}
    (note,) = read_lines("sglang-responses", tmp_path / "a.jsonl", adaptive).notes
    assert re.search("differ in length .150 tokens in 33 drafts of up to 7.*not adaptively", note)


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
    assert "counts the nodes of a draft tree" in imported.notes[-1]  # its line of server_args, which tells, is missing
    text = call("specsim", "import", "sglang-log", log).out
    assert "2.17" in text and "sglang-responses" in text


def test_accept_lengths_with_and_without_the_bonus(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for extra in (0, 1):
        choices = [{"turns": ["..."], "accept_lengths": [extra + n for n in (0, 3, 1)]}, {"accept_lengths": [extra]}]
        imported = read_lines("accept-lengths", path, {"question_id": 1, "choices": choices}, {"no": 1})
        assert rounds_of(imported).accepted.tolist() == [0, 3, 1, 0]
        assert rounds_of(imported).drafted.tolist() == [3] * 4
        assert rounds_of(imported).sequence_id is not None and imported.skipped == {"lines without choices": 1}
        assert ("never 0" in imported.notes[0]) == bool(extra)
    with pytest.raises(InputError, match="every round of .* has length 1"):
        read_lines("accept-lengths", path, {"choices": [{"accept_lengths": [1, 1]}]})


@pytest.mark.parametrize("last", [1, 0])
def test_spec_bench_says_whether_lengths_include_the_bonus(tmp_path: Path, last: int) -> None:
    """A last round that the limit cut to nothing leaves the meaning of all others: 3 rounds accept 3, 0 and 0."""
    path = tmp_path / "a.jsonl"
    choice = {"decoding_steps": [3], "new_tokens": [5 + last], "accept_lengths": [4, 1, last]}
    imported = read_lines("accept-lengths", path, {"choices": [choice]})
    assert rounds_of(imported).accepted.tolist() == [3, 0, 0]
    assert imported.output_tokens == (5 + last,)
    without = {"decoding_steps": [2], "new_tokens": [7], "accept_lengths": [4, 1]}  # never 0, and without the bonus
    assert rounds_of(read_lines("accept-lengths", path, {"choices": [without]})).accepted.tolist() == [4, 1]


def test_what_is_written_is_what_other_commands_read(tmp_path: Path) -> None:
    path, out = lines(tmp_path / "a.jsonl", META), tmp_path / "counters.json"
    assert "acceptance fit" in call("specsim", "import", "sglang-responses", path, "--out", out).out
    assert read_counters(out).accepted.tolist() == REACHED
    answers, rounds = lines(tmp_path / "b.jsonl", {"choices": [{"accept_lengths": [1, 4, 2]}]}), tmp_path / "r.parquet"
    assert call("specsim", "import", "accept-lengths", answers, "--out", rounds).code == 0
    assert read_rounds(rounds).accepted.tolist() == [0, 3, 1] and read_source(rounds)


@pytest.mark.parametrize("kind", ["sglang-responses", "accept-lengths", "aiperf"])
def test_other_json_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    for text in ("", "7", "[1]", "{}", '{"a": 1}\n{"a": 2}\n', '{"a": 1}\n{"a": \n{"a": 3}\n', "[{}]"):
        (tmp_path / "a").write_text(text)
        with pytest.raises(InputError) as refused:
            read_format(kind, [tmp_path / "a"])
        assert "\n" not in str(refused.value)
