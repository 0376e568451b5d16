"""A target and a draft model so small and random that whole decodings take milliseconds."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from realrun.decode.acceptance_predictor import Predictor
from realrun.drafters.independent import IndependentKind
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt

VOCAB = 97
POSITIONS = 160


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character: 0 is the end of text, then the printable ASCII, then the newline."""
    characters = ["<eos>", *(chr(code) for code in range(32, 127)), "\n"]
    vocab = {character: index for index, character in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def tiny_model(
    layers: int,
    seed: int,
    dtype: torch.dtype = torch.float64,
    kind: tuple[Any, Any] = (LlamaConfig, LlamaForCausalLM),
    **special: Any,
) -> Any:
    """A random model. kind : its configuration's class and its own; special : settings of its own"""
    config = kind[0](
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
        **{
            "max_position_embeddings": POSITIONS,
            "initializer_range": 0.15,
            "tie_word_embeddings": True,
            **special,
        },
    )
    torch.manual_seed(seed)
    return kind[1](config).to(dtype).eval()


@cache
def tiny_pair(eos_token_ids: tuple[int, ...] = ()) -> Pair:
    """A pair that agrees about as often as not: the draft has the target's embeddings and first layer."""
    target, draft = tiny_model(2, seed=1), tiny_model(1, seed=2)
    draft.load_state_dict({k: v for k, v in target.state_dict().items() if ".layers.1." not in k})
    return Pair(target, IndependentKind(draft), tiny_tokenizer(), "tiny/target", "tiny/draft", eos_token_ids)


def random_prompts(count: int, seed: int = 0, lengths: tuple[int, int] = (3, 20)) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, VOCAB, rng.integers(*lengths)).tolist() for _ in range(count)]


def tiny_prompts(count: int = 6, seed: int = 0) -> list[Prompt]:
    """Random prompts of three domains in turn."""
    names = ("code", "prose", "tests")
    return [Prompt(names[i % 3], tokens) for i, tokens in enumerate(random_prompts(count, seed))]


def random_predictor(pair: Pair, matrices: int = 3) -> Predictor:
    """Scores that spread over (0, 1)."""
    generator = torch.Generator().manual_seed(9)
    d_target, d_draft = pair.target.config.hidden_size, pair.draft_config.hidden_size

    def normal(*shape: int) -> torch.Tensor:
        return 0.3 * torch.randn(*shape, generator=generator, dtype=torch.float64)

    facts = {"fingerprint": pair.fingerprint, "target": pair.target_name, "drafter": pair.draft_name}
    return Predictor(normal(matrices, d_target), normal(d_draft), normal(matrices), facts)
