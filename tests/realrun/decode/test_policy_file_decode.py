"""A user's own policy file in the real loop: the same rounds as in the replay."""

from __future__ import annotations

from pathlib import Path

from docs.pages import block
from realrun.decode.decoder import Decoder
from realrun.decode.draft_model import DraftModel
from realrun.decode.sampling import Sampler
from realrun.measure.record import RecordSettings, record
from specsim.cost.model import ConstantCost
from specsim.policy.registry import make_policy
from specsim.replaying.replay import replay
from specsim.replaying.table import cost_table
from tests.support.tiny import tiny_pair, tiny_prompts


def test_the_readme_policy_decodes_as_it_replays(tmp_path: Path) -> None:
    path = tmp_path / "prob_floor.py"
    path.write_text(block("extending.md", "class ProbFloor"))
    pair, prompts, sampler = tiny_pair(), tiny_prompts(3), Sampler("greedy")
    trace = record(pair, prompts, RecordSettings(5, 24, sampler))
    policy = make_policy(str(path), {"floor": 0.05, "max_draft_tokens": 5})
    replayed = replay(trace, policy, cost_table(trace, ConstantCost(1e-3, 1e-2)), log=True)
    decoder = Decoder(pair.target, DraftModel(pair.drafter.model, pair.eos_token_ids), pair.eos_token_ids, sampler)
    assert replayed.rounds is not None
    lengths = set()
    for index, prompt in enumerate(prompts):
        decoded = decoder.decode(prompt.tokens, 24, policy, sequence=int(trace.sequence_id[index]))
        expected = [row[1:] for row in replayed.rounds.rows() if row[0] == index]
        assert decoded.tree_log() == expected
        lengths |= {drafted for _, drafted, *_ in expected}
    assert len(lengths) > 2, "the policy decides, not its limit"
