"""Costs of DMAs for planners: copies, exchanges between cores, and collectives, as functions of `simulate.isa.costs`.

A DMA is cut into descriptors, which the core's DMA engines carry out. A piece is a run of bytes that are contiguous on
both sides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from simulate.hardware import Hardware
from simulate.hardware.topology import find_entry
from simulate.isa.costs import clock_ghz, cost_function
from simulate.isa.enums import DgeMode, Engine
from simulate.isa.plan import Cost, DmaCost, Phase, Term

_PIECES_MAX = 8  # pieces of 512 bytes in one descriptor, traces of 64 tiles of 128 x 128


@cost_function
def dma(
    hardware: Hardware,
    engine: Engine,
    mode: DgeMode,
    total_bytes: int,
    piece_bytes: int,
    load: bool,
    hbm_bytes: int | None = None,
    casts: bool = False,
    by_row: bool = False,
    at_run_time: bool = False,
    apart: bool = False,
    result_bytes: int = 0,
    fraction: str = "",
) -> Cost:
    """Return the cost of a DMA: triggered on `engine`, cut into descriptors, spread over the core's DMA engines.

    A piece is a run of bytes that are contiguous on both sides. A piece is cut at the descriptor limit. Up to eight
    short pieces share a descriptor within the limit: traces show this for prepared rings, counts of packets for rings
    that software writes. Every piece but the first of a descriptor takes at least `dma_piece_ns`, which pieces of 256
    bytes exceed.

    Hardware writes a descriptor for every piece, and so does GpSimd for rows at arbitrary addresses (by_row). Meanwhile
    GpSimd computes addresses for the next descriptors. The longer of the two times counts: a scatter of 128 rows of 4
    bytes takes 2 us on gen2, 15 ns for each row, and no further microsecond.

    The DMAs of a core take their bytes from its share of HBM's bandwidth, however many engines move them. A DMA
    therefore occupies the engines for at least the time of its bytes in HBM. The engines do not start together, but
    every engine starts before the first engine could have finished its share.

    Args:
        hardware: Record of the chip.
        engine: Engine whose stream triggers the DMA.
        mode: Writer of the descriptors: nobody (a static ring prepared at load time), the hardware, or GpSimd.
        total_bytes: Bytes that pass through the engines, of the larger of source and destination.
        piece_bytes: Length of a piece in bytes.
        load: Whether the destination is on chip.
        hbm_bytes: Bytes read from HBM and written to it; None for total_bytes.
        casts: Whether the dtype changes on the way, which makes the engines slower.
        by_row: Whether GpSimd writes a descriptor for every row.
        at_run_time: Whether addresses come from operands, which takes GpSimd longer.
        apart: Whether pieces are separate in HBM and take `dma_piece_ns` on top of their bytes at the engine's peak.
        result_bytes: Bytes that a DMA writes that transposes or adds.
        fraction: Field of the record: the fraction of the copying rate at which result_bytes are written. Empty for a
            copy.
    """
    descriptors = _cut_into_descriptors(hardware, mode, total_bytes, piece_bytes, by_row)
    data = _time_data(hardware, total_bytes, descriptors, casts, apart, result_bytes, fraction)
    each_ns = (
        hardware.dma_descriptor_ns + data.ns / descriptors.count
    )  # from one queued descriptor to the next
    trigger_ns, first_ns, gpsimd_ns = _time_start(hardware, mode, load, at_run_time, descriptors.count)
    moving_ns = ceil(descriptors.count / hardware.dma_engines) * each_ns
    last_start_ns = _time_last_start(hardware, load, descriptors.count, moving_ns)
    hbm_ns = (total_bytes if hbm_bytes is None else hbm_bytes) / hardware.hbm_gb_per_s_per_core
    engines_ns = descriptors.count * each_ns / hardware.dma_engines
    phases = DmaCost(
        bytes=total_bytes,
        descriptors=descriptors.count,
        trigger_ns=trigger_ns,
        first_byte_ns=first_ns,
        busy_ns=max(engines_ns, hbm_ns),
        transfer_ns=max(last_start_ns + moving_ns + hardware.dma_descriptor_latency_ns, hbm_ns),
        completion_ns=hardware.dma_completion_ns,
        gpsimd_ns=gpsimd_ns,
        hbm_bound=hbm_ns > engines_ns,
    )

    def explain() -> tuple[Term, ...]:
        return (
            *_list_start_terms(hardware, mode, load, at_run_time, phases),
            *_list_data_terms(hardware, load, descriptors, data, last_start_ns, moving_ns, hbm_ns),
            Term(Phase.completion, ("dma_completion_ns",), hardware.dma_completion_ns, False),
        )

    clock = clock_ghz(hardware, engine)
    issue_ns = trigger_ns + gpsimd_ns
    latency = (issue_ns + first_ns + phases.transfer_ns + hardware.dma_completion_ns) * clock
    return Cost(interval_cycles=issue_ns * clock, latency_cycles=latency, dma=phases, explain=explain)


@dataclass(frozen=True)
class _Descriptors:
    """Descriptors of a DMA: their count, the pieces in the first of them, and the bytes of a piece."""

    count: int
    pieces: int
    piece_bytes: int


def _cut_into_descriptors(
    hardware: Hardware, mode: DgeMode, total_bytes: int, piece_bytes: int, by_row: bool
) -> _Descriptors:
    """Return the descriptors of a DMA: pieces are cut at the descriptor limit, and short ones share a descriptor.

    Up to eight pieces share a descriptor that is prepared or that GpSimd writes; with `by_row`, and for descriptors
    that the hardware writes, each piece has its own.
    """
    piece = max(min(piece_bytes, hardware.dma_descriptor_bytes_max), 1)
    shared = 1
    if mode is not DgeMode.hwdge and not by_row:
        shared = min(max(hardware.dma_descriptor_bytes_max // piece, 1), _PIECES_MAX)
    return _Descriptors(ceil(total_bytes / (piece * shared)), min(shared, ceil(total_bytes / piece)), piece)


@dataclass(frozen=True)
class _Data:
    """Time in ns in which a single DMA engine would move all bytes, and what it is made of.

    Attributes:
        ns: The time.
        rate_fields: Fields of the record that give the rate of the bytes.
        has_short_pieces: Whether every piece but the first of a descriptor takes `dma_piece_ns` and apart_ns instead of
            the time of its bytes.
        apart_ns: Time of a piece's bytes at the engine's peak if pieces are separate in HBM, else 0.
    """

    ns: float
    rate_fields: tuple[str, ...]
    has_short_pieces: bool
    apart_ns: float


def _time_data(
    hardware: Hardware,
    total_bytes: int,
    descriptors: _Descriptors,
    casts: bool,
    apart: bool,
    result_bytes: int,
    fraction: str,
) -> _Data:
    """Return the time in which a single engine would move the bytes, or write the results if that takes longer.

    The arguments are those of `dma`.
    """
    rate_fields: tuple[str, ...] = ("dma_cast_bytes_per_ns" if casts else "dma_engine_bytes_per_ns",)
    ns = total_bytes / getattr(hardware, rate_fields[0])
    if fraction:
        result_ns = result_bytes / hardware.dma_engine_bytes_per_ns / getattr(hardware, fraction)
        if result_ns >= ns:
            rate_fields, ns = ("dma_engine_bytes_per_ns", fraction), result_ns
    piece_ns = ns / descriptors.count / descriptors.pieces
    apart_ns = descriptors.piece_bytes / hardware.dma_piece_bytes_per_ns if apart else 0.0
    short = descriptors.pieces > 1 and piece_ns < hardware.dma_piece_ns + apart_ns and not fraction
    if short:
        ns = descriptors.count * (piece_ns + (descriptors.pieces - 1) * (hardware.dma_piece_ns + apart_ns))
    return _Data(ns, rate_fields, short, apart_ns)


def _time_last_start(hardware: Hardware, load: bool, descriptors: int, moving_ns: float) -> float:
    """Return the time in ns from the start of the first DMA engine to the start of the last one."""
    skew_ns = min(hardware.dma_load_skew_ns if load else hardware.dma_store_skew_ns, moving_ns)
    return skew_ns * (min(descriptors, hardware.dma_engines) - 1) / hardware.dma_engines


def _list_data_terms(
    hardware: Hardware,
    load: bool,
    descriptors: _Descriptors,
    data: _Data,
    last_start_ns: float,
    moving_ns: float,
    hbm_ns: float,
) -> list[Term]:
    """Return the terms of the time in which bytes move: those of the engines, or that of HBM if it is longer."""
    rounds = ceil(descriptors.count / hardware.dma_engines)
    queued_ns = rounds * hardware.dma_descriptor_ns
    terms: list[tuple[tuple[str, ...], float, bool]] = [
        (("dma_descriptor_latency_ns",), hardware.dma_descriptor_latency_ns, False),
        (("dma_load_skew_ns" if load else "dma_store_skew_ns",), last_start_ns, False),
        (("dma_descriptor_ns",), queued_ns, True),
    ]
    if data.has_short_pieces:  # every piece but the first of a descriptor takes its own time
        more = rounds * (descriptors.pieces - 1)
        terms.append((("dma_piece_ns",), more * hardware.dma_piece_ns, True))
        if data.apart_ns:
            terms.append((("dma_piece_bytes_per_ns",), more * data.apart_ns, True))
        queued_ns += more * (hardware.dma_piece_ns + data.apart_ns)
    terms.append((data.rate_fields, moving_ns - queued_ns, True))
    if sum(ns for _, ns, _ in terms) < hbm_ns:
        terms = [(("hbm_gb_per_s_per_core",), hbm_ns, True)]
    return [Term(Phase.data, numbers, ns, grows) for numbers, ns, grows in terms]


def _time_start(
    hardware: Hardware, mode: DgeMode, load: bool, at_run_time: bool, descriptors: int
) -> tuple[float, float, float]:
    """Return the times of a DMA in ns until its first byte moves: (trigger, trigger to first byte, GpSimd's work)."""
    gpsimd_ns = 0.0
    if mode is DgeMode.swdge:
        trigger_ns, first_ns = hardware.dma_swdge_trigger_ns, hardware.dma_swdge_first_ns
        gpsimd_ns = hardware.dma_swdge_gpsimd_ns if at_run_time else hardware.dma_swdge_known_gpsimd_ns
        gpsimd_ns = max(gpsimd_ns, descriptors * hardware.dma_swdge_descriptor_ns)
    elif mode is DgeMode.hwdge:
        beyond = max(descriptors - hardware.dma_hwdge_descriptors_free, 0)
        trigger_ns = hardware.dma_hwdge_trigger_ns + beyond * hardware.dma_hwdge_descriptor_ns
        # Published from the start of the trigger; in the schedule first bytes come after its end.
        first_ns = max(hardware.dma_hwdge_first_ns - hardware.dma_hwdge_trigger_ns, 0.0)
    else:
        trigger_ns = hardware.dma_static_trigger_ns
        first_ns = hardware.dma_static_first_ns if load else hardware.dma_static_store_first_ns
    return trigger_ns, first_ns, gpsimd_ns


def _list_start_terms(
    hardware: Hardware, mode: DgeMode, load: bool, at_run_time: bool, phases: DmaCost
) -> tuple[Term, ...]:
    """Return the terms of a DMA before its first byte moves, of the triggering stream, of GpSimd and of the way."""
    descriptor_type = {DgeMode.swdge: "swdge", DgeMode.hwdge: "hwdge"}.get(mode, "static")
    trigger = f"dma_{descriptor_type}_trigger_ns"
    trigger_ns = getattr(hardware, trigger)
    terms = [Term(Phase.issue, (trigger,), trigger_ns, False)]
    if phases.trigger_ns > trigger_ns:
        beyond_ns = phases.trigger_ns - trigger_ns
        terms.append(Term(Phase.issue, ("dma_hwdge_descriptor_ns",), beyond_ns, True))
    if mode is DgeMode.swdge:
        addresses = "dma_swdge_gpsimd_ns" if at_run_time else "dma_swdge_known_gpsimd_ns"
        grows = phases.gpsimd_ns > getattr(hardware, addresses)
        number = "dma_swdge_descriptor_ns" if grows else addresses
        terms.append(Term(Phase.issue, (number,), phases.gpsimd_ns, grows))
    first = (
        f"dma_{descriptor_type}_first_ns"
        if load or descriptor_type != "static"
        else "dma_static_store_first_ns"
    )
    return (*terms, Term(Phase.first_byte, (first,), phases.first_byte_ns, False))


@cost_function
def exchanged(hardware: Hardware, total_bytes: int, row_bytes: int, by_gpsimd: bool) -> Cost:
    """Return the cost of tiles that two cores exchange with sendrecv.

    Args:
        hardware: Record of the chip.
        total_bytes: Bytes that a core sends.
        row_bytes: Contiguous bytes, a piece of the DMA.
        by_gpsimd: Whether GpSimd moves them, at its own rate; else a DMA does, after a core barrier.
    """
    if by_gpsimd:
        moving_ns = total_bytes / hardware.sendrecv_gb_per_s
        whole_ns = hardware.sendrecv_latency_ns + moving_ns
        cycles = whole_ns * hardware.gpsimd_clock_ghz
        begins = Term(Phase.issue, ("sendrecv_latency_ns",), hardware.sendrecv_latency_ns, False)
        moves = Term(Phase.issue, ("sendrecv_gb_per_s",), moving_ns, True)
        return Cost(cycles, cycles, rendezvous_ns=whole_ns, explain=lambda: (begins, moves))
    copy = dma(hardware, Engine.sync, DgeMode.none, total_bytes, row_bytes, True, hbm_bytes=0)
    waits = Term(Phase.completion, ("core_barrier_ns",), hardware.core_barrier_ns, False)
    return replace(
        copy,
        latency_cycles=copy.latency_cycles + hardware.core_barrier_ns * hardware.sync_clock_ghz,
        rendezvous_ns=hardware.core_barrier_ns,
        explain=lambda: (*copy.terms, waits),
    )


@cost_function
def collective(hardware: Hardware, ranks: int, total_bytes: int, hops: float) -> Cost:
    """Return the cost of a collective: latency and rate depend on the number of ranks and the bytes.

    Up to the record's switch size every rank exchanges with every other one in one step; above it data passes round a
    ring, whose steps take time as well.

    Args:
        hardware: Record of the chip.
        ranks: Number of ranks; for one only the trigger takes time.
        total_bytes: Bytes of a rank's inputs or outputs, whichever are more.
        hops: Scale of payload and steps: 1 for an all-reduce, which is a reduce-scatter and an all-gather, else one
            half.
    """
    latency, rate = "collective_latency_ns", "collective_mesh_gb_per_s"
    switch_bytes = find_entry(hardware.collective_switch_bytes, ranks)
    first_ns = find_entry(hardware.collective_latency_ns, ranks)
    wire_ns = hops * min(total_bytes, switch_bytes) / find_entry(hardware.collective_mesh_gb_per_s, ranks)
    if total_bytes > switch_bytes:
        # Bytes more never take less time: just above the switch the ring may not be slower yet.
        ring_latency_ns = hops * find_entry(hardware.collective_ring_latency_ns, ranks)
        around_ns = max(first_ns, ring_latency_ns)
        moved = hops * 2 * (ranks - 1) / ranks * total_bytes
        ring_ns = moved / find_entry(hardware.collective_bus_gb_per_s, ranks)
        if around_ns + ring_ns > first_ns + wire_ns:
            if ring_latency_ns >= first_ns:
                latency = "collective_ring_latency_ns"
            rate, first_ns, wire_ns = "collective_bus_gb_per_s", around_ns, ring_ns
    whole_ns = first_ns + wire_ns if ranks > 1 else 0.0
    trigger_ns = hardware.dma_static_trigger_ns
    clock = hardware.sync_clock_ghz

    def explain() -> tuple[Term, ...]:
        trigger = Term(Phase.issue, ("dma_static_trigger_ns",), trigger_ns, False)
        if ranks == 1:
            return (trigger,)
        begins = Term(Phase.data, (latency,), first_ns, False)
        return trigger, begins, Term(Phase.data, (rate,), wire_ns, True)

    return Cost(
        interval_cycles=trigger_ns * clock,
        latency_cycles=(trigger_ns + whole_ns) * clock,
        rendezvous_ns=whole_ns,
        explain=explain,
    )
