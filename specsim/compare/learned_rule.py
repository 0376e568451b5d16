"""The fastest rule learned from the signals that chain policies see, beside the oracle that knows what is accepted.

The oracle's lead has two parts: what no signal tells, and what a policy leaves unused. A rule that is optimal for the
signals separates them. The best such rule is not known; RenewalStop comes close by construction, because it solves
the stopping problem of a round exactly for signals in bins (`specsim.learn.renewal_stop`). What it reaches is a
lower bound on the speedup of the best rule, so a policy may be faster than it, and its gap is then below 0.
"""

from __future__ import annotations

import dataclasses

from specsim.io.errors import InputError
from specsim.learn.search import best_policy
from specsim.learn.settings import SearchSettings
from specsim.policy.base import Policy
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.renewal_stop import SIGNALS, RenewalStop
from specsim.replaying.checks import unsupported_reason
from specsim.replaying.priced import PricedTrace


def learned_rule(train: PricedTrace, settings: SearchSettings) -> Policy | None:
    """Learn the fastest stopping rule from confidence, entropy, draft position and history.

    train : the sequences to learn from; report the rule on others
    settings : seed and threads

    Returns the faster, on `train`, of RenewalStop with its best signal and of the best fixed K, which uses no signal;
    None where the trace records no signals or is of several drafters.

    References: Chow, Robbins and Siegmund 1971, Great Expectations: The Theory of Optimal Stopping. Dinkelbach 1967, On
    Nonlinear Fractional Programming, Management Science 13 (the value of a token as a fixed point).
    """
    if unsupported_reason(train.trace, RenewalStop):
        return None
    every = dataclasses.replace(settings, trials=max(len(SIGNALS), train.trace.depth), search="grid", fixed={})
    rules: list[Policy] = []
    for kind in (FixedK, RenewalStop):
        try:
            rules.append(best_policy(kind, train, every))
        except InputError:  # such as costs that do not cover drafts this long
            return None
    return min(rules, key=lambda policy: float(train.replay(policy, seed=settings.seed).speculative_s.sum()))
