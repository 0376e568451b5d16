"""Description of an operation for the benchmark."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from speckernels.runtime import dispatch

Arguments = tuple[Any, ...]  # as in the operation's schema, which every backend takes
SEED = 20260101


@dataclass(frozen=True)
class Work:
    """Minimum work of an operation on given inputs.

    bytes : each input that matters read once, each result written once
    flops : floating-point operations
    """

    bytes: int
    flops: int


@dataclass(frozen=True)
class Case:
    """One shape of an operation. `compiled`: also measure torch.compile of the reference."""

    op: str
    shape: Mapping[str, int]
    dtype: torch.dtype
    compiled: bool = False

    @property
    def label(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self.shape.items())

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def __str__(self) -> str:
        """Name without spaces, such as "compact_kv-batch8-nodes64-bfloat16"."""
        return "-".join([self.op, *(f"{name}{size}" for name, size in self.shape.items()), self.dtype_name])


class Mismatch(AssertionError):
    """A backend's result differs from the reference; the message says where."""


def equal(expected: Any, actual: Any, case: Case) -> None:
    """Mismatch unless all tensors are equal, element by element."""
    for number, (want, got) in enumerate(zip(_tensors(expected), _tensors(actual), strict=True)):
        if want.shape != got.shape:
            raise Mismatch(f"result {number} has shape {list(got.shape)}, the reference {list(want.shape)}")
        wrong = want != got
        if bool(wrong.any()):
            where = tuple(int(i) for i in wrong.nonzero()[0])
            raise Mismatch(
                f"result {number} differs in {int(wrong.sum())} of {wrong.numel()} elements, "
                f"first at {list(where)}: {got[where].item()} instead of {want[where].item()}"
            )


def relative_error(expected: torch.Tensor, actual: torch.Tensor, limit: float, what: str) -> None:
    """Mismatch unless |actual - expected| / |expected| (2-norms) is at most `limit`; NaN never passes."""
    if expected.shape != actual.shape:
        raise Mismatch(f"{what} has shape {list(actual.shape)}, the reference {list(expected.shape)}")
    want, got = expected.double(), actual.double()
    error = float((got - want).norm() / want.norm().clamp_min(1e-300))
    if not error <= limit:
        raise Mismatch(f"{what} is off by {error:.2e} relative to the reference, allowed {limit:.0e}")


def _tensors(result: Any) -> Iterable[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        yield result
        return
    for part in result:
        yield from _tensors(part)


@dataclass(frozen=True)
class Rival:
    """Implementation of an operation by another library.

    prepare : outside any clock; gives a function of Arguments, or raises
    applies : False where there is nothing to compare, so that not even an error is written
    """

    prepare: Callable[[Case, Arguments], Callable[..., Any]]
    applies: Callable[[Case], bool] = lambda case: True


@dataclass(frozen=True)
class Operation:
    """Measurement of one operation.

    cases : what to measure on a GPU, the most telling first
    small : a few shapes that every backend survives without a GPU
    inputs : creates Arguments for a case with a generator on its device
    work : the least bytes and operations, given the case, its arguments and the right result
    check : raises Mismatch; takes the expected and the actual result
    headline : whether a case is one of the main cases, which are measured first
    rivals : ways to do it that are not ours, by name
    in_place : the operation changes its arguments, which are then its result
    public : calls the public function on Arguments; by default it takes the same ones
    """

    name: str
    cases: tuple[Case, ...]
    small: tuple[Case, ...]
    inputs: Callable[[Case, torch.Generator], Arguments]
    work: Callable[[Case, Arguments, Any], Work]
    check: Callable[[Any, Any, Case], None] = equal
    headline: Callable[[Case], bool] = lambda case: False
    rivals: Mapping[str, Rival] = field(default_factory=dict)
    in_place: bool = False
    public: Callable[..., Any] | None = None

    def run(self, *args: Any) -> Any:
        """The public function, with the current backend."""
        function = self.public or getattr(importlib.import_module(f"speckernels.ops.{self.name}"), self.name)
        result = function(*args)
        return args if self.in_place else result

    def reference(self, *args: Any) -> Any:
        """The plain torch code, without checks and dispatch."""
        result = dispatch.implementation(self.name, "reference")(*args)
        return args if self.in_place else result


def random_tree(nodes: int, batch: int, generator: torch.Generator) -> torch.Tensor:
    """parents int32 [batch, nodes]; the parent of each node is one of the 8 nodes before it."""
    index = torch.arange(nodes, device=generator.device)
    back = 1 + (torch.rand(batch, nodes, generator=generator, device=generator.device) * index.clamp(max=8)).long()
    parents = (index - back).int()
    parents[:, 0] = -1
    return parents


def depths(parents: torch.Tensor) -> torch.Tensor:
    """Depth of each node, int64 [batch, nodes]; the root has depth 0."""
    parents = parents.cpu().long()
    depth = torch.zeros_like(parents)
    rows = torch.arange(len(parents))
    for node in range(1, parents.shape[1]):
        depth[:, node] = depth[rows, parents[:, node]] + 1
    return depth
