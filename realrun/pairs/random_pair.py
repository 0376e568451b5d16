"""Make pairs of public shapes with random weights, and a vocabulary for them."""

from __future__ import annotations

from typing import cast

from transformers import PreTrainedTokenizerBase

from realrun.drafters.independent import IndependentKind
from realrun.lm.number_type import find_dtype, in_number_type
from realrun.pairs.pair import Pair
from realrun.pairs.shapes import random_model, shape_config
from specsim.io.errors import InputError


class _Vocabulary:
    """The part of a tokenizer that timing needs: its size."""

    def __init__(self, size: int):
        self.size = size

    def __len__(self) -> int:
        return self.size


def vocabulary(pair: Pair) -> int:
    """Give the pair's common vocabulary size; InputError if the sizes differ."""
    sizes = [int(config.vocab_size) for config in (pair.target.config, pair.draft_config)]
    if sizes[0] != sizes[1]:
        raise InputError(
            f"{pair.target_name} has {sizes[0]} tokens in its vocabulary, {pair.draft_name} has {sizes[1]}; "
            "choose a drafter with the target's vocabulary"
        )
    return sizes[0]


def random_pair(
    target: str,
    draft: str,
    *,
    device: str = "cuda",
    dtype: str = "bfloat16",
    positions: int | None = None,
    smoke: bool = False,
    seed: int = 0,
) -> Pair:
    """Make a pair of `realrun.pairs.shapes` with random weights; positions, smoke : see `shape_config`."""
    configs = [shape_config(name, positions=positions, smoke=smoke) for name in (target, draft)]
    whole = [shape_config(name).vocab_size for name in (target, draft)]
    if whole[0] != whole[1]:  # reduced vocabularies are all equal
        raise InputError(f"{target} and {draft} have vocabularies of {whole[0]} and {whole[1]} tokens; choose a pair")
    weights = find_dtype(dtype)
    models = [in_number_type(random_model(c, device, weights, seed + i), dtype) for i, c in enumerate(configs)]
    tokenizer = cast(PreTrainedTokenizerBase, _Vocabulary(configs[0].vocab_size))
    suffix = " (reduced)" if smoke else ""
    return Pair(models[0], IndependentKind(models[1]), tokenizer, target + suffix, draft + suffix, ())
