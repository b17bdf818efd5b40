"""Subnormal fp8 operands of the Tensor engine: kept by default, 0 under a record that says so, for every code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import simulate
from simulate.hardware import Hardware, hardware
from simulate.hardware.overlay import use_stand_in
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from simulate.replay import ReplayCache
from tests.isa.tiles import PSUM, TARGETS, Fresh, execute, plan, tile

# Dtype and its smallest normal magnitude, 2 ** (1 - bias) with bias 7 or 15.
SMALLEST = {"float8_e4m3": 2.0**-6, "float8_e4m3fn": 2.0**-6, "float8_e5m2": 2.0**-14}


def flushing(target: str) -> Hardware:
    """Return the record of a chip whose Tensor engine takes fp8 subnormals as 0."""
    record = hardware(target)
    fact = replace(record.provenance["matmul_keeps_fp8_subnormals"], value=False)
    return record.with_numbers(matmul_keeps_fp8_subnormals=fact)


def finite_codes(dtype: str) -> np.ndarray:
    """Return every finite value of an fp8 dtype as a row [1, n] of that dtype."""
    values = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, dtype))
    return values[np.isfinite(values.astype(np.float32))].reshape(1, -1)


def flushed(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return float32 values with 0 in place of magnitudes below the smallest normal one."""
    wide = values.astype(np.float32)
    return np.where(np.abs(wide) < SMALLEST[dtype], 0, wide).astype(np.float32)


MULTIPLIED = [
    (target, dtype)
    for target in TARGETS
    for dtype in SMALLEST
    if dtype != "float8_e4m3fn" or target == "trn3"
]


@pytest.mark.parametrize(("target", "dtype"), MULTIPLIED)
@pytest.mark.parametrize("paired", ["bfloat16", "float8_e5m2"])
def test_every_code_is_multiplied_by_its_value_or_as_0(target: str, dtype: str, paired: str) -> None:
    codes = finite_codes(dtype)
    half = np.full((1, 3), 0.5, getattr(ml_dtypes, paired))
    call: dict[str, Any] = {"stationary": half, "moving": codes, "dst": Fresh((3, codes.size), buffer=PSUM)}
    kept = execute(target, "nc_matmul", **call)["dst"]
    np.testing.assert_array_equal(kept, np.repeat(codes.astype(np.float32) / 2, 3, axis=0))
    with use_stand_in(flushing(target)):
        zeroed = execute(target, "nc_matmul", **call)["dst"]
    np.testing.assert_array_equal(zeroed, np.repeat(flushed(codes, dtype) / 2, 3, axis=0))


def test_both_operands_are_flushed_and_wider_dtypes_are_not() -> None:
    tiny = np.full((1, 2), 2.0**-9, ml_dtypes.float8_e4m3)
    wide = np.full((1, 2), 2.0**-20, ml_dtypes.bfloat16)
    with use_stand_in(flushing("trn2")):
        for stationary, moving, product in ((tiny, wide, 0.0), (wide, tiny, 0.0), (wide, wide, 2.0**-40)):
            call: dict[str, Any] = {"stationary": stationary, "moving": moving}
            done = execute("trn2", "nc_matmul", **call, dst=Fresh((2, 2), buffer=PSUM))["dst"]
            np.testing.assert_array_equal(done, np.full((2, 2), product, np.float32))


def test_pairs_of_rows_are_flushed() -> None:
    pair = np.array([[[2.0**-9] * 4, [2.0] * 4]], np.float32).astype(ml_dtypes.float8_e4m3)
    ones = np.ones((1, 2, 4), ml_dtypes.float8_e4m3)
    mode = nisa.matmul_perf_mode.double_row
    for record, total in ((hardware("trn2"), 2 + 2.0**-9), (flushing("trn2"), 2.0)):
        with use_stand_in(record):
            done = execute(
                "trn2",
                "nc_matmul",
                dst=Fresh((4, 4), buffer=PSUM),
                stationary=pair,
                moving=ones,
                perf_mode=mode,
            )["dst"]
        np.testing.assert_array_equal(done, np.full((4, 4), total, np.float32))


def test_a_transpose_by_an_ordinary_matmul_flushes_and_the_transpose_mode_does_not() -> None:
    codes = finite_codes("float8_e5m2")[:, :128]
    for target in ("trn1", "trn3"):
        with use_stand_in(flushing(target)):
            done = execute(
                target, "nc_transpose", dst=Fresh((128, 1), dtype="float8_e5m2", buffer=PSUM), data=codes
            )
        expected = flushed(codes, "float8_e5m2") if target == "trn1" else codes.astype(np.float32)
        np.testing.assert_array_equal(done["dst"].astype(np.float32), expected.T)


def multiply(a: Any, b: Any) -> Any:
    stationary, moving = (nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.sbuf) for x in (a, b))
    nisa.dma_copy(dst=stationary, src=a)
    nisa.dma_copy(dst=moving, src=b)
    product = nl.ndarray((a.shape[1], b.shape[1]), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=product, stationary=stationary, moving=moving)
    rows = nl.ndarray(product.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=rows, src=product)
    out = nl.ndarray(product.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=rows)
    return out


def test_a_replayed_program_flushes_and_none_of_the_other_record_is_replayed() -> None:
    cache = ReplayCache()
    codes = np.repeat(finite_codes("float8_e4m3"), 8, axis=0)
    weights = np.eye(8, 16, dtype=np.float32).astype(ml_dtypes.bfloat16)
    for record, expected in (
        (hardware("trn2"), codes.astype(np.float32)),
        (flushing("trn2"), flushed(codes, "float8_e4m3")),
    ):
        with use_stand_in(record):
            world = simulate.World("trn2", replays=cache)
            for _ in range(3):
                done = world.launch(multiply, [((weights, codes), {})], simulate.Mode.replay)
                np.testing.assert_array_equal(done.outputs[0][:8], expected)
    assert cache.report.hits == 4


@pytest.mark.parametrize("target", TARGETS)
def test_bits_of_words_have_a_pace_of_their_own(target: str) -> None:
    record = hardware(target)
    pace = replace(record.provenance["vector_bitwise_32bit_elements_per_cycle"], value=1.0)
    slow = record.with_numbers(vector_bitwise_32bit_elements_per_cycle=pace)
    columns = 4096

    def stream(operator: Any, dtype: str) -> tuple[float, float]:
        call = {"data": tile((128, columns), dtype), "dst": tile((128, columns), dtype)}
        cost = plan(target, "tensor_scalar", **call, op0=operator, operand0=1).cost
        return cost.latency_cycles, cost.on(slow).latency_cycles

    for operator in (nl.bitwise_and, nl.right_shift):
        fast, cautious = stream(operator, "int32")
        assert cautious - fast == pytest.approx(0 if target == "trn1" else columns / 2)
    for operator, dtype in ((nl.add, "int32"), (nl.bitwise_and, "int16")):
        fast, cautious = stream(operator, dtype)
        assert fast == cautious
