"""A search that was cut short anywhere goes on from its journal to the very same answer."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specsim.cost.model import ConstantCost
from specsim.io.errors import InputError
from specsim.learn import optuna_search
from specsim.learn.journal import Journal, trace_digest
from specsim.learn.search import Search, SearchResult, find_best
from specsim.learn.settings import SearchSettings
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.max_confidence import MaxConfidence
from specsim.replaying.priced import PricedTrace
from tests.support import ROOT
from tests.support.checks import refusal
from tests.support.reference import RampCost, small_trace
from tests.support.tuning_cases import CASES, run_case, stretchy_trace

JOURNAL = "search.jsonl"


@pytest.fixture(scope="module", params=CASES)
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Search, SearchResult, bytes]:
    """A search, its answer without a journal, and the journal of a run that nobody disturbed."""
    path = tmp_path_factory.mktemp("whole") / JOURNAL
    undisturbed, journaled = run_case(request.param, 7), run_case(request.param, 7, path)
    assert undisturbed == journaled
    return request.param, undisturbed, path.read_bytes()


def test_a_journal_torn_anywhere_leads_to_the_same_answer(
    whole: tuple[Search, SearchResult, bytes], tmp_path: Path
) -> None:
    search, answer, written = whole
    path = tmp_path / JOURNAL
    cuts = np.random.default_rng(0).integers(0, len(written), size=8).tolist()
    for cut in [0, 1, *cuts, len(written) - 1, len(written)]:
        path.write_bytes(written[:cut])
        assert run_case(search, 7, path) == answer, cut
        assert path.read_bytes() == written, cut


def test_a_finished_search_replays_nothing(whole: tuple[Search, SearchResult, bytes], tmp_path: Path) -> None:
    search, answer, written = whole
    path = tmp_path / JOURNAL
    path.write_bytes(written)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specsim.learn.evaluate.Evaluator.seconds", None)
        assert run_case(search, 7, path) == answer


def test_an_interrupted_search_goes_on(whole: tuple[Search, SearchResult, bytes], tmp_path: Path) -> None:
    search, answer, written = whole
    path = tmp_path / JOURNAL

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    assert run_case(search, 7, path, stop).interrupted
    assert 0 < path.stat().st_size < len(written)
    assert run_case(search, 7, path) == answer


@pytest.mark.parametrize(
    ("key", "policy", "trace_seed", "cost", "changes"),
    [
        ("trace", AdaEDL, 1, RampCost(), {}),
        ("cost", AdaEDL, 0, RampCost(4e-7), {}),
        ("trials", AdaEDL, 0, RampCost(), {"trials": 10}),
        ("seed", AdaEDL, 0, RampCost(), {"seed": 1}),
        ("search", AdaEDL, 0, RampCost(), {"search": "race"}),
        ("policy", MaxConfidence, 0, RampCost(), {}),
        ("fixed", AdaEDL, 0, RampCost(), {"fixed": {"epsilon": 0.5}}),
    ],
)
def test_the_journal_of_another_search_is_refused(
    key: str, policy: type[ChainPolicy], trace_seed: int, cost: RampCost, changes: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / JOURNAL
    settings = SearchSettings(search="grid", trials=9, storage=path)
    find_best(AdaEDL, PricedTrace(small_trace(), RampCost()), settings)
    before = path.read_bytes()
    other = PricedTrace(small_trace(trace_seed), cost)
    refusal(
        lambda: find_best(policy, other, dataclasses.replace(settings, **changes)),
        f"{JOURNAL} is the journal of another search",
        key,
    )
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", [b"hello\n", b"[1]\n", b"no line at all", b'{"kind": "profile"}\n', b"\xff\n"])
def test_a_file_that_is_no_journal_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / JOURNAL
    path.write_bytes(content)
    with pytest.raises(InputError, match="not the journal"):
        Journal(path, {})
    assert path.read_bytes() == content


def test_damage_inside_and_a_second_process_are_refused(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL
    first = Journal(path, {"a": 1})
    assert first.batch(lambda: {"n": 1}) == {"n": 1}
    with pytest.raises(InputError, match="another run"):
        Journal(path, {"a": 1})
    first.close()
    again = Journal(path, {"a": 1})
    assert len(again.ahead) == 1
    assert again.batch(lambda: {"n": 2}) == {"n": 1} and again.batch(lambda: {"n": 2}) == {"n": 2}
    again.close()
    path.write_bytes(path.read_bytes().replace(b'{"n": 1}', b'{"n": 1'))
    with pytest.raises(InputError, match="line 2, is not valid JSON"):
        Journal(path, {"a": 1})


@pytest.mark.parametrize("line", ['{"x": 1}', '{"seconds": []}', '{"seconds": "ab"}', '{"seconds": [{}]}'])
def test_a_batch_of_another_shape_is_refused(
    whole: tuple[Search, SearchResult, bytes], line: str, tmp_path: Path
) -> None:
    search, _, written = whole
    path = tmp_path / JOURNAL
    header = written.split(b"\n")[0]
    path.write_bytes(header + b"\n" + line.encode() + b"\n")
    with pytest.raises(InputError, match="delete the journal to search anew"):
        run_case(search, 7, path)


def test_digests_tell_traces_apart() -> None:
    trace = small_trace()
    digest = trace_digest(trace)
    assert trace.draft_limit.size > 0 and trace_digest(trace) == digest == trace_digest(small_trace())
    assert trace_digest(trace.select([0, 1, 2, 3])) != digest
    altered = small_trace()
    altered.entropy_nats[3, 2] += 1e-3
    assert trace_digest(altered) != digest


def test_optuna_proposes_alike_after_an_interruption() -> None:
    """Whatever was recorded is told to the study as if it had just been found."""
    trace, cost = stretchy_trace(10, 50), ConstantCost(1e-3, 1e-2)
    runs = [
        find_best(AdaEDL, PricedTrace(trace, cost), SearchSettings(search="optuna", trials=30, seed=s))
        for s in (0, 0, 1)
    ]
    assert runs[0] == runs[1] != runs[2] and optuna_search.BATCH < 30


PROCESS = """
import sys
from pathlib import Path
from tests.support.tuning_cases import run_case
run_case({search!r}, {seed}, Path({path!r}))
"""


def killed(search: Search, seed: int, path: Path, lines: int) -> bool:
    """Run a search in a process, kill it when its journal has so many lines; whether it was still running."""
    code = PROCESS.format(search=search, seed=seed, path=str(path))
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    while process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < lines):
        time.sleep(0.001)
    running = process.poll() is None
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() in (0, -signal.SIGKILL)
    return running


def kill_and_resume(search: Search, seed: int, path: Path, rng: np.random.Generator) -> bool:
    whole = path.with_name(f"whole-{path.name}")
    answer = run_case(search, seed, whole)
    running = killed(search, seed, path, int(rng.integers(len(whole.read_bytes().splitlines()))))
    assert run_case(search, seed, path) == answer
    lines = path.read_text().splitlines()
    assert all(isinstance(json.loads(line), dict) for line in lines)
    return running


def test_a_killed_search_resumes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    running = [kill_and_resume(search, 3, tmp_path / search, rng) for search in ("race", "optuna")]
    assert any(running)


@pytest.mark.slow
def test_searches_killed_at_random_moments_end_with_the_same_answer(tmp_path: Path) -> None:
    rng = np.random.default_rng()
    running = [
        kill_and_resume(search, seed, tmp_path / f"{search}{seed}", rng) for seed in range(8) for search in CASES
    ]
    assert sum(running) >= 8  # of 24; the others were done by then
