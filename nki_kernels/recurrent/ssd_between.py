"""Logarithms of decays between any two tokens of a chunk of `ssd`, [key, head, query] in PSUM.

A decay's logarithm is the sum of a over the tokens behind the key up to the query.

`sums_between` adds these tokens up: no difference of two sums gives them as exactly, as float32 needs. Every head takes
128 elements of GpSimd and four passes of a matmul of 128 columns.

`Differences` subtracts sums up to the tokens, and adds the logarithm of the key's time step, for eight heads in one
matmul over 27 rows: to each query's sum in three rows of bfloat16, all ones on the other side, come three rows for
each head, which the other side picks. Three parts hold a float32 sum. Each a counts as no less than `LEAST`, whose exp
is no number of float32: so no sum is beyond 13312, whose last place is 2^-10, and the factors that are rounded to
bfloat16 are off by no more than that rounding.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.tiles import BANK, MASKED, PARTITIONS, ranges

LEAST = -104.0
"""The least logarithm of a decay, below that of the smallest number of float32."""

LEAST_STEP = 2.0**-104
"""The least time step whose logarithm is taken, as that of 2^40 times it: log has a domain of 2^-64 to 2^64."""

LARGER = 2.0**40
LOG_LARGER = 40 * 0.6931471805599453

PARTS = 3
"""Numbers of bfloat16 that hold one of float32."""

IN_TURN = 4
"""Packs of heads whose rows are on their way from HBM, or used."""


def by_query(factors, tokens):
    """Factors [key, head] seen as [key, head, query]."""
    return factors.expand_dim(2).broadcast(2, tokens)


def sums_between(logs, after, before):
    """exp of the sums of `logs` [token, head] between key and query: [key, head, query] in float32."""
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
            own = behind[:, head, :]
            nisa.nc_matmul(dst=bank[:, head - start, :], stationary=own, moving=before, accumulate=False)
        nisa.activation(dst=decays[:, start:end, :], op=nl.exp, data=bank)
    return decays


class Differences(nl.NKIObject):
    """Tiles of the matmuls that subtract, which packs of up to `most` heads use in turn."""

    def __init__(self, most):
        self.most = most
        self.turn = 0
        self.stationary = []
        self.moving = []
        picks = head_rows(most)
        for _ in range(IN_TURN):
            keys = nl.ndarray((PARTS * (most + 1), PARTITIONS), dtype=nl.bfloat16, buffer=nl.sbuf)
            nisa.memset(dst=keys, value=1.0)
            self.stationary.append(keys)
            shape = (PARTS * (most + 1), most, PARTITIONS)
            queries = nl.ndarray(shape, dtype=nl.bfloat16, buffer=nl.sbuf)
            across = picks.expand_dim(2).broadcast(2, PARTITIONS)
            nisa.tensor_copy(dst=queries[0 : PARTS * most, :, :], src=across)
            self.moving.append(queries)

    def bring(self, sums, pack):
        """Load the rows of a pack of heads from `sums` [head, side, part, token] in HBM: the operands of its matmul."""
        first, last = pack
        tokens, rows = sums.shape[3], PARTS * (last - first)
        turn = self.turn % IN_TURN
        self.turn += 1
        keys, queries = self.stationary[turn], self.moving[turn]
        pitch = 2 * PARTS * tokens
        source = sums.ap(
            pattern=[[pitch, last - first], [tokens, PARTS], [1, tokens]],
            offset=first * pitch + PARTS * tokens,
        )
        nisa.dma_copy(dst=keys[0:rows, 0:tokens], src=source)
        source = sums.ap(pattern=[[tokens, PARTS], [pitch, last - first], [1, tokens]], offset=first * pitch)
        own = queries[PARTS * self.most : PARTS * (self.most + 1), 0 : last - first, 0:tokens]
        nisa.dma_copy(dst=own, src=source)
        return keys[:, 0:tokens], queries[:, 0 : last - first, 0:tokens]


def head_rows(heads):
    """Ones where row r belongs to head r // 3: [3 * heads, head]."""
    ones = nl.ndarray((PARTS * heads, heads), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    result = nl.ndarray(ones.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
    for least, comparison in ((0, nl.greater_equal), (PARTS - 1, nl.less_equal)):
        # r - 3 * head is 0, 1 or 2.
        nisa.affine_select(
            dst=result,
            pattern=[[-PARTS, heads]],
            offset=-least,
            channel_multiplier=1,
            on_true_tile=ones,
            on_false_value=0.0,
            cmp_op=comparison,
        )
        ones = result
    return result


def narrowed(steps, logs):
    """What `SumsInParts` takes of time steps and logarithms of decays: the steps' logarithms, and logs twice.

    The logarithms of decays are none below the least one; the second time they have the other sign.
    """
    of_steps, least, minus = (
        nl.ndarray(logs.shape, dtype=nl.float32, buffer=nl.sbuf),
        nl.ndarray(logs.shape, dtype=nl.float32, buffer=nl.sbuf),
        nl.ndarray(logs.shape, dtype=nl.float32, buffer=nl.sbuf),
    )
    nisa.tensor_scalar(dst=of_steps, data=steps, op0=nl.maximum, operand0=LEAST_STEP)
    nisa.activation(dst=of_steps, op=nl.log, data=of_steps, scale=LARGER)
    nisa.tensor_scalar(dst=of_steps, data=of_steps, op0=nl.subtract, operand0=LOG_LARGER)
    nisa.tensor_scalar(dst=least, data=logs, op0=nl.maximum, operand0=LEAST)
    nisa.tensor_scalar(dst=minus, data=least, op0=nl.multiply, operand0=-1.0)
    return of_steps, least, minus


class SumsInParts(nl.NKIObject):
    """The rows that `Differences` takes, made part after part: [head, side, part, token] in HBM.

    Side 0 has the sums of logs [token, head] up to a token, side 1 the logarithm of its time step less that sum.
    """

    def __init__(self, logs, minus, steps, before, one):
        tokens, heads = logs.shape
        sums = nl.ndarray((heads, 2, tokens), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=sums[:, 0, :], stationary=logs, moving=before, accumulate=False)
        nisa.nc_matmul(dst=sums[:, 1, :], stationary=minus, moving=before, accumulate=False)
        nisa.nc_matmul(dst=sums[:, 1, :], stationary=steps, moving=one, accumulate=True)
        self.parts = nl.ndarray((heads, 2, PARTS, tokens), dtype=nl.bfloat16, buffer=nl.sbuf)
        self.rest = sums
        self.part = 0
        self.keep()

    def keep(self):
        """The next part of what is left of the sums."""
        nisa.activation(dst=self.parts[:, :, self.part, :], op=nl.copy, data=self.rest)

    def next(self):
        """Subtract a part, and keep the next one; the last one goes to HBM with all others."""
        rest = nl.ndarray(self.rest.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=rest, data1=self.rest, data2=self.parts[:, :, self.part, :], op=nl.subtract)
        self.rest = rest
        self.part += 1
        self.keep()
        if self.part + 1 == PARTS:
            shape = self.parts.shape
            self.rows = nl.ndarray(shape, dtype=nl.bfloat16, buffer=nl.private_hbm, name="sums_of_decays")
            nisa.dma_copy(dst=self.rows, src=self.parts, engine=nisa.engine.sync)


def unseen(before):
    """What is added to differences: 0, but `MASKED` where a key [row] is behind its query [column]."""
    result = nl.ndarray(before.shape, dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=result, data=before, op0=nl.subtract, operand0=1.0, op1=nl.multiply, operand1=-MASKED
    )
    return result


def differences(keys, queries, masks, one):
    """exp of the differences of a pack's rows, times the keys' time steps: [key, head, query] in bfloat16.

    Where a key is behind its query exp might have no number of float32: there it is 0.
    """
    tokens, heads = keys.shape[1], queries.shape[1]
    decays = nl.ndarray((tokens, heads, tokens), dtype=nl.bfloat16, buffer=nl.sbuf)
    banks = nl.ndarray((tokens, heads, tokens), dtype=nl.float32, buffer=nl.psum)
    for start, end in ranges(0, heads, BANK // tokens):
        own = queries[:, start:end, :]
        nisa.nc_matmul(dst=banks[:, start:end, :], stationary=keys, moving=own, accumulate=False)
        across = masks.expand_dim(1).broadcast(1, end - start)
        nisa.nc_matmul(dst=banks[:, start:end, :], stationary=one, moving=across, accumulate=True)
    nisa.activation(dst=decays, op=nl.exp, data=banks)
    return decays
