"""Counts of a model: parameters by part, cache elements of a token, and multiply-adds of attention.

Parts:

    embedding   token table, learned positions, table of the inputs of every layer, projections around the layers
    attention   projections of queries, keys, values and outputs, with their biases and sinks
    mlp         feed-forward blocks that every token passes, shared experts, routers and gated inputs among them
    experts     routed experts, of which a token passes a few
    mixer       state spaces and the gated delta rule, which stand where a transformer has attention
    norms       weights of every norm
    head        the output projection; 0 where it is the embedding's table
    aside       what a generated token does not pass: a vision tower, the encoder of speech
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from model.config import ModelConfig
from model.config.mixers import (
    GatedDelta,
    GroupedAttention,
    HeadNorm,
    LatentAttention,
    StateSpace,
    StateSpaceHeads,
)
from model.config.parts import Block, Encoder, Mlp, Norms
from model.errors import ModelError
from model.families import read_config

PARTS = ("embedding", "attention", "mlp", "experts", "mixer", "norms", "head", "aside")

_MOST_PARAMETERS = 10**15
"""Far beyond any model, and far from what float64 and an array's shape cannot hold."""

STATE_BYTES = 4
"""Of an element of a recurrent layer's state, which is float32."""

_SCAN_PRODUCTS = 3
"""Multiply-adds of a state element for one token: decay, input, output."""

_DELTA_PRODUCTS = 4
"""Those of a state of the gated delta rule: decay, what it says of the key, what is written, output."""


@dataclass(frozen=True)
class BlockCounts:
    """`count` equal layers: parameters by part, cache and products, all of one layer.

    `divided` are the counts that tensor parallelism divides: query heads and key/value heads, or what stands for them.
    `mlp_width` is the width of `mlp` where it is one block, of which every rank holds as many elements.
    `attention_shared` and `mixer_shared` are those of `attention` and `mixer` that several ranks hold, where ranks
    outnumber key/value heads or groups. `attention_again` are those that a rank holds twice, because its keys are its
    values too. `attention_whole`, `experts_whole` and `whole` are those of attention, experts and all else that every
    rank holds whole, as it does `buffers`, elements of the checkpoint that are no parameters.
    `other_cache_per_token` are elements of another layer's cache that the layer reads. `state_per_sequence` are those
    of `cache_per_sequence` that are float32 whatever the model's dtype, as recurrent layers keep their states.
    Products are multiply-adds. They are counted for a (query, key) pair over all heads, in a prompt and in a decode
    step, and for a token beside products with weights. With a `window`, a token sees that many positions and the
    cache holds no more.
    """

    count: int
    attention: int = 0
    attention_shared: int = 0
    attention_again: int = 0
    attention_whole: int = 0
    whole: int = 0
    mlp: int = 0
    experts: int = 0
    experts_whole: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    mixer: int = 0
    mixer_shared: int = 0
    norms: int = 0
    buffers: int = 0
    cache_per_token: int = 0
    other_cache_per_token: int = 0
    cache_per_sequence: int = 0
    state_per_sequence: int = 0
    window: int | None = None
    prefill_products: int = 0
    decode_products: int = 0
    fixed_positions: int = 0
    token_products: int = 0
    mlp_width: int = 0
    divided: tuple[int, int] = (1, 1)

    @property
    def always(self) -> int:
        """Parameters that every token passes."""
        return self.attention + self.mlp + self.whole + self.mixer + self.norms

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
class ModelCounts:
    """The counts of one model, over the kinds of its blocks."""

    config: ModelConfig
    embedding: int
    head: int
    final_norms: int
    per_layer_rows: int
    projections: int
    layers: tuple[BlockCounts, ...]

    @classmethod
    def of(cls, config: ModelConfig) -> ModelCounts:
        """The counts of a config."""
        hidden = config.hidden_size
        table = config.vocab_size * hidden
        given = config.blocks[0].per_layer_input
        inputs = 0 if given is None else len(config.blocks) * given.width
        streams = config.blocks[0].streams
        turns = 0 if streams is None else 2 * (streams.count - 1) * hidden
        return cls(
            config,
            embedding=table + config.learned_positions * hidden,
            head=0 if config.tie_word_embeddings else table,
            final_norms=_norm(hidden, config.blocks[0].norms) + (0 if given is None else given.width),
            per_layer_rows=0 if given is None else given.vocabulary * inputs,
            projections=hidden * (inputs + turns),
            layers=tuple(_layers(block, hidden, count) for block, count in Counter(config.blocks).items()),
        )

    @property
    def encoder(self) -> Encoder | None:
        """The part that a generated token does not pass."""
        return self.config.encoder

    @property
    def num_layers(self) -> int:
        """Layers of all kinds."""
        return sum(layers.count for layers in self.layers)

    def parameters(self) -> dict[str, int]:
        """Parameters by part, in the order of `PARTS`."""
        counts = dict.fromkeys(PARTS, 0)
        embedding = self.embedding + self.per_layer_rows + self.projections
        counts |= {"embedding": embedding, "head": self.head, "norms": self.final_norms}
        if self.encoder is not None:
            counts["aside"] = self.encoder.parameters
        for layers in self.layers:
            for part in ("attention", "mlp", "experts", "mixer", "norms"):
                counts[part] += layers.count * getattr(layers, part)
            counts["mlp"] += layers.count * layers.whole
        return counts

    @property
    def total(self) -> int:
        """All parameters."""
        return sum(self.parameters().values())

    @property
    def head_parameters(self) -> int:
        """Parameters of the output projection, the embedding's table where the two are tied."""
        return self.head or self.config.vocab_size * self.config.hidden_size

    def passed(self, tokens: int) -> float:
        """Parameters read when `tokens` tokens go through the model together, the embedding's table included.

        The table counts as read, although a lookup reads one row of it, because published estimates divide all
        parameters by the bandwidth. That of the inputs of every layer does not: it may be most of a model.
        """
        own = sum(layers.count * (layers.always + layers.active_experts(tokens)) for layers in self.layers)
        return own + self.embedding + self.projections + self.head + self.final_norms

    @property
    def active(self) -> int:
        """Parameters that one token is multiplied with, but for the head."""
        own = sum(layers.count * (layers.always + layers.active_experts(1)) for layers in self.layers)
        return round(own) + self.projections

    def cache_elements(self, tokens: int) -> int:
        """Elements of the cache of one sequence of `tokens` tokens."""
        return sum(
            layers.count * (layers.cache_per_sequence + layers.cache_per_token * layers.seen(tokens))
            for layers in self.layers
        )

    def cache_bytes(self, tokens: int, size: int) -> int:
        """Bytes of the cache of one sequence of `tokens` tokens, in a dtype of `size` bytes."""
        states = sum(layers.count * layers.state_per_sequence for layers in self.layers)
        return size * self.cache_elements(tokens) + (STATE_BYTES - size) * states

    def read_bytes(self, tokens: int, size: int) -> int:
        """Bytes of the cache that one token reads at the end of `tokens`, some of them in several layers."""
        again = sum(
            layers.count * layers.other_cache_per_token * layers.seen(tokens) for layers in self.layers
        )
        return self.cache_bytes(tokens, size) + size * again


def load_model(path: Path, config: ModelConfig | None = None) -> ModelCounts:
    """Count the model of a config.json, or of a folder that holds one; ModelError for what cannot be read.

    A `config` that was read from the path is not read again.
    """
    model = ModelCounts.of(config or read_config(path))
    if model.total > _MOST_PARAMETERS:
        raise ModelError(
            f"{path} describes more than {_MOST_PARAMETERS:.0e} parameters; a plan takes no more"
        )
    return model


def _layers(block: Block, hidden: int, count: int) -> BlockCounts:
    """`count` equal blocks."""
    mixer, mlp = block.mixer, block.mlp
    if isinstance(mixer, GroupedAttention):
        layers = _grouped(mixer, hidden, block.norms)
    elif isinstance(mixer, LatentAttention):
        layers = _latent(mixer, hidden)
    elif isinstance(mixer, GatedDelta):
        layers = _gated_delta(mixer, hidden)
    elif isinstance(mixer, StateSpaceHeads):
        layers = _state_space_heads(mixer, hidden)
    else:
        layers = _state_space(mixer, hidden)
    sublayers = 1 + bool(mlp) + (isinstance(mixer, GroupedAttention) and mixer.cross_positions > 0)
    norms = sublayers * (block.norms.before + block.norms.after) * _norm(hidden, block.norms)
    layers = replace(layers, count=count, norms=layers.norms + norms, divided=mixer.divided)
    if block.per_layer_input is not None:
        gated = 2 * hidden * block.per_layer_input.width
        layers = replace(layers, whole=gated, norms=layers.norms + hidden)
    if block.streams is not None:
        count = block.streams.count
        mixed = count**3 + count**2 + hidden * (count + 2 * block.streams.rank)
        layers = replace(layers, whole=layers.whole + mixed, norms=layers.norms + 3 * hidden)
    if isinstance(mlp, Mlp):
        return replace(layers, mlp=_projections(hidden, mlp.width, mlp.gated, mlp.bias), mlp_width=mlp.width)
    if mlp is None:
        return layers
    router = hidden * (mlp.count + mlp.shared_gate) + mlp.router_bias * mlp.count
    return replace(
        layers,
        mlp=_projections(hidden, mlp.shared_width),
        whole=layers.whole + router,
        norms=layers.norms + mlp.hidden_vectors * hidden,
        experts=mlp.count * _projections(hidden, mlp.width, bias=mlp.bias),
        experts_whole=mlp.count * mlp.bias * hidden,
        buffers=mlp.count * mlp.choice_bias,
        num_experts=mlp.count,
        experts_per_token=mlp.per_token,
    )


def _norm(size: int, norms: Norms) -> int:
    return size * (2 if norms.bias else 1)


def _projections(hidden: int, width: int, gated: bool = True, bias: bool = False) -> int:
    """Parameters of the projections of a feed-forward block: gate, up and down, or two without a gate."""
    up = 2 if gated else 1
    return (up + 1) * hidden * width + bias * (up * width + hidden)


def _grouped(own: GroupedAttention, hidden: int, norms: Norms) -> BlockCounts:
    """Keys and values of every head are cached, unless they are those of another layer."""
    query, read = own.query_width, own.kv_width
    kv = read if own.cache_of is None else 0
    values = 0 if own.keys_as_values else kv
    gated = 2 if own.output_gate else 1
    biases = own.query_bias * gated * query + own.output_bias * hidden
    shared = (hidden + own.key_bias) * kv + (hidden + own.value_bias) * values
    attention = (1 + gated) * hidden * query + shared + biases
    of_heads = own.head_dim * (2 if kv else 1)
    head_norms = {None: 0, HeadNorm.head: of_heads, HeadNorm.width: query + kv}[own.head_norm]
    times = 2 if own.cross_positions else 1
    return BlockCounts(
        count=1,
        attention=times * attention + own.sinks * own.heads,
        attention_shared=times * shared,
        attention_again=hidden * (kv - values),
        attention_whole=times * own.output_bias * hidden,
        norms=head_norms,
        cache_per_token=2 * kv,
        other_cache_per_token=2 * (read - kv),
        cache_per_sequence=2 * kv * own.cross_positions,
        window=own.window,
        prefill_products=2 * query,
        decode_products=2 * query,
        fixed_positions=own.cross_positions,
    )


def _latent(own: LatentAttention, hidden: int) -> BlockCounts:
    """A decode step can score the latent itself, with the projections of keys and values taken into others.

    That is what `decode_products` counts. A prompt expands keys and values, which takes fewer products there.
    """
    heads, latent, turned = own.heads, own.latent_rank, own.rope_dim
    query = heads * (own.plain_dim + turned)
    queries = own.query_rank * (hidden + query) if own.query_rank else hidden * query
    compressed = hidden * (latent + turned)
    expanded = latent * heads * (own.plain_dim + own.value_dim) + heads * own.value_dim * hidden
    return BlockCounts(
        count=1,
        attention=queries + compressed + expanded,
        attention_shared=compressed,
        attention_whole=own.query_rank * hidden,
        norms=own.query_rank + latent,
        cache_per_token=latent + turned,
        prefill_products=heads * (own.plain_dim + turned + own.value_dim),
        decode_products=heads * (2 * latent + turned),
    )


def _state_space(own: StateSpace, hidden: int) -> BlockCounts:
    """The state has one size however long the sequence is."""
    inner, state, rank = own.inner, own.state, own.step_rank
    projections = 3 * hidden * inner + own.bias * (2 * inner + hidden)
    convolution = inner * own.convolution + own.convolution_bias * inner
    selection = inner * (rank + 2 * state) + rank * inner + inner
    return BlockCounts(
        count=1,
        mixer=projections + convolution + selection + inner * state + inner,
        cache_per_sequence=inner * (state + own.convolution - 1),
        state_per_sequence=inner * state,
        token_products=_SCAN_PRODUCTS * inner * state,
    )


def _gated_delta(own: GatedDelta, hidden: int) -> BlockCounts:
    """Gates of outputs are as wide as values; decay and strength of a head take a column each."""
    values, state = own.heads * own.value_dim, own.heads * own.key_dim * own.value_dim
    projections = hidden * (own.convolved + 2 * values + 2 * own.heads)
    return BlockCounts(
        count=1,
        mixer=projections + own.convolved * own.convolution + 2 * own.heads,
        norms=own.value_dim,
        cache_per_sequence=state + own.convolved * (own.convolution - 1),
        state_per_sequence=state,
        token_products=_DELTA_PRODUCTS * state,
    )


def _state_space_heads(own: StateSpaceHeads, hidden: int) -> BlockCounts:
    """Weights of states and time steps come from the projection of the heads, whose norm counts here."""
    inner, convolved = own.inner, own.inner + 2 * own.shared
    entered = inner + convolved + own.heads
    projections = hidden * (entered + inner) + own.bias * (entered + hidden)
    convolution = convolved * (own.convolution + own.convolution_bias)
    return BlockCounts(
        count=1,
        mixer=projections + convolution + 3 * own.heads + inner,
        mixer_shared=2 * own.shared * (hidden + own.convolution + own.convolution_bias),
        cache_per_sequence=inner * own.state + convolved * (own.convolution - 1),
        state_per_sequence=inner * own.state,
        token_products=_SCAN_PRODUCTS * inner * own.state,
    )
