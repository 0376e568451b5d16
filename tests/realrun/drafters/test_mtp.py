"""MTP modules in a target's checkpoint: recordings and decoding match a reference without a cache."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from realrun.decode.sampling import Sampler
from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import load_pair
from realrun.pairs.prompts import Prompt
from tests.support.checks import refusal
from tests.support.families import check_decoding
from tests.support.mtp import FAMILIES, checkpoint, reference
from tests.support.tiny import tiny_prompts

DEPTH, TOKENS = 3, 20


@pytest.mark.parametrize("name", FAMILIES)
def test_a_module_drafts_as_it_computes(name: str, tmp_path: Path) -> None:
    """At every position up to K = 3, recorded and decoded; the output is the target's own."""
    family = FAMILIES[name]
    model, own = checkpoint(family, tmp_path / "a")
    pair = load_pair(str(tmp_path / "a"), drafter="mtp", dtype="float64")
    assert (pair.draft_name, pair.drafter.name, pair.drafter.facts) == ("mtp", "mtp", {"modules": 1})
    pair = replace(pair, eos_token_ids=())
    prompts = [Prompt("one", [17]), *tiny_prompts(2, seed=7)]
    trace = record(pair, prompts, RecordSettings(DEPTH, TOKENS, Sampler()))
    for sequence, prompt in enumerate(prompts):
        rows = range(*trace.offsets[sequence : sequence + 2])
        text = trace.token[rows].tolist()
        for t, row in enumerate(rows):
            drafted, probs = reference(family, model, own, [*prompt.tokens, *text[:t]], DEPTH)
            assert trace.draft_token[row].tolist() == drafted
            assert trace.prob[row] == pytest.approx(probs, abs=1e-6)
    assert check_decoding(pair) > 3


def test_the_module_of_a_composite_checkpoint_is_read(tmp_path: Path) -> None:
    """As in Qwen3.5, the text model's tensors have longer names; the module's have the same."""
    checkpoint(FAMILIES["Qwen3.5"], tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    text = json.loads((tmp_path / "a/config.json").read_text())
    whole = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    (tmp_path / "b/config.json").write_text(json.dumps(whole))
    tensors = load_file(tmp_path / "a/model.safetensors")
    renamed = {re.sub("^model\\.", "model.language_model.", name): value for name, value in tensors.items()}
    save_file(renamed, tmp_path / "b/model.safetensors", {"format": "pt"})
    pairs = [load_pair(str(tmp_path / name), drafter="mtp", dtype="float64") for name in ("a", "b")]
    assert pairs[0].fingerprint == pairs[1].fingerprint and pairs[1].drafter.facts == {"modules": 1}


def without(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(weights: dict[str, torch.Tensor]) -> None:
        del weights[name]

    return change


def wider(weights: dict[str, torch.Tensor]) -> None:
    weights["model.mtp_layers.0.input_proj.weight"] = torch.zeros(32, 96)


def only_the_target(weights: dict[str, torch.Tensor]) -> None:
    for name in [name for name in weights if "mtp" in name]:
        del weights[name]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (only_the_target, "ships no MTP module; give another checkpoint or another --drafter"),
        (without("model.mtp_layers.0.hidden_layernorm.weight"), "does not fit .*missing hidden_layernorm.weight"),
        (without("model.mtp_layers.0.self_attn.k_proj.bias"), "does not fit .*missing model.layers.0.self_attn.k_proj"),
        (lambda weights: weights.update({"model.mtp_layers.0.gate": torch.ones(1)}), "unexpected model.layers.0.gate"),
        (wider, r"does not fit .*sizes \[32, 96\] and \[32, 64\]"),
    ],
)
def test_a_module_that_is_not_whole_is_refused(
    change: Callable[[dict[str, torch.Tensor]], None], says: str, tmp_path: Path
) -> None:
    checkpoint(FAMILIES["MiMo"], tmp_path / "a")
    weights = load_file(tmp_path / "a/model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "a/model.safetensors", {"format": "pt"})
    refusal(lambda: load_pair(str(tmp_path / "a"), drafter="mtp"), match=says)


def test_other_families_are_refused() -> None:
    refusal(lambda: load_pair(drafter="mtp"), "MTP modules of llama targets are not read, only those of deepseek_v3, ")
