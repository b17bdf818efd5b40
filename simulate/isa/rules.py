"""Rules that more than one instruction obeys; each is a function that raises RuleViolation, and carries its sentence.

Rules ask the hardware record for a limit and never for a chip by name. `operand`, `first` and `second` are the names of
operands for messages. Sources: the layout rules of the Trainium architecture guides and the parameter notes of the
nki.isa reference (NKI 0.6.0).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware, list_chips_with
from simulate.isa.enums import Engine
from simulate.memory import MemoryRegion, NkiTensor
from simulate.numerics import AluOperator, OperatorFamily

SBUF, PSUM = MemoryRegion.sbuf, MemoryRegion.psum
HBM = (MemoryRegion.private_hbm, MemoryRegion.shared_hbm)


def violations(*applications: tuple[Any, ...]) -> tuple[RuleViolation, ...]:
    """Apply rules, and return the violations that they raise instead of ending the planning.

    For rules of `simulate.level.UNDOCUMENTED` and `WARNED`: the plan's `undocumented` carries the violations to the
    launch, whose rules refuse or tolerate them.

    Args:
        applications: Tuples of a rule function and its arguments.
    """
    caught = []
    for apply, *arguments in applications:
        try:
            apply(*arguments)
        except RuleViolation as violation:
            caught.append(violation.with_traceback(None))
    return tuple(caught)


@rule("NKW-FLAG", limit="True or False", hint="pass True or False")
def is_flag(operand: str, value: Any) -> None:
    """An argument that switches a behaviour on or off is True or False.

    Raises RuleViolation otherwise.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise RuleViolation(is_flag, f"{operand}={value!r:.40}")


def flags(**values: Any) -> tuple[tuple[Any, ...], ...]:
    """Return (is_flag, name, value) for each keyword argument: the applications that `violations` takes."""
    return tuple((is_flag, operand, value) for operand, value in values.items())


@rule("NKW-OPERAND", hint="allocate it with nl.ndarray, or pass arrays as kernel arguments")
def is_tensor(operand: str, value: Any) -> None:
    """A tensor operand is an NkiTensor.

    Raises RuleViolation for another object, and OutOfBounds for a view that reaches outside its storage.
    """
    if type(value) is NkiTensor:
        return
    if isinstance(value, NkiTensor):
        value.check_bounds()
    else:
        raise RuleViolation(is_tensor, f"{operand} is {type(value).__name__} {value!r:.60}")


@rule("NKW-PARTITION-COUNT", hint="loop over tiles of at most 128 rows")
def partitions_within_limit(hardware: Hardware, operand: str, tile: NkiTensor) -> None:
    """The partition dimension of a tile has at most as many partitions as the chip's SBUF.

    Raises RuleViolation otherwise.
    """
    if tile.shape[0] > hardware.partitions:
        raise RuleViolation(
            partitions_within_limit,
            f"{operand} partition dimension {tile.shape[0]} exceeds maximum {hardware.partitions}",
            limit=f"{hardware.partitions} partitions on {hardware.name}",
        )


@rule(
    "NKW-PARTITION-START",
    hint="move the rows to an allowed start partition with nc_stream_shuffle, a matmul or a DMA",
)
def starts_on_quadrant(hardware: Hardware, operand: str, tile: NkiTensor) -> None:
    """More than 64 partitions start at partition 0, 33 to 64 at 0 or 64, up to 32 at 0, 32, 64 or 96.

    Raises RuleViolation otherwise.
    """
    if not can_start_at_partition(hardware, tile):
        start, count = first_partition(tile), tile.shape[0]
        raise RuleViolation(
            starts_on_quadrant,
            f"{operand} covers partitions {start} to {start + count - 1}",
            limit=f"start partition a multiple of {_start_step(count)} for {count} partitions",
        )


def can_start_at_partition(hardware: Hardware, tile: NkiTensor) -> bool:
    """Return whether an engine can access a tile's partitions from its first one on.

    More than 64 partitions must start at 0, 33 to 64 at 0 or 64, up to 32 at a multiple of 32, and end on the chip.
    """
    start, count = first_partition(tile), tile.shape[0]
    return start % _start_step(count) == 0 and start + count <= hardware.partitions


def _start_step(count: int) -> int:
    return 128 if count > 64 else 64 if count > 32 else 32


@rule(
    "NKW-PARTITION-STRIDE",
    limit="a partition step of 1",
    hint="have the DMA that loads them bring the rows together, as src=x[0:n:step]",
)
def partitions_are_consecutive(operand: str, tile: NkiTensor) -> None:
    """An engine accesses consecutive partitions; only a DMA can step over some.

    Raises RuleViolation otherwise.
    """
    row = tile.storage.nbytes // tile.storage.shape[0]
    step = tile.strides[0] * tile.dtype.storage.itemsize
    if tile.shape[0] > 1 and step != row:
        raise RuleViolation(
            partitions_are_consecutive,
            f"{operand} takes partitions in steps of {step / row:g} from {first_partition(tile)} on",
        )


@rule("NKW-FREE-SIZE", hint="split the free dimension over several instructions")
def free_size_within_limit(hardware: Hardware, operand: str, tile: NkiTensor) -> None:
    """An operand has at most 64K elements per partition in SBUF and 4K in PSUM (gen4: 8K of 16 bits).

    The limit of PSUM is its size, so repetitions (dims of stride 0) do not count there; 64K elements bind any operand.

    Raises RuleViolation otherwise.
    """
    limit, elements = hardware.free_elements_max_sbuf, tile.free_size
    if tile.buffer is PSUM and elements <= limit:
        limit = hardware.free_elements_max_psum
        if hardware.matmul_bf16_destination and tile.dtype.itemsize == 2:
            limit = hardware.psum_bytes_per_partition // 2
        if elements > limit:
            elements = _stored_elements(tile)
    if elements > limit:
        raise RuleViolation(
            free_size_within_limit,
            f"{operand} has {elements} elements per partition",
            limit=f"{limit} in {tile.buffer.value}",
        )


def _stored_elements(tile: NkiTensor) -> int:
    """Return the elements per partition that take memory, without repetitions by dims of stride 0."""
    return math.prod(size for size, stride in zip(tile.shape[1:], tile.strides[1:]) if stride)


@rule("NKW-DIMS", hint="flatten dims that are contiguous, or loop over one of them")
def dims_within_limit(hardware: Hardware, operand: str, tile: NkiTensor) -> None:
    """An engine accesses at most four free dimensions.

    Raises RuleViolation otherwise.
    """
    if tile.ndim - 1 > hardware.access_pattern_free_dims_max:
        raise RuleViolation(
            dims_within_limit,
            f"{operand} has {tile.ndim - 1} free dims",
            limit=f"{hardware.access_pattern_free_dims_max} on {hardware.name}",
        )


@rule("NKW-DIM-SIZE", hint="split it into two dims with reshape")
def dim_size_within_limit(hardware: Hardware, operand: str, tile: NkiTensor) -> None:
    """An engine counts the elements of one free dimension with 16 bits: at most 65535.

    Kernels of nki-library call it the hardware's limit too. A DMA is not bound: it is cut into descriptors.

    Raises RuleViolation otherwise.
    """
    largest = max(tile.shape[1:])
    if largest > hardware.access_pattern_size_max:
        raise RuleViolation(
            dim_size_within_limit,
            f"{operand} has a free dim of {largest} elements",
            limit=f"{hardware.access_pattern_size_max} on {hardware.name}",
        )


@rule("NKW-STRIDE", hint="loop over that dim, or lay the tile out with shorter rows")
def strides_within_limit(hardware: Hardware, operand: str, tile: NkiTensor) -> None:
    """An engine steps through a free dimension with a signed 16-bit stride: at most 32767 elements.

    A dim that continues the dim inside it needs no stride of its own. A DMA is not bound: a descriptor has an address.

    Raises RuleViolation otherwise.
    """
    inner = 0
    for extent, stride in zip(reversed(tile.shape[1:]), reversed(tile.strides[1:])):
        if extent == 1:
            continue
        if stride != inner and abs(stride) > hardware.access_pattern_stride_max_elements:
            raise RuleViolation(
                strides_within_limit,
                f"{operand} has a stride of {stride} {tile.dtype} elements",
                limit=f"{hardware.access_pattern_stride_max_elements} on {hardware.name}",
            )
        inner = extent * stride


@rule("NKW-BUFFER")
def lies_in(operand: str, tile: NkiTensor, *allowed: MemoryRegion) -> None:
    """An operand lies in a memory that the instruction's engine reaches.

    Raises RuleViolation unless the operand is in one of the memories `allowed`.
    """
    if tile.buffer not in allowed:
        names = " or ".join(region.value for region in allowed)
        raise RuleViolation(
            lies_in,
            f"{operand} lies in {tile.buffer.value}",
            limit=names,
            hint=_way_into(tile.buffer, allowed),
        )


def _way_into(actual: MemoryRegion, allowed: tuple[MemoryRegion, ...]) -> str:
    if not actual.on_chip:
        return "load it into SBUF with nisa.dma_copy first"
    if actual is PSUM:
        return "copy it to SBUF with nisa.tensor_copy first"
    return "allocate it with buffer=" + " or ".join(f"nl.{region.value}" for region in allowed)


@rule("NKW-INDIRECT", hint="gather it with nisa.dma_copy")
def not_indirect(operand: str, tile: NkiTensor) -> None:
    """Only the operands that the documentation lists may be addressed at run time.

    Raises RuleViolation if the operand's address is read at run time; planners apply it to operands that are not
    listed.
    """
    if tile.dynamic is not None:
        raise RuleViolation(not_indirect, f"{operand} has an address that is read at run time")


def check_tile(
    hardware: Hardware, operand: str, tile: Any, *allowed: MemoryRegion, indirect: bool = False
) -> None:
    """Check the layout rules of an on-chip operand; raise RuleViolation if one is broken.

    One run-time offset for the whole tile, as `.ap(scalar_offset=…)` and `.select` give, is a register in the access
    pattern of any engine and always allowed.

    Args:
        hardware: Record of the chip.
        operand: Name of the operand, for messages.
        tile: The operand as the kernel gives it.
        allowed: Memories in which it may be; none for SBUF and PSUM.
        indirect: Whether the reference lists the operand for tensor indirection (`.indirect`).
    """
    is_tensor(operand, tile)
    if tile.buffer not in (allowed or (SBUF, PSUM)):
        lies_in(operand, tile, *(allowed or (SBUF, PSUM)))
    partitions_within_limit(hardware, operand, tile)
    starts_on_quadrant(hardware, operand, tile)
    if tile.dynamic is None:
        partitions_are_consecutive(operand, tile)
    free_size_within_limit(hardware, operand, tile)
    if tile.ndim - 1 > hardware.access_pattern_free_dims_max:
        dims_within_limit(hardware, operand, tile)
    if max(tile.shape) > hardware.access_pattern_size_max:
        dim_size_within_limit(hardware, operand, tile)
    steps, step_max = tile.strides[1:], hardware.access_pattern_stride_max_elements
    if max(steps) > step_max or min(steps) < -step_max:
        strides_within_limit(hardware, operand, tile)
    if tile.dynamic is not None and tile.dynamic.per_partition:
        if not (indirect and tile.dynamic.group):
            not_indirect(operand, tile)
        indirect_on_chip(hardware, operand)


def check_unpacked(hardware: Hardware, *allowed: MemoryRegion, indirect: bool = False, **tiles: Any) -> None:
    """Check the layout rules of several on-chip operands as `check_tile`, and that none has a packed dtype.

    Args:
        hardware: Record of the chip.
        allowed: Memories in which they may be; none for SBUF and PSUM.
        indirect: Whether the reference lists the operands for tensor indirection (`.indirect`).
        tiles: The operands by name.
    """
    for operand, tile in tiles.items():
        check_tile(hardware, operand, tile, *allowed, indirect=indirect)
        not_packed(operand, tile)


@rule("NKW-INDIRECT-CHIP", hint="gather with nisa.local_gather or nisa.nc_n_gather")
def indirect_on_chip(hardware: Hardware, operand: str) -> None:
    """Tensor indirection, .indirect(index), exists from gen4 on.

    Raises RuleViolation otherwise.
    """
    if not hardware.indirect_views:
        raise RuleViolation(indirect_on_chip, f"{operand}.indirect(…) on {hardware.name}")


@rule("NKW-ENGINE", hint="leave engine=nisa.engine.unknown, or name one of these")
def engine_can(engine: Engine, *allowed: Engine) -> None:
    """An instruction runs on one of the engines that implement it on this chip.

    Raises RuleViolation if the engine is not among those `allowed`.
    """
    if engine not in allowed:
        raise RuleViolation(
            engine_can,
            f"engine={engine.name if isinstance(engine, Engine) else engine!r}",
            limit=", ".join(e.name for e in allowed),
        )


@rule("NKW-GPSIMD-PSUM", hint="copy it to SBUF first, or let the Vector engine do it")
def gpsimd_stays_in_sbuf(engine: Engine, **tiles: Any) -> None:
    """GpSimd reaches SBUF only.

    Raises RuleViolation if the engine is GpSimd and one of the tiles is in PSUM; other values than tiles pass.
    """
    if engine is Engine.gpsimd:
        for operand, tile in tiles.items():
            if isinstance(tile, NkiTensor) and tile.buffer is PSUM:
                raise RuleViolation(gpsimd_stays_in_sbuf, f"{operand} lies in psum")


@rule(
    "NKW-PARTITIONS-AGREE",
    hint="slice both operands to the same rows; there is no broadcasting over partitions",
)
def same_partitions(first: str, tile: NkiTensor, second: str, other: NkiTensor) -> None:
    """All operands of an instruction have the same number of partitions.

    Raises RuleViolation if two operands differ; `first` and `second` are their names.
    """
    rows, other_rows = tile.shape[0], other.shape[0]
    if rows != other_rows:
        hint = ""
        if 1 in (rows, other_rows):
            hint = format_row_hint(first if rows == 1 else second, max(rows, other_rows))
        raise RuleViolation(
            same_partitions, f"{first} has {rows} partitions, {second} has {other_rows}", hint=hint
        )


def format_row_hint(operand: str, partitions: int) -> str:
    """Return the hint that says how to repeat an operand of one row over `partitions` partitions."""
    return (
        f"{operand} has one row, which engines do not repeat: load it into {partitions} partitions with "
        f"nl.load(row.broadcast(0, {partitions})), row being the (1, N) tensor in HBM"
    )


@rule("NKW-ELEMENTS-AGREE", hint="slice or broadcast the free dims so that the counts agree")
def same_free_size(first: str, tile: NkiTensor, second: str, other: NkiTensor) -> None:
    """Operands are streamed element by element, so they have the same number of elements per partition.

    Raises RuleViolation if two operands differ; `first` and `second` are their names.
    """
    size, other_size = tile.free_size, other.free_size
    if size != other_size:
        hint = ""
        if 1 in (size, other_size) and tile.shape[0] == other.shape[0]:
            column = first if size == 1 else second
            hint = (
                f"{column} has one value per partition: give it as operand0 to nisa.tensor_scalar, or repeat it with "
                f"{column}.broadcast(1, {max(size, other_size)})"
            )
        raise RuleViolation(
            same_free_size,
            f"{first} has {size} elements per partition, {second} has {other_size}",
            hint=hint,
        )


def same_elements(first: str, tile: NkiTensor, second: str, other: NkiTensor) -> None:
    """Raise RuleViolation unless two tiles have equally many partitions and elements per partition; dims may differ."""
    if tile.shape != other.shape:
        same_partitions(first, tile, second, other)
        same_free_size(first, tile, second, other)


@rule("NKW-VECTOR-OPERAND", hint="take a column t[:, i:i+1] or reduce the free dim to one element")
def is_column(operand: str, tile: NkiTensor, like: NkiTensor) -> None:
    """A vector operand is a (P, 1) tile: one value per partition, repeated along the free dims.

    Raises RuleViolation if the tile has more elements per partition than one, or not as many partitions as `like`.
    """
    if tile.free_size != 1 or tile.shape[0] != like.shape[0]:
        hint = ""
        if tile.shape[0] == 1:
            hint = format_row_hint(operand, like.shape[0])
            if tile.free_size == like.free_size > 1:
                hint += "; nisa.tensor_tensor then combines it with data"
        raise RuleViolation(
            is_column,
            f"{operand} has shape {tile.shape}, data has {like.shape[0]} partitions",
            limit=f"({like.shape[0]}, 1)",
            hint=hint,
        )


@rule("NKW-ONE-PSUM-INPUT", hint="copy one of them to SBUF first")
def at_most_one_in_psum(first: str, tile: NkiTensor, second: str, other: NkiTensor) -> None:
    """Two streamed inputs may not both lie in PSUM.

    Raises RuleViolation if both are in PSUM.
    """
    if tile.buffer is PSUM and other.buffer is PSUM:
        raise RuleViolation(at_most_one_in_psum, f"{first} and {second} both lie in psum")


@rule("NKW-SAME-DTYPE", hint="cast with nisa.tensor_copy before or after")
def same_dtype(first: str, tile: NkiTensor, second: str, other: NkiTensor) -> None:
    """The instruction moves bits, so source and destination have the same dtype.

    Raises RuleViolation otherwise.
    """
    if tile.dtype != other.dtype:
        raise RuleViolation(same_dtype, f"{first} is {tile.dtype}, {second} is {other.dtype}")


@rule("NKW-DTYPE-ALLOWED", hint="cast it with nisa.tensor_copy")
def dtype_among(operand: str, tile: NkiTensor, *allowed: str) -> None:
    """An operand has one of the dtypes that the instruction takes.

    Raises RuleViolation if the dtype is not among those `allowed`.
    """
    if tile.dtype not in allowed:
        raise RuleViolation(dtype_among, f"{operand} is {tile.dtype}", limit=", ".join(allowed))


@rule("NKW-PACKED-DTYPE", hint="view it as an integer dtype to move bits")
def not_packed(operand: str, tile: NkiTensor) -> None:
    """The x4 dtypes are legal only for nc_matmul_mx, quantize_mx, memset to zero, plain copies and views.

    Raises RuleViolation if the dtype is an x4 one; planners of all other instructions apply it.
    """
    if tile.dtype.is_packed:
        raise RuleViolation(not_packed, f"{operand} is {tile.dtype}")


@rule(
    "NKW-BITVEC-INTEGER",
    limit="integer dtypes of one size",
    hint="view float tiles as an integer dtype with .view",
)
def bitvec_takes_integers(operator: AluOperator, **tiles: NkiTensor) -> None:
    """Bitvec operators work on integer dtypes only, on their bits, without a cast.

    Raises RuleViolation if a tile is no integer tile, or their dtypes differ in size.
    """
    dtypes = {operand: tile.dtype for operand, tile in tiles.items()}
    if (
        any(not dtype.is_integer for dtype in dtypes.values())
        or len({d.itemsize for d in dtypes.values()}) > 1
    ):
        raise RuleViolation(
            bitvec_takes_integers,
            f"{operator.name} with " + ", ".join(f"{operand} {dtype}" for operand, dtype in dtypes.items()),
        )


@rule("NKW-OPERATOR-FAMILY", hint="use two instructions")
def one_operator_family(op0: AluOperator, op1: AluOperator) -> None:
    """op0 and op1 of one instruction are both arithmetic or both bitvec.

    Raises RuleViolation if the families differ.
    """
    if op0.family is not op1.family:
        raise RuleViolation(
            one_operator_family, f"op0={op0.name} is {op0.family.value}, op1={op1.name} is {op1.family.value}"
        )


@rule("NKW-OPERATOR-CHIP", hint="compose it from operators this chip has")
def operator_on_chip(hardware: Hardware, operand: str, operator: AluOperator) -> None:
    """Some operators exist on later generations only.

    Raises RuleViolation if the chip has no engine with the operator.
    """
    if not operator.exists_on(hardware):
        raise RuleViolation(
            operator_on_chip,
            f"{operand}={operator.name} on {hardware.name}",
            limit=" or ".join(list_chips_with(operator.exists_on)),
        )


@rule("NKW-REDUCTION-OPERATOR", hint="nl.add, nl.maximum or nl.minimum")
def reduces(operand: str, operator: AluOperator) -> None:
    """A reduction uses add, subtract, multiply, maximum, minimum or a logical or bitwise and, or, xor.

    Raises RuleViolation for any other operator.
    """
    if not operator.reducible:
        raise RuleViolation(reduces, f"{operand}={operator.name}")


@rule("NKW-DEVICE-OPERATOR", hint="use nisa.activation")
def binary(operand: str, operator: AluOperator) -> None:
    """A two-operand slot takes a two-operand operator.

    Raises RuleViolation otherwise.
    """
    if operator.arity != 2:
        raise RuleViolation(binary, f"{operand}={operator.name} takes one operand")


def is_bitvec(operator: AluOperator) -> bool:
    """Return whether an operator belongs to the bitvec family, which works on raw bits."""
    return operator.family is OperatorFamily.bitvec


def first_partition(tile: NkiTensor) -> int:
    """Return the number of the partition at which an on-chip view starts within its allocation."""
    storage = tile.storage
    per_partition = storage.nbytes // storage.shape[0]
    return tile.offset * tile.dtype.storage.itemsize // per_partition
