"""Gains from changing the matmuls: 16-bit operands, transposes by DMA.

An `Edit` holds the changes of a stream, whose events are the instructions of a launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from simulate.hardware import Hardware
from simulate.isa import costs, dma_costs
from simulate.isa.enums import DgeMode, Engine
from simulate.isa.plan import Cost
from simulate.memory import MemoryRegion
from simulate.profile.advice.edits import Edit, Uses, collect_uses
from simulate.profile.advice.transfers import find_load
from simulate.run.stream import Stream


def narrow_products(stream: Stream, hardware: Hardware) -> Iterator[Edit]:
    """Yield an edit that gives float32 matmuls and transposes on the Tensor engine 16-bit operands.

    Nothing is yielded without such instructions. Casts to float32 are left out. A tile that a DMA loads in
    float32 is cast by its DMA, at the slower rate of such DMAs.
    """
    edit, narrowed = Edit(stream), set[int]()
    for event in range(len(stream)):
        template = stream.template(event)
        cost = template.plan.cost
        if not cost.streamed_cycles or not any(
            template.operands[read].dtype == "float32" for read in template.reads
        ):
            continue
        reads = [template.operands[read] for read in template.reads]
        transpose, rows = not cost.flops, reads[0].shape[0] if len(reads) == 1 else reads[1].free_size
        depth, columns = reads[0].shape[0], reads[0].free_size
        narrow = costs.matmul(hardware, depth, columns, rows, False, transpose, cost.stationary, cost.cells)
        edit.set_cost(event, narrow)
        tensors = stream.tensors_of(event)
        narrowed |= {tensors[read] for read in template.reads}
    if not edit.events:
        return
    used = collect_uses(stream)
    for tile in sorted(narrowed):
        if all(writes or event in edit.events for event, writes in used[tile]):
            _narrow_tile(edit, hardware, tile, used[tile])
    yield edit


def _narrow_tile(edit: Edit, hardware: Hardware, tile: int, events: Sequence[tuple[int, bool]]) -> None:
    """Change a float32 tile that only matmuls and transposes read to 16 bits, in `edit`.

    A DMA that loads the tile casts instead. If a single cast of a whole 16-bit tile in SBUF writes the tile,
    the cast is left out, and readers access its source. Other writers keep their cost.

    Args:
        tile: Index of the tile in the stream.
        events: (event, whether it writes) of all accesses to the tile.
    """
    stream = edit.stream
    writers = [event for event, writes in events if writes]
    for event in writers:
        template = stream.template(event)
        source = template.operands[template.reads[0]] if template.reads else None
        if source is None:
            continue
        if template.plan.cost.dma is not None:
            if source.dtype.itemsize == 4:
                edit.set_cost(event, _cast_by_dma(template.plan.cost, hardware))
            continue
        source_tensor = stream.tensors_of(event)[template.reads[0]]
        is_whole = template.boxes[template.reads[0]][3:] == (0, stream.tensors[source_tensor].row_bytes)
        casts = (
            template.op == "tensor_copy" and source.dtype.itemsize == 2 and source.buffer is MemoryRegion.sbuf
        )
        if casts and is_whole and len(writers) == 1:
            edit.leave_out(event)
            for reader, writes in events:
                if not writes:
                    edit.rename(reader, tile, source_tensor, narrower=2)


def _cast_by_dma(cost: Cost, hardware: Hardware) -> Cost:
    """Return the cost of a DMA that also casts the bytes that it moves, given its cost without a cast."""
    dma = cost.dma
    assert dma is not None
    slowdown = max(hardware.dma_engine_bytes_per_ns / hardware.dma_cast_bytes_per_ns, 1.0)
    busy_ns = dma.busy_ns * slowdown
    return replace(
        cost, dma=replace(dma, busy_ns=busy_ns, transfer_ns=dma.transfer_ns + busy_ns - dma.busy_ns)
    )


def transpose_by_dma(stream: Stream, hardware: Hardware) -> Iterator[Edit]:
    """Yield an edit that replaces transposes of the Tensor engine, and their copies out of PSUM, by DMAs.

    Nothing is yielded without such transposes. The DMA reads HBM if the tile was loaded only for the
    transposes. Only 16-bit elements are moved, for which rates are documented.
    """
    edit, used = Edit(stream), collect_uses(stream)
    transposes_by_bank: dict[int, list[int]] = {}  # transposes into each PSUM tile
    for event in range(len(stream)):
        template = stream.template(event)
        if template.plan.cost.streamed_cycles and not template.plan.cost.flops:
            transposes_by_bank.setdefault(stream.tensors_of(event)[template.writes[0]], []).append(event)
    for bank, transposes in transposes_by_bank.items():
        copies = [event for event, writes in used[bank] if not writes]
        if {event for event, writes in used[bank] if writes} == set(transposes) and len(copies) == 1:
            template = stream.template(copies[0])
            target = template.operands[template.writes[0]]
            if template.op == "tensor_copy" and target.dtype.itemsize == 2:
                _replace_by_dma(edit, hardware, transposes, copies[0], used)
    if edit.events:
        yield edit


def _replace_by_dma(edit: Edit, hardware: Hardware, transposes: Sequence[int], copy: int, used: Uses) -> None:
    """Replace a copy out of PSUM by a DMA that reads the inputs of the transposes, and leave the transposes out.

    If all inputs were loaded from HBM for these transposes only, the loads are left out too, and the DMA
    reads HBM.

    Args:
        transposes: Events that transpose into the copied PSUM tile.
        copy: Event that copies the tile to SBUF; it becomes the DMA.
    """
    stream = edit.stream
    template = stream.template(copy)
    target = template.operands[template.writes[0]]
    operands, loads = [], list[int]()
    for event in transposes:
        transpose = stream.template(event)
        read = transpose.reads[0]
        tile = stream.tensors_of(event)[read]
        operands.append((transpose.boxes[read], tile))
        writers = [writer for writer, writes in used[tile] if writes]
        readers = {reader for reader, writes in used[tile] if not writes}
        if len(writers) == 1 and readers <= {*transposes} and find_load(stream, writers[0]) is not None:
            loads += writers
        edit.leave_out(event)
    from_hbm = len(loads) == len(transposes)
    if from_hbm:
        operands = []
        for load in dict.fromkeys(loads):
            operands.append((stream.template(load).boxes[0], stream.tensors_of(load)[0]))
            edit.leave_out(load)
    operands.append((template.boxes[template.writes[0]], stream.tensors_of(copy)[template.writes[0]]))
    num_bytes = target.size * target.dtype.itemsize
    cost = dma_costs.dma(
        hardware,
        Engine.sync,
        DgeMode.none,
        num_bytes,
        target.shape[0] * target.dtype.itemsize,
        True,
        num_bytes if from_hbm else 0,
        result_bytes=num_bytes,
        fraction="dma_transpose_hbm_fraction" if from_hbm else "dma_transpose_sbuf_fraction",
    )
    edit.set_operands(copy, operands, cost, engine=Engine.dma, trigger=Engine.sync)
