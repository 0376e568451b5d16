"""A small HTTP server that answers as real servers did."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

RECORDED = Path(__file__).parent / "recorded"  # pages and a streamed response of vLLM 0.32 and llama.cpp 2026.10


@pytest.fixture
def replaying() -> Iterator[Callable[[str], tuple[str, list[dict[str, Any]]]]]:
    """Start a server that replays an engine's recording; returns its address, and what it is asked."""
    servers = []

    def start(engine: str) -> tuple[str, list[dict[str, Any]]]:
        recording = json.loads((RECORDED / f"{engine}.json").read_text())
        metrics, asked = cycle(recording["metrics"]), []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                page = recording["pages"].get(self.path)
                text = next(metrics) if self.path == "/metrics" else json.dumps(page)
                self._send(404 if text == "null" else 200, text)

            def do_POST(self) -> None:
                asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self._send(200, recording["stream"])

            def _send(self, code: int, text: str) -> None:
                self.send_response(code)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}", asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
