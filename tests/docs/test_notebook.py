"""The notebook of "Speculative decoding from scratch" runs, and is its page."""

from __future__ import annotations

import json
from pathlib import Path

from docs import pages
from docs.notebook import NOTEBOOK, PAGE


def test_the_notebook_runs_and_prints_what_stands_in_it(tmp_path: Path) -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    blocks = "\n".join(f"```python\n{''.join(cell['source'])}\n```\n" for cell in cells)
    recorded = ["".join(line for output in cell["outputs"] for line in output["text"]) for cell in cells]
    assert pages.run(blocks, tmp_path) == recorded, "python -m docs.notebook writes it anew"


def test_the_notebook_is_its_page() -> None:
    codes = [block.code.strip() for block in pages.blocks(PAGE.read_text()) if block.runs]
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"] == codes
