"""What a round teaches EESD's Thompson-sampling policies.

A round that drafted d tokens of which a were accepted counts r = a successes in n trials.
The paper's Q_v is read as the accepted tokens and the target's own, so r = |Q_v| - 1 = a:

- "exact": n = min(a + 1, d), the tokens that the target verified, as the text describes n.
  With independent acceptance p, r / n tends to p.
- "printed": n = min(|Q_v| + 1, d) = min(a + 2, d), as in Algorithm 2. A rejection that was
  drafted past counts twice. With theta, the probability of continuing to draft, r / n tends to
  p / (1 + (1 - p) theta).

A decision depends on the past of its sequence only through counts = (r summed, n summed,
rounds). A policy of this kind offers `keep_probability(counts, params, step, depth)`, the
probability that `keep_drafting` says yes after the depth-th token, given the counts and that the
round has come this far; None where depths of a round are linked in any other way. From it,
and an optional setting `counting`, `specsim.replaying.expected` computes expectations.
"""

from __future__ import annotations

import numba as nb

COUNTING = ("exact", "printed")
THETA = ("per_token", "per_round")


@nb.njit
def judged_tokens(drafted, accepted, printed):  # type: ignore[no-untyped-def]
    """n of a round, in tokens; printed is 0.0 or 1.0."""
    return min(accepted + 1.0 + printed, drafted)


@nb.njit
def count_round(counts, drafted, accepted, printed):  # type: ignore[no-untyped-def]
    """(r summed, n summed, rounds) after a round."""
    return (counts[0] + accepted, counts[1] + judged_tokens(drafted, accepted, printed), counts[2] + 1.0)
