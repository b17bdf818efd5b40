"""The vendor's seven bounds on the length of a launch, under the vendor's names and by the vendor's formulas.

Source: aws-neuron/neuron-agentic-development, skills/neuron-nki-profile-querying/references/performance-bounds.md. The
vendor states them for a single core and warns that gaps between them are no predictions. FLOP here are two for each
multiply-add, whatever the operands' width, and the Tensor engine's peak is that of 16-bit operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulate.hardware import Hardware
from simulate.profile.roofline import matmul_peaks
from simulate.profile.traffic import TensorTraffic
from simulate.run.stream import Stream
from simulate.timing import SliceKind, Timeline

_DMA = "DMA"
_ENGINES = ("Tensor", "Vector", "Scalar", "GpSimd")


@dataclass(frozen=True, slots=True)
class Bound:
    """One bound: its name, its formula, the time, and the speedup if only the engine that it is about improved."""

    name: str
    formula: str
    time_ns: float
    speedup: float


def bounds(
    stream: Stream, hardware: Hardware, timeline: Timeline, traffic: Sequence[TensorTraffic]
) -> tuple[Bound, ...]:
    """The bounds of a launch on one core, in the vendor's order."""
    active = {name: timeline.busy_ns[name] for name in _ENGINES}
    active[_DMA] = _dma_active_ns(timeline)
    dma_peak = hardware.dma_engines * hardware.dma_engine_bytes_per_ns
    dmas = [cost.dma for cost in map(stream.costs.__getitem__, stream.cost_ids) if cost.dma is not None]
    moved = sum(dma.bytes for dma in dmas)
    necessary = sum(each.nbytes for each in traffic if each.argument or not each.read_bytes)
    useful, turned = _flops(stream)
    peak = dict(matmul_peaks(hardware))["16-bit"]
    rows = (
        ("memory_bound", "dma_active_time", active[_DMA], _DMA),
        ("memory_bound_ideal", "dma_transfer_bytes / dma_bw_peak", moved / dma_peak, _DMA),
        ("memory_bound_ideal_no_reloads", "necessary_bytes / dma_bw_peak", necessary / dma_peak, _DMA),
        ("compute_bound", "te_active_time", active["Tensor"], "Tensor"),
        ("compute_bound_ideal_flops", "hw_flops / te_peak_flops", (useful + turned) / peak, "Tensor"),
        (
            "compute_bound_ideal_useful_flops",
            "(hw_flops - transpose_flops) / te_peak_flops",
            useful / peak,
            "Tensor",
        ),
        ("perfect_pipeline", "max(engine_active_times)", max(active.values()), ""),
    )
    found = []
    for name, formula, time_ns, improved in rows:
        others = (busy for engine, busy in active.items() if engine != improved)
        reached = max(time_ns, *others) if improved else time_ns
        found.append(
            Bound(name, formula, float(time_ns), float(timeline.length_ns / reached) if reached else 1.0)
        )
    return tuple(found)


def _dma_active_ns(timeline: Timeline) -> float:
    """The time during which any DMA moves bytes."""
    rows = np.flatnonzero(timeline.kind == SliceKind.transfer)
    total = reached = 0.0
    for start, end in sorted(zip(timeline.start_ns[rows].tolist(), timeline.end_ns[rows].tolist())):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def _flops(stream: Stream) -> tuple[int, int]:
    """FLOP of the matmuls, and those of transposes on the Tensor engine: products with an identity."""
    each = []
    for template in stream.templates:
        cost, turned = template.plan.cost, 0
        if cost.streamed_cycles and not cost.flops:
            data = template.plan.reads[0]
            turned = 2 * data.shape[0] * data.free_size * data.shape[0]
        each.append((cost.flops, turned))
    return (
        sum(each[number][0] for number in stream.template_ids),
        sum(each[number][1] for number in stream.template_ids),
    )
