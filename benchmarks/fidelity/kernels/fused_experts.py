"""RMSNorm, router, the best eight experts and their products for one token, as one kernel on each of two cores.

An expert's weights are loaded into a set of SBUF tiles, a dict that `_buffers` allocates: "gate", "down", "padded",
"gate scales" and "down scales". Several sets let loads of later experts run ahead. A wave is a group of experts that
are computed together.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from benchmarks.fidelity.kernels.common import PARTITIONS, evacuate, psum, sbuf
from benchmarks.fidelity.kernels.routing import normalised, quantised, routed

_SWDGE, _HWDGE = nisa.dge_mode.swdge, nisa.dge_mode.hwdge


@dataclass(frozen=True)
class Stages:
    """The choices in which versions of the fused kernel differ.

    router_loads: number of DMAs that load the router. router_prepared: their descriptors are prepared when the kernel
    is loaded; else software writes them. by_hardware: hardware writes the descriptors of the gate and up weights and
    of the down scales. wave: number of experts in a wave. buffers: number of sets of tiles. memsets: tiles are
    cleared for each expert, else only when a set is first used. widened: the Scalar engine converts weights to
    bfloat16 before the matmuls. silu_apart: products are scaled before the activation function, in an instruction of
    its own. packed: the gate and up scales come with the weights. scaled: weights have scales. one_number: all expert
    ids pass through one tile, so each waits for the loads of the expert before. quantised: the token is scaled for
    fp8 by its largest magnitude. by_shuffles: shuffles find this magnitude, and the outputs of each expert's
    activation are quantised too.
    """

    router_loads: int = 4
    router_prepared: bool = False
    by_hardware: bool = False
    wave: int = 4
    buffers: int = 4
    memsets: bool = False
    widened: bool = False
    silu_apart: bool = False
    packed: bool = False
    scaled: bool = False
    one_number: bool = False
    quantised: bool = False
    by_shuffles: bool = False


def fused_experts(x, gamma, router, gate_up, down, gate_scales, down_scales, cores, stages):
    """Return one core's columns [1, H / cores] of a mixture of experts for one token x [1, H].

    Both cores compute the gate and up projections of all chosen experts, and each 1 / `cores` of the columns of the
    down projections. H is on the partitions in blocks of 128; the last block of I is padded with zeros.

    Args:
        x: Token, [1, H].
        gamma: Gains of the RMSNorm, [1, H].
        router: [H, E].
        gate_up: [E, H, 2 I].
        down: [E, I, H].
        gate_scales: [E, 2 I] for fp8 weights, else None.
        down_scales: [E, H] for fp8 weights, else None.
        cores: Number of cores that share the columns.
        stages: Version of the kernel.
    """
    share = x.shape[1] // cores
    token = normalised(x, gamma)
    wide, best = routed(token, router, stages.router_loads, stages.router_prepared)
    if stages.quantised:
        token = quantised(token, stages.by_shuffles)
    total = sbuf((PARTITIONS, share // PARTITIONS), nl.float32)
    nisa.memset(dst=total, value=0.0)
    sets = [_buffers(gate_up, down, share, stages) for _ in range(stages.buffers)]
    chosen = best.shape[1]
    numbers = [_number(best, k) for k in range(chosen)] if stages.scaled and not stages.one_number else []
    shared = sbuf((1, 1), best.dtype)
    fetched = 0
    for wave in range(0, chosen, stages.wave):
        members = range(wave, min(chosen, wave + stages.wave))
        while fetched < min(chosen, wave + stages.buffers):
            tiles = sets[fetched % stages.buffers]
            if stages.memsets or fetched < stages.buffers:
                _clear_down(tiles)
            if stages.one_number:
                nisa.dma_copy(dst=shared, src=best[:, fetched : fetched + 1])
                expert = shared.ap(pattern=[[1, 1], [1, 1]], offset=0)
            elif numbers:
                expert = numbers[fetched]
            else:
                expert = best.ap(pattern=[[chosen, 1], [1, 1]], offset=fetched)
            _fetch(tiles, expert, gate_up, down, gate_scales, down_scales, stages)
            fetched += 1
        for k in members:
            if stages.widened:
                _widen(sets[k % stages.buffers])
            _pad(sets[k % stages.buffers], clear=k < stages.buffers)
        products = [_gate_and_up(token, sets[k % stages.buffers]) for k in members]
        between = [
            _activated(product, sets[k % stages.buffers], stages) for k, product in zip(members, products)
        ]
        for k, columns in zip(members, between):
            expert_output = _down(columns, sets[k % stages.buffers], share, stages)
            scaled = sbuf(expert_output.shape, nl.float32)
            nisa.tensor_scalar(dst=scaled, data=expert_output, op0=nl.multiply, operand0=wide[:, k : k + 1])
            nisa.tensor_tensor(dst=total, data1=total, data2=scaled, op=nl.add)
    out = nl.ndarray((1, share), dtype=x.dtype, buffer=nl.shared_hbm)
    row = sbuf((1, share), x.dtype)
    for n in range(share // PARTITIONS):
        bank = psum((1, PARTITIONS))
        nisa.nc_transpose(dst=bank, data=total[:, n : n + 1])
        nisa.activation(dst=row[:, n * PARTITIONS : (n + 1) * PARTITIONS], op=nl.copy, data=bank)
    nisa.dma_copy(dst=out, src=row)
    return out


def _buffers(gate_up, down, share, stages):
    """Allocate one set of SBUF tiles for an expert and return it as a dict.

    "gate": gate and up weights [128, H / 128, 2 I]. "down": tiles [128, share], one for each 128 rows. "padded":
    tiles for the last, partial block of gate and of up, [128, H / 128, 128]; none if I is a multiple of 128. "gate
    scales" and "down scales": float32.
    """
    depth, double = gate_up.shape[1:]
    blocks, inner = depth // PARTITIONS, double // 2
    dtype = nl.bfloat16 if stages.widened else gate_up.dtype
    tiles = {
        "gate": sbuf((PARTITIONS, blocks, double), gate_up.dtype),
        "down": [sbuf((PARTITIONS, share), down.dtype) for _ in range(0, inner, PARTITIONS)],
        "padded": [
            sbuf((PARTITIONS, blocks, PARTITIONS), dtype) for _ in range(2 if inner % PARTITIONS else 0)
        ],
        "gate scales": sbuf((PARTITIONS, max(double // PARTITIONS, 1)), nl.float32),
        "down scales": sbuf((PARTITIONS, share // PARTITIONS), nl.float32),
    }
    if stages.packed:
        nisa.memset(dst=tiles["gate scales"], value=1.0)  # in the place of the scales in the weights
    return tiles


def _clear_down(tiles):
    """Zero the last down tile from the last allowed start partition at or below its first unused row.

    Instructions may start at partitions 0, 64 and 96. Does nothing if the tile is full.
    """
    remainder = tiles["gate"].shape[2] // 2 % PARTITIONS
    start = 96 if remainder >= 96 else 64 if remainder >= 64 else 0
    if remainder:
        nisa.memset(dst=tiles["down"][-1][start:PARTITIONS, :], value=0.0)


def _number(best, k):
    """Copy the id of chosen expert `k` to a new SBUF tile [1, 1] and return that tile's access pattern."""
    number = sbuf((1, 1), best.dtype)
    nisa.dma_copy(dst=number, src=best[:, k : k + 1])
    return number.ap(pattern=[[1, 1], [1, 1]], offset=0)


def _fetch(tiles, expert, gate_up, down, gate_scales, down_scales, stages):
    """Load the weights and scales of one expert into the set `tiles`; `expert` is the access pattern of its id.

    Scales are loaded if `stages.scaled`, those of gate and up only if they are not packed with the weights.
    """
    depth, double = gate_up.shape[1:]
    inner, share = double // 2, tiles["down"][0].shape[1]
    blocks = depth // PARTITIONS
    pattern = [[double, PARTITIONS], [PARTITIONS * double, blocks], [1, double]]
    _dynamic(tiles["gate"], gate_up, pattern, 0, expert, stages.by_hardware)
    for first, tile in zip(range(0, inner, PARTITIONS), tiles["down"]):
        rows = min(PARTITIONS, inner - first)
        _dynamic(tile[0:rows, :], down, [[depth, rows], [1, share]], first * depth, expert)
    if not stages.scaled:
        return
    if not stages.packed:
        across = [[1, PARTITIONS], [PARTITIONS, tiles["gate scales"].shape[1]]]
        _dynamic(tiles["gate scales"], gate_scales, across, 0, expert)
    across = [[1, PARTITIONS], [PARTITIONS, share // PARTITIONS]]
    _dynamic(tiles["down scales"], down_scales, across, 0, expert, stages.by_hardware, nisa.scalar_engine)


def _dynamic(tile, table, pattern, offset, expert, by_hardware=False, queue=nisa.unknown_engine):
    """Load an SBUF tile from the part of a table in HBM that belongs to one expert, whose id is known at run time only.

    pattern, offset: access pattern within the expert's part. expert: access pattern of the id. by_hardware: hardware
    writes the descriptors, on the queue of engine `queue`; else software does.
    """
    source = table.ap(pattern=pattern, offset=offset, scalar_offset=expert, indirect_dim=0)
    if by_hardware:
        nisa.dma_copy(dst=tile, src=source, dge_mode=_HWDGE, engine=queue)
    else:
        nisa.dma_copy(dst=tile, src=source, dge_mode=_SWDGE)


def _pad(tiles, clear):
    """Copy the last, partial block of gate and of up columns to the set's "padded" tiles.

    clear: also zero the padded tiles beyond these columns.
    """
    gate = tiles.get("wide gate", tiles["gate"])
    inner = gate.shape[2] // 2
    remainder = inner % PARTITIONS
    for half, tile in enumerate(tiles["padded"]):
        if clear:
            nisa.memset(dst=tile[:, :, remainder:PARTITIONS], value=0.0)
        source = gate[:, :, (half + 1) * inner - remainder : (half + 1) * inner]
        nisa.tensor_copy(dst=tile[:, :, 0:remainder], src=source)


def _widen(tiles):
    """Convert an expert's weights to bfloat16 and add them to the set as "wide gate" and "wide down"."""
    tiles["wide gate"] = evacuate(tiles["gate"], nl.bfloat16)
    tiles["wide down"] = [evacuate(tile, nl.bfloat16) for tile in tiles["down"]]


def _gate_and_up(token, tiles):
    """Return gate and up projections in PSUM: a column [128, 1] for each block of gate, then for each of up."""
    gate, count = tiles.get("wide gate", tiles["gate"]), len(tiles["down"])
    inner = gate.shape[2] // 2
    bank = psum((PARTITIONS, 2 * count))
    for k in range(gate.shape[1]):
        for n in range(2 * count):
            half, i = divmod(n, count)
            start = half * inner + i * PARTITIONS
            if tiles["padded"] and i == count - 1:
                stationary = tiles["padded"][half][:, k, :]
            else:
                stationary = gate[:, k, start : start + PARTITIONS]
            destination = bank[:, n : n + 1]
            nisa.nc_matmul(
                dst=destination, stationary=stationary, moving=token[:, k : k + 1], accumulate=k > 0
            )
    return bank


def _activated(bank, tiles, stages):
    """Return SiLU(gate) times up as bfloat16 [128, blocks of I] in SBUF, scaled for fp8 if `stages.by_shuffles`."""
    count = len(tiles["down"])
    between = sbuf((PARTITIONS, count), nl.float32)
    if stages.scaled:
        for i in range(count):
            _scaled_silu(between[:, i : i + 1], bank, i, tiles["gate scales"], stages)
    else:
        other = sbuf((PARTITIONS, count), nl.float32)
        nisa.activation(dst=between, op=nl.silu, data=bank[:, 0:count])
        nisa.activation(dst=other, op=nl.copy, data=bank[:, count : 2 * count])
        nisa.tensor_tensor(dst=between, data1=between, data2=other, op=nl.multiply)
    return quantised(between, by_shuffles=True) if stages.by_shuffles else evacuate(between, nl.bfloat16)


def _down(columns, tiles, share, stages):
    """Return one expert's down projection in SBUF, float32 [128, share / 128], scaled if weights have scales."""
    product = psum((PARTITIONS, share // PARTITIONS))
    downs = tiles.get("wide down", tiles["down"])
    for n in range(share // PARTITIONS):
        for i in range(len(downs)):
            stationary = downs[i][:, n * PARTITIONS : (n + 1) * PARTITIONS]
            destination = product[:, n : n + 1]
            nisa.nc_matmul(
                dst=destination, stationary=stationary, moving=columns[:, i : i + 1], accumulate=i > 0
            )
    output = evacuate(product, nl.float32)
    if stages.scaled:
        nisa.tensor_tensor(dst=output, data1=output, data2=tiles["down scales"], op=nl.multiply)
    return output


def _scaled_silu(destination, bank, i, scales, stages):
    """Set `destination` [128, 1] to SiLU(gate) times up of block `i`, with both scaled by columns of `scales`.

    bank: projections from `_gate_and_up`.
    """
    curve, other = sbuf((PARTITIONS, 1), nl.float32), sbuf((PARTITIONS, 1), nl.float32)
    count, last = bank.shape[1] // 2, scales.shape[1] - 1
    gate_scale, up_scale = min(i, last), min(count + i, last)
    scale = scales[:, gate_scale : gate_scale + 1]
    if stages.silu_apart:
        nisa.activation(dst=curve, op=nl.copy, data=bank[:, i : i + 1], scale=scale)
        nisa.activation(dst=curve, op=nl.silu, data=curve)
    else:
        nisa.activation(dst=curve, op=nl.silu, data=bank[:, i : i + 1], scale=scale)
    nisa.activation(
        dst=other,
        op=nl.copy,
        data=bank[:, count + i : count + i + 1],
        scale=scales[:, up_scale : up_scale + 1],
    )
    nisa.tensor_tensor(dst=destination, data1=curve, data2=other, op=nl.multiply)
