"""Hugging Face assisted generation: a draft length that follows success, and a confidence threshold."""

from __future__ import annotations

from dataclasses import dataclass

import numba as nb

from specsim.policy.base import Variant, setting
from specsim.policy.chain.base import ChainPolicy

SCHEDULES = ("constant", "heuristic_transient", "heuristic")


@nb.njit
def initial_state(params):  # type: ignore[no-untyped-def]
    return (params.num_assistant_tokens,)


@nb.njit
def keep_drafting(state, params, step, depth, u):  # type: ignore[no-untyped-def]
    return depth < state[0] and step.prob >= params.assistant_confidence_threshold, state


@nb.njit
def update(state, params, drafted, accepted):  # type: ignore[no-untyped-def]
    if params.schedule == 0.0:
        return state
    if accepted == drafted:
        return (state[0] + 2.0,)
    return (max(1.0, state[0] - 1.0),)


@dataclass(frozen=True)
class HuggingFace(ChainPolicy):
    """Draft up to num_assistant_tokens, and stop after a token of probability below the threshold.

    Schedules: "constant"; "heuristic" adds 2 after a fully accepted draft, else takes 1 away, and
    lives on from sequence to sequence; "heuristic_transient" starts anew with each. The defaults
    are the library's. Departures: its moving threshold (refitted by a ROC curve where
    scikit-learn is installed) is left out, and max_draft_tokens bounds the drafts.
    """

    num_assistant_tokens: int = setting(20, 1, 256, tune=(1, 20), doc="draft length in tokens, at the start")
    schedule: str = setting("constant", choices=SCHEDULES, doc="num_assistant_tokens_schedule")
    assistant_confidence_threshold: float = setting(
        0.4, 0.0, 1.0, tune=(0.0, 0.95), doc="least probability of a drafted token to continue drafting; 0 never stops"
    )
    max_draft_tokens: int = setting(16, 1, 256, bounds="depth", doc="longest draft in tokens")

    name = "hugging_face"
    source = "transformers, generation/candidate_generator.py"
    features = ("prob",)
    variants = (
        Variant("default", tuned=False),
        Variant(
            "heuristic",
            {"schedule": "heuristic_transient", "num_assistant_tokens": 5, "assistant_confidence_threshold": 0.0},
            tuned=False,
        ),
        Variant("tuned"),
    )
    initial_state = staticmethod(initial_state)
    keep_drafting = staticmethod(keep_drafting)
    update = staticmethod(update)

    @property
    def carries_state(self) -> bool:
        return self.schedule == "heuristic"
