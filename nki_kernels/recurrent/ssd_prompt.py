"""Prompts of `ssd`: chunks of 128 tokens of each sequence, packs of heads.

Between chunks a state [n, column] in float32 stays in SBUF, and in bfloat16 steps a rounded copy of it for products.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.projection.normalised_rows import on_every_row, transpose_rows
from nki_kernels.recurrent.diagonal import identity
from nki_kernels.recurrent.slots import load_row, row, slots_or_none
from nki_kernels.tiles import BANK, PARTITIONS, load, ranges


def ssd_prompts(y, given, state, places, sequences, sizes):
    """All tokens of all sequences, for the own heads."""
    _, _, dt_bias, a_log, d, _ = given
    heads = slice(sizes.first_head, sizes.first_head + sizes.own)
    constants = {
        "bias": on_every_row(dt_bias[:, heads], PARTITIONS, nl.float32, 0.0),
        "rates": decay_rates(a_log[:, heads]),
        "skip": on_every_row(d[:, heads], PARTITIONS, nl.float32, 0.0),
        "before": triangle(-1, 0),
        "after": triangle(1, 1),
        "ones": filled((PARTITIONS, PARTITIONS), 1.0),
        "identity": identity(PARTITIONS, sizes.dtype),
    }
    read = slots_or_none(row(places[0], 1), row(places[1], 1), state.shape[0])
    written = load_row(places[0])
    counts = row(places[2], PARTITIONS)
    each = y.shape[0] // sequences
    for sequence in range(sequences):
        held = nl.ndarray((sizes.states, sizes.width), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=held, value=0.0)
        source = columns_of_slot(state, read[0:1, sequence : sequence + 1], sizes)
        nisa.dma_copy(dst=held, src=source, oob_mode=nisa.oob_mode.skip)
        rounded = held
        if sizes.dtype != nl.float32:
            rounded = nl.ndarray(held.shape, dtype=sizes.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=rounded, src=held)
        for first, last in ranges(0, each):
            start = sequence * each
            chunk = Chunk(y, given, constants, sizes, (start + first, start + last), held, rounded)
            chunk.prepare(first, counts[:, sequence : sequence + 1])
            chunk.scan()
        nisa.dma_copy(dst=columns_of_slot(state, written[0:1, sequence : sequence + 1], sizes), src=held)


def columns_of_slot(state, slot, sizes):
    """A view of HBM [n, column]: this core's columns of the states in one slot, whose number is in a tile [1, 1]."""
    pattern = [[sizes.inner, sizes.states], [1, sizes.width]]
    return state.ap(pattern=pattern, offset=sizes.left, scalar_offset=slot, indirect_dim=0)


def filled(shape, value):
    """A tile of float32 with one value."""
    result = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=result, value=value)
    return result


def decay_rates(a_log):
    """-exp(a_log) of [1, H] on each of 128 partitions."""
    result = on_every_row(a_log, PARTITIONS, nl.float32, 0.0)
    nisa.activation(dst=result, op=nl.exp, data=result)
    nisa.tensor_scalar(dst=result, data=result, op0=nl.multiply, operand0=-1.0)
    return result


def triangle(multiplier, offset):
    """1 where multiplier * (partition - column) is offset or more, else 0: [128, 128] in float32."""
    result = nl.ndarray((PARTITIONS, PARTITIONS), dtype=nl.float32, buffer=nl.sbuf)
    nisa.affine_select(
        dst=result,
        pattern=[[-multiplier, PARTITIONS]],
        offset=-offset,
        channel_multiplier=multiplier,
        on_true_tile=filled((PARTITIONS, PARTITIONS), 1.0),
        on_false_value=0.0,
        cmp_op=nl.greater_equal,
    )
    return result


def time_steps(rows, constants, live, sizes):
    """Time steps of rows [token, head], in float32; 0 where `live` [token, 1] is."""
    tokens = rows.shape[0]
    times = nl.ndarray(rows.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=times, data1=rows, data2=constants["bias"][0:tokens, :], op=nl.add)
    nisa.activation(dst=times, op=nl.softplus, data=times)
    least, most = sizes.dt_limits
    if least > 0.0:
        nisa.tensor_scalar(dst=times, data=times, op0=nl.maximum, operand0=least)
    if most is not None:
        nisa.tensor_scalar(dst=times, data=times, op0=nl.minimum, operand0=most)
    nisa.tensor_scalar(dst=times, data=times, op0=nl.multiply, operand0=live)
    return times


def by_head(factors, depth):
    """Factors [row, head] seen as [row, head, element]."""
    return factors.expand_dim(2).broadcast(2, depth)


def in_heads(rows, depth):
    """Rows [row, head * element] seen as [row, head, element]."""
    return rows.reshape_dim(1, (rows.shape[1] // depth, depth))


def scaled(rows, factors, depth, dtype):
    """Each head of rows [row, head * element] times its factor [row, head], on GpSimd."""
    result = nl.ndarray(rows.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=in_heads(result, depth),
        data1=in_heads(rows, depth),
        data2=by_head(factors, depth),
        op=nl.multiply,
        engine=nisa.engine.gpsimd,
    )
    return result


def exponential(data, dtype=nl.float32):
    """exp of every element of a tile."""
    result = nl.ndarray(data.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.activation(dst=result, op=nl.exp, data=data)
    return result


class Chunk(nl.NKIObject):
    """Up to 128 tokens of a sequence: what all packs of heads share, and the packs one after another."""

    def __init__(self, y, given, constants, sizes, rows, held, rounded):
        self.y = y
        self.u = given[0]
        self.steps = given[1]
        self.gate = given[5]
        self.constants = constants
        self.sizes = sizes
        self.rows = rows
        self.tokens = rows[1] - rows[0]
        self.held = held
        self.rounded = rounded

    def prepare(self, first, count):
        """Loads, time steps and sums of decays, and the scores of every group; `first` is the chunk's first token."""
        sizes, tokens = self.sizes, self.tokens
        start, end = self.rows
        self.x = load(self.u[start:end, sizes.left : sizes.left + sizes.width], sizes.dtype)
        self.sides = load(self.u[start:end, sizes.inner :], sizes.dtype)
        rows = load(self.steps[start:end, sizes.steps_first : sizes.steps_first + sizes.own], sizes.dtype)
        gates = load(self.gate[start:end, sizes.gate_first : sizes.gate_first + sizes.width], sizes.dtype)
        number = nl.ndarray((tokens, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.iota(dst=number, pattern=[[0, 1]], offset=first, channel_multiplier=1)
        live = nl.ndarray((tokens, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=live, data1=number, data2=count[0:tokens, :], op=nl.less)
        times = time_steps(rows, self.constants, live, sizes)
        self.gates = nl.ndarray(gates.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=self.gates, op=nl.silu, data=gates)
        self.decay(times)
        self.fed = scaled(self.x, times, sizes.depth, sizes.dtype)
        self.kept = scaled(self.x, self.left_over, sizes.depth, nl.float32)
        self.skipped = scaled(self.x, self.constants["skip"][0:tokens, :], sizes.depth, sizes.dtype)
        self.score()

    def decay(self, times):
        """Sums of a up to each token, behind it to the end, and of the whole chunk, and their exponentials."""
        tokens = self.tokens
        self.logs = nl.ndarray(times.shape, dtype=nl.float32, buffer=nl.sbuf)
        rates = self.constants["rates"][0:tokens, :]
        nisa.tensor_tensor(dst=self.logs, data1=times, data2=rates, op=nl.multiply)
        self.reached = exponential(self.summed(self.constants["before"][0:tokens, 0:tokens]))
        self.passed = exponential(self.summed(self.constants["ones"][0:tokens, :]))
        self.left_over = exponential(self.summed(self.constants["after"][0:tokens, 0:tokens]))
        nisa.tensor_tensor(dst=self.left_over, data1=self.left_over, data2=times, op=nl.multiply)

    def summed(self, chosen):
        """For each column of `chosen` [token, column] the sum of a over its ones: [column, head] @ PSUM."""
        shape = (chosen.shape[1], self.logs.shape[1])
        bank = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=bank, stationary=chosen, moving=self.logs, accumulate=False)
        return bank

    def score(self):
        """out into^T of every group, transposed, 0 where the key is behind the query: [key, group, query]."""
        tokens, groups, sizes = self.tokens, self.sizes.groups, self.sizes
        self.across = nl.ndarray((sizes.states, 2 * groups, tokens), dtype=sizes.dtype, buffer=nl.sbuf)
        transpose_rows(self.across, 0, self.sides, 2)
        self.into = self.sides
        if sizes.dtype != nl.float32:
            self.into = nl.ndarray((tokens, groups * sizes.states), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_copy(dst=self.into, src=self.sides[:, 0 : groups * sizes.states])
        self.scores = nl.ndarray((tokens, groups, tokens), dtype=nl.float32, buffer=nl.sbuf)
        for group in range(groups):
            bank = nl.ndarray((tokens, tokens), dtype=nl.float32, buffer=nl.psum)
            nisa.nc_matmul(
                dst=bank,
                stationary=self.across[:, group, :],
                moving=self.across[:, groups + group, :],
                accumulate=False,
            )
            nisa.tensor_tensor(
                dst=self.scores[:, group, :],
                data1=bank,
                data2=self.constants["before"][0:tokens, 0:tokens],
                op=nl.multiply,
            )

    def scan(self):
        """All packs: masked scores are made one pack ahead of their product, rows of y are stored one pack later."""
        packs = self.sizes.packs()
        ahead = self.masked(packs[0])
        waiting = None
        for number in range(len(packs)):
            ready = ahead
            if number + 1 < len(packs):
                ahead = self.masked(packs[number + 1])
            result = self.product(packs[number], ready)
            if waiting is not None:
                self.store(packs[number - 1], waiting)
            waiting = result
        self.store(packs[len(packs) - 1], waiting)

    def store(self, pack, rows):
        """Rows of y of a pack."""
        left = self.sizes.left + pack[0] * self.sizes.depth
        start, end = self.rows
        nisa.dma_copy(dst=self.y[start:end, left : left + rows.shape[1]], src=rows)

    def masked(self, pack):
        """The scores of the heads of a pack times decays, [key, head, query] in u's dtype.

        A decay's logarithm is the sum of a over the tokens behind the key up to the query, which no difference of two
        sums gives as exactly. Behind the query it is 0 and meets a score of 0.
        """
        first, last = pack
        tokens, group = self.tokens, self.sizes.group_of(first)
        shape = (tokens, last - first, tokens)
        behind = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        after = self.constants["after"][0:tokens, 0:tokens]
        nisa.tensor_tensor(
            dst=behind,
            data1=after.expand_dim(1).broadcast(1, last - first),
            data2=by_head(self.logs[:, first:last], tokens),
            op=nl.multiply,
            engine=nisa.engine.gpsimd,
        )
        decays = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        before = self.constants["before"][0:tokens, 0:tokens]
        for start, end in ranges(0, last - first, BANK // tokens):
            bank = nl.ndarray((tokens, end - start, tokens), dtype=nl.float32, buffer=nl.psum)
            for head in range(start, end):
                own = behind[:, head, :]
                nisa.nc_matmul(dst=bank[:, head - start, :], stationary=own, moving=before, accumulate=False)
            nisa.activation(dst=decays[:, start:end, :], op=nl.exp, data=bank)
        result = nl.ndarray(shape, dtype=self.sizes.dtype, buffer=nl.sbuf)
        scores = self.scores[:, group : group + 1, :].broadcast(1, last - first)
        nisa.tensor_tensor(dst=result, data1=decays, data2=scores, op=nl.multiply)
        return result

    def product(self, pack, masked):
        """The rows of y of a pack, which are returned, and its states after the chunk."""
        first, last = pack
        sizes, tokens, depth = self.sizes, self.tokens, self.sizes.depth
        group, columns = sizes.group_of(first), slice(first * depth, last * depth)
        shape = (tokens, (last - first) * depth)
        earlier = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
        out = self.across[:, sizes.groups + group, :]
        nisa.nc_matmul(dst=earlier, stationary=out, moving=self.rounded[:, columns], accumulate=False)
        sums = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
        one = self.constants["identity"][0:tokens, 0:tokens]
        nisa.nc_matmul(dst=sums, stationary=one, moving=self.skipped[:, columns], accumulate=False)
        for head in range(first, last):
            nisa.nc_matmul(
                dst=sums[:, (head - first) * depth : (head - first + 1) * depth],
                stationary=masked[:, head - first, :],
                moving=self.fed[:, head * depth : (head + 1) * depth],
                accumulate=True,
            )
        self.move_on(pack, columns, group)
        decayed = nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(
            dst=in_heads(decayed, depth),
            data1=in_heads(earlier, depth),
            data2=by_head(self.reached[:, first:last], depth),
            op=nl.multiply,
        )
        nisa.nc_matmul(dst=sums, stationary=one, moving=decayed, accumulate=True)
        result = nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=result, data1=sums, data2=self.gates[:, columns], op=nl.multiply)
        return result

    def move_on(self, pack, columns, group):
        """The states of a pack after the chunk: decayed, plus what its tokens leave."""
        first, last = pack
        sizes = self.sizes
        bank = nl.ndarray((sizes.states, columns.stop - columns.start), dtype=nl.float32, buffer=nl.psum)
        own = self.into[:, group * sizes.states : (group + 1) * sizes.states]
        nisa.nc_matmul(dst=bank, stationary=own, moving=self.kept[:, columns], accumulate=False)
        passed = self.passed[0 : sizes.states, first:last]
        decayed = scaled(self.held[:, columns], passed, sizes.depth, nl.float32)
        nisa.tensor_tensor(dst=self.held[:, columns], data1=decayed, data2=bank, op=nl.add)
        if sizes.dtype != nl.float32:
            nisa.activation(dst=self.rounded[:, columns], op=nl.copy, data=self.held[:, columns])
