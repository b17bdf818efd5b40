"""Where the keys and values of the new tokens are written: places of rows (token, kv head), computed at run time."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import SCALAR, STATIC, transfer


def new_places(work, positions, heights):
    """Columns of places of the rows of keys and of values, [height, 1] int32, counted in what `scatter` counts in.

    What another core or rank writes has a place behind the cache.
    """
    sizes, cache = work.sizes, work.k_cache
    first, head = work.share.sequences[0], work.share.kv_heads[0]
    if sizes.paged:
        slots = repeated_numbers(work.slots, sizes, STATIC)
        rows = places_in_pages(slots, head, cache.shape[2], sizes)
        if work.divided:
            numbers = repeated_numbers(positions, sizes, SCALAR)
            put_behind(rows, of_others(numbers, work), cache.shape[0] * cache.shape[1] * cache.shape[2])
        columns = as_columns(rows, heights, sizes)
        return columns, columns
    numbers = repeated_numbers(positions, sizes, SCALAR)
    slots = slots_of(numbers, sizes.ranks)
    sequences, kv_heads, depth, capacity = cache.shape
    columns = []
    for step in (depth * capacity, capacity):
        rows = places(slots, (first * kv_heads + head) * step, kv_heads, step, sizes)
        if work.divided:
            put_behind(rows, of_others(numbers, work), sequences * kv_heads * step)
        columns.append(as_columns(rows, heights, sizes))
    return columns[0], columns[1]


def slots_of(numbers, ranks):
    """The slots of positions that `ranks`, a power of two, divide."""
    if ranks == 1:
        return numbers
    result = nl.ndarray(numbers.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=result, data=numbers, op0=nl.right_shift, operand0=ranks.bit_length() - 1)
    return result


def of_others(numbers, work):
    """1 where another core or rank writes a position: [1, T, Hk] uint8."""
    result = nl.ndarray(numbers.shape, dtype=nl.uint8, buffer=nl.sbuf)
    if work.ranks is not None:
        places_in_group = nl.ndarray(numbers.shape, dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=places_in_group, data=numbers, op0=nl.bitwise_and, operand0=work.ranks.count - 1
        )
        nisa.tensor_scalar(
            dst=result, data=places_in_group, op0=nl.not_equal, operand0=work.ranks.place[0:1, :]
        )
        return result
    first, end = work.share.slots
    if first == 0:
        nisa.tensor_scalar(dst=result, data=numbers, op0=nl.greater_equal, operand0=float(end))
    else:
        nisa.tensor_scalar(dst=result, data=numbers, op0=nl.less, operand0=float(first))
    return result


def put_behind(rows, others, count):
    """Replace places that are others' by the first one behind a cache of `count` rows."""
    behind = nl.ndarray(rows.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.memset(dst=behind, value=count)
    nisa.tensor_copy_predicated(dst=rows, src=behind, predicate=others)


def repeated_numbers(column, sizes, queue):
    """A number of each new token, [T, 1] int32 in HBM, for each of its kv heads: [1, T, Hk]."""
    numbers = nl.ndarray((1, sizes.tokens, sizes.kv_heads), dtype=nl.int32, buffer=nl.sbuf)
    source = column.reshape((1, sizes.tokens, 1)).broadcast(2, sizes.kv_heads)
    transfer(numbers, source, queue)
    return numbers


def places(slots, first_row, kv_heads, step, sizes):
    """Where the rows (token, kv head) of the new tokens begin in a cache of `kv_heads` that lie `step` rows apart.

    The first sequence and kv head begin at `first_row`. GpSimd adds integers exactly, beyond 2 ** 24 as well.
    """
    starts = nl.ndarray(slots.shape, dtype=nl.int32, buffer=nl.sbuf)
    pattern = [[kv_heads * step, sizes.sequences], [0, sizes.new], [step, sizes.kv_heads]]
    nisa.iota(dst=starts, pattern=pattern, offset=first_row)
    result = nl.ndarray(slots.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=result, data1=slots, data2=starts, op=nl.add)
    return result


def places_in_pages(slots, first_head, kv_heads, sizes):
    """Where the rows (token, kv head) of the new tokens are in pages of `kv_heads`, counted in their rows."""
    if kv_heads == 1:
        return slots
    heads = nl.ndarray(slots.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=heads, pattern=[[0, sizes.tokens], [1, sizes.kv_heads]], offset=first_head)
    result = nl.ndarray(slots.shape, dtype=nl.int32, buffer=nl.sbuf)
    nisa.scalar_tensor_tensor(
        dst=result,
        data=slots,
        op0=nl.multiply,
        operand0=float(kv_heads),
        op1=nl.add,
        operand1=heads,
    )
    return result


def as_columns(numbers, heights, sizes):
    """Numbers on one partition as int32 columns of as many partitions as `heights` says."""
    flat = numbers.reshape((1, sizes.tokens * sizes.kv_heads))
    result = []
    first = 0
    for height in heights:
        column = nl.ndarray((height, 1), dtype=nl.int32, buffer=nl.sbuf)
        transfer(column, flat[:, first : first + height], SCALAR)
        result.append(column)
        first += height
    return result
