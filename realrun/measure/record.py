"""Record a dense trace: decode once, then ask the drafter at every position at once.

The sequences of an unfinished recording are kept beside it, so that an interrupted recording can be continued.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from realrun.decode.acceptance_predictor import pending_token_states
from realrun.decode.batch import BatchDecoding
from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.lm.batched_llama import BatchedLlama
from realrun.lm.cached import CachedLM, feeds_again, has_recurrent_layers
from realrun.lm.kernels import planless_attention
from realrun.lm.llama import supported
from realrun.lm.number_type import NotFinite, check_columns, refuse_logits
from realrun.lm.recurrent import NO_TREES
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt, prompt_facts
from realrun.proposals.judged_trees import judged_columns
from realrun.proposals.recorder import Columns, RecordRequest
from realrun.proposals.trees import TreeSize
from realrun.provenance import provenance
from speckernels import backend_for
from specsim.acceptance.formulas import distinct_trigrams
from specsim.io.arrays import Floats, Ints
from specsim.io.errors import InputError
from specsim.io.files import remove_folder, replacing, write_text
from specsim.io.progress import Counter
from specsim.trace.trace import Trace
from specsim.trace.tree_record import MAX_NODES, record_from_nodes

IDENTITY, SEQUENCE = "recording.json", "{:06d}.npz"  # in the folder of an unfinished trace
MAX_WIDTH = 256  # children recorded of a node


def partial_of(trace: Path) -> Path:
    """Name the folder that holds the recorded sequences of an unfinished trace: OUT.partial beside OUT."""
    return trace.with_name(f"{trace.name}.partial")


def has_recorded(trace: Path, sequences: Iterable[int]) -> bool:
    """Check whether any of these prompts was recorded for a trace, which may be unfinished."""
    return trace.exists() or any((partial_of(trace) / SEQUENCE.format(number)).is_file() for number in sequences)


class Recorded(NamedTuple):
    """A sequence: output tokens [N], columns of the trace, seconds of decoding and of recording."""

    tokens: Ints
    columns: Columns
    generate_s: float
    dense_s: float


class Partial:
    """A folder of recorded sequences (`partial_of`).

    trace : future folder of the trace; identity : everything that a sequence depends on, as JSON
    """

    def __init__(self, trace: Path, identity: Mapping[str, Any]):
        self.folder = partial_of(trace)
        self.identity = json.dumps(identity)

    def open(self) -> None:
        """Make the folder; drop sequences in it that were recorded with other settings."""
        path = self.folder / IDENTITY
        if not path.is_file() or path.read_bytes() != self.identity.encode():
            self.folder.mkdir(parents=True, exist_ok=True)  # the folder itself stays because it may be locked
            for other in self.folder.iterdir():
                other.unlink()
            write_text(path, self.identity)

    @property
    def count(self) -> int:
        """Count the sequences in the folder."""
        return sum(1 for _ in self.folder.glob("*.npz"))

    def get(self, number: int) -> Recorded | None:
        """Read a sequence that was recorded before; None if it is missing or damaged."""
        path = self._path(number)
        if not path.is_file():
            return None
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                columns = {name: arrays[name] for name in arrays.files}
            generate_s, dense_s = columns.pop("seconds").tolist()
            return Recorded(columns.pop("output"), columns, generate_s, dense_s)
        except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error):
            return None  # damaged: it is recorded again

    def put(self, number: int, sequence: Recorded) -> None:
        """Write a sequence."""
        with replacing(self._path(number)) as temporary, temporary.open("wb") as file:
            seconds = np.array([sequence.generate_s, sequence.dense_s])
            np.savez(file, output=sequence.tokens, seconds=seconds, **sequence.columns)  # type: ignore[arg-type]

    def remove(self) -> None:
        """Remove the folder because the trace is complete."""
        remove_folder(self.folder)

    def _path(self, number: int) -> Path:
        return self.folder / SEQUENCE.format(number)


@dataclass(frozen=True)
class RecordSettings:
    """Settings of a recording. Lengths in tokens.

    Attributes
    ----------
    max_draft_tokens : longest draft recorded at every position
    max_new_tokens : output tokens of a prompt, at most
    sampler : how tokens are chosen
    tree_nodes : nodes of every position's tree, at most; 0 records no trees
    tree_width : children of a node that a tree may hold, at most
    prompts_source : source of the prompts for the trace's metadata, a description or a file name
    typical : record the target's probability of every tree node and its entropy there, for typical acceptance

    Examples
    --------
    >>> import realrun
    >>> realrun.RecordSettings(max_draft_tokens=8, sampler=realrun.Sampler("gumbel", temperature=0.8)).tree_nodes
    0
    """

    max_draft_tokens: int = 16
    max_new_tokens: int = 128
    sampler: Sampler = Sampler()
    tree_nodes: int = 0
    tree_width: int = 10
    prompts_source: str = ""
    typical: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.max_draft_tokens <= 64:
            raise InputError(f"max_draft_tokens={self.max_draft_tokens} is outside [1, 64]; choose a number inside")
        if self.tree_nodes and not self.max_draft_tokens <= self.tree_nodes <= MAX_NODES:
            raise InputError(
                f"tree_nodes={self.tree_nodes} is neither 0 nor in [{self.max_draft_tokens}, {MAX_NODES}], from the "
                "longest draft to the most that a trace holds; choose a number inside, or 0 for no trees"
            )
        if not 1 <= self.tree_width <= MAX_WIDTH:
            raise InputError(f"tree_width={self.tree_width} is outside [1, {MAX_WIDTH}]; choose a width inside")
        if self.tree_nodes and self.sampler.mode == "rejection":
            raise InputError(
                f"tree_nodes={self.tree_nodes} with rejection sampling, in which trees are not recorded; "
                "choose --mode greedy-draft, or 0 for no trees"
            )

        if self.typical and (not self.tree_nodes or self.sampler.mode == "greedy"):
            raise InputError(
                "typical acceptance judges trees at a temperature; record with --mode greedy-draft and --tree-nodes, "
                "or without --typical"
            )

    @property
    def tree(self) -> TreeSize | None:
        """Give the size of the trees to record, None for no trees."""
        return TreeSize(self.tree_nodes, self.tree_width) if self.tree_nodes else None


def longest_prompt(pair: Pair, max_new_tokens: int, max_draft_tokens: int) -> int:
    """Compute the longest prompt, in tokens, that leaves room in both models for its output and a draft."""
    target, drafter = pair.core.make_drafter()
    room = min(target.max_positions, drafter.lm.max_positions)
    return room - max_new_tokens - min(max_draft_tokens, pair.drafter.max_depth or max_draft_tokens)


def record(
    pair: Pair,
    prompts: Sequence[Prompt],
    settings: RecordSettings,
    progress: Counter | None = None,
    partial: Partial | None = None,
    sequences: Sequence[int] | None = None,
    texts: Mapping[int, Sequence[int]] | None = None,
    together: int = 1,
) -> Trace:
    """Decode every prompt with the target alone, and record what the drafter proposes at every output position.

    Parameters
    ----------
    pair : Pair
    prompts : sequence of Prompt
        Each is a sequence of the trace, in this order.
    settings : RecordSettings
        The longest draft is cut to what the drafter can draft. In rejection mode drafts are drawn together with the
        output (`realrun.proposals.chain`).
    progress : callable, optional
        Called with (done, total) after every prompt.
    partial : realrun.measure.record.Partial, optional
        Folder that keeps finished sequences; sequences in it are not recorded again.
    sequences : sequence of int, optional
        Numbers of the prompts to record, increasing; by default all. A sequence does not depend on the others.
    texts : mapping, optional
        Outputs by the prompts' numbers, where the same target has decoded them before with these settings.
    together : int, optional
        Prompts to decode at once, where a batch changes no token but at ties: greedily, in float32 or float64, by a
        target that `realrun.lm.batched_llama` decodes. The drafter is asked as ever.

    Returns
    -------
    specsim.Trace

    Raises
    ------
    InputError
        If the texts exceed the models' positions, the drafter cannot be recorded in this mode or with trees, or a
        model's logits are NaN.

    Examples
    --------
    >>> import realrun
    >>> from realrun.pairs.prompts import Prompt, prompt_facts
    >>> pair = realrun.load_pair(drafter="prompt-lookup")
    >>> trace = realrun.record(pair, [Prompt("code", [5, 6, 7])], realrun.RecordSettings(max_new_tokens=8))
    >>> trace.output_tokens.tolist()
    [8]
    """
    pair = pair.core
    recording = _Recording(pair, settings)
    recording.check_room(max(len(prompt.tokens) for prompt in prompts))
    if partial is not None:
        partial.open()  # before the first token, so that a read-only folder is an error now
    numbers = range(len(prompts)) if sequences is None else sequences
    recording.texts |= {number: (list(text), 0.0) for number, text in (texts or {}).items()}
    kept = {number: None if partial is None else partial.get(number) for number in numbers}
    waiting = [number for number in numbers if kept[number] is None and number not in recording.texts]
    # The first is decoded alone, which checks the logits.
    others = waiting[1:] if together > 1 and decodes_batches(pair, settings) else []
    batches = [others[at : at + together] for at in range(0, len(others), together)]
    of_batch = {number: batch for batch in batches for number in batch}
    recorded: list[Recorded] = []
    for number in numbers:
        sequence = kept[number]
        if sequence is None:
            with planless_attention(pair.device):
                if number in of_batch and number not in recording.texts:
                    recording.decode({one: prompts[one].tokens for one in of_batch[number]})
                sequence = recording.sequence(number, prompts[number].tokens)
            if partial is not None:
                partial.put(number, sequence)
        recorded.append(sequence)
        if progress:
            progress(len(recorded), len(numbers))
    return trace_of(pair, prompts, settings, recording.depth, numbers, recorded)


def decodes_batches(pair: Pair, settings: RecordSettings) -> bool:
    """Tell whether prompts can be decoded at once with the same output."""
    exact = pair.dtype in (torch.float32, torch.float64)
    return settings.sampler.mode == "greedy" and exact and supported(pair.target)


class _Recording:
    """The models and the recorder of a pair, ready to record sequences."""

    def __init__(self, pair: Pair, settings: RecordSettings):
        if settings.tree is not None and not pair.trees:
            why = f" because {NO_TREES}" if pair.drafter.trees else ""
            raise InputError(f"drafter {pair.draft_name} drafts chains only{why}; record it with --tree-nodes 0")
        self.pair, self.settings, self.new_tokens = pair, settings, settings.max_new_tokens
        self.texts = dict[int, tuple[list[int], float]]()  # of prompts decoded at once, with the seconds of each
        self.target, self.drafter = pair.make_drafter()
        self.decoder = Decoder(self.target, self.drafter, pair.eos_token_ids, settings.sampler)
        self.depth = min(settings.max_draft_tokens, pair.drafter.max_depth or settings.max_draft_tokens)
        self.recorder = pair.make_recorder(settings.sampler)
        self.predictor = None if pair.predictor is None else pair.predictor.cast(pair.device, pair.dtype)

    def check_room(self, prompt_tokens: int) -> None:
        """Raise InputError if a prompt of this length, its output and a draft exceed the models' positions."""
        room = min(self.target.max_positions, self.drafter.lm.max_positions)
        longest = prompt_tokens + self.settings.max_new_tokens + self.depth
        if longest > room:
            raise InputError(
                f"longest prompt, output and draft make {longest} tokens, the models have {room} positions; "
                "shorten them"
            )

    def decode(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """Decode these prompts at once."""
        start, target, budgets = self.decoder.clock(), BatchedLlama(self.pair.target), len(prompts) * [self.new_tokens]
        decoding = BatchDecoding(target, target, [*prompts.values()], budgets, 0, self.pair.eos_token_ids)
        while not decoding.done:
            decoding.advance()
        own_s = (self.decoder.clock() - start) / len(prompts)
        self.texts |= {number: (row.output, own_s) for number, row in zip(prompts, decoding.rows, strict=True)}

    def sequence(self, number: int, prompt: Sequence[int]) -> Recorded:
        """Decode a prompt unless that is done, then record the drafter at every output position."""
        sampler, decoder = self.settings.sampler, self.decoder
        start = decoder.clock()
        if number in self.texts:
            tokens, generate_s = self.texts.pop(number)
        else:
            tokens = list(decoder.decode(prompt, self.new_tokens, None, sequence=number).tokens)
            generate_s = decoder.clock() - start
        generated = decoder.clock()
        scorer = None
        if self.predictor is not None:
            scorer = self.predictor.after(pending_token_states(self.pair.target, prompt, tokens))
        try:
            tree = self.settings.tree
            chances = self.target_prob(prompt, tokens)
            columns = self.recorder(RecordRequest(prompt, tokens, self.depth, sampler, number, scorer, tree, chances))
            if self.settings.typical:
                columns |= judged_columns(CachedLM(self.pair.target), prompt, tokens, columns, sampler)
            check_columns(columns)
        except NotFinite:
            raise refuse_logits(self.drafter.lm, [*prompt, *tokens], "drafter") from None
        return Recorded(np.asarray(tokens), columns, generate_s, decoder.clock() - generated)

    @torch.inference_mode()
    def target_prob(self, prompt: Sequence[int], output: Sequence[int]) -> Floats | None:
        """Compute the target's probability of each output token at the temperature, [T]; None in greedy decoding."""
        sampler = self.settings.sampler
        if sampler.mode == "greedy":
            return None
        logits = CachedLM(self.pair.target).forward([*prompt, *output[:-1]])[len(prompt) - 1 :]
        truth = torch.tensor([*output], device=logits.device)[:, None]
        found: Floats = sampler.probs(logits).gather(-1, truth)[:, 0].double().cpu().numpy()
        return found


def trace_of(
    pair: Pair,
    prompts: Sequence[Prompt],
    settings: RecordSettings,
    depth: int,
    numbers: Sequence[int],
    sequences: Sequence[Recorded],
) -> Trace:
    """Make the trace of recorded sequences. depth : of their drafts; numbers : of their prompts"""
    prompts = [prompts[number] for number in numbers]
    names, outputs = sequences[0].columns, [sequence.tokens for sequence in sequences]
    arrays: dict[str, Any] = {name: np.concatenate([part.columns[name] for part in sequences]) for name in names}
    if settings.tree is not None:
        trees = {name.removeprefix("tree_"): arrays.pop(name) for name in names if name.startswith("tree_")}
        arrays["tree"] = record_from_nodes(**trees, width=settings.tree.width)
    configs = {
        "target": pair.target.config,
        **({"drafter": pair.draft_config} if pair.drafter.origin == "model" else {}),
    }
    recurrent = [role for role, config in configs.items() if has_recurrent_layers(config)]
    meta = {
        "target": pair.target_name,
        "drafter": pair.draft_name,
        "drafter_kind": pair.drafter.name,
        "drafter_facts": pair.drafter_facts,
        "weights": pair.fingerprint,
        "predictor": None if pair.predictor is None else pair.predictor.digest,
        "decoding": settings.sampler.as_dict(),
        "depth": depth,
        "tree": None if settings.tree is None else settings.tree._asdict(),
        **({"typical": True} if settings.typical else {}),
        **({"recurrent_layers": recurrent} if recurrent else {}),
        **({"second_pass": True} if feeds_again(pair.target.config) else {}),
        "vocabulary": {"tokens": int(pair.target.config.vocab_size), "of": "the target's tokenizer"},
        "prompts": prompt_facts(prompts, settings.prompts_source),
        "eos_token_id": list(pair.eos_token_ids),
        "max_new_tokens": settings.max_new_tokens,
        "dtype": pair.number_type,
        "device": pair.device.type,
        "kernels": backend_for(pair.device),
        "distinct_trigram_share": distinct_trigrams(outputs),
        "first_token_accepted_share": float((arrays["match_len"] > 0).mean()),
        "record_seconds": {
            "generate": sum(sequence.generate_s for sequence in sequences),
            "dense": sum(sequence.dense_s for sequence in sequences),
        },
        "provenance": provenance(pair.device, pair.number_type),
    }
    has_sources = any(prompt.source for prompt in prompts)
    return Trace(
        meta=meta,
        sequence_id=np.array(numbers),
        domain=np.array([prompt.domain for prompt in prompts], dtype=np.str_),
        prompt_tokens=np.array([len(prompt.tokens) for prompt in prompts]),
        prompt=np.concatenate([np.array(prompt.tokens, dtype=np.int32) for prompt in prompts]),
        budget_tokens=np.full(len(prompts), settings.max_new_tokens),
        offsets=np.concatenate([[0], np.cumsum([len(output) for output in outputs])]).astype(np.int64),
        source=np.array([prompt.source for prompt in prompts], dtype=np.str_) if has_sources else None,
        **arrays,
    )


def elapsed_ratio(trace: Trace) -> float:
    """Compute seconds of decoding and dense recording over seconds of decoding alone."""
    seconds = trace.meta["record_seconds"]
    return float((seconds["generate"] + seconds["dense"]) / seconds["generate"])


def summary(trace: Trace) -> dict[str, float]:
    """Summarise a recording: its size, how much of the drafts would be accepted, and how long it took."""
    return {
        "sequences": trace.sequences,
        "output_tokens": int(trace.output_tokens.sum()),
        "mean_match_len": float(trace.match_len.mean()),
        **({} if trace.tree is None else {"mean_tree_nodes": float(trace.tree.count.mean())}),
        "first_token_accepted_share": trace.meta["first_token_accepted_share"],
        "distinct_trigram_share": trace.meta["distinct_trigram_share"],
        "time_over_generation": elapsed_ratio(trace),
    }
