"""Shapes of model steps for tests, which have sizes only or copy the other fields of a model's step."""

from __future__ import annotations

from model.engine.buckets import SIZES_ONLY
from model.layers.launch import Phase, StepShape


def decode_shape(
    sequences: int, new_tokens: int, cache_length: int, model_step: StepShape = SIZES_ONLY
) -> StepShape:
    """Return the shape of a decode step; fields other than the sizes are those of `model_step`."""
    return model_step.with_sizes(Phase.decode, sequences, new_tokens, cache_length)


def prompt_shape(
    sequences: int,
    tokens: int,
    cache_length: int,
    prefix: int = 0,
    decoding: StepShape | None = None,
    model_step: StepShape = SIZES_ONLY,
) -> StepShape:
    """Return the shape of a step with prompts, and with decoding sequences if `decoding` is given.

    Fields other than the sizes are those of `model_step`.
    """
    return model_step.with_sizes(Phase.prefill, sequences, tokens, cache_length, prefix, decoding)
