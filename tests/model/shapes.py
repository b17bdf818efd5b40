"""Small models that differ in what ranks have to share: changes to a config, and a number of ranks."""

from __future__ import annotations

from typing import Any

import ml_dtypes

SHARDED: list[tuple[dict[str, Any], int]] = [
    ({}, 1),
    ({}, 2),
    ({}, 4),
    ({"tie_word_embeddings": True, "num_key_value_heads": 1, "vocab_size": 301}, 2),
    ({"head_dim": 16, "intermediate_size": 50, "dtype": ml_dtypes.bfloat16}, 4),
]
