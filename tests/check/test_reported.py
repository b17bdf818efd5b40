"""What users report as wrong on the chip: the reported form is a warning that says so, its neighbours are silent."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from tests.check.launched import codes, findings
from tests.faults.data import copied_out

X = np.arange(32, dtype=np.float32).reshape(8, 4) / 32
COLUMN = np.arange(8, dtype=np.float32).reshape(8, 1) + 1


def exponential(x: Any, command: Any, after: str) -> Any:
    powers, tile = nl.ndarray(x.shape, dtype=nl.float32), nl.load(x)
    if after == "before":
        nisa.tensor_copy(dst=tile, src=tile, engine=nisa.engine.vector)
    nisa.exponential(dst=powers, src=tile, reduce_cmd=command)
    if after in ("vector", "scalar"):
        nisa.tensor_copy(dst=powers, src=powers, engine=getattr(nisa.engine, after))
    return copied_out(powers)


@pytest.mark.parametrize(
    ("command", "after", "expected"),
    [
        (nisa.reduce_cmd.idle, "vector", ["NKW-EXPONENTIAL-IDLE"]),
        (nisa.reduce_cmd.idle, "scalar", []),
        (nisa.reduce_cmd.idle, "before", []),
        (nisa.reduce_cmd.reset_reduce, "vector", []),
    ],
)
def test_an_idle_exponential_before_vector_work(command: Any, after: str, expected: list[str]) -> None:
    reported = findings(exponential, X, command, after, target="trn3")
    assert [finding.code for finding in reported] == expected
    assert all("a user report" in finding.message for finding in reported)


def test_a_loop_of_idle_exponentials_is_reported_once() -> None:
    def kernel(x):
        powers = nl.load(x)
        for _ in range(3):
            nisa.exponential(dst=powers, src=powers, max_value=4.0)
            nisa.tensor_scalar(dst=powers, data=powers, op0=nl.add, operand0=1.0)
        return copied_out(powers)

    assert codes(kernel, X, target="trn3") == ["NKW-EXPONENTIAL-IDLE"]


def rows_by(how: str) -> Any:
    def kernel(x, table):
        out = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.shared_hbm, name="out")
        outside = nl.ndarray((1, 1), dtype=nl.int32)
        nisa.memset(dst=outside, value=3)

        def body(i):
            row, tile = nl.ndarray((1, 1), dtype=nl.int32), nl.ndarray((1, 4), dtype=nl.float32)
            offset = {"counter": i, "outside": outside}.get(how, row)
            if how == "loaded":
                nisa.dma_copy(dst=row, src=table.ap(pattern=[[1, 1], [1, 1]], scalar_offset=i))
            elif how == "computed":
                nisa.iota(row, [[0, 1]], offset=1)
            elif how == "computed, then moved":
                nisa.iota(row, [[0, 1]], offset=1)
                moved = nl.ndarray((1, 1), dtype=nl.int32)
                nisa.dma_copy(dst=moved, src=row)
                offset = nisa.scalar_load(moved)
            elif how == "arithmetic":
                offset = i + 0
            view = x.ap(pattern=[[4, 1], [1, 4]], scalar_offset=offset, indirect_dim=0)
            nisa.dma_copy(dst=tile, src=view)
            nisa.dma_copy(dst=out.ap(pattern=[[4, 1], [1, 4]], scalar_offset=i), src=tile)

        nl.fori_loop(0, 8, body)
        return out

    return kernel


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("computed", ["NKW-OFFSET-COMPUTED"]),
        ("computed, then moved", ["NKW-OFFSET-COMPUTED"]),
        ("arithmetic", ["NKW-OFFSET-COMPUTED"]),
        ("counter", []),
        ("loaded", []),
        ("outside", []),
    ],
)
def test_an_offset_computed_in_a_device_loop(how: str, expected: list[str]) -> None:
    reported = findings(rows_by(how), X, np.arange(8, dtype=np.int32).reshape(8, 1)[::-1].copy())
    reported = [
        finding for finding in reported if finding.code not in ("NKW-INPUT-UNUSED", "NKW-OUTPUT-CONSTANT")
    ]
    assert [finding.code for finding in reported] == expected
    assert all("a user report" in finding.message for finding in reported)


def test_an_offset_computed_in_the_kernel_without_a_loop_is_silent() -> None:
    def kernel(x):
        row, tile = nl.ndarray((1, 1), dtype=nl.int32), nl.ndarray((1, 4), dtype=nl.float32)
        nisa.iota(row, [[0, 1]], offset=1)
        nisa.dma_copy(dst=tile, src=x.ap(pattern=[[4, 1], [1, 4]], scalar_offset=row))
        return copied_out(tile)

    assert codes(kernel, X) == []


def contracted(weights: Any, scales: Any, x: Any, how: str) -> Any:
    small, wide = nl.load(weights), nl.ndarray(weights.shape, dtype=nl.float32)
    if how == "activation":
        nisa.activation(dst=wide, op=nl.copy, data=small, scale=nl.load(scales))
    elif how == "added":
        nisa.tensor_scalar(dst=wide, data=small, op0=nl.add, operand0=nl.load(scales))
    else:
        nisa.tensor_scalar(dst=wide, data=small, op0=nl.multiply, operand0=nl.load(scales))
    if how == "rewritten":
        nisa.tensor_copy(dst=wide, src=small)
    moving = nl.load(x)
    if how == "picked":
        moving = nl.shared_identity_matrix(8, dtype=nl.float32)
    sums = nl.ndarray((4, moving.shape[1]), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=wide, moving=moving)
    return copied_out(sums)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3, np.int8])
@pytest.mark.parametrize(
    ("how", "scales", "expected"),
    [
        ("multiply", COLUMN, ["NKW-SCALES-CONTRACTED"]),
        ("activation", COLUMN, ["NKW-SCALES-CONTRACTED"]),
        ("multiply", np.full_like(COLUMN, 3), []),
        ("added", COLUMN, []),
        ("rewritten", COLUMN, []),
        ("picked", COLUMN, []),
    ],
)
def test_scales_of_8_bit_data_that_differ_in_a_contraction(
    dtype: Any, how: str, scales: np.ndarray, expected: list[str]
) -> None:
    weights = (np.arange(32).reshape(8, 4) % 5).astype(dtype)
    reported = findings(contracted, weights, scales, np.ones((8, 6), np.float32), how)
    reported = [finding for finding in reported if finding.code in ("NKW-SCALES-CONTRACTED", "NKW-UNREAD")]
    assert [finding.code for finding in reported] == expected
    assert all("a user report" in finding.message for finding in reported)


def test_weights_per_input_channel_of_wider_data_are_silent() -> None:
    weights = np.ones((8, 4), np.float32)
    assert codes(contracted, weights, COLUMN, np.ones((8, 6), np.float32), "multiply") == []


@pytest.mark.parametrize("scaled_side", ["stationary", "moving"])
def test_a_contraction_names_the_scaled_operand_on_either_side(scaled_side: str) -> None:
    def kernel(weights, scales, x):
        scaled, plain = nl.ndarray(weights.shape, dtype=nl.float32, name="wide"), nl.load(x)
        nisa.tensor_scalar(dst=scaled, data=nl.load(weights), op0=nl.multiply, operand0=nl.load(scales))
        stationary, moving = (scaled, plain) if scaled_side == "stationary" else (plain, scaled)
        sums = nl.ndarray((stationary.shape[1], moving.shape[1]), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=sums, stationary=stationary, moving=moving)
        return copied_out(sums)

    weights = (np.arange(32).reshape(8, 4) % 5).astype(np.int8)
    (finding,) = findings(kernel, weights, COLUMN, np.ones((8, 6), np.float32))
    assert [(touch.verb, touch.tensor) for touch in finding.touches] == [
        ("writes", "wide"),
        ("reads", "wide"),
    ]
