"""A trace as if its drafts were verified by typical acceptance (MEDUSA), a lossy rule.

A node of a draft tree is accepted if its parent is, and if the target's probability p of its token, given the parent,
exceeds min(epsilon, delta exp(-H)), where H is the entropy of the target's distribution there. The longest path is
taken, and the first token of a round is the target's own, greedily chosen.

`realrun record --typical` records p and H of every node of the recorded trees, so that any epsilon, delta and tree is a
replay. What follows an accepted path off the recorded text was not recorded, and the replay goes on along the text:
the tokens of a round are exact at every recorded position, but a real run comes to other positions, because its text
drifts. `realrun typical` measures the drift. On the text that the rule itself has decoded there is none.

A chain is the path of first candidates, so chain policies are replayed, too.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from specsim.io.errors import InputError
from specsim.trace.trace import Trace

NAME = "typical"
EPSILON = 0.09  # of MEDUSA's released code; the paper names none
FORM = "typical, typical:EPSILON or typical:EPSILON:DELTA, numbers of at least 0"


def typical_thresholds(text: str) -> tuple[float, float | None] | None:
    """Read epsilon and delta of "typical:EPSILON:DELTA"; None for the name of another rule.

    >>> from specsim.trace.typical import typical_thresholds
    >>> typical_thresholds("typical:0.1"), typical_thresholds("greedy-draft")
    ((0.1, None), None)
    """
    name, *numbers = text.split(":")
    if name != NAME:
        return None
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        values = []
    if len(values) < len(numbers) or len(values) > 2:
        raise InputError(f"unknown rule of acceptance {text!r}; give {FORM}")
    return (values[0] if values else EPSILON), (values[1] if len(values) == 2 else None)


def typically_accepted(trace: Trace, epsilon: float = EPSILON, delta: float | None = None) -> Trace:
    """Return the trace with drafts accepted by MEDUSA's typical acceptance.

    Parameters
    ----------
    trace : Trace
        Recorded with trees and the target's probabilities of their nodes.
    epsilon, delta : float
        Thresholds of p; delta is sqrt(epsilon) by default, as in the paper. A node is accepted if
        p > min(epsilon, delta exp(-H)), with H in nats.

    Returns
    -------
    Trace
        With `tree.plausible`, and match_len of chains by the same rule. Ranks stay those of the text.

    Raises
    ------
    InputError
        If the trace lacks those probabilities, or a threshold is negative or not finite.

    References
    ----------
    T. Cai et al., "MEDUSA: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
    arXiv:2401.10774, sections 3.3.1 and 4.3.2.

    Examples
    --------
    >>> import specsim
    >>> from specsim.trace.typical import typically_accepted
    >>> typically_accepted(specsim.read_trace("example:lab-eagle"), epsilon=0.1)
    Traceback (most recent call last):
    ...
    specsim.io.errors.InputError: typical acceptance needs the target's probabilities of every tree node, which this \
trace lacks; record it with `realrun record --mode greedy-draft --tree-nodes NODES --typical`
    """
    delta = math.sqrt(epsilon) if delta is None and epsilon >= 0 else delta
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        if value is None or not 0 <= value < math.inf:
            raise InputError(f"{name}={value} of typical acceptance is out of range; give a number of at least 0")
    tree = trace.tree
    if tree is None or tree.target_prob is None or tree.target_entropy_nats is None:
        raise InputError(
            "typical acceptance needs the target's probabilities of every tree node, which this trace lacks; record it "
            "with `realrun record --mode greedy-draft --tree-nodes NODES --typical`"
        )
    assert delta is not None
    threshold = np.minimum(epsilon, delta * np.exp(-tree.target_entropy_nats.astype(np.float64)))
    plausible = (tree.target_prob > threshold) & (tree.parent >= 0)
    tree = dataclasses.replace(tree, plausible=plausible)
    # Along the first candidates, up to the end of the text.
    rows, node = np.arange(len(trace.token)), np.zeros(len(trace.token), dtype=np.int64)
    remaining = np.repeat(trace.output_tokens, trace.output_tokens) - trace.position
    matched = np.zeros(len(trace.token), dtype=np.int64)
    alive = np.ones(len(trace.token), dtype=bool)
    for depth in range(trace.depth):
        first = tree.first_child[rows, node].astype(np.int64)
        alive &= (tree.first_child[rows, node + 1] > first) & (depth < remaining)
        alive &= plausible[rows, np.minimum(first, tree.nodes) - 1]
        matched += alive
        node = np.where(alive, first, node)
    rule = f"typical acceptance, epsilon {epsilon:g}, delta {delta:g}"
    return dataclasses.replace(
        trace, meta={**trace.meta, "accepted_by": rule}, match_len=matched.astype(trace.match_len.dtype), tree=tree
    )
