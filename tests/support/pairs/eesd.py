"""Tiny targets of several architectures with an early exit that has learned something."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from realrun.drafters.eesd import EarlyExit, EESDKind, as_model
from realrun.pairs.pair import Pair
from tests.support.split_targets import target_of
from tests.support.tiny import tiny_tokenizer


@cache
@torch.inference_mode(False)
@torch.no_grad()
def exit_of(target: Any, split: int, exit_layers: int) -> EarlyExit:
    """It differs from the layers, norm and head that it started as."""
    torch.manual_seed(5)
    early_exit = EarlyExit(target, split, exit_layers).eval().requires_grad_(False)
    for parameter in early_exit.parameters():
        parameter += 0.02 * torch.randn_like(parameter)
    early_exit.head.weight *= 3.0  # surer of itself, so that policies which read probabilities draft on
    return early_exit


@cache
def eesd_pair(name: str, split: int, exit_layers: int) -> Pair:
    target = target_of(name)
    draft = as_model(target, exit_of(target, split, exit_layers))
    return Pair(target, EESDKind(draft, split), tiny_tokenizer(), name, "early exit", ())
