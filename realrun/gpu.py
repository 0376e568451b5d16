"""Use a GPU that is there for minutes: stages that end in time, leave a result file, and are not done twice.

Without a GPU the stages run at reduced sizes. What a stage needs is imported when its turn comes, so that the others
run on a machine that lacks it.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

import torch

from realrun.kept_files import log_end, read_kept
from realrun.provenance import installed, provenance
from specsim.io.errors import InputError
from specsim.io.files import remove_folder, write_json, write_text
from specsim.io.progress import Progress

KIND, VERSION = "specsim-gpu-stage", 1
REPOSITORY = Path(__file__).resolve().parents[1]
MARGIN = 0.1  # of a stage's time, kept free at its end
TARGET, REDUCED_TARGET = "smollm2", "lab"
# Whatever plugins and versions are on the machine, its own warnings fail no test.
PYTEST = ("-m", "pytest", "-q", "-o", "filterwarnings=default", "-p", "no:cacheprovider")
AGREES = "agrees_with_the_reference"  # the tests of that, one for each operation and backend

TEXT_FILE = "text.npz"
ASKED_SHARE = 0.6  # of the text, whose questions a chat model makes up
WEIGHTS = "weights"  # folder beside the results, with a folder for each trained drafter
RESULT = "training.json"  # in a training's folder, once it is done
MEDUSA = "medusa"  # kind of the drafters that also decode with typical acceptance
MODEL = "model:"  # before a draft model's folder, in a drafter's source
ON_PROMPTS = ("predictor", "self-sd")  # trainings that decode prompts instead of reading the text
QUESTIONS = 400  # of specsim's own, for those
# Held-out agreement of the first drafted token, in the log: the first that is there. MEDUSA-2's "agreement" is another.
AGREEMENT = ("head_1_agreement", "mask_1_agreement", "agreement_1", "agreement")
NEEDED_SHARE = 0.7  # of the time, for trainings that others need; these have the rest
START_S = 25.0  # of a training's time: its process loads torch and the target, and writes its file
AT_ONCE = 12  # trainings on a card
LATER = ("draft-12", "Self-SD")  # trainings that are begun when all else is done
SAMPLED = ("EAGLE", "EESD", "MEDUSA-1", "SPACE", "draft-6")  # drafters that also decode at a temperature
POLICIES = (
    *("fixed_k", "max_confidence", "adaedl", "beta_ts", "cali_ts", "renewal_stop", "space_k"),
    *("vct", "pct", "eagle2", "sparse_tree"),
)
SHAPES = ("llama-3.1-8b", "llama-3.2-1b")
CONTEXT = 1024  # tokens before every prompt of these shapes
SCRIPT = "example:lab-model"  # trace that says which of their drafted tokens are accepted

_TEXT = "--batch 8 --window 512 --tokens 100 --draft-vocabulary 8192"
_BARE = "--batch 8 --window 512 --tokens 100"
# Options of `realrun train`, in order of worth; {NAME} is the folder of another training, which has to be done before.
# Learning rates: EAGLE's default and 0.001 for EESD and MEDUSA are known from earlier trainings on SmolLM2. Ranks and
# vocabularies are so small that no file exceeds 16 MiB.
RECIPES = {
    "EAGLE": f"eagle --class-weight 1 {_TEXT}",
    "EDD": f"edd --lr 0.002 {_TEXT}",
    "EESD": f"eesd --layers 4 --lr 0.001 {_TEXT}",
    "MEDUSA-1": f"medusa --lr 0.001 {_TEXT}",
    "EAGLE-3": f"eagle3 --draft-steps 5 {_TEXT} --draft-vocabulary 4096",
    "VDM": f"vdm --lr 0.002 {_TEXT}",
    "draft-6": f"draft --layers 6 {_BARE}",
    "draft-2": f"draft --layers 2 {_BARE}",
    "MEDUSA-2": f"medusa --joint --heads-from {{MEDUSA-1}} --lambda-0 0.1 --backbone-lr 0.0005 --rank 16 {_BARE} "
    "--micro 4",
    "SPACE": f"space --rank 16 {_BARE} --micro 4",
    "draft-12": f"draft --layers 12 {_BARE}",
    "EESD-predictor": "predictor --drafter {EESD} --num-prompts 32 --max-new-tokens 48 --max-draft-tokens 8 "
    "--temperatures 0,0.8",
    "draft-6-predictor": "predictor --draft-model {draft-6} --num-prompts 32 --max-new-tokens 48 "
    "--max-draft-tokens 8 --temperatures 0,0.8",
    "Self-SD": "self-sd --trials 40 --num-prompts 6 --max-new-tokens 48 --max-draft-tokens 6 --cost-repeats 5",
}
_SMALL = "--batch 4 --window 32 --tokens 0.01"
REDUCED_RECIPES = {  # for a tiny target on a CPU
    "EAGLE": f"eagle {_SMALL}",
    "EESD": f"eesd --layers 2 {_SMALL}",
    "draft-2": f"draft --layers 2 {_SMALL}",
    "EESD-predictor": "predictor --drafter {EESD} --num-prompts 12 --max-new-tokens 8 --max-draft-tokens 4",
}
_NEED = re.compile(r"\{(.+?)\}")


class OutOfTime(BaseException):
    """The stage's time is over; no `except Exception` of what it runs keeps it from ending."""


@dataclass(frozen=True)
class Job:
    """One stage's task.

    home : folder in which every stage has a folder of its name, from which a second run goes on
    work : this stage's folder there
    deadline : time.monotonic() at which the stage is ended
    target : the model whose drafters are trained and decoded
    """

    home: Path
    work: Path
    deadline: float
    device: torch.device
    target: str
    seed: int
    progress: Progress
    result: dict[str, Any] = field(default_factory=dict)  # what the stage puts into its result file

    @property
    def full(self) -> bool:
        """Whether sizes are true, as on a GPU, and not reduced."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> str:
        """Name the number type of models."""
        return "bfloat16" if self.full else "float32"

    @property
    def seconds(self) -> float:
        """Compute the seconds until the deadline, without the margin."""
        return max(0.1, (self.deadline - time.monotonic()) * (1 - MARGIN))

    def report(self, what: str, done: int, total: int) -> None:
        """Report progress; raises OutOfTime after the deadline."""
        if time.monotonic() > self.deadline:
            raise OutOfTime(f"{what}: {done} of {total} done")
        self.progress(what, done, total)

    def run(self, *command: str, limit_s: float | None = None, variables: Mapping[str, str] = {}) -> str:
        """Run a command in the source tree with these environment variables, and return its standard output.

        Raises OutOfTime if it takes longer than the limit, by default the stage's, RuntimeError with its last lines if
        it fails.
        """
        paths = [str(REPOSITORY), str(REPOSITORY / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
        # A session of its own makes a group, to be killed with its children; it has to end with this process all the
        # same.
        dying = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        with subprocess.Popen(
            [*dying, *command],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, errors = process.communicate(timeout=self.seconds if limit_s is None else limit_s)
            except BaseException as error:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its children too, or they would disturb the next stage
                if isinstance(error, subprocess.TimeoutExpired):
                    raise OutOfTime(f"{Path(command[0]).name} {' '.join(command[1:4])} was not done") from None
                raise
        if process.returncode:
            raise RuntimeError(f"exit code {process.returncode}: {log_end(output + errors)}")
        return output

    def pytest(self, *options: str, variables: Mapping[str, str] = {}) -> str:
        """Run tests with these environment variables, and return pytest's closing line."""
        return self.run(sys.executable, *PYTEST, *options, variables=variables).strip().splitlines()[-1]


class StageFile(TypedDict):
    """What every result file holds, whatever else its stage puts into it."""

    kind: Literal["specsim-gpu-stage"]
    complete: bool


@dataclass(frozen=True)
class StageResult:
    """How a stage ended, by its result file."""

    document: dict[str, Any]

    @property
    def failed(self) -> bool:
        return "error" in self.document

    @property
    def state(self) -> str:
        """Describe in words how the stage ended."""
        if self.failed:
            return str(self.document["error"])
        if "skipped" in self.document:
            return f"skipped: {self.document['skipped']}"
        return "complete" if self.document["complete"] else f"out of time ({self.document['left']}): run again to go on"


def check(job: Job) -> None:
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
    job.result.update(
        packages={name: installed(name) for name in ("triton", "flashinfer-python")},
        clocks=job.run(*query).splitlines() if shutil.which(query[0]) else [],
        free_gb=free_bytes(job.device) / 1e9,
        tests=job.pytest("tests/kernels/ops/test_contract.py", *which),
    )


def text(job: Job) -> None:
    """Let the target answer questions of specsim's and its own, as many as fit into the time."""
    from realrun.pairs.pair import load_target
    from realrun.pairs.prompts import training_prompts
    from realrun.train.common.distill import DistillSettings, TextSettings, save_text, training_text

    questions, new_tokens, batch = (9_000, 256, 2048) if job.full else (40, 24, 16)
    pair = load_target(job.target, device=str(job.device), dtype=job.dtype)
    settings = TextSettings(
        questions=training_prompts(pair.tokenizer, questions, job.seed),
        asked_share=ASKED_SHARE if pair.tokenizer.chat_template else 0.0,
        distill=DistillSettings(new_tokens=new_tokens, batch=batch, seed=job.seed),
    )
    begun, made = time.monotonic(), None
    # The next count goes on from the shards of the one before, each of which leaves a text to train on.
    for count in (1_000_000, 3_000_000, 6_000_000) if job.full else (2_000,):
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
    speed = round(tokens / spent_s)
    job.result.update(target=pair.target_name, tokens=tokens, tokens_per_second=speed, text=made.facts)


def train(job: Job, later: bool) -> None:
    """Train the papers' drafters on that text, several at once. later : those in LATER, or the others

    Kernels of different processes take turns on the card, so that processes fill the gaps in which another's host
    prepares its next step. Trainings that need others run in the last part of the time.
    """
    from realrun.pairs.pair import is_lab
    from realrun.pairs.training_tasks import training_questions

    every, at_once = (RECIPES, AT_ONCE) if job.full else (REDUCED_RECIPES, 2)
    recipes = {name: recipe.split() for name, recipe in every.items() if (name in LATER) == later}
    if not recipes:
        job.result["skipped"] = "no such training at reduced sizes"
        return
    if not is_lab(job.target):
        rows = [json.dumps({"prompt": question}) for question in training_questions(QUESTIONS)]
        write_text(job.home / WEIGHTS / "questions.jsonl", "\n".join(rows))
    end = time.monotonic() + job.seconds
    last = [name for name, recipe in recipes.items() if any(need in recipes for need in needs(recipe))]
    first = [name for name in recipes if name not in last]
    results: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(at_once) as pool:
        for names, share in ((first, NEEDED_SHARE if last else 1.0), (last, 1.0)):
            waves = max(1, -(-sum(not ended(job, name) for name in names) // at_once))
            each_s = (end - time.monotonic()) * share / waves
            made = pool.map(partial(train_one, job, limit_s=each_s), names, [recipes[name] for name in names])
            for name, result in zip(names, made, strict=True):
                results[name] = result
                job.progress("train", len(results), len(recipes))
    job.result["trainings"] = {name: results[name] for name in recipes}
    if cut_off := [name for name in recipes if results[name].get("cut_off")]:
        job.result.update(complete=False, left=f"train {', '.join(cut_off)}")


def needs(recipe: Iterable[str]) -> list[str]:
    """List the trainings whose folders this recipe names."""
    return [name for option in recipe for name in _NEED.findall(option)]


def ended(job: Job, name: str) -> dict[str, Any] | None:
    """Read the result of a training that has ended."""
    return read_kept(job.home / WEIGHTS / name / RESULT)


def train_one(job: Job, name: str, recipe: Sequence[str], *, limit_s: float) -> dict[str, Any]:
    """Train a drafter within these seconds, unless it is done; a second call goes on.

    Returns "command", and if it was trained on text "tokens", "seconds", "tokens_per_second" and "curve", a list of
    [tokens, held-out agreement]; "error" if it failed, "cut_off" if a second call may end it.
    """
    from realrun.pairs.pair import is_lab

    if result := ended(job, name):
        return result
    out, folder = job.home / WEIGHTS, job.home / WEIGHTS / name
    if lacking := [need for need in needs(recipe) if not ended(job, need)]:
        return {"error": f"{lacking[0]} is not done"}
    if limit_s <= 0:
        return {"error": "no time left", "cut_off": True}
    method, *options = (_NEED.sub(lambda need: str(out / need[1]), option) for option in recipe)
    options += ["--target", job.target, "--device", str(job.device), "--dtype", job.dtype]
    options += ["--out", str(folder), "--json"]
    if method not in ON_PROMPTS:
        options += [
            "--text",
            str(job.home / "text" / TEXT_FILE),
            "--minutes",
            f"{(limit_s - min(START_S, 0.5 * limit_s)) / 60:.3f}",
        ]
    elif not is_lab(job.target):
        options += ["--prompts", str(out / "questions.jsonl")]
    command = [sys.executable, "-m", "realrun", "train", method, *options]
    # Blocks of many sizes come and go in a training, and a dozen processes share the card's memory; cuDNN plans anew
    # for every shape, tens of milliseconds each.
    how = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}
    result = {"command": command}
    try:
        printed = json.loads(job.run(*command, limit_s=limit_s, variables=how))
    except OutOfTime as late:
        result |= {"error": str(late), "cut_off": True}
    except RuntimeError as error:
        result["error"] = str(error)
    else:
        keys = ("tokens", "seconds", "tokens_per_second", "held_out", "samples", "k", "predicted_speedup")
        result |= {key: printed[key] for key in keys if key in printed}
        write_json(result | {"curve": curve(folder)}, folder / RESULT)
    return result | {"curve": curve(folder)}


def curve(folder: Path) -> list[list[float]]:
    """Read the held-out agreement of the first drafted token from a training's log: [[tokens, agreement], ...]."""
    from realrun.train.common.folder import LOG, PLAN

    if not ((folder / LOG).exists() and (plan := read_kept(folder / PLAN))):
        return []
    per_step, points = plan["batch_windows"] * plan["window_tokens"], []
    for line in (folder / LOG).read_text().splitlines():
        with suppress(json.JSONDecodeError):  # a row that was being written
            row = json.loads(line)
            figures = row.get("held_out", {})
            points += [[row["step"] * per_step, figures[key]] for key in AGREEMENT if key in figures][:1]
    return points


def decode(job: Job, temperature: float) -> None:
    """Forecast and measure the drafters' speedups on this card, each under its paper's policy among others.

    As `realrun board`; the document also has "left_out", the reasons of drafters that do not load, and "typical",
    MEDUSA's typical acceptance where tokens are sampled.
    """
    from realrun.decode.acceptance_predictor import FILE
    from realrun.decode.sampling import Sampler
    from realrun.experiment.typical_acceptance import TypicalSettings, compare_typical
    from realrun.leaderboard.job import BoardSettings, run_leaderboard
    from realrun.measure.record import RecordSettings, longest_prompt
    from realrun.pairs.pair import LOOKUP, is_lab, load_pair
    from realrun.pairs.prompts import lab_prompts, leave_out_long, prompts_source, read_prompts, spread
    from specsim.io.examples import TASKS
    from specsim.policy.registry import find_policies, make_policy

    drafters = trained_drafters(job.home / WEIGHTS, job.target)
    if temperature:
        drafters = {name: source for name, source in drafters.items() if name in SAMPLED}
    if not drafters:
        raise InputError(f"none of {', '.join(SAMPLED)} is trained; run the stage train before")
    sampler = Sampler("greedy-draft", temperature, job.seed) if temperature else Sampler()
    plain = load_pair(job.target, drafter=LOOKUP, threads=1, device=str(job.device), dtype=job.dtype)
    pairs, left_out = {}, {}
    for name, source in drafters.items():
        folder = source.removeprefix(MODEL)
        predictor = folder if folder != source and (Path(folder) / FILE).is_file() else "auto"
        try:
            pairs[name] = load_pair(
                job.target,
                folder,
                drafter=source if folder == source else "model",
                predictor=predictor,
                beside=plain,
                threads=1,
                device=str(job.device),
                dtype=job.dtype,
            )
        except Exception as error:  # the others go on
            left_out[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    if not pairs:
        raise InputError(f"no drafter loads ({'; '.join(left_out.values())}); train others")
    if job.full:
        count, tokens, depth, nodes, width, trials, minutes = 30, 256, 8, 24, 8, 40, 12.0
    else:
        count, tokens, depth, nodes, width, trials, minutes = 8, 12, 4, 0, 1, 4, 1.0  # chains alone
    if is_lab(job.target):
        prompts = lab_prompts(plain.tokenizer, count)
    else:
        longest = min(longest_prompt(pair, tokens, depth) for pair in pairs.values())
        prompts = spread(leave_out_long(read_prompts(TASKS, plain.tokenizer), longest), count)
    settings = BoardSettings(
        RecordSettings(depth, tokens, sampler, nodes, width, prompts_source(job.target, None)),
        tuple(find_policies(POLICIES).values()),
        trials=trials,
        repeats=1,  # on a machine that nothing interrupts more prompts tell more
        tuning_share=0.4,
        seed=job.seed,
        minutes=minutes,
    )
    board = run_leaderboard(pairs, plain, prompts, settings, job.work, job.report)
    typical = {}
    if temperature:
        for row in board.rows:
            pair = pairs[row.drafter]
            if pair.drafter.name == MEDUSA and row.policy == "sparse_tree":
                policy = make_policy("sparse_tree", row.params)
                rules = TypicalSettings((0.05, 0.1, 0.2), max_new_tokens=tokens, seed=job.seed)
                try:
                    typical[row.drafter] = compare_typical(pair, prompts[:6], policy, rules)
                except (InputError, RuntimeError) as error:  # the reason in place of the comparison
                    typical[row.drafter] = {"reason": f"{type(error).__name__}: {error}".splitlines()[0]}
    job.result["board"] = {**board.as_dict(), "left_out": left_out, "typical": typical}


def trained_drafters(weights: Path, target: str) -> dict[str, str]:
    """Find the drafters to decode with, by name: what needs no training, what ships, and what was trained."""
    from realrun.decode.acceptance_predictor import FILE
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
            found[name] = f"{MODEL}{folder}"
    return found


def kernels(job: Job) -> None:
    """Run the benchmark of the kernels; the result holds the document of pytest-benchmark."""
    path = job.work / "benchmark.json"
    minutes = {"SPECKERNELS_BENCH_MINUTES": str(0.8 * job.seconds / 60)}  # the file is written at the end
    line = job.pytest("kernels/benchmarks", "--benchmark-only", f"--benchmark-json={path}", variables=minutes)
    job.result.update(tests=line, benchmark=read_kept(path))


def sanitizer(job: Job, tool: str) -> None:
    """Run each operation under a tool of NVIDIA's compute-sanitizer."""
    binary = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if not job.full or binary is None:
        job.result["skipped"] = "needs a GPU and compute-sanitizer"
        return
    command = (binary, "--tool", tool, "--error-exitcode", "9", sys.executable, "tests/kernels/sanitize.py")
    # Without torch's pool, an access beyond a tensor is also beyond an allocation.
    job.result["output"] = log_end(job.run(*command, variables={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}))


def transfer(job: Job) -> None:
    """Measure passes and speedups at true shapes, which another card's passes forecast (studies gpu_speedups)."""
    from realrun.experiment.scripted import ScriptedSettings, run_scripted
    from realrun.measure.cost_grid import Axes, run_cost_grid
    from specsim.io.examples import located
    from specsim.policy.chain.fixed_k import FixedK
    from specsim.trace.files import read_trace

    true, small = ([1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64], [128, 1024, 8192], [1, 8]), ([1, 2, 4], [32, 128], [1])
    axes = Axes(*(true if job.full else small))
    run = partial(run_cost_grid, axes=axes, seed=job.seed, smoke=not job.full, progress=job.report)
    grids = {}
    for shape in SHAPES:
        path = job.work / f"{shape}.json"
        if (grid := read_kept(path)) is None:
            grid = run(shape, minutes=job.seconds / 4 / 60, device=str(job.device), dtype=job.dtype).as_dict()
            write_json(grid, path)
        grids[shape] = grid
    trace = read_trace(located(SCRIPT, "trace"))
    settings = ScriptedSettings(CONTEXT, trials=60, seed=job.seed, minutes=job.seconds / 60)
    if not job.full:
        trace, settings = trace.select(range(2)), replace(settings, context=0, policies=[FixedK(k=3)])
    machine = {"device": str(job.device), "dtype": job.dtype}
    scripted = run_scripted(*SHAPES, trace, settings, smoke=not job.full, progress=job.report, **machine)
    job.result.update(grids=grids, scripted=scripted)


def tests(job: Job) -> None:
    """Run the tests that need a GPU."""
    if job.full:
        job.result["tests"] = job.pytest("-m", "gpu", "tests/kernels", "tests/realrun")
    else:
        job.result["skipped"] = "needs a GPU"


class Stage(NamedTuple):
    """A stage: the name of its result file, what it runs, and the seconds that it may take at most."""

    name: str
    run: Callable[[Job], None]
    most_s: float


STAGES = (  # by worth
    Stage("check", check, 90),
    Stage("text", text, 90),
    Stage("train", partial(train, later=False), 250),
    Stage("decode-greedy", partial(decode, temperature=0.0), 900),
    Stage("decode-sampled", partial(decode, temperature=0.8), 600),
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
) -> list[StageResult]:
    """Run stages into `out`; return their results, in order.

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
        done = read_kept(path, StageFile)
        if done and done["complete"] and not overwrite:
            results.append(StageResult(done))
            continue
        if overwrite:
            path.unlink(missing_ok=True)
            remove_folder(work)
        work.mkdir(parents=True, exist_ok=True)
        job = Job(home, work, min(end, time.monotonic() + stage.most_s), where, model, seed, progress)
        results.append(run_stage(stage, job))
        write_json(results[-1].document, path)
        gc.collect()
        if job.full:
            torch.cuda.empty_cache()  # processes of the next stage need it
    return results


def run_stage(stage: Stage, job: Job) -> StageResult:
    """Run a stage; its result has the reason if it failed or ran out of time."""
    start = time.monotonic()
    header = {"kind": KIND, "version": VERSION, "stage": stage.name, "reduced": not job.full}
    try:
        if start >= job.deadline:
            raise OutOfTime("the minutes were over")
        stage.run(job)
        result = {"complete": True, **job.result}
    except OutOfTime as late:
        result = {"complete": False, "left": str(late)}
    except Exception as error:  # the reason must come back from a machine that is gone afterwards
        result = {"complete": False, "error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    made = provenance(job.device, job.dtype)
    return StageResult({**result, **header, "provenance": made, "seconds": round(time.monotonic() - start, 1)})
