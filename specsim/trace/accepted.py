"""A trace as if its drafts had been made and verified by another rule.

At a temperature engines differ in what they draft and keep. With the target's distribution p and the drafter's q:

- "greedy-draft": the likeliest token x of q, kept with p(x);
- "sampled-draft": a sample x of q, kept with min(1, p(x) / q(x)) (Leviathan et al. 2023);
- "equal-samples": a sample of q, kept if the target's own, independent sample equals it.

All three emit samples of p, so that the recorded text y may be the output under any of them, and what is kept follows
from q along the text alone. A greedy draft is kept where y is the likeliest token of q. Of sampled drafts,
P(draft y and keep it) = min(p(y), q(y)), so that given that y is emitted, it was kept with min(1, q(y) / p(y)); of
equal samples with q(y). One outcome is drawn for every position, from these chances at each depth: rounds that start
there are independent given the text, so a replay is unbiased.

What the recorded drafts look like behind a token that is not kept belongs to the recorded rule, and so do the drafter's
signals. Therefore policies that read signals are refused, and so are trees, unless ranks along the text decide them.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import numba as nb
import numpy as np

from specsim.io.arrays import Ints
from specsim.io.errors import InputError
from specsim.io.rng import uniform
from specsim.trace.joined import LOOKUP, SUFFIX, JoinedTrace
from specsim.trace.trace import NO_TOKEN, Trace

Rule = Literal["greedy-draft", "sampled-draft", "equal-samples"]
RECORDED: dict[str, Rule] = {"greedy-draft": "greedy-draft", "rejection": "sampled-draft"}  # by the decoding's mode


def shares_noise(trace: Trace) -> bool:
    """Whether the recorded drafter chose by the target's noise, which is nobody's rule."""
    drafts_text = trace.drafter_kind in (LOOKUP, SUFFIX)  # whatever the noise is
    return trace.mode == "gumbel" and "accepted_by" not in trace.meta and not drafts_text


def rule_of(trace: Trace) -> Rule | None:
    """The rule by which a trace's drafts are accepted; None in greedy decoding, and where drafts shared the noise."""
    if "accepted_by" in trace.meta:
        rule: Rule = trace.meta["accepted_by"]
        return rule
    return RECORDED.get(trace.mode)


def accepted_by(trace: Trace, rule: Rule, *, seed: int = 0) -> Trace:
    """Return the trace of the same output under another rule of acceptance.

    Parameters
    ----------
    trace : Trace
        Of a single drafter. Greedy decoding, and prompt lookup, which drafts without probabilities, accept the same
        tokens under every rule.
    rule : {"greedy-draft", "sampled-draft", "equal-samples"}
    seed : int
        Of the outcomes that are drawn.

    Returns
    -------
    Trace
        With match_len as the rule accepts, and without the drafter's signals and trees; the trace itself where it was
        recorded under this rule.

    Raises
    ------
    InputError
        If the trace was recorded without the drafter's probabilities along the text, or its ranks hold shared noise.

    References
    ----------
    Y. Leviathan, M. Kalman, Y. Matias, "Fast Inference from Transformers via Speculative Decoding", ICML 2023.

    Examples
    --------
    >>> import specsim
    >>> trace = specsim.read_trace("example:lab-model-t1")  # recorded with greedy drafts at temperature 1
    >>> sampled = specsim.accepted_by(trace, "sampled-draft")
    >>> [f"{(each.match_len > 0).mean():.2f}" for each in (trace, sampled)]
    ['0.35', '0.58']
    """
    mode = trace.mode
    if mode not in ("greedy-draft", "gumbel", "rejection") or rule_of(trace) == rule:
        return trace
    if trace.drafter_kind in (LOOKUP, SUFFIX):
        return trace
    if isinstance(trace, JoinedTrace):
        raise InputError(
            "a joined trace is replayed as recorded; give one of its parts to accept drafts by another rule"
        )
    if rule == "greedy-draft":
        if mode == "gumbel" or trace.true_rank is None:
            raise InputError(f"rule {rule} needs ranks without noise, which this trace lacks; {AGAIN}")
        chances = (trace.true_rank == 0).astype(np.float32)
    else:
        column = trace.text_accept if rule == "sampled-draft" else trace.text_prob
        if column is None:
            lacks = "needs the drafter's probabilities along the text, which this trace lacks"
            raise InputError(f"rule {rule} {lacks}; {AGAIN}")
        chances = column
    matched = np.zeros_like(trace.match_len)
    key = int(np.random.SeedSequence((seed, _STREAM)).generate_state(1, np.uint64)[0] >> np.uint64(1))
    _draw(chances, trace.offsets, trace.sequence_id, key, matched)
    return dataclasses.replace(
        trace,
        meta={**trace.meta, "informed": False, "accepted_by": rule},
        match_len=matched,
        draft_token=_own_tokens(trace),
        true_rank=trace.true_rank if rule == "greedy-draft" else None,
        score=None,
        top10_confidence=None,
        tree=None,
    )


AGAIN = "record it again with `realrun record --mode greedy-draft` or --mode rejection"
_STREAM = 0x61636365  # keys this module's uniforms


@nb.njit
def _draw(chances, offsets, sequence_id, key, matched):  # type: ignore[no-untyped-def]
    for s in range(len(sequence_id)):
        for row in range(offsets[s], offsets[s + 1]):
            depth = 0
            while depth < chances.shape[1]:
                if uniform(key, sequence_id[s], row - offsets[s], depth + 1) >= chances[row, depth]:
                    break
                depth += 1
            matched[row] = depth


def _own_tokens(trace: Trace) -> Ints:
    """The output's own tokens as drafts [N, D]; others that would be drafted, or end the text, are unknown."""
    ends = np.repeat(trace.offsets[1:], trace.output_tokens)[:, None]
    place = np.arange(len(trace.token))[:, None] + np.arange(trace.depth)
    own = np.where(place < ends, trace.token[np.minimum(place, len(trace.token) - 1)], trace.draft_token)
    tokens: Ints = np.where(trace.draft_token == NO_TOKEN, NO_TOKEN, own).astype(trace.draft_token.dtype)
    return tokens
