"""A target and a drafter over four tokens that disagree strongly, and a test of what a decoder samples from them."""

from __future__ import annotations

from collections import Counter
from functools import cache

import torch
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM

from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from specsim.policy.base import Policy
from tests.support.exact_distribution import Path, continue_text
from tests.support.sampling_distribution import Distribution, warped

VOCABULARY, LENGTH = 4, 3
PROMPT = [1, 3, 0, 2]
SAMPLED = Sampler("rejection", 1.2, seed=5, top_p=0.8)


@cache
def models() -> tuple[LlamaForCausalLM, LlamaForCausalLM]:
    def model(seed: int) -> LlamaForCausalLM:
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=16, initializer_range=0.5, tie_word_embeddings=False,
            bos_token_id=0, eos_token_id=0, pad_token_id=None,
        )  # fmt: skip
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).double().eval()

    return model(2), model(4)


@cache
def target_distribution() -> Distribution:
    """Of the first tokens, from plain passes of the target over every path."""
    target, _ = models()
    distribution: Distribution = {}

    def after(path: Path) -> list[float]:
        with torch.inference_mode():
            logits = target(input_ids=torch.tensor([[*PROMPT, *path]]), use_cache=False).logits[0, -1]
        return warped(logits.tolist(), SAMPLED.temperature, SAMPLED.top_p)

    continue_text(distribution, after, (), 1.0, LENGTH)
    return distribution


def p_value(decoder: Decoder, policy: Policy | None, samples: int) -> float:
    """Of a chi-square test of the decoder's first tokens against the target's distribution; 0 for impossible tokens.

    The rounds must accept different numbers of tokens, else the test would prove little.
    """
    runs = [decoder.decode(PROMPT, LENGTH + 1, policy, sequence=number) for number in range(samples)]
    assert policy is None or len({r.accepted for run in runs for r in run.rounds}) > 1
    counts, distribution = Counter(tuple(run.tokens[:LENGTH]) for run in runs), target_distribution()
    if not counts.keys() <= distribution.keys():
        return 0.0
    often = [path for path, chance in distribution.items() if samples * chance >= 5]
    seen, expected = [counts[path] for path in often], [samples * distribution[path] for path in often]
    return float(stats.chisquare([*seen, samples - sum(seen)], [*expected, samples - sum(expected)]).pvalue)
