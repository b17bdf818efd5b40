"""Whisper: an encoder of speech that runs once for a recording, and a decoder that attends to what it left behind."""

from __future__ import annotations

from model.config.fields import Fields
from model.config.parts import Block, Encoder, GroupedAttention, Mlp, ModelConfig, Norms
from model.config.reading import MOST_HEADS, dtype, layer_count

_EPS = 1e-5
"""Of every LayerNorm: torch's default, which no field changes."""


def whisper(fields: Fields) -> ModelConfig:
    """The decoder's layers with self-attention and cross-attention; the encoder is counted apart."""
    width, heads = fields.count("d_model"), fields.count("decoder_attention_heads", most=MOST_HEADS)
    if width % heads:
        raise fields.error("d_model", f"{width} is not a multiple of decoder_attention_heads, {heads}")
    sources, targets = fields.count("max_source_positions"), fields.count("max_target_positions")
    mixer = GroupedAttention(
        heads,
        heads,
        width // heads,
        query_bias=True,
        value_bias=True,
        output_bias=True,
        cross_positions=sources,
    )
    mlp = Mlp(fields.count("decoder_ffn_dim"), "gelu", bias=True, gated=False)
    block = Block(mixer, mlp, Norms(_EPS, bias=True))
    layers, inner = layer_count(fields, "encoder_layers"), fields.count("encoder_ffn_dim")
    convolutions = 3 * width * (fields.count("num_mel_bins") + width) + 2 * width
    layer = 4 * width * width + 3 * width + 2 * width * inner + inner + width + 2 * 2 * width
    encoder = convolutions + sources * width + layers * layer + 2 * width
    return ModelConfig(
        vocab_size=fields.count("vocab_size"),
        hidden_size=width,
        blocks=(block,) * layer_count(fields, "decoder_layers"),
        max_position_embeddings=targets,
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=True),
        learned_positions=targets,
        dtype=dtype(fields),
        encoder=Encoder("encoder", encoder, positions=sources, products=layers * 2 * width * sources**2),
    )
