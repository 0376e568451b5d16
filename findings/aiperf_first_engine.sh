#!/usr/bin/env bash
# engine: AIPerf
# version: 0.13.0
# date: 2026-11-29
# finding: speed-bench-report takes acceptance length and rate from the first engine in the metrics alone: for vLLM with data
#   parallelism, one series per engine, the other engines' rounds are left out, and no note says so.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q aiperf==0.13.0 transformers==5.24.0
cat > find.py <<'EOF'
import csv
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

K, ROUNDS, REQUESTS = 3, 8, 12
ACCEPTED = 0, K  # drafted tokens that each engine's rounds accept
finished = [0, 0]  # requests of each engine, which take turns
NAMES = ("num_drafts", ROUNDS, ROUNDS), ("num_draft_tokens", K * ROUNDS, K * ROUNDS)
NAMES += (("num_accepted_tokens", *(ROUNDS * accepted for accepted in ACCEPTED)),)


class Server(BaseHTTPRequestHandler):
    """Two engines behind one address, with vLLM's counters of drafts, which have a label for the engine."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def reply(self, kind, text):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        lines = []
        for name, *per_request in NAMES:
            lines.append(f"# TYPE vllm:spec_decode_{name}_total counter")
            for engine in (0, 1):
                labels = f'engine="{engine}",model_name="m"'
                lines.append(f"vllm:spec_decode_{name}_total{{{labels}}} {float(finished[engine] * per_request[engine])}")
        self.reply("text/plain; version=0.0.4", "\n".join(lines) + "\n")

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        engine = 0 if finished[0] == finished[1] else 1
        size = ACCEPTED[engine] + 1
        deltas = [{"choices": [{"index": 0, "delta": {"content": " word" * size}}]} for _ in range(ROUNDS)]
        usage = {"prompt_tokens": 3, "completion_tokens": size * ROUNDS, "total_tokens": 3 + size * ROUNDS}
        chunks = [{"id": "0", "object": "chat.completion.chunk", "model": "m", "created": 0, **delta} for delta in deltas]
        chunks.append(chunks[0] | {"choices": [], "usage": usage})
        finished[engine] += 1
        self.reply("text/event-stream", "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n")


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()
words = Tokenizer(models.WordLevel({"word": 0, "?": 1}, unk_token="?"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", bos_token="?", eos_token="?").save_pretrained("tokenizer")
with Path("qualitative.jsonl").open("w") as file:
    for row in range(REQUESTS):
        messages = [{"role": "user", "content": f"Say {row}"}]
        file.write(json.dumps({"question_id": f"{row:032x}", "category": "coding", "messages": messages}) + "\n")
target = f"http://127.0.0.1:{server.server_port}"
aiperf = str(Path(sys.executable).with_name("aiperf"))
command = [aiperf, "profile", "--model", "m", "--url", target, "--endpoint-type", "chat", "--streaming", "--concurrency", "1"]
command += ["--custom-dataset-type", "speed_bench_coding", "--input-file", "qualitative.jsonl", "--ui", "none"]
command += ["--tokenizer", str(Path("tokenizer").resolve()), "--use-server-token-count"]
command += ["--request-count", str(REQUESTS), "--artifact-dir", "runs/one"]
subprocess.run(command, check=True, capture_output=True)
assert finished == [REQUESTS // 2] * 2


def reported(metric):
    command = [aiperf, "speed-bench-report", "runs", "--metric", metric, "--format", "csv"]
    subprocess.run(command, check=True, capture_output=True)
    return float(next(csv.DictReader(Path("speed_bench_report.csv").open()))["coding"])


length, rate = reported("accept_length"), reported("accept_rate")
series = json.loads(Path("runs", "one", "server_metrics_export.json").read_text())["metrics"]
totals = [[one["stats"]["total"] for one in series[f"vllm:spec_decode_{name}"]["series"]] for name, *_ in NAMES]
drafts, drafted, accepted = totals
print(f"AIPerf 0.13.0, {REQUESTS} requests to two engines in turn, K = {K}: one accepts nothing, the other every drafted token")
print(f"its own export of the server's metrics: drafts {drafts}, drafted tokens {drafted}, accepted tokens {accepted}")
print(f"expected: acceptance length {1 + sum(accepted) / sum(drafts):.2f}, acceptance rate {sum(accepted) / sum(drafted):.2f}")
print(f"seen: acceptance length {length:.2f}, acceptance rate {rate:.2f}, the first engine's")
as_it_was = sum(drafts) == ROUNDS * REQUESTS and accepted[1] > 0 and (length, rate) == (1.0, 0.0)
sys.exit(0 if as_it_was else "the behaviour has changed")
EOF
venv/bin/python find.py
