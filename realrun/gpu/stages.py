"""Use a GPU that is there for minutes: stages that end in time, leave a result file, and are not done twice.

Without a GPU the stages run at reduced sizes. What a stage needs is imported when its turn comes, so that the others
run on a machine that lacks it.
"""

from __future__ import annotations

import gc
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

import torch

from realrun.gpu.job import Job, OutOfTime
from realrun.kept_files import log_end, read_kept
from realrun.provenance import installed, provenance
from specsim.io.errors import InputError
from specsim.io.files import remove_folder, write_json
from specsim.io.progress import Progress

KIND, VERSION = "specsim-gpu-stage", 1
TARGET, REDUCED_TARGET = "smollm2", "lab"
AGREES = "agrees_with_the_reference"  # the tests of that, one for each operation and backend
WEIGHTS = "weights"  # folder beside the results, with a folder for each trained drafter
TEXT_FILE = "text.npz"
ASKED_SHARE = 0.6  # of the text, whose questions a chat model makes up
AT_ONCE = 12  # trainings on a card
LATER = ("draft-12", "Self-SD")  # trainings that are begun when all else is done
SAMPLED = ("EAGLE", "EESD", "MEDUSA-1", "SPACE", "draft-6")  # drafters that also decode at a temperature
SHAPES = ("llama-3.1-8b", "llama-3.2-1b")
CONTEXT = 1024  # tokens before every prompt of these shapes
SCRIPT = "example:lab-model"  # trace that says which of their drafted tokens are accepted


class TextSizes(NamedTuple):
    """How much text the target writes.

    questions : of specsim's own; new_tokens : of an answer, at most; batch : sequences at once
    tokens : counts, each of which leaves a text to train on
    """

    questions: int
    new_tokens: int
    batch: int
    tokens: Sequence[int]


TEXT = TextSizes(9_000, 256, 2048, (1_000_000, 3_000_000, 6_000_000))
REDUCED_TEXT = TextSizes(40, 24, 16, (2_000,))


class Result(TypedDict):
    """What every result file holds, whatever else its stage puts into it."""

    kind: Literal["specsim-gpu-stage"]
    complete: bool


def check(job: Job) -> dict[str, Any]:
    """Check each operation once against its reference; report packages, clocks and free memory."""
    from realrun.pairs.shapes import free_bytes
    from speckernels import Unavailable
    from speckernels.runtime.build import architecture, build_all

    if job.full:  # all at once on all cores, not one by one inside the tests
        with suppress(Unavailable):  # the tests then say which kernels are missing
            build_all((architecture(*torch.cuda.get_device_capability(job.device)),))
    fields = "driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu"
    query = ("nvidia-smi", f"--query-gpu={fields}", "--format=csv")
    which = ("-m", "gpu", "-k", AGREES) if job.full else ("-k", f"{AGREES} and compact_kv")
    return {
        "packages": {name: installed(name) for name in ("triton", "flashinfer-python")},
        "clocks": job.run(*query).splitlines() if shutil.which(query[0]) else [],
        "free_gb": free_bytes(job.device) / 1e9,
        "tests": job.pytest("tests/kernels/ops/test_contract.py", *which),
    }


def text(job: Job) -> dict[str, Any]:
    """Let the target answer questions of specsim's and its own, as many as fit into the time."""
    from realrun.pairs.pair import load_target
    from realrun.pairs.prompts import training_prompts
    from realrun.train.common.distill import DistillSettings, TextSettings, save_text, training_text

    sizes = TEXT if job.full else REDUCED_TEXT
    pair = load_target(job.target, **job.machine)
    settings = TextSettings(
        questions=training_prompts(pair.tokenizer, sizes.questions, job.seed),
        asked_share=ASKED_SHARE if pair.tokenizer.chat_template else 0.0,
        distill=DistillSettings(new_tokens=sizes.new_tokens, batch=sizes.batch, seed=job.seed),
    )
    begun, made = time.monotonic(), None
    for count in sizes.tokens:  # the next count goes on from the shards of the one before
        try:
            made = training_text(pair, replace(settings, generated_tokens=count), job.work, job.report)
        except OutOfTime:
            if made is None:
                raise
            break
        save_text(made, job.work / TEXT_FILE)
        spent_s = time.monotonic() - begun
    assert made is not None
    tokens = sum(len(part) for part, _ in made.sources) + len(made.held_out)
    facts = {"tokens": tokens, "tokens_per_second": round(tokens / spent_s), "text": made.facts}
    return {"target": pair.target_name, **facts}


def train(job: Job, later: bool) -> dict[str, Any]:
    """Train the papers' drafters on that text, several at once. later : those in LATER, or the others"""
    from realrun.gpu.training import KILLED, NO_TIME, RECIPES, REDUCED, results_in, train_all

    every, out = RECIPES if job.full else REDUCED, job.home / WEIGHTS
    recipes = {name: recipe for name, recipe in every.items() if (name in LATER) == later}
    if not recipes:
        return {"skipped": "no such training at reduced sizes"}
    try:
        trained = train_all(
            recipes,
            target=job.target,
            text=job.home / "text" / TEXT_FILE,
            out=out,
            minutes=job.seconds / 60,
            device=str(job.device),
            dtype=job.dtype,
            at_once=AT_ONCE if job.full else 2,
            progress=job.report,
        )
    except OutOfTime as late:
        return {"complete": False, "left": str(late), "trainings": results_in(out, recipes)}
    if left := [name for name, result in trained.items() if result.get("error") in (KILLED, NO_TIME)]:
        return {"complete": False, "left": f"train {', '.join(left)}", "trainings": trained}
    return {"trainings": trained}


def decode(job: Job, temperature: float) -> dict[str, Any]:
    """Forecast and measure the drafters' speedups on this card, each under its paper's policy among others."""
    from realrun.decode.sampling import Sampler
    from realrun.gpu.decoding import FULL, REDUCED, decode

    sampler = Sampler("greedy-draft", temperature, job.seed) if temperature else Sampler()
    drafters = trained_drafters(job.home / WEIGHTS, job.target)
    if temperature:
        drafters = {name: source for name, source in drafters.items() if name in SAMPLED}
    if not drafters:
        raise InputError(f"none of {', '.join(SAMPLED)} is trained; run the stage train before")
    board = decode(
        drafters,
        job.target,
        sampler,
        job.work,
        minutes=job.seconds / 60,
        sizes=FULL if job.full else REDUCED,
        seed=job.seed,
        progress=job.report,
        **job.machine,
    )
    return {"board": board}


def trained_drafters(weights: Path, target: str) -> dict[str, str]:
    """Find the drafters to decode with, by name: what needs no training, what ships, and what was trained."""
    from realrun.decode.acceptance_predictor import FILE
    from realrun.gpu.training import RECIPES
    from realrun.pairs.pair import LOOKUP

    found = {LOOKUP: LOOKUP}
    if target == TARGET:
        found["EAGLE as shipped"] = "eagle"
    for name in RECIPES:
        folder, predictor = weights / name, weights / f"{name}-predictor" / FILE
        if predictor.is_file() and not (folder / FILE).is_file():
            shutil.copy(predictor, folder)
        if (folder / "drafter.safetensors").is_file():
            found[name] = str(folder)
        elif (folder / "model.safetensors").is_file():
            found[name] = f"model:{folder}"
    return found


def kernels(job: Job) -> dict[str, Any]:
    """Run the benchmark of the kernels; the result holds the document of pytest-benchmark."""
    path = job.work / "benchmark.json"
    minutes = {"SPECKERNELS_BENCH_MINUTES": str(0.8 * job.seconds / 60)}  # the file is written at the end
    line = job.pytest("kernels/benchmarks", "--benchmark-only", f"--benchmark-json={path}", **minutes)
    return {"tests": line, "benchmark": read_kept(path)}


def sanitizer(job: Job, tool: str) -> dict[str, Any]:
    """Run each operation under a tool of NVIDIA's compute-sanitizer."""
    binary = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if not job.full or binary is None:
        return {"skipped": "needs a GPU and compute-sanitizer"}
    command = (binary, "--tool", tool, "--error-exitcode", "9", sys.executable, "tests/kernels/sanitize.py")
    # Without torch's pool, an access beyond a tensor is also beyond an allocation.
    return {"output": log_end(job.run(*command, PYTORCH_NO_CUDA_MEMORY_CACHING="1"))}


def transfer(job: Job) -> dict[str, Any]:
    """Measure passes and speedups at true shapes, which another card's passes forecast (studies gpu_speedups)."""
    from realrun.experiment.scripted import ScriptedSettings, run_scripted
    from realrun.measure.cost_grid import Axes, run_cost_grid
    from specsim.io.examples import located
    from specsim.policy.chain.fixed_k import FixedK
    from specsim.trace.files import read_trace

    true, small = ([1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64], [128, 1024, 8192], [1, 8]), ([1, 2, 4], [32, 128], [1])
    axes, run = Axes(*(true if job.full else small)), {"smoke": not job.full, "progress": job.report, **job.machine}
    grids = {}
    for shape in SHAPES:
        path = job.work / f"{shape}.json"
        if (grid := read_kept(path)) is None:
            grid = run_cost_grid(shape, axes=axes, seed=job.seed, minutes=job.seconds / 4 / 60, **run)
            write_json(grid, path)
        grids[shape] = grid
    trace = read_trace(located(SCRIPT, "trace"))
    settings = ScriptedSettings(CONTEXT, trials=60, seed=job.seed, minutes=job.seconds / 60)
    if not job.full:
        trace, settings = trace.select(range(2)), replace(settings, context=0, policies=[FixedK(k=3)])
    return {"grids": grids, "scripted": run_scripted(*SHAPES, trace, settings, **run)}


def tests(job: Job) -> dict[str, Any]:
    """Run the tests that need a GPU."""
    if not job.full:
        return {"skipped": "needs a GPU"}
    return {"tests": job.pytest("-m", "gpu", "tests/kernels", "tests/realrun")}


class Stage(NamedTuple):
    """A stage: the name of its result file, what it runs, and the seconds that it may take at most."""

    name: str
    run: Callable[[Job], Mapping[str, Any]]
    most_s: float


STAGES = (  # by worth
    Stage("check", check, 90),
    Stage("text", text, 90),
    Stage("train", partial(train, later=False), 250),
    Stage("decode-greedy", partial(decode, temperature=0.0), 330),
    Stage("decode-sampled", partial(decode, temperature=0.8), 200),
    Stage("kernels", kernels, 120),
    Stage("memcheck", partial(sanitizer, tool="memcheck"), 120),
    Stage("racecheck", partial(sanitizer, tool="racecheck"), 120),
    Stage("transfer", transfer, 240),
    Stage("train-more", partial(train, later=True), 240),
    Stage("tests", tests, 300),
)


def chosen_stages(names: Sequence[str]) -> list[Stage]:
    """Return the stages with these names, or all if there are none; raises InputError for an unknown name."""
    known = [stage.name for stage in STAGES]
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"stage {unknown[0]!r} is unknown; known: {', '.join(known)}")
    return [stage for stage in STAGES if not names or stage.name in names]


def run_stages(
    out: Path,
    *,
    minutes: float,
    stages: Sequence[str] = (),
    target: str | None = None,
    device: str | None = None,
    overwrite: bool = False,
    seed: int = 0,
    progress: Progress = lambda what, done, total: None,
    begun: float | None = None,
) -> list[dict[str, Any]]:
    """Run stages into `out`; return their result documents, in order.

    A stage whose result is complete is not run again unless `overwrite` is set. A stage that fails leaves its error in
    its result, and the next one runs: time on a GPU is too rare to lose.

    stages : their names, by default all
    target : whose drafters are trained, by default SmolLM2 on a GPU and the lab's target elsewhere
    device : by default "cuda" where there is one
    begun : time.monotonic() when the minutes began, now by default

    Raises InputError for an unknown stage or no time.
    """
    chosen = chosen_stages(stages)
    if not minutes > 0:
        raise InputError(f"minutes={minutes}; give the stages some time")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = target or (TARGET if where.type == "cuda" else REDUCED_TARGET)
    end = (time.monotonic() if begun is None else begun) + 60 * minutes
    out = out.resolve()  # commands of stages run in the source tree
    results, home = [], out.with_name(f"{out.name}-work")
    for stage in chosen:
        path, work = out / f"{stage.name}.json", home / stage.name
        done = read_kept(path, Result)
        if done and done["complete"] and not overwrite:
            results.append(done)
            continue
        if overwrite:
            path.unlink(missing_ok=True)
            remove_folder(work)
        work.mkdir(parents=True, exist_ok=True)
        job = Job(home, work, min(end, time.monotonic() + stage.most_s), where, model, seed, progress)
        results.append(run_stage(stage, job))
        write_json(results[-1], path)
        gc.collect()
        if job.full:
            torch.cuda.empty_cache()  # processes of the next stage need it
    return results


def run_stage(stage: Stage, job: Job) -> dict[str, Any]:
    """Run a stage; return its result document, with the reason if it failed or ran out of time."""
    start = time.monotonic()
    header = {"kind": KIND, "version": VERSION, "stage": stage.name, "reduced": not job.full}
    try:
        if start >= job.deadline:
            raise OutOfTime("the minutes were over")
        result = {"complete": True, **stage.run(job)}
    except OutOfTime as late:
        result = {"complete": False, "left": str(late)}
    except Exception as error:  # the reason must come back from a machine that is gone afterwards
        result = {"complete": False, "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    made = provenance(job.device, job.dtype)
    return {**result, **header, "provenance": made, "seconds": round(time.monotonic() - start, 1)}
