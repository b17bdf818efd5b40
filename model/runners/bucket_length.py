"""The length of key/value caches: a bucket, so that a generation runs one compiled graph for all its steps.

A bucket is a multiple of 128, the partitions of a tile.
"""

from __future__ import annotations

BUCKET = 128


def bucket_length(needed: int, max_positions: int, multiple: int = 1) -> int:
    """The cache length for `needed` positions, which are not more than the context of `max_positions`.

    Prompts that are padded to a `multiple` have room as well.
    """
    assert 0 < needed <= max_positions, f"{needed} of {max_positions} positions"
    padded = -(-needed // multiple) * multiple
    return -(-padded // BUCKET) * BUCKET
