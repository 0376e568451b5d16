"""120 hostile servers, addresses and options: each ends in a line, or in a benchmark that doctor reads, in its time."""

from __future__ import annotations

import gzip
import json
import resource
import signal
import socket
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from specsim.servers import client
from specsim.servers.document import read_bench
from tests.support.commands import Result, assert_refused, call
from tests.support.http_server import Answer, answer, serving, stream

LIMIT_S = 60  # of a benchmark of three short responses, on a busy machine
PATH = "/v1/completions"
HEAD = b"HTTP/1.1 200 OK\r\n"
TEXT = {"choices": [{"index": 0, "text": "a"}]}
LAST = {"choices": [], "usage": {"prompt_tokens": 28, "completion_tokens": 12}}
DEEP = "[" * 100_000


def event(document: Any) -> str:
    return f"data: {document if isinstance(document, str) else json.dumps(document)}\n\n"


def events(*documents: Any) -> Answer:
    return stream([*map(event, documents), "data: [DONE]\n\n"])


def usage(**values: Any) -> Answer:
    return events(TEXT, TEXT, LAST | {"usage": LAST["usage"] | values})


def drafts(**values: Any) -> Answer:
    return events(TEXT, TEXT, LAST | {"metrics": {"speculative_decoding": values}})


CHUNKS: dict[str, tuple[Answer, str]] = {  # of a response: what is sent, and a part of the error
    **{
        f"completion_tokens {value!r:.20}": (usage(completion_tokens=value), "streamed chunk is")
        for value in (None, "many", float("nan"), float("inf"), [1], 1e300, 10**30, -3, 2**62, True, 1.5)
    },
    **{f"prompt_tokens {value}": (usage(prompt_tokens=value), "prompt_tokens") for value in ("x", [1], -1)},
    "cached_tokens NaN": (usage(prompt_tokens_details={"cached_tokens": float("nan")}), "not a finite number"),
    **{
        f"prompt_tokens_details {value}": (usage(prompt_tokens_details=value), "prompt_tokens_details")
        for value in ([1], "x", {"cached_tokens": "x"})
    },
    **{
        f"choices {value}": (events(TEXT, {"choices": value}, LAST), "choices")
        for value in ("x", ["x"], 5, [None], [{"delta": "x"}], [{"text": 5}], [{"finish_reason": {}}])
    },
    "metrics [1]": (events(TEXT, LAST | {"metrics": [1]}), "metrics"),
    "num_draft_tokens [1]": (drafts(num_draft_tokens=[1]), "num_draft_tokens"),
    "more accepted than drafted": (
        drafts(num_spec_steps=5, num_draft_tokens=5, num_accepted_draft_tokens=9), "9 of 5 drafted tokens"
    ),
    "rounds without tokens": (drafts(num_spec_steps=10**15, num_draft_tokens=10**15), "more than the request's 12"),
    "nested chunk": (events(DEEP), "nested deeper than 50"),
    "nested objects": (events('{"a":' * 100_000), "nested deeper than 50"),
    "no JSON": (events("{"), "not valid JSON"),
    "a list": (events([1]), "Expected `object`"),
    "no UTF-8": (events('{"choices": "\udcff"}'), "choices"),
    "repeated key": (events('{"choices": [], "choices": []}'), "is repeated"),
    "an error": (events(TEXT, {"error": {"message": "out of\x1b[31m memory"}}), "answers {'message': 'out of"),
    "no usage": (events(TEXT), "sends no usage counts"),
}  # fmt: skip


def endless(head: bytes, part: bytes, pause_s: float = 0.0) -> Callable[[socket.socket], None]:
    def send(connection: socket.socket) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(part)
            time.sleep(pause_s)

    return send


def hang(connection: socket.socket) -> None:
    connection.recv(1)


BOMB = gzip.compress(bytes(100 << 20))
GZIP = "Content-Encoding: gzip"
RESPONSES: dict[str, tuple[Answer, str]] = {
    "404": (answer("none", "404 Not Found"), "answers 404"),
    "500 and escape codes": (answer("<b>\x1b[31m</b>" * 999, "500 Oops"), "answers 500"),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", "answers 204"),
    "redirect": (answer("", "302 Found", "Location: http://127.0.0.1:9/"), "answers 302"),
    "endless redirects": (answer("", "301 Moved", f"Location: {PATH}"), "answers 301"),
    "401": (answer("", "401 Unauthorized", "WWW-Authenticate: Basic"), "answers 401"),
    "closed": (b"", "RemoteProtocolError"),
    "no HTTP": (b"SSH-2.0-OpenSSH\r\n", "RemoteProtocolError"),
    "other protocol": (b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", ""),
    "long header": (HEAD + b"X: " + b"x" * (1 << 20), "RemoteProtocolError"),
    "cut body": (HEAD + b"Content-Length: 99\r\n\r\ndata: ", "RemoteProtocolError"),
    "negative length": (HEAD + b"Content-Length: -1\r\n\r\n", "RemoteProtocolError"),
    "two lengths": (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nx", "RemoteProtocolError"),
    "no chunk": (HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", "RemoteProtocolError"),
    "cut chunk": (HEAD + b"Transfer-Encoding: chunked\r\n\r\nff\r\nabc", "RemoteProtocolError"),
    "empty": (answer(""), "broke off a response"),
    "broken off": (stream([event(TEXT)]), "broke off a response"),
    "HTML": (answer("<html>"), "broke off a response"),
    "gzip that is none": (answer("x", "200 OK", GZIP), "answers in 'gzip', which was not asked for"),
    "gzip bomb": (answer(BOMB, "200 OK", GZIP), "answers in 'gzip'"),
    "deflate bomb": (answer(zlib.compress(bytes(9 << 20)), "200 OK", "Content-Encoding: deflate, br"), "deflate"),
    "endless line": (endless(HEAD + b"\r\n", b"x" * 65536), "more than 16 MiB"),
    "endless chunks": (endless(HEAD + b"\r\n", event(TEXT).encode() * 500), ""),
    "endless error": (endless(b"HTTP/1.1 500 Oops\r\n\r\n", b"x" * 65536), "more than 16 MiB"),
    "a byte at a time": (endless(HEAD + b"\r\n", b"d", 0.1), "no prompt was answered by all servers in 0.02 minutes"),
    "100 Continue": (endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"), "no prompt was answered"),
    "hangs": (hang, "no prompt was answered by all servers in 0.02 minutes"),
    "hangs in the stream": (endless(HEAD + b"\r\n" + event(TEXT).encode(), b"", 1.0), "no prompt was answered"),
}
PAGES: dict[str, tuple[str, Answer, str]] = {  # other paths
    "version hangs": ("/version", hang, "does not answer (TimeoutError)"),
    "version is nested": ("/version", answer(DEEP), "is no server of llamacpp, sglang, vllm"),
    "version is no text": ("/version", answer('{"version": [1]}'), "/version is malformed"),
    "models are nested": ("/v1/models", answer(DEEP), "/v1/models is malformed"),
    "model 5": ("/v1/models", answer('{"data": [{"id": 5}]}'), "Expected `str`, got `int`"),
    "no model": ("/v1/models", answer('{"data": []}'), "/v1/models is malformed"),
    "endless version": ("/version", endless(HEAD + b"\r\n", b"x" * 65536), "more than 16 MiB"),
    "metrics closed": ("/metrics", b"", "RemoteProtocolError"),
    "metrics cut": ("/metrics", HEAD + b"Content-Length: 99\r\n\r\nvllm", "RemoteProtocolError"),
    "metrics gzip": ("/metrics", answer("x", "200 OK", GZIP), "answers in 'gzip'"),
    "endless metrics": ("/metrics", endless(HEAD + b"\r\n", b"vllm:x 1\n" * 9999), "more than 16 MiB"),
    "metrics hang": ("/metrics", hang, "does not answer (TimeoutError)"),
}
NAME, OUTPUT = "vllm:spec_decode_num_", "vllm:generation_tokens_total"


def metrics(drafts: Any = 5, tokens: Any = 15, accepted: Any = 9, by_position: Any = (5, 2, 2), more: str = "") -> str:
    positions = "".join(
        f'{NAME}accepted_tokens_per_pos_total{{position="{place}"}} {value}\n'
        for place, value in enumerate(by_position)
    )
    return (
        f"{NAME}drafts_total {drafts}\n{NAME}draft_tokens_total {tokens}\n{NAME}accepted_tokens_total {accepted}\n"
        f"{positions}{more}"
    )


FINE = metrics()
COUNTERS: dict[str, tuple[str, str]] = {  # before and after a request of 12 tokens
    "equal": (FINE, FINE),
    "fall": (FINE, metrics(1, 3, 1, (1, 0, 0))),
    "one falls": (FINE, metrics(9, 27, 9, (4, 3, 2))),
    "vanish": (FINE, ""),
    "other engine": (FINE, FINE.replace("vllm:", "llamacpp:")),
    "two engines": ("", FINE + FINE.replace("vllm:", "llamacpp:")),
    "two models": ("", FINE.replace("total", 'total{model_name="a"}', 1) + FINE),
    "every line twice": ("", FINE + FINE),
    "10^15 rounds": ("", metrics(10**15, 3 * 10**15, 0, (0, 0, 0))),
    "beyond 2^53": ("", metrics(2**60, 2**61)),
    "many rounds": ("", metrics(5000, 15000, 90, (50, 20, 20))),
    "negative": ("", metrics(-5)),
    "NaN": ("", metrics("NaN")),
    "infinite": ("", metrics("+Inf")),
    "half": ("", metrics(5.5)),
    "no number": ("", metrics("five")),
    "more accepted than drafted": ("", metrics(5, 15, 90, (50, 20, 20))),
    "rising": ("", metrics(5, 15, 9, (2, 2, 5))),
    "sum of no positions": ("", metrics(5, 15, 99)),
    "no positions": ("", metrics(by_position=())),
    "position -1": ("", metrics(more=f'{NAME}accepted_tokens_per_pos_total{{position="-1"}} 1\n')),
    "position 70,000": ("", metrics(more=f'{NAME}accepted_tokens_per_pos_total{{position="70000"}} 1\n')),
    "position 60,000": ("", metrics(5, 300_000, 10, [*(5, 2, 2), *[0] * 59_997, 1])),
    "drafts of 9,999": ("", metrics(5, 49_995)),
    "none drafted": ("", metrics(0, 0, 0, (0, 0, 0))),
    "HTML": ("<html>", "<html>"),
    "binary": ("\0\x1b[31m" * 999, "\0" * 999),
    "of others": (
        metrics(0, 0, 0, (0, 0, 0), "vllm:generation_tokens_total 7\n"),
        FINE + "vllm:generation_tokens_total 9007\n",
    ),
}
ADDRESSES: dict[str, tuple[tuple[object, ...], str]] = {  # arguments, and a part of the error
    **{
        f"address {url!r:.20}": ((url,), "is not a server's address; write for example http://localhost:8000")
        for url in (
            "", "localhost:8000", "http://", "http://[::1", "http://127.0.0.1:99999", "http://127.0.0.1:-1",
            "http://a\0b", "ftp://127.0.0.1", "file:///etc/passwd", "//127.0.0.1", "http://" + "a" * 70_000,
            "user:SECRET@host",
        )
    },
    "closed port": (("http://user:SECRET@127.0.0.1:9/v1?key=SECRET#SECRET",), "http://127.0.0.1:9/v1 does not answer"),
    "no name": (("http://xn--/",), "does not answer"),
    "no such host": (("http://specsim.invalid",), "does not answer"),
    "concurrency 0": (("http://127.0.0.1:9", "--concurrency", 0), "concurrency"),
    "concurrency -1": (("http://127.0.0.1:9", "--concurrency", "1,-1"), "concurrency"),
    "concurrency x": (("http://127.0.0.1:9", "--concurrency", "1,x"), "concurrency"),
    "concurrency 100,000": (("http://127.0.0.1:9", "--concurrency", 100_000), "need as many prompts, not 240"),
    "minutes nan": (("http://127.0.0.1:9", "--minutes", "nan"), "minutes"),
    "minutes -1": (("http://127.0.0.1:9", "--minutes", -1), "minutes"),
    "requests 0": (("http://127.0.0.1:9", "--requests", 0), "requests"),
    "max-tokens 1": (("http://127.0.0.1:9", "--max-tokens", 1), "max-tokens"),
    "temperature nan": (("http://127.0.0.1:9", "--temperature", "nan"), "temperature"),
}  # fmt: skip


class TooLongError(BaseException):
    """Nothing catches it."""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """Raise TooLongError after so many seconds."""

    def stop(*_: object) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def bench(tmp_path: Path) -> Callable[..., Result]:
    """Run the command within its time and memory, and without leftovers."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "bench.json"
    prompts.write_text('{"prompt": [596, 534, 199]}\n')

    def run(url: str, *options: object) -> Result:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with within(LIMIT_S):
            result = call("specsim", "bench", url, "--out", out, *options)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 200 << 10  # KiB
        assert sorted(tmp_path.iterdir()) == sorted([prompts, *[out] * (result.code == 0)])
        assert "SECRET" not in result.err + result.out and "\x1b" not in result.err + result.out
        return result

    return run


def test_there_are_120() -> None:
    assert len(CHUNKS) + len(RESPONSES) + len(PAGES) + len(COUNTERS) + len(ADDRESSES) >= 120


@pytest.mark.parametrize("case", CHUNKS | RESPONSES | PAGES)
def test_a_server_is_refused_in_a_line(
    case: str, bench: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, page, error = PAGES[case] if case in PAGES else (PATH, *(CHUNKS | RESPONSES)[case])
    waits = (
        not error or "Timeout" in error or "no prompt was answered" in error
    )  # others may take long on a busy machine
    if waits:
        monkeypatch.setattr(client, "PAGE_S", 1.0)
    with serving("vllm", {path: page}) as server:
        result = bench(server.url, "--prompts", tmp_path / "prompts.jsonl", "--minutes", 0.02 if waits else 0.5)
        assert_refused(result, server.url if "minutes" not in result.err else "", error)


@pytest.mark.parametrize("case", COUNTERS)
def test_counters_that_cannot_be_give_no_acceptance(case: str, bench: Callable[..., Result], tmp_path: Path) -> None:
    """Responses that do not count themselves, as vLLM's by default."""
    before, after = COUNTERS[case]
    with serving("vllm", {PATH: events(*[TEXT] * 12, LAST)}) as server:
        server.metrics = iter([before, after])  # type: ignore[assignment]
        result = bench(server.url, "--prompts", tmp_path / "prompts.jsonl")
    assert result.code == 0 and result.err == "", result
    (arm,) = read_bench(tmp_path / "bench.json").arms
    fits = case == "of others"
    assert (arm.drafted is not None) == (case == "of others"), result.out
    assert fits or "no acceptance by position" in result.out
    assert 1 <= arm.tokens_per_round <= 12
    checked = call("specsim", "doctor", "--from", tmp_path / "bench.json")
    if case == "of others":
        assert "not valid: others used the server: the speculative server counts 8,988 more tokens" in result.out
        assert checked.out.splitlines()[-1].startswith("the benchmark is not valid: others used the server")
    else:
        assert_refused(checked, "told no acceptance by position")


@pytest.mark.parametrize("case", ADDRESSES)
def test_an_address_or_option_is_refused_in_a_line(case: str, bench: Callable[..., Result]) -> None:
    arguments, error = ADDRESSES[case]
    assert_refused(bench(*arguments), error)
