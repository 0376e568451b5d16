"""A small local HTTP server that answers as real servers did, or as broken ones would."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from pathlib import Path
from threading import Thread
from typing import Any

RECORDED = Path(__file__).parents[1] / "specsim" / "servers" / "recorded"  # of vLLM 0.32 and llama.cpp 2026.10
PAUSE_S = 0.005  # between the events of a stream, which a server does not send at once
Answer = bytes | Callable[[socket.socket], None]


def answer(text: str | bytes, status: str = "200 OK", *headers: str) -> bytes:
    """A whole response."""
    body = text.encode() if isinstance(text, str) else text
    return "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]).encode() + body


def stream(events: Sequence[str], pause_s: float = PAUSE_S) -> Callable[[socket.socket], None]:
    """A response whose events come one after the other."""

    def send(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        for event in events:
            connection.sendall(event.encode(errors="surrogateescape"))
            time.sleep(pause_s)

    return send


class HttpServer:
    """Answers by path; what it is asked is kept.

    Without answers of its own it replays an engine's recording: its pages, its metrics in turns, and its stream.
    """

    def __init__(self, engine: str = "vllm", answers: dict[str, Answer] | None = None) -> None:
        recording = json.loads((RECORDED / f"{engine}.json").read_text())
        self.events = re.findall(r".*?\n\n", recording["stream"], re.DOTALL)
        self.asked: list[dict[str, Any]] = []
        self.credentials: set[str | None] = set()
        self.pages: dict[str, Answer] = {path: answer(json.dumps(page)) for path, page in recording["pages"].items()}
        self.pages |= {"/v1/completions": stream(self.events), "/v1/chat/completions": stream(self.events)}
        self.pages |= answers or {}
        self.metrics = cycle(recording["metrics"])
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                Thread(target=self._serve, args=(self.socket.accept()[0],), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError), connection.makefile("rb") as file:
            line = file.readline().decode()
            if not line:  # the client was killed
                return
            path = line.split(" ")[1]
            headers = dict(line.decode().rstrip().split(": ", 1) for line in iter(file.readline, b"\r\n"))
            headers = {name.lower(): value for name, value in headers.items()}
            self.credentials.add(headers.get("authorization"))
            length = int(headers.get("content-length", 0))
            if length:
                self.asked.append(json.loads(file.read(length)))
            page = self.pages.get(path)
            if page is None:
                page = answer(next(self.metrics)) if path == "/metrics" else answer("none", "404 Not Found")
            if isinstance(page, bytes):
                connection.sendall(page)
            else:
                page(connection)

    def close(self) -> None:
        self.socket.close()


@contextlib.contextmanager
def serving(engine: str = "vllm", answers: dict[str, Answer] | None = None) -> Iterator[HttpServer]:
    """Run such a server."""
    server = HttpServer(engine, answers)
    try:
        yield server
    finally:
        server.close()
