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

MAX_SIZE = 2**31  # of any number of a shape
Routing = Literal["uniform", "balanced"]
Part = Literal["attention", "mlp", "experts", "head"]
Values = Literal["own", "projected keys", "keys", "shared"]


@dataclass(frozen=True)
class Indexer:
    """Chooses the cached tokens that a query of sparse attention attends to.

    chosen : entries of the cache that a query attends to at most
    heads, dim : heads and their width
    query_rank : width of the latent that its queries are made from; 0: they are made from states
    ratio : tokens that a key of the index stands for
    key_bytes : bytes of a cached key
    weighted : whether the heads' scores are weighted by the state
    own : whether this layer has it; else it takes the choice of an earlier layer

    References: DeepSeek-AI 2025, DeepSeek-V3.2-Exp.
    """

    chosen: int
    heads: int
    dim: int
    query_rank: int = 0
    ratio: int = 1
    key_bytes: float = 132
    weighted: bool = True
    own: bool = True

    @property
    def key_width(self) -> int:
        """Width of what is projected from a state: a key, and a weight of each head."""
        return self.dim + self.weighted * self.heads

    def weights(self, hidden: int) -> int:
        return self.own * ((self.query_rank or hidden) * self.heads * self.dim + hidden * self.key_width)


@dataclass(frozen=True, kw_only=True)
class Attending:
    """A block that attends to cached tokens.

    heads : of queries
    window : latest tokens that a query attends to; 0: all
    chunked : whether it attends within chunks of `window` tokens, on average to half of one once the context is longer
    ratio : tokens that an entry of the cache stands for beyond the window; 0: there are none beyond
    index : what chooses the entries that are attended to, of those that are not in the window
    gate_width : width of a gate on the results of all heads
    beside : width of all else that is projected from a state, such as compressed keys
    """

    heads: int
    window: int = 0
    chunked: bool = False
    ratio: int = 0
    index: Indexer | None = None
    gate_width: int = 0
    beside: int = 0

    def near(self, context: Floats, *, attended: bool = False) -> Floats:
        """Cached tokens of the window; attended : those that a query attends to, on average"""
        if not self.window:
            return np.zeros_like(context)
        longest = self.window / 2 if self.chunked and attended else self.window
        return np.where(context < self.window, context, longest)

    def far(self, context: Floats) -> Floats:
        """Entries of the cache that are not in a window."""
        if not self.window:
            return context
        return context / self.ratio if self.ratio else np.zeros_like(context)

    def cached(self, context: Floats) -> Floats:
        """Entries that the cache holds at this context."""
        return self.near(context) + self.far(context)

    def attended(self, context: Floats) -> Floats:
        """Cached entries that a query attends to at this context, unless an indexer chooses of them."""
        return self.near(context, attended=True) + self.far(context)

    def others(self, hidden: int) -> int:
        """Weights of the indexer and of all else that is projected from a state."""
        return self.beside * hidden + (self.index.weights(hidden) if self.index else 0)


@dataclass(frozen=True, kw_only=True)
class Attention(Attending):
    """Attention with key-value heads.

    kv_heads : key-value heads
    head_dim, value_dim : of a head, widths of keys and of values; 0: values are as wide as keys
    values : "own"; "projected keys", of which the cache holds both, as in Gemma-4; "keys" themselves, as in
        DeepSeek-V4; "shared": keys and values are those of an earlier layer
    states : states side by side that queries, keys and values are made from; EAGLE-3: 2
    query_rank : width of the queries' latent; 0: queries are made from states
    output_rank, output_groups : results of so many groups of heads are each projected to this width first; 0: they are
        not
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
        """Numbers of a cached token that a query attends to, without an indexer's keys."""
        keys = self.kv_heads * self.head_dim
        return keys if self.values == "keys" else keys + self.kv_heads * (self.value_dim or self.head_dim)

    @property
    def cached_width(self) -> int:
        """Numbers that a token adds to the cache, without an indexer's keys."""
        return 0 if self.values == "shared" else self.kv_width

    @property
    def made_width(self) -> int:
        """Width of keys and values as they are projected from states."""
        return self.kv_heads * self.head_dim if self.values in ("projected keys", "keys") else self.cached_width

    def weights(self, hidden: int) -> int:
        inputs = self.states * hidden
        queries = inputs * self.query_width
        if self.query_rank:
            queries = self.query_rank * (inputs + self.query_width)
        output = self.value_width * hidden
        if self.output_rank:
            output = self.output_rank * (self.value_width + self.output_groups * hidden)
        return queries + inputs * (self.gate_width + self.made_width) + output + self.others(hidden)


@dataclass(frozen=True, kw_only=True)
class LatentAttention(Attending):
    """Multi-head latent attention: all heads share a latent vector per token, which is all that the cache holds.

    While decoding, the matrices that expand latents to keys and values of every head are applied to queries and results
    instead ("absorbed"), so that attention's products are as wide as a latent.

    kv_rank, rope_dim : widths of a cached token's latent and of its rotated key
    query_rank : width of the queries' latent; 0: queries are made from states
    nope_dim, value_dim : of a head, widths of the part of a key that is not rotated, and of a value
    gate_rank : width of the latent that the gate is made from; 0: it is made from states

    References: DeepSeek-AI 2024, DeepSeek-V2, arXiv:2405.04434, section 2.1.

    >>> from specsim.cost.roofline.architecture import find_architecture
    >>> find_architecture("deepseek-v3").latent.cached_width
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
        return shared + queries + self.heads * head + gate + self.others(hidden)


@dataclass(frozen=True, kw_only=True)
class LinearAttention:
    """A state of fixed size in place of a KV cache: linear attention, state-space models, convolutions.

    state_size : numbers of the state of a sequence, in float32
    convolved_width : numbers of a token that a convolution covers: queries, keys and values
    input_width : all that is projected from a state: what is convolved, gates, decays, update rates
    output_width : numbers of a token's result
    kernel : tokens that the convolution covers; 0: there is none
    products : products with each number of the state: its correction, its update, its use
    inner_weights : weights of matrices between the projections from and to states
    heads : parts of the state that devices can have

    References: Yang et al. 2024, "Gated Delta Networks", arXiv:2412.06464; Dao and Gu 2024, Mamba-2, arXiv:2405.21060.

    >>> from specsim.cost.roofline.architecture import find_architecture
    >>> find_architecture("qwen3-next-80b-a3b").linear.state_size
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
    """A dense MLP. intermediate_size : its inner width; matrices : 3 with a gate, else 2"""

    intermediate_size: int
    matrices: int = 3

    part: ClassVar[Part] = "mlp"

    def weights(self, hidden: int) -> int:
        return self.matrices * hidden * self.intermediate_size


@dataclass(frozen=True)
class Experts:
    """The mixture of experts in place of a layer's MLP.

    count, per_token : experts of a layer, and how many of them a token goes to
    intermediate_size : inner width of an expert
    shared_intermediate_size : inner width of the expert that every token goes to; 0: there is none
    routing : whether tokens choose experts uniformly and independently, or so that as many experts as possible get a
        token
    probs : router statistics in place of `routing`: the probability that a token goes to each expert; `count` numbers
        that sum to `per_token`
    matrices : of an expert, 3 with a gate, else 2
    latent : width that states are projected to for the experts, and back; 0: experts see states

    Raises InputError for probabilities that are none, or more experts a token than there are.

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
        """Expected number of experts that n tokens of a pass go to, and so are read."""
        n = np.asarray(n_tokens, dtype=np.float64)
        if self.probs:
            return np.asarray(np.sum(1 - (1 - np.array(self.probs)) ** n[..., None], axis=-1))
        if self.routing == "balanced":
            return np.minimum(self.count, self.per_token * n)
        return np.asarray(self.count * (1 - (1 - self.per_token / self.count) ** n))

    def weights(self, hidden: int) -> int:
        return self.count * self.matrices * (self.latent or hidden) * self.intermediate_size

    def shared_weights(self, hidden: int) -> int:
        """Weights of the shared expert and of the projections to and from the experts' latent, which count as MLPs."""
        return hidden * (self.matrices * self.shared_intermediate_size + 2 * self.latent)


Mixer = Attention | LatentAttention | LinearAttention
Block = Mixer | Mlp | Experts
Layer = tuple[Block, ...]
B = TypeVar("B", Attention, LatentAttention, LinearAttention, Mlp, Experts)


@dataclass(frozen=True)
class Architecture:
    """A decoder: layers of blocks, each behind a norm, between an embedding and a head.

    name : as errors call it
    hidden_size, vocab_size : widths of states and of the head
    layers : the blocks of each layer, in order
    tied : whether the head is the embedding's table
    intermediate_size : inner width of a dense MLP, for drafters
    mtp_layer : the layer of its module for multi-token prediction, where that is unlike the others
    tables : weights of tables that are looked up beside the embedding, such as learned positions
    projected_width : width of all states and embeddings that are projected to a state before the first layer; EAGLE:
        that of two states
    streams : residual states of a token side by side, as hyper-connections have them
    medusa_heads : residual blocks on the last state, each with a head of its own

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
        """How many there are of each block."""
        return Counter(block for layer in self.layers for block in layer)

    def of(self, kind: type[B]) -> list[B]:
        """The blocks of a kind, each once."""
        return [block for block in self.blocks if isinstance(block, kind)]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def latent(self) -> LatentAttention | None:
        """The first latent attention that it has."""
        return next(iter(self.of(LatentAttention)), None)

    @property
    def linear(self) -> LinearAttention | None:
        """The first linear attention that it has."""
        return next(iter(self.of(LinearAttention)), None)

    @property
    def experts(self) -> Experts | None:
        """The first mixture of experts that it has."""
        return next(iter(self.of(Experts)), None)

    @property
    def widest_attention(self) -> Attention | LatentAttention:
        """Attention as it has, to all tokens if any does; InputError where it has none."""
        blocks: list[Attention | LatentAttention] = [*self.of(Attention), *self.of(LatentAttention)]
        blocks.sort(key=lambda block: block.window > 0)
        if not blocks:
            raise InputError(f"architecture {self.name} has no attention, so a drafter's layer has no known shape")
        return replace(blocks[0], window=0)

    @property
    def plain_attention(self) -> Attention:
        """Attention to all tokens with its heads, as drafters have it."""
        block = self.widest_attention
        if isinstance(block, LatentAttention):
            return Attention(heads=block.heads, kv_heads=block.heads, head_dim=block.value_dim)
        return Attention(heads=block.heads, kv_heads=block.kv_heads, head_dim=block.head_dim)

    @property
    def dense_layer(self) -> Layer:
        """A layer of its attention and a dense MLP, as drafters have it."""
        return self.widest_attention, Mlp(self.intermediate_size)

    @property
    def predicting_layer(self) -> Layer:
        """The layer of its module for multi-token prediction."""
        return self.mtp_layer or (self.widest_attention, self.experts or Mlp(self.intermediate_size))

    def attending(self, states: int) -> Architecture:
        """The same, where queries, keys and values are made from so many states side by side."""
        blocks: dict[Block, Block] = {block: replace(block, states=states) for block in self.of(Attention)}
        return replace(self, layers=tuple(tuple(blocks.get(block, block) for block in layer) for layer in self.layers))

    def count(self, *kinds: type[Block]) -> int:
        """How many blocks it has of these kinds."""
        return sum(n for block, n in self.blocks.items() if isinstance(block, kinds))

    @property
    def matrices(self) -> dict[Part, int]:
        """Weights of the matrices that quantisation packs, by part; projections of inputs count as MLPs."""
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
        """Weights of the layers' matrices, routers included."""
        routers = sum(
            n * self.hidden_size * block.count for block, n in self.blocks.items() if isinstance(block, Experts)
        )
        return sum(self.matrices.values()) + routers

    @property
    def head_parameters(self) -> int:
        """Weights of the head, or of all heads."""
        return (1 + self.medusa_heads) * self.vocab_size * self.hidden_size

    @property
    def norms(self) -> int:
        """Weights of a norm before each block and of the last one."""
        return (self.blocks.total() + 1) * self.hidden_size

    @property
    def parameters(self) -> int:
        """All weights but biases and the norms within attention, tied ones once."""
        embedding = 0 if self.tied else self.vocab_size * self.hidden_size
        return self.stack_parameters + self.head_parameters + embedding + self.tables + self.norms

    def first(self, layers: int, name: str = "") -> Architecture:
        """A model of the first layers alone, with the same output head."""
        return replace(self, name=name or f"{self.name}, {layers} layers", layers=self.layers[:layers])

    def after(self, layers: int) -> Architecture:
        """A model without the first layers, with the same output head."""
        return replace(self, layers=self.layers[layers:])


NOT_NONE = ("hidden_size", "vocab_size", "heads", "kv_heads", "head_dim")  # sizes that are at least 1
