"""Cells that the tables of this study share."""

from __future__ import annotations

from specsim.report.markdown import difference_text, markdown_table
from studies.training.seeds import Seeds, speedup, speedup_difference, tau, tau_difference

__all__ = ["difference_cells", "length_cells", "markdown_table"]


def length_cells(runs: Seeds) -> tuple[str, str]:
    """Acceptance length and speedup with their intervals."""
    return str(tau(runs)), str(speedup(runs))


def difference_cells(a: Seeds, b: Seeds) -> tuple[str, str]:
    """Acceptance length and speedup of a less those of b, with their intervals, and what they say."""
    return difference_text(tau_difference(a, b)), difference_text(speedup_difference(a, b))
