"""Every drafter over static caches: the lean path's rounds with every backend, and what a step asks of a GPU."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import realrun.lm.static.llama
from realrun.decode.decoder import Decoder
from realrun.decode.sampling import BLOCK, Sampler
from realrun.drafters.registry import DRAFTERS
from realrun.lm.kernels import use_kernels
from realrun.lm.static.graphs import WARM_UP_RUNS, Results
from realrun.lm.static.llama import StaticLlama
from realrun.lm.static.sizes import Mirrored
from realrun.measure.stream import Stream
from realrun.measure.sweeps import Prober
from realrun.pairs.pair import Pair
from specsim.policy.base import Policy
from specsim.policy.registry import make_policy
from tests.support.drafting import Case, case_pair, prompts_of
from tests.support.tiny import POSITIONS

# A device that counts what it is asked, and CUDA graphs without a GPU: operations, run again on the same memory.

READS = ("tolist", "item", "cpu", "__bool__", "__int__", "__float__")  # what brings a tensor's numbers to the host
NOTHING = ("empty", "new_empty", "empty_strided", "lift_fresh", "detach", "alias")  # operations that launch nothing
ASKS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")


class Device(TorchDispatchMode):
    """Counts what would be asked of a GPU: graphs, launches beside them, copies of inputs to it, bytes back."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs = self.puts = self.bytes_back = self.captured = 0
        self.launches = Counter[str]()
        self.tape: list[tuple[Any, Any, Any, Any]] | None = None
        self.replaying = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        assert name not in ASKS or not self.replaying, f"a recorded pass asks the device: {name}"
        if self.tape is not None:
            self.tape.append((func, args, kwargs or {}, result))
        elif not self.replaying and name not in NOTHING and not is_view(func):
            self.launches[name] += 1
        return result

    @property
    def counts(self) -> dict[str, int]:
        return {
            "graphs": self.graphs,
            "launches": self.launches.total(),
            "puts": self.puts,
            "bytes back": self.bytes_back,
        }


def is_view(func: Any) -> bool:
    return any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns)


def tensors_of(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor)]


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Graphs:
    """Stands in for `realrun.lm.static.graphs.Graphs`.

    What a graph makes on its way is spoilt after every replay, as other graphs may use its memory, and host code does
    not run again.
    """

    def __init__(self, device: Device):
        self.device = device

    def capture(self, run: Callable[[], Results], changed: Iterable[torch.Tensor] = ()) -> Callable[[], Results]:
        device, changed = self.device, [*changed]
        device.captured += 1
        device.replaying = True
        for number in range(WARM_UP_RUNS + 1):
            before = [tensor.clone() for tensor in changed]
            device.tape = [] if number == WARM_UP_RUNS else None
            results = run()
            tape, device.tape = device.tape, None
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)
        device.replaying = False
        assert tape is not None
        kept, calls, made = {address(tensor) for tensor in results}, [], []
        for func, args, kwargs, out in tape:
            given = {address(tensor) for tensor in tensors_of((args, kwargs))}
            own = [address(tensor) not in given for tensor in tensors_of(out)]
            calls.append((func, args, kwargs, tensors_of(out), own))
            made += [
                tensor
                for tensor, fresh in zip(tensors_of(out), own, strict=True)
                if fresh and address(tensor) not in kept
            ]

        def replay() -> Results:
            device.graphs += 1
            device.replaying = True
            for func, args, kwargs, out, own in calls:
                again = func(*args, **kwargs)
                if any(own):
                    for old, new, fresh in zip(out, tensors_of(again), own, strict=True):
                        if fresh:
                            old.copy_(new)
            for tensor in made:
                tensor.fill_(torch.nan if tensor.is_floating_point() else 77)
            device.replaying = False
            return results

        return replay


@contextmanager
def emulated() -> Iterator[Device]:
    """Static passes that are made inside are recorded, and what they ask of their device is counted."""
    device = Device()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(realrun.lm.static.llama, "Graphs", lambda _: Graphs(device))
        made = realrun.lm.static.llama.StaticLlama.__init__

        def recorded(lm: Any, *args: Any, graphs: bool | None = None, **options: Any) -> None:
            made(lm, *args, graphs=True if graphs is None else graphs, **options)

        patch.setattr(realrun.lm.static.llama.StaticLlama, "__init__", recorded)
        for name in READS:
            patch.setattr(torch.Tensor, name, counted_read(device, getattr(torch.Tensor, name)))
        put = Mirrored.put

        def counted_put(mirrored: Mirrored, numbers: Any) -> None:
            assert device.tape is None, "a graph does not read from the host"
            device.puts += 1
            put(mirrored, numbers)

        patch.setattr(Mirrored, "put", counted_put)
        with device:
            yield device


def counted_read(device: Device, read: Callable[..., Any]) -> Callable[..., Any]:
    def counted(tensor: torch.Tensor, *args: Any) -> Any:
        assert not device.replaying, "a recorded pass asks the device"
        device.bytes_back += tensor.nbytes
        replaying, device.replaying = device.replaying, True
        try:
            return read(tensor, *args)
        finally:
            device.replaying = replaying

    return counted


# Every drafter.

K = 4
LIMIT = {"max_draft_tokens": K}
MODES = {mode: Sampler(mode, 0.8, seed=4) for mode in ("greedy", "gumbel", "greedy-draft")}
FIXED = make_policy("fixed_k", {"k": K})
CHAINS = [FIXED, make_policy("adaedl", {"lambda0": 0.2, **LIMIT})]
OF_STATES = [make_policy("cali_ts", LIMIT), make_policy("llama_cpp", {"p_min": 0.3, **LIMIT})]
TREES = [make_policy("vct", {"width": 2, "depth": K}), make_policy("eagle2", {"nodes": 8, "depth": K, "top_k": 3})]
Run = list[tuple[list[int], list[tuple[int, int, int, int, int]]]]

kinds = pytest.mark.parametrize("kind", DRAFTERS)
RECORDED = [name for name in DRAFTERS if name != "block"]  # whose draft steps are graphs
modes = pytest.mark.parametrize("mode", MODES)


@cache
def pair_of(kind: str, dtype: torch.dtype) -> Pair:
    """Of a target over whose layers the static pass goes."""
    pair: Pair = copy.deepcopy(case_pair(Case(kind)))
    for module in (pair.target, *pair.drafter.weights(pair.target)):
        module.to(dtype)
    return pair


def policies_of(kind: str) -> list[Policy]:
    drafter = DRAFTERS[kind.removesuffix("-vllm")]
    return [*CHAINS, *(OF_STATES if drafter.has_states else []), *(TREES if drafter.trees else [])]


def runs_of(kind: str, kernels: str, sampler: Sampler, policies: list[Policy], dtype: torch.dtype, tokens: int) -> Run:
    pair = pair_of(kind, dtype)
    with use_kernels(kernels):
        decoder = Decoder(*pair.make_drafter(), (), sampler)
        assert isinstance(getattr(decoder.target, "inner", decoder.target), StaticLlama) == (kernels != "auto")
        assert kind in ("prompt-lookup", "block") or decoder.drafter.lm.describes == (kernels != "auto")  # type: ignore[attr-defined]
        runs = [
            decoder.decode(prompt.tokens, tokens, policy, sequence=number)
            for policy in policies
            for number, prompt in enumerate(prompts_of(kind)[:2])
        ]
    return [(run.tokens, run.full_log()) for run in runs]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@modes
@pytest.mark.parametrize("kind", [*DRAFTERS, "eagle-vllm"])
def test_rounds_are_those_of_the_lean_path(kind: str, mode: str, dtype: torch.dtype, graphs: bool) -> None:
    """Launched eagerly, and recorded: each policy after the others over the same caches and graphs."""
    rest = kind, MODES[mode], policies_of(kind), dtype, 10
    lean = runs_of(rest[0], "auto", *rest[1:])
    with emulated() if graphs else nullcontext():
        assert runs_of(rest[0], "reference", *rest[1:]) == lean


ON_CPU = [
    pytest.param("triton", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is not interpreted")),
    "cuda",
]


@pytest.mark.parametrize("kernels", ON_CPU)
@modes
@kinds
def test_rounds_are_the_same_with_every_backend(kind: str, mode: str, kernels: str) -> None:
    policies = [FIXED, *(TREES[:1] if DRAFTERS[kind].trees else [])]
    rest = MODES[mode], policies, torch.float32, 6
    assert runs_of(kind, kernels, *rest) == runs_of(kind, "auto", *rest)


def difference(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in after}


class Asked:
    """What a decoder asks of its device, step by step and round by round, with all that is recorded recorded before.

    steps : of every draft step; rounds : of every round, with what it drafted; captured : graphs made meanwhile
    """

    def __init__(self, kind: str, policy: Policy | None, tokens: int = 24):
        self.steps: list[dict[str, int]] = []
        self.rounds: list[dict[str, int]] = []
        pair = pair_of(kind, torch.float32)
        with use_kernels("reference"), emulated() as device:
            self.device = device
            decoder = Decoder(*pair.make_drafter(), (), Sampler())
            for prompt in prompts_of(kind):
                decoder.decode(prompt.tokens, tokens, policy)
            captured = device.captured
            self._watch(decoder)
            for prompt in prompts_of(kind):
                decoder.decode(prompt.tokens, tokens, policy)
            self.captured = device.captured - captured

    def _watch(self, decoder: Decoder) -> None:
        advance, clock, device = decoder.round, decoder.clock, self.device
        waits = 0

        def counted_clock() -> float:
            nonlocal waits
            waits += 1
            return clock()

        def counted_round(*args: Any) -> Any:
            nonlocal waits
            before, waits = device.counts, 0
            result = advance(*args)
            last = args[4][-1]  # of the rounds so far
            self.rounds.append(
                difference(device.counts, before)
                | {"waits": waits, "drafted": last.drafted, "verified": last.verified, "passes": len(last.level_nodes)}
            )
            return result

        decoder.clock, decoder.round = counted_clock, counted_round  # type: ignore[method-assign]
        lm = getattr(decoder.drafter, "lm", None)
        if lm is None or not lm.describes:
            return
        describe = lm.describe

        def counted_describe(*args: Any, **kwargs: Any) -> torch.Tensor:
            before = device.counts
            statistics: torch.Tensor = describe(*args, **kwargs)
            self.steps.append(difference(device.counts, before) | {"described bytes": statistics.nbytes})
            return statistics

        lm.describe = counted_describe


DESCRIBED_BYTES = {
    FIXED.name: 16,
    "cali_ts": 20,
    "llama_cpp": 20,
}  # bytes: token, three features, and a fourth where it is read
ROWS_AT_ONCE = (
    "medusa",
    "space",
)  # what a round proposes comes with the target's pass: a copy a round brings it into place


@pytest.mark.parametrize("policy", [FIXED, *OF_STATES], ids=lambda policy: policy.name)
@pytest.mark.parametrize("kind", [name for name in RECORDED if DRAFTERS[name].has_states])
def test_a_draft_step_is_one_launch_and_a_few_bytes_back(kind: str, policy: Policy) -> None:
    asked = Asked(kind, policy)
    assert asked.captured == 0  # nothing is recorded on the clock
    assert len(asked.steps) == sum(round_["drafted"] for round_ in asked.rounds) > 40
    for step in asked.steps:
        assert (step["graphs"], step["launches"], step["described bytes"]) == (1, 0, DESCRIBED_BYTES[policy.name])
    # Only the first step of a round gets its tokens from the host; the others find them on the device.
    assert sum(step["puts"] == 0 for step in asked.steps) >= len(asked.steps) - len(asked.rounds)
    for round_ in asked.rounds:
        scored = 3 if policy.name == "cali_ts" else 0  # the target's part of the scores
        assert round_["graphs"] == round_["drafted"] + 1
        assert round_["launches"] <= 1 + (kind in ROWS_AT_ONCE) * 2 + scored
        assert round_["puts"] <= 4 and round_["waits"] == 1
        assert round_["bytes back"] == DESCRIBED_BYTES[policy.name] * round_["drafted"] + 8 * (round_["verified"] + 1)


@pytest.mark.parametrize("kind", [name for name in RECORDED if DRAFTERS[name].trees])
def test_a_pass_of_a_tree_is_one_launch(kind: str) -> None:
    """EESD's target takes another launch for its lower layers over rows that were never fed."""
    asked = Asked(kind, TREES[0])
    assert asked.captured == 0
    for round_ in asked.rounds:
        drafting = min(round_["passes"], 1) if kind == "medusa" else round_["passes"]  # all heads run at once
        assert round_["graphs"] - drafting in ((1, 2) if kind == "eesd" else (1,))
        assert round_["waits"] == 2
    assert any(round_["passes"] == K for round_ in asked.rounds)


@pytest.mark.parametrize("kind", [name for name in RECORDED if DRAFTERS[name].has_states])
def test_a_longer_output_leaves_nothing_of_the_shorter_ones_noise(kind: str) -> None:
    """It lies on the device, V numbers for every position."""
    pair, sampler = pair_of(kind, torch.float32), MODES["gumbel"]
    with use_kernels("reference"), emulated():
        drafter = pair.make_drafter()[1]
        drafter.prepare(40, sampler, 0, BLOCK)
        recorded = drafter.lm.recorded
        before, (short,) = len(recorded.replays), map(weakref.ref, drafter._descriptions.values())
        drafter.prepare(40, sampler, 0, BLOCK + 1)
        gc.collect()
        assert short() is None and 0 < before == len(recorded.replays)


@kinds
def test_a_step_without_a_draft_is_one_launch_one_copy_and_one_wait(kind: str) -> None:
    asked = Asked(kind, None)
    assert asked.captured == 0 and not asked.steps
    for round_ in asked.rounds:
        assert (round_["graphs"], round_["launches"], round_["puts"], round_["waits"], round_["bytes back"]) == (
            1,
            1,
            1,
            1,
            8,
        )


def test_prompt_lookup_asks_for_the_targets_pass_alone() -> None:
    asked = Asked("prompt-lookup", FIXED)
    assert any(round_["drafted"] for round_ in asked.rounds) and asked.captured == 0
    assert all((round_["graphs"], round_["launches"], round_["waits"]) == (1, 1, 1) for round_ in asked.rounds)


@pytest.mark.parametrize("kind", ["model", "eesd", "edd", "eagle", "eagle3", "medusa", "self-sd", "space"])
def test_probes_of_costs_record_nothing_on_their_clock(kind: str) -> None:
    """After each size of draft once, for warmth; scores are made once only."""
    pair = pair_of(kind, torch.float32)
    with use_kernels("reference"), emulated() as device:
        prober = Prober(pair, depth=3, tree_tokens=3, sampler=Sampler(), seed=0)
        prober.warm(40)
        prober.begin([5, 6, 7, 8, 9, 10])
        prober.baseline(Stream(), 1)
        for probe in prober.chains:
            prober.run(probe, Stream())
        before = device.captured
        for probe in prober.chains:
            prober.run(probe, Stream())
        prober.scores(Stream())
        prober.baseline(Stream(), 2)
        assert device.captured == before


@pytest.mark.parametrize("kind", ["eesd", "edd", "eagle", "eagle3", "self-sd"])
def test_drafts_reach_the_end_of_the_models_positions(kind: str) -> None:
    """Rows that fill up a size, and stand beyond it, read nothing that there is not."""
    pair = pair_of(kind, torch.float64)
    prompt, runs = [1 + i % 90 for i in range(POSITIONS - 12)], []
    for kernels in ("auto", "reference"):
        with use_kernels(kernels):
            decoder = Decoder(*pair.make_drafter(), (), Sampler())
            runs += [[(run.tokens, run.full_log()) for run in (decoder.decode(prompt, 12, p) for p in (FIXED, *TREES))]]
    assert runs[0] == runs[1]
