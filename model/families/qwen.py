"""Dense transformers with grouped attention: Llama, Mistral, Qwen2, Qwen3, OLMo 2."""

from __future__ import annotations

from typing import Any

from model.plan.families.blocks import Fields, Heads, base, gated_mlp, heads, layer_count
from model.plan.parameters import Layers, LlamaLayer, Model


def llama(fields: Fields) -> Model:
    """Two norms a layer, before attention and before a gated MLP; biases where the config asks for them."""
    attention_bias, mlp_bias = fields.flag("attention_bias"), fields.flag("mlp_bias")
    missing = "biases" if attention_bias or mlp_bias else _unknown_activation(fields)
    return _dense(
        fields,
        heads(fields).attention(fields.count("hidden_size"), attention_bias, attention_bias),
        mlp_bias=mlp_bias,
        missing=missing,
    )


def mistral(fields: Fields) -> Model:
    """A Llama whose tokens see a window of positions, where the config gives one."""
    window = fields.count("sliding_window") if "sliding_window" in fields else None
    attention = heads(fields).attention(fields.count("hidden_size"))
    return _dense(fields, attention, window=window, missing=_unknown_activation(fields))


def qwen2(fields: Fields) -> Model:
    """A Llama with biases on queries, keys and values."""
    attention = heads(fields).attention(fields.count("hidden_size"), qkv_bias=True)
    return _dense(fields, attention, missing="biases")


def qwen3(fields: Fields) -> Model:
    """A Llama with an RMSNorm on every head of queries and keys."""
    own, bias = heads(fields), fields.flag("attention_bias")
    missing = "biases" if bias else _unknown_activation(fields)
    attention = own.attention(fields.count("hidden_size"), bias, bias)
    return _dense(fields, attention, head_norms=2 * own.dim, missing=missing)


def olmo2(fields: Fields) -> Model:
    """Norms after attention and after the MLP, and on whole queries and keys."""
    own, bias = heads(fields), fields.flag("attention_bias")
    attention = own.attention(fields.count("hidden_size"), bias, bias)
    norms = own.query_width + own.kv_width
    return _dense(fields, attention, head_norms=norms, missing="norms after the blocks")


def _dense(
    fields: Fields,
    attention: dict[str, int],
    mlp_bias: bool = False,
    window: int | None = None,
    head_norms: int = 0,
    missing: str = "",
) -> Model:
    own, hidden = heads(fields), fields.count("hidden_size")
    width = fields.count("intermediate_size")
    layers = Layers(
        count=layer_count(fields),
        mlp=gated_mlp(hidden, width, mlp_bias),
        norms=2 * hidden + head_norms,
        window=window,
        **attention,
    )
    return Model(
        **base(fields),
        **shared(fields, own),
        final_norms=hidden,
        layers=(layers,),
        kernels=None
        if missing
        else LlamaLayer(own.dim, width, fields.number("rms_norm_eps", default=1e-6), head_norms > 0),
        missing=missing,
    )


def shared(fields: Fields, own: Heads) -> dict[str, Any]:
    """The fields of `Model` that grouped attention decides."""
    return {
        "context": fields.count("max_position_embeddings"),
        "divided_heads": own.query,
        "divided_kv_heads": own.key_value,
    }


def _unknown_activation(fields: Fields) -> str:
    activation = fields.get("hidden_act", "silu")
    return "" if activation == "silu" else f"an MLP with {activation}"
