"""What each rank holds, and where a model fits."""

from __future__ import annotations

import pytest

from model.device import INSTANCES
from model.plan.memory import footprint, possible_tp, smallest_tp
from model.plan.parameters import load_model
from tests.model.test_plan_parameters import CONFIGS, COUNTS

LLAMA = load_model(CONFIGS / "llama-2-70b.json")


def test_one_rank_holds_all_weights_and_the_whole_cache() -> None:
    held = footprint(LLAMA, "bfloat16", 1, 4096)
    assert held.weight_bytes == 2 * int(COUNTS["llama-2-70b"])
    assert held.cache_bytes_per_sequence == 4096 * 327_680


@pytest.mark.parametrize(("tp", "key_value_parts"), [(2, 2), (8, 8), (16, 8), (64, 8)])
def test_ranks_hold_the_table_and_norms_whole_and_repeat_heads_of_the_cache(tp, key_value_parts) -> None:
    held = footprint(LLAMA, "bfloat16", tp, 4096)
    table, norms, key_value = 32000 * 8192, (2 * 80 + 1) * 8192, 80 * 2 * 8192 * 1024
    divided = LLAMA.total - table - norms - key_value
    assert held.weight_bytes == 2 * (table + norms + key_value // key_value_parts + divided // tp)
    assert held.cache_bytes_per_sequence == 4096 * 327_680 // key_value_parts


def test_a_tied_table_is_held_once_more_for_the_head() -> None:
    tied = load_model(CONFIGS / "llama-3.2-1b.json")
    assert footprint(tied, "bfloat16", 1, 1).weight_bytes == 2 * (tied.total + 128256 * 2048)


def test_the_latent_of_a_token_lies_on_every_rank() -> None:
    latent = load_model(CONFIGS / "deepseek-v3.json")
    one, many = (footprint(latent, "bfloat16", tp, 100).cache_bytes_per_sequence for tp in (1, 64))
    assert one == many


def test_float32_takes_twice_the_bytes() -> None:
    half, full = (footprint(LLAMA, dtype, 4, 64) for dtype in ("float16", "float32"))
    assert full.weight_bytes == 2 * half.weight_bytes
    assert full.cache_bytes_per_sequence == 2 * half.cache_bytes_per_sequence


@pytest.mark.parametrize(("room", "sequences"), [(-1, 0), (0, 0), (1, 0), (2, 1), (3, 1), (4, 2)])
def test_sequences_fill_what_the_weights_leave(room, sequences) -> None:
    """Room in halves of a sequence's cache."""
    held = footprint(LLAMA, "bfloat16", 8, 128)
    assert held.sequences(held.weight_bytes + room * held.cache_bytes_per_sequence // 2) == sequences


def test_the_smallest_tp_holds_the_batch_to_the_byte() -> None:
    held = footprint(LLAMA, "bfloat16", 8, 128)
    enough = held.weight_bytes + 5 * held.cache_bytes_per_sequence
    assert smallest_tp(LLAMA, "bfloat16", 128, 5, 32, enough) == 8
    assert smallest_tp(LLAMA, "bfloat16", 128, 5, 32, enough - 1) == 16
    assert smallest_tp(LLAMA, "bfloat16", 128, 5, 8, enough - 1) is None


@pytest.mark.parametrize(
    ("name", "possible"),
    [
        ("llama-2-70b", [1, 2, 4, 8, 16, 32, 64]),
        ("llama-3.2-3b", [1, 2, 4, 8]),
        ("smollm2-135m", [1]),
        ("whisper-tiny", [1, 2]),
        ("mamba-130m", [1, 2, 4, 8, 16, 32, 64, 128]),
    ],
)
def test_possible_ranks_divide_the_heads(name, possible) -> None:
    assert possible_tp(load_model(CONFIGS / f"{name}.json"), 128) == possible


def test_ranks_that_share_no_heads_evenly_are_named() -> None:
    assert LLAMA.config.undivided(3) == "3 ranks do not divide 64 heads"
    assert load_model(CONFIGS / "smollm2-135m.json").config.undivided(9) is None
    llama = load_model(CONFIGS / "llama-3.2-3b.json")
    assert llama.config.undivided(12) == "12 ranks and 8 key/value heads: neither divides the other"
    assert llama.config.undivided(24) is None


def test_every_instance_holds_at_most_its_memory() -> None:
    for instance in INSTANCES.values():
        tp = smallest_tp(LLAMA, "bfloat16", 1024, 1, instance.physical_cores, 2**34)
        assert (
            tp is None
            or tp * footprint(LLAMA, "bfloat16", tp, 1024).weight_bytes <= instance.physical_cores * 2**34
        )
