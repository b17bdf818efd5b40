"""Values in replays: NaN, infinities and bytes of bool_ as in an eager launch; and the records of replays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import simulate
from simulate.replay import ReplayMismatch, ReplayOptions
from simulate.world import process_replays

simulate.install("simulate")

import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402


def launched(kernel: Any, *arguments: Any, mode: Any = simulate.Mode.replay, **options: bool) -> Any:
    world = simulate.World("trn2", replay=ReplayOptions(**options), replays=process_replays())
    return world.launch(kernel, [(arguments, {})], mode=mode).outputs[0]


def product(a, b):
    """Compute a.T @ b in two parts of the contraction."""
    depth, rows = a.shape
    out = nl.ndarray((rows, b.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
    total = nl.ndarray(out.shape, dtype=nl.float32, buffer=nl.psum)
    for k in range(0, depth, depth // 2):
        end = k + depth // 2
        nisa.nc_matmul(dst=total, stationary=nl.load(a[k:end]), moving=nl.load(b[k:end]), accumulate=k > 0)
    result = nl.ndarray(out.shape, dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=total)
    nisa.dma_copy(dst=out, src=result)
    return out


def matrices(*special: float) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.random.default_rng(0).standard_normal((2, 128, 16), np.float32)
    for row, value in enumerate(special):
        a[row, row] = value
    return a, b


SPECIAL = [(np.nan,), (np.inf,), (-np.inf, np.nan), (np.inf, np.inf, -np.inf)]


@pytest.mark.parametrize("special", SPECIAL)
def test_values_that_are_not_finite_are_replayed_and_verified(cache, special) -> None:
    launched(product, *matrices())
    wanted = launched(product, *matrices(*special), mode=simulate.Mode.eager)
    for exact in (False, True):
        output = launched(product, *matrices(*special), exact=exact, verify=True)
        assert np.array_equal(np.isnan(output), np.isnan(wanted))
        assert np.array_equal(output[~np.isfinite(output)], wanted[~np.isfinite(wanted)], equal_nan=True)
    assert cache.report.verified == 2


@pytest.mark.parametrize("special", SPECIAL)
@pytest.mark.parametrize("instead", [0.0, np.nan, np.inf, -np.inf])
def test_a_replay_that_loses_or_changes_them_is_refused(cache, monkeypatch, special, instead) -> None:
    launched(product, *matrices())
    value = launched(product, *matrices(*special))[0, 3]

    def wrong(program, arrays, exact, peers):
        outputs = program.run(arrays, exact)
        outputs[0][0, 3] = instead
        return outputs

    monkeypatch.setattr(cache, "run", wrong)
    if np.array_equal(value, np.float32(instead), equal_nan=True):
        launched(product, *matrices(*special), verify=True)
    else:
        with pytest.raises(
            ReplayMismatch, match="output 0 differs from the eager launch in 1 of 256 elements"
        ):
            launched(product, *matrices(*special), verify=True)


@pytest.mark.parametrize("largest", [1e18, 1e19, 3e38])
def test_sums_that_overflow_in_one_order_only_are_no_mismatch(cache, largest) -> None:
    """NaN in one order of summation and infinite in another; the other elements are compared."""
    a, b = (np.random.default_rng(n).standard_normal((512, 64)).astype(np.float32) for n in range(2))
    a[:, :32] *= np.float32(largest / 8)
    a[0, :8] = np.inf
    b *= np.float32(min(largest, 1e19))
    for _ in range(3):
        output = launched(tiled, a, b, verify=True)
    assert cache.report.matmuls_fused > 0 and cache.report.verified == 2
    assert (largest < 1e19) == bool(np.isfinite(output[8:]).all())


def tiled(a, b):
    """Compute a.T @ b in four parts of the contraction, which a replay fuses."""
    out = nl.ndarray((a.shape[1], b.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
    total = nl.ndarray(out.shape, dtype=nl.float32, buffer=nl.psum)
    for k in range(0, a.shape[0], 128):
        rows = slice(k, k + 128)
        nisa.nc_matmul(dst=total, stationary=nl.load(a[rows]), moving=nl.load(b[rows]), accumulate=k > 0)
    result = nl.ndarray(out.shape, dtype=nl.float32)
    nisa.tensor_copy(dst=result, src=total)
    nisa.dma_copy(dst=out, src=result)
    return out


def returns_bytes_as_bool(x):
    out = nl.ndarray(x.shape, dtype=nl.bool_, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=nl.load(x).view(nl.bool_))
    return out


def writes_bytes_to_bool(x, flags):
    nisa.dma_copy(dst=flags, src=nl.load(x).view(nl.bool_))
    return flags


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("arguments", [(), (bool,)])
def test_bool_outputs_are_zero_and_one(cache, arguments, exact) -> None:
    kernel: Callable[..., Any] = writes_bytes_to_bool if arguments else returns_bytes_as_bool
    for step in range(3):
        x = (np.arange(12, dtype=np.uint8) * 7 + step).reshape(3, 4)
        output = launched(kernel, x, *(np.zeros((3, 4), argument) for argument in arguments), exact=exact)
        assert output.dtype == bool
        assert output.tobytes() == (x != 0).tobytes()
    assert cache.report.hits == 2


def test_callers_are_collected_whether_or_not_a_launch_was_recorded_before(cache) -> None:
    x = np.ones((4, 4), np.float32)

    def helper(x):
        tile = nl.load(x)
        nisa.dma_copy(dst=x, src=tile)

    def kernel(x):
        for _ in range(2):
            helper(x)
        return x

    collected = []
    for _ in range(3):
        with simulate.recorded(calls=True) as launches:
            launched(kernel, x)
        numbers, chains = launches[0].streams[0].chains()
        collected.append([len(chains[number]) for number in numbers])
        launched(kernel, x)
    assert collected == [[2] * 4] * 3
    assert cache.report.hits == 2
