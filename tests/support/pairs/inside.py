"""Tiny pairs of every kind of drafter, with a random predictor; those inside the target agree with it at times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from realrun.drafters.eagle import Eagle, EagleKind
from realrun.drafters.eagle3 import Eagle3, Eagle3Kind
from realrun.drafters.edd import EDDKind, one_layer_model
from realrun.drafters.eesd import EarlyExit, EESDKind, as_model
from realrun.drafters.self_sd import SelfSDKind
from realrun.lm.variants import SkippedSublayers
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from tests.support.pairs.medusa import medusa_pair
from tests.support.pairs.state import fit
from tests.support.tiny import random_predictor, tiny_model, tiny_pair, tiny_prompts, tiny_tokenizer

KINDS = ("model", "eesd", "medusa", "self-sd", "edd", "eagle")
INSIDE = KINDS[1:]
STATES_AFTER = 1  # layers, of EDD's
SKIPS = SkippedSublayers(frozenset({1}), frozenset({1}))


def marked(kinds: Sequence[str], slow: Sequence[str] = ("eagle",)) -> list[Any]:
    """Kinds as parameters; of the two that read the target's states, tests by default run one or none."""
    return [pytest.param(kind, marks=pytest.mark.slow) if kind in slow else kind for kind in kinds]


def target_of(layers: int = 3) -> Any:
    return tiny_model(layers, seed=1)


def early_exit_pair(target: Any, layers: int = 1, exit_layers: int = 1) -> Pair:
    draft = as_model(target, EarlyExit(target, layers, exit_layers).eval())
    return Pair(target, EESDKind(draft, layers), tiny_tokenizer(), "tiny/target", "tiny/exit", ())


def skipping_pair(target: Any, skips: SkippedSublayers = SKIPS) -> Pair:
    return Pair(target, SelfSDKind(skips), tiny_tokenizer(), "tiny/target", "tiny/skips", ())


def decoder_pair(target: Any) -> Pair:
    drafter = EDDKind(one_layer_model(target), STATES_AFTER)
    return Pair(target, drafter, tiny_tokenizer(), "tiny/target", "tiny/edd", ())


def feature_pair(target: Any) -> Pair:
    return Pair(target, EagleKind(Eagle(target)), tiny_tokenizer(), "tiny/target", "tiny/eagle", ())


def fused_pair(target: Any) -> Pair:
    return Pair(target, Eagle3Kind(Eagle3(target)), tiny_tokenizer(), "tiny/target", "tiny/eagle3", ())


@cache
@torch.inference_mode(False)  # tests may ask for it in inference mode
def fitted(kind: str) -> Pair:
    """EDD's, EAGLE's or EAGLE-3's, which has learned the texts of the tests, somewhat."""
    pair = {"edd": decoder_pair, "eagle": feature_pair, "eagle3": fused_pair}[kind](target_of())
    fit(pair, [Prompt("all", [17]), *tiny_prompts(6)])
    return pair


@cache
def pair_of(kind: str) -> Pair:
    if kind in ("edd", "eagle", "eagle3"):
        return fitted(kind)
    if kind == "medusa":
        return medusa_pair()
    if kind == "eesd":
        return early_exit_pair(target_of())
    return skipping_pair(target_of()) if kind == "self-sd" else tiny_pair()


def scoring(kind: str) -> Pair:
    """`pair_of` with scores that spread over (0, 1)."""
    return replace(pair_of(kind), predictor=random_predictor(pair_of(kind)))
