"""The table of tuned values: every entry is of the domains and no slower than the default, and kernels look it up."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from nki_kernels.tuned import TUNED
from nkw.targets import GENERATIONS
from simulate.kernel_by_name import build_call
from simulate.run.machine import Mode
from simulate.tune.measuring import Bench, Subject
from simulate.tune.parameters import read_declaration
from tests.kernels.accuracy import TARGETS

matmul = importlib.import_module("nki_kernels.matmul")


def length_ns(target: str, arguments: tuple[Any, ...], tuning: dict[str, Any] | None = None) -> float:
    """Return the predicted time of a dry matmul."""
    keywords = {} if tuning is None else {"tuning": tuning}
    launch = simulate.World(target).launch(kernels.matmul, [(arguments, keywords)], mode=Mode.dry)
    return simulate.timing.schedule(launch.streams, launch.hardware).length_ns


@pytest.mark.slow
@pytest.mark.parametrize("entry", TUNED)
def test_no_entry_is_slower_than_the_default_in_either_reading(
    entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, generation, launches = entry.split(" ", 2)
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", GENERATIONS[generation])
    words, values = TUNED[entry]["arguments"].split(), TUNED[entry]["values"]
    bench = Bench(Subject.from_arguments(f"nki_kernels:{name}", words, "worse"))
    kernel = read_declaration(bench.kernel)
    assert kernel.accepts(values)
    args, keywords = build_call(words, Mode.dry)
    assert kernel.bucket is not None and kernel.bucket(*args, **keywords) == launches
    default, tuned = (bench.time_launch(bench.launch(tuning)) for tuning in (kernel.default, values))
    assert tuned.program_ns < default.program_ns
    assert tuned.scheduled_ns <= default.scheduled_ns


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_a_launch_takes_the_values_of_its_generation_and_bucket(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"transposes": "tensor", "eviction": "scalar"}
    shapes = ((600, 1000), (1000, 700))
    arguments = tuple(np.zeros(shape, np.float32) for shape in shapes)
    default, tuned = (length_ns(target, arguments, tuning) for tuning in ({}, values))
    assert default != tuned
    generation = {chip: name for name, chip in GENERATIONS.items()}[target]
    entry = f"matmul {generation} {matmul.matmul_bucket(*arguments)}"
    assert entry == f"matmul {generation} float32 1024x1024x1024"
    monkeypatch.setitem(TUNED, entry, {"arguments": "", "values": values})
    assert length_ns(target, arguments) == tuned
    assert length_ns(target, arguments, {}) == default
    larger = (arguments[0], np.zeros((1000, 1025), np.float32))
    assert length_ns(target, larger) == length_ns(target, larger, {})
    targets = [chip for chip in TARGETS if chip != target]
    monkeypatch.setattr("nki_kernels.tuning.TUNED", {entry: TUNED[entry]})
    for other in targets:
        assert length_ns(other, arguments) == length_ns(other, arguments, {})


@pytest.mark.parametrize(
    ("sizes", "rounded"),
    [((1, 127, 128), "1x128x128"), ((129, 2, 3), "256x2x4"), ((2048, 2049, 1792), "2048x4096x2048")],
)
def test_sizes_are_rounded_up_to_powers_of_two(sizes: tuple[int, int, int], rounded: str) -> None:
    rows, depth, columns = sizes
    a, b = np.zeros((rows, depth), np.float32), np.zeros((depth, columns), np.float32)
    assert matmul.matmul_bucket(a, b) == f"float32 {rounded}"
    assert matmul.matmul_bucket(a.T, b, True) == f"float32 {rounded} aT"
