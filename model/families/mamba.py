"""Mamba: state-space layers, whose state has one size however long the sequence is."""

from __future__ import annotations

from model.plan.families.blocks import Fields, base, layer_count
from model.plan.parameters import Layers, Model

_SCAN_PRODUCTS = 3
"""Multiply-adds of a state element for one token: decay, input, output."""


def mamba(fields: Fields) -> Model:
    """A projection in, a short convolution, the selective scan and a projection out, in every layer."""
    hidden, state = fields.count("hidden_size"), fields.count("state_size", default=16)
    inner = fields.count("intermediate_size", default=fields.count("expand", default=2) * hidden)
    kernel = fields.count("conv_kernel", default=4)
    rank = (
        -(-hidden // 16) if fields.get("time_step_rank", "auto") == "auto" else fields.count("time_step_rank")
    )
    bias, conv_bias = fields.flag("use_bias"), fields.flag("use_conv_bias", default=True)
    projections = 3 * hidden * inner + bias * (2 * inner + hidden)
    convolution = inner * kernel + conv_bias * inner
    selection = inner * (rank + 2 * state) + rank * inner + inner
    layers = Layers(
        count=layer_count(fields),
        mixer=projections + convolution + selection + inner * state + inner,
        norms=hidden,
        cache_per_sequence=inner * (state + kernel),
        token_products=_SCAN_PRODUCTS * inner * state,
    )
    return Model(
        **base(fields, tied=True),
        context=None,
        divided_heads=inner,  # channels are independent, as heads are
        divided_kv_heads=inner,
        final_norms=hidden,
        layers=(layers,),
        missing="state-space layers",
    )
