"""Poison: results computed from undefined elements of a tile, instruction by instruction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import simulate
from simulate.errors import RuleViolation
from simulate.hardware import hardware
from simulate.nki import isa as nisa
from simulate.nki import language as nl

P, F = 32, 24
X = np.arange(P * F, dtype=np.float32).reshape(P, F)


def half(x, rows=P, columns=F // 2, dtype=nl.float32):
    """A tile of (P, F) with `rows` x `columns` elements of x, the others never written."""
    tile = nl.ndarray((P, F), dtype=dtype)
    nisa.dma_copy(dst=tile[:rows, :columns], src=x[:rows, :columns])
    return tile


def sums(rows, columns):
    return nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.psum)


def stored(tile):
    """A tile's contents, stored to HBM."""
    if tile.buffer is nl.psum:
        copied = nl.ndarray(tile.shape, tile.dtype)
        nisa.tensor_copy(dst=copied, src=tile)
        tile = copied
    out = nl.ndarray(tile.shape, tile.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out


def scaled(x):
    tile = half(x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)  # in place
    return tile, (slice(None), slice(0, F // 2)), X[:, : F // 2] * 2


def added(x):
    out = nl.ndarray((P, F), dtype=nl.float32)
    nisa.tensor_tensor(dst=out, data1=nl.load(x), data2=half(x), op=nl.add)
    return out, (slice(None), slice(0, F // 2)), X[:, : F // 2] * 2


def by_a_column(x):
    column, out = nl.ndarray((P, 1), dtype=nl.float32), nl.ndarray((P, F), dtype=nl.float32)
    nisa.memset(dst=column[0:8], value=3.0)
    nisa.tensor_scalar(dst=out, data=nl.load(x), op0=nl.multiply, operand0=column)
    return out, (slice(0, 8), slice(None)), X[:8] * 3


def activated(x):
    out = nl.ndarray((P, F), dtype=nl.float32)
    nisa.activation(dst=out, op=nl.relu, data=half(x))
    return out, (slice(None), slice(0, F // 2)), X[:, : F // 2]


def transposed(x):
    out = sums(F, P)
    nisa.nc_transpose(dst=out, data=half(x, rows=8, columns=F))
    return out, (slice(None), slice(0, 8)), X[:8].T


def product(x):
    out = sums(F, F)
    nisa.nc_matmul(dst=out, stationary=half(x), moving=nl.load(x))
    return out, (slice(0, F // 2), slice(None)), X[:, : F // 2].T @ X


def product_added_to(x):
    """A later matmul adds to poison, which stays poison."""
    out = sums(F, F)
    nisa.nc_matmul(dst=out, stationary=half(x), moving=nl.load(x), accumulate=False)
    nisa.nc_matmul(dst=out, stationary=nl.load(x), moving=nl.load(x), accumulate=True)
    return out, (slice(0, F // 2), slice(None)), 2 * X[:, : F // 2].T @ X


def copied_between_tiles(x):
    out = nl.ndarray((P, F), dtype=nl.float32)
    nisa.dma_copy(dst=out, src=half(x, rows=8, columns=F))
    return out, (slice(0, 8), slice(None)), X[:8]


def counted(x):
    """GpSimd's second core works on partition 16, of which a part was written."""
    tile, out = nl.ndarray((P, F), dtype=nl.float32), nl.ndarray((P, F + 1), dtype=nl.int32)
    nisa.memset(dst=tile[0:1], value=1.0)
    nisa.dma_copy(dst=tile[16:17, 0:1], src=x[16:17, 0:1])
    nisa.nonzero_with_count(dst=out, src=tile)
    return out, (slice(0, 1), slice(F, F + 1)), np.array([[F]])


def gathered(x):
    index, out = nl.ndarray((P, 1), dtype=nl.uint16), nl.ndarray((P, 16), dtype=nl.float32)
    nisa.memset(dst=index, value=0)
    nisa.local_gather(dst=out, src_buffer=half(x, rows=8, columns=F), index=index)
    return out, (slice(0, 8), slice(None)), np.repeat(X[:8, :1], 16, axis=1)


def shuffled(x):
    """Partition 1 of each quadrant goes to partition 0; other partitions keep their bytes, defined or not."""
    tile = nl.ndarray((P, F), dtype=nl.float32)
    nisa.dma_copy(dst=tile[1:3], src=x[1:3])
    planes = tile.reshape((P, 2, F // 2))
    nisa.nc_stream_shuffle(dst=planes, src=planes, shuffle_mask=[1, 255, 2, 4] + [255] * 28)
    return tile, (slice(0, 3), slice(None)), X[[1, 1, 2]]


def shuffled_into_another_shape(x):
    """The destination has the elements of the source under other dims."""
    out = nl.ndarray((P, 2, F // 2), dtype=nl.float32)
    nisa.memset(dst=out, value=0.0)
    nisa.nc_stream_shuffle(dst=out, src=half(x), shuffle_mask=[1, 255] + [2] * 30)
    return out, (slice(0, 2), slice(0, 1)), np.stack([X[1:2, : F // 2], np.zeros((1, F // 2), np.float32)])


def shuffled_whole_into_another_shape(x):
    out = nl.ndarray((P, 2, F // 2), dtype=nl.float32)
    nisa.nc_stream_shuffle(dst=out, src=half(x), shuffle_mask=[3] * 32)
    return out, (slice(None), slice(0, 1)), np.broadcast_to(X[3, : F // 2], (P, 1, F // 2))


def counted_on_the_first_core(x):
    tile, out = nl.ndarray((P, F), dtype=nl.float32), nl.ndarray((P, F + 1), dtype=nl.int32)
    nisa.memset(dst=tile[0:1], value=1.0)
    nisa.nonzero_with_count(dst=out, src=tile)
    return out, (slice(0, 1), slice(F, F + 1)), np.array([[F]])


def quantized_and_multiplied(x):
    """Columns 0 to 11 were written: three of six packed columns, with scales, and so a corner of the product."""
    packed = nl.ndarray((P, F // 4), dtype="float8_e4m3fn_x4")
    scale = nl.ndarray((P, F // 4), dtype=nl.uint8)
    tile = half(x, dtype=nl.bfloat16)
    nisa.quantize_mx(dst=packed, src=tile, dst_scale=scale)
    out = sums(F // 4, F // 4)
    nisa.nc_matmul_mx(out, packed, packed, scale, scale)
    return out, (slice(0, 3), slice(0, 3)), None


CASES = (
    quantized_and_multiplied,
    shuffled,
    shuffled_into_another_shape,
    shuffled_whole_into_another_shape,
    counted_on_the_first_core,
    scaled,
    added,
    by_a_column,
    activated,
    transposed,
    product,
    product_added_to,
    copied_between_tiles,
    counted,
    gathered,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_defined_part_may_be_used_and_the_rest_may_not(case: Callable[..., Any]) -> None:
    wanted: list[Any] = []

    def kernel(x, whole):
        tile, part, expected = case(x)
        wanted.append(expected)
        return stored(tile if whole else tile[part])

    chip = hardware("trn3")  # the chip that has them all
    result = simulate.launch(kernel, [((X, False), {})], chip).outputs[0]
    assert wanted[0] is None or np.array_equal(result, wanted[0])
    with pytest.raises(RuleViolation, match="NKW-UNWRITTEN") as refused:
        simulate.launch(kernel, [((X, True), {})], chip)
    assert refused.value.where is not None
    assert (
        refused.value.where.function == case.__name__
    )  # where unwritten bytes were read, not where it came out


def test_a_tile_of_which_nothing_was_written_is_refused_at_once() -> None:
    def kernel(x):
        nisa.tensor_copy(dst=nl.ndarray((P, F), dtype=nl.float32), src=nl.ndarray((P, F), dtype=nl.float32))
        return x

    with pytest.raises(RuleViolation, match="NKW-UNWRITTEN"):
        simulate.launch(kernel, [((X,), {})])


def test_an_index_that_was_not_written_is_refused_at_once() -> None:
    def kernel(x):
        index, out = nl.ndarray((P, 1), dtype=nl.uint16), nl.ndarray((P, 16), dtype=nl.float32)
        nisa.memset(dst=index[0:16], value=0)
        nisa.local_gather(dst=out, src_buffer=nl.load(x), index=index)
        return x

    with pytest.raises(RuleViolation, match="NKW-UNWRITTEN"):
        simulate.launch(kernel, [((X,), {})])


@pytest.mark.parametrize("whole", [False, True])
def test_the_other_core_receives_no_more_than_was_written(whole: bool) -> None:
    def kernel(x, whole):
        received = nl.ndarray((P, F), dtype=nl.float32)
        peer = 1 - nl.program_id(0)
        sent = half(x) if peer else nl.load(x)
        nisa.sendrecv(src=sent, dst=received, send_to_rank=peer, recv_from_rank=peer, pipe_id=0)
        out = nl.ndarray((2, P, F), dtype=nl.float32, buffer=nl.shared_hbm)
        columns = F if whole or peer else F // 2
        nisa.dma_copy(dst=out[1 - peer, :, :columns], src=received[:, :columns])
        return out

    def run() -> np.ndarray:
        return simulate.launch(kernel, [((X, whole), {})], logical_core_size=2).outputs[0]

    if whole:
        with pytest.raises(RuleViolation, match="NKW-UNWRITTEN"):
            run()
    else:
        result = run()
        assert np.array_equal(result[0], X) and np.array_equal(result[1, :, : F // 2], X[:, : F // 2])


def test_writing_a_tile_makes_it_defined_again() -> None:
    def kernel(x):
        tile = nl.ndarray((P, F), dtype=nl.float32)
        nisa.tensor_copy(dst=tile, src=half(x))
        nisa.memset(dst=tile[:, F // 2 :], value=5.0)
        return stored(tile)

    result = simulate.launch(kernel, [((X,), {})]).outputs[0]
    assert np.array_equal(result[:, : F // 2], X[:, : F // 2]) and (result[:, F // 2 :] == 5).all()
