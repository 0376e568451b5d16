"""How to search, for everything that searches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from specsim.io.errors import InputError

Search = Literal["grid", "race", "optuna"]


@dataclass(frozen=True)
class SearchSettings:
    """How the settings of a policy are searched.

    search : "grid" spends at most `trials` points on an even grid, each on all sequences; "race" starts with as many
        points of a Sobol sequence on few sequences and drops the poor ones; "optuna" proposes points from those before.
        All but the grid try the policy's defaults. A space of at most `trials` whole numbers and choices is enumerated
        either way. Default: see `specsim.learn.search.default_search`
    trials : configurations to try
    seed : seed of all randomness
    jobs : threads (default: one per core). Does not change the result
    storage : a journal file. A search that was killed goes on from it and ends with the same answer
    fixed : settings of the policy that are not searched. `max_draft_tokens` is fixed at the recorded depth if absent
    """

    search: Search | None = None
    trials: int = 100
    seed: int = 0
    jobs: int | None = None
    storage: Path | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise InputError(f"trials={self.trials}; give at least 1")
        if self.search is not None and self.search not in get_args(Search):
            raise InputError(f"search {self.search!r} is unknown; known: {', '.join(get_args(Search))}")


DEFAULT_SEARCH = SearchSettings()
