"""A target over a static cache whose lower layers can run ahead of verification; see `realrun.lm.split_target`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from realrun.lm.split_target import RowsAhead
from realrun.lm.static.llama import MAX_STEP_TOKENS, StaticLlama
from realrun.lm.static.sizes import WINDOW, Rows

UPPER, LOWER = "upper", "lower"  # variants that run only these layers; the others are the number of rows ahead


def power_of_2(count: int) -> int:
    """Round a count up to a power of 2; 0 for 0."""
    return 1 << (count - 1).bit_length() if count else 0


class StaticSplitTarget(RowsAhead, StaticLlama):
    """StaticLlama whose states after `splits` layers are kept for a drafter.

    runs_ahead : whether the drafter runs the lower layers ahead of verification, so that such passes are recorded too
    """

    runs_ahead = False

    def __init__(self, model: Any, *splits: int, **options: Any):
        self.splits = splits
        super().__init__(model, **options)
        self.own_layers = range(self.split, len(self.layers))
        width = len(splits) * int(model.config.hidden_size)
        self.states = torch.empty(self.capacity, width, dtype=model.dtype, device=self.device)

    def reset(self) -> None:
        super().reset()
        self.forget_ahead()

    @torch.inference_mode()
    def reserve(self, length: int) -> None:
        before = self.capacity
        super().reserve(length)
        if self.capacity > before:
            self.states = F.pad(self.states, (0, 0, 0, self.capacity - before))

    def run_lower(self, rows: Rows) -> torch.Tensor:
        """Run the lower layers over these rows; keep their states and return the last, [N, d]."""
        embedded = super()._input(rows, None)
        states = self.states_of(embedded, lambda x, layers: self.stack.run(x, rows, layers=layers)[0])
        self.states[rows.slots] = states
        return self.last_of(states)

    @torch.inference_mode()
    def warm_lower(self, nodes: int) -> None:
        """Record, after `warm`, the passes over tree nodes that are verified and were never fed."""
        most = min(power_of_2(nodes), MAX_STEP_TOKENS)
        self.reserve(2 * most + WINDOW)
        self._warmed += [
            (rows, masked, LOWER)
            for rows in (2**k for k in reversed(range(most.bit_length())))
            for masked in range(WINDOW, min(2 * most, MAX_STEP_TOKENS, self.max_positions) + 1, WINDOW)
            if masked > rows
        ]
        self.warm_again()

    def prompt_ahead(self, tokens: Sequence[int]) -> None:
        """Run the lower layers over any number of next tokens, without a graph."""
        start = self.length + len(self.ahead)
        self.reserve(start + len(tokens))
        embedded = F.embedding(torch.tensor(tokens, device=self.device), self.embedding)
        states = self.states_of(embedded, lambda x, layers: self.stack.prompt(x, start, layers=layers)[0])
        self.states[start : start + len(tokens)] = states
        self.ahead += tokens

    def keep_nodes(self, path: Sequence[int]) -> None:
        start, end = self.length, self.length + len(path)
        lower = [self.row_slots[row] - start for row in path]
        if path and max(lower[-1], path[-1]) >= len(path):  # else they are in place
            layers = len(self.stack.layers)
            self.stack.move([*[lower] * self.split, *[path] * (layers - self.split)], start)
            slots = torch.tensor(lower, device=self.device) + start
            self.states[start:end] = self.states[slots]
        self.truncate(start)
        self.length = end

    def _forward_nodes(self, tokens: Sequence[int], depths: Sequence[int], visible: torch.Tensor) -> torch.Tensor:
        assert self.nodes == 0 and depths[0] == 0, "a split target takes a tree in a single pass, its root first"
        n, start, seen = len(tokens), self.length, visible.numpy()
        if not self.ahead:
            self.row_slots = [*range(start, start + n)]
            return super()._forward_nodes(tokens, depths, visible)
        place, missing = self.place_rows(n)
        self.row_slots = [start + slot for slot in place]
        used = len(self.ahead) + self.nodes_ahead  # also the first free slot, less the cached tokens
        rows = power_of_2(len(missing))  # to limit the number of graphs; surplus rows take free slots
        self.reserve(start + max(used + rows, n))
        if missing:
            behind = np.eye(rows, used + rows, used, np.bool_)
            behind[: len(missing), place] = seen[missing]
            fed, at = np.zeros(rows, np.int64), np.full(rows, -used)  # a valid position
            fed[: len(missing)], at[: len(missing)] = np.array(tokens)[missing], np.array(depths)[missing] - used
            self._nodes_step(fed.tolist(), start + used, at, behind, np.zeros(rows, np.int64), LOWER)
        return self._nodes_step(tokens, start, depths, seen, place, UPPER)

    def _crop(self, end: int) -> None:
        self.forget_ahead()

    def _prompt(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        start, n, known = self.length, len(tokens), self.take_ahead(tokens)
        if known < n:
            self.prompt_ahead(tokens[known:])
        _, hidden = self.stack.prompt(self.lower_output(slice(start, start + n)), start, self.norm_out, self.own_layers)
        self.forget_ahead()
        self.hidden = hidden[-keep:].clone() if keep else hidden
        return self.logits_of(self.hidden)

    def _open(self, tokens: Sequence[int]) -> tuple[Sequence[int], int, Hashable]:
        known = self.take_ahead(tokens)
        self.forget_ahead()
        return tokens, self.length, known

    def _variants(self, n: int) -> Sequence[Hashable]:
        return (0, UPPER, *([n - 1] if n > 1 else [])) if self.runs_ahead else (0,)

    def _through(self, rows: Rows, variant: Hashable) -> tuple[torch.Tensor, torch.Tensor]:
        if variant == LOWER:
            x = self.run_lower(rows)
            return x, x
        return super()._through(rows, variant)

    def _input(self, rows: Rows, variant: Hashable) -> torch.Tensor:
        return self.lower_output(rows.sources) if variant == UPPER else self.lower_states(rows, variant)

    def lower_states(self, rows: Rows, known: Hashable) -> torch.Tensor:
        """Give the states [N, d] of rows, of which the first `known` have been through the lower layers."""
        assert isinstance(known, int)
        if known == 0:
            return self.run_lower(rows)
        if known < len(rows.slots):
            self.run_lower(rows.tail(len(rows.slots) - known))
        return self.lower_output(rows.slots)
