"""Decoders of equal kinds of layers: attention and a feed-forward block, put together from the parts of a config.

A family says by `Names` how its checkpoints call their tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from model.config.fields import Fields
from model.config.mixers import GroupedAttention, HeadNorm, LatentAttention
from model.config.parts import Block, Encoder, Experts, Mlp, ModelConfig, PerLayerInput
from model.config.reading import common, gated_mlp, layer_count, norms
from model.families.names import LLAMA, ExpertNames, Names, StackedExpertNames
from model.families.tokens import token_network
from model.layers.attention import Attention
from model.layers.attention_heads import AttentionProjections
from model.layers.embedding import Embedding
from model.layers.experts import ExpertProjections, RoutedExperts
from model.layers.head import Head
from model.layers.latent_attention import LatentMixer, LatentProjections
from model.layers.layer import Layer
from model.layers.mlp import FeedForward
from model.layers.norm import Norm, Scale
from model.layers.per_layer_input import Columns, GatedInput, PerLayerInputs
from model.layers.projection import Projection
from model.layers.shard import COLUMN_PARALLEL, ROW, Cut, by_kv_heads, by_query_heads
from model.layers.uncomputed import Uncomputed
from model.layers.weight import Numbered, Tensor, Weight
from model.network import Network, Section, part_of

_LATENT_EPS = 1e-6
"""Of the norms of latents, whatever the config says of the others: transformers' DeepseekV2RMSNorm by default."""


def equal_blocks(
    fields: Fields, mixer: GroupedAttention, mlp: Mlp | None = None, eps: float = 1e-6
) -> ModelConfig:
    """Equal blocks of attention and a gated MLP, with an RMSNorm before each; `eps` is the family's default."""
    block = Block(mixer, mlp or gated_mlp(fields), norms(fields, default=eps))
    return ModelConfig(**common(fields), blocks=(block,) * layer_count(fields))


Mixer = Callable[[ModelConfig, int, Norm], Layer]
"""Makes the layer of a block that takes the place of attention, by the block's number, with the norm before it."""


def compose(config: ModelConfig, names: Names = LLAMA, mixer: Mixer | None = None) -> Network:
    """The layers of a config, with the tensors of a checkpoint; a family may have another `mixer` beside attention."""
    hidden, vocabulary = config.hidden_size, config.vocab_size
    table, head = f"{names.table}.weight", f"{names.head}.weight"
    learned = (f"{names.positions}.weight", config.learned_positions) if names.positions else None
    own = config.blocks[0].norms
    bias = f"{names.last_norm}.bias" if own.bias else None
    tied = config.tie_word_embeddings
    embedding = Embedding("embedding", table, vocabulary, hidden, config.embedding_scale, learned)
    mixers = (block.mixer for block in config.blocks)
    return token_network(
        _with_per_layer_inputs(config, names, embedding),
        tuple(_Parts(config, names, number, mixer).layers() for number in range(len(config.blocks))),
        Head(
            "head",
            table if tied else head,
            vocabulary,
            hidden,
            Norm("head.norm", f"{names.last_norm}.weight", hidden, own.eps, bias, own.offset),
            config.logit_scale,
            config.logit_softcap,
        ),
        windows={mixer.window for mixer in mixers if isinstance(mixer, GroupedAttention) and mixer.window},
        unread=(
            *((head,) if tied else ()),
            *(f"{names.layer}.{layer}.{mask}" for layer in range(len(config.blocks)) for mask in names.masks),
            *_of_shared_caches(config, names),
        ),
        bare_prefix=names.bare,
        stacks=_stacks(config, names),
        before=_tower(config.encoder),
    )


def _tower(encoder: Encoder | None) -> dict[str, Network]:
    """The parameters of a tower as one vector, of which ranks hold even parts; no prompt passes them here."""
    if encoder is None or not encoder.parameters:
        return {}
    vector = Tensor(encoder.what, (encoder.parameters,), COLUMN_PARALLEL)
    layer = Uncomputed(encoder.what, (Weight(encoder.what, (vector,)),))
    return {"tower": Network(((layer,),), {}, ())}


def _stacks(config: ModelConfig, names: Names) -> dict[str, Sequence[str]]:
    """The tensors that hold one behind the other those of all experts of a layer, and the names of these."""
    if not isinstance(names.experts, StackedExpertNames):
        return {}
    return {
        stack: Numbered(range(block.mlp.count), partial(part_of, stack))
        for layer, block in enumerate(config.blocks)
        if isinstance(block.mlp, Experts)
        for stack in names.experts.in_layer(f"{names.layer}.{layer}")
    }


def _with_per_layer_inputs(
    config: ModelConfig, names: Names, embedding: Embedding
) -> Embedding | PerLayerInputs:
    """The embedding, with the inputs of every layer where the model has such."""
    given, own = config.blocks[0].per_layer_input, names.per_layer
    if given is None or own is None:
        return embedding
    width = len(config.blocks) * given.width
    name, eps = "per_layer_inputs", config.blocks[0].norms.eps
    return PerLayerInputs(
        name,
        embedding,
        Embedding(f"{name}.rows", f"{own.table}.weight", given.vocabulary, width, given.width**0.5),
        Projection(f"{own.projection}.weight", width, config.hidden_size),
        Norm(f"{name}.norm", f"{own.norm}.weight", given.width, eps),
    )


def _of_shared_caches(config: ModelConfig, names: Names) -> Iterator[str]:
    """Tensors of keys and values that a checkpoint may hold of layers that read those of another layer."""
    for layer, block in enumerate(config.blocks):
        if isinstance(block.mixer, GroupedAttention) and block.mixer.cache_of is not None:
            for tensor in (names.key, names.value, names.key_norm):
                yield f"{names.layer}.{layer}.{tensor}.weight"
                yield f"{names.layer}.{layer}.{tensor}.bias"


@dataclass(frozen=True)
class _Parts:
    """The layers of one block."""

    config: ModelConfig
    names: Names
    number: int
    mixer: Mixer | None

    @property
    def _block(self) -> Block:
        return self.config.blocks[self.number]

    def layers(self) -> Section:
        """Attention, the feed-forward block, and what adds the layer's own input, where there is one."""
        given = self._block.per_layer_input
        if isinstance(self._block.mixer, LatentAttention):
            return self._latent(self._block.mixer), self._mlp()
        if not isinstance(self._block.mixer, GroupedAttention):
            norm = self._norm("mixer.norm", self.names.before_attention)
            assert self.mixer is not None and norm is not None
            return self.mixer(self.config, self.number, norm), self._mlp()
        if given is None:
            return self._attention(), self._mlp()
        return self._attention(), self._feed_forward(None), self._per_layer_input(given)

    def _scale(self) -> Scale | None:
        """The factor of what the block returns."""
        if not self._block.scaled:
            return None
        return Scale(f"layers.{self.number}.scale", self._tensor(self.names.scale))

    def _tensor(self, name: str) -> str:
        return f"{self.names.layer}.{self.number}.{name}"

    def _norm(self, own: str, theirs: str, there: bool = True) -> Norm | None:
        """A norm of the residual stream; None where the block has none there."""
        if not there:
            return None
        norms, tensor = self._block.norms, self._tensor(theirs)
        bias = f"{tensor}.bias" if norms.bias else None
        name = f"layers.{self.number}.{own}"
        return Norm(name, f"{tensor}.weight", self.config.hidden_size, norms.eps, bias, norms.offset)

    def _projection(self, name: str, outputs: int, inputs: int, bias: bool) -> Projection:
        tensor = self._tensor(name)
        biased = f"{tensor}.bias" if bias else None
        return Projection(f"{tensor}.weight", outputs, inputs, biased, transposed=self.names.transposed)

    def _fused(self, name: str, sizes: tuple[int, ...], inputs: int, bias: bool) -> tuple[Projection, ...]:
        """Projections side by side in one tensor."""
        tensor = self._tensor(name)
        biased = f"{tensor}.bias" if bias else None
        return tuple(
            Projection(
                f"{tensor}.weight",
                size,
                inputs,
                biased,
                sum(sizes[:place]),
                sum(sizes),
                self.names.transposed,
            )
            for place, size in enumerate(sizes)
        )

    def _attention(self) -> Attention:
        names, hidden, norms = self.names, self.config.hidden_size, self._block.norms
        mixer = self._block.mixer
        assert isinstance(mixer, GroupedAttention)
        sizes = (mixer.query_width, mixer.kv_width, mixer.kv_width)
        if names.qkv:
            inputs = self._fused(names.qkv, sizes, hidden, mixer.query_bias)
        else:
            parts = (names.query, names.key, names.key if mixer.keys_as_values else names.value)
            biases = (mixer.query_bias, mixer.key_bias, mixer.value_bias)
            inputs = tuple(
                self._projection(name, size, hidden, bias) for name, size, bias in zip(parts, sizes, biases)
            )
        if mixer.output_gate:  # one tensor of both, head by head
            query, size = inputs[0], mixer.head_dim
            query = replace(query, tensor_outputs=2 * query.outputs, every=2 * size)
            inputs = (query, *inputs[1:], replace(query, first=size))
        owner = None if mixer.cache_of is None else f"layers.{mixer.cache_of}.attention"
        output = self._projection(names.output, hidden, mixer.query_width, mixer.output_bias)
        return Attention(
            f"layers.{self.number}.attention",
            hidden,
            mixer,
            self._norm("attention.norm", names.before_attention, norms.before),
            AttentionProjections(inputs if owner is None else inputs[:1], output),
            self._head_norms(mixer),
            self._norm("attention.after", names.after_attention, norms.after),
            owner,
            self._tensor(names.sinks) if mixer.sinks else None,
        )

    def _latent(self, mixer: LatentAttention) -> LatentMixer:
        """Latent attention; the norms of latents have an eps of their own."""
        names, hidden = self.names.latent, self.config.hidden_size
        name, rank, query_rank = f"layers.{self.number}.attention", mixer.latent_rank, mixer.query_rank
        before = self._norm("attention.norm", self.names.before_attention)
        assert before is not None

        def norm(own: str, theirs: str, size: int) -> Norm:
            return Norm(f"{name}.{own}", f"{self._tensor(theirs)}.weight", size, _LATENT_EPS)

        queries = mixer.heads * mixer.query_dim
        query_latent, query = None, self._projection(names.query, queries, hidden, False)
        if query_rank:
            query_latent = self._projection(names.query_latent, query_rank, hidden, False)
            query = self._projection(names.query_of_latent, queries, query_rank, False)
        expanded, values = mixer.heads * (mixer.plain_dim + mixer.value_dim), mixer.heads * mixer.value_dim
        projections = LatentProjections(
            query_latent,
            query,
            self._projection(names.latent, mixer.row_width, hidden, False),
            self._projection(names.expand, expanded, rank, False),
            self._projection(self.names.output, hidden, values, False),
        )
        query_norm = norm("q_norm", names.query_norm, query_rank) if query_rank else None
        latent_norm = norm("latent_norm", names.latent_norm, rank)
        return LatentMixer(name, hidden, mixer, before, projections, query_norm, latent_norm)

    def _head_norms(self, mixer: GroupedAttention) -> tuple[Norm, ...]:
        """Those of queries and keys, or of queries alone."""
        if mixer.head_norm is None:
            return ()
        whole = mixer.head_norm is HeadNorm.width
        norms, name = self._block.norms, f"layers.{self.number}.attention"

        def norm(own: str, theirs: str, heads: int, cut: Cut) -> Norm:
            size = heads * mixer.head_dim if whole else mixer.head_dim
            tensor = f"{self._tensor(theirs)}.weight"
            return Norm(
                f"{name}.{own}", tensor, size, norms.eps, offset=norms.offset, cut=cut if whole else ROW
            )

        of_queries = norm("q_norm", self.names.query_norm, mixer.heads, by_query_heads(*mixer.divided))
        if mixer.cache_of is not None:
            return (of_queries,)
        of_keys = norm("k_norm", self.names.key_norm, mixer.kv_heads, by_kv_heads(*mixer.divided))
        return of_queries, of_keys

    def _per_layer_input(self, given: PerLayerInput) -> GatedInput:
        own, hidden, norms = self.names.per_layer, self.config.hidden_size, self._block.norms
        assert own is not None
        name, tensor = f"layers.{self.number}.per_layer_input", self._tensor(own.after)
        return GatedInput(
            name,
            hidden,
            Columns("per_layer_inputs", len(self.config.blocks) * given.width, self.number * given.width),
            self._projection(own.gate, given.width, hidden, False),
            self._projection(own.output, hidden, given.width, False),
            given.activation,
            Norm(f"{name}.after", f"{tensor}.weight", hidden, norms.eps),
            self._scale(),
        )

    def _mlp(self) -> FeedForward | RoutedExperts:
        """The feed-forward block, or the experts in its place."""
        routing = self._block.mlp
        return self._experts(routing) if isinstance(routing, Experts) else self._feed_forward(self._scale())

    def _experts(self, routing: Experts) -> RoutedExperts:
        names, hidden = self.names.experts, self.config.hidden_size
        norm = self._norm("experts.norm", self.names.before_mlp)
        assert norm is not None

        def expert(prefix: str, width: int) -> ExpertProjections:
            assert isinstance(names, ExpertNames)
            return ExpertProjections(
                self._projection(f"{prefix}.{names.gate}", width, hidden, False),
                self._projection(f"{prefix}.{names.up}", width, hidden, False),
                self._projection(f"{prefix}.{names.down}", hidden, width, False),
            )

        shared = chosen_by = shared_gate = None
        numbers = range(routing.count)
        if isinstance(names, StackedExpertNames):
            experts = Numbered(numbers, partial(self._stacked_expert, names, routing))
        else:
            prefix = names.experts
            experts = Numbered(numbers, lambda number: expert(f"{prefix}.{number}", routing.width))
            shared = expert(names.shared, routing.shared_width) if routing.shared_width else None
            if routing.shared_gate:
                shared_gate = self._projection(names.shared_gate, 1, hidden, False)
            chosen_by = self._tensor(f"{names.router}.{names.choice_bias}") if routing.choice_bias else None
        return RoutedExperts(
            f"layers.{self.number}.experts",
            hidden,
            norm,
            routing,
            self._projection(names.router, routing.count, hidden, routing.router_bias),
            experts,
            shared,
            chosen_by,
            shared_gate,
        )

    def _stacked_expert(self, names: StackedExpertNames, routing: Experts, number: int) -> ExpertProjections:
        """The projections of an expert whose tensors are parts of those of all."""
        hidden, width = self.config.hidden_size, routing.width
        gate_up, gate_up_bias, down, down_bias = (
            part_of(each, number) for each in names.in_layer(self._tensor("")[:-1])
        )
        gate = Projection(gate_up, width, hidden, gate_up_bias, 0, 2 * width, transposed=True, every=2)
        return ExpertProjections(
            gate,
            replace(gate, first=1),
            Projection(down, hidden, width, down_bias, transposed=True),
        )

    def _feed_forward(self, scale: Scale | None) -> FeedForward:
        names, hidden, norms = self.names, self.config.hidden_size, self._block.norms
        mlp = self._block.mlp
        assert isinstance(mlp, Mlp)
        gate: Projection | None = None
        if not mlp.gated:
            up = self._projection(names.up, mlp.width, hidden, mlp.bias)
        elif names.gate_up:
            gate, up = self._fused(names.gate_up, (mlp.width, mlp.width), hidden, mlp.bias)
        else:
            gate = self._projection(names.gate, mlp.width, hidden, mlp.bias)
            up = self._projection(names.up, mlp.width, hidden, mlp.bias)
        return FeedForward(
            f"layers.{self.number}.mlp",
            hidden,
            self._norm("mlp.norm", names.before_mlp, norms.before),
            gate,
            up,
            self._projection(names.down, hidden, mlp.width, mlp.bias),
            mlp.activation,
            self._norm("mlp.after", names.after_mlp, norms.after),
            scale,
        )
