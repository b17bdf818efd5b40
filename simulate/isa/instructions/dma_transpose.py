"""dma_transpose: transpose on the way into SBUF, also of rows named at run time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import dma_costs, rules
from simulate.isa.book import instruction
from simulate.isa.enums import DgeMode, Engine, OobMode
from simulate.isa.instructions.dma_copy import priority_on_chip
from simulate.isa.plan import Domain, Effects, Masked, Plan
from simulate.isa.shapes import count_contiguous_bytes
from simulate.memory import Dynamic, MemoryRegion, NkiTensor

_AXES = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}
_BLOCK = 16
_LAST_DIM_MAX = 128
_EFFECTS = Effects(transposes=True, rearranges=True)


@instruction
def dma_transpose(
    hardware: Hardware,
    dst: NkiTensor,
    src: NkiTensor,
    axes: Sequence[int] | None = None,
    priority: int | None = None,
    dge_mode: DgeMode = DgeMode.unknown,
    oob_mode: OobMode = OobMode.error,
    name: str | None = None,
) -> Plan:
    """Permute the dims of src into dst, dst's dim i being source dim axes[i]; bits are kept.

    src: 2 to 4 dims @ HBM or SBUF. dst: exactly the permuted shape @ SBUF, src's dtype. axes: (1, 0), (2, 1,
    0) or (3, 1, 2, 0), by the number of dims.

    Indirect (`.ap(vector_offset=indices)`, from gen3 on): indices [I, J] uint32 @ SBUF name rows of an HBM
    tensor; column after column they give the rows of src, as many as its dim 0. Then dtype, sizes and index
    shape are restricted as the rules below say, and descriptors come from GpSimd. With oob_mode `skip` the
    elements of a row out of range are left as they are in dst. hwdge transposes 16 rows of a 2-byte dtype; an
    older text asks for a last dim that is a multiple of 128, the current one for at most 128, which is taken.

    Raises RuleViolation, OutOfBounds. Cost: dma_costs.dma at the documented fraction of the DMA rate, from HBM or
    SBUF.
    """
    rules.check_tile(hardware, "dst", dst, MemoryRegion.sbuf)
    rules.is_tensor("src", src)
    rules.lies_in("src", src, *rules.HBM, MemoryRegion.sbuf)
    if src.buffer.on_chip:
        rules.partitions_within_limit(hardware, "src", src)
    rules.same_dtype("dst", dst, "src", src)
    order = _AXES.get(src.ndim, ())
    documented_axes(src, axes, order)
    permuted_shape(dst, src, order)
    if priority is not None:
        priority_on_chip(hardware, priority)
    by_row = src.dynamic is not None and src.dynamic.per_partition
    descriptors_from(dge_mode, by_row)
    skip_needs_indirect(oob_mode, src)
    if by_row:
        rows_on_chip(hardware)
        gathered_rows(src)
        index_list(src)
        reads, mode, trigger = _split_by_column(src), DgeMode.swdge, Engine.gpsimd
    else:
        reads, mode, trigger = (src,), DgeMode.none, Engine.sync
        if dge_mode is DgeMode.hwdge:
            hardware_transpose(hardware, src)
            mode = DgeMode.hwdge

    def compute(*operands: np.ndarray | Masked) -> tuple[np.ndarray | Masked]:
        values = np.concatenate(
            [operand.values if isinstance(operand, Masked) else operand for operand in operands]
        )
        if not any(isinstance(operand, Masked) for operand in operands):
            return (values.transpose(order),)
        masks = [
            operand.chosen if isinstance(operand, Masked) else np.ones(operand.shape, bool)
            for operand in operands
        ]
        return (Masked(values.transpose(order), np.concatenate(masks).transpose(order)),)

    width = src.dtype.itemsize
    piece = min(count_contiguous_bytes(src), src.shape[-1] * width)
    fraction = "dma_transpose_sbuf_fraction" if src.buffer.on_chip else "dma_transpose_hbm_fraction"
    total = src.size * width
    hbm_bytes = (2 - src.buffer.on_chip - dst.buffer.on_chip) * total
    cost = dma_costs.dma(
        hardware, trigger, mode, total, piece, True, hbm_bytes, result_bytes=total, fraction=fraction
    )
    return Plan(
        engine=Engine.dma,
        reads=reads,
        writes=(dst,),
        domain=Domain.bits,
        compute=compute,
        cost=cost,
        name=name,
        trigger=trigger,
        skip_out_of_range=oob_mode is OobMode.skip,
        undocumented=rules.violations((no_prepared_transpose, dge_mode)),
        effects=_EFFECTS,
    )


def _split_by_column(src: NkiTensor) -> tuple[NkiTensor, ...]:
    """Return views of src's rows, one for each column of the index tile that is used.

    The list of row numbers runs down the columns. Each view has a (count, 1) column of the index as its run-time
    address.
    """
    dynamic = src.dynamic
    assert dynamic is not None
    index, rows = dynamic.index, src.shape[0]
    gathers = []
    for number, first in enumerate(range(0, rows, index.shape[0])):
        count = min(index.shape[0], rows - first)
        column = Dynamic(index[:count, number : number + 1], dynamic.step, dynamic.extent, True)
        gathers.append(
            NkiTensor.from_storage(
                (count, *src.shape[1:]), src.dtype, src.storage, src.strides, src.offset, column
            )
        )
    return tuple(gathers)


@rule("NKW-DMA-TRANSPOSE-AXES", hint="permute the view, or use several transposes")
def documented_axes(src: NkiTensor, axes: Sequence[int] | None, order: tuple[int, ...]) -> None:
    """dma_transpose permutes two dims by (1, 0), three by (2, 1, 0) and four by (3, 1, 2, 0).

    Raises RuleViolation otherwise.
    """
    requested = tuple(axes) if isinstance(axes, (tuple, list)) else axes
    if not order or requested not in (None, order):
        raise RuleViolation(
            documented_axes, f"axes={axes} of {src.ndim} dims", limit="; ".join(map(str, _AXES.values()))
        )


@rule("NKW-DMA-TRANSPOSE-SHAPE", hint="allocate dst with that shape")
def permuted_shape(dst: NkiTensor, src: NkiTensor, order: tuple[int, ...]) -> None:
    """dst has the permuted shape of src, the number of dims included.

    Raises RuleViolation otherwise.
    """
    wanted = tuple(src.shape[dim] for dim in order)
    if dst.shape != wanted:
        raise RuleViolation(
            permuted_shape, f"dst is {dst.shape}, src is {src.shape}", limit=f"dst of shape {wanted}"
        )


@rule("NKW-DMA-TRANSPOSE-DGE", hint="leave dge_mode out")
def descriptors_from(mode: DgeMode, by_row: bool) -> None:
    """A direct dma_transpose takes dge_mode unknown or hwdge, an indirect one unknown or swdge.

    Raises RuleViolation otherwise.
    """
    # `no_prepared_transpose` judges `none` of a direct transpose.
    allowed = (DgeMode.unknown, DgeMode.swdge) if by_row else (DgeMode.unknown, DgeMode.hwdge, DgeMode.none)
    if mode not in allowed:
        raise RuleViolation(
            descriptors_from,
            f"dge_mode={mode.name if isinstance(mode, DgeMode) else mode!r}",
            limit=", ".join(one.name for one in allowed),
        )


@rule("NKW-DMA-TRANSPOSE-NONE", limit="unknown or hwdge", hint="leave dge_mode out")
def no_prepared_transpose(mode: DgeMode) -> None:
    """The reference of dma_transpose does not list dge_mode=none, descriptors that are prepared before the launch.

    The documentation's page on descriptor generation lists it.

    Raises RuleViolation if the mode is none.
    """
    if mode is DgeMode.none:
        raise RuleViolation(no_prepared_transpose, "dge_mode=none")


@rule("NKW-DMA-TRANSPOSE-SKIP", hint="oob_mode=nisa.oob_mode.error")
def skip_needs_indirect(oob_mode: OobMode, src: NkiTensor) -> None:
    """oob_mode skip is for a src that is addressed at run time.

    Raises RuleViolation otherwise.
    """
    if oob_mode is OobMode.skip and src.dynamic is None:
        raise RuleViolation(skip_needs_indirect, "oob_mode=skip with static addresses")


@rule("NKW-DMA-TRANSPOSE-HWDGE", hint="dge_mode=nisa.dge_mode.unknown")
def hardware_transpose(hardware: Hardware, src: NkiTensor) -> None:
    """hwdge, from gen3 on, transposes rows in blocks of 16, a 2-byte dtype, and a last dim of at most 128.

    Raises RuleViolation otherwise.
    """
    rows = src.shape[0]
    in_blocks = (
        rows == _BLOCK if src.ndim == 2 else rows in (1, 2, 4, 8, 16) and rows * src.shape[-2] % _BLOCK == 0
    )
    if not (
        hardware.hardware_dge and in_blocks and src.shape[-1] <= _LAST_DIM_MAX and src.dtype.itemsize == 2
    ):
        raise RuleViolation(hardware_transpose, f"src {src.shape} {src.dtype} on {hardware.name}")


@rule("NKW-DMA-TRANSPOSE-GATHER-CHIP", hint="gather with dma_copy, then nc_transpose")
def rows_on_chip(hardware: Hardware) -> None:
    """An indirect dma_transpose exists from gen3 on.

    Raises RuleViolation otherwise.
    """
    if not hardware.indirect_dma_transpose:
        raise RuleViolation(rows_on_chip, f"vector_offset on {hardware.name}")


@rule("NKW-DMA-TRANSPOSE-GATHER", hint="gather with dma_copy, then nc_transpose")
def gathered_rows(src: NkiTensor) -> None:
    """Gathered rows: a 2-byte dtype, blocks of 16 rows, a last dim up to 128, of 4 dims a middle one of 1.

    Raises RuleViolation otherwise.
    """
    thin = src.ndim != 4 or 1 in src.shape[1:3]
    if src.shape[0] % _BLOCK or src.shape[-1] > _LAST_DIM_MAX or src.dtype.itemsize != 2 or not thin:
        raise RuleViolation(gathered_rows, f"src {src.shape} {src.dtype}")


@rule(
    "NKW-DMA-TRANSPOSE-INDEX",
    hint="load the row numbers as (rows, 1) uint32 for up to 128 rows, else as (128, J)",
)
def index_list(src: NkiTensor) -> None:
    """The index is (I, J) uint32 in SBUF, I = 16, 32, ... 128, 128 if J > 1, I * J at least the rows.

    Raises RuleViolation otherwise.
    """
    assert src.dynamic is not None
    index = src.dynamic.index
    well_formed = (
        isinstance(index, NkiTensor)
        and index.ndim == 2
        and index.buffer is MemoryRegion.sbuf
        and index.dtype == "uint32"
        and _BLOCK <= index.shape[0] <= 128
        and index.shape[0] % _BLOCK == 0
        and (index.shape[1] == 1 or index.shape[0] == 128)
        and index.size >= src.shape[0]
    )
    if not well_formed:
        seen = index.describe() if isinstance(index, NkiTensor) else repr(index)
        raise RuleViolation(index_list, f"{seen} for {src.shape[0]} rows")
