"""Operators of Beta 1: those of the instruction book, those that only Beta 1's tables list, and NumPy's names for them.

Beta 1 divides, takes remainders and rounds with operators that NKI 0.6 no longer lists. They are computed exactly
here, division with one rounding. On which engine is not documented, so the Vector and the Scalar engine are assumed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from simulate.numerics import (
    ACTIVATION_FUNCTIONS,
    ALU_OPERATORS,
    ActivationFunction,
    AluOperator,
    OperatorFamily,
    alu_operator,
)
from simulate.numerics.quiet import quiet


def _create_operator(name: str, function: Callable[..., Any]) -> AluOperator:
    """Return a binary operator of the Vector engine that NKI 0.6 no longer has, computed by a NumPy function."""
    engines = frozenset({"vector"})
    return AluOperator(name, quiet(function), OperatorFamily.arithmetic, 2, False, None, None, engines)


def _create_rounding(name: str, function: Callable[..., Any]) -> ActivationFunction:
    """Return a function of the Scalar engine that only Beta 1 has, computed by a NumPy function."""
    return ActivationFunction(name, function, None, name, "only in Beta 1")


BINARY = {
    **{name: row for name, row in ALU_OPERATORS.items() if row.arity == 2 and name != "average"},
    "divide": _create_operator("divide", np.divide),
    "mod": _create_operator("mod", np.mod),
    "fmod": _create_operator("fmod", np.fmod),
}
"""Operators of two operands by name."""

UNARY = {
    **{name: row for name, row in ACTIVATION_FUNCTIONS.items() if name != "prelu"},
    "floor": _create_rounding("floor", np.floor),
    "ceil": _create_rounding("ceil", np.ceil),
    "trunc": _create_rounding("trunc", np.trunc),
}
"""Functions of the Scalar engine by name."""

_NUMPY = {
    np.sum: ALU_OPERATORS["add"],
    np.prod: ALU_OPERATORS["multiply"],
    np.all: ALU_OPERATORS["logical_and"],
    np.any: ALU_OPERATORS["logical_or"],
    np.divide: BINARY["divide"],
    np.mod: BINARY["mod"],
    np.fmod: BINARY["fmod"],
}


def translate_operator(op: Any) -> Any:
    """Return the operator that an argument such as nl.add or np.add stands for, as the instruction book takes it.

    Values that need no translation, None among them, are returned unchanged and are not checked.
    """
    name = getattr(op, "nki_operator", None)
    if isinstance(name, str) and name not in ALU_OPERATORS and name in BINARY:
        return BINARY[name]
    try:
        return _NUMPY.get(op, op)
    except TypeError:
        return op


def find_alu_operator(op: Any) -> AluOperator:
    """Return the ALU operator that an argument such as np.add stands for. Raises InvalidArgument for others."""
    return alu_operator(translate_operator(op))
