"""Tiny pairs of every kind of drafter, with a random predictor; those inside the target agree with it at times."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from medusa_pairs import medusa_pair
from test_predictor import random_predictor
from tiny import tiny_model, tiny_pair, tiny_tokenizer

from realrun.drafters.eesd import EarlyExit, as_model
from realrun.models import Pair
from realrun.skips import Skips

KINDS = ("model", "eesd", "medusa", "self-sd")
INSIDE = KINDS[1:]
SKIPS = Skips(frozenset({1}), frozenset({1}))


def target_of(layers: int = 3) -> Any:
    return tiny_model(layers, seed=1)


def early_exit_pair(target: Any, layers: int = 1, exit_layers: int = 1) -> Pair:
    draft = as_model(target, EarlyExit(target, layers, exit_layers).eval())
    return Pair(target, draft, tiny_tokenizer(), "tiny/target", "tiny/exit", (), kind="eesd", split=layers)


def skipping_pair(target: Any, skips: Skips = SKIPS) -> Pair:
    return Pair(target, target, tiny_tokenizer(), "tiny/target", "tiny/skips", (), kind="self-sd", skips=skips)


@cache
def pair_of(kind: str) -> Pair:
    if kind == "medusa":
        return medusa_pair()
    if kind == "eesd":
        return early_exit_pair(target_of())
    return skipping_pair(target_of()) if kind == "self-sd" else tiny_pair()


def scoring(kind: str) -> Pair:
    """`pair_of` with scores that spread over (0, 1)."""
    return replace(pair_of(kind), predictor=random_predictor(pair_of(kind)))
