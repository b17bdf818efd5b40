"""Shards of a weight: together they are the whole, in the layout that kernels take."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from model.errors import ModelError
from model.families import load_config
from model.layers.shard import (
    COLUMN_PARALLEL,
    ROW_PARALLEL,
    VOCABULARY_PARALLEL,
    Row,
    Shard,
    Whole,
    by_heads,
    even_span,
)
from model.weights import check_ranks


def counted(rows: int, columns: int, dtype=np.float32) -> np.ndarray:
    """A weight [out, in] in which every element is different."""
    return np.arange(rows * columns).reshape(rows, columns).astype(dtype)


def shards(ranks: int) -> list[Shard]:
    return [Shard(rank, ranks) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_column_shards_side_by_side_are_the_transposed_weight(ranks) -> None:
    weight = counted(48, 32)
    parts = [COLUMN_PARALLEL.take(weight, shard) for shard in shards(ranks)]
    assert np.array_equal(np.concatenate(parts, axis=1), weight.T)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_row_shards_one_below_the_other_are_the_transposed_weight(ranks) -> None:
    weight = counted(32, 48)
    parts = [ROW_PARALLEL.take(weight, shard) for shard in shards(ranks)]
    assert np.array_equal(np.concatenate(parts, axis=0), weight.T)


@pytest.mark.parametrize("ranks", [3, 5, 7])
def test_a_width_that_does_not_divide_is_padded_without_changing_the_mlp(ranks) -> None:
    generator = np.random.default_rng(0)
    gate, up = generator.integers(-3, 4, (2, 16, 8)).astype(np.float64)
    down = generator.integers(-3, 4, (8, 16)).astype(np.float64)
    x = generator.integers(-3, 4, (4, 8)).astype(np.float64)
    total = sum(
        (np.maximum(x @ COLUMN_PARALLEL.take(gate, shard), 0) * (x @ COLUMN_PARALLEL.take(up, shard)))
        @ ROW_PARALLEL.take(down, shard)
        for shard in shards(ranks)
    )
    assert np.array_equal(total, (np.maximum(x @ gate.T, 0) * (x @ up.T)) @ down.T)
    assert len({COLUMN_PARALLEL.take(gate, shard).shape for shard in shards(ranks)}) == 1


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_query_heads_stay_whole(ranks) -> None:
    weight = counted(8 * 6, 10)
    for shard in shards(ranks):
        part = by_heads(8).take(weight, shard)
        first = shard.rank * 8 // ranks * 6
        assert np.array_equal(part, weight[first : first + 8 // ranks * 6].T)


@pytest.mark.parametrize(("heads", "ranks"), [(2, 1), (2, 2), (2, 4), (1, 4), (4, 2), (2, 8)])
def test_every_rank_holds_the_key_value_heads_its_queries_need(heads, ranks) -> None:
    query_count, depth = 8, 6
    keys = counted(heads * depth, 10)
    for shard in shards(ranks):
        held = by_heads(heads).take(keys, shard)
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
    parts = [VOCABULARY_PARALLEL.take(weight, shard) for shard in shards(ranks)]
    assert np.array_equal(np.concatenate(parts, axis=1), weight.T)
    starts = [even_span(vocabulary, shard).start for shard in shards(ranks)]
    assert starts == [rank * -(-vocabulary // ranks) for rank in range(ranks)]
    assert len({part.shape[1] for part in parts[:-1]} | {parts[0].shape[1]}) == 1


def test_shards_are_contiguous_in_the_checkpoints_dtype() -> None:
    weight = counted(8, 8, ml_dtypes.bfloat16)
    shard = Shard(1, 2)
    for part in (
        COLUMN_PARALLEL.take(weight, shard),
        ROW_PARALLEL.take(weight, shard),
        by_heads(8).take(weight, shard),
        by_heads(2).take(weight, shard),
        VOCABULARY_PARALLEL.take(weight, shard),
    ):
        assert part.flags.c_contiguous
        assert part.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_that_divide_the_heads_are_accepted(write_model, ranks) -> None:
    config = load_config(write_model())
    check_ranks(config, ranks)
    assert config.blocks[0].mixer.kv_heads_of_rank(ranks) == {1: 2, 2: 1, 4: 1}[ranks]


def test_refuses_ranks_that_do_not_divide_the_heads(write_model) -> None:
    config = load_config(write_model(num_attention_heads=12, num_key_value_heads=4, hidden_size=96))
    for ranks in (5, 8, 24):
        with pytest.raises(ModelError, match=f"{ranks} ranks do not divide 12 heads"):
            check_ranks(config, ranks)
    for ranks in (3, 6):
        with pytest.raises(
            ModelError, match=f"{ranks} ranks and 4 key/value heads: neither divides the other"
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
    part = COLUMN_PARALLEL.take(weight, Shard(0, 1))
    assert np.array_equal(part, weight.T)
    assert not np.shares_memory(part, weight)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("cut", [COLUMN_PARALLEL, ROW_PARALLEL, VOCABULARY_PARALLEL, by_heads(12), Whole()])
def test_a_cut_states_the_shape_of_what_it_takes(cut, ranks) -> None:
    weight = counted(24, 26)
    for shard in shards(ranks):
        assert cut.take(weight, shard).shape == cut.shape(weight.shape, shard)


def test_a_vector_is_held_as_a_row() -> None:
    vector = np.arange(5.0)
    row = Row().take(vector, Shard(1, 2))
    assert row.shape == Row().shape(vector.shape, Shard(1, 2)) == (1, 5)
    assert np.array_equal(row[0], vector)
    assert not np.shares_memory(row, vector)
