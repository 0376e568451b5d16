"""Why a backend does not run an operation."""

from __future__ import annotations


class Unsupported(ValueError):
    """This backend does not take these arguments; the message says what it takes."""


class Unavailable(RuntimeError):
    """This backend cannot be had here: its source does not build, or a block needs more than this GPU has."""
