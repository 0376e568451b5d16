"""Served times per token: against a server simulated step by step, and engines' overheads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specsim.cost.batches import BatchTokens
from specsim.cost.calibrate import data_sheet_document
from specsim.cost.files import read_cost
from specsim.cost.roofline.cost import Overheads, RooflineCost
from specsim.cost.roofline.document import engine_preset, in_engine
from specsim.cost.roofline.published import error_note, published_errors
from specsim.cost.roofline.serving import tpot_s
from tests.support.checks import refusal
from tests.support.commands import assert_refused, call, json_of

GPU = ("--gpu", "h100", "--target", "llama-3.1-8b", "--drafter", "eagle3")
COMMAND = ("specsim", "cost", "show")


def roofline(engine: str | None = None, drafter: str = "eagle3") -> RooflineCost:
    cost = read_cost(data_sheet_document("h100", "llama-3.1-8b", drafter, engine=engine))
    assert isinstance(cost, RooflineCost)
    return cost


def simulated_tpot_s(cost: RooflineCost, isl: int, osl: int, users: int, requests: int = 40) -> float:
    """Keep requests running at equal distances, and add up the seconds of the steps in which each of them decodes.

    A step decodes a token of every running request, and reads the prompt of one that has just begun.
    """
    passes = cost.target
    left = np.round(np.linspace(osl, 1, users)).astype(int)  # tokens that each still has to decode
    spent, seconds, counts = np.zeros(users), [], 0
    while counts < requests * users:
        ended = np.flatnonzero(left == 0)
        reading = ended[:1]  # one prompt a step
        running = np.flatnonzero(left > 0)
        context = isl + osl - left[running]
        tokens = BatchTokens.of(np.ones(len(running), dtype=np.int64), context)
        step_s = float(passes.batch_seconds(tokens)) + len(running) * cost.overheads.sequence_s + cost.step_s
        if len(reading):
            both = BatchTokens(
                tokens.sequences + 1, tokens.new + isl, tokens.cached, tokens.pairs + isl * (isl + 1) / 2
            )
            layers = (passes.total(passes.layers(passes.model, some)) for some in (both, tokens))
            step_s += float(np.subtract(*layers))
        spent[running] += step_s
        left[running] -= 1
        for user in running[left[running] == 0].tolist():
            seconds.append(spent[user] / osl)
            counts += 1
        spent[reading], left[reading] = 0.0, osl
    return float(np.mean(seconds[users:]))


@pytest.mark.parametrize(("isl", "osl", "users"), [(512, 128, 4), (2048, 64, 16), (128, 256, 32)])
def test_a_served_token_takes_what_a_server_takes_step_by_step(isl: int, osl: int, users: int) -> None:
    cost = in_engine(roofline(), "vllm")
    assert tpot_s(cost, isl, osl, users) == pytest.approx(simulated_tpot_s(cost, isl, osl, users), rel=0.005)


def test_a_prompt_of_others_weighs_as_much_with_speculation_as_without() -> None:
    """Of a served token, the part of prompts is what a single user's lacks; a round is shared by its output tokens."""
    cost = roofline()
    alone, context = replace(cost, batch=1), 1024 + 256
    round_s = float(alone.draft(3, context) + alone.verify(4, context) + alone.round_overhead())
    assert tpot_s(cost, 1024, 512, 1, k=3, acceptance=2.5) == pytest.approx(round_s / 2.5)
    plain, drafting = (tpot_s(cost, 4096, 64, 8, **more) for more in ({}, {"k": 3, "acceptance": 2.5}))
    at = replace(cost, batch=8)
    round_s = float(at.draft(3, 4128) + at.verify(4, 4128) + at.round_overhead()) / 2.5
    prompts_s = plain - float(at.autoregressive_step(4128))
    assert drafting - round_s == pytest.approx(prompts_s, rel=0.1)  # beside drafts, products leave less time to reading
    refusal(lambda: tpot_s(cost, 0, 64, 8), "isl=0, osl=64; give at least 1 each")
    refusal(lambda: tpot_s(cost, 8, 64, 8, k=3), "k=3: give the mean acceptance length as well")


def test_an_engine_adds_its_overheads_to_steps_and_rounds() -> None:
    bare = roofline()
    shared = Overheads(step_s=1e-3, sequence_s=1e-4, verified_sequence_s=2e-4, round_s=5e-4, draft_step_s=3e-4)
    cost = replace(bare, overheads=shared, batch=8)
    bare = replace(bare, batch=8)
    step_s = float(cost.autoregressive_step(500) - bare.autoregressive_step(500))
    assert step_s == pytest.approx(1e-3 + 8 * 1e-4)
    assert float(cost.verify(4, 500) - bare.verify(4, 500)) == pytest.approx(8 * (1e-4 + 2e-4))
    assert cost.round_overhead() == pytest.approx(1e-3 + 5e-4)
    assert float(cost.draft(3, 500) - bare.draft(3, 500)) == pytest.approx(3 * 3e-4)


def test_a_cost_says_how_far_published_runs_of_its_class_were_off() -> None:
    cost = roofline("sglang")
    (note,) = cost.notes(3, (500, 500))
    error = next(e for e in published_errors() if (e.what, e.experts, e.batch) == ("speedup", False, "1"))
    assert f"{error.runs} published runs" in note and cost.error_band == (error.low, error.high)
    assert 0.5 < error.low < 1 < error.high < 2 and error.median_percent < error.p90_percent
    experts = read_cost(data_sheet_document("h200", "qwen3-30b-a3b", "eagle3", engine="sglang"), batch=8)
    assert experts.notes(3, (500, 500))[0].endswith("do not rely on it")
    assert roofline().error_band is None and roofline().notes(3, (500, 500)) == ["roofline, not calibrated"]
    for drafter, weights in (("llama-3.2-1b", None), ("eagle3", "int4")):
        other = read_cost(data_sheet_document("h100", "llama-3.1-8b", drafter, weights, engine="vllm"))
        assert other.error_band is None and other.notes(3, (500, 500))[0].startswith("error unknown")
    assert error_note("TPOT", experts=False, batch=1).startswith("error unknown")


def test_drafts_that_are_made_at_once_start_a_draft_step_once() -> None:
    for drafter in ("medusa:3", "prompt-lookup", "block:2"):
        bare, cost = roofline(drafter=drafter), roofline("vllm", drafter)
        at_once = replace(cost, overheads=Overheads())
        assert float(cost.draft(3, 500)) == pytest.approx(float(at_once.draft(3, 500)))
        assert cost.round_overhead() == pytest.approx(
            engine_preset().overheads.round_s + engine_preset().overheads.draft_step_s
        )
        assert bare.round_overhead() == 0


def test_more_gpus_than_fast_links_join_are_named() -> None:
    for gpu, notes in (("h200", 2), ("gb200", 1)):
        wide = read_cost(data_sheet_document(gpu, "llama-3.1-405b", "eagle3", "float8", 16, "vllm"))
        assert len(wide.notes(3, (500, 500))) == notes
        assert any("fast links join 8" in note for note in wide.notes(3, (500, 500))) == (gpu == "h200")


def test_costs_are_shown_of_a_gpu_and_a_server() -> None:
    shown = json_of(call(*COMMAND, *GPU, "--engine", "vllm", "--batch", 16, "--isl", 1024, "--osl", 256, "--json"))
    cost = replace(roofline("vllm"), batch=16)
    assert shown["tpot_s"] == pytest.approx(tpot_s(cost, 1024, 256, 16))
    assert shown["rows"][0]["autoregressive_s"] == pytest.approx(float(cost.autoregressive_step(128)))
    text = call(*COMMAND, *GPU, "--batch", 16, "--isl", 1024, "--osl", 256).out
    assert "TPOT with 16 concurrent requests, without speculation" in text
    assert_refused(call(*COMMAND, *GPU, "--isl", 1024), "--isl and --osl go together")
    assert_refused(call(*COMMAND, *GPU[:4]), "--gpu, --target and --drafter go together")
    assert_refused(call(*COMMAND), "give costs once")
    assert_refused(call(*COMMAND, *GPU, "--engine", "nano-vllm"), "unknown engine 'nano-vllm' for costs on a GPU")
    named = ("vllm-llama3.1-8b-eagle-h100", "--isl", 8, "--osl", 8)
    assert_refused(call(*COMMAND, *named), "isl and osl need costs of shapes and hardware")
    assert set(engine_preset().engines) == {"vllm", "sglang", "tensorrt-llm"}
