"""Served times per token: against a server simulated step by step, and engines' overheads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specsim.cost.batches import BatchTokens, PaddedCost
from specsim.cost.calibrate import data_sheet_document
from specsim.cost.files import read_cost
from specsim.cost.roofline.cost import Overheads, RooflineCost
from specsim.cost.roofline.document import engine_preset, in_engine
from specsim.cost.roofline.published import Runs, Spread, error_note, expected_error, published_errors
from specsim.cost.roofline.serving import prompts_s, tpot_s
from specsim.engines.advise import advise
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


def test_a_cost_says_how_far_published_runs_of_its_kind_were_off() -> None:
    cost = roofline("sglang")
    note = cost.notes(3, (500, 500))[0]
    error = published_errors("speedup", cost.kind())
    assert error is not None and f"{error.runs} published runs (dense, eagle, batch 1" in note
    assert cost.error_band is not None and cost.error_known
    low, high = cost.error_band
    assert 0.5 < low < 1 < high < 2 and error.median_percent < error.p90_percent
    assert roofline().error_band is None and roofline().notes(3, (500, 500)) == ["roofline, not calibrated"]
    medusa = roofline("vllm", "medusa:3")
    assert medusa.error_band is None and not medusa.error_known
    assert medusa.notes(3, (500, 500))[0].startswith(
        "no published run like this one (dense, medusa, batch 1): the plain"
    )
    for batch in (1, 64):  # no such speedup is published, but speedups with each word of the kind are
        unpublished = read_cost(data_sheet_document("h200", "qwen3-30b-a3b", "eagle3", engine="sglang"), batch=batch)
        assert unpublished.error_band is not None and unpublished.notes(3, (500, 500))[0].endswith(" others")
    assert "of a single published run (" in error_note("speedup", ("dense", "consumer GPU", "eagle", "batch 1"))
    assert "1 system)" in error_note("speedup", ("dense", "block", "batch 1"))
    assert error_note("TPOT", ("dense", "CPU", "batch 1")).startswith("no published run like this one")


@pytest.mark.parametrize(
    ("gpu", "target", "drafter", "weights", "words"),
    [
        ("rtx-5090", "qwen3.6-27b", "mtp", "q4_k_m", ("dense", "hybrid", "integer weights", "consumer GPU", "mtp")),
        ("h100", "qwen3-8b", "block:5", None, ("dense", "block")),
        ("h200", "kimi-k2", "eagle3", "int4", ("experts", "integer weights", "eagle")),
        ("epyc-9655", "llama-3.1-8b", "eagle", "q8_0", ("dense", "integer weights", "CPU", "eagle")),
    ],
)
def test_a_run_is_of_a_kind(gpu: str, target: str, drafter: str, weights: str | None, words: tuple[str, ...]) -> None:
    dtype = "float32" if gpu == "epyc-9655" else "bfloat16"
    document = data_sheet_document(gpu, target, drafter, weights, 8 if gpu == "h200" else 1, dtype=dtype)
    cost = read_cost(document)
    assert isinstance(cost, RooflineCost) and cost.kind() == (*words, "batch 1")


def test_a_band_is_students_interval_over_systems() -> None:
    """Four systems at 0.1, 0.3, 0.3 and 0.5, without shrinkage to 0: 0.3 +- t(3) sqrt(0.2 ** 2 (1 + 1 / 4))."""
    means = (0.1, 0.3, 0.3, 0.5)
    runs = [Runs("speedup", f"{n}", ("dense",), 10**6, mean, 0.0) for n, mean in enumerate(means)]
    error = expected_error(runs, ("dense",), Spread(100.0, 0.2, 1e-6))
    assert error is not None and error.mean == pytest.approx(0.3, abs=1e-4)
    assert error.reach == pytest.approx(2.3534 * 0.2 * 1.25**0.5, rel=1e-4)
    assert error.band == pytest.approx((np.exp(0.3 - error.reach), np.exp(0.3 + error.reach)), rel=1e-3)
    far = expected_error(runs, ("dense",), Spread(100.0, 0.02, 1e-6))
    assert far is not None and far.band[0] == 1.0  # a band is widened to include the prediction
    mirrored = expected_error([row._replace(mean=-row.mean) for row in runs], ("dense",), Spread(100.0, 0.02, 1e-6))
    assert mirrored is not None and mirrored.band == pytest.approx((1 / far.band[1], 1.0))
    drawn = expected_error(
        runs, ("dense",), Spread(0.1, 0.2, 1e-6)
    )  # shrunk: variance 2 x 0.1^2 of two words, 0.2^2 / 4 of the mean of four systems
    assert drawn is not None and drawn.mean == pytest.approx(0.3 * 0.02 / (0.02 + 0.01), rel=1e-3)
    assert expected_error(runs, ("experts",), Spread(0.1, 0.2, 0.1)) is None
    assert expected_error(runs[:1], ("dense",), Spread(0.1, 0.2, 0.1)) is None


def test_the_band_of_a_published_run_holds_it() -> None:
    """SGLang, Llama-3.3-70B with EAGLE-3 on H200s at batch 8, 2.32 tokens a round: the measured speedup is 1.849."""
    document = data_sheet_document("h200", "llama-3.3-70b", "eagle3", tensor_parallel=4, engine="sglang")
    advice = advise({"drafted": [10**4] * 3, "accepted": [6400, 4200, 2579]}, read_cost(document, batch=8), context=500)
    speedup = advice.lengths[3].speedup
    assert speedup.low < 1.849 < speedup.high and float(speedup) == pytest.approx(1.849, rel=0.06)


def test_verification_passes_of_a_hybrid_model_take_the_published_time() -> None:
    """eagle-harness 0.1.3 on an MI355X: SGLang, Qwen3.8-27B, bfloat16. Passes of 8 and 32 tokens at batch 32, in ms."""
    cost = read_cost(data_sheet_document("mi355x", "qwen3.8-27b", "mtp", engine="sglang"), batch=32)
    assert isinstance(cost, RooflineCost)
    for tokens, measured_ms in ((8, 29.1), (32, 76.1)):
        pass_s = float(cost.target.seconds(tokens, 500, 32)) + 32 * cost.overheads.sequence_s
        assert 1e3 * pass_s == pytest.approx(measured_ms, rel=0.12)


def test_drafts_that_are_made_at_once_start_a_draft_step_once() -> None:
    """vLLM's fit of 2026: 0.36 ms a round, and 0.23 ms for the only draft step."""
    for drafter in ("medusa:3", "prompt-lookup", "block:2"):
        bare, cost = roofline(drafter=drafter), roofline("vllm", drafter)
        at_once = replace(cost, overheads=Overheads())
        assert float(cost.draft(3, 500)) == pytest.approx(float(at_once.draft(3, 500)))
        assert cost.round_overhead() == pytest.approx(0.59e-3)
        assert bare.round_overhead() == 0


def test_padding_of_a_decode_step_is_not_charged_as_verification() -> None:
    """A CUDA graph pads the tokens of 3 sequences to 4; only passes over drafts take `verified_sequence_s`."""
    cost = replace(roofline("vllm"), batch=3)
    free = replace(cost, overheads=replace(cost.overheads, verified_sequence_s=0.0))
    for tokens, verified in ((1, 0), (4, 3)):
        with_s, without_s = (
            float(PaddedCost(each, "graphs").batch_verify(BatchTokens.alike(3, tokens, 500))) for each in (cost, free)
        )
        assert with_s - without_s == pytest.approx(verified * cost.overheads.verified_sequence_s, abs=1e-12)


def test_passes_that_read_prompts_are_not_padded_to_captured_sequences() -> None:
    """SGLang captures graphs for 8 and 10 sequences: 9 that verify 4 tokens are padded, 9 prompts of 100 are not."""
    cost = replace(roofline("sglang"), batch=9)
    padded = PaddedCost(cost, "sequences")
    drafts, prompts, captured = (BatchTokens.alike(n, new, 500) for n, new in ((9, 4), (9, 100), (10, 4)))
    assert float(padded.batch_verify(prompts)) == float(cost.batch_verify(prompts))
    assert float(cost.batch_verify(drafts)) < float(padded.batch_verify(drafts)) < float(cost.batch_verify(captured))


def test_an_engine_is_priced_by_its_release() -> None:
    """A draft step took 1.25 ms in SGLang of early 2025, its pass included, and a few tenths of a ms in late 2025."""
    early, late, undated = (roofline(engine) for engine in ("sglang@2025-03", "sglang@2025-09", "sglang"))
    assert late.overheads == undated.overheads and early.engine == late.engine == "sglang"
    assert early.round_seconds(3, 500) > 1.2 * late.round_seconds(3, 500)
    assert early.tree_round_overhead() > early.round_overhead() and roofline().tree_round_overhead() == 0


def test_engines_wait_for_a_share_of_other_prompts() -> None:
    vllm, sglang = (replace(roofline(engine), batch=16) for engine in ("vllm", "sglang"))
    both = [prompts_s(cost, 4096, 64) for cost in (vllm, sglang)]
    assert vllm.prompt_share == 1 and both[1] / both[0] == pytest.approx(sglang.prompt_share) and both[1] < both[0]


def test_all_reduces_over_pcie_take_longer_than_over_nvlink() -> None:
    """Four RTX PRO 6000 over PCIe: an all-reduce takes 10 to 20 us longer than over NVLink."""
    pcie, nvlink = (
        read_cost(data_sheet_document(gpu, "llama-3.1-8b", "eagle3", None, 4, "vllm"))
        for gpu in ("rtx-pro-6000", "h100")
    )
    for cost, low, high in ((pcie, 10e-6, 25e-6), (nvlink, 0, 10e-6)):
        assert isinstance(cost, RooflineCost) and low < cost.target.derating.all_reduce_s < high


def test_more_gpus_than_fast_links_join_are_named() -> None:
    for gpu, notes in (("h200", 3), ("gb200", 2)):  # the published error, the correction by it, and the links
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
    assert_refused(call(*COMMAND, *GPU[:4]), "--gpu, --target and --drafter go together; add --drafter")
    assert_refused(call(*COMMAND), "give costs once")
    assert_refused(call(*COMMAND, *GPU, "--engine", "nano-vllm"), "unknown engine 'nano-vllm' for costs on a GPU")
    named = ("vllm-llama3.1-8b-eagle-h100", "--isl", 8, "--osl", 8)
    assert_refused(call(*COMMAND, *named), "isl and osl need costs of shapes and hardware")
    assert set(engine_preset().engines) == {"vllm", "sglang", "tensorrt-llm"}
