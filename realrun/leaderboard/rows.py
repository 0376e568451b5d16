"""The rows of `realrun leaderboard`: one policy of one drafter each, predicted and measured against one baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from realrun.experiment.choice import Forecast, choice_of
from realrun.experiment.timing import wall_clock
from realrun.leaderboard.costs import models
from realrun.leaderboard.measure import Measured
from realrun.pairs.drafter_files import weights_digest
from realrun.pairs.pair import Pair
from specsim.acceptance.formulas import distinct_trigrams
from specsim.cost.profile import ProfileCost
from specsim.io.arrays import Floats
from specsim.policy.base import Policy
from specsim.policy.chain.fixed_k import FixedK
from specsim.policy.chain.space_k import SpaceK
from specsim.policy.tree.base import TreePolicy
from specsim.replaying.intervals import Estimate, ratio_interval
from specsim.replaying.prediction import summarise
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import Replay
from specsim.replaying.simultaneous import simultaneous
from specsim.replaying.sums import PARTS
from specsim.trace.trace import Trace

FIXED, ADAPTIVE, TREE, PAPER = "fixed K", "adaptive chain", "tree", "its paper's"
LOOPS = 0.5  # share of distinct trigrams up to which a text repeats itself


@dataclass(frozen=True)
class Entry:
    """The best policy of one role with one drafter, as tuned; train_speedup : on the tuning prompts.

    Roles are the best fixed K, adaptive chain and tree, and the policy that the drafter's paper drafts with.
    """

    drafter: str
    role: str
    label: str
    policy: Policy
    train_speedup: float

    @property
    def key(self) -> str:
        """Its name among all entries."""
        return f"{self.drafter}: {self.role}"

    @property
    def title(self) -> str:
        """Its name on the board."""
        return f"{self.drafter}, {self.label}"


def role_of(kind: type[Policy]) -> str:
    """What a policy of this kind is compared as."""
    if issubclass(kind, TreePolicy):
        return TREE
    return FIXED if kind in (FixedK, SpaceK) else ADAPTIVE


def replays(
    entries: Sequence[Entry], holdouts: Mapping[str, Trace], costs: Mapping[str, ProfileCost], seed: int
) -> list[Replay]:
    """Each entry's replay on the held-out prompts, with the draws of the real runs."""
    priced = {name: PricedTrace(trace, costs[name]) for name, trace in holdouts.items()}
    return [priced[entry.drafter].replay(entry.policy, seed=seed, log=True) for entry in entries]


def rows(
    entries: Sequence[Entry],
    pairs: Mapping[str, Pair],
    plain: Pair,
    holdouts: Mapping[str, Trace],
    costs: Mapping[str, ProfileCost],
    measured: Sequence[Measured] | None,
    seed: int,
    floor_percent: float,
) -> list[dict[str, Any]]:
    """The board's rows, by measured speedup, or by the predicted one where nothing was measured.

    A drafter's seconds on a prompt are taken for as much text as the baseline's: a tuned target may write
    more or less than the plain one, and in low precision another pass of the same target may, too.

    measured : the baseline, the entries in their order, and the null arm; floor_percent : their noise floor
    """
    found = replays(entries, holdouts, costs, seed)
    own = next((name for name in holdouts if not has_own_target(pairs[name], plain)), next(iter(holdouts)))
    baseline_s = next(r.autoregressive_s for e, r in zip(entries, found, strict=True) if e.drafter == own)
    seconds = [r.speculative_s * baseline_s / r.autoregressive_s for r in found]
    ranked_by, against = seconds, baseline_s
    if measured is not None:
        wanted = measured[0].tokens
        against, *ranked_by = (one.seconds_for(wanted) for one in measured[:-1])
    order = np.argsort([s.sum() for s in ranked_by], kind="stable").tolist()
    leader = order[0]
    by_replay, ranking = simultaneous(baseline_s, seconds), simultaneous(against, ranked_by)
    most = {name: max(e.train_speedup for e in entries if e.drafter == name) for name in holdouts}
    flows = np.array([share > LOOPS for share in trigram_shares(holdouts[own])])
    board = []
    for at in order:
        entry, replayed = entries[at], found[at]
        predicted = summarise(replayed)
        behind = None if at == leader else ranking.difference(leader, at)
        spent = replayed.seconds.sum(axis=0) / replayed.output_tokens.sum()
        board.append(
            {
                "label": entry.title,
                "drafter": entry.drafter,
                "role": entry.role,
                "policy": entry.policy.name,
                "form": entry.label,
                "settings": str(entry.policy).removeprefix(entry.policy.name)[1:-1],
                "params": entry.policy.settings,
                "own_target": has_own_target(pairs[entry.drafter], plain),
                "best_of_drafter": entry.train_speedup == most[entry.drafter],
                "speedup": by_replay.speedups[at].as_dict(),
                "leader_minus_this": None if behind is None else behind.as_dict(),
                "tied_with_leader": behind is not None and not behind.significant,
                "without_loops": _over(flows, against, ranked_by[at]),
                "train_speedup": entry.train_speedup,
                **{key: getattr(predicted, key) for key in ("tau", "v_d", "r_d", "hm")},
                "truncated_share": predicted.truncated_share,
                "token_seconds": dict(zip(PARTS, spent.tolist(), strict=True)),
                "sequence_seconds": seconds[at].tolist(),
                **_measured(seconds[at], baseline_s, measured, at, ranking.speedups[at], floor_percent),
            }
        )
    return board


def trigram_shares(trace: Trace) -> list[float]:
    """Share of distinct trigrams in every output."""
    return [distinct_trigrams([text]) for text in np.split(trace.token, trace.offsets[1:-1])]


def _over(which: npt.NDArray[np.bool_], baseline_s: Floats, own_s: Floats) -> dict[str, float] | None:
    """The speedup over some of the prompts; None where there are fewer than two of them."""
    return ratio_interval(baseline_s[which], own_s[which]).as_dict() if which.sum() > 1 else None


def choice_from(
    entries: Sequence[Entry], measured: Sequence[Measured] | None, floor_percent: float
) -> dict[str, Any] | None:
    """What the tuning forecast chose and what that cost, as `choice_of` says; None where nothing was measured."""
    if measured is None:
        return None
    wanted = measured[0].tokens
    forecasts = [
        Forecast(entry.title, entry.train_speedup, own.seconds_for(wanted))
        for entry, own in zip(entries, measured[1:-1], strict=True)
    ]
    return choice_of(forecasts, measured[0].seconds_for(wanted), floor_percent)


def _measured(
    seconds: Floats,
    baseline_s: Floats,
    measured: Sequence[Measured] | None,
    at: int,
    found: Estimate,
    floor_percent: float,
) -> dict[str, Any]:
    """What really decoding the entry of this number gave. found : its measured speedup, where it was measured"""
    keys = ("measured", "error_percent", "rounds_identical_percent", "output_identical_percent")
    if measured is None:
        return dict.fromkeys((*keys, "measured_sequence_seconds"))
    baseline, own = measured[0], measured[1 + at]
    wanted = baseline.tokens
    assert own.rounds_identical is not None and own.output_identical is not None
    return {
        "measured": found.as_dict(),
        **wall_clock(baseline.wall_s_for(wanted), own.wall_s_for(wanted), found, floor_percent),
        "measured_sequence_seconds": own.seconds_for(wanted).tolist(),
        "error_percent": (float(baseline_s.sum() / seconds.sum()) / found.estimate - 1) * 100,
        "rounds_identical_percent": 100 * own.rounds_identical,
        "output_identical_percent": 100 * own.output_identical,
    }


def has_own_target(pair: Pair, plain: Pair) -> bool:
    """Whether the drafter came with a target of its own, tuned with it."""
    return pair.target is not plain.target and weights_digest(pair.target) != weights_digest(plain.target)


def about(
    pairs: Mapping[str, Pair],
    plain: Pair,
    holdouts: Mapping[str, Trace],
    documents: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """What was compared, and how fast the plain target is alone. documents : profiles by the drafter's name"""
    costs = models(documents)
    tables = {name: PricedTrace(trace, costs[name]).table() for name, trace in holdouts.items()}
    first, table = next(iter(holdouts.values())), next(iter(tables.values()))
    return {
        "target": plain.target_name,
        "device": plain.device.type,
        "dtype": str(plain.dtype).removeprefix("torch."),
        "decoding": first.meta["decoding"],
        "environment": plain.environment,
        "output_tokens": int(first.output_tokens.sum()),
        "autoregressive_token_seconds": float(table.autoregressive_s.mean()),
        "drafters": [
            {
                "name": name,
                "kind": pair.drafter.name,
                "facts": pair.drafter.facts,
                "trees": holdouts[name].tree is not None,
                "own_target": has_own_target(pair, plain),
                "depth": holdouts[name].depth,
                "first_token_accepted_share": float((holdouts[name].match_len > 0).mean()),
                "step_ratio": tables[name].step_ratio,
                "contexts": documents[name]["contexts"],
            }
            for name, pair in pairs.items()
        ],
    }


def median_error(rows: Sequence[Mapping[str, Any]]) -> float | None:
    errors = [abs(row["error_percent"]) for row in rows if row["error_percent"] is not None]
    return float(np.median(errors)) if errors else None
