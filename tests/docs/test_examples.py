"""The example policy of the documentation is served everywhere; its commands for engines run as they stand there."""

from __future__ import annotations

import json
import shlex
import tomllib
from pathlib import Path

import pytest

from docs.pages import block
from speckernels.bench.cases import ordered_cases
from speckernels.bench.measure import OWN
from specsim.compare.leaderboard import leaderboards
from specsim.learn.settings import SearchSettings
from specsim.learn.tune import tune_on
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.registry import find_policy, make_policy
from specsim.replaying.prediction import predict_policy
from specsim.replaying.priced import PricedTrace
from specsim.trace.split import split_sequences
from tests.support.commands import call
from tests.support.reference import RampCost, small_trace

MODES = ("launch", "graph", "host")  # of the kernels' benchmark on a GPU


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "prob_floor.py"
    path.write_text(block("extending.md", "class ProbFloor"))
    return path


@pytest.fixture(scope="module")
def kind(example: Path) -> type[ChainPolicy]:
    return find_policy(str(example))


def test_the_example_policy_replays(example: Path) -> None:
    trace, cost = small_trace(), RampCost()
    few = predict_policy(
        PricedTrace(trace, cost), make_policy(str(example), {"floor": "1.0", "max_draft_tokens": trace.depth})
    )
    many = predict_policy(
        PricedTrace(trace, cost),
        make_policy(f"{example}:prob_floor", {"floor": "0.0", "max_draft_tokens": trace.depth}),
    )
    assert few.drafted / few.rounds <= 1 < many.drafted / many.rounds


def test_the_example_policy_is_tuned(kind: type[ChainPolicy]) -> None:
    trace = small_trace()
    tuning, held = split_sequences(trace)
    result = tune_on(
        kind,
        PricedTrace(trace.select(tuning), RampCost()),
        PricedTrace(trace.select(held), RampCost()),
        SearchSettings(trials=10),
    )
    assert isinstance(result.best, kind) and result.best.settings["max_draft_tokens"] == trace.depth


def test_the_example_policy_stands_on_the_leaderboard(kind: type[ChainPolicy]) -> None:
    board = leaderboards({"small": small_trace()}, [RampCost()], kinds=[find_policy("fixed_k"), kind], trials=5)[0]
    assert {row.label for row in board.rows} == {"fixed_k, tuned", "fixed_k, K = 4", "prob_floor, tuned"}
    assert {sweep.setting for sweep in board.sweeps} == {"k", "floor"}


def test_the_example_of_a_claim_names_a_case_of_the_benchmark() -> None:
    claims = tomllib.loads(block("claims.md", 'document = "bench.json"', "toml"))["claim"]
    (at,) = [claim["at"] for claim in claims if "at" in claim]
    rows = {f"{case}-{mode}-{name}" for _, case in ordered_cases(on_gpu=True) for mode in MODES for name in OWN}
    assert at[1]["param"] in rows and [at[0], *at[2:]] == ["benchmarks", "extra_info", "median_us"]


def test_the_commands_for_engines_run_as_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """advise, doctor and every engine's export, in twelve lines."""
    commands = [
        shlex.split(line, comments=True)
        for line in block("howto/choose_k.md", "specsim export vllm", "sh").splitlines()
    ]
    exported = {engine for _, verb, engine, *_ in commands if verb == "export"}
    assert len(commands) <= 12 and {verb for _, verb, *_ in commands} == {"advise", "doctor", "export"}
    assert exported == {"vllm", "sglang", "llamacpp", "tensorrt-llm", "transformers"}
    monkeypatch.chdir(tmp_path)
    Path("counters.json").write_text(json.dumps({"drafted": [9000] * 4, "accepted": [7200, 5000, 2000, 400]}))
    call("specsim", "example")
    Path("example/trace").rename("trace")
    for command in commands:
        done = call(*command)
        assert done.code == 0 and done.out and not done.err, (command, done)
        if "--out" in command:
            assert json.loads(Path(command[-1]).read_text())
