"""Builder of DMA measurements: phases of a transfer, single descriptors, tiles and sweeps over sizes."""

from __future__ import annotations

import re

import numpy as np

from benchmarks.fidelity.case import Case, NotCovered, Quantity, Run, Schedule, array, chip_of
from benchmarks.fidelity.entry import Entry
from benchmarks.fidelity.kernels import dma
from simulate.hardware import Hardware
from simulate.isa import dma_costs
from simulate.isa.enums import DgeMode, Engine

_UNITS = {"": 1, "Ki": 1024, "Mi": 1 << 20, "k": 1000, "K": 1000, "M": 1_000_000}


def build(entry: Entry) -> Case:
    """Return the case of the DMA that an entry describes, with the phase that was timed.

    Raises NotCovered if the description does not give rows and bytes, or no kernel issues such a transfer.
    """
    chip = chip_of(entry)

    def case(kernel: object, arguments: tuple[object, ...], quantity: Quantity, divisor: float = 1.0) -> Case:
        runs = (Run(kernel, (arguments,)),)  # type: ignore[arg-type]
        return Case(chip, runs, quantity, Schedule.primitive, "dma_copy", divisor)

    tile = array((128, 1024))
    if entry.says("relative throughput"):
        if len(entry.product()) != 2:
            raise NotCovered(f"shapes {entry.shapes!r} do not give rows and bytes")
        count = 64  # the latency of the first one hardly counts
        arguments = (array(entry.product(), np.uint8), count, "swdge")
        return case(dma.streaming, arguments, Quantity.length, count)
    if entry.says("hardware DGE", "first data descriptor"):
        return case(dma.loads, ([tile], "hwdge"), Quantity.first_byte)
    if entry.says("static ring", "first data descriptor"):
        return case(dma.loads, ([tile],), Quantity.first_byte)
    if entry.says("first store descriptor"):
        return case(dma.stores, (tile, 1), Quantity.first_byte)
    if entry.says("last descriptor end", "dependent"):
        return case(dma.loads, ([tile],), Quantity.completion)
    if entry.says("trigger of one dma_copy"):
        return case(dma.stores, (tile, 2), Quantity.trigger)
    if entry.says("instruction-fetch") or entry.says("spread of"):
        raise NotCovered("not a transfer that a kernel asks for")
    if entry.says("one engine") or entry.says("one DMA engine") or entry.says("descriptor"):
        single = _on_one_engine(entry, chip)
        if single is not None:
            return single
    if entry.says("indirect", "software descriptor"):
        count, size = entry.integer(r"(\d+) indirect"), entry.integer(r"x (\d+) B")
        if count is None or size is None:
            raise NotCovered("the number of indirect DMAs or their row size is not given")
        rows = array((128, 1), np.int32)
        return case(dma.gathers, (array((4096, size), np.uint8), rows, count), Quantity.length)
    if entry.says("scatter"):
        count = entry.integer(r"(\d+) (?:x|scatter)")
        return case(dma.scatters, (array((65536, 1)), array((128, 1), np.int32), count), Quantity.length)
    if entry.says("128x128 tiles"):
        side = re.search(r"(\d+)x\1 matrix", entry.kernel)
        if side is None:
            raise NotCovered("the matrix whose tiles are loaded is not given")
        return case(dma.load_tiles, (array((int(side.group(1)),) * 2),), Quantity.data_phase)
    if entry.says("store of one"):
        match = re.search(r"\[(\d+),(\d+)\] tile", entry.kernel)
        if match is None:
            raise NotCovered("the tile that is stored is not given")
        shape = (int(match.group(1)), int(match.group(2)))
        return case(dma.stores, (array(shape), 1), Quantity.data)
    if entry.says("load of"):
        match = re.search(r"\[(\d+),(\d+)\] tiles", entry.kernel)
        count = entry.integer(r"^(\d+) x")
        if match is None or count is None:
            raise NotCovered("the tiles that are loaded are not given")
        shape = (int(match.group(1)), int(match.group(2)))
        return case(dma.loads, ([array(shape) for _ in range(count)],), Quantity.data_phase)
    rows = re.search(r"(\d+) rows x (\d+) (Ki|)B", entry.kernel)
    if rows is not None:
        shape = (int(rows.group(1)), int(rows.group(2)) * _UNITS[rows.group(3)])
        if entry.says("store"):
            return case(dma.stores, (array(shape, np.uint8), 1), Quantity.data)
        return case(dma.loads, ([array(shape, np.uint8)],), Quantity.data)
    raise NotCovered("the transfer is not described by rows and bytes")


def _on_one_engine(entry: Entry, chip: Hardware) -> Case | None:
    """Return the case of descriptors queued on one DMA engine, as a formula without a run.

    Returns None if `shapes` gives no size in bytes, or the transfer is indirect or uses 16 engines.
    """
    match = re.search(r"(\d+) (Ki|)B", entry.shapes)
    if match is None or entry.says("indirect") or entry.says("16 engines"):
        return None
    size = int(match.group(1)) * _UNITS[match.group(2)]
    pieces = re.search(r"(\d+) x (\d+) B", entry.shapes)
    piece = int(pieces.group(2)) if pieces else size

    def formula(hardware: Hardware) -> float:
        casts = entry.says("cast", "fp32->bf16") and "destination" in entry.shapes
        wider = 2 if casts else 1
        moved = dma_costs.dma(
            hardware, Engine.sync, DgeMode.none, wider * size, wider * piece, True, 0, casts
        ).dma
        assert moved is not None
        latency = entry.says("in flight")
        # All engines together are busy for one sixteenth of what one engine takes.
        return moved.busy_ns * hardware.dma_engines + latency * hardware.dma_descriptor_latency_ns

    return Case(chip, (), Quantity.formula, Schedule.primitive, formula=formula)
