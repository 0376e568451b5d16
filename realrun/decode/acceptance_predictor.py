"""EESD's acceptance predictor theta_M (Eq. 5), folded: how likely the target accepts the token just drafted.

    theta_M(t, i) = sigmoid(W_p [W^{min(i, 10)} H^T ; H^D])

H^T is the target's last state at the position that produced the pending token, H^D the draft model's at the position
that produced the i-th drafted token (errata A12), both after the final norm. There is nothing between the two
matrices, so W_p W^i is a vector per depth, and a score costs a product with H^D. This folding is exact. The
standardisation of the training inputs and a bias, which the paper does not mention, add a number per depth.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from realrun.lm.cached import CachedLM
from realrun.tensor_files import save_tensors
from specsim.io.errors import InputError
from specsim.io.files import digest
from specsim.io.json import parse_json

FILE = "predictor.safetensors"
FORMAT = "specsim-predictor-1"
MAX_MATRICES = 10  # the paper's; later depths share the last
TENSORS = ("target_weight", "draft_weight", "bias")


class Facts(TypedDict):
    """The pair that a predictor was trained on."""

    fingerprint: str
    target: str
    drafter: str


@dataclass(frozen=True, eq=False)
class Predictor:
    """The folded predictor of a pair. M matrices, target states of size d_T, draft states of size d_D.

    target_weight : [M, d_T], W_p W^i of depth i = 1..M; draft_weight : [d_D]; bias : [M]
    facts : its pair ("fingerprint", "target", "drafter") and how it was trained
    """

    target_weight: torch.Tensor
    draft_weight: torch.Tensor
    bias: torch.Tensor
    facts: dict[str, Any]

    def cast(self, device: torch.device, dtype: torch.dtype) -> Predictor:
        """Move it to this device, to compute in float64 for models of that type and in float32 for others."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return replace(self, **{name: getattr(self, name).to(device, wide) for name in TENSORS})

    def after(self, target_hidden: torch.Tensor | None) -> RoundScorer:
        """Make the scorer of drafts after the target's states H^T [n, d_T]; None stands for a single row of zeros."""
        if target_hidden is None:
            return RoundScorer(self.bias[None], self.draft_weight)
        hidden = target_hidden.to(self.bias.dtype)
        return RoundScorer(torch.addmm(self.bias, hidden, self.target_weight.T), self.draft_weight)

    @cached_property
    def digest(self) -> str:
        """Hash of the weights."""
        parts = [getattr(self, name).double().cpu().numpy().tobytes() for name in TENSORS]
        return digest(*parts)

    def check(self, target_config: Any, draft_config: Any, fingerprint: str) -> None:
        """Raise InputError unless it was trained on the pair of this fingerprint and of these sizes."""
        ours = (self.target_weight.shape[1], len(self.draft_weight))
        theirs = tuple(int(config.get_text_config().hidden_size) for config in (target_config, draft_config))
        if ours != theirs:
            raise InputError(
                f"the predictor reads states of sizes {ours[0]} and {ours[1]}, target and draft have {theirs[0]} and "
                f"{theirs[1]}; train a predictor with `realrun train predictor`"
            )
        if self.facts["fingerprint"] != fingerprint:
            raise InputError(
                f"the predictor was trained on other weights ({self.facts['target']} and {self.facts['drafter']}, "
                f"{self.facts['fingerprint']}; these are {fingerprint}); run `realrun train predictor`"
            )


class Scorer(Protocol):
    """Scores drafted tokens from the drafter's states."""

    def __call__(self, draft_hidden: torch.Tensor, depth: int, begin: int = 0) -> torch.Tensor:
        """Score the tokens, [m], that rounds begin .. begin + m - 1 drafted at this depth, from 1.

        draft_hidden : [m, d_D], H^D
        """


@dataclass(frozen=True, eq=False)
class RoundScorer:
    """theta_M in (0, 1) with the target's part computed: by_target [n, M] of n rounds, draft_weight [d_D]."""

    by_target: torch.Tensor
    draft_weight: torch.Tensor

    def __call__(self, draft_hidden: torch.Tensor, depth: int, begin: int = 0) -> torch.Tensor:
        by_target = self.by_target[begin : begin + len(draft_hidden), min(depth, self.by_target.shape[1]) - 1]
        return score_of(by_target, draft_hidden, self.draft_weight)


def score_of(by_target: torch.Tensor, draft_hidden: torch.Tensor, draft_weight: torch.Tensor) -> torch.Tensor:
    """Compute scores [m] from the target's part [m] and draft states [m, d_D]."""
    return torch.addmv(by_target, draft_hidden.to(by_target.dtype), draft_weight).sigmoid_()


def save_predictor(predictor: Predictor, path: Path) -> None:
    """Write a predictor as a safetensors file in float32, atomically; its facts are JSON in the header."""
    tensors = {name: getattr(predictor, name).float() for name in TENSORS}
    save_tensors(path, tensors, {"format": FORMAT, "facts": json.dumps(predictor.facts)})


def load_predictor(path: Path) -> Predictor:
    """Read a predictor file, or the file in a folder; InputError if it is missing or damaged."""
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"predictor {file} does not exist; train a predictor with `realrun train predictor`")
    again = "train it again with `realrun train predictor`"
    try:
        with safe_open(file, framework="pt") as handle:
            metadata = handle.metadata() or {}
            if metadata.get("format") != FORMAT or set(handle.keys()) != set(TENSORS):
                raise InputError(f"{file} is not a predictor in the format {FORMAT}; {again}")
            tensors = {name: handle.get_tensor(name) for name in TENSORS}
        text = metadata["facts"]
    except (SafetensorError, OSError, KeyError) as error:
        raise InputError(f"predictor {file} is damaged ({error!r}); {again}") from None
    matrices, draft = tensors["target_weight"], tensors["draft_weight"]
    if matrices.ndim != 2 or draft.ndim != 1 or tensors["bias"].shape != matrices.shape[:1]:
        raise InputError(f"predictor {file} has weights whose shapes do not fit; {again}")
    if not all(value.dtype == torch.float32 and value.isfinite().all() for value in tensors.values()):
        raise InputError(f"predictor {file} has weights that are not finite float32 numbers; {again}")
    facts = parse_json(text, f"what predictor {file} says of itself", Facts, invalid=again)
    return Predictor(**tensors, facts=facts)


@torch.inference_mode()
def pending_token_states(model: PreTrainedModel, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    """Compute H^T of a round at every output position t, [T, d_T], in a teacher-forced pass of the target.

    The pending token of round t was produced by the state before it. A prompt of a single token has no such state for
    t = 0, and zeros stand for it.
    """
    hidden = last_states(model, [*prompt, *output][: len(prompt) + len(output) - 1])
    zeros = hidden.new_zeros(1, hidden.shape[1])
    return torch.cat([zeros, hidden])[len(prompt) - 1 : len(prompt) + len(output) - 1]


@torch.inference_mode()
def last_states(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """Compute the states [n, d] that the model's head reads after each token, by the library's own pass."""
    lm = CachedLM(model)
    lm.keep_hidden = True
    lm.forward(tokens)
    assert lm.hidden is not None
    return lm.hidden
