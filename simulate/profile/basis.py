"""What a predicted length rests on: published, derived or assumed numbers of the hardware record.

Every phase of the critical path comes from few numbers of the record. A fixed overhead is told from the part
that grows with the operands; each part counts with the weakest confidence among its numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from simulate.hardware import Confidence, Hardware
from simulate.isa.costs import clock_ghz
from simulate.isa.enums import Engine
from simulate.isa.plan import Cost
from simulate.memory import MemoryRegion
from simulate.numerics import DTYPES
from simulate.profile.critical_path import Phase, Stretch
from simulate.profile.moments import Moments
from simulate.run.stream import Stream

_WEAKNESS = (Confidence.documented, Confidence.derived, Confidence.guessed)
CALLED = {
    Confidence.documented: "published",
    Confidence.derived: "derived",
    Confidence.guessed: "assumed",
}

# What sets the pace of an instruction besides the clock of its engine.
_PACE = {
    "bn_aggr": "vector_bn_aggr_cycles_per_element",
    "exponential": "vector_exponential_elements_per_cycle",
    "quantize_mx": "vector_quantize_mx_elements_per_cycle",
    "rand2": "vector_random_elements_per_cycle",
    "reciprocal": "vector_reciprocal_cycles_per_element",
    "rng": "vector_random_elements_per_cycle",
    "scalar_tensor_tensor": "vector_scalar_tensor_tensor_cycles_per_element",
    "tensor_copy_predicated": "vector_copy_predicated_sbuf_cycles_per_element",
    "tensor_reduce": "vector_reduce_16bit",
    "tensor_scalar_cumulative": "vector_scan_cycles_per_element",
    "tensor_tensor_scan": "vector_scan_cycles_per_element",
    "topk": "gpsimd_topk_cycles_per_element",
}
_COLLECTIVE = ("collective_latency_ns", "collective_mesh_gb_per_s")
_PAIR = {
    "core_barrier": ("core_barrier_ns",),
    "sendrecv": ("core_barrier_ns", "sendrecv_latency_ns", "sendrecv_gb_per_s"),
}


@dataclass(frozen=True, slots=True)
class Basis:
    """Nanoseconds of the critical path by confidence, and by the number that decides each."""

    by_confidence: tuple[tuple[Confidence, float], ...]
    by_number: tuple[tuple[str, Confidence, float], ...]


def basis(moments: Moments, path: Sequence[Stretch], hardware: Hardware) -> Basis:
    """What the length of a critical path rests on; the numbers that decide most of it first."""
    found: dict[str, float] = {}
    for stretch in path:
        stream, index = moments.stream_of(stretch.event)
        for phase, length in stretch.phases:
            for names, part in _parts(hardware, stream, index, phase, length):
                weakest = max(names, key=lambda name: _WEAKNESS.index(hardware.provenance[name].confidence))
                found[weakest] = found.get(weakest, 0.0) + part
    known = [(name, hardware.provenance[name].confidence, part) for name, part in found.items() if part]
    sums = {each: sum(part for _, has, part in known if has is each) for each in _WEAKNESS}
    return Basis(tuple(sums.items()), tuple(sorted(known, key=lambda entry: (-entry[2], entry[0]))))


def _parts(
    hardware: Hardware, stream: Stream, index: int, phase: Phase, length: float
) -> Iterator[tuple[tuple[str, ...], float]]:
    """(numbers, nanoseconds) that a phase of an event is made of."""
    cost, engine = stream.costs[stream.cost_ids[index]], Engine(stream.engines[index])
    op = stream.op_names[stream.ops[index]]
    if phase is Phase.semaphore:
        yield ("semaphore_ns", "same_engine_wait_ns"), length
    elif phase is Phase.table_load:
        yield ("activation_table_load_ns",), length
    elif op in _PAIR:
        yield _PAIR[op], length
    elif cost.dma is not None:
        yield _dma_numbers(hardware, cost, phase), length
    elif engine is Engine.dma:
        yield (("dma_static_trigger_ns",) if phase is Phase.issue else _COLLECTIVE), length
    elif op.startswith("register_"):
        yield ("register_load_hbm_ns", "semaphore_ns"), length
    else:
        if engine is Engine.tensor and phase is Phase.issue and hardware.activity_throttle:
            slowed = max(length - cost.interval_cycles / hardware.tensor_clock_ghz, 0.0)
            yield ("tensor_throttled_clock_ghz", "activity_throttle_busy_fraction"), slowed
            length -= slowed
        fixed, name = _overhead(hardware, engine, stream, index, phase)
        fixed = min(fixed, length)
        yield (name,), fixed
        if length > fixed:
            yield _pace(hardware, engine, stream, index, phase), length - fixed


def _dma_numbers(hardware: Hardware, cost: Cost, phase: Phase) -> tuple[str, ...]:
    dma = cost.dma
    assert dma is not None
    mode = "static" if dma.trigger_ns <= hardware.dma_static_trigger_ns else "hwdge"
    if dma.gpsimd_ns:
        mode = "swdge"
    if phase is Phase.issue:
        if mode == "swdge":
            at_run_time = dma.gpsimd_ns >= hardware.dma_swdge_gpsimd_ns
            fixed = "dma_swdge_gpsimd_ns" if at_run_time else "dma_swdge_known_gpsimd_ns"
            return "dma_swdge_trigger_ns", fixed, "dma_swdge_descriptor_ns"
        return (f"dma_{mode}_trigger_ns",)
    if phase is Phase.first_byte:
        return (f"dma_{mode}_first_ns",)
    if phase is Phase.completion:
        return ("dma_completion_ns",)
    return (
        "dma_engine_bytes_per_ns",
        "dma_descriptor_ns",
        "dma_descriptor_latency_ns",
        "hbm_gb_per_s_per_core",
    )


def _matmul_overhead_cycles(hardware: Hardware, stream: Stream, index: int) -> tuple[float, bool]:
    """The cycles of a matmul beside its streaming, and whether loading the stationary tile sets the pace instead."""
    cost, once = stream.costs[stream.cost_ids[index]], hardware.matmul_issue_overhead_cycles
    beside = cost.interval_cycles - cost.streamed_cycles
    names = [stream.tensors[access.tensor].dtype for access in stream.accesses(index)[:1]]
    passes = hardware.matmul_fp32_passes if any(DTYPES[name].itemsize == 4 for name in names) else 1
    loads = beside > passes * once * (1 + 1e-9)
    return (once if loads else beside), loads


def _overhead(
    hardware: Hardware, engine: Engine, stream: Stream, index: int, phase: Phase
) -> tuple[float, str]:
    """The part of an engine's phase that does not grow with the operands, in ns, and its number."""
    cost, issue = stream.costs[stream.cost_ids[index]], phase is Phase.issue
    if engine is Engine.tensor:
        if issue:
            cycles, _ = _matmul_overhead_cycles(hardware, stream, index)
            return cycles / hardware.tensor_clock_ghz, "matmul_issue_overhead_cycles"
        return hardware.matmul_latency_ns, "matmul_latency_ns"
    if engine is Engine.vector:
        name = "vector_interval_overhead_ns" if issue else "vector_latency_overhead_ns"
    elif engine is Engine.scalar:
        kind = "" if cost.table in (None, "copy") else "table_function_"
        name = f"scalar_{kind}{'interval' if issue else 'latency'}"
        name += "_overhead_ns" if not kind else "_ns"
    elif engine is Engine.gpsimd:
        return hardware.gpsimd_fixed_cycles / hardware.gpsimd_clock_ghz, "gpsimd_fixed_cycles"
    else:
        return cost.interval_cycles / clock_ghz(hardware, engine), "sync_clock_ghz"
    overhead: float = getattr(hardware, name)
    return overhead, name


def _pace(hardware: Hardware, engine: Engine, stream: Stream, index: int, phase: Phase) -> tuple[str, ...]:
    """The numbers behind the part that grows with the operands."""
    op = stream.op_names[stream.ops[index]]
    if engine is Engine.tensor:
        if phase is not Phase.issue:  # longer than at the full clock
            return ("matmul_throttled_latency_ns",)
        _, loads = _matmul_overhead_cycles(hardware, stream, index)
        return ("tensor_clock_ghz", "load_weights_cycles_per_row") if loads else ("tensor_clock_ghz",)
    if engine is Engine.gpsimd:
        return "gpsimd_clock_ghz", _PACE.get(op, "gpsimd_cycles_per_element")
    if engine is Engine.scalar:
        return ("scalar_clock_ghz",)
    if engine is not Engine.vector:
        return ("sync_clock_ghz",)
    if op in _PACE:
        return "vector_clock_ghz", _PACE[op]
    records = [stream.tensors[access.tensor] for access in stream.accesses(index)]
    if any(record.buffer is not MemoryRegion.sbuf for record in records):
        return ("vector_clock_ghz",)
    narrow = all(DTYPES[record.dtype].itemsize == 2 for record in records)
    if op == "tensor_tensor":
        name = "vector_tensor_tensor_16bit" if narrow else "vector_tensor_tensor_sbuf_cycles_per_element"
        return "vector_clock_ghz", name
    if op in ("tensor_copy", "tensor_scalar"):
        return "vector_clock_ghz", "vector_fast_mode_16bit" if narrow else "vector_fast_mode_fp32"
    return ("vector_clock_ghz",)
