"""Time steps of `ssd`, and the logarithms of their decays.

The time step of a token and head is softplus(step + bias) within limits; it is 0 for padding. Its decay is
exp(-exp(a_log) * time step). Narrow launches are those in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.recurrent.ssd_between import bound_logarithms, compute_logarithms
from nki_kernels.recurrent.ssd_heads import repeat_for_elements
from nki_kernels.recurrent.ssd_sizes import Sizes
from nki_kernels.tiles import PARTITIONS, broadcast_row


def load_decay_rates(a_log):
    """Return -exp(a_log) of a_log [1, H] in HBM, on each of 128 partitions: a new float32 SBUF tile [128, H]."""
    result = broadcast_row(a_log, PARTITIONS, nl.float32, 0.0)
    nisa.activation(dst=result, op=nl.exp, data=result)
    nisa.tensor_scalar(dst=result, data=result, op0=nl.multiply, operand0=-1.0)
    return result


def compute_time_steps(rows, bias, limits):
    """Return time steps softplus(rows + bias) within limits, a new float32 SBUF tile of the shape of `rows`.

    Args:
        rows: [token, head], as is the bias.
        limits: (least, largest). A least of 0 and a largest of None do not limit.
    """
    times = nl.ndarray(rows.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=times, data1=rows, data2=bias, op=nl.add)
    nisa.activation(dst=times, op=nl.softplus, data=times)
    limit_time_steps(times, limits)
    return times


def limit_time_steps(times, limits):
    """Limit time steps in place, to the least one if it is above 0, and to the largest one if it is not None.

    Args:
        times: a float32 tile of any shape.
        limits: (least, largest).
    """
    least, most = limits
    if least > 0.0:
        nisa.tensor_scalar(dst=times, data=times, op0=nl.maximum, operand0=least)
    if most is not None:
        nisa.tensor_scalar(dst=times, data=times, op0=nl.minimum, operand0=most)


@dataclass
class TimeSteps(nl.NKIObject):
    """Time steps of some chunks, which are computed together.

    Tiles are [token, chunk, head] in SBUF, None until their phase. bias: dt_bias, rates: -exp(a_log), both
    [128, head] float32. chunks: list of Chunk. phases: how many of STEP_PHASES are issued. rows: rows of
    steps, as in HBM. live: 1 for tokens that are no padding, else 0, [token, chunk]. times: time steps, 0 for
    padding. logs: logarithms of decays. For narrow launches: step_logs, the logarithms of time steps; least,
    `logs` but bounded below, and minus, the same with the other sign.
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
        """Issue the instructions of the next phase, and return that phase, a function of STEP_PHASES."""
        phase = STEP_PHASES[self.phases]
        phase(self)
        self.phases += 1
        return phase

    def load(self):
        """Load the raw steps of all chunks from HBM to `rows`, and compute `live`, 1 for real tokens and 0 for padding.

        Both are new SBUF tiles, [token, chunk, head] and [token, chunk] float32. Rows after the last token of
        a short chunk are zeros.
        """
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
        """Set `times` to softplus(rows + bias): time steps that are not limited yet, and not 0 for padding.

        They are a new float32 SBUF tile [token, chunk, head].
        """
        bias = self.bias.expand_dim(1).broadcast(1, len(self.chunks))
        self.times = nl.ndarray(self.rows.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=self.times, data1=self.rows, data2=bias, op=nl.add, engine=nisa.engine.gpsimd)
        nisa.activation(dst=self.times, op=nl.softplus, data=self.times)

    def decay(self):
        """Limit `times` to their limits in place, set those of padding to 0, and compute `logs`.

        `logs`, the logarithms of decays, are times * rates, a new float32 SBUF tile [token, chunk, head].
        """
        times, engine = self.times, nisa.engine.gpsimd
        limit_time_steps(times, self.sizes.dt_limits)
        live = repeat_for_elements(self.live, self.sizes.local_heads)
        nisa.tensor_tensor(dst=times, data1=times, data2=live, op=nl.multiply, engine=engine)
        self.logs = nl.ndarray(times.shape, dtype=nl.float32, buffer=nl.sbuf)
        rates = self.rates.expand_dim(1).broadcast(1, len(self.chunks))
        nisa.tensor_tensor(dst=self.logs, data1=times, data2=rates, op=nl.multiply, engine=engine)

    def take_logs(self):
        """Set `step_logs` to the logarithms of `times` plus LOG_LARGER, a new SBUF tile.

        Does nothing in float32 launches.
        """
        if self.sizes.narrow:
            self.step_logs = compute_logarithms(self.times)

    def bound(self):
        """Set `least` to `logs` bounded below, and `minus` to the same with the other sign: new SBUF tiles.

        Also subtract LOG_LARGER from `step_logs` in place. Does nothing in float32 launches.
        """
        if self.sizes.narrow:
            self.least, self.minus = bound_logarithms(self.step_logs, self.logs)


STEP_PHASES = (TimeSteps.load, TimeSteps.soften, TimeSteps.decay, TimeSteps.take_logs, TimeSteps.bound)
"""Phases of the time steps of some chunks, before the phases of the first of them."""
