"""Every kind of drafter on a CUDA device: chains, trees and graphs; some of these tests run on the CPU too, slowly."""

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
from realrun.pairs.drafter_files import LAB_DRAFTERS, has_lab_drafter
from realrun.pairs.pair import Pair, load_pair
from realrun.pairs.prompts import lab_prompts
from specsim.cost.model import SPACE, ConstantCost
from specsim.policy.base import Policy
from specsim.policy.registry import make_policy
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table

NEW_TOKENS, NODES = 24, 128  # nodes recorded: all that the trees below ask for
DRAFTERS = ("model", "prompt-lookup", *filter(has_lab_drafter, LAB_DRAFTERS))

devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
samplers = pytest.mark.parametrize(
    "sampler", [Sampler("greedy"), Sampler("gumbel", 0.7, seed=5)], ids=["greedy", "gumbel"]
)
TREES = [
    ("model", "eagle2", {"nodes": 8, "top_k": 3, "depth": 3}),
    ("eesd", "eagle2", {"nodes": 8, "top_k": 3, "depth": 3}),
    ("edd", "pct", {"width": 3, "max_depth": 3}),
    ("eagle", "eagle2", {"nodes": 12, "top_k": 3, "depth": 4}),
    ("medusa-1", "sparse_tree", {}),
    ("medusa-2", "sparse_tree", {}),
]


def chain_policy(pair: Pair) -> Policy:
    return make_policy("space_k", {"k": 3}) if pair.drafter.name == SPACE else make_policy("fixed_k", {"k": 4})


def check_identical(pair: Pair, policy: Policy, settings: RecordSettings, count: int = 3) -> None:
    """A recorded trace replays to the rounds and the text that really decoding gives."""
    prompts = lab_prompts(pair.tokenizer, count)
    trace = record(pair, prompts, settings)
    costs = cost_table(trace, ConstantCost(1e-3, 5e-3))
    replayed = replay(trace, policy, costs, log=True)
    assert replayed.truncated is None or not replayed.truncated.any()
    decoder = Decoder(*pair.make_drafter(), pair.eos_token_ids, settings.sampler)
    runs = [decoder.decode(p.tokens, settings.max_new_tokens, policy, sequence=i) for i, p in enumerate(prompts)]
    assert rounds_identical(replayed, runs) == 1.0
    assert output_identical(trace, runs) == 1.0


@pytest.fixture(scope="module")
def cuda_pair() -> Pair:
    return load_pair(device="cuda", dtype="float64")


@pytest.mark.gpu
@samplers
def test_rounds_and_outputs_are_identical_on_cuda(cuda_pair: Pair, sampler: Sampler) -> None:
    check_identical(cuda_pair, make_policy("adaedl", {"lambda0": -0.1}), RecordSettings(16, 64, sampler), count=6)


@pytest.fixture(scope="module", params=["bfloat16", "bfloat16-float32-logits"])
def low_pair(request: pytest.FixtureRequest) -> Pair:
    return load_pair(device="cuda", dtype=request.param)


@pytest.mark.gpu
@samplers
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


@pytest.mark.gpu
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


@pytest.mark.gpu
@samplers
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


@pytest.mark.gpu
def test_noise_is_the_cpus_to_rounding() -> None:
    cpu = gumbel_noise(1, 2, 3, 70, 1000, torch.device("cpu"))
    cuda = gumbel_noise(1, 2, 3, 70, 1000, torch.device("cuda"))
    torch.testing.assert_close(cuda.cpu(), cpu, rtol=1e-12, atol=1e-12)


@pytest.mark.gpu
def test_a_profile_can_be_taken(cuda_pair: Pair) -> None:
    document = profile(cuda_pair, contexts=[64, 128], depth=4, limit_s=0)
    assert min(document["median_s"]["autoregressive"]) > 0
    assert document["provenance"]["device"] == torch.cuda.get_device_name()


@devices
@samplers
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_chains_of_every_drafter(drafter: str, sampler: Sampler, device: str) -> None:
    pair = load_pair(drafter=drafter, device=device, dtype="float64")
    check_identical(pair, chain_policy(pair), RecordSettings(6, NEW_TOKENS, sampler))


@devices
@samplers
@pytest.mark.parametrize(
    ("drafter", "policy", "settings"),
    [case for case in TREES if case[0] in DRAFTERS],
)
def test_trees_of_every_drafter(
    drafter: str, policy: str, settings: dict[str, float], sampler: Sampler, device: str
) -> None:
    pair = load_pair(drafter=drafter, device=device, dtype="float64")
    check_identical(pair, make_policy(policy, settings), RecordSettings(6, NEW_TOKENS, sampler, NODES))


@pytest.mark.gpu
@pytest.mark.parametrize("drafter", [name for name in ("model", "eagle", "edd", "medusa-1") if name in DRAFTERS])
def test_trees_in_bfloat16_are_the_same_with_and_without_graphs(drafter: str) -> None:
    pair = load_pair(drafter=drafter, device="cuda", dtype="bfloat16")
    policy = make_policy("eagle2", {"nodes": 8})
    runs = []
    for graphs in (True, False):
        decoder = Decoder(*pair.make_drafter(), pair.eos_token_ids, Sampler())
        for lm in (decoder.target, decoder.drafter.lm):
            if isinstance(lm, StaticLlama) and not graphs:
                lm.recorded.graphs = None
        for number, prompt in enumerate(lab_prompts(pair.tokenizer, 2)):
            decoded = decoder.decode(prompt.tokens, NEW_TOKENS, policy, sequence=number)
            runs.append((decoded.tokens, decoded.full_log()))
    half = len(runs) // 2
    assert runs[:half] == runs[half:]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.inference_mode()
def test_a_prompt_may_continue_a_cache(dtype: str) -> None:
    """In the precisions for which CUDA has several attention kernels, whose results are laid out differently."""
    pair = load_pair(device="cuda", dtype=dtype)
    (prompt,) = lab_prompts(pair.tokenizer, 1)
    tokens = [*prompt.tokens] * 12
    whole, parts = pair.make_drafter()[0], pair.make_drafter()[0]
    expected = whole.forward(tokens)
    parts.prefill(tokens[:7])
    got = parts.forward(tokens[7:])
    limit = 1e-4 if dtype == "float32" else 5e-2
    assert (got.double() - expected[7:].double()).norm() < limit * expected[7:].double().norm()
