"""Tune drafting ahead: how many outcomes of a verification to prepare drafts for, and how long the drafts are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from specsim.cost.files import CostLike
from specsim.cost.model import SPACE
from specsim.io.arrays import Floats
from specsim.io.errors import InputError
from specsim.learn.calibration import Calibration
from specsim.learn.chain_calibration import calibrate, drafted_tokens, feature_table
from specsim.learn.predict import priced
from specsim.policy.static_tree.rates import rates_of
from specsim.replaying.ahead import AheadRounds, AheadSettings, Outcomes, reads_text_alone, replay_ahead
from specsim.replaying.intervals import Estimate, ratio_interval, ratio_of_ratios
from specsim.replaying.prediction import interval_columns
from specsim.replaying.priced import PricedTrace
from specsim.replaying.result import Result
from specsim.trace.files import TraceLike
from specsim.trace.split import split_sequences
from specsim.trace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

Mode = Literal["plain", "ahead", "pearl"]
OUTCOMES = (1, 2, 4, 8, 16)  # prepared at once


class Prepared(NamedTuple):
    """Drafts of k tokens, prepared for so many outcomes; see `specsim.replaying.ahead.AheadSettings`."""

    mode: Mode
    prepared: int
    k: int


@dataclass(frozen=True)
class AheadRow:
    """A mode at the draft length that is fastest on the tuning sequences, on the held-out ones.

    hit_rate : share of drafts that were prepared, of all that could be; 0 in plain speculation
    tau : tokens per pass of the target
    speedup : over decoding without speculation
    gain : speed relative to plain speculation at its own best draft length
    """

    mode: Mode
    prepared: int
    k: int
    hit_rate: Estimate
    tau: float
    speedup: Estimate
    gain: Estimate

    def as_dict(self) -> dict[str, Any]:
        estimates = {name: getattr(self, name).as_dict() for name in ("hit_rate", "speedup", "gain")}
        return {**vars(self), **estimates}


@dataclass(frozen=True, repr=False)
class DraftAhead(Result):
    """Result of `draft_ahead`.

    rows : plain speculation, every number of prepared outcomes, then PEARL
    best : the row that is fastest on the tuning sequences
    devices : 1 or 2
    learned_on, sequences : tuning and held-out sequences
    text_alone : whether drafts depend on the text alone
    noise_shared : whether the drafter knows the noise by which the target samples
    cost_notes : notes of the costs on their seconds
    """

    rows: tuple[AheadRow, ...]
    best: AheadRow
    devices: int
    learned_on: int
    sequences: int
    text_alone: bool
    noise_shared: bool
    cost_notes: tuple[str, ...]

    def __repr__(self) -> str:
        best = self.best
        return f"{best.mode}, {best.prepared} outcomes prepared, K = {best.k}: {best.gain} of plain speculation's speed"

    @property
    def notes(self) -> list[str]:
        """Caveats of these numbers, in words."""
        states = "prepared drafts are made from the drafter's own states, in place of the target's"
        noise = "the drafter ranks candidates by the noise that it shares with the target"
        return [
            *([] if self.text_alone else [states]),
            *([noise] if self.noise_shared else []),
            *self.cost_notes,
        ]

    def to_frame(self) -> pd.DataFrame:
        """Tabulate a row per mode: draft length, hit rate, speedup and gain with their 95 % intervals."""
        import pandas as pd  # slow to import

        return pd.DataFrame(
            {
                "mode": row.mode,
                "prepared": row.prepared,
                "k": row.k,
                "hit_rate": float(row.hit_rate),
                "tau": row.tau,
                **interval_columns(row.speedup),
                "gain": float(row.gain),
            }
            for row in self.rows
        )

    def as_dict(self) -> dict[str, Any]:
        about = {name: value for name, value in vars(self).items() if name not in ("rows", "best")}
        return {**about, "best": self.best.as_dict(), "rows": [row.as_dict() for row in self.rows]}


def draft_ahead(
    trace: TraceLike,
    cost: CostLike,
    *,
    outcomes: Sequence[int] = OUTCOMES,
    max_draft_tokens: int | None = None,
    devices: int = 2,
    tuning_share: float = 0.5,
    seed: int = 0,
) -> DraftAhead:
    """Compare drafting ahead, in which the next draft is prepared during verification, with plain speculation.

    While the target verifies a draft, the drafter prepares the next one for the most probable outcomes: so many tokens
    accepted, and this candidate of the drafter in the place of the next. Probabilities are calibrated on a part of the
    sequences, and each mode's draft length is the fastest there; all rows are of the others. Hits are counted on the
    recorded ranks of the target's tokens.

    Parameters
    ----------
    trace : Trace, str or Path
        Greedy or Gumbel, with the ranks of the target's tokens. Recorded trees are not needed.
    cost : CostModel, str, Path or mapping
        As `read_cost` takes it. Preparing several outcomes at once needs costs that price trees.
    outcomes : sequence of int
        Numbers of prepared outcomes to compare.
    max_draft_tokens : int, optional
        Longest draft to compare, below the depth of the trace (default: one less).
    devices : int
        2: the drafter has its own, and preparing overlaps verification. 1: preparing takes its time in turn.
    tuning_share : float
        Share of the sequences to calibrate and tune on, in (0, 1).
    seed : int
        Seed of the split.

    Returns
    -------
    DraftAhead
        Rows of plain speculation, of each number of outcomes and of PEARL, with hit rate, speedup over decoding without
        speculation and gain over plain speculation, and the best of them.

    Raises
    ------
    InputError
        For a trace without ranks or of rejection sampling, draft lengths that it does not hold, or costs without trees.

    References
    ----------
    Kumar et al. 2026, arXiv:2603.03251 (speculative speculative decoding, Saguaro). Liu et al. 2024, arXiv:2408.11850
    (PEARL).

    Examples
    --------
    >>> import specsim
    >>> cost = specsim.ConstantCost(s_d=0.1, s_t=1.0)
    >>> result = specsim.draft_ahead("example:lab-model", cost, outcomes=[1, 4], max_draft_tokens=4)
    >>> [row.mode for row in result.rows], result.rows[2].hit_rate > result.rows[1].hit_rate
    (['plain', 'ahead', 'ahead', 'pearl'], True)
    """
    both = priced(trace, cost)
    text_alone = reads_text_alone(both.trace)
    longest = both.trace.depth - 1 if max_draft_tokens is None else max_draft_tokens
    _check(both.trace, outcomes, longest, devices)
    tuning, rest = split_sequences(both.trace, tuning_share=tuning_share, seed=seed)
    tuned_on, held_out = both.select(tuning), both.select(rest)
    learned = learn_outcomes(tuned_on.trace, max(outcomes))
    known = {part: learned.on(part.trace) for part in (tuned_on, held_out)}
    modes: list[tuple[Mode, int]] = [("plain", 0), *(("ahead", number) for number in outcomes), ("pearl", 1)]

    def run(part: PricedTrace, at: Prepared) -> AheadRounds:
        pearl = at.mode == "pearl"
        settings = AheadSettings(at.k, 0 if pearl else at.prepared, pearl, devices == 2, text_alone)
        return replay_ahead(part.trace, settings, known[part], part.table())

    def tuning_s(at: Prepared) -> float:
        return float(run(tuned_on, at).seconds.sum())

    chosen = [min((Prepared(*mode, k) for k in range(1, longest + 1)), key=tuning_s) for mode in modes]
    ran = [run(held_out, at) for at in chosen]
    rows = tuple(_row(at, rounds, ran[0], held_out) for at, rounds in zip(chosen, ran, strict=True))
    return DraftAhead(
        rows=rows,
        best=rows[int(np.argmin([tuning_s(at) for at in chosen]))],
        devices=devices,
        learned_on=len(tuning),
        sequences=len(rest),
        text_alone=text_alone,
        noise_shared="gumbel" in repr(both.trace.meta.get("decoding")),
        cost_notes=both.table().notes,
    )


@dataclass(frozen=True)
class OutcomeModel:
    """What a drafter knows of the outcomes of a verification: the calibration of its confidence, and rates of ranks.

    rates : float64 [D, 1 + W], share of the target's tokens of every rank by depth
    """

    calibration: Calibration
    rates: Floats

    def on(self, trace: Trace) -> Outcomes:
        """Probabilities at every position of a trace."""
        run = np.zeros(len(trace.token))
        features = feature_table(trace.confidence, trace.entropy_nats, trace.prob, run)
        others = np.maximum(1 - self.rates[:, :1], 1e-9)
        return Outcomes(self.calibration.prob(features), self.rates[:, 0].copy(), self.rates[:, 1:] / others)


def learn_outcomes(trace: Trace, width: int) -> OutcomeModel:
    """Calibrate the drafter's confidence, and count the ranks of the target's tokens, from rounds at every position.

    width : candidates besides the drafter's first choice
    """
    tokens = drafted_tokens(trace)
    calibration = calibrate(tokens.features[tokens.verified], tokens.accepted[tokens.verified])
    return OutcomeModel(calibration, rates_of(trace, 1 + width))


def _check(trace: Trace, outcomes: Sequence[int], longest: int, devices: int) -> None:
    if not outcomes or min(outcomes) < 1:
        raise InputError(f"outcomes={list(outcomes)}; give numbers of prepared outcomes from 1 on, such as 1,2,4,8")
    if not 1 <= longest < trace.depth:
        raise InputError(
            f"max_draft_tokens={longest}; the token behind a draft has to be recorded too: give 1 to {trace.depth - 1}"
        )
    if devices not in (1, 2):
        raise InputError(f"devices={devices}; give 1, or 2 where the drafter has its own")
    if trace.meta.get("drafter_kind") == SPACE:
        raise InputError("SPACE drafts in the verification pass, so that there is nothing to draft ahead of it")


def _row(at: Prepared, rounds: AheadRounds, plain: AheadRounds, held_out: PricedTrace) -> AheadRow:
    baseline_s, output = held_out.baseline_s, held_out.trace.output_tokens
    return AheadRow(
        mode=at.mode,
        prepared=at.prepared,
        k=at.k,
        hit_rate=ratio_interval(rounds.hits, rounds.chances),
        tau=float(output.sum() / rounds.rounds.sum()),
        speedup=ratio_interval(baseline_s, rounds.seconds),
        gain=ratio_of_ratios(baseline_s, rounds.seconds, baseline_s, plain.seconds),
    )
