"""A server's pages and responses over HTTP; nothing is asked of any other host.

A server may be broken, or another program. What it sends is bounded in bytes and in time, and checked against
`specsim.servers.adapters` and `specsim.servers.document` once, before it counts.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from specsim.engines.formats.prometheus import is_counted
from specsim.engines.import_records import Reading, read_counts
from specsim.io.errors import InputError
from specsim.io.json import MAX_BYTES, checked, from_keys, parse_json
from specsim.servers.adapters import ADAPTERS, Adapter, Chunk, Models, Usage
from specsim.servers.document import Request, Sampling, ServerFacts, arrived_at_once
from specsim.servers.prompts import Prompt

if TYPE_CHECKING:
    import httpx2

INSTALL = "benchmarks of servers need httpx2: pip install -c constraints.txt '.[servers]'"
PAGE_S = 30.0  # for a page
TIMEOUT_S = 600.0  # without any byte of a response
TOKEN_BYTES = 2**12  # of a streamed response, for every token that was asked for
PORTS = {None, *range(1, 2**16)}
CREDENTIALS = re.compile(r"(?:(?<=//)|^)[^/?#]*@|[?#].*", re.DOTALL)  # of a URL: user and password, and a query
NO_SERVER = "give an OpenAI-compatible server of vLLM, SGLang or llama.cpp"
KNOWN = "version", "draft_tokens", "method"  # settings that are facts of their own
TEXTS = ("content", "reasoning_content", "reasoning")


def shown(url: str) -> str:
    """Return a URL for files and messages, which are shared: without user, password and query."""
    return CREDENTIALS.sub("", url)


def connect(url: str) -> httpx2.AsyncClient:
    """Open a connection to a server, by no proxy and following no redirect; InputError without httpx2."""
    try:
        import httpx2
    except ModuleNotFoundError:
        raise InputError(INSTALL) from None
    limits = httpx2.Limits(max_keepalive_connections=0)  # llama-server closes them without notice after a stream
    try:
        address = httpx2.URL(url)
        if address.scheme not in ("http", "https") or not address.host or address.port not in PORTS:
            raise ValueError
        return httpx2.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            timeout=TIMEOUT_S,
            trust_env=False,
            limits=limits,
            headers={"Accept-Encoding": "identity"},  # so that a few bytes cannot become many
        )
    except (httpx2.InvalidURL, ValueError):
        raise InputError(f"{shown(url)!r} is not a server's address; write for example http://localhost:8000") from None


async def _parts(response: httpx2.Response, url: str, most_bytes: int) -> AsyncIterator[bytes]:
    """Iterate over the bytes of a response, up to so many."""
    coding = response.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise InputError(f"{url} answers in {coding[:20]!r}, which was not asked for; ask the server, not a proxy")
    left = most_bytes
    async for part in response.aiter_bytes():
        left -= len(part)
        if left < 0:
            raise InputError(f"{url} sends more than {most_bytes >> 20} MiB for a response; {NO_SERVER}")
        yield part


async def _lines(response: httpx2.Response, url: str, most_bytes: int) -> AsyncIterator[tuple[float, str]]:
    """Iterate over the lines of a response, each with the time of its arrival."""
    rest: list[bytes] = []  # of a line that goes on
    now = 0.0
    async for part in _parts(response, url, most_bytes):
        now = time.perf_counter()
        end, *more = part.split(b"\n")
        rest.append(end)
        for begin in more:
            yield now, b"".join(rest).decode(errors="replace")
            rest = [begin]
    yield now, b"".join(rest).decode(errors="replace")


async def _page(client: httpx2.AsyncClient, path: str, url: str) -> str | None:
    """The text of a page; None where the server has none."""
    async with asyncio.timeout(PAGE_S), client.stream("GET", path) as response:
        if response.status_code != 200:
            return None
        parts = [part async for part in _parts(response, f"{url}{path}", MAX_BYTES)]
    return b"".join(parts).decode(errors="replace")


def why_silent(error: Exception, url: str) -> str:
    """Describe why a server does not answer."""
    reason = f"{type(error).__name__}: {str(error)[:200]}".rstrip(": ")
    return f"{url} does not answer ({reason}); check the address and start the server"


@dataclass(frozen=True)
class Server:
    """A server that has been recognised."""

    client: httpx2.AsyncClient
    adapter: Adapter
    facts: ServerFacts
    sampling: Sampling

    async def ask(self, prompt: Prompt) -> tuple[Request, Chunk]:
        """Stream a response: the request's times and counts, and the last chunk with the engine's counts."""
        url, invalid = self.facts.url, NO_SERVER
        path, key = ("/v1/chat/completions", "messages") if prompt.chat else ("/v1/completions", "prompt")
        body = {"model": self.facts.model, key: prompt.content, "stream": True, **self.adapter.request}
        body |= asdict(self.sampling)
        body["stream_options"] = {"include_usage": True}
        most_bytes = max(MAX_BYTES, TOKEN_BYTES * self.sampling.max_tokens)
        times: list[float] = []
        last: Chunk = {}
        finish, ended, start = "", False, time.perf_counter()
        async with self.client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                text = b"".join([part async for part in _parts(response, url, MAX_BYTES)]).decode(errors="replace")
                raise InputError(f"{url} answers {response.status_code}: {' '.join(text[:2000].split())[:200]}")
            async for now, line in _lines(response, url, most_bytes):
                data = line.removeprefix("data:").strip()
                ended = ended or data == "[DONE]"
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                answer = parse_json(data, f"{url}: a streamed chunk", invalid=invalid)
                if isinstance(answer, dict) and answer.get("error") is not None:
                    raise InputError(f"{url} answers {str(answer['error'])[:200]}")
                chunk: Chunk = checked(answer, f"{url}: a streamed chunk", Chunk, invalid=invalid)
                for choice in chunk.get("choices") or []:
                    finish = choice.get("finish_reason") or finish
                    if choice.get("text") or any((choice.get("delta") or {}).get(text) for text in TEXTS):
                        times.append(now)
                if chunk.get("usage"):
                    last = chunk
        usage: Usage = last.get("usage") or {}
        if "completion_tokens" not in usage:
            if not ended:
                raise InputError(f"{url} broke off a response; see its log")
            raise InputError(f"{url} sends no usage counts with stream_options.include_usage; update the server")
        begin, end = (times[0], times[-1]) if times else (start, start)
        rounds, drafted, accepted = self.adapter.counts(last)
        request = {
            "prompt": prompt.name,
            "output_tokens": max(usage["completion_tokens"], 1),  # the end of the text alone may count as none
            "deltas": len(times),
            "ttft_s": begin - start,
            "decode_s": end - begin,
            "finish": finish,
            "prompt_tokens": usage.get("prompt_tokens"),
            "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            "rounds": rounds,
            "drafted": drafted,
            "accepted": accepted,
            "at_once": arrived_at_once(times, start),
        }
        return from_keys(request, Request, f"{url}: a response", invalid), last

    async def metrics(self) -> str:
        """The lines of /metrics that count tokens; "" where the server has none."""
        text = await _page(self.client, "/metrics", self.facts.url)
        return "\n".join(filter(is_counted, (text or "").split("\n")))


def read_server(url: str, *, k: int | None = None) -> Reading:
    """Read a server's counts since its start from /metrics or SGLang's /server_info; InputError if it has neither."""
    name = shown(url)

    async def ask() -> str | None:
        async with connect(url.rstrip("/").removesuffix("/metrics")) as client:
            return await _page(client, "/metrics", name) or await _page(client, "/server_info", name)

    try:
        import httpx2
    except ModuleNotFoundError:
        raise InputError(INSTALL) from None
    try:
        text = asyncio.run(ask())
    except (httpx2.HTTPError, httpx2.InvalidURL, TimeoutError) as error:
        raise InputError(why_silent(error, name)) from None
    if not text:
        raise InputError(f"{name} has no /metrics; start llama-server or SGLang with metrics, or give the server's log")
    with TemporaryDirectory() as folder:
        path = Path(folder, "metrics")
        path.write_text(text)
        try:
            return read_counts(path, k=k)._replace(name=name)
        except InputError as error:
            raise InputError(str(error).replace(str(path), name)) from None


async def recognise(client: httpx2.AsyncClient, url: str, sampling: Sampling) -> Server:
    """Find out a server's engine, version, model and settings; InputError where nothing known answers."""
    import httpx2

    url = shown(url)
    try:
        for adapter in ADAPTERS:
            page = _read_object(await _page(client, adapter.page, url), f"{url}{adapter.page}")
            if adapter.key in page:
                checked(page, f"{url}{adapter.page}", adapter.shape, invalid=NO_SERVER)
                where = f"{url}/v1/models"
                models = _read_object(await _page(client, "/v1/models", url), where)
                checked(models, where, Models, invalid=NO_SERVER)
                settings = adapter.settings(page)
                facts = {"url": url, "engine": adapter.name, "model": models["data"][0]["id"], "settings": settings}
                facts |= {name: settings.pop(name) for name in KNOWN if name in settings}
                return Server(client, adapter, from_keys(facts, ServerFacts, url, NO_SERVER), sampling)
    except (httpx2.HTTPError, httpx2.InvalidURL, TimeoutError) as error:
        raise InputError(why_silent(error, url)) from None
    known_engines = ", ".join(adapter.name for adapter in ADAPTERS)
    raise InputError(f"{url} is no server of {known_engines}; give the address without a path")


def _read_object(text: str | None, name: str) -> dict[str, Any]:
    """The object of a page; {} for any other text, as another program's page of this path may be."""
    try:
        document = parse_json(text or "", name, invalid="")
    except InputError:
        return {}
    return document if isinstance(document, dict) else {}
