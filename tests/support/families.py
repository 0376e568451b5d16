"""Tiny random models of many families, and whether a drafter serves each: made, recorded and decoded, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.drafters.independent import IndependentKind
from realrun.drafters.lookup import LookupKind
from realrun.drafters.self_sd import SelfSDKind
from realrun.experiment.validate import output_identical, rounds_identical
from realrun.lm.cached import layer_types
from realrun.lm.recurrent import check_continues
from realrun.lm.variants import SkippedSublayers
from realrun.measure.record import RecordSettings, record
from realrun.pairs.drafter_files import load_drafter
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from specsim.cost.model import ConstantCost
from specsim.io.errors import InputError
from specsim.policy.registry import make_policy
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from tests.support.small_targets import alone
from tests.support.tiny import POSITIONS, VOCAB, tiny_prompts
from tests.support.trainings import CASES, LOOP

WINDOW = 8  # of all layers with a window; texts are longer
LAYERS = 3
DEPTH, WIDTH, TOKENS = 3, 2, 20
TREE_NODES = 2 + 4 + 8
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
LLAMA: dict[str, Any] = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2}
HEADS = {"head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
PLAIN_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}
OF_QWEN = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}

FAMILIES: dict[str, Callable[[], Any]] = {
    "Llama": lambda: hf.LlamaConfig(**LLAMA),
    "Qwen2": lambda: hf.Qwen2Config(**LLAMA),
    "Qwen2, with windows": lambda: hf.Qwen2Config(**LLAMA, **OF_QWEN),
    "Qwen3": lambda: hf.Qwen3Config(**LLAMA, **HEADS),
    "Gemma": lambda: hf.GemmaConfig(**LLAMA, **HEADS),
    "Gemma 2": lambda: hf.Gemma2Config(**LLAMA, **HEADS, **WINDOWS, query_pre_attn_scalar=8),
    "Gemma 3": lambda: hf.Gemma3TextConfig(**LLAMA, **HEADS, **WINDOWS, query_pre_attn_scalar=8),
    "Phi-3": lambda: hf.Phi3Config(**LLAMA, sliding_window=None),
    "GPT-2": lambda: hf.GPT2Config(**SIZES),
    "GPT-NeoX": lambda: hf.GPTNeoXConfig(**SIZES, intermediate_size=64),
    "OLMo2": lambda: hf.Olmo2Config(**LLAMA),
    "Mistral, with a window": lambda: hf.MistralConfig(**LLAMA, sliding_window=WINDOW),
    "Mixtral": lambda: hf.MixtralConfig(**LLAMA, num_local_experts=4, num_experts_per_tok=2),
    "Qwen2-MoE": lambda: hf.Qwen2MoeConfig(**LLAMA, **EXPERTS, num_experts=4, shared_expert_intermediate_size=32),
    "Qwen3-MoE": lambda: hf.Qwen3MoeConfig(**LLAMA, **EXPERTS, **HEADS, num_experts=4),
    "gpt-oss": lambda: hf.GptOssConfig(
        **LLAMA, **HEADS, **WINDOWS, num_local_experts=4, num_experts_per_tok=2, rope_parameters=PLAIN_ROTARY
    ),
    "Mamba": lambda: hf.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=LAYERS),
}


@cache
def family_model(family: str) -> Any:
    """In float64, its first layers more decisive than its last, so that drafters of few layers are often right."""
    torch.manual_seed(3)
    model = hf.AutoModelForCausalLM.from_config(FAMILIES[family](), experts_implementation="eager").double().eval()
    layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    with torch.no_grad():
        for number, layer in enumerate(layers):
            for name, parameter in layer.named_parameters():
                if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj", "c_proj.weight", "dense.weight")):
                    parameter *= 0.5**number
    return model


def shallow_draft(target: Any) -> Any:
    """A model of the target's first two layers."""
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = LAYERS - 1
    for name in ("layer_types", "layers_block_type"):
        if vars(config).get(name):  # elsewhere they follow from the number
            setattr(config, name, vars(config)[name][: LAYERS - 1])
    draft = type(target)(config).to(target.dtype).eval()
    wanted = draft.state_dict().keys()
    draft.load_state_dict({name: value for name, value in target.state_dict().items() if name in wanted})
    return draft


def trained(name: str) -> Callable[[Pair, Path], Pair]:
    """Train a step, and write the file."""

    def make(pair: Pair, folder: Path) -> Pair:
        CASES[name].run(folder, pair, loop=replace(LOOP, steps=1))
        target, drafter = load_drafter(folder, pair.target)
        return replace(pair, target=target, drafter=drafter)

    return make


def skipping(pair: Pair, folder: Path) -> Pair:
    SelfSDKind.check_target(pair.target)
    return replace(pair, drafter=SelfSDKind(SkippedSublayers(frozenset({2}), frozenset({1, 2}))))


MAKERS: dict[str, Callable[[Pair, Path], Pair]] = {
    "draft model": lambda pair, folder: replace(pair, drafter=IndependentKind(shallow_draft(pair.target))),
    "prompt lookup": lambda pair, folder: replace(pair, drafter=LookupKind()),
    "EESD": trained("eesd"),
    "MEDUSA-1": trained("medusa"),
    "MEDUSA-2": trained("medusa one stage"),
    "EDD": trained("edd"),
    "EAGLE": trained("eagle"),
    "EAGLE-3": trained("eagle3"),
    "SPACE": trained("space"),
    "Self-SD": skipping,
}


def outcome(family: str, drafter: str, folder: Path) -> str:
    """What this drafter drafts for this family, "chains" or "chains and trees"; or why it is refused.

    Where it is not refused before anything is written: a step of training, a recording, and decoding whose rounds
    are the replay's and whose text is what the target says by itself.
    """
    target = copy.deepcopy(family_model(family))
    try:
        layer_types(target.config)  # as where a model is loaded
        check_continues(target)
        pair = MAKERS[drafter](alone(target), folder)
    except InputError as error:
        if "\n" in str(error) or any(folder.rglob("*")):
            raise AssertionError(f"not in one line, or not before anything was written: {error}") from error
        return str(error)
    check_decoding(pair)
    return "chains and trees" if pair.trees else "chains"


@torch.inference_mode()
def own_text(target: Any, prompt: list[int]) -> list[int]:
    """What the target says greedily, without a cache and without the loop."""
    tokens = list(prompt)
    for _ in range(TOKENS):
        tokens.append(int(target(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def check_decoding(pair: Pair, prompts: list[Prompt] | None = None) -> int:
    """Recorded and decoded alike, and as the target alone; how many drafted tokens were accepted."""
    prompts = prompts or [Prompt("one", [17]), *tiny_prompts(2, seed=7)]
    trees = pair.trees
    settings = RecordSettings(DEPTH, TOKENS, Sampler(), TREE_NODES if trees else 0, WIDTH)
    trace = record(pair, prompts, settings)
    decoder = Decoder(*pair.make_drafter(), pair.eos_token_ids, Sampler())
    texts, accepted = [own_text(pair.target, prompt.tokens) for prompt in prompts], 0
    policies = [make_policy("fixed_k", {"k": DEPTH})]
    policies += [make_policy("vct", {"width": WIDTH, "depth": DEPTH})] if trees else []
    for policy in policies:
        replayed = replay(trace, policy, cost_table(trace, ConstantCost(1e-3, 1e-2), policy), log=True)
        runs = [decoder.decode(prompt.tokens, TOKENS, policy, sequence=number) for number, prompt in enumerate(prompts)]
        assert [run.tokens for run in runs] == texts
        assert output_identical(trace, runs) == rounds_identical(replayed, runs) == 1.0
        accepted += sum(round_.accepted for run in runs for round_ in run.rounds)
    return accepted
