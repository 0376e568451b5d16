"""A sequence decoded round by round is the sequence decoded at once."""

from __future__ import annotations

import pytest

from realrun.decode.decoder import Decoder, Decoding
from realrun.decode.sampling import Sampler
from specsim.policy.registry import make_policy
from tests.support.pairs.inside import pair_of
from tests.support.tiny import random_prompts, tiny_pair

SAMPLER = Sampler("gumbel", 0.8, seed=4)
POLICIES = [
    None,
    make_policy("fixed_k", {"k": 3}),
    make_policy("beta_ts", {"max_draft_tokens": 4}),
    make_policy("vct", {"width": 2, "depth": 3}),
]
policies = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: "plain" if policy is None else policy.name)


@policies
@pytest.mark.parametrize("kind", ["model", "edd", "medusa"])
@pytest.mark.parametrize("sampler", [Sampler(), SAMPLER, Sampler("rejection", 0.8, seed=4)], ids=lambda s: s.mode)
def test_round_by_round_gives_what_decode_gives(kind: str, policy, sampler: Sampler) -> None:  # type: ignore[no-untyped-def]
    pair = pair_of(kind)
    decoder = Decoder(*pair.make_drafter(), pair.eos_token_ids, sampler)
    for sequence, prompt in enumerate(random_prompts(2, seed=3)):
        how = {"sequence": sequence, "seed": 5}
        whole = decoder.decode(prompt, 23, policy, **how)
        decoding = Decoding(decoder, prompt, 23, policy, **how)
        assert decoding.position == 0 and not decoding.done and decoding.result.rounds == []
        while not decoding.done:
            before = decoding.position
            draft = decoding.advance()
            round_ = decoding.result.rounds[-1]
            assert round_.t == before < decoding.position <= 23
            assert len(draft.tokens) == round_.verified and tuple(draft.step_s) == round_.step_s
            assert decoding.result.tokens == whole.tokens[: decoding.position]
        assert decoding.result.tokens == whole.tokens and decoding.result.tree_log() == whole.tree_log()
        assert decoding.result.state == whole.state and decoding.result.prefill_s > 0


@policies
def test_the_end_of_the_text_ends_it(policy) -> None:  # type: ignore[no-untyped-def]
    prompt = random_prompts(1, seed=3)[0]
    pair = tiny_pair()
    text = Decoder(*pair.make_drafter(), (), SAMPLER).decode(prompt, 23, None).tokens
    ends = text[9]
    decoding = Decoding(Decoder(*pair.make_drafter(), (ends,), SAMPLER), prompt, 23, policy)
    while not decoding.done:
        assert ends not in decoding.result.tokens
        decoding.advance()
    assert decoding.result.tokens == text[: text.index(ends) + 1]


@policies
def test_a_round_says_what_it_did_and_seconds_of_steps_are_part_of_the_drafting(policy) -> None:  # type: ignore[no-untyped-def]
    pair = tiny_pair()
    rounds = Decoder(*pair.make_drafter(), (), SAMPLER).decode(random_prompts(1)[0], 23, policy).rounds
    for round_ in rounds:
        assert 0 <= sum(round_.step_s) <= round_.draft_s and min(round_.step_s, default=1.0) > 0
        assert (round_.fed > 0) == (round_.drafted > 0)
        if policy is not None and policy.name == "vct":
            assert len(round_.level_nodes) == len(round_.step_s) and (round_.asked > 0 or not round_.drafted)
        else:  # after the last token that there is room for, nobody is asked
            assert round_.level_nodes == () and len(round_.step_s) == round_.drafted
            assert round_.asked in (round_.drafted, max(0, round_.drafted - 1))
