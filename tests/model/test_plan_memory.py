"""What each rank holds, and where a model fits."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import ml_dtypes
import numpy as np
import pytest

from model.device import INSTANCES
from model.families import compose
from model.layers.launch import Phase, StepShape, WeightDtypes
from model.layers.layer import list_states
from model.layers.shard import Shard
from model.plan.memory import (
    Demand,
    PageKind,
    allocate_pages,
    compute_footprint,
    find_smallest_tp,
    list_page_kinds,
    list_possible_tp,
)
from model.plan.sizes import load_model
from tests.model.test_plan_parameters import CONFIGS, COUNTS

MEAN = Demand(sequences=256, mean=4096, longest=4096, tokens=2048)
LLAMA = load_model(CONFIGS / "llama-2-70b.json")


def test_one_rank_holds_all_weights_and_the_whole_cache() -> None:
    footprint = compute_footprint(LLAMA, "bfloat16", 1, 4096)
    assert footprint.weight_bytes == 2 * int(COUNTS["llama-2-70b"])
    assert footprint.cache_bytes_per_sequence == 4096 * 327_680


@pytest.mark.parametrize(("tp", "key_value_parts"), [(2, 2), (8, 8), (16, 8), (64, 8)])
def test_ranks_hold_the_table_and_norms_whole_and_repeat_heads_of_the_cache(tp, key_value_parts) -> None:
    footprint = compute_footprint(LLAMA, "bfloat16", tp, 4096)
    table, norms, key_value = 32000 * 8192, (2 * 80 + 1) * 8192, 80 * 2 * 8192 * 1024
    divided = LLAMA.total - table - norms - key_value
    assert footprint.weight_bytes == 2 * (table + norms + key_value // key_value_parts + divided // tp)
    assert footprint.cache_bytes_per_sequence == 4096 * 327_680 // key_value_parts


def test_a_tied_table_is_held_once_more_for_the_head() -> None:
    tied = load_model(CONFIGS / "llama-3.2-1b.json")
    assert compute_footprint(tied, "bfloat16", 1, 1).weight_bytes == 2 * (tied.total + 128256 * 2048)


def test_the_latent_of_a_token_lies_on_every_rank() -> None:
    latent = load_model(CONFIGS / "deepseek-v3.json")
    one, many = (compute_footprint(latent, "bfloat16", tp, 100).cache_bytes_per_sequence for tp in (1, 64))
    assert one == many


def test_float32_takes_twice_the_bytes() -> None:
    half, full = (compute_footprint(LLAMA, dtype, 4, 64) for dtype in ("float16", "float32"))
    assert full.weight_bytes == 2 * half.weight_bytes
    assert full.cache_bytes_per_sequence == 2 * half.cache_bytes_per_sequence


@pytest.mark.parametrize(("room", "sequences"), [(-1, 0), (0, 0), (1, 0), (2, 1), (3, 1), (4, 2)])
def test_sequences_fill_what_the_weights_leave(room, sequences) -> None:
    """Room in halves of a sequence's cache."""
    footprint = compute_footprint(LLAMA, "bfloat16", 8, 128)
    assert (
        footprint.sequences(footprint.weight_bytes + room * footprint.cache_bytes_per_sequence // 2)
        == sequences
    )


def test_the_smallest_tp_holds_the_batch_to_the_byte() -> None:
    footprint = compute_footprint(LLAMA, "bfloat16", 8, 128)
    enough = footprint.weight_bytes + 5 * footprint.cache_bytes_per_sequence
    assert find_smallest_tp(LLAMA, "bfloat16", 128, 5, 32, enough) == 8
    assert find_smallest_tp(LLAMA, "bfloat16", 128, 5, 32, enough - 1) == 16
    assert find_smallest_tp(LLAMA, "bfloat16", 128, 5, 8, enough - 1) is None


@pytest.mark.parametrize(
    ("name", "possible"),
    [
        ("llama-2-70b", [1, 2, 4, 8, 16, 32, 64]),
        ("llama-3.2-3b", [1, 2, 4, 8, 16]),
        ("smollm2-135m", [1, 2, 4, 8]),
        ("whisper-tiny", [1, 2, 4]),
        ("mamba-130m", [1, 2, 4, 8, 16, 32, 64, 128]),
    ],
)
def test_every_possible_rank_has_a_head(name, possible) -> None:
    assert list_possible_tp(load_model(CONFIGS / f"{name}.json"), 128) == possible


@pytest.mark.parametrize(
    ("name", "tp", "queries", "keys", "width", "tokens"),
    [
        ("smollm2-135m", 4, 3, 1, 384, 12288),
        ("smollm2-135m", 8, 2, 1, 192, 6144),
        ("llama-3.2-3b", 5, 6, 2, 1639, 25652),
        ("llama-3.2-3b", 16, 2, 1, 512, 8016),
    ],
)
def test_heads_that_are_padding_count_on_every_rank(name, tp, queries, keys, width, tokens) -> None:
    model = load_model(CONFIGS / f"{name}.json")
    hidden, layers, dim = (
        model.config.hidden_size,
        len(model.config.blocks),
        model.config.blocks[0].mixer.head_dim,
    )
    footprint = compute_footprint(model, "bfloat16", tp, 100)
    matrices = 2 * queries * dim + 2 * keys * dim + 3 * width
    elements = (model.config.vocab_size + tokens) * hidden + layers * (matrices + 2) * hidden + hidden
    assert footprint.weight_bytes == 2 * elements
    assert footprint.cache_bytes_per_sequence == 2 * 100 * layers * 2 * keys * dim


def test_a_footprint_is_that_of_the_shards() -> None:
    """Shapes of the weights that a rank holds, for evenly shared heads and for others."""
    for name, counts in (("smollm2-135m", (1, 2, 3, 8)), ("llama-3.2-3b", (8, 12))):
        model = load_model(CONFIGS / f"{name}.json")
        for tp in counts:
            shapes = [weight.shape(Shard(0, tp)) for weight in compose(model.config).weights]
            assert compute_footprint(model, "float32", tp, 1).weight_bytes == 4 * sum(map(prod, shapes))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["mamba-130m", "mamba2-7b"])
def test_states_of_recurrent_layers_count_as_the_layers_state_them(name: str, dtype: str) -> None:
    """Float32 whatever the model's dtype; the last inputs of convolutions are in that one."""
    model = load_model(CONFIGS / f"{name}.json")
    weight_dtype = np.dtype(getattr(ml_dtypes, dtype, dtype))
    for tp in (1, 2):
        step = StepShape(Phase.decode, 1, 1, 128, 128, tp, weight_dtype, WeightDtypes(weight_dtype))
        states = [state for layer in compose(model.config).layers for state in list_states(layer, step)]
        wanted = sum(state.nbytes for state in states)
        assert {state.dtype.itemsize for state in states} == {4, weight_dtype.itemsize}
        counted = compute_footprint(model, dtype, tp, 100).cache_bytes_per_sequence
        assert counted == wanted == model.count_cache_bytes(100, dtype, tp)


def test_every_instance_holds_at_most_its_memory() -> None:
    for instance in INSTANCES.values():
        tp = find_smallest_tp(LLAMA, "bfloat16", 1024, 1, instance.physical_cores, 2**34)
        assert (
            tp is None
            or tp * compute_footprint(LLAMA, "bfloat16", tp, 1024).weight_bytes
            <= instance.physical_cores * 2**34
        )


def test_pages_of_a_kind_hold_what_its_layers_keep() -> None:
    """A Gemma 3 1B has 4 layers that see all positions and 22 that see 512, with one key/value head of 256."""
    gemma = load_model(CONFIGS / "gemma-3-1b.json")
    position = 2 * 256 * 2
    wide, narrow = PageKind(None, 4 * 16 * position), PageKind(512, 22 * 16 * position)
    assert list_page_kinds(gemma, "bfloat16", 1, 16, 4096) == [wide, narrow]
    assert list_page_kinds(gemma, "bfloat16", 1, 16, 513) == [wide, narrow]
    (alone,) = list_page_kinds(gemma, "bfloat16", 1, 16, 512)
    assert alone == PageKind(None, wide.page_bytes + narrow.page_bytes)


def test_a_model_whose_layers_all_see_a_window_has_one_kind_of_pages() -> None:
    mistral = load_model(CONFIGS / "mistral-7b-v0.1.json")
    assert [page_kind.window for page_kind in list_page_kinds(mistral, "bfloat16", 2, 16, 32768)] == [4096]
    assert [page_kind.window for page_kind in list_page_kinds(mistral, "bfloat16", 2, 16, 4096)] == [None]


@pytest.mark.parametrize("free_bytes", [2**30, 10 * 2**30])
@pytest.mark.parametrize("mean", [600, 4096])
@pytest.mark.parametrize("sequences", [1, 16, 256])
def test_pages_of_all_kinds_fit_and_run_out_together(free_bytes: int, mean: int, sequences: int) -> None:
    page_kinds = [PageKind(None, 65_536), PageKind(512, 360_448)]
    demand = replace(MEAN, sequences=sequences, mean=mean)
    wide, narrow = allocate_pages(page_kinds, free_bytes, 16, demand)
    used_bytes = wide.pages * wide.page_bytes + narrow.pages * narrow.page_bytes
    assert free_bytes - wide.page_bytes < used_bytes <= free_bytes
    windows = (narrow.pages - 2048 // 16) // (32 + 2)
    assert windows <= sequences
    assert wide.pages >= 4096 // 16
    if windows < sequences:
        assert windows <= wide.pages // -(-mean // 16) <= windows + 1 + 34 * 6


def test_a_cache_without_windows_takes_all_memory_and_too_little_is_no_page() -> None:
    assert allocate_pages([PageKind(None, 1000)], 10_999, 16, MEAN) == [PageKind(None, 1000, 10)]
    assert allocate_pages([PageKind(None, 1000)], 999, 16, MEAN) == [PageKind(None, 1000, 0)]
    none = allocate_pages([PageKind(None, 1000), PageKind(512, 1000)], 999, 16, MEAN)
    assert none[1].pages == 2048 // 16


@pytest.mark.parametrize("free_bytes", [2**28, 10 * 2**30])
@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("sequences", [1, 256])
def test_slots_of_states_are_no_more_than_sequences_hold_and_attention_has_the_rest(
    free_bytes: int, slots: int, sequences: int
) -> None:
    page_kinds = [PageKind(None, 65_536), PageKind(None, 2_500_000, recurrent=True)]
    demand = replace(MEAN, sequences=sequences, slots=slots)
    wide, states = allocate_pages(page_kinds, free_bytes, 16, demand)
    used_bytes = wide.pages * wide.page_bytes + states.pages * states.page_bytes
    assert free_bytes - wide.page_bytes < used_bytes <= free_bytes
    assert states.pages % slots == 0
    assert 1 <= states.pages // slots <= sequences
    if states.pages // slots < sequences:
        assert wide.pages // -(-MEAN.mean // 16) <= states.pages // slots + 1


@pytest.mark.parametrize(("free_bytes", "count"), [(3999, 0), (4000, 4), (1024_000, 1024), (2048_000, 1024)])
def test_a_model_of_states_alone_has_slots_alone(free_bytes: int, count: int) -> None:
    demand = replace(MEAN, sequences=256, slots=4)
    (states,) = allocate_pages([PageKind(None, 1000, recurrent=True)], free_bytes, 16, demand)
    assert states.pages == count
