"""The Tensor engine: matmuls, plain and MX, and transposes."""

from __future__ import annotations

import numpy as np

from tests.oracle.formats import FLOAT32_MAX, TINY, UNIT, Format, Kind, single
from tests.oracle.machine import EMPTY, POISON, Core, Operand

_E4M3FN = Format("", 1, Kind.floating, 4, 3, infinite=False)
_E5M2 = Format("", 1, Kind.floating, 5, 2)
_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_EMAX = {"float8_e4m3fn_x4": 8, "float8_e5m2_x4": 15}
_LARGEST_EXPONENT = 255


def nc_matmul(
    core: Core,
    dst: Operand,
    stationary: Operand,
    moving: Operand,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: bool | None = None,
    tile_position: tuple[int, ...] = (),
    tile_size: tuple[int, ...] = (),
    perf_mode: str = "none",
) -> None:
    """Compute dst[m, n] (+)= sum over k of stationary[k, m] * moving[k, n]."""
    if is_transpose:
        core.matrix(moving)  # an identity; it is read all the same
        if core.generation > 2:
            core.write_bits(dst, core.bits(stationary.flat()).T, accumulated=True)
            return
    weights, rows = core.matrix(stationary), core.matrix(moving)
    if perf_mode == "double_row":
        # Partition k holds elements k and K + k of the contraction.
        weights = np.concatenate(np.split(weights, 2, axis=1))
        rows = np.concatenate(np.split(rows, 2, axis=1))
    _contract(core, dst, weights, rows, False if is_transpose else accumulate)


def _contract(
    core: Core, dst: Operand, weights: np.ndarray, rows: np.ndarray, accumulate: bool | None
) -> None:
    """Write the products and their sum, in any order, with the bound of a float32 dot product."""
    depth = weights.shape[0]
    with np.errstate(all="ignore"):
        # One product after the other: inf * 0 and inf - inf turn up where they arise.
        exact = np.zeros((weights.shape[1], rows.shape[1]))
        magnitude = np.zeros_like(exact)
        for k in range(depth):
            product = np.outer(weights[k], rows[k])
            exact = exact + product
            magnitude = magnitude + np.abs(np.where(np.isfinite(product), product, 0.0))
    unit = (depth + 2) * UNIT
    slack = unit / (1 - unit) * magnitude + depth * TINY
    _into_psum(core, dst, exact, slack, magnitude, accumulate)


def _into_psum(
    core: Core,
    dst: Operand,
    exact: np.ndarray,
    slack: np.ndarray,
    magnitude: np.ndarray,
    accumulate: bool | None,
) -> None:
    dst = dst.flat()
    before_it = dst.memory.state[dst.every_byte()]
    started = (before_it != EMPTY).all(axis=-1)
    adds = np.zeros(exact.shape, np.bool_) if accumulate is False else started
    before = np.where(adds, single(dst.format.decode(_raw(dst))), 0.0)
    with np.errstate(all="ignore"):
        result = exact + before
        magnitude = magnitude + np.abs(np.where(np.isfinite(before), before, 0.0))
    slack = slack + np.where(adds, 2 * UNIT * magnitude, 0.0)
    open_ = (magnitude * (1 + 1e-3) >= FLOAT32_MAX) | (magnitude == np.inf)
    slack = np.where(np.isfinite(result), slack, 0.0)
    core.write(dst, result, np.where(open_ & ~np.isnan(result), np.inf, slack), accumulated=True)
    undefined = adds & (before_it == POISON).any(axis=-1)
    dst.memory.state[dst.every_byte()[undefined]] = POISON


def _raw(operand: Operand) -> np.ndarray:
    """Return the bits of an operand of which some may never have been written."""
    return np.ascontiguousarray(operand.memory.bytes[operand.every_byte()]).view(operand.format.unsigned)[
        ..., 0
    ]


def nc_transpose(core: Core, dst: Operand, data: Operand, engine: str = "unknown") -> None:
    """Compute dst[f, p] = data[p, f]; a matmul with an identity on the Tensor engine of gen2, else a move of bits."""
    by_matmul = engine == "tensor" or (engine == "unknown" and dst.memory.buffer == "psum")
    if core.generation > 2 or not by_matmul:
        core.write_bits(dst, core.bits(data.flat()).T, accumulated=by_matmul)
        return
    values = core.matrix(data)
    # Row f of dst sums data[p, f] * identity[p, q]: a NaN or an infinity of that row reaches its other elements.
    special = np.isnan(values) | np.isinf(values)
    result = values.copy()
    for p in range(values.shape[0]):
        reaches = np.delete(special, p, axis=0).any(axis=0)
        result[p] = np.where(reaches, np.nan, values[p])
    core.write(dst, result.T, np.zeros(result.T.shape), accumulated=by_matmul)


# -- microscaling formats ------------------------------------------------------------------------------------------


def _unpacked(core: Core, operand: Operand) -> np.ndarray:
    """Return the four values of every x4 element, as [K, n, 4]; the first lies in the lowest bits."""
    bits = core.bits(operand.flat()).astype(np.int64)
    if operand.format.name.startswith("float4"):
        nibbles = np.stack([(bits >> (4 * q)) & 15 for q in range(4)], axis=-1)
        return np.where(nibbles >> 3, -1.0, 1.0) * _E2M1[nibbles & 7]
    bytes_ = np.stack([(bits >> (8 * q)) & 255 for q in range(4)], axis=-1)
    return (_E4M3FN if "e4m3" in operand.format.name else _E5M2).decode(bytes_)


def _scale_rows(partitions: int) -> list[int]:
    """Return which row of the scale tile holds group g = k // 8: row g % 4 of quadrant g // 4."""
    return [32 * (g // 4) + g % 4 for g in range(partitions // 8)]


def _scales(core: Core, operand: Operand, partitions: int, columns: int) -> np.ndarray:
    rows = operand.flat()
    chosen = rows.addresses[_scale_rows(partitions)][:, :columns]
    bits = core.bits(Operand(operand.memory, operand.format, chosen)).astype(np.int64)
    return np.where(bits == 255, np.nan, np.ldexp(1.0, bits - 127))


def nc_matmul_mx(
    core: Core,
    dst: Operand,
    stationary: Operand,
    moving: Operand,
    stationary_scale: Operand,
    moving_scale: Operand,
    tile_position: tuple[int, int] | None = None,
    tile_size: tuple[int, int] | None = None,
    accumulate: bool | None = None,
) -> None:
    """Compute dst[m, n] (+)= sum over k and q of S[k, m, q] 2^(ss - 127) M[k, n, q] 2^(ms - 127)."""
    sides = []
    for data, scale in ((stationary, stationary_scale), (moving, moving_scale)):
        values = _unpacked(core, data)
        factors = np.repeat(_scales(core, scale, values.shape[0], values.shape[1]), 8, axis=0)
        with np.errstate(all="ignore"):
            scaled = values * factors[:, :, None]
        sides.append(np.concatenate([scaled[:, :, q] for q in range(4)]))
    with np.errstate(all="ignore"):
        beyond = any((np.abs(side[np.isfinite(side)]) > FLOAT32_MAX / 2).any() for side in sides)
    if beyond:
        # Whether a scaled value overflows before it meets its partner is not documented.
        shape = (sides[0].shape[1], sides[1].shape[1])
        _into_psum(core, dst, np.zeros(shape), np.zeros(shape), np.full(shape, np.inf), accumulate)
        return
    _contract(core, dst, sides[0], sides[1], accumulate)


def quantize_mx(core: Core, dst: Operand, src: Operand, dst_scale: Operand) -> None:
    """Quantize groups of 8 partitions x 4 elements by X = 2^(floor(log2 amax) - (Emax - 1)); dst is src / X as fp8."""
    values = core.matrix(src)
    partitions, columns = values.shape[0], values.shape[1] // 4
    emax = _EMAX[dst.format.name]
    element = _E4M3FN if emax == 8 else _E5M2
    rows = _scale_rows(partitions)
    data = np.zeros((partitions, columns, 4))
    scales = np.zeros((partitions // 8, columns), np.int64)
    for group in range(partitions // 8):
        for f in range(columns):
            block = values[8 * group : 8 * group + 8, 4 * f : 4 * f + 4]
            largest = np.abs(block).max()
            if not np.isfinite(largest):
                byte, scaled = _LARGEST_EXPONENT, np.full(block.shape, np.nan)
            else:
                exponent = np.frexp(largest)[1] - 1 - (emax - 1) if largest else -127
                byte = max(int(exponent) + 127, 0)
                scaled = np.ldexp(block, 127 - byte)
            scales[group, f] = byte
            data[8 * group : 8 * group + 8, f] = single(scaled)
    bytes_ = dst.flat().addresses[:, :, None] + np.arange(4)
    core.write(Operand(dst.memory, element, bytes_), data)
    to = dst_scale.flat()
    core.write_bits(Operand(to.memory, to.format, to.addresses[rows][:, :columns]), scales)
