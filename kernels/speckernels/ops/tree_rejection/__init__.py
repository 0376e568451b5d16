"""Tree rejection: walk down a draft tree so that the output follows the target's distribution."""

from __future__ import annotations

from enum import IntEnum

import torch

from speckernels.ops.chain_rejection import check_vocabulary
from speckernels.ops.results import Verified, check_tensor, check_trees, empty_results
from speckernels.runtime.dispatch import register


class SiblingKind(IntEnum):
    """How the children of a node were drafted, which decides the rule that keeps the distribution.

    Attributes
    ----------
    iid : each child drawn from the draft's distribution, so tokens may repeat
    without_replacement : each child drawn from what its earlier siblings left of it
    top_k : children chosen without randomness (most likely tokens, a lookup, a search)
    """

    iid = 0
    without_replacement = 1
    top_k = 2


def tree_rejection(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    uniforms: torch.Tensor,
    kind: SiblingKind,
) -> Verified:
    """Multi-candidate speculative sampling: emitted tokens follow the target's distribution.

    From the root down, the children of the last accepted node are verified in the order of their
    indices; the walk goes on at the first accepted one, and ends where none is. With r the rest
    of the target's distribution p at the node (p itself at first), and q the draft's, a child x is
    accepted if

        u * q(x) / sum(q) < r(x) / sum(r)    for iid and without_replacement
        u * sum(r) < r(x)                    for top_k

    Once x is rejected, r becomes max(r / sum(r) - q / sum(q), 0) and, without replacement, q(x)
    becomes 0; for top_k, r(x) becomes 0. The last token is drawn from r at the last accepted
    node.

    The kind must be that of the drafting. Draws without replacement verified as iid, or fixed
    children verified as draws, bias the output, by up to 0.65 in total variation in the test's
    example. The other three mistakes do not: the rule for top_k asks nothing of its children, and
    iid draws less their repetitions are draws without replacement.

    Probabilities and rests are whole multiples of 2^-40, rounded down; x / sum(x) is computed as
    x * (2^40 / sum(x)) and all in float64, so every backend gives the same tokens. Per
    verified node this moves the distribution by about V * 2^-40 at most.

    NaN and negative probabilities count as 0, those above 1 as 1. A child that cannot have been
    drafted is passed over as if it were not there: one whose q(x) is 0 or whose token is outside
    [0, V), and without replacement or with top_k one that repeats an earlier sibling's token. If
    nothing is left of r, the last token is drawn from p; if that is 0 everywhere, it is -1.

    Parameters
    ----------
    tokens : int64 [B, n], the token of each node; that of the root is not verified
    parents : int32 [B, n], the parent of each node, which precedes it. Node 0 is the root
        (the pending token) with parent -1; later nodes with parent -1 are padding
    draft_probs : float32 [B, n, V], row j the distribution that the children of j were drawn
        from; None for top_k. V up to 2^22
    target_probs : float32 [B, n, V], row j the target's distribution after node j
    uniforms : float64 [B, n + 1] in [0, 1); [:, j] decides on node j (that of the root is not used),
        [:, n] draws the last token. Outside values count as the nearest inside, NaN as 0
    kind : how siblings were drafted

    Returns
    -------
    Verified
        The accepted path of each tree, and the token drawn behind it.

    Raises
    ------
    ValueError
        For other types or shapes, and where draft_probs does not suit the kind.

    References
    ----------
    iid: Miao et al. 2024, arXiv:2305.09781 (SpecInfer), Algorithm 2. without_replacement: Chen et
    al. 2024, arXiv:2402.12374 (Sequoia), Algorithm 2. top_k: q one-hot at each child in turn.
    """
    kind = SiblingKind(kind)
    check_trees(tokens, parents)
    check_tensor("target_probs", target_probs, (torch.float32,), (*parents.shape, None), parents.device)
    vocabulary = check_vocabulary(target_probs)
    if (draft_probs is None) != (kind == SiblingKind.top_k):
        needs = "is needed for" if draft_probs is None else "must be None for"
        raise ValueError(f"draft_probs {needs} siblings of kind {kind.name}; give the kind that the draft drew")
    if draft_probs is not None:
        check_tensor("draft_probs", draft_probs, (torch.float32,), (*parents.shape, vocabulary), parents.device)
        draft_probs = draft_probs.contiguous()
    check_tensor("uniforms", uniforms, (torch.float64,), (len(parents), parents.shape[1] + 1), parents.device)
    tokens, parents, target_probs, uniforms = (t.contiguous() for t in (tokens, parents, target_probs, uniforms))
    return Verified(
        *torch.ops.speckernels.tree_rejection(tokens, parents, draft_probs, target_probs, uniforms, int(kind))
    )


register(
    "tree_rejection",
    "(Tensor tokens, Tensor parents, Tensor? draft_probs, Tensor target_probs, Tensor uniforms, int kind)"
    " -> (Tensor, Tensor, Tensor)",
    lambda tokens, parents, draft_probs, target_probs, uniforms, kind: tuple(empty_results(parents)),
)
