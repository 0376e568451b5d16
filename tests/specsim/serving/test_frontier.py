"""The frontier of throughput and latency, and where speculation pays."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from specsim.acceptance.formulas import mean_tokens_per_round
from specsim.acceptance.generate import generate
from specsim.acceptance.models import IID
from specsim.cost.files import read_cost
from specsim.cost.linear import LinearCost, LinearPass
from specsim.io.progress import Counter, no_progress
from specsim.io.workers import Workers
from specsim.policy.chain.fixed_k import FixedK
from specsim.replaying.intervals import Estimate
from specsim.serving.arrivals import requests_of_trace
from specsim.serving.continuous import run_server
from specsim.serving.costs import batch_cost
from specsim.serving.draft_length import ScheduledK, TurboSpec, schedule_ranges
from specsim.serving.drafts import drafts_of
from specsim.serving.frontier import ServingFrontier, serve_frontier
from specsim.serving.latency import summarise_run
from specsim.serving.speedup_map import BreakEven, Cell, SpeedupMap, break_even, speedup_map
from specsim.trace.files import write_trace
from specsim.trace.trace import Trace
from tests.support.acceptance_examples import difficulty
from tests.support.checks import refusal
from tests.support.commands import assert_refused, call, json_of
from tests.support.lossy_cluster import losing_a_worker
from tests.support.reference import build_trace
from tests.support.serving_costs import COST

COST_FILE = ("--cost", "specdecode-bench-llama3.1-8b-eagle-h100")


def small(depth: int = 3) -> Trace:
    return generate(IID(0.8), sequences=12, output_tokens=20, depth=depth, seed=2, prompt_tokens=10)


@pytest.fixture(scope="module")
def compared() -> ServingFrontier:
    return serve_frontier(small(), COST, ["turbospec", "sglang_adaptive"], users=[1, 4], tpot_ms=9.0, pad="none")


def test_points_are_the_servers_own(compared: ServingFrontier) -> None:
    assert [(p.users, p.k, p.knows) for p in compared.points[:7]] == [
        (1, 0, ""), (1, 1, ""), (1, 2, ""), (1, 3, ""), (1, None, ""), (1, None, ""), (1, None, "acceptance")
    ]  # fmt: skip
    sent = requests_of_trace(small(), 200)
    run = run_server(drafts_of(small(), ScheduledK({1: 2}), served=True), COST, sent, slots=4, users=4)
    point = next(p for p in compared.points if (p.users, p.k) == (4, 2))
    assert point.summary == summarise_run(run, tpot_bound_s=0.009)
    clairvoyant = next(p for p in compared.points if p.users == 4 and p.knows == "acceptance")
    assert clairvoyant.summary.label == "clairvoyant, greedy" and clairvoyant.slower_than_bound == 0
    assert point.slower_than_bound == pytest.approx(clairvoyant.summary.tokens_per_s / point.summary.tokens_per_s - 1)
    informed = max(p.summary.tokens_per_s for p in compared.points if p.users == 4 and p.knows != "acceptance")
    assert point.slower_than_informed == pytest.approx(informed / point.summary.tokens_per_s - 1)


def test_nothing_is_above_the_bound_where_speculation_loses() -> None:
    """The clairvoyant rule has its drafter read every prompt, in vain; without speculation no drafter does."""
    costly = LinearCost(LinearPass(0.001, 0.001), LinearPass(0.001, 0.001))
    trace = generate(IID(0.3), sequences=12, output_tokens=10, depth=3, seed=2, prompt_tokens=200)
    points = serve_frontier(trace, costly, users=32, requests=200).points
    off, clairvoyant = points[0], points[-1]
    assert off.summary.tokens_per_s > 1.05 * clairvoyant.summary.tokens_per_s
    assert off.slower_than_bound == off.slower_than_informed == 0 < clairvoyant.slower_than_bound
    assert min(p.slower_than_bound for p in points) == 0


def test_what_confidence_gives_is_told_from_clairvoyance() -> None:
    trace = generate(difficulty(), sequences=24, output_tokens=40, depth=4, seed=4, prompt_tokens=10)
    *engines, fitted, clairvoyant = serve_frontier(trace, COST, "turbospec", users=4, requests=200).points
    assert (fitted.knows, fitted.summary.label) == ("requests", "budget, fitted to these requests")
    assert clairvoyant.slower_than_informed < 0 == clairvoyant.slower_than_bound == fitted.slower_than_informed
    for point in engines:
        ratio = clairvoyant.summary.tokens_per_s / fitted.summary.tokens_per_s
        assert 1 + point.slower_than_bound == pytest.approx((1 + point.slower_than_informed) * ratio)
        assert not point.knows and point.slower_than_informed > 0


def test_the_frontier_is_what_no_other_point_beats(compared: ServingFrontier) -> None:
    real = [p for p in compared.points if not p.knows]
    for point in real:
        beaten = any(p.summary.tokens_per_s > point.summary.tokens_per_s and p.p90_s < point.p90_s for p in real)
        assert point.on_frontier == (not beaten)
    assert any(p.on_frontier for p in real) and not all(p.on_frontier for p in real)
    assert not any(p.on_frontier for p in compared.points if p.knows)


def test_the_best_keeps_the_limit_and_makes_the_schedule(compared: ServingFrontier) -> None:
    for users in (1, 4):
        here = [p for p in compared.points if p.users == users and not p.knows]
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
    for limit_ms in (math.nan, math.inf, 0.0):
        refusal(lambda limit_ms=limit_ms: serve_frontier(small(), COST, tpot_ms=limit_ms), "limits above 0")
    refusal(lambda: serve_frontier(small(), COST, users=10**9), "8,000,000,000 requests of a load are more than")
    refusal(lambda: serve_frontier(small(), COST, users=1, requests=10**9), "1,000,000,000 requests of a load")
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
    path = tmp_path / "trace"
    write_trace(generate(IID(0.8), sequences=300, output_tokens=100, depth=3, seed=2), path)

    def compared(workers: Workers | None = None, progress: Counter = no_progress) -> ServingFrontier:
        rules = ["turbospec", "sglang_adaptive"]
        return serve_frontier(path, COST, rules, users=[1, 4], requests=300, workers=workers, progress=progress)

    assert losing_a_worker(compared).as_dict() == compared().as_dict()


def test_no_limit_is_no_share() -> None:
    compared = serve_frontier(small(), COST, users=2, requests=60)
    assert {p.summary.within for p in compared.points} == {None} and np.isfinite(compared.best(2).p90_s)


H100 = batch_cost(read_cost("specdecode-bench-llama3.1-8b-eagle-h100"))


def test_break_even_is_printed_as_the_last_batch_that_gains() -> None:
    assert str(BreakEven(None, ("k",), 5.7, 3.2, None, 8)) == "5 [3, over 8]"


def test_break_even_by_hand() -> None:
    # Every text has 3 tokens, in two rounds: 2 drafted and 1 accepted, then nothing left to draft. With passes of 10 ms
    # and 0.1 ms a token for the target, 1 ms for the drafter, that takes 2 x 1 + 2 x 10 + (3 + 1) x 0.1 x batch,
    # without speculation 3 x 10 + 3 x 0.1 x batch. These are equal at a batch of 80.
    hits = np.tile([[True, False], [False, False], [False, False]], (40, 1))
    trace = build_trace(np.random.default_rng(0), hits, [3] * 40)
    cost = LinearCost(LinearPass(0.010, 1e-4), LinearPass(0.001))
    table = speedup_map(trace, cost, [FixedK(k=2)], [1, 20, 79, 81, 160])
    assert table.cells[0].speedup["fixed_k(k=2)"].estimate == pytest.approx(30.3 / 22.4)
    assert table.cells[-1].speedup["fixed_k(k=2)"].estimate == pytest.approx((30 + 48) / (22 + 64))
    even = table.break_even[0]
    assert even.batch == pytest.approx(80, abs=0.01)
    assert (even.low, even.high) == pytest.approx((even.batch, even.batch))  # all texts are alike
    assert table.schedule() == {1: 2, 81: 0}
    assert table.as_dict()["schedules"] == [{"context": None, "ranges": [[1, 80, 2], [81, 160, 0]]}]


def test_speedup_of_a_full_batch_is_what_the_formula_expects() -> None:
    trace = generate(IID(0.7), sequences=300, output_tokens=200, depth=4, seed=1)
    cost = LinearCost(LinearPass(0.010, 1e-4, 1e-7), LinearPass(0.001), step_s=0.001)
    for batch in (1, 16, 128):
        cell = speedup_map(trace, cost, [FixedK(k=3)], [batch], contexts=[1000]).cells[0]
        cached_s = batch * 1000 * 1e-7
        plain_s = 0.011 + batch * 1e-4 + cached_s
        round_s = 0.003 + 0.011 + 4 * batch * 1e-4 + cached_s
        expected = float(mean_tokens_per_round(0.7, 3)) * plain_s / round_s
        speedup = cell.speedup["fixed_k(k=3)"]
        assert speedup.estimate == pytest.approx(expected, rel=0.02)
        assert cell.baseline_tokens_per_s == pytest.approx(batch / plain_s)


def test_speculation_loses_earlier_the_less_is_accepted_and_never_at_long_contexts() -> None:
    batches = [1, 32, 256, 1024]
    ends = []
    for accept_prob in (0.4, 0.5, 0.6):
        trace = generate(IID(accept_prob), sequences=40, output_tokens=40, depth=3, seed=4)
        table = speedup_map(trace, H100, [FixedK(k=1), FixedK(k=3)], batches, contexts=[None, 8192])
        short, long = table.break_even
        assert short.batch is not None and short.low is not None and short.high is not None
        assert short.low < short.batch < short.high
        assert long.batch is None and str(long) == "over 1024"
        ends.append(short.batch)
        schedule = table.schedule()
        assert list(schedule.values()) == sorted(schedule.values(), reverse=True) and schedule[max(schedule)] == 0
        assert min(table.schedule(8192).values()) > 0
    assert ends == sorted(ends)


def test_the_interval_of_break_even_is_over_sequences() -> None:
    # Half of the sequences gain 4/3 at batch 1, half gain 2; both as 1 / batch.
    batches = [1, 2, 4]
    tokens = np.ones((3, 2, 40))
    seconds = np.ones((3, 2, 40))
    for row, batch in enumerate(batches):
        seconds[row, 1, :20], seconds[row, 1, 20:] = 0.75 * batch, 0.5 * batch
    even = break_even(batches, np.stack([tokens, seconds], axis=2), None, ["k"])
    assert even.batch == pytest.approx(1.6)  # 40 / (20 x 0.75 + 20 x 0.5)
    assert 4 / 3 < even.low < 1.6 < even.high < 2
    width = np.log(even.high / even.low)
    # The mean of 40 draws of 0.75 or 0.5, of which the break-even is the inverse: 2 x 2.02 standard errors.
    assert width == pytest.approx(2 * 2.02 * 0.125 / np.sqrt(39) / 0.625, rel=0.1)


def test_losing_and_gaining_everywhere_are_told_apart() -> None:
    trace = generate(IID(0.2), sequences=20, output_tokens=30, depth=3)
    slow = LinearCost(LinearPass(0.010), LinearPass(0.009))
    losing = speedup_map(trace, slow, [FixedK(k=3)], [1, 2])
    assert losing.break_even[0].batch == 0 and losing.schedule() == {1: 0}
    fast = LinearCost(LinearPass(0.010), LinearPass(0.0001))
    gaining = speedup_map(trace, fast, [FixedK(k=3)], [1, 2])
    assert gaining.break_even[0].batch is None and gaining.schedule() == {1: 3}


def test_rules_and_policies_compete() -> None:
    trace = generate(IID(0.8), sequences=30, output_tokens=30, depth=4)
    calls = []
    table = speedup_map(
        trace, H100, [FixedK(k=2), TurboSpec(H100, 4)], [1, 8], progress=lambda done, total: calls.append((done, total))
    )
    assert set(table.cells[0].speedup) == {"fixed_k(k=2)", "turbospec K<=4"} and calls == [(1, 2), (2, 2)]
    assert table.break_even[0].choices == ("fixed_k(k=2)",) and table.lengths == {"fixed_k(k=2)": 2}
    assert json.loads(json.dumps(table.as_dict()))["cells"][1]["batch"] == 8
    assert table == speedup_map(trace, H100, [FixedK(k=2), TurboSpec(H100, 4)], [1, 8])
    assert speedup_map(trace, H100, [TurboSpec(H100, 4)], [1]).as_dict()["schedules"] == []


def test_schedules_join_batches_of_one_k() -> None:
    def cell(batch: int, *speedups: float) -> Cell:
        return Cell(batch, None, {f"k{i}": Estimate(s, s, s) for i, s in enumerate(speedups, start=1)}, 1.0)

    cells = (cell(2, 1.1, 1.3), cell(4, 1.2, 1.4), cell(8, 1.2, 1.1), cell(16, 0.9, 0.8))
    table = SpeedupMap((2, 4, 8, 16), (None,), cells, (), {"k1": 1, "k2": 2})
    assert table.schedule() == {1: 2, 8: 1, 16: 0} and cells[0].best == "k2"
    assert schedule_ranges(table.schedule(), 16) == [[1, 7, 2], [8, 15, 1], [16, 16, 0]]


def test_batches_have_to_increase() -> None:
    trace = generate(IID(0.5), sequences=2, output_tokens=5, depth=2)
    for batches in ([], [0, 1], [2, 2], [4, 1]):
        refusal(lambda: speedup_map(trace, H100, [FixedK(k=1)], batches), "increasing")  # noqa: B023
