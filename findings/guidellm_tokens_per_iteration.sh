#!/usr/bin/env bash
# engine: guidellm
# version: 0.8.1
# date: 2026-11-29
# finding: Output tokens per iteration are no distribution: each chunk has its answer's mean, and the first one 1, though usage
#   says it for each. Where several tokens come first they exceed K + 1, and an answer in one chunk has an ITL of 0.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q guidellm==0.8.1 torch==2.14.1 datasets==5.2.0 transformers==5.24.0
cat > find.py <<'EOF'
import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

K, GAP, REQUESTS = 3, 0.04, 6
UNEVEN, FULL, WHOLE = [1, *(K + 1, 1, 1, 1) * 3], [K + 1, K + 1], [2 * (K + 1)]  # tokens in the chunks of an answer
plans = []  # for one request after the other


class Server(BaseHTTPRequestHandler):
    """Streams words, several in a chunk, and says in each chunk how many tokens there were."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def send(self, text):
        self.wfile.write(f"{len(text):x}\r\n{text}\r\n".encode())

    def event(self, sent, *choices):
        usage = {"prompt_tokens": 5, "completion_tokens": sent, "total_tokens": 5 + sent}
        chunk = {"id": "0", "object": "text_completion", "created": 0, "model": "m", "choices": choices, "usage": usage}
        self.send(f"data: {json.dumps(chunk)}\n\n")

    def do_GET(self):
        body = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        sizes, sent = plans.pop(0), 0
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for size in sizes:
            time.sleep(GAP)
            sent += size
            self.event(sent, {"index": 0, "text": " word" * size, "finish_reason": "length" if sent == sum(sizes) else None})
        self.event(sent)
        self.send("data: [DONE]\n\n")
        self.send("")


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
server.handle_error = lambda *_: None  # the client may reset connections
threading.Thread(target=server.serve_forever, daemon=True).start()
Path("data.jsonl").write_text((json.dumps({"prompt": "a prompt of five tokens"}) + "\n") * REQUESTS)
target = f"http://127.0.0.1:{server.server_port}"
backend = f"kind=openai_http,target={target},model=m,request_format=/v1/completions"
command = [str(Path(sys.executable).with_name("guidellm")), "run", "--backend", backend, "--profile", "kind=synchronous"]
command += ["--constraint", f"kind=max_requests,count={REQUESTS}", "--data", "kind=json_file,path=data.jsonl"]
command += ["--output", "kind=json,path=out.json", "--disable-console"]


def measured(*answers):
    """Tokens per iteration (median, p95) and ITL (mean, median) of answers in such chunks."""
    plans[:] = list(answers) * REQUESTS
    subprocess.run(command, check=True, capture_output=True)
    metrics = json.loads(Path("out.json").read_text())["benchmarks"][0]["metrics"]
    names = "output_tokens_per_iteration", "inter_token_latency_ms", "output_token_count"
    size, itl, count = (metrics[name]["successful"] for name in names)
    assert count["mean"] == sum(map(sum, answers)) / len(answers)
    return size["median"], size["percentiles"]["p95"], itl["mean"], itl["median"]


uneven, full, mixed = measured(UNEVEN), measured(FULL), measured(FULL, WHOLE)
print(f"guidellm 0.8.1, K = {K}, chunks {1000 * GAP:.0f} ms apart, usage in each of them")
print(f"expected: chunks of {UNEVEN} tokens: tokens per iteration, median 1, p95 {K + 1}")
print(f"seen: median {uneven[0]:.1f}, p95 {uneven[1]:.1f}")
print(f"expected: chunks of {FULL}: at most {K + 1} tokens per iteration; ITL {1000 * GAP / (K + 1):.0f} ms")
print(f"seen: p95 {full[1]:.1f} tokens per iteration; ITL {full[2]:.1f} ms, as of {sum(FULL) - 1} tokens")
print(f"expected: {FULL} and {WHOLE} in turn, of which the latter tells nothing of ITL: the same ITL")
print(f"seen: ITL mean {mixed[2]:.1f} ms, median {mixed[3]:.1f} ms")
as_it_was = uneven[0] == uneven[1] > 1.5 and full[1] == sum(FULL) - 1 and full[2] < 1000 * GAP / (K + 1) and mixed[3] == 0
sys.exit(0 if as_it_was else "the behaviour has changed")
EOF
venv/bin/python find.py
