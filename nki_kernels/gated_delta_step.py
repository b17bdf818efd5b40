"""gated_delta_step: one token of each sequence by the gated delta rule, and the gated norm behind it (Qwen3-Next).

For every sequence and head, with q and k divided by their lengths and q by sqrt(dk) as well:

    u = beta (v - exp(g) S^T k);   y from o = exp(g) S^T q + (q . k) u;   S = exp(g) S + k u^T

with g, beta and y as in `gated_delta`, whose arguments these are, with one token of each sequence: T = B. A count of 0
says that the token is padding.

Layout
    Each of four sequences has a quadrant of the partitions, where two heads with the same key have 16 lanes each and a
    lane the state's rows of 8 neighbouring elements of a key (`delta/state_lanes.py`). So one indirect DMA moves 8
    heads of four sequences in pieces of 4 KiB, and a matmul over a quadrant reads one sequence: what is not a number in
    another one does not reach it. The states are stationary; S^T q and S^T k are columns with dv on the partitions, as
    are the numbers of all pairs of sequence and head, a column of ones times them on a diagonal.

Tiling
    for up to 512 pairs of sequence and head, for batches of as many groups of four sequences and 8 heads as SBUF
        holds: load all groups; for group i: both products; what its keys write, w = u / |k|, transposed to all lanes of
        their heads; k w^T by the Scalar engine, added to the decayed states by Vector; store
    The products of a group are taken while the one before is added: `advance_sequences` has the loop nest.

Limits:
    dk and dv up to 128; B up to 128; slots of up to 2^24 / 3 pieces, 43,690 of 8 heads of 128. Pieces are short where
    dk has no divisor near 16; a dk of 127 with a dv of 128 does not fit. One physical core: of two the first does
    the work.

Cost
    HBM: the states of the sequences once in and once out; the rest is small. Bound: a store to slots known at run time
    waits for all DMAs before it and all after wait for it, so that loads, the writing of descriptors and stores follow
    one another: 2.9, 2.4 and 2.9 us for 1 MiB, and 1.1 us around a store. Predicted on trn2 in bfloat16 for 2 key heads
    and 4 value heads of 128: 45 us for 16 sequences, of which moving the states takes 24; 157 us for 64, 94 of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki
import nki.isa as nisa
import nki.language as nl
import nki.typing as nt
import numpy as np

from nki_kernels.delta.output import compute_exponentials, finish_gate_factors
from nki_kernels.delta.signature import Arguments, check_arguments, delta_rule_reference, select_gates
from nki_kernels.delta.state_lanes import (
    QUADRANT,
    ROUNDS,
    SEQUENCES,
    compute_first_pieces,
    compute_lane_offsets,
    load_keys,
    plan_groups,
    plan_lanes,
    spread_decays,
)
from nki_kernels.delta.token_factors import (
    DECAY,
    QUERY,
    READ,
    SCORE,
    WRITE,
    begin_factors,
    finish_factors,
    repeat_on_partitions,
    scale_values,
    store_outputs,
)
from nki_kernels.tiles import PARTITIONS, blocks, identity, load, load_repeated, ranges

cores = (1,)

PAIRS = 512
"""Pairs of sequence and head that are taken together: their factors are on every partition."""

STATE_BYTES = 128 * 1024
"""Bytes of a partition that states take at most. So many are loaded before the first of them is stored."""

ROW_BYTES = 144 * 1024
"""Bytes of a partition that states and the rows of tokens share; the other bytes hold tiles of groups."""


@dataclass
class LaneKeys(nl.NKIObject):
    """Keys and queries of a group of states in SBUF, float32.

    A group has up to four sequences, each on a quadrant of 32 partitions, and up to 8 heads. A lane is a
    partition; it has some neighbouring rows of the state of one head, or of two heads of a quadrant in turn.

    columns: the moving operand of the product with the states, [lane, key head, row, head of the quadrant,
    query and key], 0 for the other head of a lane's quadrant. keys: the keys alone, [lane, key head, row].
    """

    columns: nl.NkiTensor
    keys: nl.NkiTensor


@nki.jit
def gated_delta_step(
    qkv,
    gates,
    a_log,
    dt_bias,
    norm_weight,
    states: nt.mutable_tensor,
    state_slots,
    starts,
    counts,
    key_heads,
    eps,
    first=0,
):
    """Advance the state of each sequence by one token with the gated delta rule, and apply the gated norm.

    Returns y [B, Hv * dv] in qkv's dtype in shared HBM, and `states`, of which the slots in `state_slots` are
    updated. `gated_delta` describes the arguments. AssertionError if they do not fit together, or T is not B.
    """
    gates = select_gates(gates, first, states)
    arguments = Arguments(
        qkv, gates, a_log, dt_bias, norm_weight, states, state_slots, starts, counts, key_heads, eps
    )
    check_arguments(arguments)
    heads, width = states.shape[1], states.shape[3]
    sequences = counts.shape[0]
    assert qkv.shape[0] == sequences, (
        f"{qkv.shape[0]} tokens, but {sequences} sequences of one token: launch gated_delta for more tokens"
    )
    y = nl.ndarray((sequences, heads * width), dtype=qkv.dtype, buffer=nl.shared_hbm)
    if nl.program_id(0) > 0:
        return y, states
    lanes = plan_lanes(states, 0, sequences, key_heads)
    offsets, masks = compute_lane_offsets(lanes)
    zeros = nl.ndarray((PARTITIONS, lanes.rows * width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=zeros, value=0.0, engine=nisa.engine.gpsimd)
    for start, end in ranges(0, sequences, count_sequences_at_once(heads)):
        lanes = plan_lanes(states, start, end, key_heads)
        advance_sequences(arguments, lanes, offsets, masks, zeros, y[start:end, :])
    return y, states


def count_sequences_at_once(heads):
    """Return how many sequences of `heads` heads each are computed together, so that there are PAIRS pairs at most.

    At least 1; from 4 on a multiple of 4, as four sequences share the partitions.
    """
    most = max(1, PAIRS // heads)
    return most if most < SEQUENCES else most // SEQUENCES * SEQUENCES


def advance_sequences(arguments, lanes, offsets, masks, zeros, y):
    """Compute y [B, heads * dv] @ HBM and the new states in HBM of the sequences of `lanes`, one token of each.

    The states are loaded in batches of groups; a group has up to four sequences and 8 heads. All states of a
    batch are loaded before its first products. Those of the first batch are on their way while the factors of
    the tokens are computed. Then of group i:

    Tensor engine                           Scalar engine                       Vector engine
    writes of group i + 1 to its lanes      outer products of group i           add them to the states of group i; store
    products of keys and group i + 2        keys of group i + 2                 writes and outputs of group i + 1

    Args:
        offsets: [128, 1] float32, see `compute_lane_offsets`: added to the index of a sequence's first piece of its
            state in HBM.
        masks: for each of two heads of a quadrant [128, 1] float32, 1 on the head's partitions; empty for one
            head.
        zeros: [128, elements of one round] float32, with which a new sequence begins.
    """
    first, end = lanes.first_sequence, lanes.first_sequence + lanes.sequences
    batches = plan_batches(lanes, count_row_bytes(lanes, arguments.qkv.dtype))
    tiles = [copy_zeros(lanes, batches[0][0], zeros)]

    # The factors of the tokens: softplus, and all loads, before the first states.
    diagonal = identity(lanes.sequences, nl.uint8)
    read, written = compute_first_pieces(lanes, arguments.state_slots, arguments.starts, offsets)
    keys = load_keys(lanes, arguments.qkv)
    qkv, logs, rate, padding, terms = begin_factors(arguments, lanes)
    value_columns = lanes.heads * lanes.width
    z = load(arguments.gates[first:end, 0:value_columns], arguments.gates.dtype)
    norm_weight = load_repeated(arguments.norm_weight, lanes.sequences)
    gate_factors = compute_exponentials(z, lanes.width)

    for b in range(len(batches)):  # b: batch of groups
        groups, group_keys = batches[b], []
        if b > 0:
            tiles = []
        load_states(lanes, arguments.states, read, groups, zeros, tiles)
        for group in groups[0:2]:
            group_keys.append(spread_keys(lanes, keys, group, masks))
        products = [multiply_states(lanes, groups[0], tiles[0], group_keys[0].columns)]
        if b == 0:
            token_rows = finish_factors(qkv, logs, rate, padding, terms)
            all_factors = repeat_on_partitions(token_rows, diagonal)
            factors = all_factors[0 : lanes.width, :, :, :]
            values = scale_values(qkv[:, qkv.shape[1] - value_columns :], factors[:, WRITE, :, :])
            outputs = nl.ndarray(values.shape, dtype=nl.float32, buffer=nl.sbuf)
        writes = [compute_writes(lanes, groups[0], products[0], factors, values, outputs)]
        if b == 0:
            decays = spread_decays(lanes, all_factors[:, DECAY, :, :], masks)
        if len(groups) > 1:
            products.append(multiply_states(lanes, groups[1], tiles[1], group_keys[1].columns))
        for i in range(len(groups)):  # i: group
            if i + 2 < len(groups):
                group_keys.append(spread_keys(lanes, keys, groups[i + 2], masks))
            outer = multiply_outer(lanes, groups[i], group_keys[i].keys, writes[i])
            decay_and_add(lanes, groups[i], tiles[i], decays, outer)
            store_states(lanes, arguments.states, written, groups[i], tiles[i])
            if b == 0 and i == 0:
                finish_gate_factors(gate_factors, z, norm_weight)
            if i + 1 < len(groups):
                writes.append(compute_writes(lanes, groups[i + 1], products[i + 1], factors, values, outputs))
            if i + 2 < len(groups):
                products.append(
                    multiply_states(lanes, groups[i + 2], tiles[i + 2], group_keys[i + 2].columns)
                )
    store_outputs(outputs, gate_factors, y, arguments.eps)


def count_row_bytes(lanes, dtype):
    """Return the bytes per partition of SBUF that the tokens' rows take beside the states.

    These are q, k, v and z in `dtype`, and the factors of z and squares of q and k in float32.
    """
    keys, values = lanes.key_heads * lanes.depth, lanes.heads * lanes.width
    item_bytes = 4 if dtype == nl.float32 else 2
    return item_bytes * (2 * keys + 2 * values) + 4 * (values + 3 * keys)


def plan_batches(lanes, taken):
    """Divide all `StateGroup`s of `lanes` into lists, in order; the states of a list fit into SBUF together.

    A list has at least one group.

    Args:
        taken: bytes per partition that rows of tokens take beside the states.
    """
    rounds = min(ROUNDS, blocks(lanes.heads, lanes.heads_per_quadrant))
    room = min(STATE_BYTES, ROW_BYTES - taken)
    most = max(1, room // (4 * rounds * lanes.rows * lanes.width))
    groups = plan_groups(lanes)
    batches = []
    for first, end in ranges(0, len(groups), most):
        batches.append(groups[first:end])
    return batches


def copy_zeros(lanes, group, zeros):
    """Return a new tile of zeros for the states of a group: [lane, round, element] float32 in SBUF.

    A lane is a partition; a round is one head, or a pair of heads, of each of the group's sequences. Loads
    skip a sequence that begins, so its zeros stay.
    """
    rounds = (group.heads[1] - group.heads[0]) // lanes.heads_per_quadrant
    tile = nl.ndarray((group.count_lanes(), rounds, zeros.shape[1]), dtype=nl.float32, buffer=nl.sbuf)
    for i in range(rounds):  # i: round
        nisa.tensor_copy(dst=tile[:, i, :], src=zeros[0 : group.count_lanes(), :])
    return tile


def load_states(lanes, states, first_pieces, groups, zeros, tiles):
    """Load the states of `groups` from HBM into `tiles`, one tile [lane, round, element] for each group.

    A lane is a partition; a round is one head, or a pair of heads, of each of a group's sequences. `tiles`
    may have the tiles of the first groups already, filled with zeros; those of the others are allocated and
    appended. States of sequences that begin are skipped, so they stay 0.

    Args:
        states: [slots, heads, depth, width] @ HBM.
        first_pieces: index of the first piece of each lane's sequence in HBM, [lane, column] int32; indices
            beyond all are skipped.
        zeros: [128, elements of one round] float32.
    """
    for i in range(len(groups)):  # i: group
        if i == len(tiles):
            tiles.append(copy_zeros(lanes, groups[i], zeros))
        for number in range(tiles[i].shape[1]):  # number: round
            source = lanes.view_rounds(states, first_pieces, groups[i], number, 1)
            nisa.dma_copy(dst=tiles[i][:, number : number + 1, :], src=source, oob_mode=nisa.oob_mode.skip)


def spread_keys(lanes, keys, group, masks):
    """Return `LaneKeys` of a group: its keys in float32, and the operand by which its states are multiplied.

    Args:
        keys: result of `load_keys`: queries and keys of all groups, [lane, column of the group, queries and
            keys, row]; a lane is a partition.
        masks: for each of two heads of a quadrant [128, 1] float32, 1 on the head's partitions; empty for one
            head.
    """
    count, low, high = group.count_lanes(), group.key_heads[0], group.key_heads[1]
    group_keys = keys[0:count, group.column, :, :]
    shape = (count, high - low, lanes.rows, lanes.heads_per_quadrant, 2)
    columns = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    for i in range(2):  # i: queries, keys
        data = group_keys[:, i * lanes.key_heads + low : i * lanes.key_heads + high, :]
        for head in range(lanes.heads_per_quadrant):
            scale = 1.0 if lanes.heads_per_quadrant == 1 else masks[head][0:count, :]
            nisa.activation(dst=columns[:, :, :, head, i], op=nl.copy, data=data, scale=scale)
    wide = nl.ndarray((count, high - low, lanes.rows), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(
        dst=wide, op=nl.copy, data=group_keys[:, lanes.key_heads + low : lanes.key_heads + high, :]
    )
    return LaneKeys(columns, wide)


def multiply_states(lanes, group, tile, columns):
    """Return S^T q and S^T k for each state S of a group: float32 [width, sequence, head, 2] in PSUM.

    Args:
        tile: the states, [lane, round, element]: a lane is a partition, a round one head or pair of heads of
            each sequence.
        columns: the queries and keys, of `LaneKeys`.
    """
    first, last = group.heads
    width, share = lanes.width, lanes.heads_per_quadrant
    bank = nl.ndarray((width, group.members, last - first, 2), dtype=nl.float32, buffer=nl.psum)
    for i in range((last - first) // share):  # i: round
        head = i * share
        key_head = lanes.find_key_head(first + head) - group.key_heads[0]
        for member in range(group.members):
            quadrant = slice(member * QUADRANT, (member + 1) * QUADRANT)
            # Rows of a lane lie side by side: each matmul contracts one row of all lanes, and PSUM adds them up.
            for row in range(lanes.rows):
                nisa.nc_matmul(
                    dst=bank[:, member, head : head + share, :],
                    stationary=tile[quadrant, i, row * width : (row + 1) * width],
                    # Columns of a head have zeros in the lanes of the other one, so one matmul reads both heads.
                    moving=columns[quadrant, key_head, row, :, :],
                    accumulate=row > 0,
                )
    return bank


def compute_writes(lanes, group, products, factors, values, outputs):
    """Write the outputs of a group to `outputs`, and return what its keys add to the states, in PSUM.

    Returned is u = beta (v - exp(g) S^T k) over the key's length, on each lane of its head: [lane, round,
    width] float32. A lane is a partition, a round one head or pair of heads of each sequence.

    Args:
        products: S^T q and S^T k, of `multiply_states`.
        factors: of all tokens and heads, [width, FACTORS, sequence, head].
        values: values times their factor WRITE, [width, sequence, head].
        outputs: of all groups, [width, sequence, head] float32 in SBUF; only the group's part is written.
    """
    first, last = group.heads
    share = lanes.heads_per_quadrant
    factors = factors[:, :, group.sequences, first:last]
    values = values[:, group.sequences, first:last]
    shape = (lanes.width, group.members, last - first)
    writes = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=writes, data1=products[:, :, :, 1], data2=factors[:, READ, :, :], op=nl.multiply)
    nisa.tensor_tensor(dst=writes, data1=values, data2=writes, op=nl.subtract)
    shape = (group.count_lanes(), (last - first) // share, lanes.width)
    on_lanes = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
    for i in range(shape[1]):  # i: round
        heads = writes[:, :, i * share : (i + 1) * share]
        # The repeated view makes the transpose write each head to all of its lanes.
        nisa.nc_transpose(dst=on_lanes[:, i, :], data=heads.expand_dim(3).broadcast(3, lanes.lanes_per_head))
    scored = nl.ndarray(writes.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=scored, data1=writes, data2=factors[:, SCORE, :, :], op=nl.multiply)
    outputs = outputs[:, group.sequences, first:last]
    nisa.tensor_tensor(dst=outputs, data1=products[:, :, :, 0], data2=factors[:, QUERY, :, :], op=nl.multiply)
    nisa.tensor_tensor(dst=outputs, data1=outputs, data2=scored, op=nl.add)
    return on_lanes


def multiply_outer(lanes, group, keys, writes):
    """Return the outer products of a group's keys with `writes`: float32 tiles [lane, row, width] in SBUF.

    The list has a tile for each round, which is one head or pair of heads of each sequence; a lane is a
    partition.

    Args:
        keys: [lane, key head, row], of `LaneKeys`.
        writes: the result of `compute_writes`, [lane, round, width] in PSUM.
    """
    tiles = []
    for i in range(writes.shape[1]):  # i: round
        outer = nl.ndarray((group.count_lanes(), lanes.rows, lanes.width), dtype=nl.float32, buffer=nl.sbuf)
        key_head = lanes.find_key_head(group.heads[0] + i * lanes.heads_per_quadrant) - group.key_heads[0]
        for row in range(lanes.rows):
            # A key's element is a number of the partition, the scale of an activation; Vector has the additions.
            nisa.activation(
                dst=outer[:, row, :],
                op=nl.copy,
                data=writes[:, i, :],
                scale=keys[:, key_head, row : row + 1],
            )
        tiles.append(outer)
    return tiles


def decay_and_add(lanes, group, tile, decays, outer):
    """Multiply the states of a group, in place, by their decays, and add the outer products.

    Args:
        tile: the states, [lane, round, element]: a lane is a partition, a round one head or pair of heads of
            each sequence.
        decays: of all states, [lane, column of the group, round].
        outer: result of `multiply_outer`: for each round a tile [lane, row, width].
    """
    count, first = group.count_lanes(), group.heads[0] // lanes.heads_per_quadrant
    for i in range(len(outer)):  # i: round
        state = tile[:, i, :]
        nisa.scalar_tensor_tensor(
            dst=state,
            data=state,
            op0=nl.multiply,
            operand0=decays[0:count, group.column, first + i : first + i + 1],
            op1=nl.add,
            operand1=outer[i].reshape((count, lanes.rows * lanes.width)),
        )


def store_states(lanes, states, first_pieces, group, tile):
    """Store the states of a group, `tile` [lane, round, element], to their slots of `states` in HBM.

    A lane is a partition, a round one head or pair of heads of each sequence. Lanes without rows of a state
    have an index beyond all slots, which the DMA skips.

    Args:
        states: [slots, heads, depth, width] @ HBM.
        first_pieces: index of the first piece of each lane's sequence in HBM, [lane, column] int32.
    """
    target = lanes.view_rounds(states, first_pieces, group, 0, tile.shape[1])
    skips = nisa.oob_mode.skip if lanes.filled_lanes < lanes.lanes_per_head else nisa.oob_mode.error
    nisa.dma_copy(dst=target, src=tile, oob_mode=skips)


def gated_delta_step_reference(
    qkv: np.ndarray,
    gates: np.ndarray,
    a_log: np.ndarray,
    dt_bias: np.ndarray,
    norm_weight: np.ndarray,
    states: np.ndarray,
    state_slots: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    key_heads: int,
    eps: float,
    first: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Compute y and the states with NumPy for one token of each sequence; `states` is updated in place."""
    return delta_rule_reference(
        qkv, gates, a_log, dt_bias, norm_weight, states, state_slots, starts, counts, key_heads, eps, first
    )
