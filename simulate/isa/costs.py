"""Costs of instructions on the engines from the hardware record: issue interval and latency in the engine's cycles.

The formulas are those of the nki.isa reference of release 2.26 (the last to print them) with the overheads fitted to
published device traces; every constant and its source stands in the hardware record. "Elements" are elements per
partition. Costs of DMAs are in `simulate.isa.dma_costs`. Planners call these functions. Each returns a `Cost`, whose
`explain` lists the terms that the interval and the latency are made of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial, wraps
from typing import Concatenate, NamedTuple, ParamSpec

from simulate.hardware import Hardware
from simulate.isa.enums import Engine
from simulate.isa.plan import Cost, Phase, Term
from simulate.memory import MemoryRegion, NkiTensor

_CACHE = 1 << 14  # costs of equal arguments that a process keeps, of each kind
_P = ParamSpec("_P")
_Function = Callable[Concatenate[Hardware, _P], Cost]


def cost_function(function: _Function[_P]) -> _Function[_P]:
    """Return a cost function that caches: equal arguments give one `Cost` object, whose `again` is set. A decorator.

    `again` computes the cost by another record, so that a launch can be timed by another record without being planned
    again. A choice that depends on times of the record, such as which of two phases is longer, is therefore made in
    such a function and never in a planner.
    """

    def made(hardware: Hardware, *args: _P.args, **kwargs: _P.kwargs) -> Cost:
        cost = function(hardware, *args, **kwargs)
        return replace(cost, again=lambda other: kept(other, *args, **kwargs))  # type: ignore[arg-type]

    kept = lru_cache(_CACHE)(wraps(function)(made))
    return kept  # type: ignore[return-value]


_THROTTLE = ("tensor_throttled_clock_ghz", "activity_throttle_busy_fraction")


@cost_function
def vector(
    hardware: Hardware,
    elements: float,
    number: str | None = None,
    accumulates: bool = False,
    fast_mode: bool = False,
) -> Cost:
    """Return the cost of an instruction that streams elements through the Vector engine.

    Args:
        hardware: Record of the chip.
        elements: Elements per partition.
        number: Field of the record with the pace: cycles per element if its name ends in "_cycles_per_element", else
            elements per cycle. None for one element per cycle.
        accumulates: Whether the instruction reads out an accumulator, which takes extra cycles.
        fast_mode: Whether a pace above one element per cycle is a fast mode, with more time between instructions.
    """
    cycles = elements
    if number is not None:
        pace = getattr(hardware, number)
        cycles = elements * pace if number.endswith("_cycles_per_element") else elements / pace
        fast_mode = fast_mode and pace > 1
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


@cost_function
def scalar(
    hardware: Hardware, elements: int, table: str | None, accumulates: bool = False, from_psum: bool = True
) -> Cost:
    """Return the cost of an instruction that streams one element per partition and cycle through the Scalar engine.

    Args:
        hardware: Record of the chip.
        elements: Elements per partition.
        table: Set of tables of the activation function, which lengthens the pipeline unless it is "copy"; None without
            one.
        accumulates: Whether the instruction reads out an accumulator, which takes extra cycles.
        from_psum: Whether the operand is in PSUM; from SBUF a table's pipeline is longer still.
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
    """Names of an engine's fields in the hardware record: clock, minimum interval, extra cycles of an accumulator."""

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
    """Return the terms of the cost of an engine that streams elements.

    Args:
        hardware: Record of the chip.
        lane: Names of the engine's fields of the record.
        cycles: Cycles in which the elements stream.
        number: Field of the record that gives the pace; None for one element per cycle.
        extra: Extra cycles of an accumulator, 0 without one.
        between: Field with the overhead of the interval in ns.
        pipeline: Field with the overhead of the latency in ns.
        interval: The whole interval in cycles.
        latency: The whole latency in cycles.
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
    """Return the term of the latency after the interval, when the engine is free and the result is still on its way.

    Args:
        interval: The interval in cycles.
        latency: The latency in cycles.
        clock: Clock in GHz.
        numbers: Fields of the record that decide the term.
    """
    return Term(Phase.pipeline, numbers, max(latency - interval, 0.0) / clock, False)


@cost_function
def gpsimd(hardware: Hardware, elements: float) -> Cost:
    """Return the cost on GpSimd: a fixed start, then `elements` per partition at the record's cycles per element."""
    streamed = elements * hardware.gpsimd_cycles_per_element
    return _gpsimd(
        hardware, "gpsimd_fixed_cycles", hardware.gpsimd_fixed_cycles, "gpsimd_cycles_per_element", streamed
    )


@cost_function
def gathered(hardware: Hardware, elements: int, starts: int) -> Cost:
    """Return the cost of GpSimd's gather: that of `gpsimd` plus `starts` more fixed starts."""
    return gpsimd(
        hardware, elements + starts * (hardware.gpsimd_fixed_cycles / hardware.gpsimd_cycles_per_element)
    )


@cost_function
def largest(hardware: Hardware, searched: int, kept: int) -> Cost:
    """Return the cost of GpSimd's topk: cycles for each element searched, and a cycle for each element kept."""
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


def on_engine(hardware: Hardware, engine: Engine, elements: int, number: str | None = None) -> Cost:
    """Return the cost of streaming elements on Vector or GpSimd.

    Args:
        hardware: Record of the chip.
        engine: GpSimd; every other engine counts as Vector.
        elements: Elements per partition.
        number: Field of the record with Vector's pace, as in `vector`; GpSimd ignores it.
    """
    return gpsimd(hardware, elements) if engine is Engine.gpsimd else vector(hardware, elements, number)


@cost_function
def cleared(hardware: Hardware, engine: Engine, elements: int, number: str | None = None) -> Cost:
    """Return the cost of writing zeros, as `on_engine`, with `clears` set: later matmuls may accumulate onto them."""
    return replace(on_engine(hardware, engine, elements, number), clears=True)


@cost_function
def fixed(hardware: Hardware, engine: Engine, number: str, rendezvous: bool = False) -> Cost:
    """Return the cost of an instruction that takes one time of the record, whatever its operands.

    Args:
        hardware: Record of the chip.
        engine: Engine of the instruction.
        number: Field of the record with the time in ns.
        rendezvous: Whether the time counts from when all members of a rendezvous wait.
    """
    ns = getattr(hardware, number)
    cycles = ns * clock_ghz(hardware, engine)
    term = Term(Phase.issue, (number,), ns, False)
    return Cost(cycles, cycles, rendezvous_ns=ns if rendezvous else 0.0, explain=lambda: (term,))


@cost_function
def matmul(
    hardware: Hardware,
    contraction: int,
    columns: int,
    rows: int,
    fp32: bool,
    transpose: bool = False,
    stationary: tuple[int, ...] | None = None,
    cells: tuple[int, ...] = (),
) -> Cost:
    """Return the cost of a matmul on the Tensor engine.

    The stationary tile is loaded while the matmul before streams, one row of it at a time. A stream shorter than the
    contraction does not hide the load, which then sets the pace (products of a matrix and a vector), unless the array
    holds the tile already. The minimum interval holds for an instruction, not for each of its passes: float32 products
    of 28 columns were seen to take 61 ns on gen3. Matmuls in tiles of the array run side by side; the engine issues the
    next one after the minimum interval.

    Args:
        hardware: Record of the chip.
        contraction: Rows of the stationary tile, which are its partitions.
        columns: Columns of the stationary tile.
        rows: Columns of the moving tile, which are streamed.
        fp32: Whether the operands are float32, which takes several passes.
        transpose: Whether the matmul is a transpose, which has no FLOPs and fewer float32 passes.
        stationary: Identity of how and where in the array the stationary tile is read; None if it is never reused.
        cells: Cells of the array that a matmul in a tile of the array takes; empty for the whole array.
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
        shortest = "matmul_min_interval_cycles"
        least = (shortest,) if streamed == hardware.matmul_min_interval_cycles else ()
        next_one = (shortest,) if cells else ()  # its engine is free for another tile after that
        pace = ("load_weights_cycles_per_row", *next_one, array) if exposed else (*(least or next_one), array)
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
        cells=cells,
        explain=explain,
    )


def copied(hardware: Hardware, engine: Engine, dst: NkiTensor, src: NkiTensor, bitvec: bool = False) -> Cost:
    """Return the cost of a tensor_copy or tensor_scalar from `src` to `dst` on an engine.

    In SBUF, Vector has fast modes for 16-bit tiles and for tiles without repeated elements, at the record's paces.
    `bitvec` says whether the operators work on bits, for which 32-bit tiles have a pace of their own.
    """
    if engine is Engine.scalar:
        return scalar(hardware, src.free_size, "copy")
    if engine is Engine.gpsimd:
        return gpsimd(hardware, src.free_size)
    number = None
    if dst.buffer is src.buffer is MemoryRegion.sbuf:
        if dst.dtype.itemsize == 2 and src.dtype.itemsize == 2:
            contiguous = dst.is_contiguous() and src.is_contiguous()
            number = "vector_fast_mode_16bit" if contiguous else "vector_fast_mode_16bit_strided"
        elif 0 not in src.strides[1:]:
            is_word_of_bits = bitvec and dst.dtype.itemsize == 4
            number = "vector_bitwise_32bit_elements_per_cycle" if is_word_of_bits else "vector_fast_mode_fp32"
    fast = number is not None and src.free_size > 0
    return vector(hardware, src.free_size, number, fast_mode=fast)


def tensor_tensor(hardware: Hardware, dst: NkiTensor, data1: NkiTensor, data2: NkiTensor) -> Cost:
    """Return the cost of a tensor_tensor on Vector, at a pace of the record unless an input is in PSUM.

    On the first generation two SBUF inputs share a port. Traces show no fast mode where an operand is repeated along
    the free axis.
    """
    if data1.buffer is MemoryRegion.psum or data2.buffer is MemoryRegion.psum:
        return vector(hardware, data1.free_size)
    repeated = data1.size != data2.size or 0 in data1.strides[1:] or 0 in data2.strides[1:]
    narrow = dst.dtype.itemsize == data1.dtype.itemsize == data2.dtype.itemsize == 2
    if narrow and not repeated and dst.buffer is MemoryRegion.sbuf:
        return vector(hardware, data1.free_size, "vector_tensor_tensor_16bit")
    return vector(hardware, data1.free_size, "vector_tensor_tensor_sbuf_cycles_per_element")


def clock_ghz(hardware: Hardware, engine: Engine) -> float:
    """Return the clock of an engine's instruction stream in GHz."""
    if engine is Engine.tensor:
        return hardware.tensor_clock_ghz
    if engine is Engine.vector:
        return hardware.vector_clock_ghz
    if engine is Engine.scalar:
        return hardware.scalar_clock_ghz
    if engine is Engine.gpsimd:
        return hardware.gpsimd_clock_ghz
    return hardware.sync_clock_ghz
