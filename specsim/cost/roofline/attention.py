"""Attention without a cache of keys and values per head: to latents, or to a state of fixed size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: all heads share a latent vector per token, which is all that the cache holds.

    While decoding, the matrices that expand latents to keys and values of every head are applied to queries and results
    instead ("absorbed"), so that attention's products are as wide as a latent.

    kv_rank, rope_dim : widths of a cached token's latent and of its rotated key
    query_rank : width of the queries' latent; 0: queries are made from states
    nope_dim, value_dim : of a head, widths of the part of a key that is not rotated, and of a value
    index_tokens : cached tokens that a query attends to under sparse attention, which an indexer chooses; 0: all
    index_heads, index_dim : heads of the indexer and their width

    References: DeepSeek-AI 2024, DeepSeek-V2, arXiv:2405.04434, section 2.1; of the indexer, DeepSeek-V3.2-Exp.

    >>> from specsim.cost.roofline.architecture import find_architecture
    >>> find_architecture("deepseek-v3").latent.cached_width
    576
    """

    kv_rank: int
    rope_dim: int
    query_rank: int
    nope_dim: int
    value_dim: int
    index_tokens: int = 0
    index_heads: int = 0
    index_dim: int = 0

    @property
    def cached_width(self) -> int:
        """Values that a token adds to a layer's cache, without the indexer's keys."""
        return self.kv_rank + self.rope_dim

    @property
    def index_key_bytes(self) -> int:
        """Bytes of a cached key of the indexer: float8 with a scale in float32, as DeepSeek released it."""
        return self.index_dim + 4

    def shared_weights(self, hidden: int) -> int:
        """Weights of a layer that all heads share: every device has them."""
        index = self.index_heads * self.query_rank * self.index_dim + hidden * (self.index_dim + self.index_heads)
        return hidden * (self.query_rank + self.cached_width) + index

    def head_weights(self, hidden: int) -> int:
        """Weights of a layer that belong to a head."""
        queries = (self.query_rank or hidden) * (self.nope_dim + self.rope_dim)
        return queries + self.kv_rank * (self.nope_dim + self.value_dim) + self.value_dim * hidden


@dataclass(frozen=True)
class LinearAttention:
    """Gated DeltaNet: a state matrix per value head in place of a KV cache; its size does not depend on the context.

    key_heads, value_heads, key_dim, value_dim : heads and their widths
    kernel : tokens that the convolution over queries, keys and values covers

    References: Yang et al. 2024, "Gated Delta Networks", arXiv:2412.06464.

    >>> from specsim.cost.roofline.architecture import find_architecture
    >>> find_architecture("qwen3-next-80b-a3b").linear.state_size
    524288
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    @property
    def state_size(self) -> int:
        """Numbers of a layer's state of a sequence, in float32."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def convolved_width(self) -> int:
        """Queries, keys and values of a token."""
        return 2 * self.key_heads * self.key_dim + self.output_width

    @property
    def input_width(self) -> int:
        """All that is projected from a state: what is convolved, the output's gate, decay and update rate of a head."""
        return self.convolved_width + self.output_width + 2 * self.value_heads

    @property
    def output_width(self) -> int:
        """Values of a token."""
        return self.value_heads * self.value_dim
