"""How to search, for everything that searches."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from specsim.io.errors import InputError
from specsim.policy.base import Settings

Search = Literal["grid", "optuna"]


@dataclass(frozen=True)
class SearchSettings:
    """How the settings of a policy are searched.

    search : "grid" tries at most `trials` points of an even grid; "optuna" the policy's defaults, then what Optuna's
        TPE proposes after each batch. A space of at most `trials` points is enumerated either way
    trials : configurations to try
    seed : seed of all randomness
    jobs : threads (default: one per core). Does not change the result
    storage : file of Optuna's journal storage, from which a killed search resumes to the same answer
    fixed : settings of the policy that are not searched. `max_draft_tokens` is fixed at the recorded depth if absent
    """

    search: Search = "optuna"
    trials: int = 100
    seed: int = 0
    jobs: int | None = None
    storage: Path | None = None
    fixed: Settings = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise InputError(f"trials={self.trials}; give at least 1")
        if self.search not in get_args(Search):
            raise InputError(f"search {self.search!r} is unknown; known: {', '.join(get_args(Search))}")


DEFAULT_SEARCH = SearchSettings()
