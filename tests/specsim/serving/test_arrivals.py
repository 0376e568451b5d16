"""Requests: drawn, and read from public traces' formats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID
from specsim.serving.arrivals import recorded_requests, requests_of_trace
from tests.support.checks import refusal

TRACE = generate(IID(0.5), sequences=3, output_tokens=[4, 5, 6], depth=2, prompt_tokens=7)
# As the public files begin; the times of arrival, in seconds from the first, are 0, 1.25 and 3.
FORMATS = {
    "azure 2023.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:47.9305900,396,109\n2023-11-16 18:15:49.6805900,879,55\n",
    "azure 2024.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,374,44\n"
    "2024-05-10 00:00:01.259930+00:00,396,109\n2024-05-10 00:00:03.009930+00:00,879,55\n",
    "burstgpt.csv": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,374,44,418,Conversation log\n6.25,GPT-4,396,109,505,API log\n7,ChatGPT,9,0,9,API log\n"
    "8,ChatGPT,879,55,934,Conversation log\n",
    "mooncake.jsonl": '{"timestamp": 27482, "input_length": 374, "output_length": 44, "hash_ids": [46, 47]}\n'
    '{"timestamp": 28732, "input_length": 396, "output_length": 109, "hash_ids": [46]}\n'
    '{"timestamp": 30482, "input_length": 879, "output_length": 55, "hash_ids": []}\n',
    "bailian.jsonl": '{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.0, "input_length": 374, '
    '"output_length": 44, "type": "text", "turn": 1, "hash_ids": [1089]}\n\n'
    '{"chat_id": 160, "timestamp": 62.25, "input_length": 396, "output_length": 109}\n'
    '{"chat_id": 161, "timestamp": 64, "input_length": 879, "output_length": 55}\n',
}


@pytest.mark.parametrize("name", FORMATS)
def test_public_traces_are_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(FORMATS[name])
    requests = recorded_requests(path, TRACE)
    assert requests.arrival_s == pytest.approx([0, 1.25, 3], abs=1e-9)
    assert requests.prompt_tokens.tolist() == [374, 396, 879] and requests.output_tokens.tolist() == [44, 109, 55]
    assert requests.left_out == (1 if "burst" in name else 0)
    assert sorted(requests.sequence.tolist()) == [0, 1, 2]
    assert len(recorded_requests(path, TRACE, limit=2)) == 2


def test_requests_are_taken_in_the_order_of_their_times(tmp_path: Path) -> None:
    path = tmp_path / "shuffled.csv"
    path.write_text("Timestamp,Request tokens,Response tokens\n9,1,1\n4,2,2\n4,3,3\n")
    requests = recorded_requests(path, TRACE)
    assert requests.arrival_s.tolist() == [0, 0, 5] and requests.prompt_tokens.tolist() == [2, 3, 1]


BAD = {
    "other columns": ("a.csv", "time,tokens\n1,2\n", "columns time, tokens"),
    "no number": ("a.csv", "Timestamp,Request tokens,Response tokens\n1,2,3\n2,many,3\n", "request 2 has no valid pro"),
    "negative": ("a.csv", "Timestamp,Request tokens,Response tokens\n1,2,-3\n", "no valid output"),
    "half a token": ("a.csv", "Timestamp,Request tokens,Response tokens\n1,2,0.5\n", "no valid output (0.5)"),
    "beyond numbers": ("a.csv", f"Timestamp,Request tokens,Response tokens\n1,{'9' * 400},3\n", "no valid prompt"),
    "a number as date": ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n17,2,3\n", "TIMESTAMP is no date"),
    "no date": ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nsoon,2,3\n", "TIMESTAMP is no date"),
    "no time": ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n,2,3\n", "no valid time"),
    "no rows": ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
    "more cells": ("a.csv", "Timestamp,Request tokens,Response tokens\n1,2,3,4\n", "more cells than its first line"),
    "more cells below": ("a.csv", "Timestamp,Request tokens,Response tokens\n1,2,3\n1,2,3,4\n", "not a CSV file"),
    "empty": ("a.csv", "", "not a CSV file"),
    "failed alone": ("a.csv", "Timestamp,Request tokens,Response tokens\n1,2,0\n", "no request with output"),
    "no JSON": ("a.jsonl", "{}\n", "line 1", "required field `timestamp`"),
    "a word": ("a.jsonl", '{"timestamp": 1, "input_length": "x", "output_length": 1}', "input_length"),
    "no lines": ("a.jsonl", "\n", "no request"),
    "too long": ("a.jsonl", '{"timestamp": 1, "input_length": 9999999999, "output_length": 1}', "no valid prompt"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused(tmp_path: Path, case: str) -> None:
    name, text, *message = BAD[case]
    path = tmp_path / name
    path.write_text(text)
    refusal(lambda: recorded_requests(path, TRACE), name, *message)


def test_a_missing_file_is_refused_with_what_there_could_be(tmp_path: Path) -> None:
    refusal(lambda: recorded_requests(tmp_path / "no.csv", TRACE), "does not exist", "poisson:RATE", "Azure")
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00\x01")
    refusal(lambda: recorded_requests(tmp_path / "bytes.csv", TRACE), "bytes.csv")


def test_drawn_arrivals_are_poisson() -> None:
    requests = requests_of_trace(TRACE, 6000, rate=8.0, seed=5)
    gaps_s = np.diff(requests.arrival_s)
    assert gaps_s.mean() == pytest.approx(1 / 8, rel=0.05) and gaps_s.std() == pytest.approx(1 / 8, rel=0.05)
    assert np.bincount(requests.sequence).tolist() == [2000] * 3
    assert set(requests.output_tokens.tolist()) == {4, 5, 6} and set(requests.prompt_tokens.tolist()) == {7}
    assert requests_of_trace(TRACE, 5).arrival_s.tolist() == [0] * 5
    refusal(lambda: requests_of_trace(TRACE, 5, rate=0.0), "positive rate")
    refusal(lambda: requests_of_trace(TRACE, 0), "0 requests")
