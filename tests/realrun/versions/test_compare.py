"""Versions compared: checkouts that stand in for realrun take known seconds and need no model."""

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

import numpy as np
import pytest
import torch

from realrun.cli.compare import exit_code
from realrun.pairs.pair import load_pair
from realrun.pairs.prompts import Prompt, lab_prompts
from realrun.versions import compare as module
from realrun.versions.compare import (
    LOOKS,
    CompareSettings,
    Comparison,
    Decoded,
    Restart,
    Run,
    Side,
    Worker,
    change_percent,
    compare,
    confidence_of_a_look,
    find_side,
    finished,
    over_restarts,
    rows_of,
    typical_run,
)
from specsim.policy.registry import make_policy
from studies.versions.run import checkouts
from tests.support.checks import refusal
from tests.support.commands import assert_refused, call

# A checkout that stands in for realrun.
# A round of a policy drafts 3 tokens, accepts ACCEPTED and takes SLOWER longer; noise is at most 0.2 %.
STUB = """
import random
from types import SimpleNamespace

class Sampler(SimpleNamespace): pass

class Pair:
    eos_token_ids, fingerprint = (), "weights"
    def make_drafter(self): return None, None

def load_pair(**options): return Pair()

class Decoder:
    def __init__(self, target, drafter, eos_token_ids, sampler): pass
    def decode(self, prompt, max_new_tokens, policy): pass

class Decoding:
    def __init__(self, decoder, prompt, max_new_tokens, policy, sequence, seed):
        self.policy, self.limit, self.tokens, self.rounds = policy, max_new_tokens, [], []
    position = property(lambda self: len(self.tokens))
    done = property(lambda self: len(self.tokens) >= self.limit)
    result = property(lambda self: self)
    def advance(self):
        accepted = 0 if self.policy is None else ACCEPTED
        self.tokens += range(min(accepted + 1, self.limit - len(self.tokens)))
        seconds = random.uniform(1, 1.002) * (1 if self.policy is None else 1.5 * (1 + SLOWER))
        self.rounds.append(SimpleNamespace(drafted=3, accepted=accepted, seconds=seconds))
"""


def stub_checkout(folder: Path, slower: float = 0.0, accepted: int = 1) -> str:
    """Write a checkout whose policy takes this much longer per round, and accepts so many tokens."""
    code = STUB.replace("SLOWER", str(slower)).replace("ACCEPTED", str(accepted))
    files = {
        "specsim/__init__.py": "__version__ = 'stub'\ndef make_policy(name, settings): return name\n",
        "realrun/__init__.py": code,
        "realrun/decode/__init__.py": "",
        "realrun/lm/__init__.py": "",
        "realrun/lm/clock.py": "from contextlib import nullcontext as use_clock\n",
        "realrun/decode/decoder.py": "from realrun import Decoding\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return str(folder)


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


def rows(comparison: Comparison) -> tuple[dict[str, Any], dict[str, Any]]:
    baseline, policy = comparison.as_dict()["rows"]
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
    document = compare(base, base, PROMPTS, SETTINGS, out).as_dict()
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
    assert compare(base, base, PROMPTS, SETTINGS, out, overwrite=True).restarts >= 3


def test_time_bounds_the_restarts(tmp_path: Path) -> None:
    base = stub_checkout(tmp_path / "base")
    settings = CompareSettings({}, [], max_new_tokens=4, minutes=0)
    assert compare(base, base, PROMPTS, settings, tmp_path / "out").restarts == 2


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
    document = compare(base, base, prompts, replace(SETTINGS, minutes=2), out).as_dict()
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
    comparison = compare(env, f"{code}@{env}", PROMPTS, settings, tmp_path / "out")
    base, head = comparison.versions["base"], comparison.versions["head"]
    assert base["torch"] == head["torch"] == "0.1" and base["code"] != head["code"]
    assert rows(comparison)[1]["slowdown_percent"]["estimate"] == pytest.approx(6, abs=0.2)


def test_code_that_cannot_be_stepped_is_refused_in_a_line(tmp_path: Path) -> None:
    base = stub_checkout(tmp_path / "base")
    (tmp_path / "base" / "realrun" / "decode" / "decoder.py").write_text("")
    refusal(lambda: compare(base, base, PROMPTS, SETTINGS, tmp_path / "out"), f"{base} does not decode", "'Decoding'")
    assert not (tmp_path / "out" / "restarts").exists()


def test_a_policy_is_found_by_another_process(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(OWN)
    own = make_policy(str(file), k=2)
    names = [policy and policy[0] for policy in CompareSettings({}, [FIXED, own]).job_document(PROMPTS)["policies"]]
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
        refusal(lambda: worker.ask("load"), "process of ", " ended")


def test_a_process_that_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = stub_checkout(tmp_path / "base")
    with Worker(find_side(base)) as worker:
        os.kill(worker.process.pid, signal.SIGSTOP)
        monkeypatch.setattr(module, "ANSWER_S", 0.05)
        refusal(lambda: worker.ask("load"), f"process of {base} did not answer within 0.05 s")


def test_what_libraries_print_is_no_answer(tmp_path: Path) -> None:
    base = stub_checkout(tmp_path / "base")
    code = tmp_path / "base" / "realrun" / "__init__.py"
    code.write_text(f"import os\nprint('loaded', flush=True)\nos.system('echo loaded')\n{code.read_text()}")
    settings = CompareSettings({}, [], max_new_tokens=4, minutes=0)
    assert compare(base, base, PROMPTS, settings, tmp_path / "out").restarts == 2


def test_a_round_takes_the_faster_half_of_its_repeats() -> None:
    log, other = [(3, 1), (3, 0)], (3, 2)
    runs = [
        Decoded([1, 2, 3], [(*a, s), (*b, t)])
        for (a, b), s, t in [(log, 1.0, 9.0), (log, 2.0, 2.0), (log, 9.0, 4.0), (log, 3.0, 3.0)]
    ]
    assert typical_run(runs).seconds == pytest.approx(1.5 + 2.5)
    changed = Decoded([1, 2, 3], [(*other, 5.5)])
    run = typical_run([*runs[1:], changed])  # 4, 13, 6 and 5.5 seconds
    assert run.seconds == pytest.approx(6.0) and run.rounds == 2


# Verdicts: they err as rarely as they say, and find what they shall, on restarts with a known slowdown.


NO_LIMIT = CompareSettings({}, [make_policy("fixed_k", {"k": 3})], minutes=1e9)
PROMPT_COUNT, PROCESSES = 4, 3
CLUSTER = 0.02  # a process is this much slower than others, or not, for as long as it lives
DRIFT = 0.05  # standard deviation of the machine's speed between restarts
NOISE = 0.01  # standard deviation of a prompt's seconds within a restart


def simulated(rng: np.random.Generator, slowdown: tuple[float, float], unsteady: float = 0.0) -> Restart:
    """Simulate a restart. slowdown, unsteady : of the head, in the baseline and the policy; of the head's process"""
    cluster = np.exp(CLUSTER * rng.integers(2, size=PROCESSES))
    cluster[1] *= np.exp(unsteady * rng.standard_normal())
    machine = np.exp(DRIFT * rng.standard_normal())
    runs = []
    for slower in slowdown:
        seconds = np.exp(NOISE * rng.standard_normal((PROCESSES, PROMPT_COUNT))) * cluster[:, None] * machine
        seconds[1] *= 1 + slower
        runs.append([[Run(48, 20, "a", "a", s) for s in own] for own in seconds])
    return Restart([], 1.0, [0.0] * 4, runs)


def verdicts(
    rng: np.random.Generator, slowdown: tuple[float, float], most: int, unsteady: float = 0.0
) -> tuple[list[str], int]:
    """Compare until it is decided, or up to `most` restarts; return the rows' verdicts and the restarts."""
    restarts: list[Restart] = []
    while not restarts or not (finished(restarts, NO_LIMIT) or len(restarts) >= most):
        restarts.append(simulated(rng, slowdown, unsteady))
    return [row.verdict for row in rows_of(restarts, NO_LIMIT)], len(restarts)


def shares(slowdown: tuple[float, float], most: int, times: int, unsteady: float = 0.0) -> dict[str, float]:
    """Return the shares of comparisons that call the policy slower, and that see any change in any row."""
    rng = np.random.default_rng(0)
    results = [verdicts(rng, slowdown, most, unsteady)[0] for _ in range(times)]
    return {
        "slower": float(np.mean([policy == "slower" for _, policy in results])),
        "any": float(np.mean([bool({"slower", "faster"} & {*result}) for result in results])),
    }


LEVEL = 0.05
DEFAULT, MANY = 200, 6000


@pytest.mark.parametrize("times", [DEFAULT, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("unsteady", [0.0, 0.01])
def test_equal_versions_are_rarely_told_apart(unsteady: float, times: int) -> None:
    """However many looks, rows and restarts, and if the head's processes vary twice as much as the base's."""
    assert shares((0, 0), LOOKS[-1], times, unsteady)["any"] < LEVEL


@pytest.mark.parametrize("times", [DEFAULT, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("slowdown", [(0.03, 0.03), (0, 0.03)], ids=["whole", "drafter"])
def test_a_slowdown_of_3_percent_is_found_in_6_restarts(slowdown: tuple[float, float], times: int) -> None:
    assert shares(slowdown, 6, times)["slower"] > 0.93


def test_more_restarts_find_a_smaller_slowdown() -> None:
    found = [shares((0.015, 0.015), most, 100)["slower"] for most in (4, LOOKS[-1])]
    assert found[0] < 0.3 and found[1] > 0.6


def test_intervals_hold_the_truth_at_every_look_at_once() -> None:
    """In two rows of the same processes."""
    rng, missed, times = np.random.default_rng(1), 0, 1000
    for _ in range(times):
        cluster = CLUSTER * rng.integers(2, size=(PROCESSES, LOOKS[-1]))
        intervals = []
        for _row in range(2):
            base, head, null = cluster + NOISE / 2 * rng.standard_normal(cluster.shape)
            for look in LOOKS:
                spread, _ = over_restarts(head[:look], base[:look], null[:look])
                log_ratio = float((head - (base + null) / 2)[:look].mean())
                intervals.append(change_percent(log_ratio, [spread], confidence_of_a_look(2)))
        missed += any(not interval.low <= 0 <= interval.high for interval in intervals)
    assert missed / times < LEVEL


def test_prompts_are_the_sample_of_a_change_of_rounds() -> None:
    """A change that half of the prompts gain by and the others lose by is one of these prompts only."""
    restarts = [simulated(np.random.default_rng(seed), (0, 0)) for seed in range(LOOKS[-1])]
    for restart in restarts:
        for prompt, run in enumerate(restart.runs[1][1]):
            run.seconds *= (0.8, 1.1)[prompt % 2]
    same_rounds = rows_of(restarts, NO_LIMIT)[1]
    for restart in restarts:
        for run in restart.runs[1][1]:
            run.log = "other"
    other_rounds = rows_of(restarts, NO_LIMIT)[1]
    assert (same_rounds.verdict, other_rounds.verdict) == ("faster", "not decidable")
    assert float(same_rounds.slowdown_percent) == float(other_rounds.slowdown_percent)


def test_rounds_are_the_same_only_if_they_are_in_every_restart() -> None:
    restarts = [simulated(np.random.default_rng(seed), (0, 0)) for seed in range(2)]
    restarts[1].runs[1][1][0].log = "other"
    baseline, policy = rows_of(restarts, NO_LIMIT)
    assert (baseline.rounds_identical_percent, policy.rounds_identical_percent) == (100, 100 * 7 / 8)


# By real decoding.


@pytest.mark.slow
@pytest.mark.parametrize(("part", "slower"), [("round", ["slower", "slower"]), ("draft", [None, "slower"])])
def test_a_slowdown_of_15_percent_is_found(tmp_path: Path, part: str, slower: list[str | None]) -> None:
    """In all rounds, or in drafting alone, which the baseline does not do; rounds and texts stay the same."""
    pair = {"drafter": "eagle", "threads": 1}
    prompts = lab_prompts(load_pair(threads=1).tokenizer, 3)
    settings = CompareSettings(pair, [make_policy("fixed_k", k=3)], max_new_tokens=24, clock="cpu")
    with checkouts(part, 15.0) as (base, head):
        rows = compare(base, head, prompts, settings, tmp_path / "out").rows
    verdicts = [row.verdict for row in rows]
    assert all(wanted in (None, verdict) for wanted, verdict in zip(slower, verdicts, strict=True)), rows
    assert part == "round" or verdicts[0] != "slower", rows
    assert all(row.rounds_identical_percent == row.output_identical_percent == 100 for row in rows)


# On the command line: verdicts in words, exit codes, and what is refused before the work.


def test_a_slower_version_is_reported_and_fails(tmp_path: Path) -> None:
    sides = ["--base", stub_checkout(tmp_path / "base"), "--head", stub_checkout(tmp_path / "head", slower=0.06)]
    args = [*sides, "--drafter", "prompt-lookup", "--num-prompts", 1, "--max-new-tokens", 8, "--out", tmp_path / "out"]
    shown = call("realrun", "compare", *args, "--policy", "fixed_k(k=3)")
    assert shown.code == 1 and "slower" in shown.out
    document = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [row["label"] for row in document["rows"]] == ["no speculation", "fixed_k(k=3)"]
    assert [row["verdict"] == "slower" for row in document["rows"]] == [False, True]
    assert document["options"]["clock"] == "cpu"
    assert_refused(call("realrun", "compare", *args), "holds a finished comparison", "--overwrite")


def test_the_memory_of_the_device_is_left_to_the_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command itself loads nothing there; the stub takes any device."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    base = stub_checkout(tmp_path / "base")
    args = ["--base", base, "--head", base, "--drafter", "prompt-lookup", "--num-prompts", 1, "--max-new-tokens", 4]
    args += ["--out", tmp_path / "out", "--minutes", 0.001, "--device", "cuda"]
    shown = call("realrun", "compare", *args, "--json")
    assert shown.code in (0, 3)
    options = json.loads(shown.out)["options"]
    assert (options["pair"]["device"], options["clock"]) == ("cuda", "wall")


def test_exit_codes_tell_slower_from_not_decidable() -> None:
    assert [exit_code(rows) for rows in ([False, False], [False, None], [None, True])] == [0, 3, 1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--head absent", "absent is not a folder"),
        ("--head /", "holds no realrun/ or bin/python"),
        ("--policy fixed_q", "fixed_q"),
        ("--policy fixed_k(q=3)", "no setting 'q'"),
        ("--policy fixed_k(3)", "write for example gamma=0.2"),
        ("--policy time_gain", "learns from a trace"),
        ("--clock cpu --threads 2", "--clock"),
        ("--device cuda:99", "device cuda:99 is not available"),
    ],
)
def test_what_cannot_be_compared_is_refused(tmp_path: Path, options: str, says: str) -> None:
    base = stub_checkout(tmp_path / "base")
    args = ["--base", base, "--head", base, "--drafter", "prompt-lookup", "--out", tmp_path / "out", *options.split()]
    assert_refused(call("realrun", "compare", *args), says)
