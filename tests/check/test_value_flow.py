"""Possible values contain every value that an instruction reads, in launches of the shipped kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from nki_kernels.examples import EXAMPLES, RANKS
from simulate.check.possible_values import Codes, Possible, Words
from simulate.check.value_flow import follow_values
from simulate.isa.template import Template
from simulate.kernel_by_name import build_call
from simulate.run import Mode
from simulate.run.launch import Observer
from simulate.run.machine import Issue, NeuronCore
from simulate.run.observers import observing
from simulate.run.stream import Stream
from tests.isa.tiles import TARGETS

BF16 = ml_dtypes.bfloat16


class ReadValues(Observer):
    """Observer that keeps the distinct bits of every operand by core and event; None for a run-time address."""

    sees_instructions = True

    def __init__(self) -> None:
        self.bits: dict[tuple[int, int], list[np.ndarray | None]] = {}

    def issuing(self, core: NeuronCore, issue: Issue, operands: Sequence[Any]) -> None:
        _, reads, _ = issue
        self.bits[id(core.stream), len(core.stream)] = [
            None if tile.dynamic is not None else np.unique(as_bits(tile.uncounted_array)) for tile in reads
        ]


def as_bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(f"u{array.itemsize}")


def count_contained(kernel: Any, arguments: Any, target: str, ranks: int = 1) -> int:
    """Assert that possible values contain all values that are read; return the number of operands with a statement."""
    read_values, statements = ReadValues(), 0
    with observing(read_values):
        launch = simulate.World(target, ranks).launch(kernel, [arguments] * ranks)

    def compare(
        stream: Stream,
        event: int,
        template: Template,
        tensors: Sequence[int],
        operands: Sequence[Possible],
    ) -> None:
        nonlocal statements
        for possible, bits in zip(operands, read_values.bits[id(stream), event]):
            if bits is None or possible is None:
                continue
            statements += 1
            if isinstance(possible, Codes):
                assert np.isin(bits, as_bits(possible.array)).all(), (event, template.op)
            else:
                assert isinstance(possible, Words)
                assert ((bits & ~np.uint32(possible.varying)) == possible.constant).all(), (
                    event,
                    template.op,
                )

    follow_values(launch, compare)
    return statements


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_values_of_shipped_kernels_are_among_the_possible_ones(target: str) -> None:
    statements = 0
    for name, words in EXAMPLES.items():
        kernel, ranks = getattr(kernels, name, None), RANKS.get(name, 1)
        if kernel is not None:
            statements += count_contained(kernel, build_call(words, Mode.eager, 0, ranks), target, ranks)
    assert statements > 100


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.float8_e4m3])
def test_values_of_weights_of_8_bits_are_among_the_possible_ones(target: str, dtype: Any) -> None:
    rng = np.random.default_rng(36)

    def weight(name: str, rows: int, columns: int) -> dict[str, np.ndarray]:
        elements = rng.integers(-100, 100, (rows, columns)).astype(dtype)
        return {name: elements, f"{name}_scales": np.full((1, columns), 0.01, np.float32)}

    arguments = {
        "x": rng.standard_normal((3, 130)).astype(BF16),
        "norm_weight": np.ones((1, 130), np.float32),
        "eps": 1e-5,
        **weight("w_gate", 130, 96),
        **weight("w_up", 130, 96),
        **weight("w_down", 96, 130),
    }
    assert count_contained(kernels.mlp, ((), arguments), target) > 3
