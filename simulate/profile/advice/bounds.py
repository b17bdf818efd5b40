"""The vendor's seven bounds on the length of a launch, under the vendor's names and by the vendor's formulas.

Source: aws-neuron/neuron-agentic-development, skills/neuron-nki-profile-querying/references/performance-bounds.md. The
vendor states them for a single core and warns that gaps between them are no predictions. FLOP here are two for each
multiply-add, whatever the operands' width, and the Tensor engine's peak is that of 16-bit operands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from simulate.hardware import Hardware
from simulate.profile.roofline import matmul_peaks
from simulate.profile.traffic import TensorTraffic
from simulate.run.stream import Stream
from simulate.timing import SliceKind, Timeline

_DMA = "DMA"
BOUND_ENGINES = ("Tensor", "Vector", "Scalar", "GpSimd")
"""The engines whose active times the bounds use, besides DMA."""


@dataclass(frozen=True, slots=True)
class Bound:
    """One bound: its name, its formula, the time, and the speedup if only the engine that it is about improved."""

    name: str
    formula: str
    time_ns: float
    speedup: float


@dataclass(frozen=True, slots=True)
class Quantities:
    """What the bounds are made of, for one core.

    `engine_active_ns` has every name of `BOUND_ENGINES`. `necessary_bytes` are those of inputs, outputs and weights,
    each once. `hw_flops` count each multiply-add as two and include `transpose_flops`.
    """

    total_ns: float
    dma_active_ns: float
    dma_bytes: float
    necessary_bytes: float
    hw_flops: float
    transpose_flops: float
    engine_active_ns: Mapping[str, float]
    dma_peak_bytes_per_ns: float
    tensor_peak_flops_per_ns: float


def bounds_of(found: Quantities) -> tuple[Bound, ...]:
    """The seven bounds, in the vendor's order."""
    active = {**found.engine_active_ns, _DMA: found.dma_active_ns}
    dma_peak, peak = found.dma_peak_bytes_per_ns, found.tensor_peak_flops_per_ns
    useful = found.hw_flops - found.transpose_flops
    rows = (
        ("memory_bound", "dma_active_time", active[_DMA], _DMA),
        ("memory_bound_ideal", "dma_transfer_bytes / dma_bw_peak", found.dma_bytes / dma_peak, _DMA),
        (
            "memory_bound_ideal_no_reloads",
            "necessary_bytes / dma_bw_peak",
            found.necessary_bytes / dma_peak,
            _DMA,
        ),
        ("compute_bound", "te_active_time", active["Tensor"], "Tensor"),
        ("compute_bound_ideal_flops", "hw_flops / te_peak_flops", found.hw_flops / peak, "Tensor"),
        (
            "compute_bound_ideal_useful_flops",
            "(hw_flops - transpose_flops) / te_peak_flops",
            useful / peak,
            "Tensor",
        ),
        ("perfect_pipeline", "max(engine_active_times)", max(active.values()), ""),
    )
    bounds = []
    for name, formula, time_ns, improved in rows:
        others = (busy for engine, busy in active.items() if engine != improved)
        reached = max(time_ns, *others) if improved else time_ns
        bounds.append(
            Bound(name, formula, float(time_ns), float(found.total_ns / reached) if reached else 1.0)
        )
    return tuple(bounds)


def bounds(
    stream: Stream, hardware: Hardware, timeline: Timeline, traffic: Sequence[TensorTraffic]
) -> tuple[Bound, ...]:
    """The bounds of a launch on one core."""
    dmas = [cost.dma for cost in map(stream.costs.__getitem__, stream.cost_ids) if cost.dma is not None]
    useful, turned = _flops(stream)
    return bounds_of(
        Quantities(
            total_ns=timeline.length_ns,
            dma_active_ns=dma_active_ns(timeline),
            dma_bytes=sum(dma.bytes for dma in dmas),
            necessary_bytes=sum(each.nbytes for each in traffic if each.argument or not each.read_bytes),
            hw_flops=useful + turned,
            transpose_flops=turned,
            engine_active_ns={name: timeline.busy_ns[name] for name in BOUND_ENGINES},
            dma_peak_bytes_per_ns=hardware.dma_engines * hardware.dma_engine_bytes_per_ns,
            tensor_peak_flops_per_ns=dict(matmul_peaks(hardware))["16-bit"],
        )
    )


def dma_active_ns(timeline: Timeline) -> float:
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
