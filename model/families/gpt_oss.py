"""gpt-oss: biases everywhere, a sink per head, experts in every layer, a window in every second layer."""

from __future__ import annotations

from model.config.blocks import SWIGLU_ALPHA, SWIGLU_LIMIT, SWIGLU_OAI, Experts, ModelConfig
from model.config.fields import Fields
from model.config.reading import (
    alternate_windows,
    read_attention,
    read_biases,
    read_experts_per_token,
    read_layer_count,
    read_norms,
    read_windows,
)
from model.families import dense, names

NAMES = names.Names(experts=names.StackedExpertNames())


def read_gpt_oss(fields: Fields) -> ModelConfig:
    """Return the config of a gpt-oss, whose blocks differ in their windows; other SwiGLU constants are refused.

    Raises:
        ModelError: A field is missing or has the wrong type.
    """
    for name, known in (("swiglu_limit", SWIGLU_LIMIT), ("swiglu_alpha", SWIGLU_ALPHA)):
        number = fields.number(name, default=known)
        if number != known:
            fields.unsupported(name, f"{number}; experts are computed with {known}")
    experts = fields.count("num_local_experts")
    mixer = read_attention(fields, sinks=True, **read_biases(fields, default=True))
    routed = Experts(
        experts,
        read_experts_per_token(fields, experts),
        fields.count("intermediate_size"),
        bias=True,
        router_bias=True,
        activation=SWIGLU_OAI,
    )
    window = fields.count("sliding_window")
    layer_windows = read_windows(fields, alternate_windows(2, read_layer_count(fields), window), window)
    return dense.read_blocks(fields, mixer, routed, read_norms(fields, default=1e-5), layer_windows)
