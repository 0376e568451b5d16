"""Published drafters: they draft what the libraries that wrote them draft, or are refused by name in one line."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from realrun.pairs.drafter_files import load_drafter
from realrun.pairs.pair import Pair
from tests.support.checks import refusal
from tests.support.pairs.state import layer_alone
from tests.support.published import STEPS, TEXT, layouts, write
from tests.support.small_targets import alone
from tests.support.split_targets import target_of

LAYOUTS = layouts()
KINDS = {"eagle3": "eagle3", "peagle": "block", "dflash": "block", "dspark": "block"}
REFUSED = {
    "speculators-dspark-rnn": "DSpark with a recurrent head",
    "specforge-domino": "Domino, whose head reads the tokens before each",
    "specforge-peagle": "does not say which token masks are; write its mask_token_id in config.json",
}


def pair_of(folder: Path, target: Any = None) -> Pair:
    target, drafter = load_drafter(folder, target_of("llama") if target is None else target)
    return replace(alone(target), drafter=drafter)


@torch.inference_mode()
def drafts_after(pair: Pair, context: list[int]) -> list[int]:
    """The STEPS tokens that the pair drafts after this text, whose last token is pending."""
    target, lm = pair.drafter.make_passes(pair.target)  # type: ignore[attr-defined]
    target.prefill(context[:-1])
    lm.prefill(context[:-1])
    tokens = [*context]
    for _ in range(STEPS):
        tokens.append(int(lm.forward(tokens[lm.length :])[-1].argmax()))
    return tokens[len(context) :]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_drafts_what_its_library_drafts_or_is_refused_by_name(name: str, tmp_path: Path) -> None:
    folder = write(LAYOUTS[name], tmp_path / "drafter")
    if name in REFUSED:
        refusal(lambda: pair_of(folder), match=REFUSED[name])
        return
    pair = pair_of(folder)
    assert pair.drafter.name == next(kind for word, kind in KINDS.items() if word in name)
    for place, drafts in LAYOUTS[name]["drafts"].items():
        assert drafts_after(pair, TEXT[: int(place) + 1]) == drafts


def test_older_files_of_speculators_draft_the_same(tmp_path: Path) -> None:
    """They do not state `norm_before_residual`, and hold a copy of the target's norm."""
    layout = copy.deepcopy(LAYOUTS["speculators-eagle3.1"])
    assert layout["config"].pop("norm_before_residual")
    layout["tensors"]["verifier_norm.weight"] = [32]
    layout["files"]["model.safetensors"].append("verifier_norm.weight")
    pair = pair_of(write(layout, tmp_path / "drafter"))
    for place, drafts in layout["drafts"].items():
        assert drafts_after(pair, TEXT[: int(place) + 1]) == drafts


def folder_of(folder: Path, config: dict[str, Any] | None, weights: dict[str, torch.Tensor], file: str) -> Path:
    folder.mkdir(parents=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    own = {name: tensor.contiguous() for name, tensor in weights.items()}
    if file.endswith("safetensors"):
        save_file(own, folder / file)
    else:
        torch.save(own, folder / file)
    return folder


def eagle1(target: Any, *, bias: bool) -> dict[str, torch.Tensor]:
    """Random tensors with the names of SafeAILab's EAGLE-LLaMA3-Instruct-8B."""
    generator = torch.Generator().manual_seed(5)
    layer = {f"layers.0.{name}": value for name, value in target.model.layers[1].state_dict().items()}
    shapes = {name: value.shape for name, value in layer.items() if "input_layernorm" not in name}
    shapes |= {"fc.weight": (32, 64), **({"fc.bias": (32,)} if bias else {})}
    weights = {name: 0.3 * torch.randn(*shape, generator=generator).double() for name, shape in shapes.items()}
    return {**weights, "embed_tokens.weight": target.model.embed_tokens.weight.detach()}


@torch.inference_mode()
def eagle1_drafts(target: Any, weights: dict[str, torch.Tensor], context: list[int]) -> list[int]:
    """Without a cache: a row reads a token and the target's last state before it, or the layer's own output."""
    layer = copy.deepcopy(target.model.layers[1])
    layer.input_layernorm = torch.nn.Identity()
    own = {name.removeprefix("layers.0."): value for name, value in weights.items() if name.startswith("layers.0.")}
    layer.load_state_dict(own)
    states = target.model(input_ids=torch.tensor([context[:-1]]), use_cache=False).last_hidden_state[0]
    tokens = [*context]
    for _ in range(STEPS):
        fused = torch.cat([target.model.embed_tokens.weight[tokens[1:]], states], dim=-1) @ weights["fc.weight"].T
        out = layer_alone(layer, target.model.rotary_emb, fused + weights.get("fc.bias", 0), first=1)[-1:]
        tokens.append(int(target.lm_head(out).argmax()))
        states = torch.cat([states, out])
    return tokens[len(context) :]


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32}
SPECULATORS = {"fc.": "fusion_fc.", "layers.0.": "transformer."}  # the names of releases up to 0.3.0


@pytest.mark.parametrize(
    ("config", "file", "bias", "names"),
    [
        (LLAMA, "pytorch_model.bin", False, {}),
        ({**LLAMA, "bias": True}, "model.safetensors", True, {}),
        ({"architectures": ["EagleLlamaForCausalLM"]}, "model.safetensors", False, {}),
        ({"architectures": ["EagleSpeculator"]}, "model.safetensors", True, SPECULATORS),
    ],
)  # fmt: skip
def test_an_eagle1_head_drafts_as_it_computes(
    config: dict[str, Any], file: str, bias: bool, names: dict[str, str], tmp_path: Path
) -> None:
    target = target_of("llama")
    weights = eagle1(target, bias=bias)
    renamed = {
        next((name.replace(old, new) for old, new in names.items() if name.startswith(old)), name): tensor
        for name, tensor in weights.items()
    }
    pair = pair_of(folder_of(tmp_path / "eagle", config, renamed, file))
    assert pair.drafter.name == "eagle"
    for length in (3, 9):
        assert drafts_after(pair, TEXT[:length]) == eagle1_drafts(target, weights, TEXT[:length])


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "medusa_lm_head.safetensors", "model.safetensors"])
@torch.inference_mode()
def test_published_medusa_heads_draft_as_they_compute(file: str, tmp_path: Path) -> None:
    """Three heads with biases, under the authors' names in either format and under vLLM's."""
    target, generator = target_of("llama"), torch.Generator().manual_seed(6)
    shapes = {"weight": (32, 32), "bias": (32,), "head": (97, 32)}
    heads = [
        {part: 0.4 * torch.randn(*shape, generator=generator).double() for part, shape in shapes.items()}
        for _ in range(STEPS)
    ]
    theirs = {"weight": "{}.0.linear.weight", "bias": "{}.0.linear.bias", "head": "{}.1.weight"}
    if file == "model.safetensors":
        theirs = {
            "weight": "blocks.{}.layers.0.weight",
            "bias": "blocks.{}.layers.0.bias",
            "head": "lm_heads.{}.weight",
        }
    weights = {theirs[part].format(k): tensor for k, head in enumerate(heads) for part, tensor in head.items()}
    config = {"architectures": ["MedusaModel"], "model_type": "medusa", "medusa_num_heads": 3}
    pair = pair_of(folder_of(tmp_path / "medusa", config, weights, file))
    assert pair.drafter.name == "medusa" and pair.drafter.max_depth == STEPS
    lm, drafter = pair.make_drafter()
    lm.keep_hidden = True
    lm.prefill(TEXT[:-1])
    drafter.begin(TEXT[:-1], lm.hidden[-1])
    state = target.model(input_ids=torch.tensor([TEXT[:-1]]), use_cache=False).last_hidden_state[0, -1]
    for head in heads:
        expected = head["head"] @ (F.silu(head["weight"] @ state + head["bias"]) + state)
        torch.testing.assert_close(drafter.lm.forward([TEXT[-1]])[-1], expected, rtol=0, atol=1e-10)


REFUSALS: dict[str, tuple[dict[str, Any] | None, dict[str, torch.Tensor], str, str]] = {
    "DFlash2": ({"architectures": ["DFlash2DraftModel"]}, {}, "model.safetensors", "DFlash2, whose layers convolve"),
    "MTP": ({"architectures": ["DeepSeekMTPModel"]}, {}, "model.safetensors", "MTP module, which is a part of its"),
    "heads of two layers": (
        None, {"0.1.linear.weight": torch.zeros(2, 2)}, "medusa_lm_head.pt", "heads of several layers",
    ),
    "HASS": (
        {"architectures": ["EagleSpeculator"]}, {"embedding_layernorm.weight": torch.zeros(2)}, "model.safetensors",
        "norms of HASS",
    ),
    "windows": (
        {**LAYOUTS["specforge-dflash"]["config"], "layer_types": ["sliding_attention", "full_attention"]},
        {"fc.weight": torch.zeros(2, 2)}, "model.safetensors", "DFlash with windows",
    ),
    "lacking": (LAYOUTS["specforge-dflash"]["config"], {"fc.weight": torch.zeros(32, 64)}, "model.safetensors", "fit"),
    "no weights": (LAYOUTS["specforge-dflash"]["config"], {}, "README", "has no weights that are read"),
    "EAGLE-1 of a lost file": ({"architectures": ["EagleLlamaForCausalLM"]}, {}, "README", "no weights that are read"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSALS)
def test_what_is_not_read_is_refused_in_one_line(what: str, tmp_path: Path) -> None:
    config, weights, file, says = REFUSALS[what]
    folder = folder_of(tmp_path / "drafter", config, weights, file)
    refusal(lambda: pair_of(folder), str(folder), match=says)


def test_a_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = write(LAYOUTS["speculators-eagle3-qwen3-sharded"], tmp_path / "drafter")
    (folder / "model-00003-of-00005.safetensors").unlink()
    refusal(lambda: pair_of(folder), "model-00003-of-00005", "; download it again")
