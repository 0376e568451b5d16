"""EAGLE-3 checkpoints: others' are read as they compute, and what training wrote comes out as others read it."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.drafters.eagle3 import LAYERS_KEY
from realrun.pairs.drafter_files import load_drafter, write_drafter
from realrun.pairs.pair import Pair, load_pair
from specsim.policy.registry import make_policy
from tests.realrun.drafters.test_state_drafters import eagle3_reference as reference
from tests.support.checks import refusal
from tests.support.commands import assert_refused, call, json_of
from tests.support.pairs.state import PROMPTS
from tests.support.small_targets import alone
from tests.support.split_targets import target_of
from tests.support.tiny import tiny_tokenizer
from tests.support.trainings import CASES

SIZE, HEADS, KV_HEADS, WIDE, DRAFTED = 32, 2, 1, 48, [3, 5, 7, 20, 21, 40, 41, 96]
# As yuhuili/EAGLE3-LLaMA3.1-Instruct-8B states it, in small.
PUBLISHED = {
    "architectures": ["LlamaForCausalLMEagle3"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "silu",
    "hidden_size": SIZE, "initializer_range": 0.02, "intermediate_size": WIDE, "max_position_embeddings": 20,
    "model_type": "llama", "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "num_hidden_layers": 1,
    "pad_token_id": 0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "float16",
    "transformers_version": "4.28.1", "use_cache": True, "vocab_size": 97, "draft_vocab_size": len(DRAFTED),
}  # fmt: skip


def random_weights(prefix: str = "midlayer") -> dict[str, torch.Tensor]:
    """Weights of the published names, and the published tables of the draft vocabulary."""
    generator = torch.Generator().manual_seed(11)
    head = SIZE // HEADS
    shapes = {
        "fc.weight": (SIZE, 3 * SIZE),
        f"{prefix}.self_attn.q_proj.weight": (HEADS * head, 2 * SIZE),
        f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * head, 2 * SIZE),
        f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * head, 2 * SIZE),
        f"{prefix}.self_attn.o_proj.weight": (SIZE, HEADS * head),
        f"{prefix}.mlp.gate_proj.weight": (WIDE, SIZE),
        f"{prefix}.mlp.up_proj.weight": (WIDE, SIZE),
        f"{prefix}.mlp.down_proj.weight": (SIZE, WIDE),
        f"{prefix}.hidden_norm.weight": (SIZE,),
        f"{prefix}.input_layernorm.weight": (SIZE,),
        f"{prefix}.post_attention_layernorm.weight": (SIZE,),
        "norm.weight": (SIZE,),
        "lm_head.weight": (len(DRAFTED), SIZE),
    }
    weights = {name: (0.3 * torch.randn(shape, generator=generator)).half() for name, shape in shapes.items()}
    mask = torch.zeros(97, dtype=torch.bool)
    mask[DRAFTED] = True
    return {**weights, "d2t": torch.tensor([token - i for i, token in enumerate(DRAFTED)]), "t2d": mask}


def published(folder: Path, config: dict[str, Any] | None = None, **more: torch.Tensor) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**PUBLISHED, **(config or {})}))
    save_file({**random_weights(), **more}, folder / "model.safetensors")
    return folder


def pair_of(folder: Path, target: Any = None) -> Pair:
    target, drafter = load_drafter(folder, target_of("llama") if target is None else target)
    return replace(alone(target), drafter=drafter)


@pytest.mark.parametrize("form", ["model.safetensors", "pytorch_model.bin"])
@torch.inference_mode()
def test_a_published_checkpoint_drafts_as_it_computes(form: str, tmp_path: Path) -> None:
    """In the older form of its weights, too, and with vLLM's name of the layer; behind the positions that it states."""
    folder = published(tmp_path / "a")
    if form == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
        torch.save(random_weights("layers.0"), folder / form)
    pair, text = pair_of(folder), [*PROMPTS[2].tokens, *range(1, 25)]
    assert pair.drafter.facts == {"states_after": [1, 2, 3], "draft_vocabulary": 8} and len(text) > 20
    target, lm = pair.drafter.make_passes(pair.target)
    target.prefill(text[:-1])
    for drafted in ([], [5], [5, 40]):
        logits = lm.forward([*text, *drafted][lm.length :])[-1]
        torch.testing.assert_close(logits[DRAFTED], reference(pair, text, drafted), rtol=0, atol=1e-10)
        assert logits.isfinite().nonzero().flatten().tolist() == DRAFTED


@pytest.mark.parametrize(
    ("config", "states"),
    [
        ({}, [1, 2, 3]),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, [1, 3, 4]),  # vLLM's: of layers
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}}, [1, 3, 4]),  # SGLang's: their numbers
    ],
)
def test_states_are_read_where_each_engine_says(config: dict[str, Any], states: list[int], tmp_path: Path) -> None:
    assert pair_of(published(tmp_path / "a", config)).drafter.facts["states_after"] == states


@pytest.mark.parametrize("config", [{}, {"eagle_config": {LAYERS_KEY: [0, 1, 2]}}])
def test_a_published_checkpoint_is_written_for_engines(config: dict[str, Any], tmp_path: Path) -> None:
    """Although most published ones do not name the layers that they read in the form that vLLM takes."""
    drafter = pair_of(published(tmp_path / "a", config)).drafter
    write_drafter(drafter.eagle, 97, tmp_path / "b")
    again = pair_of(tmp_path / "b").drafter
    assert again.facts == drafter.facts
    assert json.loads((tmp_path / "b/config.json").read_text())[LAYERS_KEY] == drafter.facts["states_after"]


def test_a_vocabulary_that_ends_with_the_tokenizers_drafts_no_padding(tmp_path: Path) -> None:
    """As a target is loaded: without the rows behind its tokenizer's tokens, of which 96 is here."""
    target = copy.deepcopy(target_of("llama"))
    target.resize_token_embeddings(96)
    drafter = pair_of(published(tmp_path / "a"), target).drafter
    assert drafter.eagle.tokens.tolist() == DRAFTED[:-1] and len(drafter.eagle.lm_head.weight) == 7


def test_what_would_draft_otherwise_is_refused_in_one_line(tmp_path: Path) -> None:
    def refused(says: str, place: Path) -> None:
        refusal(lambda: pair_of(place), match=says)

    settings: list[tuple[dict[str, Any], str]] = [
        ({"attention_bias": True}, "attention_bias True, only False is supported"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state False, only True is supported"),
        ({"num_hidden_layers": 2}, "does not fit its target .*give the target that it was trained for"),
        ({"hidden_size": 64}, "hidden size 64, this target 32; give the target that it was trained for"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 3]}, "states after 1, 1, 3 of 4 layers; give different numbers"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 16, 29]}, "states after 2, 16, 29 of 4 layers"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rotary embeddings .*yarn"),
    ]
    for number, (config, says) in enumerate(settings):
        refused(says, published(tmp_path / str(number), config))
    refused(
        "other embeddings than this target", published(tmp_path / "b", **{"embed_tokens.weight": torch.ones(97, 32)})
    )
    pair_of(published(tmp_path / "c", **{"embed_tokens.weight": target_of("llama").model.embed_tokens.weight.half()}))
    lacking = published(tmp_path / "d")
    weights = load_file(lacking / "model.safetensors")
    del weights["midlayer.hidden_norm.weight"]
    save_file(weights, lacking / "model.safetensors")
    refused("does not fit its target .*give the target that it was trained for", lacking)
    (lacking / "model.safetensors").write_bytes(b"none")
    refused("has no weights that are read .*; download it again", lacking)
    (lacking / "model.safetensors").unlink()
    refused("has no weights that are read .*; download it again", lacking)


@pytest.mark.parametrize("name", ["eagle3", "eagle3 shared"])
def test_a_trained_drafter_is_converted_and_drafts_the_same(name: str, tmp_path: Path) -> None:
    target = copy.deepcopy(target_of("llama")).float()
    target.save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    CASES[name].run(tmp_path / "trained", alone(target))
    document = json_of(call("realrun", "convert", tmp_path / "trained", tmp_path / "out", "--json"))
    assert document == {"kind": "eagle3", "target": "tiny/target", "out": str(tmp_path / "out")}
    assert_refused(call("realrun", "convert", tmp_path / "trained", tmp_path / "out"), "exists", "--overwrite")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    weights = load_file(tmp_path / "out" / "model.safetensors")
    drafted = 97 if name == "eagle3" else 40
    assert config["architectures"] == PUBLISHED["architectures"] and config["model_type"] == "llama"
    assert (config["vocab_size"], config["draft_vocab_size"], len(weights["lm_head.weight"])) == (97, drafted, drafted)
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}
    assert weights.keys() == {*random_weights()} - ({"d2t", "t2d"} if name == "eagle3" else set())
    if name != "eagle3":
        assert weights["t2d"].nonzero()[:, 0].tolist() == (torch.arange(40) + weights["d2t"]).tolist()
    policy, logs = make_policy("vct", {"width": 2, "depth": 3}), []
    for folder in ("trained", "out"):
        pair = load_pair(str(tmp_path / "target"), drafter=str(tmp_path / folder))
        assert (pair.draft_name, pair.drafter.name) == (folder, "eagle3")
        decoder = Decoder(*pair.make_drafter(), (), Sampler())
        runs = [decoder.decode(prompt.tokens, 12, policy) for prompt in PROMPTS[:3]]
        logs.append([(run.tokens, run.full_log()) for run in runs])
    assert logs[0] == logs[1]


def test_only_eagle3_is_converted(tmp_path: Path) -> None:
    CASES["eagle"].run(tmp_path / "eagle")
    assert_refused(
        call("realrun", "convert", tmp_path / "eagle", tmp_path / "out"), "of kind eagle", "realrun train eagle3"
    )
