"""Instructions that work on whole rows or tiles: no mask beyond slicing, and a result of another shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simulate.beta1.elementwise import elementwise, is_tile
from simulate.beta1.isa_select import no_mask
from simulate.beta1.masks import normalised
from simulate.beta1.operators import alu, operator
from simulate.beta1.program import current, issue
from simulate.beta1.region import Region
from simulate.beta1.tile import Tile, defer, nki_tensor
from simulate.errors import InvalidArgument
from simulate.isa.enums import DgeMode, OobMode, ReduceCmd
from simulate.memory import MemoryRegion

_SBUF = (MemoryRegion.sbuf,)
_STATISTICS, _MEAN_AND_VARIANCE, _SLOTS = 6, 2, 8


def _returning(
    instruction: str,
    shape: tuple[int, ...],
    dtype: Any,
    given: Any,
    tiles: dict[str, Any],
    /,
    **attributes: Any,
) -> Tile:
    """The result of an instruction that is issued once, on its operands as they are."""

    def emit(dst: Region) -> None:
        operands = {name: nki_tensor(value) for name, value in tiles.items()}
        issue(instruction, dst=dst.view(), **operands, **attributes)

    return defer(shape, dtype, emit, dtype_given=given)


def tensor_tensor_scan(
    data0: Tile,
    data1: Tile,
    initial: Any,
    op0: Any,
    op1: Any,
    reverse0: bool = False,
    reverse1: bool = False,
    *,
    dtype: Any = None,
    mask: Any = None,
    name: str | None = None,
    **_: Any,
) -> Tile:
    """Per partition: s = op1(op0(data0[i], s), data1[i]), starting from `initial`."""
    attributes = {
        "op0": operator(op0),
        "op1": operator(op1),
        "reverse0": reverse0,
        "reverse1": reverse1,
        "name": name,
    }
    tiles = {"data0": data0, "data1": data1}
    return elementwise("tensor_tensor_scan", tiles, {"initial": initial}, attributes, dtype, mask)


def tensor_partition_reduce(
    op: Any, data: Tile, *, mask: Any = None, dtype: Any = None, name: str | None = None, **_: Any
) -> Tile:
    """op over the partitions, on GpSimd: a (1, …) tile."""
    no_mask("tensor_partition_reduce", mask)
    is_tile("data", data)
    shape = (1, *data.shape[1:])
    return _returning(
        "tensor_partition_reduce", shape, data.dtype, dtype, {"data": data}, op=operator(op), name=name
    )


def bn_stats(data: Tile, *, mask: Any = None, dtype: Any = None, name: str | None = None, **_: Any) -> Tile:
    """Counts, means and variances of the even and the odd elements, per partition."""
    no_mask("bn_stats", mask)
    is_tile("data", data)
    return _returning("bn_stats", (data.shape[0], _STATISTICS), data.dtype, dtype, {"data": data}, name=name)


def bn_aggr(data: Tile, *, mask: Any = None, dtype: Any = None, name: str | None = None, **_: Any) -> Tile:
    """Mean and variance out of several bn_stats, per partition."""
    no_mask("bn_aggr", mask)
    is_tile("data", data)
    return _returning(
        "bn_aggr", (data.shape[0], _MEAN_AND_VARIANCE), data.dtype, dtype, {"data": data}, name=name
    )


def max8(*, src: Tile, mask: Any = None, dtype: Any = None, name: str | None = None, **_: Any) -> Tile:
    """The eight largest values of each partition, descending."""
    no_mask("max8", mask)
    is_tile("src", src)
    return _returning("max8", (src.shape[0], _SLOTS), src.dtype, dtype, {"src": src}, name=name)


def nc_find_index8(
    *, data: Tile, vals: Tile, mask: Any = None, dtype: Any = None, name: str | None = None, **_: Any
) -> Tile:
    """Where each of eight values occurs in data, per partition; missing values and duplicates as in 0.6."""
    no_mask("nc_find_index8", mask)
    tiles = {"data": data, "vals": vals}
    return _returning("nc_find_index8", (data.shape[0], _SLOTS), "uint32", dtype, tiles, name=name)


def nc_match_replace8(
    *,
    data: Tile,
    vals: Tile,
    imm: float,
    dst_idx: Tile | None = None,
    mask: Any = None,
    dtype: Any = None,
    name: str | None = None,
    **_: Any,
) -> Tile:
    """data with the first match of each of eight values replaced; slots are taken in the order of 0.6."""
    no_mask("nc_match_replace8", mask)
    tiles = {"data": data, "vals": vals, "dst_idx": dst_idx}
    return _returning("nc_match_replace8", data.shape, data.dtype, dtype, tiles, imm=imm, name=name)


def local_gather(
    src_buffer: Tile,
    index: Tile,
    num_elem_per_idx: int = 1,
    num_valid_indices: int | None = None,
    *,
    mask: Any = None,
    name: str | None = None,
    **_: Any,
) -> Tile:
    """Elements of each partition named by the index list of its group of 16 partitions."""
    no_mask("local_gather", mask)
    partitions, available = src_buffer.shape[0], index.size // max(index.shape[0] // 16, 1)
    count = available if num_valid_indices is None else num_valid_indices
    return _returning(
        "local_gather",
        (partitions, count) if num_elem_per_idx == 1 else (partitions, count, num_elem_per_idx),
        src_buffer.dtype,
        None,
        {"src_buffer": src_buffer, "index": index},
        num_elem_per_idx=num_elem_per_idx,
        num_valid_indices=num_valid_indices,
        name=name,
    )


def nc_stream_shuffle(
    src: Tile, dst: Tile, shuffle_mask: Sequence[int], *, mask: Any = None, name: str | None = None, **_: Any
) -> None:
    """Move rows of src to the partitions of dst within each quadrant."""
    current().settle()
    no_mask("nc_stream_shuffle", mask)
    issue("nc_stream_shuffle", dst=dst.tensor, src=src.operand, shuffle_mask=shuffle_mask, name=name)


def sequence_bounds(*, segment_ids: Tile, dtype: Any = None, name: str | None = None, **_: Any) -> Tile:
    """First and last position of the segment that each element belongs to."""
    is_tile("segment_ids", segment_ids)
    shape = (segment_ids.shape[0], 2, segment_ids.size // segment_ids.shape[0])
    tiles = {"segment_ids": segment_ids}
    return _returning("sequence_bounds", shape, segment_ids.dtype, dtype, tiles, name=name)


def tensor_scalar_cumulative(
    *,
    src: Tile,
    dst: Tile,
    op0: Any,
    op1: Any,
    imm0: Any,
    imm1: Any = None,
    reduce_cmd: ReduceCmd = ReduceCmd.reset_reduce,
    mask: Any = None,
    name: str | None = None,
    **_: Any,
) -> None:
    """Per partition, in order: reg = op1(op0(src[i], imm0), reg); dst[i] = reg.

    imm1 counts with reduce_cmd load_reduce; its examples pass it with others as well.
    """
    current().settle()
    no_mask("tensor_scalar_cumulative", mask)
    issue(
        "tensor_scalar_cumulative",
        dst=dst.tensor,
        src=src.operand,
        op0=operator(op0),
        op1=operator(op1),
        imm0=nki_tensor(imm0),
        imm1=nki_tensor(imm1) if reduce_cmd is ReduceCmd.load_reduce else None,
        reduce_cmd=reduce_cmd,
        name=name,
    )


def gather_flattened(data: Tile, indices: Tile, *, mask: Any = None, dtype: Any = None, **_: Any) -> Tile:
    """data[p, indices[p, j]] over flattened free dims."""
    no_mask("gather_flattened", mask)
    is_tile("data", data)
    is_tile("indices", indices)
    return _returning(
        "nc_n_gather", indices.shape, data.dtype, dtype, {"data": data, "indices": indices}, name=None
    )


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
    """src with its dims in the order `axes`, by default all of them turned round, moved by the DMA engines.

    Two dims by default; (2, 1, 0) and (3, 1, 2, 0) for more.
    """
    no_mask("dma_transpose", mask)
    order = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}.get(src.ndim) if axes is None else tuple(axes)
    if order is None or sorted(order) != list(range(src.ndim)):
        raise InvalidArgument("NKW-BETA1-AXES", f"dma_transpose(axes={axes!r:.40}) of {src.shape}")
    attributes = {"axes": order, "dge_mode": dge_mode, "oob_mode": oob_mode, "name": name}
    shape = tuple(src.shape[dim] for dim in order)
    return _returning("dma_transpose", shape, src.dtype, dtype, {"src": src}, **attributes)


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
    """Copy between HBM and SBUF; a mask leaves the elements of dst that it does not select untouched.

    With dst_rmw_op (add) the elements are added to those of dst, as dma_compute does today.
    """
    program = current()
    program.settle()
    adds = dst_rmw_op is not None and alu(dst_rmw_op).name != "bypass"
    selected = normalised(mask)
    if adds:
        no_mask("dma_copy with dst_rmw_op", mask)
        target_view = dst.tensor
        issue(
            "dma_compute",
            dst=target_view,
            srcs=[target_view, src.operand],
            reduce_op=alu(dst_rmw_op),
            oob_mode=oob_mode,
            unique_indices=unique_indices,
            name=name,
        )
        return
    source, target = src.region, dst.region
    boxes = [None] if selected is None else selected.boxes(target.shape)
    for box in boxes:
        part, piece = (target, source) if box is None else (target.cut(box), source.cut(box))
        issue(
            "dma_copy",
            dst=part.view(),
            src=program.readable(piece),
            oob_mode=oob_mode,
            dge_mode=dge_mode,
            name=name,
        )
