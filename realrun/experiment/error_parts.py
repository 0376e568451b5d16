"""Where a predicted time differs from the measured one: by part of a round, and by how many tokens were verified."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from realrun.decode.rounds import Round
from specsim.policy.tree.base import TreePolicy
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import Replay
from specsim.replaying.rounds import PARTS


def error_parts(priced: PricedTrace, replayed: Replay, rounds: Sequence[Sequence[Round]]) -> dict[str, Any]:
    """Compute predicted minus measured seconds, in percent of the policy's measured seconds.

    Parameters
    ----------
    priced, replayed : the trace under its costs, and the policy's replay on it
    rounds : measured, of every sequence of the trace

    Returns
    -------
    dict
        "draft", "policy", "verify" and "other", which sum to the error of the whole; and "by_verified": for each
        number of tokens verified beside the pending one, how many rounds there were and the error of their
        verification. A positive error is a part predicted to take longer than it did.
    """
    done = [round_ for sequence in rounds for round_ in sequence]
    measured_s = np.array([[getattr(round_, f"{part}_s") for part in PARTS] for round_ in done]).sum(axis=0)
    predicted_s = replayed.seconds.sum(axis=0) / replayed.draws
    whole_s = measured_s.sum()
    parts = dict(zip(PARTS, (100 * (predicted_s - measured_s) / whole_s).tolist(), strict=True))
    table = priced.table(replayed.policy)
    verify_s = table.verify_s
    if isinstance(replayed.policy, TreePolicy):
        assert table.tree is not None
        verify_s = table.tree.verify_s
    contexts = np.concatenate(
        [
            int(prompt) - 1 + np.array([round_.t for round_ in sequence], dtype=np.int64)
            for prompt, sequence in zip(priced.trace.prompt_tokens, rounds, strict=True)
        ]
    )
    verified = np.array([round_.verified for round_ in done])
    took_s = np.array([round_.verify_s for round_ in done])
    price_s = verify_s[verified + 1, contexts >> table.bucket_bits]
    by_verified = [
        {
            "tokens": int(tokens),
            "rounds": int((verified == tokens).sum()),
            "verify": float(100 * (price_s - took_s)[verified == tokens].sum() / whole_s),
        }
        for tokens in np.unique(verified)
    ]
    return {**parts, "by_verified": by_verified}
