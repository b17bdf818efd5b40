"""LLaDA: a Llama without causal mask, which predicts masked tokens (GSAI-ML/LLaDA-8B-Base, -Instruct, LLaDA-1.5).

A folder has config.json with `model_type` "llada" and `architectures` ["LLaDAModelLM"], tokenizer.json, and
safetensors. The fields are those of OLMo's first code, from which LLaDA's is derived:

    d_model, n_layers, n_heads, n_kv_heads      hidden size, layers, query heads and key/value heads
    mlp_hidden_size                             width of the MLP; null is mlp_ratio * d_model
    max_sequence_length                         most tokens of a text, prompt included
    vocab_size, embedding_size                  tokens; both are equal
    mask_token_id                               the mask; LLaDA-8B has 126336
    rope_theta, rms_norm_eps, weight_tying      as rope_theta, rms_norm_eps and tie_word_embeddings of a Llama
    include_qkv_bias                            biases of queries, keys and values

Tensors are called `model.transformer.wte`, `.ln_f` and `.ff_out` (absent with tied weights), and in
`model.transformer.blocks.<layer>` `attn_norm`, `q_proj`, `k_proj`, `v_proj`, `attn_out`, `ff_norm`, `ff_proj` (the
gate), `up_proj` and `ff_out`. The shipped `stories-mask` is such a folder.

The mask is never predicted: a text without masks is what the model is asked for (`model.runners.unmasking`).
"""

from __future__ import annotations

from dataclasses import replace

from model.config.blocks import Block, Mlp, ModelConfig
from model.config.fields import Fields
from model.config.masked_text import MaskedTextConfig
from model.config.mixers import GroupedAttention, Positions
from model.config.reading import MOST_HEADS, read_activation, read_dtype, read_layer_count, read_norms
from model.config.rope import RopeParameters
from model.families import dense
from model.layers.attention import Attention
from model.layers.block_cache import BlockCachedAttention
from model.network import Network

NAMES = dense.Names(
    table="model.transformer.wte",
    last_norm="model.transformer.ln_f",
    head="model.transformer.ff_out",
    layer="model.transformer.blocks",
    before_attention="attn_norm",
    before_mlp="ff_norm",
    query="q_proj",
    key="k_proj",
    value="v_proj",
    output="attn_out",
    gate="ff_proj",
    up="up_proj",
    down="ff_out",
)
_FIXED = {
    "block_type": "llama",
    "block_group_size": 1,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "rope": True,
    "alibi": False,
    "include_bias": False,
    "bias_for_layer_norm": False,
    "attention_layer_norm": False,
    "input_emb_norm": False,
    "scale_logits": False,
    "multi_query_attention": False,
}
"""Values of fields that the layers compute; they count where a field is absent or null."""


def read_llada(fields: Fields) -> MaskedTextConfig:
    """Return the config of a LLaDA, whose blocks are equal.

    Raises:
        ModelError: A field is missing or has the wrong type, heads do not divide the hidden size, or the mask is not a
            token of the vocabulary.
    """
    for name, computed in _FIXED.items():
        if fields.get(name, computed) != computed:
            fields.unsupported(name, f"{fields.get(name, computed)!r:.60}; layers compute {computed!r}")
    hidden, heads = fields.count("d_model"), fields.count("n_heads", most=MOST_HEADS)
    kv_heads, vocabulary = fields.count("n_kv_heads", default=heads), fields.count("vocab_size")
    if hidden % heads:
        raise fields.error("d_model", f"{hidden} is not a multiple of n_heads, {heads}")
    if heads % kv_heads:
        raise fields.error("n_kv_heads", f"{kv_heads} does not divide n_heads, {heads}")
    if fields.count("embedding_size", default=vocabulary) != vocabulary:
        fields.unsupported(
            "embedding_size",
            f"{fields.count('embedding_size')}; the embedding has a row for each of the {vocabulary} tokens of "
            "vocab_size",
        )
    masks = fields.token_ids("mask_token_id", vocabulary)
    if len(masks) != 1:
        raise fields.error("mask_token_id", f"{len(masks)} tokens; a text has one mask")
    mlp = Mlp(
        fields.count("mlp_hidden_size", default=hidden * fields.count("mlp_ratio", default=4)),
        read_activation(fields, "activation_type", "silu"),
    )
    bias = fields.flag("include_qkv_bias")
    mixer = GroupedAttention(
        heads,
        kv_heads,
        hidden // heads,
        query_bias=bias,
        key_bias=bias,
        value_bias=bias,
        positions=_read_positions(fields, hidden // heads),
        causal=False,
    )
    block = Block(mixer, mlp, read_norms(fields, default=1e-5))
    decoder = ModelConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        blocks=(block,) * read_layer_count(fields, "n_layers"),
        max_position_embeddings=fields.count("max_sequence_length"),
        tie_word_embeddings=fields.flag("weight_tying"),
        eos_token_ids=fields.token_ids("eos_token_id", vocabulary),
    )
    return MaskedTextConfig(decoder=decoder, mask_token_id=masks[0], dtype=read_dtype(fields))


def _read_positions(fields: Fields, head_dim: int) -> Positions:
    """Return the rotary positions of heads of `head_dim` elements, 0 to max_sequence_length - 1.

    Raises:
        ModelError: A field is missing or has the wrong type, or the base of the frequencies is at most 1.
    """
    if head_dim % 2:
        fields.unsupported("d_model", f"heads of {head_dim} elements; rotary embedding turns pairs")
    base = fields.number("rope_theta", 10000.0)
    if base <= 1:
        raise fields.error("rope_theta", f"{base}; must be greater than 1")
    return Positions(RopeParameters(base), fields.count("max_sequence_length"), head_dim)


def compose(config: MaskedTextConfig) -> Network:
    """Return the network, whose layers keep no keys and values between passes."""
    return dense.compose(config.decoder, NAMES)


def compose_with_cache(config: MaskedTextConfig) -> Network:
    """Return the network with attention that reuses keys and values of the text before a block of masks."""
    network = compose(config)
    blocks = (
        tuple(
            BlockCachedAttention(**vars(layer)) if isinstance(layer, Attention) else layer
            for layer in section
        )
        for section in network.blocks
    )
    return replace(network, sections=(network.sections[0], *blocks, network.sections[-1]))


def compose_causal(config: MaskedTextConfig) -> Network:
    """Return the network of a Llama with the same sizes, which decodes token by token, for comparisons of times."""
    decoder = config.decoder
    blocks = []
    for block in decoder.blocks:
        assert isinstance(block.mixer, GroupedAttention)
        blocks.append(replace(block, mixer=replace(block.mixer, causal=True)))
    return dense.compose(replace(decoder, blocks=tuple(blocks)), NAMES)
