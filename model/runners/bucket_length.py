"""The length of key/value caches: a bucket, so that a generation runs one compiled graph for all its steps.

A bucket is a multiple of 128, the partitions of a tile.
"""

from __future__ import annotations

from model.config import ModelConfig

BUCKET = 128


def positions_needed(prompt_tokens: int, max_new_tokens: int, config: ModelConfig) -> int:
    """How many positions a generation can fill: prompt and new tokens, at most the context."""
    return min(prompt_tokens + max_new_tokens, config.context)


def bucket_length(needed: int, max_positions: int, multiple: int = 1) -> int:
    """The cache length for `needed` positions, which are not more than the context of `max_positions`.

    Prompts that are padded to a `multiple` have room as well.
    """
    assert 0 < needed <= max_positions, f"{needed} of {max_positions} positions"
    padded = -(-needed // multiple) * multiple
    return -(-padded // BUCKET) * BUCKET
