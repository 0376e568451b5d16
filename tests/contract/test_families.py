"""What each drafter supports on each family of models: docs/families.md is what this gives.

`python -m tests.contract.test_families --write` writes the page anew.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.families import FAMILIES, LAYERS, MAKERS, TOKENS, WINDOW, outcome

PAGE = ROOT / "docs" / "families.md"
SUPPORTED = ("chains", "chains and trees")
HEAD = f"""# What each drafter supports on each family of models

Written by `python -m tests.contract.test_families --write`, which tries every cell on a random model of {LAYERS} layers
made by the library's configuration class: the drafter is made or trained for a step, a trace is recorded, and {TOKENS}
tokens are really decoded by fixed K and, where it drafts trees, by a static tree. "chains" and "chains and trees" mean
that all rounds were the replay's and all text what the target says greedily by itself. A number refers to the line with
which the drafter is refused, before anything is trained, recorded or written.

All is computed in float64. Windows and chunks are of {WINDOW} tokens here, so that texts leave them: the library's
own cache keeps what has left a window, as it may come back when a draft is rolled back, and the masks hide it. A
sequence is as long as the model's positions allow. Recurrent layers have one state, not one for each branch of a tree,
so models with such layers take chains only. Of Gemma 3 and 4, Mistral Small, Ministral 3,
Llama 4 and Qwen3.5, which are published with a vision encoder, only the text model is loaded.
"""

Outcomes = dict[tuple[str, str], str]

# One cell of every drafter, of every mechanism among the families, and of every refusal.
QUICK = [
    ("gpt-oss", "draft model"),
    ("Phi-3", "prompt lookup"),
    ("OLMo2", "EESD"),
    ("GPT-2", "MEDUSA-1"),
    ("Gemma", "MEDUSA-2"),
    ("Gemma 2", "EDD"),
    ("Gemma 3", "EAGLE"),
    ("Phi-3", "EAGLE-3"),
    ("Qwen2, with windows", "SPACE"),
    ("Mixtral", "Self-SD"),
    ("Mistral, with a window", "draft model"),
    ("GPT-NeoX", "EESD"),
    ("GPT-2", "MEDUSA-2"),
    ("Mamba", "draft model"),
    ("LFM2", "draft model"),
    ("Qwen3.5", "draft model"),
    ("Gemma 4 E", "draft model"),
    ("Llama 4", "draft model"),
    ("Gemma 4", "EDD"),
    ("Qwen3.5", "EESD"),
    ("LFM2", "EESD"),
    ("GraniteMoe", "EESD"),
    ("Granite-3", "EESD"),
    ("EXAONE-4", "EESD"),
    ("Gemma 3n", "EESD"),
    ("Gemma 4 E", "SPACE"),
    ("LFM2", "SPACE"),
    ("Nemotron-H", "MEDUSA-2"),
    ("dots1", "MEDUSA-2"),
    ("Granite-3", "SPACE"),
    ("Jamba", "draft model"),
]


def kind_of(refusal: str) -> str:
    """A refusal without what differs from model to model."""
    return re.sub(r"\w+ForCausalLM|\w+LMHeadModel|[\d.e+]+ %|no (embed_tokens|norm|self_attn|mlp) ", "", refusal)


def page(outcomes: Outcomes) -> str:
    """The page of these outcomes."""
    refusals = list(dict.fromkeys(text for text in outcomes.values() if text not in SUPPORTED))
    lines = [f"| family | {' | '.join(MAKERS)} |", f"|---|{'---|' * len(MAKERS)}"]
    for family in FAMILIES:
        cells = [outcomes[family, drafter] for drafter in MAKERS]
        shown = [text if text in SUPPORTED else f"no ({refusals.index(text) + 1})" for text in cells]
        lines.append(f"| {family} | {' | '.join(shown)} |")
    reasons = [f"{number}. {text}" for number, text in enumerate(refusals, start=1)]
    return "\n".join([HEAD, *lines, "", "Refusals:", "", *reasons, ""])


def read(text: str) -> Outcomes:
    """The outcomes that a page shows."""
    refusals = dict(re.findall(r"^(\d+)\. (.*)$", text, re.MULTILINE))
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    _, *drafters = (cell.strip() for cell in rows[0])
    outcomes = {}
    for family, *cells in rows[2:]:
        for drafter, cell in zip(drafters, cells, strict=True):
            refused = re.fullmatch(r"no \((\d+)\)", cell.strip())
            outcomes[family.strip(), drafter] = refusals[refused[1]] if refused else cell.strip()
    return outcomes


@pytest.mark.parametrize(("family", "drafter"), QUICK, ids=[f"{drafter}, {family}" for family, drafter in QUICK])
def test_a_cell_of_the_page_is_what_the_program_does(family: str, drafter: str, tmp_path: Path) -> None:
    assert read(PAGE.read_text())[family, drafter] == outcome(family, drafter, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cell_of_the_page_is_what_the_program_does(family: str, tmp_path: Path) -> None:
    shown = read(PAGE.read_text())
    for drafter in MAKERS:
        assert shown[family, drafter] == outcome(family, drafter, tmp_path / drafter), drafter


def test_the_page_is_written_from_its_outcomes_alone() -> None:
    text = PAGE.read_text()
    outcomes = read(text)
    assert outcomes.keys() == {(family, drafter) for family in FAMILIES for drafter in MAKERS}
    assert page(outcomes) == text


def test_the_quick_cells_have_every_drafter_and_every_refusal() -> None:
    outcomes = read(PAGE.read_text())
    refusals = {kind_of(text) for text in outcomes.values()} - {*SUPPORTED}
    tried = {kind_of(outcomes[cell]) for cell in QUICK} - {*SUPPORTED}
    assert {drafter for _, drafter in QUICK} == {*MAKERS} and tried == refusals


def test_the_page_has_forty_families_and_eight_drafters() -> None:
    outcomes = read(PAGE.read_text())
    drafts = {family for (family, _), text in outcomes.items() if text in SUPPORTED}
    assert len(drafts) >= 40 and len(MAKERS) >= 8


def main() -> None:
    """Write the page, or print it."""
    parser = argparse.ArgumentParser(description="Try every drafter on every family.")
    parser.add_argument("--write", action="store_true", help=f"write {os.path.relpath(PAGE)} instead of printing it")
    write = parser.parse_args().write
    with tempfile.TemporaryDirectory() as folder:
        text = page(
            {
                (family, drafter): outcome(family, drafter, Path(folder) / family / drafter)
                for family in FAMILIES
                for drafter in MAKERS
            }
        )
    if write:
        PAGE.write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
