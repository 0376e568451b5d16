"""Traces with recorded trees of made-up drafters that know the last token and the position alone.

The drafter's distribution after a prefix depends on where it ends and on its last token, so a
true token's rank is the same from wherever a round starts. The text is drawn from what the
drafter says about it, sharpened or flattened: on the true path its probabilities are right, but
for that.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from specsim.trace.trace import Trace
from specsim.trace.tree_record import record_from_nodes


def tree_trace(
    rng_seed: int,
    sequences: int = 4,
    tokens: int = 60,
    depth: int = 5,
    width: int = 4,
    nodes: int = 24,
    vocabulary: int = 12,
    *,
    overconfidence: float = 1.0,
    hidden: float = 0.0,
    easiness: float = 3.0,
) -> Trace:
    """A greedy trace of equally long sequences, of which `nodes` nodes per position are recorded (at least the chain).

    Records are whole, of horizon 0, where nodes is at least width + width^2 + ... to the depth.

    easiness : standard deviation of the drafter's logits, on average over the text, which has easy stretches
    overconfidence : factor by which the drafter's logits are larger than those that the text is drawn from
    hidden : standard deviation of the log of a further such factor, that lasts for stretches of text
    """
    rng = np.random.default_rng(rng_seed)
    total = tokens + depth  # what may be drafted beyond the end counts as well
    sharp = easiness * np.exp(0.6 * stretches(rng, sequences, total))
    logits = (sharp[..., None, None] * rng.normal(size=(sequences, total, vocabulary, vocabulary))).astype(np.float32)
    probs = _softmax(logits)
    order = np.argsort(-probs, axis=-1, kind="stable").astype(np.int32)
    probs = np.take_along_axis(probs, order, axis=-1)  # by rank
    factor = np.exp(hidden * stretches(rng, sequences, total)) / overconfidence
    true_probs = _softmax(np.take_along_axis(logits, order, axis=-1) * factor[..., None, None])
    return drawn_trace(rng, probs, order, true_probs, depth, width, max(nodes, depth))


def drawn_trace(
    rng: np.random.Generator,
    probs: np.ndarray,
    order: np.ndarray,
    true_probs: np.ndarray,
    depth: int,
    width: int,
    nodes: int,
) -> Trace:
    """The trace of a text that is drawn, by rank, from `true_probs`.

    probs, true_probs, order : the drafter's, the text's and the tokens [sequence, position, last token, rank], of
        `depth` positions more than the text has
    """
    sequences, total = probs.shape[:2]
    tokens = total - depth
    true_rank = np.empty((sequences, total), dtype=np.int64)
    token = np.empty((sequences, total), dtype=np.int32)
    last, every = np.zeros(sequences, dtype=np.int64), np.arange(sequences)
    for t in range(total):
        accept_prob = np.cumsum(true_probs[every, t, last], axis=1)
        true_rank[:, t] = (rng.random((sequences, 1)) > accept_prob / accept_prob[:, -1:]).sum(axis=1)
        token[:, t] = last = order[every, t, last, true_rank[:, t]]
    parent, drafted, prob, horizon = _record(probs, order, token[:, :tokens], depth, width, nodes)
    longest = int((parent >= 0).sum(axis=1).max())
    tree = record_from_nodes(parent[:, :longest], drafted[:, :longest], prob[:, :longest], horizon, width)

    ahead = np.arange(tokens)[:, None] + np.arange(depth)  # [t, i]
    ranks = np.where(ahead < tokens, true_rank[:, ahead], -1).reshape(-1, depth).astype(np.int16)
    chain, chain_prob, entropy = _chain(probs, order, token[:, :tokens], depth)
    hits = ranks == 0
    return Trace(
        meta={
            "target": "none",
            "drafter": "none",
            "decoding": "greedy",
            "depth": depth,
            "eos_token_id": None,
            "dtype": "float32",
            "device": "cpu",
        },
        sequence_id=np.arange(10, 10 + sequences, dtype=np.int64),
        domain=np.array([("code", "prose")[s % 2] for s in range(sequences)]),
        prompt_tokens=5 + 7 * np.arange(sequences, dtype=np.int64),
        budget_tokens=np.full(sequences, tokens, dtype=np.int64),
        offsets=tokens * np.arange(sequences + 1, dtype=np.int64),
        token=np.ascontiguousarray(token[:, :tokens]).ravel(),
        match_len=np.where(hits.all(axis=1), depth, hits.argmin(axis=1)).astype(np.uint8),
        draft_token=chain,
        prob=chain_prob,
        confidence=chain_prob.copy(),
        entropy_nats=entropy,
        true_rank=ranks,
        tree=tree,
    )


def stretches(rng: np.random.Generator, sequences: int, tokens: int) -> np.ndarray:
    """A standard normal number per token [S, T] that lasts for about ten of them."""
    noise = rng.normal(size=(sequences, tokens))
    for t in range(1, tokens):
        noise[:, t] = 0.9 * noise[:, t - 1] + np.sqrt(1 - 0.9**2) * noise[:, t]
    return noise


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    result: np.ndarray = (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float32)
    return result


def _chain(
    probs: np.ndarray, order: np.ndarray, token: np.ndarray, depth: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tokens of rank 0 in sequence from every position, with probability and entropy, [N, D] each."""
    sequences, tokens = token.shape
    every, start = np.arange(sequences)[:, None], np.arange(tokens)[None]
    last = np.concatenate([np.zeros((sequences, 1), dtype=np.int32), token[:, :-1]], axis=1)
    columns = []
    for i in range(depth):
        p = probs[every, start + i, last]
        last = order[every, start + i, last, 0]
        columns.append((last, p[..., 0], -(p * np.log(np.maximum(p, 1e-30))).sum(axis=-1)))
    chain, chain_prob, entropy = (np.stack(column, axis=-1).reshape(-1, depth) for column in zip(*columns, strict=True))
    return chain.astype(np.int32), chain_prob.astype(np.float32), entropy.astype(np.float32)


@nb.njit(cache=True)
def _record(probs, order, token, depth, width, most):  # type: ignore[no-untyped-def]
    """Best-first expansion at every position: parent, token, prob [N, most] in level order, and horizon [N].

    The chain comes first. Then, again and again, the likeliest of the next children of all nodes.
    """
    sequences, tokens = token.shape
    width = min(width, probs.shape[-1])
    parents = np.full((sequences * tokens, most), -1, np.int32)
    drafted = np.full((sequences * tokens, most), -1, np.int32)
    accept_probs = np.zeros((sequences * tokens, most), np.float32)
    horizon = np.zeros(sequences * tokens, np.float32)
    path, level = np.zeros(most + 1, np.float32), np.zeros(most + 1, np.int64)
    last, taken = np.zeros(most + 1, np.int64), np.zeros(most + 1, np.int64)
    child, number = np.zeros((most + 1, width), np.int64), np.zeros(most + 1, np.int64)
    for s in range(sequences):
        for t in range(tokens):
            row = s * tokens + t
            path[0], level[0], last[0] = 1.0, 0, token[s, t - 1] if t > 0 else 0
            taken[:] = 0
            count = 1
            while True:
                best, best_reached = -1, np.float32(0.0)
                if count <= depth:
                    best = count - 1  # the chain
                else:
                    for i in range(count):
                        if level[i] < depth and taken[i] < width:
                            reached = path[i] * probs[s, t + level[i], last[i], taken[i]]
                            if best < 0 or reached > best_reached:
                                best, best_reached = i, reached
                if count > most or best < 0:
                    horizon[row] = best_reached
                    break
                rank = taken[best]
                child[best, rank] = count
                taken[best] += 1
                path[count] = path[best] * probs[s, t + level[best], last[best], rank]
                last[count] = order[s, t + level[best], last[best], rank]
                level[count] = level[best] + 1
                count += 1
            end = 1
            number[0] = 0
            for head in range(count):  # in level order
                node = number[head]
                for rank in range(taken[node]):
                    below = child[node, rank]
                    number[end] = below
                    parents[row, end - 1] = head
                    drafted[row, end - 1] = last[below]
                    accept_probs[row, end - 1] = probs[s, t + level[node], last[node], rank]
                    end += 1
    return parents, drafted, accept_probs, horizon
