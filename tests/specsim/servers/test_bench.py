"""`specsim bench` against a server that replays what vLLM 0.32 and llama.cpp 2026.10 answered."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from specsim.acceptance.sources import Counters
from specsim.io.examples import TASKS
from specsim.servers import client
from specsim.servers.bench import bench
from specsim.servers.benchmark_files import read_benchmark
from specsim.servers.client import read_server
from specsim.servers.document import SPECULATIVE, read_bench
from specsim.servers.prompts import read_prompts
from tests.support.checks import refusal
from tests.support.commands import assert_refused, call, json_of
from tests.support.http_server import serving

Replaying = Callable[[str], tuple[str, list[dict[str, Any]]]]
# Of the recorded response and of the metrics before and after it, read off by hand: version, output tokens, pieces,
# rounds, drafted and accepted tokens, counters by position.
RECORDED = {
    "vllm": ("0.32.0", 12, 6, 5, 15, 9, [5, 5, 5], [5, 2, 2]),
    "llamacpp": ("b0-unknown", 12, 12, None, 15, 7, [3, 3, 3, 3, 3], [3, 1, 1, 1, 1]),
}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": [596, 534, 199]}\n')
    return path


@pytest.mark.parametrize("engine", RECORDED)
def test_counts_are_those_of_the_response_and_the_metrics(engine: str, replaying: Replaying, prompts: Path) -> None:
    version, tokens, deltas, rounds, drafted, accepted, by_depth, passed = RECORDED[engine]
    url, asked = replaying(engine)
    measured = bench(url, prompts=prompts, max_tokens=12)
    facts, (arm,) = measured.speculative, measured.arms
    assert (facts.engine, facts.version, facts.model, facts.draft_tokens) == (
        engine, version, "lab/target", len(by_depth)
    )  # fmt: skip
    (request,) = arm.requests
    assert (request.output_tokens, request.deltas, request.finish) == (tokens, deltas, "length")
    assert (request.rounds, request.drafted, request.accepted) == (rounds, drafted, accepted)
    assert (arm.drafted, arm.accepted) == (by_depth, passed) and measured.notes == []
    assert len(asked) == 3 and all(body["prompt"] == [596, 534, 199] for body in asked)  # two to warm up
    assert all(body["max_tokens"] == 12 and body["stream_options"] == {"include_usage": True} for body in asked)


def test_metrics_that_count_other_clients_are_noticed(replaying: Replaying, prompts: Path) -> None:
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    url, _ = replaying("vllm")
    measured = bench(url, prompts=prompts, concurrency=(2,))  # the recorded metrics count a single request
    assert measured.notes == [
        "concurrency 2: the server drafted 15 tokens, but 30 for these requests: others used it as well"
    ]


def test_too_few_prompts_for_all_concurrencies_are_noticed(replaying: Replaying, prompts: Path) -> None:
    prompts.write_text("".join(f'{{"prompt": "{number}"}}\n' for number in range(7)))
    url, asked = replaying("vllm")
    measured = bench(url, prompts=prompts, concurrency=(1, 2), requests=4)
    assert "11 prompts are needed and 7 given, so some repeat at another concurrency" in measured.notes
    assert [len(arm.requests) for arm in measured.arms] == [4, 7]
    assert len(asked) == 2 * 1 + 4 + 2 * 2 + 7  # two of each client to warm up


def test_arms_take_turns_and_are_paired_by_prompt(replaying: Replaying, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"text {number}"}) + "\n" for number in range(12)))
    (url, asked), (base, base_asked) = replaying("vllm"), replaying("vllm")
    out, records = tmp_path / "bench.json", tmp_path / "records"
    options = ("--baseline", base, "--prompts", prompts, "--requests", 8, "--out", out, "--records", records)
    document = json_of(call("specsim", "bench", url, *options, "--json"))
    measured = read_bench(out)
    assert measured.as_dict() == document
    texts = [body["prompt"] for body in asked[2:]]  # behind the warm-up
    assert len(set(texts)) == 8
    assert [body["prompt"] for body in base_asked[2:]] == [text for text in texts for _ in range(2)]
    assert measured.speedup(1) is not None and measured.null(1) is not None
    arm = measured.arm(SPECULATIVE, 1)
    again = read_benchmark(records / "speculative-1.json", SPECULATIVE)
    assert arm is not None and again.token_s == pytest.approx(arm.token_s) and again.concurrency == 1
    assert again.tokens_per_delta == pytest.approx(12 / 6)


def test_the_tasks_are_chats_unless_asked_for_as_texts(replaying: Replaying) -> None:
    questions = [json.loads(line)["turns"][0] for line in TASKS.read_text().splitlines()]
    for completions, key in ((False, "messages"), (True, "prompt")):
        url, asked = replaying("vllm")
        bench(url, requests=1, completions=completions)
        contents = [body[key][0]["content"] if key == "messages" else body[key] for body in asked]
        assert len(set(contents)) == len(contents) == 6 and set(contents) < set(questions)


@pytest.mark.parametrize(("engine", "counts"), [("vllm", (1633, [1034, 659, 479])), ("llamacpp", (84, [58, 46, 38]))])
def test_advise_asks_a_running_server(engine: str, counts: tuple[int, list[int]], replaying: Replaying) -> None:
    """The counts of its first recorded scrape."""
    url, _ = replaying(engine)
    reading = read_server(url)
    assert isinstance(reading.source, Counters) and reading.name == url and reading.kind == "prometheus"
    rounds, accepted = counts
    assert reading.source.drafted[0] == rounds and reading.source.accepted[:3].tolist() == accepted
    cost = ("--cost", "vllm-llama3.1-8b-eagle-h100")
    assert f"{url} read as prometheus" in call("specsim", "advise", url, *cost).out
    assert_refused(call("specsim", "advise", "http://127.0.0.1:9", *cost), "http://127.0.0.1:9 does not answer")


def test_without_metrics_sglangs_server_info_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    info = {"speculative_num_steps": 3, "internal_states": [{"avg_spec_accept_length": 2.5}]}

    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, json=info) if request.url.path == "/server_info" else httpx2.Response(404)

    monkeypatch.setattr(
        client, "connect", lambda url: httpx2.AsyncClient(base_url=url, transport=httpx2.MockTransport(answer))
    )
    reading = read_server("http://localhost:30000")
    assert reading.kind == "sglang-bench" and reading.setup.draft_tokens == 3


def test_a_password_is_sent_and_not_kept(prompts: Path) -> None:
    with serving() as server:
        url = server.url.replace("http://", "http://user:SECRET@")
        assert bench(url, prompts=prompts).speculative.url == server.url
        assert server.credentials == {"Basic dXNlcjpTRUNSRVQ="}  # user:SECRET in base 64
        assert read_server(url).name == server.url
        assert "SECRET" not in str(call("specsim", "advise", url, "--cost", "vllm-llama3.1-8b-eagle-h100"))


def test_without_httpx2_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx2", None)
    assert_refused(call("specsim", "bench", "http://127.0.0.1:9"), "pip install -c constraints.txt '.[servers]'")


def test_what_is_refused(tmp_path: Path, replaying: Replaying) -> None:
    path = tmp_path / "prompts.jsonl"
    for line in ('{"id": 1}', '{"prompt": []}', '{"messages": [{"role": "user"}]}', "3"):
        path.write_text('{"prompt": "a"}\n' + line)
        refusal(lambda: read_prompts(path), "prompts.jsonl:2 is not a prompt; give")
    path.write_text('{"prompt": "a"}')
    for url, error in (
        ("localhost:8000", "is not a server's address; write for example http://localhost:8000"),
        ("http://127.0.0.1:9", "does not answer"),
    ):
        assert_refused(call("specsim", "bench", url), error)
    url, _ = replaying("vllm")
    assert_refused(call("specsim", "bench", url, "--concurrency", "0"), "concurrency")


def test_a_notebook_whose_event_loop_runs_measures_as_well(replaying: Replaying, prompts: Path) -> None:
    url, asked = replaying("vllm")

    async def cell() -> int:
        return bench(url, prompts=prompts, max_tokens=12).arms[0].requests[0].output_tokens

    assert asyncio.run(cell()) == 12 and len(asked) == 3
