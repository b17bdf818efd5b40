"""Time steps of `ssd`, and the logarithms of their decays."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.projection.normalised_rows import on_every_row
from nki_kernels.recurrent.ssd_between import bounded, logarithms
from nki_kernels.recurrent.ssd_heads import by_head
from nki_kernels.tiles import PARTITIONS


def decay_rates(a_log):
    """-exp(a_log) of [1, H] on each of 128 partitions."""
    result = on_every_row(a_log, PARTITIONS, nl.float32, 0.0)
    nisa.activation(dst=result, op=nl.exp, data=result)
    nisa.tensor_scalar(dst=result, data=result, op0=nl.multiply, operand0=-1.0)
    return result


def time_steps(rows, bias, limits):
    """Time steps of rows [token, …] that a bias is added to, in float32."""
    times = nl.ndarray(rows.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=times, data1=rows, data2=bias, op=nl.add)
    nisa.activation(dst=times, op=nl.softplus, data=times)
    limit(times, limits)
    return times


def limit(times, limits):
    """Bring time steps between their limits."""
    least, most = limits
    if least > 0.0:
        nisa.tensor_scalar(dst=times, data=times, op0=nl.maximum, operand0=least)
    if most is not None:
        nisa.tensor_scalar(dst=times, data=times, op0=nl.minimum, operand0=most)


class Steps(nl.NKIObject):
    """Time steps of some chunks, [token, chunk, head], which are worked out together."""

    def __init__(self, chunks):
        self.chunks = chunks
        self.sizes = chunks[0].sizes
        self.constants = chunks[0].constants
        self.phases = 0

    def load(self):
        """Rows of the time steps, and which of them are no padding."""
        count, heads = len(self.chunks), self.sizes.local_heads
        self.rows = nl.ndarray((PARTITIONS, count, heads), dtype=self.sizes.dtype, buffer=nl.sbuf)
        self.live = nl.ndarray((PARTITIONS, count), dtype=nl.float32, buffer=nl.sbuf)
        first = self.sizes.steps_first
        for number in range(count):
            chunk = self.chunks[number]
            if chunk.tokens < PARTITIONS:
                nisa.memset(dst=self.rows[:, number, :], value=0.0)
            start, end = chunk.rows
            nisa.dma_copy(
                dst=self.rows[0 : chunk.tokens, number, :], src=chunk.steps[start:end, first : first + heads]
            )
            live = self.live[:, number : number + 1]
            nisa.iota(dst=live, pattern=[[0, 1]], offset=chunk.first, channel_multiplier=1)
            nisa.tensor_tensor(dst=live, data1=live, data2=chunk.count, op=nl.less, engine=nisa.engine.gpsimd)

    def soften(self):
        """softplus of the sums with their bias."""
        bias = self.constants.bias.expand_dim(1).broadcast(1, len(self.chunks))
        self.times = nl.ndarray(self.rows.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=self.times, data1=self.rows, data2=bias, op=nl.add, engine=nisa.engine.gpsimd)
        nisa.activation(dst=self.times, op=nl.softplus, data=self.times)
        self.rows = None

    def take(self):
        """The time steps, 0 for padding, and the logarithms of their decays: [token, head] of each chunk."""
        times, engine = self.times, nisa.engine.gpsimd
        limit(times, self.sizes.dt_limits)
        live = by_head(self.live, self.sizes.local_heads)
        nisa.tensor_tensor(dst=times, data1=times, data2=live, op=nl.multiply, engine=engine)
        self.logs = nl.ndarray(times.shape, dtype=nl.float32, buffer=nl.sbuf)
        rates = self.constants.rates.expand_dim(1).broadcast(1, len(self.chunks))
        nisa.tensor_tensor(dst=self.logs, data1=times, data2=rates, op=nl.multiply, engine=engine)
        for number in range(len(self.chunks)):
            tokens = slice(0, self.chunks[number].tokens)
            self.chunks[number].times = times[tokens, number, :]
            self.chunks[number].logs = self.logs[tokens, number, :]

    def narrow(self):
        """The logarithms of the time steps, for differences of narrow steps."""
        if self.sizes.narrow:
            self.step_logs = logarithms(self.times)
        self.times = None

    def bound(self):
        """The logarithms of decays as differences take them, and with the other sign."""
        if self.sizes.narrow:
            least, minus = bounded(self.step_logs, self.logs)
            for number in range(len(self.chunks)):
                chunk = self.chunks[number]
                tokens = slice(0, chunk.tokens)
                chunk.step_logs, chunk.least = self.step_logs[tokens, number, :], least[tokens, number, :]
                chunk.minus = minus[tokens, number, :]
            self.step_logs = None
        self.logs = None


def load_steps(steps):
    """The first phase of time steps."""
    steps.load()


def soften_steps(steps):
    """The second one, for the Scalar engine."""
    steps.soften()


def take_steps(steps):
    """The third one, for GpSimd."""
    steps.take()


def narrow_steps(steps):
    """The fourth one, for the Scalar engine."""
    steps.narrow()


def bound_steps(steps):
    """The last one, for GpSimd."""
    steps.bound()


STEPS = (load_steps, soften_steps, take_steps, narrow_steps, bound_steps)
"""Phases of the time steps of some chunks, before the phases of the first of them."""
