"""Patterns, selections, searches, gathers within SBUF, and statistics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tests.oracle import operators
from tests.oracle.formats import TINY, UNIT, single
from tests.oracle.machine import Core, Operand, OutOfRange


def _affine(
    core: Core, partitions: int, pattern: list[list[int]], offset: Any, channel_multiplier: int
) -> np.ndarray:
    """Compute offset + p * channel_multiplier + the pattern, outermost pair first, in wrapping int32."""
    start = core.registers[offset] if isinstance(offset, str) else offset
    rows = []
    for p in range(partitions):
        row = [start + p * channel_multiplier]
        for step, num in pattern:
            row = [value + step * i for value in row for i in range(num)]
        rows.append([(value + 2**31) % 2**32 - 2**31 for value in row])
    return np.array(rows, np.int64)


def iota(
    core: Core, dst: Operand, pattern: list[list[int]], offset: Any = 0, channel_multiplier: int = 0
) -> None:
    """Compute dst = the affine value, an int32, cast to dst."""
    values = _affine(core, dst.shape[0], pattern, offset, channel_multiplier)
    if dst.format.name == "int32":
        core.write_bits(dst, values & (2**32 - 1))
    else:
        core.write(dst, single(values))


def affine_select(
    core: Core,
    dst: Operand,
    pattern: list[list[int]],
    channel_multiplier: int,
    on_true_tile: Operand,
    on_false_value: float,
    cmp_op: str = "equal",
    offset: Any = 0,
) -> None:
    """Compute dst = on_true_tile where the affine value compares with 0, else a number."""
    affine = _affine(core, dst.shape[0], pattern, offset, channel_multiplier).astype(np.float64)
    chosen = operators.ARITHMETIC[cmp_op](affine, np.zeros_like(affine)) == 1
    number = np.full(chosen.shape, single(on_false_value))
    to = dst.flat()
    if dst.format is on_true_tile.format:
        bits = core.bits(on_true_tile.flat())
        core.write(to, number, chosen=~chosen)
        core.write_bits(to, bits, chosen)
    else:
        core.write(to, np.where(chosen, core.matrix(on_true_tile), number))


def max8(core: Core, dst: Operand, src: Operand) -> None:
    """Write the 8 largest values of each partition, descending."""
    rows = core.matrix(src)
    # No sentence says how NaN is ordered; rows with one are left open.
    nan = np.isnan(rows).any(axis=1, keepdims=True)
    best = np.array([sorted(row, reverse=True)[:8] for row in np.where(nan, 0.0, rows).tolist()])
    core.write(dst, best, np.where(nan, np.inf, np.zeros_like(best)))


def _matches(row: list[float], wanted: list[float], slots: Iterable[int]) -> dict[int, int | None]:
    """Return per slot the first position of its value that no earlier slot has taken."""
    taken: set[int] = set()
    positions: dict[int, int | None] = {}
    for slot in slots:
        free = [i for i, value in enumerate(row) if value == wanted[slot] and i not in taken]
        positions[slot] = free[0] if free else None
        taken.update(free[:1])
    return positions


def _indices(matches: list[dict[int, int | None]], dst: Operand) -> np.ndarray:
    missing = 2**dst.format.bits - 1
    return np.array(
        [[missing if (position := row[slot]) is None else position for slot in range(8)] for row in matches]
    )


def nc_find_index8(core: Core, dst: Operand, data: Operand, vals: Operand) -> None:
    """Write per slot, ascending, the first position not yet taken; all ones where there is none."""
    rows, wanted = core.matrix(data).tolist(), core.matrix(vals).tolist()
    core.write_bits(dst, _indices([_matches(row, eight, range(8)) for row, eight in zip(rows, wanted)], dst))


def nc_match_replace8(
    core: Core, dst: Operand, data: Operand, vals: Operand, imm: float, dst_idx: Operand | None = None
) -> None:
    """Replace by imm the first remaining match of each slot, from slot 7 down to 0."""
    values, wanted = core.matrix(data), core.matrix(vals).tolist()
    matches = [_matches(row, eight, range(7, -1, -1)) for row, eight in zip(values.tolist(), wanted)]
    for row, slots in enumerate(matches):
        for slot in slots.values():
            if slot is not None:
                values[row, slot] = single(imm)
    core.write(dst, values)
    if dst_idx is not None:
        core.write_bits(dst_idx, _indices(matches, dst_idx))


def nc_n_gather(core: Core, dst: Operand, data: Operand, indices: Operand) -> None:
    """Compute dst[p, j] = data[p, indices[p, j]]."""
    bits, columns = core.bits(data.flat()), core.bits(indices.flat()).astype(np.int64)
    if (columns >= bits.shape[1]).any():
        raise OutOfRange
    core.write_bits(dst, np.take_along_axis(bits, columns, axis=1))


def local_gather(
    core: Core,
    dst: Operand,
    src_buffer: Operand,
    index: Operand,
    num_elem_per_idx: int = 1,
    num_valid_indices: int | None = None,
) -> None:
    """Gather on every GpSimd core runs of elements at the offsets its 16 partitions list, partition fastest."""
    bits, offsets = core.bits(src_buffer.flat()), core.bits(index.flat()).astype(np.int64)
    result = np.zeros((bits.shape[0], int(np.prod(dst.shape[1:]))), np.int64)
    for first in range(0, bits.shape[0], 16):
        listed = [offsets[first + lane, j] for j in range(offsets.shape[1]) for lane in range(16)]
        listed = listed[:num_valid_indices]
        if max(listed) + num_elem_per_idx > bits.shape[1]:
            raise OutOfRange
        for lane in range(16):
            row = bits[first + lane]
            result[first + lane] = [row[offset + e] for offset in listed for e in range(num_elem_per_idx)]
    core.write_bits(dst, result)


def nonzero_with_count(
    core: Core, dst: Operand, src: Operand, index_offset: int = 0, padding_val: int = -1
) -> None:
    """Write on partitions 0, 16, ...: positions of the nonzero elements, padding, and their count."""
    from_, to = src.flat(), dst.flat()
    for p in range(0, src.shape[0], 16):
        one = Operand(from_.memory, from_.format, from_.addresses[p : p + 1])
        row = from_.format.decode(core.bits(one))[0]
        positions = [i + index_offset for i, value in enumerate(row) if value != 0]
        line = positions + [padding_val] * (len(row) - len(positions)) + [len(positions)]
        target = Operand(to.memory, to.format, to.addresses[p : p + 1])
        core.write_bits(target, np.array(line) & (2**32 - 1))


def topk(core: Core, val_dst: Operand, idx_dst: Operand, src: Operand, n: int) -> None:
    """Write the K largest of each list, ascending; 16 partitions hold one (j in partition j % 16, column j // 16)."""
    active = Operand(src.memory, src.format, src.addresses[:, : -(-n // 16)])
    values, bits = core.matrix(active), core.bits(active)
    count = val_dst.shape[1]
    for first in range(0, values.shape[0], 16):
        where = [(first + j % 16, j // 16) for j in range(n)]
        # Of equal values the lower position counts as larger; NaN as smallest.
        order = sorted(
            range(n),
            key=lambda j: (not np.isnan(values[where[j]]), np.nan_to_num(values[where[j]], nan=0.0), -j),
        )
        for result, j in enumerate(order[n - count :]):
            spot = (
                slice(first + result % 16, first + result % 16 + 1),
                slice(result // 16, result // 16 + 1),
            )
            for operand, word in ((val_dst, bits[where[j]]), (idx_dst, j)):
                core.write_bits(
                    Operand(operand.memory, operand.format, operand.addresses[spot]), np.array([[word]])
                )


def sequence_bounds(core: Core, dst: Operand, segment_ids: Operand) -> None:
    """Start and end of the run of equal adjacent ids around each element; (n, -1) for id 0."""
    ids = core.matrix(segment_ids)[0].tolist()
    if any(i < 0 for i in ids):
        raise OutOfRange
    starts, ends = [], []
    for position, id_ in enumerate(ids):
        start, end = position, position + 1
        while start > 0 and ids[start - 1] == id_:
            start -= 1
        while end < len(ids) and ids[end] == id_:
            end += 1
        starts.append(float(start if id_ else len(ids)))
        ends.append(float(end if id_ else -1))
    core.write(dst, np.array([[starts, ends]]))


# -- statistics ----------------------------------------------------------------------------------------------------


def bn_stats(core: Core, dst: Operand, data: Operand) -> None:
    """Count, mean and count * variance of the even elements, then of the odd ones."""
    rows = core.matrix(data)
    values, slacks = [], []
    for elements in (rows[:, 0::2], rows[:, 1::2]):
        count = elements.shape[1]
        if count == 0:
            values.append(np.zeros((rows.shape[0], 3)))
            slacks.append(np.zeros((rows.shape[0], 3)))
            continue
        with np.errstate(all="ignore"):
            mean = elements.mean(axis=1, keepdims=True)
            spread = ((elements - mean) ** 2).sum(axis=1, keepdims=True)
            peak = np.abs(elements).max(axis=1, keepdims=True)
        values.append(np.concatenate([np.full_like(mean, count), single(mean), single(spread)], axis=1))
        error, error2 = _moment_errors(count, peak, spread)
        slacks.append(np.concatenate([np.zeros_like(mean), error, error2], axis=1))
    core.write(dst, *_open_where_large(np.concatenate(values, axis=1), np.concatenate(slacks, axis=1), rows))


def _moment_errors(count: int, peak: np.ndarray, spread: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return bounds of the mean and of count * variance in float32.

    The mean of numbers up to `peak` is off by e <= (count + 2) u peak. Each squared deviation then changes by at most
    2 |d| (e + 2 u peak) and its square, which sum to 2 sqrt(count spread) e' + count e'^2 by Cauchy and Schwarz; the
    sum itself adds (count + 3) u spread.
    """
    error = (count + 2) * UNIT * peak + TINY
    deviation = error + 2 * UNIT * peak
    with np.errstate(all="ignore"):
        spread_error = (
            2 * np.sqrt(count * spread) * deviation
            + count * deviation**2
            + (count + 3) * UNIT * (spread + 2 * np.sqrt(count * spread) * deviation + count * deviation**2)
            + count * TINY
        )
    return error, spread_error


def _open_where_large(
    values: np.ndarray, slack: np.ndarray, rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Leave open rows with NaN, infinity or numbers whose squares overflow in float32."""
    with np.errstate(all="ignore"):
        open_ = ~(np.abs(rows).max(axis=1, keepdims=True) < 1e15)
    return np.where(open_, 0.0, values), np.where(open_ | ~np.isfinite(slack), np.inf, slack)


def bn_aggr(core: Core, dst: Operand, data: Operand) -> None:
    """Write mean and population variance of all parts, from (count, mean, count * variance) triples."""
    rows = core.matrix(data)
    triples = rows.reshape(rows.shape[0], -1, 3)
    count, mean, spread = (triples[:, :, i] for i in range(3))
    with np.errstate(all="ignore"):
        everything = count.sum(axis=1, keepdims=True)
        average = (count * mean).sum(axis=1, keepdims=True) / everything
        deviation = mean - average
        variance = (
            spread.sum(axis=1, keepdims=True) + (count * deviation**2).sum(axis=1, keepdims=True)
        ) / everything
        peak = np.abs(mean).max(axis=1, keepdims=True)
        number = triples.shape[1]
        error = (number + 4) * 2 * UNIT * peak + TINY
        step = error + 2 * UNIT * peak
        between = (count * (2 * np.abs(deviation) * step + step**2)).sum(axis=1, keepdims=True) / everything
        variance_error = between + (2 * number + 6) * UNIT * (np.abs(variance) + between) + TINY
        # Counts come from bn_stats; other data (negative, huge, not whole) would need another analysis.
        ordinary = (count >= 0).all(axis=1, keepdims=True) & (spread >= 0).all(axis=1, keepdims=True)
        ordinary &= (everything > 0) & (np.abs(rows).max(axis=1, keepdims=True) < 1e9)
        tiny = ((count > 0) & (count < 1e-9)).any(axis=1, keepdims=True)
    values = np.concatenate([average, variance], axis=1)
    slack = np.concatenate([error, variance_error], axis=1)
    known = np.broadcast_to(ordinary & ~tiny, values.shape)
    core.write(dst, np.where(known, single(values), 0.0), np.where(known, slack, np.inf))
