"""Train EAGLE's drafter on the features of a frozen target (Li et al. 2024, arXiv:2401.15077, 4.2).

    L = SmoothL1(f_hat, f) + w CrossEntropy(softmax(head(f)), head(f_hat)),      w = 0.1

f is the input of the target's head, and f_hat the drafter's output for the embeddings of all tokens so far and the true
features before them. Uniform noise is added to these features because in drafting they are the drafter's own.

Train EAGLE-3's drafter by training-time test (Li et al. 2025, arXiv:2503.01840, 3.2).

The drafter is unrolled on its own hidden states as in drafting. At step k, every row is made of the output of step
k - 1. It sees the rows made of the target's states up to where its draft begins, and the rows of its own draft. The
tokens fed are the text's, whatever the drafter prefers. The loss is the cross-entropy with the target's distribution
over the draft vocabulary, a mean over steps with the weights 0.8^k of the authors' code; features are not regressed.
Rows after which the target prefers a token outside the draft vocabulary do not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from realrun.drafters.eagle import Eagle, EagleKind
from realrun.drafters.eagle3 import Eagle3, Eagle3Kind, vocabulary_tables
from realrun.drafters.kind import DRAFT_TOKENS
from realrun.lm.layer_stack import capped, layer_pass
from realrun.pairs.pair import Pair
from realrun.train.common.folder import Tensors
from realrun.train.common.loop import LossAndParts, Tokens, wide
from realrun.train.common.on_text import (
    DRAFT_VOCABULARY,
    Method,
    ModuleJob,
    TextRun,
    TrainedOnText,
    agreement,
    kl_nats,
    mean_over,
    predicted,
    train_on_text,
)
from realrun.train.common.trainings import Training
from realrun.train.edd import states_and_logits
from specsim.io.settings import Settings, setting

LAB_WIDTH, LAB_LR = 256, 6e-3
LEARNING_RATE = (
    "Peak learning rate (default: 0.006 for targets as narrow as the lab's, and less in inverse proportion to the "
    "square of a wider target's width)."
)
EAGLE_OBJECTIVE = "smooth L1 of the features + class_weight x cross-entropy with the target's distribution"


@dataclass(frozen=True)
class EagleSettings(Settings):
    """Settings of EAGLE's drafter."""

    class_weight: float = setting(
        0.1, low=0, doc="Weight of the cross-entropy; the regression of features has weight 1."
    )
    noise: float = setting(0.1, low=0, doc="Maximum noise added to each component of the input features.")
    lr: float | None = setting(None, above=0, doc=LEARNING_RATE)
    draft_vocabulary: int | None = setting(
        None,
        low=1,
        doc=DRAFT_VOCABULARY,
    )
    for_vllm: bool = setting(
        False,
        "Train the layer that vLLM runs: without its first norm, and without a bias before it.",
        flag="--for-vllm",
    )


def with_lr(settings: EagleSettings, target: Any) -> EagleSettings:
    """Fill in the learning rate for a target of this width."""
    return replace(settings, lr=settings.lr or usual_lr(target))


def usual_lr(target: Any) -> float:
    """Choose the peak learning rate for a target of this width.

    It was found for the lab's 256; at 576 (SmolLM2) 0.006 diverges and 0.001 to 0.0015 train, and EAGLE's authors take
    3e-5 at 4,096, EAGLE-3's 5e-5.
    """
    width = max(LAB_WIDTH, int(target.config.hidden_size))
    return LAB_LR * (LAB_WIDTH / width) ** 2


class EagleTraining(ModuleJob):
    """Trains EAGLE's layer; the target and its head are frozen."""

    def __init__(self, target: Any, settings: EagleSettings, seed: int = 0):
        settings = with_lr(settings, target)
        assert settings.lr is not None
        super().__init__(target, Eagle(target, seed, for_vllm=settings.for_vllm), settings.lr)
        self.eagle, self.settings, self.draft_vocabulary = self.module, settings, settings.draft_vocabulary

    def loss(self, batch: torch.Tensor, step: int, answers: torch.Tensor | None = None) -> LossAndParts:
        """Compute L of a batch [B, T + 1], and its parts "regression" and "classification", the latter in nats."""
        features, counted = self._features(batch), predicted(answers)
        noise = (torch.rand_like(features) * 2 - 1) * self.settings.noise
        ours = feature_pass(self.eagle, self.target, batch[:, :-1], features + noise)
        regression = mean_over(F.smooth_l1_loss(wide(ours), wide(features), reduction="none").mean(-1), counted)
        drafted, theirs = wide(self._head(ours)), wide(self._head(features))
        nats = F.cross_entropy(drafted.flatten(0, 1), theirs.softmax(-1).flatten(0, 1), reduction="none")
        classification = mean_over(nats, None if counted is None else counted.flatten())
        parts = {"regression": float(regression.detach()), "classification": float(classification.detach())}
        return regression + self.settings.class_weight * classification, parts

    @torch.no_grad()
    def held_out(self, batch: torch.Tensor, answers: torch.Tensor | None = None) -> dict[str, float]:
        """Compute figures of first drafted tokens, whose preceding features are all the target's.

        divergence : KL(target || drafter) in nats; agreement : how often both prefer the same token;
        regression : the loss of features
        """
        features, counted = self._features(batch), predicted(answers)
        ours = feature_pass(self.eagle, self.target, batch[:, :-1], features)
        theirs, drafted = self._head(features), self._head(ours)
        return {
            "divergence": float(kl_nats(theirs, drafted, counted)),
            "agreement": float(agreement(theirs, drafted, counted)),
            "regression": float(
                mean_over(F.smooth_l1_loss(wide(ours), wide(features), reduction="none").mean(-1), counted)
            ),
        }

    def _head(self, features: torch.Tensor) -> torch.Tensor:
        """Compute the target's logits [B, T, V] of features [B, T, d]."""
        return capped(self.target.config, self.target.get_output_embeddings()(features))

    @torch.no_grad()
    def _features(self, batch: torch.Tensor) -> torch.Tensor:
        """Compute the target's features [B, T, d] of all tokens of a batch [B, T + 1] but the last."""
        features: torch.Tensor = self.target.model(input_ids=batch[:, :-1], use_cache=False).last_hidden_state
        return features


def feature_pass(eagle: Eagle, target: Any, tokens: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Compute the drafter's output [B, T, d] for tokens [B, T], each fused with the feature [B, T, d] before it."""
    inner = target.model
    embedded = inner.embed_tokens(tokens)
    before = F.pad(features, (0, 0, 1, 0))[:, :-1].to(embedded.dtype)  # [B, T, d], zeros before the first token
    x = eagle.fused(embedded, before)
    count = tokens.shape[1]
    seen = torch.ones(count, count, dtype=torch.bool, device=x.device).tril_()
    if eagle.for_vllm:
        seen[1:, 0] = False  # the first token has no row when drafting
    return layer_pass(target, eagle.layers[0], x, torch.arange(count, device=x.device), seen)


def train_eagle(pair: Pair, settings: EagleSettings, run: TextRun) -> TrainedOnText:
    """Train a drafter of the pair's target; see `train_on_text`."""
    EagleKind.check_target(pair.target)
    job = EagleTraining(pair.target, settings, run.loop.seed)
    return train_on_text(pair, Method("eagle", job.settings, EAGLE_OBJECTIVE), lambda: job, run)


EAGLE = Training(
    "eagle",
    EagleSettings,
    train_eagle,
    """Train EAGLE's drafter.

    Trains a layer that predicts the next feature (the input of the target's head); the head stays the
    target's. Then `realrun record --drafter OUT`.

    Example: realrun train eagle --out eagle --tokens 2
    """,
)


DECAY = 0.8
EAGLE3_OBJECTIVE = (
    f"cross-entropy with the target's distribution over the draft vocabulary, of draft step k x {DECAY}^k"
)


@dataclass(frozen=True)
class Eagle3Settings(Settings):
    """Settings of EAGLE-3's drafter."""

    draft_steps: int = setting(7, low=1, doc="Draft steps that training unrolls (training-time test).")
    lr: float | None = setting(None, above=0, doc=LEARNING_RATE)
    draft_vocabulary: int | None = setting(None, low=1, doc=DRAFT_VOCABULARY)


class Eagle3Training(ModuleJob):
    """Trains EAGLE-3's layer, its projection, norm and head; the target is frozen."""

    module: Eagle3

    def __init__(self, target: Any, settings: Eagle3Settings, seed: int = 0):
        settings = replace(settings, lr=settings.lr or usual_lr(target))
        assert settings.lr is not None
        super().__init__(target, Eagle3(target, seed=seed), settings.lr)
        self.settings, self.draft_vocabulary = settings, settings.draft_vocabulary

    def chosen(self, text: Sequence[tuple[Tokens, float]]) -> Tensors:
        """Choose the tokens to draft, whose head is then trained."""
        drafted = super().chosen(text).get(DRAFT_TOKENS)
        if drafted is None:
            return {}
        tokens = drafted.long()
        self.module.draft_only(self.target, tokens)
        return vocabulary_tables(tokens, int(self.target.config.vocab_size))

    def loss(self, batch: torch.Tensor, step: int, answers: torch.Tensor | None = None) -> LossAndParts:
        """Compute the loss of a batch [B, T + 1] in nats, and "first", that of first drafted tokens."""
        losses = []
        for k, (theirs, ours, prefers_drafted) in enumerate(self._steps(batch)):
            counted = prefers_drafted if answers is None else prefers_drafted & answers[:, 2 + k :]
            nats = F.cross_entropy(ours.flatten(0, 1), theirs.softmax(-1).flatten(0, 1), reduction="none")
            losses.append(mean_over(nats, counted.flatten()))
        weights = [DECAY**k for k in range(len(losses))]
        loss = torch.stack([weight * nats for weight, nats in zip(weights, losses, strict=True)]).sum() / sum(weights)
        return loss, {"first": float(losses[0].detach())}

    @torch.no_grad()
    def held_out(self, batch: torch.Tensor, answers: torch.Tensor | None = None) -> dict[str, float]:
        """divergence : KL(target || drafter) over the draft vocabulary, in nats, at first drafted tokens

        agreement : how often both prefer the same token there; agreement_i : at the i-th token of drafts of true text
        """
        figures = {}
        for depth, (theirs, ours, prefers_drafted) in enumerate(self._steps(batch)):
            counted = predicted(answers, 2 + depth)
            if depth == 0:
                figures["divergence"] = float(kl_nats(theirs, ours, counted))
            same = (ours.argmax(-1) == theirs.argmax(-1)) & prefers_drafted
            figures[f"agreement_{depth + 1}" if depth else "agreement"] = float(mean_over(same.double(), counted))
        return figures

    def _steps(self, batch: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield the target's and the drafter's logits of the draft vocabulary [B, T - 1 - k, n] for every draft step k.

        Beside them, bool [B, T - 1 - k], whether the target prefers a token of the draft vocabulary.
        """
        tokens, eagle = batch[:, :-1], self.module
        with torch.no_grad():
            states, theirs = states_and_logits(self.target, tokens, *eagle.states_after)
            preferred = theirs.argmax(-1)
            drafted = torch.ones_like(preferred, dtype=torch.bool)
            if eagle.tokens is not None:
                chosen = eagle.tokens.to(batch.device)
                drafted, theirs = torch.isin(preferred, chosen), theirs[..., chosen]
        for k, hidden in enumerate(unrolled(eagle, self.target, tokens, states, self.settings.draft_steps)):
            ours = eagle.lm_head(eagle.norm(hidden))
            yield wide(theirs[:, 1 + k :]), wide(ours), drafted[:, 1 + k :]


def unrolled(
    eagle: Eagle3, target: Any, tokens: torch.Tensor, states: torch.Tensor, steps: int
) -> Iterator[torch.Tensor]:
    """Yield the drafter's hidden states [B, T - 1 - k, d] of draft step k, from 0, of tokens [B, T].

    Row i of step k stands for token i + 1 + k of the text: after step 0, the k-th token behind a pending token i + 1.

    states : the target's [B, T, 3 d]
    """
    embedding, count = target.get_input_embeddings().weight, tokens.shape[1] - 1
    embedded = F.embedding(tokens[:, 1:], embedding)  # [B, T - 1, d]
    rotary = LlamaRotaryEmbedding(eagle.config).to(tokens.device)
    hidden = eagle.fc(states[:, :-1].to(embedded.dtype))  # [B, T - 1, d]
    cache, seen = DynamicCache(), torch.ones(count, count, dtype=torch.bool, device=tokens.device).tril_()
    own = torch.eye(count, dtype=torch.bool, device=tokens.device)
    for k in range(min(steps, count)):
        rows = count - k
        x = eagle.fused(embedded[:, k:], hidden[:, :rows])
        places = rotary(x, torch.arange(k + 1, count + 1, device=x.device)[None])
        sees = torch.cat([seen[:rows], *(own[:rows, : count - j] for j in range(1, k + 1))], dim=1)
        mask = torch.zeros(sees.shape, dtype=x.dtype, device=x.device).masked_fill_(~sees, torch.finfo(x.dtype).min)
        hidden = eagle.midlayer(x, attention_mask=mask[None, None], position_embeddings=places, past_key_values=cache)
        yield hidden


@dataclass(frozen=True)
class Eagle3Method(Method):
    """EAGLE-3, whose file also has the configuration of its layer."""

    layer: Eagle3 = field(kw_only=True)

    def as_dict(self) -> dict[str, Any]:
        return {**super().as_dict(), "config": dict(self.layer.config_json)}


def train_eagle3(pair: Pair, settings: Eagle3Settings, run: TextRun) -> TrainedOnText:
    """Train a drafter of the pair's target; see `train_on_text`."""
    Eagle3Kind.check_target(pair.target)
    job = Eagle3Training(pair.target, settings, run.loop.seed)
    return train_on_text(
        pair, Eagle3Method("eagle3", job.settings, EAGLE3_OBJECTIVE, layer=job.module), lambda: job, run
    )


EAGLE3 = Training(
    "eagle3",
    Eagle3Settings,
    train_eagle3,
    """Train EAGLE-3's drafter.

    Trains a layer on fused low, middle and high states of the target, unrolled on its own output, and a
    head of its own. Then `realrun record --drafter OUT`, or `realrun convert OUT checkpoint/` for vLLM and SGLang.

    Example: realrun train eagle3 --out eagle3 --tokens 2
    """,
)
