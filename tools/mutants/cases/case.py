"""Cases for mutants: a launch of a kernel on small inputs, with a judge of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

import nki_kernels
from tests.kernels.accuracy import as_tuple, compare, copied, in_float64, in_order, in_other_orders, normal
from tests.kernels.case import KernelCase, Settings

BF16 = ml_dtypes.bfloat16
EPS = 1e-5
Outputs = Sequence[tuple[np.ndarray, ...]]
Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Case:
    """One launch: a kernel, a chip, the arguments of each rank, and a judge of the outputs of all ranks.

    The judge raises AssertionError if numbers, shapes or dtypes are wrong. A case without a judge is dry: it runs at
    the largest sizes, and only a refusal can notice a mutant. cores: physical cores per rank. unread: names of inputs
    that a launch of these sizes does not read, so the detector's finding is ignored.
    """

    kernel: str
    target: str
    arguments: tuple[tuple[Any, ...], ...]
    judge: Callable[[Outputs], None] | None
    cores: int = 1
    unread: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.arguments)


def two_cores(case: Case) -> Case:
    """Return a copy of a case with two physical cores per rank."""
    return replace(case, cores=2)


def arguments_of(kernel: str, **arguments: Any) -> tuple[Any, ...]:
    """Return all arguments of a kernel in the order of its parameters, from arguments by name."""
    return in_order(getattr(nki_kernels, kernel), **arguments)


def by_name(
    kernel: str,
    target: str,
    reference_arguments: Arguments,
    ranks: Sequence[Arguments] = (),
    copies: bool = True,
) -> Case:
    """Return a case judged by the kernel's reference, whose arguments are given by name.

    ranks: for each of several ranks, the arguments that differ from the reference's. copies: as in `by_reference`.
    """
    shards = tuple(arguments_of(kernel, **{**reference_arguments, **changes}) for changes in ranks)
    return by_reference(
        kernel, target, *arguments_of(kernel, **reference_arguments), ranks=shards, copies=copies
    )


def by_case(case: KernelCase, target: str, settings: Settings) -> Case:
    """Return a case with arguments drawn by a kernel's test case for `settings`, and judged by its tolerance."""
    arguments = case.arguments(settings)

    def judge(outputs: Outputs) -> None:
        for output in outputs:
            case.compare(output, arguments)

    return Case(case.kernel.__name__, target, (tuple(arguments.values()),), judge)


def by_reference(
    kernel: str,
    target: str,
    *arguments: Any,
    reference_arguments: Any = None,
    ranks: Any = None,
    copies: bool = True,
) -> Case:
    """Return a case judged by the kernel's reference.

    Args:
        kernel: Name of the kernel.
        target: Name of the chip.
        *arguments: Arguments of the kernel and of its reference.
        reference_arguments: Arguments of the reference, if they differ from each rank's.
        ranks: Arguments of each rank; one rank with `arguments` if not given.
        copies: For attention, the caches are copies of inputs, so they are compared byte by byte. False if the kernel
            computes what it stores there, as rotated keys.
    """
    stored = (1, 2) if kernel.startswith("attention") and copies else ()
    reference = getattr(nki_kernels, f"{kernel}_reference")
    arguments = reference_arguments or arguments
    plain = as_tuple(reference(*copied(arguments)))
    exact = as_tuple(reference(*(in_float64(argument) for argument in arguments)))
    reordered = in_other_orders(reference, arguments)

    def judge(outputs: Outputs) -> None:
        for output in outputs:
            assert len(output) == len(plain)
            for number, (got, truth, same_dtype) in enumerate(zip(output, exact, plain)):
                if number in stored or same_dtype.dtype.kind in "iu":
                    assert got.dtype == same_dtype.dtype
                    assert got.shape == same_dtype.shape and got.tobytes() == same_dtype.tobytes()
                else:
                    compare(got, truth, same_dtype, reordered(number))

    return Case(kernel, target, ranks or (arguments,), judge)


def weights(seed: int, rows: int, columns: int, dtype: Any = np.float32) -> np.ndarray:
    """Draw weights whose products with other operands keep the scale of these operands."""
    return normal(seed, rows, columns, dtype=dtype, scale=rows**-0.5)
