"""Consumer machines: data sheets against bus widths and clocks, Metal and llama.cpp against published times."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specsim.cost.calibrate import data_sheet_document
from specsim.cost.files import read_cost
from specsim.cost.roofline.cost import RooflineCost
from specsim.cost.roofline.hardware import Hardware, find_hardware, known_hardware
from specsim.engines.advise import advise
from tests.support.checks import refusal
from tests.support.commands import call, json_of

# Width of the memory bus in bits, Gb/s per pin, multiprocessors, 16-bit FLOPs per multiprocessor and cycle, GHz; as the
# vendors' descriptions of the chips print them. 0: not printed.
BUILT = {
    "gb10": (256, 8.533, 48, 1024, 2.55), "gh200": (6144, 5.2, 132, 4096, 1.83), "l4": (192, 12.5, 60, 1024, 2.04),
    "gh200-144gb": (6144, 6.4, 132, 4096, 1.83), "v100": (4096, 1.752, 80, 1024, 1.53),
    "mi325x": (8192, 6.0, 304, 2048, 2.1), "arc-pro-b60": (192, 19.0, 20, 2048, 2.4),
    "arc-pro-b70": (256, 19.0, 32, 2048, 2.8), "a100": (5120, 3.186, 108, 2048, 1.41),
    "a800": (5120, 3.186, 108, 2048, 1.41), "a100-40gb": (5120, 2.43, 108, 2048, 1.41),
    "a6000": (384, 16.0, 84, 1024, 1.8), "h100": (5120, 5.23, 132, 4096, 1.83), "h200": (6144, 6.25, 132, 4096, 1.83),
    "h100-pcie": (5120, 3.186, 114, 4096, 1.62), "l40s": (384, 18.0, 142, 1024, 2.49),
    "rtx-4090": (384, 21.0, 128, 512, 2.52), "rtx-3090": (384, 19.5, 82, 512, 1.695),
    "rtx-5090": (512, 28.0, 170, 512, 2.407), "rtx-pro-6000": (512, 28.0, 188, 1024, 2.617),
    "h20": (6144, 5.2, 0, 0, 0), "mi300x": (8192, 5.2, 304, 2048, 2.1), "mi355x": (8192, 8.0, 256, 4096, 2.4),
    "b200": (8192, 8.0, 0, 0, 0), "gb200": (8192, 8.0, 0, 0, 0), "gb300": (8192, 8.0, 0, 0, 0),
    "m4-max": (512, 8.533, 40, 256, 1.8), "m3-ultra": (1024, 6.4, 80, 256, 1.38),
    "strix-halo": (256, 8.0, 40, 512, 2.9), "epyc-9655": (768, 6.4, 96, 64, 2.6),
    "epyc-9655-core": (64, 6.4, 1, 64, 2.6), "a100-pcie": (5120, 3.024, 108, 2048, 1.41),
    "a100-pcie-40gb": (5120, 2.43, 108, 2048, 1.41), "h100-nvl": (6016, 5.238, 0, 0, 0),
    "t4": (256, 10, 40, 1024, 1.59), "h200-nvl": (6144, 6.25, 0, 0, 0), "a10": (384, 12.5, 72, 1024, 1.695),
    "a10g": (384, 12.5, 80, 512, 1.71), "l40": (384, 18, 142, 512, 2.49), "rtx-6000-ada": (384, 20, 142, 1024, 2.505),
    "rtx-pro-6000-server": (512, 25, 188, 1024, 2.43),
}  # fmt: skip
# GB of memory, links to other devices, and GB/s of a link in one direction: NVLink 2 and 3 (25, bridges 14.0625), 4
# (25) and 5 (50), Infinity Fabric, or PCIe of 16 lanes.
JOINED = {
    "a100": (80, 12, 25), "a800": (80, 8, 25), "a100-40gb": (40, 12, 25), "a6000": (48, 4, 14.0625),
    "h100": (80, 18, 25), "h200": (141, 18, 25), "h100-pcie": (80, 12, 25), "h20": (96, 18, 25), "l4": (24, 16, 2),
    "l40s": (48, 16, 2), "gh200": (96, 18, 25), "gh200-144gb": (144, 18, 25), "v100": (32, 6, 25),
    "b200": (180, 18, 50), "b300": (288, 18, 50), "gb200": (186, 18, 50), "gb300": (288, 18, 50),
    "rtx-4090": (24, 16, 2), "rtx-3090": (24, 4, 14.0625), "rtx-5090": (32, 16, 4), "rtx-pro-6000": (96, 16, 4),
    "mi300x": (192, 7, 64), "mi325x": (256, 7, 64), "mi355x": (288, 7, 76.8), "arc-pro-b60": (24, 16, 2),
    "arc-pro-b70": (32, 16, 4), "a100-pcie": (80, 12, 25), "a100-pcie-40gb": (40, 12, 25), "h100-nvl": (94, 12, 25),
    "h200-nvl": (141, 18, 25), "a10": (24, 16, 2), "a10g": (24, 16, 2), "t4": (16, 16, 1), "l40": (48, 16, 2),
    "rtx-6000-ada": (48, 16, 2), "rtx-pro-6000-server": (96, 16, 4),
}  # fmt: skip
# GPUs of a system, and the PFLOPS in 8 bits with sparsity, twice the dense ones, that NVIDIA prints for all of it.
SYSTEMS = {"b200": (8, 72), "b300": (8, 72), "gb200": (72, 720), "gb300": (72, 720)}
# Published for llama.cpp with MTP on an M3 Ultra (Q6_K): K, output tokens per round, speedup.
METAL = ((2, 2.596, 1.0614), (3, 3.157, 0.9079), (4, 3.604, 0.7939))


def cost_of(gpu: str, target: str, drafter: str = "mtp", weights: str | None = None, **other: Any) -> RooflineCost:
    cost = read_cost(data_sheet_document(gpu, target, drafter, weights, **other))
    assert isinstance(cost, RooflineCost)
    return cost


@pytest.mark.parametrize("name", BUILT)
def test_a_data_sheet_follows_from_bus_width_and_clocks(name: str) -> None:
    bits, rate, processors, flops, clock = BUILT[name]
    found = find_hardware(name)
    assert found.memory_bytes_s == pytest.approx(1e9 * bits * rate / 8, rel=0.025)
    if processors:
        widest = found.flops.get("float16", found.flops["float32"])
        assert widest == pytest.approx(1e9 * processors * flops * clock, rel=0.04)


@pytest.mark.parametrize("name", JOINED)
def test_memory_and_links_are_those_of_the_product(name: str) -> None:
    memory, links, each = JOINED[name]
    assert find_hardware(name).memory_bytes == 1e9 * memory
    assert find_hardware(name).link_bytes_s == pytest.approx(1e9 * links * each, rel=1e-9)


def test_flops_of_eight_bits_are_twice_those_of_sixteen() -> None:
    for name in known_hardware():
        flops = find_hardware(name).flops
        if "bfloat16" in flops:
            assert flops["bfloat16"] == flops["float16"]
        if "float8" in flops:
            assert flops["float8"] == pytest.approx(2 * flops["bfloat16"], rel=0.015)
        if name in SYSTEMS:
            count, petaflops = SYSTEMS[name]
            assert flops["float8"] == pytest.approx(1e15 * petaflops / 2 / count)


@pytest.mark.parametrize("name", ["h100-nvl", "h200-nvl"])
def test_an_nvl_card_has_the_chip_of_the_sxm_at_lower_clocks(name: str) -> None:
    """132 multiprocessors x 256 FLOPs of float32 a cycle x 1.785 GHz of product brief PB-11773; matrix units throttle
    further, to 0.845 of the SXM module's 1,979 TFLOPS, as NVIDIA's product pages print both."""
    card, module = find_hardware(name), find_hardware("h100")
    assert card.flops["float32"] == pytest.approx(132 * 256 * 1.785e9, rel=0.01)
    assert card.flops["float8"] / module.flops["float8"] == pytest.approx(3341 / 3958, rel=0.001)


def test_a_910c_is_two_910b() -> None:
    whole, half = (find_hardware(name) for name in ("ascend-910c", "ascend-910b"))
    for part in ("memory_bytes_s", "memory_bytes"):
        assert getattr(whole, part) == 2 * getattr(half, part)
    assert whole.flops["bfloat16"] == 2 * half.flops["bfloat16"]


@pytest.mark.parametrize("weights", ["int8", "q6_k", "q4_k_m"])
@pytest.mark.parametrize("engine", [None, "llamacpp"])
def test_predicted_speedups_on_an_m3_ultra_are_as_low_as_published(weights: str, engine: str | None) -> None:
    counters = {"drafted": [1000] * 4, "accepted": [870, 726, 561, 447]}
    cost = cost_of("m3-ultra", "qwen3.6-27b", weights=weights, engine=engine)
    assert max(float(length.speedup) for length in advise(counters, cost, context=400).lengths) < 1.2
    assert any("8 rows takes about 6.5 decode steps" in note for note in cost.notes(4, (400, 400)))
    step_s = cost.round_seconds(0, 400)
    for k, tokens, measured in METAL:
        assert tokens * step_s / cost.round_seconds(k, 400) == pytest.approx(measured, rel=0.12)


def test_metal_reads_packed_weights_again_for_every_row_but_not_16_bit_weights() -> None:
    """llama-batched-bench on an M4: 8 rows take 6.54 times as long as one with Qwen3.8-27B in 3 bits, 1.60
    times with a 0.6B model in bfloat16."""
    for weights, measured in (("q3_k_m", 6.54), (None, 1.60)):
        passes = cost_of("m3-ultra", "qwen3.6-27b", weights=weights).target
        assert float(passes.seconds(8, 128) / passes.seconds(1, 128)) == pytest.approx(measured, rel=0.12)


@pytest.mark.parametrize(
    ("gpu", "target", "weights", "steps", "most"),
    [
        # llama.cpp#15802: passes of 1 to 8 rows of Llama-3.1-8B.
        ("rtx-3090", "llama-3.1-8b", "q4_0", {n: n * 156.56 / speed for n, speed in enumerate(
            (279.89, 390.96, 470.48, 509.70, 541.57, 559.30, 583.77), start=2)}, 0.11),
        # qwen38-mtp: rounds of K = 1 to 4 (keys -1 to -4) in decode steps: output tokens per round / speedup.
        ("v100", "qwen3.6-27b", "q4_k_m", {-1: 1.358, -2: 1.753, -3: 2.182, -4: 2.536}, 0.12),
        ("rtx-5090", "qwen3.6-27b", "q4_k_xl", {-1: 1.221, -2: 1.336, -3: 1.522, -4: 1.656}, 0.12),
    ],
    ids=["passes", "V100", "RTX 5090"],
)  # fmt: skip
def test_llama_cpps_passes_and_rounds_take_as_many_steps_as_published(
    gpu: str, target: str, weights: str, steps: dict[int, float], most: float
) -> None:
    cost = cost_of(gpu, target, "mtp", weights, engine="llamacpp")
    step_s = cost.round_seconds(0, 400)
    for size, measured in steps.items():
        seconds = float(cost.target.seconds(size, 400)) if size > 0 else cost.round_seconds(-size, 400)
        assert seconds / step_s == pytest.approx(measured, rel=most)
    assert any("llama.cpp's overheads" in note for note in cost.notes(4, (400, 400)))


def test_speedups_in_llama_cpp_outside_the_fit_are_predicted() -> None:
    """qwen38-mtp's README, Qwen3.8-27B: GPU, format, K, draft acceptance rate, speedup."""
    errors = []
    for gpu, weights, k, rate, measured in (
        ("rtx-3090", "q4_k_xl", 2, 0.78, 1.8132), ("rtx-3090", "q2_k_xl", 2, 0.76, 1.6336),
        ("rtx-3090", "q4_k_m", 2, 0.78, 1.3323), ("rtx-3090", "q4_k_m", 4, 0.65, 1.6552),
        ("rtx-4090", "q4_k_m", 2, 0.56, 1.5996),
    ):  # fmt: skip
        cost = cost_of(gpu, "qwen3.6-27b", "mtp", weights, engine="llamacpp")
        speedup = (1 + k * rate) * cost.round_seconds(0, 400) / cost.round_seconds(k, 400)
        errors.append(abs(speedup / measured - 1))
    assert np.median(errors) < 0.05


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp", "tensorrt-llm", "transformers"])
@pytest.mark.parametrize("gpu", ["rtx-3090", "epyc-9655", "v100", "m3-ultra"])
def test_every_engine_of_the_help_is_priced_on_every_kind_of_machine(engine: str, gpu: str) -> None:
    command = ("specsim", "cost", "show", "--gpu", gpu, "--target", "qwen3-8b", "--drafter", "qwen3-0.6b")
    shown = json_of(call(*command, "--engine", engine, "--weights", "Q4_K_M", "--json"))
    assert shown["rows"][0]["verify_s"]["8"] > shown["rows"][0]["autoregressive_s"] > 0


def test_a_cache_is_priced_by_its_format_and_emulation_is_named() -> None:
    """A cached token of Llama-3.1-8B takes 128 KiB in 16 bits: 32 layers x 8 heads x 128 x 2 x 2 bytes."""
    for cache, bits in ((None, 16), ("fp8", 8), ("q8_0", 8.5), ("q4_0", 4.5)):
        cost = cost_of("a100", "llama-3.1-8b", "eagle3", cache=cache)
        assert float(cost.target.kv_bytes(1)) == 131072 * bits / 16
        emulated = any("has no float8: the cache is unpacked" in note for note in cost.notes(1, (1, 1)))
        assert emulated == (cache == "fp8")
    assert not any("unpacked" in note for note in cost_of("h100", "llama-3.1-8b", cache="fp8").notes(1, (1, 1)))
    refusal(lambda: cost_of("a100", "llama-3.1-8b", cache="q9"), "unknown weight format 'q9'")


def test_the_output_head_of_a_gguf_file_is_quantized_too() -> None:
    """Llama-3.1-8B in Q4_K_M is a file of 4.92 GB, whose embeddings are packed as well."""
    weights = cost_of("rtx-3090", "llama-3.1-8b", weights="q4_k_m").target.weight_bytes
    assert weights - 128256 * 4096 * 2 + 128256 * 4096 * 4.8944 / 8 == pytest.approx(4.92e9, rel=0.01)


def test_shares_of_reread_out_of_range_are_refused() -> None:
    sheet = {"memory_bytes_s": 1e11, "flops": {"float16": 1e13}, "reread": [0.1, 2]}
    refusal(lambda: Hardware.from_json(sheet), "reread=[0.1, 2.0]; give two shares of 0 to 1")
    assert sum(any(device.reread) for device in known_hardware().values()) == 2
