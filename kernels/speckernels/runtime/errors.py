"""Errors of backends that do not run an operation."""

from __future__ import annotations


class Unsupported(ValueError):
    """The backend does not support these arguments; the message says which it supports."""


class Unavailable(RuntimeError):
    """The backend does not work on this machine: its source does not build, or a block needs more than the GPU has."""
