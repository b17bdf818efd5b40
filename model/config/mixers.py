"""Token mixers of a block: grouped and latent attention, state spaces, the gated delta rule.

Names follow Hugging Face's config.json where its families agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from model.config.heads import HeadLayout
from model.config.rope import RopeParameters


class HeadNorm(Enum):
    """Extent of the RMSNorm of queries and keys: a single head, or the width of all heads."""

    head = "head"
    width = "width"


@dataclass(frozen=True)
class Positions:
    """Rotary positions 0 to `limit` - 1, which turn the first `width` elements of a head; `name` names their tables."""

    rope: RopeParameters
    limit: int
    width: int
    name: str = "rope"


@dataclass(frozen=True)
class GroupedAttention:
    """Attention with groups of query heads; each group shares a key/value head.

    positions        rotary positions; None without rotation
    scale            factor of scores; None for 1 / sqrt(head_dim)
    softcap          bound of scores
    sinks            one learned score is added to every head
    window           positions that a token sees; None for all before it
    cross_positions  positions of a second sequence that the block attends to with further projections; 0 for none
    value_norm       an RMSNorm of each value head, without weight
    keys_as_values   values are the keys before their norm
    cache_of         index of the earlier block whose keys and values the block reads; the block has none then
    causal           False in an encoder: a position attends to all positions, and no cache is kept
    output_gate      the sigmoid of a projection multiplies the output of each query head elementwise
    """

    heads: int
    kv_heads: int
    head_dim: int
    query_bias: bool = False
    key_bias: bool = False
    value_bias: bool = False
    output_bias: bool = False
    head_norm: HeadNorm | None = None
    positions: Positions | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    window: int | None = None
    cross_positions: int = 0
    value_norm: bool = False
    keys_as_values: bool = False
    cache_of: int | None = None
    causal: bool = True
    output_gate: bool = False

    @property
    def score_scale(self) -> float:
        """Factor of all scores, q · k, before the softmax: `scale`, or 1 / sqrt(head_dim) without one."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def query_width(self) -> int:
        """Elements of all query heads of a token: heads * head_dim."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of all key heads of a token: kv_heads * head_dim."""
        return self.kv_heads * self.head_dim

    def count_seen(self, length: int) -> int:
        """Return how many of `length` positions the last one attends to, itself included: at most the window."""
        return length if self.window is None else min(length, self.window)

    def count_pairs(self, tokens: int) -> int:
        """Return for how many (query, key) pairs of a prompt of `tokens` tokens a head computes scores.

        The causal mask and the window leave out the others; without the mask all tokens**2 pairs count.
        """
        if not self.causal:
            return tokens * tokens
        seen = self.count_seen(tokens)
        return seen * (seen + 1) // 2 + (tokens - seen) * seen

    @property
    def divided(self) -> tuple[int, int]:
        """(query heads, key/value heads), the two counts that tensor parallelism divides."""
        return self.heads, self.kv_heads

    def layout(self, ranks: int) -> HeadLayout:
        """Return which heads each of `ranks` tensor-parallel ranks holds, with padding heads."""
        return HeadLayout(self.heads, self.kv_heads, ranks)


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: keys and values of all heads are expanded from one latent vector a token.

    query_rank   elements of the latent of queries; 0 where one projection makes the queries
    latent_rank  elements of the latent of keys and values
    plain_dim    elements of a query or key head without positions
    rope_dim     elements of a query or key head with rotary positions
    scale        factor of scores; None for 1 / sqrt(plain_dim + rope_dim)
    interleaved  the two elements of a rotated pair are neighbours in the checkpoint
    """

    heads: int
    query_rank: int
    latent_rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    positions: Positions | None = None
    scale: float | None = None
    interleaved: bool = True

    @property
    def query_dim(self) -> int:
        """Elements of a query or key head, rotated ones included."""
        return self.plain_dim + self.rope_dim

    @property
    def row_width(self) -> int:
        """Elements of a token in the cache: its latent, and the rotated key that all heads share."""
        return self.latent_rank + self.rope_dim

    @property
    def score_scale(self) -> float:
        """Factor of all scores, q · k, before the softmax: `scale`, or 1 / sqrt(query_dim) without one."""
        return self.query_dim**-0.5 if self.scale is None else self.scale

    @property
    def divided(self) -> tuple[int, int]:
        """(query heads, 1), the counts that tensor parallelism divides; every rank needs the whole latent."""
        return self.heads, 1

    def layout(self, ranks: int) -> HeadLayout:
        """Return which heads each of `ranks` tensor-parallel ranks holds, with padding heads."""
        return HeadLayout(self.heads, 1, ranks)


@dataclass(frozen=True)
class StateSpace:
    """Selective state space (Mamba) with a short convolution, in place of attention and MLP."""

    inner: int
    state: int
    convolution: int
    step_rank: int
    bias: bool
    convolution_bias: bool

    @property
    def divided(self) -> tuple[int, int]:
        """(channels, channels), the counts that tensor parallelism divides; channels are as independent as heads."""
        return self.inner, self.inner


@dataclass(frozen=True)
class GatedDelta:
    """Gated delta rule after a short convolution of queries, keys and values, with a gated norm of its heads.

    `heads` is the number of value heads. Each of the `key_heads` queries and keys serves the same number of them.
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    convolution: int

    @property
    def convolved(self) -> int:
        """Number of channels of the convolution over all heads: elements of queries, keys and values of a token."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def divided(self) -> tuple[int, int]:
        """(key heads, key heads), the counts that tensor parallelism divides; value heads follow their key head."""
        return self.key_heads, self.key_heads

    def layout(self, ranks: int) -> HeadLayout:
        """Return which key heads each of `ranks` tensor-parallel ranks holds; value heads follow their key head."""
        return HeadLayout(*self.divided, ranks)


@dataclass(frozen=True)
class StateSpaceHeads:
    """State space with one decay a head (Mamba-2) and a short convolution, in place of attention and MLP.

    Each of `groups` groups of heads shares the weights of its states. Time steps are bounded to `least_step` and
    `most_step`; None is no upper bound.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    convolution: int
    bias: bool
    convolution_bias: bool
    least_step: float = 0.0
    most_step: float | None = None

    @property
    def inner(self) -> int:
        """Elements of all heads of a token: heads * head_dim."""
        return self.heads * self.head_dim

    @property
    def shared(self) -> int:
        """Elements of B, or of C, of a token: `state` elements for each group."""
        return self.groups * self.state

    @property
    def divided(self) -> tuple[int, int]:
        """(heads, groups), the counts that tensor parallelism divides; the heads of a group share B and C."""
        return self.heads, self.groups

    def layout(self, ranks: int) -> HeadLayout:
        """Return which heads each of `ranks` tensor-parallel ranks holds, with padding heads."""
        return HeadLayout(*self.divided, ranks)
