"""Times of kernels on a chip some of whose numbers are others than the record says: what a calibration has to find."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from simulate.bind import install
from simulate.bundle.entries import DEVICE
from simulate.calibrate.measurement import Measurement, make_predictor
from simulate.calibrate.numbers import Parameter, change_record
from simulate.hardware import hardware
from simulate.hardware.overlay import use_stand_in
from simulate.timing import Reading

KERNEL = f"{Path(__file__).with_name('micro.py')}:micro"
SMALL = (
    "f32[8,64] 0 64 0 0 0 0",
    "f32[8,64] 1 64 1 0 0 0",
    "f32[8,64] 2 64 0 2 0 0",
    "f32[8,64] 0 64 4 1 0 0",
)
"""Arguments of four kernels of few instructions, whose DMAs follow each other."""


def prediction(arguments: str, target: str = "trn2") -> Callable[[], float]:
    """Return the predicted time of the kernel on one core."""
    install("simulate")
    return make_predictor(KERNEL, arguments, target, 1, False, Reading.scheduled)


def times(
    predictions: Sequence[Callable[[], float]], factors: Mapping[str, float], target: str = "trn2"
) -> list[float]:
    """Return the times, in ns, of kernels on a chip whose numbers are `factors` times the record's."""
    changes = {Parameter(name): math.log(factor) for name, factor in factors.items()}
    with use_stand_in(change_record(hardware(target), changes)):
        return [prediction() for prediction in predictions]


def measured(arguments: Sequence[str], factors: Mapping[str, float]) -> list[Measurement]:
    """Return measurements of the kernel with such arguments on such a chip, trn2."""
    predictions = [prediction(argument) for argument in arguments]
    return [
        Measurement(name, "trn2", time_ns, 0.0, predict)
        for name, time_ns, predict in zip(arguments, times(predictions, factors), predictions)
    ]


def entries(arguments: Sequence[str], factors: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return the same as entries of a file."""
    return [
        {
            "id": argument.name,
            "family": "kernel",
            "kernel": KERNEL,
            "shapes": argument.name,
            "dtype": "float32",
            "target": "trn2",
            "instance": "trn2.3xlarge",
            "cores": 1,
            "latency_us": argument.measured_ns / 1e3,
            "measured": DEVICE,
            "source": "a test",
            "confidence": "high",
        }
        for argument in measured(arguments, factors)
    ]
