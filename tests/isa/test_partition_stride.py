"""Engines take consecutive partitions; a DMA may step over some."""

from __future__ import annotations

from collections.abc import Callable

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from nkw.errors import RuleViolation


def copied(step: int, move: Callable[..., object]) -> Callable[..., object]:
    @nki.jit
    def kernel(x):
        out = nl.ndarray((32 // step, 8), dtype=x.dtype, buffer=nl.shared_hbm)
        loaded = nl.load(x)
        strided = nl.ndarray((32 // step, 8), dtype=x.dtype)
        move(dst=strided, src=loaded[::step])
        nisa.dma_copy(dst=out, src=strided)
        return out

    return kernel


X = np.arange(256, dtype=np.float32).reshape(32, 8)


@pytest.mark.parametrize("step", [2, 4, 8])
def test_refuses_partitions_in_steps(step: int) -> None:
    with pytest.raises(RuleViolation) as refused:
        copied(step, nisa.tensor_copy)(X)
    assert refused.value.code == "NKW-PARTITION-STRIDE"
    assert refused.value.seen == f"src takes partitions in steps of {step} from 0 on"


def test_takes_consecutive_partitions_and_a_single_one() -> None:
    for step in (1, 32):
        assert np.array_equal(copied(step, nisa.tensor_copy)(X), X[::step])


@pytest.mark.parametrize("step", [1, 2, 8])
def test_a_dma_steps_over_partitions(step: int) -> None:
    assert np.array_equal(copied(step, nisa.dma_copy)(X), X[::step])


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.uint8])
def test_a_view_in_another_dtype_is_still_consecutive(dtype: type) -> None:
    @nki.jit
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        tile, other = nl.load(x), nl.ndarray(x.shape, dtype=x.dtype)
        nisa.tensor_copy(dst=other.view(nl.uint8), src=tile.view(nl.uint8))
        nisa.dma_copy(dst=out, src=other)
        return out

    x = X.astype(dtype)
    assert np.array_equal(kernel(x), x)
