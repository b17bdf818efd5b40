"""nc_matmul: one pass of a moving tile through the 128x128 array that holds a stationary tile."""

from __future__ import annotations

from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import costs, indirection, propagation, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine, MatmulPerfMode
from simulate.isa.fp8_subnormals import flush_operands
from simulate.isa.matmul_hints import build_hint_rule
from simulate.isa.plan import SUMS_PRODUCTS, Accumulate, Domain, Plan
from simulate.isa.shapes import flat
from simulate.memory import MemoryRegion, NkiTensor

_FP8 = ("float8_e4m3", "float8_e4m3fn", "float8_e5m2")
_WIDE = ("float32", "tfloat32")
_INPUTS = (*_FP8, "bfloat16", "float16", *_WIDE)
_PERF_MODES = (*MatmulPerfMode, *(mode.value for mode in MatmulPerfMode))
MODES = {None: Accumulate.first_write_overwrites, True: Accumulate.add, False: Accumulate.overwrite}


@instruction
def nc_matmul(
    hardware: Hardware,
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: bool | None = None,
    tile_position: tuple[int, ...] = (),
    tile_size: tuple[int, ...] = (),
    perf_mode: MatmulPerfMode | str = MatmulPerfMode.none,
    name: str | None = None,
) -> Plan:
    """Compute dst[m, n] (+)= sum over k of stationary[k, m] * moving[k, n], on the Tensor engine.

    stationary: [K, M] @ SBUF, K <= 128, M <= 128. moving: [K, N] @ SBUF, N <= 512 (gen4: more). dst: [M, N] @ PSUM,
    float32 (gen4: or bfloat16), inside one 2 KiB bank per partition except on gen4. Free dims are flattened.

    Products and sums are float32 (numpy's order of summation; the hardware's is not documented). Two float32 inputs
    take four passes and count as exact float32; tfloat32 inputs carry a 10-bit mantissa. Subnormal fp8 inputs keep
    their values (a guess, see `matmul_keeps_fp8_subnormals` of the record). `accumulate`: False
    overwrites, True adds to what matmuls wrote before, None decides element by element: the first write overwrites,
    later ones add. is_*_onezero are performance hints without effect on values. With `is_transpose`, moving is an
    identity and dst is stationary transposed, bit exact where the chip has the transpose mode. perf_mode double_row
    contracts two fp8 rows per partition: stationary [K, 2, M], moving [K, 2, N].
    tile_position and tile_size choose rows and columns of the array and do not change the result. The reference
    says both that column tiling is unavailable and how to use it; public kernels use it, so it is accepted.

    Raises RuleViolation. Cost: costs.matmul.
    """
    rules.check_tile(hardware, "dst", dst, MemoryRegion.psum, indirect=True)
    rules.check_tile(hardware, "stationary", stationary, MemoryRegion.sbuf, indirect=True)
    rules.check_tile(hardware, "moving", moving, MemoryRegion.sbuf, indirect=True)
    same_contraction(stationary, moving)
    if any(indirection.is_indirect(tile) for tile in (dst, stationary, moving)):
        indirect_operands(stationary, moving, is_transpose, tile_position)
        dst, stationary, moving = (
            indirection.regroup_for_tensor_engine(tile) for tile in (dst, stationary, moving)
        )
        indirection.check(hardware, Engine.tensor, dst, stationary)
        indirection.check_gather(hardware, moving)
    known_perf_mode(perf_mode)
    double_row = perf_mode in (MatmulPerfMode.double_row, "double_row")
    rows_per_partition = 1
    if double_row:
        double_row_inputs(hardware, stationary, moving, is_transpose)
        rows_per_partition = 2
    columns, streamed = stationary.free_size // rows_per_partition, moving.free_size // rows_per_partition
    input_dtypes(hardware, stationary, moving)
    stationary_fits(hardware, columns)
    moving_fits(hardware, streamed, dst)
    matches_result(dst, columns, streamed)
    transposes_bits = is_transpose and hardware.matmul_transpose_mode
    if transposes_bits:
        rules.same_dtype("dst", dst, "stationary", stationary)
    else:
        result_dtype(hardware, dst)
    if not hardware.matmul_crosses_psum_banks:
        inside_one_bank(hardware, dst)
    if tile_position or tile_size:
        array_tile(hardware, stationary, columns, tile_position, tile_size)
        if double_row:
            takes_whole_columns(hardware, tile_size)
    accumulate_is_tristate(accumulate)

    carried = propagation.contracted
    if double_row:
        carried = propagation.contracted_in_pairs

        def compute(weights: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray]:
            count = weights.shape[0] * 2
            return (weights.reshape(count, -1).T @ rows.reshape(count, -1),)

    elif transposes_bits:
        carried = propagation.transposed

        def compute(weights: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray]:
            moving_is_identity(flat(rows))
            return (flat(weights).T,)

    else:

        def compute(weights: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray]:
            return (flat(weights).T @ flat(rows),)

    if not transposes_bits:
        compute = flush_operands(hardware, compute, stationary, moving)
    fp32 = stationary.dtype == "float32" or moving.dtype == "float32"
    return Plan(
        engine=Engine.tensor,
        reads=(stationary, moving),
        writes=(dst,),
        domain=Domain.bits if transposes_bits else Domain.float32,
        compute=compute,
        cost=costs.matmul(
            hardware,
            stationary.shape[0] * rows_per_partition,
            columns,
            streamed,
            fp32,
            is_transpose,
            _identify_stationary(stationary, tile_position, tile_size, is_transpose),
            _list_cells(hardware, tile_position, tile_size),
        ),
        name=name,
        accumulate=Accumulate.overwrite if is_transpose else MODES[accumulate],
        propagate=carried,
        effects=SUMS_PRODUCTS,
        value_rule=build_hint_rule(is_stationary_onezero, is_moving_onezero),
        undocumented=rules.violations(
            *rules.flags(
                is_stationary_onezero=is_stationary_onezero,
                is_moving_onezero=is_moving_onezero,
                is_transpose=is_transpose,
            ),
            (names_perf_mode, perf_mode),
        ),
    )


def _identify_stationary(
    stationary: NkiTensor, position: tuple[int, ...], size: tuple[int, ...], is_transpose: bool
) -> tuple[int, ...] | None:
    """Return position, size, shape and strides of the stationary tile as one tuple, by which the array holds it.

    Two matmuls with equal tuples load the same tile in the same way. None for a transpose, whose tile is data, and for
    a tile with a run-time address.
    """
    if is_transpose or stationary.dynamic is not None:
        return None
    return (*(position or ()), *(size or ()), *stationary.shape, *stationary.strides)


def _list_cells(hardware: Hardware, position: tuple[int, ...], size: tuple[int, ...]) -> tuple[int, ...]:
    """Return the numbers of the array's cells that a tile of the array takes, row by row; empty for the whole array.

    A cell is as large as the chip's smallest tile of the array.

    Args:
        hardware: Record of the chip.
        position: (first row, first column) of the tile; empty for (0, 0).
        size: (rows, columns) of the tile; empty for the whole array.
    """
    edge, side = min(hardware.matmul_tile_sizes), hardware.contraction_max
    if not size or min(size) >= side:
        return ()
    (first_row, first_column), (rows, columns) = position or (0, 0), size
    return tuple(
        row * (side // edge) + column
        for row in range(first_row // edge, (first_row + rows) // edge)
        for column in range(first_column // edge, (first_column + columns) // edge)
    )


def same_contraction(stationary: NkiTensor, moving: NkiTensor) -> None:
    """Raise RuleViolation if stationary and moving have different numbers of partitions, the contraction dim.

    The message says which operand seems to be transposed, if its free size equals the other one's partitions.
    """
    rows, moving_rows = stationary.shape[0], moving.shape[0]
    if rows == moving_rows:
        return
    limit = "stationary [K, M], moving [K, N], dst [M, N]: the contraction K lies on the partitions of both operands"
    seen = f"stationary has {rows} partitions, moving has {moving_rows}"
    hint = "slice both operands to the same rows of the contraction"
    if stationary.free_size == moving_rows:
        seen += f"; stationary ({rows}, {moving_rows}) has the layout [M, K]"
        hint = _hint_transpose("stationary", stationary)
    elif moving.free_size == rows:
        seen += f"; moving ({moving_rows}, {rows}) has the layout [N, K]"
        hint = _hint_transpose("moving", moving)
    raise RuleViolation(rules.same_partitions, seen, limit, hint)


def _hint_transpose(operand: str, tile: NkiTensor) -> str:
    """Return the hint that says how to transpose an operand of a matmul, on chip or while it is loaded."""
    shape = f"({tile.free_size}, {tile.shape[0]})"
    return (
        f"transpose {operand}: nisa.nc_transpose(dst=t, data={operand}) with t {shape} {tile.dtype} in PSUM, then "
        f"nisa.tensor_copy to SBUF; or load it with nl.load_transpose2d"
    )


@rule("NKW-MATMUL-INDIRECT", hint="gather into a tile with nisa.tensor_copy first")
def indirect_operands(
    stationary: NkiTensor, moving: NkiTensor, is_transpose: bool, position: tuple[int, ...]
) -> None:
    """Indirect operands of nc_matmul are 16-bit or fp8 floats, without tiling; moving is not with is_transpose.

    Raises RuleViolation otherwise.
    """
    wrong = [
        f"{operand} is {tile.dtype}"
        for operand, tile in (("stationary", stationary), ("moving", moving))
        if indirection.is_indirect(tile) and (tile.dtype in _WIDE or tile.dtype not in _INPUTS)
    ]
    if any(position):
        wrong.append(f"tile_position={position}")
    if is_transpose and indirection.is_indirect(moving):
        wrong.append("is_transpose with an indirect moving")
    if wrong:
        raise RuleViolation(indirect_operands, ", ".join(wrong))


@rule("NKW-MATMUL-DTYPE")
def input_dtypes(hardware: Hardware, stationary: NkiTensor, moving: NkiTensor) -> None:
    """nc_matmul takes fp8, bfloat16, float16, tfloat32 or float32; wide types pair with wide types only.

    Raises RuleViolation otherwise.
    """
    first, second = stationary.dtype, moving.dtype
    if first == second and first in ("float32", "bfloat16", "float16"):
        return
    seen = f"stationary is {first}, moving is {second}"
    for dtype in (first, second):
        if dtype not in _INPUTS:
            raise RuleViolation(
                input_dtypes, seen, limit=", ".join(_INPUTS), hint="cast with nisa.tensor_copy"
            )
        if dtype == "float8_e4m3fn" and not hardware.matmul_e4m3fn:
            raise RuleViolation(
                input_dtypes, seen, limit=f"no float8_e4m3fn on {hardware.name}", hint="use nl.float8_e4m3"
            )
    if (first in _WIDE) != (second in _WIDE):
        raise RuleViolation(
            input_dtypes,
            seen,
            limit="float32 and tfloat32 pair with each other only",
            hint="cast one of them",
        )
    if {first, second} == {"float8_e4m3", "float8_e4m3fn"}:
        raise RuleViolation(input_dtypes, seen, limit="one kind of e4m3", hint="cast one of them")


@rule("NKW-MATMUL-STATIONARY", hint="loop over blocks of 128 columns (nl.tile_size.gemm_stationary_fmax)")
def stationary_fits(hardware: Hardware, columns: int) -> None:
    """The stationary tile has at most 128 columns.

    Raises RuleViolation otherwise.
    """
    if columns > hardware.stationary_free_max:
        raise RuleViolation(
            stationary_fits, f"{columns} columns", limit=f"{hardware.stationary_free_max} on {hardware.name}"
        )


@rule("NKW-MATMUL-MOVING", hint="loop over blocks of 512 columns (nl.tile_size.gemm_moving_fmax)")
def moving_fits(hardware: Hardware, streamed: int, dst: NkiTensor) -> None:
    """The moving tile has at most 512 columns, on gen4 4096 into float32 and 8192 into bfloat16 PSUM.

    Raises RuleViolation otherwise.
    """
    wide = dst.dtype.itemsize == 4
    limit = hardware.moving_free_max_psum_fp32 if wide else hardware.moving_free_max_psum_bf16
    if streamed > limit:
        raise RuleViolation(moving_fits, f"{streamed} columns", limit=f"{limit} on {hardware.name}")


@rule("NKW-MATMUL-SHAPE")
def matches_result(dst: NkiTensor, columns: int, streamed: int) -> None:
    """dst has one partition per stationary column and one element per moving column.

    Raises RuleViolation otherwise.
    """
    if dst.shape[0] != columns or dst.free_size != streamed:
        hint = f"slice dst to [0:{columns}, 0:{streamed}]"
        if (dst.shape[0], dst.free_size) == (streamed, columns):
            hint = f"swap stationary and moving for this dst, or allocate dst with ({columns}, {streamed})"
        raise RuleViolation(
            matches_result,
            f"dst is ({dst.shape[0]}, {dst.free_size}), the product is ({columns}, {streamed})",
            hint=hint,
        )


@rule("NKW-MATMUL-RESULT-DTYPE", hint="accumulate in float32 and cast with nisa.tensor_copy to SBUF")
def result_dtype(hardware: Hardware, dst: NkiTensor) -> None:
    """PSUM accumulates float32; bfloat16 only where the chip can.

    Raises RuleViolation unless dst is float32, or bfloat16 on a chip that can write it.
    """
    if dst.dtype == "float32" or (dst.dtype == "bfloat16" and hardware.matmul_bf16_destination):
        return
    allowed = "float32 or bfloat16" if hardware.matmul_bf16_destination else "float32"
    raise RuleViolation(result_dtype, f"dst is {dst.dtype}", limit=f"{allowed} on {hardware.name}")


@rule("NKW-PSUM-BANK")
def inside_one_bank(hardware: Hardware, dst: NkiTensor) -> None:
    """The result of one matmul lies inside one 2 KiB PSUM bank per partition.

    Raises RuleViolation otherwise.
    """
    width = dst.dtype.itemsize
    per_partition = dst.storage.nbytes // dst.storage.shape[0]
    start = dst.offset * width % per_partition
    end = start + sum((extent - 1) * stride for extent, stride in zip(dst.shape[1:], dst.strides[1:])) * width
    bank = hardware.psum_bank_bytes
    if start // bank != end // bank:
        raise RuleViolation(
            inside_one_bank,
            f"bytes {start} to {end + width - 1} of each partition",
            limit=f"one bank of {bank} bytes on {hardware.name}",
            hint=_hint_banks(start // width, end // width + 1, bank // width, str(dst.dtype)),
        )


def _hint_banks(first: int, end: int, bank: int, dtype: str) -> str:
    """Return the hint that says how to write elements first to end - 1 of a partition inside PSUM banks.

    Args:
        first: First element of the result within its partition.
        end: End of the result.
        bank: Elements of a bank.
        dtype: Name of the dtype, for the text.
    """
    if end - first > bank:
        return f"write at most {bank} {dtype} per matmul, from element 0, {bank}, … of the partition on"
    border = -(-(first + 1) // bank) * bank
    starts = f"{border - (end - first)} or {border}"
    return f"begin at element {starts} of the partition in place of {first}, or split the result at {border}"


@rule(
    "NKW-MATMUL-ARRAY-TILE",
    hint="pass both, with tile_size from this list and tile_position multiples of it; split larger operands",
)
def array_tile(
    hardware: Hardware, stationary: NkiTensor, columns: int, position: tuple[int, ...], size: tuple[int, ...]
) -> None:
    """tile_position and tile_size come together; positions are multiples of sizes, and the operand fits.

    Raises RuleViolation otherwise.
    """
    sizes = hardware.matmul_tile_sizes
    fits = (
        isinstance(position, (tuple, list))
        and isinstance(size, (tuple, list))
        and len(position) == 2
        and len(size) == 2
        and all(s in sizes and p % s == 0 and 0 <= p <= 128 - s for p, s in zip(position, size))
        and stationary.shape[0] <= size[0]
        and columns <= size[1]
    )
    if not fits:
        raise RuleViolation(
            array_tile,
            f"tile_position={position}, tile_size={size}, stationary ({stationary.shape[0]}, {columns})",
            limit=f"sizes {sizes} on {hardware.name}",
        )


@rule("NKW-MATMUL-DOUBLE-ROW", hint="reshape fp8 operands to (K, 2, columns), or leave perf_mode out")
def double_row_inputs(
    hardware: Hardware, stationary: NkiTensor, moving: NkiTensor, is_transpose: bool
) -> None:
    """double_row takes fp8 operands of shape (K, 2, …), from gen3 on and not in transpose mode.

    Raises RuleViolation otherwise.
    """
    shaped = all(t.ndim >= 3 and t.shape[1] == 2 and t.dtype in _FP8 for t in (stationary, moving))
    if not (hardware.matmul_double_row and shaped) or is_transpose:
        raise RuleViolation(
            double_row_inputs,
            f"stationary {stationary.shape} {stationary.dtype}, moving {moving.shape} {moving.dtype}",
            limit=f"fp8 (K, 2, free); {'available' if hardware.matmul_double_row else 'not'} on {hardware.name}",
        )


@rule("NKW-MATMUL-DOUBLE-ROW-TILE", hint="tile_size=(rows, 128), or leave perf_mode out")
def takes_whole_columns(hardware: Hardware, size: tuple[int, ...]) -> None:
    """double_row performance mode cannot be combined with column tiling; it can with row tiling.

    Raises RuleViolation otherwise.
    """
    if size[1] != hardware.stationary_free_max:
        raise RuleViolation(
            takes_whole_columns,
            f"perf_mode=double_row with tile_size={tuple(size)}",
            limit=f"a column size of {hardware.stationary_free_max}",
        )


@rule("NKW-MATMUL-PERF-MODE", hint="perf_mode=nisa.matmul_perf_mode.double_row, or leave it out")
def known_perf_mode(perf_mode: Any) -> None:
    """perf_mode is a member of nisa.matmul_perf_mode, or its value as a string.

    Raises RuleViolation otherwise.
    """
    if perf_mode not in _PERF_MODES:
        raise RuleViolation(
            known_perf_mode,
            f"perf_mode={perf_mode!r:.40}",
            limit=", ".join(mode.name for mode in MatmulPerfMode),
        )


@rule("NKW-MATMUL-ACCUMULATE", hint="accumulate=(k > 0)")
def accumulate_is_tristate(accumulate: Any) -> None:
    """accumulate is True, False or None.

    Raises RuleViolation otherwise.
    """
    if accumulate is not None and not isinstance(accumulate, (bool, np.bool_)):
        raise RuleViolation(accumulate_is_tristate, f"accumulate={accumulate!r:.40}")


@rule("NKW-TRANSPOSE-IDENTITY", hint="moving=nl.shared_identity_matrix(n, dtype), or use nisa.nc_transpose")
def moving_is_identity(rows: np.ndarray) -> None:
    """With is_transpose the moving tile is an identity matrix.

    Raises RuleViolation if the values of the moving tile are no identity matrix; applied if is_transpose is True.
    """
    if rows.shape[0] != rows.shape[1] or not np.array_equal(rows.astype(np.float32), np.eye(rows.shape[0])):
        raise RuleViolation(moving_is_identity, f"moving of shape {rows.shape} is not an identity matrix")


@rule("NKW-MATMUL-PERF-MODE-NAME", hint="nisa.matmul_perf_mode.double_row")
def names_perf_mode(perf_mode: Any) -> None:
    """perf_mode is a member of nisa.matmul_perf_mode.

    Raises RuleViolation otherwise.
    """
    if not isinstance(perf_mode, MatmulPerfMode):
        raise RuleViolation(names_perf_mode, f"perf_mode={perf_mode!r:.40}")
