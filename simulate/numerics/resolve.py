"""Search for the table row of an operator that a kernel passes as a function: `op=nl.add`, or NumPy's `np.add`.

`simulate.numerics.operators` and `simulate.numerics.activations` each make one search function for their table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TypeVar

import numpy as np

from nkw.errors import InvalidArgument

Row = TypeVar("Row")

ALIASES = {
    "max": "maximum",
    "amax": "maximum",
    "min": "minimum",
    "amin": "minimum",
    "absolute": "abs",
    "bitwise_not": "invert",
}
"""Other spellings: `nl.max` and `nl.min`, which are documented for reductions, and names of NumPy."""


def make_resolver(rows: Mapping[str, Row], row_title: str, hint: str) -> Callable[[object], Row]:
    """Return a function that finds the row of `rows` that a kernel's argument names.

    A row names itself. Functions of `nki.language` have their operator's name in `nki_operator`; NumPy functions are
    known by their own name. Anything else raises InvalidArgument (NKW-OPERATOR), also a user's function with the name
    `add`, which would not run on the device.

    Args:
        rows: The rows by name.
        row_title: Words for a row in the message, such as "ALU operator of a NeuronCore".
        hint: What to pass instead, for the message.
    """

    @lru_cache(maxsize=512)
    def find(op: object) -> Row | None:
        name = getattr(op, "nki_operator", None)
        if name is None and (isinstance(op, np.ufunc) or _is_from_numpy(op)):
            name = getattr(op, "__name__", None)
        if not isinstance(name, str):
            return None
        return rows.get(ALIASES.get(name, name))

    row_type = type(next(iter(rows.values())))

    def resolve(op: object) -> Row:
        if isinstance(op, row_type):
            return op
        try:
            row = find(op)
        except TypeError:  # an unhashable value, which is no function either
            row = None
        if row is None:
            raise InvalidArgument("NKW-OPERATOR", f"{_describe_operator(op)} is no {row_title}; {hint}")
        return row

    return resolve


def _is_from_numpy(op: object) -> bool:
    module = getattr(op, "__module__", None)
    return callable(op) and isinstance(module, str) and (module == "numpy" or module.startswith("numpy."))


def _describe_operator(op: object) -> str:
    name = getattr(op, "nki_operator", None) or getattr(op, "__name__", None)
    return f"function {name}" if callable(op) and isinstance(name, str) else repr(op)
