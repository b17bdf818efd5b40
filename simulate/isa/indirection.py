"""Tensor indirection in an instruction: which engine does it, and where the tiles must start.

The reference states the base partitions for operands with a manual address; here every tile has one.
"""

from __future__ import annotations

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import rules
from simulate.isa.enums import Engine
from simulate.memory import Dynamic, MemoryRegion, NkiTensor
from simulate.memory.indirection import TENSOR_ENGINE_GROUP, count_offsets_per_group, offsets_in_index


def is_indirect(tile: NkiTensor) -> bool:
    """Return whether a tile is a view made by .indirect."""
    return tile.dynamic is not None and tile.dynamic.group > 0


def check(hardware: Hardware, engine: Engine, dst: NkiTensor, data: NkiTensor, *engines: Engine) -> None:
    """Check the rules of an instruction that gathers `data` (a view by .indirect) or scatters to such a view `dst`.

    Does nothing if neither is such a view.

    Args:
        hardware: Record of the chip.
        engine: Engine of the instruction.
        dst: Tile that is written.
        data: Tile that is read.
        engines: Engines that gather and scatter with this instruction; none if all do.

    Raises:
        RuleViolation: A rule is broken.
    """
    gathers, scatters = is_indirect(data), is_indirect(dst)
    if not (gathers or scatters):
        return
    if engines:
        rules.engine_can(engine, *engines)
    if gathers:
        check_gather(hardware, data)
    if scatters:
        _check_list(hardware, dst)
        scatters_into(engine, dst)
        if data.buffer is MemoryRegion.sbuf:
            starts_with_index("dst", dst, data)
        elif gathers:
            starts_with_index("dst", dst, _index(data))


def check_gather(hardware: Hardware, data: NkiTensor) -> None:
    """Check the rules of an operand that may be a view by .indirect; raise RuleViolation if one is broken."""
    if is_indirect(data):
        _check_list(hardware, data)
        starts_with_index("data", data, data)


def regroup_for_tensor_engine(tile: NkiTensor) -> NkiTensor:
    """Return an equal view whose groups have 32 partitions, as on the Tensor engine; a tile itself if not indirect."""
    dynamic = tile.dynamic
    if dynamic is None or not dynamic.group:
        return tile
    wide = Dynamic(dynamic.index, dynamic.step, dynamic.extent, True, TENSOR_ENGINE_GROUP)
    return NkiTensor.from_storage(tile.shape, tile.dtype, tile.storage, tile.strides, tile.offset, wide)


def _check_list(hardware: Hardware, tile: NkiTensor) -> None:
    assert tile.dynamic is not None
    offsets_in_index(
        tile.shape[1], count_offsets_per_group(tile.dynamic.index, tile.dynamic.group), tile.dynamic.index
    )
    index_on_quadrant(hardware, tile.dynamic.index)


def _index(tile: NkiTensor) -> NkiTensor:
    assert tile.dynamic is not None
    return tile.dynamic.index


@rule(
    "NKW-INDIRECT-QUADRANT", hint="allocate the index as a tile of its own from partition 0, 32, 64 or 96 on"
)
def index_on_quadrant(hardware: Hardware, index: NkiTensor) -> None:
    """The index of every .indirect view starts on a quadrant, a partition that is a multiple of 32.

    Raises RuleViolation if the index tile starts at another partition.
    """
    start = rules.first_partition(index)
    if start % hardware.partitions_per_quadrant:
        raise RuleViolation(
            index_on_quadrant,
            f"an index starts at partition {start}",
            limit=f"a multiple of {hardware.partitions_per_quadrant}",
        )


@rule("NKW-INDIRECT-START", hint="move the index to the data's partitions")
def starts_with_index(operand: str, tile: NkiTensor, data: NkiTensor) -> None:
    """Gathered data starts on the partition of its index, and the index of a scattered dst on that of the data.

    Raises RuleViolation if the index of `tile` and `data` start at different partitions.
    """
    first, second = rules.first_partition(_index(tile)), rules.first_partition(data)
    if first != second:
        raise RuleViolation(
            starts_with_index, f"the index of {operand} starts at partition {first}, the data at {second}"
        )


@rule("NKW-INDIRECT-SCATTER", hint="scatter into SBUF, or on the Vector engine")
def scatters_into(engine: Engine, dst: NkiTensor) -> None:
    """The Scalar engine cannot scatter into PSUM.

    Raises RuleViolation if the engine is Scalar and dst is in PSUM; planners apply it to a dst made by .indirect.
    """
    if engine is Engine.scalar and dst.buffer is MemoryRegion.psum:
        raise RuleViolation(scatters_into, f"dst {dst.describe()}")
