"""Logarithms of decays between any two tokens of a chunk of `ssd`, [key, head, query] in PSUM.

A chunk is up to 128 tokens of a sequence. A key is a token that writes to the state, and a query one that
reads it. a is the logarithm of a token's decay. The logarithm of the decay between the two is the sum of a
over the tokens behind the key up to the query. `ssd` and `gated_delta` use this file for prompts.

`sum_between` adds up these tokens: no difference of two sums gives them as exactly, as float32 needs. Every
head takes 128 elements of GpSimd and four passes of a matmul of 128 columns.

`Differences` subtracts sums up to the tokens, and adds the logarithm of the key's time step, for four heads
in one matmul over 58 rows. Three rows have the queries' sums, as three parts of bfloat16, which together hold
a float32 sum; the other side has ones there. Three rows for each head have the keys' sums; the other side
picks the head. Two such matmuls, each with half of the array's rows, run side by side.

The other 43 rows take `MASKED` off the keys of later blocks of three tokens: their exp might be no number of
float32, and scores, which are 0 there, would not hide it. Within a block keys behind a query are no more than
two tokens away. So each a counts as no less than `LEAST`, plus the logarithm of its time step where that is
above 0: exp is at most e^88 there, and where a token forgets all before it no more than e^-44, or 2^-63, of
that is left. No sum is beyond 5632, whose last place is 2^-11, and the factors that are rounded to bfloat16
are off by no more than that rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import COMPILER, STATIC, transfer
from nki_kernels.tiles import BANK, MASKED, PARTITIONS, filled, ranges

BLOCK = 3
"""Tokens that see one another before scores hide keys from earlier queries."""

LEAST = -44.0
"""The least logarithm of a decay. Two of them are a difference of 88 between tokens of a block, whose exp is finite."""

LEAST_STEP = 2.0**-104
"""The least time step whose logarithm is taken, as that of 2^40 times it: log has a domain of 2^-64 to 2^64."""

LARGER = 2.0**40
LOG_LARGER = 40 * 0.6931471805599453

PARTS = 3
"""Numbers of bfloat16 that hold one of float32."""

IN_TURN = 4
"""Pairs of operand tiles of `Differences`, used in turn; each has the rows of two matmuls."""

HALF = 64
"""Rows of the PE array of one of two matmuls that run side by side."""

OF_KEYS = PARTS + -(-PARTITIONS // BLOCK)
"""First row of the keys' sums in a half: behind the queries' sums and a mask for each block of tokens."""


def repeat_for_queries(factors, tokens):
    """Return a view of factors [key, head], repeated for each query: [key, head, query]."""
    return factors.expand_dim(2).broadcast(2, tokens)


def sum_between(logs, after, before):
    """Return the decays between tokens: exp of the sum of `logs` over the tokens after the key up to the query.

    It is a new SBUF tile [key, head, query] float32; 1 where the key is the query or comes after it.

    Args:
        logs: logarithms of the tokens' decays, [token, head] float32.
        after: [token, key], ones where the token is after the key, else zeros.
        before: [token, query], ones where the token is not after the query, else zeros.
    """
    tokens, heads = logs.shape
    behind = nl.ndarray((tokens, heads, tokens), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=behind,
        data1=after.expand_dim(1).broadcast(1, heads),
        data2=repeat_for_queries(logs, tokens),
        op=nl.multiply,
        engine=nisa.engine.gpsimd,
    )
    decays = nl.ndarray(behind.shape, dtype=nl.float32, buffer=nl.sbuf)
    for start, end in ranges(0, heads, BANK // tokens):
        bank = nl.ndarray((tokens, end - start, tokens), dtype=nl.float32, buffer=nl.psum)
        for head in range(start, end):
            terms = behind[:, head, :]
            nisa.nc_matmul(dst=bank[:, head - start, :], stationary=terms, moving=before, accumulate=False)
        nisa.activation(dst=decays[:, start:end, :], op=nl.exp, data=bank)
    return decays


@dataclass
class DifferenceRows(nl.NKIObject):
    """Operands of a matmul whose product has the logarithms of the decays between tokens, [key, head, query].

    keys: stationary, [row, key] bfloat16. queries: moving, [row, head, query] bfloat16. row: the partition at
    which both begin, 0 or 64. See `Differences`.
    """

    keys: nl.NkiTensor
    queries: nl.NkiTensor
    row: int


class Differences(nl.NKIObject):
    """Operands of the matmuls that subtract, for up to 4 heads on each half of the partitions, which are used in turn.

    keys, queries: lists of IN_TURN tiles. Rows of a half: 3 with the queries' sums, one for each block of
    three queries that masks the keys of later blocks, and 3 for each head with its keys' sums. `load` fills
    the sums. The other side of sums, and both sides of masks, are constants. turn: the number of loads so
    far.
    """

    def __init__(self):
        self.turn = 0
        keys, queries = build_key_rows(), build_query_rows()
        self.keys, self.queries = [], []
        for _ in range(IN_TURN):
            tile = nl.ndarray(keys.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
            nisa.tensor_copy(dst=tile, src=keys)
            self.keys.append(tile)
            tile = nl.ndarray(queries.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
            nisa.tensor_copy(dst=tile, src=queries)
            self.queries.append(tile)

    def load(self, sums, heads):
        """Load the sums of up to 4 heads from HBM to the next half of the operand tiles: return their DifferenceRows.

        Loads take the halves of one tile after another; the half is used again after 2 * IN_TURN loads.

        Args:
            sums: [head, side, part, token] bfloat16 in HBM, see `SumsInParts`.
            heads: (first, end) of the heads in `sums`.
        """
        first, last = heads
        tokens, pitch = sums.shape[3], 2 * PARTS * sums.shape[3]
        turn, row = self.turn // 2 % IN_TURN, self.turn % 2 * HALF
        self.turn += 1
        rows = OF_KEYS + PARTS * (last - first)
        keys = self.keys[turn][row : row + rows, 0:tokens]
        queries = self.queries[turn][row : row + rows, 0 : last - first, 0:tokens]
        source = sums.ap(
            pattern=[[pitch, last - first], [tokens, PARTS], [1, tokens]],
            offset=first * pitch + PARTS * tokens,
        )
        transfer(keys[OF_KEYS:rows, :], source, STATIC)
        source = sums.ap(pattern=[[tokens, PARTS], [pitch, last - first], [1, tokens]], offset=first * pitch)
        transfer(queries[0:PARTS, :, :], source, STATIC)
        return DifferenceRows(keys, queries, row)


def select_range(tile, pattern, multiplier, least, most):
    """Return a copy of a tile [128, ...] in which elements are 0 unless least <= multiplier * row + offset <= most.

    row is the partition, counted from 0 in each half of 64. offset is the sum of step * index over the free
    dims.

    Args:
        pattern: [step, count] of each free dim, as in `nisa.affine_select`.
    """
    for limit, comparison in ((least, nl.greater_equal), (most, nl.less_equal)):
        chosen = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.sbuf)
        for row in (0, HALF):
            nisa.affine_select(
                dst=chosen[row : row + HALF],
                pattern=pattern,
                offset=-limit,
                channel_multiplier=multiplier,
                on_true_tile=tile[row : row + HALF],
                on_false_value=0.0,
                cmp_op=comparison,
            )
        tile = chosen
    return tile


def build_key_rows():
    """Return the constant rows of the keys' side, both halves: a new bfloat16 SBUF tile [row of both halves, key].

    In a half rows 0 to 2 have ones, for the queries' sums. Row 3 + b has ones for the keys after block b of
    three tokens. Rows from OF_KEYS on are to be loaded.
    """
    # Row 3 is that of block 0, so key - 3 * (row - 2) is not negative; nor is it in rows 0 to 2.
    least = -BLOCK * (PARTS - 1)
    return select_range(
        filled((PARTITIONS, PARTITIONS), 1.0, nl.bfloat16), [[1, PARTITIONS]], -BLOCK, least, PARTITIONS
    )


def build_query_rows():
    """Return the constant rows of the queries' side, both halves: a new bfloat16 SBUF tile [row, head, query].

    In a half row 3 + b has `MASKED` for the three queries of block b. The three rows of a head from OF_KEYS
    on have ones for that head. Rows 0 to 2 are to be loaded.
    """
    heads, tokens = BANK // PARTITIONS, PARTITIONS
    # query - 3 * (row - 3) is 0, 1 or 2
    least = -BLOCK * PARTS
    masks = select_range(
        filled((PARTITIONS, tokens), MASKED, nl.bfloat16), [[1, tokens]], -BLOCK, least, least + BLOCK - 1
    )
    # row - 46 - 3 * head is 0, 1 or 2
    picks = filled((PARTITIONS, heads), 1.0, nl.bfloat16)
    picks = select_range(picks, [[-PARTS, heads]], 1, OF_KEYS, OF_KEYS + PARTS - 1)
    result = nl.ndarray((PARTITIONS, heads, tokens), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=result,
        data1=picks.expand_dim(2).broadcast(2, tokens),
        data2=masks.expand_dim(1).broadcast(1, heads),
        op=nl.add,
    )
    return result


def compute_logarithms(steps):
    """Return log(max(steps, LEAST_STEP)) + LOG_LARGER of time steps, a new float32 SBUF tile of their shape.

    `bound_logarithms` subtracts LOG_LARGER, which keeps the argument within the domain of the engine's log.
    """
    result = nl.ndarray(steps.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=result, data=steps, op0=nl.maximum, operand0=LEAST_STEP)
    nisa.activation(dst=result, op=nl.log, data=result, scale=LARGER)
    return result


def bound_logarithms(step_logs, logs, lowest=LEAST):
    """Return (bounded logs, the same with the other sign), new float32 SBUF tiles.

    Bounded logs are `logs`, but no less than `lowest`, plus the logarithm of the time step where that is
    above 0. Subtracts LOG_LARGER from `step_logs`, the result of `compute_logarithms`, in place: it then has
    the logarithms.

    Args:
        logs: logarithms of decays, in the shape of `step_logs`.
    """
    least = nl.ndarray(logs.shape, dtype=nl.float32, buffer=nl.sbuf)
    minus = nl.ndarray(logs.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=step_logs, data=step_logs, op0=nl.subtract, operand0=LOG_LARGER)
    nisa.tensor_scalar(dst=least, data=step_logs, op0=nl.maximum, operand0=0.0, op1=nl.add, operand1=lowest)
    nisa.tensor_tensor(dst=least, data1=least, data2=logs, op=nl.maximum)
    nisa.tensor_scalar(dst=minus, data=least, op0=nl.multiply, operand0=-1.0)
    return least, minus


@dataclass
class SumsInParts(nl.NKIObject):
    """Sums of logarithms of decays as three bfloat16 parts, made part after part for `Differences`.

    Side 0 has, for each head and token, the sum of logs up to the token, side 1 the logarithm of its time
    step less that sum. pieces: [head, side, part, token] bfloat16 in SBUF. remainder: what the pieces so far
    lack of the sums, [head, side, token] float32. kept: the index of the latest part. rows: the pieces in
    HBM, None until the last part.
    """

    pieces: nl.NkiTensor
    remainder: nl.NkiTensor
    kept: int = 0
    rows: nl.NkiTensor | None = None

    def write_part(self):
        """Write `remainder`, rounded to bfloat16, to `pieces` as part number `kept`."""
        nisa.activation(dst=self.pieces[:, :, self.kept, :], op=nl.copy, data=self.remainder)

    def write_next_part(self):
        """Subtract the latest part from `remainder`, and write the next part to `pieces`.

        The remainder is then a new SBUF tile. Adds 1 to `kept`. After the last part, store all pieces to a
        new tensor in HBM, `rows`.
        """
        remainder = nl.ndarray(self.remainder.shape, dtype=nl.float32, buffer=nl.sbuf)
        part_before = self.pieces[:, :, self.kept, :]
        # A float32 number less its rounded part is exact, so the parts lose nothing of the sum.
        nisa.tensor_tensor(dst=remainder, data1=self.remainder, data2=part_before, op=nl.subtract)
        self.remainder = remainder
        self.kept += 1
        self.write_part()
        if self.kept + 1 == PARTS:
            shape = self.pieces.shape
            self.rows = nl.ndarray(shape, dtype=nl.bfloat16, buffer=nl.private_hbm, name="sums_of_decays")
            transfer(self.rows, self.pieces, COMPILER)


def sum_in_parts(logs, minus, step_logs, before, identity):
    """Return SumsInParts of sums over tokens, with the first of three bfloat16 parts in its `pieces`.

    Side 0 has the sum of `logs` up to each token, side 1 the logarithm of its time step less that sum. The
    caller calls `write_next_part` for the two other parts.

    Args:
        logs: logarithms of decays, [token, head] float32.
        minus: the same with the other sign.
        step_logs: logarithms of time steps, [token, head].
        before: [token, query], ones where the token is not after the query, else zeros.
        identity: the identity matrix [token, token] float32.
    """
    tokens, heads = logs.shape
    sums = nl.ndarray((heads, 2, tokens), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums[:, 0, :], stationary=logs, moving=before, accumulate=False)
    nisa.nc_matmul(dst=sums[:, 1, :], stationary=minus, moving=before, accumulate=False)
    # The identity is the moving operand: it adds the time steps with the heads on the partitions.
    nisa.nc_matmul(dst=sums[:, 1, :], stationary=step_logs, moving=identity, accumulate=True)
    pieces = nl.ndarray((heads, 2, PARTS, tokens), dtype=nl.bfloat16, buffer=nl.sbuf)
    result = SumsInParts(pieces, sums)
    result.write_part()
    return result


def compute_differences(halves, tokens, heads):
    """Return the decays between tokens, multiplied by the keys' time steps.

    They are a new bfloat16 SBUF tile [key, head, query]. The matmul of loaded sums gives the logarithms.

    Args:
        halves: a list of DifferenceRows, of up to 4 heads each, from `Differences.load`.
        tokens: of the chunk.
        heads: of all halves.
    """
    decays = nl.ndarray((tokens, heads, tokens), dtype=nl.bfloat16, buffer=nl.sbuf)
    banks = nl.ndarray((tokens, heads, tokens), dtype=nl.float32, buffer=nl.psum)
    first = 0
    for rows in halves:
        last = first + rows.queries.shape[1]
        # Each half has 64 rows of the array, so the matmuls of two halves run side by side.
        nisa.nc_matmul(
            dst=banks[:, first:last, :],
            stationary=rows.keys,
            moving=rows.queries,
            accumulate=False,
            tile_position=(rows.row, 0),
            tile_size=(HALF, PARTITIONS),
        )
        first = last
    nisa.activation(dst=decays, op=nl.exp, data=banks)
    return decays
