"""The lab really decoded in batches: measured in turns, and predicted from probes that took turns with it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from realrun.decode.batch import BatchDecoding
from realrun.lm.batched_llama import BatchedLlama
from realrun.machine_load import Ticks, load_from, watch
from realrun.measure.batches import BatchProber, batch_profile_document
from realrun.measure.interleaving import TURN_ROUNDS, take_turns
from realrun.measure.record import RecordSettings
from realrun.measure.reuse import recorded_trace
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import study_prompts
from realrun.provenance import provenance
from specsim.cost.batch_profile import batch_profile_from_json
from specsim.io.arrays import Floats
from specsim.io.files import write_text
from specsim.io.progress import Progress
from specsim.policy.chain.fixed_k import FixedK
from specsim.replaying.intervals import Estimate, ratio_of_ratios
from specsim.serving.drafts import drafts_of
from specsim.serving.lockstep import Lockstep, lockstep
from specsim.trace.files import read_trace
from specsim.trace.trace import Trace
from studies.common import Config, Document, middle_too

DIGITS = 7  # of seconds in files
MEASURED = "measured.json"  # all that was measured
NULL = -1  # the second baseline among the arms, by which noise is known


class Case(NamedTuple):
    """An arm at a batch: speedups over the baseline, predicted and measured, and seconds of both."""

    batch: int
    k: int
    predicted: Estimate
    measured: Estimate
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Relative, of the speedup."""
        return self.predicted.estimate / self.measured.estimate - 1

    def as_dict(self) -> dict[str, Any]:
        """The row of table.csv."""
        return {
            "decoded": "really",
            "batch": self.batch,
            "k": "baseline again" if self.k == NULL else self.k,
            "predicted": self.predicted.as_dict(),
            "measured": self.measured.as_dict(),
            "error_percent": 100 * self.error,
            "predicted_s": self.predicted_s,
            "measured_s": self.measured_s,
        }


def groups(sequences: int, batch: int) -> list[range]:
    """Which sequences are decoded together."""
    return [range(first, min(first + batch, sequences)) for first in range(0, sequences, batch)]


def arms_of(config: Config) -> list[int]:
    """K of every arm; the baseline, and the null arm."""
    return [0, NULL, *config["lengths"]]


def measure(out: Path, pair: Pair, config: Config, seed: int, report: Progress) -> None:
    """Decode all that is not there yet: a file per batch and repeat."""
    prompts = study_prompts(pair.tokenizer, config["prompts"])
    settings = RecordSettings(config["depth"], config["max_new_tokens"])
    trace = recorded_trace(pair, prompts, settings, out / "trace", lambda done, total: report("record", done, total))
    cases = [(repeat, batch) for repeat in range(config["repeats"]) for batch in config["batches"]]
    texts = [prompt.tokens for prompt in prompts]
    for number, (repeat, batch) in enumerate(cases):
        report("real batches", number, len(cases))
        done = out / f"{batch}-{repeat}.json"
        if not done.is_file():
            measured = measure_batch(pair, texts, trace, batch, repeat, config, seed)
            write_text(done, json.dumps(measured, separators=(",", ":")))
    batches = {}
    for batch in config["batches"]:
        files = [out / f"{batch}-{repeat}.json" for repeat in range(config["repeats"])]
        batches[str(batch)] = gathered([json.loads(file.read_text()) for file in files])
    document = {"batches": batches, "provenance": provenance(pair.device, pair.number_type)}
    write_text(out / MEASURED, json.dumps(document, separators=(",", ":")))


def measure_batch(
    pair: Pair, texts: Sequence[Sequence[int]], trace: Trace, batch: int, repeat: int, config: Config, seed: int
) -> Document:
    """Measure one repeat of a batch: rounds of every arm, samples of probes, and how busy the machine was."""
    rng = np.random.default_rng((seed, batch, repeat))
    arms, count = arms_of(config), len(groups(len(texts), batch))
    models = [(BatchedLlama(pair.target), BatchedLlama(pair.drafter.model)) for _ in (*arms, "probes")]  # type: ignore[attr-defined]
    arm_groups: dict[str, list[Any]] = {str(k): [] for k in arms}
    probed: dict[str, list[Any]] = {}
    load = watch()
    for members in groups(len(texts), batch):
        decodings = [
            BatchDecoding(*two, [texts[i] for i in members], [int(trace.budget_tokens[i]) for i in members],
                          max(k, 0), pair.eos_token_ids)
            for k, two in zip(arms, models, strict=False)
        ]  # fmt: skip
        sweeps, end = math.ceil(config["sweeps"] / count), config["max_new_tokens"]
        prober = BatchProber(*models[-1], batch, middle_too(trace), config["lengths"], sweeps=sweeps, end=end, rng=rng)
        take_turns([*decodings, prober], rng, shift=repeat % TURN_ROUNDS)
        for k, decoding in zip(arms, decodings, strict=True):
            rows = [[members[row.number], len(row.output), row.rounds] for row in decoding.rows]
            parts = [(sum(round_.step_s), round_.verify_s, round_.other_s) for round_ in decoding.rounds]
            arm_groups[str(k)].append({"rows": rows, "seconds": np.round(parts, DIGITS).tolist()})
        for name, points in prober.samples.items():
            probed.setdefault(name, []).extend((context, round(seconds, DIGITS)) for context, seconds in points)
    return {"arms": arm_groups, "probes": probed, "ticks": list(load())}


def gathered(repeats: Sequence[Document]) -> Document:
    """Join the repeats of a batch: rows of every arm and group once, and the seconds of its rounds."""
    first, *_ = repeats
    arms: Document = {}
    for k, groups_of_arm in first["arms"].items():
        together = zip(*(repeat["arms"][k] for repeat in repeats), strict=True)
        arms[k] = [
            {
                "rows": group["rows"],
                "round_s": [np.sum(repeat["seconds"], axis=1).round(DIGITS).tolist() for repeat in same],
            }
            for group, same in zip(groups_of_arm, together, strict=True)
        ]
    probes = {name: [point for repeat in repeats for point in repeat["probes"][name]] for name in first["probes"]}
    return {"arms": arms, "probes": probes, "ticks": [repeat["ticks"] for repeat in repeats]}


def results(out: Path, config: Config) -> tuple[list[Case], Document]:
    """Every arm at every batch, and what else is to be said of the run."""
    trace, document = read_trace(out / "trace"), json.loads((out / MEASURED).read_text())
    batches = {int(batch): recorded for batch, recorded in document["batches"].items()}
    samples = {batch: recorded["probes"] for batch, recorded in batches.items()}
    cost = batch_profile_from_json(batch_profile_document(samples, middle_too(trace), config["lengths"]), str(out))
    cases, differing = [], 0
    for batch, recorded in batches.items():
        measured = {k: measured_columns(recorded["arms"][str(k)], trace) for k in arms_of(config)}
        simulated = {
            k: lockstep(drafts_of(trace, FixedK(k=k) if k > 0 else None), cost, batch) for k in arms_of(config)
        }
        for k in arms_of(config):
            differing += differences(recorded["arms"][str(k)], trace, simulated[k])
            if k:
                speedups = (
                    ratio_of_ratios(*simulated[k].per_sequence(), *simulated[0].per_sequence()),
                    ratio_of_ratios(*measured[k], *measured[0]),
                )
                cases.append(Case(batch, k, *speedups, simulated[k].total_s, float(measured[k][1].sum())))
    load = load_from(Ticks(*ticks) for recorded in batches.values() for ticks in recorded["ticks"])
    return cases, {"differing": differing, "load": load, "made": document["provenance"]}


def measured_columns(arm: Sequence[Document], trace: Trace) -> tuple[Floats, Floats]:
    """Tokens and seconds of every sequence [S]: each round at the median of its repeats, shared by those in it."""
    tokens, seconds = np.zeros(trace.sequences), np.zeros(trace.sequences)
    for group in arm:
        round_s = np.median(group["round_s"], axis=0)
        taken = np.array([len(rounds) for *_, rounds in group["rows"]])  # who is over leaves, and none joins
        shared_s = round_s / (taken[:, None] > np.arange(len(round_s))).sum(axis=0)
        for (number, output_tokens, _), rounds in zip(group["rows"], taken, strict=True):
            tokens[number], seconds[number] = output_tokens, shared_s[:rounds].sum()
    return tokens, seconds


def differences(arm: Sequence[Document], trace: Trace, simulated: Lockstep) -> int:
    """Sequences whose rounds are not those of the simulation."""
    rounds = simulated.rounds
    expected: dict[int, list[list[int]]] = {number: [] for number in range(trace.sequences)}
    for number, *round_ in zip(*(column.tolist() for column in (rounds.sequence, rounds.t, rounds.drafted,
                                                              rounds.accepted)), strict=True):  # fmt: skip
        expected[number].append(round_)
    return sum(expected[number] != done for group in arm for number, _, done in group["rows"])
