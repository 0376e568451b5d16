"""Train MEDUSA: K heads on the last state of the target (Cai et al. 2024).

MEDUSA-1 keeps the target frozen (3.2.1):

    L = sum_{k=1}^{K} 0.8^k L_k,      L_k = -log p_t^(k)(y_{t+k+1})

The paper prints the total without its minus (errata E2). Labels are the text's tokens, a share of which the target has
written (3.3.2). The optimizer is plain AdamW; the paper's is 8-bit.

MEDUSA-2 trains heads and backbone together (3.2.2, 3.3.2, 4.0.1):

    L = L_LM + lambda_0 sum_{k=1}^{K} 0.8^k L_k

L_LM preserves the backbone: the cross-entropy -log p_t^(0)(y_{t+1}) with the text, or, if the target wrote the text,
KL(p_original || p) with the same model, its adapter off. The backbone is tuned by a low-rank adapter, at a quarter of
the heads' learning rate. There are three schedules: in two stages, the heads are first trained as MEDUSA-1 (errata
E5); in a single stage, the weight lambda_0 of the heads' loss rises as a sine to its peak at the end (E6); direct,
fresh heads have full weight from the first step, which is the paper's baseline (4.3.3). Differences from the paper: the
backbone is not quantised, and a tied head has no adapter (`realrun.train.common.lora`).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F

from realrun.drafters.kind import DRAFT_TOKENS
from realrun.drafters.medusa import MedusaHeads, MedusaKind
from realrun.lm.variants import without_head
from realrun.pairs.drafter_files import describe_target, load_drafter, training_recipe, weights_digest
from realrun.pairs.pair import Pair
from realrun.train.common.folder import Tensors, refuse_another
from realrun.train.common.loop import LossAndParts, ParameterGroup, Tokens
from realrun.train.common.lora import Adapter, AdapterSettings, check_adaptable
from realrun.train.common.on_text import (
    OWN_OR_TARGETS_HEAD,
    Method,
    ModuleJob,
    TextRun,
    TrainedOnText,
    TunedTargetJob,
    agreement,
    cross_entropy_nats,
    kl_nats,
    mean_over,
    predicted,
    train_on_text,
)
from realrun.train.common.trainings import Training
from specsim.io.errors import InputError
from specsim.io.settings import Settings, setting

OBJECTIVE = "sum over heads k of decay^k x cross-entropy with the text's token k + 1 ahead"
Loss = Literal["text", "distill"]
OBJECTIVES = {
    "text": "the backbone's cross-entropy with the text + lambda_0 x the heads' loss of MEDUSA-1",
    "distill": "KL(original || backbone) + lambda_0 x the heads' loss of MEDUSA-1",
}


@dataclass(frozen=True)
class MedusaSettings(Settings):
    """Settings of MEDUSA-1's heads."""

    heads: int = setting(5, low=1, high=16, doc="Number of heads K; head k drafts the k-th token ahead.")
    lr: float = setting(3e-3, above=0, doc="Peak learning rate.")
    decay: float = setting(0.8, above=0, doc="Weight of head k's loss is this number to the power k.")
    draft_vocabulary: int | None = setting(None, low=1, doc=OWN_OR_TARGETS_HEAD)


class HeadsTraining(ModuleJob):
    """Trains MEDUSA-1's heads; the target is frozen."""

    def __init__(self, target: Any, settings: MedusaSettings):
        shared = settings.draft_vocabulary is not None
        super().__init__(target, MedusaHeads(target, settings.heads, shared), settings.lr)
        self.heads, self.settings, self.draft_vocabulary = self.module, settings, settings.draft_vocabulary

    def loss(self, batch: torch.Tensor, step: int, answers: torch.Tensor | None = None) -> LossAndParts:
        """Compute L of a batch [B, T + 1], and "head_1" to "head_K", in nats per token."""
        losses = head_losses(self.heads, self._states(batch), batch, answers)
        total = torch.stack([self.settings.decay**k * loss for k, loss in enumerate(losses, start=1)]).sum()
        return total, {f"head_{k}": float(loss.detach()) for k, loss in enumerate(losses, start=1)}

    @torch.no_grad()
    def held_out(self, batch: torch.Tensor, answers: torch.Tensor | None = None) -> dict[str, float]:
        """head_k, its loss in nats; head_k_agreement, how often it prefers what the target itself prefers k later."""
        hidden = self._states(batch)
        preferred = self.target.get_output_embeddings()(hidden).argmax(-1)
        figures = {}
        for k, logits in enumerate(head_logits(self.heads, hidden), start=1):
            labels, counted = batch[:, k + 1 :], predicted(answers, k + 1)
            figures[f"head_{k}"] = float(cross_entropy_nats(logits, labels, counted))
            same = (logits.argmax(-1) == preferred[:, k:]).double()
            figures[f"head_{k}_agreement"] = float(mean_over(same, counted))
        return figures

    @torch.no_grad()
    def _states(self, batch: torch.Tensor) -> torch.Tensor:
        """Compute the target's states [B, T, d] after its final norm, at the first T tokens of a batch [B, T + 1]."""
        states: torch.Tensor = without_head(self.target)(input_ids=batch[:, :-1], use_cache=False).last_hidden_state
        return states


def head_logits(heads: MedusaHeads, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
    """Compute logits [B, T - k, V] of head k = 1 .. K at the states [B, T, d] that have a text token k + 1 later."""
    vocabularies = heads.vocabulary.expand(len(heads), -1, -1)
    for k, (residual, vocabulary) in enumerate(zip(heads.residual, vocabularies, strict=True), start=1):
        source = hidden[:, : hidden.shape[1] - k]
        yield F.linear(F.silu(F.linear(source, residual)) + source, vocabulary)


def head_losses(
    heads: MedusaHeads, hidden: torch.Tensor, batch: torch.Tensor, answers: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Compute L_k of head k = 1 .. K, means in nats, at the states [B, T, d] of a batch [B, T + 1]."""
    return [
        cross_entropy_nats(logits, batch[:, k + 1 :], predicted(answers, k + 1))
        for k, logits in enumerate(head_logits(heads, hidden), start=1)
    ]


def train_medusa(pair: Pair, settings: MedusaSettings, run: TextRun) -> TrainedOnText:
    """Train heads on the pair's target; see `train_on_text`."""
    job = HeadsTraining(pair.target, settings)
    method = Method("medusa-1", settings, OBJECTIVE, "medusa", settings.heads)
    return train_on_text(pair, method, lambda: job, run)


@dataclass(frozen=True)
class Medusa2Settings(Settings):
    """Settings of the joint training. Defaults follow from the loss as in the paper (4.1.1 and 4.2.1).

    loss : of the backbone: "text" for cross-entropy with the text, "distill" for KL from the original
    lambda_0 : weight of the heads' loss, at its peak; 0.2 beside "text", 0.01 beside "distill"
    schedule : "constant" lambda_0, for heads that were trained before, or "sine", rising to it
    backbone_lr : peak of the adapter's learning rate; 5e-4 beside "text", 1e-4 beside "distill"
    heads_lr_factor : the heads' learning rate over the adapter's
    decay : lambda_k = decay^k
    adapter : the backbone's low-rank adapter
    """

    loss: Loss = setting("distill")
    lambda_0: float | None = setting(None, above=0)
    schedule: Literal["constant", "sine"] = setting("constant")
    backbone_lr: float | None = setting(None, above=0)
    heads_lr_factor: float = setting(4.0, above=0)
    decay: float = setting(0.8, above=0)
    adapter: AdapterSettings = setting(AdapterSettings)

    def __post_init__(self) -> None:
        super().__post_init__()
        text = self.loss == "text"
        if self.lambda_0 is None:
            object.__setattr__(self, "lambda_0", 0.2 if text else 0.01)
        if self.backbone_lr is None:
            object.__setattr__(self, "backbone_lr", 5e-4 if text else 1e-4)

    def heads_weight(self, step: int, steps: int) -> float:
        """Compute lambda_0 at this step, from 0, of `steps`."""
        assert self.lambda_0 is not None
        return self.lambda_0 * (math.sin(math.pi / 2 * (step + 1) / steps) if self.schedule == "sine" else 1.0)


def train_medusa2(
    pair: Pair,
    heads: MedusaHeads,
    settings: Medusa2Settings,
    run: TextRun,
    first_stage: Path | None = None,
) -> TrainedOnText:
    """Train heads and the target's adapter jointly, starting from these heads; see `train_on_text`.

    pair : only its target and tokenizer are used; the target is restored afterwards
    heads : heads of MEDUSA-1, or fresh heads with a sine schedule; a copy of them is trained
    run : text, loop and folder. The held-out figures are those of the drafter rounded to `run.stored`
    first_stage : folder of the heads, if they were trained

    Raises InputError if peft is missing, the target cannot be adapted, or `train_on_text` raises it.
    """
    check_adaptable(pair.target, settings.adapter)
    method = Medusa2Method(
        "medusa-2", settings, OBJECTIVES[settings.loss], "medusa", len(heads), heads=heads, first_stage=first_stage
    )
    return train_on_text(
        pair,
        method,
        lambda: JointTraining(pair.target, heads, settings, run.loop.steps, run.loop.seed, run.stored),
        run,
    )


@dataclass(frozen=True)
class Medusa2Method(Method):
    """MEDUSA-2 from these heads. first_stage : their folder, if they were trained"""

    settings: Medusa2Settings
    heads: MedusaHeads = field(kw_only=True)
    first_stage: Path | None = field(kw_only=True)

    def plan_as_dict(self, run: TextRun) -> dict[str, Any]:
        return {"start": weights_digest(self.heads), "stored": run.stored_name, **asdict(self.settings)}

    def as_dict(self) -> dict[str, Any]:
        return {
            "heads": len(self.heads),
            "adapter": self.settings.adapter.size_as_dict(),
            "method": self.name,
            "settings": asdict(self.settings),
            "first_stage": None if self.first_stage is None else training_recipe(self.first_stage),
        }


class JointTraining(TunedTargetJob):
    """Trains MEDUSA-2's heads and adapter. The target carries the adapter until `close`.

    stored : the type that figures of held-out text are rounded to
    """

    def __init__(
        self,
        target: Any,
        heads: MedusaHeads,
        settings: Medusa2Settings,
        steps: int,
        seed: int = 0,
        stored: torch.dtype = torch.bfloat16,
    ):
        self.target, self.settings, self.steps, self.stored = target, settings, steps, stored
        self.heads = copy.deepcopy(heads)
        self.drafted = heads.tokens
        if self.drafted is not None:  # the losses are over all tokens
            whole = MedusaHeads(target, len(heads), shared=True)
            whole.residual = self.heads.residual
            self.heads = whole
        if self.heads.residual.dtype.itemsize < 4:
            self.heads.float()
        self.heads.requires_grad_(True)
        self.adapter = Adapter(target, settings.adapter, seed)

    def parameter_groups(self) -> list[ParameterGroup]:
        assert self.settings.backbone_lr is not None
        lr = self.settings.backbone_lr
        return [
            ParameterGroup(list(self.adapter.tensors().values()), lr),
            ParameterGroup(list(self.heads.parameters()), lr * self.settings.heads_lr_factor),
        ]

    def loss(self, batch: torch.Tensor, step: int, answers: torch.Tensor | None = None) -> LossAndParts:
        """Compute L of a batch [B, T + 1], and "backbone" and "head_1" to "head_K", in nats per token."""
        with self.adapter.dropping():
            logits, hidden = self._pass(batch[:, :-1])
        if self.settings.loss == "distill":
            backbone = kl_nats(self._original(batch[:, :-1]), logits, predicted(answers))
        else:
            backbone = cross_entropy_nats(logits, batch[:, 1:], predicted(answers))
        heads = head_losses(self.heads, hidden.to(self.heads.residual.dtype), batch, answers)
        joint = torch.stack([self.settings.decay**k * loss for k, loss in enumerate(heads, start=1)]).sum()
        parts = {"backbone": backbone, **{f"head_{k}": loss for k, loss in enumerate(heads, start=1)}}
        total = backbone + self.settings.heads_weight(step, self.steps) * joint
        return total, {name: float(part.detach()) for name, part in parts.items()}

    def state(self) -> Tensors:
        """Collect the trained tensors by their names in a drafter's file."""
        return dict(self.heads.named_parameters()) | self.adapter.tensors()

    def chosen(self, text: Sequence[tuple[Tokens, float]]) -> Tensors:
        """Return the tokens that the heads drafted at the start."""
        return {} if self.drafted is None else {DRAFT_TOKENS: self.drafted.to(torch.int32)}

    def close(self) -> None:
        self.adapter.remove()

    @torch.no_grad()
    def held_out(self, batch: torch.Tensor, answers: torch.Tensor | None = None) -> dict[str, float]:
        """Compute figures of the drafter with its weights rounded as in the file.

        original, backbone : cross-entropy with the text in nats, adapter off and on
        divergence, agreement : KL(original || backbone) in nats, and how often both prefer the same token
        head_k, head_k_text, head_k_agreement : cross-entropy of head k with the text in nats, how often it
            prefers the text's token, and how often what the backbone itself prefers k tokens later
        """
        with self.as_stored():
            logits, hidden = self._pass(batch[:, :-1])
            original = self._original(batch[:, :-1])
            preferred = logits.argmax(-1)
            figures = {
                "original": cross_entropy_nats(original, batch[:, 1:], predicted(answers)),
                "backbone": cross_entropy_nats(logits, batch[:, 1:], predicted(answers)),
                "divergence": kl_nats(original, logits, predicted(answers)),
                "agreement": agreement(logits, original, predicted(answers)),
            }
            for k, head in enumerate(head_logits(self.heads, hidden.to(self.heads.residual.dtype)), start=1):
                guess, labels, counted = head.argmax(-1), batch[:, k + 1 :], predicted(answers, k + 1)
                figures[f"head_{k}"] = cross_entropy_nats(head, labels, counted)
                figures[f"head_{k}_text"] = mean_over((guess == labels).double(), counted)
                figures[f"head_{k}_agreement"] = mean_over((guess == preferred[:, k:]).double(), counted)
        return {name: float(value) for name, value in figures.items()}

    def _pass(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the backbone's logits [B, T, V] and the input of its head [B, T, d]."""
        fed: list[torch.Tensor] = []
        head = self.target.get_output_embeddings()
        hook = head.register_forward_pre_hook(lambda module, arguments: fed.append(arguments[0]))
        try:
            logits = self.target(input_ids=tokens, use_cache=False).logits
        finally:
            hook.remove()
        return logits, fed[0]

    @torch.no_grad()
    def _original(self, tokens: torch.Tensor) -> torch.Tensor:
        with self.adapter.off():
            logits: torch.Tensor = self.target(input_ids=tokens, use_cache=False).logits
        return logits


@dataclass(frozen=True)
class MedusaCommand(MedusaSettings):
    """Options of MEDUSA-1, and with `joint` of MEDUSA-2."""

    joint: bool = setting(False, doc="MEDUSA-2: train the target too, through a low-rank adapter. Needs peft.")
    one_stage: bool = setting(
        False,
        doc="With --joint: start from fresh heads; the weight of their loss rises as a sine.",
    )
    direct: bool = setting(
        False,
        doc="With --joint: start from fresh heads at full weight (the paper's direct fine-tuning).",
    )
    heads_from: Path | None = setting(
        None, doc="With --joint: MEDUSA-1 drafter to start from (default: trained in OUT/heads)."
    )
    joint_tokens: float | None = setting(
        None, low=0, smoke=None, doc="With --joint: million tokens of the joint stage (default: --tokens)."
    )
    backbone_loss: Loss = setting(
        "distill", doc="With --joint: loss that keeps the target near itself (distill) or the text."
    )
    lambda_0: float | None = setting(
        None,
        above=0,
        doc="With --joint: weight of the heads' loss (default: 0.01 with distill, 0.2 with text).",
    )
    backbone_lr: float | None = setting(
        None,
        above=0,
        doc="With --joint: peak learning rate of the adapter; 4 times that for heads (default: 1e-4; 5e-4 with text).",
    )
    rank: int = setting(AdapterSettings().rank, low=1, doc="With --joint: rank of the adapter.")

    def __post_init__(self) -> None:
        super().__post_init__()
        stage = (self.one_stage, self.direct, self.heads_from, self.joint_tokens, self.lambda_0, self.backbone_lr)
        if any(stage) and not self.joint:
            raise InputError(
                "--one-stage, --direct, --heads-from, --joint-tokens, --lambda-0 and --backbone-lr go with --joint"
            )
        if self.draft_vocabulary is not None and self.joint:
            raise InputError("--draft-vocabulary goes with MEDUSA-1; leave it out, or --joint")
        if self.one_stage and self.direct:
            raise InputError("--one-stage raises the weight of fresh heads, --direct does not; give only one")
        if self.fresh and self.heads_from is not None:
            option = "--one-stage" if self.one_stage else "--direct"
            raise InputError(f"{option} starts from fresh heads; leave out --heads-from, or {option}")

    @property
    def fresh(self) -> bool:
        """Check whether the joint stage starts from fresh heads."""
        return self.one_stage or self.direct

    @property
    def first(self) -> MedusaSettings:
        return MedusaSettings(self.heads, self.lr, self.decay, self.draft_vocabulary)

    @property
    def second(self) -> Medusa2Settings:
        schedule: Literal["constant", "sine"] = "sine" if self.one_stage else "constant"
        adapter = AdapterSettings(self.rank)
        return Medusa2Settings(
            self.backbone_loss, self.lambda_0, schedule, self.backbone_lr, decay=self.decay, adapter=adapter
        )


def train_either(pair: Pair, settings: MedusaCommand, run: TextRun) -> TrainedOnText:
    """Train MEDUSA-1, or MEDUSA-2: in two stages, in a single stage, or direct."""
    if not settings.joint:
        return train_medusa(pair, settings.first, run)
    check_adaptable(pair.target, settings.second.adapter)  # before heads are trained
    loop = run.loop if settings.joint_tokens is None else run.loop.lasting(settings.joint_tokens * 1e6)
    described = describe_target(pair.target, pair.target_name)
    plan = {"drafter": "medusa-2", "target": described, **asdict(settings.second), **loop.decisive}
    refuse_another(run.out, plan)  # before heads are trained
    run = replace(run, cache=run.cache or run.out)
    first_stage = None
    if settings.fresh:
        heads = MedusaHeads(pair.target, settings.heads)
    else:
        folder = settings.heads_from
        if folder is None:
            folder = run.out / "heads"
            train_medusa(pair, settings.first, replace(run, out=folder))
        tuned, start = load_drafter(folder, pair.target)
        if not isinstance(start, MedusaKind) or tuned is not pair.target:
            raise InputError(f"{folder} holds no MEDUSA-1 drafter; train it with `realrun train medusa`")
        heads, first_stage = start.heads, folder
    return train_medusa2(pair, heads, settings.second, replace(run, loop=loop), first_stage)


def printed(joint: bool = False, backbone_loss: Loss = "distill", **_: Any) -> dict[str, float]:
    """Give the options that the paper prints: 4.1.1 for heads and for MEDUSA-2 on a text, 4.2.1 on the target's own."""
    heads = {"heads": 5, "decay": 0.8, "lr": 2e-3}
    if joint and backbone_loss == "distill":
        own = {"lambda_0": 0.01, "backbone_lr": 1e-4, "warmup": 20, "batch": 128, "window": 2048}
        return {**heads, "rank": 32, **own}
    tuned = {"rank": 32, "lambda_0": 0.2, "backbone_lr": 5e-4} if joint else {}
    return {**heads, **tuned, "warmup": 40, "batch": 64, "window": 4096, "epochs": 2.0}


MEDUSA = Training(
    "medusa",
    MedusaCommand,
    train_either,
    """Train MEDUSA-1's or MEDUSA-2's heads.

    The heads read the target's last state. MEDUSA-1 freezes the target; --joint is MEDUSA-2, which
    trains it too. Then `realrun record --drafter OUT`.

    Example: realrun train medusa --out heads5 --heads 5 --tokens 1
    """,
    defaults={"tokens": 1.0},
    printed=printed,
)
