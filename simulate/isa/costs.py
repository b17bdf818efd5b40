"""Cost of an instruction from the hardware record: issue interval and latency in the engine's cycles.

The formulas are those of the nki.isa reference of release 2.26 (the last to print them) with the overheads fitted to
published device traces; every constant and its source stands in the hardware record. N is elements per partition.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache, partial
from math import ceil
from typing import NamedTuple

from simulate.hardware import Hardware
from simulate.hardware.topology import of_ranks
from simulate.isa.enums import DgeMode, Engine
from simulate.isa.plan import Cost, DmaCost, Phase, Term
from simulate.memory import MemoryRegion, NkiTensor

_CACHE = 1 << 14
_THROTTLE = ("tensor_throttled_clock_ghz", "activity_throttle_busy_fraction")
_PIECES_MAX = 8  # rows of 512 bytes in one descriptor, traces of 64 tiles of 128 x 128


@lru_cache(_CACHE)
def vector(
    hardware: Hardware,
    elements: float,
    number: str | None = None,
    accumulates: bool = False,
    fast_mode: bool = False,
) -> Cost:
    """Vector engine: the elements of one partition at the pace that a number of the record gives, else one per cycle.

    At least the minimum interval. In a fast mode, several elements per cycle, more time passes between instructions.
    """
    cycles = elements
    if number is not None:
        pace = getattr(hardware, number)
        cycles = elements * pace if number.endswith("_cycles_per_element") else elements / pace
    extra = hardware.vector_accumulate_extra_cycles if accumulates else 0
    between, between_ns = "vector_interval_overhead_ns", hardware.vector_interval_overhead_ns
    if fast_mode:
        between = "vector_fast_mode_interval_overhead_ns"
        between_ns = hardware.vector_fast_mode_interval_overhead_ns
    clock, pipeline = hardware.vector_clock_ghz, "vector_latency_overhead_ns"
    interval = max(max(hardware.vector_min_interval_cycles, cycles) + extra, cycles + between_ns * clock)
    latency = cycles + extra + hardware.vector_latency_overhead_ns * clock
    explain = partial(
        _streamed, hardware, _VECTOR, cycles, number, extra, between, pipeline, interval, latency
    )
    return Cost(interval, latency, fast_mode=fast_mode, explain=explain)


@lru_cache(_CACHE)
def scalar(
    hardware: Hardware, elements: int, table: str | None, accumulates: bool = False, from_psum: bool = True
) -> Cost:
    """Scalar engine: one element per lane and cycle; functions from a table have a longer pipeline than a copy.

    That pipeline is longer still for an operand in SBUF; a copy's is the same from both memories.
    """
    if table is None or table == "copy":
        between, pipeline = "scalar_interval_overhead_ns", "scalar_latency_overhead_ns"
    elif from_psum:
        between, pipeline = "scalar_table_function_interval_ns", "scalar_table_function_latency_ns"
    else:
        between, pipeline = "scalar_table_function_sbuf_interval_ns", "scalar_table_function_sbuf_latency_ns"
    clock = hardware.scalar_clock_ghz
    extra = hardware.activation_accumulate_extra_cycles if accumulates else 0
    busy = max(hardware.scalar_min_interval_cycles, elements) + extra
    interval = max(busy, elements + getattr(hardware, between) * clock)
    latency = elements + extra + getattr(hardware, pipeline) * clock
    explain = partial(
        _streamed, hardware, _SCALAR, elements, None, extra, between, pipeline, interval, latency
    )
    return Cost(interval, latency, table=table, explain=explain)


class _Lane(NamedTuple):
    """The numbers of an engine that streams elements: its clock, minimum interval, and cost of an accumulator."""

    clock: str
    least: str
    extra: str


_VECTOR = _Lane("vector_clock_ghz", "vector_min_interval_cycles", "vector_accumulate_extra_cycles")
_SCALAR = _Lane("scalar_clock_ghz", "scalar_min_interval_cycles", "activation_accumulate_extra_cycles")


def _streamed(
    hardware: Hardware,
    lane: _Lane,
    cycles: float,
    number: str | None,
    extra: float,
    between: str,
    pipeline: str,
    interval: float,
    latency: float,
) -> tuple[Term, ...]:
    """The terms of an engine that streams elements in so many cycles, paced by `number`.

    `between` and `pipeline` name the overheads of the interval and of the latency, in nanoseconds.
    """
    clock, least = getattr(hardware, lane.clock), getattr(hardware, lane.least)
    paced = (lane.clock,) if number is None else (number, lane.clock)
    grown = Term(Phase.issue, paced, cycles / clock, True)
    added = [Term(Phase.issue, (lane.extra, lane.clock), extra / clock, False)] if extra else []
    result = [pipeline]
    if interval > max(least, cycles) + extra:
        issue = [Term(Phase.issue, (between,), getattr(hardware, between), False), grown]
        result += [lane.extra] if extra else []
    elif cycles >= least:
        issue = [*added, grown]
    else:
        issue = [*added, Term(Phase.issue, (lane.least, lane.clock), least / clock, False)]
        result += paced[:-1]
    return (*issue, _pipeline(interval, latency, clock, *result))


def _pipeline(interval: float, latency: float, clock: float, *numbers: str) -> Term:
    """The rest of the latency, once the engine is free."""
    return Term(Phase.pipeline, numbers, max(latency - interval, 0.0) / clock, False)


@lru_cache(_CACHE)
def gpsimd(hardware: Hardware, elements: float) -> Cost:
    """GpSimd: a fixed start and then one element per partition and cycle at best."""
    streamed = elements * hardware.gpsimd_cycles_per_element
    return _gpsimd(
        hardware, "gpsimd_fixed_cycles", hardware.gpsimd_fixed_cycles, "gpsimd_cycles_per_element", streamed
    )


@lru_cache(_CACHE)
def largest(hardware: Hardware, searched: int, kept: int) -> Cost:
    """GpSimd's search for the largest elements: passes over all of them, and a cycle for each that is kept."""
    streamed = hardware.gpsimd_topk_cycles_per_element * searched
    return _gpsimd(hardware, "gpsimd_clock_ghz", kept, "gpsimd_topk_cycles_per_element", streamed)


def _gpsimd(hardware: Hardware, start: str, start_cycles: float, number: str, streamed: float) -> Cost:
    cycles = start_cycles + streamed

    def explain() -> tuple[Term, ...]:
        clock = hardware.gpsimd_clock_ghz
        return (
            Term(Phase.issue, (start, "gpsimd_clock_ghz"), start_cycles / clock, False),
            Term(Phase.issue, (number, "gpsimd_clock_ghz"), streamed / clock, True),
        )

    return Cost(cycles, cycles, explain=explain)


@lru_cache(_CACHE)
def fixed(hardware: Hardware, engine: Engine, number: str, rendezvous: bool = False) -> Cost:
    """An instruction that holds its engine for one time of the record: with a `rendezvous`, once all members wait."""
    ns = getattr(hardware, number)
    cycles = ns * clock_ghz(hardware, engine)
    held = Term(Phase.issue, (number,), ns, False)
    return Cost(cycles, cycles, rendezvous_ns=ns if rendezvous else 0.0, explain=lambda: (held,))


@lru_cache(_CACHE)
def matmul(
    hardware: Hardware,
    contraction: int,
    columns: int,
    rows: int,
    fp32: bool,
    transpose: bool = False,
    stationary: tuple[int, ...] | None = None,
) -> Cost:
    """Tensor engine: `columns` of the stationary tile, `rows` streamed; float32 takes several passes.

    The stationary tile is loaded while the matmul before streams, one row of it at a time: a stream shorter than the
    contraction does not hide the load, which then sets the pace (products of a matrix and a vector), unless the array
    holds the tile already: matmuls with equal `stationary` read it in one way, into one part of the array. The minimum
    interval holds for an instruction, not for each of its passes: float32 products of 28 columns were seen to take 61
    ns on gen3.
    """
    passes = loads = 1
    if fp32:
        loads = hardware.matmul_fp32_instructions
        passes = hardware.transpose_fp32_passes if transpose else hardware.matmul_fp32_passes
    streamed = max(min(hardware.matmul_min_interval_cycles, columns), passes * rows)
    loaded = loads * min(contraction, hardware.contraction_max) * hardware.load_weights_cycles_per_row
    interval = max(streamed, loaded) + passes * hardware.matmul_issue_overhead_cycles
    exposed = max(loaded - streamed, 0.0)
    latency = streamed + hardware.matmul_latency_ns * hardware.tensor_clock_ghz

    def explain() -> tuple[Term, ...]:
        clock, array = hardware.tensor_clock_ghz, "tensor_clock_ghz"
        least = ("matmul_min_interval_cycles",) if streamed == hardware.matmul_min_interval_cycles else ()
        pace = ("load_weights_cycles_per_row", array) if exposed else (*least, array)
        overhead_ns = passes * hardware.matmul_issue_overhead_cycles / clock
        terms = (
            Term(Phase.issue, ("matmul_issue_overhead_cycles", array), overhead_ns, False),
            Term(Phase.issue, pace, max(streamed, loaded) / clock, True),
            _pipeline(interval, latency, clock, "matmul_latency_ns", *least),
        )
        if not hardware.activity_throttle:
            return terms
        longer = Term(Phase.pipeline, ("matmul_throttled_latency_ns",), 0.0, True)
        return (*terms, Term(Phase.issue, _THROTTLE, 0.0, True), longer)

    return Cost(
        interval_cycles=interval,
        latency_cycles=latency,
        flops=0 if transpose else 2 * contraction * columns * rows,
        streamed_cycles=streamed,
        stationary=stationary,
        kept_cycles=exposed if stationary is not None else 0.0,
        explain=explain,
    )


def copied(hardware: Hardware, dst: NkiTensor, src: NkiTensor) -> Cost:
    """A copy or tensor_scalar on the Vector engine: later chips do 16-bit tiles at 4x and 32-bit ones at 2x in SBUF."""
    number = None
    if dst.buffer is src.buffer is MemoryRegion.sbuf:
        if dst.dtype.itemsize == 2 and src.dtype.itemsize == 2:
            contiguous = dst.is_contiguous() and src.is_contiguous()
            number = "vector_fast_mode_16bit" if contiguous else "vector_fast_mode_16bit_strided"
        elif 0 not in src.strides[1:]:
            number = "vector_fast_mode_fp32"
    fast = number is not None and src.free_size > 0 and getattr(hardware, number) > 1
    return vector(hardware, src.free_size, number, fast_mode=fast)


def tensor_tensor(hardware: Hardware, dst: NkiTensor, data1: NkiTensor, data2: NkiTensor) -> Cost:
    """A two-operand instruction on the Vector engine: two SBUF inputs share a port on the first generation.

    Traces show no fast mode where an operand is repeated along the free axis.
    """
    if data1.buffer is MemoryRegion.psum or data2.buffer is MemoryRegion.psum:
        return vector(hardware, data1.free_size)
    repeated = data1.size != data2.size or 0 in data1.strides[1:] or 0 in data2.strides[1:]
    narrow = dst.dtype.itemsize == data1.dtype.itemsize == data2.dtype.itemsize == 2
    if narrow and not repeated and dst.buffer is MemoryRegion.sbuf:
        return vector(hardware, data1.free_size, "vector_tensor_tensor_16bit")
    return vector(hardware, data1.free_size, "vector_tensor_tensor_sbuf_cycles_per_element")


@lru_cache(_CACHE)
def dma(
    hardware: Hardware,
    engine: Engine,
    mode: DgeMode,
    total_bytes: int,
    piece_bytes: int,
    load: bool,
    hbm_sides: int = 1,
    cast_bytes: int = 0,
    by_row: bool = False,
    at_run_time: bool = False,
    fraction: str | None = None,
) -> Cost:
    """One DMA: triggered on `engine`'s stream, cut into descriptors, spread over the core's DMA engines.

    `mode` tells who writes the descriptors: nobody (a static ring prepared at load time), the hardware, or GpSimd.
    `piece_bytes` is the length of contiguous runs. Runs are cut at the descriptor limit; up to eight short runs share a
    descriptor within it, at the rate of one long run: traces show it for prepared rings, counts of packets for those
    that software writes. Hardware writes one for every run, and so does GpSimd for rows that lie anywhere (`by_row`).
    GpSimd works out addresses for the next descriptors meanwhile, which takes longer where they follow from data
    (`at_run_time`). The longer of the two counts: a scatter of 128 rows of 4 bytes takes 2 us on gen2, 15 ns each, and
    no further microsecond.

    `hbm_sides` of source and destination lie in HBM. However many engines move them, DMAs of one core take their bytes
    from its share of HBM, so a DMA holds the pool for no less than its bytes take there. The engines do not start
    together, but none starts later than the first one would have finished its part. `cast_bytes` is what arrives where
    the dtype changes on the way, which slows the engines down; 0 for a copy. `fraction` names the part of the copying
    rate at which the engines do something else.
    """
    piece = max(min(piece_bytes, hardware.dma_descriptor_bytes_max), 1)
    shared = 1
    if mode is not DgeMode.hwdge and not by_row:
        shared = min(max(hardware.dma_descriptor_bytes_max // piece, 1), _PIECES_MAX)
    descriptors = ceil(total_bytes / (piece * shared))
    data_ns = total_bytes / hardware.dma_engine_bytes_per_ns
    if cast_bytes:
        data_ns = max(data_ns, cast_bytes / hardware.dma_cast_bytes_per_ns)
    each_ns = hardware.dma_descriptor_ns + data_ns / descriptors  # from one queued descriptor to the next
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
    used = min(descriptors, hardware.dma_engines)
    moving_ns = ceil(descriptors / hardware.dma_engines) * each_ns
    skew_ns = min(hardware.dma_load_skew_ns if load else hardware.dma_store_skew_ns, moving_ns)
    apart_ns = skew_ns * (used - 1) / hardware.dma_engines
    hbm_ns = hbm_sides * total_bytes / hardware.hbm_gb_per_s_per_core
    busy_ns = max(descriptors * each_ns / hardware.dma_engines, hbm_ns)
    transfer_ns = max(apart_ns + moving_ns + hardware.dma_descriptor_latency_ns, hbm_ns)
    clock = clock_ghz(hardware, engine)
    issue_ns = trigger_ns + gpsimd_ns
    latency = (issue_ns + first_ns + transfer_ns + hardware.dma_completion_ns) * clock
    longer = 1.0
    if fraction is not None:
        longer = 1 / getattr(hardware, fraction)
        longer_ns = transfer_ns * (longer - 1)
        busy_ns, transfer_ns = busy_ns / getattr(hardware, fraction), transfer_ns + longer_ns
        latency += longer_ns * clock
    parts = DmaCost(
        bytes=total_bytes,
        descriptors=descriptors,
        trigger_ns=trigger_ns,
        first_byte_ns=first_ns,
        busy_ns=busy_ns,
        transfer_ns=transfer_ns,
        completion_ns=hardware.dma_completion_ns,
        gpsimd_ns=gpsimd_ns,
    )

    def explain() -> tuple[Term, ...]:
        queued_ns = ceil(descriptors / hardware.dma_engines) * hardware.dma_descriptor_ns
        casts = cast_bytes and data_ns > total_bytes / hardware.dma_engine_bytes_per_ns
        data: list[tuple[str, float, bool]] = [
            ("dma_descriptor_latency_ns", hardware.dma_descriptor_latency_ns, False),
            ("dma_load_skew_ns" if load else "dma_store_skew_ns", apart_ns, False),
            ("dma_descriptor_ns", queued_ns, True),
            ("dma_cast_bytes_per_ns" if casts else "dma_engine_bytes_per_ns", moving_ns - queued_ns, True),
        ]
        if sum(ns for _, ns, _ in data) < hbm_ns:
            data = [("hbm_gb_per_s_per_core", hbm_ns, True)]
        at = () if fraction is None else (fraction,)
        return (
            *_start(hardware, mode, load, at_run_time, parts),
            *[Term(Phase.data, (number, *at), ns * longer, grows) for number, ns, grows in data],
            Term(Phase.completion, ("dma_completion_ns",), hardware.dma_completion_ns, False),
        )

    return Cost(interval_cycles=issue_ns * clock, latency_cycles=latency, dma=parts, explain=explain)


def _start(
    hardware: Hardware, mode: DgeMode, load: bool, at_run_time: bool, parts: DmaCost
) -> tuple[Term, ...]:
    """The terms of a DMA until its first byte moves: on the stream that triggers it, on GpSimd, and after them."""
    kind = {DgeMode.swdge: "swdge", DgeMode.hwdge: "hwdge"}.get(mode, "static")
    trigger = f"dma_{kind}_trigger_ns"
    trigger_ns = getattr(hardware, trigger)
    terms = [Term(Phase.issue, (trigger,), trigger_ns, False)]
    if parts.trigger_ns > trigger_ns:
        beyond_ns = parts.trigger_ns - trigger_ns
        terms.append(Term(Phase.issue, ("dma_hwdge_descriptor_ns",), beyond_ns, True))
    if mode is DgeMode.swdge:
        addresses = "dma_swdge_gpsimd_ns" if at_run_time else "dma_swdge_known_gpsimd_ns"
        grows = parts.gpsimd_ns > getattr(hardware, addresses)
        number = "dma_swdge_descriptor_ns" if grows else addresses
        terms.append(Term(Phase.issue, (number,), parts.gpsimd_ns, grows))
    first = f"dma_{kind}_first_ns" if load or kind != "static" else "dma_static_store_first_ns"
    return (*terms, Term(Phase.first_byte, (first,), parts.first_byte_ns, False))


@lru_cache(_CACHE)
def exchanged(hardware: Hardware, total_bytes: int, row_bytes: int, by_gpsimd: bool) -> Cost:
    """Tiles that two cores exchange: by GpSimd at a rate of its own, else as a DMA after a core barrier."""
    if by_gpsimd:
        moving_ns = total_bytes / hardware.sendrecv_gb_per_s
        whole_ns = hardware.sendrecv_latency_ns + moving_ns
        cycles = whole_ns * hardware.gpsimd_clock_ghz
        begins = Term(Phase.issue, ("sendrecv_latency_ns",), hardware.sendrecv_latency_ns, False)
        moves = Term(Phase.issue, ("sendrecv_gb_per_s",), moving_ns, True)
        return Cost(cycles, cycles, rendezvous_ns=whole_ns, explain=lambda: (begins, moves))
    copy = dma(hardware, Engine.sync, DgeMode.none, total_bytes, row_bytes, True, hbm_sides=0)
    waits = Term(Phase.completion, ("core_barrier_ns",), hardware.core_barrier_ns, False)
    return replace(
        copy,
        latency_cycles=copy.latency_cycles + hardware.core_barrier_ns * hardware.sync_clock_ghz,
        rendezvous_ns=hardware.core_barrier_ns,
        explain=lambda: (*copy.terms, waits),
    )


@lru_cache(_CACHE)
def collective(hardware: Hardware, ranks: int, total_bytes: int, hops: float) -> Cost:
    """A collective over `ranks` ranks: small-message latency plus bytes over the rate of its size range.

    `hops` scales the payload: 1 for an all-reduce (reduce-scatter and all-gather together), one half for either.
    """
    latency_ns = of_ranks(hardware.collective_latency_ns, ranks)
    switch_bytes = of_ranks(hardware.collective_switch_bytes, ranks)
    wire_ns = min(total_bytes, switch_bytes) / of_ranks(hardware.collective_mesh_gb_per_s, ranks)
    mesh_ns = wire_ns
    if total_bytes > switch_bytes:
        # Bytes more never take less time: just above the switch the plateau's rate is not reached yet.
        ring_ns = 2 * (ranks - 1) / ranks * total_bytes / of_ranks(hardware.collective_bus_gb_per_s, ranks)
        wire_ns = max(wire_ns, ring_ns)
    whole_ns = latency_ns + hops * wire_ns if ranks > 1 else 0.0
    trigger_ns = hardware.dma_static_trigger_ns
    clock = hardware.sync_clock_ghz

    def explain() -> tuple[Term, ...]:
        trigger = Term(Phase.issue, ("dma_static_trigger_ns",), trigger_ns, False)
        if ranks == 1:
            return (trigger,)
        rate = "collective_bus_gb_per_s" if wire_ns > mesh_ns else "collective_mesh_gb_per_s"
        latency = Term(Phase.data, ("collective_latency_ns",), latency_ns, False)
        return trigger, latency, Term(Phase.data, (rate,), hops * wire_ns, True)

    return Cost(
        interval_cycles=trigger_ns * clock,
        latency_cycles=(trigger_ns + whole_ns) * clock,
        rendezvous_ns=whole_ns,
        explain=explain,
    )


def clock_ghz(hardware: Hardware, engine: Engine) -> float:
    """The clock of an engine's instruction stream."""
    if engine is Engine.tensor:
        return hardware.tensor_clock_ghz
    if engine is Engine.vector:
        return hardware.vector_clock_ghz
    if engine is Engine.scalar:
        return hardware.scalar_clock_ghz
    if engine is Engine.gpsimd:
        return hardware.gpsimd_clock_ghz
    return hardware.sync_clock_ghz
