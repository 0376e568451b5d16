"""`realrun compare` from end to end: restarts of both versions in turns, until every row is decided or time is up.

In a restart, fresh processes of both versions decode the same prompts in turns. Intervals over restarts stay valid
however often they are looked at. A side is a checkout, an environment or both.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import select
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from msgspec import convert

from realrun.decode.sampling import Sampler
from realrun.kept_files import claim, log_end, read_kept
from realrun.machine_load import Load, Ticks, load_from, watch
from realrun.measure.interleaving import TURN_ROUNDS, take_turns
from realrun.pairs.pair import load_pair
from realrun.pairs.prompts import Prompt, prompt_digest, prompt_facts
from specsim.io.arrays import Floats
from specsim.io.errors import InputError
from specsim.io.files import digest, file_digest, remove_folder, write_json
from specsim.io.progress import Counter, Progress
from specsim.policy.base import Policy
from specsim.policy.registry import NAMED
from specsim.replaying.intervals import (
    CONFIDENCE,
    LARGEST_EXPONENT,
    NO_SPECULATION,
    Estimate,
    log_ratio_error,
    student_quantile,
)

WORKER = Path(__file__).with_name("worker.py")
PYTHON = Path("bin", "python")
PACKAGES = ("realrun", "specsim", "speckernels", "kernels")  # folders of code that decides how fast a side is
CODE = (".py", ".cu", ".cuh", ".h")
HOW = "give a checkout (holds realrun/), an environment (holds bin/python), or both as CHECKOUT@ENVIRONMENT"
ANSWER_S = 600.0  # that a process may take for an answer: it loads models, and may compile kernels


@dataclass(frozen=True)
class Side:
    """A version to run.

    name : as it was given
    checkout : None for what the environment has installed
    python : the interpreter
    """

    name: str
    checkout: Path | None
    python: Path

    def environment(self, restart: int) -> dict[str, str]:
        """Return the environment variables of a process.

        All processes of a restart hash texts alike: collisions in dictionaries make a process faster or slower, and
        would look like a difference of versions.
        """
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        variables["PYTHONHASHSEED"] = str(restart)
        if self.checkout is not None:
            variables["PYTHONPATH"] = os.pathsep.join([str(self.checkout), str(self.checkout / "kernels")])
        return variables


def find_side(name: str) -> Side:
    """Find the checkout and the interpreter of CHECKOUT, ENVIRONMENT or CHECKOUT@ENVIRONMENT, or raise InputError."""
    parts = [name] if Path(name).is_dir() else name.rsplit("@", 1)
    folders = [Path(part).absolute() for part in parts]
    for part, folder in zip(parts, folders, strict=True):
        if not folder.is_dir():
            raise InputError(f"{part} is not a folder; {HOW}")
    checkout = folders[0] if (folders[0] / "realrun" / "__init__.py").is_file() else None
    home = folders[-1] if len(folders) == 2 or checkout is None else None
    if len(folders) == 2 and checkout is None:
        raise InputError(f"{parts[0]} holds no realrun/; {HOW}")
    if home is not None and not (home / PYTHON).is_file():
        raise InputError(f"{parts[-1]} holds no {'realrun/ or ' if len(parts) == 1 else ''}{PYTHON}; {HOW}")
    return Side(name, checkout, Path(sys.executable) if home is None else home / PYTHON)


def code_digest(folder: Path) -> str:
    """Hash the code of the project's packages in a folder."""
    paths = (path for package in PACKAGES for path in sorted((folder / package).rglob("*")) if path.suffix in CODE)
    return digest(json.dumps([[str(path.relative_to(folder)), file_digest(path)] for path in paths]))


class Worker:
    """A process that decodes with a side's code when it is told to.

    Commands are those of `realrun.versions.worker.Worker`. Raises InputError, with the end of the process's log, where
    the side's code cannot serve them.
    """

    def __init__(self, side: Side, restart: int = 0):
        self.side = side
        self.log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            [side.python, "-P", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env=side.environment(restart),
            text=True,
            start_new_session=True,  # so that Ctrl-C ends the command, which ends its processes
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.kill()
        self.process.communicate()
        self.log.close()

    def send(self, do: str, **arguments: Any) -> None:
        """Send a command; `answer` waits for its result."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` says why
            print(json.dumps({"do": do, **arguments}), file=self.process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """Wait for the result of the last command."""
        assert self.process.stdout is not None
        answers = self.process.stdout
        ready, _, _ = select.select([answers], [], [], ANSWER_S)
        line = answers.readline() if ready else ""
        if not line:
            what = "ended" if ready else f"did not answer within {ANSWER_S:g} s"
            self.log.seek(0)
            log = log_end(self.log.read())
            raise InputError(f"the process of {self.side.name} {what}: {log}; run its Python to see why")
        answer = json.loads(line)
        if "error" in answer:
            what = " ".join(str(answer["error"]).split())
            raise InputError(f"{self.side.name} does not decode: {what:.400}; compare a version that can run this job")
        return dict(answer)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Run a command and return its result."""
        self.send(do, **arguments)
        return self.answer()


def ask_all(workers: Sequence[Worker], do: str, **arguments: Any) -> list[dict[str, Any]]:
    """Run a command in all workers at once, where time does not matter."""
    for worker in workers:
        worker.send(do, **arguments)
    return [worker.answer() for worker in workers]


def identity_of(side: Side, started: Mapping[str, str]) -> dict[str, str]:
    """Return what a side's times depend on. started : answer of its worker to "start" """
    folder = Path(started["folder"])
    if side.checkout is not None and folder != side.checkout.resolve():
        raise InputError(f"{side.name} runs the code in {folder}; start another Python, as CHECKOUT@ENVIRONMENT")
    facts = {name: value for name, value in started.items() if name != "folder"}
    return {"name": side.name, "code": code_digest(folder), **facts}


LOOKS = (3, 5, 8, 12)  # restarts after which results are looked at; the last is the most that are made
LEAST_RESTARTS = 2  # that have a spread
HEAD_SHARE, NULL_SHARE = 1.5, 2.0  # variance of head less the mean of two, and of one less another, in a process's
Verdict = Literal["slower", "faster", "no change", "not decidable"]
BASE, HEAD, NULL = range(3)  # processes of a restart; the third runs the base version once more
# Times that a process loads its models, so that weights and caches lie elsewhere in memory. Few, because another
# restart tells more than another layout in each.
LAYOUTS = 2
RESULT, RESTARTS, IDENTITY = "compare.json", "restarts", "settings.json"  # in the output folder
ANEW = "pass --overwrite or another --out"


class Spread(NamedTuple):
    """Standard error of a mean, and its degrees of freedom."""

    error: float
    freedom: int


EXACT = Spread(0.0, 0)


def confidence_of_a_look(rows: int) -> float:
    """Compute the confidence of one interval such that all rows at all looks together have 95 % (Bonferroni)."""
    return 1 - (1 - CONFIDENCE) / (rows * len(LOOKS))


def over_restarts(head: Floats, base: Floats, null: Floats) -> tuple[Spread, Spread]:
    """Compute the spreads of two means: of head less the mean of base and null, and of null less base.

    Processes differ by chance alike, whatever code they run: so both differences tell by how much, and the mean of the
    second is known to be 0. head, base, null : a logarithm per restart [R]
    """
    restarts = head.size
    ratios, null_ratios = head - (base + null) / 2, null - base
    squares = float(((ratios - ratios.mean()) ** 2).sum() / HEAD_SHARE + (null_ratios**2).sum() / NULL_SHARE)
    freedom = 2 * restarts - 1
    of_head, of_null = (math.sqrt(share * squares / freedom / restarts) for share in (HEAD_SHARE, NULL_SHARE))
    return Spread(of_head, freedom), Spread(of_null, freedom)


def over_prompts(a_top: Floats, a_bottom: Floats, b_top: Floats, b_bottom: Floats) -> Spread:
    """Compute the spread of the logarithm of one ratio of sums over another, per-prompt quantities [S] in pairs."""
    if a_top.size == 1:
        return EXACT  # the interval is of this prompt alone
    return Spread(log_ratio_error(a_top, a_bottom, b_top, b_bottom), a_top.size - 1)


def change_percent(log_ratio: float, spreads: Sequence[Spread], confidence: float) -> Estimate:
    """Turn the logarithm of a ratio into a change in percent with its Student interval.

    The errors add in squares; the degrees of freedom are the fewest of any.
    """
    spreads = [spread for spread in spreads if spread.error > 0]
    reach = 0.0
    if spreads:
        freedom = min(spread.freedom for spread in spreads)
        reach = student_quantile(freedom, (1 + confidence) / 2) * math.hypot(*(spread.error for spread in spreads))
    ends = (min(log_ratio + sign * reach, LARGEST_EXPONENT) for sign in (0, -1, 1))
    return Estimate(*(100 * math.expm1(end) for end in ends))


def verdict(slowdown_percent: Estimate, limit_percent: float) -> Verdict:
    """Name a change of seconds per token: significant, smaller than the limit, or neither."""
    if slowdown_percent.low > 0:
        return "slower"
    if slowdown_percent.high < 0:
        return "faster"
    within = max(slowdown_percent.high, -slowdown_percent.low) <= limit_percent
    return "no change" if within else "not decidable"


def exceeds(slowdown_percent: Estimate, limit_percent: float) -> bool | None:
    """Tell whether a slowdown exceeds the limit; None while the interval holds the limit."""
    if slowdown_percent.low > limit_percent:
        return True
    return False if slowdown_percent.high <= limit_percent else None


class Decoded(NamedTuple):
    """Tokens that a process decoded once, and its rounds: drafted, accepted, seconds."""

    tokens: list[int]
    rounds: list[tuple[int, int, float]]


@dataclass
class Run:
    """A process's decoding of a prompt, its rounds as `typical_run` takes them."""

    tokens: int
    rounds: int
    text: str
    log: str
    seconds: float


@dataclass
class Restart:
    """A restart: runs [arm][process][prompt], arm 0 is the baseline.

    prompts : numbers of those that were decoded, the same in every restart
    """

    prompts: list[int]
    spent_s: float
    ticks: list[float]
    runs: list[list[list[Run]]]


@contextmanager
def started(
    sides: Sequence[Side], job: Mapping[str, Any], number: int
) -> Iterator[tuple[list[Worker], dict[str, dict[str, str]]]]:
    """Start the processes of a restart; gives them, and by version what its times depend on."""
    base, head = sides
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker(side, number)) for side in (base, head, base)]
        answers = ask_all(workers, "start", job=job)
        yield workers, {"base": identity_of(base, answers[BASE]), "head": identity_of(head, answers[HEAD])}


def decode_all(
    workers: Sequence[Worker],
    arms: int,
    prompts: Sequence[int],
    limit_s: float,
    order: np.random.Generator,
    progress: Counter,
) -> tuple[list[int], list[list[list[Run]]]]:
    """Decode prompts with every arm in every layout, all processes in turns.

    limit_s : prompts that would take longer, by those before them, are left out

    Returns the prompts that were decoded, and runs [arm][process][prompt].
    """
    layouts: dict[tuple[int, int, int], list[Decoded]] = defaultdict(list)
    begun_s, done = time.monotonic(), 0
    for layout in range(LAYOUTS):
        if layout:
            ask_all(workers, "load")
        for number, prompt in enumerate(prompts, start=1):
            for arm in order.permutation(arms).tolist():
                decodings = [RemoteDecoding(worker, arm, prompt, layout) for worker in workers]
                take_turns(decodings, order, turn_rounds=1)
                for process, decoding in enumerate(decodings):
                    assert decoding.run is not None
                    layouts[arm, process, prompt].append(decoding.run)
                done += 1
                progress(done, LAYOUTS * len(prompts) * arms)
            if not layout and LAYOUTS * (time.monotonic() - begun_s) * (1 + 1 / number) > limit_s:
                prompts = prompts[:number]
                break
    return list(prompts), [
        [[typical_run(layouts[arm, process, prompt]) for prompt in prompts] for process in range(len(workers))]
        for arm in range(arms)
    ]


class RemoteDecoding:
    """A sequence that a worker decodes; `advance` runs a whole turn of rounds.

    Turns end elsewhere in every layout, because the first round of a turn takes longer.
    """

    def __init__(self, worker: Worker, arm: int, prompt: int, layout: int):
        self.worker = worker
        self.rounds = TURN_ROUNDS - layout % TURN_ROUNDS  # of the next turn
        self.position = 0
        self.run: Decoded | None = None
        worker.ask("begin", arm=arm, prompt=prompt)

    @property
    def done(self) -> bool:
        return self.run is not None

    def advance(self) -> None:
        state = self.worker.ask("advance", rounds=self.rounds)
        self.position, self.rounds = state["position"], TURN_ROUNDS
        self.run = state["run"] and Decoded(**state["run"])


def typical_run(layouts: Sequence[Decoded]) -> Run:
    """Summarise the runs of a process on a prompt: each round takes the mean of the faster half of its repeats.

    Interruptions and busy neighbours only ever add time. Where runs do other rounds, the median run counts.
    """
    logs = [[round_[:2] for round_ in run.rounds] for run in layouts]
    seconds = [[round_[2] for round_ in run.rounds] for run in layouts]
    half = len(layouts) // 2
    middle = int(np.argsort([sum(layout_s) for layout_s in seconds])[half])
    same = all(log == logs[0] for log in logs)
    spent_s = float(np.sort(seconds, axis=0)[:half].mean(axis=0).sum()) if same else sum(seconds[middle])
    tokens, log = layouts[middle].tokens, logs[middle]
    return Run(len(tokens), len(log), digest(json.dumps(tokens)), digest(json.dumps(log)), spent_s)


@dataclass(frozen=True)
class CompareSettings:
    """How two versions decode, and for how long.

    Attributes
    ----------
    pair : arguments of `realrun.load_pair`
    policies : decoded beside the baseline
    sampler : how tokens are chosen
    max_new_tokens : most output tokens per prompt
    seed : of all randomness
    minutes : no restart begins that would end later; two are made in any case. Prompts are left out so that eight
        restarts fit, at least one is decoded; 0 decodes all in two restarts
    max_slowdown_percent : slowdown that is looked for
    clock : "wall", or "cpu", which is steadier on a busy machine and times one CPU thread
    kernels : "auto", or as `--kernels`

    Examples
    --------
    >>> import realrun
    >>> realrun.CompareSettings({"drafter": "prompt-lookup"}, [], minutes=1).max_slowdown_percent
    2.0
    """

    pair: Mapping[str, Any]
    policies: Sequence[Policy]
    sampler: Sampler = field(default_factory=Sampler)
    max_new_tokens: int = 32
    seed: int = 0
    minutes: float = 5.0
    max_slowdown_percent: float = 2.0
    clock: str = "wall"
    kernels: str = "auto"

    def job_document(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Return what the processes are started with."""
        return {
            "pair": _not_default(self.pair, load_pair),
            "sampler": _not_default(vars(self.sampler), Sampler),
            "policies": [None, *([_name_of(policy), dict(policy.settings)] for policy in self.policies)],
            "policy_files": [file_digest(Path(file)) for file in map(_own_file, self.policies) if file],
            "prompts": [prompt.tokens for prompt in prompts],
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
            "clock": "" if self.clock == "wall" else self.clock,
            "kernels": "" if self.kernels == "auto" else self.kernels,
        }

    def as_dict(self) -> dict[str, Any]:
        policies = [str(policy) for policy in self.policies]
        return {**vars(self), "sampler": vars(self.sampler), "policies": policies}


def _not_default(arguments: Mapping[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    """Leave out arguments at their defaults, which other versions of the function may not have yet."""
    parameters = inspect.signature(function).parameters
    return {
        name: arguments[name]
        for name in parameters
        if name in arguments and arguments[name] != parameters[name].default
    }


def _own_file(policy: Policy) -> str:
    """Return the file of a policy that is not built in, else ""."""
    kind = type(policy)
    return "" if NAMED.get(policy.name) is kind else inspect.getfile(kind)


def _name_of(policy: Policy) -> str:
    """Return the name by which another process finds the policy: a built-in's, or FILE.py:NAME."""
    file = _own_file(policy)
    return f"{file}:{policy.name}" if file else policy.name


@dataclass(frozen=True)
class CompareRow:
    """The head against the base: changes in percent, of times positive if the head is slower.

    policy : None for the baseline
    exceeds : whether the slowdown exceeds the limit; None while that is not decidable
    tau : mean acceptance lengths of base and head
    null_percent : of the base's second process against its first (A/A test)
    restart_token_ms : milliseconds per token [process][restart]
    """

    policy: Policy | None
    slowdown_percent: Estimate
    verdict: Verdict
    exceeds: bool | None
    round_time_percent: Estimate
    tau_percent: Estimate
    tau: dict[str, float]
    rounds_identical_percent: float
    output_identical_percent: float
    null_percent: Estimate
    restart_token_ms: list[list[float]]

    @property
    def label(self) -> str:
        return NO_SPECULATION if self.policy is None else str(self.policy)

    def as_dict(self) -> dict[str, Any]:
        params = {} if self.policy is None else dict(self.policy.settings)
        figures = {name: v.as_dict() if isinstance(v, Estimate) else v for name, v in vars(self).items()}
        del figures["policy"]
        return {"label": self.label, "policy": self.policy and self.policy.name, "params": params, **figures}


@dataclass(frozen=True)
class Comparison:
    """Two versions compared. versions : what the times of "base" and "head" depend on; prompts : that were decoded"""

    rows: Sequence[CompareRow]
    restarts: int
    spent_s: float
    load: Load
    settings: CompareSettings
    versions: Mapping[str, Mapping[str, str]]
    prompts: Sequence[Prompt]
    prompts_left_out: int

    def as_dict(self) -> dict[str, Any]:
        """Make the document of compare.json."""
        return {
            "kind": "realrun-compare",
            "rows": [row.as_dict() for row in self.rows],
            "restarts": self.restarts,
            "spent_s": self.spent_s,
            "load": self.load._asdict(),
            "options": self.settings.as_dict(),
            **self.versions,
            "prompts": prompt_facts(self.prompts, ""),
            "prompts_left_out": self.prompts_left_out,
        }


def compare(
    base: str,
    head: str,
    prompts: Sequence[Prompt],
    settings: CompareSettings,
    out: Path,
    *,
    overwrite: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> Comparison:
    """Decode the same prompts with two versions of the code at once, and tell whether the second is slower.

    Each restart starts three processes: the base, the head, and the base once more (the A/A test). They decode the same
    prompts with the baseline and every policy, taking turns of two rounds, so that all see the same machine. A process
    can be faster or slower than another of the same code for as long as it lives; so restarts are the sample, not
    rounds, and prompts are left out for more restarts.

    Parameters
    ----------
    base, head : str
        The versions: a checkout (folder with realrun/), an environment (folder with bin/python), or both as
        CHECKOUT@ENVIRONMENT.
    prompts : sequence of Prompt
    settings : CompareSettings
    out : Path
        Folder for compare.json and finished restarts, which are used again after an interruption.
    overwrite : bool
        Whether to start anew and replace what is in the folder.
    progress : callable, optional
        Told (what, done, total).

    Returns
    -------
    Comparison
        Versions, and a row for the baseline and each policy with the change of seconds per token in percent (positive
        is slower) and its interval, its verdict, and what the change is made of.

    Raises
    ------
    InputError
        If a side is no version, its code cannot decode the job, or the folder holds a finished or another comparison.

    Examples
    --------
    A version with itself; `minutes=0` decodes all prompts in the fewest restarts, which are two.

    >>> import tempfile
    >>> from pathlib import Path
    >>> import realrun
    >>> from realrun.pairs.prompts import Prompt
    >>> settings = realrun.CompareSettings({"drafter": "prompt-lookup"}, [], max_new_tokens=2, minutes=0)
    >>> checkout = str(Path(realrun.__file__).parents[1])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     comparison = realrun.compare(checkout, checkout, [Prompt("all", [5, 6, 7])], settings, Path(folder))
    >>> comparison.restarts, comparison.rows[0].rounds_identical_percent
    (2, 100.0)
    """
    sides = [find_side(base), find_side(head)]
    if overwrite:
        remove_folder(out / RESTARTS)
        (out / RESULT).unlink(missing_ok=True)
    if (out / RESULT).exists():
        raise InputError(f"{out} holds a finished comparison; {ANEW}")
    job, restarts = settings.job_document(prompts), kept_restarts(out / RESTARTS)
    versions: dict[str, dict[str, str]] = {}
    while not versions or not finished(restarts, settings):
        number, start_s, load = len(restarts), time.monotonic(), watch()
        with started(sides, job, number) as (workers, versions):
            identity = json.loads(json.dumps({**job, "prompts": prompt_digest(prompts), **versions}))  # as it is read
            claim(out / RESTARTS / IDENTITY, identity, f"{out} holds restarts", ANEW)
            if finished(restarts, settings):
                break
            limit_s = 60 * settings.minutes / LOOKS[-2] - (time.monotonic() - start_s)
            order = np.random.default_rng((settings.seed, number))
            numbers, runs = decode_all(
                workers,
                len(job["policies"]),
                restarts[0].prompts if restarts else order.permutation(len(prompts)).tolist(),
                math.inf if restarts or not settings.minutes else limit_s,
                order,
                partial(progress, f"restart {number + 1}"),
            )
        spent_s, ticks = time.monotonic() - start_s, list(load())  # now that the processes have ended
        restarts.append(Restart(numbers, spent_s, ticks, runs))
        write_json(asdict(restarts[-1]), out / RESTARTS / f"{number}.json")
    comparison = Comparison(
        rows_of(restarts, settings),
        len(restarts),
        sum(restart.spent_s for restart in restarts),
        load_from(Ticks(*restart.ticks) for restart in restarts),
        settings,
        versions,
        [prompts[number] for number in sorted(restarts[0].prompts)],
        len(prompts) - len(restarts[0].prompts),
    )
    write_json(comparison.as_dict(), out / RESULT)
    return comparison


def kept_restarts(folder: Path) -> list[Restart]:
    """Read the restarts that an earlier start of the command finished."""
    documents = (read_kept(folder / f"{number}.json", Restart) for number in count())
    return [convert(document, Restart) for document in takewhile(lambda document: document is not None, documents)]


def finished(restarts: Sequence[Restart], settings: CompareSettings) -> bool:
    """Tell whether every row is decided at a look, or there is no time for another restart."""
    made = len(restarts)
    if made < LEAST_RESTARTS:
        return False
    spent_s = [restart.spent_s for restart in restarts]
    if made >= LOOKS[-1] or sum(spent_s) + max(spent_s) > 60 * settings.minutes:
        return True
    return made in LOOKS and all(row.exceeds is not None for row in rows_of(restarts, settings))


def rows_of(restarts: Sequence[Restart], settings: CompareSettings) -> list[CompareRow]:
    """Return a row for the baseline and each policy."""
    confidence = confidence_of_a_look(1 + len(settings.policies))
    return [
        _row(policy, [restart.runs[arm] for restart in restarts], confidence, settings.max_slowdown_percent)
        for arm, policy in enumerate((None, *settings.policies))
    ]


def _row(
    policy: Policy | None, runs: Sequence[Sequence[Sequence[Run]]], confidence: float, limit_percent: float
) -> CompareRow:
    """Compare head and base. runs : [restart][process][prompt]"""
    seconds, tokens, rounds = (  # [restart, process, prompt]
        np.array([[[getattr(run, key) for run in process] for process in restart] for restart in runs])
        for key in ("seconds", "tokens", "rounds")
    )
    # [process, restart], of all prompts
    token_s, round_s = (np.log(seconds.sum(axis=2) / counts.sum(axis=2)).T for counts in (tokens, rounds))
    same_rounds, same_text = (
        [
            getattr(base, key) == getattr(head, key)
            for restart in runs
            for base, head in zip(restart[BASE], restart[HEAD], strict=True)
        ]
        for key in ("log", "text")
    )
    acceptance = of_text = EXACT
    if not all(same_rounds):
        mean_s, tokens_, rounds_ = (column.mean(axis=0) for column in (seconds, tokens, rounds))
        acceptance = over_prompts(tokens_[HEAD], rounds_[HEAD], tokens_[BASE], rounds_[BASE])
        of_text = over_prompts(mean_s[HEAD], tokens_[HEAD], mean_s[BASE], tokens_[BASE])
    tau = tokens.sum(axis=(0, 2)) / rounds.sum(axis=(0, 2))
    slowdown, null_change = _changes(token_s, confidence, of_text)
    round_time, _ = _changes(round_s, confidence)
    tau_change = change_percent(float(np.log(tau[HEAD] / tau[BASE])), [acceptance], confidence)
    return CompareRow(
        policy,
        slowdown,
        verdict(slowdown, limit_percent),
        exceeds(slowdown, limit_percent),
        round_time,
        tau_change,
        {"base": float(tau[BASE]), "head": float(tau[HEAD])},
        100 * float(np.mean(same_rounds)),
        100 * float(np.mean(same_text)),
        null_change,
        (1e3 * np.exp(token_s)).tolist(),
    )


def _changes(logs: Floats, confidence: float, *more: Spread) -> tuple[Estimate, Estimate]:
    """Compute the changes, in percent, of head and of null against base. logs : [process, restart]"""
    base, head, null = logs[BASE], logs[HEAD], logs[NULL]
    of_head, of_null = over_restarts(head, base, null)
    return (
        change_percent(float((head - (base + null) / 2).mean()), [of_head, *more], confidence),
        change_percent(float((null - base).mean()), [of_null], confidence),
    )
