"""The lab's trained drafters: output is their target's own, and replay repeats every round that they really run."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from realrun.decode.decoder import Decoder
from realrun.decode.rounds import Decoded
from realrun.decode.sampling import Sampler
from realrun.experiment.validate import output_identical, rounds_identical
from realrun.measure.record import RecordSettings, record
from realrun.pairs.lab_drafters import LAB_DRAFTERS, drafter_training, has_lab_drafter
from realrun.pairs.pair import LOOKUP, Pair, load_pair
from realrun.pairs.prompts import Prompt, lab_prompts
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


TRAINED = [*filter(has_lab_drafter, LAB_DRAFTERS)]  # shipped, or in lab-weights/
PAIRS = [
    *((name, policy) for name in ("model", *TRAINED, LOOKUP) for policy in POLICIES if serves(name, policy)),
    *(("space", make_policy("space_k", {"k": DEPTH})) for name in TRAINED if name == "space"),
]
choices = pytest.mark.parametrize("sampler", CHOICES.values(), ids=CHOICES)


@cache
def recorded(name: str, sampler: Sampler) -> tuple[Pair, list[Prompt], Trace]:
    """A trace whose outputs are those of the target alone, without a cache and without the loop under test."""
    pair = load_pair(dtype="float64", drafter=name)
    prompts = lab_prompts(pair.tokenizer, 3)
    trace = record(pair, prompts, RecordSettings(DEPTH, TOKENS, sampler, NODES * pair.drafter.trees, WIDTH))
    for index, prompt in enumerate(prompts):
        output = trace.token[trace.offsets[index] : trace.offsets[index + 1]].tolist()
        with torch.inference_mode():
            logits = pair.target(input_ids=torch.tensor([[*prompt.tokens, *output]]), use_cache=False).logits[0]
        assert sampler.tokens(logits[len(prompt.tokens) - 1 : -1], index, 0).tolist() == output
    assert 0.1 < (trace.match_len > 0).mean() < 0.95
    return pair, prompts, trace


@pytest.mark.parametrize("name", TRAINED)
def test_it_ships_with_its_facts_and_its_predictor(name: str) -> None:
    pair = load_pair(drafter=name)
    assert pair.draft_name == f"lab/{name}"
    assert pair.predictor is not None and pair.predictor.facts["fingerprint"] == pair.fingerprint
    assert drafter_training(name)["target"]["name"] == "lab/target"


@pytest.mark.slow
@choices
@pytest.mark.parametrize(("name", "policy"), PAIRS, ids=lambda part: str(part))
def test_replay_repeats_every_real_round(name: str, sampler: Sampler, policy: Policy) -> None:
    pair, prompts, trace = recorded(name, sampler)
    replayed = replay(trace, policy, cost_table(trace, ConstantCost(1e-3, 1e-2), policy), seed=9, log=True)
    decoder = Decoder(*pair.make_drafter(), pair.eos_token_ids, sampler)
    runs, state = list[Decoded](), None
    for index, prompt in enumerate(prompts):
        runs.append(decoder.decode(prompt.tokens, TOKENS, policy, sequence=index, seed=9, state=state))
        state = runs[-1].state
    assert replayed.truncated is None or not replayed.truncated.any()
    assert rounds_identical(replayed, runs) == 1.0
    assert output_identical(trace, runs) == 1.0
    assert replayed.rounds is not None and len(replayed.rounds) == sum(len(run.rounds) for run in runs)
