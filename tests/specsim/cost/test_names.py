"""Names as people type them, and what a checkpoint's own config.json says, against figures written by hand."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specsim.cost.calibrate import data_sheet_document
from specsim.cost.files import read_cost
from specsim.cost.roofline.architecture import find_architecture, find_model, public_shapes
from specsim.cost.roofline.config import ModelConfig
from specsim.cost.roofline.cost import KINDS, RooflineCost, find_drafter
from specsim.cost.roofline.drafters import WITHOUT_MTP, lacks_mtp
from specsim.cost.roofline.families import families
from specsim.cost.roofline.formats import find_format, read_weights, stored_weights
from specsim.cost.roofline.hardware import BITS, find_hardware, known_hardware
from specsim.engines.conventions import CONVENTIONS
from specsim.engines.flags import FLAGS, VLLM_METHODS
from specsim.io.names import ALIASES, known_name, plain
from tests.support.checks import refusal

CHECKPOINTS = Path(__file__).parent / "checkpoints"
LISTED = {
    kind: shlex.split(names)
    for kind, names in (line.split(":", 1) for line in (CHECKPOINTS / "names.txt").read_text().splitlines())
}
# Models whose config.json is unknown or needs their authors' code.
NO_SHAPE = ("deepseek-v4.1-flash", "mimo-v2.5", "step-3.5-flash", "kimi-k3")
# By hand: what each name of names.txt means. The others are of models and hardware without figures here.
MEANT = {
    **{name: name for name in LISTED["targets"] if name not in NO_SHAPE},
    "Qwen/Qwen3.6-35B-A3B": "qwen3.6-35b-a3b", "openai/gpt-oss-120b": "gpt-oss-120b",
    "deepseek-ai/DeepSeek-V3.2": "deepseek-v3.2", "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "H100": "h100", "NVIDIA H100 80GB HBM3": "h100", "NVIDIA GeForce RTX 3090": "rtx-3090",
    **{name: name for name in ("gb10", "gh200", "l4", "l40", "a10g", "mi325x", "arc-pro-b70", "ascend-910b")},
    "dgx-spark": "gb10",
    "dflash": "block", "dspark": "block", "ngram": "prompt-lookup", "suffix": "prompt-lookup", "p-eagle": "block",
    "pard": "block", "EAGLE3": "eagle3", "deepseek_mtp": "mtp", "qwen3_next_mtp": "mtp",
    "vLLM": "vllm", "SGLang": "sglang", "trtllm": "tensorrt-llm", "tensorrt_llm": "tensorrt-llm",
}  # fmt: skip
FIND: dict[str, Callable[[str], str]] = {
    "targets": lambda name: find_architecture(name).name,
    "hub ids": lambda name: find_architecture(name).name,
    "gpus": lambda name: find_hardware(name).name,
    "drafters": lambda name: find_drafter(name, find_architecture("qwen3-8b")).kind,
    "engines": lambda name: known_name("engine", name, [*FLAGS]),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in LISTED.items() for name in names])
def test_a_listed_name_is_found_or_refused_with_few_others(kind: str, name: str) -> None:
    if name in MEANT:
        assert FIND[kind](name) == MEANT[name]
        return
    text = refusal(lambda: FIND[kind](name))
    assert repr(name) in text and "\n" not in text and len(text) < 240, text
    assert sum(known in text.split() or f"{known}," in text for known in public_shapes()) <= 3
    assert "?" in text or "nearest: " in text or "choose one of" in text


@pytest.mark.parametrize(
    ("name", "shape", "weights"),
    [
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b", None),
        ("Qwen/Qwen3-32B-FP8", "qwen3-32b", "float8"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int8", "qwen2.5-7b", "int8"),
        ("Qwen/Qwen3-8B-AWQ", "qwen3-8b", "int4"),
        ("nvidia/DeepSeek-V3.1-NVFP4", "deepseek-v3.1", "nvfp4"),
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "llama-3.1-8b", "int4"),
        ("bartowski/Qwen_Qwen3-8B-GGUF:Q4_K_M", "qwen3-8b", "q4_k_m"),
        ("models/Qwen3-8B-IQ2_XXS-00001-of-00002.gguf", "qwen3-8b", "iq2_xxs"),
        ("llama3.1:8b-instruct-q8_0", "llama-3.1-8b", "q8_0"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama-4-scout", None),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b", None),
        ("amd/Llama-3.1-70B-Instruct-FP8-KV", "llama-3.1-70b", "float8"),
        ("gpt-oss:20b", "gpt-oss-20b", {"experts": "mxfp4"}),
        ("unsloth/gpt-oss-20b-BF16", "gpt-oss-20b", "bfloat16"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3", "float8"),
        ("moonshotai/Kimi-K2.5", "kimi-k2.5", {"experts": "int4-g32"}),
        ("mistralai/Mistral-Large-Instruct-2411", "mistral-large", None),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "mistral-small-24b", None),
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "mistral-small-3.2-24b", None),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b", None),
        ("mistralai/Mistral-7B-Instruct-v0.1", "mistral-7b-instruct-v0.1", None),
        ("mistralai/Devstral-Small-2507", "devstral-small", None),
        ("microsoft/phi-4", "phi-4", None),
        ("Qwen/Qwen3-4B-Instruct-2507-FP8", "qwen3-4b", "float8"),
        ("Qwen/Qwen2.5-Coder-32B-Instruct-AWQ", "qwen2.5-coder-32b", "int4"),
        ("meta-llama/Meta-Llama-3-70B-Instruct", "llama-3-70b", None),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-70B", "deepseek-r1-distill-llama-70b", None),
        ("unsloth/DeepSeek-R1-Distill-Qwen-14B-GGUF:Q8_0", "deepseek-r1-distill-qwen-14b", "q8_0"),
        ("XiaomiMiMo/MiMo-7B-RL", "mimo-7b", None),
        ("google/gemma-3-4b-it", "gemma-3-4b", None),
        ("google/gemma-3-1b-pt", "gemma-3-1b", None),
        ("nvidia/DeepSeek-R1-0528-FP4", "deepseek-r1", "nvfp4"),  # TensorRT-LLM's page: "NVFP4 model"
        ("mlx-community/Qwen3-8B-4bit", "qwen3-8b", "int4"),
        ("unsloth/Qwen3-8B-bnb-4bit", "qwen3-8b", "int4"),
        ("unsloth/Qwen3-32B-GGUF:UD-Q4_K_XL", "qwen3-32b", "q4_k_xl"),
    ],
)
def test_a_models_name_says_its_shape_and_its_weights(name: str, shape: str, weights: Any) -> None:
    stored = stored_weights(name)
    assert find_architecture(name).name == shape and (stored and stored.weights) == weights


@pytest.mark.parametrize(
    "name", ["unsloth/Qwen3-32B-GGUF", "Qwen3-32B.gguf", "unsloth/DeepSeek-V3-0324-GGUF", "lmstudio/Qwen3-8B-MLX"]
)
def test_a_name_that_tells_only_that_there_is_a_format_needs_it(name: str) -> None:
    refusal(lambda: stored_weights(name), f"{name} does not tell the format of its weights", "--weights ")
    refusal(lambda: data_sheet_document("rtx-4090", name, "qwen3-0.6b"), "does not tell the format")
    assert data_sheet_document("rtx-4090", name, "qwen3-0.6b", "q4_k_m")["weights"] == "q4_k_m"
    assert find_architecture(name).num_layers > 30  # a shape is told


@pytest.mark.parametrize(
    "name",
    [
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        "Qwen/Qwen3-Embedding-8B",
        "qwen3",
        "-",
        "microsoft/Phi-4-mini-instruct",
    ],
)
def test_another_model_of_a_known_name_is_not_taken_for_it(name: str) -> None:
    assert find_model(name) is None
    refusal(lambda: find_architecture(name), f"unknown model {name!r}", "nearest: ")


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"), ("NVIDIA A100-SXM4-40GB", "a100-40gb"), ("NVIDIA H100 PCIe", "h100-pcie"),
        ("RTX4090", "rtx-4090"), ("geforce rtx 5090", "rtx-5090"), ("AMD Instinct MI355X", "mi355x"),
        ("Apple M4 Max", "m4-max"), ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"),
        ("NVIDIA GB10", "gb10"), ("NVIDIA DGX Spark", "gb10"), ("NVIDIA GH200 480GB", "gh200"), ("NVIDIA L4", "l4"),
        ("Tesla V100-SXM2-32GB", "v100"), ("AMD Instinct MI325X", "mi325x"), ("Ascend910B2", "ascend-910b"),
        ("Intel(R) Arc(TM) Pro B60 Graphics", "arc-pro-b60"), ("910C", "ascend-910c"),
        ("NVIDIA GeForce RTX 3090 Ti", None), ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA H20-3e", None),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"), ("NVIDIA H100 NVL", "h100-nvl"), ("NVIDIA L40", "l40"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"), ("A100 40", "a100-40gb"), ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA A10", "a10"), ("NVIDIA A10G", "a10g"), ("Tesla T4", "t4"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"), ("RTX PRO 6000 Server Edition", "rtx-pro-6000-server"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-server"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None), ("Quadro RTX 6000", None), ("NVIDIA A100X", None),
    ],
)  # fmt: skip
def test_a_gpu_is_found_as_it_names_itself_and_no_other(name: str, device: str | None) -> None:
    if device is None:
        refusal(lambda: find_hardware(name), f"unknown GPU {name!r}", "nearest: ", "memory_bytes_s")
    else:
        assert find_hardware(name).name == device


def test_no_two_names_are_alike_and_every_alias_names_something() -> None:
    drafters = (*KINDS[1:], *VLLM_METHODS)
    tables = {"model": public_shapes(), "GPU": known_hardware(), "drafter": drafters, "engine": {*FLAGS, *CONVENTIONS}}
    for kind, table in {**tables, "weight format": BITS}.items():
        names = {plain(name) for name in table}
        assert len(names) == len({*table})
        assert {*map(plain, ALIASES[kind].values())} <= names and not names & {*ALIASES[kind]}  # type: ignore[index]


def test_several_gpus_are_given_by_their_number() -> None:
    refusal(lambda: find_hardware("8xH100"), "'8xH100' is 8 GPUs", "--gpu h100 --tp 8")


def test_formats_are_found_as_people_write_them() -> None:
    written = ["fp8", "FP8", "AWQ", "W4A16", "bf16", "NVFP4", "Q4_K_M", "q8_0", "IQ4_XS", "UD-Q4_K_XL", "fp8_e5m2"]
    names = ["float8", "float8", "int4", "int4", "bfloat16", "nvfp4", "q4_k_m", "q8_0", "iq4_xs", "q4_k_xl", "float8"]
    assert [find_format(name) for name in written] == names
    assert read_weights("experts=MXFP4,attention=fp8") == {"experts": "mxfp4", "attention": "float8"}
    refusal(lambda: find_format("q4_k_xs"), "unknown weight format 'q4_k_xs'; nearest: ", "q4_k_s")


def priced(target: str, drafter: str = "eagle3", **other: Any) -> RooflineCost:
    cost = read_cost(data_sheet_document("h100", target, drafter, **other))
    assert isinstance(cost, RooflineCost)
    return cost


def test_an_awq_checkpoint_is_priced_in_four_bits() -> None:
    """A decode step on an H100 takes 2.546 ms with int4 weights at 128 cached tokens, 6.364 in bfloat16."""
    awq = str(CHECKPOINTS / "target_awq.json")
    cost = priced(awq)
    assert 1e3 * float(cost.autoregressive_step(128)) == pytest.approx(2.546, abs=5e-4)
    assert any("int4 (by quantization_config of" in note for note in cost.notes(1, (1, 1)))
    chosen = priced(awq, weights="bf16")
    assert 1e3 * float(chosen.autoregressive_step(128)) == pytest.approx(6.364, abs=5e-4)
    assert not any("quantization_config" in note for note in chosen.notes(1, (1, 1)))


def test_deepseek_fits_eight_h200_as_it_was_released() -> None:
    """671 GB in float8, 1,342 in bfloat16; eight H200 have 1,128."""
    cost = read_cost(data_sheet_document("H200", "deepseek-ai/DeepSeek-V3", "deepseek_mtp", None, 8))
    assert isinstance(cost, RooflineCost)
    assert cost.target.weight_bytes == pytest.approx(671e9, rel=0.01)
    refusal(lambda: read_cost(data_sheet_document("H200", "deepseek-v3", "mtp", "bf16", 8)), "GB a device")


CONFIG = json.loads((CHECKPOINTS / "target_awq.json").read_text())


@pytest.mark.parametrize(
    ("quantization", "weights"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "int4-g32"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "int8"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}, "float8"),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}, {"experts": "mxfp4"}),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "int4"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
        ({"quant_method": "compressed-tensors", "ignore": ["lm_head", "re:.*mlp.gate$"],
          "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}}}, "float8"),
        ({"quant_method": "compressed-tensors",
          "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|down)_proj.*"],
          "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}}}},
         {"experts": "int4-g32"}),
        ({"quant_method": "compressed-tensors",
          "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}}}, "nvfp4"),
        # DeepSeek-V4: experts in four bits with one scale per 32 weights, the other matrices in float8.
        ({"quant_method": "fp8", "fmt": "e4m3", "expert_dtype": "fp4"},
         {"attention": "float8", "mlp": "float8", "experts": "mxfp4"}),
    ],
)  # fmt: skip
def test_a_quantization_config_is_read(quantization: dict[str, Any], weights: Any) -> None:
    stored = stored_weights(ModelConfig({**CONFIG, "quantization_config": quantization}))
    assert stored is not None and stored.weights == weights
    nested = stored_weights(ModelConfig({"text_config": CONFIG, "quantization_config": quantization}))
    assert nested is not None and nested.weights == weights


@pytest.mark.parametrize(
    "quantization", [{"quant_method": "gptq", "bits": 3}, {"quant_method": "hqq"}, {"bits": 4}, "awq"]
)
def test_another_quantization_asks_for_the_weights(quantization: Any) -> None:
    refusal(lambda: stored_weights(ModelConfig({**CONFIG, "quantization_config": quantization})), "--weights int4")


def test_a_published_eagle3_head_is_told_by_its_config() -> None:
    """EAGLE-3 of Llama-3.1-8B: a draft step of 0.353 ms in vLLM on an H100, not the 0.585 of a draft model."""
    head = str(CHECKPOINTS / "drafter_eagle3.json")
    cost, guess = (priced("llama-3.1-8b", drafter, engine="vllm") for drafter in (head, "eagle3"))
    assert cost.drafter.kind == "eagle3"
    for context in (128, 4096):
        assert cost.draft(1, context) == guess.draft(1, context)
    speculators = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": 32000,
        "transformer_layer_config": json.loads((CHECKPOINTS / "drafter_eagle3.json").read_text()),
    }  # fmt: skip
    again = find_drafter(speculators, find_architecture("llama-3.1-8b")).model
    assert again is not None and cost.drafter.model is not None
    assert again.matrices == cost.drafter.model.matrices and again.vocab_size == 32000


def test_the_head_of_a_mixture_has_its_own_width() -> None:
    """The published head of gpt-oss-20b: an MLP 17,280 wide and 32,000 tokens, 308 million weights."""
    head = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 2880, "intermediate_size": 17280,
            "num_hidden_layers": 1, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
            "vocab_size": 201088, "draft_vocab_size": 32000}  # fmt: skip
    model = find_drafter(head, find_architecture("gpt-oss-20b")).model
    assert model is not None and model.stack_parameters + model.head_parameters == pytest.approx(308e6, rel=0.002)


def test_a_dflash_config_drafts_a_block_in_one_pass() -> None:
    """5 layers of the target's shape, blocks of 16 whose first token is the last accepted one: costs as block:5."""
    file = str(CHECKPOINTS / "drafter_dflash.json")
    cost, block = (priced("qwen3-8b", drafter) for drafter in (file, "block:5"))
    assert (cost.drafter.kind, cost.drafter.method, cost.drafter.block) == ("block", "dflash", 15)
    assert cost.draft(8, 1000) == block.draft(8, 1000)
    assert any("trained for blocks of 15 drafted tokens" in note for note in cost.notes(17, (1, 1)))
    assert not any("trained for" in note for note in cost.notes(15, (1, 1)))


@pytest.mark.parametrize(
    ("classes", "kind", "method"),
    [
        ("DSparkDraftModel", "block", "dspark"), ("PEagleDraftModel", "block", "p-eagle"),
        ("DominoDraftModel", "block", ""), ("Eagle3Speculator", "eagle3", ""), ("EagleLlamaForCausalLM", "eagle", ""),
        ("DeepSeekMTPModel", "mtp", ""), ("LlamaForCausalLM", "model", ""),
    ],
)  # fmt: skip
def test_drafters_are_told_by_their_architectures(classes: str, kind: str, method: str) -> None:
    config = {**CONFIG, "architectures": [classes]}
    drafter = find_drafter(config, find_architecture("llama-3.1-70b"))
    assert (drafter.kind, drafter.method) == (kind, method)
    if kind != "model":
        refusal(lambda: find_architecture(ModelConfig(config)), "is a drafter's", "give it as --drafter")


@pytest.mark.parametrize(
    ("name", "kind", "method"),
    [
        ("z-lab/Qwen3-8B-DFlash-b16", "block", "dflash"), ("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "eagle3", ""),
        ("dflash:3", "block", "dflash"), ("NEXTN", "mtp", ""), ("suffix", "prompt-lookup", "suffix"),
        ("Qwen/Qwen3-0.6B", "model", ""), ("draft-mtp", "mtp", ""), ("ngram-mod", "prompt-lookup", ""),
    ],
)  # fmt: skip
def test_drafters_are_found_by_engines_names_and_hub_ids(name: str, kind: str, method: str) -> None:
    drafter = find_drafter(name, find_architecture("qwen3-8b"))
    assert (drafter.kind, drafter.method) == (kind, method)


@pytest.mark.parametrize("kind", [*WITHOUT_MTP, "deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5"])
def test_families_without_mtp_have_no_word_of_it_in_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = Path(transformers.__file__).parent / "models" / kind.removesuffix("_text")
    words = re.search("mtp|nextn", "".join(path.read_text() for path in folder.glob("*.py")))
    assert folder.is_dir() and (words is None) == (kind in WITHOUT_MTP)


@pytest.mark.parametrize(
    ("target", "drafter", "lacks"),
    [
        ("llama-3.1-8b", "mtp", True), ("Qwen/Qwen3-8B", "NEXTN", True), ("qwen3-30b-a3b", "mtp", True),
        ("deepseek-v3", "mtp", False), ("qwen3.6-27b", "mtp", False), ("mimo-7b", "mtp", False),
        ("gemma-4-31b", "mtp", False), ("llama-3.1-8b", "eagle3", False), ("llama-3.1-8b", "a/Llama-3.1-8B-MTP", False),
    ],
)  # fmt: skip
def test_mtp_of_a_model_without_its_layers_is_named(target: str, drafter: str, lacks: bool) -> None:
    cost = read_cost(data_sheet_document("b200", target, drafter, None, 8 if target == "deepseek-v3" else 1))
    assert any("has no layers for multi-token prediction" in note for note in cost.notes(1, (1, 1))) == lacks


def test_the_nearest_names_are_those_of_the_model_not_of_its_owner() -> None:
    text = refusal(lambda: find_architecture("mistralai/Mistral-Nemo-Instruct-2407"), "nearest: ")
    assert "drafter" not in text and "mistral-" in text.partition("nearest: ")[2]


def test_a_distilled_model_has_the_shape_of_its_base() -> None:
    """DeepSeek-R1's model card: Qwen2.5-Math-7B, Qwen2.5-14B and -32B, Llama-3.1-8B, Llama-3.3-70B."""
    for name, base in (("Qwen-7B", "qwen2.5-7b"), ("Qwen-32B", "qwen2.5-32b"), ("Llama-8B", "llama-3.1-8b")):
        found = find_architecture(f"deepseek-ai/DeepSeek-R1-Distill-{name}")
        assert replace(found, name=base) == find_architecture(base)
        assert stored_weights(f"deepseek-ai/DeepSeek-R1-Distill-{name}") is None  # not DeepSeek-R1's float8


def test_keys_that_gemma_3_leaves_out_are_transformers_defaults() -> None:
    """The published config.json of gemma-3-4b-it: its text_config says no heads, vocabulary or size of heads."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "sliding_window": 1024}  # fmt: skip
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    found = find_architecture(ModelConfig(config), "gemma-3-4b")
    assert found == find_architecture("google/gemma-3-4b-it", "gemma-3-4b")
    assert (found.plain_attention.heads, found.plain_attention.kv_heads, found.vocab_size) == (8, 4, 262208)
    transformers = pytest.importorskip("transformers")
    for family, keys in families().defaults.items():
        own = transformers.CONFIG_MAPPING[family]().to_dict()
        assert {key: own[key] for key in keys} == keys


def test_a_config_says_how_many_mtp_layers_there_are() -> None:
    for count, lacks in ((None, True), (0, True), (1, False)):
        assert lacks_mtp(ModelConfig({**CONFIG, "num_nextn_predict_layers": count})) == lacks


@pytest.mark.parametrize("name", ["draft_model", "STANDALONE", "model"])
def test_a_draft_model_is_asked_for(name: str) -> None:
    refusal(lambda: find_drafter(name, find_architecture("qwen3-8b")), "which model drafts?", "qwen3-0.6b")


def test_a_one_layer_llama_of_the_targets_width_is_eagles_head() -> None:
    config = {**CONFIG, "num_hidden_layers": 1}
    assert find_drafter(config, find_architecture("llama-3.1-8b")).kind == "eagle"
    assert find_drafter(config, find_architecture("llama-3.1-70b")).kind == "model"


def test_an_engine_of_unknown_overhead_adds_none_and_says_so() -> None:
    bare, engine = (priced("llama-3.1-8b", engine=name) for name in (None, "transformers"))
    assert bare.round_seconds(3, 1000) == engine.round_seconds(3, 1000)
    assert "without the overhead of transformers, which is not known" in engine.notes(3, (1000, 1000))
