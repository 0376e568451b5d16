"""Train the acceptance predictor of EESD Eq. 5 on the samples of `predictor_data`.

The factors W^1..W^M and W_p are trained as the paper has them, with cross-entropy; one logit
and a sigmoid stand for its two rows (errata A11), with a bias, and inputs are standardised.
The product is taken from the left, W_p W^i first, which changes no value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file

from realrun.decode.acceptance_predictor import FILE, MAX_MATRICES, Predictor, save_predictor
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt, prompt_digest
from realrun.provenance import provenance
from realrun.training.common.loop import claim
from realrun.training.predictor.data import (
    PARTS,
    PredictorSettings,
    Samples,
    Tensors,
    collect_all,
    joined,
    save_tensors,
)
from specsim.arrays import Floats
from specsim.errors import InputError
from specsim.progress import Progress
from specsim.speedup.formulas import reliability

CHECKPOINT, COLLECTED = "checkpoint.safetensors", "collected"


class FactorisedPredictor(torch.nn.Module):
    """W^1..W^M [M, d_D, d_T], W_p as target_readout and draft_readout [d_D], a bias, and the inputs' scales."""

    target_mean: torch.Tensor
    target_scale: torch.Tensor
    draft_mean: torch.Tensor
    draft_scale: torch.Tensor

    def __init__(self, matrices: int, d_target: int, d_draft: int, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int, scale: float) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=generator) * scale)

        self.matrices = normal(matrices, d_draft, d_target, scale=d_target**-0.5)
        self.target_readout = normal(d_draft, scale=0.5 * d_draft**-0.5)
        self.draft_readout = normal(d_draft, scale=0.5 * d_draft**-0.5)
        self.bias = torch.nn.Parameter(torch.zeros(()))
        for name, size in (("target", d_target), ("draft", d_draft)):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_scale", torch.ones(size))

    def standardise(self, target_hidden: torch.Tensor, draft_hidden: torch.Tensor) -> None:
        """Take the scales from these states."""
        for name, hidden in (("target", target_hidden.float()), ("draft", draft_hidden.float())):
            getattr(self, f"{name}_mean").copy_(hidden.mean(0))
            getattr(self, f"{name}_scale").copy_(hidden.std(0, correction=0).clamp_min(1e-6))

    def fold(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """target_weight [M, d_T], draft_weight [d_D], bias [M] of a `Predictor`."""
        target_weight = torch.einsum("d,mdt->mt", self.target_readout, self.matrices) / self.target_scale
        draft_weight = self.draft_readout / self.draft_scale
        bias = self.bias - target_weight @ self.target_mean - draft_weight @ self.draft_mean
        return target_weight, draft_weight, bias

    def forward(self, target_hidden: torch.Tensor, draft_hidden: torch.Tensor, depth: torch.Tensor) -> torch.Tensor:
        """Logits [n] of samples with states [n, d_T] and [n, d_D] at depths [n] from 1."""
        target_weight = torch.einsum("d,mdt->mt", self.target_readout, self.matrices)
        target = (target_hidden - self.target_mean) / self.target_scale
        draft = (draft_hidden - self.draft_mean) / self.draft_scale
        chosen = target_weight[depth.clamp_max(len(self.matrices)) - 1]
        return torch.linalg.vecdot(target, chosen) + draft @ self.draft_readout + self.bias


class Trainer:
    """AdamW with a checkpoint after every epoch: a run that was killed goes on and ends with the same weights."""

    def __init__(self, samples: Samples, settings: PredictorSettings, checkpoint: Path, device: torch.device):
        self.samples, self.settings, self.path, self.device = samples, settings, checkpoint, device
        self.model = FactorisedPredictor(
            min(MAX_MATRICES, settings.depth),
            samples.target_hidden.shape[1],
            samples.draft_hidden.shape[1],
            settings.seed,
        ).to(device)
        train = samples.part("train")
        rounds = samples.round[train[samples.depth[train] == 1]]
        self.model.standardise(samples.target_hidden[rounds], samples.draft_hidden[train])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
        self.history: list[dict[str, float]] = []
        self.best = self._weights()
        if checkpoint.exists():
            self._resume()

    @property
    def finished(self) -> bool:
        losses = [row["validation_nats"] for row in self.history]
        since_best = len(losses) - 1 - int(np.argmin(losses)) if losses else 0
        return len(losses) >= self.settings.epochs or since_best >= self.settings.patience

    def run(self, progress: Progress) -> None:
        while not self.finished:
            row = {"train_nats": self._epoch(len(self.history)), "validation_nats": self.loss("validation")}
            if not self.history or row["validation_nats"] < min(r["validation_nats"] for r in self.history):
                self.best = self._weights()
            self.history.append(row)
            self._checkpoint()
            progress("train", len(self.history), self.settings.epochs)
        progress("train", self.settings.epochs, self.settings.epochs)

    def logits(self, indices: torch.Tensor) -> torch.Tensor:
        s = self.samples
        return self.model(
            s.target_hidden[s.round[indices]].to(self.device).float(),
            s.draft_hidden[indices].to(self.device).float(),
            s.depth[indices].to(self.device),
        )

    def _epoch(self, epoch: int) -> float:
        """One pass over the training samples, in an order that seed and epoch decide; mean loss in nats."""
        train = self.samples.part("train")
        order = train[torch.from_numpy(np.random.default_rng((self.settings.seed, epoch)).permutation(len(train)))]
        total = 0.0
        for indices in order.split(self.settings.batch):
            labels = self.samples.label[indices].to(self.device).float()
            loss = F.binary_cross_entropy_with_logits(self.logits(indices), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += float(loss.detach()) * len(indices)
        return total / len(train)

    @torch.no_grad()
    def loss(self, part: str) -> float:
        """Mean loss in nats over one part of the samples."""
        indices = self.samples.part(part)
        labels = self.samples.label.float()
        total = 0.0
        for chunk in indices.split(16384):
            loss = F.binary_cross_entropy_with_logits(self.logits(chunk).cpu(), labels[chunk], reduction="sum")
            total += float(loss)
        return total / len(indices)

    def folded(self, facts: Mapping[str, Any]) -> Predictor:
        """The predictor of the best epoch; folded in float64."""
        model = FactorisedPredictor(*self.model.matrices.shape[:1], *self.model.matrices.shape[:0:-1])
        model.load_state_dict(self.best)
        with torch.no_grad():
            target_weight, draft_weight, bias = model.double().fold()
        return Predictor(target_weight, draft_weight, bias, dict(facts))

    def _weights(self) -> Tensors:
        return {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}

    def _checkpoint(self) -> None:
        tensors = {f"model.{name}": value for name, value in self._weights().items()}
        tensors |= {f"best.{name}": value for name, value in self.best.items()}
        for index, slots in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{slot}": torch.as_tensor(value).cpu() for slot, value in slots.items()}
        save_tensors(tensors, self.path, {"history": json.dumps(self.history)})

    def _resume(self) -> None:
        tensors = load_file(self.path, device=str(self.device))

        def under(prefix: str) -> Tensors:
            return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}

        self.model.load_state_dict(under("model."))
        self.best = {name: value.cpu() for name, value in under("best.").items()}
        whole = self.optimizer.state_dict()
        for key, value in under("optimizer.").items():
            index, slot = key.split(".")
            whole["state"].setdefault(int(index), {})[slot] = value
        self.optimizer.load_state_dict(whole)
        with safe_open(self.path, framework="pt") as handle:
            self.history = json.loads(handle.metadata()["history"])


def quality(scores: npt.ArrayLike, labels: npt.ArrayLike) -> dict[str, float]:
    """How well scores in [0, 1] foretell labels: log-loss in nats, expected calibration error, area under ROC."""
    from sklearn.metrics import log_loss, roc_auc_score

    score, label = np.clip(np.asarray(scores, dtype=np.float64), 1e-7, 1 - 1e-7), np.asarray(labels, dtype=bool)
    varied = label.any() and not label.all()
    return {
        "log_loss_nats": float(log_loss(label, score, labels=[False, True])),
        "ece": reliability(score, label).ece,
        "auc": float(roc_auc_score(label, score)) if varied else float("nan"),
    }


def compare(samples: Samples, predictor: Predictor, part: str = "held out") -> dict[str, dict[str, float]]:
    """The quality of the predictor, of confidence alone (Platt scaling, fitted to train), and of the base rate."""
    from sklearn.linear_model import LogisticRegression

    def features(indices: torch.Tensor) -> Floats:
        confidence = samples.confidence[indices].double().clamp(1e-6, 1 - 1e-6)
        return np.asarray(torch.logit(confidence)[:, None].numpy())

    train, held = samples.part("train"), samples.part(part)
    labels = samples.label[held].numpy()
    platt = LogisticRegression(C=1e6).fit(features(train), samples.label[train].numpy())
    here = predictor.cast(torch.device("cpu"), torch.float64)
    scores = torch.empty(len(held), dtype=torch.float64)
    for depth in samples.depth[held].unique().tolist():
        chosen = samples.depth[held] == depth
        rows = held[chosen]
        scorer = here.after(samples.target_hidden[samples.round[rows]])
        scores[chosen] = scorer(samples.draft_hidden[rows], depth)
    rate = float(samples.label[train].float().mean())
    return {
        "predictor": quality(scores.numpy(), labels),
        "confidence": quality(platt.predict_proba(features(held))[:, 1], labels),
        "base rate": quality(np.full(len(held), rate), labels),
    }


def train_predictor(
    pair: Pair, prompts: Sequence[Prompt], settings: PredictorSettings, out: Path, progress: Progress
) -> dict[str, Any]:
    """Collect, train, write OUT/predictor.safetensors; facts and held-out quality as a JSON-able document.

    What is there of an earlier run with the same settings is used: killed at any moment, a
    second call goes on. OUT/collected may be deleted when all is done. The depth is cut to what
    the drafter can draft. Raises InputError for a folder of other settings, or prompts too few
    to hold some out.
    """
    if len(prompts) < PARTS:
        raise InputError(f"{len(prompts)} prompts are too few to hold some out; give at least {PARTS}")
    settings = replace(settings, depth=min(settings.depth, pair.drafter.max_depth or settings.depth))
    claim(out, _plan(pair, prompts, settings))
    samples = joined(collect_all(pair, prompts, settings, out / COLLECTED, progress))
    trainer = Trainer(samples, settings, out / CHECKPOINT, pair.device)
    trainer.run(progress)
    facts = {
        "fingerprint": pair.fingerprint,
        "target": pair.target_name,
        "drafter": pair.draft_name,
        "drafter_kind": pair.drafter.name,
        "settings": asdict(settings),
        "sequences": len(prompts),
        "samples": len(samples.label),
        "positions": len(samples.target_hidden),
        "epochs": len(trainer.history),
        "best_epoch": 1 + int(np.argmin([row["validation_nats"] for row in trainer.history])),
        "provenance": provenance(pair.device, pair.dtype),
    }
    facts["held_out"] = compare(samples, trainer.folded(facts))
    save_predictor(trainer.folded(facts), out / FILE)
    return {**facts, "predictor": str(out / FILE), "history": trainer.history}


def _plan(pair: Pair, prompts: Sequence[Prompt], settings: PredictorSettings) -> dict[str, Any]:
    """All that decides the result."""
    plan = {
        "weights": pair.fingerprint,
        "drafter_kind": pair.drafter.name,
        "dtype": str(pair.dtype).removeprefix("torch."),
        "device": pair.device.type,
        "prompts": prompt_digest(prompts),
        **asdict(settings),
    }
    return dict(json.loads(json.dumps(plan)))  # tuples become lists, as in the file
