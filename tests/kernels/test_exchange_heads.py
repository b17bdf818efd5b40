"""exchange_heads: all rows of a rank's heads, and back, bit by bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from nki.collectives import ReplicaGroup

import nki_kernels as kernels
import simulate

TARGETS = ("trn1", "trn2", "trn3")


def draw(sequences: int, rows: int, width: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    """Return rows of all ranks, [sequences, rows, width], with one infinity and one NaN."""
    array = np.random.default_rng(seed).standard_normal((sequences, rows, width)).astype(dtype)
    array[0, 0, :2] = np.inf, np.nan
    return array


def divide_rows(array: np.ndarray, ranks: int) -> list[np.ndarray]:
    """Return the rows of each rank, [sequences * rows of a rank, width]."""
    count = array.shape[1] // ranks
    return [
        np.concatenate([rows[rank * count : (rank + 1) * count] for rows in array]) for rank in range(ranks)
    ]


def divide_heads(array: np.ndarray, ranks: int) -> list[np.ndarray]:
    """Return the heads of each rank, [sequences * rows, width of the rank]."""
    rows, count = np.concatenate(array), array.shape[2] // ranks
    return [rows[:, rank * count : (rank + 1) * count] for rank in range(ranks)]


def launch(
    target: str,
    rank_arrays: list[tuple[np.ndarray, ...]],
    group: ReplicaGroup | None = None,
    cores: int = 1,
    **options: Any,
) -> list[Any]:
    """Return the results of all ranks, of so many physical cores each, for their arrays q, or q, k and v."""
    world, ranks = simulate.World(target, len(rank_arrays), cores), len(rank_arrays)
    group = group or ReplicaGroup([list(range(ranks))])
    options = {"replica_group": group, "ranks": len(group.groups[0]), **options}
    arguments = [{**dict(zip("qkv", map(np.copy, arrays))), **options} for arrays in rank_arrays]
    return world.launch(kernels.exchange_heads, [((), keywords) for keywords in arguments]).outputs


def check(outputs: list[Any], expected: list[np.ndarray]) -> None:
    """Check that every rank returns its array, bit by bit."""
    assert len(outputs) == len(expected)
    for output, array in zip(outputs, expected):
        assert output.dtype == array.dtype
        np.testing.assert_array_equal(output.astype(np.float32), array.astype(np.float32))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rows", [1, 127, 128, 129])
def test_a_rank_has_all_rows_of_its_heads_and_its_rows_again(target: str, rows: int) -> None:
    all_rows = draw(2, 2 * rows, 12)
    rows_of_ranks, heads_of_ranks = divide_rows(all_rows, 2), divide_heads(all_rows, 2)
    check(launch(target, [(array,) for array in rows_of_ranks], sequences=2), heads_of_ranks)
    check(launch(target, [(array,) for array in heads_of_ranks], sequences=2, to_rows=True), rows_of_ranks)


@pytest.mark.parametrize("rows", [1, 2, 3, 127, 129])
def test_two_cores_exchange_half_of_the_rows_each(rows: int) -> None:
    all_rows = draw(2, 3 * rows, 12)
    rows_of_ranks, heads_of_ranks = divide_rows(all_rows, 3), divide_heads(all_rows, 3)
    options = {"sequences": 2, "cores": 2}
    outputs = launch("trn2", [(array, -array, array) for array in rows_of_ranks], **options)
    for arrays, sign in zip(zip(*outputs), (1, -1, 1)):
        check(list(arrays), [sign * array for array in heads_of_ranks])
    check(launch("trn2", [(array,) for array in heads_of_ranks], to_rows=True, **options), rows_of_ranks)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(("ranks", "sequences", "rows"), [(2, 1, 8), (3, 2, 6), (4, 3, 4), (8, 1, 40)])
def test_queries_keys_and_values_are_exchanged_as_the_reference_says(
    ranks: int, sequences: int, rows: int, dtype: Any
) -> None:
    """Keys and values have half as many heads as queries."""
    all_arrays = [draw(sequences, rows, width * ranks, dtype, seed) for seed, width in enumerate((6, 3, 3))]
    inputs = [divide_rows(all_rows, ranks) for all_rows in all_arrays]
    outputs = launch("trn2", list(zip(*inputs)), sequences=sequences)
    referred = kernels.exchange_heads_reference(inputs[0], None, ranks, *inputs[1:], sequences)
    for all_rows, arrays, from_reference in zip(all_arrays, zip(*outputs), zip(*referred)):
        check(list(arrays), divide_heads(all_rows, ranks))
        check(list(from_reference), divide_heads(all_rows, ranks))
    queries = [rank_outputs[0] for rank_outputs in outputs]
    options = {"sequences": sequences, "to_rows": True}
    check(launch("trn2", [(array,) for array in queries], **options), inputs[0])
    check(kernels.exchange_heads_reference(queries, None, ranks, **options), inputs[0])


def test_groups_exchange_by_the_order_of_their_lists() -> None:
    all_arrays = [draw(1, 4, 8, seed=seed) for seed in range(2)]
    groups = [[0, 3], [2, 1]]
    inputs: list[tuple[np.ndarray, ...]] = [()] * 4
    for group, all_rows in zip(groups, all_arrays):
        for rank, array in zip(group, divide_rows(all_rows, 2)):
            inputs[rank] = (array,)
    outputs = launch("trn2", inputs, ReplicaGroup(groups))
    for group, all_rows in zip(groups, all_arrays):
        check([outputs[rank] for rank in group], divide_heads(all_rows, 2))


REFUSED = {
    "width": ({"width": 6}, {"width": 9}, "2 ranks do not divide a width of 9"),
    "sequences": ({"sequences": 2}, {"sequences": 3}, "3 sequences do not divide 4 rows of q"),
    "keys of other rows": ({"keys": 4}, {"keys": 3}, "k and v need 4 rows as q, not 3"),
    "rows on the way back": (
        {"sequences": 2, "to_rows": True},
        {"sequences": 4, "to_rows": True},
        "2 ranks do not divide 1 rows of a sequence",
    ),
    "keys on the way back": (
        {"to_rows": True},
        {"to_rows": True, "keys": 4},
        "the way back takes the outputs of attention alone",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_does_not_fit_together(name: str) -> None:
    accepted, refused, message = REFUSED[name]

    def run(width: int = 8, keys: int = 0, **options: Any) -> None:
        further = [np.ones((keys, width), np.float32)] * 2 if keys else []
        launch("trn2", [(np.ones((4, width), np.float32), *further)] * 2, **options)

    run(**accepted)
    with pytest.raises(AssertionError, match=message):
        run(**refused)
