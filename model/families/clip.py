"""CLIP's text encoder: causal attention, learned positions, LayerNorm and biases, and a projection in some models."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from model.config.blocks import Block, Mlp, Norms
from model.config.component import refuse_unread
from model.config.fields import Fields
from model.config.mixers import GroupedAttention
from model.config.reading import MOST_HEADS, read_activation, read_dtype, read_layer_count
from model.config.text_encoders import PENULTIMATE, PROJECTED, ClipTextConfig
from model.layers.attention import Attention
from model.layers.attention_heads import AttentionProjections
from model.layers.layer import Layer
from model.layers.mlp import FeedForward
from model.layers.norm import Norm
from model.layers.projection import Projection
from model.layers.text_encoder import FinalNorm, NamedStates, StateProjection, TextEmbedding
from model.network import Input, Network

_PREFIX = "text_model."
_IGNORED = (
    "attention_dropout bos_token_id dropout initializer_factor initializer_range pad_token_id projection_dim"
).split()
"""Fields for training, for tokenizers, or for the projection, which only some of the encoders have."""


def read_clip_text(fields: Fields) -> ClipTextConfig:
    """Return the config of a CLIP text encoder without projection, for texts padded to all positions.

    Raises:
        ModelError: A field is missing or has the wrong type, or heads do not divide the hidden size.
    """
    hidden = fields.count("hidden_size")
    heads = fields.count("num_attention_heads", most=MOST_HEADS)
    if hidden % heads:
        raise fields.error("hidden_size", f"{hidden} is not a multiple of num_attention_heads, {heads}")
    if hidden // heads % 2:
        fields.unsupported(
            "hidden_size", f"heads of {hidden // heads}; the kernels of attention take even sizes"
        )
    vocabulary, positions = fields.count("vocab_size"), fields.count("max_position_embeddings", default=77)
    ends = fields.token_ids("eos_token_id", vocabulary)
    if len(ends) != 1:
        raise fields.error("eos_token_id", f"{list(ends)!r:.60}; the pooled state is that of one end token")
    activation = read_activation(fields, "hidden_act", "quick_gelu")
    config = ClipTextConfig(
        rows=positions,
        vocab_size=vocabulary,
        hidden_size=hidden,
        block=Block(
            GroupedAttention(
                heads,
                heads,
                hidden // heads,
                query_bias=True,
                key_bias=True,
                value_bias=True,
                output_bias=True,
            ),
            Mlp(fields.count("intermediate_size"), activation, bias=True, gated=False),
            Norms(fields.number("layer_norm_eps", default=1e-5), bias=True),
        ),
        layers=read_layer_count(fields),
        positions=positions,
        eos_token_id=ends[0],
        dtype=read_dtype(fields),
    )
    refuse_unread(fields, *_IGNORED)
    return config


def read_clip_projection(fields: Fields) -> ClipTextConfig:
    """Return the config of a CLIP text encoder with a projection of its pooled state.

    Raises:
        ModelError: A field is missing or has the wrong type, or heads do not divide the hidden size.
    """
    return replace(read_clip_text(fields), projected=fields.count("projection_dim", default=512))


def compose(config: ClipTextConfig) -> Network:
    """Return the network from `ids` [batch, rows] to the last and penultimate hidden states, and the projected ones."""
    hidden, eps = config.hidden_size, config.block.norms.eps
    table, positions = (f"{_PREFIX}embeddings.{name}_embedding.weight" for name in ("token", "position"))
    embedding = TextEmbedding(
        "embedding", table, config.vocab_size, hidden, learned=(positions, config.positions)
    )
    blocks = [_build_block(config, number) for number in range(config.layers)]
    # The penultimate states are the result of the last layer before the last block.
    *layers, before = embedding, *chain(*blocks[:-1])
    attention, mlp = blocks[-1]
    last: list[Layer] = [FinalNorm(_build_norm("norm", f"{_PREFIX}final_layer_norm", hidden, eps))]
    outputs = ["x", PENULTIMATE]
    if config.projected:
        projection = Projection("text_projection.weight", config.projected, hidden)
        last.append(StateProjection("projection", projection, PROJECTED))
        outputs.append(PROJECTED)
    return Network(
        (
            *((layer,) for layer in layers),
            (NamedStates(before, target=PENULTIMATE),),
            (NamedStates(attention, source=PENULTIMATE), mlp),
            tuple(last),
        ),
        {"ids": Input("ids", most=config.vocab_size - 1)},
        tuple(outputs),
        unread=(f"{_PREFIX}embeddings.position_ids",),
        bare_prefix=_PREFIX,
    )


def _build_block(config: ClipTextConfig, number: int) -> tuple[Layer, Layer]:
    """Return attention and MLP of block `number`."""
    name, tensor = f"layers.{number}", f"{_PREFIX}encoder.layers.{number}"
    hidden, mixer, mlp, eps = (
        config.hidden_size,
        config.block.mixer,
        config.block.mlp,
        config.block.norms.eps,
    )
    assert isinstance(mixer, GroupedAttention) and isinstance(mlp, Mlp)
    *inputs, output = (
        _build_linear(f"{tensor}.self_attn.{letter}_proj", hidden, hidden)
        for letter in ("q", "k", "v", "out")
    )
    attention = Attention(
        f"{name}.attention",
        hidden,
        mixer,
        _build_norm(f"{name}.attention.norm", f"{tensor}.layer_norm1", hidden, eps),
        AttentionProjections(tuple(inputs), output),
        is_cached=False,
    )
    feed_forward = FeedForward(
        f"{name}.mlp",
        hidden,
        _build_norm(f"{name}.mlp.norm", f"{tensor}.layer_norm2", hidden, eps),
        None,
        _build_linear(f"{tensor}.mlp.fc1", mlp.width, hidden),
        _build_linear(f"{tensor}.mlp.fc2", hidden, mlp.width),
        mlp.activation,
    )
    return attention, feed_forward


def _build_linear(tensor: str, outputs: int, inputs: int) -> Projection:
    return Projection(f"{tensor}.weight", outputs, inputs, f"{tensor}.bias")


def _build_norm(name: str, tensor: str, hidden: int, eps: float) -> Norm:
    return Norm(name, f"{tensor}.weight", hidden, eps, f"{tensor}.bias")
