"""Deliberately broken kernels, which an operation's own check must catch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A kernel source with one text replaced.

    file : "csrc/..." below `kernels/`, or "ops/..." below `kernels/speckernels/`
    find : occurs exactly once in it
    why : the bug it stands for
    """

    file: str
    find: str
    replace: str
    why: str
