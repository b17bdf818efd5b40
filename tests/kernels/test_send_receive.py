"""send_receive: what each rank returns, bit by bit, and who waits for whom."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from nki.collectives import ReplicaGroup  # noqa: F401  (binds the simulator before the kernels)

import nki_kernels as kernels
import simulate
from nkw.errors import RendezvousMismatch, RuleViolation

TARGETS = ("trn1", "trn2", "trn3")


def matrices(ranks: int, rows: int, columns: int, dtype: object = np.float32) -> list[np.ndarray]:
    random = np.random.default_rng(rows)
    return [random.standard_normal((rows, columns)).astype(dtype) for _ in range(ranks)]


def launched(target: str, x: list[np.ndarray], pairs: list[list[tuple[int, int]]]) -> list[np.ndarray]:
    world = simulate.World(target, ranks=len(x))
    return world.launch(kernels.send_receive, [((array, its), {}) for array, its in zip(x, pairs)]).outputs


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rows", [1, 127, 128, 129])
def test_a_target_has_the_matrix_of_its_source(target: str, rows: int) -> None:
    x = matrices(2, rows, 33)
    x[0][0, :2] = np.inf, np.nan
    sent, received = launched(target, x, [[(0, 1)]] * 2)
    assert np.array_equal(received, x[0], equal_nan=True)
    assert np.array_equal(sent, x[0], equal_nan=True)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int32])
@pytest.mark.parametrize(
    "pairs", [[(0, 2), (1, 3)], [(0, 1), (1, 2), (2, 3)], [(0, 1), (1, 2), (2, 3), (3, 0)], [(3, 0)]], ids=str
)
def test_pairs_may_form_chains_and_rings(pairs: list[tuple[int, int]], dtype: object) -> None:
    x = matrices(4, 5, 7, dtype)
    target_of = dict(pairs)
    wanted = {target: x[source] for source, target in target_of.items()}
    outputs = launched("trn2", x, [pairs] * 4)
    for rank, (output, stated) in enumerate(zip(outputs, kernels.send_receive_reference(x, pairs))):
        assert output.dtype == x[0].dtype
        assert np.array_equal(output, wanted.get(rank, x[rank]))
        assert np.array_equal(output, stated)


def test_ranks_may_name_their_own_pair_alone() -> None:
    x = matrices(4, 3, 4)
    outputs = launched("trn2", x, [[(rank % 2, rank % 2 + 2)] for rank in range(4)])
    assert [np.array_equal(output, x[source]) for output, source in zip(outputs, (0, 1, 0, 1))] == [True] * 4


def test_a_pair_of_two_shapes_is_refused_and_one_of_one_shape_is_not() -> None:
    x = matrices(2, 3, 4)
    with pytest.raises(RendezvousMismatch, match="srcs: member 1"):
        launched("trn2", [x[0], x[1][:2]], [[(0, 1)]] * 2)
    assert np.array_equal(launched("trn2", x, [[(0, 1)]] * 2)[1], x[0])


def test_a_rank_is_no_two_targets() -> None:
    x = matrices(3, 3, 4)
    with pytest.raises(RuleViolation, match="source_target_pairs"):
        launched("trn2", x, [[(0, 1), (2, 1)]] * 3)
    assert np.array_equal(launched("trn2", x, [[(0, 1), (2, 0)]] * 3)[0], x[2])
