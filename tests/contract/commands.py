"""A contract of the command lines: what they answer on small inputs, recorded number for number.

    python -m tests.contract.commands                  compare with commands.json, print every difference
    python -m tests.contract.commands --exact          the same, floats to the last digit
    python -m tests.contract.commands --write          record commands.json anew
    python -m tests.contract.commands --only NAME ...  of these commands alone; a name may be the start of names

Commands, options and where things are imported from stand in one place each: IMPORTS below,
and the table COMMANDS. What is left out of the documents stands in one place as well: DROPPED.

Inputs are made from numpy's generators, and their floats are rounded to multiples of 1/4096, so
that they do not depend on the processor. The weights of the models are such numbers too.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import heapq
import io
import json
import math
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

# IMPORTS of the project: all that this file takes from it.
import realrun.leaderboard.costs as board_costs
import realrun.profiling.slices as profile_slices
import realrun.validation.run as validation_run
from realrun.decode.acceptance_predictor import Predictor, save_predictor
from realrun.drafters.eagle import Eagle
from realrun.drafters.edd import one_layer_model, own_state
from realrun.drafters.eesd import EarlyExit
from realrun.drafters.medusa import MedusaHeads
from realrun.pairs.drafter_files import describe_target, save_drafter
from realrun.pairs.pair import load_pair
from realrun.validation.measured_costs import MeasuredCosts
from specsim.trace.files import read_trace, write_trace
from specsim.trace.trace import Trace
from specsim.trace.tree_record import record_from_nodes
from tests.support.commands import call

# Where `realrun validate` and `realrun leaderboard` look up the function `profile`, which measures.
PROFILE_USERS = (profile_slices, validation_run, board_costs)
GOLDEN = Path(__file__).with_name("commands.json")
Document = Any  # parsed JSON

# What documents do not keep, and why.
MADE_HERE = "a path or a description of this machine, this run or these versions"
CLOCK = "measured by a clock, or follows from what was"
WORDING = "a sentence for people, which names options"
LONG = "long, and told by other fields"
DROPPED: dict[str, dict[str, str]] = {
    "every": {
        "trace": MADE_HERE,
        "provenance": MADE_HERE,
        "environment": MADE_HERE,
        "date": MADE_HERE,
        "record_seconds": CLOCK,
        "time_over_generation": CLOCK,
        "reason": WORDING,  # of what was skipped; its name stays
        "warnings": WORDING,
        "doc": WORDING,
        "source": WORDING,  # of a policy; of a tree search a path
    },
    "leaderboard": {"sequence_seconds": LONG},
    "written": {"parameters": LONG, "checksums": MADE_HERE},  # of the model that generated it; of Parquet files
    "validate": {
        "measured": CLOCK,
        "error_percent": CLOCK,
        "median_abs_error_percent": CLOCK,
        "p90_abs_error_percent": CLOCK,
        "unseen_error_percent": CLOCK,
        "median_abs_unseen_error_percent": CLOCK,
        "error_parts": CLOCK,
        "null_arm": CLOCK,
        "noise_floor_percent": CLOCK,
        "resolved": CLOCK,
        "overhead": CLOCK,
        "acceleration_over_overhead": CLOCK,
        "acceleration_over_overhead_off_percent": CLOCK,
        "sequence_seconds": CLOCK,
        "autoregressive_sequence_seconds": CLOCK,
        "load": CLOCK,
        "wall_clock_speedup": CLOCK,
        "wall_clock_differs": CLOCK,
        "baseline": CLOCK,
        "tokens_per_s": CLOCK,
        "ms_per_token": CLOCK,
        "choice": CLOCK,
        "predicted_speedup_best": CLOCK,  # of the row that was fastest by the clock
        "measured_speedup_best": CLOCK,
        "accepted_histogram": CLOCK,  # likewise
        "device": MADE_HERE,  # the processor's name
    },
}

TOLERANCE = 1e-9  # relative, of floats
FITTED = 1e-6, "logistic regression by scikit-learn's solver ends where rounding of BLAS leads it"
STEPS = 2e-2, "nodes lie on the edges of an isotonic step, and which side is decided by the last digit of a regression"
OPTIMISED = 1e-5, "scipy's minimisers end within their tolerance, where rounding leads them"
NETWORK = 1e-6, "what a neural network computes, stored as float32; matrix products round as the processor does"
SINGLE = 1e-4, "what a neural network computes in float32"


@dataclass(frozen=True)
class Command:
    """A command to run. {NAME} in its words is an input of INPUTS, {out} a new path of its own.

    read : what to keep of the printed document and of what was written to {out}
    tolerance : relative, of floats, and why it is larger than TOLERANCE if it is. With STEPS, of counts too, and the
        settings learned are compared by --exact alone
    """

    line: str
    read: Callable[[Document, Path], Document] = lambda document, out: trimmed(document)
    tolerance: tuple[float, str] = (TOLERANCE, "")


# ---------------------------------------------------------------------------------------------
# The table. Policies with the settings that suit a trace of depth 6 with trees of 64 nodes.
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
    "hardware_pct": "min_path_prob=0.02",
    "beta_ts_tree": "beam=2 width=3 nodes=12",
}
LEARNED_BY_REGRESSION = ("renewal_stop", "hardware_pct")
TREES = POLICIES.keys() - {
    "fixed_k", "max_confidence", "adaedl", "beta_ts", "cali_ts", "time_gain", "renewal_stop", "hugging_face",
    "llama_cpp", "p_min", "space_k",
}  # fmt: skip
PAIR = "--target {target} --draft-model {draft} --dtype float64 --threads 1"
INSIDE = "--target {target} --drafter {%s} --dtype float64 --threads 1"
SHORT = "--prompts {prompts} --num-prompts 4 --max-new-tokens 16 --max-draft-tokens 4"
RECORDED_TREES = "--tree-nodes 12 --tree-width 3"


def table() -> dict[str, Command]:
    """All commands by name."""
    found: dict[str, Command] = {}

    def add(name: str, line: str, **how: Any) -> None:
        assert name not in found, name
        found[name] = Command(line, **how)

    for policy, settings in POLICIES.items():
        words = " ".join(f"--set {setting}" for setting in settings.split())
        how: dict[str, Any] = {"tolerance": FITTED} if policy in LEARNED_BY_REGRESSION else {}
        for cost in ("constant", "profile"):
            add(
                f"replay {policy}, {cost} cost",
                f"specsim replay {{trees}} --policy {policy} {words} --cost {{{cost}}} --json",
                **how,
            )
        if policy not in TREES:
            add(
                f"replay {policy}, rejection sampling",
                f"specsim replay {{rejection}} --policy {policy} {words} --cost {{profile}} --json",
                **how,
            )
    for policy in ("beta_ts", "cali_ts"):
        add(
            f"replay {policy}, expected",
            f"specsim replay {{scored}} --policy {policy} --cost {{profile}} --expected --json",
            tolerance=NETWORK,
        )
    add("replay beta_ts, seed 3", "specsim replay {chains} --policy beta_ts --cost {profile} --seed 3 --json")
    add("replay fixed_k, space", "specsim replay {masked} --policy fixed_k --set k=3 --cost {profile} --json")
    add("replay space_k, space", "specsim replay {masked} --policy space_k --cost {profile} --json")
    add("replay time_gain, packed trace", "specsim replay {packed} --policy time_gain --cost {profile} --json")
    add(
        "replay time_gain, share and seed",
        "specsim replay {chains} --policy time_gain --cost {constant} --tuning-share 0.3 --seed 5 --json",
    )
    add(
        "replay renewal_stop, isotonic on entropy",
        "specsim replay {chains} --policy renewal_stop --set signal=entropy --set lookahead=false --cost {profile} "
        "--json",
        tolerance=FITTED,
    )
    add(
        "replay hardware_pct, isotonic",
        "specsim replay {trees} --policy hardware_pct --set width=3 --set calibration=isotonic --cost {profile} --json",
        tolerance=STEPS,
    )
    for batch in (1, 4):
        add(
            f"replay adaedl, cost grids, batch {batch}",
            f"specsim replay {{chains}} --policy adaedl --cost {{target_grid}} --draft-cost {{grids}}:drafter "
            f"--batch {batch} --json",
        )
    add(
        "replay pct, cost grids",
        "specsim replay {trees} --policy pct --set max_nodes=20 "
        "--cost {target_grid} --draft-cost {grids}:drafter --json",
    )

    add("tune grid", "specsim tune {chains} --policy adaedl --cost {profile} --search grid --trials 30 --json")
    add(
        "tune race",
        "specsim tune {chains} --policy max_confidence --set dynamic=false --cost {constant} --search race "
        "--trials 64 --seed 2 --json",
    )
    add("tune optuna", "specsim tune {chains} --policy beta_ts --cost {profile} --search optuna --trials 12 --json")
    add(
        "tune race in folds",
        "specsim tune {chains} --policy adaedl --cost {profile} --search race --trials 40 --folds 3 --jobs 2 --json",
    )
    add(
        "tune optuna in folds",
        "specsim tune {chains} --policy p_min --cost {constant} --search optuna --trials 8 --folds 2 --json",
    )
    add(
        "tune a tree policy",
        "specsim tune {trees} --policy pct --cost {profile} --search grid --trials 16 --tuning-share 0.6 --json",
    )
    add("tune fixed_k, rejection sampling", "specsim tune {rejection} --policy fixed_k --cost {profile} --json")
    add(
        "tune renewal_stop",
        "specsim tune {chains} --policy renewal_stop --cost {profile} --json",
        tolerance=FITTED,
    )

    add(
        "leaderboard of all policies",
        "specsim leaderboard {trees} --cost {profile} --trials 5 --replays 2 --no-sensitivity --json",
        read=board,
        tolerance=FITTED,
    )
    add(
        "leaderboard of two traces",
        "specsim leaderboard {chains} {rejection} --cost {profile} --cost {constant} --policy fixed_k "
        "--policy adaedl --policy beta_ts --trials 6 --replays 2 --max-draft-tokens 3,6 --tuning-share 0.4 --seed 1 "
        "--no-sensitivity --json",
        read=board,
    )
    add(
        "leaderboard with sensitivity",
        "specsim leaderboard {trees} --cost {constant} --policy fixed_k --policy cape --trials 6 --json",
        read=board,
    )

    add("tree search, accuracies", "specsim tree search {accuracies} --nodes 20 --json")
    add("tree search, trace", "specsim tree search {trees} --nodes 16 --json")
    add("tree best, profile", "specsim tree best {trees} --cost {profile} --max-nodes 24 --max-depth 5 --json")
    add("tree best, constant cost", "specsim tree best {trees} --cost {constant} --max-nodes 10 --json")

    sources = {"trace": "{chains}", "rounds": "{rounds} --policy fixed_k(k=4)", "counters": "{counters}"}
    for model in ("iid", "per_position", "difficulty"):
        for source, words in sources.items():
            if (model, source) != ("difficulty", "counters"):
                add(
                    f"acceptance fit {model}, {source}",
                    f"specsim acceptance fit {words} --model {model} --out {{out}} --json",
                    tolerance=OPTIMISED if model == "difficulty" else (TOLERANCE, ""),
                )
        add(
            f"acceptance check {model}",
            f"specsim acceptance check {{model_{model}}} {{chains}} --replicates 4 --seed 1 --json",
            tolerance=OPTIMISED if model == "difficulty" else (TOLERANCE, ""),
        )
        add(
            f"acceptance generate {model}",
            f"specsim acceptance generate {{model_{model}}} --out {{out}} --sequences 6 --output-tokens 40 "
            "--max-draft-tokens 5 --prompt-tokens 12 --seed 4 --json",
            read=with_columns,
            tolerance=OPTIMISED if model == "difficulty" else (TOLERANCE, ""),
        )

    for trace in ("trees", "chains", "rejection", "packed"):
        add(f"info {trace}", f"specsim info {{{trace}}} --json")
    add("policies", "specsim policies --json")
    add("data list, shipped", "specsim data list --json")
    add("data list, folder", "specsim data list --folder {results} --json")

    add("record, greedy", f"realrun record {{out}} {PAIR} {SHORT} --mode greedy --json", **RECORDED)
    add("record, gumbel with trees", f"realrun record {{out}} {PAIR} {SHORT} {RECORDED_TREES} --json", **RECORDED)
    add(
        "record, gumbel, top-p and a seed",
        f"realrun record {{out}} {PAIR} {SHORT} --temperature 1.2 --top-p 0.8 --seed 3 --json",
        **RECORDED,
    )
    add(
        "record, rejection sampling",
        f"realrun record {{out}} {PAIR} {SHORT} --mode rejection --top-p 0.9 --json",
        **RECORDED,
    )
    add(
        "record with scores",
        f"realrun record {{out}} {PAIR} {SHORT} --predictor {{predictor}} --json",
        **RECORDED,
    )
    for kind in ("eesd", "medusa", "self_sd", "edd", "eagle", "space"):
        pair = INSIDE % kind
        trees = "" if kind == "space" else RECORDED_TREES
        add(f"record {kind}", f"realrun record {{out}} {pair} {SHORT} {trees} --mode greedy --json", **RECORDED)
    for kind in ("eesd", "medusa"):
        pair = INSIDE % kind
        add(f"record {kind}, gumbel without trees", f"realrun record {{out}} {pair} {SHORT} --json", **RECORDED)
    add(
        "record eesd, rejection sampling",
        f"realrun record {{out}} {INSIDE % 'eesd'} {SHORT} --mode rejection --json",
        **RECORDED,
    )
    lookup = "--target {target} --drafter prompt-lookup --dtype float64 --threads 1"
    for mode in ("greedy", "gumbel"):
        add(
            f"record prompt-lookup, {mode}",
            f"realrun record {{out}} {lookup} --prompts {{repetitive}} --max-new-tokens 24 --max-draft-tokens 4 "
            f"--mode {mode} --temperature 0.3 --json",
            **RECORDED,
        )
    add(
        "record in float32",
        f"realrun record {{out}} {PAIR} {SHORT} {RECORDED_TREES} --dtype float32 --json",
        read=with_columns,
        tolerance=SINGLE,
    )
    add("info of a recorded trace", "specsim info {recorded} --json", tolerance=NETWORK)
    add(
        "replay adaedl, recorded trace",
        "specsim replay {recorded} --policy adaedl --cost {profile} --json",
        tolerance=NETWORK,
    )
    add(
        "replay eagle2, recorded trace",
        "specsim replay {recorded} --policy eagle2 --set nodes=8 --set top_k=3 --set depth=4 --cost {profile} --json",
        tolerance=NETWORK,
    )

    measured = "--contexts 8,16 --max-draft-tokens 3 --repeats 2"
    add("profile", f"realrun profile {{out}} {PAIR} {measured} --tree-nodes 8 --json", read=shapes_alone)
    add(
        "profile, chains alone",
        f"realrun profile {{out}} {PAIR} {measured} --tree-nodes 0 --mode rejection --json",
        read=shapes_alone,
    )
    for kind in ("eesd", "medusa", "space"):
        line = f"realrun profile {{out}} {INSIDE % kind} {measured} --tree-nodes 4 --mode greedy --json"
        add(f"profile {kind}", line, read=shapes_alone)
    add("shapes", "realrun shapes --json")
    add(
        "cost-grid",
        "realrun cost-grid qwen3-0.6b --out {out} --tokens 1,3 --contexts 8,16 --batches 1,2 --repeats 2 --device cpu "
        "--dtype float32 --smoke-test --json",
        read=shapes_alone,
    )

    validated = {"read": rounds_and_predictions, "tolerance": NETWORK}
    few = "--trials 4 --repeats 3"
    add(
        "validate chains and trees",
        f"realrun validate --out {{out}} {PAIR} {SHORT} --tree-nodes 24 --tree-width 4 {few} --policy fixed_k "
        "--policy adaedl --policy beta_ts --policy time_gain --policy vct --policy sparse_tree --policy pct "
        "--policy beta_ts_tree --json",
        **validated,
    )
    add(
        "validate all chain policies",
        f"realrun validate --out {{out}} {PAIR} {SHORT} --predictor {{predictor}} --mode greedy {few} --json",
        **validated,
    )
    add(
        "validate eesd",
        f"realrun validate --out {{out}} {INSIDE % 'eesd'} {SHORT} {few} --policy fixed_k "
        "--policy max_confidence --json",
        **validated,
    )
    add(
        "validate, rejection sampling",
        f"realrun validate --out {{out}} {PAIR} {SHORT} --mode rejection {few} --policy fixed_k --policy adaedl "
        "--policy beta_ts --json",
        **validated,
    )
    add(
        "leaderboard of drafters, predicted",
        f"realrun leaderboard --out {{out}} {PAIR} {SHORT} --drafters model,{{eesd}},{{medusa}},prompt-lookup "
        "--tree-nodes 16 --tree-width 4 --policy fixed_k --policy adaedl --policy pct --trials 3 --predict-only --json",
        read=board,
        tolerance=NETWORK,
    )
    return found


# ---------------------------------------------------------------------------------------------
# What is kept of the documents.
# ---------------------------------------------------------------------------------------------


def trimmed(document: Document, *kinds: str) -> Document:
    """The document without what DROPPED lists for every one and for these kinds."""
    dropped = {key for kind in ("every", *kinds) for key in DROPPED[kind]}
    if isinstance(document, dict):
        return {key: trimmed(value, *kinds) for key, value in document.items() if key not in dropped}
    return [trimmed(value, *kinds) for value in document] if isinstance(document, list) else document


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
    kept = {name: column(values) for name, values in columns.items() if values is not None}
    return {"printed": trimmed(document), "meta": trimmed(meta, "written"), "columns": kept}


def column(values: npt.NDArray[Any]) -> dict[str, Any]:
    """Shape and contents: few integers as they are, many by their digest, floats by mean, weighted mean and the first.

    The weights tell the order.
    """
    told: dict[str, Any] = {"shape": list(values.shape), "dtype": values.dtype.str.replace("<U", "str")[:3]}
    if values.dtype.kind != "f":
        plain = values.ravel().tolist()
        if len(plain) <= 100:
            return {**told, "values": plain}
        return {**told, "digest": hashlib.sha256(json.dumps(plain).encode()).hexdigest()[:16]}
    flat = values.ravel().astype(np.float64)
    if not len(flat):
        return told
    weights = np.arange(1, len(flat) + 1) / len(flat)
    return {
        **told,
        "mean": math.fsum(flat) / len(flat),
        "weighted": math.fsum(flat * weights) / len(flat),
        "first": flat[:8].tolist(),
    }


def shapes_alone(document: Document, out: Path) -> Document:
    """Keys and shapes; integers and texts as they are, floats as the word "float"."""

    def shape(value: Document) -> Document:
        if isinstance(value, dict):
            return {key: shape(one) for key, one in value.items()}
        if isinstance(value, list) and value:
            array = np.array(value)
            return {"shape": list(array.shape)} if array.dtype.kind == "f" else [shape(one) for one in value]
        return "float" if isinstance(value, float) else value

    assert json.loads(out.read_text()) == document
    return shape(trimmed(document))


def rounds_and_predictions(document: Document, out: Path) -> Document:
    """Rows by their label, without the clock's; every real round: sequence, t, drafted, accepted, verified, last."""
    document = trimmed(document, "validate")
    document["rows"].sort(key=lambda row: row["label"])
    names = ("sequence_id", "t", "drafted", "accepted", "verified", "last")
    rounds: dict[str, list[list[int]]] = {}
    for one in pq.read_table(out / "rounds.parquet").to_pylist():
        rounds.setdefault(one["policy"], []).append([one[name] for name in names])
    assert sorted(path.name for path in out.iterdir()) == [
        *("profile.json", "report.html", "rounds.parquet", "trace", "tuned.json", "tuning_profile.json"),
        "validation.json",
    ]  # fmt: skip
    return {**document, "rounds": {label: " ".join(map(_joined, rounds[label])) for label in sorted(rounds)}}


def _joined(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))


RECORDED: dict[str, Any] = {"read": with_columns, "tolerance": NETWORK}

# ---------------------------------------------------------------------------------------------
# Inputs.
# ---------------------------------------------------------------------------------------------

INPUTS: dict[str, Callable[[Workplace], Path]] = {}
DEPTH = 6


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
            for module in PROFILE_USERS:
                stack.enter_context(mock.patch.object(module, "profile", fixed_profile))
            stack.enter_context(mock.patch.object(MeasuredCosts, "document", fixed_document))
            return command.read(printed(self.words(command.line, out)), out)

    def words(self, line: str, out: Path) -> list[str]:
        """The words of a command with the names in them filled in."""

        def fill(name: str) -> str:
            return str(out if name == "out" else self.path(name))

        return [re.sub(r"\{(\w+)\}", lambda found: fill(found[1]), word) for word in line.split()]


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
    optional: dict[str, Any] = {"accept_prob": confidence} if changes.get("decoding") else {}
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

    The text is drawn from what the drafter says about it, flattened. The chain comes first into
    every record, then, again and again, the likeliest of the next children of all nodes.
    """
    rng = np.random.default_rng(5)
    total = tokens + DEPTH  # what may be drafted beyond the end counts as well
    noise = rng.normal(size=(sequences, total))
    for t in range(1, total):
        noise[:, t] = 0.9 * noise[:, t - 1] + math.sqrt(1 - 0.81) * noise[:, t]
    sharp = 3.0 * np.exp(0.6 * noise)
    logits = rounded(sharp[..., None, None] * rng.normal(size=(sequences, total, vocabulary, vocabulary)))
    order = np.argsort(-logits, axis=-1, kind="stable").astype(np.int32)
    ranked = np.take_along_axis(logits, order, axis=-1).astype(np.float64)

    def softmax(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        weights = np.exp(values - values.max(axis=-1, keepdims=True))
        return np.asarray(weights / weights.sum(axis=-1, keepdims=True))

    probs = np.maximum(rounded(softmax(ranked)), np.float32(1 / 4096))
    true_rank = np.empty((sequences, total), dtype=np.int64)
    token = np.empty((sequences, total), dtype=np.int32)
    last, every = np.zeros(sequences, dtype=np.int64), np.arange(sequences)
    for t in range(total):
        chance = np.cumsum(rounded(softmax(ranked[every, t, last] / 1.3)), axis=1)
        true_rank[:, t] = (rng.random((sequences, 1)) > chance / chance[:, -1:]).sum(axis=1)
        token[:, t] = last = order[every, t, last, true_rank[:, t]]

    shape = (sequences * tokens, nodes)
    parent, drafted = np.full(shape, -1, dtype=np.int16), np.full(shape, -1, dtype=np.int32)
    prob, horizon = np.zeros(shape, dtype=np.float32), np.zeros(shape[0], dtype=np.float32)
    chain, chain_prob = np.zeros((shape[0], DEPTH), np.int32), np.zeros((shape[0], DEPTH), np.float32)
    entropy = np.zeros((shape[0], DEPTH), np.float32)
    for s in range(sequences):
        for t in range(tokens):
            row = s * tokens + t
            before = int(token[s, t - 1]) if t else 0
            found, horizon[row] = _best_first(probs[s, t:], order[s, t:], before, width, nodes)
            for place, (above, drafted_token, chance_of) in enumerate(found):
                parent[row, place], drafted[row, place], prob[row, place] = above, drafted_token, chance_of
            for i in range(DEPTH):
                p = probs[s, t + i, before].astype(np.float64)
                before = int(order[s, t + i, before, 0])
                chain[row, i], chain_prob[row, i] = before, p[0]
                entropy[row, i] = rounded(-(p * np.log(p)).sum())
    ahead = np.arange(tokens)[:, None] + np.arange(DEPTH)
    ranks = np.where(ahead < tokens, true_rank[:, ahead], -1).reshape(-1, DEPTH).astype(np.int16)
    hits = ranks == 0
    score = rounded(np.clip(chain_prob + 0.1 * rng.normal(size=chain_prob.shape), 0.01, 0.99))
    return Trace(
        meta=meta_of(eos_token_id=None),
        sequence_id=np.arange(10, 10 + sequences, dtype=np.int64),
        domain=np.array([("code", "prose")[s % 2] for s in range(sequences)]),
        prompt_tokens=5 + 4 * np.arange(sequences, dtype=np.int64),
        budget_tokens=np.full(sequences, tokens, dtype=np.int64),
        offsets=tokens * np.arange(sequences + 1, dtype=np.int64),
        token=np.ascontiguousarray(token[:, :tokens]).ravel(),
        match_len=np.where(hits.all(axis=1), DEPTH, hits.argmin(axis=1)).astype(np.uint8),
        draft_token=chain,
        prob=chain_prob,
        confidence=chain_prob.copy(),
        entropy_nats=entropy,
        true_rank=ranks,
        score=score,
        top10_confidence=chain_prob.copy(),
        tree=record_from_nodes(parent, drafted, prob, horizon, width),
    )


def _best_first(
    probs: npt.NDArray[np.float32], order: npt.NDArray[np.int32], last: int, width: int, most: int
) -> tuple[list[tuple[int, int, float]], float]:
    """(parent, token, probability) of the nodes found, in level order, and the horizon. probs [t, token, rank]."""
    path, level, token, parent, rank = [1.0], [0], [last], [-1], [0]
    heap: list[tuple[float, int, int]] = []  # (-path probability, parent, rank)

    def reach(node: int, child: int) -> float:
        return path[node] * float(probs[level[node], token[node], child])

    def take(node: int, child: int) -> None:
        path.append(reach(node, child))
        token.append(int(order[level[node], token[node], child]))
        level.append(level[node] + 1)
        parent.append(node)
        rank.append(child)
        if child + 1 < width:
            heapq.heappush(heap, (-reach(node, child + 1), node, child + 1))

    for node in range(DEPTH):
        take(node, 0)
    while heap and len(path) <= most:
        _, node, child = heapq.heappop(heap)
        take(node, child)
        if level[-1] < DEPTH:
            heapq.heappush(heap, (-reach(len(path) - 1, 0), len(path) - 1, 0))
    children: list[list[int]] = [[] for _ in path]  # taken in the order of their ranks
    for node in range(1, len(path)):
        children[parent[node]].append(node)
    ordered = [0]
    for node in ordered:  # in level order
        ordered += children[node]
    number = {node: place for place, node in enumerate(ordered)}
    found = [(number[parent[n]], token[n], float(probs[level[n] - 1, token[parent[n]], rank[n]])) for n in ordered[1:]]
    return found, -heap[0][0] if heap else 0.0


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
    return text_json(work.folder / "constant.json", {"s_d": 0.0015, "s_t": 0.01})


@_input
def profile(work: Workplace) -> Path:
    return text_json(work.folder / "profile.json", profile_of([2, 40, 200], 12, tree_tokens=65))


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
    pair: Any, *, contexts: Sequence[int], depth: int, tree_tokens: int = 0, **how: Any
) -> dict[str, Any]:
    """What `realrun validate` is told that it measured: the same seconds in every run."""
    return profile_of(contexts, min(depth, pair.drafter.max_depth or depth), tree_tokens if pair.drafter.trees else 0)


def fixed_document(costs: MeasuredCosts, runs: Any, repeats: int) -> dict[str, Any]:
    """What `realrun validate` and `realrun leaderboard` are told that decoding cost: the same seconds in every run."""
    return profile_of(costs.contexts, costs.prober.depth, max(costs.prober.sizes, default=0))


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
    campaign = {"target": grid_of("target", 1.0), "drafter": grid_of("drafter", 0.12)}
    return text_json(work.folder / "grids.json", {"grids": campaign})


@_input
def results(work: Workplace) -> Path:
    folder = work.folder / "results"
    folder.mkdir()
    text_json(folder / "grid.json", grid_of("target", 1.0))
    text_json(
        folder / "profile.json",
        {
            "kind": "specsim-campaign",
            "stage": "profile",
            "complete": True,
            "reduced": True,
            "grids": {"target": grid_of("target", 1.0)},
            "provenance": {"device": "NVIDIA of nowhere", "date": "2020-01-01"},
        },
    )
    return folder


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
    found = []
    for s, (begin, end) in enumerate(zip(trace.offsets[:-1].tolist(), trace.offsets[1:].tolist(), strict=True)):
        row = begin
        while row < end:
            drafted = min(k, limit[row])
            accepted = min(match[row], drafted)
            found.append((s, row - begin, drafted, accepted))
            row += accepted + 1
    return found


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
    found = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    found.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=found, eos_token="<eos>")


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
            printed(work.words(f"realrun record {{out}} {PAIR} {SHORT} {options} --json", out))
        return out

    return make


INPUTS |= {"recorded": _recorded(RECORDED_TREES), "scored": _recorded("--predictor {predictor}")}


# ---------------------------------------------------------------------------------------------
# Comparison, and the command line of this file.
# ---------------------------------------------------------------------------------------------

COMMANDS = table()


def differences(golden: Document, found: Document, tolerance: float, at: str = "") -> list[str]:
    """A line for each place at which two documents differ; floats may by this share of the larger one."""
    if isinstance(golden, dict) and isinstance(found, dict):
        lines = [f"{at}.{key}: is gone" for key in golden.keys() - found.keys()]
        lines += [f"{at}.{key}: is new" for key in found.keys() - golden.keys()]
        both = [key for key in golden if key in found]
        return sorted(lines) + [
            line for key in both for line in differences(golden[key], found[key], tolerance, f"{at}.{key}")
        ]
    if isinstance(golden, list) and isinstance(found, list):
        if len(golden) != len(found):
            return [f"{at}: {len(golden)} elements were recorded, now {len(found)}"]
        return [
            line
            for i, (one, other) in enumerate(zip(golden, found, strict=True))
            for line in differences(one, other, tolerance, f"{at}[{i}]")
        ]
    if isinstance(golden, float) and isinstance(found, float):
        close = math.isclose(golden, found, rel_tol=tolerance, abs_tol=tolerance * 1e-3)
        same = close or (math.isnan(golden) and math.isnan(found))
    else:
        same = type(golden) is type(found) and golden == found
    return [] if same else [f"{at}: {golden!r} was recorded, now {found!r}"]


def compared(command: Command, golden: Document, found: Document, *, exact: bool = False) -> list[str]:
    """The differences that count for this command."""
    if exact:
        return differences(golden, found, 0.0)
    if command.tolerance == STEPS:
        golden, found = ({key: value for key, value in one.items() if key != "params"} for one in (golden, found))
        golden, found = in_floats(golden), in_floats(found)
    return differences(golden, found, command.tolerance[0])


def in_floats(document: Document) -> Document:
    if isinstance(document, dict):
        return {key: in_floats(value) for key, value in document.items()}
    return float(document) if type(document) is int else document


def read_golden() -> dict[str, Document]:
    documents: dict[str, Document] = json.loads(GOLDEN.read_text())
    return documents


def write_golden(documents: dict[str, Document]) -> None:
    """A line per command."""
    lines = [
        f"{json.dumps(name)}:{json.dumps(document, separators=(',', ':'))}" for name, document in documents.items()
    ]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the commands' answers with those recorded.")
    parser.add_argument("--write", action="store_true", help="record them anew instead")
    parser.add_argument("--exact", action="store_true", help="compare floats to the last digit")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="commands whose names begin so")
    options = parser.parse_args()
    chosen = {
        name: command
        for name, command in COMMANDS.items()
        if not options.only or any(name.startswith(start) for start in options.only)
    }
    documents: dict[str, Document] = {}
    lines: list[str] = []
    golden = read_golden() if GOLDEN.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        work = Workplace(Path(folder))
        for name, command in chosen.items():
            try:
                documents[name] = work.run(command)
            except Exception as error:
                lines.append(f"{name}: {type(error).__name__}: {error}")
                continue
            if options.write:
                continue
            if name not in golden:
                lines.append(f"{name}: was not recorded")
                continue
            unlike = compared(command, golden[name], documents[name], exact=options.exact)
            lines += [f"{name}: {line}" for line in unlike]
    if not options.only and not options.write:
        lines += [f"{name}: was recorded, but is no command" for name in golden if name not in COMMANDS]
    for line in lines:
        print(line)
    if options.write:
        kept = {**golden, **documents}
        write_golden({name: kept[name] for name in COMMANDS if name in kept})
        print(f"{len(documents)} of {len(chosen)} commands recorded, {GOLDEN.stat().st_size:,} bytes")
    else:
        print(f"{len(chosen)} commands, {len(lines)} differences")
    return 1 if lines else 0


if __name__ == "__main__":
    raise SystemExit(main())
