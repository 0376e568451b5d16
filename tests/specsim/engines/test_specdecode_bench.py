"""A file of SpecDecode-Bench's shape: the dense trace that follows by hand, and what it is worth on an H100."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specsim.policy.registry import find_policy
from specsim.replaying.checks import unsupported_reason
from specsim.trace.files import read_trace
from specsim.trace.trace import Trace
from tests.support.commands import call, json_of

# Two requests, the second of which has lengths from its second token on, as where the target emits the first alone.
FILE = """\
{"prompt_token_ids": [5, 6, 7], "generated_token_ids": [11, 12, 13, 14, 15, 16], "acc_eagle": {"acc_len": [3, 1, 4, 2, 1, 1]}, "dataset": "qa"}
{"prompt_token_ids": [8], "generated_token_ids": [21, 22, 23, 24], "acc_eagle": {"acc_len": [4, 2, 1]}, "dataset": "code"}
"""  # noqa: E501
# By hand: a length of n is n - 1 accepted tokens; at 22 three tokens are left, all of which are taken.
MATCH = [*[2, 0, 3, 1, 0, 0], *[0, 3, 1, 0]]
ACCEPTED = {0: [11, 12], 2: [13, 14, 15], 3: [14], 7: [22, 23, 24], 8: [23]}  # by row of the trace

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
    assert trace.token.tolist() == [11, 12, 13, 14, 15, 16, 21, 22, 23, 24]
    assert trace.match_len.tolist() == MATCH and trace.depth == 3
    assert trace.offsets.tolist() == [0, 6, 10] and trace.budget_tokens.tolist() == [6, 4]
    assert [one.tolist() for one in trace.prompts or []] == [[5, 6, 7], [8]]
    assert trace.domain.tolist() == ["qa", "code"] and trace.eos_token_ids == []
    for row, drafted in enumerate(trace.draft_token.tolist()):
        accepted = ACCEPTED.get(row, [])
        assert drafted[: len(accepted)] == accepted and len(accepted) == MATCH[row]
        assert len(accepted) == 3 or drafted[len(accepted)] != trace.token[row + len(accepted)]  # the rejected one
    # Of 10 rows 5, 3 and 2 accept a first, second and third token: what stands for confidence tells that, no more.
    assert trace.confidence[0] == pytest.approx([5 / 10, 3 / 5, 2 / 3], rel=1e-6)
    assert (trace.confidence == trace.confidence[0]).all()


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
