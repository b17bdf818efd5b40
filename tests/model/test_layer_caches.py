"""The caches of layers: their arrays, the bytes of a page, and the arguments of a launch, for every kind of cache."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from model.config.heads import HeadLayout
from model.layers.cache import Cache, create_cache, create_encoder_cache, create_latent_cache
from model.layers.launch import FLOAT32, Phase, StepShape
from model.layers.paged import STATES

HEADS = HeadLayout(2, 2, 1)
STEP = StepShape(Phase.decode, 6, 3, 256, 256, 1, FLOAT32, FLOAT32)
PAGED = replace(STEP, pages=9, block_size=16, slots=5)
WINDOWED = replace(PAGED, window_pages=((32, 4),))


@pytest.mark.parametrize(
    ("cache", "shapes", "page_bytes"),
    [
        (create_cache("a", HEADS, 8, STEP), [(3, 2, 8, 256), (3, 2, 256, 8)], 4 * 2 * 2 * 8 * 256),
        (create_cache("a", HEADS, 8, PAGED), [(9, 16, 2, 8)] * 2, 4 * 2 * 2 * 8 * 16),
        (create_cache("a", HEADS, 8, WINDOWED, 32), [(4, 16, 2, 8)] * 2, 4 * 2 * 2 * 8 * 16),
        (create_cache("a", HEADS, 8, WINDOWED, 64), [(9, 16, 2, 8)] * 2, 4 * 2 * 2 * 8 * 16),
        (
            create_encoder_cache("a", HeadLayout(2, 2, 1), 8, 30, STEP),
            [(3, 2, 8, 30), (3, 2, 30, 8)],
            4 * 2 * 2 * 8 * 30,
        ),
        (
            create_encoder_cache("a", HeadLayout(2, 2, 1), 8, 30, PAGED),
            [(5, 2, 8, 30), (5, 2, 30, 8)],
            4 * 2 * 2 * 8 * 30,
        ),
        (create_latent_cache("a", 24, STEP), [(3, 256, 24)], 4 * 24 * 256),
        (create_latent_cache("a", 24, PAGED), [(9, 16, 24)], 4 * 24 * 16),
    ],
)
def test_arrays_and_bytes_of_a_page(cache: Cache, shapes: list[tuple[int, ...]], page_bytes: int) -> None:
    assert [array.shape for array in cache.arrays] == shapes
    assert cache.page_bytes == page_bytes
    halved = replace(
        cache, arrays=tuple(replace(array, dtype=np.dtype(np.float16)) for array in cache.arrays)
    )
    assert 2 * halved.page_bytes == page_bytes


def names(cache: Cache) -> dict[str, str]:
    return {parameter: value.name for parameter, value in cache.arguments.items()}


def test_pages_of_a_window_have_slots_tables_and_positions_of_their_own() -> None:
    keys_and_values = {"k_cache": "a.keys", "v_cache": "a.values"}
    wide, narrow = (create_cache("a", HEADS, 8, WINDOWED, window) for window in (None, 32))
    assert names(wide) == {**keys_and_values, "slots": "slot_mapping", "block_tables": "block_tables"}
    assert names(narrow) == {**keys_and_values, "slots": "slot_mapping.32", "block_tables": "block_tables.32"}
    assert (wide.positions.name, narrow.positions.name) == ("positions", "positions.32")
    assert wide.arguments["slots"].shape == (6, 1) and wide.arguments["block_tables"].shape == (3, 16)
    assert narrow.arguments["block_tables"].shape == (3, WINDOWED.for_window(32).cache_length // 16)


def test_what_a_launch_without_pages_is_given() -> None:
    assert set(create_cache("a", HEADS, 8, STEP).arguments) == {"k_cache", "v_cache"}
    assert set(create_latent_cache("a", 24, STEP).arguments) == {"cache"}
    assert set(create_encoder_cache("a", HeadLayout(2, 2, 1), 8, 30, STEP).arguments) == {
        "k_cache",
        "v_cache",
    }
    assert names(create_encoder_cache("a", HeadLayout(2, 2, 1), 8, 30, PAGED))["cache_rows"] == "state_slots"


def test_prompts_beside_sequences_that_decode_have_tables_of_their_own() -> None:
    decoding = replace(PAGED, tokens=4, sequences=4)
    step = replace(PAGED, phase=Phase.prefill, tokens=28, sequences=2, decoding=decoding)
    arguments = create_cache("a", HEADS, 8, step).arguments
    shapes = {name: arguments[name].shape for name in ("slots", "block_tables", "prompt_tables")}
    assert shapes == {"slots": (28, 1), "block_tables": (4, 16), "prompt_tables": (2, 16)}


def test_a_copy_reads_and_writes_pages_of_all_arrays() -> None:
    launch = create_cache("a", HEADS, 8, WINDOWED, 32).copy(3)
    values = [value.name for value in launch.values]
    assert values == ["a.keys", "a.values", "copy_sources.32", "copy_destinations.32"]
    assert launch.results == ("a.keys", "a.values") and launch.work.bytes == 2 * 3 * 4 * 2 * 2 * 8 * 16
    assert create_latent_cache("a", 24, PAGED).copy(3).arguments["other"] is None
    state = Cache(create_latent_cache("s", 24, PAGED).arrays, PAGED, STATES)
    assert state.copy(3).arguments["sources"].name == "copy_sources.states"


def test_slots_of_an_encoder_are_never_copied() -> None:
    assert not create_encoder_cache("a", HeadLayout(2, 2, 1), 8, 30, PAGED).is_copied
    assert create_cache("a", HEADS, 8, PAGED).is_copied and create_latent_cache("a", 24, PAGED).is_copied
