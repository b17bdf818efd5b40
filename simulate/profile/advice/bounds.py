"""The vendor's seven bounds on the length of a launch, with the vendor's names and formulas.

Source: aws-neuron/neuron-agentic-development,
skills/neuron-nki-profile-querying/references/performance-bounds.md. The vendor states them for a single core,
and warns that gaps between them are no predictions. A multiply-add counts as two FLOP for any operand width.
The Tensor engine's peak is that of 16-bit operands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from simulate.hardware import Hardware
from simulate.profile.roofline import list_matmul_peaks
from simulate.profile.traffic import TensorTraffic
from simulate.run.stream import Stream
from simulate.timing import SliceKind, Timeline

_DMA = "DMA"
BOUND_ENGINES = ("Tensor", "Vector", "Scalar", "GpSimd")
"""Engines whose active times the bounds use, in addition to DMA."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound: its name and formula as the vendor states them, its time in ns, and a speedup.

    `speedup` is how many times shorter the launch could be if only the engine of the bound improved.
    """

    name: str
    formula: str
    time_ns: float
    speedup: float


@dataclass(frozen=True, slots=True)
class Quantities:
    """Inputs of the bounds, for a single core; NaN for an unknown one.

    `engine_active_ns` has every name of `BOUND_ENGINES`. `necessary_bytes` counts inputs, outputs and weights
    once each. `hw_flops` counts a multiply-add as two and includes `transpose_flops`.
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


def compute_bounds(quantities: Quantities) -> tuple[Bound, ...]:
    """Compute the seven bounds, in the vendor's order.

    A bound of an unknown quantity is NaN, except `perfect_pipeline`, which is then not reliable.
    """
    active = {**quantities.engine_active_ns, _DMA: quantities.dma_active_ns}
    dma_peak, peak = quantities.dma_peak_bytes_per_ns, quantities.tensor_peak_flops_per_ns
    useful = quantities.hw_flops - quantities.transpose_flops
    rows = (
        ("memory_bound", "dma_active_time", active[_DMA], _DMA),
        ("memory_bound_ideal", "dma_transfer_bytes / dma_bw_peak", quantities.dma_bytes / dma_peak, _DMA),
        (
            "memory_bound_ideal_no_reloads",
            "necessary_bytes / dma_bw_peak",
            quantities.necessary_bytes / dma_peak,
            _DMA,
        ),
        ("compute_bound", "te_active_time", active["Tensor"], "Tensor"),
        ("compute_bound_ideal_flops", "hw_flops / te_peak_flops", quantities.hw_flops / peak, "Tensor"),
        (
            "compute_bound_ideal_useful_flops",
            "(hw_flops - transpose_flops) / te_peak_flops",
            useful / peak,
            "Tensor",
        ),
        ("perfect_pipeline", "max(engine_active_times)", max(active.values()), ""),
    )
    bounds = []
    for name, formula, time_ns, improved_engine in rows:
        remaining_ns = (busy for engine, busy in active.items() if engine != improved_engine)
        limit_ns = max(time_ns, *remaining_ns) if improved_engine else time_ns
        bounds.append(
            Bound(name, formula, float(time_ns), float(quantities.total_ns / limit_ns) if limit_ns else 1.0)
        )
    return tuple(bounds)


def bound_launch(
    stream: Stream, hardware: Hardware, timeline: Timeline, traffic: Sequence[TensorTraffic]
) -> tuple[Bound, ...]:
    """Compute the vendor's bounds of a launch on one core from its prediction.

    Args:
        timeline: Schedule of the stream.
        traffic: Bytes to and from HBM by tensor, as `sum_traffic` returns them.
    """
    dmas = [cost.dma for cost in map(stream.costs.__getitem__, stream.cost_ids) if cost.dma is not None]
    useful_flops, transpose_flops = _count_flops(stream)
    return compute_bounds(
        Quantities(
            total_ns=timeline.length_ns,
            dma_active_ns=sum_dma_active_ns(timeline),
            dma_bytes=sum(dma.bytes for dma in dmas),
            necessary_bytes=sum(
                tensor.nbytes for tensor in traffic if tensor.argument or not tensor.read_bytes
            ),
            hw_flops=useful_flops + transpose_flops,
            transpose_flops=transpose_flops,
            engine_active_ns={name: timeline.busy_ns[name] for name in BOUND_ENGINES},
            dma_peak_bytes_per_ns=hardware.dma_engines * hardware.dma_engine_bytes_per_ns,
            tensor_peak_flops_per_ns=dict(list_matmul_peaks(hardware))["16-bit"],
        )
    )


def sum_dma_active_ns(timeline: Timeline) -> float:
    """Return the time in ns during which at least one DMA moves bytes."""
    rows = np.flatnonzero(timeline.slice_kind == SliceKind.transfer)
    total = reached = 0.0
    for start, end in sorted(zip(timeline.start_ns[rows].tolist(), timeline.end_ns[rows].tolist())):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


def _count_flops(stream: Stream) -> tuple[int, int]:
    """Return (FLOP of the matmuls, FLOP of transposes on the Tensor engine, which multiply with an identity)."""
    flops_by_template = []
    for template in stream.templates:
        cost, transpose_flops = template.plan.cost, 0
        if cost.streamed_cycles and not cost.flops:
            stationary = template.plan.reads[0]
            transpose_flops = 2 * stationary.shape[0] * stationary.free_size * stationary.shape[0]
        flops_by_template.append((cost.flops, transpose_flops))
    return (
        sum(flops_by_template[number][0] for number in stream.template_ids),
        sum(flops_by_template[number][1] for number in stream.template_ids),
    )
