"""Prompts of `ssd`: chunks of 128 tokens of each sequence, packs of heads.

Between chunks a state [n, column] in float32 stays in SBUF, and in bfloat16 steps a rounded copy of it for products.
Packs of all chunks follow one another through four stages, so that no engine waits at the end of a chunk.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.projection.normalised_rows import on_every_row, transpose_rows
from nki_kernels.recurrent.diagonal import identity
from nki_kernels.recurrent.slots import load_row, row, slots_or_none
from nki_kernels.recurrent.ssd_between import (
    Differences,
    SumsInParts,
    differences,
    narrowed,
    sums_between,
    unseen,
)
from nki_kernels.tiles import PARTITIONS, ranges

PREPARED = 6
"""Packs before its first one with which the first phase of a chunk comes."""

AT_ONCE = 640
"""Time steps on a partition that are worked out together, for several chunks."""

AHEAD = 3
"""Packs whose decays are computed before those of the first of them are used."""

PAUSE = 2
"""Packs without new decays while the Scalar engine opens the gates of a chunk, for which it loads another table."""

OTHERS = 4
"""Of so many packs GpSimd masks one, the Vector engine the rest."""

REPEATED = 3
"""Packs of a group from which on its scores are repeated for each head, which the Vector engine reads faster."""


def ssd_prompts(y, given, state, places, sequences, sizes):
    """All tokens of all sequences, for the own heads."""
    _, _, dt_bias, a_log, d, _ = given
    heads = slice(sizes.first_head, sizes.first_head + sizes.own)
    constants = {
        "bias": on_every_row(dt_bias[:, heads], PARTITIONS, nl.float32, 0.0),
        "rates": decay_rates(a_log[:, heads]),
        "before": triangle(-1, 0),
        "after": triangle(1, 1),
        "ones": filled((PARTITIONS, PARTITIONS), 1.0),
        "identity": identity(PARTITIONS, sizes.dtype),
    }
    skip = on_every_row(d[:, heads], PARTITIONS, nl.float32, 0.0)
    constants["skip"] = skip
    if sizes.narrow:
        constants["differences"] = Differences(sizes.most)
        constants["one"] = identity(PARTITIONS, nl.float32)
        constants["unseen"] = unseen(constants["before"])
        shape = (PARTITIONS, sizes.own, PARTITIONS)
        constants["skips"] = nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf)
    read = slots_or_none(row(places[0], 1), row(places[1], 1), state.shape[0])
    written = load_row(places[0])
    counts = row(places[2], PARTITIONS)
    each = y.shape[0] // sequences
    chunks = []
    for sequence in range(sequences):
        held = Held(state, read, written, sequence, sizes)
        for first, last in ranges(0, each):
            rows = (sequence * each + first, sequence * each + last)
            count = counts[:, sequence : sequence + 1]
            ends = last == each
            chunks.append(Chunk(y, given, constants, sizes, rows, held, first, count, ends, len(chunks)))
    pass_packs(chunks, sizes.packs(), max(1, AT_ONCE // sizes.own))


def pass_packs(chunks, packs, together):
    """Packs of all chunks through the stages; time steps of so many chunks are worked out together."""
    turns = []
    for number in range(len(chunks)):
        for pack in packs:
            turns.append({"chunk": chunks[number], "pack": pack})
    prepared, decayed, pause = 0, 0, 0
    waiting = []
    for number in range(len(turns) + 3):
        while prepared < len(chunks) and prepared * len(packs) <= number + PREPARED:
            if prepared % together == 0:
                waiting.append((take_steps, chunks[prepared : prepared + together]))
            for phase in PHASES:
                waiting.append((phase, chunks[prepared]))
            prepared += 1
        # All that the first chunk needs comes at once, and the phases of the others with the packs before.
        count = len(PHASES) + 1 if number == 0 else -(-len(PHASES) // len(packs))
        for phase, chunk in waiting[0:count]:
            phase(chunk)
            if phase == open_gates:
                pause = PAUSE
        waiting = waiting[count:]
        finished, multiplied = number - 3, number - 2
        if finished >= 0:
            turns[finished]["chunk"].finish(turns[finished])
        most = min(len(turns), number + (1 if pause > 0 else AHEAD))
        pause = max(0, pause - 1)
        for turn in turns[decayed : min(most, max(number + 1, decayed + 2))]:
            while not turn["chunk"].ready:
                phase, chunk = waiting[0]
                phase(chunk)
                waiting = waiting[1:]
            turn["chunk"].decay(turn)
            decayed += 1
        if number < len(turns):
            turns[number]["chunk"].mask(turns[number], number % OTHERS == OTHERS - 1)
        if finished >= 0 and len(packs) == 1:  # the next turn has the same states
            turns[finished]["chunk"].move_on(turns[finished])
        if 0 <= multiplied < len(turns):
            turns[multiplied]["chunk"].multiply(turns[multiplied])
        if finished >= 0 and len(packs) > 1:
            turns[finished]["chunk"].move_on(turns[finished])
        if finished >= 0:
            turns[finished] = None


class Held(nl.NKIObject):
    """The states of a sequence, [n, column], from its slot and back; `rounded` are they in the dtype of products."""

    def __init__(self, state, read, written, sequence, sizes):
        self.state = state
        self.read = read[0:1, sequence : sequence + 1]
        self.written = written[0:1, sequence : sequence + 1]
        self.sizes = sizes

    def load(self):
        """The states of the own heads; zeros at the start of a sequence."""
        sizes = self.sizes
        self.wide = nl.ndarray((sizes.states, sizes.width), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=self.wide, value=0.0, engine=nisa.engine.gpsimd)
        source = columns_of_slot(self.state, self.read, sizes)
        nisa.dma_copy(dst=self.wide, src=source, oob_mode=nisa.oob_mode.skip, engine=nisa.engine.scalar)
        self.rounded = self.wide
        if sizes.dtype != nl.float32:
            self.rounded = nl.ndarray(self.wide.shape, dtype=sizes.dtype, buffer=nl.sbuf)

    def round(self, columns):
        """Bring columns of the states to the dtype of products."""
        if self.sizes.dtype != nl.float32:
            rounded = self.rounded[:, columns]
            nisa.tensor_copy(dst=rounded, src=self.wide[:, columns], engine=nisa.engine.gpsimd)

    def store(self):
        """Write them back."""
        nisa.dma_copy(dst=columns_of_slot(self.state, self.written, self.sizes), src=self.wide)


def columns_of_slot(state, slot, sizes):
    """A view of HBM [n, column]: this core's columns of the states in one slot, whose number is in a tile [1, 1]."""
    pattern = [[sizes.inner, sizes.states], [1, sizes.width]]
    return state.ap(pattern=pattern, offset=sizes.left, scalar_offset=slot, indirect_dim=0)


def load_aside(source):
    """A tile of rows from HBM, in another queue than what is needed at once."""
    tile = nl.ndarray(source.shape, dtype=source.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=source, engine=nisa.engine.gpsimd)
    return tile


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


def fill_skips(constants, heads):
    """The identity times the skip of some heads: [token, head, token]."""
    own = constants["skips"][:, heads, :]
    nisa.tensor_tensor(
        dst=own,
        data1=constants["identity"].expand_dim(1).broadcast(1, own.shape[1]),
        data2=by_head(constants["skip"][:, heads], PARTITIONS),
        op=nl.multiply,
        engine=nisa.engine.gpsimd,
    )


def time_steps(rows, bias, limits):
    """Time steps of rows [token, …] that a bias is added to, in float32."""
    times = nl.ndarray(rows.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=times, data1=rows, data2=bias, op=nl.add)
    nisa.activation(dst=times, op=nl.softplus, data=times)
    least, most = limits
    if least > 0.0:
        nisa.tensor_scalar(dst=times, data=times, op0=nl.maximum, operand0=least)
    if most is not None:
        nisa.tensor_scalar(dst=times, data=times, op0=nl.minimum, operand0=most)
    return times


def take_steps(chunks):
    """Time steps of some chunks, 0 for padding, and the logarithms of their decays: [token, head] of each chunk."""
    sizes, constants = chunks[0].sizes, chunks[0].constants
    count, heads = len(chunks), sizes.own
    rows = nl.ndarray((PARTITIONS, count, heads), dtype=sizes.dtype, buffer=nl.sbuf)
    live = nl.ndarray((PARTITIONS, count), dtype=nl.float32, buffer=nl.sbuf)
    first = sizes.steps_first
    for number in range(count):
        chunk = chunks[number]
        if chunk.tokens < PARTITIONS:
            nisa.memset(dst=rows[:, number, :], value=0.0)
        start, end = chunk.rows
        nisa.dma_copy(
            dst=rows[0 : chunk.tokens, number, :], src=chunk.steps[start:end, first : first + heads]
        )
        place = live[:, number : number + 1]
        nisa.iota(dst=place, pattern=[[0, 1]], offset=chunk.first, channel_multiplier=1)
        nisa.tensor_tensor(dst=place, data1=place, data2=chunk.count, op=nl.less)
    bias = constants["bias"].expand_dim(1).broadcast(1, count)
    times = time_steps(rows, bias, sizes.dt_limits)
    nisa.tensor_tensor(dst=times, data1=times, data2=by_head(live, heads), op=nl.multiply)
    logs = nl.ndarray(times.shape, dtype=nl.float32, buffer=nl.sbuf)
    rates = constants["rates"].expand_dim(1).broadcast(1, count)
    nisa.tensor_tensor(dst=logs, data1=times, data2=rates, op=nl.multiply)
    of_steps, least, minus = narrowed(times, logs) if sizes.narrow else (None, None, None)
    for number in range(count):
        chunk = chunks[number]
        own = slice(0, chunk.tokens)
        chunk.times = times[own, number, :]
        chunk.logs = logs[own, number, :]
        if of_steps is not None:
            chunk.step_logs, chunk.least = of_steps[own, number, :], least[own, number, :]
            chunk.minus = minus[own, number, :]


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
    """Up to 128 tokens of a sequence: what all packs of heads share, and the stages of a pack."""

    def __init__(self, y, given, constants, sizes, rows, held, first, count, last, number):
        self.y = y
        self.u = given[0]
        self.steps = given[1]
        self.gate = given[5]
        self.constants = constants
        self.sizes = sizes
        self.rows = rows
        self.tokens = rows[1] - rows[0]
        self.held = held
        self.first = first
        self.count = count
        self.last = last
        self.number = number
        self.ready = False
        self.before = constants["before"][0 : self.tokens, 0 : self.tokens]
        self.after = constants["after"][0 : self.tokens, 0 : self.tokens]
        self.one = constants["identity"][0 : self.tokens, 0 : self.tokens]

    def summed(self, chosen):
        """For each column of `chosen` [token, column] the sum of a over its ones: [column, head] @ PSUM."""
        shape = (chosen.shape[1], self.logs.shape[1])
        bank = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=bank, stationary=chosen, moving=self.logs, accumulate=False)
        return bank

    def decay(self, turn):
        """Decays between the tokens of the chunk, for the heads of a pack: [key, head, query].

        In narrow steps the time steps of the keys are in them.
        """
        first, last = turn["pack"]
        if self.sizes.narrow:
            keys, queries = self.constants["differences"].bring(self.sides.rows, turn["pack"])
            masks = self.constants["unseen"][0 : self.tokens, 0 : self.tokens]
            turn["decays"] = differences(keys, queries, masks, self.one)
        else:
            turn["decays"] = sums_between(self.logs[:, first:last], self.after, self.before)

    def mask(self, turn, by_gpsimd):
        """Scores times decays, [key, head, query] in u's dtype, and what is multiplied by them."""
        first, last = turn["pack"]
        sizes, depth = self.sizes, self.sizes.depth
        if sizes.narrow and self.number == 0:
            fill_skips(self.constants, slice(first, last))
        if self.first == 0:
            self.held.round(slice(first * depth, last * depth))
        columns = self.x[:, first * depth : last * depth]
        turn["kept"] = scaled(columns, self.left_over[:, first:last], depth, nl.float32)
        turn["fed"] = columns
        if not sizes.narrow:
            turn["fed"] = scaled(columns, self.times[:, first:last], depth, sizes.dtype)
            skip = self.constants["skip"][0 : self.tokens, first:last]
            turn["skipped"] = scaled(columns, skip, depth, sizes.dtype)
        scores = self.scores[:, sizes.group_of(first), :, :]
        if scores.shape[1] == 1:
            scores = scores.broadcast(1, last - first)
        masked = nl.ndarray(turn["decays"].shape, dtype=sizes.dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(
            dst=masked,
            data1=turn["decays"],
            data2=scores[:, 0 : last - first, :],
            op=nl.multiply,
            engine=nisa.engine.gpsimd if by_gpsimd else nisa.engine.vector,
        )
        turn["masked"] = masked

    def multiply(self, turn):
        """The sums of a pack over states and tokens, and what its tokens leave of states."""
        first, last = turn["pack"]
        sizes, tokens, depth = self.sizes, self.tokens, self.sizes.depth
        group = sizes.group_of(first)
        columns = slice(first * depth, last * depth)
        shape = (tokens, (last - first) * depth)
        earlier = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
        out = self.across[:, sizes.groups + group, :]
        nisa.nc_matmul(dst=earlier, stationary=out, moving=self.held.rounded[:, columns], accumulate=False)
        decayed = nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(
            dst=in_heads(decayed, depth),
            data1=in_heads(earlier, depth),
            data2=by_head(self.reached[:, first:last], depth),
            op=nl.multiply,
        )
        sums = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
        if not sizes.narrow:
            nisa.nc_matmul(dst=sums, stationary=self.one, moving=turn["skipped"], accumulate=False)
        for head in range(last - first):
            place = slice(head * depth, (head + 1) * depth)
            fed = turn["fed"][:, place]
            if sizes.narrow:
                skip = self.constants["skips"][0:tokens, first + head, 0:tokens]
                nisa.nc_matmul(dst=sums[:, place], stationary=skip, moving=fed, accumulate=False)
            nisa.nc_matmul(
                dst=sums[:, place], stationary=turn["masked"][:, head, :], moving=fed, accumulate=True
            )
        left = nl.ndarray((sizes.states, shape[1]), dtype=nl.float32, buffer=nl.psum)
        into = self.into[:, group * sizes.states : (group + 1) * sizes.states]
        nisa.nc_matmul(dst=left, stationary=into, moving=turn["kept"], accumulate=False)
        passed = self.passed[0 : sizes.states, first:last]
        turn["passed"] = scaled(self.held.wide[:, columns], passed, depth, nl.float32)
        turn["sums"], turn["decayed"], turn["left"] = sums, decayed, left

    def move_on(self, turn):
        """The states of a pack after the chunk: decayed, plus what its tokens leave; stored behind the last pack."""
        first, last = turn["pack"]
        held, depth = self.held, self.sizes.depth
        columns = slice(first * depth, last * depth)
        nisa.tensor_tensor(dst=held.wide[:, columns], data1=turn["passed"], data2=turn["left"], op=nl.add)
        held.round(columns)
        if self.last and last == self.sizes.own:
            held.store()

    def finish(self, turn):
        """Rows of y of a pack."""
        first, last = turn["pack"]
        depth = self.sizes.depth
        nisa.nc_matmul(dst=turn["sums"], stationary=self.one, moving=turn["decayed"], accumulate=True)
        result = nl.ndarray(turn["sums"].shape, dtype=self.sizes.dtype, buffer=nl.sbuf)
        gates = self.gates[:, first * depth : last * depth]
        nisa.tensor_tensor(dst=result, data1=turn["sums"], data2=gates, op=nl.multiply)
        left = self.sizes.left + first * depth
        start, end = self.rows
        nisa.dma_copy(dst=self.y[start:end, left : left + result.shape[1]], src=result)


def bring_in(chunk):
    """Rows of u and of the gate; a sequence's first chunk loads its states, too."""
    sizes = chunk.sizes
    start, end = chunk.rows
    chunk.into_out = load_aside(chunk.u[start:end, sizes.inner :])
    chunk.x = load_aside(chunk.u[start:end, sizes.left : sizes.left + sizes.width])
    chunk.raw = load_aside(chunk.gate[start:end, sizes.gate_first : sizes.gate_first + sizes.width])
    if chunk.first == 0:
        chunk.held.load()


def first_part(chunk):
    """Sums of decays with the heads on the partitions, and their first parts."""
    if chunk.sizes.narrow:
        one = chunk.constants["one"][0 : chunk.tokens, 0 : chunk.tokens]
        chunk.sides = SumsInParts(chunk.least, chunk.minus, chunk.step_logs, chunk.before, one)


def next_part(chunk):
    """The next parts of these sums; the last ones on their way to HBM."""
    if chunk.sizes.narrow:
        chunk.sides.next()


def reach(chunk):
    """Decays from the beginning of the chunk to each token."""
    chunk.reached = exponential(chunk.summed(chunk.before))


def pass_by(chunk):
    """Decays over the chunk."""
    chunk.passed = exponential(chunk.summed(chunk.constants["ones"][0 : chunk.tokens, :]))


def leave_over(chunk):
    """Decays from each token to the end of the chunk, times its time step."""
    chunk.left_over = exponential(chunk.summed(chunk.after))
    nisa.tensor_tensor(dst=chunk.left_over, data1=chunk.left_over, data2=chunk.times, op=nl.multiply)


def turn_over(chunk):
    """into and out of every group with n on the partitions; into in float32."""
    tokens, groups, sizes = chunk.tokens, chunk.sizes.groups, chunk.sizes
    chunk.across = nl.ndarray((sizes.states, 2 * groups, tokens), dtype=sizes.dtype, buffer=nl.sbuf)
    transpose_rows(chunk.across, 0, chunk.into_out, 2)
    chunk.into = chunk.into_out
    if sizes.dtype != nl.float32:
        chunk.into = nl.ndarray((tokens, groups * sizes.states), dtype=nl.float32, buffer=nl.sbuf)
        rows = chunk.into_out[:, 0 : groups * sizes.states]
        nisa.tensor_copy(dst=chunk.into, src=rows, engine=nisa.engine.gpsimd)


def score(chunk):
    """out into^T of every group, transposed, 0 where the key is behind the query: [key, group, head, query].

    A group of many packs has its scores once for each head of a pack.
    """
    tokens, groups, sizes = chunk.tokens, chunk.sizes.groups, chunk.sizes
    copies = sizes.most if sizes.narrow and sizes.heads >= REPEATED * groups * sizes.most else 1
    dtype = sizes.dtype if sizes.narrow else nl.float32
    chunk.scores = nl.ndarray((tokens, groups, copies, tokens), dtype=dtype, buffer=nl.sbuf)
    for group in range(groups):
        bank = nl.ndarray((tokens, tokens), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(
            dst=bank,
            stationary=chunk.across[:, group, :],
            moving=chunk.across[:, groups + group, :],
            accumulate=False,
        )
        own = chunk.scores[:, group, :, :]
        nisa.tensor_tensor(dst=own[:, 0, :], data1=bank, data2=chunk.before, op=nl.multiply)
        if copies > 1:
            others = own[:, 0:1, :].broadcast(1, copies - 1)
            nisa.tensor_copy(dst=own[:, 1:copies, :], src=others, engine=nisa.engine.gpsimd)


def open_gates(chunk):
    """silu of the gates in float32; the last phase."""
    chunk.gates = nl.ndarray(chunk.raw.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=chunk.gates, op=nl.silu, data=chunk.raw)
    chunk.ready = True


PHASES = (
    bring_in,
    first_part,
    next_part,
    next_part,
    reach,
    pass_by,
    leave_over,
    turn_over,
    score,
    open_gates,
)
"""What all packs of a chunk share, a phase with each pack of the chunk before."""
