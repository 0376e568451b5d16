"""Tiny targets with MEDUSA heads that know their texts about as well as good heads know a language."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from realrun.decode.acceptance_predictor import pending_token_states
from realrun.decode.decoder import Decoder
from realrun.decode.draft_model import DraftModel
from realrun.decode.sampling import Sampler
from realrun.drafters.medusa import MedusaHeads, MedusaKind
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from tests.support.tiny import POSITIONS, VOCAB, tiny_model, tiny_prompts, tiny_tokenizer

CHOICES = {"greedy": Sampler(), "gumbel": Sampler("gumbel", 0.8, seed=4)}
HEADS, TOKENS, STEPS = 4, 60, 10
CONFIGS = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "mistral": (MistralConfig, MistralForCausalLM)}


def own_texts(
    pair: Pair, sampler: Sampler, tokens: int = TOKENS, prompts: Sequence[Prompt] | None = None
) -> list[list[int]]:
    """What the target alone says after these prompts, the tiny prompts by default."""
    plain = Decoder(pair.target, DraftModel(pair.target, ()), pair.eos_token_ids, sampler)
    texts = [prompt.tokens for prompt in prompts or tiny_prompts()]
    return [plain.decode(text, tokens, None, sequence=number).tokens for number, text in enumerate(texts)]


@cache
@torch.inference_mode(False)  # tests may ask for it in inference mode
def medusa_pair(architecture: str = "llama", eos_token_ids: tuple[int, ...] = (), heads: int = HEADS) -> Pair:
    """A random target and heads fitted to the very texts that the tests decode."""
    target = tiny_model(2, seed=1) if architecture == "llama" else random_target(architecture)
    pair = Pair(
        target, MedusaKind(MedusaHeads(target, heads)), tiny_tokenizer(), "tiny/target", "tiny/heads", eos_token_ids
    )
    fit(pair, tiny_prompts())
    return pair


def random_target(architecture: str) -> Any:
    kind, model = CONFIGS[architecture]
    sliding: dict[str, Any] = {"sliding_window": None} if architecture == "mistral" else {}
    config = kind(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.15,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        **sliding,
    )
    torch.manual_seed(2)
    return model(config).double().eval()


def fit(pair: Pair, prompts: Sequence[Prompt], rate: float = 0.03) -> None:
    """A few steps of cross-entropy: head k learns the token k places after the pending token."""
    heads = pair.drafter.heads
    states: list[list[torch.Tensor]] = [[] for _ in heads.residual]
    truth: list[list[torch.Tensor]] = [[] for _ in heads.residual]
    for sampler in CHOICES.values():
        for prompt, text in zip(prompts, own_texts(pair, sampler, prompts=prompts), strict=True):
            produced = pending_token_states(pair.target, prompt.tokens, text)
            for k in range(len(heads)):
                states[k].append(produced[: len(text) - k].clone())
                truth[k].append(torch.tensor(text[k:]))
    optimiser = torch.optim.Adam(heads.parameters(), lr=rate)
    for _ in range(STEPS):
        losses = [
            F.cross_entropy(heads.logits(k, heads.state(k, torch.cat(states[k]))), torch.cat(truth[k]))
            for k in range(len(heads))
        ]
        optimiser.zero_grad()
        torch.stack(losses).sum().backward()
        optimiser.step()
    heads.eval().requires_grad_(False)
