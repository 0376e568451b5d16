"""Several trainings at once on one card, each in a process of its own, on one text and within one time.

Kernels of different processes take turns on the card, so that processes fill the gaps in which another's host prepares
its next step; beyond that, each gets its share of the card. A training that another one needs ends early, and the
others go on meanwhile to the end.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from realrun.gpu.job import environment
from realrun.kept_files import log_end, read_kept
from realrun.pairs.pair import is_lab
from realrun.pairs.training_tasks import training_questions
from realrun.train.common.folder import CHECKPOINT, LOG, PLAN
from specsim.io.files import write_json, write_text
from specsim.io.progress import Progress

RESULT, PRINTED, ERRORS = "training.json", "printed.json", "train.log"
# Held-out agreement of the first drafted token, in the log: the first that is there. MEDUSA-2's "agreement" is another.
AGREEMENT = ("head_1_agreement", "mask_1_agreement", "agreement_1", "agreement")
ON_PROMPTS = ("predictor", "self-sd")  # trainings that decode prompts instead of reading the text
QUESTIONS = 400  # of specsim's own, for those
NEEDED_SHARE = 0.7  # of the time, for trainings that others need; these have the rest
START_S = 25.0  # taken from a training's minutes: its process loads torch and the target, and writes its file
GRACE_S = 20.0  # after which a training that should have ended is killed
POLL_S = 0.5
KILLED, NO_TIME = "killed: it did not end in time", "no time left"  # errors of what another run goes on with

_TEXT = "--batch 8 --window 512 --tokens 100 --draft-vocabulary 8192"
_BARE = "--batch 8 --window 512 --tokens 100"
# Options of `realrun train`, in order of worth; {NAME} is the folder of another training, which has to be done before.
# Learning rates: EAGLE's default and 0.001 for EESD and MEDUSA are known from earlier trainings on SmolLM2. Ranks and
# vocabularies are so small that no file exceeds 16 MiB.
RECIPES: dict[str, tuple[str, ...]] = {
    name: tuple(recipe.split())
    for name, recipe in {
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
    }.items()
}
_SMALL = "--batch 4 --window 32 --tokens 0.01"
REDUCED: dict[str, tuple[str, ...]] = {  # for a tiny target on a CPU
    name: tuple(recipe.split())
    for name, recipe in {
        "EAGLE": f"eagle {_SMALL}",
        "EESD": f"eesd --layers 2 {_SMALL}",
        "draft-2": f"draft --layers 2 {_SMALL}",
        "EESD-predictor": "predictor --drafter {EESD} --num-prompts 12 --max-new-tokens 8 --max-draft-tokens 4",
    }.items()
}
_NEED = re.compile(r"\{(.+)\}")


class Span(NamedTuple):
    """When a training runs, as shares of the whole time. begin : at the earliest"""

    begin: float
    end: float


def needs(recipe: Sequence[str]) -> list[str]:
    """List the trainings whose folders this recipe names."""
    return [name for option in recipe for name in _NEED.findall(option)]


def spans(recipes: Mapping[str, Sequence[str]], at_once: int) -> dict[str, Span]:
    """Divide the time among trainings, given in order of worth, of which `at_once` run at once.

    Trainings that need others run in the last part of the time. Before that the others run in waves, each as long as
    its share of them. Trainings of the last wave that no other needs go on to the end, as many as there is room for.
    """
    last = [name for name, recipe in recipes.items() if any(need in recipes for need in needs(recipe))]
    first = [name for name in recipes if name not in last]
    needed = {need for name in last for need in needs(recipes[name])}
    part = NEEDED_SHARE if last else 1.0
    divided = dict.fromkeys(last, Span(part, 1.0))
    room = at_once - len(last)
    for begin in range(0, len(first), at_once):
        wave = first[begin : begin + at_once]
        span = Span(part * begin / len(first), part * (begin + len(wave)) / len(first))
        for name in wave:
            divided[name] = span
            if span.end == part and name not in needed and room > 0:
                divided[name], room = Span(span.begin, 1.0), room - 1
    return divided


@dataclass
class _Running:
    """A training's process. end : time.monotonic() at which it should have ended"""

    process: subprocess.Popen[bytes]
    end: float
    begun: float = field(default_factory=time.monotonic)
    rows: int = 0  # of the log, that were reported

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def train_all(
    recipes: Mapping[str, Sequence[str]],
    *,
    target: str,
    text: Path,
    out: Path,
    minutes: float,
    device: str,
    at_once: int,
    progress: Progress,
    dtype: str = "bfloat16",
) -> dict[str, Any]:
    """Train these drafters, and print their held-out agreement as it comes; a second call goes on.

    Parameters
    ----------
    recipes : mapping
        Options of `realrun train` by the training's name, in order of worth, as in RECIPES.
    text : Path
        File that `realrun.train.common.distill.save_text` wrote.
    out : Path
        Folder with a folder for each training: OUT/NAME/train.log has what its process printed.
    minutes : float
        For all trainings together; one that does not end within GRACE_S after its share is killed.
    at_once : int
        Number of trainings at once.
    progress : Progress
        Called with (stage, done, total). If it raises, all processes are ended.

    Returns
    -------
    dict
        By name: "command", "files" (bytes by name), and "tokens", "seconds", "tokens_per_second" and "curve", a list of
        [tokens, agreement], if it was trained on text; "error" if it failed. Skipped ones have only "error".
    """
    out = out.resolve()
    done = {name: result for name, result in results_in(out, recipes).items() if "error" not in result}
    left = {name: recipes[name] for name in recipes if name not in done}
    plan, begun = spans(left, at_once), time.monotonic()
    total_s, running = 60 * minutes, dict[str, _Running]()
    questions = out / "questions.jsonl"

    def command(name: str, end: float) -> list[str]:
        method, *options = (_NEED.sub(lambda need: str(out / need[1]), option) for option in left[name])
        options += ["--target", target, "--device", device, "--dtype", dtype, "--out", str(out / name), "--json"]
        if method not in ON_PROMPTS:
            seconds = max(1.0, end - time.monotonic() - min(START_S, 0.5 * total_s))
            options += ["--text", str(text.resolve()), "--minutes", f"{seconds / 60:.3f}"]
        elif not is_lab(target):
            if not questions.exists():  # takes seconds, in which the trainings on text run already
                rows = [json.dumps({"prompt": question}) for question in training_questions(QUESTIONS)]
                write_text(questions, "\n".join(rows))
            options += ["--prompts", str(questions)]
        return [sys.executable, "-m", "realrun", "train", method, *options]

    commands = dict[str, list[str]]()
    results: dict[str, dict[str, Any]] = dict(done)
    try:
        while len(results) < len(recipes):
            for name in [name for name in left if name not in results and name not in running]:
                lacking = [need for need in needs(left[name]) if need in results and "error" in results[need]]
                waits = [need for need in needs(left[name]) if need in left and need not in results]
                end = begun + total_s * plan[name].end
                if lacking or end - time.monotonic() < min(START_S, 0.5 * total_s):
                    results[name] = {"error": f"{lacking[0]} failed" if lacking else NO_TIME}
                elif not waits and len(running) < at_once:
                    commands[name] = command(name, end)
                    running[name] = _start(commands[name], out / name, end)
            for name, training in list(running.items()):
                training.rows = _report(name, out / name, training.rows)
                late = time.monotonic() > training.end + GRACE_S
                if training.process.poll() is None and not late:
                    continue
                if late:
                    training.kill()
                del running[name]
                seconds = time.monotonic() - training.begun
                facts = {"command": commands[name], "process_seconds": round(seconds, 1)}
                results[name] = facts | _result(out / name, training.process.returncode, late)
                write_json(results[name], out / name / RESULT)
                print(
                    f"{name}: {results[name].get('error', 'done')} after {seconds:.0f} s", file=sys.stderr, flush=True
                )
            progress("train", len(results), len(recipes))
            time.sleep(POLL_S if running else 0)
    finally:
        for training in running.values():
            training.kill()
    return {name: results[name] for name in recipes}


def results_in(out: Path, names: Iterable[str]) -> dict[str, Any]:
    """Read the results of those of these trainings that have ended; see `train_all`."""
    return {name: result for name in names if (result := read_kept(out / name / RESULT))}


def _start(command: Sequence[str], folder: Path, end: float) -> _Running:
    folder.mkdir(parents=True, exist_ok=True)
    # Blocks of many sizes come and go in a training, and a dozen processes share the card's memory.
    variables = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",  # cuDNN plans anew for every shape, tens of milliseconds each
    }
    # A session of its own makes a group, to be killed with its children; it has to end with this process all the same.
    dying = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    with (folder / PRINTED).open("wb") as printed, (folder / ERRORS).open("ab") as errors:
        process = subprocess.Popen(
            [*dying, *command],
            env=environment(**variables),
            stdout=printed,
            stderr=errors,
            start_new_session=True,
        )
    return _Running(process, end)


def _report(name: str, folder: Path, known: int) -> int:
    """Print the held-out agreement of new rows; return the number of rows with one."""
    points = curve(folder)
    for tokens, agreement in points[known:]:
        print(f"{name}: {tokens / 1e6:.2f} M tokens, agreement {100 * agreement:.1f} %", file=sys.stderr, flush=True)
    return max(known, len(points))


def curve(folder: Path) -> list[list[float]]:
    """Read the held-out agreement of the first drafted token from a training's log: [[tokens, agreement], ...]."""
    if not ((folder / LOG).exists() and (plan := read_kept(folder / PLAN))):
        return []
    per_step, points = plan["batch_windows"] * plan["window_tokens"], []
    for line in (folder / LOG).read_text().splitlines():
        with suppress(json.JSONDecodeError):  # a row that is being written
            row = json.loads(line)
            figures = row.get("held_out", {})
            points += [[row["step"] * per_step, figures[key]] for key in AGREEMENT if key in figures][:1]
    return points


def _result(folder: Path, code: int, late: bool) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if points := curve(folder):
        result["curve"] = points
    if late:
        result["error"] = KILLED
    elif code:
        result["error"] = f"exit code {code}: {log_end((folder / ERRORS).read_text(errors='replace'))}"
    else:
        printed = json.loads((folder / PRINTED).read_text())
        keys = ("tokens", "seconds", "tokens_per_second", "held_out", "samples", "k", "predicted_speedup")
        result |= {key: printed[key] for key in keys if key in printed}
    result["files"] = {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*.safetensors"))
        if path.name != CHECKPOINT
    }
    return result
