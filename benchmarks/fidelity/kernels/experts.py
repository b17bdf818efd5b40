"""Mixtures of experts for one token or a few: the chosen experts are fetched by index and multiplied."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import nki.isa as nisa
import nki.language as nl

from benchmarks.fidelity.kernels.common import PARTITIONS, broadcast, constant, evacuate, load, psum, sbuf
from benchmarks.fidelity.kernels.decode import normalised


@dataclass(frozen=True)
class Stages:
    """What a fused kernel for a mixture of experts does besides the experts.

    router [H, E] @ HBM: norm, scores and the best eight before them; down projections then come by hardware
    descriptors. buffers: sets of tiles for experts, 0 for as many as there are. memsets: tiles are cleared first.
    hardware_dge: gate and up projections come by hardware descriptors as well. shuffles: steps of a reduction over the
    partitions at the end. widened_ahead: narrow weights are widened tile by tile as they come, else before each matmul.
    scaled_apart: the products of an expert are scaled by an instruction of their own. quantised: so are activations.
    """

    router: Any = None
    one_router_load: bool = False
    buffers: int = 0
    memsets: bool = False
    hardware_dge: bool = False
    shuffles: int = 0
    widened_ahead: bool = False
    scaled_apart: bool = False
    quantised: bool = False


def experts(x, rows, gate_up, down, chosen, gate_width, down_width, stages=Stages()):
    """The chosen experts of a mixture for one token: gate_up [E, H, 2 I], down [E, I, H], fetched by index.

    x [128, H / 128]; rows [128, 1] holds the row numbers that indirect loads address. `stages` is what a kernel does
    besides.
    """
    count, depth, double = gate_up.shape
    inner = double // 2
    columns = load(x)
    if stages.router is not None:
        columns = normalised(columns, constant((PARTITIONS, 1), 1.0e-6))
        _route(columns, stages.router, stages.one_router_load)
    places = load(rows)
    gate_up = gate_up.reshape((count * depth, double))
    down = down.reshape((count * inner, depth))
    total = sbuf((PARTITIONS, depth // PARTITIONS), nl.float32)
    nisa.memset(dst=total, value=0.0)
    sets = {}
    for number in range(chosen):
        tiles = []
        for k in range(depth // PARTITIONS):
            kept = sets.get((number % stages.buffers, "gate", k)) if stages.buffers else None
            tiles.append(_gathered(gate_up, places, double, gate_width, kept, stages.hardware_dge, k))
            sets[number % max(stages.buffers, 1), "gate", k] = tiles[-1]
        if stages.widened_ahead:
            tiles = [_used(tile, 0, double, columns.dtype) for tile in tiles]
        act = sbuf((PARTITIONS, (inner + PARTITIONS - 1) // PARTITIONS), columns.dtype)
        for i in range(0, inner, PARTITIONS):
            high = min(PARTITIONS, inner - i)
            gate, up = psum((high, 1)), psum((high, 1))
            for half, bank in ((0, gate), (inner, up)):
                for k in range(len(tiles)):
                    nisa.nc_matmul(
                        dst=bank,
                        stationary=_used(tiles[k], half + i, high, columns.dtype),
                        moving=columns[:, k : k + 1],
                        accumulate=k > 0,
                    )
            curve = sbuf((high, 1), nl.float32)
            nisa.activation(dst=curve, op=nl.silu, data=gate)
            place = act[0:high, i // PARTITIONS : i // PARTITIONS + 1]
            nisa.tensor_tensor(dst=place, data1=curve, data2=up, op=nl.multiply)
            if stages.scaled_apart:
                nisa.tensor_scalar(dst=place, data=place, op0=nl.multiply, operand0=0.5)
            if stages.quantised:
                _quantise(place)
        parts = []
        for i in range(act.shape[1]):
            part = sbuf((PARTITIONS, depth), down.dtype)
            if stages.memsets:
                nisa.memset(dst=part, value=0.0, engine=nisa.gpsimd_engine)
            parts.append(_gathered(down, places, depth, down_width, part, stages.router is not None, i))
        if stages.widened_ahead:
            parts = [_used(part, 0, depth, columns.dtype) for part in parts]
        product = psum((PARTITIONS, depth // PARTITIONS))
        for n in range(depth // PARTITIONS):
            for i in range(len(parts)):
                high = min(PARTITIONS, inner - i * PARTITIONS)
                stationary = _used(parts[i], n * PARTITIONS, PARTITIONS, columns.dtype)
                nisa.nc_matmul(
                    dst=product[:, n : n + 1],
                    stationary=stationary[0:high, :],
                    moving=act[0:high, i : i + 1],
                    accumulate=i > 0,
                )
        nisa.tensor_tensor(dst=total, data1=total, data2=product, op=nl.add)
    for step in range(stages.shuffles):
        moved = sbuf(total.shape, nl.float32)
        nisa.nc_stream_shuffle(dst=moved, src=total, shuffle_mask=[(i + (1 << step)) % 32 for i in range(32)])
        nisa.tensor_tensor(dst=total, data1=total, data2=moved, op=nl.add)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    result = sbuf(x.shape, x.dtype)
    nisa.tensor_copy(dst=result, src=total)
    nisa.dma_copy(dst=out, src=result)
    return out


def paired_experts(x, rows, blocks, loads, matmuls, tokens):
    """`loads` blocks [128, n] fetched by index, one DMA each, and `matmuls` small products of each with the tokens.

    The products of a block accumulate in PSUM and are scaled after that; x [128, tokens].
    """
    moving = load(x)
    places = load(rows)
    total = sbuf((PARTITIONS, tokens), nl.float32)
    nisa.memset(dst=total, value=0.0)
    scale = constant((PARTITIONS, 1), 1.0)
    for _ in range(loads):
        tile = _gathered(blocks, places, blocks.shape[1], blocks.shape[1])
        bank = psum((PARTITIONS, tokens))
        for i in range(matmuls):
            stationary = tile[:, i * PARTITIONS : (i + 1) * PARTITIONS]
            nisa.nc_matmul(dst=bank, stationary=stationary, moving=moving, accumulate=i > 0)
        nisa.scalar_tensor_tensor(
            dst=total, data=bank, op0=nl.multiply, operand0=scale, op1=nl.add, operand1=total
        )
    out = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=total)
    return out


def _quantise(column):
    """A column scaled by its largest value over the partitions, which a transpose brings to one of them."""
    rows = column.shape[0]
    bank = psum((1, rows), column.dtype)
    nisa.nc_transpose(dst=bank, data=column)
    largest = sbuf((1, 1), nl.float32)
    nisa.tensor_reduce(dst=largest, op=nl.maximum, data=bank, axis=1)
    nisa.reciprocal(dst=largest, data=largest)
    ones = sbuf((1, rows), nl.float32)
    nisa.memset(dst=ones, value=1.0)
    nisa.tensor_scalar(
        dst=column, data=column, op0=nl.multiply, operand0=evacuate(broadcast(largest, ones), nl.float32)
    )


def _route(columns, router, at_once):
    """Scores of the experts [1, E] from router [H, E], and the eight best of them."""
    depth, count = router.shape
    blocks = depth // PARTITIONS
    bank = psum((1, count))
    whole = load(router.reshape((PARTITIONS, blocks * count)), "hwdge") if at_once else None
    for k in range(blocks):
        if at_once:
            tile = whole[:, k * count : (k + 1) * count]
        else:
            tile = load(router[k * PARTITIONS : (k + 1) * PARTITIONS, :], "hwdge")
        nisa.nc_matmul(dst=bank, stationary=columns[:, k : k + 1], moving=tile, accumulate=k > 0)
    scores = sbuf((1, count), nl.float32)
    nisa.activation(dst=scores, op=nl.copy, data=bank)
    best = sbuf((1, 8), nl.float32)
    nisa.max8(dst=best, src=scores)
    found = sbuf((1, 8), nl.uint32)
    nisa.nc_find_index8(dst=found, data=scores, vals=best)


def _gathered(table, places, columns, width, tile=None, by_hardware=False, number=0):
    """128 rows of `columns` elements of an expert table, by row numbers, in DMAs of `width` columns.

    by_hardware: rows follow each other from an address that is known when the DMA is triggered.
    """
    if tile is None:
        tile = sbuf((PARTITIONS, columns), table.dtype)
    if by_hardware:
        first = number * PARTITIONS
        nisa.dma_copy(dst=tile, src=table[first : first + PARTITIONS, :], dge_mode=nisa.dge_mode.hwdge)
        return tile
    for first in range(0, columns, width):
        last = min(columns, first + width)
        source = table.ap(
            pattern=[[columns, PARTITIONS], [1, last - first]],
            offset=first,
            vector_offset=places,
            indirect_dim=0,
        )
        nisa.dma_copy(dst=tile[:, first:last], src=source)
    return tile


def _used(tile, first, size, dtype):
    """Columns of a loaded tile in the dtype that is multiplied: fp8 weights are widened before each matmul."""
    part = tile[:, first : first + size]
    if tile.dtype == dtype:
        return part
    wide = sbuf(part.shape, dtype)
    nisa.tensor_copy(dst=wide, src=part)
    return wide
