"""Costs of several drafters: tables by hand, catching up on many tokens, and the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specsim.cost.files import read_cost
from specsim.cost.joined import JoinedCost, joined_document, joined_table
from specsim.cost.model import ConstantCost
from specsim.cost.profile import ProfileCost, profile_from_json
from specsim.io.errors import InputError
from tests.support.commands import call, json_of
from tests.support.joined_traces import joined_trace


def profile_document(**more: Any) -> dict[str, Any]:
    """Steps of 2 ms, passes of 10 + n ms; at context 2, catching up on 1, 4 and 16 tokens takes 1, 2.5 and 10 ms."""
    seconds = {
        "draft_step": [[0.002, 0.002]] * 5,
        "catch_up": [0.001, 0.002],
        "catch_up_many": {"tokens": [4, 16], "seconds": [[0.0025, 0.004], [0.01, 0.02]]},
        "verify": [[0.010 + n / 1000] * 2 for n in range(1, 7)],
        "autoregressive": [0.010, 0.010],
        "policy_step": 1e-5,
        "round_overhead": 1e-4,
    }
    return {"kind": "specsim-profile", "version": 2, "contexts": [2, 102], "mean_s": {**seconds, **more}}


def profile(**more: Any) -> ProfileCost:
    return profile_from_json(profile_document(**more), "given")


def test_catching_up_is_linear_between_what_was_measured() -> None:
    cost = profile()
    by_hand = {1: 0.001, 2: 0.0015, 3: 0.002, 4: 0.0025, 10: 0.00625, 16: 0.01, 32: 0.02}  # 0.625 ms a token from 4 on
    for tokens, seconds in by_hand.items():
        assert float(cost.catch_up_by(tokens, 2)) == pytest.approx(seconds, rel=1e-12)
    assert float(cost.catch_up_by(4, 52)) == pytest.approx((0.0025 + 0.004) / 2)
    assert float(cost.catch_up_by(1, 2)) == float(cost.catch_up(2))


def test_a_profile_of_short_drafts_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(json.dumps(profile_document()))
    shown = json_of(call("specsim", "cost", "show", tmp_path / "profile.json", "--json"))
    assert [list(row["verify_s"]) for row in shown["rows"]] == [["1", "2", "4"]] * 2


def test_what_was_not_measured_costs_as_many_times_one() -> None:
    assert float(profile(catch_up_many=None).catch_up_by(7, 2)) == pytest.approx(0.007)
    assert float(ConstantCost(0.1, 1.0).catch_up_by(7, 2)) == 0.0


@pytest.mark.parametrize(
    "many",
    [
        {"tokens": [1, 4], "seconds": [[0.0, 0.0]] * 2},
        {"tokens": [4, 4], "seconds": [[0.0, 0.0]] * 2},
        {"tokens": [], "seconds": []},
        {"tokens": [4], "seconds": [[0.0]]},
        {"tokens": [4], "seconds": [[0.0, -1.0]]},
        {"tokens": [4]},
    ],
)
def test_a_profile_that_catches_up_oddly_is_refused(many: Any) -> None:
    with pytest.raises(InputError, match="profile again"):
        profile(catch_up_many=many)


def test_a_joined_table_by_hand() -> None:
    trace = joined_trace(drafters=2)
    table = joined_table(trace, JoinedCost((ConstantCost(0.001, 0.020), profile())))
    longest = int(trace.output_tokens.max())
    assert table.each_draft_s.shape[:2] == (2, trace.depth + 1) and table.each_catch_up_s.shape[:2] == (2, longest + 1)
    np.testing.assert_allclose(table.each_draft_s[:, 3, 0], [0.003, 0.006])
    np.testing.assert_allclose(table.each_verify_s[:, 4, 0], [0.020, 0.014])
    at = 8 - 2  # the first column is priced at context 8
    np.testing.assert_allclose(table.each_catch_up_s[1, [0, 1, 4], 0], [0, 0.001 + 1e-5 * at, 0.0025 + 1.5e-5 * at])
    assert not table.each_catch_up_s[0].any()
    assert table.each_round_overhead_s.tolist() == [0.0, 1e-4] and table.each_policy_step_s.tolist() == [0.0, 1e-5]
    np.testing.assert_array_equal(table.autoregressive_s, 0.020)  # the first's
    assert table.notes == (
        "a token without speculation takes 10 to 20 ms by the drafters' costs, which should be of one target on one "
        "machine",
    )


def test_a_file_of_joined_costs_holds_each_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "cost.json"
    constants = {"s_d": 0.001, "s_t": 0.010}
    file.write_text(json.dumps(joined_document([constants, profile_document()])))
    cost = read_cost(file)
    assert isinstance(cost, JoinedCost) and cost.parts[0] == ConstantCost(0.001, 0.010)
    assert float(cost.parts[1].catch_up_by(4, 2)) == 0.0025
    for bad, message in (
        ([], "does not hold the costs of single drafters"),
        ([joined_document([constants])], "does not hold the costs of single drafters"),
        ([constants, {"s_d": -1.0, "s_t": 1.0}], "drafter 2: .*s_d"),
        ([constants, 7], "drafter 2 is neither"),
    ):
        file.write_text(json.dumps(joined_document(bad)))
        with pytest.raises(InputError, match=message):
            read_cost(file)
    file.write_text(json.dumps({"kind": "specsim-joined-cost", "version": 1}))
    with pytest.raises(InputError, match="required field `costs`"):
        read_cost(file)
