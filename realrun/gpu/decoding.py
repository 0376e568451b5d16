"""Decode with trained drafters on a GPU within minutes: `realrun board`, whose recording and tuning run in parallel.

Recording and tuning time nothing and wait for the host, so a process for each drafter does them at once. Then a single
process measures costs and decodes, with the GPU for itself.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from transformers.utils import logging

from realrun.decode.acceptance_predictor import FILE
from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.experiment.typical_acceptance import TypicalSettings, compare_typical
from realrun.kept_files import read_own
from realrun.leaderboard.job import PROFILE, BoardSettings, CostSettings, run_leaderboard, tune, within
from realrun.measure.record import RecordSettings, has_recorded, longest_prompt
from realrun.measure.reuse import recorded_trace
from realrun.pairs.drafter_files import weights_digest
from realrun.pairs.pair import LOOKUP, Pair, is_lab, load_pair
from realrun.pairs.prompts import Prompt, lab_prompts, leave_out_long, prompts_source, read_prompts, spread
from specsim.cost.profile import Profile
from specsim.io.arrays import Ints
from specsim.io.errors import InputError
from specsim.io.examples import TASKS
from specsim.io.progress import Progress
from specsim.policy.registry import find_policies, make_policy

MODEL = "model:"  # before a draft model's folder, in a drafter's source
ALSO = ("adaedl", "beta_ts")  # policies of every draft model's rows; other drafters have their paper's
MEDUSA = "medusa"


@dataclass(frozen=True)
class DecodeSizes:
    """How much is recorded, measured and decoded.

    prompts : spread over the domains, a `tuning_share` of them to tune on
    rows : policies of a drafter that decode, its paper's first
    record_s, tune_s : limits of all recording processes at a time, and of the tuning
    end_s : kept free behind the decoding, for costs that are still missing and the result
    typical_prompts : prompts that MEDUSA decodes with typical acceptance, 0 for none; epsilons : its thresholds
    """

    prompts: int = 30
    tuning_share: float = 0.4
    new_tokens: int = 256
    depth: int = 8
    tree_nodes: int = 24
    tree_width: int = 8
    trials: int = 40
    repeats: int = 1
    rows: int = 2
    policies: tuple[str, ...] = (
        *("fixed_k", "max_confidence", "adaedl", "beta_ts", "cali_ts", "renewal_stop", "space_k"),
        *("vct", "pct", "eagle2", "sparse_tree"),
    )
    slices: int = 1
    sweeps: int = 1
    enough: int = 6
    record_s: float = 60.0
    tune_s: float = 75.0  # where no policy has been compiled before
    end_s: float = 20.0
    typical_prompts: int = 6
    epsilons: tuple[float, ...] = (0.05, 0.1, 0.2)

    def board(self, sampler: Sampler, source: str, seed: int) -> BoardSettings:
        """Make the settings of the board."""
        record = RecordSettings(self.depth, self.new_tokens, sampler, self.tree_nodes, self.tree_width, source)
        costs = CostSettings(
            self.slices, self.slices, self.sweeps, self.tree_nodes + 1, enough=self.enough, one_prober=True
        )
        return BoardSettings(
            record,
            tuple(find_policies(self.policies).values()),
            trials=self.trials,
            repeats=self.repeats,
            tuning_share=self.tuning_share,
            seed=seed,
            rows=self.rows,
            costs=costs,
        )


FULL = DecodeSizes()
REDUCED = DecodeSizes(
    prompts=6,
    new_tokens=12,
    depth=4,
    tree_nodes=8,
    tree_width=4,
    trials=4,
    policies=("fixed_k", "adaedl", "beta_ts", "cali_ts", "space_k", "pct", "eagle2", "sparse_tree"),
    slices=1,
    enough=2,
    end_s=5.0,
    typical_prompts=2,
    epsilons=(0.1,),
)


def decode(
    drafters: Mapping[str, str],
    target: str,
    sampler: Sampler,
    out: Path,
    *,
    minutes: float,
    sizes: DecodeSizes = FULL,
    device: str = "cuda",
    dtype: str = "bfloat16",
    seed: int = 0,
    progress: Progress = lambda what, done, total: None,
) -> dict[str, Any]:
    """Forecast and measure the drafters' best policies on held-out prompts; return the leaderboard's document.

    A second call with the same folder goes on. The document also has "left_out", the reasons of drafters that failed,
    "seconds", where the time went, and "typical", MEDUSA's typical acceptance where tokens are sampled.

    drafters : sources by name, as `load_pair` takes them, or "model:FOLDER" of a draft model
    """
    clock = Stopwatch(progress)
    end = time.monotonic() + 60 * minutes
    machine: dict[str, Any] = {"device": device, "dtype": dtype, "threads": 1}
    settings = sizes.board(sampler, prompts_source(target, None), seed)
    settings = replace(settings, decode_until=end - sizes.end_s)
    with started(drafters, target, machine, settings, out) as processes:
        plain = load_pair(target, drafter=LOOKUP, **machine)
        pairs, left_out = loaded(drafters, target, plain, machine)
        for name in left_out:
            processes.pop(name).process.kill()
        also = {name: ALSO for name in pairs if pairs[name].drafter.origin == "model"}
        settings = replace(settings, also=also)
        prompts = chosen_prompts(target, plain, pairs, sizes)
        clock.lap("load")
        ahead = Ahead(processes, plain, settings, sizes, out, clock)
        document = run_leaderboard(pairs, plain, prompts, settings, out, clock, ahead=ahead)
        clock.lap("report")
    late = {row["drafter"]: row["reason"] for row in document["skipped"] if row["policy"] == "all"}
    typical = {}
    if sampler.mode != "greedy" and sizes.typical_prompts:
        rules = TypicalSettings(sizes.epsilons, max_new_tokens=sizes.new_tokens, seed=seed)
        for name, pair in pairs.items():
            if pair.drafter.name == MEDUSA and name not in late:
                typical[name] = _typical(pair, prompts[: sizes.typical_prompts], document, name, rules)
        clock.lap("typical")
    return {**document, "left_out": {**left_out, **late}, "typical": typical, "seconds": clock.seconds}


def chosen_prompts(target: str, plain: Pair, pairs: Mapping[str, Pair], sizes: DecodeSizes) -> list[Prompt]:
    """Choose prompts that fit all pairs; their domains alternate, so that the first of them are of all kinds."""
    if is_lab(target):
        prompts = lab_prompts(plain.tokenizer, sizes.prompts)
    else:
        longest = min(longest_prompt(pair, sizes.new_tokens, sizes.depth) for pair in pairs.values())
        prompts = spread(leave_out_long(read_prompts(TASKS, plain.tokenizer), longest), sizes.prompts)
    by_domain = sorted(prompts, key=lambda prompt: prompt.domain)
    domains = groupby(by_domain, lambda prompt: prompt.domain)
    ranked = [(rank, prompt) for _, same in domains for rank, prompt in enumerate(same)]
    return [prompt for _, prompt in sorted(ranked, key=lambda one: one[0])]


def loaded(
    drafters: Mapping[str, str], target: str, plain: Pair, machine: Mapping[str, Any]
) -> tuple[dict[str, Pair], dict[str, str]]:
    """Load all pairs over a single target; also the reason of every drafter that does not load."""
    pairs, reasons = dict[str, Pair](), dict[str, str]()
    for name, source in drafters.items():
        try:
            pairs[name] = load(target, source, machine, plain)
        except Exception as error:  # the others go on
            reasons[name] = reason_of(error)
    if not pairs:
        raise InputError(f"no drafter loads ({'; '.join(reasons.values())}); give others")
    return pairs, reasons


def load(target: str, source: str, machine: Mapping[str, Any], beside: Pair | None = None) -> Pair:
    """Load a pair with the predictor in the drafter's folder, if there is one."""
    if not source.startswith(MODEL):
        return load_pair(target, drafter=source, beside=beside, predictor="auto", **machine)
    folder = source.removeprefix(MODEL)
    predictor = folder if (Path(folder) / FILE).is_file() else "auto"
    return load_pair(target, folder, beside=beside, predictor=predictor, **machine)


def reason_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _typical(
    pair: Pair, prompts: Sequence[Prompt], document: Mapping[str, Any], name: str, settings: TypicalSettings
) -> dict[str, Any]:
    """Compare typical acceptance with the drafter's sparse tree of the board; the reason if it fails."""
    rows = [row for row in document["rows"] if row["drafter"] == name and row["policy"] == "sparse_tree"]
    try:
        return compare_typical(pair, prompts, make_policy("sparse_tree", rows[0]["params"]), settings)
    except (InputError, IndexError, RuntimeError) as error:
        return {"reason": reason_of(error)}


class Stopwatch:
    """Progress that adds up where the time went. seconds : by what was done, for all drafters"""

    def __init__(self, progress: Progress):
        self.progress, self.seconds, self.last = progress, dict[str, float](), time.monotonic()

    def lap(self, what: str) -> None:
        """Count the time since the last lap for this."""
        now = time.monotonic()
        self.seconds[what] = round(self.seconds.get(what, 0.0) + now - self.last, 2)
        self.last = now

    def __call__(self, what: str, done: int, total: int) -> None:
        self.lap(what.rpartition(": ")[2])
        self.progress(what, done, total)


@dataclass
class Process:
    """A process of a drafter, with the connection to it."""

    process: Any
    connection: Connection


@contextmanager
def started(
    drafters: Mapping[str, str], target: str, machine: Mapping[str, Any], settings: BoardSettings, out: Path
) -> Iterator[dict[str, Process]]:
    """Start a process for every drafter, which loads its models; all end with the block."""
    context, processes = multiprocessing.get_context("spawn"), dict[str, Process]()
    try:
        for name, source in drafters.items():
            here, there = context.Pipe()
            arguments = (there, name, (target, source, machine), settings, out)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            there.close()
            processes[name] = Process(process, here)
        yield processes
    finally:
        for one in processes.values():
            one.process.kill()
            one.process.join()


def serve(connection: Connection, name: str, what: tuple[Any, ...], settings: BoardSettings, out: Path) -> None:
    """Load a drafter, then call each function that is received; send the reason if one fails, else an empty text."""
    logging.disable_progress_bar()
    pair, reason = None, ""
    try:
        pair = load(*what)
    except Exception as error:
        reason = reason_of(error)
    with suppress(EOFError, BrokenPipeError):
        while True:
            function, arguments = connection.recv()
            if pair is not None:
                try:
                    reason = function(pair, name, out, *arguments) or ""
                except Exception as error:
                    reason = reason_of(error)
            connection.send(reason)


def record_one(
    pair: Pair,
    name: str,
    out: Path,
    prompts: Sequence[Prompt],
    sequences: Ints,
    settings: BoardSettings,
    texts: Mapping[int, Sequence[int]],
    target_digest: str,
) -> None:
    """Record these prompts beside the drafter's trace. texts : of the target of this digest"""
    known = texts if weights_digest(pair.target) == target_digest else None
    record = within(pair, settings.record)
    recorded_trace(pair, prompts, record, out / name / "trace", lambda *_: None, sequences=sequences, texts=known)


def tune_one(
    pair: Pair, name: str, out: Path, prompts: Sequence[Prompt], sequences: Ints, settings: BoardSettings
) -> None:
    """Tune the drafter's policies under the profile in its folder."""
    record = within(pair, settings.record)
    train = recorded_trace(pair, prompts, record, out / name / "trace", lambda *_: None, sequences=sequences)
    cost = Profile.from_json(read_own(out / name / PROFILE, again="delete it"), f"of {name}").cost
    tune(name, train, cost, settings, out, lambda *_: None, jobs=1)


class Ahead:
    """Has the processes record and tune for a board; see `realrun.leaderboard.job.Ahead`."""

    def __init__(
        self,
        processes: dict[str, Process],
        plain: Pair,
        settings: BoardSettings,
        sizes: DecodeSizes,
        out: Path,
        clock: Stopwatch,
    ):
        self.processes, self.plain, self.settings, self.sizes = processes, plain, settings, sizes
        self.out, self.clock = out, clock

    def record(self, prompts: Sequence[Prompt], sequences: Ints) -> dict[str, str]:
        missing = [
            number
            for number in sequences.tolist()
            if not all(has_recorded(self.out / name / "trace", [number]) for name in self.processes)
        ]
        texts = {number: self._text(number, prompts[number]) for number in missing}
        self.clock.lap("texts")
        asked = (prompts, sequences, self.settings, texts, weights_digest(self.plain.target))
        reasons = self._ask(record_one, asked, self.sizes.record_s)
        self.clock.lap("record in parallel")
        return reasons

    def tune(self, prompts: Sequence[Prompt], sequences: Ints, settings: BoardSettings) -> None:
        self._ask(tune_one, (prompts, sequences, settings), self.sizes.tune_s)
        self.clock.lap("tune in parallel")

    def _text(self, number: int, prompt: Prompt) -> list[int]:
        if not hasattr(self, "decoder"):
            self.decoder = Decoder(*self.plain.make_drafter(), self.plain.eos_token_ids, self.settings.record.sampler)
        return self.decoder.decode(prompt.tokens, self.settings.record.max_new_tokens, None, sequence=number).tokens

    def _ask(self, function: Any, arguments: tuple[Any, ...], limit_s: float) -> dict[str, str]:
        """Have all processes do this; return the reasons of those that failed, which are ended."""
        reasons, end = dict[str, str](), time.monotonic() + limit_s
        waiting = {process.connection: name for name, process in self.processes.items()}
        for connection in waiting:
            with suppress(BrokenPipeError):  # told below
                connection.send((function, arguments))
        while waiting and (ready := wait([*waiting], max(0.0, end - time.monotonic()))):
            for connection in [one for one in waiting if one in ready]:
                name = waiting.pop(connection)
                try:
                    reason = connection.recv()
                except (EOFError, ConnectionResetError):
                    reason = "its process ended, perhaps for lack of memory"
                if reason:
                    reasons[name] = reason
        reasons |= dict.fromkeys(waiting.values(), f"{function.__name__} took longer than {limit_s:g} s")
        for name in [name for name in reasons if name in waiting.values() or function is record_one]:
            self.processes.pop(name).process.kill()
        return reasons
