"""Greedy chains of several sequences at once: every pass of drafter and target processes all of them.

Sequences accept different numbers of tokens, so each has its own length. A finished sequence leaves the batch. Every
output is the same as without the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from realrun.lm.batched_llama import BatchedLlama
from realrun.lm.clock import device_clock
from specsim.io.errors import InputError


@dataclass
class BatchedSequence:
    """A sequence of the batch: its number, its tokens, all but the last of them cached, and its maximum length `end`.

    rounds : (t, drafted, accepted), as `realrun.decode.rounds.Decoded.log` has them
    """

    number: int
    tokens: list[int]
    prompt_tokens: int
    end: int
    rounds: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]


class BatchRound(NamedTuple):
    """A round of the batch: the numbers of its sequences, and the seconds of its parts.

    step_s : of each draft step; other_s : of everything but these and verification
    """

    numbers: tuple[int, ...]
    step_s: tuple[float, ...]
    verify_s: float
    other_s: float

    @property
    def seconds(self) -> float:
        return sum(self.step_s) + self.verify_s + self.other_s


class BatchDecoding:
    """Decodes sequences together, round by round; making it prefills them.

    target, drafter : their caches are reset
    prompts : at least a prompt, each with at least 1 token
    budgets : maximum number of output tokens of each
    k : tokens to draft in every round, 0 for decoding without speculation
    eos_token_ids : tokens that end an output

    Raises InputError if a prompt is missing or empty, or a text exceeds the models' positions.

    rows : list of BatchedSequence
    rounds : list of BatchRound
    """

    @torch.inference_mode()
    def __init__(
        self,
        target: BatchedLlama,
        drafter: BatchedLlama,
        prompts: Sequence[Sequence[int]],
        budgets: Sequence[int],
        k: int,
        eos_token_ids: Sequence[int] = (),
    ):
        self.target, self.drafter, self.k, self.eos_token_ids = target, drafter, k, frozenset(eos_token_ids)
        self.rows = [
            BatchedSequence(number, list(prompt), len(prompt), len(prompt) + budget)
            for number, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True))
        ]
        self._check()
        self.rounds: list[BatchRound] = []
        self.clock = device_clock(target.device)
        for model in (target, drafter) if k else (target,):
            model.reset(len(prompts))
            for row in self.rows:
                model.add(row.tokens[:-1])
        self.active = list(self.rows)

    def _check(self) -> None:
        if not self.rows or not all(row.tokens for row in self.rows):
            raise InputError("no prompts, or an empty prompt; give at least one token each")
        longest, most = max(row.end for row in self.rows), min(self.target.max_positions, self.drafter.max_positions)
        if min(row.end - row.prompt_tokens for row in self.rows) < 1 or longest > most:
            raise InputError(
                f"prompt and output of up to {longest} tokens, the models have {most} positions; ask for at least 1 "
                "output token, and no more than there is room for"
            )

    @property
    def position(self) -> float:
        """Give the mean number of output tokens so far."""
        return sum(len(row.output) for row in self.rows) / len(self.rows)

    @property
    def done(self) -> bool:
        return not self.active

    @torch.inference_mode()
    def advance(self) -> BatchRound:
        """Run a round of the unfinished sequences."""
        start = self.clock()
        drafts: list[list[int]] = [[] for _ in self.active]
        step_s = self._draft(drafts)
        drafted = self.clock()
        tokens = [[row.tokens[-1], *draft] for row, draft in zip(self.active, drafts, strict=True)]
        chosen = self.target.forward(tokens).argmax(-1).tolist()
        verified = self.clock()
        numbers = tuple(row.number for row in self.active)
        for row, draft, own in zip(self.active, drafts, chosen, strict=True):
            self._commit(row, draft, own)
        lengths = np.array([len(row.tokens) - 1 for row in self.active])
        self.target.truncate(lengths)
        if self.k:
            self.drafter.truncate(lengths)
        self._leave()
        other_s = self.clock() - verified + drafted - start - sum(step_s)
        self.rounds.append(BatchRound(numbers, tuple(step_s), verified - drafted, other_s))
        return self.rounds[-1]

    def _draft(self, drafts: list[list[int]]) -> list[float]:
        """Extend the drafts, a pass per token; return the seconds of each pass.

        A sequence that drafts no further, because of its budget or an end-of-text token, feeds no token.
        """
        limits = [min(self.k, row.end - len(row.tokens) - 1) for row in self.active]
        step_s = []
        for step in range(max(limits)):
            start = self.clock()
            feeds: list[list[int]] = []
            for row, draft, limit, cached in zip(self.active, drafts, limits, self.drafter.lengths, strict=True):
                going = step < limit and not (draft and draft[-1] in self.eos_token_ids)
                feeds.append([*row.tokens, *draft][int(cached) :] if going else [])
            if not any(feeds):
                break
            logits = self.drafter.forward(feeds)
            last = torch.tensor([max(len(feed) - 1, 0) for feed in feeds], device=logits.device)
            tokens = logits[torch.arange(len(feeds), device=logits.device), last].argmax(-1).tolist()
            for feed, draft, token in zip(feeds, drafts, tokens, strict=True):
                draft.extend([token] if feed else [])
            step_s.append(self.clock() - start)
        return step_s

    def _commit(self, row: BatchedSequence, draft: list[int], own: list[int]) -> None:
        accepted = 0
        while accepted < len(draft) and draft[accepted] == own[accepted]:
            accepted += 1
        emitted = own[: accepted + 1]
        ends = [i for i, token in enumerate(emitted) if token in self.eos_token_ids]
        if ends:
            emitted = emitted[: ends[0] + 1]
        row.rounds.append((len(row.output), len(draft), min(accepted, len(emitted))))
        row.tokens.extend(emitted)

    def _leave(self) -> None:
        """Remove finished sequences, last first because the last sequence takes the place of a removed sequence."""
        for place in reversed(range(len(self.active))):
            row = self.active[place]
            if len(row.tokens) >= row.end or row.tokens[-1] in self.eos_token_ids:
                for model in (self.target, self.drafter) if self.k else (self.target,):
                    model.drop(place)
                last = self.active.pop()
                if last is not row:
                    self.active[place] = last
