"""What a plan knows of a model: parameters by part, what a token leaves in the cache, and what attention multiplies.

Parts:

    embedding   token table, and learned positions
    attention   projections of queries, keys, values and outputs, with their biases and sinks
    mlp         feed-forward blocks that every token passes, shared experts and routers among them
    experts     routed experts, of which a token passes a few
    mixer       state-space blocks, which stand where a transformer has attention and MLP
    norms       weights of every norm
    head        the output projection; 0 where it is the embedding's table
    aside       what a generated token does not pass: a vision tower, the encoder of speech
"""

from __future__ import annotations

from dataclasses import dataclass

PARTS = ("embedding", "attention", "mlp", "experts", "mixer", "norms", "head", "aside")


@dataclass(frozen=True)
class Layers:
    """`count` equal layers: parameters by part, cache and products, all of one layer.

    `attention_shared` are the parameters of `attention` that more ranks than key/value heads hold several times.
    Products are multiply-adds: for a (query, key) pair over all heads in a prompt and in a decode step, and for a
    token beside those with weights. Where `window` is a number, a token sees so many positions and the cache holds
    no more.
    """

    count: int
    attention: int = 0
    attention_shared: int = 0
    mlp: int = 0
    experts: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    mixer: int = 0
    norms: int = 0
    cache_per_token: int = 0
    cache_per_sequence: int = 0
    window: int | None = None
    prefill_products: int = 0
    decode_products: int = 0
    fixed_positions: int = 0
    token_products: int = 0

    @property
    def always(self) -> int:
        """Parameters that every token passes."""
        return self.attention + self.mlp + self.mixer + self.norms

    def active_experts(self, tokens: int) -> float:
        """Parameters of the experts that `tokens` tokens reach, each choosing its experts evenly and by itself."""
        if not self.num_experts:
            return 0.0
        missed = (1 - self.experts_per_token / self.num_experts) ** tokens
        return self.experts * (1 - missed)

    def seen(self, tokens: int) -> int:
        """Positions of `tokens` that a token at their end attends to."""
        return tokens if self.window is None else min(tokens, self.window)

    def pairs(self, tokens: int) -> float:
        """(query, key) pairs of a causal prompt of `tokens` tokens."""
        width = self.seen(tokens)
        return width * (width + 1) / 2 + (tokens - width) * width


@dataclass(frozen=True)
class Aside:
    """Parameters that a generated token does not pass; a prompt sends `positions` through them, once."""

    what: str
    parameters: int
    positions: int = 0
    products: int = 0


@dataclass(frozen=True)
class LlamaLayer:
    """What the project's kernels need to know of a layer that they compute."""

    head_dim: int
    intermediate: int
    eps: float
    head_norms: bool
    """Whether queries and keys pass an RMSNorm head by head before the rotary embedding."""


@dataclass(frozen=True)
class Model:
    """One model. `kernels` is None where a layer needs what no kernel computes; `missing` then says what.

    `divided_heads` and `divided_kv_heads` are what tensor parallelism divides: query heads, and the parts of the
    cache; with more ranks than the latter, several ranks hold the same part.
    """

    model_type: str
    dtype: str | None
    context: int | None
    vocabulary: int
    hidden: int
    divided_heads: int
    divided_kv_heads: int
    embedding: int
    head: int
    final_norms: int
    layers: tuple[Layers, ...]
    kernels: LlamaLayer | None = None
    missing: str = ""
    aside: Aside | None = None

    @property
    def num_layers(self) -> int:
        """Layers of all kinds."""
        return sum(layers.count for layers in self.layers)

    def parameters(self) -> dict[str, int]:
        """Parameters by part, in the order of `PARTS`."""
        counts = dict.fromkeys(PARTS, 0)
        counts |= {"embedding": self.embedding, "head": self.head, "norms": self.final_norms}
        if self.aside is not None:
            counts["aside"] = self.aside.parameters
        for layers in self.layers:
            for part in ("attention", "mlp", "experts", "mixer", "norms"):
                counts[part] += layers.count * getattr(layers, part)
        return counts

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(self.parameters().values())

    @property
    def head_parameters(self) -> int:
        """Parameters of the output projection, the embedding's table where the two are tied."""
        return self.head or self.vocabulary * self.hidden

    def passed(self, tokens: int) -> float:
        """Parameters read when `tokens` tokens go through the model together, the embedding's table included.

        The table counts as read, although a lookup reads one row of it, because published estimates divide all
        parameters by the bandwidth.
        """
        own = sum(layers.count * (layers.always + layers.active_experts(tokens)) for layers in self.layers)
        return own + self.embedding + self.head + self.final_norms

    @property
    def active(self) -> int:
        """Parameters that one token is multiplied with, but for the head."""
        return round(sum(layers.count * (layers.always + layers.active_experts(1)) for layers in self.layers))

    def cache_elements(self, tokens: int) -> int:
        """Elements of the cache of one sequence of `tokens` tokens."""
        return sum(
            layers.count * (layers.cache_per_sequence + layers.cache_per_token * layers.seen(tokens))
            for layers in self.layers
        )

    def undivided(self, tp: int) -> str | None:
        """Why `tp` ranks cannot share this model evenly; None where they can."""
        heads, kv_heads = self.divided_heads, self.divided_kv_heads
        if heads % tp:
            return f"{tp} ranks do not divide {heads} heads"
        if kv_heads % tp and tp % kv_heads:
            return f"{tp} ranks and {kv_heads} key/value heads: neither divides the other"
        return None
