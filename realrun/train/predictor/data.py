"""Collect what the acceptance predictor is trained on: states and verified tokens of recorded runs.

The target decodes prompts, and the drafter's recorder computes the drafts of rounds at every position. Every drafted
token behind correct tokens becomes a sample: (H^T, H^D, depth, whether the target's token equals it). The states are
those that the drafter's pass would have scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from realrun.decode.acceptance_predictor import pending_token_states
from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from realrun.proposals.recorder import Recorder, RecordRequest
from realrun.train.common.folder import Tensors, save_tensors
from realrun.train.common.trainings import sampler_at
from specsim.io.errors import InputError
from specsim.io.progress import Progress
from specsim.io.settings import Settings, setting

SHARD_PROMPTS = 16  # prompts whose states share a file
PARTS = 10  # random parts of the sequences: part 0 is held out, part 1 selects the epoch, the others train


@dataclass(frozen=True)
class PredictorSettings(Settings):
    """Settings of collecting samples and training on them."""

    max_new_tokens: int = setting(128, low=1, doc="Maximum output tokens per prompt.")
    max_draft_tokens: int = setting(16, low=1, high=64, doc="Maximum draft length, in tokens.")
    temperatures: tuple[float, ...] = setting(
        (0.0, 0.7, 0.8, 1.0),
        doc="Temperatures to decode prompts at, in turn, comma-separated; 0 is greedy.",
    )
    epochs: int = setting(40, low=1, doc="Maximum passes over the samples.")
    patience: int = setting(5)  # epochs without a lower validation loss, after which training ends
    batch: int = setting(2048)  # samples of a step
    lr: float = setting(1e-3)
    weight_decay: float = setting(0.01)
    seed: int = setting(0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.temperatures:
            raise InputError("a predictor learns from text of some temperature; give at least 1")
        for sequence in range(len(self.temperatures)):
            self.sampler(sequence)  # refuses a bad temperature

    def sampler(self, sequence: int) -> Sampler:
        return sampler_at(self.temperatures[sequence % len(self.temperatures)], self.seed)


class StateKeeper:
    """A `Scorer` that keeps the states it is called with: [T, depth, d_D] of T rounds, in float16."""

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
    """Decode a prompt and collect the samples of its T tokens: the fields of `Samples` but `sequence`."""
    decoder.sampler = settings.sampler(sequence)
    output = decoder.decode(prompt.tokens, settings.max_new_tokens, None, sequence=sequence).tokens
    keeper = StateKeeper(len(output), settings.max_draft_tokens)
    request = RecordRequest(prompt.tokens, output, settings.max_draft_tokens, decoder.sampler, sequence, keeper)
    columns = recorder(request)
    correct = columns["match_len"].astype(np.int64)
    depths = np.arange(settings.max_draft_tokens)  # tokens drafted before
    in_range = np.arange(len(output))[:, None] + depths < len(output)
    rounds, before = np.nonzero((depths <= correct[:, None]) & in_range)
    return {
        "target_hidden": pending_token_states(pair.target, prompt.tokens, output).cpu().half(),
        "draft_hidden": keeper.states[rounds, before],
        "confidence": torch.from_numpy(columns["confidence"][rounds, before]),
        "round": torch.from_numpy(rounds),
        "depth": torch.from_numpy(before + 1),
        "label": torch.from_numpy(before < correct[rounds]),
    }


def collect_all(
    pair: Pair, prompts: Sequence[Prompt], settings: PredictorSettings, folder: Path, progress: Progress
) -> list[Tensors]:
    """Run `collect` on every prompt, or read its file; a file holds SHARD_PROMPTS prompts."""
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
                samples = collect(pair, decoder, recorder, prompts[number], settings, number)
                shard |= {f"{number}.{name}": value.contiguous() for name, value in samples.items()}
                progress("decode", number + 1, len(prompts))
            save_tensors(path, shard)
        try:
            shard = load_file(path)
        except SafetensorError as error:
            raise InputError(f"{path} is damaged ({error}); delete it") from None
        sequences += [{key.split(".")[1]: shard[key] for key in shard if key.startswith(f"{n}.")} for n in numbers]
        progress("decode", numbers[-1] + 1, len(prompts))
    return sequences


@dataclass(frozen=True)
class Samples:
    """n verified tokens of N rounds.

    target_hidden [N, d_T], of rounds; draft_hidden [n, d_D]; confidence [n], the drafter's; round, depth, label,
    sequence : [n], the token's round and depth from 1, whether it was correct, the sequence
    """

    target_hidden: torch.Tensor
    draft_hidden: torch.Tensor
    confidence: torch.Tensor
    round: torch.Tensor
    depth: torch.Tensor
    label: torch.Tensor
    sequence: torch.Tensor

    def part(self, name: str) -> torch.Tensor:
        """List the indices of the training, validation or held-out samples; the split is by sequence."""
        # Drawn at random because domains and temperatures come in turn.
        drawn = np.random.default_rng(PARTS).permutation(int(self.sequence.max()) + 1) % PARTS
        kind = torch.from_numpy(drawn)[self.sequence]
        chosen = {"train": kind > 1, "validation": kind == 1, "held out": kind == 0}
        return chosen[name].nonzero()[:, 0]


def joined(sequences: Sequence[Tensors]) -> Samples:
    """Join the samples of all sequences; rounds are numbered consecutively."""
    columns = {name: torch.cat([s[name] for s in sequences]) for name in sequences[0]}
    rounds, samples = (torch.tensor([len(s[name]) for s in sequences]) for name in ("target_hidden", "label"))
    sequence = torch.arange(len(sequences)).repeat_interleave(samples)
    columns["round"] += (rounds.cumsum(0) - rounds)[sequence]
    return Samples(**columns, sequence=sequence)
