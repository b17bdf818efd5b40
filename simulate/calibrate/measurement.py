"""A measured time of a kernel that is known by name, and its prediction."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simulate.errors import InvalidArgument
from simulate.hardware import hardware
from simulate.kernel_by_name import call_of, callable_named, folder_of, importing_from
from simulate.run import Launch, Mode
from simulate.run.launch import plain
from simulate.timing import Reading, schedule
from simulate.world import launch


@dataclass(frozen=True)
class Measurement:
    """What was measured on a chip, and its prediction.

    target: the chip's name. spread: the standard deviation over the time, 0 where it is not known. predict: the
    predicted time in ns, by the record that stands for the chip at that moment; it launches the kernel dry.
    """

    name: str
    target: str
    measured_ns: float
    spread: float
    predict: Callable[[], float]


def named_call(words: str, arguments: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function that FILE.py:NAME or MODULE:NAME names, and the arguments that words stand for, by place.

    Raises InvalidArgument for a kernel that is not there, for what is no argument, and for arguments that it does not
    take.
    """
    with importing_from(folder_of(words)):
        kernel = plain(callable_named(words))
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


def predictor(
    words: str, arguments: str, target: str, cores: int, on_host: bool, reading: Reading
) -> Callable[[], float]:
    """The predicted time of a kernel by name, in ns, with what a benchmark or a synchronous call adds.

    Raises what `named_call` raises; the prediction raises what the launch raises.
    """
    kernel, own = named_call(words, arguments)

    def predict() -> float:
        chip = hardware(target)
        done: Launch = launch(kernel, [(own, {})], chip, cores, Mode.dry, has_grid=cores > 1)
        placed = schedule(done.streams, done.hardware, reading)
        if on_host:
            return placed.length_ns + placed.overhead_ns + chip.host_overhead_ns
        return placed.length_ns + chip.benchmark_overhead_ns

    return predict
