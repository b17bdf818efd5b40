"""DeepSeek V2 and V3: multi-head latent attention, whose cache is one latent vector a token, and routed experts.

A decode step can score the latent itself, with the projections of keys and values taken into those of queries and
outputs; that is what `decode_products` counts. A prompt expands keys and values, which takes fewer products there.
V3's extra layer for predicting a second token is no part of the model that generates, and is not counted.
"""

from __future__ import annotations

from model.plan.families.blocks import Fields, base, gated_mlp, layer_count
from model.plan.families.sparse import chosen
from model.plan.parameters import Layers, Model


def deepseek(fields: Fields) -> Model:
    """Some dense layers, then layers with routed and shared experts."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    count = layer_count(fields)
    dense = min(_whole(fields, "first_k_dense_replace"), count)
    latent, rope = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim")
    plain, value = fields.count("qk_nope_head_dim"), fields.count("v_head_dim")
    query, low_rank = heads * (plain + rope), _whole(fields, "q_lora_rank")
    queries = hidden * low_rank + low_rank * query if low_rank else hidden * query
    compressed = hidden * (latent + rope)
    attention = {
        "attention": queries + compressed + latent * heads * (plain + value) + heads * value * hidden,
        "attention_shared": compressed,
        "cache_per_token": latent + rope,
        "prefill_products": heads * (plain + rope + value),
        "decode_products": heads * (2 * latent + rope),
        "norms": 2 * hidden + low_rank + latent,
    }
    experts = fields.count("n_routed_experts")
    width = fields.count("moe_intermediate_size")
    shared_width = _whole(fields, "n_shared_experts") * width
    kinds = []
    if dense:
        mlp = gated_mlp(hidden, fields.count("intermediate_size"))
        kinds.append(Layers(count=dense, mlp=mlp, **attention))
    if count > dense:
        kinds.append(
            Layers(
                count=count - dense,
                mlp=hidden * experts + gated_mlp(hidden, shared_width),
                experts=experts * gated_mlp(hidden, width),
                num_experts=experts,
                experts_per_token=chosen(fields, experts),
                **attention,
            )
        )
    return Model(
        **base(fields),
        context=fields.count("max_position_embeddings"),
        divided_heads=heads,
        divided_kv_heads=1,  # every rank's heads need the whole latent
        final_norms=hidden,
        layers=tuple(kinds),
        missing="latent attention or routed experts",
    )


def _whole(fields: Fields, name: str) -> int:
    """A whole number that may be 0, which is also what an absent one means."""
    return 0 if fields.get(name, 0) == 0 else fields.count(name)
