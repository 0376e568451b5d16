"""Run vLLM's two files of adaptive verification on a CPU: `VLLM_PYTHON -m tests.support.vllm_adaptive`, vLLM 0.32.

Triton interprets its kernels. The load is 1,040 steps of synthetic drafts: requests arrive, are prefilled in a step,
decode and leave; some leave after a part of their prompt. The file has the number of tokens of each draft that vLLM
verifies in every step, the coefficients after every refit, and the tables of costs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).parents[1] / "specsim" / "serving" / "vllm_adaptive.json"
K, SLOTS, STEPS, WORDS = 5, 12, 1040, 4
LIMIT, MAX_TOKENS = 512, 8192
ASKED = [1, 3, 8, 9, 60, 500, 512, 513, 700, 768, 900, 5000, 8192]  # sizes whose costs are in the file


def verify_ms(tokens: float) -> float:
    """Milliseconds of a pass. They fall in places, where the profile has to stay monotonic."""
    return 4.0 + 0.05 * tokens + 0.4 * float(np.sin(tokens))


def draft_ms(requests: float) -> float:
    return 0.4 + 0.02 * requests + 0.05 * float(np.cos(3 * requests))


@dataclass
class Turn:
    """A step: requests that decode, the drafter's confidence in their drafts, and the tokens that would be accepted.

    logit : [R, K], of the likeliest of four words; that of the other three is 0
    match : [R], draft tokens that would be accepted
    prompts : number of each new request, tokens that are read of its prompt, and whether they complete it
    """

    request: list[int]
    logit: Any
    match: list[int]
    prompts: list[tuple[int, int, bool]]

    @property
    def prob(self) -> Any:
        """The drafter's largest probability [R, K]."""
        return (1 / (1 + (WORDS - 1) * np.exp(-self.logit.astype(np.float64)))).astype(np.float32)


def turns() -> Iterator[Turn]:
    """Generate the steps.

    A drafted token at position i, from 0, whose log odds are f by the drafter's probability, is accepted with
    probability sigmoid(1.2 f - 1.0 - 0.1 i), and after 600 steps with sigmoid(0.7 f - 0.3 i).
    """
    random = np.random.default_rng(0)
    running: list[int] = []
    number = 0
    for step in range(STEPS):
        prompts: list[tuple[int, int, bool]] = []
        if len(running) < SLOTS - 1 and random.random() < 0.3:
            prompts.append((number, int(random.integers(1, 300)), bool(random.random() < 0.7)))
            number += 1
        logit = (3 * np.abs(random.standard_normal((len(running), K)))).astype(np.float32)
        feature = logit - np.log(WORDS - 1)
        slope, bias, fall = (1.2, -1.0, 0.1) if step < 600 else (0.7, 0.0, 0.3)
        chance = 1 / (1 + np.exp(-(slope * feature + bias - fall * np.arange(K))))
        accepted = np.cumprod(random.random(chance.shape) < chance, axis=1).sum(axis=1)
        yield Turn(running.copy(), logit, accepted.tolist(), prompts)
        running = [each for each in running if random.random() < 0.97]
        running += [request for request, _, ends in prompts if ends]


class _Anything:
    """A stub of CUDA streams and events: nothing is asynchronous on a CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def load() -> tuple[Any, Any]:
    """Import both files of vLLM, with stubs of the modules that need a GPU."""
    import contextlib
    import importlib
    import importlib.util
    import sys
    from types import ModuleType, SimpleNamespace

    import torch
    import triton  # type: ignore[import-not-found,import-untyped]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped]

    globals()["tl"] = tl  # where the interpreter looks for it

    @triton.jit
    def _compute_max_and_sumexp(logits):  # type: ignore[no-untyped-def]
        largest = tl.max(logits, axis=0)
        return largest, tl.sum(tl.exp(logits - largest), axis=0)

    def module(name: str, **names: Any) -> None:
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(names)

    class Buffer:
        def __init__(self, *shape: int, dtype: Any, device: Any) -> None:
            self.gpu, self.cpu = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
            self.np = self.cpu.numpy()

        def copy_to_cpu(self) -> None:
            self.cpu.copy_(self.gpu)

    # The names that the two files import, without the packages around them.
    home = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])  # type: ignore[union-attr,index]
    logger = SimpleNamespace(debug=print_nothing)
    module("vllm")
    module("vllm.envs", VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN=8192)
    sys.modules["vllm"].envs = sys.modules["vllm.envs"]  # type: ignore[attr-defined]
    module("vllm.config.compilation", CUDAGraphMode=object)
    group = SimpleNamespace(broadcast_object=lambda value, src: value)
    module("vllm.distributed.parallel_state", get_tp_group=lambda: group)
    module("vllm.logger", init_logger=lambda name: logger)
    module("vllm.utils.gpu_sync_debug", gpu_sync_allowed=contextlib.nullcontext)
    module("vllm.utils.torch_utils", async_tensor_h2d=lambda array, out: out.copy_(torch.from_numpy(array)))
    module("vllm.v1.attention.backend", AttentionCGSupport=object)
    module("vllm.v1.utils", CpuGpuBuffer=Buffer)
    streams = {"StepTimingSample": object, "stream": lambda *args: contextlib.nullcontext()}
    module("vllm.v1.worker.gpu.async_utils", **streams)
    unused = ("get_query_lens_mismatch_unsupported_backend", "get_varlen_cudagraph_unsupported_backend")
    module("vllm.v1.worker.gpu.attn_utils", **dict.fromkeys(unused))
    module("vllm.triton_utils", triton=triton, tl=tl)
    utils = "vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils"
    module(utils, _compute_max_and_sumexp=_compute_max_and_sumexp)
    torch.cuda.Stream = torch.cuda.Event = torch.cuda.current_stream = _Anything  # type: ignore[assignment,misc]

    def read(name: str) -> Any:
        spec = importlib.util.spec_from_file_location(name, home / "v1/worker/gpu/spec_decode" / f"{name}.py")
        assert spec is not None and spec.loader is not None
        found = importlib.util.module_from_spec(spec)
        sys.modules[name] = found
        spec.loader.exec_module(found)
        return found

    return read("adaptive_verification"), read("acceptance_estimator")


def print_nothing(*args: Any) -> None: ...


def main() -> None:
    import os
    from types import SimpleNamespace

    os.environ |= {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
    import torch

    adaptive, estimating = load()
    states = SimpleNamespace(
        num_speculative_steps=K,
        device=torch.device("cpu"),
        max_num_reqs=SLOTS,
        max_num_batched_tokens=MAX_TOKENS,
        req_id_to_index={},
        num_computed_tokens_np=np.zeros(SLOTS, dtype=np.int64),
        prefill_len=SimpleNamespace(np=np.zeros(SLOTS, dtype=np.int64)),
    )
    manager = adaptive.AdaptiveVerificationManager(states, torch.zeros(SLOTS + 1, dtype=torch.int32), 1, 1 << 20)
    estimator = estimating.OnlineAcceptanceEstimator(SLOTS, K, states.device)
    captured = [1, 2, 4, *range(8, 256, 8), *range(256, LIMIT + 1, 16)]
    sizes = [batch["num_tokens"] for batch in manager.batches_to_profile(captured)]
    profile = [
        SimpleNamespace(
            num_reqs=min(size, SLOTS),
            drafter_ms=draft_ms(min(size, SLOTS)),
            num_target_tokens=size,
            forward_ms=verify_ms(size),
            full_cudagraph=size <= LIMIT,
        )
        for size in sizes
    ]
    manager.set_initial_cost_curves(profile)
    draft, verify = manager.cost_tables
    admitted: list[str] = []
    coefficients: list[list[float]] = []
    confidences = torch.empty(SLOTS, K)
    temperature = torch.zeros(SLOTS)
    for turn in turns():
        # These drafts were made at the end of the previous step.
        slots = states.req_id_to_index
        idx = torch.tensor([slots[str(request)] for request in turn.request], dtype=torch.int32)
        if len(idx):
            logits = torch.zeros(len(idx), K, WORDS)
            logits[:, :, 0] = torch.from_numpy(turn.logit)
            for place in range(K):
                estimator.predict(logits[:, place], idx, torch.tensor(place), confidences, temperature)
            manager.record_confidences(confidences, SimpleNamespace(num_reqs=len(idx), idx_mapping=idx.long()))
        for gone in set(slots) - {str(request) for request in turn.request}:
            del slots[gone]
        for request, _, _ in turn.prompts:
            slots[str(request)] = min(set(range(SLOTS)) - set(slots.values()))
            manager.add_request(slots[str(request)])
        names = [str(request) for request in turn.request] + [str(request) for request, _, _ in turn.prompts]
        if not names:
            admitted.append("")
            continue
        tokens = {str(request): 1 + K for request in turn.request}
        for request in turn.request:
            states.num_computed_tokens_np[slots[str(request)]] = states.prefill_len.np[slots[str(request)]] = 1
        for request, new, ends in turn.prompts:
            tokens[str(request)] = new
            states.num_computed_tokens_np[slots[str(request)]] = 0
            states.prefill_len.np[slots[str(request)]] = new if ends else new + 1
        manager.get_num_tokens(tokens, {str(request): [0] * K for request in turn.request})
        mapping = torch.tensor([slots[name] for name in names], dtype=torch.int32)
        manager.reallocate_drafts(names, mapping.long())
        counts = manager._batch_draft_capacity[: len(turn.request)].tolist()
        admitted.append("".join(map(str, counts)))
        accepted = [min(match, count) for match, count in zip(turn.match, counts, strict=True)]
        sampled = [1 + each for each in accepted] + [int(ends) for _, _, ends in turn.prompts]
        rejected = [count - each for count, each in zip(counts, accepted, strict=True)] + [0] * len(turn.prompts)
        if turn.request:
            estimator.step(mapping, *(torch.tensor(each, dtype=torch.int32) for each in (sampled, rejected)))
            if estimator._steps_since_refit == 0:
                coefficients.append([float(estimator.slope[0]), *estimator.intercepts.tolist()])
    tables = {"draft_ms": draft.tolist(), "verify_ms": [float(verify[size]) for size in ASKED]}
    FILE.write_text(json.dumps({**tables, "coefficients": coefficients, "admitted": admitted}) + "\n")


if __name__ == "__main__":
    main()
