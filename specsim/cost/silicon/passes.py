"""Passes of a model by measured operators: matrices by a pass's tokens, attention by its sequences and context."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from specsim.cost.batches import BatchTokens
from specsim.cost.roofline.architecture import Architecture
from specsim.cost.roofline.hardware import find_hardware
from specsim.cost.roofline.passes import Roofline
from specsim.cost.silicon.tables import LARGEST_CONTEXT, ROUTINGS, Tables, tables
from specsim.io.arrays import Floats, Seconds
from specsim.io.errors import InputError

Attention = Literal["once", "separate"]
CONTEXTS: Floats = np.exp2(
    np.arange(18, dtype=np.float64)
)  # at which attention was measured; between them it is a straight line
NORMS, EMBEDDING = 0.8, 0.3  # shares of memory bandwidth, the package's own


@dataclass(frozen=True)
class SiliconPasses:
    """Passes of a model on a GPU, as NVIDIA measured their operations.

    hardware : a name of `specsim.cost.silicon.tables.SYSTEMS`
    framework : {"vllm", "trtllm", "sglang"}, whose kernels
    dtype : {"bfloat16", "float8"}, of the layers' matrices; cache and head are bfloat16
    tensor_parallel : devices that share the matrices
    routing : {"balanced", "power_law_1.01", "power_law_1.2"}, how tokens are dealt to experts
    attention : nobody has measured attention of several queries of a sequence over a cache. "once" counts them as a
        single query, which reads the cache once, the least it can take; "separate" as so many sequences, each of which
        reads a cache of its own, the most. The truth lies between, near "once" while reading the cache decides

    Raises InputError where the package or tables are missing, or the weights do not fit.

    References: NVIDIA, aiconfigurator-core, https://pypi.org/project/aiconfigurator-core/
    """

    model: Architecture
    hardware: str
    framework: str = "vllm"
    dtype: str = "bfloat16"
    tensor_parallel: int = 1
    routing: str = "balanced"
    attention: Attention = "once"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("routing", self.routing, ROUTINGS),
            ("attention", self.attention, get_args(Attention)),
        ):
            if value not in known:
                raise InputError(f"silicon: {name} {value!r} is unknown; known: {', '.join(known)}")
        if self.model.latent or self.model.linear:
            raise InputError(
                f"silicon: attention of {self.model.name} is not read from the tables; write a cost file of the form "
                "roofline"
            )
        self.tables.mode("GEMM", self.dtype)
        # Whether it fits, and can be shared by these devices.
        weights = None if self.dtype == "bfloat16" else self.dtype
        Roofline(self.model, find_hardware(self.hardware), weights=weights, tensor_parallel=self.tensor_parallel)

    @property
    def tables(self) -> Tables:
        return tables(self.hardware, self.framework)

    def seconds(self, n_tokens: int, context: npt.ArrayLike, batch: int = 1, *, ends: bool = True) -> Seconds:
        """A pass over n_tokens new tokens of each of `batch` sequences, behind `context` cached ones each.

        ends : embedding and head as well; else the layers alone
        """
        return self.batch_seconds(BatchTokens.alike(batch, n_tokens, context), ends=ends)

    def batch_seconds(self, tokens: BatchTokens, *, ends: bool = True) -> Seconds:
        """Passes over ragged batches, whose attention is that of the mean context. ends : as of `seconds`"""
        sizes, place = np.unique(tokens.new, return_inverse=True)
        matrices = np.array([matrices_s(self, int(rows), ends) for rows in sizes])[place.reshape(np.shape(tokens.new))]
        queries = tokens.sequences if self.attention == "once" else tokens.new
        return np.asarray(matrices + self.attention_s(queries, tokens.cached / tokens.sequences))

    def attention_s(self, queries: Floats, cached: Floats) -> Seconds:
        """Attention of all layers, so many queries of a sequence each."""
        if np.max(cached, initial=0.0) > LARGEST_CONTEXT:
            raise InputError(f"silicon: attention is measured up to {LARGEST_CONTEXT:,} cached tokens; ask for fewer")
        seconds = np.zeros(np.shape(cached))
        for count in np.unique(queries).tolist():
            curve = np.interp(cached + 1, CONTEXTS, attention_curve_s(self, int(count)))
            seconds = np.where(queries == count, curve, seconds)
        return seconds

    def attention_operations(self) -> list[Any]:
        model, tables = self.model, self.tables
        shared = {"n": model.num_heads // self.tensor_parallel,
                  "n_kv": max(model.num_kv_heads // self.tensor_parallel, 1),
                  "kv_cache_dtype": tables.mode("KVCache", "bfloat16"), "head_size": model.head_dim}  # fmt: skip
        layers = (0, model.num_layers - model.window_layers), (model.window, model.window_layers)
        return [
            tables.operations.GenerationAttention("attention", count, window_size=window, **shared)
            for window, count in layers
            if count
        ]

    def matrix_operations(self, ends: bool) -> Iterator[Any]:
        """All operations that go by the tokens of a pass."""
        model, make = self.model, self.tables.operations
        count, hidden, devices = model.num_layers, model.hidden_size, self.tensor_parallel
        queries = model.num_heads * model.head_dim
        if count:
            yield make.ElementWise("norms", 2 * count, 2 * hidden, 2 * hidden, NORMS)
            kv = model.kv_width // min(devices, model.num_kv_heads)
            yield self._matrix("queries, keys, values", count, queries // devices + kv, model.attended_states * hidden)
            yield self._matrix("output projection", count, hidden, queries // devices, low_precision_input=True)
            yield from self._mlp("MLP", count - model.expert_layers, model.intermediate_size)
            yield from self._experts()
            if devices > 1:
                yield make.CustomAllReduce("all-reduce", 2 * count, hidden, devices)
        if ends:
            yield from self._ends()

    def _matrix(self, name: str, count: float, outputs: int, inputs: int, dtype: str = "", **other: bool) -> Any:
        mode = self.tables.mode("GEMM", dtype or self.dtype)
        return self.tables.operations.GEMM(name, count, outputs, inputs, mode, **other)

    def _mlp(self, name: str, count: int, width: int) -> Iterator[Any]:
        if not count or not width:
            return
        inner, hidden = width // self.tensor_parallel, self.model.hidden_size
        yield self._matrix(f"{name} gate, up", count, 2 * inner, hidden)
        yield self.tables.operations.ElementWise(f"{name} activation", count, 2 * inner, inner, NORMS)
        yield self._matrix(f"{name} down", count, hidden, inner, low_precision_input=True)

    def _experts(self) -> Iterator[Any]:
        experts, count, hidden = self.model.experts, self.model.expert_layers, self.model.hidden_size
        if experts is None or not count:
            return
        yield self._matrix("router", count, experts.count, hidden, "bfloat16")
        yield self.tables.operations.MoE(
            "experts", count, hidden, experts.intermediate_size, experts.per_token, experts.count,
            self.tensor_parallel, 1, self.tables.mode("MoE", self.dtype), self.routing, 1, is_context=False,
        )  # fmt: skip
        yield from self._mlp("shared expert", count, experts.shared_intermediate_size)

    def _ends(self) -> Iterator[Any]:
        model, make = self.model, self.tables.operations
        hidden, vocabulary = model.hidden_size, model.vocab_size // self.tensor_parallel
        if model.medusa_heads:
            yield self._matrix("residual blocks", model.medusa_heads, hidden, hidden)
            yield make.ElementWise("activations", model.medusa_heads, 2 * hidden, hidden, NORMS)
        else:
            yield make.Embedding("embedding", 1, vocabulary, hidden, EMBEDDING)
        if model.projected_width:
            yield self._matrix("input projection", 1, hidden, model.projected_width)
        yield self._matrix("head", max(model.medusa_heads, 1), vocabulary, hidden, "bfloat16")


@cache
def matrices_s(passes: SiliconPasses, rows: int, ends: bool) -> float:
    """All that goes by the tokens of a pass, `rows` of them in all."""
    return passes.tables.seconds(matrix_wire(passes, ends), rows=rows)


@cache
def matrix_wire(passes: SiliconPasses, ends: bool) -> str:
    return passes.tables.wire([*passes.matrix_operations(ends)])


@cache
def attention_curve_s(passes: SiliconPasses, sequences: int) -> Seconds:
    """Attention of all layers at all CONTEXTS."""
    if not passes.model.num_layers:
        return np.zeros(len(CONTEXTS))
    wire = passes.tables.wire(passes.attention_operations())
    each = (passes.tables.seconds(wire, sequences=sequences, context=int(length)) for length in CONTEXTS)
    return np.fromiter(each, float)
