"""A contract of the command lines: what they answer on small inputs, recorded number for number.

    python -m tests.contract.commands                  compare with commands.json, print every difference
    python -m tests.contract.commands --exact          the same, floats to the last digit
    python -m tests.contract.commands --write          record commands.json anew
    python -m tests.contract.commands --only NAME ...  of these commands alone; a name may be the start of names

IMPORTS lists the modules that the commands need, COMMANDS every command with its options, and DROPPED the keys that are
not compared.

Inputs are made from numpy's generators, and their floats are rounded to multiples of 1/4096, so
that they do not depend on the processor. The weights of the models are such numbers too.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import math
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from scipy.special import softmax
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

import realrun.experiment.forecast as validation_costs

# IMPORTS of the project: all that this file takes from it.
import realrun.leaderboard.job as board_costs
import realrun.measure.profile as board_profiles
from realrun.decode.acceptance_predictor import Predictor, save_predictor
from realrun.drafters.eagle import Eagle
from realrun.drafters.edd import one_layer_model, own_state
from realrun.drafters.eesd import EarlyExit
from realrun.drafters.medusa import MedusaHeads
from realrun.experiment.measuring import MeasuredCosts
from realrun.measure.profile import LEAST_SWEEPS
from realrun.pairs.drafter_files import describe_target, save_drafter
from realrun.pairs.pair import load_pair
from specsim.cost.profile import Profile
from specsim.trace.files import read_trace, write_trace
from specsim.trace.trace import Trace
from tests.support.commands import call
from tests.support.quick import quick_measurements
from tests.support.tree_traces import drawn_trace, stretches

# Where `realrun validate` and `realrun board` look up the functions that measure profiles.
PROFILE_USERS = ((board_profiles, "profile"), (validation_costs, "profile"))
GOLDEN = Path(__file__).with_name("commands.json")
Document = Any  # parsed JSON

# What documents do not keep: paths and descriptions of this machine, this run or these versions, what a clock measured
# or follows from that, sentences for people, and what is long and told by other fields. "every" is left out everywhere.
DROPPED = {
    "every": "trace provenance environment date precise record_seconds time_over_generation reason warnings doc source",
    "leaderboard": "sequence_seconds made costs",
    "written": "parameters checksums",
    "validate": "measured error_percent median_abs_error_percent p90_abs_error_percent errors "
    "machine_state time made costs error_parts null_arm noise_floor_percent resolved overhead "
    "acceleration_over_overhead acceleration_over_overhead_off_percent sequence_seconds "
    "autoregressive_sequence_seconds load wall_clock_speedup wall_clock_differs baseline tokens_per_s ms_per_token "
    "choice predicted_speedup_best measured_speedup_best accepted_histogram device",
}

NOTHING = "(nothing)"  # stands for what a document lacks
TOLERANCE = 1e-9  # relative, of floats
FITTED = 1e-6, "logistic regression by scikit-learn's solver ends where rounding of BLAS leads it"
OPTIMISED = 1e-5, "scipy's minimisers end within their tolerance, where rounding leads them"
NETWORK = 1e-6, "what a neural network computes, stored as float32; matrix products round as the processor does"
SINGLE = 1e-4, "what a neural network computes in float32"


@dataclass(frozen=True)
class Command:
    """A command to run. {NAME} in its words is an input of INPUTS, {out} a new path of its own.

    read : name of the function that says what to keep of the printed document and of what was written to {out}
    tolerance : relative, of floats, and why it is larger than TOLERANCE if it is
    """

    line: str
    read: str = "printed_alone"
    tolerance: tuple[float, str] = (TOLERANCE, "")


# ---------------------------------------------------------------------------------------------
# The table: policies with the settings that suit a trace of depth 6 with trees of 64 nodes, then a command a line, as
# "name: words", under what is kept of its answer and how exactly. All are run with --json.
# ---------------------------------------------------------------------------------------------

POLICIES: dict[str, str] = {
    "fixed_k": "k=3",
    "max_confidence": "lambda0=0.3",
    "adaedl": "gamma=0.15",
    "beta_ts": "alpha0=2.0",
    "cali_ts": "sigma_m=0.2",
    "time_gain": "",
    "renewal_stop": "",
    "hugging_face": "num_assistant_tokens=5 assistant_confidence_threshold=0.3",
    "llama_cpp": "p_min=0.5",
    "p_min": "p_min=0.5",
    "space_k": "k=4",
    "vct": "width=2 depth=4",
    "cartesian": "s1=2 s2=2 s3=1",
    "sparse_tree": "nodes=12",
    "optimal_tree": "max_nodes=20",
    "cape": "depth=4",
    "eagle2": "nodes=20 depth=5 top_k=6",
    "pct": "leaf_threshold=0.05",
    "beta_ts_tree": "beam=2 width=3 nodes=12",
}
FIRST_TREE = list(POLICIES).index("vct")
WORDS = {  # that many commands share
    "PAIR": "--target {target} --draft-model {draft} --dtype float64 --threads 1",
    "INSIDE": "--target {target} --dtype float64 --threads 1",
    "GUMBEL": "--mode gumbel --temperature 1.2",
    "SHORT": "--prompts {prompts} --num-prompts 4 --max-new-tokens 16 --max-draft-tokens 4",
    "TREES": "--tree-nodes 12 --tree-width 3",
    "FEW": "--contexts 8,16 --max-draft-tokens 3 --minutes 0",
    "LOOKUP": "--target {target} --drafter prompt-lookup --dtype float64 --threads 1 --prompts {repetitive} "
    "--max-new-tokens 24 --max-draft-tokens 4 --temperature 0.3",
    "TWO": "--policy fixed_k --policy adaedl",
}

TABLE: dict[tuple[str, tuple[float, str]], str] = {
    ("printed_alone", (TOLERANCE, "")): """
        replay beta_ts, seed 3: specsim replay {chains} --policy beta_ts --cost {profile} --seed 3
        replay fixed_k, space: specsim replay {masked} --policy fixed_k --set k=3 --cost {profile}
        replay space_k, space: specsim replay {masked} --policy space_k --cost {profile}
        replay time_gain, packed trace: specsim replay {packed} --policy time_gain --cost {profile}
        replay time_gain, share and seed: specsim replay {chains} --policy time_gain --cost {constant}
            --tuning-share 0.3 --seed 5
        replay adaedl, cost grids, batch 1: specsim replay {chains} --policy adaedl --cost {target_grid}
            --draft-cost {grids}:drafter --batch 1
        replay adaedl, cost grids, batch 4: specsim replay {chains} --policy adaedl --cost {target_grid}
            --draft-cost {grids}:drafter --batch 4
        replay pct, cost grids: specsim replay {trees} --policy pct --set max_nodes=20 --cost {target_grid}
            --draft-cost {grids}:drafter
        tune grid: specsim tune {chains} --policy adaedl --cost {profile} --search grid --trials 30
        tune optuna: specsim tune {chains} --policy beta_ts --cost {profile} --search optuna --trials 12
        tune a tree policy: specsim tune {trees} --policy pct --cost {profile} --search grid --trials 16
            --tuning-share 0.6
        tune fixed_k, rejection sampling: specsim tune {rejection} --policy fixed_k --cost {profile}
        tree search, accuracies: specsim tree search {accuracies} --nodes 20
        tree search, trace: specsim tree search {trees} --nodes 16
        cost calibrate, probe: specsim cost calibrate {named_profile} {probe} --out {out}
        tree best, profile: specsim tree best {trees} --cost {profile} --max-nodes 24 --max-depth 5
        tree best, constant cost: specsim tree best {trees} --cost {constant} --max-nodes 10
        acceptance fit iid, trace: specsim acceptance fit {chains} --model iid --out {out}
        acceptance fit iid, rounds: specsim acceptance fit {rounds} --policy fixed_k(k=4) --model iid --out {out}
        acceptance fit iid, counters: specsim acceptance fit {counters} --model iid --out {out}
        acceptance fit per_position, trace: specsim acceptance fit {chains} --model per_position --out {out}
        acceptance fit per_position, rounds: specsim acceptance fit {rounds} --policy fixed_k(k=4)
            --model per_position --out {out}
        acceptance fit per_position, counters: specsim acceptance fit {counters} --model per_position --out {out}
        info trees: specsim info {trees}
        info chains: specsim info {chains}
        info rejection: specsim info {rejection}
        info packed: specsim info {packed}
        policies: specsim policies
        shapes: realrun shapes
    """,
    ("printed_alone", FITTED): """
        replay renewal_stop, isotonic on entropy: specsim replay {chains} --policy renewal_stop --set signal=entropy
            --set lookahead=false --cost {profile}
        tune renewal_stop: specsim tune {chains} --policy renewal_stop --cost {profile}
    """,
    ("printed_alone", OPTIMISED): """
        acceptance fit difficulty, trace: specsim acceptance fit {chains} --model difficulty --out {out}
        acceptance fit difficulty, rounds: specsim acceptance fit {rounds} --policy fixed_k(k=4) --model difficulty
            --out {out}
    """,
    ("printed_alone", NETWORK): """
        replay beta_ts, expected: specsim replay {scored} --policy beta_ts --cost {profile} --expected
        replay cali_ts, expected: specsim replay {scored} --policy cali_ts --cost {profile} --expected
        info of a recorded trace: specsim info {recorded}
        replay adaedl, recorded trace: specsim replay {recorded} --policy adaedl --cost {profile}
        replay eagle2, recorded trace: specsim replay {recorded} --policy eagle2 --set nodes=8 --set top_k=3
            --set depth=4 --cost {profile}
    """,
    ("board", (TOLERANCE, "")): """
        leaderboard of two traces: specsim leaderboard {chains} {rejection} --cost {profile} --cost {constant} {TWO}
            --policy beta_ts --trials 6 --replays 2 --max-draft-tokens 3,6 --tuning-share 0.4 --seed 1
    """,
    ("board", FITTED): """
        leaderboard of all policies: specsim leaderboard {trees} --cost {profile} --trials 5 --replays 2
    """,
    ("board", NETWORK): """
        leaderboard of drafters, predicted: realrun board --minutes 0 --out {out} {PAIR} {SHORT}
            --drafters model,{eesd},{medusa},prompt-lookup --tree-nodes 16 --tree-width 4 {TWO} --policy pct
            --trials 3 --predict-only
    """,
    ("with_columns", (TOLERANCE, "")): """
        acceptance generate iid: specsim acceptance generate {model_iid} --out {out} --sequences 6 --output-tokens 40
            --max-draft-tokens 5 --prompt-tokens 12 --seed 4
        acceptance generate per_position: specsim acceptance generate {model_per_position} --out {out} --sequences 6
            --output-tokens 40 --max-draft-tokens 5 --prompt-tokens 12 --seed 4
    """,
    ("with_columns", OPTIMISED): """
        acceptance generate difficulty: specsim acceptance generate {model_difficulty} --out {out} --sequences 6
            --output-tokens 40 --max-draft-tokens 5 --prompt-tokens 12 --seed 4
    """,
    ("with_columns", NETWORK): """
        record, greedy: realrun record {out} {PAIR} {SHORT} --mode greedy
        record, gumbel with trees: realrun record {out} {PAIR} {SHORT} {TREES} --mode gumbel
        record, gumbel, top-p and a seed: realrun record {out} {PAIR} {SHORT} {GUMBEL} --top-p 0.8 --seed 3
        record, rejection sampling: realrun record {out} {PAIR} {SHORT} --mode rejection --top-p 0.9
        record with scores: realrun record {out} {PAIR} {SHORT} --predictor {predictor}
        record eesd: realrun record {out} {INSIDE} --drafter {eesd} {SHORT} {TREES} --mode greedy
        record medusa: realrun record {out} {INSIDE} --drafter {medusa} {SHORT} {TREES} --mode greedy
        record self_sd: realrun record {out} {INSIDE} --drafter {self_sd} {SHORT} {TREES} --mode greedy
        record edd: realrun record {out} {INSIDE} --drafter {edd} {SHORT} {TREES} --mode greedy
        record eagle: realrun record {out} {INSIDE} --drafter {eagle} {SHORT} {TREES} --mode greedy
        record space: realrun record {out} {INSIDE} --drafter {space} {SHORT} --mode greedy
        record eesd, gumbel without trees: realrun record {out} {INSIDE} --drafter {eesd} {SHORT} --mode gumbel
        record medusa, gumbel without trees: realrun record {out} {INSIDE} --drafter {medusa} {SHORT} --mode gumbel
        record eesd, rejection sampling: realrun record {out} {INSIDE} --drafter {eesd} {SHORT} --mode rejection
        record prompt-lookup, greedy: realrun record {out} {LOOKUP} --mode greedy
        record prompt-lookup, gumbel: realrun record {out} {LOOKUP} --mode gumbel
    """,
    ("with_columns", SINGLE): """
        record in float32: realrun record {out} {PAIR} {SHORT} {TREES} --dtype float32
    """,
    ("shapes_alone", (TOLERANCE, "")): """
        profile: realrun profile {out} {PAIR} {FEW} --tree-nodes 8
        profile, chains alone: realrun profile {out} {PAIR} {FEW} --tree-nodes 0 --mode rejection
        profile eesd: realrun profile {out} {INSIDE} --drafter {eesd} {FEW} --tree-nodes 4 --mode greedy
        profile medusa: realrun profile {out} {INSIDE} --drafter {medusa} {FEW} --tree-nodes 4 --mode greedy
        profile space: realrun profile {out} {INSIDE} --drafter {space} {FEW} --tree-nodes 4 --mode greedy
        probe: realrun probe {PAIR} --contexts 8,16 --seconds 0 --out {out}
        cost-grid: realrun cost-grid qwen3-0.6b --out {out} --tokens 1,3 --contexts 8,16 --batches 1,2 --repeats 2
            --device cpu --dtype float32 --smoke-test
    """,
    ("rounds_and_predictions", NETWORK): """
        validate chains and trees: realrun validate --out {out} {PAIR} {SHORT} --tree-nodes 24 --tree-width 4
            --trials 4 --repeats 3 --minutes 0 {TWO} --policy beta_ts --policy time_gain --policy vct
            --policy sparse_tree
            --policy pct --policy beta_ts_tree
        validate all chain policies: realrun validate --out {out} {PAIR} {SHORT} --predictor {predictor} --mode greedy
            --trials 4 --repeats 3 --minutes 0
        validate eesd: realrun validate --out {out} {INSIDE} --drafter {eesd} {SHORT} --trials 4 --repeats 3
            --minutes 0 --policy fixed_k --policy max_confidence
        validate, rejection sampling: realrun validate --out {out} {PAIR} {SHORT} --mode rejection --trials 4
            --repeats 3 --minutes 0 {TWO} --policy beta_ts
    """,
}


def table() -> dict[str, Command]:
    """All commands by name."""
    commands: dict[str, Command] = {}
    for policy, settings in POLICIES.items():
        words = " ".join(["specsim replay {%s}", "--policy", policy, *(f"--set {s}" for s in settings.split())])
        tolerance = FITTED if policy == "renewal_stop" else (TOLERANCE, "")
        variants = {f"{cost} cost": f"{words % 'trees'} --cost {{{cost}}} --json" for cost in ("constant", "profile")}
        if policy in list(POLICIES)[:FIRST_TREE]:
            variants["rejection sampling"] = f"{words % 'rejection'} --cost {{profile}} --json"
        commands |= {f"replay {policy}, {name}": Command(v, tolerance=tolerance) for name, v in variants.items()}
    for (read, tolerance), text in TABLE.items():
        for entry in re.split(r"\n {8}(?! )", text.rstrip())[1:]:
            name, words = entry.split(": ", 1)
            words = re.sub(r"\{([A-Z]+)\}", lambda shared: WORDS[shared[1]], " ".join(words.split()))
            assert name not in commands, name
            commands[name] = Command(f"{words} --json", read, tolerance)
    return commands


# ---------------------------------------------------------------------------------------------
# What is kept of the documents.
# ---------------------------------------------------------------------------------------------


def trimmed(document: Document, *kinds: str) -> Document:
    """Return the document without the keys that DROPPED lists for every command and for these kinds."""
    dropped = {key for kind in ("every", *kinds) for key in DROPPED[kind].split()}
    if isinstance(document, dict):
        return {key: trimmed(value, *kinds) for key, value in document.items() if key not in dropped}
    return [trimmed(value, *kinds) for value in document] if isinstance(document, list) else document


def printed_alone(document: Document, out: Path) -> Document:
    return trimmed(document)


def board(document: Document, out: Path) -> Document:
    return trimmed(document, "leaderboard")


def with_columns(document: Document, out: Path) -> Document:
    """The printed document, and the columns of the trace that was written."""
    trace = read_trace(out)
    columns: dict[str, Any] = {name: getattr(trace, name) for name in vars(type(trace))["__dataclass_fields__"]}
    tree = columns.pop("tree")
    if tree is not None:
        columns |= {f"tree {name}": getattr(tree, name) for name in ("prob", "token", "first_child", "horizon")}
    meta = columns.pop("meta")
    arrays = {name: column(values) for name, values in columns.items() if values is not None}
    return {"printed": trimmed(document), "meta": trimmed(meta, "written"), "columns": arrays}


def column(values: npt.NDArray[Any]) -> dict[str, Any]:
    """Shape and contents: few integers as they are, many by their digest, floats by mean, weighted mean and the first.

    The weights tell the order.
    """
    description: dict[str, Any] = {"shape": list(values.shape), "dtype": values.dtype.str.replace("<U", "str")[:3]}
    if values.dtype.kind != "f":
        plain = values.ravel().tolist()
        if len(plain) <= 100:
            return {**description, "values": plain}
        return {**description, "digest": hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]}
    flat = values.ravel().astype(np.float64)
    if not len(flat):
        return description
    weights = np.arange(1, len(flat) + 1) / len(flat)
    return {
        **description,
        "mean": math.fsum(flat) / len(flat),
        "weighted": math.fsum(flat * weights) / len(flat),
        "first": flat[:8].tolist(),
    }


def shapes_alone(document: Document, out: Path) -> Document:
    """Keys and shapes; integers and texts as they are, floats as the word "float"."""

    def shape(value: Document) -> Document:
        if isinstance(value, dict):
            return {key: shape(part) for key, part in value.items()}
        if isinstance(value, list) and value:
            array = np.array(value)
            return {"shape": list(array.shape)} if array.dtype.kind == "f" else [shape(part) for part in value]
        return "float" if isinstance(value, float) else value

    assert json.loads(out.read_text()) == document
    return shape(trimmed(document))


def rounds_and_predictions(document: Document, out: Path) -> Document:
    """Rows by their label, without the clock's; every real round: sequence, t, drafted, accepted, verified, last."""
    document = trimmed(document, "validate")
    document["rows"].sort(key=lambda row: row["label"])
    names = ("sequence_id", "t", "drafted", "accepted", "verified", "last")
    rounds: dict[str, list[list[int]]] = {}
    for row in pq.read_table(out / "rounds.parquet").to_pylist():
        rounds.setdefault(row["policy"], []).append([row[name] for name in names])
    assert sorted(path.name for path in out.iterdir()) == [
        *("forecast.json", "profile.json", "report.html", "rounds.parquet", "trace", "tuned.json"),
        *("tuning_profile.json", "validation.json"),
    ]  # fmt: skip
    return {**document, "rounds": {label: " ".join(map(_joined, rounds[label])) for label in sorted(rounds)}}


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


READERS: dict[str, Callable[[Document, Path], Document]] = {
    reader.__name__: reader for reader in (printed_alone, board, with_columns, shapes_alone, rounds_and_predictions)
}

# ---------------------------------------------------------------------------------------------
# Inputs.
# ---------------------------------------------------------------------------------------------

INPUTS: dict[str, Callable[[Workplace], Path]] = {}
DEPTH = 6
CONSTANT = {"s_d": 0.0015, "s_t": 0.01}


class Workplace:
    """A folder of inputs, each made when first asked for, and of what commands write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: dict[str, Path] = {}
        self._runs = 0

    def path(self, name: str) -> Path:
        """The input of this name."""
        if name not in self._made:
            self._made[name] = INPUTS[name](self)
        return self._made[name]

    def new(self) -> Path:
        """A path at which there is nothing yet."""
        self._runs += 1
        return self.folder / f"out{self._runs}"

    def run(self, command: Command) -> Document:
        """What is kept of the command's answer."""
        out = self.new()
        with contextlib.ExitStack() as stack:
            stack.enter_context(settings_put_back())
            stack.enter_context(quick_measurements(LEAST_SWEEPS))
            for module, name in () if command.read == "shapes_alone" else PROFILE_USERS:
                stack.enter_context(mock.patch.object(module, name, fixed_profile))
            if command.read != "shapes_alone":
                stack.enter_context(mock.patch.object(board_costs, "profile_slice", fixed_slice))
            stack.enter_context(mock.patch.object(MeasuredCosts, "profile", fixed_run_profile))
            return READERS[command.read](printed(self.words(command.line, out)), out)

    def words(self, line: str, out: Path) -> list[str]:
        """The words of a command with the names in them filled in."""

        def fill(name: str) -> str:
            return str(out if name == "out" else self.path(name))

        return [re.sub(r"\{(\w+)\}", lambda match: fill(match[1]), word) for word in line.split()]


def _input(make: Callable[[Workplace], Path]) -> Callable[[Workplace], Path]:
    INPUTS[make.__name__] = make
    return make


@contextlib.contextmanager
def settings_put_back() -> Iterator[None]:
    """Torch's threads and the loudness of transformers, as they were before."""
    threads, verbosity, bars = torch.get_num_threads(), logging.get_verbosity(), logging.is_progress_bar_enabled()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        logging.set_verbosity(verbosity)
        (logging.enable_progress_bar if bars else logging.disable_progress_bar)()


def printed(words: Sequence[str]) -> Document:
    """The JSON that this command prints, run in this process."""
    result = call(*words)
    if result.code:
        raise AssertionError(f"{' '.join(words)}\nended with {result.code}: {result.err}")
    return json.loads(result.out)


def rounded(values: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """To multiples of 1/4096: what the last digit of an exponential is then does not matter."""
    return (np.round(np.asarray(values, dtype=np.float64) * 4096) / 4096).astype(np.float32)


def text_json(path: Path, document: Document) -> Path:
    path.write_text(json.dumps(document))
    return path


def meta_of(**changes: Any) -> dict[str, Any]:
    return {
        "target": "none",
        "drafter": "none",
        "decoding": "greedy",
        "depth": DEPTH,
        "eos_token_id": 0,
        "dtype": "float32",
        "device": "cpu",
        **changes,
    }


def chain_trace(sequences: int = 16, tokens: int = 70, **changes: Any) -> Trace:
    """Acceptance in stretches of 20 tokens on average; confidence, entropy and score tell some of it.

    Sequences differ in length, some end by the token 0, some drafts hold it.
    """
    rng = np.random.default_rng(11)
    lengths = (tokens - 3 * (np.arange(sequences) % 5)).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(offsets[-1])
    stretch = np.cumsum(rng.random(total) < 1 / 20)
    ease = 1.75 + 1.2 * rng.normal(size=stretch[-1] + 1)[stretch]
    chance = 1 / (1 + np.exp(-(ease[:, None] + 0.8 * rng.normal(size=(total, DEPTH)))))
    confidence = rounded(np.clip(chance, 0.01, 0.99))
    entropy = rounded(3.5 * (1 - chance) ** 0.8 * np.exp(0.3 * rng.normal(size=chance.shape)))
    hits = rng.random(chance.shape) < confidence
    by_end = np.arange(sequences) % 3 == 0
    token = rng.integers(1, 500, size=total).astype(np.int32)
    token[offsets[1:][by_end] - 1] = 0
    ahead = np.arange(total)[:, None] + np.arange(DEPTH)
    inside = ahead < np.repeat(offsets[1:], lengths)[:, None]
    truth = token[np.minimum(ahead, total - 1)]
    wrong = rng.integers(0, 500, size=hits.shape, dtype=np.int32)
    wrong = np.where(wrong == truth, (truth + 1) % 500, wrong)
    match = hits & inside
    score = rounded(np.clip(confidence + 0.1 * rng.normal(size=hits.shape), 0.01, 0.99))
    optional: dict[str, Any] = {"text_prob": confidence, "text_accept": confidence} if changes.get("decoding") else {}
    return Trace(
        meta=meta_of(**changes),
        sequence_id=np.arange(10, 10 + sequences, dtype=np.int64),
        domain=np.array([("code", "prose")[s % 2] for s in range(sequences)]),
        prompt_tokens=8 + 3 * np.arange(sequences, dtype=np.int64),
        budget_tokens=lengths + np.where(by_end, 4, 0),
        offsets=offsets,
        token=token,
        match_len=np.where(match.all(axis=1), DEPTH, match.argmin(axis=1)).astype(np.uint8),
        draft_token=np.where(match, truth, wrong).astype(np.int32),
        prob=rounded(confidence**2),
        confidence=confidence,
        entropy_nats=entropy,
        score=score,
        top10_confidence=rounded(confidence**0.8),
        **optional,
    )


def tree_trace(sequences: int = 12, tokens: int = 50, width: int = 10, nodes: int = 64, vocabulary: int = 10) -> Trace:
    """Trees of a made-up drafter whose distribution depends on the position and the last token alone.

    The text is drawn from what the drafter says about it, flattened.
    """
    rng = np.random.default_rng(5)
    sharp = 3.0 * np.exp(0.6 * stretches(rng, sequences, tokens + DEPTH))
    logits = rounded(sharp[..., None, None] * rng.normal(size=(*sharp.shape, vocabulary, vocabulary)))
    order = np.argsort(-logits, axis=-1, kind="stable").astype(np.int32)
    ranked = np.take_along_axis(logits, order, axis=-1).astype(np.float64)
    probs = np.maximum(rounded(softmax(ranked, axis=-1)), np.float32(1 / 4096))
    trace = drawn_trace(rng, probs, order, rounded(softmax(ranked / 1.3, axis=-1)), DEPTH, width, nodes)
    score = rounded(np.clip(trace.prob + 0.1 * rng.normal(size=trace.prob.shape), 0.01, 0.99))
    return replace(
        trace,
        prompt_tokens=5 + 4 * np.arange(sequences, dtype=np.int64),
        entropy_nats=rounded(trace.entropy_nats),
        score=score,
        top10_confidence=trace.confidence.copy(),
    )


@_input
def chains(work: Workplace) -> Path:
    return written(work, "chains", chain_trace())


@_input
def rejection(work: Workplace) -> Path:
    return written(work, "rejection", chain_trace(decoding={"mode": "rejection", "temperature": 0.8, "seed": 0}))


@_input
def masked(work: Workplace) -> Path:
    return written(work, "masked", chain_trace(drafter_kind="space"))


@_input
def trees(work: Workplace) -> Path:
    return written(work, "trees", tree_trace())


def written(work: Workplace, name: str, trace: Trace) -> Path:
    write_trace(trace, work.folder / name)
    return work.folder / name


@_input
def packed(work: Workplace) -> Path:
    path = work.folder / "packed.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(work.path("chains").iterdir()):
            archive.write(file, file.name)
    return path


@_input
def constant(work: Workplace) -> Path:
    return text_json(work.folder / "constant.json", CONSTANT)


@_input
def profile(work: Workplace) -> Path:
    return text_json(work.folder / "profile.json", profile_of([2, 40, 200], 12, tree_tokens=65))


@_input
def named_profile(work: Workplace) -> Path:
    document = {**profile_of([2, 40, 200], 3, tree_tokens=0), "target": "target", "drafter": "draft"}
    return text_json(work.folder / "named_profile.json", document)


@_input
def probe(work: Workplace) -> Path:
    seconds = {"verify": [[0.012], [0.013]], "draft_step": [[0.002]], "autoregressive": [0.0121]}
    document = {
        "kind": "specsim-probe",
        "version": 1,
        "target": "target",
        "drafter": "draft",
        "contexts": [100],
        "sweeps": 9,
        "mean_s": seconds,
        "relative_half_width": {"verify": [0.01, 0.02], "draft_step": 0.03, "autoregressive": 0.01},
    }
    return text_json(work.folder / "probe.json", document)


def profile_of(contexts: Sequence[int], depth: int, tree_tokens: int) -> dict[str, Any]:
    """A profile by formula, in which every argument matters."""
    at = np.array(contexts) * 1e-6

    def table_of(sizes: Sequence[int], seconds: Callable[[int], float]) -> list[list[float]]:
        return [(seconds(n) + at).tolist() for n in sizes]

    sizes = sorted({size for size in (1, 2, 4, 8, 16, 32, tree_tokens) if size <= tree_tokens})
    tree = {
        "sizes": sizes,
        "wider": table_of(sizes, lambda n: 3e-5 * (n - 1)),
        "verify": table_of(sizes, lambda n: 1e-2 + 7e-5 * n),
        "policy_step": 4e-5,
        "round_overhead": 5e-4,
    }
    median = {
        "draft_step": table_of(range(1, depth + 1), lambda n: 1.2e-3 + 4e-4 / n),
        "catch_up": (2e-4 + at).tolist(),
        "verify": table_of(range(1, depth + 2), lambda n: 1e-2 + 1e-4 * n**1.5),
        "autoregressive": (9e-3 + 2 * at).tolist(),
        "policy_step": 2e-5,
        "round_overhead": 4e-4,
        "score_step": 1e-4,
        **({"tree": tree} if tree_tokens else {}),
    }
    statistics = {"mean_s": median, "median_s": median, "p25_s": median, "p75_s": median}
    return {
        "kind": "specsim-profile",
        "version": 2,
        "contexts": [int(context) for context in contexts],
        "block_expansion": None,
        **statistics,
        "provenance": {"device": "none", "dtype": "float64"},
    }


def fixed_profile(
    pair: Any, *sweeps: Any, contexts: Sequence[int], depth: int, tree_tokens: int = 0, **how: Any
) -> dict[str, Any]:
    """What `realrun validate` is told that it measured: the same seconds in every run."""
    return profile_of(contexts, min(depth, pair.drafter.max_depth or depth), tree_tokens if pair.drafter.trees else 0)


def fixed_slice(*given: Any, **how: Any) -> Profile:
    return Profile.from_json(fixed_profile(*given, **how), "given")


def fixed_run_profile(costs: MeasuredCosts, runs: Any, repeats: int) -> Profile:
    """What `realrun validate` and `realrun board` are told that decoding cost: the same seconds in every run."""
    document = profile_of(costs.contexts, costs.prober.depth, max(costs.prober.sizes, default=0))
    return Profile.from_json(document, "given")


def grid_of(model: str, scale: float) -> dict[str, Any]:
    batches, contexts, tokens = [1, 4], [0, 64, 512], [1, 2, 4, 16, 64]
    return {
        "kind": "specsim-cost-grid",
        "version": 1,
        "model": model,
        "batches": batches,
        "contexts": contexts,
        "tokens": tokens,
        "median_s": [[[scale * 1e-3 * (9 + b + c / 64 + 0.1 * n) for n in tokens] for c in contexts] for b in batches],
        "missing": [],
        "provenance": {"device": "a device", "dtype": "bfloat16"},
    }


@_input
def target_grid(work: Workplace) -> Path:
    return text_json(work.folder / "target_grid.json", grid_of("target", 1.0))


@_input
def grids(work: Workplace) -> Path:
    grids = {"target": grid_of("target", 1.0), "drafter": grid_of("drafter", 0.12)}
    return text_json(work.folder / "grids.json", {"grids": grids})


@_input
def accuracies(work: Workplace) -> Path:
    path = work.folder / "accuracies.csv"
    rates = ((0.62, 0.14, 0.06, 0.03), (0.55, 0.13, 0.05, 0.03), (0.48, 0.12, 0.06, 0.02), (0.41, 0.11, 0.05, 0.02))
    lines = ["depth,top1,top2,top3,top4"]
    lines += [f"{depth},{','.join(map(str, row))}" for depth, row in enumerate(rates, start=1)]
    path.write_text("\n".join(lines) + "\n")
    return path


def fixed_rounds(trace: Trace, k: int) -> list[tuple[int, int, int, int]]:
    """(sequence, t, drafted, accepted) of drafting k tokens, or as many as may be drafted."""
    match, limit = trace.match_len.tolist(), trace.draft_limit.tolist()
    rounds = []
    for s, (begin, end) in enumerate(zip(trace.offsets[:-1].tolist(), trace.offsets[1:].tolist(), strict=True)):
        row = begin
        while row < end:
            drafted = min(k, limit[row])
            accepted = min(match[row], drafted)
            rounds.append((s, row - begin, drafted, accepted))
            row += accepted + 1
    return rounds


@_input
def rounds(work: Workplace) -> Path:
    """Rounds of two policies over the same sequences."""
    columns: dict[str, list[Any]] = {name: [] for name in ("policy", "sequence_id", "t", "drafted", "accepted")}
    for k in (2, 4):
        for row in fixed_rounds(chain_trace(), k):
            for name, value in zip(columns, (f"fixed_k(k={k})", *row), strict=True):
                columns[name].append(value)
    path = work.folder / "rounds.parquet"
    pq.write_table(pa.table(columns), path)
    return path


@_input
def counters(work: Workplace) -> Path:
    drafted, accepted = np.array([row[2:] for row in fixed_rounds(chain_trace(), 4)]).T
    depth = np.arange(1, 5)[:, None]
    document = {
        "drafted": (drafted >= depth).sum(axis=1).tolist(),
        "accepted": (accepted >= depth).sum(axis=1).tolist(),
    }
    return text_json(work.folder / "counters.json", document)


def _fitted(model: str) -> Callable[[Workplace], Path]:
    def make(work: Workplace) -> Path:
        out = work.folder / f"model_{model}.json"
        printed(
            ["specsim", "acceptance", "fit", str(work.path("chains")), "--model", model, "--out", str(out), "--json"]
        )
        return out

    return make


INPUTS |= {f"model_{model}": _fitted(model) for model in ("iid", "per_position", "difficulty")}

# Models so small and random that whole decodings take milliseconds.

VOCABULARY, HIDDEN = 97, 32


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character: 0 is the end of text, then the printable ASCII, then the newline."""
    characters = ["<eos>", *(chr(code) for code in range(32, 127)), "\n"]
    vocabulary = {character: index for index, character in enumerate(characters)}
    base = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    base.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=base, eos_token="<eos>")


def numbers(name: str, shape: Sequence[int], scale: float = 0.15) -> torch.Tensor:
    """Normal numbers, rounded, that depend on this name alone."""
    rng = np.random.default_rng(list(name.encode()))
    return torch.from_numpy(rounded(scale * rng.normal(size=tuple(shape))))


def model_of(layers: int) -> Any:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=160,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.4 if "embed" in name else 0.15  # of both ends, so that the target is sure at times
            parameter.copy_(torch.ones(parameter.shape) if "norm" in name else numbers(name, parameter.shape, scale))
    return model


def saved(work: Workplace, name: str, model: Any) -> Path:
    folder = work.folder / name
    with contextlib.redirect_stderr(io.StringIO()):  # a bar of progress
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
    return folder


@_input
def target(work: Workplace) -> Path:
    return saved(work, "target", model_of(3))


@_input
def draft(work: Workplace) -> Path:
    """It has the target's embeddings and first two layers, and agrees about as often as not."""
    return saved(work, "draft", model_of(2))


@_input
def predictor(work: Workplace) -> Path:
    """Scores that spread over (0, 1)."""
    with settings_put_back(), contextlib.redirect_stderr(io.StringIO()):
        pair = load_pair(str(work.path("target")), str(work.path("draft")), dtype="float64", threads=1)
    facts = {"fingerprint": pair.fingerprint, "target": pair.target_name, "drafter": pair.draft_name}
    of_target, of_draft, bias = (numbers(f"predictor {n}", (n,), 0.3) for n in (3 * HIDDEN, HIDDEN, 3))
    path = work.folder / "predictor" / "predictor.safetensors"
    save_predictor(Predictor(of_target.reshape(3, HIDDEN), of_draft, bias, facts), path)
    return path


def _inside(kind: str) -> Callable[[Workplace], Path]:
    def make(work: Workplace) -> Path:
        model = model_of(3)
        facts, tensors = FACTS[kind], dict(TENSORS[kind](model))
        folder = work.folder / kind
        save_drafter(folder, kind.replace("_", "-"), tensors, {"target": describe_target(model, "tiny"), **facts})
        return folder

    return make


def random_like(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: torch.ones(value.shape) if "norm" in name else numbers(name, value.shape) for name, value in state.items()
    }


def heads_of(model: Any) -> dict[str, torch.Tensor]:
    """The target's own head three times, each after a random residual block."""
    state = MedusaHeads(model, 3).state_dict()
    return {**state, "residual": numbers("residual", state["residual"].shape)}


FACTS: dict[str, dict[str, Any]] = {
    "eesd": {"layers": 1, "exit_layers": 1},
    "medusa": {"heads": 3},
    "self_sd": {"attention": [1], "mlp": [1]},
    "edd": {"states_after": 1},
    "eagle": {},
    "space": {"masks": 3},
}
TENSORS: dict[str, Callable[[Any], Mapping[str, torch.Tensor]]] = {
    "eesd": lambda model: EarlyExit(model, 1).state_dict(),
    "medusa": heads_of,
    "self_sd": lambda model: {},
    "edd": lambda model: random_like(own_state(one_layer_model(model))),
    "eagle": lambda model: random_like(Eagle(model).state_dict()),
    "space": lambda model: {"mask": numbers("mask", (HIDDEN,))},
}
INPUTS |= {kind: _inside(kind) for kind in FACTS}


def prompt_file(path: Path, texts: Sequence[str]) -> Path:
    lines = [json.dumps({"text": text, "domain": "ab"[i % 2]}) for i, text in enumerate(texts)]
    path.write_text("\n".join(lines) + "\n")
    return path


@_input
def prompts(work: Workplace) -> Path:
    texts = ["def f(x):", "The end of it", "import os", "Speculative", "one two three"]
    return prompt_file(work.folder / "prompts.jsonl", texts)


@_input
def repetitive(work: Workplace) -> Path:
    texts = ["abcabcabcabcabc", "to be or not to be or not to", "1212121212"]
    return prompt_file(work.folder / "repetitive.jsonl", texts)


def _recorded(options: str) -> Callable[[Workplace], Path]:
    def make(work: Workplace) -> Path:
        out = work.new()
        with settings_put_back():
            printed(work.words(f"realrun record {{out}} {WORDS['PAIR']} {WORDS['SHORT']} {options} --json", out))
        return out

    return make


INPUTS |= {"recorded": _recorded(WORDS["TREES"]), "scored": _recorded("--predictor {predictor}")}


# ---------------------------------------------------------------------------------------------
# Comparison, and the command line of this file.
# ---------------------------------------------------------------------------------------------

COMMANDS = table()


def leaves(document: Document, at: str = "") -> Iterator[tuple[str, Document]]:
    """Every number, text and empty list or object of a document, by its place."""
    parts = document.items() if isinstance(document, dict) else enumerate(document) if type(document) is list else ()
    if not parts or not document:
        yield at, document
    for key, part in parts:
        yield from leaves(part, f"{at}.{key}")


def same(recorded: Document, now: Document, tolerance: float) -> bool:
    """Whether two leaves are equal; floats may differ by this share of the larger."""
    if type(recorded) is not float or type(now) is not float:
        return type(recorded) is type(now) and bool(recorded == now)
    close = math.isclose(recorded, now, rel_tol=tolerance, abs_tol=tolerance * 1e-3)
    return close or (math.isnan(recorded) and math.isnan(now))


def differences(golden: Document, answer: Document, tolerance: float) -> list[str]:
    """A line for each place at which two documents differ."""
    recorded, now = dict(leaves(golden)), dict(leaves(answer))
    return [
        f"{at}: {recorded.get(at, NOTHING)!r} was recorded, now {now.get(at, NOTHING)!r}"
        for at in {**recorded, **now}
        if not same(recorded.get(at, NOTHING), now.get(at, NOTHING), tolerance)
    ]


def compared(command: Command, golden: Document, answer: Document, *, exact: bool = False) -> list[str]:
    """The differences that count for this command."""
    return differences(golden, answer, 0.0 if exact else command.tolerance[0])


def read_golden(path: Path = GOLDEN) -> dict[str, Document]:
    documents: dict[str, Document] = json.loads(path.read_text())
    return documents


def write_golden(documents: dict[str, Document], path: Path = GOLDEN) -> None:
    """Write a line for each document."""
    lines = [
        f"{json.dumps(name)}:{json.dumps(document, separators=(',', ':'))}" for name, document in documents.items()
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the commands' answers with those recorded.")
    parser.add_argument("--write", action="store_true", help="record them anew instead")
    parser.add_argument("--exact", action="store_true", help="compare floats to the last digit")
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[""], help="commands whose names begin so")
    options = parser.parse_args()
    chosen = [name for name in COMMANDS if name.startswith(tuple(options.only))]
    golden, different = read_golden(), 0
    with tempfile.TemporaryDirectory() as folder:
        work = Workplace(Path(folder))
        for name in chosen:
            document = work.run(COMMANDS[name])
            if options.write:
                golden[name] = document
                continue
            lines = compared(COMMANDS[name], golden.get(name), document, exact=options.exact)
            different += bool(lines)
            print(*(f"{name}: {line}" for line in lines), sep="\n", end="\n" * bool(lines))
    if options.write:
        write_golden({name: golden[name] for name in COMMANDS if name in golden})
    print(f"{len(chosen)} commands {'recorded' if options.write else f'compared, {different} differ'}")
    return bool(different)


if __name__ == "__main__":
    raise SystemExit(main())
