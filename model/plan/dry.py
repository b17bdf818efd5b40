"""Times of kernels from dry runs, at few enough sizes that a plan takes seconds.

- Up to 128 rows pass the weights together, with almost the same instructions: between launches at 1, 16 and 128 rows,
  times are interpolated. With sequence parallelism, products are launched at their exact number of rows.
- Beyond some thousand rows a kernel repeats itself: products with weights every 1,536 rows, attention every 1,024. The
  number of instructions is a polynomial in the number of repetitions. It is linear for products and for attention
  beyond its window, else quadratic. Launches at smaller sizes with the same remainder extrapolate it: of products at
  1 and 2 repetitions, of attention at 1, 2 and 4. For the serial reading, a sum over instructions, they are nearly
  exact. Attention of 8,192 tokens is within 1 % of its launch; 1, 2 and 3 repetitions of 512 tokens left it 42 % short.
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
    """Time in three readings, in ns: dataflow and serial are the bounds, program is the prediction.

    Where only a roofline is known, dataflow is the roofline, and the others follow from shares of the peaks.
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
        """Return the longer of two times in every reading."""
        return Time(
            max(self.dataflow_ns, other.dataflow_ns),
            max(self.program_ns, other.program_ns),
            max(self.serial_ns, other.serial_ns),
        )

    @classmethod
    def from_readings(cls, compute_ns: Callable[[Callable[[Time], float]], float]) -> Time:
        """Return the times that a function computes from the times of each reading.

        Args:
            compute_ns: gets the function that takes a reading of a time, and returns ns.
        """
        return cls(
            compute_ns(lambda time: time.dataflow_ns),
            compute_ns(lambda time: time.program_ns),
            compute_ns(lambda time: time.serial_ns),
        )

    @classmethod
    def exact(cls, time_ns: float) -> Time:
        """Return a time that is equal in every reading, such as that of starting a kernel."""
        return cls(time_ns, time_ns, time_ns)


class DryTimes:
    """Times of single launches on the ranks of a mesh of a chip. Rank 0 is planned; the others are taken to equal it.

    `overhead_ns` is the time of starting and ending a kernel, once a launch has been timed. `busy_cores` is the number
    of physical cores of a rank, at most `lnc`, that worked in the last launch.
    """

    def __init__(self, target: str, mesh: Mesh, lnc: int = 1) -> None:
        self._mesh = mesh
        self._device = DryDevice(target, mesh.ranks, one_for_all=True, lnc=lnc)
        self.overhead_ns = 0.0
        self.busy_cores = lnc

    def time_launch(self, launch: Launch) -> Time:
        """Return the time of one launch, without starting and ending the kernel.

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
        """Return the time of a product with weights, which takes the rows of all sequences together.

        Args:
            build_launch: builds the launch for a number of rows.
            rows: rows of the launch.
            ranks: ranks that cut the rows among them.
        """

        def measure(rows: int) -> Time:
            return self.time_launch(build_launch(rows))

        if ranks > 1:
            period = ROWS_PERIOD // ranks * ranks
            return measure(rows) if rows <= ROWS_TOGETHER else extrapolate(measure, rows, period)
        return extrapolate(lambda size: _interpolate(measure, size), rows, ROWS_PERIOD)

    def time_prompt(self, build_launch: SizedLaunch, tokens: int, window: int | None) -> Time:
        """Return the time of a prompt's attention, which beyond a window repeats itself for every token.

        Args:
            build_launch: builds the launch for a number of tokens of a prompt.
            tokens: tokens of the prompt.
            window: positions that a token sees, or None where it sees all.
        """
        full = min(-(-(window or 0) // _TOKENS_PERIOD) * _TOKENS_PERIOD, tokens)
        repeats = _TOKENS_REPEATS if window is None else _TOKENS_REPEATS[1:]

        def measure(length: int) -> Time:
            return self.time_launch(build_launch(length))

        def measure_beyond(size: int) -> Time:
            """Time a prompt of so many tokens beyond the window; one of more than a tile on a line of two."""
            length = full + size
            return measure(length) if length <= ROWS_TOGETHER else _interpolate(measure, length)

        return extrapolate(measure_beyond, tokens - full, _TOKENS_PERIOD, repeats)


def create_stand_in(argument: Argument, device: Device, mesh: Mesh) -> Any:
    """Return an argument for a dry run, which reads shapes and dtypes only: an array repeats a single zero."""
    if argument is Axis.pipeline:
        return [(0, 1)]
    if isinstance(argument, Value):
        return np.broadcast_to(np.zeros((), argument.dtype), argument.shape)
    return convert_argument(argument, device, mesh)


def _interpolate(measure: Callable[[int], Time], rows: int) -> Time:
    """Return the time of a number of rows, on the line between two that are measured.

    These are 1, 16 or 128 rows; of more than one tile, the first row of the last tile and all of its rows.
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
    """Return the time at a size, which grows as a polynomial in the number of periods.

    Measures the size itself if it has at most as many periods as the last of `repeats`. Otherwise the polynomial
    passes through the times at `repeats` periods and the same remainder; its order is one less than their number.
    """
    count, remainder = divmod(size, period)
    if count <= repeats[-1]:
        return measure(size)
    total = Time()
    for repeat in repeats:
        weight = prod((count - other) / (repeat - other) for other in repeats if other != repeat)
        total = total + measure(period * repeat + remainder) * weight
    return total
