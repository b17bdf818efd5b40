"""Poison: results computed from undefined elements of a tile, instruction by instruction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import simulate
from nkw.errors import RuleViolation
from simulate.hardware import hardware
from simulate.nki import isa as nisa
from simulate.nki import language as nl

P, F = 32, 24
X = np.arange(P * F, dtype=np.float32).reshape(P, F)


def half(x, rows=P, columns=F // 2, dtype=nl.float32):
    """Return a tile of (P, F) with `rows` x `columns` elements of x, the others never written."""
    tile = nl.ndarray((P, F), dtype=dtype)
    nisa.dma_copy(dst=tile[:rows, :columns], src=x[:rows, :columns])
    return tile


def sums(rows, columns):
    return nl.ndarray((rows, columns), dtype=nl.float32, buffer=nl.psum)


def stored(tile):
    """Store a tile's contents to HBM."""
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
    """Add a later matmul to poison, which stays poison."""
    out = sums(F, F)
    nisa.nc_matmul(dst=out, stationary=half(x), moving=nl.load(x), accumulate=False)
    nisa.nc_matmul(dst=out, stationary=nl.load(x), moving=nl.load(x), accumulate=True)
    return out, (slice(0, F // 2), slice(None)), 2 * X[:, : F // 2].T @ X


def copied_between_tiles(x):
    out = nl.ndarray((P, F), dtype=nl.float32)
    nisa.dma_copy(dst=out, src=half(x, rows=8, columns=F))
    return out, (slice(0, 8), slice(None)), X[:8]


def counted(x):
    """Count on GpSimd's second core, which works on partition 16, of which a part was written."""
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
    """Move partition 1 of each quadrant to partition 0; other partitions keep their bytes, defined or not."""
    tile = nl.ndarray((P, F), dtype=nl.float32)
    nisa.dma_copy(dst=tile[1:3], src=x[1:3])
    planes = tile.reshape((P, 2, F // 2))
    nisa.nc_stream_shuffle(dst=planes, src=planes, shuffle_mask=[1, 255, 2, 4] + [255] * 28)
    return tile, (slice(0, 3), slice(None)), X[[1, 1, 2]]


def shuffled_into_another_shape(x):
    """Shuffle into a destination that has the elements of the source under other dims."""
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
    """Multiply three of six packed columns that were written, with scales: a corner of the product is defined."""
    packed = nl.ndarray((P, F // 4), dtype="float8_e4m3fn_x4")
    scale = nl.ndarray((P, F // 4), dtype=nl.uint8)
    tile = half(x, dtype=nl.bfloat16)
    nisa.quantize_mx(dst=packed, src=tile, dst_scale=scale)
    out = sums(F // 4, F // 4)
    nisa.nc_matmul_mx(out, packed, packed, scale, scale)
    return out, (slice(0, 3), slice(0, 3)), None


def reduced(x):
    out = nl.ndarray((P, 1), dtype=nl.float32)
    nisa.tensor_reduce(dst=out, op=nl.maximum, data=half(x, rows=8, columns=F), axis=1)
    return out, (slice(0, 8), slice(None)), X[:8].max(axis=1, keepdims=True)


def reduced_in_part(x):
    """Sum three columns each, of which the sums of the first half are defined."""
    out = nl.ndarray((P, F // 3), dtype=nl.float32)
    nisa.tensor_reduce(dst=out, op=nl.add, data=half(x).reshape((P, F // 3, 3)), axis=2)
    return out, (slice(None), slice(0, F // 6)), X[:, : F // 2].reshape(P, F // 6, 3).sum(axis=2)


def moments(x):
    six, out = nl.ndarray((P, 6), dtype=nl.float32), nl.ndarray((P, 2), dtype=nl.float32)
    nisa.bn_stats(dst=six, data=half(x, rows=8, columns=F))
    nisa.bn_aggr(dst=out, data=six)
    return out, (slice(0, 8), slice(0, 1)), X[:8].mean(axis=1, keepdims=True)


def largest(x):
    out = nl.ndarray((P, 8), dtype=nl.float32)
    nisa.max8(dst=out, src=half(x, rows=8, columns=F))
    return out, (slice(0, 8), slice(None)), X[:8, : F - 9 : -1]


def places_of_the_largest(x):
    tile = half(x, rows=8, columns=F)
    eight, indices = nl.ndarray((P, 8), dtype=nl.float32), nl.ndarray((P, 8), dtype=nl.uint32)
    nisa.max8(dst=eight, src=tile)
    nisa.nc_find_index8(dst=indices, data=tile, vals=eight)
    return indices, (slice(0, 8), slice(None)), np.broadcast_to(np.arange(F - 1, F - 9, -1), (8, 8))


def without_the_largest(x):
    tile, eight = half(x, rows=8, columns=F), nl.ndarray((P, 8), dtype=nl.float32)
    nisa.max8(dst=eight, src=tile)
    nisa.nc_match_replace8(dst=tile, data=tile, vals=eight, imm=0.0)
    return tile, (slice(0, 8), slice(F - 8, F)), np.zeros((8, 8))


def running_sum(x):
    out = nl.ndarray((P, F), dtype=nl.float32)
    nisa.tensor_tensor_scan(
        dst=out, data0=nl.load(x), data1=half(x, 8, F), initial=0.0, op0=nl.minimum, op1=nl.add
    )
    state, rows = np.zeros(8, np.float32), []
    for column in X[:8].T:
        state = np.minimum(column, state) + column
        rows.append(state)
    return out, (slice(0, 8), slice(None)), np.array(rows).T


def summed_in_registers(x):
    """Accumulate by two instructions; both see a tile of which the first 8 partitions were filled."""
    tile, out = half(x, 8, F), nl.ndarray((P, 1), dtype=nl.float32)
    for command, result in ((nisa.reduce_cmd.reset_reduce, None), (nisa.reduce_cmd.reduce, out)):
        nisa.activation(
            dst=tile, op=nl.relu, data=tile, reduce_op=nl.add, reduce_res=result, reduce_cmd=command
        )
    return out, (slice(0, 8), slice(None)), 2 * X[:8].sum(axis=1, keepdims=True)


def largest_in_registers(x):
    """Add filled rows to registers that hold poison, by a later instruction."""
    chosen, kept = nl.ndarray((P, F), dtype=nl.uint8), nl.ndarray((P, F), dtype=nl.float32)
    nisa.memset(dst=chosen, value=1)
    out = nl.ndarray((P, 1), dtype=nl.float32)
    for tile, command in (
        (half(x, 8, F), nisa.reduce_cmd.reset_reduce),
        (nl.load(x), nisa.reduce_cmd.reduce),
    ):
        nisa.select_reduce(
            dst=kept, predicate=chosen, on_true=tile, on_false=0.0, reduce_res=out, reduce_cmd=command
        )
    return out, (slice(0, 8), slice(None)), X[:8].max(axis=1, keepdims=True)


def cumulative(x):
    out = nl.ndarray((P, F), dtype=nl.float32)
    nisa.tensor_scalar_cumulative(
        dst=out,
        src=half(x, 8, F),
        op0=nl.multiply,
        op1=nl.add,
        imm0=1.0,
        reduce_cmd=nisa.reduce_cmd.reset_reduce,
    )
    return out, (slice(0, 8), slice(None)), np.cumsum(X[:8], axis=1)


def scaled_and_summed(x):
    tile, out = half(x, 8, F), nl.ndarray((P, 1), dtype=nl.float32)
    nisa.tensor_scalar_reduce(
        dst=tile, data=tile, op0=nl.multiply, operand0=2.0, reduce_op=nl.add, reduce_res=out
    )
    return out, (slice(0, 8), slice(None)), 2 * X[:8].sum(axis=1, keepdims=True)


def selected_by_position(x):
    first, last = nl.ndarray((P, 1), dtype=nl.float32), nl.ndarray((P, 1), dtype=nl.float32)
    nisa.memset(dst=first, value=0.0)
    nisa.memset(dst=last, value=4.0)
    kept, out = nl.ndarray((P, F), dtype=nl.float32), nl.ndarray((P, 1), dtype=nl.float32)
    nisa.range_select(
        dst=kept,
        on_true_tile=half(x, 8, F),
        comp_op0=nl.greater_equal,
        comp_op1=nl.less,
        bound0=first,
        bound1=last,
        reduce_res=out,
    )
    return out, (slice(0, 8), slice(None)), X[:8, 3:4]


def exponentials(x):
    out, total = nl.ndarray((P, F), dtype=nl.float32), nl.ndarray((P, 1), dtype=nl.float32)
    nisa.exponential(
        dst=out, src=half(x, 8, F), max_value=1e4, reduce_res=total, reduce_cmd=nisa.reduce_cmd.reset_reduce
    )
    return total, (slice(0, 8), slice(None)), np.zeros((8, 1))


def activated_twice(x):
    out = nl.ndarray((P, F), dtype=nl.float32)
    nisa.activate2(dst=out, op=nl.relu, data=half(x, 8, F), imm0=2.0, imm1=1.0, op0=nl.multiply, op1=nl.add)
    return out, (slice(0, 8), slice(None)), 2 * X[:8] + 1


CASES = (
    activated_twice,
    cumulative,
    exponentials,
    largest,
    largest_in_registers,
    moments,
    places_of_the_largest,
    reduced,
    reduced_in_part,
    running_sum,
    scaled_and_summed,
    selected_by_position,
    summed_in_registers,
    without_the_largest,
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

    def kernel(x, reads_all):
        tile, defined, expected = case(x)
        wanted.append(expected)
        return stored(tile if reads_all else tile[defined])

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


@pytest.mark.parametrize("filled", [F - 1, F])
def test_a_reduction_without_a_defined_result_is_refused_at_once(filled: int) -> None:
    def kernel(x):
        tile, out = nl.ndarray((P, F), dtype=nl.float32), nl.ndarray((P, 1), dtype=nl.float32)
        nisa.dma_copy(dst=tile[:, :filled], src=x[:, :filled])
        nisa.tensor_reduce(dst=out, op=nl.add, data=tile, axis=1)
        return stored(nl.load(x))

    if filled == F:
        simulate.launch(kernel, [((X,), {})])
        return
    with pytest.raises(RuleViolation, match="NKW-UNWRITTEN") as refused:
        simulate.launch(kernel, [((X,), {})])
    assert refused.value.instruction == "tensor_reduce"


@pytest.mark.parametrize("rows", [P - 1, P])
@pytest.mark.parametrize("command", ["idle", "reduce"])
def test_accumulator_registers_that_were_not_set_are_refused(command: str, rows: int) -> None:
    def kernel(x):
        tile, out = nl.load(x), nl.ndarray((P, 1), dtype=nl.float32)
        nisa.activation(
            dst=tile[:rows],
            op=nl.relu,
            data=tile[:rows],
            reduce_op=nl.add,
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )
        nisa.activation(
            dst=tile,
            op=nl.relu,
            data=tile,
            reduce_op=nl.add,
            reduce_res=out,
            reduce_cmd=getattr(nisa.reduce_cmd, command),
        )
        return stored(out)

    for mode in (simulate.Mode.eager, simulate.Mode.dry):
        if rows == P:
            done = simulate.launch(kernel, [((X,), {})], mode=mode)
            times = 2 if command == "reduce" else 1
            expected = times * X.sum(axis=1, keepdims=True)
            assert mode is simulate.Mode.dry or np.array_equal(done.outputs[0], expected)
            continue
        with pytest.raises(RuleViolation, match="NKW-REGISTERS-UNSET") as refused:
            simulate.launch(kernel, [((X,), {})], mode=mode)
        verb = "adds to" if command == "reduce" else "reads out"
        assert refused.value.seen == (
            f"reduce_cmd={command} {verb} the scalar accumulator registers of 32 partitions, "
            "of which this kernel never reset 1"
        )


@pytest.mark.parametrize("reset", [True, False])
def test_a_reset_defines_registers_that_summed_undefined_elements(reset: bool) -> None:
    def kernel(x):
        tile, filled, out = half(x, 8, F), nl.load(x), nl.ndarray((P, 1), dtype=nl.float32)
        if reset:
            nisa.activation(
                dst=tile, op=nl.relu, data=tile, reduce_op=nl.add, reduce_cmd=nisa.reduce_cmd.reset
            )
        else:
            nisa.activation(
                dst=tile, op=nl.relu, data=tile, reduce_op=nl.add, reduce_cmd=nisa.reduce_cmd.reset_reduce
            )
        nisa.activation(
            dst=filled,
            op=nl.relu,
            data=filled,
            reduce_op=nl.add,
            reduce_res=out,
            reduce_cmd=nisa.reduce_cmd.reduce,
        )
        return stored(out)

    if reset:
        result = simulate.launch(kernel, [((X,), {})]).outputs[0]
        assert np.array_equal(result, X.sum(axis=1, keepdims=True))
        return
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


@pytest.mark.parametrize("reads_all", [False, True])
def test_the_other_core_receives_no_more_than_was_written(reads_all: bool) -> None:
    def kernel(x, reads_all):
        received = nl.ndarray((P, F), dtype=nl.float32)
        peer = 1 - nl.program_id(0)
        sent = half(x) if peer else nl.load(x)
        nisa.sendrecv(src=sent, dst=received, send_to_rank=peer, recv_from_rank=peer, pipe_id=0)
        out = nl.ndarray((2, P, F), dtype=nl.float32, buffer=nl.shared_hbm)
        columns = F if reads_all or peer else F // 2
        nisa.dma_copy(dst=out[1 - peer, :, :columns], src=received[:, :columns])
        return out

    def run() -> np.ndarray:
        return simulate.launch(kernel, [((X, reads_all), {})], logical_core_size=2).outputs[0]

    if reads_all:
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
