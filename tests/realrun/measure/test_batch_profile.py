"""Probes of batches: what they run, and the profile that is made of their samples."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from realrun.drafters.lookup import LookupKind
from realrun.lm.batched_llama import BatchedLlama
from realrun.measure.batches import BatchProber, batch_profile_document, noise_floor, profile_batches
from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID
from specsim.cost.batch_profile import BatchProfileCost
from specsim.cost.batches import BatchTokens
from specsim.cost.files import read_cost
from specsim.trace.files import write_trace
from tests.support.checks import refusal
from tests.support.commands import assert_refused, call, json_of
from tests.support.tiny import tiny_pair

CONTEXTS, LENGTHS = [10, 30], [1, 3]


class Fed(BatchedLlama):
    """Notes what every pass is fed, and behind how many cached tokens."""

    def __init__(self, model: Any):
        super().__init__(model)
        self.passes: list[tuple[list[int], list[int]]] = []

    def forward(self, tokens: Any) -> Any:
        self.passes.append(([len(row) for row in tokens], self.lengths.tolist()))
        return super().forward(tokens)


def prober(sweeps: int = 4, **changes: Any) -> BatchProber:
    pair, rng = tiny_pair(), np.random.default_rng(0)
    asked: dict[str, Any] = {"contexts": CONTEXTS, "lengths": LENGTHS, **changes}
    return BatchProber(Fed(pair.target), Fed(pair.drafter.model), 3, **asked, sweeps=sweeps, end=50.0, rng=rng)


def test_every_length_is_probed_at_every_context_and_evenly_over_the_run() -> None:
    batch_prober = prober()
    target, drafter = batch_prober.decoding.target, batch_prober.decoding.drafter
    assert isinstance(target, Fed) and isinstance(drafter, Fed)
    positions = []
    while not batch_prober.done:
        positions.append(batch_prober.position)
        batch_prober.advance()
    assert positions == pytest.approx(np.arange(24) * 50 / 24) and batch_prober.position == 50
    for name in ("verify 1", "verify 2", "verify 4"):
        assert sorted(context for context, _ in batch_prober.samples[name]) == 4 * [10] + 4 * [30]
    counts = {name: len(points) for name, points in batch_prober.samples.items()}
    assert (counts["step"], counts["round"], counts["draft 1"], counts["draft 2"]) == (8, 16, 8, 8)
    assert counts["draft 0"] + counts["behind"] == 16
    assert all(seconds > 0 for points in batch_prober.samples.values() for _, seconds in points)
    # All sequences stay, whatever was accepted, and begin at the context.
    assert {tuple(lengths) for _, lengths in target.passes} == {(10,) * 3, (30,) * 3}
    assert sorted({tuple(fed) for fed, _ in target.passes}) == [(1,) * 3, (2,) * 3, (4,) * 3]
    first = [(fed[0], lengths[0]) for fed, lengths in drafter.passes]
    assert first.count((2, 9)) + first.count((2, 29)) == counts["behind"]  # it lacks one token more


def linear_samples(batch: int) -> dict[str, list[tuple[int, float]]]:
    """Costs linear in the context and the batch, as probes would find them without noise."""
    rng = np.random.default_rng(batch)
    samples: dict[str, list[tuple[int, float]]] = {}
    for name, base in (("verify 1", 10), ("verify 2", 12), ("verify 4", 16), ("draft 0", 3), ("draft 1", 2),
                       ("draft 2", 2), ("behind", 3.5), ("step", 0.1), ("round", 0.3)):  # fmt: skip
        slope = 0.0 if name in ("step", "round") else 1.0
        contexts = rng.choice(CONTEXTS, 40).tolist()
        samples[name] = [(c, 1e-3 * (base + slope * (batch + 0.01 * c))) for c in contexts]
    return samples


def test_a_profile_of_samples_is_what_they_say(tmp_path: Path) -> None:
    document = batch_profile_document({8: linear_samples(8), 1: linear_samples(1)}, CONTEXTS, LENGTHS)
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document))
    cost = read_cost(path)
    assert isinstance(cost, BatchProfileCost)
    assert (cost.step_s, cost.round_s) == pytest.approx((1e-4, 2e-4), rel=1e-6)
    four = BatchTokens.alike(4, 3, 20)  # between two and four tokens, two contexts, and two batches
    assert float(cost.batch_verify(four)) == pytest.approx(1e-3 * (14 + 4 + 0.2), rel=1e-3)
    steps = cost.batch_draft(np.arange(3), BatchTokens.alike(8, 1, 10 + np.arange(3)))
    assert steps == pytest.approx(1e-3 * np.array([11.1, 10.1, 10.1]), rel=1e-3)
    assert float(cost.batch_draft(0, BatchTokens.alike(1, 2, 30))) == pytest.approx(1e-3 * (3.5 + 1.3), rel=1e-3)


def test_a_negative_difference_is_no_time() -> None:
    samples = linear_samples(1)
    samples["behind"] = [(c, s / 2) for c, s in samples["draft 0"]]
    samples["round"] = [(c, s / 10) for c, s in samples["step"]]
    document = batch_profile_document({1: samples}, CONTEXTS, LENGTHS)
    assert document["catch_up_s"] == [[0.0, 0.0]] and document["round_s"] == 0.0


def test_a_pair_is_profiled_at_several_batches(tmp_path: Path) -> None:
    done: list[tuple[int, int]] = []
    document = profile_batches(
        tiny_pair(), batches=[1, 3], contexts=CONTEXTS, depth=2, repeats=2, progress=lambda *at: done.append(at)
    )
    assert (document["batches"], document["contexts"], document["tokens"]) == ([1, 3], CONTEXTS, [1, 2, 3])
    assert (document["target"], document["drafter"]) == ("tiny/target", "tiny/draft")
    assert 0 < document["noise_floor"] < 10
    assert done == [*((2 * n, 24) for n in range(1, 13))]  # 2 batches x 2 repeats x 2 contexts x K of 0, 1 and 2
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(document))
    trace = generate(IID(0.8), sequences=6, output_tokens=12, depth=2, prompt_tokens=14)
    priced = json_of(call("specsim", "cost", "show", path, "--batch", "3", "--tokens", "1,3", "--json"))
    assert [row["context"] for row in priced["rows"]] == CONTEXTS
    write_trace(trace, tmp_path / "trace")
    args = ("serve", "schedule", tmp_path / "trace", "--cost", path, "--batch", "1,2,3", "--json")
    assert len(json_of(call("specsim", *args))["cells"]) == 3
    assert_refused(call("specsim", *args[:-2], "1,8"), "batch profile covers batches 1 to 3, asked for 4 to 8")


def test_batches_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that none is measured on a machine of its own; turns are of two rounds."""
    went: list[int] = []

    class Noted(BatchProber):
        def advance(self) -> None:
            went.append(len(self.texts))
            super().advance()

    monkeypatch.setattr("realrun.measure.batches.BatchProber", Noted)
    profile_batches(tiny_pair(), batches=[1, 2, 3], contexts=CONTEXTS, depth=1, repeats=3)
    in_turns = np.array(went).reshape(-1, 3, 2)  # everyone's turn comes before anyone's next one
    assert (in_turns[:, :, 0] == in_turns[:, :, 1]).all()
    assert (np.sort(in_turns[:, :, 0]) == [1, 2, 3]).all()


def test_the_noise_floor_by_hand() -> None:
    """Every other sample of a cell against those between; other cells are not mixed in, nor are those of one sample."""
    verify = [(10, 1.0), (30, 5.0), (10, 1.2), (10, 1.1), (30, 5.0), (10, 1.4), (10, 9.0)]  # 1.1 and 1.3, at 10
    samples = {1: {"verify 1": verify, "draft 0": [(10, 1.0), (10, 3.0)]}, 2: {"verify 1": [(10, 7.0)]}}
    assert noise_floor(samples) == pytest.approx(0.2 / 1.2)  # of 0.2 / 1.2, 0 and 2 / 2
    samples[1]["step"] = [(10, 1.0), (10, 100.0)]
    assert noise_floor(samples) == pytest.approx(0.2 / 1.2)
    assert noise_floor({1: {"verify 1": [(10, 7.0)]}}) is None


def test_what_cannot_be_probed_is_refused() -> None:
    refusal(lambda: prober(contexts=[0, 10]), "at least 1")
    refusal(lambda: prober(lengths=[0]), "at least 1")
    other = replace(tiny_pair(), drafter=LookupKind())
    asked: dict[str, Any] = {"batches": [1, 2], "contexts": CONTEXTS, "depth": 2, "repeats": 2}
    refusal(lambda: profile_batches(tiny_pair(), **{**asked, "batches": [2, 4]}), "begin with 1")
    refusal(lambda: profile_batches(tiny_pair(), **{**asked, "contexts": [30, 10]}), "increasing")
    refusal(lambda: profile_batches(tiny_pair(), **{**asked, "contexts": [10, 400]}), "160 positions")
    refusal(lambda: profile_batches(other, **asked), "not with lookup", "draft model")


def test_the_command_takes_contexts_and_depth_from_a_trace(tmp_path: Path) -> None:
    pair, out = tiny_pair(), tmp_path / "batches.json"
    for name, model in (("target", pair.target), ("draft", pair.drafter.model)):
        model.save_pretrained(tmp_path / name)
        pair.tokenizer.save_pretrained(tmp_path / name)
    models = (
        "--target",
        tmp_path / "target",
        "--draft-model",
        tmp_path / "draft",
        "--dtype",
        "float64",
        "--threads",
        0,
    )
    write_trace(generate(IID(0.8), sequences=2, output_tokens=12, depth=2, prompt_tokens=14), tmp_path / "trace")
    settings = ("--batches", "1,2", "--repeats", 2, "--for", tmp_path / "trace")
    document = json_of(call("realrun", "batch-profile", out, *models, *settings, "--json"))
    assert document["tokens"] == [1, 2, 3] and document["contexts"][0] == 13 and document["contexts"][-1] == 24
    assert json.loads(out.read_text()) == document
    assert_refused(call("realrun", "batch-profile", out, *models, *settings), "--overwrite")
    shown = call("realrun", "batch-profile", out, *models, *settings, "--overwrite")
    assert shown.code == 0 and "first draft step" in shown.out and "pass of 3" in shown.out
    refused = call("realrun", "batch-profile", out, *models, *settings, "--contexts", "8", "--overwrite")
    assert_refused(refused, "--for already decides --contexts")
