"""Times of kernels from dry runs, which trace a launch without computing it, at few enough sizes to plan in seconds.

`predict`, `experts` and `single_step` call this module.

- Up to 128 rows pass the weights together, with almost the same instructions: between launches at 1, 16 and 128 rows,
  times are interpolated. With sequence parallelism, products are launched at their exact number of rows.
- Beyond some thousand rows a kernel repeats the same instructions: products with weights every 1,536 rows, attention
  every 1,024. The number of instructions is a polynomial in the number of repetitions. It is linear for products and
  for attention beyond its window, else quadratic. Launches at smaller sizes with the same remainder extrapolate it: of
  products at 1 and 2 repetitions, of attention at 1, 2 and 4. For the serial reading, a sum over instructions, they are
  nearly exact. Attention of 8,192 tokens is within 1 % of its launch; 1, 2 and 3 repetitions of 512 tokens left it 42 %
  short.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np

from model.device import DryDevice
from model.execution.bound_launch import Device, convert_argument
from model.layers.launch import Argument, Axis, Launch, Value
from model.mesh import Mesh

SizedLaunch = Callable[[int], Launch]
"""Builder of a launch for a number of rows, tokens or sequences."""

ROWS_TOGETHER = 128
"""Rows of one tile of activations: the partitions."""

_LAUNCHED_ROWS = (1, 16, ROWS_TOGETHER)
_TOKENS_PERIOD = 1024
_TOKENS_REPEATS = (1, 2, 4)
"""Repetitions of attention that are launched; beyond a window, where time grows linearly, the last two of them."""

ROWS_PERIOD = 1536
"""A multiple of the groups of 128, 256, 384 and 512 rows of products."""


@dataclass(frozen=True)
class Time:
    """Time of a kernel, pass or request in ns, in three readings: a lower bound, the prediction and an upper bound.

    | field | meaning |
    |---|---|
    | `dataflow_ns` | lower bound: instructions wait only for their data; of a roofline, the roofline |
    | `program_ns` | prediction; of a roofline, the time at the usual shares of the peaks |
    | `serial_ns` | upper bound: one instruction after another; of a roofline, the time at the least shares |
    """

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
        """Return the larger of both times, in each reading separately."""
        return Time(
            max(self.dataflow_ns, other.dataflow_ns),
            max(self.program_ns, other.program_ns),
            max(self.serial_ns, other.serial_ns),
        )

    @classmethod
    def from_readings(cls, compute_ns: Callable[[Callable[[Time], float]], float]) -> Time:
        """Return a time whose three readings a function computes, each from the same reading of other times.

        Args:
            compute_ns: called three times, each time with a function that returns one reading, in ns, of the `Time`
                passed to it. Returns that reading of the new time in ns.
        """
        return cls(
            compute_ns(lambda time: time.dataflow_ns),
            compute_ns(lambda time: time.program_ns),
            compute_ns(lambda time: time.serial_ns),
        )

    @classmethod
    def exact(cls, time_ns: float) -> Time:
        """Return a time whose three readings are all `time_ns`, such as the overhead of starting a kernel."""
        return cls(time_ns, time_ns, time_ns)


class DryTimes:
    """Timer of single kernel launches on the ranks of a mesh of a chip; only rank 0 is run, and stands for all ranks.

    `overhead_ns` is the time of starting and ending a kernel; it is 0 until a launch has been timed. `busy_cores` is
    the number of physical cores of a rank, at most `lnc`, that worked in the last launch.
    """

    def __init__(self, target: str, mesh: Mesh, lnc: int = 1) -> None:
        self._mesh = mesh
        self._device = DryDevice(target, mesh.ranks, one_for_all=True, lnc=lnc)
        self.overhead_ns = 0.0
        self.busy_cores = lnc

    def time_launch(self, launch: Launch) -> Time:
        """Return the time of one launch, without starting and ending the kernel; sets `overhead_ns` and `busy_cores`.

        Raises:
            ModelError: the kernel refuses the launch.
        """
        arguments = {
            parameter: create_stand_in(argument, self._device, self._mesh)
            for parameter, argument in launch.arguments.items()
        }
        self._device.run(launch.kernel, [arguments])
        launched = self._device.take_pass()
        self.overhead_ns = launched.overhead_ns
        self.busy_cores = launched.busy_cores
        prediction = launched.prediction()
        time = Time(prediction.dataflow_ns, prediction.program_ns, prediction.serial_ns)
        return time - Time.exact(launched.overhead_ns)

    def time_rows(self, build_launch: SizedLaunch, rows: int, ranks: int = 1) -> Time:
        """Return the time of a product with weights, from dry runs at few other numbers of rows.

        Args:
            build_launch: builds the launch for a number of rows.
            rows: rows of the launch, of all sequences together.
            ranks: ranks that divide the rows among them; above 1, up to 128 rows are measured exactly.

        Raises:
            ModelError: the kernel refuses a launch.
        """

        def measure(rows: int) -> Time:
            return self.time_launch(build_launch(rows))

        if ranks > 1:
            period = ROWS_PERIOD // ranks * ranks
            return measure(rows) if rows <= ROWS_TOGETHER else extrapolate(measure, rows, period)
        return extrapolate(lambda size: _interpolate(measure, size), rows, ROWS_PERIOD)

    def time_prompt(self, build_launch: SizedLaunch, tokens: int, window: int | None) -> Time:
        """Return the time of a prompt's attention, from dry runs at few shorter lengths.

        Args:
            build_launch: builds the launch for a number of tokens of a prompt.
            tokens: tokens of the prompt.
            window: positions that a token attends to, or None if it attends to all positions before it.

        Raises:
            ModelError: the kernel refuses a launch.
        """
        full = min(-(-(window or 0) // _TOKENS_PERIOD) * _TOKENS_PERIOD, tokens)
        repeats = _TOKENS_REPEATS if window is None else _TOKENS_REPEATS[1:]

        def measure(length: int) -> Time:
            return self.time_launch(build_launch(length))

        def measure_beyond(size: int) -> Time:
            """Return the time of a prompt that is `size` tokens longer than the window rounded up to `_TOKENS_PERIOD`.

            A length above 128 tokens is interpolated between two measured lengths.
            """
            length = full + size
            return measure(length) if length <= ROWS_TOGETHER else _interpolate(measure, length)

        return extrapolate(measure_beyond, tokens - full, _TOKENS_PERIOD, repeats)


def create_stand_in(argument: Argument, device: Device, mesh: Mesh) -> Any:
    """Return a replacement for a launch's argument in a dry run, which reads only shapes and dtypes.

    Returns an array of zeros for a `Value`, without its memory; one pair of ranks for the pipeline axis; and for any
    other argument what a real launch gets.
    """
    if argument is Axis.pipeline:
        return [(0, 1)]
    if isinstance(argument, Value):
        return np.broadcast_to(np.zeros((), argument.dtype), argument.shape)
    return convert_argument(argument, device, mesh)


def _interpolate(measure: Callable[[int], Time], rows: int) -> Time:
    """Return the time at a number of rows, from a line through the measured times at the sizes below and above.

    Up to 128 rows the measured sizes are 1, 16 and 128 rows. Beyond, they are the first and the last row of the tile of
    128 rows that `rows` ends in.
    """
    above = (rows - 1) // ROWS_TOGETHER * ROWS_TOGETHER
    sizes = (above + 1, above + ROWS_TOGETHER) if above else _LAUNCHED_ROWS
    if rows in sizes:
        return measure(rows)
    low, high = next((low, high) for low, high in pairwise(sizes) if low < rows < high)
    share = (rows - low) / (high - low)
    return measure(low) * (1 - share) + measure(high) * share


def extrapolate(
    measure: Callable[[int], Time], size: int, period: int, repeats: Sequence[int] = (1, 2)
) -> Time:
    """Return the time at a size, as a polynomial in the number of periods that the size contains.

    A size of at most `repeats[-1]` whole periods is measured itself. For a larger one, the polynomial passes through
    the measured times at each number of periods in `repeats`, plus the same remainder. Its degree is len(repeats) - 1.

    Args:
        measure: returns the time at a size.
        size: rows, tokens, sequences or another count.
        period: size after which the instructions repeat themselves.
        repeats: numbers of periods that are measured, in ascending order.
    """
    count, remainder = divmod(size, period)
    if count <= repeats[-1]:
        return measure(size)
    total = Time()
    for repeat in repeats:
        weight = prod((count - other) / (repeat - other) for other in repeats if other != repeat)
        total = total + measure(period * repeat + remainder) * weight
    return total
