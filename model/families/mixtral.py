"""Transformers with grouped attention and routed experts: Mixtral, Qwen3-MoE, gpt-oss."""

from __future__ import annotations

from collections import Counter

from model.plan.families.blocks import Fields, base, gated_mlp, heads, layer_count, windows
from model.plan.families.transformer import shared
from model.plan.parameters import Layers, Model

MISSING = "routed experts"


def mixtral(fields: Fields) -> Model:
    """Gated experts in every layer, two of eight for a token."""
    own, hidden = heads(fields), fields.count("hidden_size")
    experts = fields.count("num_local_experts")
    layers = Layers(
        count=layer_count(fields),
        mlp=hidden * experts,
        experts=experts * gated_mlp(hidden, fields.count("intermediate_size")),
        num_experts=experts,
        experts_per_token=chosen(fields, experts),
        norms=2 * hidden,
        window=fields.count("sliding_window") if "sliding_window" in fields else None,
        **own.attention(hidden),
    )
    return Model(**base(fields), **shared(fields, own), final_norms=hidden, layers=(layers,), missing=MISSING)


def qwen3_moe(fields: Fields) -> Model:
    """Small gated experts; some layers may have one MLP instead."""
    own, hidden = heads(fields), fields.count("hidden_size")
    count, experts = layer_count(fields), fields.count("num_experts")
    step = fields.count("decoder_sparse_step", default=1)
    listed = fields.get("mlp_only_layers", [])
    if not isinstance(listed, list) or not all(isinstance(each, int) for each in listed):
        raise fields.error("mlp_only_layers", f"{listed!r} is not a list of layers")
    sparse = sum(layer not in listed and (layer + 1) % step == 0 for layer in range(count))
    bias = fields.flag("attention_bias")
    attention, norms = own.attention(hidden, bias, bias), 2 * hidden + 2 * own.dim
    kinds = []
    if sparse:
        kinds.append(
            Layers(
                count=sparse,
                mlp=hidden * experts,
                experts=experts * gated_mlp(hidden, fields.count("moe_intermediate_size")),
                num_experts=experts,
                experts_per_token=chosen(fields, experts),
                norms=norms,
                **attention,
            )
        )
    if count > sparse:
        dense = gated_mlp(hidden, fields.count("intermediate_size"))
        kinds.append(Layers(count=count - sparse, mlp=dense, norms=norms, **attention))
    return Model(
        **base(fields), **shared(fields, own), final_norms=hidden, layers=tuple(kinds), missing=MISSING
    )


def gpt_oss(fields: Fields) -> Model:
    """Biases everywhere, a sink per head, experts in every layer, windows in every second layer."""
    own, hidden = heads(fields), fields.count("hidden_size")
    count, experts = layer_count(fields), fields.count("num_local_experts")
    attention = own.attention(hidden, qkv_bias=True, output_bias=True)
    attention["attention"] += own.query  # one sink a head
    counts = Counter(windows(fields, count, fields.count("sliding_window"), full_every=2))
    kinds = tuple(
        Layers(
            count=number,
            mlp=hidden * experts + experts,
            experts=experts * gated_mlp(hidden, fields.count("intermediate_size"), bias=True),
            num_experts=experts,
            experts_per_token=chosen(fields, experts),
            norms=2 * hidden,
            window=window,
            **attention,
        )
        for window, number in counts.items()
    )
    return Model(**base(fields), **shared(fields, own), final_norms=hidden, layers=kinds, missing=MISSING)


def chosen(fields: Fields, experts: int) -> int:
    """Experts that a token passes; ModelError where there are not so many."""
    number = fields.count("num_experts_per_tok")
    if number > experts:
        raise fields.error("num_experts_per_tok", f"{number} of {experts} experts")
    return number
