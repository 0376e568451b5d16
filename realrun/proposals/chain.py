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

In every mode the drafter's distribution along the text itself is recorded, too: the rank of the output's token and, at
a temperature, its probability (`text_columns`). Other rules of acceptance follow from them (`specsim.trace.accepted`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
def branch_columns(lm: CachedLM, request: RecordRequest, target: CachedLM | None = None) -> Columns:
    """Record what a draft model proposes at every position; a `Recorder` once lm is given.

    A teacher-forced pass gives every first token. Then, step by step, a branch per position grows by a token:
    all branches share the prefix's cache, and a mask lets a branch see the prefix up to its position and its own
    earlier tokens.

    target : as of `proposals_of`
    """
    output, first, depth = request.output, len(request.prompt), request.depth
    proposals = proposals_of(request, int(lm.model.config.vocab_size), target)
    lm.reset()
    lm.keep_hidden = request.scorer is not None
    on_text = lm.forward([*request.prompt, *output[:-1]])[first - 1 :]
    hidden_on_text = None if lm.hidden is None else lm.hidden[first - 1 :]
    along = along_text(on_text, output, request.sampler, request.sequence)
    prefix, branches = lm.length, 1 if lm.recurrent else CHUNK
    for begin in range(0, len(output), branches):
        lm.fork([*request.prompt, *output[:begin]])
        rows = torch.arange(begin, min(begin + branches, len(output)), device=on_text.device)
        logits, hidden = on_text[rows], None if hidden_on_text is None else hidden_on_text[rows]
        branch = proposals.take(logits, hidden, begin, 0)
        for step in range(1, depth):
            logits = branch_pass(lm, branch, rows + first, prefix, step)
            branch = proposals.take(logits, lm.hidden, begin, step)
        lm.drop_rows((depth - 1) * len(rows))
    return proposals.columns() | repeated_columns(along, request) | proposals.grown_tree_columns(lm)


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

    def columns(self) -> Columns:
        """Make the trace's columns but for those of `text_columns`."""
        columns = columns_of(self.statistics.numpy(), np.asarray(self.request.output), self.request.depth)
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


class DrawnProposals(Proposals):
    """Proposals in rejection mode, drawn together with the output.

    While a branch is accepted it is the output, so that a single pass of the target over that will do.
    """

    def __init__(self, request: RecordRequest, vocabulary: int, target: CachedLM):
        assert request.tree is None, "RecordSettings refuses it"
        super().__init__(request, vocabulary)
        target.reset()
        self.judged = target.forward([*request.prompt, *request.output[:-1]])[len(request.prompt) - 1 :]
        self.truth = torch.tensor(request.output, device=self.judged.device)

    def take(self, logits: torch.Tensor, hidden: torch.Tensor | None, begin: int, step: int) -> torch.Tensor:
        if step == 0:
            self.following = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
        parts = range(0, len(logits), CHUNK)  # distributions of a long text would take several times its logits
        tokens = torch.cat([self._drawn(logits[at : at + CHUNK], begin, at, step) for at in parts])
        self.take_scores(None if hidden is None else hidden[-len(logits) :], begin, step)
        return tokens

    def _drawn(self, logits: torch.Tensor, begin: int, start: int, step: int) -> torch.Tensor:
        """The tokens [n] of branches from `start` on, and what is recorded of them, from their logits [n, V]."""
        sampler, total = self.request.sampler, len(self.truth)
        following = self.following[start : start + len(logits)]
        rows = torch.arange(begin + start, begin + start + len(logits), device=logits.device)
        at = (rows + step).clamp(max=total - 1)
        draft_probs, target_probs, true_token = sampler.probs(logits), sampler.probs(self.judged[at]), self.truth[at]
        following &= rows + step < total
        place = RoundContext(sampler, self.request.sequence, begin + start)
        tokens = drafted_with(draft_probs, target_probs, true_token, following, place, step + 1)
        following &= tokens == true_token
        drafted = with_top10(describe(draft_probs, tokens), sampler, logits)
        self.statistics[begin + start : begin + start + len(logits), step] = drafted.cpu()
        return tokens


def proposals_of(request: RecordRequest, vocabulary: int, target: CachedLM | None) -> Proposals:
    """Make the proposals of a request, to be filled in.

    target : judges them in rejection mode, and is not needed in others
    """
    if request.sampler.mode != "rejection":
        return Proposals(request, vocabulary)
    assert target is not None
    return DrawnProposals(request, vocabulary, target)


def tree_columns(trees: Trees) -> Columns:
    """Name the columns of trees as traces do."""
    return {f"tree_{name}": column for name, column in trees._asdict().items()}


def branch_pass(lm: CachedLM, tokens: torch.Tensor, visible: torch.Tensor, prefix: int, steps: int) -> torch.Tensor:
    """Compute logits [n, V] after each branch's newest token; branch j follows visible[j] tokens of the prefix."""
    if lm.recurrent:  # a single branch, after `fork`
        return lm.forward(tokens.tolist())
    mask = branch_mask(visible, prefix, steps, lm.model.dtype)
    return lm.run_model(input_ids=tokens[None], position_ids=(visible + steps - 1)[None], attention_mask=mask)


def described(sampler: Sampler, logits: torch.Tensor, sequence: int, position: int) -> torch.Tensor:
    """Describe the tokens drafted from logits [n, V]: `Sampler.statistics`, then top10_confidence, [n, 5]."""
    return with_top10(sampler.statistics(logits, sequence, position), sampler, logits)


def with_top10(statistics: torch.Tensor, sampler: Sampler, logits: torch.Tensor) -> torch.Tensor:
    """Append to statistics [n, 4] the top10_confidence of their logits [n, V]: [n, 5]."""
    return torch.cat([statistics, sampler.top10_confidence(logits)[:, None]], dim=-1)


class AlongText(NamedTuple):
    """The output's own tokens in the drafter's distributions along the text: arrays of one shape.

    rank : among the siblings that `Sampler.candidates` orders; the tokens of a larger score, and those of the same
        score and a lower index, come before it
    prob : of the distribution that is sampled from
    """

    rank: Ints
    prob: Floats


def along_text(
    logits: torch.Tensor, output: Sequence[int], sampler: Sampler, sequence: int, position: int = 0
) -> AlongText:
    """Find the output's tokens, [T], in the drafter's logits [T, V]; the first is at output position `position`."""
    warped = sampler.warped(logits)
    noise = sampler.draft_noise(logits, sequence, range(position, position + len(logits)))
    scores = warped if noise is None else warped + noise
    truth = torch.tensor(output, device=scores.device)[:, None]
    true_scores = scores.gather(-1, truth)
    index = torch.arange(scores.shape[1], device=scores.device)
    before = (scores > true_scores) | ((scores == true_scores) & (index < truth))
    prob = warped.softmax(-1).gather(-1, truth)[:, 0]
    return AlongText(before.sum(-1).cpu().numpy(), prob.double().cpu().numpy())


def text_columns(along: AlongText, request: RecordRequest) -> Columns:
    """Make the columns true_rank and, at a temperature, text_prob and text_accept; along : of [T, depth]."""
    position = np.add.outer(np.arange(len(request.output)), np.arange(request.depth))
    inside = position < len(request.output)
    columns: Columns = {"true_rank": np.where(inside, np.minimum(along.rank, MAX_RANK), NO_RANK).astype(np.int16)}
    if request.target_prob is not None:
        prob = np.where(inside, along.prob, 0.0)
        target = request.target_prob[np.minimum(position, len(request.output) - 1)]
        columns["text_prob"] = prob.astype(np.float32)
        columns["text_accept"] = np.minimum(prob / np.maximum(target, np.finfo(float).tiny), 1.0).astype(np.float32)
    return columns


def repeated_columns(along: AlongText, request: RecordRequest) -> Columns:
    """Make `text_columns` from [T] numbers of a drafter that sees only tokens.

    Along the text, its distribution at depth i is its first distribution i - 1 positions later.
    """
    position = np.add.outer(np.arange(len(request.output)), np.arange(request.depth))
    later = np.minimum(position, len(request.output) - 1)
    return text_columns(AlongText(along.rank[later], along.prob[later]), request)


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
    output: Ints,
    depth: int,
) -> Columns:
    """Make columns of a trace from statistics [T, depth, STATISTICS] of the branches."""
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
    }


def drafted_with(
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    true_token: torch.Tensor,
    following: torch.Tensor,
    first_round: RoundContext,
    depth: int,
) -> torch.Tensor:
    """Draw token `depth` of the drafts of consecutive rounds, int64 [n], together with the output.

    draft_probs, target_probs : [n, V], under the drafted prefixes; the target's are read where these are the text
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
