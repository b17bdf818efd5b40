"""Granite: a Llama with factors of embeddings, scores, layer outputs and logits.

Granite multiplies every layer output by m before it is added to the residual stream x. The layers here carry x / m
instead and add their outputs unscaled. RMSNorm(x / m) equals RMSNorm(x) if its epsilon is divided by m squared.
"""

from __future__ import annotations

from dataclasses import replace

from model.config.blocks import ModelConfig
from model.config.fields import Fields
from model.config.reading import read_attention, read_biases, read_gated_mlp, read_norms
from model.families.dense import read_blocks

_MIN_MULTIPLIER = 2.0**-63
"""Smallest residual multiplier; the square of a smaller one is no normal float32 number."""


def read_granite(fields: Fields) -> ModelConfig:
    """Return the config of a Granite, with its factors moved into embeddings, scores, norms and logits.

    Raises:
        ModelError: A field is missing or has the wrong type, or the residual multiplier is outside 2^-63 to 2^63.
    """
    residual = fields.number("residual_multiplier", default=1.0)
    if not _MIN_MULTIPLIER <= residual <= 1 / _MIN_MULTIPLIER:
        raise fields.error(
            "residual_multiplier", f"{residual}; float32 does not hold its square: give 2^-63 to 2^63"
        )
    mixer = read_attention(
        fields, scale=fields.number("attention_multiplier", default=1.0), **read_biases(fields)
    )
    block_norms = read_norms(fields)
    scaled_norms = replace(block_norms, eps=block_norms.eps / residual**2)
    return replace(
        read_blocks(fields, mixer, read_gated_mlp(fields, bias=True), scaled_norms),
        embedding_scale=fields.number("embedding_multiplier", default=1.0) / residual,
        logit_scale=1 / fields.number("logits_scaling", default=1.0),
    )
