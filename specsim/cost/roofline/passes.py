"""The operations of a pass, their bytes, FLOPs and seconds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from specsim.cost.batches import BatchTokens
from specsim.cost.roofline.hardware import BITS, GGUF_BITS, PRODUCTS, Derating, Hardware, usual_derating
from specsim.cost.roofline.shape import (
    Architecture,
    Attending,
    Attention,
    Experts,
    LatentAttention,
    LinearAttention,
    Mlp,
    Part,
)
from specsim.io.arrays import Floats, Seconds
from specsim.io.errors import InputError
from specsim.io.names import nearest_names

SMALL_BATCH = 8
"""Most rows (tokens of a pass) that llama.cpp and Metal multiply with packed weights by matrix-vector kernels, row by
row. Larger passes use matrix units; they are assumed to take at least as long as a pass of this size."""
STATE_BYTES = {"float32": 4, "bfloat16": 2, "replay": 4}
"""Bytes per element of a recurrent state, by how an engine restores it after a rejection: it stores a state of this
dtype after every verified token, or it stores none and runs the accepted tokens again ("replay")."""
EXPERTS_ALIKE = 0.8
"""n tokens of one sequence use as many experts as n ** 0.8 tokens of different sequences; see studies/published."""


@dataclass(frozen=True)
class Operation:
    """A kind of operation of a pass on a device, summed over all layers.

    bytes : read from and written to memory; link_bytes : sent to other devices; flops : of matrix products. Numbers,
        or arrays over passes.
    launches : number of kernel launches
    all_reduces : number of all-reduces
    products : type of the products; empty: that of the states
    """

    name: str
    bytes: Floats | float
    flops: Floats | float = 0.0
    launches: int = 0
    link_bytes: Floats | float = 0.0
    all_reduces: int = 0
    products: str = ""


@dataclass(frozen=True)
class Roofline:
    """A model's passes on a kind of hardware.

    An operation takes the longer of reading its bytes and computing its FLOPs, plus its launches. Weights and the cache
    are read once per pass, however many tokens it has; of experts, only those that its tokens go to.

    dtype : of states, and of all else unless the following say otherwise; embeddings and routers stay in it
    weights : format of the layers' matrices, a name of `hardware.BITS`; or a format of each part: "attention", "mlp"
        (dense MLPs and shared experts), "experts" (default: that of "mlp") and "head". Default: `dtype`
    activations : "float8" or "float4", which states are rounded to before they are multiplied with weights; products
        are then of the wider of both types. Default: weights are unpacked to `dtype` as they are read
    cache : format of keys and values, or of latents. Default: `dtype`
    tensor_parallel : devices that share weights and cache
    states : how the engine restores recurrent states after a rejection, a key of `STATE_BYTES`
    vector : share of the float32 throughput that an engine reaches if it multiplies packed weights with up to
        `SMALL_BATCH` rows without matrix units; 0: it uses matrix units. `Hardware.reread`, if given, replaces it
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
    weights: str | Mapping[str, str] | None = None
    tensor_parallel: int = 1
    derating: Derating = field(default_factory=usual_derating)
    activations: str | None = None
    cache: str | None = None
    states: str = "float32"
    vector: float = 0.0

    def __post_init__(self) -> None:
        self.hardware.flops_of(self.dtype)
        if self.activations is not None:
            if self.activations not in PRODUCTS:
                known = " or ".join(PRODUCTS)
                raise InputError(f"roofline: activations in {self.activations!r} are unknown; give {known}")
            self.hardware.flops_of(self.activations)
        parts = self.weights if isinstance(self.weights, Mapping) else {}
        for part in set(parts) - set(get_args(Part)):
            known = ", ".join(get_args(Part))
            raise InputError(f"roofline: weights of {part!r} are unknown; give a format for some of {known}")
        for name in parts.values() if parts else [self.weights]:
            if name is not None and name not in BITS:
                raise InputError(f"roofline: weights in {name!r} are unknown; {nearest_names(str(name), [*BITS])}")
        if self.cache is not None and self.cache not in BITS:
            raise InputError(f"roofline: a cache in {self.cache!r} is unknown; {nearest_names(self.cache, [*BITS])}")
        if self.states not in STATE_BYTES:
            raise InputError(f"roofline: states {self.states!r} are unknown; give one of {', '.join(STATE_BYTES)}")
        for heads in sorted({block.heads for block in self.model.blocks if not isinstance(block, Mlp | Experts)}):
            if self.tensor_parallel < 1 or heads % self.tensor_parallel:
                raise InputError(
                    f"roofline: {self.tensor_parallel} devices cannot share the {heads} heads of {self.model.name}; "
                    "choose a divisor"
                )
        if self.tensor_parallel > 1 and not self.hardware.link_bytes_s:
            raise InputError(f"roofline: {self.hardware.name} has no link_bytes_s, which tensor_parallel needs")
        if 0 < self.hardware.memory_bytes < self.weight_bytes / self.tensor_parallel:
            raise InputError(
                f"roofline: the weights of {self.model.name} take {self.weight_bytes / self.tensor_parallel / 1e9:.0f} "
                f"GB a device, {self.hardware.name} has {self.hardware.memory_bytes / 1e9:.0f}; choose larger "
                "hardware, fewer bits (--weights) or more devices (--tp)"
            )

    @property
    def formats(self) -> str:
        """The formats besides `dtype`, in words."""
        weights = self.weights
        if isinstance(weights, Mapping):
            weights = ", ".join(f"{part} {name}" for part, name in weights.items())
        named = {"weights": weights, "activations": self.activations, "cache": self.cache}
        return "".join(f", {what} {name}" for what, name in named.items() if name)

    @property
    def notes(self) -> list[str]:
        """Limits of the hardware that users should know: slow passes over a few tokens, and emulated cache formats."""
        name, packed = self.hardware.name, self.hardware.reread[1]
        notes = []
        if packed:
            passes = 1 + packed * (SMALL_BATCH - 1)
            notes.append(
                f"kernels of {name} read packed weights again for each row of a small batch: a pass of {SMALL_BATCH} "
                f"rows takes about {passes:.1f} decode steps; measure pass times and give them to `specsim cost "
                "calibrate --measured`"
            )
        if self.cache == "float8" and "float8" not in self.hardware.flops:
            notes.append(
                f"{name} has no float8: the cache is unpacked in software, and attention is slower than priced"
            )
        return notes

    @cached_property
    def weight_bytes(self) -> float:
        """Bytes of the weights on all devices together."""
        packed = {**self.model.matrices, "head": self.model.head_parameters}
        rest = self.model.parameters - sum(packed.values())
        return sum(size * self._weight_bytes(part) for part, size in packed.items()) + rest * self._width

    def kv_bytes(self, context: npt.ArrayLike) -> Floats:
        """Bytes of the cache of a sequence with `context` tokens on all devices together; copies count once."""
        return np.asarray(self._token_bytes(context, 1) + self._state_bytes)

    def device_bytes(self, sequences: npt.ArrayLike, context: npt.ArrayLike) -> Floats:
        """Weights, and the caches of so many sequences with `context` tokens each, on a device."""
        caches = self._token_bytes(context, self.tensor_parallel) + self._state_bytes / self.tensor_parallel
        return np.asarray(self.weight_bytes / self.tensor_parallel + np.asarray(sequences) * caches)

    def _token_bytes(self, context: npt.ArrayLike, devices: int) -> Floats:
        """Bytes of a sequence's cache that grow with its context, on one of `devices` devices."""
        tokens, bytes_ = np.asarray(context, dtype=np.float64), np.zeros(np.shape(context))
        for block, count in self.model.blocks.items():
            if isinstance(block, Attending):
                kv = block.cached(tokens) * block.cached_width * self._cache_width
                bytes_ = bytes_ + count * kv / holders(block, devices)
                if block.index and block.index.own:
                    bytes_ = bytes_ + count * tokens / block.index.ratio * block.index.key_bytes
        return np.asarray(bytes_)

    @property
    def _state_bytes(self) -> float:
        """Bytes of a sequence's recurrent states and of the tokens that convolutions keep."""
        return float(
            sum(
                count * (block.state_size * STATE_BYTES[self.states] + self._convolved_tokens(block))
                for block, count in self.model.blocks.items()
                if isinstance(block, LinearAttention)
            )
        )

    def _convolved_tokens(self, linear: LinearAttention) -> float:
        """Bytes of the past tokens that a layer's convolution reads."""
        return max(linear.kernel - 1, 0) * linear.convolved_width * self._width

    @property
    def _width(self) -> float:
        return BITS[self.dtype] / 8

    @property
    def _cache_width(self) -> float:
        return BITS[self.cache or self.dtype] / 8

    def _format(self, part: Part | None) -> str:
        """The format of the weights of a part; None: of routers and the like."""
        if part is None or self.weights is None:
            return self.dtype
        if isinstance(self.weights, str):
            return self.dtype if part == "head" and self.weights not in GGUF_BITS else self.weights
        whole = self.weights.get("mlp", self.dtype) if part == "experts" else self.dtype
        return self.weights.get(part, whole)

    def _weight_bytes(self, part: Part | None) -> float:
        return BITS[self._format(part)] / 8

    def _products(self, weights: str) -> str:
        """The type in which weights, or a cache, of this format are multiplied with activations."""
        return product_type(weights, self.activations, self.dtype)

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
            yield self._linear("residual blocks", rows, model.hidden_size, model.hidden_size, heads, "mlp")
            yield Operation("activations", 3 * heads * states, launches=heads)
        else:
            heads = 1
            yield Operation("embedding", 2 * states, launches=1)
            if model.projected_width:
                yield self._linear("input projection", rows, model.projected_width, model.hidden_size, 1, "mlp")
            yield Operation("last norm", 4 * states, launches=1)
        yield self._linear("head", rows, model.hidden_size, model.vocab_size, heads, "head")
        yield Operation("sampling", heads * rows * model.vocab_size * self._width, launches=1)

    def layers(self, model: Architecture, tokens: BatchTokens) -> Iterator[Operation]:
        """Operations of the layers of `model` in such a pass, summed over layers."""
        if not model.num_layers:
            return
        rows, count, devices = tokens.new, model.blocks.total(), self.tensor_parallel
        states = rows * model.hidden_size * self._width
        # Reads and writes the hidden state and every residual stream.
        yield Operation("norms", count * 2 * (1 + model.streams) * states, launches=count)
        for block, times in model.blocks.items():
            match block:
                case Attention():
                    yield from self._attention(block, times, model.hidden_size, tokens)
                case LatentAttention():
                    yield from self._latent_attention(block, times, model.hidden_size, tokens)
                case LinearAttention():
                    yield from self._linear_attention(block, times, model.hidden_size, tokens)
                case Mlp():
                    yield from self._mlp("MLP", rows, model.hidden_size, block, times)
                case Experts():
                    yield from self._experts(block, times, model.hidden_size, tokens)
        if devices > 1:  # every device sends its share of the sum to the others, and then of the result
            sent = 2 * (devices - 1) / devices * states
            yield Operation("all-reduce", 0.0, link_bytes=count * sent, all_reduces=count)

    def _attention(self, block: Attention, count: int, hidden: int, tokens: BatchTokens) -> Iterator[Operation]:
        """Operations of attention, whose heads are divided over the devices."""
        rows, width, devices = tokens.new, self._width, self.tensor_parallel
        inputs, queries, results = block.states * hidden, block.query_width, block.value_width
        projected = block.gate_width + block.made_width
        if block.query_rank:
            yield self._linear("latents", rows, inputs, block.query_rank, count, "attention", divided=False)
            yield self._linear("queries", rows, block.query_rank, queries, count, "attention")
        else:
            projected += queries
        yield self._linear("queries, keys, values", rows, inputs, projected, count, "attention")
        yield from self._other_projections(block, count, hidden, tokens)
        moved = count * rows * (queries + block.cached_width) * width / devices
        yield Operation("rotation, cache write", 2 * moved, launches=count)
        entries, pairs = self._reached(block, tokens)
        kv = count * entries * block.kv_width * self._cache_width / holders(block, devices)
        products = 2 * (queries + results) * count * pairs / devices
        yield Operation("attention", kv + count * rows * (queries + results) * width / devices, products, count,
                        products=self._products(self.cache or self.dtype))  # fmt: skip
        yield from self._gate(block, count, rows * results)
        if block.output_rank:
            groups = block.output_groups
            yield self._per_head("output latents", rows, results // groups, block.output_rank, groups, count)
            results = groups * block.output_rank
        yield self._linear("output projection", rows, results, hidden, count, "attention")

    def _latent_attention(
        self, block: LatentAttention, count: int, hidden: int, tokens: BatchTokens
    ) -> Iterator[Operation]:
        """Operations of latent attention: every device holds all latent vectors, heads are divided over the devices."""
        rows, width, devices, heads = tokens.new, self._width, self.tensor_parallel, block.heads
        down = block.query_rank + block.cached_width
        yield self._linear("queries and latents", rows, hidden, down, count, "attention", divided=False)
        yield self._linear("queries", rows, block.query_rank or hidden, block.query_width, count, "attention")
        yield from self._other_projections(block, count, hidden, tokens)
        attended, pairs = self._reached(block, tokens)
        yield self._per_head("absorbed keys", rows, block.nope_dim, block.kv_rank, heads, count)
        moved = rows * (heads * block.cached_width / devices + block.cached_width)
        yield Operation("rotation, cache write", 2 * count * moved * width, launches=count)
        wide = block.cached_width + block.kv_rank  # of a query and of its result, and of a pair's products
        cache = attended * block.cached_width * self._cache_width
        yield Operation("attention", count * (cache + rows * heads * wide * width / devices),
                        2 * count * heads * wide * pairs / devices, count,
                        products=self._products(self.cache or self.dtype))  # fmt: skip
        yield self._per_head("absorbed values", rows, block.kv_rank, block.value_dim, heads, count)
        if block.gate_width:
            made_from = block.gate_rank or hidden
            yield self._linear("gate", rows, made_from, block.gate_width, count, "attention")
        yield from self._gate(block, count, rows * heads * block.value_dim)
        yield self._linear("output projection", rows, heads * block.value_dim, hidden, count, "attention")

    def _reached(self, block: Attending, tokens: BatchTokens) -> tuple[Floats, Floats]:
        """Cache entries of a layer that a pass reads, and pairs of a query and an entry that it attends to."""
        rows, all_ = tokens.new, tokens.cached + tokens.new
        context = tokens.cached / tokens.sequences
        near = tokens.sequences * block.near(context, attended=True)
        far = tokens.sequences * block.far(context)
        near, far = (near + rows, far) if block.window else (near, far + rows)
        near_pairs, far_pairs = tokens.pairs * (near / all_), tokens.pairs * (far / all_)
        if block.index:
            far, far_pairs = (np.minimum(each, rows * block.index.top_k) for each in (far, far_pairs))
        return near + far, near_pairs + far_pairs

    def _other_projections(self, block: Attending, count: int, hidden: int, tokens: BatchTokens) -> Iterator[Operation]:
        """The projections of `extra_width` and the indexer, which every device computes in full."""
        rows, index = tokens.new, block.index
        if block.extra_width:
            yield self._linear("other projections", rows, hidden, block.extra_width, count, "attention", divided=False)
        if index is None or not index.own:
            return
        queries, made_from = index.heads * index.dim, index.query_rank or hidden
        yield self._linear("index queries", rows, made_from, queries, count, "attention", divided=False)
        yield self._linear("index keys", rows, hidden, index.key_width, count, "attention", divided=False)
        keys, pairs = (tokens.cached + rows) / index.ratio, tokens.pairs / index.ratio
        products = "float8" if "float8" in self.hardware.flops else self.dtype
        # Scores are written in float32 and read again to select the highest.
        yield Operation("index scores", count * (keys * index.key_bytes + 2 * 4 * pairs), 2 * count * queries * pairs,
                        2 * count, products=products)  # fmt: skip

    def _gate(self, block: Attending, count: int, results: Floats) -> Iterator[Operation]:
        """The gate on attention's output."""
        if block.gate_width:
            yield Operation("attention gate", 3 * count * results * self._width / self.tensor_parallel, launches=count)

    def _linear_attention(
        self, linear: LinearAttention, count: int, hidden: int, tokens: BatchTokens
    ) -> Iterator[Operation]:
        """Operations of a block with a recurrent state, whose heads are divided over the devices.

        A decode step reads and writes the state of each sequence once. With states in "float32" or "bfloat16" a
        verification pass writes and reads the state of every token, because any token may be the last accepted one.
        """
        rows, width, devices = tokens.new, self._width, self.tensor_parallel
        outputs = linear.output_width
        yield self._linear("linear attention inputs", rows, hidden, linear.input_width, count, "attention")
        convolved, kernel = linear.convolved_width, linear.kernel
        if kernel:
            moved = 2 * rows + 2 * tokens.sequences * (kernel - 1) + kernel  # new tokens, those before them, weights
            yield Operation("convolution", count * moved * convolved * width / devices,
                            2 * count * rows * kernel * convolved / devices, count)  # fmt: skip
        if linear.inner_weights:
            size = count * linear.inner_weights / devices
            yield Operation("linear attention gates", size * self._weight_bytes("attention"), 2 * rows * size, count,
                            products=self._products(self._format("attention")))  # fmt: skip
        kept = tokens.sequences if self.states == "replay" else np.maximum(rows - tokens.prompts, tokens.sequences)
        states = 2 * kept * linear.state_size * STATE_BYTES[self.states]
        yield Operation("linear attention", count * (states + rows * (convolved + outputs) * width) / devices,
                        2 * linear.products * count * rows * linear.state_size / devices, count)  # fmt: skip
        yield Operation("norm, gate", 3 * count * rows * outputs * width / devices, launches=count)
        yield self._linear("linear attention outputs", rows, outputs, hidden, count, "attention")

    def _linear(
        self, name: str, rows: Floats, inputs: int, outputs: int, count: int, part: Part | None, *, divided: bool = True
    ) -> Operation:
        """A matrix of each of `count` layers. divided : over the devices; else every device holds all of it"""
        size = inputs * outputs * count / (self.tensor_parallel if divided else 1)
        states = count * rows * (inputs + outputs) * self._width
        products = self._products(self._format(part)) if part else ""
        weights = size * (self._weight_bytes(part) + self._further_bytes(rows, part))
        return Operation(name, weights + states, 2 * rows * size, count, products=products)

    def _further_bytes(self, rows: Floats, part: Part | None) -> Floats:
        """Bytes per weight whose reading takes as long as the rows after the first take, up to `SMALL_BATCH` rows."""
        width = self._weight_bytes(part)
        share = self.hardware.reread[width < 2]
        each = share * width
        vector_flops = self.vector * self.hardware.flops.get("float32", 0.0)
        if not any(self.hardware.reread) and vector_flops and width < 2:
            each = 2 * self.hardware.memory_bytes_s * self.derating.memory / vector_flops
        return each * (np.clip(rows, 1, SMALL_BATCH) - 1)

    def _per_head(self, name: str, rows: Floats, inputs: int, outputs: int, heads: int, count: int) -> Operation:
        """A matrix per head of each of `count` layers, which multiplies the inputs of that head."""
        heads_here = heads / self.tensor_parallel
        size, states = inputs * outputs * heads_here * count, count * rows * heads_here * (inputs + outputs)
        weights = size * (self._weight_bytes("attention") + self._further_bytes(rows, "attention"))
        work = weights + states * self._width, 2 * rows * size, count
        return Operation(name, *work, products=self._products(self._format("attention")))

    def _mlp(self, name: str, rows: Floats, hidden: int, mlp: Mlp, count: int) -> Iterator[Operation]:
        inner, gated = mlp.intermediate_size, mlp.matrices == 3
        up = f"{name} gate, up" if gated else f"{name} up"
        yield self._linear(up, rows, hidden, (mlp.matrices - 1) * inner, count, "mlp")
        moved = mlp.matrices * count * rows * inner * self._width / self.tensor_parallel
        yield Operation(f"{name} activation", moved, launches=count)
        yield self._linear(f"{name} down", rows, inner, hidden, count, "mlp")

    def _experts(self, experts: Experts, count: int, hidden: int, tokens: BatchTokens) -> Iterator[Operation]:
        rows, inner, width = tokens.new, experts.intermediate_size, self._width
        copies = rows * experts.per_token
        seen, ups = experts.latent or hidden, experts.matrices - 1
        matrix = count * seen * inner / self.tensor_parallel
        decoded = rows - tokens.prompts
        of_sequence = np.maximum(decoded / np.maximum(tokens.sequences, 1), 1.0)
        alike = 1.0 if experts.routing == "balanced" else EXPERTS_ALIKE
        read = experts.read(
            decoded * of_sequence ** (alike - 1) + tokens.prompts
        )  # equivalent number of independent tokens
        again = self._further_bytes(copies / read, "experts")  # rows per expert that is read
        weights = read * matrix * (self._weight_bytes("experts") + again)
        products = self._products(self._format("experts"))
        yield self._linear("router", rows, hidden, experts.count, count, None)
        yield Operation("choice of experts", count * rows * experts.count * width, launches=2 * count)
        if experts.latent:
            yield self._linear("experts' latents", rows, hidden, seen, count, "mlp", divided=False)
        up = count * copies * (seen + ups * inner) * width
        yield Operation("experts gate, up" if ups == 2 else "experts up", ups * weights + up,
                        2 * ups * copies * matrix, count, products=products)  # fmt: skip
        gated = experts.matrices * count * copies * inner * width / self.tensor_parallel
        yield Operation("experts activation", gated, launches=count)
        down = count * copies * (seen + inner) * width
        yield Operation("experts down", weights + down, 2 * copies * matrix, count, products=products)
        yield Operation("sum of experts", count * (copies + rows) * seen * width, launches=count)
        if experts.latent:
            yield self._linear("states of latents", rows, seen, hidden, count, "mlp", divided=False)
        if experts.shared_intermediate_size:
            shared = Mlp(experts.shared_intermediate_size, experts.matrices)
            yield from self._mlp("shared expert", rows, hidden, shared, count)

    def time(self, operation: Operation) -> Seconds:
        """Seconds of an operation."""
        work = operation.bytes, operation.flops, operation.launches, operation.link_bytes, operation.all_reduces
        return np.asarray(seconds_of(*work, self.ceilings(operation.products), self.derating))

    def ceilings(self, products: str = "") -> tuple[float, float, float]:
        """Bytes/s of memory, FLOP/s of products of this type, bytes/s between devices."""
        throughput = self.hardware.flops_of(products or self.dtype)
        return self.hardware.memory_bytes_s, throughput, self.hardware.link_bytes_s

    def total(self, operations: Iterable[Operation]) -> Seconds:
        """Seconds of operations in sequence."""
        return np.asarray(sum(self.time(operation) for operation in operations))

    def seconds(self, n_tokens: int, context: npt.ArrayLike, batch: int = 1) -> Seconds:
        """Seconds of a pass, see `operations`."""
        return self.batch_seconds(BatchTokens.alike(batch, n_tokens, context))

    def batch_seconds(self, tokens: BatchTokens, *, ends: bool = True) -> Seconds:
        """Seconds of passes over ragged batches. ends : embedding and head as well; else the layers alone"""
        return self.total(self.batch_operations(tokens) if ends else self.layers(self.model, tokens))


def holders(block: Attending, devices: int) -> int:
    """Number of parts into which the devices divide a block's cache: at most one per key-value head, the other devices
    hold copies; 1 for latent attention, whose cache every device holds in full."""
    return min(devices, block.kv_heads) if isinstance(block, Attention) else 1


@cache
def product_type(weights: str, activations: str | None, dtype: str) -> str:
    """The wider of weights and activations, in whose type they are multiplied."""
    bits = max(int(BITS[weights]), PRODUCTS.get(activations or "", int(BITS[dtype])))
    return next((name for name, narrow in PRODUCTS.items() if bits == narrow), dtype)


def seconds_of(
    read: Any,
    flops: Any,
    launches: Any,
    sent: Any,
    all_reduces: Any,
    ceilings: tuple[float, Any, float],
    derating: Derating,
) -> Any:
    """Seconds of operations with these bytes, FLOPs, launches, bytes between devices and all-reduces."""
    memory, throughput, link = ceilings
    reading, computing = read / (memory * derating.memory), flops / (throughput * derating.compute)
    hidden = (1 - derating.overlap) * np.minimum(reading, computing)
    sending = sent / link if link else 0.0
    waiting = launches * derating.launch_s + all_reduces * derating.all_reduce_s
    return np.maximum(reading, computing) + hidden + sending + waiting
