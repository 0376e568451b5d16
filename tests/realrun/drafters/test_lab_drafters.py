"""The lab's trained drafters: output is their target's own, and replay repeats every round that they really run."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from realrun.decode.decoder import Decoder
from realrun.decode.rounds import Decoded
from realrun.decode.sampling import Sampler
from realrun.pairs.drafter_files import read_drafter
from realrun.pairs.pair import LAB_DRAFTERS, LAB_WEIGHTS, LOOKUP, Pair, load_pair
from realrun.pairs.prompts import Prompt, lab_prompts
from realrun.recording.record import RecordSettings, record
from realrun.validation.validate import output_identical, rounds_identical
from specsim.cost.model import ConstantCost
from specsim.policy.base import Policy
from specsim.policy.registry import make_policy
from specsim.policy.tree.base import TreePolicy
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from specsim.trace.trace import Trace

CHAINS_ONLY = ("space", LOOKUP)
DEPTH, TOKENS, NODES, WIDTH = 4, 48, 600, 6  # as deep as MEDUSA has heads
CHOICES = {"greedy": Sampler(), "gumbel": Sampler("gumbel", 0.8, seed=4)}
POLICIES = [
    make_policy("fixed_k", {"k": 1}),
    make_policy("fixed_k", {"k": DEPTH}),
    make_policy("beta_ts", {"alpha0": 3.0, "max_draft_tokens": DEPTH}),
    make_policy("cali_ts", {"max_draft_tokens": DEPTH}),
    make_policy("adaedl", {"gamma": 0.2, "lambda0": 0.3, "dynamic": False, "max_draft_tokens": DEPTH}),
    make_policy("max_confidence", {"lambda0": 0.3, "target_rate": 0.4, "epsilon": 0.3, "max_draft_tokens": DEPTH}),
    make_policy("vct", {"width": 2, "depth": DEPTH}),
    make_policy("cartesian", {"s1": 4, "s2": 2, "s3": 1, "s4": 1}),
    make_policy("eagle2", {"nodes": 8, "depth": DEPTH, "top_k": 3}),
    make_policy("pct", {"cost_ratio": 0.1, "leaf_threshold": 0.05, "width": 4, "max_depth": DEPTH}),
    make_policy("beta_ts_tree", {"alpha0": 3.0, "beam": 2, "width": 3, "max_depth": 3}),
]


def serves(name: str, policy: Policy) -> bool:
    """Whether this drafter drafts what the policy asks for."""
    reads_scores = policy.name == "cali_ts"
    return not (name in CHAINS_ONLY and isinstance(policy, TreePolicy)) and not (name == LOOKUP and reads_scores)


drafters = pytest.mark.parametrize("name", LAB_DRAFTERS)
PAIRS = [
    *((name, policy) for name in (*LAB_DRAFTERS, LOOKUP) for policy in POLICIES if serves(name, policy)),
    ("space", make_policy("space_k", {"k": DEPTH})),
]
choices = pytest.mark.parametrize("sampler", CHOICES.values(), ids=CHOICES)


@cache
def recorded(name: str, sampler: Sampler) -> tuple[Pair, list[Prompt], Trace]:
    pair = load_pair(dtype="float64", drafter=name)
    prompts = lab_prompts(pair.tokenizer, 3)
    return (
        pair,
        prompts,
        record(pair, prompts, RecordSettings(DEPTH, TOKENS, sampler, NODES * pair.drafter.trees, WIDTH)),
    )


def really_run(pair: Pair, prompts: list[Prompt], sampler: Sampler, policy: Policy | None) -> list[Decoded]:
    loop = Decoder(*pair.make_drafter(), pair.eos_token_ids, sampler)
    runs, state = list[Decoded](), None
    for index, prompt in enumerate(prompts):
        runs.append(loop.decode(prompt.tokens, TOKENS, policy, sequence=index, seed=9, state=state))
        state = runs[-1].state
    return runs


@torch.inference_mode()
def plain_output(pair: Pair, prompt: list[int], count: int, sampler: Sampler, sequence: int) -> list[int]:
    """The target alone, without a cache and without the loop under test."""
    tokens = list(prompt)
    for position in range(count):
        logits = pair.target(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1:]
        tokens.append(int(sampler.tokens(logits, sequence, position)))
    return tokens[len(prompt) :]


@drafters
def test_it_ships_with_its_facts_and_its_predictor(name: str) -> None:
    pair = load_pair(drafter=name)
    assert pair.draft_name == f"lab/{name}"
    assert pair.predictor is not None and pair.predictor.facts["fingerprint"] == pair.fingerprint
    assert read_drafter(LAB_WEIGHTS / name).facts["target"]["name"] == "lab/target"


@pytest.mark.parametrize("name", ["medusa-2", "space"])
def test_some_have_a_target_of_their_own_near_the_labs(name: str) -> None:
    theirs, tuned = load_pair().target, load_pair(drafter=name).target
    tokens = torch.tensor(
        [load_pair().tokenizer.encode("def add(self, other):\n    return self.total + other.total\n")]
    )
    with torch.inference_mode():
        p, q = (torch.log_softmax(model(tokens).logits.float(), -1) for model in (theirs, tuned))
    divergence_nats = (p.exp() * (p - q)).sum(-1).mean()
    assert 0 < divergence_nats < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LAB_DRAFTERS, LOOKUP])
@choices
def test_the_output_is_the_targets_own(name: str, sampler: Sampler) -> None:
    pair, prompts, trace = recorded(name, sampler)
    for index, prompt in enumerate(prompts):
        output = trace.token[trace.offsets[index] : trace.offsets[index + 1]].tolist()
        assert output == plain_output(pair, prompt.tokens, len(output), sampler, index)
    assert 0.1 < (trace.match_len > 0).mean() < 0.95


@pytest.mark.slow
@choices
@pytest.mark.parametrize(("name", "policy"), PAIRS, ids=lambda part: str(part))
def test_replay_repeats_every_real_round(name: str, sampler: Sampler, policy: Policy) -> None:
    pair, prompts, trace = recorded(name, sampler)
    replayed = replay(trace, policy, cost_table(trace, ConstantCost(1e-3, 1e-2), policy), seed=9, log=True)
    runs = really_run(pair, prompts, sampler, policy)
    assert replayed.truncated is None or not replayed.truncated.any()
    assert rounds_identical(replayed, runs) == 1.0
    assert output_identical(trace, runs) == 1.0
    assert replayed.rounds is not None and len(replayed.rounds) == sum(len(run.rounds) for run in runs)
