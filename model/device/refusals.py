"""Checks of kernel arguments by the kernels themselves, so that no limit is stated twice.

The layers of a model ask here whether a kernel takes a launch, and use other kernels if it refuses.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

import simulate
from model.device.binding import find_kernel, find_nki_dtype, run_checked


@dataclass(frozen=True)
class ArrayShape:
    """Shape and dtype of an array argument of a kernel."""

    shape: tuple[int, ...]
    dtype: np.dtype


@cache
def find_refusal(kernel: str, arguments: tuple[tuple[str, Any], ...]) -> str | None:
    """Return the message with which a kernel refuses arguments, or None if it accepts them.

    Kernels check their arguments before their first call into `nki`. The kernel's function runs outside of a launch on
    arrays that have only a shape, a dtype and rows. A failing assertion is the refusal. The first call into `nki`,
    which is refused outside of a launch, or the first other view of an array, such as `x.ap(…)`, ends the check. Limits
    that need `nki`, such as the capacity of SBUF, are not checked. A replica group counts as a group of several ranks.
    Results are cached.

    Args:
        kernel: Name of a kernel of `nki_kernels`.
        arguments: (parameter, argument) pairs, with an `ArrayShape` for every array.

    Raises:
        NkwError: The function fails for another reason than running outside of a launch.
    """
    backend = run_checked(simulate.install)
    function = find_kernel(kernel)
    stand_ins = {
        name: _StandIn(argument) if isinstance(argument, ArrayShape) else argument
        for name, argument in arguments
    }
    try:
        getattr(function, "func", function)(**stand_ins)
    except AssertionError as refusal:
        return str(refusal)
    except _ViewTaken:
        return None
    except Exception as error:
        if backend == "simulate" and getattr(error, "code", "") != "NKW-NO-KERNEL":
            raise
    return None


class _ViewTaken(AttributeError):
    """Exception that ends the check of a kernel when it takes a view of an array, which it does after its checks."""


class _StandIn:
    """Array argument of a kernel without elements: it has a shape and a dtype, and can be sliced by rows."""

    def __init__(self, array: ArrayShape) -> None:
        self._array, self.shape, self.dtype = array, array.shape, find_nki_dtype(array.dtype.name)

    def __getitem__(self, rows: slice) -> _StandIn:
        """Return a stand-in for the rows that a slice selects along the first axis."""
        count = len(range(*rows.indices(self.shape[0])))
        return _StandIn(ArrayShape((count, *self.shape[1:]), self._array.dtype))

    def __getattr__(self, name: str) -> Any:
        raise _ViewTaken(name)
