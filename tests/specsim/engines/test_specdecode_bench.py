"""A file of SpecDecode-Bench's shape: the dense trace that follows by hand, and what it is worth on an H100."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specsim.policy.registry import find_policy
from specsim.replaying.checks import unsupported_reason
from specsim.trace.files import read_trace, write_trace
from specsim.trace.trace import Trace
from tests.support.commands import assert_refused, call, json_of

# The shape of the four published files, with their faults: the text is of another run than EAGLE's lengths, so that it
# may have any number of tokens more or less, while those of the n-gram drafter always fit it; lists of EAGLE often end
# with a 2, of which one token lies beyond them.
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

# Twelve tokens behind a prompt of 113, so that all contexts, 112 to 123, are priced at 120, the middle of a column.
LENGTHS, PROMPT, PRICED_AT, DEPTH = [3, 2, 1, 1, 5, 4, 3, 2, 1, 2, 1, 1], 113, 120, 4
TARGET = {"fixed_s": 5.88590713e-3, "token_s": 2.10103129e-5, "cached_token_s": 3.92645679e-8}  # arXiv:2601.11580
DRAFTER = {"fixed_s": 2.13526175e-3, "token_s": 8.41429603e-7, "cached_token_s": 2.37768493e-9}
STEP_S = 1.20683946e-3


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
    found = json_of(call("specsim", "import", "specdecode-bench", path, "--json"))
    assert (found["requests"], found["output_tokens"], found["skipped"]) == (3, 12, {})
    assert "2 of 3 requests have lengths for another number of tokens than their text (-3 to +2)" in str(found["notes"])
    assert "of the drafters acc_eagle, acc_ngram, acc_eagle is read" in found["notes"]


def test_requests_that_cannot_be_read_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "bench.jsonl"
    path.write_text(FILE + DAMAGED)
    found = json_of(call("specsim", "import", "specdecode-bench", path, "--json"))
    assert (found["requests"], found["output_tokens"]) == (3, 12)
    assert found["skipped"] == {
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
    told = "reads how sure the drafter is, of which this trace says nothing"
    assert unsupported_reason(trace, find_policy("max_confidence")) == told
    assert unsupported_reason(trace, find_policy("fixed_k")) is None


def pass_s(costs: dict[str, float], batch: int, new: int, cached: int) -> float:
    """Of a batch that has so many new and cached tokens a sequence."""
    return costs["fixed_s"] + batch * (costs["token_s"] * new + costs["cached_token_s"] * cached)


def rounds_of(k: int) -> list[tuple[int, int]]:
    """(drafted, accepted): no more is drafted than leaves room for the target's own token."""
    found, t = [], 0
    while t < len(LENGTHS):
        drafted = min(k, len(LENGTHS) - t - 1)
        found.append((drafted, min(LENGTHS[t] - 1, drafted)))
        t += found[-1][1] + 1
    return found


def seconds_of(k: int, batch: int) -> float:
    """Of all rounds: drafts one after another, one token more to catch up on behind a whole draft, a pass, a step."""
    total_s, behind = 0.0, False
    for drafted, accepted in rounds_of(k):
        total_s += sum(pass_s(DRAFTER, batch, 1, PRICED_AT + place) for place in range(drafted))
        total_s += batch * DRAFTER["token_s"] * (behind and drafted > 0)
        total_s += pass_s(TARGET, batch, drafted + 1, PRICED_AT) + STEP_S
        behind = drafted > 0 and accepted == drafted
    return total_s


def test_the_published_constants_rank_it_at_three_batches(tmp_path: Path) -> None:
    """Speedups by hand at batch 1, 8 and 64; drafts of four tokens are two, none, four, one and none of them good."""
    assert rounds_of(4) == [(4, 2), (4, 0), (4, 4), (2, 1), (0, 0)]
    rng = np.random.default_rng(0)
    records = [
        {
            "prompt_token_ids": rng.integers(1, 99, PROMPT).tolist(),
            "generated_token_ids": rng.integers(1, 99, len(LENGTHS)).tolist(),
            "acc_eagle": {"acc_len": LENGTHS},
        }
        for _ in range(4)
    ]
    imported("".join(json.dumps(one) + "\n" for one in records), tmp_path)
    asked = ("leaderboard", tmp_path / "trace", "--cost", "vllm-llama3.1-8b-eagle-h100", "--policy", "fixed_k")
    speedups = []
    for batch in (1, 8, 64):
        found = json_of(call("specsim", *asked, "--batch", batch, "--no-sensitivity", "--trials", 8, "--json"))
        rows: dict[str, Any] = {row["label"]: row for row in found["boards"][0]["rows"]}
        alone_s = len(LENGTHS) * (pass_s(TARGET, batch, 1, PRICED_AT) + STEP_S)
        fixed, tuned = rows["fixed_k, K = 4"], rows["fixed_k, tuned"]
        assert fixed["sequence_seconds"] == pytest.approx([seconds_of(4, batch)] * 2, rel=1e-9)
        assert fixed["speedup"]["estimate"] == pytest.approx(alone_s / seconds_of(4, batch), rel=1e-9)
        best = min(range(1, DEPTH + 1), key=lambda k: seconds_of(k, batch))
        assert tuned["params"]["k"] == best
        assert tuned["speedup"]["estimate"] == pytest.approx(alone_s / seconds_of(best, batch), rel=1e-9)
        speedups.append(tuned["speedup"]["estimate"])
    assert speedups[0] > speedups[1] > speedups[2]
