"""Time steps of `ssd`, and the logarithms of their decays."""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.recurrent.ssd_between import bounded, logarithms
from nki_kernels.recurrent.ssd_heads import by_head
from nki_kernels.recurrent.ssd_sizes import Sizes
from nki_kernels.tiles import PARTITIONS, on_every_row


def decay_rates(a_log):
    """Return -exp(a_log) of [1, H] on each of 128 partitions."""
    result = on_every_row(a_log, PARTITIONS, nl.float32, 0.0)
    nisa.activation(dst=result, op=nl.exp, data=result)
    nisa.tensor_scalar(dst=result, data=result, op0=nl.multiply, operand0=-1.0)
    return result


def time_steps(rows, bias, limits):
    """Return time steps of rows [token, …] that a bias is added to, in float32."""
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


@dataclass
class TimeSteps(nl.NKIObject):
    """Time steps of some chunks, [token, chunk, head], which are worked out together; None until their phase.

    bias, rates: [128, head]; rates are -exp(a_log). chunks: list of Chunk. phases: how many are done. rows: rows of
    steps. live: 1 for tokens that are no padding, [token, chunk]. times: 0 for padding. logs: logarithms of decays. For
    narrow steps step_logs: logarithms of time steps, and least, minus: `logs` as differences take them, and with the
    other sign.
    """

    sizes: Sizes
    bias: nl.NkiTensor
    rates: nl.NkiTensor
    chunks: list
    phases: int = 0
    rows: nl.NkiTensor | None = None
    live: nl.NkiTensor | None = None
    times: nl.NkiTensor | None = None
    logs: nl.NkiTensor | None = None
    step_logs: nl.NkiTensor | None = None
    least: nl.NkiTensor | None = None
    minus: nl.NkiTensor | None = None

    def work(self):
        """Issue the next phase, and return it."""
        phase = STEP_PHASES[self.phases]
        phase(self)
        self.phases += 1
        return phase

    def load(self):
        """Load `rows`, and compute `live`."""
        count, heads, first = len(self.chunks), self.sizes.local_heads, self.sizes.steps_first
        self.rows = nl.ndarray((PARTITIONS, count, heads), dtype=self.sizes.dtype, buffer=nl.sbuf)
        self.live = nl.ndarray((PARTITIONS, count), dtype=nl.float32, buffer=nl.sbuf)
        for i in range(count):  # i: chunk
            chunk = self.chunks[i]
            if chunk.tokens < PARTITIONS:
                # `live` times what is undefined may be NaN, so rows after the last token are zeros.
                nisa.memset(dst=self.rows[:, i, :], value=0.0)
            start, end = chunk.rows
            source = chunk.inputs.steps[start:end, first : first + heads]
            nisa.dma_copy(dst=self.rows[0 : chunk.tokens, i, :], src=source)
            live = self.live[:, i : i + 1]
            nisa.iota(dst=live, pattern=[[0, 1]], offset=chunk.first, channel_multiplier=1)
            nisa.tensor_tensor(dst=live, data1=live, data2=chunk.count, op=nl.less, engine=nisa.engine.gpsimd)

    def soften(self):
        """Begin `times` with softplus of the sums of rows and bias."""
        bias = self.bias.expand_dim(1).broadcast(1, len(self.chunks))
        self.times = nl.ndarray(self.rows.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=self.times, data1=self.rows, data2=bias, op=nl.add, engine=nisa.engine.gpsimd)
        nisa.activation(dst=self.times, op=nl.softplus, data=self.times)

    def decay(self):
        """Limit `times`, set those of padding to 0, and compute `logs`."""
        times, engine = self.times, nisa.engine.gpsimd
        limit(times, self.sizes.dt_limits)
        live = by_head(self.live, self.sizes.local_heads)
        nisa.tensor_tensor(dst=times, data1=times, data2=live, op=nl.multiply, engine=engine)
        self.logs = nl.ndarray(times.shape, dtype=nl.float32, buffer=nl.sbuf)
        rates = self.rates.expand_dim(1).broadcast(1, len(self.chunks))
        nisa.tensor_tensor(dst=self.logs, data1=times, data2=rates, op=nl.multiply, engine=engine)

    def take_logs(self):
        """Compute `step_logs`, for narrow steps."""
        if self.sizes.narrow:
            self.step_logs = logarithms(self.times)

    def bound(self):
        """Compute `least` and `minus`, for narrow steps."""
        if self.sizes.narrow:
            self.least, self.minus = bounded(self.step_logs, self.logs)


STEP_PHASES = (TimeSteps.load, TimeSteps.soften, TimeSteps.decay, TimeSteps.take_logs, TimeSteps.bound)
"""Phases of the time steps of some chunks, before the phases of the first of them."""
