"""Every field of a config with every value that does not belong there, one at a time."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

from tests.hostile.mutate import FLOATS, NUMBERS

ABSENT = object()
"""In the place of a value: the field is left out."""
VALUES: tuple[Any, ...] = (
    ABSENT, None, True, False, *NUMBERS, *FLOATS, 0.5, 1e-200, math.nan, math.inf, -math.inf, "", "4", "silu",
    "default", "\x1b[31m\u202e", "x" * 100_000, [], [1], [[[[]]]], [True, False, True], [None] * 5, [math.inf] * 3,
    [10**400], {}, {"a": 1}, ["full_attention"],
)  # fmt: skip
OTHERS = (
    "head_dim rope_scaling rope_theta partial_rotary_factor sliding_window layer_types max_window_layers "
    "use_sliding_window quantization_config attention_bias rope_local_base_freq sliding_window_pattern torch_dtype "
    "no_rope_layers no_rope_layer_interval n_inner scale_attn_by_inverse_layer_idx use_bidirectional_attention "
    "original_max_position_embeddings num_kv_shared_layers text_config"
).split()
"""Fields that some families read, and that a config need not have."""
ROPE = (
    "rope_type type factor original_max_position_embeddings low_freq_factor high_freq_factor beta_fast beta_slow "
    "mscale mscale_all_dim attention_factor truncate short_factor long_factor partial_rotary_factor full_attention"
).split()


def spoilt(sound: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of a changed field and a copy of a config in which it is absent or one of `VALUES`."""
    paths = [*_list_paths(sound), *((name,) for name in OTHERS if name not in sound)]
    paths += [("rope_parameters", name) for name in ROPE if name not in sound.get("rope_parameters", ROPE)]
    for path in paths:
        for value in VALUES:
            config = copy.deepcopy(sound)
            inner = config
            for key in path[:-1]:
                inner = inner[key]
            inner.pop(path[-1], None)
            if value is not ABSENT:
                inner[path[-1]] = value
            yield f"{'.'.join(path)} = {'absent' if value is ABSENT else repr(value)[:60]}", config


def _list_paths(fields: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in fields.items():
        yield (*before, name)
        if isinstance(value, dict):
            yield from _list_paths(value, (*before, name))
