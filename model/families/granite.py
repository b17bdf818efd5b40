"""Granite: a Llama that multiplies embeddings, scores, what every layer adds to the residual stream, and logits.

With m the multiplier of the residual stream x, x / m is what the layers here carry: they then add their results as
they are. RMSNorm of x / m is that of x if its eps is divided by m squared. So m is a factor of the embeddings alone.
"""

from __future__ import annotations

from dataclasses import replace

from model.config.fields import Fields
from model.config.parts import ModelConfig
from model.config.reading import attention, biases, gated_mlp
from model.families.dense import compose as compose
from model.families.dense import equal_blocks

_LEAST = 2.0**-63
"""Its square is the least normal number of float32."""


def granite(fields: Fields) -> ModelConfig:
    """Equal blocks."""
    residual = fields.number("residual_multiplier", default=1.0)
    if not _LEAST <= residual <= 1 / _LEAST:
        raise fields.error("residual_multiplier", f"{residual}; float32 does not hold its square")
    mixer = attention(fields, scale=fields.number("attention_multiplier", default=1.0), **biases(fields))
    config = equal_blocks(fields, mixer, gated_mlp(fields, bias=True))
    norms = replace(config.blocks[0].norms, eps=config.blocks[0].norms.eps / residual**2)
    return replace(
        config,
        blocks=tuple(replace(block, norms=norms) for block in config.blocks),
        embedding_scale=fields.number("embedding_multiplier", default=1.0) / residual,
        logit_scale=1 / fields.number("logits_scaling", default=1.0),
    )
