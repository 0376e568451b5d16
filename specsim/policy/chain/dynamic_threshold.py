"""AdaEDL's Algorithm 1: move a stopping threshold toward a target acceptance rate.

Shared by AdaEDL and Max-Confidence, as in the paper. Departures and decisions:

- The paper's line 11 compares accepted tokens with the maximum draft length; its
  comment and the code of the method it adapts compare drafted tokens. The latter is
  used here: lambda falls only when drafting stopped early.
- The averaged acceptance rate starts at 0, as in that code.
- lambda is capped at 1, above which every round would stop after a single token, but it
  may fall below 0, because AdaEDL's score does.
- lambda and the averaged rate start anew with every sequence; the paper does not say.
- Rounds cut short by the end of the output count like any other.
"""

from __future__ import annotations

import numba as nb

RATE_DECAY = 0.5  # beta_1, AdaEDL section 4.4
THRESHOLD_DECAY = 0.9  # beta_2


@nb.njit
def update_threshold(  # type: ignore[no-untyped-def]
    state,
    drafted,
    accepted,
    max_draft_tokens,
    target_rate,
    epsilon,
    rate_decay=RATE_DECAY,
    threshold_decay=THRESHOLD_DECAY,
):
    """(lambda, averaged acceptance rate) after a round."""
    threshold, average = state
    average = rate_decay * average + (1.0 - rate_decay) * accepted / drafted
    if average < target_rate:
        goal = threshold + epsilon
    elif drafted != max_draft_tokens:
        goal = threshold - epsilon
    else:
        goal = threshold
    threshold = threshold_decay * threshold + (1.0 - threshold_decay) * goal
    return (min(threshold, 1.0), average)


@nb.njit
def initial_state(params):  # type: ignore[no-untyped-def]
    return (params.lambda0, 0.0)


@nb.njit
def update(state, params, drafted, accepted):  # type: ignore[no-untyped-def]
    if params.dynamic == 0.0:
        return state
    goal = params.max_draft_tokens, params.target_rate, params.epsilon
    return update_threshold(state, drafted, accepted, *goal, params.rate_decay, params.threshold_decay)
