"""Arithmetic without NumPy's floating-point warnings.

Engines compute infinities and NaN silently, so NumPy's warnings of overflow, invalid operands and division by zero tell
nothing about a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np

Function = TypeVar("Function", bound=Callable[..., object])


def quiet(function: Function) -> Function:
    """Return the function with all of NumPy's floating-point warnings off while it runs; results are the same.

    Each function gets an errstate object of its own: NumPy 1.26 keeps the saved state in that object, and two nested
    uses of one object would leave the warnings off for good.
    """
    return np.errstate(all="ignore")(function)
