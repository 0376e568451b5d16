"""Every kind of drafter on a CUDA device, as chains and as trees; the same tests on the CPU are slow ones."""

from __future__ import annotations

import pytest
import torch

from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.experiment.validate import output_identical, rounds_identical
from realrun.lm.static.llama import StaticLlama
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
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
devices = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])]
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


def check_identical(pair: Pair, policy: Policy, sampler: Sampler, tree_nodes: int = 0) -> None:
    """A recorded trace replays to the rounds and the text that really decoding gives."""
    prompts = lab_prompts(pair.tokenizer, 3)
    trace = record(pair, prompts, RecordSettings(6, NEW_TOKENS, sampler, tree_nodes))
    costs = cost_table(trace, ConstantCost(1e-3, 5e-3))
    replayed = replay(trace, policy, costs, log=True)
    assert replayed.truncated is None or not replayed.truncated.any()
    decoder = Decoder(*pair.make_drafter(), pair.eos_token_ids, sampler)
    runs = [decoder.decode(p.tokens, NEW_TOKENS, policy, sequence=i) for i, p in enumerate(prompts)]
    assert rounds_identical(replayed, runs) == 1.0
    assert output_identical(trace, runs) == 1.0


@devices
@samplers
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_chains_of_every_drafter(drafter: str, sampler: Sampler, device: str) -> None:
    pair = load_pair(drafter=drafter, device=device, dtype="float64")
    check_identical(pair, chain_policy(pair), sampler)


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
    check_identical(pair, make_policy(policy, settings), sampler, NODES)


@pytest.mark.gpu
@needs_cuda
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
            runs.append((decoded.tokens, decoded.tree_log()))
    half = len(runs) // 2
    assert runs[:half] == runs[half:]


@pytest.mark.gpu
@needs_cuda
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
