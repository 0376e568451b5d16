"""A low-rank adapter on a target's linear layers (LoRA, Hu et al. 2021), as in MEDUSA-2 (MEDUSA 4.0.1).

`peft` inserts it; `Adapter.tensors` collects its values in the format of `realrun.lm.variants`, which
merges them without peft. Difference from the paper: a head that is tied to the embedding gets no adapter because its
update would change the embedding too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

import torch

from realrun.lm.variants import ADAPTER
from realrun.train.common.folder import Tensors
from specsim.io.errors import InputError
from specsim.io.settings import Settings, setting

NAME = "default"  # peft's for the adapter


@dataclass(frozen=True)
class AdapterSettings(Settings):
    """Settings of the adapter: the tuned weight is W + alpha / rank B A."""

    rank: int = setting(32, low=1, doc="Rank of the adapter.")
    alpha: float = setting(16.0, above=0)
    dropout: float = setting(0.05, low=0, below=1)  # probability that an input of A is dropped in training

    def size_as_dict(self) -> dict[str, Any]:
        """Make the fact "adapter" of a drafter's file."""
        return {"rank": self.rank, "alpha": self.alpha}


class Adapter:
    """An adapter on a Hugging Face model, which it changes in place until `remove`.

    Everything else is frozen. A starts at random, drawn from the seed, and B at zero, so that the model is unchanged at
    first. The values are at least float32, whatever the model's type. Inputs are dropped only within `dropping`.
    """

    def __init__(self, target: Any, settings: AdapterSettings, seed: int = 0):
        peft = import_peft()
        self.target, self.names = target, adapted_modules(target)
        self._trainable = {name: parameter.requires_grad for name, parameter in target.named_parameters()}
        config = peft.LoraConfig(
            r=settings.rank, lora_alpha=settings.alpha, lora_dropout=settings.dropout, target_modules=self.names
        )
        with torch.random.fork_rng([target.device] if target.device.type == "cuda" else []):
            torch.manual_seed(seed)
            self._wrapped = peft.LoraModel(target, {NAME: config}, NAME)
        self._layers = {name: target.get_submodule(name) for name in self.names}
        for layer in self._layers.values():
            for part in (layer.lora_A, layer.lora_B):
                if part[NAME].weight.dtype.itemsize < 4:
                    part.float()
            layer.lora_dropout.eval()

    def tensors(self) -> Tensors:
        """Collect the trained values by their names in a drafter's file: A [r, in] and B [out, r] per module."""
        tensors = {}
        for name, layer in self._layers.items():
            tensors[f"{ADAPTER}{name}.A"] = layer.lora_A[NAME].weight
            tensors[f"{ADAPTER}{name}.B"] = layer.lora_B[NAME].weight
        return tensors

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy these values, named as by `tensors`, into the adapter."""
        for name, value in self.tensors().items():
            value.copy_(tensors[name])

    @contextmanager
    def off(self) -> Iterator[None]:
        """Run the block with the original model."""
        self._wrapped.disable_adapter_layers()
        try:
            yield
        finally:
            self._wrapped.enable_adapter_layers()

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Run the block with training's dropout, drawn from torch's generator."""
        for layer in self._layers.values():
            layer.lora_dropout.train()
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.lora_dropout.eval()

    def remove(self) -> None:
        """Restore the model."""
        self._wrapped.unload()
        for name, parameter in self.target.named_parameters():
            parameter.requires_grad_(self._trainable[name])


def adapted_modules(target: Any) -> list[str]:
    """List all linear modules except routers; the head only if it does not share the embedding's weight."""
    head = target.get_output_embeddings()
    tied = head is not None and head.weight is target.get_input_embeddings().weight
    names = [
        name
        for name, module in target.named_modules()
        if isinstance(module, torch.nn.Linear)
        and (not tied if module is head else type(module).forward is torch.nn.Linear.forward)
    ]
    if not names:
        raise InputError(f"{type(target).__name__} has no linear layers to adapt; choose a Llama-like target")
    return names


def check_adaptable(target: Any, settings: AdapterSettings) -> None:
    """Raise InputError if this target cannot have an adapter, or peft is not installed.

    peft refuses some models only when it adds the adapter, so an adapter is added to a copy without weights.
    """
    import_peft()
    if any(hasattr(module, "A_log") and hasattr(module, "D") for module in target.modules()):
        raise InputError(
            f"{type(target).__name__} has Mamba layers, whose projections take no adapter because fused kernels read "
            "their weights; train a drafter without an adapter, such as MEDUSA-1"
        )
    adapted_modules(target)
    with torch.device("meta"):
        empty = type(target)(target.config)
    try:
        Adapter(empty, settings)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = shorten(str(error), 200, placeholder=" ...")
        raise InputError(
            f"{type(target).__name__} takes no adapter of these settings ({reason}); change them, or train a drafter "
            "without an adapter, such as MEDUSA-1"
        ) from None


def import_peft() -> Any:
    """Import peft; InputError if it is not installed."""
    try:
        import peft
    except ImportError:
        raise InputError("training an adapter needs the package peft; install it with `pip install peft`") from None
    return peft
