"""Measure on a GPU, in a list of stages that each end in time and leave a result file.

Without a GPU the stages run at reduced sizes. What a stage needs is imported when its turn comes, so that the others
run on a machine that lacks it.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict

import torch

from realrun.kept_files import log_end, read_kept
from realrun.provenance import installed, provenance
from specsim.io.errors import InputError
from specsim.io.files import remove_folder, write_json
from specsim.io.progress import Progress

if TYPE_CHECKING:
    from realrun.measure.record import RecordSettings

KIND, VERSION = "specsim-campaign", 1
REPOSITORY = Path(__file__).resolve().parents[1]
MARGIN = 0.1  # of a stage's time, kept free at its end
# Whatever plugins and versions are on the machine, its own warnings fail no test.
PYTEST = ("-m", "pytest", "-q", "-o", "filterwarnings=default", "-p", "no:cacheprovider")
AGREES = "agrees_with_the_reference"  # the tests of that, one for each operation and backend
SHAPES = ("llama-3.1-8b", "llama-3.2-1b", "llama-2-7b", "llama-68m", "qwen3-8b", "qwen3-0.6b")
PAIRS = (  # target, drafter, tokens of context before every prompt
    ("llama-3.1-8b", "llama-3.2-1b", 1024),
    ("llama-2-7b", "llama-68m", 0),
    ("llama-3.1-8b", "llama-3.2-1b", 8192),
)
SCRIPT = "example:lab-model"  # trace that says which drafted tokens are accepted


class Result(TypedDict):
    """What every result file holds, whatever else its stage puts into it."""

    kind: Literal["specsim-campaign"]
    complete: bool


class OutOfTime(BaseException):
    """The stage's time is over; no `except Exception` of what it runs keeps it from ending."""


@dataclass(frozen=True)
class Job:
    """One stage's task.

    work : folder from which a second run goes on
    deadline : time.monotonic() at which the stage is ended
    """

    work: Path
    deadline: float
    device: torch.device
    seed: int
    progress: Progress

    @property
    def full(self) -> bool:
        """Whether sizes are true, as on a GPU, and not reduced."""
        return self.device.type == "cuda"

    @property
    def machine(self) -> dict[str, Any]:
        """Device and number type, as functions take them."""
        return {"device": str(self.device), "dtype": "bfloat16" if self.full else "float32"}

    @property
    def seconds(self) -> float:
        """Compute the seconds until the deadline, without the margin."""
        return max(0.1, (self.deadline - time.monotonic()) * (1 - MARGIN))

    def report(self, what: str, done: int, total: int) -> None:
        """Report progress; raises OutOfTime after the deadline."""
        if time.monotonic() > self.deadline:
            raise OutOfTime(f"{what}: {done} of {total} done")
        self.progress(what, done, total)

    def run(self, *command: str, **variables: str) -> str:
        """Run a command in the source tree with these environment variables, and return what it printed.

        Raises OutOfTime if it takes longer than the stage may, RuntimeError with its last lines if it fails.
        """
        paths = [str(REPOSITORY), str(REPOSITORY / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
        with subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=self.seconds)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)  # its children too, or they would disturb the next stage
                if isinstance(error, subprocess.TimeoutExpired):
                    raise OutOfTime(f"{Path(command[0]).name} {' '.join(command[1:4])} was not done") from None
                raise
        if process.returncode:
            raise RuntimeError(f"exit code {process.returncode}: {log_end(output)}")
        return output

    def pytest(self, *options: str, **variables: str) -> str:
        """Run tests with these environment variables, and return pytest's closing line."""
        return self.run(sys.executable, *PYTEST, *options, **variables).strip().splitlines()[-1]


def smoke(job: Job) -> dict[str, Any]:
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


def kernels(job: Job) -> dict[str, Any]:
    """Run the benchmark of the kernels; the result holds the document of pytest-benchmark."""
    path = job.work / "benchmark.json"
    minutes = {"SPECKERNELS_BENCH_MINUTES": str(0.8 * job.seconds / 60)}  # the file is written at the end
    line = job.pytest("kernels/benchmarks", "--benchmark-only", f"--benchmark-json={path}", **minutes)
    return {"tests": line, "benchmark": read_kept(path)}


def tests(job: Job) -> dict[str, Any]:
    """Run the tests that need a GPU."""
    if not job.full:
        return {"skipped": "needs a GPU"}
    return {"tests": job.pytest("-m", "gpu", "tests/kernels", "tests/realrun")}


def sanitizer(job: Job, tool: str) -> dict[str, Any]:
    """Run each operation under a tool of NVIDIA's compute-sanitizer."""
    binary = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if not job.full or binary is None:
        return {"skipped": "needs a GPU and compute-sanitizer"}
    command = (binary, "--tool", tool, "--error-exitcode", "9", sys.executable, "tests/kernels/sanitize.py")
    # Without torch's pool, an access beyond a tensor is also beyond an allocation.
    return {"output": log_end(job.run(*command, PYTORCH_NO_CUDA_MEMORY_CACHING="1"))}


def cost_grid(job: Job, shape: str) -> dict[str, Any]:
    """Time the passes of a model shape with random weights."""
    from realrun.measure.cost_grid import Axes, run_cost_grid

    true, small = ([1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64], [128, 1024, 8192], [1, 8]), ([1, 2, 4], [32, 128], [1])
    axes = Axes(*(true if job.full else small))
    minutes = job.seconds / 60
    grid = run_cost_grid(
        shape, axes=axes, smoke=not job.full, seed=job.seed, minutes=minutes, progress=job.report, **job.machine
    )
    late = any(entry["reason"].startswith("time") for entry in grid["missing"])
    return {"grids": {shape: grid}, "complete": not late, **({"left": "some passes"} if late else {})}


def scripted(job: Job, pair: tuple[str, str, int]) -> dict[str, Any]:
    """Forecast and measure speedups of two model shapes, where a shipped trace decides what is accepted."""
    from realrun.experiment.scripted import ScriptedSettings, run_scripted
    from specsim.io.examples import located
    from specsim.policy.chain.fixed_k import FixedK
    from specsim.trace.files import read_trace

    target, draft, context = pair
    trace, minutes = read_trace(located(SCRIPT, "trace")), job.seconds / 60
    if job.full:
        settings = ScriptedSettings(context, trials=60, seed=job.seed, minutes=minutes)
    else:
        trace = trace.select(range(2))
        settings = ScriptedSettings(policies=[FixedK(k=3)], seed=job.seed, minutes=minutes)
    document = run_scripted(target, draft, trace, settings, smoke=not job.full, progress=job.report, **job.machine)
    return {"scripted": document}


def recording(job: Job) -> RecordSettings:
    """Return what is recorded of the bundled target."""
    from realrun.decode.sampling import Sampler
    from realrun.measure.record import RecordSettings

    draft_tokens, new_tokens = (16, 128) if job.full else (4, 8)
    return RecordSettings(draft_tokens, new_tokens, Sampler("gumbel", 0.8, job.seed))


def tuning(job: Job) -> dict[str, Any]:
    """Return how policies for the bundled target are tuned and decoded."""
    from specsim.policy.chain.fixed_k import FixedK

    kinds = None if job.full else (FixedK,)
    return {"kinds": kinds, "trials": 60 if job.full else 2, "seed": job.seed, "minutes": job.seconds / 60}


def validation(job: Job) -> dict[str, Any]:
    """Forecast and measure speedups of the bundled target with EAGLE's drafter."""
    from realrun.experiment.run import validate
    from realrun.experiment.settings import ValidationSettings
    from realrun.pairs.pair import load_pair
    from realrun.pairs.prompts import lab_prompts

    pair = load_pair(drafter="eagle", **job.machine)
    prompts = lab_prompts(pair.tokenizer, 24 if job.full else 4)
    settings = ValidationSettings(recording(job), **tuning(job))
    return {"validation": validate(pair, prompts, settings, job.work, job.report)}


def board(job: Job) -> dict[str, Any]:
    """Rank the drafters of the bundled target: record, measure, tune and forecast, then decode for real."""
    from realrun.leaderboard.job import BoardSettings, named, run_leaderboard
    from realrun.pairs.pair import LOOKUP, load_pair
    from realrun.pairs.prompts import lab_prompts

    plain = load_pair(drafter=LOOKUP, **job.machine)
    sources = named(None if job.full else "model", "lab")
    pairs = {name: load_pair(drafter=source, beside=plain, **job.machine) for name, source in sources.items()}
    prompts = lab_prompts(plain.tokenizer, 24 if job.full else 4)
    settings = BoardSettings(replace(recording(job), tree_nodes=64 if job.full else 0), **tuning(job))
    return {"board": run_leaderboard(pairs, plain, prompts, settings, job.work, job.report)}


class Stage(NamedTuple):
    """A stage: the name of its result file, what it runs, and the seconds that it may take at most."""

    name: str
    run: Callable[[Job], Mapping[str, Any]]
    most_s: float


STAGES = (
    Stage("smoke", smoke, 90),
    Stage("validate", validation, 120),
    Stage("board", board, 240),
    *(Stage(f"cost-grid-{shape}", partial(cost_grid, shape=shape), 60) for shape in SHAPES),
    *(Stage(f"scripted-{number}", partial(scripted, pair=pair), 150) for number, pair in enumerate(PAIRS, start=1)),
    Stage("kernels", kernels, 240),
    Stage("tests", tests, 300),
    Stage("memcheck", partial(sanitizer, tool="memcheck"), 120),
    Stage("racecheck", partial(sanitizer, tool="racecheck"), 120),
)


def chosen_stages(names: Sequence[str]) -> list[Stage]:
    """Return the stages with these names, or all if there are none; raises InputError for an unknown name."""
    known = [stage.name for stage in STAGES]
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"stage {unknown[0]!r} is unknown; known: {', '.join(known)}")
    return [stage for stage in STAGES if not names or stage.name in names]


def run_campaign(
    out: Path,
    *,
    minutes: float,
    stages: Sequence[str] = (),
    device: str | None = None,
    overwrite: bool = False,
    seed: int = 0,
    progress: Progress = lambda what, done, total: None,
    begun: float | None = None,
) -> list[dict[str, Any]]:
    """Run stages into `out`; return their result documents, in order.

    A stage whose result is complete is not run again unless `overwrite` is set. A stage that fails leaves its error in
    its result, and the next one runs: time on a GPU is too rare to lose.

    stages : their names, by default all; device : by default "cuda" where there is one
    begun : time.monotonic() when the minutes began, now by default

    Raises InputError for an unknown stage or no time.
    """
    chosen = chosen_stages(stages)
    if not minutes > 0:
        raise InputError(f"minutes={minutes}; give the campaign some time")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    end = (time.monotonic() if begun is None else begun) + 60 * minutes
    results = []
    for stage in chosen:
        path, work = out / f"{stage.name}.json", out.with_name(f"{out.name}-work") / stage.name
        done = read_kept(path, Result)
        if done and done["complete"] and not overwrite:
            results.append(done)
            continue
        if overwrite:
            path.unlink(missing_ok=True)
            remove_folder(work)
        work.mkdir(parents=True, exist_ok=True)
        job = Job(work, min(end, time.monotonic() + stage.most_s), where, seed, progress)
        results.append(run_stage(stage, job))
        write_json(results[-1], path)
        gc.collect()
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
    made = provenance(job.device, job.machine["dtype"])
    return {**result, **header, "provenance": made, "seconds": round(time.monotonic() - start, 1)}
