"""Lint rules about calls of nki: removed and renamed names with their replacements, and arguments of wrong types."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator

from simulate.check.findings import Severity
from simulate.check.lint.rules import Spot, lint_rule
from simulate.check.lint.source import Scope, Source, argument
from simulate.isa import INSTRUCTIONS
from simulate.level import FEATURES, Level

_REMOVED = {
    "nl.arange": "a slice, t[0:128, 0:64]",
    "nl.mgrid": "a slice, t[0:128, 0:64]",
    "nl.par_dim": "dim 0 is the partition dim; give the plain shape",
    "nl.spmd_dim": "kernel[2](…)",
    "nl.nc": "kernel[2](…)",
}
_PLAIN_RANGES = frozenset({"nl.affine_range", "nl.sequential_range", "nl.static_range"})
_NOT_ON_DEVICE = {
    "nl.divide": "nl.multiply(a, nl.reciprocal(b))",
    "nl.fmod": "nisa on integers",
    "nl.mod": "nisa on integers",
}
_HAVE_RULES = frozenset({*_PLAIN_RANGES, "nl.dynamic_range"})
"""Deprecated names that other rules report."""
_OPERATOR_ARGUMENTS = frozenset({"op", "op0", "op1", "reduce_op", "cmp_op", "comp_op0", "comp_op1"})
_ENUM_ARGUMENTS = {
    "engine": "nisa.engine.vector",
    "dge_mode": "nisa.dge_mode.hwdge",
    "reduce_cmd": "nisa.reduce_cmd.reset_reduce",
    "oob_mode": "nisa.oob_mode.skip",
    "dma_engine": "nisa.dma_engine.dma",
}


@lint_rule("NKI006", Severity.error)
def buffers_are_objects(source: Source, scope: Scope) -> Iterator[Spot]:
    """buffer= gets an object of nl, such as nl.sbuf, not a string."""
    for call, name in source.calls(scope):
        value = argument(call, 99, "buffer")
        if name.startswith("nl.") and isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield Spot(call, f"buffer={value.value!r}", f"buffer=nl.{value.value}")


@lint_rule("NKI007", Severity.warning)
def enums_are_members(source: Source, scope: Scope) -> Iterator[Spot]:
    """An argument that takes an enum gets one of its members, such as nisa.engine.vector, not a number.

    A warning: the vendor's library numbers members, and compiles.
    """
    for call, name in source.calls(scope):
        for keyword in call.keywords if name.startswith("nisa.") else []:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            if keyword.arg in _ENUM_ARGUMENTS and isinstance(value, int):
                member = _ENUM_ARGUMENTS[keyword.arg]
                yield Spot(call, f"{keyword.arg}={value}", f"{keyword.arg}={member}")


@lint_rule("NKI021", Severity.error)
def removed_arguments(source: Source, scope: Scope) -> Iterator[Spot]:
    """Instructions take no mask=, and no dtype= unless they document it: the dtype of dst decides.

    Public samples of the first 0.x releases still have dst and a dtype that repeats its dtype: a warning.
    """
    for call, name in source.calls(scope):
        planner = INSTRUCTIONS.get(name.removeprefix("nisa.")) if name.startswith("nisa.") else None
        known = inspect.signature(planner).parameters if planner is not None else {}
        for keyword in call.keywords:
            if keyword.arg == "mask" and (planner is not None or name.startswith("nl.")):
                yield Spot(call, f"{name}(mask=…)", "slice the operands to the elements that are meant")
            elif keyword.arg == "dtype" and planner is not None and "dtype" not in known:
                repeated = Severity.warning if argument(call, 0, "dst") is not None else None
                yield Spot(call, f"{name}(dtype=…)", "the dtype of dst decides", repeated)


@lint_rule("NKI023", Severity.error)
def removed_names(source: Source, scope: Scope) -> Iterator[Spot]:
    """nl.arange, nl.mgrid, nl.par_dim, nl.spmd_dim and nl.nc were removed: slice tensors; dim 0 is the partitions."""
    for node, name in source.attributes(scope):
        if name in _REMOVED:
            yield Spot(node, name, _REMOVED[name])


@lint_rule("NKI026", Severity.warning)
def plain_ranges(source: Source, scope: Scope) -> Iterator[Spot]:
    """nl.affine_range, nl.sequential_range and nl.static_range behave like range; write range."""
    for call, name in source.calls(scope):
        if name in _PLAIN_RANGES:
            yield Spot(call, name, "range")


@lint_rule("NKI027", Severity.error, since=Level(0, 5))
def simulated_operators(source: Source, scope: Scope) -> Iterator[Spot]:
    """nl.divide, nl.fmod and nl.mod exist in simulation only."""
    for node, name in source.attributes(scope):
        if name in _NOT_ON_DEVICE:
            yield Spot(node, name, _NOT_ON_DEVICE[name])


@lint_rule("NKI028", Severity.error)
def power_of_tiles(source: Source, scope: Scope) -> Iterator[Spot]:
    """nl.power takes two tiles of one shape, not a number."""
    for call, name in source.calls(scope):
        if name == "nl.power" and any(isinstance(a, ast.Constant) for a in call.args):
            yield Spot(call, ast.unparse(call), "nisa.tensor_scalar(op0=nl.power, operand0=…)")


@lint_rule("NKI029", Severity.error)
def matmul_is_transposed(source: Source, scope: Scope) -> Iterator[Spot]:
    """nl.matmul works with transpose_x=True only."""
    for call, name in source.calls(scope):
        flag = argument(call, 2, "transpose_x")
        if name == "nl.matmul" and not (isinstance(flag, ast.Constant) and flag.value is True):
            yield Spot(call, "nl.matmul without transpose_x=True", "nl.matmul(xT, y, transpose_x=True)")


@lint_rule("NKI030", Severity.error)
def seed_is_a_tile(source: Source, scope: Scope) -> Iterator[Spot]:
    """nl.random_seed takes a (1, 1) tile, not a number."""
    for call, name in source.calls(scope):
        value = argument(call, 0, "seed")
        if name == "nl.random_seed" and isinstance(value, ast.Constant):
            yield Spot(call, f"nl.random_seed({ast.unparse(value)})", "a (1, 1) int32 tile with the seed")


@lint_rule("NKI039", Severity.warning)
def deprecated_names(source: Source, scope: Scope) -> Iterator[Spot]:
    """A kernel uses no deprecated name of NKI, and operators of nl, not of NumPy, as op= of an instruction."""
    for node, name in source.attributes(scope):
        if name in FEATURES and name not in _HAVE_RULES and source.level.deprecates(name):
            yield Spot(node, name, FEATURES[name].instead)
    for call, name in source.calls(scope):
        for keyword in call.keywords if name.startswith("nisa.") and not source.old_imports else ():
            text = ast.unparse(keyword.value)
            if keyword.arg in _OPERATOR_ARGUMENTS and text.startswith(("np.", "numpy.")):
                yield Spot(
                    keyword.value, f"{keyword.arg}={text}", f"the operator of nl: {_get_nl_operator(text)}"
                )


@lint_rule("NKI043", Severity.error)
def names_of_the_level(source: Source, scope: Scope) -> Iterator[Spot]:
    """A kernel uses only names of NKI that its release has."""
    for node, name in source.attributes(scope):
        if name in FEATURES and not source.level.has(name):
            row = FEATURES[name]
            yield Spot(node, f"{name}, which NKI {row.since} added, at level {source.level}", row.instead)


def _get_nl_operator(text: str) -> str:
    name = text.split(".")[-1]
    return "nl." + {"max": "maximum", "min": "minimum"}.get(name, name)
