"""The token mixers of a block: attention of each kind, state spaces, the gated delta rule.

Names follow Hugging Face's config.json where its families agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from model.config.heads import HeadLayout
from model.config.rope import RopeParameters


class HeadNorm(Enum):
    """Which queries and keys an RMSNorm takes together."""

    head = "head"
    width = "width"


@dataclass(frozen=True)
class Positions:
    """Rotary positions: `limit` of them turn the first `width` elements of a head; `name` is that of their tables."""

    rope: RopeParameters
    limit: int
    width: int
    name: str = "rope"


@dataclass(frozen=True)
class GroupedAttention:
    """Query heads in groups that share a key/value head.

    `positions` is None where nothing is rotated. `window`, where it is a number, is how many positions a token sees.
    `scale` multiplies scores, by default 1 / sqrt(head_dim); `softcap` bounds them. `sinks` adds one learned score to
    every head. `cross_positions`, where it is not 0, are those of another sequence that the block attends to besides,
    with projections of its own.
    With an `output_gate` each query head has a gate of its size, whose sigmoid multiplies what the head attends to.
    `value_norm` is an RMSNorm of each value head that has no weight. Where `keys_as_values`, values are the keys before
    their norm. `cache_of` is the number of the earlier block whose keys and values the block reads; it has none itself.
    Blocks of an encoder are not `causal`: a position attends to all, and nothing is kept.
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
        """The factor of every score."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def query_width(self) -> int:
        """Width of all queries."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of all keys."""
        return self.kv_heads * self.head_dim

    def seen(self, length: int) -> int:
        """Positions of `length` that the last of them attends to."""
        return length if self.window is None else min(length, self.window)

    def pairs(self, tokens: int) -> int:
        """(query, key) pairs of a prompt of `tokens` tokens."""
        if not self.causal:
            return tokens * tokens
        seen = self.seen(tokens)
        return seen * (seen + 1) // 2 + (tokens - seen) * seen

    @property
    def divided(self) -> tuple[int, int]:
        """The counts that tensor parallelism divides: query heads, and key/value heads."""
        return self.heads, self.kv_heads

    def layout(self, ranks: int) -> HeadLayout:
        """Which heads each of `ranks` ranks holds."""
        return HeadLayout(self.heads, self.kv_heads, ranks)


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention: keys and values of all heads are expanded from one latent vector a token.

    A query's and a key's head has `plain_dim` elements without positions and `rope_dim` with; `query_rank` is 0 where
    queries are projected at once. `scale` multiplies scores, by default 1 / sqrt(plain_dim + rope_dim). Pairs that turn
    together stand side by side in a checkpoint where they are `interleaved`.
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
        """Elements of a head of queries and keys."""
        return self.plain_dim + self.rope_dim

    @property
    def row_width(self) -> int:
        """Elements of a token in the cache: its latent, and the key that all heads share."""
        return self.latent_rank + self.rope_dim

    @property
    def score_scale(self) -> float:
        """The factor of every score."""
        return self.query_dim**-0.5 if self.scale is None else self.scale

    @property
    def divided(self) -> tuple[int, int]:
        """Query heads, and 1: the heads of every rank need the whole latent."""
        return self.heads, 1

    def layout(self, ranks: int) -> HeadLayout:
        """Which heads each of `ranks` ranks holds."""
        return HeadLayout(self.heads, 1, ranks)


@dataclass(frozen=True)
class StateSpace:
    """A selective state space with a short convolution, in place of attention and MLP."""

    inner: int
    state: int
    convolution: int
    step_rank: int
    bias: bool
    convolution_bias: bool

    @property
    def divided(self) -> tuple[int, int]:
        """Channels, which are independent, as heads are."""
        return self.inner, self.inner


@dataclass(frozen=True)
class GatedDelta:
    """The gated delta rule behind a short convolution of queries, keys and values, with a gated norm of its heads.

    `heads` are those of values; equally many of them share the query and the key of each of `key_heads`.
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    convolution: int

    @property
    def convolved(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def divided(self) -> tuple[int, int]:
        """Key heads, each with the value heads that share it."""
        return self.key_heads, self.key_heads


@dataclass(frozen=True)
class StateSpaceHeads:
    """A state space whose decay is one number for a head (Mamba-2), with a short convolution, in place of both blocks.

    Groups of heads share the weights of their states. Time steps are at least `least_step`, and at most `most_step`
    where that is a number.
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
        """Width of all heads."""
        return self.heads * self.head_dim

    @property
    def shared(self) -> int:
        """Width of the weights of states of all groups, on one side."""
        return self.groups * self.state

    @property
    def divided(self) -> tuple[int, int]:
        """The counts that tensor parallelism divides: heads, and groups."""
        return self.heads, self.groups
