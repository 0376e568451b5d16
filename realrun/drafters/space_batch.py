"""SPACE's auto-correct decoding of several sequences at once (Yi et al. 2024, section 4.3).

Every pass holds, for each sequence, its pending token, its candidates and their groups of masks, in the layout of
`realrun.drafters.space`. Sequences accept different numbers of candidates, so each has a length of its own: a
pass appends the same slots to all rows of the cache, and what a row keeps moves behind what it had. Sequences that have
ended leave the batch. The output of each is what it is alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from realrun.decode.sampling import Sampler
from realrun.drafters.space import mask_token, pass_layout
from realrun.lm.windows import window_of
from specsim.arrays import Ints
from specsim.errors import InputError


@dataclass
class Row:
    """One sequence: its number, what decides its noise; its text, of which all but the last token is cached.

    rounds : (t, drafted, accepted), as `realrun.decode.rounds.Decoded.log` has them
    candidates : [k], to be verified next
    """

    number: int
    prompt_tokens: int
    tokens: list[int]
    rounds: list[tuple[int, int, int]] = field(default_factory=list)
    candidates: list[int] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def position(self) -> int:
        """t, the output position that is decided next."""
        return len(self.tokens) - self.prompt_tokens


@torch.inference_mode()
def decode_batch(
    target: PreTrainedModel,
    masks: int,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampler: Sampler,
    eos_token_ids: Sequence[int] = (),
    k: int | None = None,
) -> list[Row]:
    """Decode all prompts together, k candidates a round; the rows in the prompts' order.

    k : at most the masks trained with, and these unless given. Row i has the noise of sequence i. Stops, for each,
    after max_new_tokens or at an end-of-text token, which is emitted.

    Raises InputError for rejection sampling, an empty prompt, or too long an output.
    """
    k = masks if k is None else k
    _check(target, prompts, max_new_tokens, sampler, k, masks)
    rows = [Row(number, len(prompt), list(prompt)) for number, prompt in enumerate(prompts)]
    batch = _Batch(target, [len(prompt) - 1 for prompt in prompts])
    batch.prefill([row.tokens[:-1] for row in rows])
    _propose(rows, batch.ask(k), sampler)
    active = list(rows)
    while active:
        logits, said = batch.verify([[row.tokens[-1], *row.candidates] for row in active], k)
        kept = []
        for row, own in zip(active, logits, strict=True):
            limit = row.prompt_tokens + max_new_tokens - len(row.tokens) - 1
            kept.append(_judge(row, own, limit, sampler, eos_token_ids))
        going = [
            place
            for place, row in enumerate(active)
            if row.tokens[-1] not in eos_token_ids and row.position < max_new_tokens
        ]
        batch.keep(kept, k + 1, going)
        groups = [said[place, kept[place] - 1] for place in going]
        active = [active[place] for place in going]
        _propose(active, groups, sampler)
    return rows


def _propose(rows: Sequence[Row], said: Sequence[torch.Tensor] | torch.Tensor, sampler: Sampler) -> None:
    """Take each row's candidates from what a group of masks said, [k, V]."""
    for row, logits in zip(rows, said, strict=True):
        row.candidates = sampler.tokens(logits, row.number, row.position).tolist()


def _judge(row: Row, logits: torch.Tensor, limit: int, sampler: Sampler, eos_token_ids: Sequence[int]) -> int:
    """Extend a row by what its pass, logits [k + 1, V], lets it emit; how many tokens of the pass stay cached."""
    draft = row.candidates[: max(limit, 0)]
    ends = [place for place, token in enumerate(draft) if token in eos_token_ids]
    draft = draft[: ends[0] + 1] if ends else draft
    chosen = sampler.tokens(logits[: len(draft) + 1], row.number, row.position).tolist()
    accepted = 0
    while accepted < len(draft) and draft[accepted] == chosen[accepted]:
        accepted += 1
    emitted = chosen[: accepted + 1]
    ends = [place for place, token in enumerate(emitted) if token in eos_token_ids]
    emitted = emitted[: ends[0] + 1] if ends else emitted
    row.rounds.append((row.position, len(draft), min(accepted, len(emitted))))
    row.tokens += emitted
    return len(emitted)


def _check(
    target: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampler: Sampler, k: int, most: int
) -> None:
    if sampler.mode == "rejection":
        raise InputError("batches are decoded in greedy and Gumbel mode; choose one of them")
    if not 1 <= k <= most:
        raise InputError(f"k={k} candidates of a target trained with {most} masks; choose 1 to {most}")
    if window_of(target.config) is not None:
        raise InputError("batches are decoded where every layer has full attention; decode one sequence at a time")
    if not prompts or not all(prompts):
        raise InputError("a batch without prompts or with an empty one; give each at least one token")
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens={max_new_tokens}; ask for at least 1")
    longest, room = max(map(len, prompts)) + max_new_tokens, int(target.config.max_position_embeddings)
    if longest > room:
        raise InputError(f"prompt and output of {longest} tokens exceed the model's {room} positions; shorten them")


class _Batch:
    """The library's model over a cache of B rows, of which each has a length of its own.

    lengths : int [B], cached tokens. Beyond them up to the longest, what a row holds is masked
    """

    def __init__(self, model: PreTrainedModel, lengths: Sequence[int]):
        self.model = model
        self.cache: Any = DynamicCache(config=model.config)
        self.mask_id = mask_token(model)
        self.last = int(model.config.max_position_embeddings) - 1
        self.lengths = np.zeros(len(lengths), dtype=np.int64)
        self.slots = 0

    def prefill(self, contexts: Sequence[Sequence[int]]) -> None:
        """Cache these tokens; shorter rows are padded at their end."""
        longest = max(map(len, contexts))
        if longest:
            padded = [[*context, *[0] * (longest - len(context))] for context in contexts]
            visible = torch.ones(longest, longest, dtype=torch.bool).tril()
            self._run(padded, np.arange(longest), visible)
            self.lengths = np.array([len(context) for context in contexts])
            self.slots = longest

    def ask(self, k: int) -> torch.Tensor:
        """What a group of masks behind every row says, [B, k, V]."""
        chain = torch.ones(k, k, dtype=torch.bool).tril()
        said = self._run([[self.mask_id] * k] * len(self.lengths), np.arange(k), chain)
        self._crop()
        return said

    def verify(self, tokens: Sequence[Sequence[int]], k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [B, n, V] after n tokens of every row, and what their groups of k masks say, [B, n, k, V]."""
        n = len(tokens[0])
        masked = [[*row, *[self.mask_id] * (n * k)] for row in tokens]
        logits = self._run(masked, *pass_layout(n, k))
        return logits[:, :n], logits[:, n:].unflatten(1, (n, k))

    def keep(self, kept: Sequence[int], tokens: int, rows: Sequence[int]) -> None:
        """Of the last pass' `tokens` real ones keep the first kept[b] of every row, and then these rows alone."""
        device = self.model.device
        if rows:
            every = torch.arange(len(kept), device=device)[:, None]
            source = self.slots + torch.arange(tokens, device=device).expand(len(kept), -1)
            goal = torch.from_numpy(self.lengths).to(device)[:, None] + torch.arange(tokens, device=device)
            for layer in self.cache.layers:
                for cached in (layer.keys, layer.values):
                    cached[every, :, goal] = cached[every, :, source]
            self.lengths = (self.lengths + np.array(kept))[list(rows)]
            self.slots = int(self.lengths.max())
            self._crop()
            self.cache.batch_select_indices(torch.tensor(rows, device=device))

    def _crop(self) -> None:
        """Drop what lies beyond the longest row."""
        self.cache.crop(self.slots - self.cache.get_seq_length())

    def _run(self, tokens: Sequence[Sequence[int]], depths: Ints, visible: torch.Tensor) -> torch.Tensor:
        """Logits [B, n, V] of n new tokens a row, behind its own; depths [n] and visible [n, n] as of one tree."""
        dtype, device = self.model.dtype, self.model.device
        ids = torch.tensor([*map(list, tokens)], device=device)
        before = torch.arange(self.slots) < torch.from_numpy(self.lengths)[:, None, None]
        seen = torch.cat([before.expand(-1, len(depths), -1), visible.expand(len(ids), -1, -1)], dim=2)
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
        positions = torch.from_numpy(np.minimum(self.lengths[:, None] + depths, self.last))
        inputs: dict[str, Any] = {
            "input_ids": ids,
            "position_ids": positions.to(device),
            "attention_mask": mask[:, None].to(device),
            "past_key_values": self.cache,
            "use_cache": True,
        }
        logits: torch.Tensor = self.model(**inputs).logits
        return logits
