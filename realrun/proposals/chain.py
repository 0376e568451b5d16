"""Dense recording of a draft model: its proposals at every position of an output at once.

In rejection sampling the output y is the target's own sample. At every position the drafter continues drafting from
prompt + y[:t] by sampling, and what it drafts is drawn together with y: given y, a round of rejection sampling (p the
target's distribution, q the drafter's) drafts the output's own token x and has it accepted with probability
min(1, q(x)/p(x)), and else drafts from the normalised (q - p)+ and has that rejected, since

    P(draft x, accepted) = min(p(x), q(x)) = p(x) min(1, q(x)/p(x)),
    P(x emitted after a rejection) = (p(x) - q(x))+ = p(x) (1 - min(1, q(x)/p(x))).

After a rejection the drafter samples from q because its tokens no longer depend on y. So given the text before, each
drafted token follows q, whatever comes later, and drafts, acceptance (match_len counts the leading tokens that equal
y's, as in every trace) and output together follow a real run's distribution. Rounds from different positions draw
independently.

accept_prob is min(1, p/q) of every drafted token under its drafted prefix, from the target run over the same branches;
0 beyond the recorded end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import Sampler, describe, draw
from realrun.lm.cached import CachedLM
from realrun.lm.number_type import check_drafted
from realrun.proposals.recorder import Columns, RecordRequest
from realrun.proposals.trees import Noise, Trees, grown_trees
from specsim.io.arrays import Floats, Ints

CHUNK = 256  # positions whose branches share a forward pass
STATISTICS = 5  # columns of `described`
NO_RANK = -1
MAX_RANK = np.iinfo(np.int16).max


@torch.inference_mode()
def branch_columns(lm: CachedLM, request: RecordRequest) -> Columns:
    """Record what a draft model proposes at every position; a `Recorder` once lm is given.

    A teacher-forced pass gives every first token. Then, step by step, a branch per position grows by a token:
    all branches share the prefix's cache, and a mask lets a branch see the prefix up to its position and its own
    earlier tokens.
    """
    output, first, depth = request.output, len(request.prompt), request.depth
    proposals = Proposals(request, int(lm.model.config.vocab_size))
    lm.reset()
    lm.keep_hidden = request.scorer is not None
    logits = lm.forward([*request.prompt, *output[:-1]])[first - 1 :]
    rank = true_ranks(logits, output, request.sampler, request.sequence)
    tokens = proposals.take(logits, lm.hidden, 0, 0)
    prefix = lm.length
    for begin in range(0, len(output), CHUNK):
        rows = torch.arange(begin, min(begin + CHUNK, len(output)), device=logits.device)
        branch = tokens[rows]
        for step in range(1, depth):
            logits = branch_pass(lm, branch, rows + first, prefix, step)
            branch = proposals.take(logits, lm.hidden, begin, step)
        lm.drop_rows((depth - 1) * len(rows))
    return proposals.columns(rank) | proposals.grown_tree_columns(lm)


class Proposals:
    """What is drafted at every position of an output of T tokens, filled in depth by depth.

    statistics [T, D, STATISTICS], scores [T, D], siblings and sibling_probs [T, D, width]
    """

    def __init__(self, request: RecordRequest, vocabulary: int):
        self.request, total, depth = request, len(request.output), request.depth
        self.width = 0 if request.tree is None else min(request.tree.width, vocabulary)
        self.statistics = torch.empty(total, depth, STATISTICS, dtype=torch.float64)
        self.scores = torch.zeros(total, depth, dtype=torch.float64)
        self.siblings = np.empty((total, depth, self.width), dtype=np.int64)
        self.sibling_probs = np.empty((total, depth, self.width), dtype=np.float32)

    def take(self, logits: torch.Tensor, hidden: torch.Tensor | None, begin: int, step: int) -> torch.Tensor:
        """Fill in what is drafted from logits [n, V] at depth step + 1 from position `begin` on; the tokens [n].

        hidden : the states behind the logits, the last n rows of it, where they are kept
        """
        sampler, sequence = self.request.sampler, self.request.sequence
        rows = slice(begin, begin + len(logits))
        drafted = described(sampler, logits, sequence, begin + step)
        self.statistics[rows, step] = on_host = drafted.cpu()
        check_drafted(on_host)  # ahead of feeding the tokens
        self.take_scores(None if hidden is None else hidden[-len(logits) :], begin, step)
        if self.request.tree is not None:
            ahead = range(begin + step, begin + step + len(logits))
            tokens, probs = sampler.candidates(logits, sequence, ahead, self.width)
            self.siblings[rows, step], self.sibling_probs[rows, step] = tokens.cpu().numpy(), probs.cpu().numpy()
        return drafted[:, 0].long()

    def take_scores(self, hidden: torch.Tensor | None, begin: int, step: int) -> None:
        """Fill in the scores of tokens with these states [n, d], if scores are requested and states kept."""
        if self.request.scorer is not None and hidden is not None:
            self.scores[begin : begin + len(hidden), step] = self.request.scorer(hidden, step + 1, begin).cpu()

    def columns(self, rank: Ints) -> Columns:
        """Make the trace's columns; rank : see `columns_of`."""
        columns = columns_of(self.statistics.numpy(), rank, np.asarray(self.request.output), self.request.depth)
        if self.request.scorer is not None:
            columns["score"] = self.scores.numpy().astype(np.float32)
        return columns

    def grown_tree_columns(self, lm: CachedLM, pending: Ints | None = None) -> Columns:
        """Grow the trees from the chains, if trees are requested; lm, pending : see `grown_trees`."""
        if self.request.tree is None:
            return {}
        noise, first = Noise(self.request.sampler, self.request.sequence), len(self.request.prompt)
        drafted = (self.siblings, self.sibling_probs, self.request.tree.nodes)
        return tree_columns(grown_trees(lm, noise, first, *drafted, pending))


def tree_columns(trees: Trees) -> Columns:
    """Name the columns of trees as traces do."""
    return {f"tree_{name}": column for name, column in trees._asdict().items()}


def branch_pass(lm: CachedLM, tokens: torch.Tensor, visible: torch.Tensor, prefix: int, steps: int) -> torch.Tensor:
    """Compute logits [n, V] after each branch's newest token; branch j follows visible[j] tokens of the prefix."""
    mask = branch_mask(visible, prefix, steps, lm.model.dtype)
    return lm.run_model(input_ids=tokens[None], position_ids=(visible + steps - 1)[None], attention_mask=mask)


def described(sampler: Sampler, logits: torch.Tensor, sequence: int, position: int) -> torch.Tensor:
    """Describe the tokens drafted from logits [n, V]: `Sampler.statistics`, then top10_confidence, [n, 5]."""
    return with_top10(sampler.statistics(logits, sequence, position), sampler, logits)


def with_top10(statistics: torch.Tensor, sampler: Sampler, logits: torch.Tensor) -> torch.Tensor:
    """Append to statistics [n, 4] the top10_confidence of their logits [n, V]: [n, 5]."""
    return torch.cat([statistics, sampler.top10_confidence(logits)[:, None]], dim=-1)


def true_ranks(logits: torch.Tensor, output: Sequence[int], sampler: Sampler, sequence: int, position: int = 0) -> Ints:
    """Rank each output token, [T], among the siblings that `Sampler.candidates` orders, from logits [T, V].

    The rank counts the tokens of a larger score, and those of the same score and a lower index.
    position : output position of the first
    """
    scores = sampler.warped(logits)
    noise = sampler.draft_noise(logits, sequence, range(position, position + len(logits)))
    if noise is not None:
        scores = scores + noise
    truth = torch.tensor(output, device=scores.device)[:, None]
    true_scores = scores.gather(-1, truth)
    index = torch.arange(scores.shape[1], device=scores.device)
    before = (scores > true_scores) | ((scores == true_scores) & (index < truth))
    ranks: Ints = before.sum(-1).cpu().numpy()
    return ranks


def branch_mask(visible: torch.Tensor, prefix: int, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """Make an additive mask [1, 1, n, prefix + steps * n]; branch j sees visible[j] prefix tokens and itself."""
    n = len(visible)
    seen = torch.arange(prefix, device=visible.device)[None] < visible[:, None]
    same_branch = torch.eye(n, dtype=torch.bool, device=visible.device).repeat(1, steps)
    mask = torch.zeros(n, prefix + steps * n, dtype=dtype, device=visible.device)
    mask.masked_fill_(~torch.cat([seen, same_branch], dim=1), torch.finfo(dtype).min)
    return mask[None, None]


def columns_of(
    statistics: Floats,
    rank: Ints,
    output: Ints,
    depth: int,
) -> Columns:
    """Make columns of a trace from statistics [T, depth, STATISTICS] of the branches; rank [T] of the true token."""
    total = len(output)
    draft_token = statistics[:, :, 0].astype(np.int32)
    position = np.arange(total)[:, None] + np.arange(depth)[None]  # output position of each drafted token
    inside = position < total
    position = np.minimum(position, total - 1)
    match = (draft_token == output[position]) & inside
    return {
        "token": output.astype(np.int32),
        "match_len": np.logical_and.accumulate(match, axis=1).sum(axis=1).astype(np.uint8),
        "draft_token": draft_token,
        "prob": statistics[:, :, 1].astype(np.float32),
        "confidence": statistics[:, :, 2].astype(np.float32),
        "entropy_nats": statistics[:, :, 3].astype(np.float32),
        "top10_confidence": statistics[:, :, 4].astype(np.float32),
        # An independent draft model sees only tokens: on the true path its distribution at depth i is its first
        # distribution i - 1 positions later.
        "true_rank": np.where(inside, np.minimum(rank, MAX_RANK)[position], NO_RANK).astype(np.int16),
    }


@torch.inference_mode()
def rejection_columns(drafter: CachedLM, target: CachedLM, request: RecordRequest) -> Columns:
    """Record what a draft model proposes at every position, with accept_prob; a `Recorder` once the models are given.

    Trees are not recorded in this mode. Both models run over the output once and then, step by step, over a
    branch per position.
    """
    assert request.tree is None, "RecordSettings refuses it"
    output, sampler, sequence, depth = request.output, request.sampler, request.sequence, request.depth
    total, first = len(output), len(request.prompt)
    proposals = Proposals(request, int(drafter.model.config.vocab_size))
    accept_prob = torch.zeros(total, depth, dtype=torch.float64)
    lms = (drafter, target)
    for lm in lms:
        lm.reset()
    drafter.keep_hidden = request.scorer is not None
    on_path = [lm.forward([*request.prompt, *output[:-1]])[first - 1 :] for lm in lms]
    hidden = None if drafter.hidden is None else drafter.hidden[first - 1 :]
    truth = torch.tensor(output, device=on_path[0].device)
    rank = true_ranks(on_path[0], output, sampler, sequence)
    prefix = drafter.length
    for begin in range(0, total, CHUNK):
        end = min(begin + CHUNK, total)
        rows = torch.arange(begin, end, device=truth.device)
        logits = [part[begin:end] for part in on_path]
        states = None if hidden is None else hidden[begin:end]
        following = torch.ones(end - begin, dtype=torch.bool, device=truth.device)
        for step in range(depth):
            draft_probs, target_probs = (sampler.probs(part) for part in logits)
            true_token = truth[(rows + step).clamp(max=total - 1)]
            following &= rows + step < total
            place = RoundContext(sampler, sequence, begin)
            tokens = drafted_with(draft_probs, target_probs, true_token, following, place, step + 1)
            described = with_top10(describe(draft_probs, tokens), sampler, logits[0])
            proposals.statistics[begin:end, step] = described.cpu()
            drawn_from, judged_by = (probs.gather(-1, tokens[:, None])[:, 0] for probs in (draft_probs, target_probs))
            inside = min(end, total - step) - begin  # rows whose token lies before the recorded end
            if inside > 0:
                accept_prob[begin : begin + inside, step] = (judged_by / drawn_from).clamp(max=1)[:inside].cpu()
            proposals.take_scores(states, begin, step)
            if step + 1 == depth:
                break
            following &= tokens == true_token
            logits = [branch_pass(lm, tokens, rows + first, prefix, step + 1) for lm in lms]
            states = drafter.hidden
        for lm in lms:
            lm.drop_rows((depth - 1) * len(rows))
    return proposals.columns(rank) | {"accept_prob": accept_prob.numpy().astype(np.float32)}


def drafted_with(
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    true_token: torch.Tensor,
    following: torch.Tensor,
    first_round: RoundContext,
    depth: int,
) -> torch.Tensor:
    """Draw token `depth` of the drafts of consecutive rounds, int64 [n], together with the output.

    draft_probs, target_probs : [n, V], under the drafted prefixes
    true_token : int64 [n], the output's token there
    following : bool [n], whether all earlier tokens of the draft were accepted
    first_round : the first of these rounds
    """
    n, device, (sampler, sequence, position, *_) = len(true_token), true_token.device, first_round
    keep = [sampler.uniform("couple", sequence, position + row, depth) for row in range(n)]
    redraw = [sampler.uniform("draft", sequence, position + row, depth) for row in range(n)]
    q, p = (probs.gather(-1, true_token[:, None])[:, 0].double() for probs in (draft_probs, target_probs))
    accepted = following & (torch.tensor(keep, dtype=torch.float64, device=device) * p < q)
    residual = (draft_probs - target_probs).clamp(min=0)
    # Distributions that differ by rounding alone may leave nothing.
    rejected = following & residual.any(-1)
    return torch.where(accepted, true_token, draw(torch.where(rejected[:, None], residual, draft_probs), redraw))
