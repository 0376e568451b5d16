"""Comparisons of checkouts that stand in for realrun: they take known seconds, and need no model."""

from __future__ import annotations

import json
import os
import signal
import sys
import venv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from realrun.pairs.prompts import Prompt
from realrun.versions import compare as module
from realrun.versions import sides
from realrun.versions.compare import CompareSettings, compare, typical_run
from realrun.versions.sides import Side, Worker, find_side
from specsim.io.errors import InputError
from specsim.policy.registry import make_policy
from tests.support.checks import refusal
from tests.support.stub_checkout import stub_checkout

OWN = """
from dataclasses import dataclass

from specsim.policy.chain.fixed_k import FixedK


@dataclass(frozen=True)
class Mine(FixedK):
    name = "mine"
    source = "test"
"""
PROMPTS = [Prompt("all", [5, 6]), Prompt("all", [7])]
FIXED = make_policy("fixed_k", k=3)
SETTINGS = CompareSettings({}, [FIXED], max_new_tokens=12, minutes=5)


def rows(document: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    baseline, policy = document["rows"]
    return baseline, policy


def test_a_slower_policy_is_told_from_an_equal_baseline(tmp_path: Path) -> None:
    base, head = stub_checkout(tmp_path / "base"), stub_checkout(tmp_path / "head", slower=0.06)
    baseline, policy = rows(compare(base, head, PROMPTS, SETTINGS, tmp_path / "out"))
    assert (baseline["exceeds"], policy["exceeds"], policy["verdict"]) == (False, True, "slower")
    assert baseline["slowdown_percent"]["estimate"] == pytest.approx(0, abs=0.2)
    assert policy["slowdown_percent"]["estimate"] == pytest.approx(6, abs=0.2)
    assert policy["round_time_percent"]["estimate"] == pytest.approx(policy["slowdown_percent"]["estimate"], rel=1e-9)
    assert policy["tau_percent"] == {"estimate": 0.0, "low": 0.0, "high": 0.0}
    assert policy["rounds_identical_percent"] == policy["output_identical_percent"] == 100


def test_other_acceptance_is_told_from_other_time(tmp_path: Path) -> None:
    """Two accepted tokens in place of one: a third fewer rounds, each as long as before."""
    base, head = stub_checkout(tmp_path / "base"), stub_checkout(tmp_path / "head", accepted=2)
    baseline, policy = rows(compare(base, head, PROMPTS, SETTINGS, tmp_path / "out"))
    assert policy["verdict"] == "faster" and policy["tau"] == {"base": 2.0, "head": 3.0}
    assert policy["slowdown_percent"]["estimate"] == pytest.approx(100 * (2 / 3 - 1), abs=0.2)
    assert policy["round_time_percent"]["estimate"] == pytest.approx(0, abs=0.2)
    assert policy["rounds_identical_percent"] == 0 and baseline["rounds_identical_percent"] == 100


def test_finished_restarts_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, out, runs = stub_checkout(tmp_path / "base"), tmp_path / "out", 0
    real = module.decode_all

    def counted(*arguments: Any) -> Any:
        nonlocal runs
        runs += 1
        if runs == 3:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(module, "decode_all", counted)
    with pytest.raises(KeyboardInterrupt):
        compare(base, base, PROMPTS, SETTINGS, out)
    kept = [(out / "restarts" / f"{number}.json").read_bytes() for number in range(2)]
    document = compare(base, base, PROMPTS, SETTINGS, out)
    assert kept == [(out / "restarts" / f"{number}.json").read_bytes() for number in range(2)]
    assert document["restarts"] == runs - 1 >= 3
    assert json.loads((out / "compare.json").read_text()) == document
    refusal(lambda: compare(base, base, PROMPTS, SETTINGS, out), "holds a finished comparison", "--overwrite")
    assert document["options"]["sampler"]["mode"] == "greedy" and document["options"]["kernels"] == "auto"
    (out / "compare.json").unlink()
    longer = replace(SETTINGS, max_new_tokens=13)
    refusal(lambda: compare(base, base, PROMPTS, longer, out), "holds restarts with max_new_tokens=12, asked for 13")
    (tmp_path / "base" / "realrun" / "decode" / "more.py").write_text("")
    refusal(lambda: compare(base, base, PROMPTS, SETTINGS, out), "holds restarts with base=", "--overwrite")
    assert compare(base, base, PROMPTS, SETTINGS, out, overwrite=True)["restarts"] >= 3


def test_time_bounds_the_restarts(tmp_path: Path) -> None:
    base = stub_checkout(tmp_path / "base")
    settings = CompareSettings({}, [], max_new_tokens=4, minutes=0)
    assert compare(base, base, PROMPTS, settings, tmp_path / "out")["restarts"] == 2


def test_prompts_are_left_out_in_the_first_restart_and_are_the_same_in_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prompt takes a second in each of two layouts; an eighth of two minutes holds seven."""
    seconds = 0.0

    def clock() -> float:
        nonlocal seconds
        seconds += 1.0
        return seconds

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    base, out = stub_checkout(tmp_path / "base"), tmp_path / "out"
    prompts = [Prompt(str(number), [5]) for number in range(20)]
    document = compare(base, base, prompts, replace(SETTINGS, minutes=2), out)
    assert (document["prompts"]["count"], document["prompts_left_out"]) == (7, 13)
    kept = [json.loads(file.read_text()) for file in sorted((out / "restarts").glob("[0-9]*.json"))]
    assert len(kept) >= 3 and all(part["prompts"] == kept[0]["prompts"] for part in kept)
    assert len({*kept[0]["prompts"]}) == 7 and kept[0]["prompts"] != list(range(7))
    assert all(len(runs) == 7 for part in kept for arm in part["runs"] for runs in arm)


def test_sides_are_found(tmp_path: Path) -> None:
    (tmp_path / "env" / "bin").mkdir(parents=True)
    (tmp_path / "env" / "bin" / "python").touch()
    code, env = stub_checkout(tmp_path / "code"), str(tmp_path / "env")
    assert find_side(code) == Side(code, Path(code), Path(sys.executable))
    assert find_side(env) == Side(env, None, Path(env, "bin", "python"))
    assert find_side(f"{code}@{env}") == Side(f"{code}@{env}", Path(code), Path(env, "bin", "python"))
    refusal(lambda: find_side(str(tmp_path / "absent")), "is not a folder", "give a checkout")
    refusal(lambda: find_side(str(tmp_path)), "holds no realrun/ or bin/python")
    refusal(lambda: find_side(f"{code}@{tmp_path}"), "holds no bin/python")
    refusal(lambda: find_side(f"{env}@{env}"), "holds no realrun/")


def environment(folder: Path) -> str:
    """Make an environment with packages of its own."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    stub_checkout(packages)
    for package in ("torch", "transformers"):
        (packages / f"{package}-0.1.dist-info").mkdir()
        (packages / f"{package}-0.1.dist-info" / "METADATA").write_text(f"Name: {package}\nVersion: 0.1\n")
    return str(folder)


def test_an_environment_runs_its_own_packages_or_a_checkout(tmp_path: Path) -> None:
    env, code = environment(tmp_path / "env"), stub_checkout(tmp_path / "code", slower=0.06)
    settings = CompareSettings({}, [FIXED], max_new_tokens=12, minutes=0)
    document = compare(env, f"{code}@{env}", PROMPTS, settings, tmp_path / "out")
    base, head = document["base"], document["head"]
    assert base["torch"] == head["torch"] == "0.1" and base["code"] != head["code"]
    assert rows(document)[1]["slowdown_percent"]["estimate"] == pytest.approx(6, abs=0.2)


def test_code_that_cannot_be_stepped_is_refused_in_a_line(tmp_path: Path) -> None:
    base = stub_checkout(tmp_path / "base")
    (tmp_path / "base" / "realrun" / "decode" / "decoder.py").write_text("")
    refusal(lambda: compare(base, base, PROMPTS, SETTINGS, tmp_path / "out"), f"{base} does not decode", "'Decoding'")
    assert not (tmp_path / "out" / "restarts").exists()


def test_a_policy_is_found_by_another_process(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    own = make_policy(str(file), k=2)
    names = [policy and policy[0] for policy in CompareSettings({}, [FIXED, own]).job(PROMPTS)["policies"]]
    assert names == [None, "fixed_k", f"{file}:mine"] and make_policy(names[2], k=2) == own


def test_restarts_with_another_policy_file_are_refused(tmp_path: Path) -> None:
    base, out, file = stub_checkout(tmp_path / "base"), tmp_path / "out", tmp_path / "own.py"
    file.write_text(OWN)
    settings = CompareSettings({}, [make_policy(str(file))], max_new_tokens=4, minutes=0)
    compare(base, base, PROMPTS, settings, out)
    (out / "compare.json").unlink()
    file.write_text(f"{OWN}    # drafts otherwise\n")
    refusal(lambda: compare(base, base, PROMPTS, settings, out), "holds restarts with policy_files=")


def test_a_process_that_dies_is_named(tmp_path: Path) -> None:
    base = stub_checkout(tmp_path / "base")
    with Worker(find_side(base)) as worker:
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.process.wait()
        with pytest.raises(InputError, match="process of .* ended"):
            worker.ask("load")


def test_a_process_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = stub_checkout(tmp_path / "base")
    with Worker(find_side(base)) as worker:
        os.kill(worker.process.pid, signal.SIGSTOP)
        monkeypatch.setattr(sides, "ANSWER_S", 0.05)
        refusal(lambda: worker.ask("load"), f"process of {base} did not answer within 0.05 s")


def test_what_libraries_print_is_no_answer(tmp_path: Path) -> None:
    base = stub_checkout(tmp_path / "base")
    code = tmp_path / "base" / "realrun" / "__init__.py"
    code.write_text(f"import os\nprint('loaded', flush=True)\nos.system('echo loaded')\n{code.read_text()}")
    settings = CompareSettings({}, [], max_new_tokens=4, minutes=0)
    assert compare(base, base, PROMPTS, settings, tmp_path / "out")["restarts"] == 2


def test_a_round_takes_the_faster_half_of_its_repeats() -> None:
    log, other = [[3, 1], [3, 0]], [[3, 2]]
    runs = [
        {"tokens": [1, 2, 3], "rounds": [[*a, s], [*b, t]]}
        for (a, b), s, t in [(log, 1.0, 9.0), (log, 2.0, 2.0), (log, 9.0, 4.0), (log, 3.0, 3.0)]
    ]
    assert typical_run(runs)["seconds"] == pytest.approx(1.5 + 2.5)
    changed = {"tokens": [1, 2, 3], "rounds": [[*other[0], 5.5]]}
    run = typical_run([*runs[1:], changed])  # 4, 13, 6 and 5.5 seconds
    assert run["seconds"] == pytest.approx(6.0) and run["rounds"] == 2
