"""The accuracy of a kernel: its error against float64 is at most twice that of numpy in the same storage dtypes.

The truth is the kernel's reference evaluated in float64. How far plain numpy is from it depends on the order in which
the processor at hand sums: over a few outputs one BLAS may be thrice as exact as another. So numpy's error is the
largest of several: with BLAS, with matrix products that add one term after the other, and, where a kernel is beyond
these two, with terms in eight random orders. One unit in the last place of the largest output is allowed on top, for
the cases where numpy happens to be exact.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from typing import Any

import numpy as np

import simulate
from simulate.check import Finding, examine
from simulate.replay import ReplayCache, ReplayOptions

TARGETS = ("trn1", "trn2", "trn3")
ODD_SIZES = (8, 64, 127, 128, 129, 172)
"""Around one tile of 128 partitions, below it, and ragged above it."""

ORDERS = 9
"""In which numpy's products add their terms, beside BLAS': one after the other, and eight random ones."""

_FAR = 16
_FRACTION_BITS = {"float64": 52, "float32": 23, "bfloat16": 7, "float16": 10, "float8_e4m3": 3}


REPORTED_REFUSALS = frozenset({"NKW-DMA-PARTITIONS"})
"""Codes of warnings that rest on public reports alone and that kernels of this package get; see docs/checks.md."""


def find_faults(launching: Callable[[], object], orders: int = 0, seeds: int = 0) -> list[Finding]:
    """Return all findings but REPORTED_REFUSALS about all launches that a call makes; see `examine`."""
    findings = examine(launching, orders, seeds)
    return [finding for finding in findings if finding.code not in REPORTED_REFUSALS]


def last_place(dtype: np.dtype, magnitude: float) -> float:
    """Return the distance of neighbouring values of `dtype` at `magnitude`."""
    exponent = math.frexp(magnitude)[1] - 1 if magnitude else 0
    return 2.0 ** (exponent - _FRACTION_BITS[dtype.name])


def compare(
    kernel_output: np.ndarray,
    reference_float64: np.ndarray,
    numpy_same_dtype: np.ndarray,
    in_other_orders: Iterable[np.ndarray] = (),
) -> None:
    """Assert that the kernel's largest error is at most twice numpy's plus one last place; prints both errors.

    `in_other_orders` are numpy's results with matrix products that add their terms in other orders. They are asked for
    until the kernel's error is within the bound, and not where it is so far beyond that no order brings it there.
    """
    assert kernel_output.shape == reference_float64.shape
    assert kernel_output.dtype == numpy_same_dtype.dtype
    errors = np.abs(kernel_output.astype(np.float64) - reference_float64)
    unit = last_place(kernel_output.dtype, float(np.abs(reference_float64).max()))
    numpy_error = 0.0
    for numpy_output in chain([numpy_same_dtype], in_other_orders):
        numpy_error = max(
            numpy_error, float(np.abs(numpy_output.astype(np.float64) - reference_float64).max())
        )
        bound = 2 * numpy_error + unit
        if (errors <= bound).all() or not (errors <= _FAR * bound).all():
            break
    worst = tuple(int(i) for i in np.unravel_index(int(np.argmax(errors)), errors.shape))
    beyond = int(np.count_nonzero(~(errors <= bound)))
    report = (
        f"kernel error {errors.max():.3g}, numpy error {numpy_error:.3g}, last place {unit:.3g}; worst at {worst}: "
        f"{float(kernel_output[worst]):.9g} for {reference_float64[worst]:.9g}; "
        f"{beyond} of {errors.size} beyond {bound:.3g}"
    )
    print(report)
    assert beyond == 0, report


def run(kernel: Any, arguments: Sequence[Any], target: str = "trn1") -> Any:
    """Return what a kernel returns on one rank of a chip; the arguments are copied, so in-place updates stay inside."""
    return simulate.World(target).launch(kernel, [(copied(arguments), {})]).outputs[0]


def in_every_way(kernel: Any, arguments: Sequence[Any], target: str = "trn1") -> list[Any]:
    """Return outputs of an eager, a replayed and an exactly replayed launch; the last has the bytes of the first."""
    replays = ReplayCache()
    ways = [ReplayOptions(), ReplayOptions(), ReplayOptions(exact=True)]
    launches = [
        simulate.World(target, replay=way, replays=replays).launch(
            kernel, [(copied(arguments), {})], mode=simulate.Mode.replay
        )
        for way in ways
    ]
    modes = [launch.mode.value for launch in launches]
    assert modes == ["eager", "replay", "replay"], replays.report.refusals
    outputs = [launch.outputs[0] for launch in launches]
    for first, last in zip(as_tuple(outputs[0]), as_tuple(outputs[2])):
        assert np.array_equal(first, last, equal_nan=first.dtype.kind == "f")
        assert first.tobytes() == last.tobytes()
    return outputs


def check(
    kernel: Any, reference: Callable[..., Any], arguments: Sequence[Any], target: str = "trn1"
) -> tuple[np.ndarray, ...]:
    """Run a kernel in every way, compare every float output with its reference in float64, and return eager's."""
    eager, replayed, _ = in_every_way(kernel, arguments, target)
    for outputs in (eager, replayed):
        compare_all(as_tuple(outputs), reference, arguments)
    return as_tuple(eager)


def compare_all(
    outputs: Sequence[np.ndarray], reference: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    """Compare outputs with the reference of the arguments; integer outputs have to be equal."""
    plain = as_tuple(reference(*copied(arguments)))
    exact = as_tuple(reference(*(in_float64(argument) for argument in arguments)))
    outputs_in_other_orders = in_other_orders(reference, arguments)
    assert len(outputs) == len(plain)
    for index, (output, truth, same_dtype) in enumerate(zip(outputs, exact, plain)):
        if output.dtype.kind in "iu":
            assert np.array_equal(output, same_dtype)
        else:
            compare(output, truth, same_dtype, outputs_in_other_orders(index))


def in_other_orders(
    reference: Callable[..., Any], arguments: Sequence[Any]
) -> Callable[[int], Iterator[np.ndarray]]:
    """Return numpy's results with sums in other orders, by the index of an output; each is computed once, lazily."""

    @cache
    def results(number: int) -> tuple[Any, ...]:
        return as_tuple(reference(*(summed_in_order(argument, number) for argument in copied(arguments))))

    return lambda index: (np.asarray(results(number)[index]) for number in range(ORDERS))


def in_order(kernel: Any, **arguments: Any) -> tuple[Any, ...]:
    """Return arguments by name as all arguments of a kernel in the order of its parameters, defaults included."""
    bound = inspect.signature(kernel).bind(**arguments)
    bound.apply_defaults()
    return bound.args


def named(kernel: Any, arguments: Sequence[Any]) -> dict[str, Any]:
    """Return arguments in the order of a kernel's parameters by name."""
    return dict(inspect.signature(kernel).bind(*arguments).arguments)


def copied(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Return arguments with every array copied."""
    return tuple(a.copy() if isinstance(a, np.ndarray) else a for a in arguments)


def in_float64(argument: Any) -> Any:
    """Return an array of floats in float64; anything else as it is."""
    if isinstance(argument, np.ndarray) and argument.dtype.kind not in "iu":
        return argument.astype(np.float64)
    return argument


class InOrder(np.ndarray):
    """An array whose matrix products, with `@`, add one term after the other, rounding each time.

    Order 0 is that of the terms; each other number stands for a random one.
    """

    number = 0

    def __array_finalize__(self, source: Any) -> None:
        self.number = getattr(source, "number", self.number)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        result = super().__array_function__(function, types, args, kwargs)
        return summed_in_order(result, self.number)  # numpy's joins give plain arrays

    def __matmul__(self, other: np.ndarray) -> np.ndarray:
        if other.ndim == 1:
            return (self @ other[:, None])[..., 0]
        terms = np.arange(self.shape[-1])
        first, *remaining = np.random.default_rng(self.number).permutation(terms) if self.number else terms
        total = self[..., first : first + 1] * other[..., first : first + 1, :]
        for k in remaining:
            total += self[..., k : k + 1] * other[..., k : k + 1, :]
        return total

    def __rmatmul__(self, other: np.ndarray) -> np.ndarray:
        return summed_in_order(other, self.number) @ self


def summed_in_order(argument: Any, number: int = 0) -> Any:
    """Return an array as one whose matrix products sum in an order; anything else as it is."""
    if not isinstance(argument, np.ndarray):
        return argument
    ordered = argument.view(InOrder)
    ordered.number = number
    return ordered


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return the outputs of a kernel as a tuple, also if there is one."""
    return value if isinstance(value, tuple) else (value,)


_DRAWING = [True]


@contextmanager
def undrawn() -> Iterator[None]:
    """Have `normal` return zeros that take no memory: arguments of launches that compute no numbers."""
    _DRAWING[0] = False
    try:
        yield
    finally:
        _DRAWING[0] = True


def normal(seed: int, *shape: int, dtype: Any = np.float32, scale: float = 1.0) -> np.ndarray:
    """Return normally distributed values of a fixed seed, stored in `dtype`."""
    if not _DRAWING[0]:
        return np.broadcast_to(np.zeros((), dtype), shape)
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(dtype)


def whole_numbers(seed: int, *shape: int, largest: int = 8) -> np.ndarray:
    """Return float32 whole numbers so small that sums of products of them are exact."""
    return np.random.default_rng(seed).integers(-largest, largest + 1, shape).astype(np.float32)
