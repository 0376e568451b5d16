"""What the acceptance predictor learns from: states and judged tokens of recorded runs.

The target decodes prompts, and the drafter's recorder tells what rounds from every position
would draft. Every drafted token that the target would have judged, all before it being right,
becomes a sample: (H^T, H^D, depth, whether the target's token equals it). The states are those
that the pass would have scored, whatever they depend on in a drafter of this kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from realrun.decode.acceptance_predictor import pending_token_states
from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from realrun.proposals.recorder import Recorder
from specsim.errors import InputError
from specsim.files import replacing
from specsim.progress import Progress

SHARD_PROMPTS = 16  # prompts whose states lie in one file
PARTS = 10  # of the sequences, drawn at random: one is held out, one chooses the epoch, the others train

Tensors = dict[str, torch.Tensor]


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
            self.sampler(sequence)  # refuses a bad temperature

    def sampler(self, sequence: int) -> Sampler:
        temperature = self.temperatures[sequence % len(self.temperatures)]
        return Sampler("gumbel", temperature, self.seed) if temperature else Sampler()


class StateKeeper:
    """Stands where a `Scorer` does, and keeps the states that it is shown: [T, depth, d_D] of T rounds, in float16."""

    def __init__(self, rounds: int, depth: int):
        self.shape = (rounds, depth)
        self.states = torch.empty(0)

    def __call__(self, draft_hidden: torch.Tensor, depth: int, begin: int = 0) -> torch.Tensor:
        if self.states.ndim == 1:
            self.states = torch.empty(*self.shape, draft_hidden.shape[1], dtype=torch.float16)
        self.states[begin : begin + len(draft_hidden), depth - 1] = draft_hidden.cpu().half()
        return torch.zeros(len(draft_hidden))


@torch.inference_mode()
def collect(
    pair: Pair, decoder: Decoder, recorder: Recorder, prompt: Prompt, settings: PredictorSettings, sequence: int
) -> Tensors:
    """Samples of one decoded sequence of T tokens: the fields of `Samples` less `sequence`, rounds from its start."""
    decoder.sampler = settings.sampler(sequence)
    output = decoder.decode(prompt.tokens, settings.max_new_tokens, None, sequence=sequence).tokens
    keeper = StateKeeper(len(output), settings.depth)
    columns = recorder(prompt.tokens, output, settings.depth, decoder.sampler, sequence, keeper)
    right = columns["match_len"].astype(np.int64)
    depths = np.arange(settings.depth)  # tokens drafted before
    inside = np.arange(len(output))[:, None] + depths < len(output)
    rounds, before = np.nonzero((depths <= right[:, None]) & inside)
    return {
        "target_hidden": pending_token_states(pair.target, prompt.tokens, output).cpu().half(),
        "draft_hidden": keeper.states[rounds, before],
        "confidence": torch.from_numpy(columns["confidence"][rounds, before]),
        "round": torch.from_numpy(rounds),
        "depth": torch.from_numpy(before + 1),
        "label": torch.from_numpy(before < right[rounds]),
    }


def collect_all(
    pair: Pair, prompts: Sequence[Prompt], settings: PredictorSettings, folder: Path, progress: Progress
) -> list[Tensors]:
    """`collect` of every prompt, a file per SHARD_PROMPTS of them; files that are there are read."""
    decoder = Decoder(*pair.make_drafter(), pair.eos_token_ids, Sampler())
    recorder = pair.make_recorder(Sampler())  # greedy and Gumbel mode have the same pass
    folder.mkdir(parents=True, exist_ok=True)
    sequences: list[Tensors] = []
    for begin in range(0, len(prompts), SHARD_PROMPTS):
        numbers = range(begin, min(begin + SHARD_PROMPTS, len(prompts)))
        path = folder / f"{begin:06d}.safetensors"
        if not path.exists():
            shard: Tensors = {}
            for number in numbers:
                found = collect(pair, decoder, recorder, prompts[number], settings, number)
                shard |= {f"{number}.{name}": value.contiguous() for name, value in found.items()}
                progress("decode", number + 1, len(prompts))
            save_tensors(shard, path)
        shard = load_file(path)
        sequences += [{key.split(".")[1]: shard[key] for key in shard if key.startswith(f"{n}.")} for n in numbers]
        progress("decode", numbers[-1] + 1, len(prompts))
    return sequences


@dataclass(frozen=True)
class Samples:
    """n judged tokens of N rounds.

    target_hidden [N, d_T], of rounds; draft_hidden [n, d_D]; confidence [n], the drafter's; round, depth, label,
    sequence : [n], the token's round and depth from 1, whether it was right, the sequence
    """

    target_hidden: torch.Tensor
    draft_hidden: torch.Tensor
    confidence: torch.Tensor
    round: torch.Tensor
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


def joined(sequences: Sequence[Tensors]) -> Samples:
    """All sequences' samples, with rounds counted through."""
    columns = {name: torch.cat([s[name] for s in sequences]) for name in sequences[0]}
    rounds, samples = (torch.tensor([len(s[name]) for s in sequences]) for name in ("target_hidden", "label"))
    sequence = torch.arange(len(sequences)).repeat_interleave(samples)
    columns["round"] += (rounds.cumsum(0) - rounds)[sequence]
    return Samples(**columns, sequence=sequence)


def save_tensors(tensors: Tensors, path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file atomically."""
    with replacing(path) as temporary:
        save_file({name: value.contiguous() for name, value in tensors.items()}, temporary, metadata=metadata)
