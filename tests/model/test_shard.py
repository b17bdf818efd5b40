"""Shards of a weight: together they are the whole, in the layout that kernels take."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from model.config import load_config
from model.errors import ModelError
from model.layers import (
    Shard,
    check_ranks,
    column_parallel,
    key_value_heads,
    local_key_value_heads,
    query_heads,
    row_parallel,
    vocabulary_parallel,
    vocabulary_span,
)


def counted(rows: int, columns: int, dtype=np.float32) -> np.ndarray:
    """A weight [out, in] in which every element is different."""
    return np.arange(rows * columns).reshape(rows, columns).astype(dtype)


def shards(ranks: int) -> list[Shard]:
    return [Shard(rank, ranks) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_column_shards_side_by_side_are_the_transposed_weight(ranks) -> None:
    weight = counted(48, 32)
    parts = [column_parallel(weight, shard) for shard in shards(ranks)]
    assert np.array_equal(np.concatenate(parts, axis=1), weight.T)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_row_shards_one_below_the_other_are_the_transposed_weight(ranks) -> None:
    weight = counted(32, 48)
    parts = [row_parallel(weight, shard) for shard in shards(ranks)]
    assert np.array_equal(np.concatenate(parts, axis=0), weight.T)


@pytest.mark.parametrize("ranks", [3, 5, 7])
def test_a_width_that_does_not_divide_is_padded_without_changing_the_mlp(ranks) -> None:
    generator = np.random.default_rng(0)
    gate, up = generator.integers(-3, 4, (2, 16, 8)).astype(np.float64)
    down = generator.integers(-3, 4, (8, 16)).astype(np.float64)
    x = generator.integers(-3, 4, (4, 8)).astype(np.float64)
    total = sum(
        (np.maximum(x @ column_parallel(gate, shard), 0) * (x @ column_parallel(up, shard)))
        @ row_parallel(down, shard)
        for shard in shards(ranks)
    )
    assert np.array_equal(total, (np.maximum(x @ gate.T, 0) * (x @ up.T)) @ down.T)
    assert len({column_parallel(gate, shard).shape for shard in shards(ranks)}) == 1


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_query_heads_stay_whole(ranks) -> None:
    weight = counted(8 * 6, 10)
    for shard in shards(ranks):
        part = query_heads(weight, shard)
        first = shard.rank * 8 // ranks * 6
        assert np.array_equal(part, weight[first : first + 8 // ranks * 6].T)


@pytest.mark.parametrize(("heads", "ranks"), [(2, 1), (2, 2), (2, 4), (1, 4), (4, 2), (2, 8)])
def test_every_rank_holds_the_key_value_heads_its_queries_need(heads, ranks) -> None:
    query_count, depth = 8, 6
    keys = counted(heads * depth, 10)
    for shard in shards(ranks):
        held = key_value_heads(keys, heads, shard)
        own = held.shape[1] // depth
        assert own == max(1, heads // ranks)
        queries = range(shard.rank * query_count // ranks, (shard.rank + 1) * query_count // ranks)
        group = len(queries) // own
        for place, query in enumerate(queries):
            wanted = query // (query_count // heads)
            local = place // group
            assert np.array_equal(
                held[:, local * depth : (local + 1) * depth], keys[wanted * depth : (wanted + 1) * depth].T
            )


@pytest.mark.parametrize("vocabulary", [127, 128, 129])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_vocabulary_shards_cover_every_token_once(vocabulary, ranks) -> None:
    weight = counted(vocabulary, 8)
    parts = [vocabulary_parallel(weight, shard) for shard in shards(ranks)]
    assert np.array_equal(np.concatenate(parts, axis=1), weight.T)
    starts = [vocabulary_span(vocabulary, shard).start for shard in shards(ranks)]
    assert starts == [rank * -(-vocabulary // ranks) for rank in range(ranks)]
    assert len({part.shape[1] for part in parts[:-1]} | {parts[0].shape[1]}) == 1


def test_shards_are_contiguous_in_the_checkpoints_dtype() -> None:
    weight = counted(8, 8, ml_dtypes.bfloat16)
    shard = Shard(1, 2)
    for part in (
        column_parallel(weight, shard),
        row_parallel(weight, shard),
        query_heads(weight, shard),
        key_value_heads(weight, 2, shard),
        vocabulary_parallel(weight, shard),
    ):
        assert part.flags.c_contiguous
        assert part.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_that_divide_the_heads_are_accepted(write_model, ranks) -> None:
    config = load_config(write_model())
    check_ranks(config, ranks)
    assert local_key_value_heads(config, ranks) == {1: 2, 2: 1, 4: 1}[ranks]


def test_refuses_ranks_that_do_not_divide_the_heads(write_model) -> None:
    config = load_config(write_model(num_attention_heads=12, num_key_value_heads=4, hidden_size=96))
    for ranks in (5, 8, 24):
        with pytest.raises(ModelError, match=f"{ranks} ranks do not divide num_attention_heads, 12"):
            check_ranks(config, ranks)
    for ranks in (3, 6):
        with pytest.raises(
            ModelError, match=f"{ranks} ranks and num_key_value_heads, 4: neither divides the other"
        ):
            check_ranks(config, ranks)
    check_ranks(config, 12)
    with pytest.raises(ModelError, match="over 0 ranks; at least 1 is needed"):
        check_ranks(config, 0)


@pytest.mark.parametrize(("vocabulary", "fits"), [(5, False), (6, False), (7, True), (8, True)])
def test_refuses_a_vocabulary_too_small_for_its_ranks(write_model, vocabulary, fits) -> None:
    config = load_config(write_model(vocab_size=vocabulary))
    if fits:
        check_ranks(config, 4)
        return
    with pytest.raises(
        ModelError, match=f"a vocabulary of {vocabulary} leaves the last of 4 ranks without a token"
    ):
        check_ranks(config, 4)


@pytest.mark.parametrize("rows", [63, 64, 65, 127, 129])
def test_shards_are_copies_of_any_number_of_rows(rows) -> None:
    weight = counted(rows, 5, ml_dtypes.bfloat16)
    part = column_parallel(weight, Shard(0, 1))
    assert np.array_equal(part, weight.T)
    assert not np.shares_memory(part, weight)
