"""The leaderboard of a trace: a row per variant of a policy, beside the oracle and the learned rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from specsim.compare.sensitivity import Sweep
from specsim.io.arrays import Floats, Ints, Strings
from specsim.learn.evaluate import TRUNCATED
from specsim.policy.base import Policy
from specsim.replaying.intervals import Comparison, Estimate, against_baseline
from specsim.replaying.prediction import Prediction
from specsim.replaying.result import Result
from specsim.replaying.rounds import PARTS
from specsim.report.page import NEAR_PERCENT, simplest

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@dataclass(frozen=True, repr=False)
class Row:
    """A variant of a policy on the held-out sequences.

    replays : number of replays averaged; 1 unless the policy is random
    lengths : rounds by drafted tokens that the target verified [D + 1 or more], of all replays together
    token_s : seconds per output token in draft, policy, verify, other
    speculative_s : seconds per held-out sequence [S], mean of the replays
    train_speedup : on the tuning sequences, whether it was tuned or not
    speedup : with an interval that holds for all rows of the board at once; the prediction's holds for it alone
    truncated_trials : settings of its search that the recorded trees are too small to judge
    rule_gap : seconds over those of the rule learned from the same signals, less 1; None for trees, or without a rule
    to_leader : the leader's speedup less this row's, its interval holding for all rows at once; None for the leader
    """

    label: str
    policy: Policy
    tuned: bool
    prediction: Prediction
    replays: int
    lengths: Ints
    token_s: tuple[float, ...]
    speculative_s: Floats
    train_speedup: float
    speedup: Estimate
    truncated_trials: int = 0
    rule_gap: float | None = None
    to_leader: Comparison | None = None

    def __repr__(self) -> str:
        return f"{self.label}: speedup {self.speedup}"

    @property
    def tied(self) -> bool:
        """Whether the difference to the leader is not significant (95 %, all rows at once)."""
        return self.to_leader is not None and not self.to_leader.significant

    @property
    def mean_length(self) -> float:
        """Mean number of drafted tokens that a round verified."""
        return float(self.lengths @ np.arange(len(self.lengths)) / self.lengths.sum())

    def length_quantile(self, q: float) -> int:
        """Least number of verified tokens that a share q of the rounds does not exceed."""
        return int(np.searchsorted(self.lengths.cumsum(), q * self.lengths.sum()))

    def as_dict(self) -> dict[str, Any]:
        document = self.prediction.as_dict()
        keys = ("policy", "params", "speedup", "v_d", "r_d", "hm", "tau", "oracle_regret")
        return {
            "label": self.label,
            "settings": str(self.policy).removeprefix(self.policy.name)[1:-1],
            "tuned": self.tuned,
            **{key: document[key] for key in keys},
            "speedup": self.speedup.as_dict(),
            "learned_rule_gap": self.rule_gap,
            "train_speedup": self.train_speedup,
            "mean_draft_tokens": self.mean_length,
            "draft_tokens_quantiles": {f"{q:g}": self.length_quantile(q) for q in (0.1, 0.5, 0.9)},
            "rounds_by_draft_tokens": self.lengths.tolist(),
            "token_seconds": dict(zip(PARTS, self.token_s, strict=True)),
            "truncated_trials": self.truncated_trials,
            "truncated_share": (document["truncated_rounds"] or 0) / document["rounds"],
            "seeds": self.replays,
            "tied_with_leader": self.tied,
            "leader_minus_this": self.to_leader.as_dict() if self.to_leader else None,
            "sequence_seconds": self.speculative_s.tolist(),
        }


@dataclass(frozen=True, repr=False)
class Board(Result):
    """A trace at a maximal draft length.

    tuning, holdout : sequences; output_tokens : of the hold-out ones, together
    baseline_s : seconds per held-out sequence [S]; domains : of these sequences [S]
    rule, rule_speedup : the fastest rule learned from the policies' signals on the tuning sequences, and what it
        reaches on the held-out ones (`learned_rule` of the leaderboard); None where no chain or signal is there
    rows : best first; skipped : (policy, reason)
    cost_band : 5th and 95th percentile of measured over predicted speedup with such costs; None if unknown
    """

    trace: str
    max_draft: int
    meta: Mapping[str, Any]
    tuning: int
    holdout: int
    output_tokens: int
    baseline_s: Floats
    domains: Strings
    oracle: Estimate
    oracle_of: str
    rule: Policy | None
    rule_speedup: Estimate | None
    rows: list[Row]
    skipped: list[tuple[str, str]]
    sweeps: list[Sweep]
    cost_band: tuple[float, float] | None = None

    def __repr__(self) -> str:
        return "\n".join(map(repr, self.rows))

    def to_frame(self) -> pd.DataFrame:
        """Tabulate the variants of policies, best first; speedups as ratios, lengths in tokens."""
        import pandas as pd  # slow to import, and a comparison does not need it

        return pd.DataFrame(
            {
                "label": row.label,
                "policy": row.policy.name,
                "speedup": row.speedup.estimate,
                "speedup_low": row.speedup.low,
                "speedup_high": row.speedup.high,
                "tied_with_leader": row.tied,
                **{name: getattr(row.prediction, name) for name in ("v_d", "r_d", "hm", "tau", "oracle_regret")},
                "mean_draft_tokens": row.mean_length,
                "settings": str(row.policy),
            }
            for row in self.rows
        )

    def plot(self) -> Figure:
        """Speedup of every row with its 95 % interval, between the baseline and the oracle."""
        from specsim.report.leaderboard_figures import ranking_figure  # matplotlib is slow to import

        return ranking_figure(self.as_dict())

    def domain_speedups(self, row: Row) -> dict[str, float]:
        """Speedup of a row on the held-out sequences of every domain."""
        parts = {str(name): self.domains == name for name in np.unique(self.domains)}
        return {
            name: float(self.baseline_s[part].sum() / row.speculative_s[part].sum()) for name, part in parts.items()
        }

    @property
    def recommended(self) -> Row | None:
        """The row with the fewest settings of those within `NEAR_PERCENT` of the best; None if none surely gains."""
        if against_baseline(self.rows[0].speedup.as_dict()) != "faster":
            return None
        return self.rows[simplest((row.speedup, len(fields(row.policy))) for row in self.rows)]

    @property
    def unjudged(self) -> str:
        """A sentence where recorded trees were too small to judge policies or settings, else nothing."""
        left_out = [name for name, reason in self.skipped if TRUNCATED in reason]
        partly = [row.label for row in self.rows if row.truncated_trials]
        partly += [sweep.label for sweep in self.sweeps if sweep.truncated]
        left_out += [f"some settings of {name}" for name in dict.fromkeys(partly)]
        if not left_out:
            return ""
        return (
            f"Trees could not be judged fully: the recorded ones are too small for {', '.join(left_out)}; record "
            "larger ones with `realrun record --tree-nodes --tree-width`."
        )

    @property
    def warnings(self) -> list[str]:
        """Differences that are not significant, and notes on costs, a sentence each."""
        warned = [f"costs: {note}" for note in self.rows[0].prediction.cost_notes]
        if tied := sum(row.tied for row in self.rows):
            others = f"{tied} of {len(self.rows) - 1} other policies"
            warned.insert(0, f"not significant on {self.holdout} sequences: the leader's lead over {others}")
        return [*([self.unjudged] if self.unjudged else []), *warned]

    def as_dict(self) -> dict[str, Any]:
        keys = ("target", "drafter", "decoding", "device", "dtype")
        recommended = self.recommended
        return {
            "trace": self.trace,
            "max_draft": self.max_draft,
            "recorded": {
                **{key: self.meta.get(key) for key in keys},
                "date": (self.meta.get("provenance") or {}).get("date"),
            },
            "sequences": {"tuning": self.tuning, "holdout": self.holdout},
            "output_tokens": self.output_tokens,
            "baseline_token_seconds": float(self.baseline_s.sum()) / self.output_tokens,
            "oracle": self.oracle.as_dict(),
            "oracle_of": self.oracle_of,
            "learned_rule": str(self.rule) if self.rule else None,
            "learned_rule_speedup": self.rule_speedup.as_dict() if self.rule_speedup else None,
            "rows": [{**row.as_dict(), "domain_speedups": self.domain_speedups(row)} for row in self.rows],
            "recommended": recommended and {"label": recommended.label, "within_percent": NEAR_PERCENT},
            "cost_band": None if self.cost_band is None else list(self.cost_band),
            "unjudged": self.unjudged,
            "skipped": [{"policy": name, "reason": reason} for name, reason in self.skipped],
            "sensitivity": [s.as_dict() for s in self.sweeps],
            "warnings": self.warnings,
        }
