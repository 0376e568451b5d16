"""Engines' numbers, by their definitions, against what the engines printed of real runs."""

from __future__ import annotations

import numpy as np
import pytest

from specsim.acceptance.sources import Rounds
from specsim.engines.definitions import DEFINITIONS, LENGTH, POSITIONS, QUANTITIES, RATE, Totals, find_definitions
from specsim.io.errors import InputError
from tests.specsim.engines.test_as_engine import COUNTED
from tests.support.commands import call, json_of


def totals_of(engine: str, k: str, output_tokens: int = 12 * 96) -> Totals:
    """What a recorded run of 12 prompts of 96 tokens comes to."""
    columns = ([int(digit) for sequence in COUNTED[engine][k] for digit in sequence[column]] for column in (0, 1))
    return Totals.of(Rounds(*(np.array(column) for column in columns)), output_tokens)


def value(engine: str, quantity: str, totals: Totals) -> object:
    (number,) = find_definitions(quantity, engine)
    return number.value(totals)


def test_what_llamacpp_printed() -> None:
    """Of its statistics at K = 3: 475 drafts of 1,414 tokens, 659 accepted, 308, 207 and 144 by position."""
    totals = totals_of("llamacpp", "3")
    assert (totals.rounds, totals.drafted, totals.accepted) == (475, 1414, 659)
    assert totals.by_depth.accepted.tolist() == [308, 207, 144]
    assert value("llamacpp", LENGTH, totals) == pytest.approx(1 + 659 / 475)
    assert value("llamacpp", RATE, totals) == pytest.approx(659 / 1414)
    assert value("llamacpp", POSITIONS, totals) == pytest.approx([308 / 475, 207 / 475, 144 / 475])


@pytest.mark.parametrize(("k", "drafts", "drafted", "accepted"), [("3", 481, 1443, 674), ("5", 417, 2085, 750)])
def test_what_vllm_printed(k: str, drafts: int, drafted: int, accepted: int) -> None:
    totals = totals_of("vllm", k)
    assert (totals.rounds, totals.drafted, totals.accepted) == (drafts, drafted, accepted)
    assert value("vllm", LENGTH, totals) == pytest.approx(1 + accepted / drafts)
    assert value("vllm", RATE, totals) == pytest.approx(accepted / drafted)


def test_one_run_by_every_definition() -> None:
    """Three rounds by hand: 2 of 2, 0 of 2 and 1 of 1 accepted; with the prompt's token 7 tokens."""
    totals = Totals.of(Rounds(np.array([2, 2, 1]), np.array([2, 0, 1])), 7)
    expected: dict[tuple[str, str], object] = {
        ("specsim", LENGTH): 7 / 3,
        ("specsim", RATE): 3 / 5,
        ("specsim", POSITIONS): [
            2 / 3,
            3 / 4,
        ],  # counters: of 2 with an accepted token, 2 / 3 draft a second
        ("vllm", LENGTH): 2.0,
        ("vllm", RATE): 3 / 5,
        ("vllm", POSITIONS): [2 / 3, 1 / 3],
        ("llamacpp", LENGTH): 2.0,
        ("llamacpp", RATE): 3 / 5,
        ("llamacpp", POSITIONS): [2 / 3, 1 / 3],
        ("sglang", LENGTH): 7 / 3,
        ("sglang", RATE): 3 / 5,
        ("tensorrt-llm", LENGTH): 2.0,
        ("tensorrt-llm", POSITIONS): [2 / 3, 1 / 2],
        ("transformers", LENGTH): 1.0,
    }
    assert {(number.engine, number.quantity) for number in DEFINITIONS} == set(expected)
    for number in DEFINITIONS:
        assert number.value(totals) == pytest.approx(expected[number.engine, number.quantity]), number.printed


def test_explain_puts_an_engine_beside_specsim() -> None:
    rows = json_of(call("specsim", "explain", "acceptance-rate", "--engine", "sglang", "--json"))["acceptance-rate"]
    assert [row["engine"] for row in rows] == ["specsim", "sglang"]
    assert "pull request 13212" in rows[1]["note"]
    rounds = json_of(call("specsim", "explain", "rounds", "--engine", "vllm", "--json"))["rounds"]
    assert rounds[0]["first_token"] == "prefill" and rounds[0]["clips_draft"] is False


@pytest.mark.parametrize("quantity", [*QUANTITIES, "rounds"])
def test_explain_says_it_in_words(quantity: str) -> None:
    text = call("specsim", "explain", quantity).out
    assert "vllm" in text and "specsim" in text


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(InputError, match="unknown definition of position-rate in 'transformers'; choose one of"):
        find_definitions(POSITIONS, "transformers")
    with pytest.raises(InputError, match="unknown quantity 'tau'; choose one of acceptance-length"):
        find_definitions("tau")
