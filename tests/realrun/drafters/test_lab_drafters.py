"""The lab's trained drafters ship with their facts and their predictor."""

from __future__ import annotations

import pytest

from realrun.pairs.drafter_files import (
    LAB_DRAFTERS,
    LAB_WEIGHTS,
    SHIPPED,
    has_lab_drafter,
    lab_drafter,
    read_drafter,
    shipped_drafter,
)
from realrun.pairs.gguf_models import PACKAGES
from realrun.pairs.pair import load_pair


@pytest.mark.parametrize("name", [*filter(has_lab_drafter, LAB_DRAFTERS)])  # shipped, or in lab-weights/
def test_it_ships_with_its_facts_and_its_predictor(name: str) -> None:
    pair = load_pair(drafter=name)
    assert pair.draft_name == f"lab/{name}"
    assert pair.predictor is not None and pair.predictor.facts["fingerprint"] == pair.fingerprint
    assert read_drafter(lab_drafter(name)).facts["target"]["name"] == "lab/target"


def test_other_targets_drafters_go_by_the_names_of_both() -> None:
    """Their facts say how they were trained, and nothing of where."""
    found = [(folder.parent.name, folder.name) for folder in SHIPPED.glob("*/*") if folder.parent != LAB_WEIGHTS]
    assert found == [("smollm2", "eagle")]
    for target, name in found:
        folder = shipped_drafter(target, name)
        assert target in PACKAGES and folder is not None and folder != lab_drafter(name)
        file = read_drafter(folder)
        assert file.kind == name and file.facts["target"]["name"] == target
        assert len(file.tensors["draft_tokens"]) == file.facts["draft_vocabulary"]
        assert file.facts["tokens"] == file.facts["loop"]["steps"] * 12 * 512 and "/" not in str(file.facts["text"])
    assert shipped_drafter("lab", "eagle") is None and shipped_drafter("smollm2", "abacus") is None
