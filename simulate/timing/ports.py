"""Memory ports that engines share, and cells of the array: which of them each event takes during its issue interval.

On gen2 the Vector engine and GpSimd exclude each other on SBUF, and the Vector and Scalar engines on PSUM. Later chips
have separate ports. There fast modes of the Vector engine exclude GpSimd on a bus, and two engines that read one bank
of PSUM slow each other down. Two instructions that overlap at half speed end no earlier than two in sequence, so
the model lets them follow each other. Every PSUM tile counts as one bank.

Matmuls in tiles of the array run side by side if they take different cells of it. A cell is a square of the array of
the smallest tile size. A cell counts as a port; in a stream with such matmuls, a matmul without a tile takes all cells.

A port is an integer, of which only equality means anything. `simulate.timing.core` lets an event wait until all of its
ports are free.

Policy: ports are granted in program order, so a lower cost never lengthens a schedule by them. The chip grants a port
to the first engine that requests it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulate.hardware import Hardware
from simulate.isa.enums import Engine
from simulate.memory import MemoryRegion
from simulate.run.stream import Stream

_SBUF, _PSUM, _BUS, _TILES = range(4)
_CELLS = -1  # port of cell 0 of the array; cell i is port -1 - i
_ENGINES = max(engine.value for engine in Engine) + 1
_NONE: tuple[int, ...] = ()

_Column = NDArray[np.int64]


def find_shared_ports(stream: Stream, hardware: Hardware) -> list[tuple[int, ...]]:
    """Return for every event the ports that it takes: contended memory ports and cells of the array.

    A memory port counts only if at least two engines of the stream use it. The list is empty if no event takes a port.
    """
    memory_ports, cells = _find_memory_ports(stream, hardware), _find_cells(stream, hardware)
    if not memory_ports or not cells:
        return memory_ports or cells
    return [ports + array_cells for ports, array_cells in zip(memory_ports, cells)]


def _find_cells(stream: Stream, hardware: Hardware) -> list[tuple[int, ...]]:
    """Return for every event the ports of the array's cells that it takes, none unless the Tensor engine executes it.

    The list itself is empty if no matmul of the stream takes a tile of the array.
    """
    taken = [tuple(_CELLS - cell for cell in cost.cells) for cost in stream.costs]
    if not any(taken):
        return []
    edge = min(hardware.matmul_tile_sizes)
    all_cells = tuple(_CELLS - cell for cell in range((hardware.contraction_max // edge) ** 2))
    tensor = Engine.tensor.value
    return [
        (taken[cost] or all_cells) if engine == tensor else _NONE
        for engine, cost in zip(stream.engines, stream.cost_ids)
    ]


def _find_memory_ports(stream: Stream, hardware: Hardware) -> list[tuple[int, ...]]:
    """Return for every event its ports to SBUF and PSUM that two engines use; an empty list if there are none."""
    present = set(stream.engines)
    if Engine.vector.value not in present or present.isdisjoint((Engine.scalar.value, Engine.gpsimd.value)):
        return []
    engines, events, ports = _list_port_uses(stream, hardware)
    users = np.unique(ports * _ENGINES + engines) // _ENGINES
    contended = np.isin(ports, users[1:][users[1:] == users[:-1]])
    if not contended.any():
        return []
    span = int(ports.max()) + 1
    pairs = np.unique((events * span + ports)[contended])
    event_ports = [_NONE] * len(stream)
    for event, port in zip((pairs // span).tolist(), (pairs % span).tolist()):
        event_ports[event] += (port,)
    return event_ports


def _list_port_uses(stream: Stream, hardware: Hardware) -> tuple[_Column, _Column, _Column]:
    """Return every access of an operand through a port that engines may share, as columns (engine, event, port).

    The columns are empty if the chip has separate ports and buses.
    """
    tensors = np.frombuffer(stream.rows, np.int64).reshape(-1, 5)[:, 0] >> 2
    counts = np.diff(np.frombuffer(stream.row_ends, np.uint64).astype(np.int64) // 5, prepend=0)
    events = np.repeat(np.arange(len(stream)), counts)
    engines = np.frombuffer(stream.engines, np.uint8).astype(np.int64)[events]
    vector, scalar, gpsimd = (
        engines == engine.value for engine in (Engine.vector, Engine.scalar, Engine.gpsimd)
    )
    lies_in = [record.buffer for record in stream.tensors]
    sbuf = np.array([buffer is MemoryRegion.sbuf for buffer in lies_in], bool)[tensors] & (vector | gpsimd)
    psum = np.array([buffer is MemoryRegion.psum for buffer in lies_in], bool)[tensors] & (vector | scalar)
    ports = []
    if hardware.vector_gpsimd_share_sbuf_port:
        ports.append((sbuf, np.full_like(tensors, _SBUF)))
    if hardware.vector_fast_modes_share_bus_with_gpsimd:
        fast = np.array([cost.fast_mode for cost in stream.costs], bool)
        fast = fast[np.frombuffer(stream.cost_ids, np.uint32)][events]
        ports.append((sbuf & (fast | gpsimd), np.full_like(tensors, _BUS)))
    if hardware.vector_scalar_share_psum_port:
        ports.append((psum, np.full_like(tensors, _PSUM)))
    elif hardware.psum_same_bank_slowdown_factor > 1.0:
        ports.append((psum, _TILES + tensors))
    if not ports:
        return tensors[:0], tensors[:0], tensors[:0]
    behind = np.concatenate([where for where, _ in ports])
    numbers = np.concatenate([port for _, port in ports])
    return np.tile(engines, len(ports))[behind], np.tile(events, len(ports))[behind], numbers[behind]
