"""Mamba: state-space layers, whose state has one size however long the sequence is."""

from __future__ import annotations

from model.config.fields import Fields
from model.config.parts import Block, ModelConfig, StateSpace
from model.config.reading import common, layer_count, norms


def mamba(fields: Fields) -> ModelConfig:
    """A projection in, a short convolution, the selective scan and a projection out, in every layer."""
    hidden = fields.count("hidden_size")
    automatic = fields.get("time_step_rank", "auto") == "auto"
    mixer = StateSpace(
        inner=fields.count("intermediate_size", default=fields.count("expand", default=2) * hidden),
        state=fields.count("state_size", default=16),
        convolution=fields.count("conv_kernel", default=4),
        step_rank=-(-hidden // 16) if automatic else fields.count("time_step_rank"),
        bias=fields.flag("use_bias"),
        convolution_bias=fields.flag("use_conv_bias", default=True),
    )
    block = Block(mixer, None, norms(fields, "layer_norm_epsilon"))
    return ModelConfig(
        **common(fields, tied=True, limited=False),
        blocks=(block,) * layer_count(fields),
    )
