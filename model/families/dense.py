"""Decoders whose blocks consist of a mixer and an MLP or experts: layers built from the blocks of a config.

A mixer is the attention or recurrent layer of a block. `Names` of a family names the tensors of the layers in its
checkpoints. The families' modules call `read_blocks` and `compose`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from model.config.blocks import Block, Encoder, Experts, Mlp, ModelConfig, Norms, PerLayerInput
from model.config.fields import Fields
from model.config.mixers import GroupedAttention, HeadNorm, LatentAttention
from model.config.reading import read_common, read_dtype, read_gated_mlp, read_layer_count, read_norms
from model.families.names import LLAMA, ExpertNames, Names, StackedExpertNames
from model.families.tokens import build_token_network
from model.formats import read_format, read_method
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
from model.layers.shard import COLUMN_PARALLEL, ROW, by_kv_heads, by_query_heads
from model.layers.uncomputed import Uncomputed
from model.layers.weight import Numbered, Tensor, Weight
from model.network import Network, Section, name_in_stack

_LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, whatever config.json says: the default of transformers' DeepseekV2RMSNorm."""


def read_blocks(
    fields: Fields,
    mixer: GroupedAttention,
    mlp: Mlp | Experts | None = None,
    block_norms: Norms | None = None,
    layer_windows: Sequence[int | None] | None = None,
) -> ModelConfig:
    """Return the config of a decoder whose blocks are equal, or differ in their windows only.

    Sizes, the number of layers and the limit of positions are read from `fields`.

    Args:
        fields: The fields of config.json.
        mixer: Attention of every block.
        mlp: The MLP or the experts of every block, by default a gated MLP with silu.
        block_norms: The norms of every block, by default an RMSNorm before each layer.
        layer_windows: The window of every layer, by default the window of `mixer`.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    block = Block(mixer, mlp or read_gated_mlp(fields), block_norms or read_norms(fields))
    return ModelConfig(
        **read_common(fields),
        blocks=(block,) * read_layer_count(fields)
        if layer_windows is None
        else tuple(replace(block, mixer=replace(mixer, window=window)) for window in layer_windows),
    )


def with_tower(fields: Fields, text: Fields, config: ModelConfig, tower: Encoder | None) -> ModelConfig:
    """Return the config of a text decoder together with a tower, such as a vision encoder, that plans count.

    The dtype and the tying of embeddings are those of config.json around it, if it names them.

    Args:
        fields: The fields of config.json.
        text: The fields of the text decoder in it.
        config: The config of the text decoder.
        tower: The tower, or None.
    """
    return replace(
        config,
        dtype=read_dtype(fields) or config.dtype,
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=config.tie_word_embeddings),
        weight_format=read_format(text),
        quant_method=read_method(text),
        encoder=tower,
    )


BuildMixer = Callable[[ModelConfig, int, Norm], Layer]
"""Builds the mixer of a block that has no attention, from the config, the block's number and the norm before it."""


def compose(config: ModelConfig, names: Names = LLAMA, build_mixer: BuildMixer | None = None) -> Network:
    """Return the network of a decoder: embedding, blocks and head, with the tensors of its checkpoint.

    Args:
        config: The config of the model.
        names: The names of the checkpoint's tensors.
        build_mixer: Builds the mixers of blocks with neither grouped nor latent attention; needed if there are any.
    """
    hidden, vocabulary = config.hidden_size, config.vocab_size
    table, head = f"{names.table}.weight", f"{names.head}.weight"
    learned = (f"{names.positions}.weight", config.learned_positions) if names.positions else None
    first_norms = config.blocks[0].norms
    bias = f"{names.last_norm}.bias" if first_norms.bias else None
    tied = config.tie_word_embeddings
    embedding = Embedding("embedding", table, vocabulary, hidden, config.embedding_scale, learned)
    mixers = (block.mixer for block in config.blocks)
    return build_token_network(
        _add_per_layer_inputs(config, names, embedding),
        tuple(
            _BlockBuilder(config, names, number, build_mixer).build() for number in range(len(config.blocks))
        ),
        Head(
            "head",
            table if tied else head,
            vocabulary,
            hidden,
            Norm("head.norm", f"{names.last_norm}.weight", hidden, first_norms.eps, bias, first_norms.offset),
            config.logit_scale,
            config.logit_softcap,
        ),
        windows={mixer.window for mixer in mixers if isinstance(mixer, GroupedAttention) and mixer.window},
        unread=(
            *((head,) if tied else ()),
            *(f"{names.layer}.{layer}.{mask}" for layer in range(len(config.blocks)) for mask in names.masks),
            *_list_unread_keys_and_values(config, names),
        ),
        bare_prefix=names.bare,
        stacks=_list_stacks(config, names),
        before=_build_tower(config.encoder),
    )


def _build_tower(encoder: Encoder | None) -> dict[str, Network]:
    """Return a network that holds the parameters of a tower as one vector, divided evenly among the ranks.

    Returns an empty dict without a tower, and for an encoder with layers of its own. No prompt passes the tower.
    """
    if encoder is None or not encoder.parameters:
        return {}
    vector = Tensor(encoder.description, (encoder.parameters,), COLUMN_PARALLEL)
    layer = Uncomputed(encoder.description, (Weight(encoder.description, (vector,)),))
    return {"tower": Network(((layer,),), {}, ())}


def _list_stacks(config: ModelConfig, names: Names) -> dict[str, Sequence[str]]:
    """Return, by the name of each checkpoint tensor that stacks the tensors of a layer's experts, their names.

    The result is empty for families that store experts one by one.
    """
    if not isinstance(names.experts, StackedExpertNames):
        return {}
    return {
        stack: Numbered(range(block.mlp.count), partial(name_in_stack, stack))
        for layer, block in enumerate(config.blocks)
        if isinstance(block.mlp, Experts)
        for stack in names.experts.list_stacks(f"{names.layer}.{layer}")
    }


def _add_per_layer_inputs(
    config: ModelConfig, names: Names, embedding: Embedding
) -> Embedding | PerLayerInputs:
    """Return the first layer: the embedding, or for a model with per-layer inputs one that computes these too."""
    sizes, tensors = config.blocks[0].per_layer_input, names.per_layer
    if sizes is None or tensors is None:
        return embedding
    width = len(config.blocks) * sizes.width
    name, eps = "per_layer_inputs", config.blocks[0].norms.eps
    return PerLayerInputs(
        name,
        embedding,
        Embedding(f"{name}.rows", f"{tensors.table}.weight", sizes.vocabulary, width, sizes.width**0.5),
        Projection(f"{tensors.projection}.weight", width, config.hidden_size),
        Norm(f"{name}.norm", f"{tensors.norm}.weight", sizes.width, eps),
    )


def _list_unread_keys_and_values(config: ModelConfig, names: Names) -> Iterator[str]:
    """Yield names of key and value tensors that a checkpoint may have for layers that read another layer's cache."""
    for layer, block in enumerate(config.blocks):
        if isinstance(block.mixer, GroupedAttention) and block.mixer.cache_of is not None:
            for tensor in (names.key, names.value, names.key_norm):
                yield f"{names.layer}.{layer}.{tensor}.weight"
                yield f"{names.layer}.{layer}.{tensor}.bias"


@dataclass(frozen=True)
class _BlockBuilder:
    """Builder of the layers of block `number`."""

    config: ModelConfig
    names: Names
    number: int
    build_mixer: BuildMixer | None

    @property
    def _block(self) -> Block:
        return self.config.blocks[self.number]

    def build(self) -> Section:
        """Return the layers of the block in order: mixer, MLP or experts, and the per-layer input if there is one."""
        mixer, per_layer_input = self._block.mixer, self._block.per_layer_input
        if isinstance(mixer, LatentAttention):
            return self._build_latent_attention(mixer), self._build_mlp()
        if not isinstance(mixer, GroupedAttention):
            assert self.build_mixer is not None
            norm = self._build_norm("mixer.norm", self.names.before_attention)
            return self.build_mixer(self.config, self.number, norm), self._build_mlp()
        if per_layer_input is None:
            return self._build_attention(mixer), self._build_mlp()
        return (
            self._build_attention(mixer),
            self._build_feed_forward(None),
            self._build_per_layer_input(per_layer_input),
        )

    def _build_scale(self) -> Scale | None:
        """Return the factor of the block's output; None for a block without one."""
        return (
            Scale(f"layers.{self.number}.scale", self._name_tensor(self.names.scale))
            if self._block.scaled
            else None
        )

    def _name_tensor(self, name: str) -> str:
        return f"{self.names.layer}.{self.number}.{name}"

    def _build_norm(self, name: str, tensor_name: str) -> Norm:
        """Return a norm of hidden states: `name` names it within the block, `tensor_name` in the block's checkpoint."""
        block_norms, tensor = self._block.norms, self._name_tensor(tensor_name)
        return Norm(
            f"layers.{self.number}.{name}",
            f"{tensor}.weight",
            self.config.hidden_size,
            block_norms.eps,
            f"{tensor}.bias" if block_norms.bias else None,
            block_norms.offset,
        )

    def _build_projection(self, name: str, outputs: int, inputs: int, bias: bool = False) -> Projection:
        tensor = self._name_tensor(name)
        bias_tensor = f"{tensor}.bias" if bias else None
        return Projection(f"{tensor}.weight", outputs, inputs, bias_tensor, transposed=self.names.transposed)

    def _build_attention(self, mixer: GroupedAttention) -> Attention:
        names, hidden, block_norms = self.names, self.config.hidden_size, self._block.norms
        queries, keys, sharer = mixer.query_width, mixer.kv_width, mixer.cache_of
        if names.qkv:
            sizes = (queries, keys, keys)
            inputs = self._build_projection(names.qkv, sum(sizes), hidden, mixer.query_bias).split(sizes)
        else:
            inputs = (
                self._build_projection(names.query, queries, hidden, mixer.query_bias),
                self._build_projection(names.key, keys, hidden, mixer.key_bias),
                self._build_projection(
                    names.key if mixer.keys_as_values else names.value, keys, hidden, mixer.value_bias
                ),
            )
        if mixer.output_gate and names.output_gate:
            inputs = (*inputs, self._build_projection(names.output_gate, queries, hidden))
        elif mixer.output_gate:  # one tensor of queries and gates, head by head
            fused = self._build_projection(names.query, 2 * queries, hidden, mixer.query_bias)
            query, gate = fused.split((mixer.head_dim, mixer.head_dim), mixer.heads)
            inputs = (query, *inputs[1:], gate)
        return Attention(
            f"layers.{self.number}.attention",
            hidden,
            mixer,
            self._build_norm("attention.norm", names.before_attention) if block_norms.before else None,
            AttentionProjections(
                inputs if sharer is None else inputs[:1],
                self._build_projection(names.output, hidden, queries, mixer.output_bias),
            ),
            self._build_head_norms(mixer),
            self._build_norm("attention.after", names.after_attention) if block_norms.after else None,
            None if sharer is None else f"layers.{sharer}.attention",
            self._name_tensor(names.sinks) if mixer.sinks else None,
        )

    def _build_latent_attention(self, mixer: LatentAttention) -> LatentMixer:
        names, hidden = self.names.latent, self.config.hidden_size
        name, rank, query_rank = f"layers.{self.number}.attention", mixer.latent_rank, mixer.query_rank
        queries = mixer.heads * mixer.query_dim
        query_latent = query_norm = None
        query = self._build_projection(names.query, queries, hidden)
        if query_rank:
            query_latent = self._build_projection(names.query_latent, query_rank, hidden)
            query = self._build_projection(names.query_of_latent, queries, query_rank)
            query_norm = Norm(
                f"{name}.q_norm", f"{self._name_tensor(names.query_norm)}.weight", query_rank, _LATENT_EPS
            )
        expanded, values = mixer.heads * (mixer.plain_dim + mixer.value_dim), mixer.heads * mixer.value_dim
        projections = LatentProjections(
            query_latent,
            query,
            self._build_projection(names.latent, mixer.row_width, hidden),
            self._build_projection(names.expand, expanded, rank),
            self._build_projection(self.names.output, hidden, values),
        )
        norm = self._build_norm("attention.norm", self.names.before_attention)
        latent_norm = Norm(
            f"{name}.latent_norm", f"{self._name_tensor(names.latent_norm)}.weight", rank, _LATENT_EPS
        )
        return LatentMixer(name, hidden, mixer, norm, projections, query_norm, latent_norm)

    def _build_head_norms(self, mixer: GroupedAttention) -> tuple[Norm, ...]:
        """Return the norms of queries and of keys: (), both, or that of queries if another block's keys are read."""
        if mixer.head_norm is None:
            return ()
        is_wide, block_norms = mixer.head_norm is HeadNorm.width, self._block.norms
        query = ("q_norm", self.names.query_norm, mixer.heads, by_query_heads)
        key = ("k_norm", self.names.key_norm, mixer.kv_heads, by_kv_heads)
        return tuple(
            Norm(
                f"layers.{self.number}.attention.{name}",
                f"{self._name_tensor(tensor_name)}.weight",
                heads * mixer.head_dim if is_wide else mixer.head_dim,
                block_norms.eps,
                offset=block_norms.offset,
                cut=cut_heads(*mixer.divided) if is_wide else ROW,
            )
            for name, tensor_name, heads, cut_heads in ((query, key) if mixer.cache_of is None else (query,))
        )

    def _build_per_layer_input(self, sizes: PerLayerInput) -> GatedInput:
        tensors, hidden = self.names.per_layer, self.config.hidden_size
        assert tensors is not None
        name, tensor = f"layers.{self.number}.per_layer_input", self._name_tensor(tensors.after)
        return GatedInput(
            name,
            hidden,
            Columns("per_layer_inputs", len(self.config.blocks) * sizes.width, self.number * sizes.width),
            self._build_projection(tensors.gate, sizes.width, hidden),
            self._build_projection(tensors.output, hidden, sizes.width),
            sizes.activation,
            Norm(f"{name}.after", f"{tensor}.weight", hidden, self._block.norms.eps),
            self._build_scale(),
        )

    def _build_mlp(self) -> FeedForward | RoutedExperts:
        mlp = self._block.mlp
        return (
            self._build_experts(mlp)
            if isinstance(mlp, Experts)
            else self._build_feed_forward(self._build_scale())
        )

    def _build_experts(self, routing: Experts) -> RoutedExperts:
        names, hidden = self.names.experts, self.config.hidden_size
        shared = choice_bias = shared_gate = None
        numbers = range(routing.count)
        if isinstance(names, StackedExpertNames):
            experts = Numbered(numbers, partial(self._build_stacked_expert, names, routing.width))
        else:
            build, prefix = partial(self._build_expert, names), names.experts
            experts = Numbered(numbers, lambda number: build(f"{prefix}.{number}", routing.width))
            shared = build(names.shared, routing.shared_width) if routing.shared_width else None
            shared_gate = (
                self._build_projection(names.shared_gate, 1, hidden) if routing.shared_gate else None
            )
            choice_bias = self._name_tensor(names.choice_bias) if routing.choice_bias else None
        return RoutedExperts(
            f"layers.{self.number}.experts",
            hidden,
            self._build_norm("experts.norm", self.names.before_mlp),
            routing,
            self._build_projection(names.router, routing.count, hidden, routing.router_bias),
            experts,
            shared,
            choice_bias,
            shared_gate,
            self._build_norm("experts.after", self.names.after_mlp) if self._block.norms.after else None,
        )

    def _build_expert(self, names: ExpertNames, prefix: str, width: int) -> ExpertProjections:
        hidden = self.config.hidden_size
        return ExpertProjections(
            self._build_projection(f"{prefix}.{names.gate}", width, hidden),
            self._build_projection(f"{prefix}.{names.up}", width, hidden),
            self._build_projection(f"{prefix}.{names.down}", hidden, width),
        )

    def _build_stacked_expert(self, names: StackedExpertNames, width: int, number: int) -> ExpertProjections:
        """Return the projections of expert `number`, with intermediate size `width`, from stacked checkpoint tensors.

        The outputs of gate and up alternate in one tensor.
        """
        hidden = self.config.hidden_size
        gate_up, gate_up_bias, down, down_bias = (
            name_in_stack(stack, number) for stack in names.list_stacks(f"{self.names.layer}.{self.number}")
        )
        fused = Projection(gate_up, 2 * width, hidden, gate_up_bias, transposed=True)
        gate, up = fused.split((1, 1), width)
        return ExpertProjections(gate, up, Projection(down, hidden, width, down_bias, transposed=True))

    def _build_feed_forward(self, scale: Scale | None) -> FeedForward:
        names, hidden, block_norms, mlp = (
            self.names,
            self.config.hidden_size,
            self._block.norms,
            self._block.mlp,
        )
        assert isinstance(mlp, Mlp)
        up = self._build_projection(names.up, mlp.width, hidden, mlp.bias)
        gate = self._build_projection(names.gate, mlp.width, hidden, mlp.bias) if mlp.gated else None
        if mlp.gated and names.gate_up:
            sizes = (mlp.width, mlp.width)
            gate, up = self._build_projection(names.gate_up, sum(sizes), hidden, mlp.bias).split(sizes)
        return FeedForward(
            f"layers.{self.number}.mlp",
            hidden,
            self._build_norm("mlp.norm", names.before_mlp) if block_norms.before else None,
            gate,
            up,
            self._build_projection(names.down, hidden, mlp.width, mlp.bias),
            mlp.activation,
            self._build_norm("mlp.after", names.after_mlp) if block_norms.after else None,
            scale,
        )
