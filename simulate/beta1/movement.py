"""`nl.load`, `nl.store` and other functions that move data between HBM and the chip, with masks.

A result is a tile whose instruction waits for its target: the tile of an assignment, else a fresh one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nkw.errors import InvalidArgument, RuleViolation, rule
from simulate.beta1.arithmetic import apply_binary, apply_unary, bring_to_sbuf
from simulate.beta1.elementwise import copy
from simulate.beta1.isa_matmul import nc_matmul
from simulate.beta1.isa_select import memset
from simulate.beta1.loops import LoopVariable
from simulate.beta1.masks import Box, Mask, no_mask, normalise_mask
from simulate.beta1.operators import find_alu_operator
from simulate.beta1.program import current, issue
from simulate.beta1.reductions import reduce, transpose
from simulate.beta1.region import Region
from simulate.beta1.tile import Tile, defer, defer_masked
from simulate.isa.enums import DgeMode, OobMode
from simulate.memory import MemoryRegion, NkiTensor, Storage
from simulate.numerics import as_dtype, from_float32


def load(src: Tile, *, mask: Any = None, dtype: Any = None, **_: Any) -> Tile:
    """Return a tile with a part of an HBM tensor, copied to SBUF by DMA; a 1-D part of n elements becomes (n, 1).

    Elements that the mask leaves out are undefined in a fresh tile, and keep their values in the target of an
    assignment. Raises RuleViolation if src is not in HBM.
    """
    lies_in_hbm("src", src)
    selected = normalise_mask(mask)
    shape = src.shape if src.ndim > 1 else (*src.shape, 1)
    source = src.region if src.ndim > 1 else Region.from_tensor(src.tensor.expand_dim(1))

    def emit(dst: Region) -> None:
        _copy(dst, source, selected)

    memories = (MemoryRegion.sbuf,)
    return defer(shape, src.dtype, emit, memories=memories, dtype_given=dtype, mask=selected)


def store(dst: Tile, value: Any, *, mask: Any = None, **_: Any) -> None:
    """Copy a tile, or a number, to a part of an HBM tensor by DMA. A tile in PSUM is copied to SBUF before.

    Elements that the mask leaves out stay unchanged.

    Raises:
        RuleViolation: dst is not in HBM, or value has another shape and either a mask or another number of elements.
    """
    program = current()
    lies_in_hbm("dst", dst)
    selected = normalise_mask(mask)
    if not isinstance(value, Tile):
        value = memset(dst.shape if dst.ndim > 1 else (*dst.shape, 1), value, dst.dtype)
    value = bring_to_sbuf(value)
    program.settle()
    source = value.region
    target = dst.region if dst.ndim == len(source.shape) else dst.region.reshaped(source.shape)
    if target is None or target.shape != source.shape:
        same_elements(dst, value, selected)
        issue("dma_copy", dst=dst.tensor, src=value.operand)
        return
    _copy(target, source, selected)


def _copy(dst: Region, src: Region, mask: Mask | None, **options: Any) -> None:
    """Copy the elements that a mask selects from src to dst by dma_copy, one instruction for each rectangle.

    Args:
        dst: The destination.
        src: The source, of the same shape.
        mask: The mask, None for all elements.
        options: Further arguments of dma_copy.
    """
    for box in [None] if mask is None else mask.boxes(dst.shape):
        to, source = (dst, src) if box is None else (dst.cut(box), src.cut(box))
        issue("dma_copy", dst=to.view(), src=current().readable(source), **options)


def load_transpose2d(src: Tile, *, mask: Any = None, dtype: Any = None, **_: Any) -> Tile:
    """Return a 2-D part of an HBM tensor transposed, in SBUF: loaded by DMA, then transposed by the Tensor engine.

    More than 128 rows are taken 128 at a time, into a fresh tile.
    """
    program, at_once = current(), current().core.hardware.partitions
    if src.ndim != 2 or src.shape[0] <= at_once or normalise_mask(mask) is not None:
        loaded = load(src, mask=mask, dtype=dtype)
        return copy(transpose(loaded))
    program.settle()
    rows, columns = src.shape
    result: Tile = program.tile.from_region(
        program.fresh((columns, rows), dtype or src.dtype, MemoryRegion.sbuf)
    )
    for start in range(0, rows, at_once):
        end = min(start + at_once, rows)
        result[:, start:end] = transpose(load(src[start:end, :], dtype=dtype))
    return result


def dma_transpose(
    src: Tile,
    *,
    axes: tuple[int, ...] | None = None,
    mask: Any = None,
    dtype: Any = None,
    dge_mode: DgeMode = DgeMode.unknown,
    oob_mode: OobMode = OobMode.error,
    name: str | None = None,
    **_: Any,
) -> Tile:
    """Return src transposed by the DMA engines: dim i of the result is dim axes[i] of src.

    `axes` is by default (1, 0), (2, 1, 0) or (3, 1, 2, 0), by the number of dims. Raises InvalidArgument if it is no
    permutation of the dims, and RuleViolation for a mask.
    """
    no_mask("dma_transpose", mask)
    order = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}.get(src.ndim) if axes is None else tuple(axes)
    if order is None or sorted(order) != list(range(src.ndim)):
        raise InvalidArgument(
            "NKW-BETA1-AXES",
            f"dma_transpose(axes={axes!r:.40}) of {src.shape}; axes names each dim once, such as (1, 0), and may be "
            "left out for two to four dims",
        )

    def emit(dst: Region) -> None:
        issue(
            "dma_transpose",
            dst=dst.view(),
            src=src.operand,
            axes=order,
            dge_mode=dge_mode,
            oob_mode=oob_mode,
            name=name,
        )

    return defer(tuple(src.shape[dim] for dim in order), src.dtype, emit, dtype_given=dtype)


def dma_copy(
    *,
    dst: Tile,
    src: Tile,
    mask: Any = None,
    dst_rmw_op: Any = None,
    unique_indices: bool = True,
    oob_mode: OobMode = OobMode.error,
    dge_mode: DgeMode = DgeMode.unknown,
    name: str | None = None,
    **_: Any,
) -> None:
    """Copy src to dst, between HBM and SBUF; a mask leaves the elements of dst that it does not select unchanged.

    With dst_rmw_op (add) the elements are combined with those of dst, as dma_compute does in NKI 0.6; a mask is then
    refused.
    """
    current().settle()
    selected = normalise_mask(mask)
    if dst_rmw_op is not None and find_alu_operator(dst_rmw_op).name != "bypass":
        no_mask("dma_copy with dst_rmw_op", mask)
        target = dst.tensor
        issue(
            "dma_compute",
            dst=target,
            srcs=[target, src.operand],
            reduce_op=find_alu_operator(dst_rmw_op),
            oob_mode=oob_mode,
            unique_indices=unique_indices,
            name=name,
        )
        return
    _copy(dst.region, src.region, selected, oob_mode=oob_mode, dge_mode=dge_mode, name=name)


def loop_reduce(
    x: Tile, op: Any, loop_indices: Any, *, dtype: Any = None, mask: Any = None, **_: Any
) -> Tile:
    """Return the running reduction of x over loops: `t[...] = nl.loop_reduce(x, op, [i])`.

    t is x in the first iteration, and op(t, x) in later ones. Raises RuleViolation unless loop_indices are variables
    of the loops, and InvalidArgument if the result is not assigned to a tile.
    """
    reduces_loops(loop_indices)
    first = all(index.first for index in loop_indices)
    reduction = find_alu_operator(op)

    def run(region: Region, box: Box) -> None:
        source = current().readable(x.region.cut(box))
        if first:
            issue("tensor_copy", dst=region.view(), src=source)
        else:
            issue("tensor_tensor", dst=region.view(), data1=region.view(), data2=source, op=reduction)

    return defer_masked(x.shape, x.dtype, run, mask, dtype_given=dtype, target_needed=True)


def matmul(x: Tile, y: Tile, *, transpose_x: bool = False, mask: Any = None, **_: Any) -> Tile:
    """Return x @ y as a float32 tile in PSUM; with transpose_x, x.T @ y, which needs no transpose on the chip.

    Operands in PSUM are copied to SBUF before.
    """
    stationary = bring_to_sbuf(x) if transpose_x else bring_to_sbuf(transpose(x))
    return nc_matmul(stationary, bring_to_sbuf(y), mask=mask)


def shared_constant(constant: Any, dtype: Any = None, **_: Any) -> Tile:
    """Return an HBM tensor with the contents of an array, which is known when the kernel is specialised.

    Raises InvalidArgument for a scalar or an empty array.
    """
    values = np.asarray(constant)
    if values.ndim == 0 or not values.size:
        raise InvalidArgument(
            "NKW-SHAPE",
            f"nl.shared_constant of an array of shape {values.shape}; pass an array of at least one dim and element",
        )
    core = current().core
    element = core.stored_dtype(as_dtype(values.dtype if dtype is None else dtype))
    content = (
        from_float32(values.astype(np.float32), element)
        if element.is_float
        else values.astype(element.storage)
    )
    storage = Storage(
        values.shape, element, MemoryRegion.private_hbm, "shared_constant", np.ascontiguousarray(content)
    )
    core.rank.tensors.add(storage)
    return current().tile.from_region(Region.from_tensor(NkiTensor(values.shape, element, storage)))


def mean_square_norm(x: Tile, w: Tile, axis: Any, n: int, epsilon: float = 1e-6, dtype: Any = None) -> Tile:
    """Return the RMS norm x / sqrt(sum(x * x over axis) / n + epsilon) * w; without `dtype` in the dtype of x."""
    total = reduce(np.add, apply_binary("multiply", x, x, "float32"), axis, "float32", keepdims=True)
    inverse = apply_unary("rsqrt", apply_binary("add", apply_binary("multiply", total, 1.0 / n), epsilon))
    return apply_binary("multiply", apply_binary("multiply", x, inverse, "float32"), w, dtype or x.dtype)


@rule("NKW-BETA1-HBM")
def lies_in_hbm(operand: str, tile: Any) -> None:
    """nl.load reads HBM and nl.store writes it; between SBUF and PSUM tiles are copied by assignment.

    Raises RuleViolation unless `tile` is a Tile in HBM; `operand` is its parameter, for the message.
    """
    if not isinstance(tile, Tile) or tile.buffer.on_chip:
        seen = f"{tile.shape} in {tile.buffer.value}" if isinstance(tile, Tile) else f"{tile!r:.60}"
        raise RuleViolation(lies_in_hbm, f"{operand} is {seen}")


@rule("NKW-BETA1-STORE-SHAPE")
def same_elements(dst: Tile, value: Tile, mask: Any) -> None:
    """A stored tile has the shape of its destination, or, without a mask, as many elements.

    Raises RuleViolation if there is a mask, or the numbers of elements differ. Called for a tile of another shape
    than its destination.
    """
    if mask is not None or dst.size != value.size:
        raise RuleViolation(same_elements, f"{value.shape} to {dst.shape}")


@rule("NKW-BETA1-LOOP-INDICES")
def reduces_loops(loop_indices: Any) -> None:
    """loop_reduce names the variables of the loops it reduces over, as nl.affine_range gives them.

    Raises RuleViolation unless `loop_indices` is a non-empty sequence of LoopVariables.
    """
    if not loop_indices or not all(isinstance(index, LoopVariable) for index in loop_indices):
        raise RuleViolation(reduces_loops, f"loop_indices={loop_indices!r:.60}", hint="loop_indices=[k]")
