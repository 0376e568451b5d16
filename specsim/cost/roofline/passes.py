"""The operations of a pass, their bytes, FLOPs and seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from specsim.cost.batches import BatchTokens
from specsim.cost.roofline.architecture import Architecture
from specsim.cost.roofline.hardware import BITS, Derating, Hardware, usual_derating
from specsim.io.arrays import Floats, Seconds
from specsim.io.errors import InputError


@dataclass(frozen=True)
class Operation:
    """A kind of operation of a pass on a device, summed over all layers.

    bytes : read from and written to memory; link_bytes : sent to other devices; flops : of matrix products. Numbers,
        or arrays over passes.
    launches : how many operations are started
    """

    name: str
    bytes: Floats | float
    flops: Floats | float = 0.0
    launches: int = 0
    link_bytes: Floats | float = 0.0


@dataclass(frozen=True)
class Roofline:
    """A model's passes on a kind of hardware.

    An operation takes the longer of reading its bytes and computing its FLOPs, plus its launches. Weights and the cache
    are read once per pass, however many tokens it has; of experts, only those that its tokens go to.

    dtype : of states, cache and products
    weights : of the layers' matrices, "int4", "int8" or "float8", unpacked as they are read; default: `dtype`.
        Embeddings, routers and the head stay in `dtype`
    tensor_parallel : devices that share weights and cache
    derating : reached share of the ceilings

    Raises InputError for a dtype without throughput, weights that do not fit, or devices without a link.

    References: Williams et al. 2009, "Roofline: an insightful visual performance model".

    >>> from specsim.cost.roofline.architecture import find_architecture
    >>> from specsim.cost.roofline.hardware import Derating, find_hardware
    >>> from specsim.cost.roofline.passes import Roofline
    >>> model = Roofline(find_architecture("llama-3.1-8b"), find_hardware("h100"), derating=Derating())
    >>> [round(1e3 * float(model.seconds(n, 1000)), 2) for n in (1, 8, 64)]  # milliseconds: memory decides
    [4.52, 4.55, 4.74]
    """

    model: Architecture
    hardware: Hardware
    dtype: str = "bfloat16"
    weights: str | None = None
    tensor_parallel: int = 1
    derating: Derating = field(default_factory=usual_derating)

    def __post_init__(self) -> None:
        self.hardware.flops_of(self.dtype)
        if self.weights is not None and self.weights not in BITS:
            raise InputError(f"roofline: weights in {self.weights!r} are unknown; known: {', '.join(BITS)}")
        if self.tensor_parallel < 1 or self.model.num_heads % self.tensor_parallel:
            raise InputError(
                f"roofline: {self.tensor_parallel} devices cannot share the {self.model.num_heads} heads of "
                f"{self.model.name}; choose a divisor"
            )
        if self.tensor_parallel > 1 and not self.hardware.link_bytes_s:
            raise InputError(f"roofline: {self.hardware.name} has no link_bytes_s, which tensor_parallel needs")
        if 0 < self.hardware.memory_bytes < self.weight_bytes / self.tensor_parallel:
            raise InputError(
                f"roofline: the weights of {self.model.name} take {self.weight_bytes / self.tensor_parallel / 1e9:.0f} "
                f"GB a device, {self.hardware.name} has {self.hardware.memory_bytes / 1e9:.0f}; choose larger "
                "hardware, fewer bits or more devices"
            )

    @property
    def weight_bytes(self) -> float:
        """Of all devices together."""
        stack = self.model.stack_parameters
        return stack * self._packed + (self.model.parameters - stack) * self._width

    def kv_bytes(self, context: npt.ArrayLike) -> Floats:
        """The cache of a sequence with `context` tokens, of all devices together."""
        cached = self.model.attended(np.asarray(context, dtype=np.float64))
        return np.asarray(cached * self.model.kv_width * self._width)

    @property
    def _width(self) -> float:
        return BITS[self.dtype] / 8

    @property
    def _packed(self) -> float:
        return BITS[self.weights or self.dtype] / 8

    def operations(self, n_tokens: int, context: npt.ArrayLike, batch: int = 1) -> list[Operation]:
        """Operations of a pass over n_tokens new tokens of each of `batch` sequences with `context` cached tokens."""
        return self.batch_operations(BatchTokens.alike(batch, n_tokens, context))

    def batch_operations(self, tokens: BatchTokens) -> list[Operation]:
        """Operations of passes over ragged batches. A sliding window applies to the mean context."""
        first, *rest = self._ends(tokens.new)
        return [first, *self.layers(self.model, tokens), *rest]

    def _ends(self, rows: Floats) -> Iterator[Operation]:
        """Operations before and after the layers, over `rows` tokens."""
        model, states = self.model, rows * self.model.hidden_size * self._width
        if model.medusa_heads:
            heads = model.medusa_heads
            yield self._linear("residual blocks", rows, model.hidden_size, model.hidden_size, heads, packed=True)
            yield Operation("activations", 3 * heads * states, launches=heads)
        else:
            heads = 1
            yield Operation("embedding", 2 * states, launches=1)
            if model.projected_inputs:
                yield self._linear("input projection", rows, model.projected_inputs * model.hidden_size,
                                   model.hidden_size, 1, packed=True)  # fmt: skip
            yield Operation("last norm", 4 * states, launches=1)
        yield self._linear("head", rows, model.hidden_size, model.vocab_size, heads)
        yield Operation("sampling", heads * rows * model.vocab_size * self._width, launches=1)

    def layers(self, model: Architecture, tokens: BatchTokens) -> Iterator[Operation]:
        """Operations of the layers of `model` in such a pass, summed over layers."""
        if not model.num_layers:
            return
        rows, width, count, devices = tokens.new, self._width, model.num_layers, self.tensor_parallel
        hidden, queries = model.hidden_size, model.num_heads * model.head_dim
        cached = tokens.sequences * model.attended(tokens.cached / tokens.sequences)
        new_per_key = tokens.pairs / (tokens.cached + rows)  # queries that weigh a key, on average over keys
        states = rows * hidden * width
        yield Operation("norms", 2 * count * 4 * states, launches=2 * count)  # reads and writes state and residual
        yield self._linear("queries, keys, values", rows, hidden, queries + model.kv_width, count, packed=True)
        moved = count * rows * (queries + model.kv_width) * width / devices
        yield Operation("rotation, cache write", 2 * moved, launches=count)
        # Devices beyond the key-value heads hold copies of them.
        kv = (cached + count * rows) * model.kv_width * width / min(devices, model.num_kv_heads)
        products = 4 * queries * new_per_key * (cached + count * rows) / devices
        yield Operation("attention", kv + 2 * count * rows * queries * width / devices, products, launches=count)
        yield self._linear("output projection", rows, queries, hidden, count, packed=True)
        dense = count - model.expert_layers
        if dense:
            yield from self._mlp("MLP", rows, hidden, model.intermediate_size, dense)
        if model.expert_layers:
            yield from self._experts(model, rows)
        if devices > 1:  # a ring: every device sends its share of the sum around, and then of the result
            steps = 2 * (devices - 1)
            yield Operation("all-reduce", 0.0, 0.0, 2 * count * steps, 2 * count * steps / devices * states)

    def _linear(
        self, name: str, rows: Floats, inputs: int, outputs: int, count: int, *, packed: bool = False
    ) -> Operation:
        """A matrix of each of `count` layers, divided over the devices."""
        size = inputs * outputs * count / self.tensor_parallel
        states = count * rows * (inputs + outputs) * self._width
        return Operation(name, size * (self._packed if packed else self._width) + states, 2 * rows * size, count)

    def _mlp(self, name: str, rows: Floats, hidden: int, inner: int, count: int) -> Iterator[Operation]:
        yield self._linear(f"{name} gate, up", rows, hidden, 2 * inner, count, packed=True)
        gated = 3 * count * rows * inner * self._width / self.tensor_parallel
        yield Operation(f"{name} activation", gated, launches=count)
        yield self._linear(f"{name} down", rows, inner, hidden, count, packed=True)

    def _experts(self, model: Architecture, rows: Floats) -> Iterator[Operation]:
        experts, count, hidden = model.experts, model.expert_layers, model.hidden_size
        assert experts is not None
        inner, copies, width = experts.intermediate_size, rows * experts.per_token, self._width
        matrix = count * hidden * inner / self.tensor_parallel
        weights = experts.read(rows) * matrix * self._packed
        yield self._linear("router", rows, hidden, experts.count, count)
        yield Operation("choice of experts", count * rows * experts.count * width, launches=2 * count)
        up = count * copies * (hidden + 2 * inner) * width
        yield Operation("experts gate, up", 2 * weights + up, 4 * copies * matrix, count)
        gated = 3 * count * copies * inner * width / self.tensor_parallel
        yield Operation("experts activation", gated, launches=count)
        down = count * copies * (hidden + inner) * width
        yield Operation("experts down", weights + down, 2 * copies * matrix, count)
        yield Operation("sum of experts", count * (copies + rows) * hidden * width, launches=count)
        if experts.shared_intermediate_size:
            yield from self._mlp("shared expert", rows, hidden, experts.shared_intermediate_size, count)

    def time(self, operation: Operation) -> Seconds:
        """Seconds of an operation."""
        work = operation.bytes, operation.flops, operation.launches, operation.link_bytes
        return np.asarray(seconds_of(*work, self.ceilings, self.derating))

    @property
    def ceilings(self) -> tuple[float, float, float]:
        """Bytes/s of memory, FLOP/s, bytes/s between devices."""
        return self.hardware.memory_bytes_s, self.hardware.flops_of(self.dtype), self.hardware.link_bytes_s

    def total(self, operations: Iterable[Operation]) -> Seconds:
        """Seconds of operations in sequence."""
        return np.asarray(sum(self.time(operation) for operation in operations))

    def seconds(self, n_tokens: int, context: npt.ArrayLike, batch: int = 1) -> Seconds:
        """Seconds of a pass, see `operations`."""
        return self.batch_seconds(BatchTokens.alike(batch, n_tokens, context))

    def batch_seconds(self, tokens: BatchTokens) -> Seconds:
        """Seconds of passes over ragged batches."""
        return self.total(self.batch_operations(tokens))


def seconds_of(
    read: Any, flops: Any, launches: Any, sent: Any, ceilings: tuple[float, float, float], derating: Derating
) -> Any:
    """Seconds of operations with these bytes, FLOPs, launches and bytes between devices."""
    memory, throughput, link = ceilings
    reading, computing = read / (memory * derating.memory), flops / (throughput * derating.compute)
    hidden = (1 - derating.overlap) * np.minimum(reading, computing)
    sending = sent / link if link else 0.0
    return np.maximum(reading, computing) + hidden + sending + launches * derating.launch_s
