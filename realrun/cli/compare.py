"""`realrun compare`: two versions of the code, measured at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from realrun.cli.options import (
    OVERWRITE_HELP,
    KernelSettings,
    PairSettings,
    PromptSettings,
    SamplingSettings,
    capped_policy,
    working,
)
from specsim.cli.command import Answer
from specsim.cli.console import parse_settings, print_table
from specsim.cli.options import SeedSettings
from specsim.io.errors import InputError
from specsim.io.settings import Settings, setting

if TYPE_CHECKING:
    from realrun.versions.compare import CompareRow, Comparison
    from specsim.policy.base import Policy
    from specsim.replaying.intervals import Estimate

NOT_DECIDABLE = 3  # exit code
SETTLED = re.compile(r"([^(]+)\((.*)\)")  # a policy with settings, as tables print it
SIDE_HELP = "a checkout (folder with realrun/), an environment (folder with bin/python), or CHECKOUT@ENVIRONMENT."


@dataclass(frozen=True, kw_only=True)
class CompareOptions(Settings):
    """Which versions to compare, where, and how long."""

    base: str = setting(..., f"Version before: {SIDE_HELP}", metavar="VERSION")
    head: str = setting(..., f"Version after: {SIDE_HELP}", metavar="VERSION")
    out: Path = setting(Path("compare"), "Folder for the result and finished restarts.")
    policy: list[str] = setting(
        ["fixed_k"], 'Policy to decode with, as NAME, FILE.py or "NAME(SETTING=VALUE, ...)"; repeat for more.'
    )
    minutes: float = setting(
        5.0,
        "Time to measure for, at most; prompts are left out so that eight restarts fit. It stops as soon as every row "
        "is decided.",
        above=0,
    )
    max_slowdown: float = setting(2.0, "Exit with 1 if a slowdown exceeds this many percent significantly.", above=0)
    overwrite: bool = setting(False, OVERWRITE_HELP, flag="--overwrite/--no-overwrite")


@dataclass(frozen=True, kw_only=True)
class ComparePrompts(PromptSettings):
    """Which prompts are decoded, and how far: few, because each is decoded in every restart."""

    num_prompts: int | None = setting(4, "Prompts to use, balanced over domains.", low=1)
    max_new_tokens: int = setting(32, "Maximum output tokens per prompt.", low=1)


@dataclass(frozen=True, kw_only=True)
class CompareMachine(KernelSettings):
    """Where models run, and by which clock rounds are timed."""

    clock: Literal["auto", "wall", "cpu"] = setting(
        "auto",
        "Clock: wall, or the process's CPU time, which ignores other processes, but also waiting. auto: cpu for one "
        "CPU thread, else wall.",
    )

    @property
    def chosen_clock(self) -> str:
        """Return the clock's name; InputError where it cannot measure such a run."""
        from realrun.lm.clock import CPU, WALL, check_clock

        if self.clock == "auto":
            return CPU if self.device == "cpu" and self.threads == 1 else WALL
        check_clock(self.clock, self.device, self.threads)
        return self.clock


def compare(
    job: CompareOptions,
    pair: PairSettings,
    texts: ComparePrompts,
    sampling: SamplingSettings,
    random: SeedSettings,
    machine: CompareMachine,
) -> Answer:
    """Compare the speed of two versions.

    Runs both versions at once, each in processes of its own, on the same prompts. They take turns of two rounds, so
    that both see the same machine; separate runs differ by some percent. Processes are restarted, because a process can
    be faster or slower than another of the same code for as long as it lives: intervals are over restarts. A second
    process of the base is compared with the first (A/A test).

    Each policy and the baseline without speculation get a verdict: slower or faster (significant, 95 % for all rows and
    looks together), no change larger than some percent, or not decidable. A change of acceptance (other rounds) is told
    apart from a change of time.

    Exits with 1 if a row is slower by more than --max-slowdown, with 3 if that is not decidable in the given time, and
    with 0 if no row is. After an interruption the same command goes on. Writes compare.json.

    Example: realrun compare --base ../v1 --head . --target MODEL --draft-model SMALL_MODEL --prompts prompts.jsonl
    """
    from realrun.measure.record import longest_prompt
    from realrun.pairs.pair import find_device
    from realrun.pairs.prompts import prompts_source
    from realrun.versions.compare import CompareSettings, find_side
    from realrun.versions.compare import compare as compare_versions

    clock = machine.chosen_clock
    prompts_source(pair.target, texts.prompts)
    kinds = [_kind_and_settings(text) for text in job.policy]
    for side in (job.base, job.head):
        find_side(side)
    find_device(machine.device)
    with working(job.out, machine, overwrite=job.overwrite) as report:
        loaded = pair.load(machine, device="cpu")  # the processes need the device's memory
        policies = [capped_policy(loaded, *kind) for kind in kinds]
        longest = max((policy.max_draft_tokens for policy in policies), default=0)
        chosen = texts.load(loaded, longest_prompt(loaded, texts.max_new_tokens, longest))
        del loaded  # the processes load their own
        settings = CompareSettings(
            {**vars(pair), **machine.load_options},
            policies,
            sampling.sampler(random.seed),
            texts.max_new_tokens,
            random.seed,
            job.minutes,
            job.max_slowdown,
            clock,
            machine.kernels,
        )
        comparison = compare_versions(
            job.base, job.head, chosen, settings, job.out, overwrite=job.overwrite, progress=report
        )
    code = exit_code([row.exceeds for row in comparison.rows])
    return Answer(comparison.as_dict(), partial(print_comparison, comparison, job.out), code=code)


def exit_code(exceeds: Sequence[bool | None]) -> int:
    """Return the exit code of rows that exceed the limit, do not, or are not decidable (None)."""
    return 1 if True in exceeds else NOT_DECIDABLE if None in exceeds else 0


def _kind_and_settings(text: str) -> tuple[type[Policy], dict[str, str]]:
    from specsim.learn.fit import needs_fitting
    from specsim.policy.base import build_policy
    from specsim.policy.registry import find_policy

    settled = SETTLED.fullmatch(text)
    name, values = settled.groups() if settled else (text, "")
    kind = find_policy(name)
    if needs_fitting(kind):
        raise InputError(f"policy {name} learns from a trace, which two versions do not share; choose another policy")
    settings = parse_settings([part.strip() for part in values.split(", ") if part], option="")
    build_policy(kind, settings)  # refuses them before models are loaded
    return kind, settings


def print_comparison(comparison: Comparison, out: Path) -> None:
    """Print the verdict of every row, and how far to trust it."""
    from specsim.report.page import load_text

    base, head = comparison.versions["base"], comparison.versions["head"]
    for name, side in (("base", base), ("head", head)):
        versions = ", ".join(f"{package} {side[package]}" for package in ("torch", "transformers"))
        print(f"{name}: {side['name']}, code {side['code'][:12]}, {versions}")
    if base["weights"] != head["weights"]:
        print("note: base and head have other weights, which changes acceptance")
    print(f"machine: {load_text(*comparison.load)}")
    prompts = len(comparison.prompts)
    if left_out := comparison.prompts_left_out:
        print(f"prompts left out for the time: {left_out} of {left_out + prompts}")
    title = f"{comparison.restarts} restarts, {prompts} prompts; positive is slower"
    columns = ["policy", "verdict", "time per token", "time per round", "mean acceptance length (tau)", "A/A test"]
    print_table(title, columns, [_cells(row) for row in comparison.rows])
    print(f"full result: {out / 'compare.json'}")


def _cells(row: CompareRow) -> Sequence[str]:
    changes = (_percent_text(change) for change in (row.slowdown_percent, row.round_time_percent))
    tau = "same rounds" if row.rounds_identical_percent == 100 else f"{row.tau['base']:.3f} -> {row.tau['head']:.3f}"
    return [row.label, verdict_text(row), *changes, tau, _percent_text(row.null_percent)]


def verdict_text(row: CompareRow) -> str:
    """Write the verdict of a row in words."""
    if row.verdict == "no change":
        return f"no change larger than {max(row.slowdown_percent.high, -row.slowdown_percent.low):.1f} %"
    return row.verdict


def _percent_text(change: Estimate) -> str:
    return f"{change:+.1f} % [{change.low:+.1f}, {change.high:+.1f}]"
