"""The oracle's instructions by name, and those it has no second opinion on, with the reason.

Every public function of a file in this folder is an instruction. A file may also enter how its operands are drawn
(`tests.oracle.streams.common.draws`).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from types import FunctionType

INSTRUCTIONS: dict[str, Callable[..., None]] = {
    name: value
    for module in [
        importlib.import_module(f"{__name__}.{file.name}") for file in pkgutil.iter_modules(__path__)
    ]
    for name, value in vars(module).items()
    if isinstance(value, FunctionType) and value.__module__ == module.__name__ and not name.startswith("_")
}

WITHOUT_ORACLE = {
    "core_barrier": "needs two cores and changes no memory",
    "sendrecv": "needs two cores",
}
"""Instructions of the book that the lockstep does not try, and why."""

NOT_IN_THE_BOOK = ("scalar_load", "scalar_store", "scalar_arithmetic")
"""What `NkiScalar` (0.7) does, which the simulator has as methods."""
