"""The error that a user can cause."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input. The message is one line: what is wrong, where, what to do."""
