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
    by_kv_heads,
    by_query_heads,
    slice_vocabulary,
)
from model.loading.weights import check_ranks


def counted(rows: int, columns: int, dtype=np.float32) -> np.ndarray:
    """Return a weight [out, in] in which every element is different."""
    return np.arange(rows * columns).reshape(rows, columns).astype(dtype)


def shards(ranks: int) -> list[Shard]:
    return [Shard(rank, ranks) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_column_shards_side_by_side_are_the_transposed_weight(ranks) -> None:
    weight = counted(48, 32)
    rank_weights = [COLUMN_PARALLEL.take(weight, shard) for shard in shards(ranks)]
    assert np.array_equal(np.concatenate(rank_weights, axis=1), weight.T)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_row_shards_one_below_the_other_are_the_transposed_weight(ranks) -> None:
    weight = counted(32, 48)
    rank_weights = [ROW_PARALLEL.take(weight, shard) for shard in shards(ranks)]
    assert np.array_equal(np.concatenate(rank_weights, axis=0), weight.T)


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


LAYOUTS = [
    *((8, 8, 4), (8, 2, 2), (8, 2, 4), (8, 1, 4), (8, 2, 8), (8, 8, 3), (9, 3, 2), (9, 3, 4), (9, 3, 8)),
    *((14, 2, 4), (14, 2, 5), (15, 3, 13), (5, 1, 4), (36, 12, 32)),
]
"""Query heads, key/value heads and ranks: some share evenly, some hold padding, some the same key/value head."""


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), LAYOUTS)
def test_every_rank_holds_the_key_value_heads_its_queries_need(heads, kv_heads, ranks) -> None:
    """Query heads lie in order, whole, each once; zeros behind those of a rank; equal parts on every rank."""
    depth, group = 6, heads // kv_heads
    queries, keys = counted(heads * depth, 10) + 1, counted(kv_heads * depth, 10) + 1
    seen = []
    for shard in shards(ranks):
        projections = [by_query_heads(heads, kv_heads).take(queries, shard)]
        projections.append(by_kv_heads(heads, kv_heads).take(keys, shard))
        local_queries, local_keys = (projection.T.reshape(-1, depth, 10) for projection in projections)
        group_size = len(local_queries) // len(local_keys)
        assert (len(local_queries), len(local_keys)) == (group_size * len(local_keys), -(-kv_heads // ranks))
        for index, query in enumerate(local_queries):
            if query.any():
                number = int(query[0, 0]) // (depth * 10)
                seen.append(number)
                assert np.array_equal(query, queries.reshape(heads, depth, 10)[number])
                needed = keys.reshape(kv_heads, depth, 10)[number // group]
                assert np.array_equal(local_keys[index // group_size], needed)
    assert seen == list(range(heads))


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), LAYOUTS)
def test_padded_heads_add_nothing_to_a_sum_over_ranks(heads, kv_heads, ranks) -> None:
    generator = np.random.default_rng(0)
    queries = generator.integers(-3, 4, (heads * 6, 8)).astype(np.float64)
    output = generator.integers(-3, 4, (8, heads * 6)).astype(np.float64)
    x = generator.integers(-3, 4, (4, 8)).astype(np.float64)
    columns, rows = by_query_heads(heads, kv_heads), by_query_heads(heads, kv_heads, axis=1)
    total = sum((x @ columns.take(queries, shard)) @ rows.take(output, shard) for shard in shards(ranks))
    assert np.array_equal(total, x @ queries.T @ output.T)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "copies"), [(8, 2, 2, 1), (8, 2, 4, 2), (14, 2, 5, 2)]
)
def test_what_ranks_hold_counts_copies_and_no_padding(heads, kv_heads, ranks, copies) -> None:
    assert by_query_heads(heads, kv_heads).count_elements(heads * 6, ranks) == heads * 6
    assert by_kv_heads(heads, kv_heads).count_elements(kv_heads * 6, ranks) == copies * kv_heads * 6


@pytest.mark.parametrize("vocabulary", [32, 127, 128, 129])
@pytest.mark.parametrize("ranks", [1, 2, 4, 32])
def test_vocabulary_shards_cover_every_token_once_and_differ_by_one_token(vocabulary, ranks) -> None:
    weight = counted(vocabulary, 8)
    rank_weights = [VOCABULARY_PARALLEL.take(weight, shard) for shard in shards(ranks)]
    assert np.array_equal(np.concatenate(rank_weights, axis=1), weight.T)
    sizes = [rank_weight.shape[1] for rank_weight in rank_weights]
    assert sizes == sorted(sizes, reverse=True)
    assert 0 < sizes[0] <= sizes[-1] + 1
    starts = [slice_vocabulary(vocabulary, shard).start for shard in shards(ranks)]
    assert starts == [sum(sizes[:rank]) for rank in range(ranks)]


def test_shards_are_contiguous_in_the_checkpoints_dtype() -> None:
    weight = counted(8, 8, ml_dtypes.bfloat16)
    shard = Shard(1, 2)
    for rank_weight in (
        COLUMN_PARALLEL.take(weight, shard),
        ROW_PARALLEL.take(weight, shard),
        by_query_heads(8, 2).take(weight, shard),
        by_query_heads(8, 2, axis=1).take(weight, shard),
        by_kv_heads(8, 2).take(weight, shard),
        VOCABULARY_PARALLEL.take(weight, shard),
    ):
        assert rank_weight.flags.c_contiguous
        assert rank_weight.dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize(
    ("changes", "most", "unit"),
    [
        ({"vocab_size": 3}, 3, "tokens"),
        ({"vocab_size": 15, "num_attention_heads": 1, "num_key_value_heads": 1}, 15, "tokens"),
    ],
)
def test_refuses_more_ranks_than_tokens(write_model, changes, most, unit) -> None:
    config = load_config(write_model(**changes))
    for ranks in range(1, most + 1):
        check_ranks(config, ranks)
    for ranks in (most + 1, 32):
        message = (
            f"{ranks} ranks for {most} {unit}; each rank needs one, so this model takes 1 to {most} ranks"
        )
        with pytest.raises(ModelError) as refused:
            check_ranks(config, ranks)
        assert str(refused.value) == message
    with pytest.raises(ModelError, match="over 0 ranks; at least 1 is needed"):
        check_ranks(config, 0)


@pytest.mark.parametrize("rows", [63, 64, 65, 127, 129])
def test_shards_are_copies_of_any_number_of_rows(rows) -> None:
    weight = counted(rows, 5, ml_dtypes.bfloat16)
    rank_weight = COLUMN_PARALLEL.take(weight, Shard(0, 1))
    assert np.array_equal(rank_weight, weight.T)
    assert not np.shares_memory(rank_weight, weight)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "cut",
    [COLUMN_PARALLEL, ROW_PARALLEL, VOCABULARY_PARALLEL, by_query_heads(8, 2), by_kv_heads(8, 2), Whole()],
)
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
