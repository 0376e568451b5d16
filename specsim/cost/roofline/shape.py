"""The shape of a decoder: what decides how many bytes a pass reads and how many FLOPs it does."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from specsim.io.arrays import Floats
from specsim.io.errors import InputError

MAX_SIZE = 2**31  # exclusive limit of every size
Routing = Literal["uniform", "balanced"]
Part = Literal["attention", "mlp", "experts", "head"]
Values = Literal["own", "projected keys", "keys", "shared"]


@dataclass(frozen=True)
class Indexer:
    """The indexer of sparse attention, which selects the cached tokens that a query attends to.

    top_k : most cache entries that a query attends to
    heads, dim : number and width of the indexer's heads
    key_bytes : bytes of a cached key
    query_rank : width of the latent vector that queries are projected from; 0: from the hidden state
    ratio : cached tokens per index key
    weighted : whether a projection of the hidden state weights the scores of the heads
    own : whether this layer has an indexer of its own; else it reuses the selection of an earlier layer

    References: DeepSeek-AI 2025, DeepSeek-V3.2-Exp.
    """

    top_k: int
    heads: int
    dim: int
    key_bytes: float
    query_rank: int = 0
    ratio: int = 1
    weighted: bool = True
    own: bool = True

    @property
    def key_width(self) -> int:
        """Width of the projection of a hidden state: a key, and a weight per head."""
        return self.dim + self.weighted * self.heads

    def weights(self, hidden: int) -> int:
        return self.own * ((self.query_rank or hidden) * self.heads * self.dim + hidden * self.key_width)


@dataclass(frozen=True, kw_only=True)
class Attending:
    """An attention block with a cache that grows with the context.

    heads : number of query heads
    window : latest tokens that a query attends to; 0: all
    chunked : whether a query attends to its chunk of `window` tokens, which holds half as many on average
    ratio : tokens per cache entry beyond the window; 0: the cache holds the window alone
    index : selects the entries beyond the window that a query attends to; None: all
    gate_width : width of the gate on the output of all heads
    extra_width : width of other projections of the hidden state, such as compressed keys
    """

    heads: int
    window: int = 0
    chunked: bool = False
    ratio: int = 0
    index: Indexer | None = None
    gate_width: int = 0
    extra_width: int = 0

    def near(self, context: Floats, *, attended: bool = False) -> Floats:
        """Cached tokens in the window. attended : count those that a query attends to on average, fewer in chunks"""
        if not self.window:
            return np.zeros_like(context)
        longest = self.window / 2 if self.chunked and attended else self.window
        return np.where(context < self.window, context, longest)

    def far(self, context: Floats) -> Floats:
        """Cache entries beyond the window."""
        if not self.window:
            return context
        return context / self.ratio if self.ratio else np.zeros_like(context)

    def cached(self, context: Floats) -> Floats:
        """Cache entries at this context length."""
        return self.near(context) + self.far(context)

    def attended(self, context: Floats) -> Floats:
        """Cache entries that a query attends to at this context length, before an indexer selects from them."""
        return self.near(context, attended=True) + self.far(context)

    def extra_weights(self, hidden: int) -> int:
        """Weights of the indexer and of the projections of `extra_width`."""
        return self.extra_width * hidden + (self.index.weights(hidden) if self.index else 0)


@dataclass(frozen=True, kw_only=True)
class Attention(Attending):
    """Multi-head, grouped-query or multi-query attention.

    kv_heads : number of key-value heads
    head_dim, value_dim : width of a head's keys and of its values; value_dim 0: as wide as keys
    values : "own": values have their own projection; "projected keys": keys and values share a projection and the cache
        holds both (Gemma-4); "keys": the cached keys are the values (DeepSeek-V4); "shared": keys and values of an
        earlier layer are used, this layer caches none
    states : hidden states that are concatenated as input of the projections; EAGLE-3: 2
    query_rank : width of the latent vector that queries are projected from; 0: from the hidden state
    output_rank, output_groups : a low-rank output projection first maps each of `output_groups` groups of heads to
        `output_rank`; rank 0: one output matrix
    """

    kv_heads: int
    head_dim: int
    value_dim: int = 0
    values: Values = "own"
    states: int = 1
    query_rank: int = 0
    output_rank: int = 0
    output_groups: int = 1

    part: ClassVar[Part] = "attention"

    @property
    def value_width(self) -> int:
        """Width of the results of all heads."""
        return self.heads * (self.value_dim or self.head_dim)

    @property
    def query_width(self) -> int:
        """Width of the queries of all heads."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers of a cached token that attention reads, without an indexer's keys."""
        keys = self.kv_heads * self.head_dim
        return keys if self.values == "keys" else keys + self.kv_heads * (self.value_dim or self.head_dim)

    @property
    def cached_width(self) -> int:
        """Numbers that a token adds to the cache, without an indexer's keys."""
        return 0 if self.values == "shared" else self.kv_width

    @property
    def made_width(self) -> int:
        """Width of the projection to keys and values."""
        return self.kv_heads * self.head_dim if self.values in ("projected keys", "keys") else self.cached_width

    def weights(self, hidden: int) -> int:
        inputs = self.states * hidden
        queries = inputs * self.query_width
        if self.query_rank:
            queries = self.query_rank * (inputs + self.query_width)
        output = self.value_width * hidden
        if self.output_rank:
            output = self.output_rank * (self.value_width + self.output_groups * hidden)
        return queries + inputs * (self.gate_width + self.made_width) + output + self.extra_weights(hidden)


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Attending):
    """Multi-head latent attention (MLA): the cache holds one latent vector and one rotary key per token for all heads.

    In decoding, the up-projections of keys and values are absorbed into queries and outputs, so attention scores and
    sums are computed at the width of the latent vector.

    kv_rank, rope_dim : width of a token's latent vector and of its rotary key
    query_rank : width of the latent vector that queries are projected from; 0: from the hidden state
    nope_dim, value_dim : width per head of the keys' part without rotary embedding, and of values
    gate_rank : width of the latent vector that the gate is projected from; 0: from the hidden state

    References: DeepSeek-AI 2024, DeepSeek-V2, arXiv:2405.04434, section 2.1.

    >>> from specsim.cost.roofline.architecture import find_architecture
    >>> from specsim.cost.roofline.shape import LatentAttention
    >>> find_architecture("deepseek-v3").of(LatentAttention)[0].cached_width
    576
    """

    kv_rank: int
    rope_dim: int
    query_rank: int
    nope_dim: int
    value_dim: int
    gate_rank: int = 0

    part: ClassVar[Part] = "attention"

    @property
    def cached_width(self) -> int:
        """Numbers that a token adds to the cache, without an indexer's keys."""
        return self.kv_rank + self.rope_dim

    @property
    def query_width(self) -> int:
        """Width of the queries of all heads."""
        return self.heads * (self.nope_dim + self.rope_dim)

    def weights(self, hidden: int) -> int:
        shared = hidden * (self.query_rank + self.cached_width)
        head = self.kv_rank * (self.nope_dim + self.value_dim) + self.value_dim * hidden
        queries = (self.query_rank or hidden) * self.query_width
        gate = (self.gate_rank or hidden) * self.gate_width
        return shared + queries + self.heads * head + gate + self.extra_weights(hidden)


@dataclass(frozen=True, kw_only=True)
class LinearAttention:
    """A block with a recurrent state of fixed size instead of a KV cache: linear attention, Mamba, convolutions.

    state_size : elements of a sequence's recurrent state
    convolved_width : channels of the short convolution: queries, keys and values
    input_width : width of the input projection: convolved channels, gates, decays, update rates
    output_width : width of a token's output before the output projection
    kernel : tokens that the convolution covers; 0: no convolution
    products : multiply-adds per token and element of the state, such as correction, update and readout
    inner_weights : weights between the input and output projections
    heads : heads of the state, which tensor parallelism divides

    References: Yang et al. 2024, "Gated Delta Networks", arXiv:2412.06464; Dao and Gu 2024, Mamba-2, arXiv:2405.21060.

    >>> from specsim.cost.roofline.architecture import find_architecture
    >>> from specsim.cost.roofline.shape import LinearAttention
    >>> find_architecture("qwen3-next-80b-a3b").of(LinearAttention)[0].state_size
    524288
    """

    state_size: int
    convolved_width: int
    input_width: int
    output_width: int
    kernel: int
    products: int = 3
    inner_weights: int = 0
    heads: int = 1

    part: ClassVar[Part] = "attention"

    def weights(self, hidden: int) -> int:
        projected = hidden * (self.input_width + self.output_width)
        return projected + self.kernel * self.convolved_width + self.inner_weights


@dataclass(frozen=True)
class Mlp:
    """A dense MLP. intermediate_size : inner width; matrices : 3 with a gate, else 2"""

    intermediate_size: int
    matrices: int = 3

    part: ClassVar[Part] = "mlp"

    def weights(self, hidden: int) -> int:
        return self.matrices * hidden * self.intermediate_size


@dataclass(frozen=True)
class Experts:
    """A mixture of experts, which replaces a layer's MLP.

    count, per_token : experts in the layer, and experts that a token is routed to
    intermediate_size : inner width of an expert
    shared_intermediate_size : inner width of the shared expert, which every token uses; 0: none
    routing : "uniform": tokens choose experts uniformly and independently; "balanced": tokens spread over as many
        experts as possible
    probs : measured router statistics, which replace `routing`: the probability that a token goes to each expert;
        `count` numbers that sum to `per_token`
    matrices : matrices of an expert, 3 with a gate, else 2
    latent : width to which hidden states are projected before the experts, and from which they are projected back;
        0: experts read hidden states

    Raises InputError for invalid probabilities, or if per_token exceeds count.

    >>> from specsim.cost.roofline.shape import Experts
    >>> mixtral = Experts(count=8, per_token=2, intermediate_size=14336)
    >>> mixtral.read([1, 2, 4]).tolist()
    [2.0, 3.5, 5.46875]
    """

    count: int
    per_token: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    routing: Routing = "uniform"
    probs: tuple[float, ...] = ()
    matrices: int = 3
    latent: int = 0

    part: ClassVar[Part] = "experts"

    def __post_init__(self) -> None:
        if not 1 <= self.per_token <= self.count:
            raise InputError(f"architecture: {self.per_token} experts a token of {self.count}; give 1 to {self.count}")
        if self.routing not in ("uniform", "balanced"):
            raise InputError(f"architecture: routing {self.routing!r} is unknown; known: uniform, balanced")
        if not self.probs:
            return
        if len(self.probs) != self.count or not all(0 <= p <= 1 for p in self.probs):
            raise InputError(f"architecture: router statistics are not {self.count} probabilities; give all experts'")
        if abs(sum(self.probs) - self.per_token) > 0.01 * self.per_token:
            raise InputError(
                f"architecture: router statistics sum to {sum(self.probs):g}, a token goes to {self.per_token} "
                "experts; give the probability that a token goes to each"
            )

    def read(self, n_tokens: npt.ArrayLike) -> Floats:
        """Expected number of experts whose weights a pass over n tokens reads."""
        n = np.asarray(n_tokens, dtype=np.float64)
        if self.probs:
            return np.asarray(np.sum(1 - (1 - np.array(self.probs)) ** n[..., None], axis=-1))
        if self.routing == "balanced":
            return np.minimum(self.count, self.per_token * n)
        return np.asarray(self.count * (1 - (1 - self.per_token / self.count) ** n))

    def weights(self, hidden: int) -> int:
        return self.count * self.matrices * (self.latent or hidden) * self.intermediate_size

    def shared_weights(self, hidden: int) -> int:
        """Weights of the shared expert and of the projections to and from `latent`, which have the MLP's format."""
        return hidden * (self.matrices * self.shared_intermediate_size + 2 * self.latent)


Mixer = Attention | LatentAttention | LinearAttention
Block = Mixer | Mlp | Experts
Layer = tuple[Block, ...]
B = TypeVar("B", Attention, LatentAttention, LinearAttention, Mlp, Experts)


@dataclass(frozen=True)
class Architecture:
    """A decoder-only model: an embedding, layers of pre-norm blocks, and an output head.

    name : name in error messages and reports
    hidden_size, vocab_size : width of the hidden state and of the output head
    layers : the blocks of each layer, in order
    tied : whether embedding and output head share their weights
    intermediate_size : inner width of a dense MLP in this model's drafters
    mtp_layer : layer of the model's MTP module if it differs from the model's own layers
    tables : weights of lookup tables other than the embedding, such as learned positions
    projected_width : input width of the projection before the first layer, which concatenates hidden states and
        embeddings; EAGLE: 2 * hidden_size; 0: no projection
    streams : parallel residual streams of a token (hyper-connections)
    medusa_heads : MEDUSA heads on the last hidden state, each a residual block and an output head

    >>> from specsim.cost.roofline.architecture import find_architecture
    >>> model = find_architecture("llama-2-7b")
    >>> model.parameters
    6738415616
    """

    name: str
    hidden_size: int
    vocab_size: int
    layers: tuple[Layer, ...]
    tied: bool = False
    intermediate_size: int = 0
    mtp_layer: Layer = ()
    tables: int = 0
    projected_width: int = 0
    streams: int = 1
    medusa_heads: int = 0

    def __post_init__(self) -> None:
        for block in (self, *self.blocks):
            for field in fields(block):
                value, least = getattr(block, field.name), int(field.name in NOT_NONE)
                if type(value) is int and not least <= value < (MAX_SIZE**2 if field.name == "tables" else MAX_SIZE):
                    raise InputError(f"architecture {self.name}: {field.name}={value}; give at least {least}")
        for attention in self.of(Attention):
            if attention.heads % attention.kv_heads:
                raise InputError(
                    f"architecture {self.name}: {attention.heads} heads over {attention.kv_heads} key-value heads; "
                    "give a multiple"
                )

    @cached_property
    def blocks(self) -> Counter[Block]:
        """Number of occurrences of each block."""
        return Counter(block for layer in self.layers for block in layer)

    def of(self, kind: type[B]) -> list[B]:
        """The different blocks of a kind."""
        return [block for block in self.blocks if isinstance(block, kind)]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def experts(self) -> Experts | None:
        """The first mixture of experts, or None."""
        return next(iter(self.of(Experts)), None)

    @property
    def widest_attention(self) -> Attention | LatentAttention:
        """The model's attention without a sliding window; InputError for a model without attention."""
        blocks: list[Attention | LatentAttention] = [*self.of(Attention), *self.of(LatentAttention)]
        blocks.sort(key=lambda block: block.window > 0)
        if not blocks:
            raise InputError(f"architecture {self.name} has no attention, so a drafter's layer has no known shape")
        return replace(blocks[0], window=0)

    @property
    def plain_attention(self) -> Attention:
        """Full attention with the model's numbers of heads, as drafters of one dense layer use it."""
        block = self.widest_attention
        if isinstance(block, LatentAttention):
            return Attention(heads=block.heads, kv_heads=block.heads, head_dim=block.value_dim)
        return Attention(heads=block.heads, kv_heads=block.kv_heads, head_dim=block.head_dim)

    @property
    def dense_layer(self) -> Layer:
        """A layer of the model's attention and a dense MLP, as EAGLE uses it."""
        return self.widest_attention, Mlp(self.intermediate_size)

    @property
    def predicting_layer(self) -> Layer:
        """The layer of the model's MTP module."""
        return self.mtp_layer or (self.widest_attention, self.experts or Mlp(self.intermediate_size))

    def attending(self, states: int) -> Architecture:
        """A copy whose queries, keys and values are projected from `states` concatenated hidden states."""
        blocks: dict[Block, Block] = {block: replace(block, states=states) for block in self.of(Attention)}
        return replace(self, layers=tuple(tuple(blocks.get(block, block) for block in layer) for layer in self.layers))

    def count(self, *kinds: type[Block]) -> int:
        """Number of blocks of these kinds."""
        return sum(n for block, n in self.blocks.items() if isinstance(block, kinds))

    @property
    def matrices(self) -> dict[Part, int]:
        """Weights of the matrices that are quantized, by part; input projections count as "mlp"."""
        hidden = self.hidden_size
        sizes: dict[Part, int] = {"attention": 0, "mlp": self.projected_width * hidden, "experts": 0}
        sizes["mlp"] += self.medusa_heads * hidden**2
        for block, n in self.blocks.items():
            sizes[block.part] += n * block.weights(hidden)
            if isinstance(block, Experts):
                sizes["mlp"] += n * block.shared_weights(hidden)
        return sizes

    @property
    def stack_parameters(self) -> int:
        """Weights of all matrices but embedding and head; routers included."""
        routers = sum(
            n * self.hidden_size * block.count for block, n in self.blocks.items() if isinstance(block, Experts)
        )
        return sum(self.matrices.values()) + routers

    @property
    def head_parameters(self) -> int:
        """Weights of the output head, or of all MEDUSA heads."""
        return (1 + self.medusa_heads) * self.vocab_size * self.hidden_size

    @property
    def norms(self) -> int:
        """Weights of the norm before each block and of the final norm."""
        return (self.blocks.total() + 1) * self.hidden_size

    @property
    def parameters(self) -> int:
        """All weights but biases and the norms within attention; tied weights count once."""
        embedding = 0 if self.tied else self.vocab_size * self.hidden_size
        return self.stack_parameters + self.head_parameters + embedding + self.tables + self.norms

    def first(self, layers: int, name: str = "") -> Architecture:
        """A model of the first layers, with the same output head."""
        return replace(self, name=name or f"{self.name}, {layers} layers", layers=self.layers[:layers])

    def after(self, layers: int) -> Architecture:
        """A model without the first layers, with the same output head."""
        return replace(self, layers=self.layers[layers:])


NOT_NONE = ("hidden_size", "vocab_size", "heads", "kv_heads", "head_dim")  # sizes that must be at least 1
