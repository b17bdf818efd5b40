"""A measured time of a kernel that is known by name, and its prediction."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from nkw.errors import InvalidArgument
from simulate.calibrate.numbers import Parameter, deciding, parameters
from simulate.hardware import Hardware, hardware
from simulate.kernel_by_name import call_of, callable_named, folder_of, importing_from
from simulate.run import Launch, Mode
from simulate.run.launch import unwrap_kernel
from simulate.timing import Dependences, Reading, Timeline, decided_by, dependences, schedule
from simulate.world import launch


@dataclass(frozen=True)
class Measurement:
    """What was measured on a chip, and its prediction.

    target: the chip's name. spread: the standard deviation over the time, 0 where it is not known.
    """

    name: str
    target: str
    measured_ns: float
    spread: float
    predict: Predictor


def named_call(words: str, arguments: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function that FILE.py:NAME or MODULE:NAME names, and the arguments that words stand for, by place.

    Raises InvalidArgument for a kernel that is not there, for what is no argument, and for arguments that it does not
    take.
    """
    with importing_from(folder_of(words)):
        kernel = unwrap_kernel(callable_named(words))
    try:
        texts = shlex.split(arguments)
    except ValueError as error:
        raise InvalidArgument("NKW-KERNEL-ARGUMENT", f"{arguments!r:.60} are no arguments: {error}") from None
    args, keywords = call_of(texts, Mode.dry)
    try:
        bound = inspect.signature(kernel).bind(*args, **keywords)
    except TypeError as error:
        raise InvalidArgument(
            "NKW-KERNEL-CALL", f"{words:.60} does not take these arguments: {error}"
        ) from None
    bound.apply_defaults()
    if bound.kwargs:
        names = ", ".join(bound.kwargs)
        raise InvalidArgument(
            "NKW-KERNEL-CALL", f"{words:.60} takes {names} by name only, and times are by place"
        )
    return kernel, bound.args


class Predictor:
    """The predicted time of what was measured, in ns, by the record that stands for the chip at that moment.

    Its kernels are launched dry on the first call. Later calls time the same launches by the record of their moment, at
    the costs that it gives: what overlays change decides no instruction.
    """

    def __init__(
        self,
        chip: Callable[[], Hardware],
        launched: Callable[[], Sequence[Launch]],
        reading: Reading,
        read: Callable[[Hardware, Sequence[Launch], Sequence[Timeline]], float],
    ) -> None:
        """chip: the record of the moment. launched: makes the dry launches. read: what of their timelines was timed."""
        self._chip = chip
        self._launched = launched
        self._reading = reading
        self._read = read
        self._remembered: tuple[list[tuple[Any, ...]], list[Timeline]] | None = None

    def __call__(self, remember: bool = False) -> float:
        """The time in ns; with `remember`, later calls for which nothing is different place nothing in time again.

        Raises what the launch raises.
        """
        chip = self._chip()
        launches = [done.on(chip) for done, _ in self._recorded]
        decided = [decided_by(done.streams, done.hardware) for done in launches]
        if self._remembered is not None and self._remembered[0] == decided:
            overhead_ns = chip.kernel_start_ns + chip.kernel_end_ns
            timelines = [replace(each, overhead_ns=overhead_ns) for each in self._remembered[1]]
        else:
            timelines = [
                schedule(done.streams, done.hardware, self._reading, waits)
                for done, (_, waits) in zip(launches, self._recorded)
            ]
        if remember:
            self._remembered = decided, timelines
        return self._read(chip, launches, timelines)

    @property
    def instructions(self) -> int:
        """Of all launches."""
        return sum(len(stream) for done, _ in self._recorded for stream in done.streams)

    def numbers(self) -> list[Parameter]:
        """The numbers that may decide the time: those in the terms of costs, and all waits; without launches all."""
        chip = self._chip()
        launches = [done.on(chip) for done, _ in self._recorded]
        return deciding(chip, launches) if launches else parameters(chip)

    @cached_property
    def _recorded(self) -> list[tuple[Launch, Dependences]]:
        """The launches with their dependences; what the kernels returned is let go."""
        every_read = self._reading is Reading.scheduled
        return [
            (replace(done, outputs=[]), dependences(done.streams, every_read)) for done in self._launched()
        ]


def predictor(
    words: str, arguments: str, target: str, cores: int, on_host: bool, reading: Reading
) -> Predictor:
    """The predicted time of a kernel by name, with what a benchmark or a synchronous call adds.

    Raises what `named_call` raises.
    """
    kernel, own = named_call(words, arguments)

    def chip() -> Hardware:
        return hardware(target)

    def launched() -> list[Launch]:
        return [launch(kernel, [(own, {})], chip(), cores, Mode.dry, has_grid=cores > 1)]

    def read(record: Hardware, _: Sequence[Launch], timelines: Sequence[Timeline]) -> float:
        (placed,) = timelines
        if on_host:
            return placed.length_ns + placed.overhead_ns + record.host_overhead_ns
        return placed.length_ns + record.benchmark_overhead_ns

    return Predictor(chip, launched, reading, read)
