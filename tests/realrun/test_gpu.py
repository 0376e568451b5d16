"""The same claims on a CUDA device."""

from __future__ import annotations

import pytest
import torch

from realrun.decode.decoder import Decoder
from realrun.decode.draft_model import DraftModel
from realrun.decode.rounds import Round, RoundContext
from realrun.decode.sampling import Sampler, gumbel_noise
from realrun.experiment.validate import output_identical, rounds_identical
from realrun.lm.static.llama import StaticLlama
from realrun.measure.profile import profile
from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import Pair, load_pair
from realrun.pairs.prompts import lab_prompts
from specsim.cost.model import ConstantCost
from specsim.policy.registry import make_policy
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def cuda_pair() -> Pair:
    return load_pair(device="cuda", dtype="float64")


@pytest.mark.parametrize("sampler", [Sampler("greedy"), Sampler("gumbel", 0.7, seed=5)], ids=["greedy", "gumbel"])
def test_rounds_and_outputs_are_identical_on_cuda(cuda_pair: Pair, sampler: Sampler) -> None:
    prompts = lab_prompts(cuda_pair.tokenizer, 6)
    trace = record(cuda_pair, prompts, RecordSettings(16, 64, sampler))
    policy = make_policy("adaedl", {"lambda0": -0.1})
    replayed = replay(trace, policy, cost_table(trace, ConstantCost(1e-3, 5e-3)), log=True)
    drafter = DraftModel(cuda_pair.drafter.model, cuda_pair.eos_token_ids)
    decoder = Decoder(cuda_pair.target, drafter, cuda_pair.eos_token_ids, sampler)
    runs = [decoder.decode(p.tokens, 64, policy, sequence=i) for i, p in enumerate(prompts)]
    assert rounds_identical(replayed, runs) == 1.0
    assert output_identical(trace, runs) == 1.0


@pytest.fixture(scope="module", params=["bfloat16", "bfloat16-float32-logits"])
def low_pair(request: pytest.FixtureRequest) -> Pair:
    return load_pair(device="cuda", dtype=request.param)


@pytest.mark.parametrize("sampler", [Sampler("greedy"), Sampler("gumbel", 0.7, seed=5)], ids=["greedy", "gumbel"])
def test_rounds_are_identical_with_and_without_graphs(low_pair: Pair, sampler: Sampler) -> None:
    policy = make_policy("max_confidence", {"lambda0": 0.3, "max_draft_tokens": 6})
    runs = []
    for graphs in (True, False):
        drafter = DraftModel(low_pair.drafter.model, low_pair.eos_token_ids)
        decoder = Decoder(low_pair.target, drafter, low_pair.eos_token_ids, sampler)
        for lm in (decoder.target, drafter.lm):
            assert isinstance(lm, StaticLlama) and lm.recorded.graphs is not None
            if not graphs:
                lm.recorded.graphs = None
        for number, prompt in enumerate(lab_prompts(low_pair.tokenizer, 3)):
            for arm in (policy, None):
                decoded = decoder.decode(prompt.tokens, 64, arm, sequence=number)
                runs.append((graphs, decoded.tokens, decoded.log()))
    half = len(runs) // 2
    assert [run[1:] for run in runs[:half]] == [run[1:] for run in runs[half:]]


def test_nothing_is_recorded_on_the_clock(low_pair: Pair) -> None:
    drafter = DraftModel(low_pair.drafter.model, ())
    decoder = Decoder(low_pair.target, drafter, (), Sampler())
    (prompt,) = lab_prompts(low_pair.tokenizer, 1)
    policy = make_policy("fixed_k", {"k": 5})
    decoder.decode(prompt.tokens, 32, policy)
    for lm, sizes in ((decoder.target, range(1, 7)), (drafter.lm, (1, 2))):
        assert isinstance(lm, StaticLlama)
        recorded = {key[0] for key in lm.recorded.replays if isinstance(key, tuple)}
        assert recorded == set(sizes)


@pytest.mark.parametrize("sampler", [Sampler("greedy"), Sampler("gumbel", 0.7, seed=5)], ids=["greedy", "gumbel"])
@torch.inference_mode()
def test_every_pass_is_one_graph_and_one_copy_to_the_host(low_pair: Pair, sampler: Sampler) -> None:
    drafter = DraftModel(low_pair.drafter.model, ())
    decoder = Decoder(low_pair.target, drafter, (), sampler)
    policy = make_policy("fixed_k", {"k": 6})
    (prompt,) = lab_prompts(low_pair.tokenizer, 1)
    decoder.decode(prompt.tokens, 64, policy)  # compiles, records
    tokens = list(prompt.tokens)
    decoder.target.reset()
    decoder.target.prefill(tokens[:-1])
    drafter.begin(tokens[:-1])
    rounds: list[Round] = []
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as seen:
        for _ in range(3):
            t = len(tokens) - len(prompt.tokens)
            decoder.round(
                tokens, RoundContext(decoder.sampler, 0, t, 6, 0), policy, policy.initial_state(policy.params), rounds
            )
    counts = {event.key: event.count for event in seen.key_averages()}
    passes = sum(r.drafted + 1 for r in rounds)
    assert passes == 21
    assert sum(count for key, count in counts.items() if "Memcpy DtoH" in key) == passes
    # A round's first draft step is told its tokens and the target's pass its own; where the text begins, once.
    assert sum(count for key, count in counts.items() if "Memcpy HtoD" in key) <= 2 * len(rounds) + 1
    assert counts["cudaGraphLaunch"] == passes
    assert counts.get("cudaDeviceSynchronize", 0) <= len(rounds) + 1  # one a round, and the profiler's own


def test_noise_is_the_cpus_to_rounding() -> None:
    cpu = gumbel_noise(1, 2, 3, 70, 1000, torch.device("cpu"))
    cuda = gumbel_noise(1, 2, 3, 70, 1000, torch.device("cuda"))
    torch.testing.assert_close(cuda.cpu(), cpu, rtol=1e-12, atol=1e-12)


def test_a_profile_can_be_taken(cuda_pair: Pair) -> None:
    document = profile(cuda_pair, contexts=[64, 128], depth=4, limit_s=0)
    assert min(document["median_s"]["autoregressive"]) > 0
    assert document["provenance"]["device"] == torch.cuda.get_device_name()
