"""A mixture of experts for a batch of tokens on one core; an expert's weights are one block, loaded in one DMA.

A pair is a token and one of its chosen experts. A slot is one expert with up to `lanes` pairs: a lane is one pair's
position in its slot. A group of slots shares instructions of the Vector and Scalar engines. Each iteration loads the
weights of the next group, computes gate and up of the current one, and finishes the group before.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from benchmarks.fidelity.kernels.common import BANK, PARTITIONS, constant, load, psum, sbuf

_RING = 3  # groups of tiles for experts


def slotted_experts(x, indices, weights, blocks, loads, lanes, group):
    """Return the experts' outputs for a batch of tokens, in the shape of x.

    With one lane, a slot's token is known beforehand. With more, tokens are gathered into lanes by a matmul with
    zeros and ones, at most 128 lanes at a time, and outputs are transposed and added up by another.

    Args:
        x: Tokens: [128, T, H / 128] with one lane, else [T, H].
        indices: Expert id of each slot, [1, S].
        weights: Routing weight of each slot, [1, S].
        blocks: Experts' weights [E, 128, F]: H columns of gate and up, H / 2 of down, then the scales of both.
        loads: Number of slots that load their expert; later slots compute with what the tiles contain.
        lanes: Pairs per slot.
        group: Slots per group.
    """
    slots = indices.shape[1]
    depth = x.shape[1] if lanes > 1 else x.shape[2] * PARTITIONS
    tokens = load(x)
    numbers = load(indices)
    wide = _spread(load(weights))
    fold = constant((PARTITIONS, PARTITIONS), 1.0)
    halves = constant((PARTITIONS, 2), 1.0)
    batch = x.shape[0] if lanes > 1 else x.shape[1]
    slots_per_block = min(slots, PARTITIONS // lanes)  # slots of one block of lanes
    if lanes > 1:
        _planned(numbers)
        placement = sbuf((batch, slots_per_block * lanes), x.dtype)
        nisa.memset(dst=placement, value=0.0)
        total = sbuf((batch, depth), nl.float32)
    else:
        total = sbuf((PARTITIONS, batch, depth // PARTITIONS), nl.float32)
    nisa.memset(dst=total, value=0.0)
    ring = [[sbuf((PARTITIONS, blocks.shape[2]), blocks.dtype) for _ in range(group)] for _ in range(_RING)]
    groups = (slots + group - 1) // group
    begun, moving, outputs = {}, None, None
    for step in range(-1, groups + 1):
        if step + 1 < groups:
            _fetch(ring[(step + 1) % _RING], blocks, numbers, (step + 1) * group, min(loads, slots))
        if 0 <= step < groups:
            if lanes > 1 and step * group % slots_per_block == 0:
                moving = _gathered(tokens, placement)
            columns = [
                _lane(tokens, moving, step * group + s, slots_per_block, lanes, slots // batch)
                for s in range(group)
            ]
            begun[step] = _gate_and_up(columns, ring[step % _RING], depth, halves)
        if step < 1:
            continue
        first = (step - 1) * group
        if lanes > 1 and first % slots_per_block == 0:
            outputs = sbuf((PARTITIONS, depth // PARTITIONS, slots_per_block * lanes), x.dtype)
        products = _down(begun.pop(step - 1), ring[(step - 1) % _RING], depth, fold, halves, lanes)
        for s in range(group):
            if lanes == 1:
                destination = total[:, min((first + s) * batch // slots, batch - 1), :]
                nisa.scalar_tensor_tensor(
                    dst=destination,
                    data=products[:, s, :],
                    op0=nl.multiply,
                    operand0=wide[:, s : s + 1],
                    op1=nl.add,
                    operand1=destination,
                )
        if lanes > 1:
            lane = first % slots_per_block * lanes
            nisa.tensor_copy(dst=outputs[:, :, lane : lane + group * lanes], src=products)
            if (first + group) % slots_per_block == 0:
                _routed(outputs, placement, total)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    result = sbuf(x.shape, x.dtype)
    nisa.tensor_copy(dst=result, src=total)
    nisa.dma_copy(dst=out, src=result)
    return out


def _spread(row):
    """Broadcast a row [1, n], at most its first 512 elements, to every partition of a new float32 SBUF tile.

    The broadcast is a matmul with ones.
    """
    size = min(row.shape[1], BANK)
    bank, wide = psum((PARTITIONS, size)), sbuf((PARTITIONS, size), nl.float32)
    nisa.nc_matmul(dst=bank, stationary=constant((1, PARTITIONS), 1.0), moving=row[:, 0:size])
    nisa.tensor_copy(dst=wide, src=bank)
    return wide


def _planned(numbers):
    """Compute the lane of each pair: compare the slots' experts with those on the partitions, count and add up.

    The result is not used; only its time matters. numbers: expert ids [1, S] in SBUF.
    """
    row = sbuf(numbers.shape, nl.float32)
    nisa.tensor_copy(dst=row, src=numbers)
    pairs = _spread(row)
    before = constant((PARTITIONS, PARTITIONS), 1.0)
    for _ in range(2):  # tiles of 128 experts
        same, ranks = sbuf(pairs.shape, nl.float32), sbuf(pairs.shape, nl.float32)
        count = sbuf((PARTITIONS, 1), nl.float32)
        nisa.tensor_scalar(dst=same, data=pairs, op0=nl.equal, operand0=1.0)
        nisa.tensor_reduce(dst=count, op=nl.add, data=same, axis=1)
        nisa.tensor_tensor_scan(dst=ranks, data0=same, data1=same, initial=0.0, op0=nl.multiply, op1=nl.add)
        bank = psum((PARTITIONS, 1))
        nisa.nc_matmul(dst=bank, stationary=before, moving=count)
        nisa.tensor_copy(dst=count, src=bank)
        nisa.tensor_scalar(dst=ranks, data=ranks, op0=nl.add, operand0=count)
        nisa.tensor_tensor(dst=same, data1=same, data2=ranks, op=nl.multiply)


def _fetch(tiles, blocks, numbers, first, loads):
    """Load the blocks of the slots from `first` on into `tiles`, one each, and stop at slot `loads`.

    numbers: expert ids [1, S] in SBUF.
    """
    _, rows, columns = blocks.shape
    for s in range(len(tiles)):
        if first + s >= loads:
            return
        expert = numbers.ap(pattern=[[numbers.shape[1], 1], [1, 1]], offset=first + s)
        source = blocks.ap(
            pattern=[[columns, rows], [1, columns]], offset=0, scalar_offset=expert, indirect_dim=0
        )
        nisa.dma_copy(dst=tiles[s], src=source, dge_mode=nisa.dge_mode.swdge)


def _gathered(tokens, placement):
    """Return the tokens of a block of lanes as an SBUF tile [128, H / 128, lanes].

    tokens is [T, H]; placement [T, lanes] has a one where the lane has the token.
    """
    blocks, lanes = tokens.shape[1] // PARTITIONS, placement.shape[1]
    moving = sbuf((PARTITIONS, blocks, lanes), tokens.dtype)
    together = BANK // lanes
    for first in range(0, blocks, together):
        bank = psum((PARTITIONS, together, lanes))
        for c in range(together):
            start = (first + c) * PARTITIONS
            stationary = tokens[:, start : start + PARTITIONS]
            nisa.nc_matmul(dst=bank[:, c, :], stationary=stationary, moving=placement)
        nisa.tensor_copy(dst=moving[:, first : first + together, :], src=bank)
    return moving


def _lane(tokens, moving, slot, slots_per_block, lanes, chosen):
    """Return the moving operand [128, H / 128, lanes] of a slot: the token with one lane, else its columns of `moving`.

    chosen: experts per token.
    """
    if lanes == 1:
        token = tokens[:, min(slot // max(chosen, 1), tokens.shape[1] - 1), :]
        return token.reshape((PARTITIONS, token.shape[1], 1))
    lane = slot % slots_per_block * lanes
    return moving[:, :, lane : lane + lanes]


def _gate_and_up(columns, tiles, depth, halves):
    """Compute the gate and up projections of a group of slots, scaled and added up.

    columns: moving operand of each slot. halves: columns [128, 1] that select the gate rows and the up rows.

    Returns:
        The projections [128, 2, group * lanes], and the scales of the down projections [128, group, H / 128], float32.
    """
    blocks, lanes, group = depth // PARTITIONS, columns[0].shape[2], len(columns)
    bank = psum((PARTITIONS, group, blocks, lanes))
    for s in range(group):
        for c in range(blocks):
            stationary = tiles[s][:, c * PARTITIONS : (c + 1) * PARTITIONS]
            nisa.nc_matmul(dst=bank[:, s, c, :], stationary=stationary, moving=columns[s][:, c, :])
    scales, later = (sbuf((PARTITIONS, group, blocks), nl.float32) for _ in range(2))
    start = depth + depth // 2
    for s in range(group):
        nisa.activation(dst=scales[:, s, :], op=nl.copy, data=tiles[s][:, start : start + blocks])
        nisa.activation(dst=later[:, s, :], op=nl.copy, data=tiles[s][:, start + blocks : start + 2 * blocks])
    scaled = sbuf((PARTITIONS, group, lanes, blocks), nl.float32)
    for i in range(lanes):
        nisa.tensor_tensor(dst=scaled[:, :, i, :], data1=bank[:, :, :, i], data2=scales, op=nl.multiply)
    sums = sbuf((PARTITIONS, group, lanes), nl.float32)
    nisa.tensor_reduce(dst=sums, op=nl.add, data=scaled, axis=3)
    pair = sbuf((PARTITIONS, 2, group * lanes), nl.float32)
    for half in range(2):
        nisa.tensor_scalar(
            dst=pair[:, half, :], data=sums, op0=nl.multiply, operand0=halves[:, half : half + 1]
        )
    return pair, later


def _down(begun, tiles, depth, fold, halves, lanes):
    """Finish a group of slots: fold up rows onto gate rows, apply SiLU and the down projection.

    With one lane, the down projection's scales are applied too. begun: result of `_gate_and_up`. fold: stationary
    operand of the fold.

    Returns:
        The products: float32 [128, group, H / 128] with one lane, else bfloat16 [128, H / 128, group * lanes].
    """
    pair, later = begun
    group, blocks = len(tiles), depth // PARTITIONS
    bank = psum(pair.shape)
    nisa.nc_matmul(dst=bank, stationary=fold, moving=pair)
    curve = sbuf((PARTITIONS, group * lanes), nl.float32)
    nisa.activation(dst=curve, op=nl.silu, data=bank[:, 0, :])
    nisa.tensor_tensor(dst=curve, data1=curve, data2=bank[:, 1, :], op=nl.multiply)
    between = sbuf((PARTITIONS, group, lanes, 2), nl.bfloat16)
    for half in range(2):
        nisa.tensor_scalar(
            dst=between[:, :, :, half], data=curve, op0=nl.multiply, operand0=halves[:, half : half + 1]
        )
    product = psum((PARTITIONS, group, blocks // 2, lanes * 2))
    for s in range(group):
        for c in range(blocks // 2):
            start = depth + c * PARTITIONS
            stationary = tiles[s][:, start : start + PARTITIONS]
            nisa.nc_matmul(dst=product[:, s, c, :], stationary=stationary, moving=between[:, s, :, :])
    if lanes == 1:
        products = sbuf((PARTITIONS, group, blocks), nl.float32)
        nisa.tensor_tensor(dst=products, data1=product, data2=later, op=nl.multiply)
        return products
    products = sbuf((PARTITIONS, blocks, group * lanes), nl.bfloat16)
    for s in range(group):
        destination = products[:, :, s * lanes : (s + 1) * lanes]
        nisa.tensor_copy(dst=destination, src=product[:, s, :, :])
    return products


def _routed(outputs, placement, total):
    """Transpose the lanes' outputs [128, H / 128, lanes] and add them to the tokens' sums `total` [T, H] in SBUF."""
    blocks, lanes = outputs.shape[1:]
    turned = sbuf((lanes, blocks * PARTITIONS), outputs.dtype)
    for first in range(0, blocks, 4):
        bank = psum((lanes, 4, PARTITIONS), outputs.dtype)
        for c in range(4):
            nisa.nc_transpose(dst=bank[:, c, :], data=outputs[:, first + c, :])
        nisa.activation(dst=turned[:, first * PARTITIONS : (first + 4) * PARTITIONS], op=nl.copy, data=bank)
    weights = sbuf((lanes, placement.shape[0]), outputs.dtype)
    nisa.memset(dst=weights, value=1.0)
    for first in range(0, blocks * PARTITIONS, BANK):
        bank = psum((placement.shape[0], BANK))
        nisa.nc_matmul(dst=bank, stationary=weights, moving=turned[:, first : first + BANK])
        destination = total[:, first : first + BANK]
        nisa.tensor_tensor(dst=destination, data1=destination, data2=bank, op=nl.add)
