"""A pass over the target's own cache, with nothing kept from round to round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class OverTarget:
    """Mixed into a pass whose `length` follows the target's: what was verified is there.

    So a round always starts with the pending token alone, and verification overwrites what was fed here.

    ahead : tokens fed since the target's last pass
    """

    target: Any
    ahead: int
    nodes: int
    hidden: Any

    @property
    def length(self) -> int:
        return int(self.target.length) + self.ahead

    @length.setter
    def length(self, length: int) -> None:
        self.ahead = length - self.target.length

    def reset(self) -> None:
        self.ahead = self.nodes = 0
        self.hidden = None

    def prefill(self, tokens: Sequence[int]) -> None:
        """The target has fed them."""

    def truncate(self, length: int) -> None:
        self.ahead = self.nodes = 0

    def keep_nodes(self, path: Sequence[int]) -> None:
        self.truncate(0)
