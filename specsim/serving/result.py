"""What all results of serving have in common."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from specsim.replaying.result import Result


@dataclass(frozen=True, repr=False, kw_only=True)
class Served(Result):
    """Where a result of serving comes from.

    learned_on : sequences that policies learned from, none of which they are reported on
    sequences : those reported on
    approximate : whether acceptance was drawn, on a trace of rejection sampling
    cost_notes : what the costs say of their own seconds
    """

    learned_on: int
    sequences: int
    approximate: bool
    cost_notes: tuple[str, ...]

    @property
    def conditions(self) -> list[str]:
        """Conditions of these numbers, in words."""
        learned = [f"learned on {self.learned_on} others"] if self.learned_on else []
        return [*learned, *(["approximate: rejection sampling"] if self.approximate else [])]

    @property
    def notes(self) -> list[str]:
        """Caveats of these numbers, in words."""
        return [*self.conditions, *self.cost_notes]

    def about(self) -> dict[str, Any]:
        """The common fields by name."""
        about = {field.name: getattr(self, field.name) for field in fields(Served)}
        return {**about, "cost_notes": list(self.cost_notes)}
