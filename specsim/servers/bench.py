"""Benchmark a running server: the same prompts with and without speculation, in turns."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import cycle
from math import inf
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from specsim.acceptance.sources import Counters
from specsim.engines import rates
from specsim.engines.formats.prometheus import (
    BY_POSITION,
    DRAFTED,
    DRAFTS,
    by_position,
    difference,
    output_tokens,
    scrape,
)
from specsim.engines.formats.registry import FORMATS
from specsim.io.errors import InputError
from specsim.io.files import digest
from specsim.io.json import from_keys, parse_json
from specsim.io.progress import Progress
from specsim.servers.adapters import Chunk
from specsim.servers.client import Server, connect, recognise, why_silent
from specsim.servers.document import BASELINE, REPEAT, SPECULATIVE, Arm, ArmName, Bench, Duration, Request, Sampling
from specsim.servers.prompts import Prompt, read_prompts

PER_CLIENT = 4  # requests, at least
PER_BLOCK = 2  # requests of a client before the arms change, as fewer run at a block's start and end
LAG = 2  # steps of a request that /metrics may count late
DAMAGED = "remove it, or give another --out"
WARM_UP = 2  # requests of each client that are not measured


@dataclass(frozen=True)
class _Answers:
    """What an arm has measured so far, as the journal keeps it; scrapes : metrics before and after every block."""

    requests: list[Request]
    responses: list[dict[str, Any]]
    seconds: list[Duration]
    scrapes: list[tuple[str, str]]

    def extend(self, other: _Answers) -> None:
        for name, values in vars(other).items():
            getattr(self, name).extend(values)


@dataclass(frozen=True)
class _JournalLine:
    """What the arms answered to a block's prompts."""

    clients: int
    number: int
    arms: dict[ArmName, _Answers]


class _Block(NamedTuple):
    """Prompts that are answered by every arm before the next block's."""

    place: float
    clients: int
    number: int
    prompts: list[Prompt]


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
    journal: str | PathLike[str] | None = None,
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
        Time limit, warm-up included. A block that it cuts is not counted.
    max_tokens, temperature, seed
        Sampling of every request.
    journal : path, optional
        File to which finished blocks are appended. The same call goes on from it if the benchmark was stopped.
    progress : callable
        Called with what is done, how much of it, and out of how much.

    Returns
    -------
    Bench
        `speedup(concurrency)`, and every request in `arms`. `stopped` tells why it ended early, if a server failed.

    Raises
    ------
    InputError
        If httpx2 is missing, a server does not answer before anything was measured, or settings are out of range.

    Examples
    --------
    >>> import specsim
    >>> measured = specsim.bench("http://localhost:8000", baseline="http://localhost:8001")  # doctest: +SKIP
    """
    if min(concurrency, default=0) < 1 or requests < 1 or max_tokens < 2 or not minutes > 0:
        raise InputError("concurrency, requests and minutes must be positive, and max_tokens at least 2")
    asked = read_prompts(None if prompts is None else Path(prompts), seed=seed)
    asked = [prompt.as_text() for prompt in asked] if completions else asked
    sampling = Sampling(max_tokens, temperature, seed)
    plan = {clients: max(requests, PER_CLIENT * clients) for clients in sorted(set(concurrency))}
    if max(plan) > len(asked):
        raise InputError(
            f"{max(plan):,} requests at the same time need as many prompts, not {len(asked):,}; give a lower "
            "--concurrency, or more --prompts"
        )
    source = "specsim's tasks" if prompts is None else Path(prompts).name
    names = [prompt.name for prompt in asked]
    settings = {**asdict(sampling), "concurrency": sorted(plan), "requests": requests, "prompts": names}

    async def run() -> Bench:
        async with connect(url) as client, connect(baseline or url) as other:
            server = await recognise(client, url, sampling)
            base = None if baseline is None else await recognise(other, baseline, sampling)
            asked_digest = digest(json.dumps(settings))
            record = _Journal(None if journal is None else Path(journal), asked_digest, server, base)
            return await _run(server, base, asked, plan, minutes, source, record, progress)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(run())
    with ThreadPoolExecutor(1) as thread:  # in a notebook, whose thread runs an event loop
        return thread.submit(asyncio.run, run()).result()


class _Journal:
    """Finished blocks by concurrency and number, kept in a file if one is given.

    A line is written at once; a kill can only cut the last one.
    """

    def __init__(self, path: Path | None, settings_digest: str, server: Server, base: Server | None) -> None:
        self.path = path
        self.blocks: dict[tuple[int, int], dict[ArmName, _Answers]] = {}
        facts = [asdict(each.facts) for each in (server, base) if each is not None]
        self.head = head = json.loads(json.dumps({"settings": {"digest": settings_digest}, "servers": facts}))
        text = path.read_bytes() if path is not None and path.is_file() else b""
        whole = text[: text.rfind(b"\n") + 1]
        lines = [parse_json(line, str(path), invalid=DAMAGED) for line in whole.splitlines()]
        if path is not None and text != whole:
            path.write_bytes(whole)
        if not lines:
            return
        for part, other in (("settings", "other settings or prompts"), ("servers", "a server that changed since")):
            if lines[0].get(part) != head[part]:
                raise InputError(f"{path} was measured with {other}; give the former, or another --out")
        for line in lines[1:]:
            block = from_keys(line, _JournalLine, str(path), DAMAGED)
            self.blocks[block.clients, block.number] = block.arms

    def add(self, block: _Block, arms: dict[ArmName, _Answers]) -> None:
        """Keep a finished block."""
        if not self.blocks:
            self._write(self.head)
        self.blocks[block.clients, block.number] = arms
        self._write(asdict(_JournalLine(block.clients, block.number, arms)))

    def _write(self, line: Mapping[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


async def _run(
    server: Server, base: Server | None, prompts: list[Prompt], plan: Mapping[int, int], minutes: float, source: str,
    journal: _Journal, progress: Progress,
) -> Bench:  # fmt: skip
    servers: dict[ArmName, Server] = {SPECULATIVE: server}
    servers |= {} if base is None else {BASELINE: base, REPEAT: base}
    own, notes, needed = cycle(prompts), [], sum(min(count, len(prompts)) for count in plan.values())
    if needed > len(prompts):
        notes.append(f"{needed} prompts are needed and {len(prompts)} given, so some repeat at another concurrency")
    warm_up: dict[int, list[Prompt]] = {}
    blocks: list[_Block] = []  # by the place of each, so that concurrencies take turns
    for clients, count in plan.items():
        warm_up[clients] = [next(own) for _ in range(WARM_UP)]
        chosen = [next(own) for _ in range(min(count, len(prompts)))]
        size = PER_BLOCK * clients if clients > 1 else 1
        parts = [chosen[begin : begin + size] for begin in range(0, len(chosen), size)]
        blocks += [_Block((number + 0.5) / len(parts), clients, number, part) for number, part in enumerate(parts)]
    blocks.sort(key=lambda block: block[:2])
    left = [block for block in blocks if (block.clients, block.number) not in journal.blocks]
    done, stopped = needed - sum(len(block.prompts) for block in left), ""
    try:
        async with asyncio.timeout(60 * minutes):
            for clients in sorted({block.clients for block in left}):
                for each in {SPECULATIVE: server, BASELINE: base}.values():
                    if each is not None:
                        await _block(each, warm_up[clients] * clients, clients)
            for block in left:
                turn = {}
                for name in list(servers)[:: -1 if block.number % 2 else 1]:  # so that a drift of the machine cancels
                    turn[name] = await _turn(servers[name], block)
                journal.add(block, turn)
                done += len(block.prompts)
                progress("prompts", done, needed)
    except TimeoutError:
        notes.append(f"stopped after {done} of {needed} prompts, at the time limit")
        if not done:
            raise InputError(
                f"no prompt was answered by all servers in {minutes} minutes; give more --minutes"
            ) from None
    except InputError as error:
        if not done:
            raise
        stopped = f"{error} ({done} of {needed} prompts were measured)"
    answers = {(name, clients): _Answers([], [], [], []) for clients in plan for name in servers}
    for block in blocks:
        for name, answer in journal.blocks.get((block.clients, block.number), {}).items():
            answers[name, block.clients].extend(answer)
    arms = []
    for (name, clients), answer in answers.items():
        if not answer.requests:
            continue
        requests = [request for request in answer.requests if request.output_tokens > 1]
        if not requests:
            raise InputError(f"{servers[name].facts.url} answers with a single token; give other --prompts")
        k = server.facts.draft_tokens or 0 if name == SPECULATIVE else 0
        others = _tokens_of_others(answer, k)
        arm = Arm(name, clients, sum(answer.seconds), requests, None, None, asdict(server.sampling), others)
        if name == SPECULATIVE:
            counters, remarks = _counts(server, answer)
            try:
                if counters is not None:
                    arm = replace(arm, drafted=counters.drafted.tolist(), accepted=counters.accepted.tolist())
            except InputError as error:
                remarks = [f"no acceptance by position ({error})"]
            notes += [f"concurrency {clients}: {remark}" for remark in remarks]
        arms.append(arm)
    facts = server.facts
    lengths = [len(arm.drafted) for arm in arms if arm.drafted]
    if facts.draft_tokens is None and lengths:
        facts = replace(facts, draft_tokens=max(lengths))
    today = datetime.now(UTC).date().isoformat()
    return Bench(facts, None if base is None else base.facts, arms, source, today, notes, stopped=stopped)


async def _turn(server: Server, block: _Block) -> _Answers:
    """Have a server answer a block's prompts."""
    before, start = await _metrics(server), time.perf_counter()
    answers = await _block(server, block.prompts, block.clients)
    seconds = time.perf_counter() - start
    requests, responses = (list(column) for column in zip(*answers, strict=True))
    return _Answers(requests, responses, [seconds], [(before, await _metrics(server))])


async def _metrics(server: Server) -> str:
    import httpx2

    try:
        return await server.metrics()
    except (httpx2.HTTPError, TimeoutError) as error:
        raise InputError(why_silent(error, server.facts.url)) from None


async def _block(server: Server, prompts: Sequence[Prompt], clients: int) -> list[tuple[Request, Chunk]]:
    """Ask all prompts, so many at the same time; answers in the order of the prompts."""
    import httpx2

    waiting = iter(enumerate(prompts))
    answers: dict[int, tuple[Request, Chunk]] = {}

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


def _tokens_of_others(answers: _Answers, k: int) -> int:
    """Tokens that /metrics counts beside those of these requests; 0 if it does not tell.

    Metrics lag behind by a step or so: a few tokens of a request are no one else's.
    """
    counted = 0
    for before, after in answers.scrapes:
        with suppress(InputError):
            counted += max((output_tokens(after) or 0) - (output_tokens(before) or 0), 0)
    own = sum(request.output_tokens for request in answers.requests)
    return counted - own if counted > own + LAG * (k + 1) * len(answers.requests) else 0


def _counts(server: Server, answers: _Answers) -> tuple[Counters | None, list[str]]:
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
        return None, [f"no acceptance by position ({'; '.join(remarks)})"]
    return counters, remarks
