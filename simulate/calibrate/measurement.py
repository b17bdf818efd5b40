"""A measured time of a kernel, and its prediction by any hardware record."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from nkw.errors import InvalidArgument
from simulate.calibrate.numbers import Parameter, list_deciding, list_parameters
from simulate.hardware import Hardware, hardware
from simulate.kernel_by_name import build_call, find_import_folder, importing_from, load_callable
from simulate.run import Launch, Mode
from simulate.run.launch import unwrap_kernel
from simulate.timing import Dependences, Reading, Timeline, dependences, list_deciding_numbers, schedule
from simulate.world import launch


@dataclass(frozen=True)
class Measurement:
    """A measured time of a kernel on a chip, and its prediction.

    `target` is the chip's name. `spread` is the standard deviation over the measured time, 0 if unknown. `predict()`
    returns the predicted time in ns.
    """

    name: str
    target: str
    measured_ns: float
    spread: float
    predict: Predictor


def resolve_call(kernel_name: str, arguments: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Import the kernel that FILE.py:NAME or MODULE:NAME names, and parse its arguments.

    Args:
        kernel_name: The name.
        arguments: The arguments as one text of a command line, such as 'bf16[128,512] 4'.

    Returns:
        The kernel as a plain function; and all its arguments in the order of its parameters, with defaults.

    Raises:
        InvalidArgument: If the kernel does not exist, if a text is no argument, if the kernel does not accept the
            arguments, or if it has keyword-only parameters.
    """
    with importing_from(find_import_folder(kernel_name)):
        kernel = unwrap_kernel(load_callable(kernel_name))
    try:
        texts = shlex.split(arguments)
    except ValueError as error:
        raise InvalidArgument(
            "NKW-KERNEL-ARGUMENT",
            f"{arguments!r:.60} cannot be split into arguments: {error}; check its quotes",
        ) from None
    args, keywords = build_call(texts, Mode.dry)
    try:
        bound = inspect.signature(kernel).bind(*args, **keywords)
    except TypeError as error:
        raise InvalidArgument(
            "NKW-KERNEL-CALL", f"{kernel_name:.60} does not take these arguments: {error}"
        ) from None
    bound.apply_defaults()
    if bound.kwargs:
        names = ", ".join(bound.kwargs)
        raise InvalidArgument(
            "NKW-KERNEL-CALL",
            f"{kernel_name:.60} has keyword-only parameters {names}, which measured times cannot "
            "pass; make them positional",
        )
    return kernel, bound.args


class Predictor:
    """Callable that predicts the time of a measured kernel in ns, by the record that `hardware` returns at the call.

    The kernels are launched dry on the first call. Later calls time the same launches by the record of that moment,
    with its costs, because numbers that overlays change do not change instructions.
    """

    def __init__(
        self,
        chip: Callable[[], Hardware],
        launch_kernels: Callable[[], Sequence[Launch]],
        reading: Reading,
        get_time: Callable[[Hardware, Sequence[Launch], Sequence[Timeline]], float],
    ) -> None:
        """Store the functions of a prediction.

        Args:
            chip: Returns the current record.
            launch_kernels: Makes the dry launches.
            reading: The reading by which they are timed.
            get_time: Returns the time in ns that was measured, from the record, the launches and their timelines.
        """
        self._chip = chip
        self._launched = launch_kernels
        self._reading = reading
        self._read = get_time
        self._remembered: tuple[list[tuple[Any, ...]], list[Timeline]] | None = None

    def __call__(self, remember: bool = False) -> float:
        """Predict the time in ns by the current record. Errors of the launch pass through.

        Args:
            remember: Keep the timelines, so that later calls need not schedule again if all numbers that decide the
                schedule are equal.
        """
        chip = self._chip()
        launches = [launch.on(chip) for launch, _ in self._recorded]
        decisive_numbers = [list_deciding_numbers(launch.streams, launch.hardware) for launch in launches]
        if self._remembered is not None and self._remembered[0] == decisive_numbers:
            overhead_ns = chip.kernel_start_ns + chip.kernel_end_ns
            timelines = [replace(timeline, overhead_ns=overhead_ns) for timeline in self._remembered[1]]
        else:
            timelines = [
                schedule(launch.streams, launch.hardware, self._reading, waits)
                for launch, (_, waits) in zip(launches, self._recorded)
            ]
        if remember:
            self._remembered = decisive_numbers, timelines
        return self._read(chip, launches, timelines)

    @property
    def instructions(self) -> int:
        """Number of instructions of all launches; makes the launches if no call has made them."""
        return sum(len(stream) for launch, _ in self._recorded for stream in launch.streams)

    def list_numbers(self) -> list[Parameter]:
        """Return the numbers of the record that may decide the time; if there are no launches, all replaceable ones."""
        chip = self._chip()
        launches = [launch.on(chip) for launch, _ in self._recorded]
        return list_deciding(chip, launches) if launches else list_parameters(chip)

    @cached_property
    def _recorded(self) -> list[tuple[Launch, Dependences]]:
        """Dry launches with their dependences, without the outputs of the kernels; made at the first access."""
        every_read = self._reading is Reading.scheduled
        return [
            (replace(launch, outputs=[]), dependences(launch.streams, every_read))
            for launch in self._launched()
        ]


def make_predictor(
    kernel_name: str, arguments: str, target: str, cores: int, on_host: bool, reading: Reading
) -> Predictor:
    """Return the predictor of a kernel by name.

    Its time includes the overhead of a benchmark on the device; or of kernel start, kernel end and a synchronous call,
    if it was measured on the host.

    Args:
        kernel_name: FILE.py:NAME or MODULE:NAME.
        arguments: The arguments as one text of a command line.
        target: The chip.
        cores: The physical cores of the launch, 1 or 2.
        on_host: Whether the time was measured by the clock of the host.
        reading: The reading by which the kernel is timed.

    Raises:
        InvalidArgument: As `resolve_call`.
    """
    kernel, positional = resolve_call(kernel_name, arguments)

    def chip() -> Hardware:
        return hardware(target)

    def launch_kernels() -> list[Launch]:
        return [launch(kernel, [(positional, {})], chip(), cores, Mode.dry, has_grid=cores > 1)]

    def get_time(record: Hardware, _: Sequence[Launch], timelines: Sequence[Timeline]) -> float:
        (timeline,) = timelines
        if on_host:
            return timeline.length_ns + timeline.overhead_ns + record.host_overhead_ns
        return timeline.length_ns + record.benchmark_overhead_ns

    return Predictor(chip, launch_kernels, reading, get_time)
