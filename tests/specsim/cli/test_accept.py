"""`--accept`: a recording replayed by the rule of an engine, from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

import specsim
from specsim.policy.chain.fixed_k import FixedK
from tests.support.commands import assert_refused, call, json_of

REPLAY = ("--policy", "fixed_k", "--set", "k=2", "--cost", "example:lab-deep-model", "--json")


def accepted_of(*options: str, trace: str = "example:lab-model-t1") -> int:
    document = json_of(call("specsim", "replay", trace, *REPLAY, *options))
    return int(document["accepted"])


def test_an_engine_stands_for_its_rule() -> None:
    trace, counts = specsim.read_trace("example:lab-model-t1"), {}
    for engine, rule in (("vllm", "greedy-draft"), ("transformers", "sampled-draft"), ("mlx", "equal-samples")):
        counts[engine] = accepted_of("--accept", engine)
        cost = specsim.read_cost("example:lab-deep-model")
        assert counts[engine] == specsim.replay(specsim.accepted_by(trace, rule), cost, FixedK(k=2)).accepted.sum()
        assert accepted_of("--accept", rule) == counts[engine]
    assert counts["mlx"] < counts["vllm"] < counts["transformers"]
    assert accepted_of() == counts["vllm"]  # as recorded


def test_rounds_as_an_engine_runs_them_are_accepted_as_it_does() -> None:
    assert accepted_of("--as", "transformers") > 1.3 * accepted_of("--as", "transformers", "--accept", "greedy-draft")
    shared = json_of(call("specsim", "replay", "example:lab-model", *REPLAY, "--as", "vllm"))
    assert shared["engine"]["shares_noise"] is True


@pytest.mark.parametrize(
    ("trace", "rule", "says"),
    [
        ("none", "vlm", "unknown rule of acceptance 'vlm'"),
        ("none", "vllm-block", "cannot be replayed: a draft is judged as a whole"),
        ("example:lab-model", "vllm", "needs ranks without noise, which this trace lacks; record it again"),
        ("example:lab-model", "transformers", "probabilities along the text, which this trace lacks; record it again"),
    ],
)
def test_a_rule_that_cannot_be_had_is_refused(trace: str, rule: str, says: str) -> None:
    assert_refused(call("specsim", "replay", trace, *REPLAY, "--accept", rule), says)


@pytest.mark.parametrize(
    ("trace", "policy", "option", "reads"),
    [
        ("example:lab-model-t1", "max_confidence", ("--accept", "sampled-draft"), "the drafter's confidence"),
        ("example:lab-model", "eagle2", ("--as", "vllm"), "the recorded trees"),
    ],
)
def test_what_an_option_takes_away_is_not_said_to_be_missing(
    trace: str, policy: str, option: tuple[str, str], reads: str
) -> None:
    command = ("specsim", "replay", trace, "--policy", policy, "--cost", "example:lab-deep-model", *option)
    assert_refused(call(*command), f"reads {reads}, which this trace holds under the rule")


def test_a_joined_trace_is_refused(tmp_path: Path) -> None:
    call("specsim", "join", "example:lab-lookup", "example:lab-model", "--out", tmp_path / "joined")
    refused = call(
        "specsim", "tune", tmp_path / "joined", *REPLAY[:2], "--cost", "example:lab-deep-model", "--accept", "mlx"
    )
    assert_refused(refused, "a joined trace is replayed as recorded; give one of its parts")


def test_the_table_of_rules_is_shown() -> None:
    shown = json_of(call("specsim", "explain", "accept", "--engine", "vllm", "--json"))["accept"]
    assert {row["name"]: row["rule"] for row in shown}["vllm-probabilistic"] == "sampled-draft"
    assert {row["name"].partition("-")[0] for row in shown} == {"vllm"}


def test_an_engine_that_pads_drafts_of_lookup_pays_for_them_in_full() -> None:
    """A round verifies K + 1 tokens whatever was found: as many tokens are accepted, each round costs more."""
    replay = ("replay", "example:lab-lookup", "--policy", "fixed_k", "--set", "k=7", "--cost", "example:lab-deep-model")
    plain, padded = (json_of(call("specsim", *replay, "--as", name, "--json")) for name in ("vllm", "openvino"))
    assert padded["tau"] == pytest.approx(plain["tau"], rel=0.1)
    assert padded["speedup"]["high"] < plain["speedup"]["low"]
