"""Drafters by name: the lab's and other targets' that ship, those of a user's file or of another package."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from realrun.drafters.registry import PLUGINS, find_kind
from realrun.measure.record import RecordSettings, record
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
from specsim.io.errors import InputError
from specsim.policy.registry import find_policy, policies
from tests.support.checks import refusal
from tests.support.tiny import tiny_pair, tiny_prompts


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
        assert shipped_drafter(target, str(folder)) is None  # a path is no name
        file = read_drafter(folder)
        assert file.kind == name and file.facts["target"]["name"] == target
        assert len(file.tensors["draft_tokens"]) == file.facts["draft_vocabulary"]
        assert file.facts["tokens"] == file.facts["loop"]["steps"] * 12 * 512 and "/" not in str(file.facts["text"])
    assert shipped_drafter("lab", "eagle") is None and shipped_drafter("smollm2", "abacus") is None


OWN = """\
from realrun.drafters.lookup import LookupKind


class Mine(LookupKind):
    name = "mine"
"""
TWO = OWN + '\n\nclass Other(LookupKind):\n    name = "other"\n'


@pytest.fixture
def target(tmp_path: Path) -> str:
    folder = tmp_path / "target"
    tiny_pair().target.save_pretrained(folder)
    tiny_pair().tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_drafter_of_a_file_proposes_what_its_class_does(target: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    settings = RecordSettings(3, 12)
    own, built_in = (
        record(load_pair(target, drafter=name, dtype="float64"), tiny_prompts(2), settings)
        for name in (str(file), "prompt-lookup")
    )
    assert own.meta["drafter"] == own.meta["drafter_kind"] == "mine"
    np.testing.assert_array_equal(own.draft_token, built_in.draft_token)


def test_one_of_several_is_named(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(TWO)
    kind = find_kind(f"{tmp_path / 'two.py'}:other")
    assert kind is not None and kind.name == "other"
    with pytest.raises(InputError, match="has the drafters mine, other; name one, such as .*two.py:mine$"):
        find_kind(str(tmp_path / "two.py"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\n", "defines no drafter; write a class of DrafterKind"),
        ("1 / 0\n", "line 1: ZeroDivisionError: division by zero; correct the file"),
        (OWN.replace('"mine"', '"mine"\n    origin = "file"'), "Mine has origin 'file'; write origin = \"target\""),
    ],
)
def test_a_file_that_cannot_serve_is_refused_in_one_line(text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text(text)
    refusal(lambda: find_kind(str(file)), match=f"^[^\n]*{says}[^\n]*$")
    refusal(lambda: find_kind("nowhere.py"), "drafter file nowhere.py does not exist")


def test_an_installed_package_adds_drafters_and_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package is a module and a folder of metadata on the path, as pip installs it."""
    (tmp_path / "added.py").write_text(OWN)
    (tmp_path / "added_policy.py").write_text(
        "from dataclasses import dataclass\n\nfrom specsim.policy.chain.fixed_k import FixedK\n\n\n"
        '@dataclass(frozen=True)\nclass AddedK(FixedK):\n    name = "added_k"\n'
    )
    metadata = tmp_path / "added-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: added\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        f"[{PLUGINS}]\nmine = added:Mine\nbroken = added:Missing\n[specsim.policies]\nadded_k = added_policy:AddedK\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    kind = find_kind("mine")
    assert kind is not None and kind.name == "mine"
    refusal(lambda: find_kind("broken"), "added:Missing of specsim.drafters does not load: ", "; update its package")
    assert find_policy("added_k").name == "added_k" and "added_k" in policies()
    assert find_kind("nobody") is None
