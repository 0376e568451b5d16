"""What the acceptance predictor learns from: states and judged tokens of recorded runs.

The target decodes prompts; every drafted token that it would have judged becomes a sample:
(H^T, H^D, depth, whether the target's token equals it). As all tokens before a judged one
are right, its draft state lies on the target's own output: one teacher-forced pass of each
model per sequence gives every sample of every round that could start there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from realrun.choice import Choice
from realrun.decode import Decoder
from realrun.drafters.draft_model import DraftModel
from realrun.models import Pair
from realrun.predictor import last_states, producing_states
from realrun.prompts import Prompt
from specsim.errors import InputError

SHARD_PROMPTS = 16  # prompts whose states lie in one file
PARTS = 10  # of the sequences, drawn at random: one is held out, one chooses the epoch, the others train

Tensors = dict[str, torch.Tensor]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class PredictorSettings:
    """How to collect and train. Prompts are decoded at each of `temperatures` in turn; 0 is greedy.

    depth : longest draft that samples are taken from, in tokens
    patience : epochs without a lower validation loss after which training ends
    """

    max_new_tokens: int = 128
    depth: int = 16
    temperatures: tuple[float, ...] = (0.0, 0.7, 0.8, 1.0)
    epochs: int = 40
    patience: int = 5
    batch: int = 2048
    lr: float = 1e-3
    weight_decay: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        if self.depth < 1 or self.max_new_tokens < 1 or self.epochs < 1 or not self.temperatures:
            raise InputError("a predictor learns from a depth, tokens, epochs and temperatures; give at least 1 each")
        for sequence in range(len(self.temperatures)):
            self.choice(sequence)  # refuses a bad temperature

    def choice(self, sequence: int) -> Choice:
        temperature = self.temperatures[sequence % len(self.temperatures)]
        return Choice("gumbel", temperature, self.seed) if temperature else Choice()


@torch.inference_mode()
def collect(pair: Pair, decoder: Decoder, prompt: Prompt, settings: PredictorSettings, sequence: int) -> Tensors:
    """States and choices along one decoded sequence of T tokens.

    target_hidden [T, d_T], draft_hidden [T, d_D] in float16, match [T]: whether the token that
    the draft model proposes after prompt and y[:t] is y[t], confidence [T]: how sure it is.
    """
    decoder.choice = settings.choice(sequence)
    output = decoder.decode(prompt.tokens, settings.max_new_tokens, None, sequence=sequence).tokens
    draft_hidden = last_states(pair.draft, [*prompt.tokens, *output[:-1]])[len(prompt.tokens) - 1 :]
    logits = pair.draft.get_output_embeddings()(draft_hidden)
    described = decoder.choice.statistics(logits, sequence, 0).cpu()
    return {
        "target_hidden": producing_states(pair.target, prompt.tokens, output).cpu().half(),
        "draft_hidden": draft_hidden.cpu().half(),
        "match": described[:, 0].long() == torch.tensor(output),
        "confidence": described[:, 2].float(),
    }


def collect_all(
    pair: Pair, prompts: Sequence[Prompt], settings: PredictorSettings, folder: Path, progress: Progress
) -> list[Tensors]:
    """`collect` of every prompt, a file per SHARD_PROMPTS of them; files that are there are read."""
    decoder = Decoder(pair.target, DraftModel(pair.draft, ()), pair.eos_token_ids, Choice())
    folder.mkdir(parents=True, exist_ok=True)
    sequences: list[Tensors] = []
    for begin in range(0, len(prompts), SHARD_PROMPTS):
        numbers = range(begin, min(begin + SHARD_PROMPTS, len(prompts)))
        path = folder / f"{begin:06d}.safetensors"
        if not path.exists():
            shard: Tensors = {}
            for number in numbers:
                found = collect(pair, decoder, prompts[number], settings, number)
                shard |= {f"{number}.{name}": value.contiguous() for name, value in found.items()}
                progress("decode", number + 1, len(prompts))
            save_tensors(shard, path)
        shard = load_file(path)
        sequences += [{key.split(".")[1]: shard[key] for key in shard if key.startswith(f"{n}.")} for n in numbers]
        progress("decode", numbers[-1] + 1, len(prompts))
    return sequences


@dataclass(frozen=True)
class Samples:
    """n judged tokens over N rows of states.

    target_hidden [N, d_T], draft_hidden [N, d_D], confidence [N]; round, row, depth, label, sequence : [n], the row
    at which the round starts, the row of the judged token, its depth from 1, whether it was right
    """

    target_hidden: torch.Tensor
    draft_hidden: torch.Tensor
    confidence: torch.Tensor
    round: torch.Tensor
    row: torch.Tensor
    depth: torch.Tensor
    label: torch.Tensor
    sequence: torch.Tensor

    def part(self, name: str) -> torch.Tensor:
        """Indices of the samples that train, or for validation, or held out; split by sequence."""
        # Drawn, since domains and temperatures come in turn.
        drawn = np.random.default_rng(PARTS).permutation(int(self.sequence.max()) + 1) % PARTS
        kind = torch.from_numpy(drawn)[self.sequence]
        chosen = {"train": kind > 1, "validation": kind == 1, "held out": kind == 0}
        return chosen[name].nonzero()[:, 0]


def judged_samples(sequences: Sequence[Tensors], depth: int) -> Samples:
    """Every drafted token up to this depth that the target judges, in rounds from every position."""
    match = torch.cat([s["match"] for s in sequences])
    lengths = torch.tensor([len(s["match"]) for s in sequences])
    sequence = torch.arange(len(sequences)).repeat_interleave(lengths)
    ends = lengths.cumsum(0)[sequence]
    alive = torch.arange(len(match))  # rounds whose first i - 1 tokens are right
    parts = []
    for i in range(1, depth + 1):
        row = alive + i - 1
        parts.append((alive, row, torch.full_like(row, i)))
        goes_on = match[row] & (row + 1 < ends[alive])
        alive = alive[goes_on]
    rounds, rows, depths = (torch.cat(part) for part in zip(*parts, strict=True))
    return Samples(
        target_hidden=torch.cat([s["target_hidden"] for s in sequences]),
        draft_hidden=torch.cat([s["draft_hidden"] for s in sequences]),
        confidence=torch.cat([s["confidence"] for s in sequences]),
        round=rounds,
        row=rows,
        depth=depths,
        label=match[rows],
        sequence=sequence[rounds],
    )


def save_tensors(tensors: Tensors, path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file atomically."""
    temporary = path.with_suffix(".tmp")
    save_file({name: value.contiguous() for name, value in tensors.items()}, temporary, metadata=metadata)
    os.replace(temporary, path)
