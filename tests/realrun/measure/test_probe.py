"""Probes: what they measure is what moved, and a profile from before then holds for the machine as it is now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from realrun.measure.probe import probe
from realrun.measure.profile import LEAST_SWEEPS, profile
from specsim.cost.files import read_cost
from specsim.cost.probe import changes, with_probe
from specsim.io.errors import InputError
from specsim.io.files import write_json
from tests.support.clock import time_passes
from tests.support.commands import assert_refused, call, json_of
from tests.support.tiny import tiny_model, tiny_pair, tiny_tokenizer

CONTEXTS = [8, 40]


def calm(tokens: int, _: int) -> float:
    return 1e-3 * (10 + tokens)


def loaded(tokens: int, _: int) -> float:
    """Small passes suffer most, drafts of one token among them."""
    return calm(tokens, 0) * {1: 1.5, 2: 1.3, 3: 1.2, 4: 1.15}.get(tokens, 1.1)


def test_a_profile_with_a_probe_is_the_profile_that_the_machine_would_have_now(monkeypatch: pytest.MonkeyPatch) -> None:
    how: dict[str, Any] = {"contexts": CONTEXTS, "depth": 6, "limit_s": 0, "tree_tokens": 0}
    with monkeypatch.context() as patch:
        time_passes(patch, calm)
        before, first = read_cost(profile(tiny_pair(), **how)), probe(tiny_pair(), contexts=[20], limit_s=0)
    with monkeypatch.context() as patch:
        time_passes(patch, loaded)
        after, second = read_cost(profile(tiny_pair(), **how)), probe(tiny_pair(), contexts=[20], limit_s=0)
    now = with_probe(before, second)
    for n in range(1, 8):
        np.testing.assert_allclose(now.verify(n, CONTEXTS), after.verify(n, CONTEXTS), rtol=0.01)
    np.testing.assert_allclose(now.autoregressive_step(CONTEXTS), after.autoregressive_step(CONTEXTS), rtol=0.01)
    np.testing.assert_allclose(now.draft(6, CONTEXTS), after.draft(6, CONTEXTS), rtol=0.01)
    moved = {change.part: change.factor for change in changes(first, second)}
    expected = {"pass of 1": 1.5, "pass of 2": 1.3, "pass of 3": 1.2, "pass of 4": 1.15, "pass of 5": 1.1}
    assert moved == pytest.approx({**expected, "draft step": 1.5, "decoding step": 1.5}, rel=0.01)
    assert all(change.significant for change in changes(first, second))


def test_a_probe_says_how_precise_it_is_and_what_else_ran() -> None:
    document = probe(tiny_pair(), contexts=CONTEXTS, limit_s=0)
    assert document["sweeps"] == LEAST_SWEEPS and {"others_percent", "stolen_percent"} == document["load"].keys()
    assert np.shape(document["mean_s"]["verify"]) == (5, 2) and np.shape(document["mean_s"]["draft_step"]) == (4, 2)
    assert len(document["relative_half_width"]["verify"]) == 5 and document["relative_half_width"]["draft_step"] > 0


@pytest.mark.parametrize("wrong", [{"contexts": [9, 4]}, {"contexts": [158]}, {"limit_s": -1.0}])
def test_what_cannot_be_probed_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="context|limit_s"):
        probe(tiny_pair(), **{"contexts": [8], **wrong})


def test_the_commands_probe_and_calibrate(tmp_path: Path) -> None:
    for name, seed in (("target", 1), ("draft", 2)):
        tiny_model(1, seed).float().save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
    models = ["--target", tmp_path / "target", "--draft-model", tmp_path / "draft"]
    sizes = ["--contexts", "8,40", "--max-draft-tokens", 4, "--tree-nodes", 4, "--minutes", 0]
    json_of(call("realrun", "profile", tmp_path / "profile.json", *models, *sizes, "--json"))
    out = ["--contexts", "20", "--seconds", 0, "--out", tmp_path / "probe.json"]
    document = json_of(call("realrun", "probe", *models, *out, "--json"))
    assert json.loads((tmp_path / "probe.json").read_text()) == document
    assert_refused(call("realrun", "probe", *models, *out), "probe.json", "--overwrite")
    shown = call("realrun", "probe", *models, "--contexts", "20", "--seconds", 0)
    assert shown.out.count("\n") == 1 and "decoding step" in shown.out
    files = [tmp_path / "profile.json", tmp_path / "probe.json"]
    now = json_of(call("specsim", "cost", "calibrate", *files, "--out", tmp_path / "now.json", "--json"))
    expected = with_probe(read_cost(files[0]), document)
    written = read_cost(tmp_path / "now.json")
    for n in (1, 3, 5):
        np.testing.assert_allclose(written.verify(n, [8, 25, 40]), expected.verify(n, [8, 25, 40]))
        np.testing.assert_allclose(written.tree_verify(n, [8, 25, 40]), expected.tree_verify(n, [8, 25, 40]))
    assert now["probed"]["probe"]["date"] == document["provenance"]["date"]
    write_json({**document, "drafter": "another"}, tmp_path / "other.json")
    other = [tmp_path / "profile.json", tmp_path / "other.json"]
    assert_refused(call("specsim", "cost", "calibrate", *other, "--out", tmp_path / "n.json"), "another", "drafter")
    assert not (tmp_path / "n.json").exists()
