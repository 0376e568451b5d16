"""The one error a user can cause, and the one a check can report."""

from __future__ import annotations


class InputError(ValueError):
    """Bad input. The message is one line: what is wrong, where, what to do."""
