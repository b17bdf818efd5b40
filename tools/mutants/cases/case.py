"""One case of the mutants: a launch of a kernel on small inputs, with what it has to return."""

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
    """One launch: a kernel, a chip, the arguments of every rank, and a judge of the outputs of every rank.

    The judge raises AssertionError where numbers, shapes or dtypes are wrong. A case without one is dry: planned and
    placed at the largest sizes, where it may only be refused. A rank has `cores` physical cores. `unread` names inputs
    that a launch of these sizes has no use for: that nothing reads them is no finding.
    """

    kernel: str
    target: str
    arguments: tuple[tuple[Any, ...], ...]
    judge: Callable[[Outputs], None] | None
    cores: int = 1
    unread: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Ranks of the world."""
        return len(self.arguments)


def two_cores(case: Case) -> Case:
    """Return the same case on logical cores of two physical ones."""
    return replace(case, cores=2)


def arguments_of(kernel: str, **arguments: Any) -> tuple[Any, ...]:
    """Return arguments by name as all arguments of a kernel in the order of its parameters."""
    return in_order(getattr(nki_kernels, kernel), **arguments)


def by_name(
    kernel: str,
    target: str,
    reference_arguments: Arguments,
    ranks: Sequence[Arguments] = (),
    copies: bool = True,
) -> Case:
    """Return a case judged by the kernel's reference, whose arguments are given by name.

    ranks: changes of the arguments of each of several ranks.
    """
    shards = tuple(arguments_of(kernel, **{**reference_arguments, **changes}) for changes in ranks)
    return by_reference(
        kernel, target, *arguments_of(kernel, **reference_arguments), ranks=shards, copies=copies
    )


def by_case(case: KernelCase, target: str, settings: Settings) -> Case:
    """Return a case with arguments that a kernel's tests draw, judged by their tolerance."""
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
    """Return a case judged by the kernel's reference; for several ranks `whole` has the arguments of the reference.

    The caches of attention hold copies, so they are compared byte by byte, unless it rotates keys.
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
    """Return weights whose products have the scale of their other operand."""
    return normal(seed, rows, columns, dtype=dtype, scale=rows**-0.5)
