"""Gains from using all partitions: elementwise work on few partitions, spread over all of them.

An `Edit` holds the changes of a stream, whose events are the instructions of a launch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from simulate.hardware import Hardware
from simulate.isa import costs, dma_costs
from simulate.isa.enums import DgeMode, Engine
from simulate.isa.plan import PERMUTES_BITS, PLAIN, Cost, Phase
from simulate.isa.shapes import count_contiguous_bytes
from simulate.profile.advice.edits import Edit, Uses, collect_uses, find_trigger_engine
from simulate.run.stream import Stream

_ELEMENTWISE = Engine.vector, Engine.scalar, Engine.gpsimd


def spread_over_partitions(stream: Stream, hardware: Hardware) -> Iterator[Edit]:
    """Yield an edit that spreads elementwise tiles of at most half of the partitions over all partitions.

    Nothing is yielded without such tiles. A tile is spread if all instructions that access it are elementwise
    or plain DMAs to or from HBM. The same must hold for every tile that such an instruction connects to it.
    The work per partition then shrinks by the factor by which partitions grow.
    """
    used = collect_uses(stream)
    spread = _find_tiles_to_spread(stream, used, hardware.partitions)
    edit = Edit(stream)
    fewest = hardware.partitions
    for event in range(len(stream)):
        tiles = [tensor for tensor in stream.tensors_of(event) if stream.tensors[tensor].buffer.on_chip]
        if not tiles or not spread.keys() >= set(tiles):
            continue
        factor = min(spread[tile] for tile in tiles)
        template = stream.template(event)
        if template.plan.cost.dma is not None:
            cost = _spread_dma(stream, event, factor, hardware)
        else:
            cost = _spread_instruction(template.plan.cost, template.plan.engine, factor, hardware)
            fewest = min(fewest, template.operands[template.writes[0]].shape[0])
        edit.set_cost(event, cost)
    if edit.events and fewest < hardware.partitions:
        edit.detail = f"{fewest} of {hardware.partitions} are used"
        yield edit


def _find_tiles_to_spread(stream: Stream, used: Uses, partitions: int) -> dict[int, int]:
    """Return the factor by which the number of partitions of each tile grows, for tiles that can be spread.

    The factor is at least 2, and tiles that instructions connect have the same one.

    Args:
        used: Accesses to every tensor, as `collect_uses` returns them.
        partitions: Number of partitions of the chip.
    """
    factors = {}
    for tile in used:
        record = stream.tensors[tile]
        if record.buffer.on_chip:
            factors[tile] = min(partitions // record.shape[0], math.prod(record.shape[1:]))
    groups: dict[int, set[int]] = {tile: {tile} for tile in factors}
    refused = {tile for tile, factor in factors.items() if factor < 2}
    for event in range(len(stream)):
        tiles = [tensor for tensor in stream.tensors_of(event) if tensor in factors]
        if not _can_spread(stream, event):
            refused.update(tiles)
        for tile in tiles[1:]:
            if groups[tile] is not groups[tiles[0]]:
                joined = groups[tile] | groups[tiles[0]]
                for member in joined:
                    groups[member] = joined
    return {
        tile: min(factors[member] for member in groups[tile])
        for tile in factors
        if not groups[tile] & refused
    }


def _can_spread(stream: Stream, event: int) -> bool:
    """Return whether an event may run on more partitions: a plain DMA, or an instruction without reduction or state.

    The operands of the instruction must be on chip and have equal numbers of partitions and of elements in
    each.
    """
    template, plan = stream.template(event), stream.template(event).plan
    if not template.direct or event in stream.rendezvous or plan.effects.random is not None:
        return False
    if plan.cost.dma is not None:
        return plan.effects.copies and len(template.boxes) == 2
    is_plain = plan.effects in (PLAIN, PERMUTES_BITS)
    if plan.engine not in _ELEMENTWISE or not is_plain or plan.state is not None:
        return False
    operands = [template.operands[index] for index in (*template.reads, *template.writes)]
    first = template.operands[template.writes[0]]
    return all(
        operand.shape[0] == first.shape[0] and operand.free_size == first.free_size and operand.buffer.on_chip
        for operand in operands
    )


def _spread_instruction(cost: Cost, engine: Engine, factor: int, hardware: Hardware) -> Cost:
    """Return the cost of an instruction on `factor` times more partitions with the same number of elements in all.

    Args:
        cost: Cost of the instruction as it is.
    """
    growing_ns = sum(term.ns for term in cost.terms if term.phase is Phase.issue and term.grows)
    saved_cycles = growing_ns * costs.clock_ghz(hardware, engine) * (1 - 1 / factor)
    return replace(
        cost,
        interval_cycles=cost.interval_cycles - saved_cycles,
        latency_cycles=cost.latency_cycles - saved_cycles,
    )


def _spread_dma(stream: Stream, event: int, factor: int, hardware: Hardware) -> Cost:
    """Return the cost of a DMA whose tile has `factor` times more partitions, and shorter contiguous pieces.

    A DMA whose descriptors are not written ahead keeps its cost.
    """
    template = stream.template(event)
    dma = template.plan.cost.dma
    assert dma is not None
    if dma.trigger_ns != hardware.dma_static_trigger_ns:
        return template.plan.cost
    is_load = not stream.tensors[stream.tensors_of(event)[0]].buffer.on_chip
    piece_bytes = min(map(count_contiguous_bytes, template.operands)) // factor
    return dma_costs.dma(
        hardware,
        find_trigger_engine(stream, event),
        DgeMode.none,
        dma.bytes,
        max(piece_bytes, 1),
        is_load,
        dma.bytes,
    )
