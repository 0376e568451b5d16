"""The engines' HTTP interfaces: how a server is recognised, and where its responses count drafts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from specsim.servers import llamacpp, sglang, vllm

Counts = tuple[int | None, int | None, int | None]  # rounds, drafted and accepted tokens; None for what is unknown


class Adapter(Protocol):
    """The interface of an engine, a module of this folder.

    NAME : the engine, as `specsim.engines.flags.FLAGS` calls it
    PAGE : path of a page that only this engine has, with the key KEY
    REQUEST : fields of a request beside OpenAI's
    RESPONSES : format of its responses in `specsim.engines.formats.registry.FORMATS`
    """

    NAME: str
    PAGE: str
    KEY: str
    REQUEST: dict[str, Any]
    RESPONSES: str

    def settings(self, page: Mapping[str, Any]) -> dict[str, Any]:
        """Return version, draft_tokens and method where the page tells them, and other settings."""

    def counts(self, response: Mapping[str, Any]) -> Counts:
        """Return the counts of a response, of which the last chunk is given."""


ADAPTERS: tuple[Adapter, ...] = (llamacpp, sglang, vllm)
