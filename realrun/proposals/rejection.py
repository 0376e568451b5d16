"""Record a trace of rejection sampling: drafts, their acceptance probabilities, and an outcome.

The output y is the target's own sample. At every position the drafter continues drafting from
prompt + y[:t] by sampling, and what it drafts is drawn together with y: given y, a round of
rejection sampling (p the target's distribution, q the drafter's) drafts the output's own token
x and has it accepted with probability min(1, q(x)/p(x)), and else drafts from the normalised
(q - p)+ and has that rejected, since

    P(draft x, accepted) = min(p(x), q(x)) = p(x) min(1, q(x)/p(x)),
    P(x emitted after a rejection) = (p(x) - q(x))+ = p(x) (1 - min(1, q(x)/p(x))).

After a rejection the drafter samples from q because its tokens no longer depend on y. So given the text before, each
drafted token follows q, whatever comes later, and drafts, acceptance (match_len counts the leading tokens that equal
y's, as in every trace) and output together follow a real run's distribution. Rounds from different positions draw
independently.

accept_prob is min(1, p/q) of every drafted token under its drafted prefix, from the target
run over the same branches; 0 beyond the recorded end.
"""

from __future__ import annotations

import numpy as np
import torch

from realrun.decode.rounds import RoundContext
from realrun.decode.sampling import describe, draw
from realrun.lm.cached import CachedLM
from realrun.proposals.chain import CHUNK, Proposals, branch_pass, true_ranks, with_top10
from realrun.proposals.recorder import Columns, RecordRequest


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
