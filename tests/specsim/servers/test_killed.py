"""`specsim bench` that is killed at any moment ends, started again, with the answer of an undisturbed run."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specsim.io.files import working_in
from specsim.servers.document import read_bench
from tests.support.commands import assert_refused, call
from tests.support.http_server import HttpServer, answer, serving

KILLS = 20
PROMPTS = 8
METRICS = "vllm:generation_tokens_total 0\n"  # no counters of speculation: the responses count, whoever asked before


def start(server: HttpServer, base: HttpServer, prompts: Path, out: Path) -> subprocess.Popen[bytes]:
    options = ["--prompts", str(prompts), "--requests", str(PROMPTS), "--out", str(out)]
    command = [sys.executable, "-m", "specsim", "bench", server.url, "--baseline", base.url, *options]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def answer_of(out: Path) -> Any:
    """All of a benchmark but its times."""
    bench = read_bench(out)
    arms = [
        (arm.name, arm.drafted, arm.accepted, [(r.prompt, r.output_tokens, r.rounds) for r in arm.requests])
        for arm in bench.arms
    ]
    return bench.speculative, bench.notes, arms


@pytest.mark.slow
def test_a_benchmark_that_was_killed_goes_on(tmp_path: Path) -> None:
    prompts, out, rng = tmp_path / "prompts.jsonl", tmp_path / "work" / "bench.json", np.random.default_rng(62)
    prompts.write_text("".join(f'{{"prompt": "text {number}"}}\n' for number in range(PROMPTS)))
    out.parent.mkdir()
    with serving() as server, serving() as base:
        server.pages["/metrics"] = base.pages["/metrics"] = answer(METRICS)
        assert start(server, base, prompts, out).wait() == 0
        expected, whole = answer_of(out), len(server.asked) + len(base.asked)
        kills = most_asked = 0
        while kills < KILLS:
            out.unlink()
            server.asked.clear()
            base.asked.clear()
            process, moment = start(server, base, prompts, out), rng.integers(0, whole, endpoint=True)
            while len(server.asked) + len(base.asked) < moment and process.poll() is None:
                time.sleep(0.001)
            time.sleep(float(rng.uniform(0, 0.2)))
            process.kill()
            if process.wait() == 0 or out.exists():
                continue
            kills += 1
            second = start(server, base, prompts, out)
            assert second.wait() == 0
            assert answer_of(out) == expected and list(out.parent.iterdir()) == [out]
            most_asked = max(most_asked, len(server.asked) + len(base.asked))
        assert most_asked <= whole + 4 + 3  # two of each to warm up again, and the block that was being answered
    print(f"\n| bench | SIGKILL | {kills} | {kills} | {most_asked - whole} requests of {whole} |")


def test_two_writers_of_one_file(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    with serving() as server, working_in(tmp_path / "bench.json.unfinished"):
        assert_refused(call("specsim", "bench", server.url, "--out", out), "another process works in")
        assert not server.asked
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("harm", ["{", '{"settings": 1}', "\0" * 99, '{"clients": 1}\n{"clients": "x"}'])
def test_a_damaged_journal_is_refused(harm: str, tmp_path: Path) -> None:
    journal = tmp_path / "bench.json.unfinished" / "blocks.jsonl"
    journal.parent.mkdir()
    journal.write_text(harm + "\n")
    with serving() as server:
        assert_refused(call("specsim", "bench", server.url, "--out", tmp_path / "bench.json"), journal)
