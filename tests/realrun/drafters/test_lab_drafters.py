"""The lab's trained drafters ship with their facts and their predictor."""

from __future__ import annotations

import pytest

from realrun.pairs.lab_drafters import LAB_DRAFTERS, drafter_training, has_lab_drafter
from realrun.pairs.pair import load_pair


@pytest.mark.parametrize("name", [*filter(has_lab_drafter, LAB_DRAFTERS)])  # shipped, or in lab-weights/
def test_it_ships_with_its_facts_and_its_predictor(name: str) -> None:
    pair = load_pair(drafter=name)
    assert pair.draft_name == f"lab/{name}"
    assert pair.predictor is not None and pair.predictor.facts["fingerprint"] == pair.fingerprint
    assert drafter_training(name)["target"]["name"] == "lab/target"
