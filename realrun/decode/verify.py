"""Verification of drafts: which drafted tokens become output, and the token after them.

Rejection sampling gives the target's distribution, whatever the drafter's: Leviathan et al. 2023 (arXiv:2211.17192),
Algorithm 1; Chen et al. 2023 (arXiv:2302.01318), Algorithm 2. Both write p for the target and q for the draft, as here.

A verifier of trees takes the target's logits [k + 1, V], row 0 after the pending token and row i + 1 after node i of
the draft, and returns the accepted nodes, from the top down and numbered as in `Draft.tokens`, and the target's own
token after the last of them.

On a CPU, where nothing has to be copied from a device, only rows on the accepted path are looked at: all sixty rows of
a tree may take longer than a draft pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Protocol, get_args

import torch

import speckernels
from realrun.decode.draft import Draft, Siblings
from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import Sampler, draw, plain_calls
from specsim.io.errors import InputError

Accepted = tuple[list[int], int]  # path, token


def rejection_verifier(logits: torch.Tensor, draft: Draft, context: RoundContext) -> list[int]:
    """Emit the accepted tokens and a token of the target's own; a sample of p if nothing was drafted.

    logits : [k + 1, V], the target's after the pending token and each drafted token
    """
    sampler, sequence, position, *_ = context
    drafted = len(draft.tokens)
    uniforms = [sampler.uniform("judge", sequence, position, depth) for depth in range(1, drafted + 1)]
    uniforms.append(sampler.uniform("last", sequence, position, 0))
    verify = verify_chain if plain_calls(logits) else verify_by_kernel
    return verify(draft.tokens, draft.probs, sampler.probs(logits), uniforms)


def verify_chain(
    tokens: Sequence[int],
    draft_probs: Sequence[torch.Tensor],
    target_probs: torch.Tensor,
    uniforms: Sequence[float],
) -> list[int]:
    """Emit the accepted tokens of a chain of k and another token: speckernels.chain_rejection in plain calls.

    Token i is accepted if its uniform u < p/q (strictly: p = 0 is never accepted). The first rejected token is
    replaced by a draw from the normalised (p - q)+. If all are accepted, the last token is drawn from p.

    draft_probs : [k] of [V], what each token was drawn from; target_probs : [k + 1, V]
    uniforms : [k + 1], the last of them for the draw
    """
    for place, token in enumerate(tokens):
        target, drafter = target_probs[place], draft_probs[place]
        if not uniforms[place] * drafter[token].item() < target[token].item():
            residual = (target - drafter).clamp(min=0)
            # Distributions that differ by rounding alone may leave nothing.
            weights = residual if residual.any() else target
            return [*tokens[:place], int(draw(weights[None], uniforms[-1:]))]
    return [*tokens, int(draw(target_probs[-1:], uniforms[-1:]))]


def verify_by_kernel(
    tokens: Sequence[int],
    draft_probs: Sequence[torch.Tensor],
    target_probs: torch.Tensor,
    uniforms: Sequence[float],
) -> list[int]:
    """Do the same as `verify_chain` by speckernels.chain_rejection, in float32."""
    device = target_probs.device
    stacked = torch.stack([*draft_probs]) if draft_probs else target_probs[:0]
    verified = speckernels.chain_rejection(
        torch.tensor([[*tokens]], dtype=torch.int64, device=device),
        stacked[None].float(),
        target_probs[None].float(),
        torch.tensor([[*uniforms]], dtype=torch.float64, device=device),
    )
    # A single copy from the device; emitted tokens are followed by -1.
    return [token for token in verified.emitted[0].tolist() if token >= 0]


class Verifier(Protocol):
    """Judges a chain by the target's logits."""

    def __call__(self, logits: torch.Tensor, draft: Draft, context: RoundContext) -> list[int]:
        """Emit the accepted tokens and a token of the target's own.

        logits : [k + 1, V], after the pending token and each drafted token
        """


def match_verifier(logits: torch.Tensor, draft: Draft, context: RoundContext) -> list[int]:
    """Accept the leading tokens that equal the target's own choices; lossless except in rejection mode."""
    chosen: list[int] = context.sampler.tokens(logits, context.sequence, context.position).tolist()
    drafted = draft.tokens
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == chosen[accepted]:
        accepted += 1
    return chosen[: accepted + 1]


def verifier_for(sampler: Sampler) -> Verifier:
    """Choose the lossless verifier of this sampler."""
    return rejection_verifier if sampler.mode == "rejection" else match_verifier


class TreeVerifier(Protocol):
    """Judges a draft tree by the target's logits.

    lossy : whether the output may differ from the target's own, in distribution or, if greedy, in tokens
    """

    lossy: ClassVar[bool]

    def __call__(self, logits: torch.Tensor, draft: Draft, context: RoundContext) -> Accepted: ...


@dataclass(frozen=True)
class MatchTree:
    """Accept each node that is the target's own choice after its accepted parent; lossless except in rejection mode.

    If siblings have the same token, several accepted nodes may be deepest; that of lowest index ends the path.
    """

    lossy: ClassVar[bool] = False

    def __call__(self, logits: torch.Tensor, draft: Draft, context: RoundContext) -> Accepted:
        sampler, sequence, position, *_ = context
        tokens, parents = draft.tokens, draft.parents
        positions = [position]  # of the token after each row
        for parent in parents:
            positions.append(positions[parent + 1] + 1)
        chosen: Callable[[int], int]
        if plain_calls(logits):
            chosen = cache(lambda row: int(sampler.tokens(logits[row : row + 1], sequence, positions[row])))
        else:
            chosen = sampler.tokens_at(logits, sequence, positions).tolist().__getitem__
        path = longest_path(parents, lambda node: tokens[node] == chosen(parents[node] + 1))
        return path, chosen(path[-1] + 1 if path else 0)


@dataclass(frozen=True)
class RejectTree:
    """Multi-branch rejection sampling by the rule that fits how the siblings were drafted; lossless.

    iid : SpecInfer (Miao et al. 2024, arXiv:2305.09781, Algorithm 2)
    without_replacement : Sequoia (Chen et al. 2024, arXiv:2402.12374, Algorithm 2)
    top_k : draw from the target, and see whether the token is among the children

    On chains this is `realrun.decode.verify`, draw for draw. Raises InputError for a draft that could bias
    the output: drawn siblings without their distributions, other siblings with distributions, and drawn siblings of
    which some are not verified. Whether a node is verified must not depend on its own token, and it does where a
    policy selects the most probable nodes.
    """

    lossy: ClassVar[bool] = False

    def __call__(self, logits: torch.Tensor, draft: Draft, context: RoundContext) -> Accepted:
        check_siblings(draft)
        sampler, sequence, position, *_ = context

        def judge(node: int) -> float:
            return sampler.uniform("judge", sequence, position, node + 1)

        last = sampler.uniform("last", sequence, position, 0)
        if plain_calls(logits):
            return walk(draft, lambda row: sampler.probs(logits[row : row + 1])[0], judge, last)
        return reject_by_kernel(draft, sampler.probs(logits), [*map(judge, range(len(draft.tokens))), last])


@dataclass(frozen=True)
class TypicalAcceptance:
    """Accept each node with p(token) > min(epsilon, delta exp(-H)) after its accepted parent. Lossy.

    p is the target's distribution at the sampler's temperature, H its entropy in nats. The longest path is taken, and
    the token after it is greedy, so the output follows neither the target's distribution nor its greedy text. Greedy
    mode, the limit as the temperature falls to 0, is lossless: it uses `match_tree`.

    MEDUSA (Cai et al. 2024, arXiv:2401.10774), section 3.3.1. The token that the paper accepts without condition is
    here the last token of the previous round. The paper names no epsilon; 0.09 is that of its released code.

    delta : sqrt(epsilon) if None, as in the paper's section 4.3.2
    """

    epsilon: float = 0.09
    delta: float | None = None
    lossy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, value in (("epsilon", self.epsilon), ("delta", self.delta)):
            if value is not None and not 0 <= value < math.inf:
                raise InputError(f"{name}={value} of typical acceptance is out of range; give a number of at least 0")

    def __call__(self, logits: torch.Tensor, draft: Draft, context: RoundContext) -> Accepted:
        sampler = context.sampler
        if sampler.mode == "greedy":
            return match_tree(logits, draft, context)
        delta = math.sqrt(self.epsilon) if self.delta is None else self.delta
        if not plain_calls(logits):
            warped = sampler.warped(logits)
            stats = speckernels.draft_statistics(warped)
            judged_by = (warped[None], stats.logsumexp[None].float(), stats.entropy_nats[None].float())
            thresholds = (self.epsilon, delta)
            tree = kernel_tree(draft, logits.device)
            return read(speckernels.typical_acceptance(*tree, *judged_by, stats.token[None], *thresholds))

        @cache
        def after(row: int) -> tuple[torch.Tensor, float]:
            """Give the target's probabilities at this row, and the acceptance threshold."""
            probs = sampler.probs(logits[row : row + 1])[0].double()
            return probs, min(self.epsilon, delta * math.exp(-float(torch.special.entr(probs).sum())))

        def accepts(node: int) -> bool:
            probs, threshold = after(draft.parents[node] + 1)
            return float(probs[draft.tokens[node]]) > threshold

        path = longest_path(draft.parents, accepts)
        return path, int(logits[path[-1] + 1 if path else 0].argmax())


match_tree = MatchTree()
reject_tree = RejectTree()


def tree_verifier_for(sampler: Sampler) -> TreeVerifier:
    """Choose the lossless verifier of this sampler."""
    return reject_tree if sampler.mode == "rejection" else match_tree


def longest_path(parents: Sequence[int], accepts: Callable[[int], bool]) -> list[int]:
    """Find the path to the deepest accepted node, to that of lowest index if there are several.

    Nodes follow their parents. accepts : called for children of the pending token and of accepted nodes only
    """
    depth = {-1: 0}
    for node, parent in enumerate(parents):
        if parent in depth and accepts(node):
            depth[node] = depth[parent] + 1
    node = max(depth, key=depth.__getitem__)  # the first of the deepest
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def check_siblings(draft: Draft) -> None:
    """Raise InputError for a draft whose parts contradict each other on how its siblings were drafted."""
    kind, tokens, probs = draft.siblings, len(draft.tokens), len(draft.probs)
    if kind not in get_args(Siblings):
        raise InputError(f"siblings {kind!r} of a draft are unknown; known: {', '.join(get_args(Siblings))}")
    if kind == "top_k" and probs:
        raise InputError(
            f"a draft of top_k siblings carries {probs} distributions, but such siblings are not drawn; "
            "give the kind that they were drafted by, or leave its probs empty"
        )
    if kind != "top_k" and probs != tokens:
        raise InputError(
            f"a draft of {kind} siblings carries {probs} distributions for {tokens} tokens; give the "
            "distribution that each was drawn from, or call siblings that were not drawn top_k"
        )
    if kind != "top_k" and draft.drafted > tokens:
        raise InputError(
            f"{draft.drafted - tokens} of {draft.drafted} nodes of a draft with {kind} siblings were not verified, "
            "which biases the sampled output; verify all nodes, or draft top_k siblings"
        )


def walk(
    draft: Draft,
    target_probs: Callable[[int], torch.Tensor],
    judge: Callable[[int], float],
    last: float,
) -> Accepted:
    """Do the same as speckernels.tree_rejection in plain calls and in float64.

    target_probs : the target's distribution [V] at a row; judge : the uniform of a node, last :
        that of the last token
    """
    path: list[int] = []
    at = -1
    while True:
        children = [node for node, parent in enumerate(draft.parents) if parent == at]
        target = target_probs(at + 1).double()
        accepted, rest = judge_children(draft, children, target, judge)
        if accepted is None:
            # Distributions that differ by rounding alone may leave nothing.
            return path, int(draw((rest if rest.any() else target)[None], [last]))
        path.append(at := accepted)


def judge_children(
    draft: Draft, children: Sequence[int], target: torch.Tensor, judge: Callable[[int], float]
) -> tuple[int | None, torch.Tensor]:
    """Find a node's first accepted child, if any, and what the children before it left of the target's [V].

    See speckernels.tree_rejection for the rules. Tokens that cannot have been drafted are skipped: tokens of
    probability 0 in the draft, or drawn before without replacement.
    """
    rest = target
    offered = draft.probs[children[0]].double() if children and draft.siblings != "top_k" else None
    for child in children:
        token = draft.tokens[child]
        if offered is None:
            if judge(child) * float(rest.sum()) < float(rest[token]):
                return child, rest
            rest = without(rest, token)
        elif (prob := float(offered[token])) > 0:
            total, total_offered = float(rest.sum()) or 1.0, float(offered.sum())
            if judge(child) * prob / total_offered < float(rest[token]) / total:
                return child, rest
            rest = (rest / total - offered / total_offered).clamp(min=0)
            if draft.siblings == "without_replacement":
                offered = without(offered, token)
    return None, rest


def without(weights: torch.Tensor, token: int) -> torch.Tensor:
    """Set the weight of this token to 0 in a copy of weights [V]."""
    weights = weights.clone()
    weights[token] = 0
    return weights


def reject_by_kernel(draft: Draft, target_probs: torch.Tensor, uniforms: Sequence[float]) -> Accepted:
    """Do the same as `walk` by speckernels.tree_rejection, in float32, for target_probs [k + 1, V].

    uniforms : [k + 1], of each node and of the last token
    """
    device = target_probs.device
    offered = None
    if draft.siblings != "top_k":
        # By parent, whose children share a distribution; the rows of leaves do not matter.
        drawn_from = {parent + 1: probs for parent, probs in zip(draft.parents, draft.probs, strict=True)}
        rows = [drawn_from.get(row, target_probs[row]) for row in range(len(target_probs))]
        offered = torch.stack([row.float() for row in rows])[None]
    verified = speckernels.tree_rejection(
        *kernel_tree(draft, device),
        offered,
        target_probs[None].float(),
        torch.tensor([[0.0, *uniforms]], dtype=torch.float64, device=device),  # the root is not judged
        speckernels.SiblingKind[draft.siblings],
    )
    return read(verified)


def kernel_tree(draft: Draft, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Number tokens and parents [1, k + 1] as the kernels do: node 0 is the pending token, which is not judged."""
    parents = [-1, *(parent + 1 for parent in draft.parents)]
    return (
        torch.tensor([[0, *draft.tokens]], device=device),
        torch.tensor([parents], dtype=torch.int32, device=device),
    )


def read(verified: speckernels.Verified) -> Accepted:
    """Copy the kernels' result for a tree to the host."""
    path, emitted = torch.stack([verified.path[0].long(), verified.emitted[0]]).tolist()
    nodes = [node - 1 for node in path if node > 0]
    return nodes, emitted[len(nodes)]
