"""Benchmark a running server: the same prompts with and without speculation, in turns."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from math import inf
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from specsim.engines import rates
from specsim.engines.formats.prometheus import BY_POSITION, DRAFTED, DRAFTS, by_position, difference, scrape
from specsim.engines.formats.registry import FORMATS
from specsim.io.errors import InputError
from specsim.io.progress import Progress
from specsim.servers.client import Server, connect, recognise
from specsim.servers.document import BASELINE, REPEAT, SPECULATIVE, Arm, Bench, Request
from specsim.servers.prompts import Prompt, read_prompts

PER_CLIENT = 4  # requests, at least
PER_BLOCK = 2  # requests of a client before the arms change, as fewer run at a block's start and end
WARM_UP = 2  # requests of each client that are not measured


class _Answers(NamedTuple):
    """What an arm has measured so far; scrapes : metrics before and after every block."""

    requests: list[Request]
    responses: list[dict[str, Any]]
    seconds: list[float]
    scrapes: list[tuple[str, str]]


def bench(
    url: str,
    *,
    baseline: str | None = None,
    prompts: str | PathLike[str] | None = None,
    completions: bool = False,
    concurrency: Sequence[int] = (1,),
    requests: int = 48,
    minutes: float = 10.0,
    max_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    progress: Progress = lambda what, done, total: None,
) -> Bench:
    """Measure a running server with speculative decoding, beside the same server without.

    Prompts are sent in blocks, each to the server, the baseline, and the baseline again (an A/A test), and the next
    block in reverse order. Blocks of all concurrencies take turns. No prompt is sent to the speculative server twice as
    long as there are enough.

    Parameters
    ----------
    url, baseline : str
        OpenAI-compatible servers of vLLM, SGLang or llama.cpp: one that speculates, and the same without speculation.
        Nothing else is talked to.
    prompts : path, optional
        JSON Lines, as `read_prompts` takes them (default: specsim's 240 tasks).
    completions : bool
        Send questions as texts to continue, to a model without a chat template.
    concurrency : sequence of int
        Requests that run at the same time.
    requests : int
        Requests per arm and concurrency, at least 4 per client.
    minutes : float
        Time limit, after which the benchmark ends with a block.
    max_tokens, temperature, seed
        Sampling of every request.
    progress : callable
        Called with what is done, how much of it, and out of how much.

    Returns
    -------
    Bench
        `speedup(concurrency)`, and every request in `arms`.

    Raises
    ------
    InputError
        If httpx2 is missing, a server does not answer, or settings are out of range.

    Examples
    --------
    >>> import specsim
    >>> measured = specsim.bench("http://localhost:8000", baseline="http://localhost:8001")  # doctest: +SKIP
    """
    if min(concurrency, default=0) < 1 or requests < 1 or max_tokens < 2 or not minutes > 0:
        raise InputError("concurrency, requests and minutes must be positive, and max_tokens at least 2")
    asked = read_prompts(None if prompts is None else Path(prompts), seed=seed)
    asked = [prompt.as_text() for prompt in asked] if completions else asked
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    plan = {clients: max(requests, PER_CLIENT * clients) for clients in sorted(set(concurrency))}
    source = "specsim's tasks" if prompts is None else Path(prompts).name

    async def run() -> Bench:
        async with connect(url) as client, connect(baseline or url) as other:
            server = await recognise(client, url, sampling)
            base = None if baseline is None else await recognise(other, baseline, sampling)
            return await _run(server, base, asked, plan, minutes, source, progress)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(run())
    with ThreadPoolExecutor(1) as thread:  # in a notebook, whose thread runs an event loop
        return thread.submit(asyncio.run, run()).result()


async def _run(
    server: Server, base: Server | None, prompts: list[Prompt], plan: Mapping[int, int], minutes: float, source: str,
    progress: Progress,
) -> Bench:  # fmt: skip
    servers = {SPECULATIVE: server} | ({} if base is None else {BASELINE: base, REPEAT: base})
    own, notes, needed = _endless(prompts), [], sum(min(count, len(prompts)) for count in plan.values())
    if needed > len(prompts):
        notes.append(f"{needed} prompts are needed and {len(prompts)} given, so some repeat at another concurrency")
    answers = {(name, clients): _Answers([], [], [], []) for clients in plan for name in servers}
    blocks: list[tuple[float, int, int, list[Prompt]]] = []  # by the place of each, so that concurrencies take turns
    for clients, count in plan.items():
        warm = [next(own) for _ in range(WARM_UP)] * clients
        for each in {SPECULATIVE: server, BASELINE: base}.values():
            if each is not None:
                await _block(each, warm, clients)
        chosen = [next(own) for _ in range(min(count, len(prompts)))]
        size = PER_BLOCK * clients if clients > 1 else 1
        parts = [chosen[begin : begin + size] for begin in range(0, len(chosen), size)]
        blocks += [((number + 0.5) / len(parts), clients, number, part) for number, part in enumerate(parts)]
    deadline, done = time.monotonic() + 60 * minutes, 0
    for _, clients, number, block in sorted(blocks, key=lambda each: each[:2]):
        for name in list(servers)[:: -1 if number % 2 else 1]:  # so that a drift of the machine cancels
            answer, before = answers[name, clients], await server.metrics()
            start = time.perf_counter()
            for request, response in await _block(servers[name], block, clients):
                answer.requests.append(request)
                answer.responses.append(response)
            answer.seconds.append(time.perf_counter() - start)
            answer.scrapes.append((before, await server.metrics()))
        done += len(block)
        progress("prompts", done, needed)
        if time.monotonic() > deadline and done < needed:
            notes.append(f"stopped after {done} of {needed} prompts, at the time limit")
            break
    arms = []
    for (name, clients), answer in answers.items():
        counts: tuple[list[int] | None, list[int] | None] = None, None
        if name == SPECULATIVE and answer.requests:
            counts, remarks = _counts(server, answer)
            notes += [f"concurrency {clients}: {remark}" for remark in remarks]
        requests = [request for request in answer.requests if request.output_tokens > 1]
        if answer.requests and not requests:
            raise InputError(f"{servers[name].facts.url} answers with a single token; give other --prompts")
        if requests:
            arms.append(Arm(name, clients, sum(answer.seconds), requests, *counts, dict(server.sampling)))
    facts = server.facts
    lengths = [len(arm.drafted) for arm in arms if arm.drafted]
    if facts.draft_tokens is None and lengths:
        facts = replace(facts, draft_tokens=max(lengths))
    today = datetime.now(UTC).date().isoformat()
    return Bench(facts, None if base is None else base.facts, arms, source, today, notes)


def _endless(prompts: list[Prompt]) -> Iterator[Prompt]:
    while True:
        yield from prompts


async def _block(server: Server, prompts: Sequence[Prompt], clients: int) -> list[tuple[Request, dict[str, Any]]]:
    """Ask all prompts, so many at the same time; answers in the order of the prompts."""
    import httpx2

    waiting = iter(enumerate(prompts))
    answers: dict[int, tuple[Request, dict[str, Any]]] = {}

    async def client() -> None:
        for place, prompt in waiting:
            answers[place] = await server.ask(prompt)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(clients, len(prompts))):
                group.create_task(client())
    except ExceptionGroup as group_:
        error = group_.exceptions[0]
        if not isinstance(error, httpx2.HTTPError):
            raise error from None
        raise InputError(f"{server.facts.url} stopped answering ({type(error).__name__}); see its log") from None
    return [answers[place] for place in sorted(answers)]


def _counts(server: Server, answers: _Answers) -> tuple[tuple[list[int] | None, list[int] | None], list[str]]:
    """Counters by position [D], by the responses or else by the server's metrics, and remarks on them."""
    with TemporaryDirectory() as folder:
        responses = Path(folder, "responses.jsonl")
        responses.write_text("".join(json.dumps(response) + "\n" for response in answers.responses))
        counters, drafted, remarks = None, None, []
        try:
            totals = FORMATS[server.adapter.responses].read([responses]).totals
            counters = None if totals is None else totals.by_depth
        except InputError as error:
            remarks.append(str(error))
        try:
            counts: Counter[tuple[str, int | None]] = Counter()
            paths = Path(folder, "before"), Path(folder, "after")
            for texts in answers.scrapes:
                for path, text in zip(paths, texts, strict=True):
                    path.write_text(text)
                counts.update(difference(scrape(paths[0]).counts, scrape(paths[1]).counts, paths))
            rounds, drafted = counts[DRAFTS, None], counts[DRAFTED, None]
            if counters is None:
                # Drafts are cut at the limit on output tokens, the more of them the longer they are.
                counters, remarks = rates.counters(rounds, drafted, by_position(counts, BY_POSITION), "", most_off=inf)
        except (InputError, KeyError) as error:
            remarks.append(f"/metrics: {error}")
    remarks = [remark.replace(f"{folder}/", "") for remark in remarks]
    told = [request.drafted for request in answers.requests if request.drafted is not None]
    if drafted is not None and len(told) == len(answers.requests) and drafted != sum(told):
        text = f"the server drafted {drafted:,} tokens, but {sum(told):,} for these requests: others used it as well"
        remarks.append(text)
    if counters is None:
        return (None, None), [f"no acceptance by position ({'; '.join(remarks)})"]
    return (counters.drafted.tolist(), counters.accepted.tolist()), remarks
