"""Costs by NVIDIA's measured operators: against the package's own figures, and what adapts them to verification."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specsim.cost.batches import BatchTokens
from specsim.cost.files import read_cost
from specsim.cost.roofline.architecture import find_architecture
from specsim.cost.roofline.hardware import find_hardware
from specsim.cost.silicon import cost as cost_module
from specsim.cost.silicon.cost import SiliconCost
from specsim.cost.silicon.passes import CONTEXTS, SiliconPasses
from specsim.cost.silicon.tables import SYSTEMS, tables
from specsim.io.errors import InputError
from tests.support.checks import refusal
from tests.support.commands import assert_refused, call, json_of

GIVEN = {
    "kind": "specsim-cost", "version": 1, "form": "silicon", "source": "aiconfigurator-core 0.12.0", "date": "2026-11",
    "target": "llama-3.1-8b", "drafter": "llama-3.2-1b", "hardware": "h200",
}  # fmt: skip


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "silicon.json"
    path.write_text(json.dumps({**GIVEN, **changes}))
    return path


def test_one_line_says_that_the_package_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)  # an import of it fails
    tables.cache_clear()
    try:
        assert_refused(call("specsim", "cost", "show", written(tmp_path)), "not installed", ".[silicon]", "roofline")
    finally:
        tables.cache_clear()


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-next-80b-a3b"])
def test_attention_that_the_tables_are_not_read_for_is_refused(name: str) -> None:
    refusal(lambda: SiliconPasses(find_architecture(name), "h200"), f"silicon: attention of {name}", "form roofline")


class TestMeasured:
    """Of version 0.12.0; left out where the package is missing."""

    @pytest.fixture(autouse=True)
    def package(self) -> None:
        pytest.importorskip("aiconfigurator_core", reason="the extra [silicon] is not installed")

    def passes(self, model: str = "llama-3.1-8b", hardware: str = "h200", **other: Any) -> SiliconPasses:
        return SiliconPasses(find_architecture(model), hardware, **other)

    def cost(self, tmp_path: Path, **changes: Any) -> SiliconCost:
        cost = read_cost(written(tmp_path, **changes))
        assert isinstance(cost, SiliconCost)
        return cost

    @pytest.mark.parametrize("model", ["meta-llama/Meta-Llama-3.1-8B", "Qwen/Qwen3-8B"])
    @pytest.mark.parametrize(("batch", "context"), [(1, 1024), (8, 5000)])
    def test_a_step_is_the_packages_own(self, model: str, batch: int, context: int) -> None:
        """Its end-to-end figure, of its own list of operations; asked for within 10 %."""
        from aiconfigurator_core.sdk.engine import EngineHandle

        modes = {f"{kind}_quant_mode": "bfloat16" for kind in ("gemm", "kvcache", "fmha")}
        whole = EngineHandle.compile(model, "h200_sxm", "vllm", **modes).decode_step_latency(batch, context, 2)
        own = model.partition("/")[2].removeprefix("Meta-").lower()
        assert float(self.passes(own).seconds(1, context, batch)) == pytest.approx(1e-3 * whole, rel=0.005)

    def test_verification_of_8_tokens_takes_hardly_more_than_one_of_64_more(self, tmp_path: Path) -> None:
        cost = self.cost(tmp_path)
        single, eight, many = (float(cost.verify(n, 1024)) for n in (1, 8, 64))
        assert single == cost.autoregressive_step(1024)
        assert eight < 1.05 * single < many

    def test_a_matrix_takes_what_was_measured(self) -> None:
        """4096 x 4096 in bfloat16 on an H100: about 15 us from 1 token to 64."""
        h100 = tables("h100", "vllm")
        wire = h100.wire([h100.operations.GEMM("matrix", 1, 4096, 4096, h100.mode("GEMM", "bfloat16"))])
        microseconds = [1e6 * h100.seconds(wire, rows=rows) for rows in (1, 2, 4, 8, 16, 32, 64)]
        assert microseconds == pytest.approx([15.0] * 7, abs=1.6)

    def test_a_layer_of_experts_takes_what_was_measured(self) -> None:
        """Qwen3-30B-A3B on an H100, balanced, at 1, 2, 4, ... 32 tokens, as it was printed of the package's tables."""
        layer = self.passes("qwen3-30b-a3b", "h100")
        (experts,) = (operation for operation in layer.matrix_operations(ends=False) if operation._name == "experts")
        wire = layer.tables.wire([experts])
        microseconds = [1e6 * layer.tables.seconds(wire, rows=n) / 48 for n in (1, 2, 4, 8, 16, 32)]
        assert [round(value) for value in microseconds] == [49, 75, 124, 228, 420, 422]

    def test_attention_is_bracketed_by_one_query_and_so_many_sequences(self, tmp_path: Path) -> None:
        once, separate = (self.cost(tmp_path, attention=way) for way in ("once", "separate"))
        single, eight = (once.target.attention_s(n, np.array(4000.0)) for n in (1, 8))
        assert eight > single
        assert once.verify(8, 4000) - once.target.seconds(8, 0) == pytest.approx(
            float(single - once.target.attention_s(1, np.array(0.0)))
        )
        assert float(separate.verify(8, 4000) - once.verify(8, 4000)) == pytest.approx(float(eight - single))
        assert separate.verify(1, 4000) == once.verify(1, 4000)
        (note,) = once.notes(7, (100, 4000))
        assert f"takes {1e3 * float(once.verify(8, 4000)):.2f} ms" in note
        assert note.endswith(f"{1e3 * float(separate.verify(8, 4000)):.2f}")

    def test_steps_that_are_not_credible_are_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """SGLang's Llama-3.1-70B in float8 is faster at batch 2 than at 1; no step here is 3 times the roofline."""
        falls = self.cost(tmp_path, target="llama-3.1-70b", hardware="b200", framework="sglang", dtype="float8")
        (_, note) = falls.notes(3, (500, 500))
        assert note.startswith("a step of batch 2 takes 0.94")
        usual = self.cost(tmp_path)
        assert len(usual.notes(3, (500, 500))) == 1
        monkeypatch.setattr(cost_module, "LARGEST_FACTOR", 1.0)
        assert "times the roofline of the data sheet; 0.8 to 1 are credible" in usual.notes(3, (500, 500))[1]

    def test_a_ragged_batch_takes_matrices_of_all_its_tokens_and_attention_of_its_mean_context(self) -> None:
        """4 + 1 new tokens behind 1000 and 100 cached ones; then like sequences, several passes at once."""
        passes = self.passes()
        ragged = BatchTokens.of(np.array([4, 1]), np.array([1000, 100]))
        alone = passes.seconds(5, 0) - passes.attention_s(1, np.array(0.0))  # five tokens without their attention
        assert float(passes.batch_seconds(ragged)) == pytest.approx(
            float(alone + passes.attention_s(2, np.array(550.0)))
        )
        several = BatchTokens.alike(np.array([1, 2, 3]), np.array([4, 1, 4]), np.array([500, 900, 500]))
        apart = [float(passes.seconds(n, c, b)) for b, n, c in ((1, 4, 500), (2, 1, 900), (3, 4, 500))]
        assert passes.batch_seconds(several) == pytest.approx(apart, rel=1e-12)

    def test_attention_between_measured_contexts_is_the_packages(self) -> None:
        model = self.passes()
        wire = model.tables.wire(model.attention_operations())
        for context in (1, 99, 1500, 40_000):
            direct = model.tables.seconds(wire, context=context + 1)
            assert float(model.attention_s(1, np.array(float(context)))) == pytest.approx(direct, rel=0.01)
        assert np.all(np.diff(model.attention_s(4, CONTEXTS[3:-1])) > 0)
        with pytest.raises(InputError, match="up to 131,072"):
            model.seconds(1, 200_000)

    def test_a_drafter_is_priced_by_its_own_passes(self, tmp_path: Path) -> None:
        cost = self.cost(tmp_path, step_s=0.001, round_s=0.0005, batch=4)
        small = self.passes("llama-3.2-1b")
        drafted = [float(small.seconds(1, 1000 + place, 4)) for place in range(3)]
        assert float(cost.draft(3, 1000)) == pytest.approx(sum(drafted))
        assert cost.round_overhead() == 0.0015
        assert float(cost.autoregressive_step(1000)) == pytest.approx(float(cost.verify(1, 1000)) + 0.001)

    def test_an_early_exit_verifies_its_own_layers_for_one_token_alone(self, tmp_path: Path) -> None:
        cost = self.cost(tmp_path, drafter="eesd:8")
        upper, lower = (replace(cost.target, model=cost.target.model.first(layers)) for layers in (24, 8))
        by_hand = upper.seconds(5, 1000) + lower.seconds(1, 1000, ends=False)
        assert float(cost.verify(5, 1000)) == pytest.approx(float(by_hand))
        whole = cost.target.seconds(1, 1000)
        assert float(upper.seconds(1, 1000) + lower.seconds(1, 1000, ends=False)) == pytest.approx(float(whole))

    def test_devices_share_the_matrices(self) -> None:
        alone, two = (self.passes(tensor_parallel=devices) for devices in (1, 2))
        assert 0.4 < float(two.seconds(8, 1000) / alone.seconds(8, 1000)) < 0.9

    def test_what_is_in_no_table_is_refused_in_one_line(self, tmp_path: Path) -> None:
        for changes, words in [
            ({"hardware": "a6000"}, ("a6000", "known: a100")),
            ({"framework": "tgi"}, ("tgi", "known: vllm")),
            ({"dtype": "int4"}, ("int4", "known: bfloat16")),
            ({"hardware": "a100", "dtype": "float8"}, ("a100", "fp8")),
            ({"routing": "zipf"}, ("zipf", "known: balanced")),
            ({"attention": "twice"}, ("twice", "known: once")),
            ({"target": "llama-3.1-70b", "hardware": "h100"}, ("141 GB", "h100")),
            ({"tensor_parallel": 3}, ("3 devices",)),
            ({"batch": 0}, ("batch=0",)),
            ({"colour": 1}, ("colour", "known")),
        ]:
            assert_refused(call("specsim", "cost", "show", written(tmp_path, **changes)), *words)
        config = find_architecture("mixtral-8x7b")
        odd = replace(config, experts=replace(config.experts, intermediate_size=1000))
        with pytest.raises(InputError, match="lack an operation: .*MoE"):
            SiliconPasses(odd, "h200").seconds(1, 100)

    def test_a_trace_is_replayed_and_batches_are_asked(self, tmp_path: Path) -> None:
        shown = json_of(call("specsim", "cost", "show", written(tmp_path), "--batch", 8, "--json"))
        assert shown["batch"] == 8 and "vllm 0.24.0 on h200" in shown["notes"][0]
        at = shown["rows"][1]
        assert at["verify_s"]["1"] == at["autoregressive_s"] > 0

    def test_the_datasheets_say_what_the_package_says(self) -> None:
        """Its own ceilings of the same devices; of the B200 it has 7.7 TB/s, of which the source tells."""
        from aiconfigurator_core.sdk.perf_database import load_system_spec

        for name, system in SYSTEMS.items():
            device, spec = find_hardware(name), load_system_spec(system)
            assert device.flops_of("bfloat16") == spec["gpu"]["bfloat16_tc_flops"]
            assert device.link_bytes_s == spec["node"]["intra_node_bw"]
            if name == "b200":
                assert spec["gpu"]["mem_bw"] == 7.7e12 and "7.7 TB/s" in device.source
            else:
                assert device.memory_bytes_s == spec["gpu"]["mem_bw"]
            if "float8" in device.flops:
                assert device.flops["float8"] == pytest.approx(spec["gpu"]["fp8_tc_flops"], rel=1e-3)
