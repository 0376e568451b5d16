"""Checks that many tests make."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from specsim.errors import InputError


def refusal(run: Callable[[], object], *names: str) -> None:
    """An InputError of one line that has all of this in it."""
    with pytest.raises(InputError) as caught:
        run()
    text = str(caught.value)
    assert "\n" not in text and all(name in text for name in names), text
