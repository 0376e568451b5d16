"""Tiny targets with drafters of EDD, EAGLE and EAGLE-3 that have learned the texts of the tests, somewhat."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

from realrun.drafters.block import Block, BlockKind
from realrun.drafters.eagle import Eagle, EagleKind
from realrun.drafters.eagle3 import Eagle3, Eagle3Kind
from realrun.drafters.edd import EDDKind, one_layer_model
from realrun.drafters.kind import DrafterKind
from realrun.drafters.state_drafter import StateDrafterLM
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt
from realrun.train.eagle import feature_pass, unrolled
from realrun.train.edd import block_logits, states_and_logits
from tests.support.pairs.medusa import CHOICES, own_texts
from tests.support.split_targets import target_of
from tests.support.tiny import random_predictor, tiny_prompts, tiny_tokenizer

KINDS = ("edd", "eagle", "eagle3")
# As a published drafter's config.json states them, in small.
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 160, "rms_norm_eps": 1e-5, "mask": 96,
    "tokens": 4, "states_after": [1, 3],
}  # fmt: skip
DFLASH = {**SIZES, "form": "dflash", "model_type": "qwen3"}
BLOCKS: dict[str, dict[str, Any]] = {  # by the target that tests give them
    "llama": DFLASH,
    "qwen2-sdpa": {**SIZES, "form": "p-eagle"},
    "qwen3": {**DFLASH, "draws_anchor": True, "markov_rank": 4},  # DSpark
}
TARGETS = ("llama", "qwen3", "qwen2-sdpa", "mistral-sdpa")  # fused parts, and the library's
TOKENS, STEPS, BLOCK, UNROLLED = 24, 8, 6, 3
PROMPTS = [Prompt("code", [17]), *tiny_prompts(4, seed=7)]  # the first has no state before its pending token
NOTHING = -100  # that a loss passes over


@cache
@torch.inference_mode(False)  # tests may ask for it in inference mode
def state_pair(kind: str, name: str = "llama", eos_token_ids: tuple[int, ...] = ()) -> Pair:
    """A drafter fitted to what its target says after PROMPTS, with random scores; "eagle-vllm" is the layer of vLLM."""
    if eos_token_ids:
        return replace(state_pair(kind, name), eos_token_ids=eos_token_ids)
    target = copy.deepcopy(target_of(name))  # which others may have made in inference mode
    makers: dict[str, Callable[[], DrafterKind]] = {
        "edd": lambda: EDDKind(one_layer_model(target, seed=1), 2),
        "eagle": lambda: EagleKind(Eagle(target, seed=1)),
        "eagle-vllm": lambda: EagleKind(Eagle(target, seed=1, for_vllm=True)),
        "eagle3": lambda: Eagle3Kind(Eagle3(target, seed=1)),
        "block": lambda: BlockKind.of_block(Block(target, BLOCKS[name])),
    }
    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        pair = Pair(target, makers[kind](), tiny_tokenizer(), name, kind, ())
    fit(pair, PROMPTS)
    return replace(pair, predictor=random_predictor(pair))


def fit(pair: Pair, prompts: Sequence[Prompt], rate: float = 0.02) -> None:
    """A few steps towards what the target says after these prompts, and EAGLE's towards its features."""
    target, (draft,) = pair.target.requires_grad_(False), pair.drafter.weights(pair.target)
    draft.requires_grad_(True)
    texts = [
        [*prompt.tokens, *text]
        for sampler in CHOICES.values()
        for prompt, text in zip(prompts, own_texts(pair, sampler, TOKENS, prompts), strict=True)
    ]
    longest = max(map(len, texts))
    rows = torch.tensor([text + [NOTHING] * (longest - len(text)) for text in texts])
    tokens, truth = rows.clamp(min=0)[:, :-1], rows[:, 1:]
    features = target.model(input_ids=tokens, use_cache=False).last_hidden_state
    generator = torch.Generator().manual_seed(2)
    optimiser = torch.optim.Adam(draft.parameters(), lr=rate)
    for _ in range(STEPS):
        loss = torch.zeros((), dtype=torch.float64)
        if isinstance(pair.drafter, EDDKind):
            states, _ = states_and_logits(target, tokens, pair.drafter.split)
            logits = [block_logits(draft, tokens, states, BLOCK)]
        elif isinstance(pair.drafter, BlockKind):
            states, _ = states_and_logits(target, tokens, *draft.states_after)
            drafted = pair.drafter.drafted
            made = torch.stack([draft.along(*one, 0, drafted) for one in zip(tokens, states, strict=True)])
            rows = [made[:, : tokens.shape[1] - k, k] for k in range(drafted)]
            logits = [draft.logits(row) for row in rows]
            if draft.markov_head is not None:
                pairs = zip(logits, rows, strict=True)
                logits = [row + draft.bias(state, tokens[:, k:]) for k, (row, state) in enumerate(pairs)]
        elif isinstance(pair.drafter, Eagle3Kind):
            states, _ = states_and_logits(target, tokens, *draft.states_after)
            logits = [draft.lm_head(draft.norm(x)) for x in unrolled(draft, target, tokens, states, UNROLLED)]
        else:
            noise = 0.2 * torch.rand(features.shape, generator=generator, dtype=features.dtype) - 0.1
            made = feature_pass(draft, target, tokens, features + noise)
            logits, loss = [target.get_output_embeddings()(made)], F.smooth_l1_loss(made, features)
        for ours in logits:
            last = truth[:, -ours.shape[1] :].flatten()
            loss = loss + F.cross_entropy(ours.flatten(0, 1), last, ignore_index=NOTHING) / len(logits)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    draft.eval().requires_grad_(False)


@dataclass(frozen=True)
class Seen:
    """Logits [V] of the drafter after a context, whose last token is pending, and what it has drafted."""

    context: list[int]
    drafted: list[int]
    logits: torch.Tensor


def watch(lm: StateDrafterLM) -> list[Seen]:
    """What every row of this pass stands for, kept by the tokens that it is given alone."""
    seen: list[Seen] = []
    text: list[int] = []
    nodes: list[int] = []
    prefill, forward, forward_nodes = lm.prefill, lm.forward, lm.forward_nodes

    def watched_prefill(tokens: Sequence[int]) -> None:
        text[lm.length :] = tokens
        prefill(tokens)

    def watched(tokens: Sequence[int]) -> torch.Tensor:
        text[lm.length :] = tokens
        nodes.clear()
        logits, pending = forward(tokens), lm.target.length + 1
        seen.append(Seen(text[:pending], text[pending:], logits[-1]))
        return logits

    def watched_nodes(tokens: Sequence[int], depths: Sequence[int], visible: torch.Tensor) -> torch.Tensor:
        nodes.extend(tokens)
        logits = forward_nodes(tokens, depths, visible)
        for row, sees in zip(logits, visible, strict=True):
            seen.append(Seen([*text], [nodes[node] for node in sees.nonzero()[:, 0].tolist()], row))
        return logits

    lm.prefill, lm.forward, lm.forward_nodes = watched_prefill, watched, watched_nodes  # type: ignore[method-assign]
    return seen


def layer_alone(layer: Any, rotary: Any, x: torch.Tensor, first: int = 0) -> torch.Tensor:
    """The library's layer over rows x [n, d] at positions first, first + 1 .., each of which sees those before."""
    count = len(x)
    positions = torch.arange(first, first + count)[None]
    unseen = torch.ones(count, count, dtype=torch.bool).triu_(1)
    mask = torch.zeros(count, count, dtype=x.dtype).masked_fill_(unseen, torch.finfo(x.dtype).min)
    places = rotary(x[None], position_ids=positions)
    out: torch.Tensor = layer(
        x[None], attention_mask=mask[None, None], position_ids=positions, position_embeddings=places
    )
    return out[0]
