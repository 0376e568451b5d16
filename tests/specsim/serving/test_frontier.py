"""Throughput against latency over draft lengths, rules and loads; on workers of which one dies; large traces."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest

from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID
from specsim.io.workers import Workers
from specsim.serving.arrivals import requests_of_trace
from specsim.serving.continuous import run_server
from specsim.serving.draft_length import ScheduledK
from specsim.serving.drafts import drafts_of
from specsim.serving.frontier import ServingFrontier, serve_frontier
from specsim.serving.latency import summarise_run
from specsim.trace.files import write_trace
from specsim.trace.trace import Trace
from tests.support.checks import refusal
from tests.support.commands import assert_refused, call, json_of
from tests.support.serving_costs import COST

COST_FILE = ("--cost", "specdecode-bench-llama3.1-8b-eagle-h100")


def small(depth: int = 3) -> Trace:
    return generate(IID(0.8), sequences=12, output_tokens=20, depth=depth, seed=2, prompt_tokens=10)


@pytest.fixture(scope="module")
def compared() -> ServingFrontier:
    return serve_frontier(small(), COST, ["turbospec", "sglang_adaptive"], users=[1, 4], tpot_ms=9.0)


def test_points_are_the_servers_own(compared: ServingFrontier) -> None:
    assert [(p.users, p.k, p.oracle) for p in compared.points[:7]] == [
        (1, 0, False), (1, 1, False), (1, 2, False), (1, 3, False), (1, None, False), (1, None, False), (1, None, True)
    ]  # fmt: skip
    sent = requests_of_trace(small(), 200)
    run = run_server(drafts_of(small(), ScheduledK({1: 2})), COST, sent, slots=4, users=4)
    point = next(p for p in compared.points if (p.users, p.k) == (4, 2))
    assert point.summary == summarise_run(run, tpot_bound_s=0.009)
    oracle = next(p for p in compared.points if p.users == 4 and p.oracle)
    assert point.slower_than_oracle == pytest.approx(oracle.summary.tokens_per_s / point.summary.tokens_per_s - 1)
    assert all(p.slower_than_oracle > 0 for p in compared.points if not p.oracle)


def test_the_frontier_is_what_no_other_point_beats(compared: ServingFrontier) -> None:
    real = [p for p in compared.points if not p.oracle]
    for point in real:
        beaten = any(p.summary.tokens_per_s > point.summary.tokens_per_s and p.p90_s < point.p90_s for p in real)
        assert point.on_frontier == (not beaten)
    assert any(p.on_frontier for p in real) and not all(p.on_frontier for p in real)


def test_the_best_keeps_the_limit_and_makes_the_schedule(compared: ServingFrontier) -> None:
    for users in (1, 4):
        here = [p for p in compared.points if p.users == users and not p.oracle]
        best, keeping = compared.best(users), [p for p in here if p.p90_s <= 0.009]
        if keeping:
            assert best.summary.tokens_per_s == max(p.summary.tokens_per_s for p in keeping)
        else:
            assert best.p90_s == min(p.p90_s for p in here)
    assert compared.schedule()[1] == compared.best(1, fixed=True).k
    assert len(compared.to_frame()) == 14 and compared.plot().axes[0].get_ylabel() == "output tokens per second"


def test_requests_may_have_limits_of_their_own() -> None:
    compared = serve_frontier(small(), COST, users=2, tpot_ms=[1e-3, 1e3], requests=100)
    shares = [p.summary.within for p in compared.points]
    assert shares == pytest.approx([0.5] * len(shares), abs=0.02)  # every second request's cannot be missed


def test_the_command_prints_what_engines_take(tmp_path: Path) -> None:
    write_trace(small(), tmp_path / "trace")
    args = ("serve", "frontier", tmp_path / "trace", *COST_FILE, "--users", "1,4", "--jobs", 1, "--rule", "turbospec")
    shown = call("specsim", *args, "--set", "turbospec.memory=0.9", "--figure", tmp_path / "f.svg")
    assert shown.code == 0 and (tmp_path / "f.svg").stat().st_size > 1000
    document = json_of(call("specsim", *args, "--json"))
    lengths = ",".join(f"{users}:{k}" for users, k in document["schedule"].items())
    assert f"schedule {lengths}\n" in shown.out and "turbospec" in shown.out and "vllm: " in shown.out
    assert_refused(call("specsim", *args, "--set", "memory=0.9"), "name the rule", "budget.memory=0.9")
    assert_refused(call("specsim", *args, "--set", "dspark.lag=0"), "settings of dspark", "as a rule")
    assert_refused(call("specsim", *args, "--figure", "f.txt"), ".svg")
    refusal(lambda: serve_frontier(small(), COST, users=[0]), "at least 1 user")
    assert json.dumps(document)


def test_rules_of_a_users_file_are_compared(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import dataclasses, specsim\n@dataclasses.dataclass(frozen=True)\nclass Always(specsim.DraftLengthRule):\n"
        "    name = 'always'\n    source = 'mine'\n    max_draft_tokens = 2\n"
        "    def choose(self, state, running):\n        return 2\n"
    )
    compared = serve_frontier(small(), COST, str(tmp_path / "mine.py"), users=3, workers=Workers(jobs=2))
    by_label = {point.summary.label: point.summary.tokens_per_s for point in compared.points}
    assert by_label["always"] == by_label["K by batch 1:2"]


@pytest.mark.slow
def test_a_dask_cluster_that_loses_a_worker_gives_the_same_answer(tmp_path: Path) -> None:
    """A worker of two is killed when the first results are there; its servers are simulated again."""
    distributed = pytest.importorskip("distributed", reason="the extra [dask] is not installed")
    path = tmp_path / "trace"
    write_trace(generate(IID(0.8), sequences=300, output_tokens=100, depth=3, seed=2), path)
    asked = {"users": [1, 4], "requests": 300}
    alone = serve_frontier(path, COST, ["turbospec", "sglang_adaptive"], **asked)  # type: ignore[arg-type]
    killed: list[int] = []
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
    ):
        victim = next(iter(client.run(os.getpid).values()))

        def kill(done: int, total: int) -> None:
            if 0 < done < total and not killed:
                os.kill(victim, signal.SIGKILL)
                killed.append(done)

        workers = Workers("dask", scheduler=cluster.scheduler_address)
        shared = serve_frontier(path, COST, ["turbospec", "sglang_adaptive"], workers=workers, progress=kill, **asked)  # type: ignore[arg-type]
        assert killed and victim not in client.run(os.getpid).values()
    assert shared.as_dict() == alone.as_dict()


def test_no_limit_is_no_share() -> None:
    compared = serve_frontier(small(), COST, users=2, requests=60)
    assert {p.summary.within for p in compared.points} == {None} and np.isfinite(compared.best(2).p90_s)
