"""What the study's answers and figures are made of: numbers from a trace, and from plain documents of boards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from specsim.arrays import Floats
from specsim.cost.model import ConstantCost, CostModel
from specsim.errors import InputError
from specsim.fitting import tree_calibration
from specsim.policy.base import Policy
from specsim.policy.registry import CHAIN_POLICIES, make_policy
from specsim.policy.tree.eagle2 import Eagle2
from specsim.policy.tree.pct import PCT
from specsim.replaying.priced import PricedTrace
from specsim.replaying.replay import Replay
from specsim.report.tree_figures import dense_sizes
from specsim.speedup.intervals import Comparison, Estimate, paired_difference, ratio_difference, ratio_interval
from specsim.static_tree import shape as tree_shapes
from specsim.static_tree.rates import rates_of
from specsim.static_tree.search import best_trees, expected_tokens, node_accept_probs
from specsim.trace.trace import Trace
from studies.common import MOST_TRUNCATED
from studies.costs import MOST_NODES
from studies.words import first_best

Document = Mapping[str, Any]
Row = Mapping[str, Any]
Where = Callable[[Row], bool]

PASSES = ConstantCost(1.0, 1.0)  # a second per draft pass
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
WIDTHS = range(1, 9)
PERCENTILES = (5, 25, 50, 75, 95)  # of the nodes of rounds
STATIC = ("vct", "cartesian", "sparse_tree", "optimal_tree")


@dataclass(frozen=True)
class Rounds:
    """A policy's rounds on a trace, counted by sequence [S]: plain data, which a file can hold.

    truncated : those that asked for more than the recorded trees hold
    """

    num_rounds: list[int]
    output_tokens: list[int]
    verified_nodes: list[int]  # beside the pending tokens
    draft_passes: list[int]
    truncated_rounds: list[int]

    @property
    def tau(self) -> Estimate:
        """Acceptance length: tokens per round."""
        return ratio_interval(self.output_tokens, self.num_rounds)

    @property
    def verified(self) -> Estimate:
        """Nodes verified per round."""
        return ratio_interval(self.verified_nodes, self.num_rounds)

    @property
    def passes(self) -> float:
        """Draft passes per round."""
        return sum(self.draft_passes) / sum(self.num_rounds)

    @property
    def truncated(self) -> float:
        """Share of rounds that asked for more than the recorded trees hold."""
        return sum(self.truncated_rounds) / sum(self.num_rounds)


def passes_replay(trace: Trace, policy: Policy) -> Replay:
    """The replay with draft passes for seconds: what costs have no part in; with the log of its rounds."""
    return PricedTrace(trace, PASSES).replay(policy, log=True)


def rounds_of(trace: Trace, policy: Policy) -> Rounds:
    """The policy's rounds on the trace."""
    return counted(passes_replay(trace, policy))


def counted(found: Replay) -> Rounds:
    """The rounds of a `passes_replay`."""
    cut = np.zeros_like(found.num_rounds) if found.truncated is None else found.truncated
    passes = np.rint(found.seconds[:, 0]).astype(np.int64)
    counts = (found.num_rounds, found.output_tokens, found.verified, passes, cut)
    return Rounds(*(column.tolist() for column in counts))


def policy_of(row: Row) -> Policy:
    """The policy of a row of a leaderboard or a validation."""
    return make_policy(row["policy"], row["params"])


def first(rows: Sequence[Row], where: Where) -> Row | None:
    return next((row for row in rows if where(row)), None)


def labelled(label: str) -> Where:
    return lambda row: row["label"] == label


def in_role(policy: str, role: str) -> Where:
    return lambda row: row["policy"] == policy and row["role"] == role


def tuned_best(board: Document, names: Sequence[str]) -> Row | None:
    """The row of these policies, of a leaderboard or a validation, that is best on the tuning sequences."""
    return first_best(row for row in board["rows"] if row["policy"] in names)


def compare(baseline_s: npt.ArrayLike, a: Row | None, b: Row | None) -> Comparison | None:
    """Speedup of a less that of b; None unless both are there."""
    if a is None or b is None:
        return None
    return paired_difference(baseline_s, a["sequence_seconds"], b["sequence_seconds"])


def opponents(board: Document, document: Document) -> list[tuple[str, Row | None, Row | None]]:
    """(who, its row on a board, its row in the validation) of all that hardware_pct is compared with."""
    chains = list(CHAIN_POLICIES)
    asked = [
        ("PCT, s_d / s_t of the costs", labelled("pct, s_d / s_t of the costs"), in_role("pct", "fitted")),
        ("PCT, tuned", labelled("pct, tuned"), in_role("pct", "tuned")),
        ("EAGLE-2, default", labelled("eagle2, 50 nodes, depth 6"), in_role("eagle2", "default")),
        ("EAGLE-2, tuned", labelled("eagle2, tuned"), in_role("eagle2", "tuned")),
    ]
    found = [(who, first(board["rows"], on), first(document["rows"], run)) for who, on, run in asked]
    for who, names in (("best static tree", STATIC), ("best chain policy", chains)):
        found.append((who, tuned_best(board, names), tuned_best(document, names)))
    return found


def paper_pct(config: Document) -> PCT:
    """PCT as its paper runs it, but for a bound on verified nodes, which the paper's costs need."""
    paper = config["paper"]
    settings = {key: paper[key] for key in ("width", "max_depth", "leaf_threshold")}
    return PCT(cost_ratio=paper["s_d"] / paper["s_t"], max_nodes=MOST_NODES, **settings)


@dataclass(frozen=True)
class PaperAnswer:
    """PCT with the paper's values beside EAGLE-2 on all sequences, for nothing is tuned; `small`: EAGLE-2 with as
    many nodes as PCT has in the mean."""

    pct: Rounds
    eagle2: Rounds
    small: Rounds
    difference: Comparison

    @property
    def node_share(self) -> float:
        return self.pct.verified.estimate / self.eagle2.verified.estimate

    @property
    def tau_ratio(self) -> float:
        return self.pct.tau.estimate / self.eagle2.tau.estimate

    @property
    def comparable(self) -> bool:
        """Whether the record holds what both ask for."""
        return max(self.pct.truncated, self.eagle2.truncated) <= MOST_TRUNCATED

    def nodes_beyond(self, share: float) -> Comparison:
        """Nodes that PCT verifies per round less this share of EAGLE-2's."""
        return self._beyond(share, self.pct.verified_nodes, self.eagle2.verified_nodes)

    def tau_beyond(self, share: float) -> Comparison:
        """PCT's acceptance length less this share of EAGLE-2's."""
        return self._beyond(share, self.pct.output_tokens, self.eagle2.output_tokens)

    def _beyond(self, share: float, pct: Sequence[int], eagle2: Sequence[int]) -> Comparison:
        return ratio_difference(pct, self.pct.num_rounds, share * np.asarray(eagle2), self.eagle2.num_rounds)

    @classmethod
    def of(cls, document: Document) -> Self:
        """From what `dataclasses.asdict` made of one."""
        rounds = {name: Rounds(**document[name]) for name in ("pct", "eagle2", "small")}
        difference = document["difference"]
        return cls(
            **rounds, difference=Comparison(**{**difference, "difference": Estimate(**difference["difference"])})
        )


def paper_answer(trace: Trace, config: Document, cost: CostModel) -> PaperAnswer:
    """The paper's comparison. difference : of speedups, PCT less EAGLE-2, under this cost"""
    pct, eagle2 = paper_pct(config), Eagle2()
    rounds = rounds_of(trace, pct)
    nodes = max(1, round(rounds.verified.estimate))
    priced = PricedTrace(trace, cost)
    seconds = [priced.replay(policy).speculative_s for policy in (pct, eagle2)]
    return PaperAnswer(
        pct=rounds,
        eagle2=rounds_of(trace, eagle2),
        small=rounds_of(trace, Eagle2(nodes=nodes)),
        difference=paired_difference(priced.baseline_s, *seconds),
    )


def width_rows(trace: Trace, config: Document) -> list[dict[str, float]]:
    """Acceptance length and verified nodes of the paper's PCT by expansion width, on all sequences.

    Widths of which the record truncates more rounds than `MOST_TRUNCATED` are left out.
    """
    assert trace.tree is not None
    found = []
    for width in WIDTHS:
        if width > trace.tree.width:
            break
        rounds = rounds_of(trace, dataclasses.replace(paper_pct(config), width=width))
        if rounds.truncated > MOST_TRUNCATED:
            continue
        found.append(
            {
                "width": width,
                "nodes": rounds.verified.estimate,
                "tau": rounds.tau.estimate,
                "truncated": rounds.truncated,
            }
        )
    return found


def domain_rows(trace: Trace, policies: Mapping[str, Policy]) -> dict[str, dict[str, Document]]:
    """Acceptance length, truncated share and spread of the verified nodes of rounds, by policy and domain."""
    found: dict[str, dict[str, Document]] = {}
    for name, policy in policies.items():
        found_rounds = passes_replay(trace, policy)
        rounds, replayed = counted(found_rounds), found_rounds.rounds
        assert replayed is not None
        found[name] = {}
        for domain in np.unique(trace.domain).tolist():
            (inside,) = np.nonzero(trace.domain == domain)
            count, tokens, cut = (
                sum(column[i] for i in inside)
                for column in (rounds.num_rounds, rounds.output_tokens, rounds.truncated_rounds)
            )
            nodes = replayed.verified[np.isin(replayed.sequence, inside)]
            found[name][domain] = {
                "tau": tokens / count,
                "truncated": cut / count,
                "nodes_mean": float(nodes.mean()),
                "nodes_percentiles": np.percentile(nodes, PERCENTILES).tolist(),
            }
    return found


def static_sizes(
    train: Trace, holdout: Trace, costs: Mapping[str, CostModel]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Dense trees, and those searched on `train`, replayed on `holdout`: points of `tree_figures.sizes`, by nodes.

    expected : tokens per round by the rates of `train`, so that a tree can be chosen without the held-out sequences
    """
    priced = {name: PricedTrace(holdout, cost) for name, cost in costs.items()}
    rates = rates_of(train)
    found = best_trees(rates, max(SIZES))
    shapes = [tree_shapes.cartesian(sizes) for sizes in dense_sizes(rates.shape)]
    searched = [found.shape(n) for n in SIZES if n <= found.nodes]

    def points(shapes: Sequence[tree_shapes.Shape]) -> list[dict[str, Any]]:
        return [{**static_point(holdout, one, priced), "expected": expected_tokens(rates, one)} for one in shapes]

    return points(sorted(shapes, key=len)), points(searched)


def static_point(trace: Trace, shape: tree_shapes.Shape, costs: Mapping[str, PricedTrace]) -> dict[str, Any]:
    """One static tree replayed."""
    policy = make_policy("sparse_tree", {"children": tuple(map(float, shape))})
    speedups: dict[str, float | None] = {}
    for name, priced in costs.items():
        try:
            speedups[name] = priced.replay(policy).speedup
        except InputError:  # more nodes than these costs are measured for
            speedups[name] = None
    return {"nodes": len(shape) - 1, "tokens": rounds_of(trace, policy).tau.estimate, "speedups": speedups}


def best_static(boards: Mapping[str, Document], train: Trace) -> dict[str, Document]:
    """The best static tree of each board, by the tuning sequences, and its nodes' chances, as `tree_figures` draws."""
    rates = rates_of(train, ranks=32)
    found = {}
    for cost, board in boards.items():
        row = tuned_best(board, STATIC)
        if row is not None:
            shape = tuple(policy_of(row).shape)  # type: ignore[attr-defined]
            title = f"{cost}: {row['label']}, {len(shape) - 1} nodes"
            found[title] = {"shape": list(shape), "chances": node_accept_probs(rates, shape).tolist()}
    return found


def node_bins(holdout: Trace) -> dict[str, dict[str, Any]]:
    """Reliability of draft probabilities: first children, which the paper's figure shows, and all nodes."""
    found = {}
    for label, rank in (("first children", 0), ("all nodes", None)):
        bins = tree_calibration.reliability(holdout, rank)
        found[label] = {
            "ece": bins.ece,
            "count": bins.count.tolist(),
            **{key: known(getattr(bins, key)) for key in ("mean_confidence", "accept_rate")},
        }
    return found


def known(values: Floats) -> list[float | None]:
    """The values as JSON has them: None for what an empty bin does not have."""
    return [None if np.isnan(value) else float(value) for value in values]
