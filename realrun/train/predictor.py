"""Train the acceptance predictor of EESD Eq. 5 on the states and verified tokens of recorded runs.

The target decodes prompts, and the drafter's recorder computes the drafts of rounds at every position. Every drafted
token behind correct tokens becomes a sample: (H^T, H^D, depth, whether the target's token equals it). The states are
those that the drafter's pass would have scored.

The factors W^1..W^M and W_p are trained with cross-entropy, as in the paper; a single logit and a sigmoid replace its
two rows (errata A11), with a bias, and inputs are standardised. The product is taken from the left, W_p W^i first,
which does not change its value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file

from realrun.decode.acceptance_predictor import FILE, MAX_MATRICES, Predictor, pending_token_states, save_predictor
from realrun.decode.decoder import Decoder
from realrun.decode.sampling import Sampler
from realrun.pairs.pair import Pair
from realrun.pairs.prompts import Prompt, prompt_digest
from realrun.proposals.recorder import Recorder, RecordRequest
from realrun.provenance import provenance
from realrun.tensor_files import save_tensors
from realrun.train.common.folder import (
    CHECKPOINT,
    Tensors,
    checkpoint,
    claim,
    save_checkpoint,
)
from realrun.train.common.on_text import Summary
from realrun.train.common.trainings import PromptOptions, Training, num_prompts_setting, sampler_at
from specsim.acceptance.formulas import reliability
from specsim.io.arrays import Floats
from specsim.io.errors import InputError
from specsim.io.progress import Progress
from specsim.io.settings import Settings, setting

SHARD_PROMPTS = 16  # prompts whose states share a file
PARTS = 10  # random parts of the sequences: part 0 is held out, part 1 selects the epoch, the others train
COLLECTED = "collected"


@dataclass(frozen=True)
class PredictorSettings(Settings):
    """Settings of collecting samples and training on them."""

    max_new_tokens: int = setting(128, low=1, doc="Maximum output tokens per prompt.")
    max_draft_tokens: int = setting(16, low=1, high=64, doc="Maximum draft length, in tokens.")
    temperatures: tuple[float, ...] = setting(
        (0.0, 0.7, 0.8, 1.0),
        doc="Temperatures to decode prompts at, in turn, comma-separated; 0 is greedy.",
    )
    epochs: int = setting(40, low=1, doc="Maximum passes over the samples.")
    patience: int = setting(5)  # epochs without a lower validation loss, after which training ends
    batch: int = setting(2048)  # samples of a step
    lr: float = setting(1e-3)
    weight_decay: float = setting(0.01)
    seed: int = setting(0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.temperatures:
            raise InputError("a predictor learns from text of some temperature; give at least 1")
        for sequence in range(len(self.temperatures)):
            self.sampler(sequence)  # refuses a bad temperature

    def sampler(self, sequence: int) -> Sampler:
        return sampler_at(self.temperatures[sequence % len(self.temperatures)], self.seed)


class StateKeeper:
    """A `Scorer` that keeps the states it is called with: [T, depth, d_D] of T rounds, in float16."""

    def __init__(self, rounds: int, depth: int):
        self.shape = (rounds, depth)
        self.states = torch.empty(0)

    def __call__(self, draft_hidden: torch.Tensor, depth: int, begin: int = 0) -> torch.Tensor:
        if self.states.ndim == 1:
            self.states = torch.empty(*self.shape, draft_hidden.shape[1], dtype=torch.float16)
        self.states[begin : begin + len(draft_hidden), depth - 1] = draft_hidden.cpu().half()
        return torch.zeros(len(draft_hidden))


@torch.inference_mode()
def collect(
    pair: Pair, decoder: Decoder, recorder: Recorder, prompt: Prompt, settings: PredictorSettings, sequence: int
) -> Tensors:
    """Decode a prompt and collect the samples of its T tokens: the fields of `Samples` but `sequence`."""
    decoder.sampler = settings.sampler(sequence)
    output = decoder.decode(prompt.tokens, settings.max_new_tokens, None, sequence=sequence).tokens
    keeper = StateKeeper(len(output), settings.max_draft_tokens)
    request = RecordRequest(prompt.tokens, output, settings.max_draft_tokens, decoder.sampler, sequence, keeper)
    columns = recorder(request)
    correct = columns["match_len"].astype(np.int64)
    depths = np.arange(settings.max_draft_tokens)  # tokens drafted before
    in_range = np.arange(len(output))[:, None] + depths < len(output)
    rounds, before = np.nonzero((depths <= correct[:, None]) & in_range)
    return {
        "target_hidden": pending_token_states(pair.target, prompt.tokens, output).cpu().half(),
        "draft_hidden": keeper.states[rounds, before],
        "confidence": torch.from_numpy(columns["confidence"][rounds, before]),
        "round": torch.from_numpy(rounds),
        "depth": torch.from_numpy(before + 1),
        "label": torch.from_numpy(before < correct[rounds]),
    }


def collect_all(
    pair: Pair, prompts: Sequence[Prompt], settings: PredictorSettings, folder: Path, progress: Progress
) -> list[Tensors]:
    """Run `collect` on every prompt, or read its file; a file holds SHARD_PROMPTS prompts."""
    decoder = Decoder(*pair.make_drafter(), pair.eos_token_ids, Sampler())
    recorder = pair.make_recorder(Sampler())  # all modes but rejection have the same pass
    folder.mkdir(parents=True, exist_ok=True)
    sequences: list[Tensors] = []
    for begin in range(0, len(prompts), SHARD_PROMPTS):
        numbers = range(begin, min(begin + SHARD_PROMPTS, len(prompts)))
        path = folder / f"{begin:06d}.safetensors"
        if not path.exists():
            shard: Tensors = {}
            for number in numbers:
                samples = collect(pair, decoder, recorder, prompts[number], settings, number)
                shard |= {f"{number}.{name}": value.contiguous() for name, value in samples.items()}
                progress("decode", number + 1, len(prompts))
            save_tensors(path, shard, {})
        try:
            shard = load_file(path)
        except SafetensorError as error:
            raise InputError(f"{path} is damaged ({error}); delete it") from None
        sequences += [{key.split(".")[1]: shard[key] for key in shard if key.startswith(f"{n}.")} for n in numbers]
        progress("decode", numbers[-1] + 1, len(prompts))
    return sequences


@dataclass(frozen=True)
class Samples:
    """n verified tokens of N rounds.

    target_hidden [N, d_T], of rounds; draft_hidden [n, d_D]; confidence [n], the drafter's; round, depth, label,
    sequence : [n], the token's round and depth from 1, whether it was correct, the sequence
    """

    target_hidden: torch.Tensor
    draft_hidden: torch.Tensor
    confidence: torch.Tensor
    round: torch.Tensor
    depth: torch.Tensor
    label: torch.Tensor
    sequence: torch.Tensor

    def part(self, name: str) -> torch.Tensor:
        """List the indices of the training, validation or held-out samples; the split is by sequence."""
        # Drawn at random because domains and temperatures come in turn.
        drawn = np.random.default_rng(PARTS).permutation(int(self.sequence.max()) + 1) % PARTS
        kind = torch.from_numpy(drawn)[self.sequence]
        chosen = {"train": kind > 1, "validation": kind == 1, "held out": kind == 0}
        return chosen[name].nonzero()[:, 0]


def joined(sequences: Sequence[Tensors]) -> Samples:
    """Join the samples of all sequences; rounds are numbered consecutively."""
    columns = {name: torch.cat([s[name] for s in sequences]) for name in sequences[0]}
    rounds, samples = (torch.tensor([len(s[name]) for s in sequences]) for name in ("target_hidden", "label"))
    sequence = torch.arange(len(sequences)).repeat_interleave(samples)
    columns["round"] += (rounds.cumsum(0) - rounds)[sequence]
    return Samples(**columns, sequence=sequence)


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
        """Set the scales from these states."""
        for name, hidden in (("target", target_hidden.float()), ("draft", draft_hidden.float())):
            getattr(self, f"{name}_mean").copy_(hidden.mean(0))
            getattr(self, f"{name}_scale").copy_(hidden.std(0, correction=0).clamp_min(1e-6))

    def fold(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute target_weight [M, d_T], draft_weight [d_D], bias [M] of a `Predictor`."""
        target_weight = torch.einsum("d,mdt->mt", self.target_readout, self.matrices) / self.target_scale
        draft_weight = self.draft_readout / self.draft_scale
        bias = self.bias - target_weight @ self.target_mean - draft_weight @ self.draft_mean
        return target_weight, draft_weight, bias

    def forward(self, target_hidden: torch.Tensor, draft_hidden: torch.Tensor, depth: torch.Tensor) -> torch.Tensor:
        """Compute logits [n] of samples with states [n, d_T] and [n, d_D] at depths [n] from 1."""
        target_weight = torch.einsum("d,mdt->mt", self.target_readout, self.matrices)
        target = (target_hidden - self.target_mean) / self.target_scale
        draft = (draft_hidden - self.draft_mean) / self.draft_scale
        chosen = target_weight[depth.clamp_max(len(self.matrices)) - 1]
        return torch.linalg.vecdot(target, chosen) + draft @ self.draft_readout + self.bias


class Trainer:
    """AdamW with a checkpoint after every epoch, so that a killed run continues and ends with the same weights."""

    def __init__(self, samples: Samples, settings: PredictorSettings, path: Path, device: torch.device):
        self.samples, self.settings, self.path, self.device = samples, settings, path, device
        self.model = FactorisedPredictor(
            min(MAX_MATRICES, settings.max_draft_tokens),
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
        if path.exists():
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
        """Train an epoch, in an order that seed and epoch determine; return the mean loss in nats."""
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
        """Compute the mean loss in nats over a part of the samples."""
        indices = self.samples.part(part)
        labels = self.samples.label.float()
        total = 0.0
        for chunk in indices.split(16384):
            loss = F.binary_cross_entropy_with_logits(self.logits(chunk).cpu(), labels[chunk], reduction="sum")
            total += float(loss)
        return total / len(indices)

    def folded(self) -> Predictor:
        """Fold the predictor of the best epoch, in float64, without facts."""
        model = FactorisedPredictor(*self.model.matrices.shape[:1], *self.model.matrices.shape[:0:-1])
        model.load_state_dict(self.best)
        with torch.no_grad():
            target_weight, draft_weight, bias = model.double().fold()
        return Predictor(target_weight, draft_weight, bias, {})

    def _weights(self) -> Tensors:
        return {name: value.detach().cpu().clone() for name, value in self.model.state_dict().items()}

    def _checkpoint(self) -> None:
        parts = {"model": self._weights(), "best": self.best}
        save_checkpoint(self.path, parts, self.optimizer, history=self.history)

    def _resume(self) -> None:
        with checkpoint(self.path, self.optimizer, self.device) as (parts, facts):
            self.model.load_state_dict(parts["model"])
            self.best = {name: value.cpu() for name, value in parts["best"].items()}
            self.history = facts["history"]


def quality(scores: npt.ArrayLike, labels: npt.ArrayLike) -> dict[str, float | None]:
    """Compute how well scores in [0, 1] predict labels: log-loss in nats, expected calibration error, ROC AUC."""
    from sklearn.metrics import log_loss, roc_auc_score

    score, label = np.clip(np.asarray(scores, dtype=np.float64), 1e-7, 1 - 1e-7), np.asarray(labels, dtype=bool)
    varied = label.any() and not label.all()
    return {
        "log_loss_nats": float(log_loss(label, score, labels=[False, True])),
        "ece": reliability(score, label).ece,
        "auc": float(roc_auc_score(label, score)) if varied else None,
    }


def compare(samples: Samples, predictor: Predictor, part: str = "held out") -> dict[str, dict[str, float | None]]:
    """Compute the quality of the predictor, of confidence alone (Platt scaling) and of the base rate."""
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


@dataclass(frozen=True)
class TrainedPredictor:
    """A predictor that was written to `path`, and the losses of every epoch."""

    path: Path
    predictor: Predictor
    history: Sequence[dict[str, float]]

    def as_dict(self) -> dict[str, Any]:
        return {**self.predictor.facts, "predictor": str(self.path), "history": self.history}

    def summary(self) -> Summary:
        facts = self.predictor.facts
        rows = [
            [name, *("-" if values[key] is None else f"{values[key]:.4f}" for key in ("log_loss_nats", "ece", "auc"))]
            for name, values in facts["held_out"].items()
        ]
        title = f"held-out sequences; {facts['samples']} samples, epoch {facts['best_epoch']} of {facts['epochs']}"
        return Summary(title, ["", "log-loss, nats", "calibration error", "area under ROC"], rows)


def train_predictor(
    pair: Pair, prompts: Sequence[Prompt], settings: PredictorSettings, out: Path, progress: Progress
) -> TrainedPredictor:
    """Collect samples, train on them, and write OUT/predictor.safetensors.

    pair : target and drafter that the predictor is for
    prompts : decoded for samples; do not use prompts that traces will be recorded on
    out : folder of the predictor. A killed run with the same settings is continued. OUT/collected may be deleted at the
        end
    progress : called with (stage, done, total)

    Raises InputError if the folder has other settings, or there are too few prompts to hold some out.

    References: Liu et al. 2024 (EESD), Eq. 5.
    """
    if len(prompts) < PARTS:
        raise InputError(f"{len(prompts)} prompts are too few to hold some out; give at least {PARTS}")
    settings = replace(
        settings, max_draft_tokens=min(settings.max_draft_tokens, pair.drafter.max_depth or settings.max_draft_tokens)
    )
    plan = {
        "weights": pair.fingerprint,
        "drafter_kind": pair.drafter.name,
        "dtype": pair.number_type,
        "device": pair.device.type,
        "prompts": prompt_digest(prompts),
        **asdict(settings),
    }
    claim(out, plan)
    samples = joined(collect_all(pair, prompts, settings, out / COLLECTED, progress))
    trainer = Trainer(samples, settings, out / CHECKPOINT, pair.device)
    trainer.run(progress)
    predictor = trainer.folded()
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
        "provenance": provenance(pair.device, pair.number_type),
        "held_out": compare(samples, predictor),
    }
    predictor = replace(predictor, facts=facts)
    save_predictor(predictor, out / FILE)
    return TrainedPredictor(out / FILE, predictor, trainer.history)


@dataclass(frozen=True)
class PredictorPrompts(PromptOptions):
    """Prompt options with many more prompts by default, because every position of a round is a sample."""

    lab_count: ClassVar[int] = 600
    num_prompts: int | None = num_prompts_setting(lab_count)


PREDICTOR = Training(
    "predictor",
    PredictorSettings,
    train_predictor,
    """Train the acceptance predictor of Cali-TS.

    It is theta_M of EESD's Eq. 5, trained on runs of the pair. Do not use prompts that traces will be recorded on.

    Example: realrun train predictor --out predictor --prompts train.jsonl
    """,
    shared=PredictorPrompts,
    trains="predictor",
    beside_draft=True,
    smoke_test=False,
)
