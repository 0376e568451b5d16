"""Temperatures of confidence: found again where they are known, by hand and by their definition."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specsim.acceptance.generate import generate
from specsim.acceptance.iid import IID
from specsim.acceptance.sources import longest_starts
from specsim.engines.confidence_temperatures import Drafts, confidence_temperatures, fit, survival
from specsim.io.errors import InputError
from specsim.trace.files import write_trace
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace
from tests.support.commands import assert_refused, call, json_of

TRUE = np.array([2.0, 0.7, 1.3])  # temperatures of three places


def sigmoid(logit: Any) -> Any:
    return 1 / (1 + np.exp(-logit))


def trace_of(sequences: int = 40, output_tokens: int = 400, seed: int = 0) -> Trace:
    """Confidence says of every token how likely it is, but for these temperatures."""
    rng = np.random.default_rng(seed)
    plain = generate(IID(0.5), sequences=sequences, output_tokens=output_tokens, depth=len(TRUE))
    plain.meta["synthetic"]["informed"] = True
    logit = rng.normal(0.8, 1.5, plain.confidence.shape)
    hit = rng.random(logit.shape) < sigmoid(logit / TRUE)
    match = np.cumprod(hit, axis=1).sum(axis=1)
    left = np.repeat(plain.output_tokens, plain.output_tokens) - plain.position
    return dataclasses.replace(
        plain, match_len=np.minimum(match, left).astype(np.uint8), confidence=sigmoid(logit).astype(np.float32)
    )


@pytest.fixture(scope="module")
def trace() -> Trace:
    return trace_of()


def test_known_temperatures_are_found(trace: Trace) -> None:
    """Within 4 standard errors: 1 over the root of the sum of z^2 p (1 - p) over verified tokens is that of 1/T."""
    fitted = confidence_temperatures(trace, len(TRUE))
    rows = longest_starts(trace)
    assert fitted.rounds == len(rows) > 5000
    logit = np.log(trace.confidence[rows] / (1 - trace.confidence[rows].astype(float)))
    for place, (temperature, true) in enumerate(zip(fitted.temperatures, TRUE, strict=True)):
        seen = logit[trace.match_len[rows] >= place, place]
        prob = sigmoid(seen / true)
        error = 1 / np.sqrt((seen**2 * prob * (1 - prob)).sum())
        assert abs(1 / temperature - 1 / true) < 4 * error < 0.2 / true
    assert (fitted.ece_after < fitted.ece_before).all() and fitted.ece_before[0] > 0.05 > fitted.ece_after.max()


def test_a_confidence_that_is_right_is_left_alone() -> None:
    """Temperature 1, and no error to mend."""
    drafts = Drafts(np.array([[np.log(3.0)], [-np.log(3.0)]] * 4), np.ones((8, 1), bool), np.zeros((8, 1), bool))
    drafts.accepted[[0, 2, 4, 1]] = True  # 3 of 4 where confidence is 3/4, 1 of 4 where it is 1/4
    assert fit(drafts) == pytest.approx([1.0], abs=1e-5)


def test_temperatures_by_hand() -> None:
    """Of tokens with confidence 0.9, 3 of 4 are accepted, with 0.1, 1 of 4: ln 9 / T = ln 3, so that T = 2.

    The second place is verified behind the accepted ones alone: there confidence 0.8 comes with 16 of 17, odds of
    4 to the square, and T = 1/2.
    """
    first = np.array([True, True, True, False] * 17)
    rows = len(first)
    logit = np.stack([np.full(rows, np.log(9.0)), np.full(rows, np.log(4.0))], axis=1)
    second = first & (np.cumsum(first) % 17 != 0)
    drafts = Drafts(logit, np.ones((rows, 2), dtype=bool), np.stack([first, second], axis=1))
    low = Drafts(-logit[:, :1], drafts.drafted[:, :1], ~drafts.accepted[:, :1])
    assert fit(drafts) == pytest.approx([2.0, 0.5], rel=1e-4)
    assert fit(low) == pytest.approx([2.0], rel=1e-4)
    assert survival(drafts, np.array([2.0, 0.5]))[0] == pytest.approx([3 / 4, 3 / 4 * 16 / 17])


def test_bounds_hold_where_the_likelihood_has_no_maximum() -> None:
    """All accepted: the colder the better. Half accepted whatever the confidence: the warmer."""
    logit, all_of = np.full((10, 1), 1.0), np.ones((10, 1), dtype=bool)
    assert fit(Drafts(logit, all_of, all_of)) == pytest.approx([0.1], rel=1e-3)
    half = np.arange(10)[:, None] % 2 == 0
    assert fit(Drafts(logit, all_of, half)) == pytest.approx([10.0], rel=1e-3)


def test_calibration_errors_are_of_sequences_that_were_not_fitted_to(trace: Trace) -> None:
    """By definition: in 15 bins, what the first tokens' product says against how often they were accepted."""
    fitted = confidence_temperatures(trace, 2)
    shallow = trace.shallower(2)
    rows = longest_starts(shallow)
    sequence = np.searchsorted(trace.offsets, rows, side="right") - 1
    halves = split_sequences(trace)
    likely = np.clip(shallow.confidence[rows].astype(float), 1e-6, 1 - 1e-6)
    predicted = np.empty((len(rows), 2))
    for half, other in (halves, halves[::-1]):
        cold = confidence_temperatures_of_all(shallow.select(other))
        held = np.isin(sequence, half)
        predicted[held] = np.cumprod(sigmoid(np.log(likely[held] / (1 - likely[held])) / cold), axis=1)
    for place in (0, 1):
        has = shallow.draft_limit[rows] > place
        prob, hit = predicted[has, place], shallow.match_len[rows][has] > place
        bins = np.minimum((prob * 15).astype(int), 14)
        gaps = [abs(prob[bins == number].sum() - hit[bins == number].sum()) for number in np.unique(bins)]
        assert fitted.ece_after[place] == pytest.approx(sum(gaps) / has.sum(), rel=1e-6)


def confidence_temperatures_of_all(trace: Trace) -> Any:
    return confidence_temperatures(trace, trace.depth).temperatures


def test_what_cannot_be_fitted_is_refused(trace: Trace) -> None:
    with pytest.raises(InputError, match="recorded to depth 3"):
        confidence_temperatures(trace, 4)
    alike = dataclasses.replace(trace, confidence=np.full_like(trace.confidence, 0.7))
    for blind in (generate(IID(0.5), sequences=4, output_tokens=50, depth=3), alike):
        with pytest.raises(InputError, match="has no drafter confidence"):
            confidence_temperatures(blind, 3)
    with pytest.raises(InputError, match="1 sequences cannot be split"):
        confidence_temperatures(trace.select([0]), 2)
    never = dataclasses.replace(trace, match_len=np.minimum(trace.match_len, 1))
    with pytest.raises(InputError, match="accepted up to its token 3, .* give --k 2 or a longer trace"):
        confidence_temperatures(never, 3)


def test_the_command_writes_the_engines_file(trace: Trace, tmp_path: Path) -> None:
    folder, out = tmp_path / "trace", tmp_path / "sts.json"
    write_trace(trace, folder)
    shown = call("specsim", "export", "sglang", "--k", 3, "--confidence", folder, "--out", out)
    assert f"--speculative-dspark-confidence-sts-path {out} (also pass --speculative-algorithm DSPARK" in shown.out
    fitted, written = confidence_temperatures(trace, 3), json.loads(out.read_text())
    assert set(written) == {"temperatures", "dataset", "num_samples", "ece_before", "ece_after"}
    assert written["temperatures"] == pytest.approx(fitted.temperatures, abs=1e-6) and written["dataset"] == str(folder)
    assert written["num_samples"] == fitted.rounds and len(written["ece_before"]) == len(written["ece_after"]) == 3
    asked = ("specsim", "export", "tensorrt-llm", "--k", 2, "--confidence", folder, "--json")
    shorter = json_of(call(*asked))
    assert (
        "confidence_sts_path: sts.json}" in shorter["flags"] and len(json.loads(shorter["file"])["temperatures"]) == 2
    )
    assert_refused(call("specsim", "export", "vllm", "--k", 2, "--confidence", folder), "vllm reads no such file")
    assert_refused(call("specsim", "export", "sglang", "--schedule", "1:2", "--confidence", folder), "--k of 1 or more")
    assert_refused(
        call("specsim", "export", "sglang", "--k", 2, "--confidence", folder, "--cost", "x"), "one at a time"
    )
