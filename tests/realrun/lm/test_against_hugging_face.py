"""The library's own assisted generation as an independent witness."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from realrun.decode.sampling import Sampler
from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from specsim.cost.model import ConstantCost
from specsim.policy.registry import make_policy
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table

NEW_TOKENS = 96
PROMPTS = 6


@contextmanager
def counted_passes(pair: Pair) -> Iterator[list[int]]:
    """Sizes of the target's forward passes, one entry each."""
    sizes: list[int] = []

    def note(_module: torch.nn.Module, _args: object, kwargs: dict[str, torch.Tensor]) -> None:
        sizes.append(kwargs["input_ids"].shape[1])

    handle = pair.target.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield sizes
    finally:
        handle.remove()


def assisted_generation(pair: Pair, prompt: list[int], k: int) -> list[int]:
    """Output of `generate` with the draft model as assistant, K constant, no confidence threshold."""
    config = pair.drafter.model.generation_config
    config.num_assistant_tokens = k
    config.num_assistant_tokens_schedule = "constant"
    config.assistant_confidence_threshold = 0.0
    ids = torch.tensor([prompt])
    out = pair.target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        assistant_model=pair.drafter.model,
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.filterwarnings("ignore")  # the library warns about its own defaults
@pytest.mark.parametrize(
    ("k", "count"), [(4, 1), *(pytest.param(k, PROMPTS, marks=pytest.mark.slow) for k in (1, 3, 5, 8))]
)
def test_same_text_and_as_many_target_passes_as_the_replay_has_rounds(
    k: int, count: int, lab_pair64: Pair, prompts: list[Prompt]
) -> None:
    some = prompts[:: len(prompts) // count][:count]
    trace = record(lab_pair64, some, RecordSettings(8, NEW_TOKENS, Sampler("greedy")))
    policy = make_policy("fixed_k", {"k": k})
    replayed = replay(trace, policy, cost_table(trace, ConstantCost(1e-3, 5e-3)))
    for number, prompt in enumerate(some):
        with counted_passes(lab_pair64) as sizes:
            output = assisted_generation(lab_pair64, prompt.tokens, k)
        recorded = trace.token[trace.offsets[number] : trace.offsets[number + 1]].tolist()
        assert output == recorded
        assert len(sizes) == replayed.num_rounds[number]
