"""Whisper: an encoder of speech that runs once for a recording, and a decoder that attends to what it left behind."""

from __future__ import annotations

from model.plan.families.blocks import Fields, dtype, layer_count
from model.plan.parameters import Aside, Layers, Model


def whisper(fields: Fields) -> Model:
    """The decoder's layers with self-attention and cross-attention; the encoder stands aside."""
    width, vocabulary = fields.count("d_model"), fields.count("vocab_size")
    sources, targets = fields.count("max_source_positions"), fields.count("max_target_positions")
    attention = 4 * width * width + 3 * width  # keys have no bias
    decoder = Layers(
        count=layer_count(fields, "decoder_layers"),
        attention=2 * attention,
        mlp=_mlp(width, fields.count("decoder_ffn_dim")),
        norms=3 * 2 * width,
        cache_per_token=2 * width,
        cache_per_sequence=2 * width * sources,
        prefill_products=2 * width,
        decode_products=2 * width,
        fixed_positions=sources,
    )
    convolutions = 3 * width * (fields.count("num_mel_bins") + width) + 2 * width
    layer = attention + _mlp(width, fields.count("encoder_ffn_dim")) + 2 * 2 * width
    layers = layer_count(fields, "encoder_layers")
    encoder = convolutions + sources * width + layers * layer + 2 * width
    table = vocabulary * width
    return Model(
        model_type="whisper",
        dtype=dtype(fields),
        context=targets,
        vocabulary=vocabulary,
        hidden=width,
        divided_heads=fields.count("decoder_attention_heads"),
        divided_kv_heads=fields.count("decoder_attention_heads"),
        embedding=table + targets * width,
        head=0 if fields.flag("tie_word_embeddings", default=True) else table,
        final_norms=2 * width,
        layers=(decoder,),
        missing="cross-attention or biases",
        aside=Aside("encoder", encoder, positions=sources, products=layers * 2 * width * sources**2),
    )


def _mlp(width: int, inner: int) -> int:
    """Parameters of two projections with biases."""
    return 2 * width * inner + inner + width
