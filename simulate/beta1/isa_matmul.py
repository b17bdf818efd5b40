"""Instructions of the Tensor engine in Beta 1's form, which returns the result as a tile.

Results are pending: the instruction is issued into the target of an assignment, else into a fresh tile.
"""

from __future__ import annotations

from typing import Any

from nkw.errors import Unsupported
from simulate.beta1.arithmetic import bring_to_sbuf
from simulate.beta1.elementwise import is_tile
from simulate.beta1.masks import normalise_mask
from simulate.beta1.program import current, issue
from simulate.beta1.reductions import transpose
from simulate.beta1.region import Region
from simulate.beta1.tile import Tile, defer
from simulate.isa.enums import Engine, MatmulPerfMode
from simulate.memory import MemoryRegion, views

_PERF_MODES = {"double_row_gen3": MatmulPerfMode.double_row}


def nc_matmul(
    stationary: Tile,
    moving: Tile,
    *,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    tile_position: tuple[int, ...] = (),
    tile_size: tuple[int, ...] = (),
    perf_mode: Any = MatmulPerfMode.none,
    mask: Any = None,
    dtype: Any = None,
    name: str | None = None,
    **_: Any,
) -> Tile:
    """Return stationary.T @ moving as a float32 tile in PSUM. An assignment overwrites its target, `+=` adds to it.

    The first `+=` to an element overwrites it. The Tensor engine reads SBUF: an operand in PSUM is copied to SBUF
    before, as the compiler did. With is_transpose into a PSUM tile of another dtype than the operand's, which the
    transpose mode of later chips does not write, the product with the identity is an ordinary matmul. A mask may use
    loop variables only; if it selects nothing, no matmul is issued.

    Raises:
        RuleViolation: An operand is no tile on chip.
        Unsupported: The mask depends on positions in the operands.
    """
    is_tile("stationary", stationary)
    is_tile("moving", moving)
    skip = _is_skipped("nc_matmul", mask)
    mode = _PERF_MODES.get(perf_mode, perf_mode) or MatmulPerfMode.none
    double = mode in (MatmulPerfMode.double_row, "double_row")
    first = 2 if double else 1
    stationary_tile, moved = bring_to_sbuf(stationary), bring_to_sbuf(moving)
    shape = (views.count(stationary.shape[first:]), views.count(moving.shape[first:]))
    exact = current().core.hardware.matmul_transpose_mode

    def matmul(dst: Region, accumulate: bool | None) -> None:
        if skip:
            return
        moves_bits = is_transpose and (dst.tensor.dtype == stationary_tile.dtype or not exact)
        issue(
            "nc_matmul",
            dst=dst.view(),
            stationary=stationary_tile.operand,
            moving=moved.operand,
            is_stationary_onezero=is_stationary_onezero,
            is_moving_onezero=is_moving_onezero,
            is_transpose=moves_bits,
            accumulate=accumulate,
            tile_position=tile_position,
            tile_size=tile_size,
            perf_mode=mode,
            name=name,
        )

    return defer(
        shape,
        "float32",
        lambda dst: matmul(dst, False),
        MemoryRegion.psum,
        (MemoryRegion.psum,),
        dtype_given=dtype,
        mask=True if skip else None,
        accumulate=lambda dst: matmul(dst, None),
    )


def nc_transpose(
    data: Tile,
    *,
    mask: Any = None,
    dtype: Any = None,
    engine: Engine = Engine.unknown,
    name: str | None = None,
    **_: Any,
) -> Tile:
    """Return data transposed, all free dims as one: from the Tensor engine in PSUM, with engine=vector in SBUF.

    A mask may use loop variables only; if it selects nothing, nothing is issued. Raises Unsupported for another mask.
    """
    is_tile("data", data)
    shape = (views.count(data.shape[1:]), data.shape[0])
    if _is_skipped("nc_transpose", mask):
        return defer(shape, data.dtype, lambda dst: None, MemoryRegion.psum, dtype_given=dtype, mask=mask)
    if engine is not Engine.vector:
        return transpose(data, dtype, name)

    def emit(dst: Region) -> None:
        issue("nc_transpose", dst=dst.view(), data=data.operand, engine=engine, name=name)

    return defer(shape, data.dtype, emit, dtype_given=data.dtype)


def _is_skipped(instruction: str, mask: Any) -> bool:
    """Return whether a mask of loop variables only, such as `mask=i * 128 < n`, excludes the instruction.

    Raises Unsupported if the mask depends on positions in the operands.
    """
    selected = normalise_mask(mask)
    if selected is None:
        return False
    if any(any(condition.steps) for condition in selected.conditions):
        raise Unsupported(
            "NKW-BETA1-TENSOR-ENGINE-MASK",
            f"{instruction} with a mask over its operands cannot be simulated: which of their axes it means "
            "is not documented; slice the operands",
        )
    return not selected.boxes((1,))
