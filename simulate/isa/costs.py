"""Cost of an instruction from the hardware record: issue interval and latency in the engine's cycles.

The formulas are those of the nki.isa reference of release 2.26 (the last to print them) with the overheads fitted to
published device traces; every constant and its source stands in the hardware record. N is elements per partition.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from simulate.hardware import Hardware
from simulate.hardware.topology import of_ranks
from simulate.isa.enums import DgeMode, Engine
from simulate.isa.plan import Cost, DmaCost
from simulate.memory import MemoryRegion, NkiTensor

_CACHE = 1 << 14
_PIECES_MAX = 8  # rows of 512 bytes in one descriptor, traces of 64 tiles of 128 x 128


@lru_cache(_CACHE)
def vector(
    hardware: Hardware, element_cycles: float, extra_cycles: float = 0.0, fast_mode: bool = False
) -> Cost:
    """Vector engine: `element_cycles` for the elements of one partition, at least the minimum interval.

    In a fast mode, several elements per cycle, more time passes between instructions.
    """
    clock = hardware.vector_clock_ghz
    busy = max(hardware.vector_min_interval_cycles, element_cycles) + extra_cycles
    between_ns = hardware.vector_interval_overhead_ns
    if fast_mode:
        between_ns = hardware.vector_fast_mode_interval_overhead_ns
    return Cost(
        interval_cycles=max(busy, element_cycles + between_ns * clock),
        latency_cycles=element_cycles + extra_cycles + hardware.vector_latency_overhead_ns * clock,
        fast_mode=fast_mode,
    )


@lru_cache(_CACHE)
def scalar(
    hardware: Hardware, elements: int, table: str | None, accumulates: bool = False, from_psum: bool = True
) -> Cost:
    """Scalar engine: one element per lane and cycle; functions from a table have a longer pipeline than a copy.

    That pipeline is longer still for an operand in SBUF; a copy's is the same from both memories.
    """
    clock = hardware.scalar_clock_ghz
    extra = hardware.activation_accumulate_extra_cycles if accumulates else 0
    plain = table is None or table == "copy"
    if plain:
        between_ns, latency_ns = hardware.scalar_interval_overhead_ns, hardware.scalar_latency_overhead_ns
    elif from_psum:
        between_ns = hardware.scalar_table_function_interval_ns
        latency_ns = hardware.scalar_table_function_latency_ns
    else:
        between_ns = hardware.scalar_table_function_sbuf_interval_ns
        latency_ns = hardware.scalar_table_function_sbuf_latency_ns
    busy = max(hardware.scalar_min_interval_cycles, elements) + extra
    return Cost(
        interval_cycles=max(busy, elements + between_ns * clock),
        latency_cycles=elements + extra + latency_ns * clock,
        table=table,
    )


@lru_cache(_CACHE)
def gpsimd(hardware: Hardware, elements: float) -> Cost:
    """GpSimd: a fixed start and then one element per partition and cycle at best."""
    cycles = hardware.gpsimd_fixed_cycles + elements * hardware.gpsimd_cycles_per_element
    return Cost(interval_cycles=cycles, latency_cycles=cycles)


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
    holds the tile already: matmuls with equal `stationary` read it alike, into the same part of the array. The minimum
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
    return Cost(
        interval_cycles=interval,
        latency_cycles=streamed + hardware.matmul_latency_ns * hardware.tensor_clock_ghz,
        flops=0 if transpose else 2 * contraction * columns * rows,
        streamed_cycles=streamed,
        stationary=stationary,
        kept_cycles=exposed if stationary is not None else 0.0,
    )


def copied(hardware: Hardware, dst: NkiTensor, src: NkiTensor) -> Cost:
    """A copy or tensor_scalar on the Vector engine."""
    cycles = copy_cycles(hardware, dst, src)
    return vector(hardware, cycles, fast_mode=cycles < src.free_size)


def copy_cycles(hardware: Hardware, dst: NkiTensor, src: NkiTensor) -> float:
    """Vector cycles of a copy or tensor_scalar: later chips do 16-bit tiles at 4x and 32-bit ones at 2x in SBUF."""
    elements = src.free_size
    if dst.buffer is not MemoryRegion.sbuf or src.buffer is not MemoryRegion.sbuf:
        return elements
    if dst.dtype.itemsize == 2 and src.dtype.itemsize == 2:
        contiguous = dst.is_contiguous() and src.is_contiguous()
        rate = hardware.vector_fast_mode_16bit if contiguous else hardware.vector_fast_mode_16bit_strided
        return elements / rate
    return elements / (hardware.vector_fast_mode_fp32 if 0 not in src.strides[1:] else 1)


def tensor_tensor_cycles(hardware: Hardware, dst: NkiTensor, data1: NkiTensor, data2: NkiTensor) -> float:
    """Vector cycles of a two-operand instruction: two SBUF inputs share a port on the first generation."""
    elements = data1.free_size
    if data1.buffer is MemoryRegion.psum or data2.buffer is MemoryRegion.psum:
        return elements
    broadcast = data1.size != data2.size or 0 in data1.strides[1:] or 0 in data2.strides[1:]
    if broadcast:
        # Traces show no fast mode where an operand is repeated along the free axis.
        return elements * hardware.vector_tensor_tensor_sbuf_cycles_per_element
    if (
        dst.dtype.itemsize == data1.dtype.itemsize == data2.dtype.itemsize == 2
        and dst.buffer is MemoryRegion.sbuf
    ):
        return elements / hardware.vector_tensor_tensor_16bit
    return elements * hardware.vector_tensor_tensor_sbuf_cycles_per_element


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
    the dtype changes on the way, which slows the engines down; 0 for a copy.
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
    hbm_ns = hbm_sides * total_bytes / hardware.hbm_gb_per_s_per_core
    parts = DmaCost(
        bytes=total_bytes,
        descriptors=descriptors,
        trigger_ns=trigger_ns,
        first_byte_ns=first_ns,
        busy_ns=max(descriptors * each_ns / hardware.dma_engines, hbm_ns),
        transfer_ns=max(
            skew_ns * (used - 1) / hardware.dma_engines + moving_ns + hardware.dma_descriptor_latency_ns,
            hbm_ns,
        ),
        completion_ns=hardware.dma_completion_ns,
        gpsimd_ns=gpsimd_ns,
    )
    clock = clock_ghz(hardware, engine)
    issue_ns = trigger_ns + gpsimd_ns
    whole_ns = issue_ns + first_ns + parts.transfer_ns + parts.completion_ns
    return Cost(interval_cycles=issue_ns * clock, latency_cycles=whole_ns * clock, dma=parts)


@lru_cache(_CACHE)
def collective(hardware: Hardware, ranks: int, total_bytes: int, hops: float) -> Cost:
    """A collective over `ranks` ranks: small-message latency plus bytes over the rate of its size range.

    `hops` scales the payload: 1 for an all-reduce (reduce-scatter and all-gather together), one half for either.
    """
    latency_ns = of_ranks(hardware.collective_latency_ns, ranks)
    switch_bytes = of_ranks(hardware.collective_switch_bytes, ranks)
    wire_ns = min(total_bytes, switch_bytes) / of_ranks(hardware.collective_mesh_gb_per_s, ranks)
    if total_bytes > switch_bytes:
        # Bytes more never take less time: just above the switch the plateau's rate is not reached yet.
        ring_ns = 2 * (ranks - 1) / ranks * total_bytes / of_ranks(hardware.collective_bus_gb_per_s, ranks)
        wire_ns = max(wire_ns, ring_ns)
    whole_ns = latency_ns + hops * wire_ns if ranks > 1 else 0.0
    trigger_ns = hardware.dma_static_trigger_ns
    clock = hardware.sync_clock_ghz
    return Cost(
        interval_cycles=trigger_ns * clock,
        latency_cycles=(trigger_ns + whole_ns) * clock,
        rendezvous_ns=whole_ns,
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
