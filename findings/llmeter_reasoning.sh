#!/usr/bin/env bash
# engine: LLMeter
# version: 0.2.0
# date: 2026-11-29
# finding: Chat completions of a reasoning model: TPOT divides the time of the visible text by the tokens of reasoning and text,
#   and TTFT waits for the text, in silence: a model that thinks long seems several times as fast as it decodes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q boto3==1.44.8 jmespath==1.1.0 tqdm==4.70.1 universal-pathlib==0.3.10 openai==3.57.0 httpx==0.28.1
venv/bin/pip install -q --no-deps llmeter==0.2.0
cat > find.py <<'EOF'
import asyncio
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from llmeter.endpoints import OpenAICompletionStreamEndpoint
from llmeter.runner import Runner

GAP, REASONING, VISIBLE, REQUESTS = 0.02, 40, 10, 3  # s between chunks of one token each, chunks, chunks, answers
field = None  # where the server puts its reasoning: vLLM and SGLang have `reasoning_content`, or `reasoning`


class Server(BaseHTTPRequestHandler):
    """Streams an answer, a token in a chunk: reasoning first, if there is a field for it, then visible text."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def event(self, text):
        text = f"data: {text}\n\n"
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        chunk = {"id": "0", "object": "chat.completion.chunk", "model": "m", "created": 0}
        total = REASONING + VISIBLE
        for number in range(total):
            time.sleep(GAP)
            delta = {field: "word "} if field and number < REASONING else {"content": "word "}
            self.event(json.dumps(chunk | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}))
        usage = {"prompt_tokens": 5, "completion_tokens": total, "total_tokens": 5 + total}
        if field:
            usage["completion_tokens_details"] = {"reasoning_tokens": REASONING}
        self.event(json.dumps(chunk | {"choices": [], "usage": usage}))
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
address = f"http://127.0.0.1:{server.server_port}/v1"
endpoint = OpenAICompletionStreamEndpoint("m", api_key="none", base_url=address)
payload = OpenAICompletionStreamEndpoint.create_payload("Say words", max_tokens=REASONING + VISIBLE)


def measured():
    """Medians of TTFT and TPOT, in ms, and the tokens of an answer."""
    result = asyncio.run(Runner(endpoint).run(payload=payload, n_requests=REQUESTS, clients=1))
    assert result.stats["failed_requests"] == 0
    middle = [1000 * result.stats[f"time_{name}-p50"] for name in ("to_first_token", "per_output_token")]
    return *middle, result.responses[0].num_tokens_output


plain = measured()
field = "reasoning_content"
thinking = measured()
field = "reasoning"
newer = measured()
total = REASONING + VISIBLE
print(f"LLMeter 0.2.0, {total} tokens, one every {1000 * GAP:.0f} ms; {REASONING} of them reasoning, or none")
print(f"expected: TPOT about {1000 * GAP:.0f} ms for both: the first token of either kind begins it, or visible tokens alone count")
print(f"seen: TPOT {plain[1]:.1f} ms without reasoning, {thinking[1]:.1f} ms with it ({newer[1]:.1f} ms in the newer field)")
print(f"seen: TTFT {plain[0]:.0f} ms without reasoning, {thinking[0]:.0f} ms with it")
as_it_was = all(row[2] == total and row[1] < plain[1] / 3 and row[0] > 900 * GAP * REASONING for row in (thinking, newer))
sys.exit(0 if as_it_was and plain[1] > 900 * GAP else "the behaviour has changed")
EOF
venv/bin/python find.py 2> log || {
    tail -n 20 log
    exit 1
}
