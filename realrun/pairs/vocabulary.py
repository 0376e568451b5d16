"""The vocabulary of a target and its draft model in decoding: that of the target's tokenizer.

Embeddings are often padded beyond it, for speed, and to different sizes in models of the same family (152064 and 151936
rows over the 151665 tokens of Qwen2.5). Padding stands for no token, so its rows are cut off when a model is loaded:
in no mode and by no drafter can such an id be proposed, sampled, or weighed in a probability.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from specsim.io.errors import InputError

NAMED = 5  # tokens that an error names at most


def tokens_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """Compute the size of a vocabulary that holds all of the tokenizer's ids."""
    return max(tokenizer.get_vocab().values()) + 1


def check_tokenizers(
    tokenizers: Sequence[PreTrainedTokenizerBase], names: Sequence[str], *, allow_difference: bool
) -> None:
    """Raise InputError if the tokenizers of target and draft model differ, or, if allowed, disagree on an id.

    If allowed, tokens may be known to a single tokenizer: the draft model never proposes tokens that it does not know.
    """
    target, draft = (tokenizer.get_vocab() for tokenizer in tokenizers)
    if target == draft:
        return
    differing = sorted(
        (token for token in target.keys() | draft.keys() if target.get(token) != draft.get(token)),
        key=lambda token: (min(ids[token] for ids in (target, draft) if token in ids), token),
    )
    both = f"target {names[0]} and draft model {names[1]} have tokenizers that differ"
    if not allow_difference:
        raise InputError(
            f"{both} in {_listed(differing, target, draft)}; choose a pair that shares a tokenizer, or pass "
            "--allow-tokenizer-difference if they differ only in tokens that one tokenizer lacks"
        )
    theirs = {number: token for token, number in draft.items()}
    clashing = [token for token, number in target.items() if theirs.get(number, token) != token]
    clashing += [token for token, number in target.items() if draft.get(token, number) != number]
    if clashing:
        raise InputError(
            f"{both} in what an id stands for: {_listed([*dict.fromkeys(clashing)], target, draft)}; choose a pair "
            "whose ids agree"
        )


def _listed(tokens: Sequence[str], target: Mapping[str, int], draft: Mapping[str, int]) -> str:
    """Write the number of tokens, and some of them with their ids."""
    named = [f"{token!r} ({target.get(token, 'none')} and {draft.get(token, 'none')})" for token in tokens[:NAMED]]
    more = ["..."] if len(tokens) > NAMED else []
    return f"{len(tokens)} token{'s' if len(tokens) != 1 else ''}, by their ids in either: {', '.join(named + more)}"


def fit_vocabulary(model: Any, known: int, size: int) -> Any:
    """Resize a model's vocabulary in place, to read and propose ids below `size`; return the model.

    Surplus rows are cut off; missing rows are filled with the mean token. Ids from `known` on, which its own
    tokenizer lacks, are read and never proposed (`realrun.lm.cached.CachedLM.known_tokens`).
    """
    rows = len(model.get_input_embeddings().weight)
    if rows != size:
        with torch.random.fork_rng([]), torch.no_grad():  # rows to add are made at random first
            model.resize_token_embeddings(size, mean_resizing=False)
            if rows < size:
                embedded = model.get_input_embeddings().weight
                embedded[rows:] = embedded[:rows].mean(0)
    model.config.padding_rows = max(rows - size, 0)
    model.config.known_tokens = min(known, size)
    return model


def padding_notes(models: Mapping[str, Any]) -> list[str]:
    """Describe, by role, the padding that was cut off these models; empty if nothing was."""
    return [
        f"vocabulary: {model.config.vocab_size} tokens, of the target's tokenizer; {cut} padding rows of the {role}'s "
        "embedding stand for no token and are left out"
        for role, model in models.items()
        if (cut := getattr(model.config, "padding_rows", 0))
    ]
