"""SPACE at a batch size above one: every sequence is decoded as it is alone."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.drafters.space_batch import decode_batch
from specsim.errors import InputError
from specsim.policy.registry import make_policy
from tests.support.families import family_model
from tests.support.pairs.space import CHOICES, MASKS, space_pair, word_prompts
from tests.support.tiny import POSITIONS

TOKENS = 40
PROMPTS = [prompt.tokens for prompt in word_prompts()]


@pytest.mark.parametrize(("mode", "k"), [("greedy", MASKS), ("greedy", 2), ("gumbel", MASKS)])
def test_every_row_is_decoded_as_it_is_alone(mode: str, k: int) -> None:
    """Outputs and rounds, of rows that accept different numbers of candidates and leave at different times."""
    free = decode_batch(space_pair().target, space_pair().drafter.masks, PROMPTS, TOKENS, CHOICES[mode], k=k)
    assert len({row.tokens[-1] for row in free}) > 1
    common = max((token for token in range(97)), key=lambda token: sum(token in row.output for row in free))
    for ends in ((), (common,)):
        pair = space_pair(ends)
        rows = decode_batch(pair.target, pair.drafter.masks, PROMPTS, TOKENS, CHOICES[mode], ends, k)
        decoder = Decoder(*pair.make_drafter(), ends, CHOICES[mode])
        for number, prompt in enumerate(PROMPTS):
            alone = decoder.decode(prompt, TOKENS, make_policy("fixed_k", {"k": k}), sequence=number)
            assert rows[number].output == alone.tokens
            assert rows[number].rounds == alone.log()
        lengths = {len(row.output) for row in rows}
        assert (len(lengths) > 1) == bool(ends)
        accepted = [[a for _, _, a in row.rounds] for row in rows]
        assert any(len(set(together)) > 1 for together in itertools.zip_longest(*accepted, fillvalue=0))


def test_rows_do_not_depend_on_their_neighbours() -> None:
    """Nor on what is left in the slots of rows that are shorter."""
    pair, rng = space_pair(), np.random.default_rng(0)
    together = decode_batch(pair.target, pair.drafter.masks, PROMPTS, TOKENS, Sampler())
    for _ in range(3):
        order = rng.permutation(len(PROMPTS))[: rng.integers(1, len(PROMPTS) + 1)].tolist()
        again = decode_batch(pair.target, pair.drafter.masks, [PROMPTS[i] for i in order], TOKENS, Sampler())
        assert [row.output for row in again] == [together[i].output for i in order]


def test_a_batch_of_single_tokens_and_a_full_context() -> None:
    pair = space_pair()
    (row, other) = decode_batch(pair.target, pair.drafter.masks, [[5], [7]], POSITIONS - 1, Sampler())
    decoder = Decoder(*pair.make_drafter(), (), Sampler())
    assert row.output == decoder.decode([5], POSITIONS - 1, None).tokens
    assert other.output == decoder.decode([7], POSITIONS - 1, None).tokens
    (row,) = decode_batch(pair.target, pair.drafter.masks, [[5]], 1, Sampler())
    assert row.rounds == [(0, 0, 0)] and len(row.output) == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sampler": Sampler("rejection")}, "decoded in greedy and Gumbel mode"),
        ({"k": 6}, "k=6 candidates of a target trained with 5 masks; choose 1 to 5"),
        ({"prompts": []}, "without prompts"),
        ({"prompts": [[1], []]}, "an empty one"),
        ({"max_new_tokens": 0}, "ask for at least 1"),
        ({"max_new_tokens": POSITIONS}, "exceed the model's 160 positions"),
    ],
)
def test_what_is_refused(changed: dict[str, Any], message: str) -> None:
    pair = space_pair()
    asked: dict[str, Any] = {"prompts": [[1]], "max_new_tokens": 5, "sampler": Sampler(), **changed}
    with pytest.raises(InputError, match=message):
        decode_batch(pair.target, pair.drafter.masks, **asked)


def test_windows_are_refused() -> None:
    with pytest.raises(InputError, match="every layer has full attention"):
        decode_batch(family_model("Mistral, with a window"), 3, [[1]], 5, Sampler())
