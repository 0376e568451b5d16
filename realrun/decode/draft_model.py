"""Vanilla speculative decoding's drafter: an independent draft model, for chains and trees.

A tree grows level by level, a pass for each. The steps are those of `specsim.replaying.tree`, whose nodes come from a
record instead. In rejection mode the children of a node are drawn at random, and how they are drawn decides how they
may be judged (`realrun.decode.verify`). With a single child each, "iid" draws the same tokens as a chain
(`Sampler.draft`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from realrun.decode.acceptance_predictor import Predictor, score_of
from realrun.decode.draft import Draft, KeepDrafting, params_of
from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import BLOCK, Sampler, compared_in, gumbel_noise
from realrun.lm.cached import CachedLM
from realrun.lm.choice import make_lm
from realrun.lm.clock import now
from realrun.lm.number_type import refuse_logits
from realrun.lm.static.sizes import Mirrored
from specsim.io.arrays import Array
from specsim.io.compiled import njit
from specsim.io.errors import InputError
from specsim.policy.chain.base import Step
from specsim.policy.tree.base import MAX_DRAFTED, TreePolicy, close_kept, limit_widths, new_tree
from specsim.replaying.kernel import step_functions


class TreeGrower:
    """Grows trees on a draft model's cache.

    tree, token : the nodes drafted so far, the root first
    slot : int32, place of each expanded node among the nodes of the draft model's cache; -1 for others, and for the
        root, whose token is cached
    """

    def __init__(self, lm: CachedLM):
        self.lm = lm
        room = MAX_DRAFTED + 1
        self.tree, self.token = new_tree(), np.zeros(room, dtype=np.int64)
        self.slot, self.widths = np.zeros(room, dtype=np.int32), np.zeros(room, dtype=np.int32)
        self.keep = np.zeros(room, dtype=np.bool_)

    def warm(self, policy: TreePolicy, length: int) -> None:
        """Prepare the model for this policy's passes over sequences of `length` tokens."""
        self.lm.check_trees()
        nodes = policy.max_expanded * policy.max_draft_tokens
        self.lm.warm(range(1, max(2, policy.max_expanded) + 1), length + nodes, nodes)

    def grow(
        self,
        tokens: Sequence[int],
        context: RoundContext,
        policy: TreePolicy,
        state: Any,
        score: Callable[[int], torch.Tensor] | None = None,
    ) -> tuple[Draft, Any]:
        """Grow a tree of up to `limit` levels after `tokens`, for output positions `position` and on.

        Where the policy expands nothing at the root, no pass is made and nothing drafted.

        score : gives the predictor's score [1] of the last pass's first token at this depth, from 1; None where the
            policy reads none

        Returns the draft and the policy's new state.
        """
        tree, widths, params = self.tree, self.widths, params_of(policy)
        draft = Draft(siblings="top_k", fed=len(tokens) - self.lm.length)
        functions = step_functions(policy)
        first, count = 0, 1
        chain = 0  # node of the newest level on the first candidates' chain, -1 where that has ended
        widths[0] = 0
        for level in range(context.limit):
            begin, end = now(), count
            state = functions.expand(state, params, tree, first, end, context.policy_uniform(level), widths)
            drafted, expanded = limit_widths(widths, first, end, MAX_DRAFTED + 1 - count)
            if expanded > policy.max_expanded:
                raise InputError(f"policy {policy} expands {expanded} nodes of a level, more than its max_expanded")
            start = now()
            draft.policy_s += start - begin
            draft.asked += 1
            if not drafted:
                break
            parents = expanded_nodes(widths, first, end, expanded)
            logits = self._pass(tokens, parents, level)
            columns = self._children(logits, int(widths[parents].max()), context, level)
            chain = count if parents[0] == chain else -1  # a level begins with it, and with its children if it has any
            if score is not None and chain >= 0:
                columns = torch.cat([columns, score(level + 1).double().expand(expanded, 1)], dim=1)
            # The only copy from the device to the host in a pass.
            on_host = columns.cpu().numpy()
            # Every expanded node has a first child; later columns of narrower nodes are filled with -1.
            if np.isnan(on_host).any() or (on_host[:, 0] < 0).any():
                raise refuse_logits(self.lm, tokens, "drafter")
            if score is not None:  # in float32, as in traces
                tree.score[level] = np.float32(on_host[0, -1]) if chain >= 0 else tree.score[level - 1]
            count = add_level(tree, self.token, widths, self.slot, parents, count, level + 1, on_host)
            first = end
            draft.level_nodes.append(expanded)
            draft.step_s.append(now() - start)
        draft.drafted = count - 1
        if draft.drafted:
            self._select(draft, count, policy, state)
        return draft, state

    def _children(self, logits: torch.Tensor, width: int, context: RoundContext, level: int) -> torch.Tensor:
        """Draft children of each row of logits [n, V]: tokens and probabilities [n, 2 width] in float64."""
        sampler, sequence, position, *_ = context
        n = len(logits)
        # Rows that share memory are the same distribution, for example of all nodes of a level of MEDUSA.
        rows = logits[:1] if n > 1 and logits.stride(0) == 0 else logits
        tokens, probs = sampler.candidates(rows, sequence, [position + level] * len(rows), width)
        return torch.cat([tokens.expand(n, -1).double(), probs.expand(n, -1).double()], dim=1)

    def commit(self, path: Sequence[int]) -> None:
        """Keep the cache of the accepted nodes; the last may be a leaf, which is not cached."""
        self.lm.keep_nodes([slot for slot in (int(self.slot[node]) for node in path) if slot >= 0])

    def _pass(self, tokens: Sequence[int], nodes: Array, level: int) -> torch.Tensor:
        """Compute logits [n, V] after these nodes of a level, which enter the cache."""
        if level == 0:
            return self.lm.forward(tokens[self.lm.length :])[-1:]
        visible = ingest(self.tree.parent, self.slot, nodes, self.lm.nodes)
        fed = self.token[nodes].tolist()
        return self.lm.forward_nodes(fed, [level - 1] * len(fed), torch.from_numpy(visible))

    def _select(self, draft: Draft, count: int, policy: TreePolicy, state: Any) -> None:
        keep = self.keep
        keep[:count] = False
        keep[0] = True
        step_functions(policy).select(state, params_of(policy), self.tree, count, keep)
        kept, _ = close_kept(self.tree, count, keep)
        if kept > policy.max_verified_nodes:
            raise InputError(f"policy {policy} verifies {kept} nodes, more than its max_nodes; keep fewer, or raise it")
        nodes, parents = kept_nodes(self.tree.parent, keep, count, kept)
        draft.nodes, draft.parents = nodes.tolist(), parents.tolist()
        draft.tokens = self.token[nodes].tolist()


@njit
def expanded_nodes(widths, first, end, expanded):  # type: ignore[no-untyped-def]
    """List the nodes of first .. end - 1 that get children."""
    nodes = np.empty(expanded, np.int64)
    at = 0
    for node in range(first, end):
        if widths[node] > 0:
            nodes[at] = node
            at += 1
    return nodes


@njit
def ingest(parent, slot, nodes, held):  # type: ignore[no-untyped-def]
    """Give these nodes the slots from `held` on; return the slots that each sees, bool [n, held + n]."""
    visible = np.zeros((len(nodes), held + len(nodes)), np.bool_)
    for row, node in enumerate(nodes):
        slot[node] = held + row
        at = node
        while at > 0:
            visible[row, slot[at]] = True
            at = parent[at]
    return visible


@njit
def add_level(tree, token, widths, slot, parents, count, level, columns):  # type: ignore[no-untyped-def]
    """Append the children of these nodes; return the number of nodes.

    columns [n, 2 w] or [n, 2 w + 1]: tokens, then probabilities, then perhaps a score
    """
    most = columns.shape[1] // 2
    for row, node in enumerate(parents):
        widths[node] = min(widths[node], most)  # there are no more tokens
        for rank in range(widths[node]):
            prob = np.float32(columns[row, most + rank])
            token[count] = np.int64(columns[row, rank])
            tree.prob[count] = prob
            tree.path[count] = tree.path[node] * prob
            tree.parent[count] = node
            tree.rank[count] = rank
            tree.depth[count] = level
            widths[count] = 0
            slot[count] = -1
            count += 1
    return count


@njit
def kept_nodes(parent, keep, count, kept):  # type: ignore[no-untyped-def]
    """List the kept nodes but the root, and their parents, numbered among them: -1 is the root."""
    nodes, parents = np.empty(kept, np.int64), np.empty(kept, np.int64)
    number = np.full(count, -1)
    at = 0
    for node in range(1, count):
        if keep[node]:
            nodes[at], parents[at], number[node] = node, number[parent[node]], at
            at += 1
    return nodes, parents


class StepDescription:
    """Statistics [c] of a chain's draft step, except in rejection mode, a `realrun.lm.cached.Describe`.

    Token, its probability, the largest probability, entropy in nats; then the predictor's score and the top-10
    confidence, if requested. Everything that changes from step to step and from round to round is read at fixed
    addresses, so that CUDA graphs can record it with the pass.

    room : number of output positions that there is noise for
    """

    def __init__(self, lm: CachedLM, sampler: Sampler, room: int, predictor: Predictor | None, weighing_top10: bool):
        self.sampler, self.room, self.predictor, self.weighing_top10 = sampler, room, predictor, weighing_top10
        self._vocab, self._type = int(lm.model.config.vocab_size), compared_in(lm.model.dtype)
        self._device, self._sequence = lm.device, -1
        rows = room if sampler.noisy_drafter else 0
        self._noise = torch.empty(rows, self._vocab, dtype=self._type, device=lm.device)
        # The place in the text of output position 0, and of the first token that the round drafts.
        self._places, self._known = Mirrored([2], torch.int64, lm.device), (0, 0)
        if predictor is not None:
            self._by_target = predictor.bias.clone()[None]  # [1, M]

    def begin_sequence(self, sequence: int) -> None:
        """Load a sequence's noise, before timing starts where the sequence is known by then."""
        if sequence == self._sequence:
            return
        self._sequence = sequence
        for start in range(0, len(self._noise), BLOCK):
            part = self._noise[start : start + BLOCK]
            seed = self.sampler.seed
            part.copy_(gumbel_noise(seed, sequence, start, len(part), self._vocab, self._device, self._type))

    def begin_round(self, context: RoundContext, tokens: int, target_hidden: torch.Tensor | None) -> None:
        """Prepare steps that draft after a text of this many tokens."""
        self.begin_sequence(context.sequence)
        places = tokens - context.position, tokens if self.predictor is not None else 0
        if places != self._known:
            self._places.put(places)
            self._known = places
        if self.predictor is not None:
            self._by_target.copy_(
                self.predictor.after(None if target_hidden is None else target_hidden[None]).by_target
            )

    def __call__(self, logits: torch.Tensor, position: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        first, start = self._places.tensor
        noise = None
        if self.sampler.noisy_drafter:
            noise = self._noise[(position + 1 - first).clamp(0, self.room - 1)]
        parts = [self.sampler.statistics_with(logits, noise)[0]]
        if self.predictor is not None:
            depth = (position + 1 - start).clamp(0, self._by_target.shape[1] - 1)
            parts.append(score_of(self._by_target[0, depth], hidden, self.predictor.draft_weight))
        if self.weighing_top10:
            parts.append(self.sampler.top10_confidence(logits))
        return torch.cat(parts) if len(parts) > 1 else parts[0]


class DraftModel:
    """An independent model with the target's tokenizer (Leviathan et al. 2023).

    Drafters inside the target give their own pass, a `CachedLM`, in place of the model.

    max_depth : maximum number of levels to draft, None for no limit
    scoring : whether the predictor's scores are computed
    weighing_top10 : whether `Step.top10_confidence` is computed
    predictor : scores every drafted token of a chain, for policies that read scores
    wants_target_hidden : whether `begin`, `commit` and `commit_tree` need the target's last state [d_T]
        at the position that produced the newest output token; scores need it
    """

    max_depth: int | None = None

    def __init__(
        self,
        model: PreTrainedModel | CachedLM,
        eos_token_ids: Sequence[int],
        predictor: Predictor | None = None,
    ):
        self.lm = model if isinstance(model, CachedLM) else make_lm(model, drafting=True)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.predictor = None if predictor is None else predictor.cast(self.lm.device, self.lm.model.dtype)
        self.wants_target_hidden = self.scoring = self.weighing_top10 = False
        self._target_hidden: torch.Tensor | None = None
        self._descriptions: dict[tuple[Sampler, bool, bool], StepDescription] = {}

    def prepare(
        self, length: int, sampler: Sampler, sequence: int, positions: int, features: Sequence[str] = ()
    ) -> None:
        """Prepare, before timing starts, sequences of `length` tokens, `positions` of them output.

        features : what the policy reads; "score" and "top10_confidence" are computed only if they are among them
        """
        if "score" in features and self.predictor is None:
            raise InputError(
                "the policy reads the score of an acceptance predictor and this drafter has none; give one with "
                "--predictor, made by `realrun train predictor`"
            )
        self.enable_scores("score" in features)
        self.weighing_top10 = "top10_confidence" in features
        feeds, model = (1, 2), self.lm.model  # a fully accepted draft leaves two tokens to feed
        self.lm.warm(feeds, length)
        sampler.prepare(sequence, positions, int(model.config.vocab_size), self.lm.device, model.dtype)
        description = self._description(sampler, positions)
        if description is not None:
            description.begin_sequence(sequence)
            self.lm.warm_description(feeds, description)

    def _description(self, sampler: Sampler, positions: int) -> StepDescription | None:
        """Get the statistics computed in the draft step's CUDA graph; None if the step runs without a graph.

        positions : number of output positions
        """
        if not self.lm.describes or sampler.mode == "rejection":
            return None
        key = sampler, self.scoring, self.weighing_top10
        description = self._descriptions.get(key)
        if description is None or description.room < positions:
            if description is not None:
                self.lm.forget_description(description)
            room = -(-positions // BLOCK) * BLOCK
            description = StepDescription(
                self.lm, sampler, room, self.predictor if self.scoring else None, self.weighing_top10
            )
            self._descriptions[key] = description
        return description

    def enable_scores(self, scoring: bool) -> None:
        """Turn the computation of scores on or off."""
        self.scoring = self.wants_target_hidden = self.lm.keep_hidden = scoring

    def take_hidden(self, target_hidden: torch.Tensor | None) -> None:
        """Take up the target's last state [d_T] at the position that produced the pending token."""
        self._target_hidden = target_hidden

    def begin(self, context: Sequence[int], target_hidden: torch.Tensor | None = None) -> None:
        """Start a sequence; context holds its tokens except the pending token."""
        self.lm.reset()
        self.lm.prefill(context)
        self.take_hidden(target_hidden)

    def foretold(self, tokens: Sequence[int]) -> float:
        """Estimate, before drafting, how likely it predicts the next token; see `specsim.trace.joined.foretold`."""
        return 1.0

    def propose(self, tokens: Sequence[int], context: RoundContext, keep: KeepDrafting) -> Draft:
        """Draft 1 to `limit` tokens after `tokens`, for output positions `position` and on, of this context.

        Stops at the limit, at an end-of-text token, or when `keep` returns False.
        """
        feed = tokens[self.lm.length :]
        draft = Draft(fed=len(feed))
        description = self._description(context.sampler, context.position + context.limit)
        if description is not None:
            description.begin_round(context, len(tokens), self._target_hidden)
        while True:
            start = now()
            described, probs = self._step(feed, context, len(draft.tokens) + 1, description)
            if probs is not None:
                draft.probs.append(probs)
            # The only copy from the device to the host in a draft step.
            token, *features = described.tolist()
            if token < 0 or math.isnan(features[0]):
                raise refuse_logits(self.lm, [*tokens, *draft.tokens], "drafter")
            draft.parents.append(len(draft.tokens) - 1)
            draft.tokens.append(int(token))
            # Traces hold float32, and replay must decide on the same numbers.
            prob, confidence, entropy_nats, *more = (float(np.float32(x)) for x in features)
            top10_confidence = more.pop() if self.weighing_top10 else 0.0
            score = more.pop() if self.scoring else 0.0
            step = Step(prob, confidence, entropy_nats, score, top10_confidence)
            draft.steps.append(step)
            drafted = now()
            draft.step_s.append(drafted - start)
            if len(draft.tokens) == context.limit or draft.tokens[-1] in self.eos_token_ids:
                return draft
            proceed = keep(step, len(draft.tokens))
            draft.asked += 1
            draft.policy_s += now() - drafted
            if not proceed:
                return draft
            feed = draft.tokens[-1:]

    def _step(
        self, feed: Sequence[int], context: RoundContext, depth: int, description: StepDescription | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft the token at this depth, from 1: statistics [c] and, in rejection mode, its distribution [V]."""
        if description is not None:
            return self.lm.describe(feed, description, follows=depth > 1), None
        logits = self.lm.forward(feed)[-1:]
        (described,), probs = context.sampler.draft(logits, context.sequence, context.position, depth)
        if self.scoring:
            described = torch.cat([described, self._score(depth)])
        if self.weighing_top10:
            described = torch.cat([described, context.sampler.top10_confidence(logits)])
        return described, None if probs is None else probs[0]

    def _score(self, depth: int) -> torch.Tensor:
        """Score [1] the token that the last pass drafted, at this depth of the round, from 1.

        In a tree's level this is the first node. The round's first pass may have fed tokens before it as well.
        """
        assert self.predictor is not None and self.lm.hidden is not None
        if depth == 1:
            hidden = self._target_hidden
            self._scorer = self.predictor.after(None if hidden is None else hidden[None])
        return self._scorer(self.lm.hidden[-1:] if depth == 1 else self.lm.hidden[:1], depth)

    def commit(self, length: int, target_hidden: torch.Tensor | None = None) -> None:
        """Keep the cache of the first `length` tokens, which are now part of the output."""
        self.lm.truncate(length)
        self.take_hidden(target_hidden)

    @cached_property
    def _grower(self) -> TreeGrower:
        return TreeGrower(self.lm)

    def prepare_tree(self, policy: TreePolicy, length: int) -> None:
        """Prepare this policy's trees before timing starts, after `prepare`."""
        self._grower.warm(policy, length)

    def propose_tree(
        self,
        tokens: Sequence[int],
        context: RoundContext,
        policy: TreePolicy,
        state: Any,
    ) -> tuple[Draft, Any]:
        """Draft a tree of up to `limit` levels after `tokens`, for output positions `position` and on, of this context.

        Returns the draft, whose tokens the policy selected, and the policy's new state.
        """
        return self._grower.grow(tokens, context, policy, state, self._score if self.scoring else None)

    def commit_tree(self, path: Sequence[int], target_hidden: torch.Tensor | None = None) -> None:
        """Keep the cache of the accepted nodes, numbered as in `Draft.nodes`."""
        self._grower.commit(path)
        self.take_hidden(target_hidden)
