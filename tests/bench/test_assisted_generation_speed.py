"""Speed of the decoding loop beside the library's own assisted generation."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from realrun.decode.decoder import Decoder
from realrun.decode.draft_model import DraftModel
from realrun.decode.sampling import Sampler
from realrun.pairs.pair import load_pair
from realrun.pairs.prompts import lab_prompts
from specsim.policy.registry import make_policy
from tests.realrun.lm.test_against_hugging_face import NEW_TOKENS, PROMPTS, assisted_generation

pytestmark = pytest.mark.bench


@pytest.mark.filterwarnings("ignore")
def test_at_least_one_and_a_half_times_its_speed() -> None:
    torch.set_num_threads(1)
    pair = load_pair()
    prompts = lab_prompts(pair.tokenizer, 21)
    policy = make_policy("fixed_k", {"k": 4})
    drafter = DraftModel(pair.drafter.model, pair.eos_token_ids)
    decoder = Decoder(pair.target, drafter, pair.eos_token_ids, Sampler("greedy"))
    ratios = []
    for number, prompt in enumerate([prompts[0], *prompts[:: len(prompts) // PROMPTS]]):
        start = time.perf_counter()
        ours = decoder.decode(prompt.tokens, NEW_TOKENS, policy).tokens
        middle = time.perf_counter()
        theirs = assisted_generation(pair, prompt.tokens, 4)
        end = time.perf_counter()
        if number:  # the first one warms up
            ratios.append((end - middle) / (middle - start) * len(ours) / len(theirs))
    print(f"\ntokens/s over assisted generation's: median {np.median(ratios):.2f}, {np.round(ratios, 2)}")
    assert np.median(ratios) >= 1.5
