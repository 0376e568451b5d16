"""The same claims on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from realrun.choice import Choice, gumbel_noise
from realrun.decode import Decoder
from realrun.drafters.draft_model import DraftModel
from realrun.models import Pair, load_pair
from realrun.profile import profile
from realrun.prompts import lab_prompts
from realrun.record import RecordSettings, record
from realrun.validate import output_identical, rounds_identical
from specsim.cost import ConstantCost
from specsim.policy import make_policy
from specsim.replay import compile_for, replay

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def cuda_pair() -> Pair:
    return load_pair(device="cuda", dtype="float64")


@pytest.mark.parametrize("choice", [Choice("greedy"), Choice("gumbel", 0.7, seed=5)], ids=["greedy", "gumbel"])
def test_rounds_and_outputs_are_identical_on_cuda(cuda_pair: Pair, choice: Choice) -> None:
    prompts = lab_prompts(cuda_pair.tokenizer, 6)
    trace = record(cuda_pair, prompts, RecordSettings(16, 64, choice))
    policy = make_policy("adaedl", {"lambda0": -0.1})
    replayed = replay(trace, policy, compile_for(trace, ConstantCost(1e-3, 5e-3)), log=True)
    drafter = DraftModel(cuda_pair.draft, cuda_pair.eos_token_ids)
    decoder = Decoder(cuda_pair.target, drafter, cuda_pair.eos_token_ids, choice)
    runs = [decoder.decode(p.tokens, 64, policy, sequence=i) for i, p in enumerate(prompts)]
    assert rounds_identical(replayed, runs) == 1.0
    assert output_identical(trace, runs) == 1.0


def test_noise_is_the_cpus_to_rounding() -> None:
    cpu = gumbel_noise(1, 2, 3, 70, 1000, torch.device("cpu"))
    cuda = gumbel_noise(1, 2, 3, 70, 1000, torch.device("cuda"))
    torch.testing.assert_close(cuda.cpu(), cpu, rtol=1e-12, atol=1e-12)


def test_a_profile_can_be_taken(cuda_pair: Pair) -> None:
    document = profile(cuda_pair, contexts=[64, 128], depth=4, repeats=3)
    assert min(document["median_s"]["autoregressive"]) > 0
    assert document["provenance"]["device"] == torch.cuda.get_device_name()
