"""Lengths of contiguous KV caches, rounded up so that one compiled graph computes all steps of a generation.

A length is a multiple of 128, the number of partitions of a tile. Runners of static batches and the planner use it.
"""

from __future__ import annotations

from model.config import ModelConfig

BUCKET = 128


def count_positions_needed(prompt_tokens: int, max_new_tokens: int, config: ModelConfig) -> int:
    """Return the number of positions that a generation can fill: prompt and new tokens, at most the model's context."""
    return min(prompt_tokens + max_new_tokens, config.context)


def bucket_length(needed: int, max_positions: int, multiple: int = 1) -> int:
    """Return the cache length for `needed` positions: rounded up to `multiple`, then to 128.

    Args:
        needed: Positions that sequences fill, from 1 to `max_positions`.
        max_positions: The model's context.
        multiple: Prompts are padded to a multiple of so many tokens; the padded prompts fit the cache as well.
    """
    assert 0 < needed <= max_positions, f"{needed} of {max_positions} positions"
    padded = -(-needed // multiple) * multiple
    return -(-padded // BUCKET) * BUCKET
