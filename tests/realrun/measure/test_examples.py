"""The shipped example traces are what `realrun record` gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import specsim
from tests.support.commands import call

DIFFERING = 1  # sequences at most, where another processor's rounding turns a near tie around


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lab-eagle", "lab-lookup", "lab-model"])
def test_an_example_is_what_recording_gives(name: str, tmp_path: Path) -> None:
    shipped = specsim.read_trace(f"example:{name}")
    meta = shipped.meta
    drafter = meta["drafter"].removeprefix("lab/").replace("draft", "model")
    tree = meta.get("tree") or {"nodes": 0, "width": 10}
    arguments = {
        "target": meta["target"],
        "drafter": drafter,
        "num-prompts": meta["prompts"]["count"],
        "max-new-tokens": meta["max_new_tokens"],
        "max-draft-tokens": meta["depth"],
        "mode": meta["decoding"]["mode"],
        "temperature": meta["decoding"]["temperature"],
        "seed": meta["decoding"]["seed"],
        "tree-nodes": tree["nodes"],
        "tree-width": tree["width"],
    }
    options = [part for key, value in arguments.items() for part in (f"--{key}", value)]
    assert call("realrun", "record", tmp_path / "again", *options).code == 0
    again = specsim.read_trace(tmp_path / "again")
    assert again.meta["prompts"] == meta["prompts"] and again.meta["weights"] == meta["weights"]
    assert np.array_equal(again.output_tokens, shipped.output_tokens)
    same = (again.token == shipped.token) & (again.match_len == shipped.match_len)
    of_row = np.repeat(np.arange(shipped.sequences), shipped.output_tokens)
    assert len(np.unique(of_row[~same])) <= DIFFERING
    if shipped.tree is not None:
        assert again.tree is not None and again.tree.nodes == shipped.tree.nodes
    at = same & (shipped.draft_token[:, 0] >= 0)
    assert np.allclose(again.prob[at, 0], shipped.prob[at, 0], atol=1e-4)
