"""Timed rounds of scripted drafts: chains, SPACE's passes with masks behind every token, and trees.

A pass of SPACE over m drafted tokens of a run with k masks is a tree of (m + 1)(k + 1) tokens, whose cache is compacted
at once.

Every round of a tree drafts it and verifies a given number of tokens; all draft passes but the first ingest a given
number of nodes. A tree's draft pass is compared with a chain's step at the same place of its round, so that `wider` of
a single node holds the mask and the search for siblings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numba as nb
import numpy as np
import torch

from realrun.decode.decoder import Decoder
from realrun.decode.draft import Draft
from realrun.decode.draft_model import DraftModel
from realrun.decode.rounds import Round, RoundContext
from realrun.decode.verify import Accepted, tree_verifier_for, verifier_for
from realrun.drafters.space import MaskedTarget
from realrun.lm.cached import CachedLM
from specsim.io.errors import InputError
from specsim.policy.base import setting
from specsim.policy.registry import make_policy
from specsim.policy.tree.base import MAX_DRAFTED, TreePolicy
from specsim.replaying.kernel import step_functions

PASSES, WIDE_PASSES = 5, 3  # of a measured tree; what a few nodes add falls from pass to pass, what many add does not
WIDE = 16  # nodes of a pass
MAX_TREE_TOKENS = MAX_DRAFTED // 2  # so that two levels fit into a tree
EVERY_SIZE = 8  # up to which all sizes are measured: products of an odd number of rows are slower


@nb.njit
def leaves_of(params):  # type: ignore[no-untyped-def]
    """Count the root's children that are verified and never expanded: half of the verified nodes if there is room."""
    room = MAX_DRAFTED - int(params.level_nodes) * int(params.max_depth)
    return min((int(params.kept) + 1) // 2, room)


@nb.njit
def initial_state(params):  # type: ignore[no-untyped-def]
    return (0.0,)


@nb.njit
def expand(state, params, tree, first, end, u, widths):  # type: ignore[no-untyped-def]
    nodes, level = int(params.level_nodes), tree.depth[first]
    if level == 0:
        widths[0] = nodes + leaves_of(params) if params.max_depth > 1.0 else max(nodes, int(params.kept))
        return state
    widths[first : first + nodes] = 1
    if level == int(params.max_depth) - 1:  # enough leaves for verification
        wanted = int(params.kept) - (end - 1)
        for i in range(first, first + nodes):
            widths[i] = max(1, -(-wanted // nodes))
    return state


@nb.njit
def select(state, params, tree, count, keep):  # type: ignore[no-untyped-def]
    nodes, kept, leaves = int(params.level_nodes), int(params.kept), 0
    if params.max_depth > 1.0:
        leaves = leaves_of(params)
        keep[nodes + 1 : nodes + 1 + leaves] = True
    before = min(kept - leaves, nodes)
    keep[: before + 1] = True
    after = nodes + 1 + leaves
    keep[after : after + kept - leaves - before] = True
    return np.inf


@nb.njit
def update(state, params, depth, accepted):  # type: ignore[no-untyped-def]
    return state


@dataclass(frozen=True)
class MeasuredTree(TreePolicy):
    """Levels of `level_nodes` expanded nodes; `kept` nodes are verified, half of them never expanded.

    Trees of policies end in such nodes, and a target that shares its lower layers with the drafter must
    run those layers over them in verification.
    """

    level_nodes: int = setting(1, 1, MAX_TREE_TOKENS)
    kept: int = setting(1, 0, MAX_TREE_TOKENS)
    max_depth: int = setting(PASSES, 1, PASSES, bounds="depth")

    name = "measured_tree"
    source = "for measurement only"
    initial_state = staticmethod(initial_state)
    expand = staticmethod(expand)
    select = staticmethod(select)
    update = staticmethod(update)

    @property
    def max_nodes(self) -> int:
        return self.kept

    @property
    def max_expanded(self) -> int:
        return self.level_nodes

    @property
    def max_width(self) -> int:
        return self.level_nodes + self.kept


class ScriptedTreeVerifier:
    """Does the verifier's work, then accepts the path to node `accept`, -1 for no node."""

    lossy: ClassVar[bool] = True

    def __init__(self) -> None:
        self.accept = -1

    def __call__(self, logits: torch.Tensor, draft: Draft, context: RoundContext) -> Accepted:
        tree_verifier_for(context.sampler)(logits, draft, context)
        path, node = list[int](), self.accept
        while node >= 0:
            path.append(node)
            node = draft.parents[node]
        return path[::-1], 0


def tree_sizes(tree_tokens: int) -> list[int]:
    """List the sizes to measure: 1, 2, ..., 8, 11, 16, 23, 32, 47, ... and always tree_tokens; none for 0."""
    if not 0 <= tree_tokens <= MAX_TREE_TOKENS:
        raise InputError(f"tree_tokens={tree_tokens} is outside [0, {MAX_TREE_TOKENS}]; choose a size inside")
    if tree_tokens == 0:
        return []
    doubled = {2**k for k in range(4, 10)} | {3 * 2**k - 1 for k in range(2, 8)}
    return [size for size in sorted({*range(1, EVERY_SIZE + 1), *doubled}) if size < tree_tokens] + [tree_tokens]


def passes(level_nodes: int, max_depth: int | None = None) -> int:
    """Count the draft passes of a measured tree; max_depth : the most that the drafter can make, None for no limit."""
    wanted = PASSES if level_nodes < WIDE else min(WIDE_PASSES, MAX_DRAFTED // level_nodes)
    return wanted if max_depth is None else min(wanted, max_depth)


def warm_trees(decoder: Decoder, sizes: Sequence[int], chain_tokens: Sequence[int], length: int) -> None:
    """Get both models ready for trees and drafts of these sizes over caches of `length` tokens."""
    drafter, largest = decoder.drafter, max(sizes, default=0)
    nodes = min(max(WIDE * PASSES, largest * WIDE_PASSES), MAX_DRAFTED)
    assert isinstance(drafter, DraftModel)
    decoder.target.warm({*chain_tokens, *sizes}, length + largest)
    if sizes:
        drafter.lm.warm({1, 2, *sizes}, length + nodes, nodes)


def scripted_tree_round(
    decoder: Decoder,
    tokens: list[int],
    context: int,
    level_nodes: int,
    size: int,
    rng: np.random.Generator,
) -> Round:
    """Run a round of draft passes over level_nodes nodes each, verify `size` tokens; restore both caches."""
    drafter, verifier = decoder.drafter, decoder.tree_verifier
    assert isinstance(drafter, DraftModel) and isinstance(verifier, ScriptedTreeVerifier)
    levels = passes(level_nodes, drafter.max_depth)
    policy = MeasuredTree(level_nodes, size - 1, levels)
    verifier.accept = int(rng.integers(-1, size - 1))
    if drafter.lm.reads_target_states:
        fall_behind(decoder, context, levels, rng)
    rounds: list[Round] = []
    decoder.clock()  # a round begins with an idle device
    decoder.round(list(tokens), RoundContext(decoder.sampler, 0, 0, levels), policy, (0.0,), rounds)
    decoder.target.truncate(context)
    drafter.commit(context)
    return rounds[0]


def fall_behind(decoder: Decoder, context: int, drafted: int, rng: np.random.Generator) -> None:
    """Drop from the drafter's cache what a round of so many drafted tokens emitted, as when the next round begins."""
    drafter = decoder.drafter
    assert isinstance(drafter, DraftModel)
    lacking = int(rng.integers(1, drafted + 2)) - drafter.lm.caches_pending_token
    drafter.commit(max(context - lacking, 0), decoder.produced_by(-1))


def masked_passes(depth: int) -> list[tuple[int, int]]:
    """List the (masks, drafted tokens) to measure: full drafts of every k, shorter drafts of the largest k."""
    return [*((k, k) for k in range(1, depth + 1)), *((depth, drafted) for drafted in range(depth))]


def pass_tokens(masks: int, drafted: int) -> int:
    """Count the tokens of a pass: the pending token and the drafted tokens, each with its masks."""
    return (drafted + 1) * (masks + 1)


def _set_masks(target: CachedLM, masks: int) -> None:
    """Put this many masks into the groups of the next pass, after a pass that left all candidates to draft."""
    if not isinstance(target, MaskedTarget):
        assert masks == 0
        return
    target.masks = target.most
    target.ask()
    target.masks = masks


class ScriptedVerifier:
    """Does the verifier's work, then accepts `accept` tokens."""

    def __init__(self) -> None:
        self.accept = 0

    def __call__(self, logits: torch.Tensor, draft: Draft, context: RoundContext) -> list[int]:
        verifier_for(context.sampler)(logits, draft, context)
        return [*draft.tokens[: self.accept], 0]


def scripted_round(
    decoder: Decoder,
    tokens: list[int],
    context: int,
    size: int,
    behind: int,
    rng: np.random.Generator,
    masks: int = 0,
) -> Round:
    """Run a round of `size` drafted tokens at this context; restore both caches afterwards.

    behind : cached tokens that the draft cache lacks at first, if it can lack any; a drafter that reads the target's
        states lacks a random number unless `behind` is more than 1
    masks : mask tokens behind every token of SPACE's pass
    """
    drafter, verifier = decoder.drafter, decoder.verifier
    assert isinstance(drafter, DraftModel)
    assert isinstance(verifier, ScriptedVerifier)
    if size and drafter.lm.reads_target_states and behind <= 1:
        fall_behind(decoder, context, size, rng)
    else:
        drafter.commit(context - behind, decoder.produced_by(-1))
    _set_masks(decoder.target, masks)
    verifier.accept = int(rng.integers(size + 1))
    policy = make_policy("adaedl", {"lambda0": -10.0, "max_draft_tokens": size}) if size else None
    state = step_functions(policy).initial_state(policy.params) if policy else None
    rounds: list[Round] = []
    decoder.clock()  # a round begins with an idle device, or it would wait for what was prepared
    decoder.round(list(tokens), RoundContext(decoder.sampler, 0, 0, size), policy, state, rounds)
    if size:
        drafter.commit(context)
    decoder.target.truncate(context)
    # A round that drafted nothing leaves the draft cache behind.
    drafter.lm.prefill(tokens[drafter.lm.length : context])
    return rounds[0]


def scored_round(decoder: Decoder, tokens: list[int], context: int, size: int, rng: np.random.Generator) -> Round:
    """Run `scripted_round` with the predictor's scores."""
    drafter = decoder.drafter
    assert isinstance(drafter, DraftModel)
    drafter.enable_scores(True)
    decoder.target.keep_hidden = drafter.wants_target_hidden
    round_ = scripted_round(decoder, tokens, context, size, 0, rng)
    drafter.enable_scores(False)
    decoder.target.keep_hidden = drafter.wants_target_hidden
    return round_
