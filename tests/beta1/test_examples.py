"""What the unit tests of the SDK's documentation use beyond the tutorials, against numpy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import simulate.beta1.isa as nisa
import simulate.beta1.language as nl
from nkw.errors import InvalidArgument, RuleViolation
from tests.beta1.kernels import run, stored, whole_numbers

X, Y = whole_numbers(128, 48), whole_numbers(128, 48, seed=1)


@pytest.mark.parametrize("rows", [127, 128, 129, 300])
def test_load_transpose2d_takes_more_rows_than_partitions(rows: int) -> None:
    x = whole_numbers(rows, 48)
    assert np.array_equal(run(lambda x: stored(nl.load_transpose2d(x)), x), x.T)


def test_dma_transpose_turns_the_dims_round() -> None:
    x = whole_numbers(16, 128).astype(np.float16)
    assert np.array_equal(run(lambda x: stored(nisa.dma_transpose(x[:, :])), x), x.T)
    assert np.array_equal(run(lambda x: stored(nisa.dma_transpose(nl.load(x), axes=(1, 0))), x), x.T)
    with pytest.raises(InvalidArgument, match="NKW-BETA1-AXES"):
        run(lambda x: stored(nisa.dma_transpose(nl.load(x), axes=(0, 2))), x)


def test_dma_copy_adds_to_rows_read_at_run_time() -> None:
    rows = np.arange(64, dtype=np.int32).reshape(64, 1) * 2

    def kernel(x, rows):
        out = nl.ndarray((128, 48), nl.float32, buffer=nl.shared_hbm)
        nl.store(out, nl.ones((128, 48), nl.float32))
        _, column = nl.mgrid[0:64, 0:48]
        nisa.dma_copy(dst=out[nl.load(rows), column], src=nl.load(x[0:64, :]), dst_rmw_op=np.add)
        return out

    expected = np.ones((128, 48), np.float32)
    expected[rows[:, 0]] += X[:64]
    assert np.array_equal(run(kernel, X, rows), expected)


@pytest.mark.parametrize("reverse", [False, True])
def test_predicates_may_be_boolean(reverse: bool) -> None:
    def kernel(x, y, flags):
        chosen, dst = nl.load(flags), nl.load(y)
        nisa.tensor_copy_predicated(src=nl.load(x), dst=dst, predicate=chosen, reverse_pred=reverse)
        selected = nl.ndarray(x.shape, nl.float32)
        nisa.select_reduce(
            dst=selected, predicate=chosen, on_true=nl.load(x), on_false=nl.fp32.min, reverse_pred=reverse
        )
        return stored(dst), stored(selected)

    flags = X > Y
    seen, selected = run(kernel, X, Y, flags)
    assert np.array_equal(seen, np.where(flags ^ reverse, X, Y))
    assert np.array_equal(selected, np.where(flags ^ reverse, X, np.finfo(np.float32).min))


def test_tensor_scalar_cumulative_runs_on_and_takes_its_start_with_load_reduce_only() -> None:
    def kernel(x):
        dst = nl.ndarray(x.shape, nl.float32)
        for command in (nisa.reduce_cmd.load_reduce, nisa.reduce_cmd.reduce):
            nisa.tensor_scalar_cumulative(
                src=nl.load(x), dst=dst, op0=nl.add, op1=nl.add, imm0=1.0, imm1=5.0, reduce_cmd=command
            )
        return stored(dst)

    once = np.cumsum(X + 1, 1)
    assert np.array_equal(run(kernel, X), once + once[:, -1:] + 5)


def test_rand_is_uniform_and_gather_flattened_takes_what_it_is_told() -> None:
    def kernel(indices):
        data = nl.rand((128, 64))
        return stored(data), stored(nl.gather_flattened(data, nl.load(indices)))

    indices = np.random.default_rng(0).integers(0, 64, (128, 20)).astype(np.uint32)
    data, taken = run(kernel, indices)
    assert np.array_equal(taken, np.take_along_axis(data, indices.astype(np.int64), 1))
    assert data.min() >= 0 and data.max() < 1
    # Of 8192 draws the mean is within 6 standard errors of 1/2, and every eighth of the range is hit.
    assert abs(data.mean() - 0.5) < 6 * (1 / 12 / data.size) ** 0.5
    assert np.histogram(data, 8, (0, 1))[0].min() > 0


def test_an_hbm_tensor_is_true_and_a_tile_is_no_condition() -> None:
    def kernel(x, y=None):
        return stored(nl.load(y) if y else nl.load(x))

    assert np.array_equal(run(kernel, X), X)
    assert np.array_equal(run(kernel, X, Y), Y)
    with pytest.raises(RuleViolation, match="NKW-BETA1-CONDITION"):
        run(lambda x: stored(nl.load(x)) if nl.load(x) else None, X)


@pytest.mark.parametrize("precise", ["0", "1"])
def test_a_view_in_another_dtype_keeps_the_elements(monkeypatch, precise: str) -> None:
    monkeypatch.setenv("NKI_PRECISE_FP", precise)
    x = whole_numbers(64, 8).astype(ml_dtypes.bfloat16)
    seen = run(lambda x: stored(nl.load(x.view(nl.bfloat16))), x)
    assert seen.shape == (64, 8) and np.array_equal(seen.astype(np.float32), x.astype(np.float32))
