"""The notebook of a page: `python -m docs.notebook` writes docs/learn/from_scratch.ipynb of the page beside it."""

from __future__ import annotations

import json
from typing import Any

from docs.pages import BLOCK, HOME, blocks

PAGE = HOME / "learn" / "from_scratch.md"
NOTEBOOK = PAGE.with_suffix(".ipynb")


def cells(text: str) -> list[dict[str, Any]]:
    """Split a page into cells: a cell of code for every Python block, with its output, and Markdown between them."""
    made, end = [], 0
    for match in BLOCK.finditer(text):
        made += [_markdown(text[end : match.start()])] if text[end : match.start()].strip() else []
        (block,) = blocks(match[0])
        made.append(_code(block.code, block.output or ""))
        end = match.end()
    made.append(_markdown(text[end:]))
    return [{"id": f"cell-{number}", **cell} for number, cell in enumerate(made)]


def _markdown(text: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "metadata": {}, "source": text.strip().splitlines(keepends=True)}


def _code(code: str, output: str) -> dict[str, Any]:
    printed = [{"name": "stdout", "output_type": "stream", "text": output.splitlines(keepends=True)}] if output else []
    source = code.rstrip().splitlines(keepends=True)
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": printed, "source": source}


def notebook(text: str) -> str:
    """Write a page as a notebook of format 4.5."""
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    document = {"cells": cells(text), "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(PAGE.read_text()))
