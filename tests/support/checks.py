"""Checks that many tests make."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specsim.io.errors import InputError
from specsim.trace.files import META, meta_digest


def refusal(run: Callable[[], object], *names: str, match: str | None = None) -> str:
    """Return the text of an InputError: a single line with all of these words, which the expression matches."""
    with pytest.raises(InputError, match=match) as caught:
        run()
    text = str(caught.value)
    assert "\n" not in text and all(name in text for name in names), text
    return text


def edit_meta(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change a trace's meta.json and its checksum, so that only the content is wrong."""
    meta = json.loads((folder / META).read_text())
    change(meta)
    if isinstance(meta.get("checksums"), dict):
        meta["checksums"][META] = meta_digest(meta)
    (folder / META).write_text(json.dumps(meta))
