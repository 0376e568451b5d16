"""Record a trace of rejection sampling: drafts, their acceptance probabilities, and one outcome.

The output y is the target's own sample. At every position the drafter continues drafting from
prompt + y[:t] by sampling, and what it drafts is drawn together with y: given y, a round of
rejection sampling (p the target's distribution, q the drafter's) drafts the output's own token
x and has it accepted with probability min(1, q(x)/p(x)), and else drafts from the normalised
(q - p)+ and has that rejected, since

    P(draft x, accepted) = min(p(x), q(x)) = p(x) min(1, q(x)/p(x)),
    P(x emitted after a rejection) = (p(x) - q(x))+ = p(x) (1 - min(1, q(x)/p(x))).

After a rejection the drafter samples from q, as it has no more to do with y. So given the text
before, each drafted token follows q, whatever it is that comes later; and drafts, acceptance
(match_len counts the leading tokens that equal y's, as in every trace) and output follow a
real run's law together. Rounds from different positions draw independently.

accept_prob is min(1, p/q) of every drafted token under its drafted prefix, from the target
run over the same branches; 0 beyond the recorded end.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from realrun.decode.acceptance_predictor import Scorer
from realrun.decode.sampling import Sampler, describe, draw
from realrun.lm.cached import CachedLM
from realrun.proposals.chain import CHUNK, STATISTICS, branch_mask, columns_of, true_ranks, with_top10
from realrun.proposals.recorder import Columns
from realrun.proposals.trees import TreeSize


@torch.inference_mode()
def rejection_columns(
    drafter: CachedLM,
    target: CachedLM,
    prompt: Sequence[int],
    output: Sequence[int],
    depth: int,
    sampler: Sampler,
    sequence: int,
    scorer: Scorer | None = None,
    tree: TreeSize | None = None,
) -> Columns:
    """What a draft model proposes at every position, with accept_prob: a `Recorder` once both models are given.

    Trees are not recorded in this mode. Both models run over the output once and then, step by step, over one
    branch per position.
    """
    assert tree is None, "RecordSettings refuses it"
    total, first = len(output), len(prompt)
    statistics = torch.empty(total, depth, STATISTICS, dtype=torch.float64)
    accept_prob = torch.zeros(total, depth, dtype=torch.float64)
    scores = torch.zeros(total, depth, dtype=torch.float64)
    lms = (drafter, target)
    for lm in lms:
        lm.reset()
    drafter.keep_hidden = scorer is not None
    on_path = [lm.forward([*prompt, *output[:-1]])[first - 1 :] for lm in lms]
    hidden = None if drafter.hidden is None else drafter.hidden[first - 1 :]
    truth = torch.tensor(output, device=on_path[0].device)
    rank = true_ranks(on_path[0], output, sampler, sequence)
    prefix = drafter.length
    for begin in range(0, total, CHUNK):
        end = min(begin + CHUNK, total)
        rows = torch.arange(begin, end, device=truth.device)
        logits = [part[begin:end] for part in on_path]
        state = None if hidden is None else hidden[begin:end]
        following = torch.ones(end - begin, dtype=torch.bool, device=truth.device)
        for step in range(depth):
            draft_probs, target_probs = (sampler.probs(part) for part in logits)
            wanted = truth[(rows + step).clamp(max=total - 1)]
            following &= rows + step < total
            tokens = drafted_with(draft_probs, target_probs, wanted, following, sampler, sequence, begin, step + 1)
            statistics[begin:end, step] = with_top10(describe(draft_probs, tokens), sampler, logits[0]).cpu()
            drawn_from, judged_by = (probs.gather(-1, tokens[:, None])[:, 0] for probs in (draft_probs, target_probs))
            inside = min(end, total - step) - begin  # rows whose token lies before the recorded end
            if inside > 0:
                accept_prob[begin : begin + inside, step] = (judged_by / drawn_from).clamp(max=1)[:inside].cpu()
            if scorer is not None and state is not None:
                scores[begin:end, step] = scorer(state, step + 1, begin).cpu()
            if step + 1 == depth:
                break
            following &= tokens == wanted
            logits = [_branch_pass(lm, tokens, rows + first, prefix, step + 1) for lm in lms]
            state = drafter.hidden
        for lm in lms:
            lm.drop_rows((depth - 1) * len(rows))
    columns = columns_of(statistics.numpy(), rank, np.asarray(output), depth)
    columns["accept_prob"] = accept_prob.numpy().astype(np.float32)
    return columns if scorer is None else {**columns, "score": scores.numpy().astype(np.float32)}


def drafted_with(
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    wanted: torch.Tensor,
    following: torch.Tensor,
    sampler: Sampler,
    sequence: int,
    position: int,
    depth: int,
) -> torch.Tensor:
    """Token `depth` of the drafts of the rounds at `position`, `position` + 1, ..., drawn together with the output.

    draft_probs, target_probs : [n, V], under the drafted prefixes
    wanted : int64 [n], the output's token there; following : bool [n], whether all before was
        accepted, so that the draft is still on the output's path
    Returns int64 [n].
    """
    n, device = len(wanted), wanted.device
    keep = [sampler.uniform("couple", sequence, position + row, depth) for row in range(n)]
    redraw = [sampler.uniform("draft", sequence, position + row, depth) for row in range(n)]
    q, p = (probs.gather(-1, wanted[:, None])[:, 0].double() for probs in (draft_probs, target_probs))
    accepted = following & (torch.tensor(keep, dtype=torch.float64, device=device) * p < q)
    residual = (draft_probs - target_probs).clamp(min=0)
    # Distributions that differ by rounding alone may leave nothing.
    rejected = following & residual.any(-1)
    return torch.where(accepted, wanted, draw(torch.where(rejected[:, None], residual, draft_probs), redraw))


def _branch_pass(lm: CachedLM, tokens: torch.Tensor, visible: torch.Tensor, prefix: int, steps: int) -> torch.Tensor:
    """Logits [n, V] after each branch's newest token; branch j follows visible[j] tokens of the prefix."""
    mask = branch_mask(visible, prefix, steps, lm.model.dtype)
    return lm.run_model(input_ids=tokens[None], position_ids=(visible + steps - 1)[None], attention_mask=mask)
