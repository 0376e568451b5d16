"""The interface of engines: convert a pair, run it, return its rounds and seconds."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from realrun.decode.sampling import Sampler
from realrun.kept_files import log_end
from realrun.pairs.pair import Pair
from realrun.pairs.whole import save_model
from specsim.engines.acceptance_rules import find_rule
from specsim.engines.conventions import Conventions, find_conventions
from specsim.io.arrays import Array
from specsim.io.errors import InputError
from specsim.lookup.ngram import NgramRule
from specsim.policy.chain.base import ChainPolicy
from specsim.policy.chain.fixed_k import FixedK
from specsim.serving.draft_length import ScheduledK, fixed_length
from specsim.trace.accepted import Rule

INSTALL = "pip install -c constraints.txt '.[engines]'"
PROCESSES = Path(__file__).parent / "processes"
DONE = "done "  # how a process says on a line of its own how many turns it has done


@dataclass(frozen=True)
class Setting:
    """How an engine drafts.

    k : tokens of a round, at most
    p_min : below which its rule for confidence stops
    batch : sequences at once, at most
    schedule : tokens of a round by the sequences of a step, of which k is the most; None where it is always k
    """

    k: int
    p_min: float = 0.0
    batch: int = 1
    schedule: ScheduledK | None = None

    @property
    def rule(self) -> ScheduledK:
        """Tokens of a round by the sequences of a step."""
        return self.schedule or fixed_length(self.k)

    def as_dict(self) -> dict[str, Any]:
        lengths = None if self.schedule is None else {str(batch): k for batch, k in self.schedule.lengths.items()}
        return {"k": self.k, "p_min": self.p_min, "batch": self.batch, "schedule": lengths}

    def __str__(self) -> str:
        if not self.k:
            return "no speculation"
        text = f"K = {self.k}" if self.schedule is None else self.schedule.label
        text += f", p_min = {self.p_min:g}" if self.p_min else ""
        return text + (f", {self.batch} at once" if self.batch > 1 else "")


class Sums(NamedTuple):
    """An engine's own counters: rounds with a draft, drafted and accepted tokens, these by position.

    None stands where it has no such counter.
    """

    rounds: int | None
    drafted: int
    accepted: int
    accepted_per_position: list[int] | None = None


@dataclass(frozen=True)
class EngineRun:
    """Output of an engine in a setting.

    outputs : tokens of every prompt's output
    rounds : (drafted, accepted) of every prompt's rounds, in their order, as the engine counts them, drafted being None
        where it does not say how many; in batches, of those that drafted
    sums : its counters, where it has any
    """

    outputs: list[list[int]]
    rounds: Sequence[Sequence[tuple[int | None, int]]]
    sums: Sums | None = None


class DenseRun(NamedTuple):
    """What an engine drafted after every output token.

    outputs : tokens of every prompt's output
    rows : drafts in the order of the steps, as `realrun.engines.processes.vllm_recorder.row_type` has them
    facts : which engine, and how it ran; the key "engine" of the trace's metadata
    generate_s, draft_s : seconds that the target took, and drafting with recording
    """

    outputs: list[list[int]]
    rows: Array
    facts: dict[str, str | int | None]
    generate_s: float
    draft_s: float


class Turn(NamedTuple):
    """Seconds that an engine took for a prompt after prefill: in all, and for drafts."""

    output_tokens: int
    whole_s: float
    draft_s: float


class Job(NamedTuple):
    """Prompts to decode, up to this limit on output tokens, in a folder with the converted pair.

    lookup : draft by prompt lookup, not by the draft model
    temperature : at which all tokens are sampled from, without top-k and top-p; 0: greedy
    seed : of the first prompt's noise; each prompt has the next one
    """

    folder: Path
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    eos_token_ids: Sequence[int]
    lookup: bool = False
    temperature: float = 0.0
    seed: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "folder": str(self.folder), "eos_token_ids": list(self.eos_token_ids)}


class Engine:
    """An engine, by default with drafts of K tokens of a draft model, whose process says what each round drafted.

    To add another, subclass this in a new file, write the module that PROCESSES runs, run_NAME.py with `run(job)`, and
    add a line in `realrun.engines.registry`.

    name : as conventions call it
    modules : what must be installed in this Python
    package : what must be installed in an interpreter that the engine runs in, by its name in the package index; None
        for one that runs in this Python
    takes_p_min : whether a draft can end where the drafter is not sure
    takes_batches : whether it is run with several sequences at once, and a draft length by how many
    lookup_rule : its prompt lookup, where that is known
    environment : variables of its processes
    """

    name: ClassVar[str]
    modules: ClassVar[tuple[str, ...]] = ()
    package: ClassVar[str | None] = None
    takes_p_min: ClassVar[bool] = False
    takes_batches: ClassVar[bool] = False
    lookup_rule: ClassVar[NgramRule | None] = None
    environment: ClassVar[Mapping[str, str]] = {}

    @property
    def short_name(self) -> str:
        """The name by which its module in PROCESSES, its extra and its environment variable are called."""
        return self.name.partition("-")[0]

    @property
    def conventions(self) -> Conventions:
        return find_conventions(self.name)

    @property
    def draft_rule(self) -> Rule:
        """The rule by which it accepts a draft model's tokens at a temperature."""
        return find_rule(self.name)

    def rule_of(self, *, lookup: bool) -> Rule:
        """Return the rule of acceptance; what lookup drafts has no probability, so that it is always the target's."""
        return "greedy-draft" if lookup else self.draft_rule

    def check_installed(self) -> None:
        """Raise InputError if a package is missing."""
        if missing := [name for name in self.modules if importlib.util.find_spec(name) is None]:
            raise InputError(f"{self.name} needs {' and '.join(missing)}, not installed here: {INSTALL}")
        try:
            self.version()
        except (OSError, subprocess.SubprocessError):
            raise InputError(
                f"{self.python} has no {self.package}; install it there by pip install -c constraints.txt "
                f"'.[{self.short_name}]', or name another interpreter in {self.variable}"
            ) from None

    @property
    def variable(self) -> str:
        """The environment variable that names the engine's interpreter."""
        return f"SPECSIM_{self.short_name.upper()}_PYTHON"

    @property
    def python(self) -> str:
        """The interpreter that has its package."""
        return os.environ.get(self.variable) or sys.executable

    def convert(self, pair: Pair, folder: Path) -> None:
        """Write the pair's models as the engine reads them; InputError where it cannot."""
        save_models(pair, folder)

    def process(
        self,
        job: Mapping[str, Any],
        folder: Path,
        variables: Mapping[str, str] | None = None,
        done: Callable[[int], None] = lambda turns: None,
    ) -> Any:
        """Run the engine's module of PROCESSES on a job in its own process; return its JSON.

        Its log is left in folder/log.txt. InputError, with the log's last lines, where it fails.

        variables : of the environment, beside the engine's own
        done : called with the number of finished turns, as the module prints it
        """
        module = f"run_{self.short_name}"
        job_file, result, log = folder / "job.json", folder / "result.json", folder / "log.txt"
        job_file.write_text(json.dumps(job))
        result.unlink(missing_ok=True)
        command = [self.python, str(PROCESSES / "run.py"), str(job_file), str(result), module]
        environment = {**os.environ, **self.environment, **(variables or {})}
        with (
            log.open("w") as errors,
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, env=environment, errors="replace"
            ) as process,
        ):
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    if line.startswith(DONE):
                        done(int(line.removeprefix(DONE)))
            except BaseException:
                process.kill()
                raise
        if process.returncode or not result.is_file():
            last = log_end(log.read_text(errors="replace"))
            raise InputError(f"{module} ended with {process.returncode}: {last}; run the engine alone to see why")
        return json.loads(result.read_text())

    def run(self, job: Job, setting: Setting) -> EngineRun:
        """Decode all prompts in a process of its own."""
        result = self.process({**job.as_dict(), "k": setting.k}, job.folder)
        rounds = [[(drafted, accepted) for drafted, accepted in rounds] for rounds in result["rounds"]]
        return EngineRun(result["outputs"], rounds)

    def run_timed(
        self, job: Job, arms: Sequence[Setting], turns: Sequence[tuple[int, int]], done: Callable[[int], None]
    ) -> list[Turn]:
        """Decode prompts in settings, (arm, prompt) in turn in a single process, and return the seconds of each.

        done : called with the number of finished turns, after each
        """
        raise InputError(f"{self.name} does not say how long its drafts take; choose llamacpp")

    def check_dense(self, sampler: Sampler) -> None:
        """Raise InputError unless `run_dense` can record the installed version with this sampling."""
        raise InputError(f"{self.name} does not record what it drafts at every position; choose vllm or llamacpp")

    def run_dense(self, job: Job, setting: Setting, sampler: Sampler, step_tokens: int | None = None) -> DenseRun:
        """Decode all prompts without speculation, and draft setting.k tokens after every output token all the same.

        step_tokens : tokens of a step, at most, so that longer prompts are read in chunks; None for whole prompts
        """
        raise NotImplementedError

    def policy(self, setting: Setting) -> ChainPolicy:
        """Return the policy that drafts the same in a replay."""
        return FixedK(setting.k)

    def version(self) -> str:
        """Return the installed package's version."""
        return self._version

    @cached_property
    def _version(self) -> str:
        print_it = f"from importlib.metadata import version; print(version({self.package!r}))"
        done = subprocess.run([self.python, "-c", print_it], capture_output=True, text=True, check=True)
        return done.stdout.strip()


def models_of(pair: Pair) -> list[tuple[str, Any]]:
    """Return the models that an engine needs, by the names of their files: target and, if any, draft model."""
    return [("target", pair.target), *(("draft", model) for model in pair.drafter.weights(pair.target))]


def save_models(pair: Pair, folder: Path) -> None:
    """Write the pair as Hugging Face has models: a folder for each, with the tokenizer."""
    for name, model in models_of(pair):
        save_model(model, pair.tokenizer, folder / name)
