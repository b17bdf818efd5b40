"""nc_transpose: bits on every engine that keeps them, and the matmul with an identity that gen2 makes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nkw.errors import Unsupported
from simulate.hardware import hardware
from simulate.isa import Accumulate, Engine
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from simulate.world import launch
from tests.isa.reference import (
    FLOATS,
    INTEGERS,
    STORAGE,
    assert_same,
    assert_same_bits,
    every_bit_pattern,
    sample,
)
from tests.isa.tiles import PSUM, SBUF, TARGETS, Fresh, Given, execute, healthy, plan, refuses, tile


@pytest.mark.parametrize("shape", [(1, 1), (31, 32), (32, 5, 3)])
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_the_vector_engine_keeps_every_bit(dtype: str, shape: tuple[int, ...]) -> None:
    bits = every_bit_pattern(dtype, shape)
    expected = bits.reshape(shape[0], -1).T
    for buffer in (SBUF, PSUM):
        done = execute(
            "trn1",
            "nc_transpose",
            dst=Fresh(expected.shape, dtype, buffer),
            data=Given(bits, buffer),
            engine=Engine.vector,
        )
        assert_same_bits(done["dst"], expected)


@pytest.mark.parametrize("target", ["trn2", "trn3"])
@pytest.mark.parametrize("shape", [(1, 128), (127, 33), (128, 4, 32)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8"])
def test_the_tensor_engine_keeps_every_bit_from_gen3_on(
    dtype: str, shape: tuple[int, ...], target: str
) -> None:
    bits = every_bit_pattern(dtype, shape)
    expected = bits.reshape(shape[0], -1).T
    done = execute(target, "nc_transpose", dst=Fresh(expected.shape, dtype, PSUM), data=bits)["dst"]
    assert_same_bits(done, expected)


def _times_identity(data: np.ndarray) -> np.ndarray:
    """Compute dst[f, p] = sum over k of data[k, f] * identity[k, p], one product after the other from 0."""
    partitions, free = data.shape
    result = np.zeros((free, partitions))
    for f in range(free):
        for p in range(partitions):
            total = 0.0
            for k in range(partitions):
                total += float(data[k, f]) * (1.0 if k == p else 0.0)
            result[f, p] = total
    return result


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2"])
def test_gen2_multiplies_with_an_identity(dtype: str) -> None:
    data = sample(dtype, (9, 7))
    data[2, 0] = -0.0
    data[3, 1] = np.nan
    data[4, 2] = np.inf
    data[[1, 8], 3] = -np.inf, np.inf
    data[[0, 5], 4] = np.nan, np.inf
    done = execute("trn1", "nc_transpose", dst=Fresh((7, 9), dtype, PSUM), data=data)["dst"]
    expected = _times_identity(data)
    assert_same(done, expected)
    assert np.isnan(expected[1]).all() and np.isinf(expected[2, 4])
    zeros = expected == 0
    assert zeros.any() and (np.signbit(done.astype(np.float32))[zeros] == np.signbit(expected)[zeros]).all()


def test_gen2_takes_what_nc_matmul_takes() -> None:
    for dtype in ("float32", "bfloat16", "float16", "float8_e4m3", "float8_e5m2", "tfloat32"):
        plan("trn1", "nc_transpose", dst=tile((8, 8), dtype, PSUM), data=tile((8, 8), dtype))
    for dtype in ("int32", "uint8", "float8_e4m3fn"):
        call = {"dst": tile((8, 8), dtype, PSUM), "data": tile((8, 8), dtype)}
        refuses("NKW-MATMUL-DTYPE", "trn1", "nc_transpose", **call)
        plan("trn3", "nc_transpose", **call)
        plan("trn1", "nc_transpose", **{**call, "engine": Engine.vector})


@pytest.mark.parametrize("dtype", ["float8_e4m3", "float8_e5m2"])
def test_fp8_through_the_tensor_engine_of_gen3_is_not_simulated(dtype: str) -> None:
    call = {"dst": tile((8, 8), dtype, PSUM), "data": tile((8, 8), dtype)}
    error = refuses("NKW-TRANSPOSE-FP8", "trn2", "nc_transpose", **call)
    assert isinstance(error, Unsupported)
    plan("trn1", "nc_transpose", **call)
    plan("trn3", "nc_transpose", **call)
    plan("trn2", "nc_transpose", **{**call, "engine": Engine.vector})


@pytest.mark.parametrize("target", TARGETS)
def test_the_destination_decides_the_engine(target: str) -> None:
    data = tile((8, 16))
    for buffer, engine in ((PSUM, Engine.tensor), (SBUF, Engine.vector)):
        made = plan(target, "nc_transpose", dst=tile((16, 8), buffer=buffer), data=data)
        assert made.engine is engine
        assert made.accumulate is (Accumulate.overwrite if engine is Engine.tensor else None)
    refuses("NKW-BUFFER", target, "nc_transpose", dst=tile((16, 8)), data=data, engine=Engine.tensor)
    refuses(
        "NKW-BUFFER",
        target,
        "nc_transpose",
        dst=tile((16, 8), buffer=PSUM),
        data=tile((8, 16), buffer=PSUM),
    )
    for engine in (Engine.scalar, Engine.gpsimd):
        refuses("NKW-ENGINE", target, "nc_transpose", **healthy("nc_transpose", engine=engine))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("partitions", "free"), [(31, 32), (32, 31), (32, 32), (33, 32), (32, 33)])
def test_the_vector_engine_does_one_block(target: str, partitions: int, free: int) -> None:
    call = {"dst": tile((free, partitions)), "data": tile((partitions, free))}
    if max(partitions, free) <= 32:
        plan(target, "nc_transpose", **call)
    else:
        error = refuses("NKW-TRANSPOSE-VECTOR", target, "nc_transpose", **call)
        assert "transpose into a PSUM tile" in str(error)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("free", [127, 128, 129])
def test_the_tensor_engine_does_128_columns(target: str, free: int) -> None:
    call = {"dst": tile((min(free, 128), 128), buffer=PSUM), "data": tile((128, free))}
    if free <= 128:
        plan(target, "nc_transpose", **call)
    else:
        refuses("NKW-TRANSPOSE-TENSOR", target, "nc_transpose", **call)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"dst": tile((8, 7), buffer=PSUM)}, "NKW-TRANSPOSE-SHAPE"),
        ({"dst": tile((7, 8), buffer=PSUM)}, "NKW-TRANSPOSE-SHAPE"),
        ({"dst": tile((8, 8), "bfloat16", PSUM)}, "NKW-SAME-DTYPE"),
        ({"dst": tile((8, 1024), buffer=PSUM)[:, 508:516]}, "NKW-PSUM-BANK"),
    ],
)
def test_refusals_of_nc_transpose(changes: dict[str, Any], code: str) -> None:
    refuses(code, "trn2", "nc_transpose", **healthy("nc_transpose", **changes))
    if code == "NKW-PSUM-BANK":
        plan("trn3", "nc_transpose", **healthy("nc_transpose", **changes))


def test_a_matmul_may_not_go_on_where_a_transpose_has_written_by_accident() -> None:
    """A transpose starts its PSUM elements anew, like a matmul with accumulate=False."""

    def kernel(identity, data):
        stationary, rows = nl.load(identity), nl.load(data)
        total = nl.ndarray((4, 4), nl.float32, nl.psum)
        nisa.nc_matmul(dst=total, stationary=stationary, moving=rows)
        nisa.nc_transpose(dst=total, data=rows)
        nisa.nc_matmul(dst=total, stationary=stationary, moving=rows, accumulate=True)
        copied = nl.ndarray((4, 4), nl.float32)
        nisa.tensor_copy(dst=copied, src=total)
        out = nl.ndarray((4, 4), nl.float32, nl.shared_hbm)
        nl.store(out, copied)
        return out

    data = np.arange(16, dtype=STORAGE["float32"]).reshape(4, 4)
    done = launch(kernel, [((np.eye(4, dtype=np.float32), data), {})], hardware("trn2"))
    assert_same(done.outputs[0], data.T + data)
    assert not done.warnings
