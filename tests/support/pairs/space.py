"""Tiny targets tuned by SAR-SFT on a text that can be learned, so that their masks propose what is often accepted."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from realrun.decode.sampling import Sampler
from realrun.drafters.kind import DrafterKind
from realrun.drafters.space import MaskedTarget, SpaceKind, with_mask
from realrun.pairs.drafter_files import load_drafter
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from realrun.train.common.loop import LoopSettings
from realrun.train.common.lora import AdapterSettings
from realrun.train.common.on_text import TextRun
from realrun.train.space import SpaceSettings, train_space
from tests.support.small_targets import alone
from tests.support.tiny import random_prompts, tiny_model, tiny_tokenizer
from tests.support.trainings import word_text, words

MASKS = 5
CHOICES = {"greedy": Sampler(), "gumbel": Sampler("gumbel", 0.8, seed=4)}
LOOP = LoopSettings(steps=100, batch_windows=8, window_tokens=24, warmup_steps=3, dtype="float64", log_every=5)
# What the tests decode with: all of the target trained, on a text of few words.
FULL = SpaceSettings(MASKS, full=True, lr=1e-2, examples=6)
FEW = 3
FAST = SpaceSettings(MASKS, lr=2e-2, examples=6, adapter=AdapterSettings(rank=8, alpha=16, dropout=0.0))


def word_prompts() -> list[Prompt]:
    """Pieces of such text and random prompts, also of a single token."""
    text = words(2, count=FEW)
    pieces = [text[at : at + length].tolist() for at, length in ((0, 13), (30, 1), (60, 20), (90, 2))]
    return [Prompt("ab"[i % 2], tokens) for i, tokens in enumerate([*pieces, *random_prompts(1)])]


def train(folder: Path, model: Any, settings: SpaceSettings = FAST, loop: LoopSettings = LOOP, **options: Any) -> Any:
    text = word_text(count=options.pop("count", 12))
    return train_space(alone(model), settings, TextRun(text, loop, folder, **options)).as_dict()


def as_pair(loaded: tuple[Any, DrafterKind], eos_token_ids: tuple[int, ...] = ()) -> Pair:
    return Pair(*loaded, tiny_tokenizer(), "tiny", "space", eos_token_ids)


@cache
@torch.inference_mode(False)  # tests may ask for it in inference mode
def space_pair(eos_token_ids: tuple[int, ...] = ()) -> Pair:
    if eos_token_ids:
        return replace(space_pair(), eos_token_ids=eos_token_ids)
    model = tiny_model(2, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder), model, FULL, count=FEW)
        return as_pair(load_drafter(Path(folder), model))


def untrained_target(masks: int = MASKS, layers: int = 2) -> Any:
    """A random target with a random mask token."""
    target = tiny_model(layers, seed=1)
    return with_mask(target, 0.15 * torch.randn(32, generator=torch.Generator().manual_seed(3)))


def untrained_pair(masks: int = MASKS) -> Pair:
    target = untrained_target(masks)
    return Pair(target, SpaceKind(masks), tiny_tokenizer(), "tiny", "space", ())


def masked_target(masks: int = MASKS) -> MaskedTarget:
    return MaskedTarget(untrained_target(masks), masks)
