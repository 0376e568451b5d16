"""Train EDD's decoder, or VDM's, on the distributions of a frozen target ("Faster Speculative Decoding via Effective
Draft Decoder with Pruned Candidate Tree", section 3.1).

The text is cut into blocks of L tokens, each of which simulates a round: the tokens of a block see the target's states
of all blocks before it and the embeddings of their own block up to themselves (the dual-block mask; Eq. 3, errata B8).
The loss is KL(target || decoder), Eq. 4, at all tokens but the first of a block, which the target itself predicts.
Every step draws L. The paper's ablations are settings: a single block length, the cross-entropy with the text, and no
states at all (VDM).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from realrun.drafters.edd import (
    EDDKind,
    check_split,
    default_split,
    load_own_state,
    one_layer_model,
    own_state,
    share_vocabulary,
)
from realrun.lm.layer_stack import capped, layer_pass
from realrun.pairs.pair import Pair
from realrun.train.common.folder import Tensors
from realrun.train.common.loop import LossAndParts
from realrun.train.common.on_text import (
    OWN_OR_TARGETS_HEAD,
    Method,
    ModuleJob,
    TextRun,
    TrainedOnText,
    cross_entropy_nats,
    kl_nats,
    mean_over,
    train_on_text,
)
from realrun.train.common.trainings import Training
from specsim.io.errors import InputError
from specsim.io.settings import Settings, setting

# Appendix B, "during the training of the draft model"; no window is printed.
PRINTED = {"lr": 1e-4, "batch": 8, "epochs": 1.0, "shortest_block": 5, "longest_block": 10}
OBJECTIVES = {"kl": "KL(target || drafter) at every token", "text": "cross-entropy with the text's next token"}
PLACES = 5  # places of a draft whose agreement is reported


@dataclass(frozen=True)
class EddSettings(Settings):
    """Settings of EDD's decoder."""

    states_after: int | None = setting(
        None,
        low=1,
        doc="Read the target's states after this many layers as soft prompts (default: all but 3).",
    )
    shortest_block: int = setting(5, low=2, doc="Tokens of the shortest block; a block simulates a round.")
    longest_block: int = setting(10, low=2, doc="Tokens of the longest block; each step draws a length.")
    loss: Literal["kl", "text"] = setting("kl", doc="Learn the target's distribution (kl) or the text's tokens (text).")
    lr: float = setting(6e-3, above=0, doc="Peak learning rate.")
    draft_vocabulary: int | None = setting(None, low=1, doc=OWN_OR_TARGETS_HEAD)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shortest_block > self.longest_block:
            raise InputError(f"blocks of {self.shortest_block} to {self.longest_block} tokens; give the shortest first")


@dataclass(frozen=True)
class VdmSettings(EddSettings):
    """Settings of a vanilla draft model: `loss` and `lr`; it reads no states and has no blocks."""

    states_after: int | None = setting(0)
    shortest_block: int = setting(5)
    longest_block: int = setting(10)


class DecoderTraining(ModuleJob):
    """Trains the decoder of EDD or VDM; the target is frozen."""

    def __init__(self, target: Any, settings: EddSettings, seed: int = 0):
        self.settings, self.seed = settings, seed
        self.split = default_split(target) if settings.states_after is None else settings.states_after
        if self.split:
            check_split(target, self.split)
        # Trains faster than a random layer: the last layer reads states as the target does, the first layer embeddings.
        like = -1 if self.split else 0
        self.decoder: Any = one_layer_model(target, seed, like=like)
        start = target.model.layers[like]
        self.decoder.model.layers[0].load_state_dict(start.state_dict())
        trained: Any = self.decoder
        self.draft_vocabulary = settings.draft_vocabulary
        if self.draft_vocabulary is not None:
            share_vocabulary(self.decoder, target)
            trained = torch.nn.ModuleList([self.decoder.model.layers, self.decoder.model.norm])
        super().__init__(target, trained, settings.lr)

    def loss(self, batch: torch.Tensor, step: int, answers: torch.Tensor | None = None) -> LossAndParts:
        """Compute the loss of a batch [B, T + 1] in nats per token, and "block", the block length in tokens."""
        settings = self.settings
        rng = np.random.default_rng((self.seed, 3, step))
        block = int(rng.integers(settings.shortest_block, settings.longest_block + 1))
        ours, theirs = self._logits(batch, block)
        count = ours.shape[1]
        chosen = self._drafted(count, block)
        counted = None if answers is None else answers[:, 1:][:, chosen]
        if settings.loss == "text":
            loss = cross_entropy_nats(ours[:, chosen], batch[:, 1:][:, chosen], counted)
        else:
            loss = kl_nats(theirs[:, chosen], ours[:, chosen], counted)
        return loss, {"block": float(block)} if self.split else {}

    def state(self) -> Tensors:
        return own_state(self.decoder, shared=self.draft_vocabulary is not None)

    def load_state(self, tensors: Tensors) -> None:
        load_own_state(self.decoder, tensors, self.target)

    @torch.no_grad()
    def held_out(self, batch: torch.Tensor, answers: torch.Tensor | None = None) -> dict[str, float]:
        """divergence : KL(target || decoder) in nats at drafted tokens, in the longest blocks

        agreement, agreement_i : how often both prefer the same token, at all of these and at the i-th of a draft
        """
        block = self.settings.longest_block
        ours, theirs = self._logits(batch, block)
        same = (ours.argmax(-1) == theirs.argmax(-1)).double()
        chosen = self._drafted(ours.shape[1], block)
        counts = torch.ones_like(same, dtype=torch.bool) if answers is None else answers[:, 1:]
        figures = {
            "divergence": float(kl_nats(theirs[:, chosen], ours[:, chosen], counts[:, chosen])),
            "agreement": float(mean_over(same[:, chosen], counts[:, chosen])),
        }
        if self.split:
            figures |= {
                f"agreement_{i + 1}": float(mean_over(same[:, i::block], counts[:, i::block]))
                for i in range(min(PLACES, block - 1))
            }
        return figures

    def _logits(self, batch: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute logits [B, T, V] after the first T tokens of a batch [B, T + 1]: the decoder's and the target's."""
        tokens = batch[:, :-1]
        if not self.split:
            with torch.no_grad():
                theirs = self.target(input_ids=tokens, use_cache=False).logits
            return self.decoder(input_ids=tokens, use_cache=False).logits, theirs
        states, theirs = states_and_logits(self.target, tokens, self.split)
        return block_logits(self.decoder, tokens, states, block), theirs

    def _drafted(self, count: int, block: int) -> torch.Tensor:
        """Mark the rows, bool [count], that predict a drafted token: for VDM, all."""
        if not self.split:
            return torch.ones(count, dtype=torch.bool)
        return (torch.arange(count) + 1) % block != 0


@torch.no_grad()
def states_and_logits(target: Any, tokens: torch.Tensor, *splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a target's states after `splits` layers, side by side [B, T, len(splits) d], and its logits [B, T, V].

    tokens : [B, T]; splits : from 1, ascending
    """
    outputs: list[Any] = []
    # Not the library's list of states: the last of them is normed.
    hooks = [
        target.model.layers[split - 1].register_forward_hook(lambda module, inputs, output: outputs.append(output))
        for split in splits
    ]
    try:
        logits: torch.Tensor = target(input_ids=tokens, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    states = [output[0] if isinstance(output, tuple) else output for output in outputs]
    return torch.cat(states, dim=-1), logits


def block_logits(decoder: Any, tokens: torch.Tensor, states: torch.Tensor, block: int) -> torch.Tensor:
    """Compute the decoder's logits [B, T, V] after each of these tokens [B, T], under the dual-block mask.

    states : [B, T, d], the target's; block : L in tokens
    """
    inner = decoder.model
    count = tokens.shape[1]
    embedded = inner.embed_tokens(tokens)
    x = torch.cat([states.to(embedded.dtype), embedded], dim=1)  # [B, 2 T, d]
    positions = torch.arange(count, device=tokens.device).repeat(2)
    x = layer_pass(decoder, inner.layers[0], x, positions, dual_block_mask(count, block).to(tokens.device))
    logits: torch.Tensor = capped(decoder.config, decoder.get_output_embeddings()(inner.norm(x[:, count:])))
    return logits


def dual_block_mask(count: int, block: int) -> torch.Tensor:
    """Make the attention mask of `count` states followed by `count` tokens: bool [2 count, 2 count].

    Token i of block j = floor(i / L) sees the states before token j L, and tokens j L to i. What states
    see plays no part; each sees itself.
    """
    index = torch.arange(count)
    start = index // block * block  # [count], the first token of each token's block
    states = index[None] < start[:, None]
    tokens = (index[None] >= start[:, None]) & (index[None] <= index[:, None])
    own = torch.eye(count, dtype=torch.bool)
    return torch.cat([torch.cat([own, torch.zeros_like(own)], dim=1), torch.cat([states, tokens], dim=1)])


def train_edd(pair: Pair, settings: EddSettings, run: TextRun) -> TrainedOnText:
    """Train a decoder of the pair's target, of kind "vdm" if it reads no states; see `train_on_text`."""
    EDDKind.check_target(pair.target)
    job = DecoderTraining(pair.target, settings, run.loop.seed)
    kind, resolved = "edd" if job.split else "vdm", replace(settings, states_after=job.split)
    return train_on_text(pair, Method(kind, resolved, OBJECTIVES[settings.loss]), lambda: job, run)


EDD = Training(
    "edd",
    EddSettings,
    train_edd,
    """Train EDD, the Effective Draft Decoder.

    Trains a layer that reads the target's states of all verified tokens as soft prompts; embedding and
    head start as copies of the target's. Then `realrun record --drafter OUT`.

    Example: realrun train edd --out edd --tokens 2
    """,
    printed=lambda **_: PRINTED,
)
VDM = Training(
    "vdm",
    VdmSettings,
    train_edd,
    """Train VDM, a vanilla draft model.

    It is EDD's decoder without the target's states.

    Trains an independent model of a single layer, with embedding and head copied from the target:
    the baseline for EDD.

    Example: realrun train vdm --out vdm --tokens 2
    """,
    printed=lambda **_: {name: PRINTED[name] for name in ("lr", "batch", "epochs")},
)
