"""Logarithms of decays between any two tokens of a chunk of `ssd`, [key, head, query] in PSUM.

A decay's logarithm is the sum of a over the tokens behind the key up to the query.

`sums_between` adds these tokens up: no difference of two sums gives them as exactly, as float32 needs. Every head takes
128 elements of GpSimd and four passes of a matmul of 128 columns.

`Differences` subtracts sums up to the tokens, and adds the logarithm of the key's time step, for four heads in one
matmul over 58 rows: to each query's sum in three rows of bfloat16, all ones on the other side, come three rows for
each head, which the other side picks. Three parts hold a float32 sum. Two such matmuls, each with half of the array's
rows, run side by side. The other 43 rows take `MASKED` off the keys of later blocks of three tokens: their exp might be
no number of float32, and scores, which are 0 there, would not hide it. Within a block keys behind a query are no more
than two tokens away. So each a counts as no less than `LEAST`, plus the logarithm of its time step where that is above
0: exp is at most e^88 there, and where a token forgets all before it no more than e^-44, or 2^-63, of that is left.
No sum is beyond 5632, whose last place is 2^-11, and the factors that are rounded to bfloat16 are off by no more than
that rounding.
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
"""Packs of heads whose rows are on their way from HBM, or used."""

HALF = 64
"""Rows of the array of one of two matmuls that run side by side."""

OF_KEYS = PARTS + -(-PARTITIONS // BLOCK)
"""The first row of the keys' sums in a half, behind the queries' sums and a mask for each block of tokens."""


def by_query(factors, tokens):
    """Return a view of factors [key, head] as [key, head, query]."""
    return factors.expand_dim(2).broadcast(2, tokens)


def sums_between(logs, after, before):
    """Return exp of the sums of `logs` [token, head] between key and query: [key, head, query] in float32."""
    tokens, heads = logs.shape
    behind = nl.ndarray((tokens, heads, tokens), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=behind,
        data1=after.expand_dim(1).broadcast(1, heads),
        data2=by_query(logs, tokens),
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
    """Operands of a matmul whose product has the logarithms of decays; they begin at partition `row`."""

    keys: nl.NkiTensor
    queries: nl.NkiTensor
    row: int


class Differences(nl.NKIObject):
    """Operands of the matmuls that subtract, for up to 4 heads on each half of the partitions, which are used in turn.

    Rows of a half: 3 with the queries' sums, one for each block of queries that masks the keys of later blocks, and 3
    for each head with its keys' sums. The other side of sums, and both sides of masks, are constants.
    """

    def __init__(self):
        self.turn = 0
        keys, queries = key_rows(), query_rows()
        self.keys, self.queries = [], []
        for _ in range(IN_TURN):
            tile = nl.ndarray(keys.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
            nisa.tensor_copy(dst=tile, src=keys)
            self.keys.append(tile)
            tile = nl.ndarray(queries.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
            nisa.tensor_copy(dst=tile, src=queries)
            self.queries.append(tile)

    def load(self, sums, heads):
        """Load the rows of up to 4 heads from `sums` [head, side, part, token] in HBM: the operands of their matmul."""
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


def selected(tile, pattern, multiplier, least, most):
    """Return the tile where multiplier * row + pattern over its free dims is in a range, else 0, in both halves."""
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


def key_rows():
    """Return the keys' side of both halves: ones for queries' sums, and where a key is after a row's block."""
    # Row 3 is that of block 0, so key - 3 * (row - 2) is not negative; nor is it in rows 0 to 2.
    least = -BLOCK * (PARTS - 1)
    return selected(
        filled((PARTITIONS, PARTITIONS), 1.0, nl.bfloat16), [[1, PARTITIONS]], -BLOCK, least, PARTITIONS
    )


def query_rows():
    """Return the queries' side of both halves: `MASKED` for a row's block, and ones for the head of a row of keys."""
    heads, tokens = BANK // PARTITIONS, PARTITIONS
    # query - 3 * (row - 3) is 0, 1 or 2
    least = -BLOCK * PARTS
    masks = selected(
        filled((PARTITIONS, tokens), MASKED, nl.bfloat16), [[1, tokens]], -BLOCK, least, least + BLOCK - 1
    )
    # row - 46 - 3 * head is 0, 1 or 2
    picks = filled((PARTITIONS, heads), 1.0, nl.bfloat16)
    picks = selected(picks, [[-PARTS, heads]], 1, OF_KEYS, OF_KEYS + PARTS - 1)
    result = nl.ndarray((PARTITIONS, heads, tokens), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=result,
        data1=picks.expand_dim(2).broadcast(2, tokens),
        data2=masks.expand_dim(1).broadcast(1, heads),
        op=nl.add,
    )
    return result


def logarithms(steps):
    """Return logarithms of time steps plus LOG_LARGER: none is below that of the least one."""
    result = nl.ndarray(steps.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=result, data=steps, op0=nl.maximum, operand0=LEAST_STEP)
    nisa.activation(dst=result, op=nl.log, data=result, scale=LARGER)
    return result


def bounded(step_logs, logs, lowest=LEAST):
    """Return the logarithms of decays that `SumsInParts` takes, twice, and prepare the results of `logarithms`.

    None of the former is below `lowest`; the second time they have the other sign.
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
    """The rows that `Differences` takes, made part after part: [head, side, part, token].

    Side 0 has the sums of logs [token, head] up to a token, side 1 the logarithm of its time step less that sum.
    pieces: bfloat16 in SBUF. remainder: what the pieces lack of the sums. kept: the index of the latest piece. rows:
    the pieces in HBM, None until the last one.
    """

    pieces: nl.NkiTensor
    remainder: nl.NkiTensor
    kept: int = 0
    rows: nl.NkiTensor | None = None

    def keep(self):
        """Keep the next part of the remainder."""
        nisa.activation(dst=self.pieces[:, :, self.kept, :], op=nl.copy, data=self.remainder)

    def next(self):
        """Subtract a part, and keep the next one; store the last one to HBM with all others."""
        remainder = nl.ndarray(self.remainder.shape, dtype=nl.float32, buffer=nl.sbuf)
        part_before = self.pieces[:, :, self.kept, :]
        # A float32 number less its rounded part is exact, so the parts lose nothing of the sum.
        nisa.tensor_tensor(dst=remainder, data1=self.remainder, data2=part_before, op=nl.subtract)
        self.remainder = remainder
        self.kept += 1
        self.keep()
        if self.kept + 1 == PARTS:
            shape = self.pieces.shape
            self.rows = nl.ndarray(shape, dtype=nl.bfloat16, buffer=nl.private_hbm, name="sums_of_decays")
            transfer(self.rows, self.pieces, COMPILER)


def sum_in_parts(logs, minus, steps, before, one):
    """Return the SumsInParts of logs [token, head], of the same with the other sign, and of time steps' logarithms."""
    tokens, heads = logs.shape
    sums = nl.ndarray((heads, 2, tokens), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums[:, 0, :], stationary=logs, moving=before, accumulate=False)
    nisa.nc_matmul(dst=sums[:, 1, :], stationary=minus, moving=before, accumulate=False)
    # The identity is the moving operand: it adds the time steps with the heads on the partitions.
    nisa.nc_matmul(dst=sums[:, 1, :], stationary=steps, moving=one, accumulate=True)
    pieces = nl.ndarray((heads, 2, PARTS, tokens), dtype=nl.bfloat16, buffer=nl.sbuf)
    result = SumsInParts(pieces, sums)
    result.keep()
    return result


def differences(halves, tokens, heads):
    """Return exp of the differences of a pack's rows, times the keys' time steps: [key, head, query] in bfloat16."""
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
