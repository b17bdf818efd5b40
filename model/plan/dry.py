"""Times of kernels from dry runs, at few enough sizes that a plan takes seconds.

- Up to 128 rows go through the weights together, with almost the same instructions: between launches at 1, 16 and 128
  rows, times are taken as linear. With sequence parallelism products are launched at their own number of rows.
- Beyond some thousand rows a kernel repeats itself, products with weights every 1,536 rows and attention every 512: the
  number of instructions is a polynomial in the number of repetitions, linear for products and beyond a window of
  attention, quadratic for attention else. Forward differences of launches at the first sizes with the same remainder
  continue it; for the serial reading, a sum over instructions, that is nearly exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from math import comb
from typing import Any

import numpy as np

from model.device import DryDevice
from model.execution.bound_launch import Device, bound
from model.layers.launch import Argument, Axis, Launch, Value
from model.mesh import Mesh

Sized = Callable[[int], Launch]
"""A launch by the rows of its step."""

ROWS_TOGETHER = 128
"""Rows of one tile of activations: the partitions."""

_KNOTS = (1, 16, ROWS_TOGETHER)
_PERIOD = 512
ROWS_PERIOD = 1536
"""A multiple of the groups of 128, 256, 384 and 512 rows of products."""


@dataclass(frozen=True)
class Time:
    """A time by its readings: dataflow and serial are the bounds, program is the prediction."""

    dataflow_ns: float = 0.0
    program_ns: float = 0.0
    serial_ns: float = 0.0

    def __add__(self, other: Time) -> Time:
        return Time(
            self.dataflow_ns + other.dataflow_ns,
            self.program_ns + other.program_ns,
            self.serial_ns + other.serial_ns,
        )

    def __sub__(self, other: Time) -> Time:
        return self + other * -1.0

    def __mul__(self, factor: float) -> Time:
        return Time(self.dataflow_ns * factor, self.program_ns * factor, self.serial_ns * factor)

    def at_least(self, other: Time) -> Time:
        """The longer of two times in every reading."""
        return Time(
            max(self.dataflow_ns, other.dataflow_ns),
            max(self.program_ns, other.program_ns),
            max(self.serial_ns, other.serial_ns),
        )

    @classmethod
    def of(cls, reading: Callable[[Callable[[Time], float]], float]) -> Time:
        """What a function of a reading of times gives in every reading."""
        return cls(
            reading(lambda time: time.dataflow_ns),
            reading(lambda time: time.program_ns),
            reading(lambda time: time.serial_ns),
        )

    @classmethod
    def exact(cls, time_ns: float) -> Time:
        """A time that is equal in every reading, such as a roofline."""
        return cls(time_ns, time_ns, time_ns)


class DryTimes:
    """Times of single launches on the ranks of a mesh of a chip. Rank 0 is planned; the others are taken to equal it.

    Raises ModelError for a launch that its kernel refuses.
    """

    def __init__(self, target: str, mesh: Mesh) -> None:
        self._mesh = mesh
        self._device = DryDevice(target, mesh.ranks, one_for_all=True)
        self.overhead_ns = 0.0

    def launch(self, launch: Launch) -> Time:
        """One launch, without starting and ending the kernel."""
        arguments = {
            parameter: stand_in(argument, self._device, self._mesh)
            for parameter, argument in launch.arguments.items()
        }
        self._device.run(launch.kernel, [arguments])
        done = self._device.take_pass()
        self.overhead_ns = done.overhead_ns
        took = done.prediction()
        whole = Time(took.dataflow_ns, took.program_ns, took.serial_ns)
        return whole - Time.exact(done.overhead_ns)

    def by_rows(self, sized: Sized, rows: int, ranks: int = 1) -> Time:
        """A product with weights, which takes the rows of all sequences together; `ranks` may cut them."""
        if rows > ROWS_TOGETHER:
            period = ROWS_PERIOD // ranks * ranks
            return continued(lambda size: self.launch(sized(size)), rows, order=1, period=period)
        if ranks > 1 or rows in _KNOTS:
            return self.launch(sized(rows))
        low, high = next((low, high) for low, high in pairwise(_KNOTS) if low < rows < high)
        share = (rows - low) / (high - low)
        return self.launch(sized(low)) * (1 - share) + self.launch(sized(high)) * share

    def by_tokens(self, sized: Sized, tokens: int, window: int | None) -> Time:
        """Attention of a prompt with itself, which beyond a window repeats itself for every token."""
        if window is None:
            return continued(lambda size: self.launch(sized(size)), tokens, order=2)
        full = min(-(-window // _PERIOD) * _PERIOD, tokens)
        return continued(lambda size: self.launch(sized(full + size)), tokens - full, order=1)


def stand_in(argument: Argument, device: Device, mesh: Mesh) -> Any:
    """An argument for a dry run, which looks at shapes and dtypes only: one element seen as many."""
    if argument is Axis.pipeline:
        return [(0, 1)]
    if isinstance(argument, Value):
        return np.broadcast_to(np.zeros((), argument.dtype), argument.shape)
    return bound(argument, device, mesh)


def continued(time: Callable[[int], Time], size: int, order: int, period: int = _PERIOD) -> Time:
    """The time at `size` rows: launched where that is small, else by forward differences up to `order`."""
    repeats, rest = divmod(size, period)
    if repeats <= order + 1:
        return time(size)
    known = [time(period * repeat + rest) for repeat in range(1, order + 2)]
    total = Time()
    for degree in range(order + 1):
        total = total + known[0] * comb(repeats - 1, degree)
        known = [after - before for before, after in pairwise(known)]
    return total
