"""A server's pages and responses over HTTP; nothing is asked of any other host."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from specsim.engines.import_records import Reading, read_counts
from specsim.io.errors import InputError
from specsim.servers.adapters import ADAPTERS, Adapter
from specsim.servers.document import Request, ServerFacts
from specsim.servers.prompts import Prompt

if TYPE_CHECKING:
    import httpx2

INSTALL = "benchmarks of servers need httpx2: pip install -c constraints.txt '.[servers]'"
TIMEOUT_S = 600.0  # without any byte of a response


def connect(url: str) -> httpx2.AsyncClient:
    """Open a connection to a server, by no proxy and following no redirect; InputError without httpx2."""
    try:
        import httpx2
    except ModuleNotFoundError:
        raise InputError(INSTALL) from None
    address = httpx2.URL(url)
    if address.scheme not in ("http", "https") or not address.host:
        raise InputError(f"{url!r} is not a server's address; write for example http://localhost:8000")
    limits = httpx2.Limits(max_keepalive_connections=0)  # llama-server closes them without notice after a stream
    base = url.rstrip("/").removesuffix("/v1")
    return httpx2.AsyncClient(base_url=base, timeout=TIMEOUT_S, trust_env=False, limits=limits)


@dataclass(frozen=True)
class Server:
    """A server that has been recognised.

    sampling : fields of every request: max_tokens, temperature, seed
    """

    client: httpx2.AsyncClient
    adapter: Adapter
    facts: ServerFacts
    sampling: Mapping[str, Any]

    async def ask(self, prompt: Prompt) -> tuple[Request, dict[str, Any]]:
        """Stream a response: the request's times and counts, and the last chunk with the engine's counts."""
        path, key = ("/v1/chat/completions", "messages") if prompt.chat else ("/v1/completions", "prompt")
        body = {"model": self.facts.model, key: prompt.content, "stream": True, **self.adapter.request, **self.sampling}
        body["stream_options"] = {"include_usage": True}
        deltas, finish, begin, last = 0, "", 0.0, {}
        start = end = time.perf_counter()
        async with self.client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                raise InputError(f"{self.facts.url} answers {response.status_code}: {' '.join(text.split())[:200]}")
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                chunk = _json(data)
                if "error" in chunk:
                    raise InputError(f"{self.facts.url} answers {str(chunk['error'])[:200]}")
                for choice in chunk.get("choices") or []:
                    finish = choice.get("finish_reason") or finish
                    if choice.get("text") or any((choice.get("delta") or {}).get(k) for k in TEXTS):
                        end = time.perf_counter()
                        begin, deltas = begin or end, deltas + 1
                if chunk.get("usage"):
                    last = chunk
        usage = last.get("usage", {})
        if "completion_tokens" not in usage:
            raise InputError(
                f"{self.facts.url} sends no usage counts with stream_options.include_usage; update the server"
            )
        return Request(
            prompt.name,
            int(usage["completion_tokens"]),
            deltas,
            (begin or end) - start,
            end - (begin or end),
            finish,
            usage.get("prompt_tokens"),
            (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            *self.adapter.counts(last),
        ), last

    async def metrics(self) -> str:
        """The text of /metrics; "" where the server has none."""
        response = await self.client.get("/metrics")
        return response.text if response.status_code == 200 else ""


def read_server(url: str, *, k: int | None = None) -> Reading:
    """Read a server's counts since its start from /metrics or SGLang's /server_info; InputError if it has neither."""
    try:
        import httpx2
    except ModuleNotFoundError:
        raise InputError(INSTALL) from None

    async def ask() -> str:
        async with connect(url.rstrip("/").removesuffix("/metrics")) as client:
            for page in ("/metrics", "/server_info"):
                response = await client.get(page)
                if response.status_code == 200:
                    return response.text
            return ""

    try:
        text = asyncio.run(ask())
    except httpx2.HTTPError as error:
        raise InputError(
            f"{url} does not answer ({type(error).__name__}: {error}); check the address and start the server"
        ) from None
    if not text:
        raise InputError(f"{url} has no /metrics; start llama-server or SGLang with metrics, or give the server's log")
    with TemporaryDirectory() as folder:
        path = Path(folder, "metrics")
        path.write_text(text)
        try:
            return read_counts(path, k=k)._replace(name=url)
        except InputError as error:
            raise InputError(str(error).replace(str(path), url)) from None


TEXTS = ("content", "reasoning_content", "reasoning")


async def recognise(client: httpx2.AsyncClient, url: str, sampling: Mapping[str, Any]) -> Server:
    """Find out a server's engine, version, model and settings; InputError where nothing known answers."""
    import httpx2

    try:
        for adapter in ADAPTERS:
            response = await client.get(adapter.page)
            page = _json(response.text) if response.status_code == 200 else {}
            if adapter.key in page:
                models = _json((await client.get("/v1/models")).text)
                facts = adapter.settings(page)
                known = {name: facts.pop(name) for name in ("version", "draft_tokens", "method") if name in facts}
                model = models["data"][0]["id"]
                return Server(
                    client, adapter, ServerFacts(url, adapter.name, model=model, **known, settings=facts), sampling
                )
    except httpx2.HTTPError as error:
        raise InputError(
            f"{url} does not answer ({type(error).__name__}: {error}); check the address and start the server"
        ) from None
    except (KeyError, IndexError, TypeError):
        raise InputError(f"{url}/v1/models names no model; give an OpenAI-compatible server") from None
    known_engines = ", ".join(adapter.name for adapter in ADAPTERS)
    raise InputError(f"{url} is no server of {known_engines}; give the address without a path")


def _json(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}
