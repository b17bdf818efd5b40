"""Memory ports that engines share: which of them each event holds while it is issued.

On gen2 the Vector engine and GpSimd exclude each other on SBUF, and the Vector and Scalar engines on PSUM. Later chips
have ports of their own: there fast modes of the Vector engine take turns with GpSimd on a bus, and two engines that
read one bank of PSUM slow each other down. Two instructions that overlap at half speed end when they would one after
the other, so that is what is modelled. A tile stands for its bank.

Ports are granted in program order, as engines take their instructions, so a lower cost never lengthens a schedule by
them. The chip grants them to whoever comes first.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from simulate.hardware import Hardware
from simulate.isa.enums import Engine
from simulate.memory import MemoryRegion
from simulate.run.stream import Stream

_SBUF, _PSUM, _BUS, _TILES = range(4)
_NONE: tuple[int, ...] = ()


def shared_ports(stream: Stream, hardware: Hardware) -> list[tuple[int, ...]]:
    """For every event the ports it holds and another engine of the stream holds as well; empty if there are none."""
    banks = hardware.psum_same_bank_slowdown_factor > 1.0 and not hardware.vector_scalar_share_psum_port
    users: dict[int, set[int]] = defaultdict(set)
    held: dict[int, set[int]] = defaultdict(set)
    for event, engine, buffer, tensor in _accesses(stream):
        fast = stream.costs[stream.cost_ids[event]].fast_mode
        ports = []
        if buffer is MemoryRegion.sbuf and engine != Engine.scalar.value:
            if hardware.vector_gpsimd_share_sbuf_port:
                ports.append(_SBUF)
            if hardware.vector_fast_modes_share_bus_with_gpsimd and (fast or engine == Engine.gpsimd.value):
                ports.append(_BUS)
        if buffer is MemoryRegion.psum and engine != Engine.gpsimd.value:
            if hardware.vector_scalar_share_psum_port:
                ports.append(_PSUM)
            if banks:
                ports.append(_TILES + tensor)
        for port in ports:
            users[port].add(engine)
            held[event].add(port)
    contended = {port for port, engines in users.items() if len(engines) > 1}
    if not contended:
        return []
    return [
        tuple(sorted(held[event] & contended)) if event in held else _NONE for event in range(len(stream))
    ]


def _accesses(stream: Stream) -> list[tuple[int, int, MemoryRegion, int]]:
    """(event, engine, memory, tensor) of the on-chip operands of the engines that share ports."""
    engines = np.frombuffer(stream.engines, np.uint8)
    tensors = np.frombuffer(stream.rows, np.int64).reshape(-1, 5)[:, 0] >> 2
    counts = np.diff(np.frombuffer(stream.row_ends, np.uint64).astype(np.int64) // 5, prepend=0)
    owner = np.repeat(np.arange(len(stream)), counts)
    sharing = [Engine.vector.value, Engine.scalar.value, Engine.gpsimd.value]
    on_chip = np.array([record.buffer.on_chip for record in stream.tensors], bool)
    if not len(owner):
        return []
    wanted = np.flatnonzero(np.isin(engines[owner], sharing) & on_chip[tensors])
    records = stream.tensors
    return [
        (event, engine, records[tensor].buffer, tensor)
        for event, engine, tensor in zip(
            owner[wanted].tolist(), engines[owner[wanted]].tolist(), tensors[wanted].tolist()
        )
    ]
