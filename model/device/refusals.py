"""Which arguments a kernel takes: the kernel itself is asked, so that no limit is stated a second time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

import simulate
from model.device.binding import checked, kernel_named, nki_dtype


@dataclass(frozen=True)
class ArrayShape:
    """An array without elements, as an argument of a kernel."""

    shape: tuple[int, ...]
    dtype: np.dtype


@cache
def find_refusal(kernel: str, arguments: tuple[tuple[str, Any], ...]) -> str | None:
    """Return the sentence with which a kernel refuses arguments, or None where it takes them.

    Kernels check their arguments before the first call into `nki`. So the kernel's function runs outside of a launch,
    with arrays that have a shape and a dtype alone: a check that fails is the refusal, and the first call into `nki`,
    which is refused outside of a launch, or the first view of an array, such as `x.ap(…)`, ends the question. No kernel
    has code for it, and a limit that a check needs `nki` for, such as the room in SBUF, is not asked. A replica group
    counts as one of several ranks.

    Args:
        arguments: names of parameters with `ArrayShape` for arrays, and other values as they are. The answer is kept.

    Raises:
        NkwError: the function fails for another reason than that it runs outside of a launch.
    """
    backend = checked(simulate.install)
    function = kernel_named(kernel)
    values = {name: _stand_in(value) for name, value in arguments}
    try:
        getattr(function, "func", function)(**values)
    except AssertionError as refusal:
        return str(refusal)
    except _ViewTaken:
        return None
    except Exception as error:
        if backend == "simulate" and getattr(error, "code", "") != "NKW-NO-KERNEL":
            raise
    return None


def _stand_in(value: Any) -> Any:
    """Return what stands for an argument while a kernel checks it."""
    if isinstance(value, ArrayShape):
        return _StandIn(value.shape, nki_dtype(value.dtype.name))
    return value


class _ViewTaken(AttributeError):
    """A kernel takes a view of an array, and so has checked its arguments."""


class _StandIn:
    """An argument of a kernel with the shape and the dtype of an array, and nothing else of it."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.dtype = shape, dtype

    def __getattr__(self, name: str) -> Any:
        raise _ViewTaken(name)
