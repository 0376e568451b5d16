"""Typical acceptance replayed: against real rounds on the rule's own text, and against enumeration on another."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.decode.verify import TypicalAcceptance
from realrun.measure.record import RecordSettings, record
from realrun.pairs.pair import Pair
from specsim.cost.model import ConstantCost
from specsim.policy.base import Policy
from specsim.policy.registry import make_policy
from specsim.replaying.replay import Replay, replay
from specsim.replaying.table import cost_table
from specsim.trace.files import read_trace, write_trace
from specsim.trace.trace import Trace
from specsim.trace.typical import typical_thresholds, typically_accepted
from tests.specsim.replaying.test_tree_replay import COST
from tests.support.checks import refusal
from tests.support.pairs.medusa import medusa_pair
from tests.support.tiny import tiny_pair, tiny_prompts

SAMPLER, TOKENS, PROMPTS = Sampler("greedy-draft", 0.5, seed=4), 24, tiny_prompts(3)
SETTINGS = RecordSettings(4, TOKENS, SAMPLER, tree_nodes=120, tree_width=3, typical=True)
TREES: dict[str, Policy] = {
    "cartesian": make_policy("cartesian", {"s1": 3, "s2": 2, "s3": 2, "s4": 1}),
    "chain": make_policy("cartesian", {"s1": 1, "s2": 1, "s3": 1, "s4": 1}),
    "eagle2": make_policy("eagle2", {"top_k": 3, "depth": 4, "nodes": 9}),
}
PAIRS = {"medusa": lambda: medusa_pair(), "draft model": lambda: tiny_pair((5, 9))}


def replayed(trace: Trace, policy: Policy) -> Replay:
    return replay(trace, policy, cost_table(trace, COST), log=True)


@cache
def plain_trace() -> Trace:
    """On the text that the target samples by itself."""
    return record(medusa_pair(), PROMPTS, SETTINGS)


@pytest.mark.parametrize("epsilon", [0.001, 0.01, 0.1])
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("name", PAIRS)
def test_on_the_rules_own_text_a_replay_has_the_rounds_of_the_real_run(name: str, tree: str, epsilon: float) -> None:
    pair: Pair = PAIRS[name]()
    rule = TypicalAcceptance(epsilon)
    decoder = Decoder(*pair.make_drafter(), pair.eos_token_ids, SAMPLER, tree_verifier=rule)
    runs = [decoder.decode(p.tokens, TOKENS, TREES[tree], sequence=i) for i, p in enumerate(PROMPTS)]
    trace = record(pair, PROMPTS, SETTINGS, texts={i: run.tokens for i, run in enumerate(runs)})
    result = replayed(typically_accepted(trace, epsilon), TREES[tree])
    assert result.truncated is not None and not result.truncated.any()
    assert result.rounds is not None
    rows = np.stack([getattr(result.rounds, field) for field in ("t", "drafted", "accepted", "verified", "last")], 1)
    logs = [row[:5] for run in runs for row in run.full_log()]
    assert rows.tolist() == [list(row) for row in logs]
    if tree == "chain":  # which a chain policy drafts as well
        chain = replay(
            typically_accepted(trace, epsilon), make_policy("fixed_k", {"k": 4}), cost_table(trace, ConstantCost(1, 1))
        )
        assert (chain.num_rounds == result.num_rounds).all()
        ends = len(pair.eos_token_ids) > 0  # a chain ends where its drafter drafts the end of the text
        assert ends or (chain.accepted == result.accepted).all()


@pytest.mark.parametrize(("epsilon", "delta"), [(0.02, None), (0.3, 0.3)])
def test_every_node_and_round_is_as_enumerated_by_passes_without_a_cache(epsilon: float, delta: float | None) -> None:
    trace, pair = plain_trace(), medusa_pair()
    tree, prompts = trace.tree, PROMPTS
    assert tree is not None and tree.target_prob is not None and tree.target_entropy_nats is not None
    bound = math.sqrt(epsilon) if delta is None else delta

    @cache
    @torch.inference_mode()
    def after(*tokens: int) -> np.ndarray:
        logits = pair.target(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].numpy()
        weights = np.exp(logits / SAMPLER.temperature)
        result: np.ndarray = weights / weights.sum()
        return result

    result = replayed(typically_accepted(trace, epsilon, delta), TREES["cartesian"])
    assert result.rounds is not None
    checked, longest = 0, []
    rounds = zip(result.rounds.sequence.tolist(), result.rounds.t.tolist(), strict=True)
    for s, t in [*rounds][::2]:
        row = int(trace.offsets[s]) + t
        text = [*prompts[s].tokens, *trace.token[trace.offsets[s] : row].tolist()]
        paths: dict[int, tuple[int, ...]] = {0: ()}
        accepted = {0}
        for node in range(1, int(tree.count[row]) + 1):
            column, parent = node - 1, int(tree.parent[row, node - 1])
            p, token = after(*text, *paths[parent]), int(tree.token[row, column])
            entropy = -float((p * np.log(p)).sum())
            assert tree.target_prob[row, column] == pytest.approx(p[token], rel=1e-5, abs=1e-9)
            assert tree.target_entropy_nats[row, column] == pytest.approx(entropy, rel=1e-5)
            paths[node] = (*paths[parent], token)
            level = len(paths[node])
            drafted = tree.rank[row, column] < (3, 2, 2, 1)[level - 1] and level <= TOKENS - t - 1
            if drafted and parent in accepted and p[token] > min(epsilon, bound * math.exp(-entropy)):
                accepted.add(node)
            checked += 1
        longest.append(max(len(paths[node]) for node in accepted))
    assert result.rounds.accepted[::2].tolist() == longest
    assert checked > 500 and len({*longest}) > 2


def test_files_hold_it_and_a_policy_is_predicted_by_the_rule(tmp_path: Path) -> None:
    trace = plain_trace()
    write_trace(trace, tmp_path / "trace")
    again = read_trace(tmp_path / "trace")
    assert again.tree is not None and trace.tree is not None
    for name in ("target_prob", "target_entropy_nats"):
        assert np.array_equal(getattr(again.tree, name), getattr(trace.tree, name))
    thresholds = (0.0, None), (0.1, None), (9.0, 9e9)
    rounds = [replayed(typically_accepted(again, *pair), TREES["eagle2"]).num_rounds.sum() for pair in thresholds]
    assert rounds[0] < rounds[1] < rounds[2] == len(trace.token)


def test_what_the_rule_cannot_judge_is_refused() -> None:
    trace = plain_trace()
    assert trace.tree is not None
    bare = replace(trace, tree=replace(trace.tree, target_prob=None))
    refusal(
        lambda: typically_accepted(bare),
        "record it with `realrun record --mode greedy-draft --tree-nodes NODES --typical`",
    )
    refusal(lambda: write_trace(typically_accepted(trace), "judged"), "write the recording")
    refusal(lambda: typically_accepted(trace, -0.1), "epsilon=-0.1 of typical acceptance is out of range")
    refusal(lambda: typical_thresholds("typical:high"), "unknown rule of acceptance 'typical:high'; give typical")
    refusal(lambda: RecordSettings(typical=True, sampler=SAMPLER), "judges trees at a temperature")
    narrow = replace(SETTINGS, tree_nodes=4, tree_width=1)
    chains = typically_accepted(record(medusa_pair(), PROMPTS[:1], narrow), 0.0)
    assert (result := replayed(chains, TREES["cartesian"])).truncated is not None and result.truncated.all()
    assert not replayed(chains, TREES["chain"]).truncated.any()  # type: ignore[union-attr]
