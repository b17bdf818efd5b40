"""GPT-2: learned positions, LayerNorm, biases everywhere, an MLP without a gate; projections stored as [in, out]."""

from __future__ import annotations

from model.config.blocks import Block, Mlp, ModelConfig, Norms
from model.config.fields import Fields
from model.config.mixers import GroupedAttention
from model.config.reading import MOST_HEADS, read_activation, read_dtype, read_layer_count
from model.families import names

NAMES = names.Names(
    table="transformer.wte",
    positions="transformer.wpe",
    last_norm="transformer.ln_f",
    layer="transformer.h",
    before_attention="ln_1",
    before_mlp="ln_2",
    qkv="attn.c_attn",
    output="attn.c_proj",
    up="mlp.c_fc",
    down="mlp.c_proj",
    transposed=True,
    bare="transformer.",
    masks=("attn.bias", "attn.masked_bias"),
)


def read_gpt2(fields: Fields) -> ModelConfig:
    """Return the config of a GPT-2, whose blocks are equal.

    Raises:
        ModelError: A field is missing or has the wrong type, or the heads do not divide the hidden size.
    """
    hidden, heads = fields.count("n_embd"), fields.count("n_head", most=MOST_HEADS)
    if hidden % heads:
        raise fields.error("n_embd", f"{hidden} is not a multiple of n_head, {heads}")
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if fields.flag(name):
            fields.unsupported(name, "true; no layer computes that")
    head_dim = hidden // heads
    if head_dim % 2:
        fields.unsupported("n_embd", f"heads of {head_dim}; the kernels of attention take even sizes")
    positions = fields.count("n_positions", default=1024)
    mixer = GroupedAttention(
        heads,
        heads,
        head_dim,
        query_bias=True,
        key_bias=True,
        value_bias=True,
        output_bias=True,
        scale=None if fields.flag("scale_attn_weights", default=True) else 1.0,
    )
    width = fields.count("n_inner", default=4 * hidden)
    mlp = Mlp(width, read_activation(fields, "activation_function", "gelu_new"), bias=True, gated=False)
    block = Block(mixer, mlp, Norms(fields.number("layer_norm_epsilon", default=1e-5), bias=True))
    return ModelConfig(
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        blocks=(block,) * read_layer_count(fields, "n_layer"),
        max_position_embeddings=positions,
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=True),
        learned_positions=positions,
        dtype=read_dtype(fields),
    )
