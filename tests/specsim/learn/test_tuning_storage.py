"""A search that was cut short anywhere goes on from its storage to the very same answer."""

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
import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from specsim.cost.model import ConstantCost
from specsim.io.errors import InputError
from specsim.learn.search import ASKED, SearchResult, find_best
from specsim.learn.settings import Search, SearchSettings
from specsim.learn.storage import open_study, trace_digest
from specsim.policy.chain.adaedl import AdaEDL
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.max_confidence import MaxConfidence
from specsim.replaying.priced import PricedTrace
from tests.support import ROOT
from tests.support.reference import RampCost, small_trace
from tests.support.tuning_cases import CASES, run_case, stretchy_trace

FILE = "search.jsonl"


@pytest.fixture(scope="module", params=CASES)
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Search, SearchResult, bytes]:
    """A search, its answer without a file, and the file of a run that nobody disturbed."""
    path = tmp_path_factory.mktemp("whole") / FILE
    undisturbed, stored = run_case(request.param, 7), run_case(request.param, 7, path)
    assert undisturbed == stored
    return request.param, undisturbed, path.read_bytes()


def studies(path: Path) -> list[optuna.Study]:
    """All studies in a file."""
    storage = JournalStorage(JournalFileBackend(str(path)))
    return [optuna.load_study(study_name=name, storage=storage) for name in optuna.get_all_study_names(storage)]


def tried(path: Path) -> list[Any]:
    """What the only study in a file tried, and what it found."""
    (study,) = studies(path)
    return [(trial.params, trial.state, trial.value) for trial in study.trials]


def test_a_file_torn_anywhere_leads_to_the_same_answer(
    whole: tuple[Search, SearchResult, bytes], tmp_path: Path
) -> None:
    search, answer, written = whole
    path = tmp_path / FILE
    path.write_bytes(written)
    undisturbed = tried(path)
    cuts = np.random.default_rng(0).integers(0, len(written), size=8).tolist()
    for cut in [0, 1, *cuts, len(written) - 1, len(written)]:
        path.write_bytes(written[:cut])
        assert run_case(search, 7, path) == answer, cut
        assert tried(path) == undisturbed, cut


def test_a_finished_search_replays_nothing(whole: tuple[Search, SearchResult, bytes], tmp_path: Path) -> None:
    search, answer, written = whole
    path = tmp_path / FILE
    path.write_bytes(written)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specsim.learn.evaluate.Evaluator.seconds", None)
        assert run_case(search, 7, path) == answer


def test_an_interrupted_search_goes_on(whole: tuple[Search, SearchResult, bytes], tmp_path: Path) -> None:
    search, answer, written = whole
    path = tmp_path / FILE

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    assert run_case(search, 7, path, stop).interrupted
    assert 0 < path.stat().st_size < len(written)
    assert run_case(search, 7, path) == answer


@pytest.mark.parametrize(
    ("policy", "trace_seed", "cost", "changes"),
    [
        (AdaEDL, 1, RampCost(), {}),
        (AdaEDL, 0, RampCost(4e-7), {}),
        (AdaEDL, 0, RampCost(), {"trials": 10}),
        (AdaEDL, 0, RampCost(), {"seed": 1}),
        (AdaEDL, 0, RampCost(), {"search": "optuna"}),
        (MaxConfidence, 0, RampCost(), {}),
        (AdaEDL, 0, RampCost(), {"fixed": {"epsilon": 0.5}}),
    ],
    ids=["trace", "cost", "trials", "seed", "search", "policy", "fixed"],
)
def test_another_search_in_the_same_file_is_a_study_of_its_own(
    policy: type[ChainPolicy], trace_seed: int, cost: RampCost, changes: dict[str, Any], tmp_path: Path
) -> None:
    settings = SearchSettings(search="grid", trials=9, storage=tmp_path / FILE)
    first = find_best(AdaEDL, PricedTrace(small_trace(), RampCost()), settings)
    priced = PricedTrace(small_trace(trace_seed), cost)
    expected = find_best(policy, priced, dataclasses.replace(settings, storage=None, **changes))
    assert find_best(policy, priced, dataclasses.replace(settings, **changes)) == expected
    assert len(studies(tmp_path / FILE)) == 2
    assert find_best(AdaEDL, PricedTrace(small_trace(), RampCost()), settings) == first


@pytest.mark.parametrize("content", [b"hello\n", b"[1]\n", b"no line at all", b'{"kind": "profile"}\n', b"\xff\n"])
def test_a_file_that_is_no_journal_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / FILE
    path.write_bytes(content)
    with pytest.raises(InputError, match="not a journal of Optuna's"), open_study(path, "a"):
        pass
    assert path.read_bytes() == content


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / FILE
    with open_study(path, "a") as study:
        study.set_user_attr("n", 1)
        with pytest.raises(InputError, match="another process"), open_study(path, "a"):
            pass
    with open_study(path, "a") as study:
        assert study.user_attrs == {"n": 1}


@pytest.mark.parametrize(("whole", "damaged"), [(b'{"n":1}', b'{"n":1'), (b'"study_id"', b'"study"')])
def test_damage_inside_is_refused(tmp_path: Path, whole: bytes, damaged: bytes) -> None:
    path = tmp_path / FILE
    with open_study(path, "a") as study:
        study.set_user_attr("n", 1)
        study.set_user_attr("n", 2)
    path.write_bytes(path.read_bytes().replace(whole, damaged))
    with pytest.raises(InputError, match=r"is damaged .*delete it to search anew$"), open_study(path, "a"):
        pass


def test_digests_tell_traces_apart() -> None:
    trace = small_trace()
    digest = trace_digest(trace)
    assert trace.draft_limit.size > 0 and trace_digest(trace) == digest == trace_digest(small_trace())
    assert trace_digest(trace.select([0, 1, 2, 3])) != digest
    altered = small_trace()
    altered.entropy_nats[3, 2] += 1e-3
    assert trace_digest(altered) != digest


def test_optuna_proposes_alike_after_an_interruption() -> None:
    trace, cost = stretchy_trace(10, 50), ConstantCost(1e-3, 1e-2)
    runs = [
        find_best(AdaEDL, PricedTrace(trace, cost), SearchSettings(search="optuna", trials=30, seed=s))
        for s in (0, 0, 1)
    ]
    assert runs[0] == runs[1] != runs[2] and ASKED < 30


PROCESS = """
import sys
from pathlib import Path
from tests.support.tuning_cases import run_case
run_case({search!r}, {seed}, Path({path!r}))
"""


def killed(search: Search, seed: int, path: Path, lines: int) -> bool:
    """Run a search in a process, kill it when its file has so many lines; whether it was still running."""
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
    running = [kill_and_resume(search, 3, tmp_path / search, rng) for search in CASES]
    assert any(running)


@pytest.mark.slow
def test_searches_killed_at_random_moments_end_with_the_same_answer(tmp_path: Path) -> None:
    rng = np.random.default_rng()
    running = [
        kill_and_resume(search, seed, tmp_path / f"{search}{seed}", rng) for seed in range(8) for search in CASES
    ]
    assert sum(running) >= 6  # of 16; the others were done by then
