"""Stage smoke: does everything run here at all, and does it agree with the CPU?

The first minute on a machine; without a GPU, whether its path agrees with the CPU's own. Every check stands alone
and is saved as soon as it is done, so that a crash leaves what was found before it.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend
from transformers import AutoTokenizer

from realrun.campaign.job import Job
from realrun.campaign.profile import against_floor
from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.lm.kernels import use_kernels
from realrun.lm.static.llama import StaticLlama
from realrun.measure.cost_grid import Axes, run_cost_grid
from realrun.pairs.lab_drafters import LAB_DRAFTERS, LAB_WEIGHTS, has_lab_drafter
from realrun.pairs.pair import Pair, load_pair
from realrun.pairs.prompts import Prompt, lab_prompts
from realrun.pairs.shapes import random_model, shape_config
from speckernels import Unsupported, use_backend
from speckernels.bench.cases import OPERATIONS
from speckernels.bench.cases.base import SEED, Arguments, Operation
from speckernels.bench.inputs import copied
from speckernels.bench.machine import availability, measure_ceilings, versions
from speckernels.runtime.dispatch import AUTO
from specsim.cost.model import SPACE
from specsim.policy.registry import make_policy

BACKENDS = ("triton", "cuda")
STEP_SHAPES = ("llama-3.2-1b", "llama-3.1-8b")
STEP_AXES = Axes(tokens=(1,), contexts=(128,), batches=(1,))
DRAFTERS = ("model", "prompt-lookup", *filter(has_lab_drafter, LAB_DRAFTERS))
NEW_TOKENS, K = 16, 3
Check = Callable[[Job], Any]


def run(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = job.previous().get("checks", {})
    checks = {name: result for name, result in found.items() if not _problem(result)}
    errors: dict[str, str] = {}
    left = []
    tasks = [*_tasks()]
    for number, (name, check) in enumerate(tasks):
        job.report(number, len(tasks))
        if name in checks:
            continue
        if job.left_s() == 0:
            left.append(name)
            continue
        try:
            checks[name] = check(job)
        except Exception as error:  # whatever it is, the other checks are worth having
            checks[name] = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        if problem := _problem(checks[name]):
            errors[name] = problem
        job.save({"checks": checks, "errors": errors})
        gc.collect()
    return {"checks": checks, "errors": errors, "left": left, "complete": not left and not errors}


def _tasks() -> Iterator[tuple[str, Check]]:
    yield "versions", lambda job: versions() | availability()
    yield "copy bandwidth", lambda job: {"copy_gb_s": copy_gb_s(job.device)}
    yield "attention of the library", attention_backends
    for operation in OPERATIONS:
        yield f"operation {operation.name}", partial(kernels_agree, operation=operation)
    yield "graph replay", graphs_agree
    for shape in STEP_SHAPES:
        yield f"step of {shape}", partial(step_time, shape=shape)
    for drafter in DRAFTERS:
        yield f"drafter {drafter}", partial(drafter_agrees, drafter=drafter)


def _problem(result: Mapping[str, Any]) -> str:
    """Describe what a check found wrong; empty if nothing is."""
    wrong = [f"{key}: {value}" for key, value in result.items() if key == "error" or str(value).startswith("differs")]
    return "; ".join(wrong)


def attention_backends(job: Job) -> dict[str, str]:
    """Which kernel the library chooses for prompts and for masked passes."""
    query, keys = (torch.randn(1, heads, 64, 64, dtype=job.dtype, device=job.device) for heads in (8, 8))
    mask = torch.ones(64, 64, dtype=torch.bool, device=job.device)
    chosen = {
        "prompt": torch._fused_sdp_choice(query, keys, keys, is_causal=True),
        "masked": torch._fused_sdp_choice(query, keys, keys, attn_mask=mask),
    }
    names = {int(getattr(SDPBackend, name)): name for name in dir(SDPBackend) if name.isupper()}
    return {what: names.get(number, str(number)) for what, number in chosen.items()}


def _widened(args: Arguments) -> Arguments:
    """The same in float64."""
    return tuple(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)


@torch.no_grad()
def kernels_agree(job: Job, operation: Operation) -> dict[str, str]:
    """Every backend against the reference, in float64 where that takes it, at a true shape on a GPU."""
    case = operation.cases[0] if job.full else operation.small[0]
    args = operation.inputs(case, torch.Generator(job.device).manual_seed(SEED))
    expected, verdict = operation.reference(*copied(args)), "agrees with the reference"
    if any(isinstance(a, torch.Tensor) and a.is_floating_point() for a in args):
        with suppress(Exception):  # choices by weights in fixed point, say, are of float32 by definition
            exact = operation.reference(*_widened(copied(args)))
            operation.check(exact, expected, case)
            expected, verdict = exact, "agrees with float64"
    found = {"case": str(case)}
    for backend in BACKENDS:
        try:
            with use_backend(backend):
                operation.check(expected, operation.run(*copied(args)), case)
            found[backend] = verdict
        except Unsupported as error:
            found[backend] = f"not for this: {error}"
        except Exception as error:
            found[backend] = f"differs or fails: {type(error).__name__}: {error}"
    return found


@torch.inference_mode()
def graphs_agree(job: Job) -> dict[str, str]:
    """Check that a recorded pass gives the logits of the eager pass."""
    if not job.full:
        return {"graphs": "none without a GPU"}
    model = random_model(shape_config("llama-3.2-1b", smoke=True), job.device, job.dtype, job.seed)
    logits = []
    for graphs in (False, True):
        lm = StaticLlama(model, capacity=64, graphs=graphs)
        lm.prefill([5, 6, 7])
        logits.append([lm.forward([token]).clone() for token in (8, 9, 10)])
    same = all(torch.equal(*pair) for pair in zip(*logits, strict=True))
    return {"graphs": "replayed passes equal eager ones to the bit" if same else "differs from the eager pass"}


def step_time(job: Job, shape: str) -> dict[str, Any]:
    """The step of a token at batch 1, and the time that reading the weights takes at the copy bandwidth."""
    grid = run_cost_grid(
        shape, axes=STEP_AXES, device=str(job.device), dtype=job.dtype_name, smoke=not job.full, seed=job.seed
    )
    return against_floor(shape, grid, copy_gb_s(job.device), job)


@cache
def copy_gb_s(device: torch.device) -> float:
    """The copy bandwidth, measured once."""
    return measure_ceilings(device).copy_gb_s


def drafter_agrees(job: Job, drafter: str) -> dict[str, Any]:
    """Greedy tokens of the lab's pair over the static path here and over the plain path on the CPU, both in float32."""
    texts = []
    loaded: dict[str, Pair] = {}
    for device, kernels in ((str(job.device), AUTO if job.full else "reference"), ("cpu", AUTO)):
        if device not in loaded:
            loaded[device] = load_pair(drafter=drafter, device=device, dtype="float32")
        pair = loaded[device]
        policy = make_policy("space_k", {"k": K}) if pair.drafter.name == SPACE else make_policy("fixed_k", {"k": K})
        with use_kernels(kernels):
            decoder = Decoder(*pair.make_drafter(), pair.eos_token_ids, Sampler())
            decoded = decoder.decode(_lab_prompt().tokens, NEW_TOKENS, policy)
        texts.append((decoded.tokens, decoded.log()))
    (here, rounds), (there, expected) = texts
    if here == there:
        return {"text": "as on the CPU", "rounds": "as on the CPU" if rounds == expected else "others than on the CPU"}
    first = next((i for i, (a, b) in enumerate(zip(here, there, strict=False)) if a != b), min(map(len, (here, there))))
    return {"text": f"differs from the CPU's at token {first}", "here": here, "there": there}


@cache
def _lab_prompt() -> Prompt:
    """Read one prompt with the lab's tokenizer, which all its drafters share; reading the corpus takes a second."""
    (prompt,) = lab_prompts(AutoTokenizer.from_pretrained(LAB_WEIGHTS / "target"), 1)
    return prompt
