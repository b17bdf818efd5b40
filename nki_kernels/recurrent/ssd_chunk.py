"""A chunk of a prompt of `ssd`: up to 128 tokens of a sequence, and the stages of a pack of its heads."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.dma import COMPILER, transfer
from nki_kernels.recurrent.ssd_between import differences, sums_between
from nki_kernels.recurrent.ssd_heads import by_head, in_heads, scaled
from nki_kernels.tiles import BANK, PARTITIONS, ranges


class Chunk(nl.NKIObject):
    """Up to 128 tokens of a sequence: what all packs of heads share, and the stages of a pack."""

    def __init__(self, y, given, constants, sizes, rows, held, first, count, last):
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
        self.phases = 0
        self.ready = False

    def summed(self, chosen):
        """For each column of `chosen` [token, column] the sum of a over its ones: [column, head] @ PSUM."""
        shape = (chosen.shape[1], self.logs.shape[1])
        bank = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=bank, stationary=chosen, moving=self.logs, accumulate=False)
        return bank

    def fetch(self, turn):
        """Bring the sums of decays of a pack, for narrow steps."""
        if self.sizes.narrow:
            halves = []
            for heads in ranges(turn["pack"][0], turn["pack"][1], BANK // PARTITIONS):
                halves.append(self.constants["differences"].bring(self.sides.rows, heads))
            turn["halves"] = halves

    def decay(self, turn):
        """Decays between the tokens of the chunk, for the heads of a pack: [key, head, query].

        In narrow steps the time steps of the keys are in them.
        """
        first, last = turn["pack"]
        if self.sizes.narrow:
            turn["decays"] = differences(turn["halves"], self.tokens, last - first)
        else:
            turn["decays"] = sums_between(self.logs[:, first:last], self.after, self.before)

    def scale(self, turn):
        """x times what products need: for states the decays behind each token; in float32 time steps and the skip."""
        first, last = turn["pack"]
        sizes, depth = self.sizes, self.sizes.depth
        columns = self.x[:, first * depth : last * depth]
        turn["kept"] = scaled(columns, self.left_over[:, first:last], depth, nl.float32)
        turn["fed"] = columns
        if not sizes.narrow:
            turn["fed"] = scaled(columns, self.times[:, first:last], depth, sizes.dtype)
            skip = self.constants["skip"][0 : self.tokens, first:last]
            turn["skipped"] = scaled(columns, skip, depth, sizes.dtype)

    def mask(self, turn, engine):
        """Scores times decays, [key, head, query] in u's dtype."""
        first, last = turn["pack"]
        scores = self.scores[:, self.sizes.group_of(first), :, :]
        if scores.shape[1] == 1:
            scores = scores.broadcast(1, last - first)
        masked = nl.ndarray(turn["decays"].shape, dtype=self.sizes.dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(
            dst=masked,
            data1=turn["decays"],
            data2=scores[:, 0 : last - first, :],
            op=nl.multiply,
            engine=engine,
        )
        turn["masked"], turn["decays"] = masked, None

    def look_back(self, turn):
        """What the tokens of a pack read of the states before the chunk, and these states after its decays."""
        first, last = turn["pack"]
        sizes, held, depth = self.sizes, self.held, self.sizes.depth
        columns = slice(first * depth, last * depth)
        if self.first == 0:
            held.round(columns, False)
        passed = self.passed[0 : sizes.states, first:last]
        turn["passed"] = scaled(held.wide[:, columns], passed, depth, nl.float32)
        shape = (self.tokens, (last - first) * depth)
        earlier = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
        out = self.across[:, sizes.groups + sizes.group_of(first), :]
        nisa.nc_matmul(dst=earlier, stationary=out, moving=held.rounded[:, columns], accumulate=False)
        decayed = nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(
            dst=in_heads(decayed, depth),
            data1=in_heads(earlier, depth),
            data2=by_head(self.reached[:, first:last], depth),
            op=nl.multiply,
        )
        turn["decayed"] = decayed

    def sum_up(self, turn):
        """Rows of y of a pack: the sums over the tokens of the chunk and those before, times the gates."""
        first, last = turn["pack"]
        sizes, tokens, depth = self.sizes, self.tokens, self.sizes.depth
        sums = nl.ndarray((tokens, (last - first) * depth), dtype=nl.float32, buffer=nl.psum)
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
        nisa.nc_matmul(dst=sums, stationary=self.one, moving=turn["decayed"], accumulate=True)
        turn["y"] = nl.ndarray(sums.shape, dtype=sizes.dtype, buffer=nl.sbuf)
        gates = self.gates[:, first * depth : last * depth]
        result = nl.ndarray(sums.shape, dtype=sizes.dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=result, data1=sums, data2=gates, op=nl.multiply)
        left = sizes.left + first * depth
        start, end = self.rows
        rows = self.y[start:end, left : left + result.shape[1]]
        transfer(rows, result, COMPILER)

    def move_on(self, turn):
        """The states of a pack after the chunk: decayed, plus what its tokens leave."""
        first, last = turn["pack"]
        sizes, held, depth = self.sizes, self.held, self.sizes.depth
        columns = slice(first * depth, last * depth)
        group = sizes.group_of(first)
        left = nl.ndarray((sizes.states, (last - first) * depth), dtype=nl.float32, buffer=nl.psum)
        into = self.into[:, group * sizes.states : (group + 1) * sizes.states]
        nisa.nc_matmul(dst=left, stationary=into, moving=turn["kept"], accumulate=False)
        nisa.tensor_tensor(dst=held.wide[:, columns], data1=turn["passed"], data2=left, op=nl.add)

    def keep(self, turn, by_scalar):
        """Round the states of a pack for the next chunk; all are stored behind the last pack of the last one."""
        first, last = turn["pack"]
        depth = self.sizes.depth
        if not self.last:
            self.held.round(slice(first * depth, last * depth), by_scalar)
        elif last == self.sizes.own:
            self.held.store()
