"""A file of SpecDecode-Bench's shape: the dense trace that follows by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from specsim.policy.registry import find_policy
from specsim.replaying.checks import unsupported_reason
from specsim.trace.files import read_trace, write_trace
from specsim.trace.trace import Trace
from tests.support.commands import assert_refused, call, json_of

# The shape of the four published files, with their faults: the text is of another run than EAGLE's lengths, so that it
# may have any number of tokens more or less, while those of the n-gram drafter always fit it; lists of EAGLE often end
# with a 2, whose second token lies beyond them.
FILE = """\
{"id": "151", "prompt_token_ids": [5, 6, 7], "generated_token_ids": [11, 12, 13, 14], "acc_eagle": {"acc_len": [1, 1, 4, 2, 1, 2]}, "acc_ngram": {"acc_len": [1, 21, 1, 1]}}
{"id": "103", "prompt_token_ids": [8], "generated_token_ids": [21, 22, 23, 24, 25, 26, 27], "acc_eagle": {"acc_len": [1, 3, 2, 2]}, "acc_ngram": {"acc_len": [1, 1, 1, 1, 1, 1, 1]}}
{"id": "7", "prompt_token_ids": [8, 9], "generated_token_ids": [31, 32], "acc_eagle": {"acc_len": [1, 1]}, "acc_ngram": {"acc_len": [1, 1]}}
"""  # noqa: E501
# By hand: a length of n is n - 1 accepted tokens, but no more than the list still holds.
MATCH = [*[0, 0, 3, 1, 0, 1], *[0, 2, 1, 1], *[0, 0]]
DAMAGED = """{"id": "1", "prompt_token_ids": [5], "generated_token_ids": [1, 2]}
{"id": "2", "prompt_token_ids": [5], "generated_token_ids": [1, 2], "acc_eagle": {}}
{"id": "3", "prompt_token_ids": [5], "generated_token_ids": [1, 2], "acc_eagle": {"acc_len": []}}
{"id": "4", "prompt_token_ids": [5], "generated_token_ids": [1, 2], "acc_eagle": {"acc_len": [1, -7615]}}
{"id": "5", "prompt_token_ids": [5], "generated_token_ids": [1, 2], "acc_eagle": {"acc_len": [1, 300]}}
{"id": "6", "prompt_token_ids": [5], "generated_token_ids": [1, 2], "acc_eagle": {"acc_len": [1, null]}}
{"id": "7", "generated_token_ids": [1, 2], "acc_eagle": {"acc_len": [1, 1]}}
"""


def imported(text: str, folder: Path) -> Trace:
    path, out = folder / "bench.jsonl", folder / "trace"
    path.write_text(text)
    json_of(call("specsim", "import", "specdecode-bench", path, "--out", out, "--json"))
    trace = read_trace(out)
    assert isinstance(trace, Trace)
    return trace


def test_every_column_is_as_by_hand(tmp_path: Path) -> None:
    trace = imported(FILE, tmp_path)
    assert trace.match_len.tolist() == MATCH and trace.depth == 3
    assert trace.offsets.tolist() == [0, 6, 10, 12] and trace.budget_tokens.tolist() == [6, 4, 2]
    assert trace.prompt_tokens.tolist() == [3, 1, 2] and trace.domain.tolist() == ["bench"] * 3  # the file's name
    assert trace.eos_token_ids == [] and trace.prompts is None and not trace.has_text
    for row, drafted in enumerate(trace.draft_token.tolist()):  # what stands for tokens matches as far as MATCH says
        ahead = trace.token[row : row + MATCH[row]].tolist()
        assert drafted[: len(ahead)] == ahead
        assert len(ahead) == 3 or drafted[len(ahead)] != trace.token[0]
    # Of 12 rows 6, 2 and 1 accept a first, second and third token: what stands for confidence tells that, no more.
    assert trace.confidence[0] == pytest.approx([6 / 12, 2 / 6, 1 / 2], rel=1e-6)
    assert (trace.confidence == trace.confidence[0]).all()


def test_lengths_of_another_run_than_the_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    path.write_text(FILE)
    read = json_of(call("specsim", "import", "specdecode-bench", path, "--json"))
    assert (read["requests"], read["output_tokens"], read["skipped"]) == (3, 12, {})
    assert "2 of 3 requests have lengths for another number of tokens than their text (-3 to +2)" in str(read["notes"])
    assert "of the drafters acc_eagle, acc_ngram, acc_eagle is read" in read["notes"]


def test_requests_that_cannot_be_read_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    path.write_text(FILE + DAMAGED)
    document = json_of(call("specsim", "import", "specdecode-bench", path, "--json"))
    assert (document["requests"], document["output_tokens"]) == (3, 12)
    assert document["skipped"] == {
        "requests without acc_eagle.acc_len": 3,
        "requests with lengths that are not whole numbers from 1 to 256": 3,
        "requests without prompt_token_ids": 1,
    }
    path.write_text(DAMAGED)
    assert_refused(call("specsim", "import", "specdecode-bench", path), "no acceptance lengths can be read (3 requests")


def test_several_files_are_told_apart_by_their_names(tmp_path: Path) -> None:
    paths = [tmp_path / "gsm8k.jsonl", tmp_path / "cnn.jsonl"]
    for path in paths:
        path.write_text(FILE)
    out = tmp_path / "trace"
    json_of(call("specsim", "import", "specdecode-bench", *paths, "--out", out, "--json"))
    assert read_trace(out).domain.tolist() == ["gsm8k"] * 3 + ["cnn"] * 3


def test_a_trace_without_text_is_not_joined(tmp_path: Path) -> None:
    trace = imported(FILE, tmp_path)
    write_trace(trace, tmp_path / "other")
    refused = call("specsim", "join", tmp_path / "trace", tmp_path / "other", "--out", tmp_path / "joined")
    assert_refused(refused, "holds match lengths without the text that they belong to")


def test_policies_that_ask_how_sure_the_drafter_is_are_left_off_its_boards(tmp_path: Path) -> None:
    trace = imported(FILE, tmp_path)
    reason = "reads the drafter's confidence, which this trace lacks"
    assert unsupported_reason(trace, find_policy("max_confidence")) == reason
    assert unsupported_reason(trace, find_policy("fixed_k")) is None
