"""The one clock: what it reads, that all of decoding reads it, and where the CPU's is refused."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.drafters.lookup import LookupKind
from realrun.lm.clock import CPU, WALL, check_clock, clock_name, device_clock, now, use_clock
from realrun.measure.profile import profile
from realrun.pairs.joined import join_pairs
from realrun.pairs.pair import Pair
from specsim.policy.registry import make_policy
from tests.support.checks import refusal
from tests.support.commands import assert_refused, call
from tests.support.pairs.inside import pair_of
from tests.support.tiny import tiny_pair, tiny_prompts


@pytest.fixture
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def forbidden(*args: Any, **options: Any) -> Any:
    raise AssertionError("another clock was read, or a model loaded")


def lookup_pair() -> Pair:
    return replace(tiny_pair(), drafter=LookupKind(), draft_name="lookup")


PAIRS = {
    "model": (tiny_pair, "fixed_k", {"k": 3}),
    "tree": (tiny_pair, "eagle2", {"nodes": 6, "top_k": 3, "depth": 3}),
    "dropped tokens": (tiny_pair, "llama_cpp", {}),
    "inside": (lambda: pair_of("edd"), "adaedl", {"max_draft_tokens": 4}),
    "lookup": (lookup_pair, "fixed_k", {"k": 3}),
    "joined": (lambda: join_pairs([lookup_pair(), tiny_pair()]), "switch_match", {}),
}


@pytest.mark.parametrize("name", [CPU, WALL])
@pytest.mark.parametrize("kind", PAIRS)
def test_all_of_decoding_reads_the_chosen_clock(
    kind: str, name: str, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second of a round comes from readings of one clock, which here stands a second further each time."""
    make, policy, settings = PAIRS[kind]
    readings = iter(range(10**9))
    monkeypatch.setattr(time, "perf_counter" if name == CPU else "process_time", forbidden)
    monkeypatch.setattr(time, "process_time" if name == CPU else "perf_counter", lambda: float(next(readings)))
    with use_clock(name):
        pair: Pair = make()
        decoder = Decoder(*pair.make_drafter(), (), Sampler("greedy"))
        decoded = decoder.decode(tiny_prompts(1)[0].tokens, 12, make_policy(policy, settings))
    assert decoded.seconds == int(decoded.seconds) > 0


def test_the_result_names_the_clock(one_thread: None) -> None:
    assert tiny_pair().environment["clock"] == WALL
    with use_clock(CPU):
        assert tiny_pair().environment["clock"] == clock_name() == CPU
        assert profile(tiny_pair(), contexts=[4], depth=1, limit_s=0, tree_tokens=0)["clock"] == CPU
    assert clock_name() == WALL


def test_the_cpu_clock_counts_native_threads_and_no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the process's: threads that torch or a library starts are in it, unlike in the calling thread's own."""
    monkeypatch.setattr(time, "process_time", lambda: 7.0)
    monkeypatch.setattr(time, "thread_time", forbidden)
    with use_clock(CPU):
        assert now() == device_clock_of_one_thread(monkeypatch)() == 7.0


def device_clock_of_one_thread(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    return device_clock(torch.device("cpu"))


@pytest.mark.parametrize(("device", "threads"), [("cuda", 1), ("cuda:1", 1), ("cpu", 2), ("cpu", 0)])
def test_the_cpu_clock_is_refused_where_others_do_the_work(
    device: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal(lambda: check_clock(CPU, device, threads), "--clock cpu", "--device cpu --threads 1")
    check_clock(WALL, device, threads)
    if threads:
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
        with use_clock(CPU):
            refusal(lambda: device_clock(torch.device(device)), "--clock cpu")


@pytest.mark.parametrize("command", [["validate", "--out"], ["board", "--out"], ["profile"]])
def test_commands_refuse_it_before_the_work(command: list[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realrun.pairs.pair.load_pair", forbidden)
    result = call("realrun", *command, tmp_path / "out", "--clock", "cpu", "--threads", 2)
    assert_refused(result, "--clock cpu", "--threads 1")


@pytest.mark.parametrize("command", [["validate", "--out"], ["board", "--out"], ["engine", "validate"]])
@pytest.mark.parametrize(("repeats", "required"), [(2, 3), (1, 3), (4, 5)])
def test_commands_refuse_repeats_without_a_median(
    command: list[str], repeats: int, required: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("realrun.pairs.pair.load_pair", forbidden)
    out = [tmp_path / "out"] if "--out" in command else []
    result = call("realrun", *command, *out, "--repeats", repeats)
    assert_refused(result, f"{repeats} repeats have no median run", f"pass --repeats {required}")
