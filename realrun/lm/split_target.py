"""A target whose lower layers can run ahead of verification, for drafters that share them.

The first N layers (`split`) and the others are two stacks. A drafter runs the lower stack over the pending token and
the tokens that it drafts. Their states after layer N are kept, so that verification runs only the upper layers over
them, and all layers only over tokens that the drafter never fed (EESD: the newest token; errata A13). With N = 0 only
the cache is shared. States after fewer layers can be kept beside them (EAGLE-3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from transformers import PreTrainedModel

from realrun.lm.cached import grown
from realrun.lm.layer_stack import PartsLM, model_parts


class RowsAhead:
    """Rows that a drafter has fed to the lower layers ahead of verification, in slots behind the cached tokens.

    splits : layer counts, ascending: states are kept after so many layers; the last is all lower layers, `split`
    states : [room, len(splits) d], these states by slot, side by side
    ahead : the tokens, starting with the pending token
    nodes_ahead : number of tree nodes behind those, in the order in which they were fed
    row_nodes : for the next pass over a tree, which of the nodes ahead each row but the first is, -1 for none
    row_slots : slots in the lower layers of the rows of the last pass over a tree
    """

    splits: tuple[int, ...]
    states: torch.Tensor

    @property
    def split(self) -> int:
        return self.splits[-1]

    def states_of(self, x: torch.Tensor, run: Callable[[torch.Tensor, range], torch.Tensor]) -> torch.Tensor:
        """Compute the states to keep [n, len(splits) d] of the lower layers' input x [n, d].

        run : runs some layers
        """
        states = []
        for start, end in pairwise((0, *self.splits)):
            x = run(x, range(start, end))
            states.append(x)
        return torch.cat(states, dim=-1) if len(states) > 1 else x

    def last_of(self, states: torch.Tensor) -> torch.Tensor:
        """Take the output of all lower layers [n, d] from states [n, len(splits) d]."""
        return states if len(self.splits) == 1 else states[:, -(states.shape[1] // len(self.splits)) :]

    def lower_output(self, slots: slice | torch.Tensor) -> torch.Tensor:
        """Look up the output of all lower layers [n, d] at these slots."""
        return self.last_of(self.states[slots])

    def forget_ahead(self) -> None:
        self.ahead: list[int] = []
        self.nodes_ahead = 0
        self.row_nodes: list[int] | None = None
        self.row_slots: list[int] = []

    def take_ahead(self, tokens: Sequence[int]) -> int:
        """Count how many of the next tokens the drafter has fed."""
        known = len(self.ahead)
        assert self.ahead == [*tokens[:known]], "the target verifies tokens that were not drafted"
        return known

    def place_rows(self, n: int) -> tuple[list[int], list[int]]:
        """Place each of a tree's n rows among the slots behind the cached tokens; with the rows that were never fed.

        These are placed behind all others.
        """
        fed = [0, *(self.row_nodes or [-1] * (n - 1))]
        used = len(self.ahead) + self.nodes_ahead
        missing = [row for row in range(n) if fed[row] < 0]
        place = [node + (row > 0) for row, node in enumerate(fed)]
        for number, row in enumerate(missing):
            place[row] = used + number
        return place, missing


class SplitTarget(RowsAhead, PartsLM):
    """CachedLM in two stacks."""

    def __init__(self, model: PreTrainedModel, *splits: int):
        self.parts = model_parts(model)
        layers, split = model.model.layers, splits[-1]
        self.splits = splits
        self.lower, self.upper = self.parts.stack(layers[:split]), self.parts.stack(layers[split:])
        self.norm, self.head = model.model.norm, model.get_output_embeddings()
        width = len(splits) * int(model.config.hidden_size)
        self.states = torch.empty(0, width, dtype=model.dtype, device=model.device)
        super().__init__(model)

    def reset(self) -> None:
        super().reset()
        self.forget_ahead()

    def feed_ahead(self, tokens: Sequence[int]) -> None:
        """Run the lower layers over the next tokens, behind those already fed ahead."""
        start = self.length + len(self.ahead)
        end = start + len(tokens)
        self._check_positions(end)
        self._run_lower(tokens, start, slice(start, end), self.parts.causal_mask(len(tokens), end))
        self.ahead += tokens

    def feed_nodes_ahead(self, tokens: Sequence[int], positions: Sequence[int], visible: torch.Tensor) -> None:
        """Run the lower layers over tree nodes behind the pending token; visible [n, nodes_ahead + n]."""
        assert len(self.ahead) == 1
        start = self.length + 1 + self.nodes_ahead
        at = torch.tensor(positions, device=self.device)
        self._run_lower(tokens, start, at, self.parts.tree_mask(visible, start + len(tokens)))
        self.nodes_ahead += len(tokens)

    def keep_nodes(self, path: Sequence[int]) -> None:
        slots, start = [self.row_slots[row] for row in path], self.length
        if slots != [*range(start, start + len(path))]:
            self.lower.move(slots, start)
            self.states[start : start + len(path)] = self.states[torch.tensor(slots, device=self.device)]
        super().keep_nodes(path)

    def _forward(self, tokens: Sequence[int], keep: int) -> torch.Tensor:
        start, n, known = self.length, len(tokens), self.take_ahead(tokens)
        end = start + n
        mask = self.parts.causal_mask(n, end)
        if known < n:
            own = mask if known == 0 else self.parts.causal_mask(n - known, end)
            self._run_lower(tokens[known:], start + known, slice(start + known, end), own)
        x = self.upper.run(self.lower_output(slice(start, end)), start, slice(start, end), mask)
        self.forget_ahead()
        return self.finish(x, keep)

    def _forward_nodes(self, tokens: Sequence[int], depths: Sequence[int], visible: torch.Tensor) -> torch.Tensor:
        assert self.nodes == 0 and depths[0] == 0, "a split target takes a tree in a single pass, its root first"
        start, n = self.length, len(tokens)
        positions = self.node_positions(depths)
        mask = self.parts.tree_mask(visible, start + n)
        if not self.ahead:
            self.row_slots = [*range(start, start + n)]
            self._run_lower(tokens, start, positions, mask)
            x = self.lower_output(slice(start, start + n))
            return self.finish(self.upper.run(x, start, positions, mask), keep=0)
        place, missing = self.place_rows(n)
        used = len(self.ahead) + self.nodes_ahead + len(missing)
        if missing:
            seen = torch.zeros(len(missing), used, dtype=torch.bool)
            seen[:, place] = visible[missing]
            first = start + used - len(missing)
            at = positions[torch.tensor(missing, device=self.device)]
            self._run_lower([tokens[row] for row in missing], first, at, self.parts.tree_mask(seen, start + used))
        self.row_slots = [start + slot for slot in place]
        x = self.lower_output(torch.tensor(self.row_slots, device=self.device))
        x = self.upper.run(x, start, positions, mask)
        return self.finish(x, keep=0)

    def _run_lower(
        self, tokens: Sequence[int], start: int, positions: slice | torch.Tensor, mask: torch.Tensor | None
    ) -> None:
        states = self.states_of(
            self.parts.embed(tokens), lambda x, layers: self.lower.run(x, start, positions, mask, layers=layers)
        )
        end = start + len(tokens)
        self.states = grown(self.states, end)
        self.states[start:end] = states

    def _crop(self, end: int) -> None:
        self.forget_ahead()

    def _move_nodes(self, path: Sequence[int]) -> None:
        self.upper.move([self.length + node for node in path], self.length)
