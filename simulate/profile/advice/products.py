"""What a change of the matmuls would gain: 16-bit operands, transposes by DMA."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from simulate.hardware import Hardware
from simulate.isa import costs, dma_costs
from simulate.isa.enums import DgeMode, Engine
from simulate.isa.plan import Cost
from simulate.memory import MemoryRegion
from simulate.profile.advice.edits import Edit, Uses, uses
from simulate.profile.advice.transfers import load_of
from simulate.run.stream import Stream


def narrow_products(stream: Stream, hardware: Hardware) -> Iterator[Edit]:
    """float32 products, and the transposes for them, with 16-bit operands; casts to float32 are left out.

    A tile that comes from HBM in float32 is cast by its DMA, at the slower pace of such DMAs.
    """
    edit, narrowed = Edit(stream), set[int]()
    for event in range(len(stream)):
        template = stream.template(event)
        cost = template.plan.cost
        if not cost.streamed_cycles or not any(
            template.operands[at].dtype == "float32" for at in template.reads
        ):
            continue
        reads = [template.operands[place] for place in template.reads]
        transpose, rows = not cost.flops, reads[0].shape[0] if len(reads) == 1 else reads[1].free_size
        depth, columns = reads[0].shape[0], reads[0].free_size
        narrow = costs.matmul(hardware, depth, columns, rows, False, transpose, cost.stationary, cost.cells)
        edit.cost(event, narrow)
        tensors = stream.tensors_of(event)
        narrowed |= {tensors[place] for place in template.reads}
    if not edit.events:
        return
    used = uses(stream)
    for tile in sorted(narrowed):
        if all(writes or event in edit.events for event, writes in used[tile]):
            _narrow(edit, hardware, tile, used[tile])
    yield edit


def _narrow(edit: Edit, hardware: Hardware, tile: int, events: Sequence[tuple[int, bool]]) -> None:
    """A float32 tile that only products read, in 16 bits: a cast to it vanishes, a DMA into it casts."""
    stream = edit.stream
    writers = [event for event, writes in events if writes]
    for event in writers:
        template = stream.template(event)
        source = template.operands[template.reads[0]] if template.reads else None
        if source is None:
            continue
        if template.plan.cost.dma is not None:
            if source.dtype.itemsize == 4:
                edit.cost(event, _casting(template.plan.cost, hardware))
            continue
        raw = stream.tensors_of(event)[template.reads[0]]
        whole = template.boxes[template.reads[0]][3:] == (0, stream.tensors[raw].row_bytes)
        casts = (
            template.op == "tensor_copy" and source.dtype.itemsize == 2 and source.buffer is MemoryRegion.sbuf
        )
        if casts and whole and len(writers) == 1:
            edit.leave_out(event)
            for other, writes in events:
                if not writes:
                    edit.rename(other, tile, raw, narrower=2)


def _casting(cost: Cost, hardware: Hardware) -> Cost:
    """The cost of a DMA that converts the dtype of its bytes on the way."""
    dma = cost.dma
    assert dma is not None
    slower = max(hardware.dma_engine_bytes_per_ns / hardware.dma_cast_bytes_per_ns, 1.0)
    busy = dma.busy_ns * slower
    return replace(cost, dma=replace(dma, busy_ns=busy, transfer_ns=dma.transfer_ns + busy - dma.busy_ns))


def transposes_by_dma(stream: Stream, hardware: Hardware) -> Iterator[Edit]:
    """Transposes of the Tensor engine and their copies out of PSUM as DMAs, from HBM where the tile comes from there.

    Only elements of 16 bits: the documented rates are theirs.
    """
    edit, used = Edit(stream), uses(stream)
    turned: dict[int, list[int]] = {}  # by PSUM tile, its transposes
    for event in range(len(stream)):
        template = stream.template(event)
        if template.plan.cost.streamed_cycles and not template.plan.cost.flops:
            turned.setdefault(stream.tensors_of(event)[template.writes[0]], []).append(event)
    for bank, transposes in turned.items():
        copies = [event for event, writes in used[bank] if not writes]
        if {event for event, writes in used[bank] if writes} == set(transposes) and len(copies) == 1:
            template = stream.template(copies[0])
            target = template.operands[template.writes[0]]
            if template.op == "tensor_copy" and target.dtype.itemsize == 2:
                _move(edit, hardware, transposes, copies[0], used)
    if edit.events:
        yield edit


def _move(edit: Edit, hardware: Hardware, transposes: Sequence[int], copy: int, used: Uses) -> None:
    """The copy out of PSUM becomes a DMA that reads what the transposes read."""
    stream = edit.stream
    template = stream.template(copy)
    target = template.operands[template.writes[0]]
    parts, loads = [], list[int]()
    for event in transposes:
        turn = stream.template(event)
        place = turn.reads[0]
        tile = stream.tensors_of(event)[place]
        parts.append((turn.boxes[place], tile))
        writers = [other for other, writes in used[tile] if writes]
        readers = {other for other, writes in used[tile] if not writes}
        if len(writers) == 1 and readers <= {*transposes} and load_of(stream, writers[0]) is not None:
            loads += writers
        edit.leave_out(event)
    from_hbm = len(loads) == len(transposes)
    if from_hbm:
        parts = []
        for load in dict.fromkeys(loads):
            parts.append((stream.template(load).boxes[0], stream.tensors_of(load)[0]))
            edit.leave_out(load)
    parts.append((template.boxes[template.writes[0]], stream.tensors_of(copy)[template.writes[0]]))
    total = target.size * target.dtype.itemsize
    cost = dma_costs.dma(
        hardware,
        Engine.sync,
        DgeMode.none,
        total,
        target.shape[0] * target.dtype.itemsize,
        True,
        total if from_hbm else 0,
        result_bytes=total,
        fraction="dma_transpose_hbm_fraction" if from_hbm else "dma_transpose_sbuf_fraction",
    )
    edit.operate(copy, parts, cost, engine=Engine.dma, trigger=Engine.sync)
