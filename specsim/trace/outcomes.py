"""Outcomes of traces of rejection sampling: accepted tokens are drawn from recorded probabilities.

Such a trace holds accept_prob[t, i] = min(1, p/q) of the i-th drafted token at position t,
p and q being the target's and the drafter's distribution under the drafted prefix (Leviathan
et al. 2023, Algorithm 1). Given the drafts, token i is accepted independently with that
probability, and what follows a rejected token does not matter; no match is longer than
draft_limit. A replay is the sum over DRAWS outcomes, each drawn for every position by
counter-based uniforms: the same for all policies, so that they can be compared in pairs.

Within a round this is exact. From round to round it is approximate: a round of a accepted
tokens moves on by a + 1 positions of the recorded output, while in a real run the accepted
tokens and the replacement become the context, which the recorded context matches in distribution only on
average. The end is approximate too: a sequence always ends where the recorded sequence does, by its
budget or at its end-of-text token (nothing beyond it is accepted, accept_prob is 0 there).

The recorded drafts and match_len of such a trace are drawn together with the output
(`realrun.proposals.chain`), so `as_recorded` gives a trace whose replay follows a real run's distribution
exactly, from an outcome per position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numba as nb
import numpy as np

from specsim.io.arrays import IntArray
from specsim.io.errors import InputError
from specsim.io.rng import uniform
from specsim.trace.trace import Trace

DRAWS = 16
_ACCEPT, _POLICY = 1, 2  # purposes of the uniforms of a draw


def drawn_match_len(trace: Trace, seed: int, draw: int) -> IntArray:
    """Draw the match lengths uint8 [N] of an outcome: accepted tokens of a draft as long as draft_limit allows.

    A token is accepted if its uniform, keyed by (seed, draw, sequence id, t, i), is below
    accept_prob. Raises InputError where the trace lacks that column.
    """
    if trace.accept_prob is None:
        raise InputError("the trace lacks the column 'accept_prob'; record it in rejection mode")
    known = trace.drawn
    if (seed, draw) not in known:
        matched = np.zeros(len(trace.token), dtype=np.uint8)
        key = _stream(seed, draw, _ACCEPT)
        _draw(trace.accept_prob, trace.draft_limit, trace.offsets, trace.sequence_id, key, matched)
        known[seed, draw] = matched
    return known[seed, draw]


Outcome = tuple[IntArray, int]  # match lengths [N], seed of the policy's uniforms


def outcomes(trace: Trace, seed: int) -> Iterator[Outcome]:
    """Iterate over the outcomes that a replay sums over: DRAWS, or the recorded outcome of an exact trace."""
    if not trace.approximate:
        yield trace.match_len, seed
        return
    for draw in range(DRAWS):
        yield drawn_match_len(trace, seed, draw), _stream(seed, draw, _POLICY)


def as_recorded(trace: Trace) -> Trace:
    """Return the trace without accept_prob, so that its replay takes the recorded outcome.

    Drafts, outcome and output follow the distribution of a real run together, so this replay is exact
    in distribution, with the noise of a single outcome. Other traces are returned as they are.
    """
    return dataclasses.replace(trace, accept_prob=None) if trace.approximate else trace


@nb.njit(cache=True, nogil=True)
def _draw(accept_prob, draft_limit, offsets, sequence_id, seed, matched):  # type: ignore[no-untyped-def]
    for s in range(len(sequence_id)):
        start = offsets[s]
        for row in range(start, offsets[s + 1]):
            i = 0
            while i < draft_limit[row] and uniform(seed, sequence_id[s], row - start, i + 1) < accept_prob[row, i]:
                i += 1
            matched[row] = i


def _stream(seed: int, draw: int, purpose: int) -> int:
    """Derive a 63-bit seed for this purpose."""
    return int(np.random.SeedSequence((seed, draw, purpose)).generate_state(1, np.uint64)[0] >> np.uint64(1))
