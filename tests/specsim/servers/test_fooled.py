"""What would fool a measurement is said: buffered streams, other servers, servers that die, too little data."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specsim.servers.doctor import doctor
from specsim.servers.document import BASELINE, SPECULATIVE, Bench, arrived_at_once, read_bench
from specsim.servers.traps import bench_traps
from tests.specsim.servers.test_doctor import HEALTHY, Truth, measured
from tests.support.checks import refusal
from tests.support.commands import Result, assert_refused, call
from tests.support.http_server import HttpServer, answer, serving, stream

PATH = "/v1/completions"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "text {number}"}}\n' for number in range(9)))
    return path


def run(server: HttpServer, base: HttpServer, prompts: Path, *options: object) -> Result:
    out = prompts.with_name("bench.json")
    return call(
        "specsim", "bench", server.url, "--baseline", base.url, "--prompts", prompts, "--requests", 6, "--out", out,
        *options,
    )  # fmt: skip


@pytest.mark.parametrize("burst", [100, 4])
def test_a_buffered_stream_gives_no_speedup(burst: int, prompts: Path) -> None:
    """All chunks in one piece after 20 ms, or some at a time, as a proxy sends them whose buffer is full."""
    with serving() as server, serving() as base:
        parts = ["".join(server.events[begin : begin + burst]) for begin in range(0, len(server.events), burst)]
        server.pages[PATH] = stream(["", *parts], pause_s=0.02)
        shown = run(server, base, prompts)
    assert shown.code == 0 and shown.out.startswith("not valid: buffered stream: "), shown
    result = read_bench(prompts.with_name("bench.json"))
    assert result.speedup(1) is None and result.null(1) is not None
    checked = call("specsim", "doctor", "--from", prompts.with_name("bench.json"))
    assert checked.out.splitlines()[-1].startswith("the benchmark is not valid: buffered stream"), checked


@pytest.mark.parametrize(
    ("times_s", "together"),
    [
        (10 + 0.005 * np.arange(12), 1),  # a long prompt, then a token every 5 ms
        (0.2 + 0.030 * np.repeat(np.arange(9), 4)[3:], 1),  # llama.cpp: a token, then the four of a round at once
        (0.005 + 0.0002 * np.arange(100), 1),  # a toy model
        (0.020 + 0.00008 * np.arange(12), 12),  # in one piece
        (np.repeat([0.5, 1.0, 1.5], 20) + 0.0001 * np.arange(60), 20),  # a buffer of 20 pieces
        ([], 0),
        ([0.3], 1),
    ],
)
def test_pieces_that_arrive_together(times_s: Sequence[float], together: int) -> None:
    assert arrived_at_once([*times_s], 0.0) == together


def test_a_single_prompt_has_no_interval(prompts: Path) -> None:
    prompts.write_text('{"prompt": "a"}\n')
    with serving() as server, serving() as base:
        assert run(server, base, prompts).code == 0
    out = prompts.with_name("bench.json")
    assert read_bench(out).speedup(1) is None
    shown = call("specsim", "doctor", "--from", out)
    assert shown.out.splitlines()[-1].startswith("not decidable: fewer than two prompts were answered by both"), shown


@pytest.mark.parametrize(
    ("change", "evidence"),
    [
        ({"model": "b/other"}, "differ in model target and other"),
        ({"engine": "sglang"}, "differ in engine vllm and sglang"),
        ({"version": "2"}, "differ in version 1 and 2"),
        ({"url": "http://server"}, "both are http://server"),
        ({"model": "/a/folder/target/"}, ""),
    ],
)
def test_a_baseline_of_another_server_is_said_first(change: dict[str, Any], evidence: str) -> None:
    bench = measured(HEALTHY, 3)
    assert bench.baseline is not None
    bench = replace(bench, baseline=replace(bench.baseline, **change))
    assert (evidence in bench_traps(bench)[0].evidence) and bench_traps(bench)[0].invalid == bool(evidence)
    assert repr(doctor(bench)).startswith("the benchmark is not valid: ") == bool(evidence)


def varied(bench: Bench, spread: float, slower: float, requests: int) -> Bench:
    """The same benchmark with fewer requests, whose seconds vary, and speculation so many times as slow."""
    rng = np.random.default_rng(1)
    arms = []
    for arm in bench.arms:
        factors = np.exp(spread * rng.standard_normal(requests)) * (slower if arm.name == SPECULATIVE else 1.0)
        some = [
            replace(r, decode_s=r.decode_s * float(f)) for r, f in zip(arm.requests[:requests], factors, strict=True)
        ]
        arms.append(replace(arm, requests=some, drafted=None, accepted=None))
        if arm.drafted:
            rounds, accepted = (sum(getattr(r, name) or 0 for r in some) for name in ("rounds", "accepted"))
            passed = [round(rounds * 0.75**i) for i in range(1, 4)]
            arms[-1] = replace(arms[-1], drafted=[rounds] * 3, accepted=passed)
            assert abs(sum(passed) / accepted - 1) < 0.2
    return replace(bench, arms=arms)


@pytest.mark.parametrize(
    ("spread", "slower", "requests", "verdict"),
    [
        (1.0, 1.0, 8, "not decidable: speedup .* give about --requests [0-9,]+"),
        (1.0, 3.0, 8, "not decidable: speedup .* measure on an idle machine, or more requests"),
        (0.01, 1.0, 40, "no cause found: the server is healthy"),
    ],
)
def test_the_last_line_says_no_more_than_its_interval(
    spread: float, slower: float, requests: int, verdict: str
) -> None:
    bench = varied(measured(Truth(rate=0.75), 3), spread, slower, requests)
    assert re.fullmatch(verdict, repr(doctor(bench))), repr(doctor(bench))


def test_others_on_the_baseline_are_noticed(prompts: Path) -> None:
    """Its metrics count tokens beyond the 12 of each response."""
    with serving() as server, serving() as base:
        counts = iter(range(0, 10**6, 500))
        base.metrics = (f"vllm:generation_tokens_total {next(counts)}\n" for _ in range(10**3))  # type: ignore[assignment]
        shown = run(server, base, prompts)
    line = "not valid: others used the server: the baseline server counts 2,928 more tokens than were sent here (72)"
    assert shown.out.startswith(line), shown.out


class Dying:
    """Answers so many requests more, then closes connections, or leaves them open."""

    def __init__(self, server: HttpServer, after: int, *, hangs: bool = False) -> None:
        self.left, self.send, self.hangs = after, stream(server.events), hangs

    def __call__(self, connection: socket.socket) -> None:
        self.left -= 1
        if self.left >= 0:
            self.send(connection)
        elif self.hangs:
            connection.recv(1)


def asked(server: HttpServer) -> list[str]:
    return [body["prompt"] for body in server.asked]


def test_a_server_that_dies_loses_nothing_and_the_same_command_goes_on(prompts: Path) -> None:
    """Two requests warm up, then the server answers 4 of 6 prompts; the fifth is asked again."""
    out = prompts.with_name("bench.json")
    with serving() as server, serving() as base:
        assert run(server, base, prompts, "--out", prompts.with_name("whole.json")).code == 0
        whole = asked(server)
        server.asked.clear()
        server.pages[PATH] = Dying(server, 6)
        ended = run(server, base, prompts)
        assert ended.code == 2 and ended.err.count("\n") == 1 and not out.exists(), ended
        assert "stopped answering (RemoteProtocolError); see its log (4 of 6 prompts were measured)" in ended.err
        assert "what was measured is kept in" in ended.err and ": 4 prompts of prompts.jsonl" in ended.out
        assert_refused(run(server, base, prompts, "--seed", 1), "other settings or prompts")
        server.pages["/version"], version = answer('{"version": "0.33"}'), server.pages["/version"]
        assert_refused(run(server, base, prompts), "a server that changed since")
        server.pages["/version"], server.pages[PATH] = version, stream(server.events)
        server.asked.clear()
        assert run(server, base, prompts).code == 0
        assert asked(server) == whole[:2] + whole[6:]  # warm-up, and the two that were missing
    results = read_bench(out), read_bench(prompts.with_name("whole.json"))
    for name in (SPECULATIVE, BASELINE):
        names = [[request.prompt for request in arm.requests] for arm in (each.arm(name, 1) for each in results) if arm]
        assert names[0] == names[1] and len(names[0]) == 6
    assert sorted(path.name for path in prompts.parent.iterdir()) == ["bench.json", "prompts.jsonl", "whole.json"]


def test_the_time_limit_holds_within_a_request(prompts: Path) -> None:
    """What was measured before is kept, as an answer."""
    with serving() as server, serving() as base:
        server.pages[PATH] = Dying(server, 5, hangs=True)
        shown = run(server, base, prompts, "--minutes", 0.1)
    assert shown.code == 0 and "note: stopped after 3 of 6 prompts, at the time limit" in shown.out, shown


def documents() -> dict[str, tuple[list[Any], Any]]:
    request = ["arms", 0, "requests", 0]
    first = measured(HEALTHY, 3).as_dict()["arms"][0]["requests"][0]
    return {
        "accepted 90 of 80": (["arms", 0, "drafted"], [80, 80, 80]),
        "accepted rises": (["arms", 0, "accepted"], [20, 30, 50]),
        "drafted rises": (["arms", 0, "drafted"], [2000, 2001, 2002]),
        "accepted is shorter": (["arms", 0, "accepted"], [3]),
        "negative counts": (["arms", 0, "accepted"], [-1, -1, -1]),
        "no accepted": (["arms", 0, "accepted"], None),
        "more rounds than tokens": (["arms", 0, "drafted"], [10**6] * 3),
        "decode_s": ([*request, "decode_s"], -0.15),
        "ttft_s": ([*request, "ttft_s"], -1),
        "output_tokens": ([*request, "output_tokens"], -3),
        "finish": ([*request, "finish"], {}),
        "prompt_tokens": ([*request, "prompt_tokens"], "x"),
        "rounds": ([*request, "rounds"], 10**15),
        "clients_s": (["arms", 0, "clients_s"], -1),
        "clients_s of 0": (["arms", 0, "clients_s"], 0),
        "concurrency": (["arms", 1, "concurrency"], 0),
        "another concurrency": (["arms", 1, "concurrency"], 2),
        "name": (["arms", 0, "name"], "baseline"),
        "no requests": (["arms", 1, "requests"], []),
        "single tokens": ([*request[:3]], [{**first, "output_tokens": 1, "rounds": 0, "accepted": 0}]),
        "no arms": (["arms"], []),
        "version": (["version"], 2),
        "draft_tokens": (["speculative", "draft_tokens"], -1),
        "draft_tokens of 100,000": (["speculative", "draft_tokens"], 100_000),
        "model": (["speculative", "model"], 5),
        "engine": (["speculative", "engine"], "other"),
        "unknown key": (["other"], 1),
    }


@pytest.mark.parametrize("case", documents())
def test_a_file_that_no_server_can_have_answered_is_refused(case: str, tmp_path: Path) -> None:
    path, (keys, value) = tmp_path / "bench.json", documents()[case]
    document = measured(HEALTHY, 3).as_dict()
    target = document
    for key in keys[:-1]:
        target = target[key]
    target[keys[-1]] = value
    path.write_text(json.dumps(document))
    refusal(lambda: read_bench(path), "bench.json")
    assert_refused(call("specsim", "doctor", "--from", path), path)
