"""SAR-SFT: train a target to predict several tokens at once at mask tokens (Yi et al. 2024, 3.1).

    L_AR  = - sum_{t=1}^{N} log p(y_t | y_<t, X)
    L_SAR = - sum_{t=1}^{m} log p(y_t | y_<t, X) - sum_{j=1}^{k} log p(y_{m+j} | y_<m, j masks, X)

An example has the first loss with probability p_ar, otherwise the second, for m drawn from 1 .. N - k (per example,
C5). The last real token, y_{m-1}, predicts y_m and mask j predicts y_{m+j} (errata C3, C4). X is a question and Y its
answer in text that says which tokens are answers; in plain text, a window is an answer whose first token stands for X.

A window serves `examples` examples at once: its tokens pass through the model once, causally, followed by a group of k
masks for each m, which sees only y_<m and itself. This equals the separate examples because no real token sees a mask.
The sum of all losses is divided by examples and tokens of the batch, so that p_ar = 1 is the mean loss of plain
fine-tuning.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from realrun.drafters.space import MAX_MASKS, SpaceKind
from realrun.lm.cached import masks_of, window_of
from realrun.lm.variants import TUNED
from realrun.pairs.pair import Pair
from realrun.train.common.folder import Tensors
from realrun.train.common.loop import LossAndParts, ParameterGroup, wide
from realrun.train.common.lora import Adapter, AdapterSettings, check_adaptable
from realrun.train.common.on_text import (
    Method,
    TextRun,
    TrainedOnText,
    TunedTargetJob,
    cross_entropy_nats,
    mean_over,
    predicted,
    train_on_text,
)
from realrun.train.common.trainings import Training
from specsim.io.settings import Settings, setting

# Table 2 and section 4.1. The batch is 4 sequences on each of 8 GPUs (appendix A.1; no accumulation is printed), the
# window the longest source and the longest target.
PRINTED: dict[str, float | tuple[float, ...]] = {
    "full": True,
    "lr": 5e-5,
    "betas": (0.9, 0.999),
    "batch": 4 * 8,
    "window": 2048 + 2048,
    "epochs": 2.0,
    "masks": 5,
    "p_ar": 0.5,
}
OBJECTIVE = "cross-entropy with the text: of real tokens with probability p_ar, else of real tokens and masks"
CUTS = 16  # positions of a held-out window at which masks are evaluated


@dataclass(frozen=True)
class SpaceSettings(Settings):
    """Settings of SAR-SFT."""

    masks: int = setting(5, low=1, high=MAX_MASKS, doc="Number of mask tokens, the tokens proposed at once.")
    p_ar: float = setting(0.5, low=0, high=1, doc="Share of examples without masks.")
    full: bool = setting(False, doc="Train the whole target instead of a low-rank adapter.")
    lr: float | None = setting(
        None, above=0, doc="Peak learning rate (default: 1e-3; 2e-4 with --full)."
    )  # 5e-5 in the paper, for a 7B target
    examples: int = setting(16, low=1, doc="Positions of every window that get masks.")
    adapter: AdapterSettings = setting(AdapterSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr is None:
            object.__setattr__(self, "lr", 2e-4 if self.full else 1e-3)

    @property
    def decisive(self) -> dict[str, Any]:
        """Select the settings that influence the result."""
        return {name: value for name, value in asdict(self).items() if not (self.full and name == "adapter")}


def train_space(pair: Pair, settings: SpaceSettings, run: TextRun) -> TrainedOnText:
    """Tune the pair's target with a mask token; see `train_on_text`.

    The held-out figures are those of the target rounded to `run.stored`. Raises InputError if peft is missing, the
    target cannot be adapted, or `train_on_text` raises it.
    """
    SpaceKind.check_target(pair.target)
    if not settings.full:
        check_adaptable(pair.target, settings.adapter)
    method = SpaceMethod("space", settings, OBJECTIVE, ahead=settings.masks)
    return train_on_text(pair, method, lambda: MaskTraining(pair.target, settings, run.loop.seed, run.stored), run)


@dataclass(frozen=True)
class SpaceMethod(Method):
    """SPACE's fine-tuning (SAR-SFT); its plan names the type to which figures of held-out text are rounded."""

    settings: SpaceSettings

    def plan_as_dict(self, run: TextRun) -> dict[str, Any]:
        return {"stored": run.stored_name, **self.settings.decisive}

    def as_dict(self) -> dict[str, Any]:
        settings = self.settings
        adapter = {} if settings.full else {"adapter": settings.adapter.size_as_dict()}
        return {"masks": settings.masks, **adapter, "method": self.name, "settings": settings.decisive}


class MaskTraining(TunedTargetJob):
    """Trains the mask token and the target.

    An adapted target carries its adapter until `close`; a target that is trained whole is a copy.

    stored : the type that figures of held-out text are rounded to
    """

    def __init__(self, target: Any, settings: SpaceSettings, seed: int = 0, stored: torch.dtype = torch.bfloat16):
        self.original, self.settings, self.stored = target, settings, stored
        rows = target.get_input_embeddings().weight.detach()
        kind = torch.float32 if rows.dtype.itemsize < 4 else rows.dtype
        noise = torch.randn(rows.shape[1], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.mask = (noise.to(rows.device) * rows.double().std()).to(kind).requires_grad_(True)
        self.adapter: Adapter | None = None
        if settings.full:
            self.model = copy.deepcopy(target).requires_grad_(True)
            if target.dtype.itemsize < 4:
                self.model.float()
        else:
            self.model, self.adapter = target, Adapter(target, settings.adapter, seed)

    def close(self) -> None:
        if self.adapter is not None:
            self.adapter.remove()

    def parameter_groups(self) -> list[ParameterGroup]:
        assert self.settings.lr is not None
        return [ParameterGroup(list(self.state().values()), self.settings.lr)]

    def state(self) -> Tensors:
        """Collect the trained tensors by their names in a drafter's file."""
        if self.adapter is not None:
            return {"mask": self.mask, **self.adapter.tensors()}
        return {"mask": self.mask, **{f"{TUNED}{name}": value for name, value in self.model.named_parameters()}}

    def loss(self, batch: torch.Tensor, step: int, answers: torch.Tensor | None = None) -> LossAndParts:
        """Compute the loss of a batch [B, T + 1]; "text" and "masks", means in nats per predicted token."""
        total = batch.shape[1] - 1
        cuts = self._draw(len(batch), total, answers).to(batch.device)
        with self.adapter.dropping() if self.adapter is not None else nullcontext():
            logits, masked = self._pass(batch[:, :-1], cuts)  # [B, T, V], [B, E, k, V]
        # Of a real token: how many of its window's examples have it among what they predict.
        last = torch.where(cuts > 0, cuts, total)  # [B, E]
        counts = (torch.arange(total, device=batch.device) < last[..., None]).sum(1)  # [B, T]
        predictions = len(batch) * total
        if answers is not None:
            counts, predictions = counts * answers[:, 1:], max(1, int(answers[:, 1:].sum()))
        text = F.cross_entropy(wide(logits).flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
        nats = (text * counts.flatten()).sum()
        parts = {"text": float(nats.detach() / counts.sum().clamp(min=1))}
        if self.settings.p_ar < 1:
            parts["masks"] = 0.0  # where a batch happens to have none
        if masked is not None:
            labels = mask_labels(batch, cuts, self.settings.masks)  # [B, E, k]
            mask_nats = F.cross_entropy(wide(masked).flatten(0, 2), labels.flatten(), reduction="none")
            drawn = (cuts > 0)[..., None].expand(labels.shape).flatten()
            parts["masks"] = float((mask_nats.detach() * drawn).sum() / drawn.sum())
            nats = nats + (mask_nats * drawn).sum()
        return nats / cuts.shape[1] / predictions, parts

    @torch.no_grad()
    def held_out(self, batch: torch.Tensor, answers: torch.Tensor | None = None) -> dict[str, float]:
        """Compute figures of the target with its weights rounded as in the file.

        original, tuned : cross-entropy with the text in nats, before and after
        mask_j, mask_j_text, mask_j_agreement : cross-entropy of mask j with the text in nats, how often it prefers
            the text's token, and how often what the tuned target itself prefers there; at CUTS places of each window
        """
        total, masks = batch.shape[1] - 1, self.settings.masks
        places = torch.linspace(1, total - masks, CUTS).round().long().unique()
        cuts = places.expand(len(batch), -1).to(batch.device)
        # Of a mask, as of its label: whether the example's y_m .. y_{m+k} are an answer's, bool [B, E].
        inside = None if answers is None else answer_cuts(answers, masks).gather(1, cuts)
        with nullcontext() if self.adapter is None else self.adapter.off():
            original = self.original(input_ids=batch[:, :-1], use_cache=False).logits
        with self.as_stored():
            logits, masked = self._pass(batch[:, :-1], cuts)
        assert masked is not None
        figures = {
            "original": cross_entropy_nats(original, batch[:, 1:], predicted(answers)),
            "tuned": cross_entropy_nats(logits, batch[:, 1:], predicted(answers)),
        }
        guess, labels = masked.argmax(-1), mask_labels(batch, cuts, masks)
        preferred = mask_labels(F.pad(logits.argmax(-1), (1, 0)), cuts, masks)
        for j in range(masks):
            figures[f"mask_{j + 1}"] = cross_entropy_nats(masked[:, :, j], labels[:, :, j], inside)
            figures[f"mask_{j + 1}_text"] = mean_over((guess == labels)[:, :, j].double(), inside)
            figures[f"mask_{j + 1}_agreement"] = mean_over((guess == preferred)[:, :, j].double(), inside)
        return {name: float(value) for name, value in figures.items()}

    def _draw(self, windows: int, total: int, answers: torch.Tensor | None = None) -> torch.Tensor:
        """Draw m [windows, examples], int64, from 1 .. total - k; 0 for examples with the autoregressive loss.

        answers : bool [windows, total + 1]; y_m .. y_{m+k} are then tokens of an answer. Windows without such have 0
        """
        shape, settings = (windows, self.settings.examples), self.settings
        autoregressive = torch.rand(shape) < settings.p_ar
        if answers is None:
            return torch.randint(1, total - settings.masks + 1, shape).masked_fill(autoregressive, 0)
        possible = answer_cuts(answers.cpu(), settings.masks)
        none = ~possible.any(1, keepdim=True)
        drawn = torch.multinomial((possible | none).double(), settings.examples, replacement=True)
        return drawn.masked_fill(autoregressive | none, 0)

    def _pass(self, tokens: torch.Tensor, cuts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute logits [B, T, V] of tokens [B, T], and [B, E, k, V] of the masks in place of y_m and on, m = cuts.

        Without any m there are no masks; results for an m of 0 are meaningless.
        """
        if not bool(cuts.any()):
            return self.model(input_ids=tokens, use_cache=False).logits, None
        embedded = self.model.get_input_embeddings()(tokens)
        groups, masks, total = cuts.shape[1], self.settings.masks, tokens.shape[1]
        asked = self.mask.to(embedded.dtype)
        if (scale := getattr(self.model.get_input_embeddings(), "embed_scale", None)) is not None:
            asked = asked * scale.to(embedded.dtype)  # as Gemma's does with every token
        asked = asked.expand(len(tokens), groups * masks, -1)
        at = (cuts[..., None] + torch.arange(masks, device=cuts.device)).flatten(1)
        positions = torch.cat([torch.arange(total, device=cuts.device).expand(len(tokens), -1), at], dim=1)
        seen, window = group_mask(cuts, masks, total, embedded.dtype), window_of(self.model.config)
        logits = self.model(
            inputs_embeds=torch.cat([embedded, asked], dim=1),
            position_ids=positions,
            attention_mask=masks_of(self.model.config, window, seen, positions, positions),
            use_cache=False,
        ).logits
        return logits[:, :total], logits[:, total:].unflatten(1, (groups, masks))


def answer_cuts(answers: torch.Tensor, masks: int) -> torch.Tensor:
    """Mark each m, bool [B, T + 1 - k], for which y_m .. y_{m+k} are tokens of an answer [B, T + 1]; never m = 0."""
    whole = answers.unfold(1, masks + 1, 1).all(-1)
    whole[:, 0] = False
    return whole


def group_mask(cuts: torch.Tensor, masks: int, total: int, dtype: torch.dtype) -> torch.Tensor:
    """Make the additive attention mask [B, 1, n, n] of T tokens and E groups of k masks behind: n = T + E k.

    Tokens see each other causally. Masks of the group with cut m see the first m tokens of the window, which are X
    and y_<m, and the masks before them in the group.
    """
    device, (windows, groups) = cuts.device, cuts.shape
    causal = torch.ones(total, total, dtype=torch.bool, device=device).tril()  # [T, T]
    real = F.pad(causal, (0, groups * masks)).expand(windows, -1, -1)  # [B, T, n], rows of tokens
    before = (torch.arange(total, device=device) < cuts[..., None]).repeat_interleave(masks, dim=1)  # [B, E k, T]
    own = torch.ones(masks, masks, dtype=torch.bool, device=device).tril()
    group = torch.block_diag(*[own] * groups).bool().expand(windows, -1, -1)  # [B, E k, E k]
    seen = torch.cat([real, torch.cat([before, group], dim=2)], dim=1)  # [B, n, n]
    additive = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, torch.finfo(dtype).min)
    return additive[:, None]


def mask_labels(batch: torch.Tensor, cuts: torch.Tensor, masks: int) -> torch.Tensor:
    """Look up y_{m + j} [B, E, k] of windows [B, T + 1], whose first token is X, for m = cuts [B, E], j = 1 .. k."""
    at = cuts[..., None] + torch.arange(1, masks + 1, device=batch.device)
    return batch.gather(1, at.flatten(1)).view(at.shape)


SPACE = Training(
    "space",
    SpaceSettings,
    train_space,
    """Train SPACE: a target with mask tokens.

    The masks propose its next tokens. The target itself is tuned, so its output changes; --p-ar 1 is plain fine-tuning,
    for comparison. Then `realrun record --drafter OUT`. Needs peft unless --full.

    Example: realrun train space --out space5 --masks 5 --tokens 2
    """,
    printed=lambda **_: PRINTED,
)
