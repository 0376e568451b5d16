"""Heads whose logits are float32, whatever the type of the weights, and heads of a part of the vocabulary.

A head with 16-bit weights rounds its logits to 16 bits: near 20, bfloat16 numbers are 1/8 apart, so that logits tie.
Products of 16-bit numbers are summed in float32 anyway, and here that sum is the logit. The states are still rounded to
16 bits, differently in passes of other sizes.
"""

from __future__ import annotations

from typing import Any

import torch

from realrun.lm.skinny_linear import skinny_linear
from specsim.io.errors import InputError


class Float32Head(torch.nn.Linear):
    """A model's head: float32 logits [..., V] of states [..., d]. Its weights are of 16 bits."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = float32_product(hidden.flatten(0, -2), self.weight.T).unflatten(0, hidden.shape[:-1])
        return logits if self.bias is None else logits + self.bias.float()


def float32_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Compute a @ b in float32 from 16-bit matrices, [n, d] and [d, m], or from batches of them.

    On the CPU and for gradients there is no such product, and both are copied to float32 first.
    """
    if a.device.type == "cuda" and not torch.is_grad_enabled():
        product = torch.mm if a.dim() == 2 else torch.bmm
        return product(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def gives_float32(model: Any) -> bool:
    """Check whether a model's head is a `Float32Head`."""
    return isinstance(model.get_output_embeddings(), Float32Head)


def logits_type(model: Any) -> torch.dtype:
    """Give the number type of a model's logits."""
    return torch.float32 if gives_float32(model) else model.dtype


class PartialHead(torch.nn.Module):
    """A head of some tokens: logits [..., V] of states [..., d], minus infinity for all other tokens.

    rows : a plain matrix [n, d]
    tokens : int64 [n], the tokens that get logits
    size : V
    """

    tokens: torch.Tensor

    def __init__(self, rows: Any, tokens: torch.Tensor, size: int):
        super().__init__()
        self.rows, self.out_features = rows, size
        self.register_buffer("tokens", tokens.to(rows.weight.device), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return spread(self.rows(hidden), self.tokens, self.out_features)


def spread(some: torch.Tensor, tokens: torch.Tensor, size: int) -> torch.Tensor:
    """Make logits [..., size], minus infinity for all but these tokens [n], of the tokens' logits [..., n]."""
    logits = some.new_full((*some.shape[:-1], size), -torch.inf)
    return logits.index_copy_(-1, tokens, some)


def partial_head(head: Any, tokens: torch.Tensor | None) -> Any:
    """Restrict a head to logits of these tokens, int64 [n]; None leaves it as it is."""
    if tokens is None:
        return head
    rows = type(head)(head.in_features, len(tokens), bias=False, device="meta")
    rows.weight = torch.nn.Parameter(head.weight.detach()[tokens.to(head.weight.device)], requires_grad=False)
    return PartialHead(rows, tokens, int(head.out_features))


def tokens_of_head(model: Any) -> torch.Tensor | None:
    """Return the tokens of a model whose head is a `PartialHead`; None for other heads."""
    head = model.get_output_embeddings()
    return head.tokens if isinstance(head, PartialHead) else None


def head_product(head: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Compute logits [..., V] of states [..., d] by a head; by `skinny_linear` if it is a plain matrix."""
    if isinstance(head, PartialHead):
        return spread(head_product(head.rows, hidden), head.tokens, head.out_features)
    if type(head) is torch.nn.Linear and head.bias is None:
        return skinny_linear(hidden, head.weight)
    logits: torch.Tensor = head(hidden)
    return logits


def with_float32_logits(model: Any) -> Any:
    """Replace the model's head by a `Float32Head` on the same weights, which may be the embedding's.

    Returns the model itself. Raises InputError if its head is not a plain matrix, for example if it is quantised.
    """
    old = model.get_output_embeddings()
    if type(old) is not torch.nn.Linear:
        raise InputError(
            f"{type(model).__name__} has a head of type {type(old).__name__}, which gives no logits in float32; "
            "choose a number type without float32 logits"
        )
    head = Float32Head(old.in_features, old.out_features, bias=old.bias is not None, device="meta")
    head.weight, head.bias = old.weight, old.bias
    model.set_output_embeddings(head)
    return model
